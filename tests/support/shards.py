"""Small models under `fully_shard`, and the parts of DTensors on this rank."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from support import formula
from support.overlap import ThreadDevice
from support.reference import Array, Synchronous, flat, same_bits
from torch import Tensor, distributed, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from superadam.devices import Device
from superadam.kernels.hyperparameters import Hyperparameters
from superadam.testing import SimulatedDevice


class Model(nn.Module):
    """Has even, uneven and empty shards, a tied, an unused and a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 1)
        self.tied = nn.Linear(7, 1)
        self.tied.weight = self.last.weight
        self.unused = nn.Linear(3, 5)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.first(x).relu())
        return self.frozen(self.last(inner) + self.tied(inner.tanh()))


def model_of(dtype: torch.dtype, seed: int = 1, **options: Any) -> Any:
    """Return such a model, its two matrices and all the rest sharded one by one."""
    torch.manual_seed(seed)
    model = Model().to(dtype)
    wrap([model.first, model.second, model], **options)
    return model


@torch.no_grad()
def local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; an ordinary tensor itself."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def is_first_replica(tensor: Any) -> bool:
    """Return whether the elements of this rank's part are counted on this rank; of ordinary tensors on the first."""
    if not hasattr(tensor, "placements"):
        return distributed.get_rank() == 0
    places = enumerate(tensor.placements)
    return all(tensor.device_mesh.get_local_rank(n) == 0 for n, placement in places if placement.is_replicate())


def gathered(value: Any) -> list[Any]:
    """Return what each rank has here, on all of them."""
    every = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, value)
    return every


def wrap(modules: Iterable[nn.Module], **options: Any) -> None:
    for module in modules:
        fully_shard(module, **options)


def ways_to_shard(way: str) -> dict[str, Any]:
    """Return options of `fully_shard` on two ranks: replicas, `Shard(1)`, weights on the host; none for other words."""
    if way == "replicate":
        return {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}
    if way == "columns":
        return {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}
    return {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if way == "host" else {}


DEVICES: dict[str, Callable[[], tuple[Device, int]]] = {
    "host": lambda: (ThreadDevice(), 0),
    "simulated": lambda: (SimulatedDevice(1, 0.5), 0),
    "kept": lambda: (SimulatedDevice(2, 0.5), 2),
}
"""Where schedulers work, and how many buckets stay there."""


class Oracle(Synchronous):
    """Adam in numpy over this rank's parts of parameters, with the norm over all ranks.

    `twins` are ordinary copies of the parameters, whose `.grad` it reads.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.twins = [nn.Parameter(parameter.detach().clone()) for parameter in self.tensors]
        super().__init__([local(parameter) for parameter in self.tensors])

    def copy_gradients(self) -> None:
        for twin, parameter in zip(self.twins, self.tensors, strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()

    def norm_of(self, gradients: Mapping[int, Array]) -> tuple[float, bool]:
        sums = [formula.chunk_sums(one) for i, one in gradients.items() if is_first_replica(self.twins[i])]
        every = gathered(formula.ordered_sum(np.concatenate([np.zeros(0), *sums])))
        norm = math.sqrt(formula.ordered_sum(np.array(every)))
        return norm, math.isfinite(norm)

    def step_all(self, limit: float | None) -> float:
        """Make a step with the twins' gradients, and return the norm."""
        gradients = {i: flat(local(p.grad), local(p)) for i, p in enumerate(self.twins) if p.grad is not None}
        hyper = Hyperparameters.of_group(self.optimizer.param_groups[0])
        return self.step(gradients, [hyper] * len(self.twins), limit)[1]

    def check_step(self, *, rel_tol: float = 0.0) -> None:
        """Let the optimizer make a step without a limit, and compare its norm and everything that it leaves."""
        self.copy_gradients()
        self.optimizer.step()
        norm, outcome = self.step_all(None), self.optimizer.last_outcome
        assert math.isclose(outcome.grad_norm, norm, rel_tol=rel_tol)
        self.check()
        self.optimizer.zero_grad()

    def check(self) -> None:
        for tensor, one in zip(self.tensors, self.parameters, strict=True):
            part, entry = local(tensor), self.optimizer.state[tensor]
            assert same_bits(flat(part, part), one.shown)
            if not entry:
                assert not one.step
                continue
            assert ("master" in entry) is (tensor.dtype == torch.bfloat16)
            assert same_bits(flat(local(entry.get("master", tensor)), part), one.p)
            assert same_bits(flat(local(entry["exp_avg"]), part), one.m)
            assert same_bits(flat(local(entry["exp_avg_sq"]), part), one.v)
            assert entry["step"].item() == one.step
            for key in entry.keys() - {"step"}:
                assert type(entry[key]) is (Tensor if type(tensor) is nn.Parameter else type(tensor))
                assert getattr(entry[key], "placements", None) == getattr(tensor, "placements", None)
                assert entry[key].shape == tensor.shape
                assert entry[key].dtype == (torch.float64 if tensor.dtype == torch.float64 else torch.float32)


ROUNDED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
"""A policy of mixed precision under which gradients of bf16 shards are rounded once they are reduced."""

SHAPES = [(7, 5), (5, 1), (1, 9), (9, 6)]
"""Of layers: uneven parts, and on some ranks none at all."""


def assert_same(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert same_bits(flat(one, one), flat(other, other))


def parts_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return copies of this rank's parts of parameters and of all state, on the CPU."""
    parts: list[Tensor] = []
    for parameter in model.parameters():
        parts += [parameter, *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))]
    return [local(part).cpu().clone() for part in parts]


def digest_of(model: nn.Module, optimizer: Any) -> str:
    parts = [part.contiguous().flatten().view(torch.uint8).numpy().tobytes() for part in parts_of(model, optimizer)]
    return hashlib.sha256(b"".join(parts)).hexdigest()
