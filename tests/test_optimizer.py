"""Steps, speculation, verdicts and rollbacks, one case at a time; test_transaction.py mixes them in any order."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from visible import bits, give_gradients, parameter, parameters_of, refused, shown, state_bits, train, visible

from superadam import SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(dtype: torch.dtype = torch.float32, **options: object) -> SpeculativeCPUAdam:
    return SpeculativeCPUAdam([parameter(70, dtype=dtype), parameter(3, 5, dtype=dtype, seed=1)], **options)


def speculate(optimizer: SpeculativeCPUAdam, seed: int, size: float = 1.0) -> None:
    give_gradients(optimizer, seed, size)
    optimizer.speculate()


# -- rollback ----------------------------------------------------------------------------------------------------------

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
    "after a speculated step": lambda optimizer: (speculate(optimizer, 1), optimizer.resolve(), None)[-1],
}


@EACH_DTYPE
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad switched on"])
def test_rollback_restores_every_bit(dtype: torch.dtype, spoil: str, history: str, amsgrad: bool) -> None:
    options = {"max_grad_norm": 1.0, "lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}
    optimizer, twin = make(dtype, **options), make(dtype, **options)
    for one in (optimizer, twin):
        HISTORIES[history](one)
    before = shown(optimizer)
    optimizer.param_groups[0]["amsgrad"] = amsgrad
    give_gradients(optimizer, 2)
    for one in parameters_of(optimizer):
        one.grad = SPOILS[spoil](one.grad)
    optimizer.speculate()
    assert shown(optimizer) != before
    optimizer.rollback()
    optimizer.param_groups[0]["amsgrad"] = False
    assert shown(optimizer) == before
    assert visible(optimizer) == visible(twin)  # so what was absent is absent again, max_exp_avg_sq too
    for one in (optimizer, twin):
        train(one, 3)
    assert visible(optimizer) == visible(twin)


def test_state_while_speculation_is_open_is_that_of_the_last_accepted_step() -> None:
    optimizer = make(torch.bfloat16)
    speculate(optimizer, 1)
    assert optimizer.state_dict()["state"] == {}
    assert not optimizer.state
    optimizer.resolve()
    before = visible(optimizer)["state"]
    speculate(optimizer, 2)
    assert visible(optimizer)["state"] == before
    assert optimizer.state[parameters_of(optimizer)[0]]["step"] == 1


def test_zero_grad_drops_open_speculation() -> None:
    for set_to_none in (True, False):
        optimizer = make()
        train(optimizer, 1)
        before = visible(optimizer)
        speculate(optimizer, 2)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert visible(optimizer) == before
        assert optimizer.statistics.dropped == 2


def test_rollback_and_commit_without_speculation_do_nothing() -> None:
    optimizer = make()
    optimizer.rollback()
    optimizer.commit()
    train(optimizer, 1)
    before = visible(optimizer)
    optimizer.rollback()
    optimizer.commit()
    assert visible(optimizer) == before


# -- pending gradients -------------------------------------------------------------------------------------------------


@EACH_DTYPE
def test_gradients_in_one_buffer_that_is_filled_again(dtype: torch.dtype) -> None:
    """As buckets of data-parallel training hold them: speculation keeps copies."""
    optimizer, twin = make(dtype), make(dtype)
    buffer = torch.zeros(85, dtype=dtype)
    for seed in range(3):
        give_gradients(twin, seed)
        views = [buffer[:70], buffer[70:].view(3, 5)]
        for one, other, view in zip(parameters_of(optimizer), parameters_of(twin), views, strict=True):
            one.grad = view.copy_(other.grad)
        optimizer.speculate()
        buffer.fill_(math.nan)
        optimizer.resolve()
        twin.step()
    twin.zero_grad()
    assert visible(optimizer) == visible(twin)


def test_gradient_written_to_after_speculation_is_refused() -> None:
    optimizer, twin = make(), make()
    give_gradients(optimizer, 1)
    held = parameters_of(optimizer)[1].grad
    optimizer.speculate()
    held.zero_()
    for use in (optimizer.resolve, optimizer.step):
        with refused(optimizer, RuntimeError, "gradient of parameter 1 of group 0 was written to after speculate"):
            use()
    optimizer.rollback()
    for one in (optimizer, twin):
        train(one, 2)
    assert visible(optimizer) == visible(twin)


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
    assert visible(optimizer) == visible(twin)
    assert optimizer.last_outcome is not None
    assert optimizer.last_outcome.kind is (StepKind.CLIPPED if limit in (0.5, 0.0) else StepKind.COMMITTED)


def test_second_gradient_while_open_is_refused() -> None:
    optimizer = make()
    speculate(optimizer, 1)
    shown_before = shown(optimizer)
    first, second = parameters_of(optimizer)
    second.grad = torch.ones_like(second)
    for again in (optimizer.speculate, optimizer.step, lambda: optimizer.speculate([second])):
        with refused(optimizer, RuntimeError, "parameter 1 of group 0 has a second gradient"):
            again()
        assert shown(optimizer) == shown_before
    second.grad = None
    optimizer.resolve()
    twin = make()
    train(twin, 1)
    assert visible(optimizer) == visible(twin)
    assert first.grad is None


@pytest.mark.parametrize("through", ["step", "resolve", "step of open speculation"])
def test_on_nonfinite_raise(through: str) -> None:
    optimizer = make(torch.bfloat16, on_nonfinite="raise")
    train(optimizer, 1)
    before = state_bits(optimizer)
    give_gradients(optimizer, 2)
    parameters_of(optimizer)[1].grad[0, 0] = math.inf
    if through != "step":
        optimizer.speculate()
    with pytest.raises(FloatingPointError, match="1 gradient elements are Inf or NaN"):
        (optimizer.resolve if through == "resolve" else optimizer.step)()
    assert state_bits(optimizer) == before
    assert optimizer.last_outcome is not None
    assert optimizer.last_outcome.kind is StepKind.SKIPPED
    assert optimizer.last_outcome.nonfinite == 1
    optimizer.zero_grad()
    train(optimizer, 3)
    assert optimizer.last_outcome.kind is StepKind.COMMITTED


def test_skipped_step_does_not_advance() -> None:
    optimizer = make()
    train(optimizer, 1)
    before = state_bits(optimizer)
    train(optimizer, 2, math.inf)
    assert state_bits(optimizer) == before
    assert optimizer.last_outcome is not None
    assert optimizer.last_outcome.nonfinite == 85


def test_resolve_without_speculation_is_a_step_without_gradients() -> None:
    optimizer = make(on_nonfinite="raise")
    give_gradients(optimizer, 1, math.nan)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    outcome = optimizer.resolve()
    assert (outcome.kind, outcome.grad_norm, outcome.nonfinite) == (StepKind.COMMITTED, 0.0, 0)


def test_statistics_count_steps_and_parameters() -> None:
    optimizer = make(max_grad_norm=1.0)
    train(optimizer, 1, 1e-3)
    train(optimizer, 2)
    train(optimizer, 3, math.nan)
    for size in (1e-3, 1.0, math.nan):
        speculate(optimizer, 4, size)
        optimizer.resolve()
    speculate(optimizer, 5)
    optimizer.rollback()
    counts = optimizer.statistics
    assert (counts.committed, counts.clipped, counts.skipped, counts.steps) == (2, 2, 2, 6)
    assert (counts.respeculated, counts.dropped) == (2, 4)
    seconds = [counts.norm_seconds, counts.update_seconds, counts.speculate_seconds, counts.resolve_seconds]
    assert min(*seconds, counts.commit_seconds) > 0


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
    optimizer, twin = make(dtype), make(dtype)
    for one in (optimizer, twin):
        train(one, 1)
    speculate(optimizer, 2)
    for one in (optimizer, twin):
        one.param_groups[0].update(change)
    (optimizer.step if through_step else optimizer.resolve)()
    train(twin, 2)
    assert shown(optimizer) == shown(twin)
    assert visible(optimizer) == visible(twin)
    assert optimizer.statistics.respeculated == 2


@EACH_DTYPE
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
def test_hyperparameters_changed_after_the_verdict_do_not(dtype: torch.dtype, change: dict) -> None:
    optimizer, twin = make(dtype), make(dtype)
    speculate(optimizer, 1)
    optimizer.resolve()  # accepted, not committed
    train(twin, 1)
    for one in (optimizer, twin):
        one.param_groups[0].update(change)
    assert visible(optimizer) == visible(twin)
    speculate(optimizer, 2)
    optimizer.resolve()
    train(twin, 2)
    assert visible(optimizer) == visible(twin)


def test_tensor_learning_rate_is_captured_by_value() -> None:
    optimizer, twin = make(lr=torch.tensor(0.01)), make(lr=torch.tensor(0.01))
    speculate(optimizer, 1)
    optimizer.resolve()
    train(twin, 1)
    for one in (optimizer, twin):
        one.param_groups[0]["lr"].fill_(0.5)  # as schedulers do
    speculate(optimizer, 2)  # commits the first step in the same pass
    train(twin, 2)
    assert shown(optimizer) == shown(twin)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.resolve()
    assert optimizer.statistics.respeculated == 2
    assert state_bits(optimizer)["state"] == state_bits(twin)["state"]  # lr is in the parameters alone
    assert shown(optimizer) != shown(twin)


def test_bad_hyperparameter_leaves_speculation_open() -> None:
    optimizer, twin = make(), make()
    speculate(optimizer, 1)
    optimizer.param_groups[0]["lr"] = math.nan
    for conclude in (optimizer.resolve, optimizer.step):
        with refused(optimizer, ValueError, "lr is nan"):
            conclude()
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.resolve()
    train(twin, 1)
    assert visible(optimizer) == visible(twin)


@pytest.mark.parametrize("gradient_dtypes", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_gradient_dtype_changes_between_steps(gradient_dtypes: tuple[int, int]) -> None:
    """An accepted gradient of another dtype cannot share the pass of the next one; the bits are the same."""
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    optimizer, twin = make(), make()
    for seed, index in enumerate(gradient_dtypes):
        for one in (optimizer, twin):
            give_gradients(one, seed)
            for p in parameters_of(one):
                p.grad_dtype = None  # torch then takes any dtype
                p.grad = p.grad.to(kinds[index])
        optimizer.speculate()
        optimizer.resolve()
        twin.step()
        twin.zero_grad()
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
        optimizer.resolve()
        train(twin, seed)
        assert optimizer.last_outcome == twin.last_outcome  # the norm is summed in the order of the groups
    assert visible(optimizer) == visible(twin)


def test_step_takes_the_gradients_that_are_left() -> None:
    optimizer, twin = make(max_grad_norm=1.0), make(max_grad_norm=1.0)
    give_gradients(optimizer, 1)
    optimizer.speculate([parameters_of(optimizer)[1]])
    assert parameters_of(optimizer)[0].grad is not None
    optimizer.step()
    train(twin, 1)
    assert visible(optimizer) == visible(twin)
    assert optimizer.last_outcome == twin.last_outcome


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


def test_no_gradient_at_all() -> None:
    optimizer = make()
    before = visible(optimizer)
    optimizer.step()
    optimizer.speculate()
    optimizer.resolve()
    assert visible(optimizer) == before
    assert optimizer.statistics.committed == 2


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
def test_clip_grad_norm_sets_the_limit_of_one_step(speculative: bool) -> None:
    optimizer, twin = make(), make(max_grad_norm=0.5)
    give_gradients(optimizer, 1)
    if speculative:
        optimizer.speculate([parameters_of(optimizer)[0]])
    norm = optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    train(twin, 1)
    assert twin.last_outcome is not None
    assert (norm.shape, norm.dtype, norm.item()) == ((), torch.float64, twin.last_outcome.grad_norm)
    assert visible(optimizer) == visible(twin)
    assert optimizer.last_outcome == twin.last_outcome
    train(optimizer, 2)
    assert optimizer.last_outcome.kind is StepKind.COMMITTED  # the limit was for one step


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
    optimizer = make()
    train(optimizer, 1)
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
    twin = make()
    train(twin, 1)
    train(twin, 2)
    assert state_bits(optimizer) == state_bits(twin)
