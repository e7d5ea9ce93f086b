"""`superadam.integrations.distributed_checkpoint` in one process: every bit comes back, or nothing is touched."""

import contextlib
import errno
import functools
import gc
import os
import re
import resource
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.children import exit_code_of_child, killed_at
from support.deep import DEEP
from support.interrupting import interrupt_at_each_line
from support.visible import content
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.serialization import config as serialization

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.integrations import checkpoint_contents, checkpoint_folder
from superadam.integrations.distributed_checkpoint import CheckpointError, latest, load, save

pytestmark = pytest.mark.filterwarnings("error")

OPTIMIZERS = [torch.optim.AdamW, torch.optim.Adam, SpeculativeCPUAdamW, SpeculativeCPUAdam]


class Model(nn.Module):
    """With tied weights, a buffer called as a key of the state, an unused parameter, and one that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3, 0, 2))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("step", torch.tensor([3, 4]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.second(self.first(inputs).relu()) * self.scalar)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"calls": 7}


def groups_of(model: Model) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": others, "lr": 0.01}, {"params": [first], "weight_decay": 0.1}]


def make(kind: Any, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(seed)
    model = Model().to(dtype)
    return model, kind(groups_of(model), **{"lr": torch.tensor(0.02), **options})


def train(model: Model, optimizer: Any, steps: int = 3, *, seed: int = 1, speculates: bool = False) -> None:
    """Train; if asked to, so that each commit shares the pass of the next speculation."""
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(4, 5, dtype=model.scalar.dtype)).square().mean().backward()
        if speculates:
            optimizer.speculate()
        optimizer.step()
        optimizer.zero_grad()


def stepped(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, Any]:
    made = make(kind, dtype, **options)
    train(*made)
    return made


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}])
@serialization.patch("load.mmap", True)  # as a program may set it
def test_every_bit_comes_back_and_training_goes_on(kind, dtype, options, tmp_path):
    pair = stepped(kind, dtype, **options)
    other = make(kind, dtype, seed=5)  # with options of its own, which are replaced
    for model, _ in (pair, other):
        model.second.bias.requires_grad_(False)  # its state stays
    extra = {"epoch": 3, "losses": [1.5, float("inf")], "name": "x", "random": torch.get_rng_state(), "none": None}
    before = content(*pair)
    assert save(tmp_path, *pair, extra=extra) == tmp_path / "save-00000001"
    assert content(*pair) == before
    loaded = load(tmp_path, *other)
    assert torch.equal(loaded.pop("random"), extra.pop("random"))
    assert loaded == extra
    assert content(*other) == before
    for model, optimizer in (pair, other):
        model.second.bias.requires_grad_(True)
        train(model, optimizer, seed=2)
    assert content(*other) == content(*pair)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_that_has_not_stepped_stays_so(kind, tmp_path):
    pair = make(kind, torch.bfloat16)
    before = content(*pair)
    save(tmp_path, *pair)
    has_stepped, other = stepped(kind, torch.bfloat16, seed=3), make(kind, torch.bfloat16, seed=5)
    load(tmp_path, *has_stepped)
    load(tmp_path, *other)
    assert content(*pair) == before
    for _, one in (pair, other):
        assert not one.state
        assert getattr(one, "last_outcome", None) is None
        assert getattr(getattr(one, "statistics", None), "steps", 0) == 0
    for each in (pair, has_stepped, other):
        train(*each)
    assert content(*has_stepped) == content(*other) == content(*pair)


LAYOUTS: dict[str, list[list[int]]] = {
    "first": [[], [0, 1, 2], [3, 4, 5]],
    "middle": [[5, 4], [], [3, 2, 1, 0]],
    "last": [[0, 1, 2, 3], [4, 5], []],
    "two": [[], [1, 2], [], [0, 5]],
    "none": [[0, 1], [2, 3], [4, 5]],
    "all": [[], []],
}
"""Which parameters each group has; called as where the groups without any are."""


def make_groups(kind: Any, layout: list[list[int]], *, seed: int, lr: float, is_frozen: bool = False) -> Any:
    """Return a model and its optimizer; if asked to, the first group that has parameters has frozen ones alone."""
    torch.manual_seed(seed)
    model = Model()
    parameters = list(model.parameters())
    groups = [{"params": [parameters[i] for i in group], "lr": lr * (n + 1)} for n, group in enumerate(layout)]
    for i in next(filter(None, layout), []) if is_frozen else []:
        parameters[i].requires_grad_(False)
    return model, kind(groups)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("wait", "is_frozen"), [(True, False), (False, True)])
def test_groups_may_have_no_parameters_or_only_frozen_ones(kind, layout, wait, is_frozen, tmp_path):
    pair = make_groups(kind, LAYOUTS[layout], seed=0, lr=0.01, is_frozen=is_frozen)
    train(*pair)
    before = content(*pair)
    save(tmp_path, *pair, wait=wait)
    other = make_groups(kind, LAYOUTS[layout], seed=5, lr=0.5, is_frozen=is_frozen)
    load(tmp_path, *other)
    assert content(*other) == content(*pair) == before
    for one in (pair, other):
        train(*one, seed=2)
    assert content(*other) == content(*pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_torch_comes_without_masters_and_goes_without(dtype, tmp_path):
    """Loading a file is loading the state dict; torch keeps the moments in the parameters' dtype."""
    theirs = stepped(torch.optim.AdamW, dtype)
    save(tmp_path, *theirs)
    ours, same = stepped(SpeculativeCPUAdamW, dtype, seed=5), make(SpeculativeCPUAdamW, dtype, seed=6)
    load(tmp_path, *ours)
    same[0].load_state_dict(theirs[0].state_dict())
    same[1].load_state_dict(theirs[1].state_dict())
    for one in (ours, same):
        train(*one, seed=2)
    assert content(*ours) == content(*same)
    save(tmp_path, *ours)
    back, same = make(torch.optim.AdamW, dtype, seed=7), make(torch.optim.AdamW, dtype, seed=8)
    load(tmp_path, *back)
    same[0].load_state_dict(ours[0].state_dict())
    same[1].load_state_dict(ours[1].torch_state_dict())
    assert content(*back) == content(*same)


def test_group_keys_that_the_file_lacks_stay_and_names_of_parameters_do(tmp_path):
    model, optimizer = stepped(torch.optim.AdamW)
    for group in optimizer.param_groups:
        del group["maximize"]
        group["param_names"] = [str(p.shape) for p in group["params"]]
    save(tmp_path, model, optimizer)
    other, other_optimizer = make(torch.optim.AdamW, seed=5, maximize=True)
    for group in other_optimizer.param_groups:
        group["params"].reverse()
        group["param_names"] = [str(p.shape) for p in group["params"]]
    load(tmp_path, other, other_optimizer)
    for group in other_optimizer.param_groups:
        assert group["maximize"]
        assert group["param_names"] == [str(p.shape) for p in group["params"]]


@pytest.mark.parametrize("options", [{}, {"eps": 0.0, "max_grad_norm": 1.0}])
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_torch_makes_its_template_without_a_trace(options, has_scheduler):
    """Its step has zero gradients, and moments would decay towards the parameters (L2), or become 0/0."""
    pairs = [make(SpeculativeCPUAdam, torch.bfloat16, weight_decay=0.5, amsgrad=True, **options) for _ in range(3)]
    (model, optimizer), (same, _), (other, other_optimizer) = pairs
    with OffloadScheduler(optimizer, model) if has_scheduler else contextlib.nullcontext():
        template = get_optimizer_state_dict(model, optimizer)
        assert set(template["state"]) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            entry = template["state"][name]
            assert torch.equal(entry.pop("master"), parameter.float())
            assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
            assert not any(tensor.any() for tensor in entry.values())
        assert optimizer.last_outcome is None
        assert optimizer.statistics.steps == 0
        set_optimizer_state_dict(other, other_optimizer, get_optimizer_state_dict(model, optimizer))
        assert other_optimizer.last_outcome is None
        for pair in pairs:
            train(*pair)
        assert optimizer.statistics.steps == 3
    model.unused.data = same.unused.data  # has no elements
    states = [content(*pair) for pair in pairs]
    for state in states:  # no gradient has reached it: state of zeros, or none
        state["optimizer"]["state"].pop(5, None)
    assert states[0] == states[1] == states[2]


def test_true_first_step_with_zero_gradients_and_rate_counts_also_while_something_is_saved(tmp_path):
    model, optimizer = make(SpeculativeCPUAdamW)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def _init_optim_state() -> dict[str, Any]:  # as one of torch's is called
        return optimizer.step() or {}

    stepping = SimpleNamespace(state_dict=_init_optim_state, load_state_dict=optimizer.load_state_dict)
    with pytest.warns(UserWarning, match="in a single process"):
        torch.distributed.checkpoint.save({"it": stepping}, checkpoint_id=tmp_path)
    assert {*(int(entry["step"]) for entry in optimizer.state.values()), optimizer.statistics.steps} == {1}


def new(seed: int = 5) -> tuple[Model, Any]:
    return make(SpeculativeCPUAdamW, torch.bfloat16, seed=seed)


def told_of_failure(folder: Path, work: Callable[[], object]) -> str:
    """Return the words of a save that fails."""
    with pytest.raises(CheckpointError) as error:
        work()
    words = str(error.value)
    assert words.startswith(f"cannot save a checkpoint to {folder}: ")
    assert words.endswith("; earlier ones are as they were")
    assert "\n" not in words
    return words


def refused(folder: Path, model: Model, optimizer: Any) -> str:
    """Return the words of a load that is refused, after which everything is as it was."""
    before = content(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        load(folder, model, optimizer)
    assert content(model, optimizer) == before
    words = str(error.value)
    assert "\n" not in words
    assert words.startswith(f"cannot load a checkpoint from {folder}: ")
    assert "nothing was loaded" in words
    return words


@pytest.fixture
def pair():
    return stepped(SpeculativeCPUAdamW, torch.bfloat16)


def damages(content: bytes) -> Iterator[bytes | None]:
    """Yield what a file may have become: a bit flipped, of a small file in each byte; nothing, shorter or longer."""
    for position in range(len(content)) if len(content) < 1000 else (0, len(content) // 3, len(content) - 1):
        yield content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :]
    yield from (None, content[:-1], content + b"\n", b"")


def test_damage_anywhere_is_refused_and_the_intact_one_named(pair, tmp_path):
    older, newest = save(tmp_path, *pair, extra="older"), save(tmp_path, *pair)
    other = new()
    paths = [tmp_path / "latest", *newest.iterdir()]
    assert {path.name for path in paths} == {"latest", "__0_0.distcp", ".metadata", "values.pt", "manifest.json"}
    for path in paths:
        told, intact = f"load {newest if path.name == 'latest' else older}, which is intact", path.read_bytes()
        for damaged in damages(intact):
            if damaged is not None:
                path.write_bytes(damaged)
            words = refused(tmp_path, *other)
            if damaged is None or len(damaged) != len(intact):
                assert path.name in words
            elif path.name != "latest":
                assert f"{path} is damaged" in words
            assert told in words or (path.name == "latest" and "is not the one that latest names" in words)
            path.unlink(missing_ok=True)
        path.mkdir()
        assert told in refused(tmp_path, *other)
        path.rmdir()
        path.write_bytes(intact)
    (newest / "additional").touch()
    assert "additional" in refused(tmp_path, *other)
    assert load(older, *other) == "older"
    (older / ".metadata").unlink()
    assert "no other one in it is intact" in refused(tmp_path, *other)
    (newest / "additional").unlink()
    assert f"load {newest}, which is intact" in refused(older, *other)


def test_nothing_there_is_refused(pair, tmp_path):
    assert "latest is missing" in refused(tmp_path, *pair)
    assert "latest is missing" in refused(tmp_path / "absent", *pair)
    (tmp_path / "file").touch()
    for call in (latest, lambda folder: save(folder, *pair), lambda folder: load(folder, *pair)):
        with pytest.raises(CheckpointError, match=r"cannot .*file: NotADirectoryError: "):
            call(tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").write_text('{"run": "of the program"}')
    (link := tmp_path / "best").symlink_to(inside := save(tmp_path / "run", *pair))
    before = everything(inside)
    for folder in (inside, inside / "more", link / "more"):
        for call in (latest, lambda folder: save(folder, *pair), lambda folder: save(folder, *pair, wait=False)):
            with pytest.raises(CheckpointError, match=r"(is|lies in) a checkpoint, .* holds it: pass \S*/run[;:]"):
                call(folder)
    assert everything(inside) == before
    (tmp_path / "gone").mkdir()
    with contextlib.chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        for call in (load, save):
            with pytest.raises(CheckpointError, match="run: FileNotFoundError: "):
                call("run", *pair)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, SpeculativeCPUAdamW])
def test_wrapper_with_state_of_its_own_is_saved_itself_and_goes_on_from_a_link(kind, pair, tmp_path):
    model, inner = pair
    wrapper, other = kind(groups_of(model)), make(kind, torch.bfloat16, seed=5)
    wrapper.optimizer = inner
    train(model, wrapper, 1)
    (tmp_path / "best").symlink_to(save(tmp_path / "run", model, wrapper))
    load(tmp_path / "best", *other)
    assert content(*other) == content(model, wrapper)
    save(tmp_path / "run", *other)


Pair = namedtuple("Pair", "x y")
UNSAVEABLE = "extra, a parameter group or the model's state holds an object, expected numbers"


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"extra": extra}, UNSAVEABLE)
            for extra in (Pair(1, 2), {"path": Path("/")}, lambda: None, threading.Lock())
        ),
        *(({"keep": keep}, "keep is .*, expected a whole number of at least 1") for keep in (0, -1, True, 1.5, None)),
        ({"optimizer": make(torch.optim.AdamW)[1]}, "the optimizer has parameters that the model lacks"),
        ({"optimizer": [make(SpeculativeCPUAdamW)[1]]}, "optimizer is a list, expected one Optimizer; earlier"),
        ({"optimizer": None}, "optimizer is a NoneType, expected one Optimizer; earlier"),
    ],
)
def test_what_cannot_be_saved_is_one_sentence(options, words, wait, pair, tmp_path):
    """Pickles are not executed but for DCP's own metadata, so that there are none to load."""
    model, optimizer = pair
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, model, **{"optimizer": optimizer, **options}, wait=wait)
    assert os.listdir(tmp_path) in ([], [".lock"])


def test_other_things_than_a_model_and_an_optimizer_are_one_sentence(pair, tmp_path):
    save(tmp_path, *pair)
    for given, words in (
        ((*reversed(pair),), "model is a SpeculativeCPUAdamW"),
        ((pair[0], None), "optimizer is a NoneT"),
    ):
        for call in (save, load):
            with pytest.raises(CheckpointError, match=rf"{words}.*, expected one (Module|Optimizer); \w+ .*$"):
                call(tmp_path, *given)


@pytest.mark.parametrize("key", ["slow.weights", 7])
def test_state_whose_keys_would_not_come_back_is_refused(key, tmp_path):
    model, optimizer = stepped(torch.optim.AdamW)
    optimizer.state[model.first.bias][key] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"state of first.bias has the key .*, expected names without dots"):
        save(tmp_path, model, optimizer)


class Hooked(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        raise ValueError("version 1 is too old")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hook_that_raises_leaves_no_untrue_sentence(kind, tmp_path):
    """The optimizer is loaded by then."""
    model, optimizer = stepped(kind)
    model.hooked = Hooked()
    save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, model, optimizer)
    told = "ValueError: version 1 is too old; a part of it was loaded: load again before training"
    assert str(error.value) == f"cannot load a checkpoint from {tmp_path}: {told}"
    model.hooked = None
    with pytest.raises(CheckpointError, match=r"hooked\._extra_state is present in it, expected absent"):
        load(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.float(), r"first.bias is .*bfloat16\) in it, expected .*float32\) as in the model"),
        (
            lambda model: setattr(model, "second", nn.Linear(6, 5).bfloat16()),
            r"second.weight is \(\(5, 7\), .* \(\(5, 6",
        ),
        (lambda model: model.register_buffer("new", torch.zeros(1)), "new is absent in it, expected"),
        (lambda model: delattr(model, "step"), "step is .* in it, expected absent"),
        (lambda model: setattr(model, "hooked", Hooked()), "hooked._extra_state is absent in it, expected present"),
        (lambda model: setattr(model, "new", nn.Parameter(torch.ones(1))), "other parameter groups than the optimizer"),
    ],
)
def test_checkpoint_of_another_model_is_refused(change, words, pair, tmp_path):
    save(tmp_path, *pair)
    model, _ = new()
    change(model)
    assert re.search(words, refused(tmp_path, model, SpeculativeCPUAdamW(groups_of(model))))


@pytest.mark.parametrize("key", ["others", "param_groups", "extra"])
def test_values_that_lack_a_part_are_refused(key, pair, tmp_path, monkeypatch):
    whole = checkpoint_contents.bytes_of_values
    monkeypatch.setattr(
        checkpoint_contents,
        "bytes_of_values",
        lambda values: whole({name: value for name, value in values.items() if name != key}),
    )
    save(tmp_path, *pair)
    assert f"KeyError: '{key}'" in refused(tmp_path, *new())


def test_full_disk_is_one_sentence_and_the_older_one_stays(tmp_path):
    """At whichever file it is full, or in the middle of a tensor."""
    model = nn.Linear(200, 99)  # larger than the buffer of a file
    pair = model, SpeculativeCPUAdamW(model.parameters())
    save(tmp_path, *pair, extra="older")
    before = sorted(tmp_path.rglob("*"))
    sizes = sorted(path.stat().st_size for path in (tmp_path / "save-00000001").iterdir())

    def fail():
        for limit in [0, *(size - 1 for size in sizes), *range(1000, sizes[-1], 9999)]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            words = told_of_failure(tmp_path, lambda: save(tmp_path, *pair))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            advice = "free some space, or choose another folder that all ranks share"
            assert words.endswith(f"[Errno 27] File too large: {advice}; earlier ones are as they were")
            assert sorted(tmp_path.rglob("*")) == before

    assert exit_code_of_child(fail) == 0
    assert load(tmp_path, *pair) == "older"


def test_an_alarm_is_not_mended_by_more_space(tmp_path, pair, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=TimeoutError("of the program")))
    told = told_of_failure(tmp_path, lambda: save(tmp_path, *pair))
    assert told.endswith("TimeoutError: of the program; earlier ones are as they were")


@pytest.mark.parametrize("earlier", [0, 1])
def test_checkpoint_that_cannot_be_named_is_deleted(earlier, pair, tmp_path, monkeypatch):
    def fail(*paths: Path, replace: Callable[..., object] = os.replace) -> None:
        if paths[1].name == "latest":
            raise OSError(errno.ENOSPC, "planted")
        replace(*paths)

    for _ in range(earlier):
        save(tmp_path, *pair)
    before = {*tmp_path.rglob("*"), tmp_path / ".lock"}
    monkeypatch.setattr(os, "replace", fail)
    for _ in range(2):
        assert "planted" in told_of_failure(tmp_path, lambda: save(tmp_path, *pair))
        assert {*tmp_path.rglob("*")} == before


def test_all_is_on_the_disk_before_it_has_its_name_and_that_before_it_is_latest(pair, tmp_path, monkeypatch):
    save(tmp_path, *pair, keep=1)
    calls, sizes = [], {}
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synchronize(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        sizes[path.name] = path.stat().st_size
        calls.append(f"{'names' if path.is_dir() else 'file'} {'in part' if 'save' in str(path) else 'here'}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synchronize)
    monkeypatch.setattr(os, "rename", lambda *paths: calls.append(f"rename to {paths[1].name[:5]}") or rename(*paths))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append(f"replace {paths[1].name}") or replace(*paths))
    path = save(tmp_path, *pair, keep=1)
    assert calls == [
        *("file in part", "rename to .meta", "file in part", "file in part"),
        *("file in part", "replace manifest.json", "names in part"),
        *("rename to save-", "names here"),
        *("file here", "replace latest", "names here"),
        "rename to .save",
    ]
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    assert files.pop("manifest.json") > 0  # had another name
    assert len(files) == 3
    assert files.items() <= sizes.items()


def test_interrupt_at_any_line_of_the_end_leaves_no_lock(pair, tmp_path, monkeypatch):
    """Where all that was interrupted is kept, as by a notebook."""
    monkeypatch.setattr(checkpoint_folder, "LOCK_SECONDS", 0)
    exit_of_stack = ExitStack.__exit__.__code__
    assert interrupt_at_each_line(lambda: save(tmp_path, *pair, keep=1), lambda code: code is exit_of_stack) > 10


def test_interrupt_before_torch_ends_an_archive_ends_no_process(pair, tmp_path, monkeypatch):
    """torch ends it when its object is deleted, after the file was closed."""

    def save_interrupted() -> None:
        exit_of_archive = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr(torch.serialization._open_zipfile_writer_buffer, "__exit__", exit_of_archive)
        with contextlib.suppress(KeyboardInterrupt):
            save(tmp_path, *pair)
        gc.collect()
        assert exit_of_archive.called

    monkeypatch.setattr(checkpoint_contents, "bytes_of_values", Mock(return_value=b""))  # an archive in memory
    assert exit_code_of_child(save_interrupted) == 0


def interrupted_as_torch_tells(*_: object) -> None:
    """Raise what torch tells of its archive where a write was interrupted."""
    try:
        raise KeyboardInterrupt
    finally:
        raise RuntimeError("unexpected pos")


def test_interruption_passes_through(pair, tmp_path, monkeypatch):
    save(tmp_path, *pair)
    before = sorted(tmp_path.rglob("*"))
    moments = dict.fromkeys(("prepare_local_plan", "write_data", "finish"), Mock(side_effect=KeyboardInterrupt))
    for name, interrupt in [*moments.items(), ("write_data", interrupted_as_torch_tells)]:
        with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            context.setattr(FileSystemWriter, name, interrupt)
            save(tmp_path, *pair)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_save_that_is_killed_at_any_moment_leaves_the_older_or_the_new_one(tmp_path):
    pair, start, folder = new(), tmp_path / "start", tmp_path / "folder"
    states = {}
    for extra in ("oldest", "older", "newer"):
        train(*pair, 1)
        states[extra] = content(*pair)
        if extra != "newer":
            save(start, *pair, extra=extra, keep=1)
    (start / ".save-00000009.feedbeef.part").mkdir()
    save_newer = functools.partial(save, folder, *pair, extra="newer", keep=1)
    seen = []
    for number in range(0, 1000, 1 if DEEP else 5):
        shutil.copytree(start, folder)
        code = exit_code_of_child(lambda: killed_at(number, save_newer))  # noqa: B023
        other = new(6)
        seen.append(load(folder, *other))
        assert content(*other) == states[seen[-1]]
        if number % 5 == 0 or code == 0:
            newest = save(folder, *other, keep=1)
            assert sorted(os.listdir(folder)) == [".lock", "latest", newest.name]
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen == sorted(seen, reverse=True)  # "older", then "newer"
    assert set(seen) == {"older", "newer"}
    assert len(seen) > 10


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused_to_save(folder: Path, model: Model, optimizer: Any) -> str:
    before = everything(folder)
    words = told_of_failure(folder, lambda: save(folder, model, optimizer))
    assert everything(folder) == before
    return words


def test_folder_is_continued_by_who_loaded_its_newest_or_saved_it(pair, tmp_path):
    """Or loaded an older one by its name; who was overtaken is refused, though both have continued the same one."""
    folder = tmp_path / "run"
    assert latest(folder) is None
    assert not folder.exists()  # one rank only looks
    for extra in range(3):
        path = save(folder, *pair, extra=extra)
        assert latest(folder) == latest(str(folder)) == path
    fresh, one, other = new(5), new(6), new(7)
    save(tmp_path / "another", *fresh)
    load(tmp_path / "another", *fresh)
    words = "it holds save-00000003, which was neither loaded into this optimizer nor saved from it: end the job"
    assert words in refused_to_save(folder, *fresh)  # to have asked is not to have loaded
    for each in (one, other):
        assert load(path, *each) == 2
        assert content(*each) == content(*pair)
    newest = save(folder, *one)
    for each in (other, pair):
        assert "it holds save-00000004, which" in refused_to_save(folder, *each)
    load(folder, *other)
    save(folder, *other)
    assert "it holds save-00000005, which" in refused_to_save(folder, *one)
    load(newest, *one)
    assert save(folder, *one, extra="newer").name == "save-00000006"
    assert (folder / "save-00000005").is_dir()
    assert load(folder, *new()) == "newer"


def test_checkpoint_that_was_the_newest_when_asked_for_is_not_continued_over_a_newer_one(pair, tmp_path):
    path = save(tmp_path, *pair)
    assert latest(tmp_path) == path
    assert exit_code_of_child(lambda: save(tmp_path, *pair)) == 0  # another process
    late = new()
    load(path, *late)
    assert "it holds save-00000002, which" in refused_to_save(tmp_path, *late)
    load(tmp_path / "save-00000002", *late)
    save(tmp_path, *late)


def test_save_that_was_interrupted_once_it_was_published_may_be_followed_by_another(pair, tmp_path, monkeypatch):
    """Deleting older ones takes time; or one that failed before it was named the newest."""
    interrupt = Mock(side_effect=KeyboardInterrupt)

    def full(path, write, replace=checkpoint_folder.replace_file):
        if path.name == "latest":
            raise OSError(28, "No space left on device")
        replace(path, write)

    with monkeypatch.context() as context:
        context.setattr(checkpoint_folder, "replace_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path / "full", *pair)
    assert save(tmp_path / "full", *pair).exists()
    with monkeypatch.context() as context:
        context.setattr(checkpoint_folder, "_sealed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, *pair)
    assert save(tmp_path, *pair).name == "save-00000001"
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        rename = os.rename
        context.setattr(os, "rename", lambda old, new: interrupt(old) if old.name[0] != "." else rename(old, new))
        save(tmp_path, *pair, keep=1)
    assert latest(tmp_path) == tmp_path / "save-00000002"
    assert save(tmp_path, *pair, keep=1).name == "save-00000003"


def test_only_one_that_is_not_the_first_needs_its_name(pair, tmp_path):
    """Newer ones may have been lost together with `latest`."""
    save(tmp_path, *pair, keep=1, extra=1)
    (tmp_path / "latest").unlink()
    fresh = new()
    assert "it holds save-00000001, which" in refused_to_save(tmp_path, *fresh)
    assert load(tmp_path, *fresh) == 1
    path = save(tmp_path, *pair, keep=1, extra=2)
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=rf"latest is missing or damaged; .* load {path}, which is intact"):
        latest(tmp_path)
    other = new()
    assert load(path, *other) == 2
    save(tmp_path, *other)


def test_damaged_newest_one_is_never_passed_over_in_silence(pair, tmp_path):
    older, newest = save(tmp_path, *pair, extra="older"), save(tmp_path, *pair)
    (newest / "values.pt").write_bytes(b"")
    assert latest(tmp_path) == newest
    assert f"load {older}, which is intact" in refused(newest, *new())
    shutil.rmtree(newest)
    for _ in range(2):  # lost, then `latest` damaged
        with pytest.raises(CheckpointError) as error:
            latest(tmp_path)
        assert str(error.value).startswith(f"cannot continue or begin a run in {tmp_path}: ")
        assert "is missing" in str(error.value)
        assert str(error.value).endswith(f"; nothing was changed: load {older}, which is intact")
        (tmp_path / "latest").write_bytes(b"save-1\xff")
    other = new()
    assert load(older, *other) == "older"
    assert latest(save(tmp_path, *other).parent) == tmp_path / "save-00000002"


def test_file_called_latest_of_others_is_left_alone(pair, tmp_path):
    (tmp_path / "latest").write_text("global_step100")  # DeepSpeed's
    (tmp_path / ".lock").touch()
    with pytest.raises(CheckpointError, match=r"latest is missing or damaged"):
        latest(tmp_path)
    words = "it holds latest, which was neither loaded into this optimizer nor saved from it"
    assert words in refused_to_save(tmp_path, *pair)
