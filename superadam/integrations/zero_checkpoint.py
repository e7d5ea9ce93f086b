"""A ZeRO checkpoint of DeepSpeed, as tensors by the names of parameters; reads it without DeepSpeed.

Nothing that a checkpoint names is executed: objects of DeepSpeed become inert ones. Layouts are those that DeepSpeed
0.19.8 writes (`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `checkpoint/ds_to_universal.py`).
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superadam.integrations.checkpoint_folder import CheckpointError
from superadam.optim.checkpoint import CORRECTIONS

UNIVERSAL = "zero"  # the folder in which ds_to_universal makes one of each parameter


class ZeroCheckpoint:
    """A checkpoint whose shards are mapped into memory, or that has files for each parameter.

    Attributes:
        places: of each trained parameter, the number of the flat group that DeepSpeed keeps it in.
        others: frozen parameters and buffers, and tied weights under their other names.
        shapes: of all of these.
        steps: that DeepSpeed counted, skipped ones included.

    Raises CheckpointError, KeyError or OSError where it has another layout.
    """

    def __init__(self, folder: Path) -> None:
        latest = folder / "latest"
        path = self._path = folder / latest.read_text().strip() if latest.is_file() else folder
        self._is_universal = (path / UNIVERSAL).is_dir()
        files = [Path(UNIVERSAL, "optimizer_state.pt")] if self._is_universal else _shards_of(path)
        of_models = _numbered(path, r"(?:zero_pp_rank_\d+_)?mp_rank_00_model_states\.pt")
        models = [_read(path / name) for name in of_models]
        shards = [_read(path / name) for name in files]
        self._shards = shards if self._is_universal else [shard["optimizer_state_dict"] for shard in shards]
        count = self._shards[0]["partition_count"]
        self._ranks: int = max(count) if isinstance(count, list) else count
        for kind, names in (("optim_states", files), ("model_states", of_models)):
            if "pp_rank" in str(names[0]) and len(names) != self._ranks:
                raise CheckpointError(f"it has {kind} of {len(names)} ranks, expected {self._ranks}; copy all of it")
        self._is_cut = "fp32_flat_groups" in self._shards[0]
        # Adam's own state dict has this name in ZeRO-1 and 2, or this one in ZeRO-3, or only its groups were converted.
        self._adam = [each.get("base_optimizer_state", each.get("optimizer_state_dict", each)) for each in self._shards]
        self._groups = {number: group for group in self._adam[0]["param_groups"] for number in group["params"]}
        for number, group in self._groups.items():
            entries = [each.get("state", {}).get(number, {}) for each in self._adam]
            if len(counts := {float(entry["step"]) for entry in entries if "step" in entry}) > 1:
                raise CheckpointError(f"its shards are of steps {sorted(counts)}, expected one save; copy all again")
            if not group.keys() & {"amsgrad", *CORRECTIONS} or group.keys() & {"max_grad_norm", "use_muon"}:
                raise CheckpointError("it was trained with another optimizer, expected Adam or AdamW")
            is_corrected = all(group.get(key, True) for key in CORRECTIONS)
            if group.get("amsgrad") or group.get("maximize") or not is_corrected:
                raise CheckpointError(
                    "it was trained with amsgrad, maximize or without bias correction, expected plain Adam"
                )
        model = models[0]
        config = model.get("ds_config")
        config = config if isinstance(config, dict) else {}  # None in older ones
        zero, made = config.get("zero_optimization"), config.get("optimizer") or {}
        takes_turns = isinstance(zero, dict) and zero.get("round_robin_gradients") and zero["stage"] == 2
        if self._is_universal and takes_turns and self._ranks > 1:
            raise CheckpointError(
                "ds_to_universal mixes parameters up with round_robin_gradients, load the checkpoint it was made of"
            )
        kind, params = (made.get("type") or "").lower(), made.get("params") or {}
        version = [*map(int, re.findall(r"\d+", str(model.get("ds_version"))))]
        # DeepSpeed's own Adam keeps this nowhere else, and older ones lost it; in groups, it is that of torch's.
        if kind and (kind != "adam" or "adam_w_mode" in params or version >= [0, 19, 4]):
            is_decoupled = kind != "adam" or bool(params.get("adam_w_mode", True))
            for group in self._groups.values():
                group.setdefault("decoupled_weight_decay", is_decoupled)
        self._names: list[dict[str, Any]] = [dict(shapes) for shapes in model["param_shapes"]]
        self.places = {name: number for number, shapes in enumerate(self._names) for name in shapes}
        states = [] if self._is_universal else [adam["state"] for adam in self._adam]
        if lacking := [name for name, number in self.places.items() if any(number not in state for state in states)]:
            raise CheckpointError(
                f"it has no moments of {lacking[0]}, as before the first step or of SuperOffload, which saves none, "
                "expected both; begin anew with the model that zero_to_fp32.py makes of it"
            )
        weights = {name: value for name, value in model["module"].items() if isinstance(value, Tensor)}
        self.others = {name: value for name, value in weights.items() if value.numel() and name not in self.places}
        self.others |= _frozen(models)  # of which ZeRO-3 leaves nothing in `module`
        self.shapes: dict[str, Any] = {name: value.shape for name, value in self.others.items()}
        for shapes in self._names:
            self.shapes.update(shapes)
        self.steps = int(model["global_steps"])

    def verify(self, rank: int, world_size: int) -> None:
        """Raise CheckpointError where the bytes of a file of this rank's share are not those that torch.save wrote."""
        paths = sorted([*self._path.glob("*.pt"), *(self._path / UNIVERSAL).rglob("*.pt")])
        for path in paths[rank::world_size]:
            try:
                if not path.is_file() or not zipfile.is_zipfile(path):
                    continue  # if it is needed, `_read` refuses it
                with zipfile.ZipFile(path) as archive:
                    has_sums = any(entry.CRC for entry in archive.infolist())  # torch can be told to write none
                    damaged = archive.testzip() if has_sums else None
            except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, zlib.error) as error:
                damaged = str(error)
            if damaged is not None:
                raise CheckpointError(f"{path} is damaged; copy it again")

    def flat(self, name: str, key: str) -> Tensor:
        """Return a copy or view of `fp32`, `exp_avg` or `exp_avg_sq` of a trained parameter, flat or in its shape."""
        if self._is_universal:
            path = self._path / UNIVERSAL / name / f"{key}.pt"
            read = _read(path)
            values = read.get("param") if isinstance(read, dict) else read
            if not isinstance(values, Tensor):
                raise CheckpointError(f"{path} holds {type(values).__name__}, expected a tensor; it is damaged")
            return values
        number, pieces, (begin, size) = self.places[name], [], self._sizes[name]
        masters = "fp32_flat_groups" if self._is_cut else "single_partition_of_fp32_groups"
        for rank, (shard, adam) in enumerate(zip(self._shards, self._adam, strict=True)):
            moments = adam["state"][number]
            flat = shard[masters][number] if key == "fp32" else moments[key]
            first, last = begin, begin + size
            if not self._is_cut:  # as `param_slice_mappings` tells, but wrongly with `round_robin_gradients`
                part = moments["exp_avg"].numel()
                first, last = max(begin - rank * part, 0), min(last - rank * part, part)
            pieces.append(flat.narrow(0, first, last - first) if first < last else flat[:0])
        return torch.cat(pieces)[: math.prod(self.shapes[name])]

    @functools.cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return where each parameter begins and how many elements it has in a flat group: of a rank, or of all ranks.

        ZeRO-3 cuts each parameter for the ranks and pads it; ZeRO-1 and 2 cut the group.
        """
        parts = self._ranks if self._is_cut else 1
        paddings = self._shards[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in self._names]
        sizes = {}
        for shapes, padding in zip(self._names, paddings, strict=True):
            begin = 0
            for (name, shape), unused in zip(shapes.items(), padding, strict=True):
                sizes[name] = begin, -(-math.prod(shape) // parts)
                begin += sizes[name][1] + unused
        return sizes

    def step(self, name: str) -> Any:
        """Return the step count of a trained parameter."""
        path = self._path / UNIVERSAL / name / "step.pt"
        if path.exists():
            return _read(path)
        entry = self._adam[0].get("state", {}).get(self.places[name], {})
        return entry["step"] if "step" in entry else self.group_of(name)["step"]  # where apex's FusedAdam has it

    def group_of(self, name: str) -> dict[str, Any]:
        """Return the group of a trained parameter, with its hyper-parameters."""
        group: dict[str, Any] = self._groups[self.places[name]]
        return group


def _frozen(models: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return frozen parameters, which ZeRO-3 cuts and pads; none where they were not saved."""
    shapes: dict[str, Any] = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    frozen = {}
    for name in shapes.keys() & fragments[0].keys():
        numel, pieces = math.prod(shapes[name]), [each[name].flatten() for each in fragments]
        whole = pieces[0] if pieces[0].numel() >= numel else torch.cat(pieces)
        frozen[name] = whole[:numel].view(shapes[name])
    return frozen


def _shards_of(path: Path) -> list[str]:
    """Return the files of optimizer state."""
    parts = [name for name in os.listdir(path) if re.search(r"mp_rank_(?!00_)\d|^layer_|expert_", name)]
    if parts:
        raise CheckpointError(
            f"{min(parts)} is of tensor, pipeline or expert parallelism, which is not read; experts of one rank are, "
            "once ds_to_universal has converted them"
        )
    return _numbered(path, r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_00_optim_states\.pt")


def _numbered(path: Path, pattern: str) -> list[str]:
    """Return the files that a pattern describes, in the order of their ranks: of two numbers, the longer is greater."""
    found = sorted(filter(re.compile(pattern).fullmatch, os.listdir(path)), key=lambda name: (len(name), name))
    if not found:
        kind = pattern.rpartition("00_")[2].replace("\\", "")
        raise CheckpointError(f"{path} has no files *{kind}, expected a checkpoint of ZeRO-1, 2 or 3")
    return found


def _read(path: Path) -> Any:
    """Return what torch.save wrote, its tensors mapped."""
    try:
        if path.exists() and not path.is_file():
            raise EOFError("a pipe might be waited for")
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        inert: list[Any] = [(type("Inert", (), {"__init__": lambda self, *_: None}), name) for name in unknown]
        with torch.serialization.safe_globals(inert):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # torch seeks before the beginning of a cut file
            raise
        raise CheckpointError(
            f"{path} is damaged, or holds what is not loaded; copy it again, or leave that out"
        ) from error
