"""Steps, speculation, verdicts and rollbacks, one case at a time; test_transaction.py mixes them in any order."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import platform
from collections.abc import Callable

import pytest
import torch
from support.optimizers import DTYPES, EACH_DTYPE, train_alike, trained
from support.visible import (
    are_taken,
    bits,
    give_gradients,
    parameter,
    parameters_of,
    refused,
    shown,
    speculate,
    state_bits,
    train,
    visible,
)

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind


def make(dtype: torch.dtype = torch.float32, **options: object) -> SpeculativeCPUAdam:
    return SpeculativeCPUAdam([parameter(70, dtype=dtype), parameter(3, 5, dtype=dtype, seed=1)], **options)


# -- questions and rollback --------------------------------------------------------------------------------------------

SPOILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ordinary": lambda gradient: gradient,
    "Inf": lambda gradient: gradient.index_fill(-1, torch.tensor(1), math.inf),
    "NaN": lambda gradient: gradient.index_fill(-1, torch.tensor(2), math.nan),
    "denormal": lambda gradient: gradient.sign() * torch.finfo(gradient.dtype).smallest_normal / 4,
}
HISTORIES: dict[str, Callable[[SpeculativeCPUAdam], None]] = {
    "first step": lambda optimizer: None,
    "after a step": lambda optimizer: train(optimizer, 1, 1e-3),
    "after a clipped step": lambda optimizer: train(optimizer, 1),
    "after a speculated step": lambda optimizer: train(optimizer, 1, speculative=True),
}


def give_spoiled(optimizer: SpeculativeCPUAdam, seed: int, spoil: str) -> None:
    give_gradients(optimizer, seed)
    for one in parameters_of(optimizer):
        one.grad = SPOILS[spoil](one.grad)


@EACH_DTYPE
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad switched on"])
def test_speculation_is_invisible_and_rollback_gives_gradients_back(
    dtype: torch.dtype, spoil: str, history: str, amsgrad: bool
) -> None:
    options = {"max_grad_norm": 1.0, "lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}
    optimizer, twin = make(dtype, **options), make(dtype, **options)
    for one in (optimizer, twin):
        HISTORIES[history](one)
        one.param_groups[0]["amsgrad"] = amsgrad
        give_spoiled(one, 2, spoil)
    kept = shown(optimizer)
    optimizer.speculate()
    assert all(are_taken(optimizer))
    assert shown(optimizer) == kept
    assert visible(optimizer) == visible(twin)  # also what is absent: state, and max_exp_avg_sq
    assert all(are_taken(optimizer))
    optimizer.rollback()
    assert not any(are_taken(optimizer))
    assert all(type(one.grad) is torch.Tensor for one in parameters_of(optimizer))
    assert visible(optimizer) == visible(twin)
    for one in (optimizer, twin):
        one.step()
    assert visible(optimizer) == visible(twin)
    for one in (optimizer, twin):
        train(one, 3)
    assert visible(optimizer) == visible(twin)


QUESTIONS: dict[str, Callable[[SpeculativeCPUAdam], object]] = {
    "norm": lambda optimizer: optimizer.clip_grad_norm_(math.inf),
    "norm, twice": lambda optimizer: (optimizer.clip_grad_norm_(1.0), optimizer.clip_grad_norm_(math.inf)),
    "norm by torch": lambda optimizer: torch.nn.utils.get_total_norm([p.grad for p in parameters_of(optimizer)]),
    "torch's limit far away": lambda optimizer: torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 1e30),
    "state": lambda optimizer: dict(optimizer.state),
    "state_dict": SpeculativeCPUAdam.state_dict,
    "torch_state_dict": SpeculativeCPUAdam.torch_state_dict,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "commit": SpeculativeCPUAdam.commit,
    "repr": repr,
    "gradients": lambda optimizer: [(p.grad.sum().item(), str(p.grad), p.grad + 1) for p in parameters_of(optimizer)],
    "finite": lambda optimizer: [torch.isfinite(p.grad).all() for p in parameters_of(optimizer)],
    "speculate again": SpeculativeCPUAdam.speculate,
    "masters": SpeculativeCPUAdam.reload_masters,
}


@EACH_DTYPE
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("spoil", ["ordinary", "NaN"])
def test_questions_change_nothing(dtype: torch.dtype, question: str, spoil: str) -> None:
    """Above all: a NaN that was seen stays seen."""
    optimizer, twin = make(dtype, max_grad_norm=1.0), make(dtype, max_grad_norm=1.0)
    for seed in range(3):
        for one in (optimizer, twin):
            train(one, 2 * seed, speculative=one is optimizer)
            give_spoiled(one, 2 * seed + 1, spoil)
        optimizer.speculate()
        QUESTIONS[question](optimizer)
        assert all(are_taken(optimizer))
        QUESTIONS[question](twin)
        optimizer.resolve()
        twin.step()
        assert optimizer.last_outcome.kind is twin.last_outcome.kind
        if spoil == "NaN":
            assert optimizer.last_outcome.kind is StepKind.SKIPPED
        else:
            assert optimizer.last_outcome == twin.last_outcome
        assert visible(optimizer) == visible(twin)


def test_question_about_other_gradients_leaves_open_speculation_alone() -> None:
    """The norm is that of what is in `.grad` at that moment; what was speculated on can come back."""
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    speculate(optimizer, 2)
    handles = [one.grad for one in parameters_of(optimizer)]
    for one in parameters_of(optimizer):
        one.grad = torch.full_like(one, 3.0)
    assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(3.0 * 85**0.5)
    for one, handle in zip(parameters_of(optimizer), handles, strict=True):
        one.grad = handle
    optimizer.step()
    assert optimizer.statistics.accepted == 2
    optimizer.zero_grad()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)


def test_rollback_and_commit_without_speculation_do_nothing() -> None:
    optimizer = make()
    optimizer.rollback()
    optimizer.commit()
    train(optimizer, 1)
    before = visible(optimizer)
    optimizer.rollback()
    optimizer.commit()
    assert visible(optimizer) == before


# -- `.grad` decides ---------------------------------------------------------------------------------------------------


def _through_numpy(one: torch.Tensor) -> None:
    gradient = one.grad if one.grad.dtype != torch.bfloat16 else one.grad.view(torch.int16)
    gradient.numpy()[..., 0] = 0


GRADIENT_EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda one: setattr(one, "grad", None),
    "zero": lambda one: one.grad.zero_(),
    "replaced": lambda one: setattr(one, "grad", torch.full_like(one, 0.25)),
    "added": lambda one: setattr(one, "grad", operator.iadd(one.grad, 0.25)),
    "indexed": lambda one: operator.setitem(one.grad, (..., 0), 0.25),
    "halved": lambda one: one.grad.mul_(0.5),
    "third": lambda one: one.grad.div_(3.0),
    "product": lambda one: setattr(one, "grad", one.grad * 0.3),
    "many products": lambda one: one.grad.mul_(0.3).mul_(torch.tensor(0.7)).div_(1.1),
    "negated": lambda one: one.grad.neg_(),
    "through numpy": _through_numpy,
    "through data": lambda one: operator.setitem(one.grad.data, (..., 1), 0.25),
    "swapped": lambda one: setattr(one.grad, "data", torch.full_like(one, 0.25)),
    "backward": lambda one: (one * one).sum().backward(),
}


@EACH_DTYPE
@pytest.mark.parametrize("edit", GRADIENT_EDITS)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=str)
def test_gradients_edited_after_speculation_count(
    dtype: torch.dtype, edit: str, limit: float | None, which: list[int]
) -> None:
    optimizer, twin = make(dtype, max_grad_norm=limit), make(dtype, max_grad_norm=limit)
    for seed in range(3):
        for one in (optimizer, twin):
            give_gradients(one, seed, speculative=one is optimizer)
            for index in which:
                GRADIENT_EDITS[edit](parameters_of(one)[index])
        assert visible(optimizer)["gradients"] == visible(twin)["gradients"]
        optimizer.resolve()
        twin.step()
        assert shown(optimizer) == shown(twin)
        optimizer.zero_grad()
        twin.zero_grad()
    assert visible(optimizer) == visible(twin)


FORMS_OF_ZERO_GRAD: dict[str, Callable[[SpeculativeCPUAdam], None]] = {
    "to None": lambda optimizer: optimizer.zero_grad(),
    "to zero": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "by hand": lambda optimizer: [setattr(p, "grad", None) for p in parameters_of(optimizer)] and None,
    "zero_ by hand": lambda optimizer: [p.grad.zero_() for p in parameters_of(optimizer)] and None,
    "zeros": lambda optimizer: [setattr(p, "grad", torch.zeros_like(p)) for p in parameters_of(optimizer)] and None,
    "foreach": lambda optimizer: torch._foreach_zero_([p.grad for p in parameters_of(optimizer)]),
    "module": lambda optimizer: _module_of(optimizer).zero_grad(),
    "module, to zero": lambda optimizer: _module_of(optimizer).zero_grad(set_to_none=False),
}


def _module_of(optimizer: SpeculativeCPUAdam) -> torch.nn.Module:
    module = torch.nn.Module()
    for index, one in enumerate(parameters_of(optimizer)):
        module.register_parameter(f"p{index}", one)
    return module


@EACH_DTYPE
@pytest.mark.parametrize("form", FORMS_OF_ZERO_GRAD)
@pytest.mark.parametrize("goes_on", [False, True])
def test_step_after_zero_grad(dtype: torch.dtype, form: str, goes_on: bool) -> None:
    """No step without a gradient; one with zeros where they are zeros, as in torch: moments decay."""
    optimizer, twin = make(dtype), make(dtype)
    for seed in range(3):
        for one in (optimizer, twin):
            train(one, 2 * seed)
            give_gradients(one, 2 * seed + 1, speculative=one is optimizer)
            FORMS_OF_ZERO_GRAD[form](one)
            if goes_on:
                for p in parameters_of(one):
                    (p * 3).sum().backward()
            one.step()
        assert visible(optimizer) == visible(twin)
        assert optimizer.last_outcome == twin.last_outcome


@EACH_DTYPE
@pytest.mark.parametrize("between", ["nothing", "speculate", "rollback", "commit", "state"])
def test_step_twice_with_the_same_gradients(dtype: torch.dtype, between: str) -> None:
    optimizer, twin = make(dtype, max_grad_norm=5.0), make(dtype, max_grad_norm=5.0)
    for seed in range(3):
        speculate(optimizer, seed)
        give_gradients(twin, seed)
        for repeat in range(3):
            optimizer.step()
            twin.step()
            assert shown(optimizer) == shown(twin)
            assert optimizer.last_outcome == twin.last_outcome
            if repeat < 2 and between != "nothing":
                getattr(optimizer, between)() if between != "state" else dict(optimizer.state)
        assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_second_gradient_takes_the_place_of_the_first(dtype: torch.dtype) -> None:
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    speculate(optimizer, 2)
    speculate(optimizer, 3)
    optimizer.step()
    optimizer.zero_grad()
    train(twin, 3)
    assert visible(optimizer) == visible(twin)
    assert optimizer.statistics.dropped == optimizer.statistics.accepted == (2 if dtype == torch.bfloat16 else 0)


@EACH_DTYPE
def test_gradients_that_others_hold_are_left_alone(dtype: torch.dtype) -> None:
    """They may be written to at any time, and count as they are at the step."""
    optimizer, twin = make(dtype), make(dtype)
    for seed in range(3):
        for one in (optimizer, twin):
            give_gradients(one, seed)
            held = parameters_of(one)[1].grad
            if one is optimizer:
                one.speculate()
                assert are_taken(one) == [True, False]
                assert parameters_of(one)[1].grad is held
            held.mul_(2)
            one.step()
        assert visible(optimizer) == visible(twin)
        assert optimizer.last_outcome == twin.last_outcome


@EACH_DTYPE
@pytest.mark.parametrize("when", ["first", "second"])
def test_gradients_of_inference_mode(dtype: torch.dtype, when: str) -> None:
    optimizer, twin = make(dtype), make(dtype)
    for seed in range(4):
        for one in (optimizer, twin):
            with torch.inference_mode((seed % 2 == 0) is (when == "first")):
                give_gradients(one, seed)
            if one is optimizer:
                one.speculate()
                assert are_taken(one) == [(seed % 2 == 0) is not (when == "first")] * 2
            one.step()
        assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("reads", [SpeculativeCPUAdam.commit, SpeculativeCPUAdam.state_dict], ids=["commit", "read"])
def test_commit_leaves_the_norm_of_the_open_step_alone(dtype: torch.dtype, reads: Callable) -> None:
    """What is committed is the gradient of the step before, of a parameter that takes no part in the open one."""
    optimizer, twin = make(dtype, max_grad_norm=1e3), make(dtype, max_grad_norm=1e3)
    for one in (optimizer, twin):
        train(one, 0)
        train(one, 1, 10.0, speculative=one is optimizer)
        give_gradients(one, 2)
        parameters_of(one)[0].grad = None
    assert optimizer.statistics.accepted == 2
    optimizer.speculate()
    reads(optimizer)
    for one in (optimizer, twin):
        one.step()
    assert optimizer.last_outcome == twin.last_outcome
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_graphs(dtype: torch.dtype) -> None:
    """They are not taken, and neither is the graph that they belong to disturbed."""
    optimizer, twin = make(dtype), make(dtype)
    for _ in range(3):
        for one in (optimizer, twin):
            one.zero_grad()
            loss = sum((p * p * p).sum() for p in parameters_of(one))
            loss.backward(create_graph=True)
            if one is optimizer:
                one.speculate()
                assert not any(are_taken(one))
            penalty = sum(p.grad.square().sum() for p in parameters_of(one))
            penalty.backward()
            one.step()
        assert state_bits(optimizer) == state_bits(twin)


# -- verdicts ----------------------------------------------------------------------------------------------------------


@EACH_DTYPE
@pytest.mark.parametrize("limit", [None, math.inf, 0.5, 0.0])
def test_speculate_and_resolve_are_a_step(dtype: torch.dtype, limit: float | None) -> None:
    optimizer, twin = make(dtype, max_grad_norm=limit), make(dtype, max_grad_norm=limit)
    for seed in range(4):
        train(twin, seed)
        speculate(optimizer, seed)
        assert optimizer.resolve() == optimizer.last_outcome == twin.last_outcome
        assert shown(optimizer) == shown(twin)
        optimizer.zero_grad()
    assert visible(optimizer) == visible(twin)
    assert optimizer.last_outcome is not None
    assert optimizer.last_outcome.kind is (StepKind.CLIPPED if limit in (0.5, 0.0) else StepKind.COMMITTED)


@pytest.mark.parametrize("through", ["step", "resolve", "step of open speculation"])
def test_on_nonfinite_raise(through: str) -> None:
    optimizer = trained(make(torch.bfloat16, on_nonfinite="raise"), [1])
    before = state_bits(optimizer)
    give_gradients(optimizer, 2)
    parameters_of(optimizer)[1].grad[0, 0] = math.inf
    if through != "step":
        optimizer.speculate()
        assert all(are_taken(optimizer))
    for _ in range(2):  # the gradients are still there
        with pytest.raises(FloatingPointError, match="1 gradient elements are Inf or NaN"):
            (optimizer.resolve if through == "resolve" else optimizer.step)()
        assert state_bits(optimizer) == before
        assert optimizer.last_outcome is not None
        assert optimizer.last_outcome.kind is StepKind.SKIPPED
        assert optimizer.last_outcome.nonfinite == 1
    optimizer.zero_grad()
    train(optimizer, 3)
    assert optimizer.last_outcome.kind is StepKind.COMMITTED


@EACH_DTYPE
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("size", [math.inf, math.nan])
@pytest.mark.parametrize("has_state", [False, True])
def test_skipped_step_changes_nothing(dtype: torch.dtype, speculative: bool, size: float, has_state: bool) -> None:
    """Not even the number of steps; a first one leaves no state."""
    optimizer = make(dtype)
    if has_state:
        train(optimizer, 1)
    before = visible(optimizer)
    train(optimizer, 2, size, speculative=speculative)
    assert visible(optimizer) == before
    assert bool(optimizer.state_dict()["state"]) is has_state
    assert optimizer.last_outcome.nonfinite == 85


def test_resolve_without_speculation_is_a_step() -> None:
    optimizer, twin = make(on_nonfinite="raise"), make()
    give_gradients(optimizer, 1, math.nan)
    for conclude in (optimizer.step, optimizer.resolve):
        with pytest.raises(FloatingPointError):
            conclude()
    give_gradients(optimizer, 2)
    outcome = optimizer.resolve()
    optimizer.zero_grad()
    train(twin, 2)
    assert outcome == twin.last_outcome
    assert visible(optimizer) == visible(twin)
    outcome = optimizer.resolve()
    assert (outcome.kind, outcome.grad_norm, outcome.nonfinite) == (StepKind.COMMITTED, 0.0, 0)


def test_statistics_count_steps_and_parameters() -> None:
    """Only a working copy with state is speculated on, and the first step makes that state."""
    optimizer = make(torch.bfloat16, max_grad_norm=1.0)
    train(optimizer, 1, 1e-3, speculative=True)
    train(optimizer, 2)
    train(optimizer, 3, math.nan)
    counts = optimizer.statistics
    assert (counts.accepted, counts.respeculated, counts.dropped) == (0, 0, 0)
    for size in (1e-3, 1.0, math.nan):
        train(optimizer, 4, size, speculative=True)
    assert (counts.accepted, counts.respeculated, counts.dropped) == (2, 2, 2)
    speculate(optimizer, 5)
    optimizer.rollback()
    assert (counts.accepted, counts.respeculated, counts.dropped) == (2, 2, 4)
    assert (counts.committed, counts.clipped, counts.skipped, counts.steps) == (2, 2, 2, 6)
    seconds = [counts.norm_seconds, counts.update_seconds, counts.speculate_seconds, counts.resolve_seconds]
    assert min(*seconds, counts.commit_seconds) > 0


def _written(optimizer: SpeculativeCPUAdam) -> None:
    with torch.no_grad():
        parameters_of(optimizer)[0][0] = 7.0


FATES: dict[str, tuple[Callable[[SpeculativeCPUAdam], object], tuple[int, int, int]]] = {
    "accepted": (lambda optimizer: None, (2, 0, 0)),
    "one was written to": (_written, (1, 1, 0)),
    "one was written to, and the state read": (lambda optimizer: (_written(optimizer), optimizer.state), (0, 2, 0)),
    "learning rate": (lambda optimizer: optimizer.param_groups[0].update(lr=0.5), (0, 2, 0)),
    "limit": (lambda optimizer: optimizer.clip_grad_norm_(0.5), (0, 2, 0)),
    "torch's limit": (lambda optimizer: torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.5), (0, 2, 0)),
    "one without gradient": (lambda optimizer: GRADIENT_EDITS["none"](parameters_of(optimizer)[0]), (1, 0, 1)),
    "one was edited": (lambda optimizer: GRADIENT_EDITS["added"](parameters_of(optimizer)[0]), (1, 0, 1)),
    "one was replaced": (lambda optimizer: GRADIENT_EDITS["replaced"](parameters_of(optimizer)[0]), (1, 0, 1)),
    "one was scaled": (lambda optimizer: GRADIENT_EDITS["halved"](parameters_of(optimizer)[0]), (1, 1, 0)),
    "one is NaN": (lambda optimizer: parameters_of(optimizer)[0].grad.mul_(math.nan), (0, 0, 2)),
    "zero_grad": (SpeculativeCPUAdam.zero_grad, (0, 0, 2)),
    "rollback": (SpeculativeCPUAdam.rollback, (0, 0, 2)),
    "added group": (lambda optimizer: optimizer.add_param_group({"params": [parameter(3)]}), (0, 0, 2)),
    "loaded": (lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()), (0, 0, 2)),
}


@pytest.mark.parametrize("fate", FATES)
def test_statistics_tell_what_became_of_speculation(fate: str) -> None:
    happen, expected = FATES[fate]
    optimizer = trained(make(torch.bfloat16), [1])
    speculate(optimizer, 2)
    happen(optimizer)
    optimizer.step()
    counts = optimizer.statistics
    assert (counts.accepted, counts.respeculated, counts.dropped) == expected


# -- hyper-parameters between the parts of a step ----------------------------------------------------------------------

CHANGES = [
    {"lr": 0.05},
    {"betas": (0.5, 0.9)},
    {"eps": 1e-3},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"amsgrad": True},
    {"maximize": True},
]


@EACH_DTYPE
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
@pytest.mark.parametrize("through_step", [False, True], ids=["resolve", "step"])
def test_hyperparameters_changed_after_speculation_count(dtype: torch.dtype, change: dict, through_step: bool) -> None:
    optimizer, twin = trained(make(dtype), [1]), trained(make(dtype), [1])
    speculate(optimizer, 2)
    for one in (optimizer, twin):
        one.param_groups[0].update(change)
    (optimizer.step if through_step else optimizer.resolve)()
    optimizer.zero_grad()
    train(twin, 2)
    assert shown(optimizer) == shown(twin)
    assert visible(optimizer) == visible(twin)
    assert optimizer.statistics.respeculated == (2 if dtype in (torch.bfloat16, torch.float16) else 0)


@EACH_DTYPE
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
def test_hyperparameters_changed_after_the_verdict_do_not(dtype: torch.dtype, change: dict) -> None:
    optimizer, twin = make(dtype), make(dtype)
    for seed in range(2):  # the second step is accepted, not committed
        train(optimizer, seed, speculative=True)
        train(twin, seed)
    for one in (optimizer, twin):
        one.param_groups[0].update(change)
    assert visible(optimizer) == visible(twin)
    train_alike(optimizer, twin, 2)


def test_tensor_learning_rate_is_captured_by_value() -> None:
    optimizer, twin = (make(torch.bfloat16, lr=torch.tensor(0.01)) for _ in range(2))
    trained(optimizer, range(2), speculative=True)
    trained(twin, range(2))
    for one in (optimizer, twin):
        one.param_groups[0]["lr"].fill_(0.5)  # as schedulers do
    speculate(optimizer, 2)  # commits the second step in the same pass
    for one in (optimizer, twin):
        one.param_groups[0]["lr"].fill_(0.25)
    optimizer.resolve()
    optimizer.zero_grad()
    train(twin, 2)
    assert (optimizer.statistics.accepted, optimizer.statistics.respeculated) == (2, 2)
    assert visible(optimizer) == visible(twin)


def test_bad_hyperparameter_leaves_speculation_open() -> None:
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    speculate(optimizer, 2)
    optimizer.param_groups[0]["lr"] = math.nan
    for conclude in (optimizer.resolve, optimizer.step, optimizer.speculate, lambda: optimizer.clip_grad_norm_(1.0)):
        before = state_bits(optimizer)
        with pytest.raises(ValueError, match="lr is nan"):
            conclude()
        assert state_bits(optimizer) == before
        assert all(are_taken(optimizer))
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.resolve()
    assert optimizer.statistics.respeculated == 2  # because the state was looked at
    optimizer.zero_grad()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient_dtypes", [(0, 1, 0), (1, 0, 1), (1, 2, 0), (2, 1, 1)])
def test_gradient_dtype_changes_between_steps(dtype: torch.dtype, gradient_dtypes: tuple[int, ...]) -> None:
    """An accepted gradient of another dtype cannot share the pass of the next one; the bits are the same."""
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    optimizer, twin = make(dtype), make(dtype)
    for seed, index in enumerate(gradient_dtypes):
        for one in (optimizer, twin):
            give_gradients(one, seed)
            for p in parameters_of(one):
                p.grad_dtype = None  # torch then takes any dtype
                p.grad = p.grad.to(kinds[index])
        optimizer.speculate()
        assert all(are_taken(optimizer))
        optimizer.resolve()
        twin.step()
        twin.zero_grad()
        optimizer.zero_grad()
    assert visible(optimizer) == visible(twin)


# -- which parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_speculation_on_parameters_in_any_order(order: list[int]) -> None:
    def three() -> SpeculativeCPUAdam:
        return SpeculativeCPUAdam([parameter(5000, seed=i, dtype=DTYPES[i]) for i in range(3)], max_grad_norm=1.0)

    optimizer, twin = three(), three()
    for seed in range(3):
        give_gradients(optimizer, seed)
        for index in order:
            optimizer.speculate(iter([parameters_of(optimizer)[index]]))
        assert all(are_taken(optimizer))
        optimizer.resolve()
        optimizer.zero_grad()
        train(twin, seed)
        assert optimizer.last_outcome == twin.last_outcome  # the norm is summed in the order of the groups
    assert visible(optimizer) == visible(twin)


def test_foreign_parameter_is_refused() -> None:
    optimizer = make()
    give_gradients(optimizer, 1)
    with refused(optimizer, ValueError, "a parameter that is in no group"):
        optimizer.speculate([parameters_of(optimizer)[0], parameter(3)])
    optimizer.step()
    assert optimizer.last_outcome is not None


def test_parameters_without_gradients_and_frozen_ones_stay() -> None:
    frozen = parameter(4, seed=5).requires_grad_(False)
    optimizer = SpeculativeCPUAdam([parameter(70), frozen, parameter(6, seed=2)])
    live, _, sometimes = parameters_of(optimizer)
    for seed, speculative in enumerate([False, True, False, True]):
        give_gradients(optimizer, seed)
        if seed in (0, 3):
            sometimes.grad = None
        before = bits(sometimes)
        if speculative:
            optimizer.speculate()
            optimizer.resolve()
        else:
            optimizer.step()
        assert (bits(sometimes) == before) is (seed in (0, 3))
        optimizer.zero_grad()
    assert bits(frozen) == bits(parameter(4, seed=5))
    assert frozen not in optimizer.state
    assert (optimizer.state[live]["step"], optimizer.state[sometimes]["step"]) == (4, 2)


@pytest.mark.slow
def test_thousands_of_tiny_parameters() -> None:
    """3000 parameters of one element make the steps of one parameter of 3000."""
    whole = SpeculativeCPUAdamW([parameter(3000)])
    pieces = SpeculativeCPUAdamW([torch.nn.Parameter(piece) for piece in parameter(3000).detach().clone().split(1)])
    for seed in range(2):
        give_gradients(whole, seed)
        for one, piece in zip(parameters_of(pieces), parameters_of(whole)[0].grad.split(1), strict=True):
            one.grad = piece.clone()
        whole.step()
        pieces.step()
    assert bits(torch.cat([one.detach() for one in parameters_of(pieces)])) == bits(parameters_of(whole)[0])


# -- the limit of the norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_clip_grad_norm_sets_the_limit_of_one_step(speculative: bool, limit: float) -> None:
    optimizer, twin = make(), make(max_grad_norm=limit)
    for one in (optimizer, twin):
        give_gradients(one, 1)
    if speculative:
        optimizer.speculate([parameters_of(optimizer)[0]])
        assert are_taken(optimizer) == [True, False]
    norm = optimizer.clip_grad_norm_(limit)
    for one in (optimizer, twin):
        one.step()
    assert (norm.shape, norm.dtype, norm.item()) == ((), torch.float64, twin.last_outcome.grad_norm)
    assert visible(optimizer) == visible(twin)
    assert optimizer.last_outcome == twin.last_outcome
    assert optimizer.resolve().kind is StepKind.COMMITTED


def test_norm_is_of_the_gradients_that_are_there() -> None:
    """One that was speculated on and then dropped has a part in neither the answer nor the verdict."""
    optimizer, twin = make(), make()
    for one in (optimizer, twin):
        give_gradients(one, 1, speculative=one is optimizer)
        parameters_of(one)[1].grad = None
    assert optimizer.clip_grad_norm_(0.5).item() == twin.clip_grad_norm_(0.5).item()
    optimizer.step(), twin.step()
    assert optimizer.last_outcome == twin.last_outcome
    assert visible(optimizer) == visible(twin)


@EACH_DTYPE
@pytest.mark.parametrize("limit", [None, 0.5, 5.0])
@pytest.mark.parametrize("torchs", [0.3, 3.0, 1e9])
@pytest.mark.parametrize("foreach", [False, True])
def test_limits_of_torch_and_of_the_optimizer(
    dtype: torch.dtype, limit: float | None, torchs: float, foreach: bool
) -> None:
    """Both act, one after the other, as on gradients that were not taken."""
    optimizer, twin = make(dtype, max_grad_norm=limit), make(dtype, max_grad_norm=limit)
    for seed in range(4):
        coefficients = []
        for one in (optimizer, twin):
            give_gradients(one, seed, 0.1 if seed == 3 else 1.0, speculative=one is optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters_of(one), torchs, foreach=foreach)
            coefficients.append(min(1.0, torchs / (norm.double().item() + 1e-6)))
            one.step()
        assert visible(optimizer) == visible(twin)
        assert coefficients[0] == coefficients[1]
        told, plain = optimizer.last_outcome, twin.last_outcome
        assert told is not None
        assert plain is not None
        assert told.clip_coefficient == pytest.approx(coefficients[0] * plain.clip_coefficient, rel=1e-2)
        assert told.kind is (StepKind.CLIPPED if told.clip_coefficient != 1.0 else StepKind.COMMITTED)
        if coefficients[0] == 1.0:
            assert told == plain
        else:
            assert told.grad_norm == pytest.approx(plain.grad_norm / coefficients[0], rel=1e-2)


@EACH_DTYPE
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("factors", [(0.5, 0.25), (0.3, 0.7), (1.0, 0.1), (2.0, 3.0), (0.0, 1.0)], ids=str)
def test_factors_of_each_layer(dtype: torch.dtype, limit: float | None, factors: tuple[float, float]) -> None:
    """Such as layer-wise learning rates that users put into gradients; no one number tells them."""
    optimizer, twin = make(dtype, max_grad_norm=limit), make(dtype, max_grad_norm=limit)
    for seed in range(3):
        for one in (optimizer, twin):
            give_gradients(one, seed, speculative=one is optimizer)
            for p, factor in zip(parameters_of(one), factors, strict=True):
                p.grad.mul_(factor)
            one.step()
        assert visible(optimizer) == visible(twin)
        told, plain = optimizer.last_outcome, twin.last_outcome
        if limit is None and factors in ((0.3, 0.7), (1.0, 0.1)):
            # Nothing depends on the norm then, and that of products is told without reading the gradients again.
            assert (told.kind, told.clip_coefficient, told.nonfinite) == (plain.kind, 1.0, 0)
            assert told.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2 if dtype.itemsize == 2 else 1e-7)
        else:
            assert told == plain


@pytest.mark.parametrize("speculative", [False, True])
def test_outcome_tells_the_whole_coefficient(speculative: bool) -> None:
    """Of exact numbers: gradients of norm 8, which torch clips to about 4, and the optimizer to 1."""
    optimizer = SpeculativeCPUAdam([torch.nn.Parameter(torch.zeros(64))], max_grad_norm=1.0)
    (one,) = parameters_of(optimizer)
    one.grad = torch.ones(64)
    if speculative:
        optimizer.speculate()
    torch.nn.utils.clip_grad_norm_([one], 4.0)
    optimizer.step()
    outcome = optimizer.last_outcome
    assert outcome is not None
    assert outcome.kind is StepKind.CLIPPED
    if speculative:
        assert outcome.grad_norm == 8.0
        assert outcome.clip_coefficient == pytest.approx(1 / 8, rel=1e-5)
    else:  # only what it did itself
        assert outcome.grad_norm == pytest.approx(4.0, rel=1e-5)
        assert outcome.clip_coefficient == pytest.approx(1 / 4, rel=1e-5)


if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here

    @pytest.mark.usefixtures("one_torch_thread")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("when", ["never", "speculate, clip", "clip, speculate"])
    def test_clipping_by_torch_has_the_bits_of_torch(dtype: torch.dtype, when: str) -> None:
        """A working copy has those of the fp32 run with the same gradients, rounded."""
        options = {"lr": 0.1, "weight_decay": 0.1}
        optimizer = SpeculativeCPUAdamW([parameter(64, dtype=dtype), parameter(16, 12, dtype=dtype, seed=1)], **options)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        copies = [torch.nn.Parameter(p.detach().to(wide, copy=True)) for p in parameters_of(optimizer)]
        reference = torch.optim.AdamW(copies, fused=True, **options)
        for seed in range(5):
            give_gradients(optimizer, seed)
            plain = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters_of(optimizer)]
            for p, one in zip(parameters_of(optimizer), plain, strict=True):
                one.grad = p.grad.clone()
            if when == "speculate, clip":
                optimizer.speculate()
            for params in (plain, parameters_of(optimizer)):
                torch.nn.utils.clip_grad_norm_(params, 0.7)
            if when == "clip, speculate":
                optimizer.speculate()
            assert are_taken(optimizer) == [when != "never"] * 2
            for one, copied in zip(plain, copies, strict=True):
                copied.grad = one.grad.to(wide)
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            assert shown(optimizer) == [bits(copied.to(dtype)) for copied in copies]


def test_zero_grad_forgets_the_limit_of_the_step_that_never_came() -> None:
    optimizer = make()
    give_gradients(optimizer, 1)
    optimizer.clip_grad_norm_(0.5)
    optimizer.zero_grad()
    train(optimizer, 1)
    assert optimizer.last_outcome is not None
    assert optimizer.last_outcome.kind is StepKind.COMMITTED


BAD_LIMITS = [-1.0, math.nan, -math.inf, "one", 1j, torch.ones(2)]


@pytest.mark.parametrize("value", BAD_LIMITS, ids=str)
def test_bad_limit_is_refused(value: object) -> None:
    optimizer = make(max_grad_norm=2.0)
    with refused(optimizer, ValueError, "max_grad_norm is .*expected a number of at least 0"):
        optimizer.max_grad_norm = value
    with refused(optimizer, ValueError, "max_norm is .*expected a number of at least 0"):
        optimizer.clip_grad_norm_(value)
    with pytest.raises(ValueError, match="max_grad_norm is"):
        make(max_grad_norm=value)
    assert optimizer.max_grad_norm == 2.0


@pytest.mark.parametrize("value", ["ignore", None, True, 3])
def test_bad_on_nonfinite_is_refused(value: object) -> None:
    optimizer = make()
    with refused(optimizer, ValueError, "expected 'skip' or 'raise'"):
        optimizer.on_nonfinite = value
    with pytest.raises(ValueError, match="on_nonfinite"):
        make(on_nonfinite=value)
    assert optimizer.on_nonfinite == "skip"


# -- hyper-parameters --------------------------------------------------------------------------------------------------

BAD_VALUES = {
    "lr": [-1.0, math.nan, math.inf, "high", None, torch.ones(2), torch.tensor(math.nan)],
    "betas": [(1.0, 0.9), (0.9, -0.1), (math.nan, 0.9), 0.9, (0.9,), (0.9, 0.9, 0.9), None, ("a", "b")],
    "eps": [-1e-8, math.nan, math.inf, None, [1]],
    "weight_decay": [-0.1, math.nan, math.inf, None, 1j],
}
BAD_PAIRS = [(key, value) for key, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(("key", "value"), BAD_PAIRS, ids=str)
def test_bad_hyperparameter_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"expected|must be"):
        make(**{key: value})
    optimizer = trained(make(), [1])
    give_gradients(optimizer, 2)
    with refused(optimizer, ValueError, r"expected|must be"):
        optimizer.add_param_group({"params": [parameter(3)], key: value})
    good = optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value  # as schedulers do; noticed by whatever needs it next
    before = state_bits(optimizer)
    for use in (optimizer.step, optimizer.speculate, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="expected"):
            use()
    assert state_bits(optimizer) == before
    optimizer.param_groups[0][key] = good
    optimizer.step()
    twin = trained(make(), [1, 2])
    assert state_bits(optimizer) == state_bits(twin)


def test_saving_a_state_that_is_held_does_not_end_that_edits_count() -> None:
    optimizer, twin = make(), make()
    for one in (optimizer, twin):
        train(one, 1)
        entry = one.state[parameters_of(one)[0]]
        if one is optimizer:
            one.state_dict()
        entry["exp_avg"] = torch.full((70,), 0.5)
        train(one, 2)
    assert visible(optimizer) == visible(twin)
