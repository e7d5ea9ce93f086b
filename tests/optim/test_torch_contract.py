"""What scripts and frameworks expect of anything that calls itself a `torch.optim.Optimizer`."""

import contextlib
import copy
import functools
import math
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.optimizers import EACH_DTYPE, EACH_PAIR, make, through_disk, trained
from support.visible import bits, give_gradients, parameter, parameters_of, refused, state_bits, train, visible
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from superadam import SpeculativeCPUAdamW


@EACH_PAIR
def test_groups_defaults_and_text_are_those_of_torch(ours: type, theirs: type) -> None:
    options = {"lr": 0.5, "betas": (torch.tensor(0.5), torch.tensor(0.75)), "weight_decay": 0.5}
    optimizer, reference = make(cls=ours, **options), make(cls=theirs, **options)
    assert optimizer.defaults == reference.defaults
    assert repr(optimizer).replace(ours.__name__, theirs.__name__) == repr(reference)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert visible(optimizer) == visible(reference)


@EACH_PAIR
def test_named_parameters(ours: type, theirs: type) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer, reference = ours(model.named_parameters()), theirs(model.named_parameters())
    assert optimizer.state_dict() == reference.state_dict()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    with refused(optimizer, ValueError, "with/without names"):
        optimizer.add_param_group({"params": [parameter(3)]})
    optimizer.add_param_group({"params": [("late", parameter(3))]})
    assert optimizer.param_groups[1]["param_names"] == ["late"]


REFUSED_BY_TORCH: dict[str, tuple[Callable[[type], Any], type[Exception]]] = {
    "a tensor": (lambda cls: cls(parameter(3)), TypeError),
    "nothing": (lambda cls: cls([]), ValueError),
    "a set": (lambda cls: cls([{"params": {parameter(3)}}]), TypeError),
    "numbers": (lambda cls: cls([3.0]), TypeError),
    "strings": (lambda cls: cls(["weight"]), TypeError),
    "not a leaf": (lambda cls: cls([parameter(3) * 2]), ValueError),
    "both implementations": (lambda cls: make(cls=cls, foreach=True, fused=True), RuntimeError),
    "a group that is no dict": (lambda cls: make(cls=cls).add_param_group([parameter(3)]), TypeError),
}


@EACH_PAIR
@pytest.mark.parametrize("what", REFUSED_BY_TORCH)
def test_refused_as_torch_refuses(ours: type, theirs: type, what: str) -> None:
    attempt, error = REFUSED_BY_TORCH[what]
    with pytest.raises(error) as reference:
        attempt(theirs)
    with pytest.raises(error) as caught:
        attempt(ours)
    assert str(caught.value).startswith(str(reference.value).rstrip("."))


@pytest.mark.parametrize("key", ["capturable", "differentiable"])
def test_options_that_cannot_be_are_refused(key: str) -> None:
    with pytest.raises(RuntimeError, match=f"{key}=True is not possible, because .*; leave it False"):
        make(**{key: True})
    optimizer = make()
    with refused(optimizer, RuntimeError, f"{key}=True is not possible"):
        optimizer.add_param_group({"params": [parameter(3)], key: True})


def test_ctrl_c_leaves_no_group_unchecked() -> None:
    class Interrupted(np.float64):
        def __float__(self) -> float:
            signal.raise_signal(signal.SIGINT)
            return -1.0

    optimizer = make()
    before = visible(optimizer)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.add_param_group({"params": [parameter(3)], "lr": Interrupted()})
    assert "Invalid learning rate: -1.0" in str(caught.value.__context__)
    assert visible(optimizer) == before


@EACH_PAIR
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_that_are_not_trained(ours: type, theirs: type, dtype: torch.dtype) -> None:
    def ends(cls: Any) -> tuple[list[Any], list[Any]]:
        optimizer = make(cls=cls, fused=True)
        quantized = torch.nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
        optimizer.add_param_group({"params": [quantized, parameter(3)]})
        for seed in range(3):
            quantized.data = torch.full((3,), seed).to(dtype)
            train(optimizer, seed)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        quantized.grad_dtype = None  # any
        told = f"parameter 0 of group 1 is {dtype} and has a gradient, expected no"
        for gradient in (torch.ones(3), torch.ones(3).to(dtype)) if cls is ours else ():
            quantized.grad = gradient
            for call in (optimizer.step, optimizer.speculate):
                with refused(optimizer, TypeError, told):
                    call()
        return [one.tolist() for one in parameters_of(optimizer)], sorted(optimizer.state_dict()["state"])

    assert ends(ours) == ends(theirs)


@EACH_PAIR
def test_step_hooks(ours: type, theirs: type) -> None:
    def heard(cls: type) -> list[Any]:
        optimizer, calls = make(cls=cls), []

        def hook(name: str) -> Callable[..., None]:
            return lambda opt, args, kwargs: calls.append(
                (name, opt is optimizer, args[1:], sorted(kwargs), bits(parameters_of(opt)[0]) == before)
            )

        handles = [
            register_optimizer_step_pre_hook(hook("everywhere before")),
            register_optimizer_step_post_hook(hook("everywhere after")),
            optimizer.register_step_pre_hook(hook("before")),
            optimizer.register_step_post_hook(hook("after")),
        ]
        for arguments in ({}, {"closure": lambda: 3.0}):
            give_gradients(optimizer, 1)
            before = bits(parameters_of(optimizer)[0])
            calls.append(optimizer.step(**arguments))
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.step(closure=lambda: optimizer.register_step_post_hook(hook("from now on")) and 3.0)
        return calls

    assert heard(ours) == heard(theirs)
    assert len(heard(ours)) == 11


@EACH_PAIR
def test_hook_that_the_step_of_a_subclass_registers(ours: type, theirs: type) -> None:
    def heard(cls: Any) -> list[bool]:
        class Late(cls):  # type: ignore[misc]
            def step(self) -> None:
                if not calls:
                    self.register_step_post_hook(lambda opt, *_: calls.append(opt is optimizer))
                super().step()

        optimizer, calls = make(cls=cls) and make(cls=Late), []
        optimizer.step()
        return calls

    assert heard(ours) == heard(theirs) == [True, True]  # one of them by the class above, which has a wrapper as well


def test_step_pre_hook_that_changes_the_arguments() -> None:
    optimizer = make()
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: 5.0), {}))
    assert optimizer.step() == 5.0


@EACH_PAIR
def test_profilers_see_steps_and_zero_grad(ours: type, theirs: type) -> None:
    def seen(cls: type) -> list[str]:
        optimizer = make(cls=cls)
        optimizer.step()  # that nothing looks at
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            optimizer.step()  # without gradients, and with them
            give_gradients(optimizer, 1)
            optimizer.step()
            optimizer.zero_grad()
        return [event.name for event in profiler.events() if event.name.startswith("Optimizer.")]

    for cls in (ours, theirs):
        assert seen(cls) == [f"Optimizer.{name}#{cls.__name__}.{name}" for name in ("step", "step", "zero_grad")]


def test_wrappers_of_the_class_are_called() -> None:
    """Frameworks wrap `step` of a class before or after its first instance, with all that `functools.wraps` copies."""
    calls = []

    class Sub(SpeculativeCPUAdamW): ...

    def wrap(name: str) -> None:
        plain = Sub.step

        @functools.wraps(plain)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return plain(self, *args, **kwargs)

        Sub.step = step

    for name in ("first", "second"):
        wrap(name)
        copy.deepcopy(make(cls=Sub)).step()
        pickle.loads(pickle.dumps(SpeculativeCPUAdamW([parameter(3)]))).step()
    assert calls == ["first", "second", "first"]


def test_step_hook_sees_the_step_that_it_follows() -> None:
    optimizer, seen = make(dtype=torch.bfloat16), []
    optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(int(optimizer.state[parameters_of(optimizer)[0]]["step"]))
    )
    for seed in range(3):
        train(optimizer, seed)
    give_gradients(optimizer, 3, speculative=True)
    optimizer.step()
    assert seen == [1, 2, 3, 4]


@EACH_PAIR
def test_state_dict_hooks(ours: type, theirs: type) -> None:
    """Methods are called as torch's checkpoints do, which name `self`."""

    def heard(cls: Any) -> list[Any]:
        optimizer, calls = make(cls=cls), []
        train(optimizer, 1)
        saved = cls.state_dict(self=optimizer)
        optimizer.register_state_dict_pre_hook(lambda opt: calls.append(("before saving", opt is optimizer)))
        optimizer.register_state_dict_post_hook(
            lambda opt, made: (calls.append(("after saving", sorted(made))), {**made, "more": 1})[1]
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda opt, given: (calls.append(("before loading", sorted(given))), {**given, "param_groups": groups})[1]
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda opt, given: (calls.append("earlier"), given.update(earlier=1))[1], prepend=True
        )
        optimizer.register_load_state_dict_post_hook(
            lambda opt: calls.append(("after loading", opt.param_groups[0]["lr"], len(opt.state)))
        )
        groups = copy.deepcopy(saved["param_groups"])
        groups[0]["lr"] = 0.75
        calls.append(sorted(optimizer.state_dict()))
        cls.load_state_dict(self=optimizer, state_dict=saved)
        calls.append(sorted(saved))
        train(optimizer, 2)
        optimizer.register_state_dict_post_hook(lambda opt, made: {"instead": len(made)})
        calls.append(optimizer.state_dict())
        return calls

    assert heard(ours) == heard(theirs)
    assert ("after loading", 0.75, 2) in heard(ours)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_closure(mode: Callable[[], Any]) -> None:
    """Frameworks run forward and backward inside; gradients are on there, as long as the outer mode lets them."""
    optimizer, twin = make(), make()

    def closure() -> float:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        with torch.inference_mode(False):
            loss = sum(p.square().sum() for p in parameters_of(optimizer))
            loss.backward()
            return float(loss.detach())

    for _ in range(2):
        expected = float(sum(p.detach().square().sum() for p in parameters_of(twin)))
        for p in parameters_of(twin):
            p.grad = 2 * p.detach()
        twin.step()
        with mode():
            assert optimizer.step(closure) == expected
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("is_stepped_there", [False, True])
def test_modes_without_autograd(dtype, mode, speculative, is_stepped_there):
    """State made inside inference mode, or from gradients made there, can be used outside."""
    optimizer, twin = make(dtype=dtype), make(dtype=dtype)

    for seed in range(3):
        inner = mode if seed != 1 else contextlib.nullcontext
        with inner():
            give_gradients(optimizer, seed)
        with inner() if is_stepped_there else contextlib.nullcontext():
            if speculative:
                optimizer.speculate()
            optimizer.step()
            assert len(optimizer.state) == 2
        optimizer.zero_grad()
        train(twin, seed)
        for one in (optimizer, twin):
            with torch.no_grad():
                parameters_of(one)[0][seed] = 7.0
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.parametrize("is_speculated", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e3], ids=["accepted", "clipped"])
def test_autograd_notices_that_parameters_changed(dtype: torch.dtype, is_speculated: bool, size: float) -> None:
    optimizer = make(dtype=dtype, max_grad_norm=100.0)
    p = parameters_of(optimizer)[0]
    train(optimizer, 1)
    give_gradients(optimizer, 2, size, speculative=is_speculated)
    y = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@EACH_DTYPE
def test_graphs_made_before_and_during_speculation_stay_valid(dtype: torch.dtype) -> None:
    """Nothing is written before the step: not by speculation, and not by a rollback, a question or a skipped step."""
    optimizer, twin = trained(make(dtype=dtype), [1]), trained(make(dtype=dtype), [1])
    p, q = parameters_of(optimizer)[0], parameters_of(twin)[0]
    graphs = [(p * p * p).sum()]
    give_gradients(optimizer, 2, math.nan, speculative=True)
    graphs.append((p * p).sum())
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    graphs.append((p * 3).sum())
    optimizer.rollback()
    assert type(p.grad) is torch.Tensor  # given back
    version = p._version
    optimizer.zero_grad()
    for graph in (*graphs, (q * q * q).sum(), (q * q).sum(), (q * 3).sum()):
        graph.backward()
    assert p._version == version
    assert bits(p.grad) == bits(q.grad)
    assert visible(optimizer)["state"] == visible(twin)["state"]


def test_compiled_step() -> None:
    optimizer, twin = make(), make()
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(2):
        for one, call in ((optimizer, step), (twin, twin.step)):
            give_gradients(one, seed)
            call()
    assert visible(optimizer) == visible(twin)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "torch.save": lambda optimizer: through_disk(optimizer, weights_only=False),
}

STORAGES = {
    "fp32": {"amsgrad": True},
    "bf16": {"moments": "bf16", "master": "24bit", "amsgrad": True},
    "8 bits": {"moments": "8bit", "master": "24bit"},
}


@EACH_DTYPE
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("history", ["new", "stepped", "accepted", "exposed", "scheduled"])
@pytest.mark.parametrize("storage", STORAGES)
def test_copies_continue_alike(dtype: torch.dtype, how: str, history: str, storage: str) -> None:
    made = [parameter(70, dtype=dtype), parameter(2, 64, dtype=dtype, seed=1)]
    optimizer = SpeculativeCPUAdamW(made, max_grad_norm=2.0, on_nonfinite="raise", **STORAGES[storage])
    optimizer.register_step_pre_hook(lambda *ignored: None)  # hooks stay behind, as in torch
    if history == "scheduled":
        lr_scheduler.StepLR(optimizer, 1)
    if history != "new":
        train(optimizer, 1, speculative=history == "accepted")
    if history == "exposed":
        assert optimizer.state
    other = COPIES[how](optimizer)
    assert type(other) is type(optimizer)
    assert [key for key in dir(other) if key[0] != "_"] == [key for key in dir(optimizer) if key[0] != "_"]
    assert repr(other) == repr(optimizer)
    assert other.defaults == optimizer.defaults
    assert (other.max_grad_norm, other.on_nonfinite) == (2.0, "raise")
    assert (other.moments, other.master) == (optimizer.moments, optimizer.master)
    assert (other.statistics, other.last_outcome) == (optimizer.statistics, optimizer.last_outcome)
    assert visible(other) == visible(optimizer)
    train(other, 2)
    if history != "new":
        assert visible(other) != visible(optimizer)  # they share nothing
    train(optimizer, 2)
    assert visible(other) == visible(optimizer)


@pytest.mark.parametrize("key", ["", "param_groups", "state"])
def test_what_a_pickle_lacks_stays(key: str) -> None:
    optimizer = SpeculativeCPUAdamW([parameter(7)])
    train(optimizer, 1)
    before = state_bits(optimizer)
    optimizer.__setstate__({key: getattr(optimizer, key)} if key else {})
    assert state_bits(optimizer) == before


def test_steps_of_other_threads_wait_for_a_copy() -> None:
    optimizer = make(max_grad_norm=1e9)
    train(optimizer, 1)
    with ThreadPoolExecutor(1) as others:

        class Copied:
            def __deepcopy__(self, memo: dict[int, Any]) -> None:
                with pytest.raises(TimeoutError):
                    others.submit(train, optimizer, 2).result(timeout=0.1)

        optimizer.param_groups[0]["name"] = Copied()
        copied = copy.deepcopy(optimizer)
    assert copied.state[parameters_of(copied)[-1]]["step"] == 1
    assert optimizer.state[parameters_of(optimizer)[-1]]["step"] == 2


def test_limits_and_outcomes_are_shared_by_copies_of_the_attributes_alone() -> None:
    """As Lightning makes them: an object of a subclass, with the optimizer's `__dict__`."""
    optimizer = make(max_grad_norm=1e9)
    wrapped = copy.copy(optimizer.__dict__)
    other = SpeculativeCPUAdamW.__new__(SpeculativeCPUAdamW)
    other.__dict__ = wrapped
    other.max_grad_norm = 0.5
    other.clip_grad_norm_(0.25)
    train(other, 1)
    assert optimizer.max_grad_norm == 0.5
    assert optimizer.last_outcome is other.last_outcome
    assert optimizer.last_outcome.clip_coefficient < 1.0
    assert visible(optimizer) == visible(other)
    copy.deepcopy(optimizer).max_grad_norm = 2.0
    assert optimizer.max_grad_norm == 0.5
