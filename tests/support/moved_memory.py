"""Programs that move, free, reshape and share memory of parameters and state, drawn from a seed.

Run as a program it tries many of them; `make sanitize` does so with kernels that notice every access to memory that is
not there.
"""

import argparse
import copy
import logging
import pickle
import random
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from support.visible import bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.kernels.memory import has_memory
from superadam.testing import SimulatedDevice

STEPS = 4
MOMENTS = ("before backward", "in a hook", "before the step", "after the step")
SETTINGS = ("host", "simulated device", "speculate()")
FORMATS: tuple[dict[str, str], ...] = ({}, {}, {"moments": "bf16"}, {"moments": "8bit", "master": "24bit"})


class Run:
    """One program under way: a model whose gradients are given, its optimizer, and what the program holds."""

    def __init__(self, seed: int, setting: str) -> None:
        draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        self.model = nn.ParameterDict({
            "a": nn.Parameter(self.values(64, 64).to(dtype)),
            "b": nn.Parameter(self.values(192).to(dtype)),
            "c": nn.Parameter(self.values(3, 128).to(torch.float32)),
        })  # fmt: skip
        options: dict[str, Any] = {"max_grad_norm": draw.choice([None, 1.0]), **draw.choice(FORMATS)}
        self.optimizer: SpeculativeCPUAdam = SpeculativeCPUAdamW(self.model.parameters(), lr=1e-2, **options)
        self.setting = setting
        self.held: list[Any] = []
        self.actions: list[tuple[int, str, Action, str, str]] = []
        for _ in range(draw.randint(1, 8)):
            name, where = draw.choice("abc"), (draw.randrange(1, STEPS), draw.choice(MOMENTS))
            keys = ["exp_avg", "exp_avg_sq"]  # which parameters have masters depends on the device
            keys += ["master"] if self.model[name].dtype.itemsize == 2 else []
            self.actions.append((*where, draw.choice(ACTIONS), name, draw.choice(keys)))
        if {"parameter: fp32", "parameter: another dtype"} & {action.name for _, _, action, _, _ in self.actions}:
            self.actions = [(*rest, key.replace("master", "exp_avg")) for *rest, key in self.actions]
        if any(do in UNSEEN for _, _, do, _, _ in self.actions):  # an address would tell of it, by chance
            self.actions = [one for one in self.actions if one[2] not in FILLED_AGAIN]
        self.errors: list[str] = []
        self.faults: list[str] = []

    def values(self, *shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=self.generator)

    @property
    def text(self) -> list[str]:
        """What the program does, for messages."""
        return [f"step {at}, {when}: {action.name} of {name}.{key}" for at, when, action, name, key in self.actions]

    def act(self, step: int, moment: str) -> None:
        for at, when, action, name, key in self.actions:
            if (at, when) == (step, moment) and all(map(has_memory, self.read_by_torch)):
                try:
                    with torch.no_grad():
                        action.do(self, self.model[name], key)
                except Exception as error:  # torch's own, as where shared memory is to be resized
                    self.errors.append(f"{type(error).__name__}: {error}")

    @property
    def read_by_torch(self) -> list[Tensor]:
        """What torch reads in the midst of actions, whether it has memory or not."""
        if all(action.name != "free the count" for _, _, action, _, _ in self.actions):  # `state` is not looked at
            return [*self.model.values()]
        counts = [entry["step"] for entry in self.optimizer.state.values() if "step" in entry]
        return [*self.model.values(), *counts]

    def tensor(self, parameter: Tensor, key: str) -> Tensor | None:
        """Return one tensor of a parameter's state, if it has that."""
        value = self.optimizer.state[parameter].get(key) if parameter in self.optimizer.state else None
        return value if isinstance(value, Tensor) and has_memory(value) else None

    def go(self) -> Iterator[object]:
        """Train; yield what a program sees after each step, and the error that ends it."""
        device = {"device": SimulatedDevice(0)} if self.setting == "simulated device" else {}
        scheduler: Any = nullcontext()
        if self.setting in ("host", "simulated device"):
            scheduler = OffloadScheduler(self.optimizer, self.model, num_threads=1, bucket_numel=1000, **device)
        with scheduler:
            for step in range(STEPS):
                try:
                    self.step(step)
                except Exception as error:
                    yield step, type(error).__name__, str(error)
                    return
                self.act(step, "after the step")
                with self.refusals():
                    seen = self.seen()
                yield seen

    def step(self, step: int) -> None:
        self.act(step, "before backward")
        if not all(map(has_memory, self.model.values())):
            raise RuntimeError("torch would read what is not there")
        gradients = {n: self.values(*p.shape).to(p.dtype) for n, p in self.model.items() if n != "b" or step % 3 != 2}
        handle = self.model["c"].register_post_accumulate_grad_hook(lambda _: self.act(step, "in a hook"))
        # Backward reaches `c` before `a` and `b`.
        loss = torch.zeros(())
        for name in sorted(gradients):
            loss = loss + (self.model[name] * gradients[name]).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        handle.remove()
        if self.setting == "speculate()":
            with suppress(ValueError, TypeError), self.refusals():  # of what may be put right until the step
                self.optimizer.speculate()
        self.act(step, "before the step")
        with self.refusals():
            self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Note errors of the optimizer that do not say what was wrong with what a program gave it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, ValueError | TypeError) or "cpu/cdef.h" in str(error):
                self.faults.append(f"{type(error).__name__}: {error}")
            raise

    def seen(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()["state"]
        values = {f"{number} {key}": value for number, entry in state.items() for key, value in entry.items()}
        values |= dict(self.model.items()) | {f"held {number}": one for number, one in enumerate(self.held)}
        tensors = {name: one for name, one in values.items() if isinstance(one, Tensor) and has_memory(one)}
        return {"errors": [*self.errors], **{name: bits(one) for name, one in tensors.items()}}


Do = Callable[[Run, Tensor, str], object]


class Action(NamedTuple):
    """Something that a program does to a parameter, or to a tensor of its state."""

    name: str
    do: Do


def _of_state(change: Callable[[Tensor], object], *then: Callable[[Run, Tensor, str, Any], object]) -> Do:
    """Return what changes a tensor of the state, and then does something with what came of it."""

    def do(run: Run, parameter: Tensor, key: str) -> None:
        value = run.tensor(parameter, key)
        if value is not None:
            made = change(value)
            for one in then:
                one(run, parameter, key, made)

    return do


def _assign(run: Run, parameter: Tensor, key: str, made: object) -> None:
    run.optimizer.state[parameter][key] = made


def _keep(run: Run, parameter: Tensor, key: str, made: object) -> None:
    run.held.append(made)


def _assign_through_dlpack(run: Run, parameter: Tensor, key: str, made: Tensor) -> None:
    """Assign another storage in the same memory, and hold that where no action moves or frees it, as none may."""
    run.held.append([made])
    _assign(run, parameter, key, torch.from_dlpack(made))


def _put(new: Callable[[Tensor], object]) -> Do:
    return _of_state(new, _assign)


def _hold(what: Callable[[Tensor], object]) -> Do:
    return _of_state(what, _keep)


def _put_and_hold(new: Callable[[Tensor], Tensor]) -> Do:
    return _of_state(new, _keep, _assign)


def _of_entry(change: Callable[[Run, Tensor, Any], object]) -> Do:
    """Return what changes the entry of a parameter that has one."""
    return lambda run, p, key: p in run.optimizer.state and change(run, p, run.optimizer.state[p])


def _pickle(run: Run, parameter: Tensor, entry: dict[str, Any]) -> None:
    if all(map(has_memory, entry.values())):  # torch would pickle what is not there
        run.optimizer.state[parameter] = pickle.loads(pickle.dumps(entry))


def _to_held(change: Callable[[Tensor], object]) -> Do:
    def do(run: Run, parameter: Tensor, key: str) -> None:
        for one in [one() if isinstance(one, weakref.ref) else one for one in run.held]:
            if isinstance(one, Tensor) and has_memory(one):
                change(one)

    return do


def _set_data(tensor: Tensor, new: Tensor) -> None:
    tensor.data = new


def _refill(tensor: Tensor) -> None:
    if tensor.is_shared():  # of which torch makes no more room
        return
    storage = tensor.untyped_storage()
    kept = storage.clone()  # all of it: others may have views
    storage.resize_(0)
    storage.resize_(kept.nbytes())
    storage.copy_(kept)


def _replace_freed(tensor: Tensor) -> None:
    kept = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    tensor.data = kept


def _grow(tensor: Tensor) -> None:
    if not tensor.is_shared():  # torch ends the process
        tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes() + 64)


def _swap(tensor: Tensor) -> None:
    other = tensor.detach().clone()
    torch.utils.swap_tensors(tensor, nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.detach().t().clone(memory_format=torch.contiguous_format).t() if tensor.dim() == 2 else tensor


def _reshape(change: Callable[[Tensor], Tensor]) -> Do:
    """Change a parameter and its state alike."""

    def do(run: Run, parameter: Tensor, key: str) -> None:
        entry = run.optimizer.state.get(parameter, {})
        if not all(has_memory(value) for value in entry.values() if isinstance(value, Tensor)):
            return
        parameter.data = change(parameter.data)
        for name in [name for name in entry if name != "step"]:
            entry[name] = change(entry[name])

    return do


def _reshape_parameter(change: Callable[[Tensor], Tensor]) -> Do:
    return lambda run, parameter, key: _set_data(parameter, change(parameter.data))


def _exchange(run: Run, parameter: Tensor, key: str) -> None:
    moments = run.tensor(parameter, "exp_avg"), run.tensor(parameter, "exp_avg_sq")
    if moments[0] is not None and moments[1] is not None:
        entry = run.optimizer.state[parameter]
        entry["exp_avg"], entry["exp_avg_sq"] = moments[1].abs(), moments[0].abs()


def _put_count(run: Run, parameter: Tensor, entry: Any) -> None:
    run.held.append(torch.tensor(3))
    entry["step"] = run.held[-1]


def _group_of_its_own(run: Run, parameter: Tensor, key: str) -> None:
    first = run.optimizer.param_groups[0]
    if any(one is parameter for one in first["params"]):
        first["params"] = [one for one in first["params"] if one is not parameter]
        run.optimizer.param_groups.append({**first, "params": [parameter], "lr": 2e-2})


def _freeze_or_thaw(run: Run, parameter: Tensor, key: str) -> None:
    if parameter is not run.model["c"]:  # which has the hook
        parameter.requires_grad_(not parameter.requires_grad)


def _rows(tensor: Tensor) -> Tensor:
    return tensor[: max(1, tensor.shape[0] // 3)]


def _columns(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)


ACTIONS = [
    Action("read", _of_state(lambda v: v.sum())),
    Action("assign", _put(torch.clone)),
    Action("assign zeros of the parameter", lambda run, p, key: _put(lambda v: torch.zeros_like(p))(run, p, key)),
    Action(".data = clone", _of_state(lambda v: _set_data(v, v.clone()))),
    Action(".data = zeros", _of_state(lambda v: _set_data(v, torch.zeros_like(v)))),
    Action(".data = nothing, then zeros", _of_state(lambda v: (_set_data(v, v[:0]), _set_data(v, torch.zeros(1))))),
    Action(".data = another dtype", _of_state(lambda v: _set_data(v, v.to(torch.float16)))),
    Action(".data = double", _of_state(lambda v: _set_data(v, v.double()))),
    Action(".data = transposed", _of_state(lambda v: _set_data(v, _transposed(v)))),
    Action(".data = fewer rows", _of_state(lambda v: _set_data(v, _rows(v)))),
    Action("set_", _of_state(lambda v: v.set_(v.clone()))),  # type: ignore[call-overload]
    Action("swap_tensors", _of_state(_swap)),
    Action("freed and filled again", _of_state(_refill)),
    Action("freed and replaced", _of_state(_replace_freed)),
    Action("freed", _of_state(lambda v: v.untyped_storage().resize_(0))),
    Action("storage grows", _of_state(_grow)),
    Action("resize_ to fewer", _of_state(lambda v: v.resize_(3))),
    Action("share_memory_", _of_state(torch.Tensor.share_memory_)),
    Action("write", _of_state(lambda v: v.mul_(0.5))),
    Action("write through .data", _of_state(lambda v: v.data.mul_(0.5))),
    Action("write through numpy", _of_state(lambda v: v.dtype == torch.float32 and v.numpy().fill(0.25))),
    Action("put another dtype", _put(lambda v: v.to(torch.bfloat16))),
    Action("put double", _put(torch.Tensor.double)),
    Action("put transposed", _put(_transposed)),
    Action("put a view of more", _put(lambda v: torch.cat([v, v])[: v.shape[0]])),
    Action("put fewer", _put(_rows)),
    Action("put no tensor", _put(lambda v: 1.0)),
    Action("put and hold", _put_and_hold(torch.clone)),
    Action("put another dtype and hold", _put_and_hold(lambda v: v.to(torch.bfloat16))),
    Action("put fp32 and hold", _put_and_hold(lambda v: v.float().clone())),
    Action("put double and hold", _put_and_hold(torch.Tensor.double)),
    Action("put transposed and hold", _put_and_hold(_transposed)),
    Action("put rows of more and hold", _put_and_hold(lambda v: torch.cat([v, v])[: v.shape[0]])),
    Action("put what another library has", _of_state(torch.clone, _assign_through_dlpack)),
    Action("hold", _hold(lambda v: v)),
    Action("hold weakly", _hold(weakref.ref)),
    Action("hold an alias", _hold(torch.Tensor.detach)),
    Action("hold .data", _hold(lambda v: v.data)),
    Action("hold the storage", _hold(torch.Tensor.untyped_storage)),
    Action("hold an array", _hold(lambda v: v.dtype == torch.float32 and v.numpy())),
    Action("hold the entry", lambda run, p, key: run.held.append(run.optimizer.state.get(p))),
    Action("hold the state", lambda run, p, key: run.held.append(run.optimizer.state)),
    Action("hold a state dict", lambda run, p, key: run.held.append(run.optimizer.state_dict())),
    Action("write to what is held", _to_held(lambda one: one.mul_(0.5))),
    Action("write to what is held through .data", _to_held(lambda one: one.data.mul_(0.5))),
    Action("free and fill again what is held", _to_held(_refill)),
    Action("move what is held", _to_held(lambda one: _set_data(one, one.clone()))),
    Action("share what is held", _to_held(torch.Tensor.share_memory_)),
    Action("let go", lambda run, p, key: run.held.clear()),
    Action("delete", lambda run, p, key: run.optimizer.state.pop(p, None)),
    Action("clear", lambda run, p, key: run.optimizer.state.clear()),
    Action("exchange", _exchange),
    Action("pickled", _of_entry(_pickle)),
    Action("write the count", _of_entry(lambda run, p, entry: entry["step"].fill_(7))),
    Action("put a count", _of_entry(_put_count)),
    Action("free the count", _of_entry(lambda run, p, entry: entry["step"].untyped_storage().resize_(0))),
    Action("load", lambda run, p, key: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))),
    Action("another group", lambda run, p, key: run.optimizer.add_param_group({"params": nn.Parameter(run.values(7))})),
    Action("groups in another order", lambda run, p, key: run.optimizer.param_groups[0]["params"].reverse()),
    Action("a group of its own", _group_of_its_own),
    Action("frozen or thawed", _freeze_or_thaw),
    Action("assign the state", lambda run, *_: setattr(run.optimizer, "state", defaultdict(dict, run.optimizer.state))),
    Action("copy of the optimizer", lambda run, p, key: run.held.append(copy.deepcopy(run.optimizer).state_dict())),
    Action("parameter: write", lambda run, p, key: p.mul_(0.5)),
    Action("parameter: write through .data", lambda run, p, key: p.data.mul_(0.5)),
    Action("parameter: .data = clone", lambda run, p, key: _set_data(p, p.data.clone())),
    Action("parameter: .data = other values", lambda run, p, key: _set_data(p, 0.5 * p.data)),
    Action("parameter: freed and replaced", lambda run, p, key: _replace_freed(p)),
    Action("parameter: freed and filled again", lambda run, p, key: _refill(p)),
    Action("parameter: freed", lambda run, p, key: p.untyped_storage().resize_(0)),
    Action("parameter: share_memory_", lambda run, p, key: p.share_memory_()),
    Action("parameter: transposed", _reshape_parameter(_transposed)),
    Action("parameter: fewer rows alone", _reshape_parameter(lambda t: _rows(t).clone())),
    Action("parameter: a view of rows alone", _reshape_parameter(_rows)),
    Action("parameter: wider alone", _reshape_parameter(_columns)),
    Action("parameter: another dtype", _reshape_parameter(torch.Tensor.double)),
    Action("parameter: fp32", _reshape_parameter(torch.Tensor.float)),
    Action("both: fewer rows", _reshape(lambda t: _rows(t).clone())),
    Action("both: a view of rows", _reshape(_rows)),
    Action("both: wider", _reshape(_columns)),
    Action("both: flat", _reshape(lambda t: t.reshape(-1).clone())),
    Action("both: transposed", _reshape(lambda t: t.t().clone(memory_format=torch.contiguous_format))),
]  # fmt: skip
UNSEEN = [one for one in ACTIONS if one.name.endswith(("through .data", "through numpy"))]
"""Writes to what no counter counts, which are found when the parameter has a gradient."""
FILLED_AGAIN = [one for one in ACTIONS if one.name.startswith("free and fill") or one.name.endswith("filled again")]


def difference(seed: int, *settings: str) -> str | None:
    """Return how a program with a scheduler, or in two parts, differs from the one without; None if it does not."""
    plain = Run(seed, "plain")
    seen = list(plain.go())
    for setting in settings:
        run = Run(seed, setting)
        for step, (ours, expected) in enumerate(zip(run.go(), seen, strict=False)):
            if found := _difference(ours, expected):
                return f"seed {seed}, {setting}, step {step}: {found}; {run.text}"
        if faults := [*run.faults, *plain.faults]:
            return f"seed {seed}, {setting}: {faults}; {run.text}"
    return None


def _difference(ours: Any, expected: Any) -> str | None:
    if isinstance(ours, dict) and isinstance(expected, dict):
        names = sorted(name for name in ours.keys() | expected.keys() if ours.get(name) != expected.get(name))
        # What is a working copy depends on the device.
        names = [one for one in names if not one.endswith("master") or (one in ours and one in expected)]
        return f"{names} differ" if names else None
    shown = ["..." if isinstance(one, dict) else one for one in (ours, expected)]
    return None if ours == expected else f"{shown[0]} instead of {shown[1]}"


def main() -> None:
    """Try programs, and end with 1 at the first one that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    wrong = 0
    for seed in range(arguments.first, arguments.first + arguments.programs):
        found = difference(seed, SETTINGS[seed % len(SETTINGS)])
        if found is not None:
            wrong += 1
            sys.stdout.write(found + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{arguments.programs} programs, {wrong} differ\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
