"""Bytes on the GPU and the host, by category and stage, of one rank; what does not fit, and what would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from superadam.host.memory import HostNeeds
from superadam.offload.needs import needs_of, with_bucket
from superadam.offload.placement import PACKED_UNDER_WAY, Placement, numel_of_buckets, room_for_new_values
from superadam.plan import UnplannableError
from superadam.plan.activations import END, FORWARD, HEAD, LAYERS, peaks_of
from superadam.plan.machines import Machine
from superadam.plan.models import layers_of, on_meta
from superadam.state.storage import Master, Moments, Storage

STEP = "step()"
TRAINING, SAVING, RESUMING, MAPPED = "training", "saving in the background", "resuming", "resuming, file mapped"
SIZE = torch.bfloat16.itemsize
MOST_TOKENS = 1 << 20  # of a micro-batch, whose loss is run in chunks without memory; more than a GPU has room for


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is trained."""

    sequences: int = 1  # of a micro-batch of a rank
    tokens: int = 4096  # of a sequence
    micro_batches: int = 1  # of a step
    ranks: int = 1  # that FSDP2 divides the model among
    loss: str = "chunked"  # or "full"
    moments: str = "fp32"  # as of `superadam.SpeculativeCPUAdam`
    master: str = "fp32"
    checkpointing: bool = True  # whether layers are computed again in backward
    flows: bool = False  # whether weights are in host memory (`CPUOffloadPolicy`)
    clipped: float = 0.0  # share of steps that are

    @property
    def storage(self) -> Storage:
        """How the state is stored."""
        return Storage(Moments(self.moments), Master(self.master))

    @property
    def tokens_of_step(self) -> int:
        """Of all ranks."""
        return self.sequences * self.tokens * self.micro_batches * self.ranks


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, without memory."""

    config: PreTrainedConfig
    model: nn.Module
    parameters: int  # their elements
    unit: int  # elements of the largest layer, which FSDP2 gathers
    root: int  # elements of what belongs to no layer
    found: dict[object, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)  # peaks, by setting

    @staticmethod
    def of(config: PreTrainedConfig) -> Subject:
        """Return the model of a configuration; raises `UnplannableError` where there is none."""
        model = on_meta(config)
        every = sum(parameter.numel() for parameter in model.parameters())
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
        return Subject(config, model, every, max(sizes, default=0), every - sum(sizes))

    def shards(self, ranks: int) -> dict[str, Tensor]:
        """Return what a rank has of each parameter: FSDP2 divides the first dimension."""
        return {
            name: parameter.data.new_empty(-(-parameter.shape[0] // ranks), *parameter.shape[1:])
            for name, parameter in self.model.named_parameters()
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by stage and category."""

    gpu: Mapping[str, Mapping[str, int]]
    host: Mapping[str, Mapping[str, int]]
    gpu_limit: int  # of the machine
    host_limit: int
    waiting: int  # new values that wait on the host for the verdict
    room: int | None  # on the GPU for new values; None where all have room
    cut: tuple[str, ...] = ()  # names of tensors that are larger than a bucket
    one_memory: bool = False  # whether both limits are of one memory

    @property
    def free(self) -> int:
        """Bytes of the GPU that its peak leaves."""
        return self.gpu_limit - max(total(categories) for categories in self.gpu.values())

    @property
    def problems(self) -> list[tuple[str, str, int, int]]:
        """What does not fit: place, stage, bytes and limit; training first, and what needs most."""
        found = []
        for place, stages, limit in (("GPU", self.gpu, self.gpu_limit), ("host", self.host, self.host_limit)):
            over = [
                (place, stage, size, limit)
                for stage, categories in stages.items()
                if (size := total(categories)) > limit
            ]
            found += sorted(over, key=lambda problem: -problem[2])
        if self.one_memory:
            loaded = total(self.gpu[FORWARD]) - self.gpu[FORWARD]["activations"]
            for stage, categories in self.host.items():
                is_loading = stage in (RESUMING, MAPPED)
                both = total(categories) + (loaded if is_loading else self.gpu_limit - self.free)
                found += [("GPU and host", stage, both, self.gpu_limit)] if both > self.gpu_limit else []
        return sorted(found, key=lambda problem: problem[1] in (SAVING, RESUMING, MAPPED))

    @property
    def trains(self) -> bool:
        """Whether training fits; saving and resuming may not."""
        return all(stage in (SAVING, RESUMING, MAPPED) for _, stage, _, _ in self.problems)

    @property
    def resumes(self) -> bool:
        """Whether it can be resumed with a second copy of the state."""
        return all(stage == SAVING for _, stage, _, _ in self.problems)


def total(categories: Mapping[str, int]) -> int:
    """Return the bytes of a stage."""
    return sum(categories.values())


def placement_of(subject: Subject, setting: Setting) -> Placement:
    """Return the placement that a scheduler begins with."""
    shards = subject.shards(setting.ranks).values()
    return Placement(0, numel_of_buckets(sum(shard.numel() for shard in shards)), None, 1)


def activations_for(subject: Subject, setting: Setting) -> dict[str, int]:
    """Return the peaks of forward and backward, which are looked for once; raises `UnplannableError`."""
    if (tokens := setting.sequences * setting.tokens) > MOST_TOKENS:
        raise UnplannableError(f"a micro-batch has {tokens} tokens, expected {MOST_TOKENS} at most; make it smaller")
    key = setting.sequences, setting.tokens, setting.loss, setting.checkpointing
    if key not in subject.found:
        subject.found[key] = peaks_of(subject.config, *key)
    return subject.found[key]


def memory_of(subject: Subject, setting: Setting, machine: Machine) -> Memory:
    """Return what training takes; raises `UnplannableError`."""
    found = activations_for(subject, setting)
    placement, shards = placement_of(subject, setting), subject.shards(setting.ranks)
    mine = SIZE * sum(shard.numel() for shard in shards.values())
    bucket, largest = SIZE * placement.bucket_numel, SIZE * max(shard.numel() for shard in shards.values())
    is_sharded = setting.ranks > 1 or setting.flows
    fixed = {
        "weights": 0 if setting.flows else mine,
        "gathered weights": SIZE * (subject.root + 2 * subject.unit) if is_sharded else 0,
        "context and fragments": int(machine.gpu_reserved.value),
    }
    if setting.micro_batches > 1 and not setting.flows:
        fixed["gradients of earlier micro-batches"] = mine
    unit = max(subject.unit, subject.root)
    reduced = {"gradients that are reduced": (SIZE + 4) * unit if is_sharded else 0}  # whole, and in fp32
    packed = {"buckets under way": 0 if setting.flows else (PACKED_UNDER_WAY + 1) * bucket}
    gpu = {
        FORWARD: fixed | {"activations": found[FORWARD]},
        HEAD: fixed | packed | {"activations": found[HEAD]},
        LAYERS: fixed | packed | reduced | {"activations": found[LAYERS]},
        END: fixed | packed | reduced | {"activations": max(found[END], 0 if is_sharded else largest)},
    }
    room, waiting = None, 0
    limit = int(machine.gpu_memory.value)
    if not setting.flows:
        free = limit - max(map(total, gpu.values()))
        room = room_for_new_values(mine, packed["buckets under way"], bucket, max(0, free))
        waiting = 0 if room is None else max(0, mine - room)
        gpu[END] = gpu[END] | {"new values": mine - waiting}
        gpu[STEP] = fixed | {"new values": mine - waiting}
    host = _host(shards, setting, machine, placement, waiting, mine)
    cut = tuple(name for name, shard in shards.items() if shard.numel() > placement.bucket_numel)
    return Memory(gpu, host, limit, int(machine.host_memory.value), waiting, room, cut, machine.one_memory)


def _host(
    shards: Mapping[str, Tensor], setting: Setting, machine: Machine, placement: Placement, waiting: int, mine: int
) -> dict[str, dict[str, int]]:
    needs, flows = HostNeeds(), setting.flows
    for shard in shards.values():
        needs += needs_of(shard, is_on_host=flows, piece_numel=placement.bucket_numel, storage=setting.storage)
    if not flows:
        needs = with_bucket(replace(needs, shadows=waiting), SIZE, placement, mine // SIZE)
    reserved = {"process": int(machine.host_reserved.value)} | ({"weights": mine} if flows else {})
    training = reserved | {
        "state": needs.state,
        "gradients": needs.gradients + needs.pending,
        "new values that wait": needs.shadows,
        "lists of uncertain elements": needs.lists,
        "buckets under way": needs.under_way,
    }
    most = max(needs_of(shard, is_on_host=flows, storage=Storage()).state for shard in shards.values()) // 3
    loading = {"process": reserved["process"], "weights": mine, "state": needs.state}
    return {
        TRAINING: training,
        SAVING: training | {"copy of the state": needs.state + most},
        RESUMING: loading | {"state that is read": needs.state},
    } | ({} if setting.ranks > 1 else {MAPPED: loading | {"state that is read": most}})
