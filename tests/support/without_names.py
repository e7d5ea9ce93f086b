"""Trains with and without private names of torch, in forks of this process, and prints what came out as JSON.

Run as a script, in a process that has not imported superadam. `python without_names.py`.
"""

import builtins
import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import multiprocessing
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("distributed.tensor.DTensor._local_tensor", "distributed.tensor.DTensor._spec")
NEEDED_ALONE = (
    "_C._InferenceMode",
    "_C._DisableFuncTorch",
    "utils._python_dispatch._disable_current_modes",
    "_subclasses.fake_tensor.unset_fake_temporarily",
    "utils._pytree.MappingKey",
    "_compile._disable_dynamo",
    "optim.Optimizer.profile_hook_step",
    "Tensor._version",
    "_C._autograd._unsafe_set_version_counter",
    "_foreach_copy_",
    "utils._pytree.register_pytree_node",
    "autograd.profiler._is_profiler_enabled",
    "autograd.graph._allow_mutation_on_saved_tensors_enabled",
    "autograd.forward_ad._current_level",
    "autograd.Variable._execution_engine.queue_callback",
)
"""Names that are not needed to take gradients, but by the optimizer itself, which does without each."""

ADDRESS = "UntypedStorage._cdata"
"""A name that is needed for both."""

VERSION = "Tensor._version"
"""Of those, one without which values are compared that need not be otherwise."""

NONE, OTHERS, ALL = "none", "others", "all"
"""Of the names are missing; `OTHERS` are those of NEEDED_ALONE but for VERSION."""

STEPS = 7


def take_away_part(name: str) -> None:
    """Hide an attribute of DTensors from superadam, but not from torch."""
    from torch.distributed.tensor import DTensor

    slot: Any = getattr(DTensor, name)

    def get(tensor: Any) -> Any:
        caller = sys._getframe(1)
        is_asked = name in caller.f_code.co_names or name in caller.f_code.co_consts  # and not the C++ that it calls
        if is_asked and str(caller.f_globals["__name__"]).startswith("superadam"):
            raise AttributeError(name)
        return slot.__get__(tensor)

    setattr(DTensor, name, property(get, slot.__set__))


def import_without(*paths: str) -> list[str]:
    """Import superadam in a process in which torch seems to lack these names; return what is missing for handles."""
    for path in set(paths).intersection(PARTS):
        take_away_part(path.rpartition(".")[2])
    early = set(paths).difference(PARTS)
    with blinded(early):
        from superadam.kernels import torch_private

    assert not any(torch_private.FOUND[path] for path in early)
    return torch_private.missing


@contextlib.contextmanager
def blinded(paths: Iterable[str]) -> Iterator[None]:
    """Let `getattr` find none of these names meanwhile."""
    parts = [path.rpartition(".") for path in paths]
    places = [(operator.attrgetter(owner)(torch) if owner else torch, name) for owner, _, name in parts]
    usual = getattr

    def blind(of: Any, what: str, *default: Any) -> Any:
        return default[0] if any(of is owner and what == name for owner, name in places) else usual(of, what, *default)

    builtins.getattr = blind
    try:
        yield
    finally:
        builtins.getattr = usual


def missing_without(path: str) -> list[str]:
    """Return what is missing for handles where torch lacks one name, by the one module that looks for it."""
    from superadam.kernels import torch_private

    spec: Any = importlib.util.spec_from_file_location("one_more_torch_private", torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    with blinded([path]):
        spec.loader.exec_module(module)
    return module.missing


# -- training ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Has bf16 and fp32 parameters, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 9), nn.Linear(9, 7).bfloat16(), nn.Linear(7, 3)
        self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu().bfloat16()).float())


def _digest(tensors: Sequence[Tensor]) -> str:
    from torch.distributed.tensor import DTensor

    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    data = b"".join(one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in parts)
    return hashlib.sha256(data).hexdigest()


def train(model: nn.Module, overlap: str, dtype: torch.dtype = torch.float32) -> tuple[str, int]:
    """Return a digest of parameters and state after steps with all that may come between, and how often was taken."""
    from superadam import OffloadScheduler, SpeculativeCPUAdamW
    from superadam.handles.gradient_handle import taken_of
    from superadam.testing import SimulatedDevice

    parameters = [*model.parameters()]
    optimizer = SpeculativeCPUAdamW(parameters, lr=1e-2)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduled = overlap == "scheduler"
    scheduler = OffloadScheduler(optimizer, model, device=SimulatedDevice(1), bucket_numel=40) if scheduled else None
    taken = 0
    for step in range(STEPS):
        for micro in range(1 + step % 2):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro)).to(dtype)
            loss = model(inputs).float().square().sum()
            (scaler.scale(loss) if step == 6 else loss).backward()
            if overlap == "speculate":
                optimizer.speculate()
            taken += sum(taken_of(one.grad) is not None for one in parameters)
        first: Any = parameters[0].grad
        assert not first.isnan().any()
        optimizer.max_grad_norm = 0.5 if step % 3 == 1 else None
        if step == 2:
            torch.nn.utils.clip_grad_norm_(parameters, 0.25)
        if step == 3:
            first.mul_(0.5)
            parameters[1].grad.add_(0.25)  # type: ignore[union-attr]
        if step == 4:
            with torch.no_grad():
                parameters[0].mul_(0.75)
                parameters[-1].data = parameters[-1].data.clone()
        if step == 5:
            torch._foreach_div_([one.grad for one in parameters if one.grad is not None], 3.0)
        with torch.inference_mode(step == 0):
            scaler.step(optimizer) if step == 6 else optimizer.step()
        if step == 6:
            scaler.update()
        rates.step()
        optimizer.zero_grad()
    if scheduler is not None:
        scheduler.close()
    state = [optimizer.state[one] for one in parameters]
    tensors = [value for entry in state for _, value in sorted(entry.items())]
    digest = _digest([*parameters, *tensors])
    if isinstance(model, Model):
        shorter = parameters[3]
        shorter.data, shorter.grad = shorter.data[:3].clone(), torch.ones_like(shorter.data[:3])
        with contextlib.suppress(ValueError):  # it does not fit its state
            optimizer.step()
    return digest, taken


def train_all() -> dict[str, Any]:
    """Train alone, with `speculate()` and with a scheduler."""
    told: list[str] = []
    log = logging.getLogger("superadam")
    log.addFilter(lambda record: told.append(record.getMessage()) or record.levelno < logging.WARNING)
    runs = {overlap: train(Model(), overlap) for overlap in ("alone", "speculate", "scheduler")}
    digests, taken = zip(*runs.values(), strict=True)
    return {"digests": set(digests), "taken": taken, "refused": is_refused(Model()), "told": told}


def is_refused(model: nn.Module) -> bool:
    """Whether sums in fp32, which need gradients that are taken, are refused in one sentence; they are right if not."""
    from superadam import OffloadScheduler, SpeculativeCPUAdamW

    with OffloadScheduler(SpeculativeCPUAdamW(model.parameters()), model) as scheduler:
        try:
            with scheduler.accumulate(torch.float32):
                return False
        except RuntimeError as error:
            return str(error).count(";") == 1


def train_sharded() -> dict[str, Any]:
    """The same with DTensors, on one rank."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    found: dict[str, Any] = {"digests": set(), "taken": []}
    for dtype, overlap in itertools.product((torch.float32, torch.bfloat16), ("alone", "scheduler")):
        torch.default_generator.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)).to(dtype)
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        digest, taken = train(model, overlap, dtype)
        found["digests"].add(f"{dtype} {digest}")
        found["taken"].append(taken)
    found["refused"] = is_refused(model)
    distributed.destroy_process_group()
    return found


# -- forks -------------------------------------------------------------------------------------------------------------


def in_fork(work: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def names_of_torch() -> list[str]:
    from superadam.kernels import torch_private

    return [*torch_private.FOUND]


def train_without(paths: Sequence[str], train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"missing": import_without(*paths)} | train()
    except Exception as error:
        raise RuntimeError(f"without {paths}") from error


if __name__ == "__main__":
    import cffi  # noqa: F401
    import numpy  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    names = in_fork(names_of_torch)
    others = [path for path in NEEDED_ALONE if path != VERSION]
    cases = {VERSION: [VERSION], OTHERS: others, ADDRESS: [ADDRESS], NONE: [], ALL: names}
    plain = {name: in_fork(train_without, paths, train_all) for name, paths in cases.items()}
    cases = {path: [path] for path in (*PARTS, VERSION)} | {NONE: [], ALL: [*names, *PARTS]}
    sharded = {name: in_fork(train_without, paths, train_sharded) for name, paths in cases.items()}
    missing = {path: missing_without(path) for path in names}  # at last: this imports superadam here
    json.dump({"missing": missing, "plain": plain, "sharded": sharded}, sys.stdout, default=sorted)
