"""Steps, speculation, verdicts and rollbacks, one case at a time; test_transaction.py mixes them in any order."""

import copy
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import EACH_DTYPE, trained
from support.visible import are_taken, give_gradients, parameter, parameters_of, refused, state_bits, train, visible

from superadam import OffloadScheduler, SpeculativeCPUAdam, SpeculativeCPUAdamW, StepKind


def make(dtype: torch.dtype = torch.float32, **options: object) -> SpeculativeCPUAdam:
    return SpeculativeCPUAdam([parameter(70, dtype=dtype), parameter(3, 5, dtype=dtype, seed=1)], **options)


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
@pytest.mark.parametrize("is_spoiled", [False, True])
def test_questions_change_nothing(dtype: torch.dtype, question: str, is_spoiled: bool) -> None:
    """Above all: a NaN that was seen stays seen."""
    optimizer, twin = make(dtype, max_grad_norm=1.0), make(dtype, max_grad_norm=1.0)
    for seed in range(3):
        for one in (optimizer, twin):
            train(one, 2 * seed, speculative=one is optimizer)
            give_gradients(one, 2 * seed + 1)
            for p in parameters_of(one) if is_spoiled else ():
                p.grad.view(-1)[2] = math.nan
        optimizer.speculate()
        QUESTIONS[question](optimizer)
        assert all(are_taken(optimizer))
        QUESTIONS[question](twin)
        optimizer.resolve()
        twin.step()
        assert optimizer.last_outcome.kind is twin.last_outcome.kind
        if is_spoiled:
            assert optimizer.last_outcome.kind is StepKind.SKIPPED
        else:
            assert optimizer.last_outcome == twin.last_outcome
        assert visible(optimizer) == visible(twin)


def test_question_about_other_gradients_leaves_open_speculation_alone() -> None:
    """The norm is that of what is in `.grad` at that moment; what was speculated on can come back."""
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    give_gradients(optimizer, 2, speculative=True)
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


@pytest.mark.parametrize("through", ["step", "resolve"])
@pytest.mark.parametrize("is_open", [False, True])
def test_on_nonfinite_raise(through: str, is_open: bool) -> None:
    optimizer = trained(make(torch.bfloat16, on_nonfinite="raise"), [1])
    before = state_bits(optimizer)
    give_gradients(optimizer, 2)
    parameters_of(optimizer)[1].grad[0, 0] = math.inf
    if is_open:
        optimizer.speculate()
        assert all(are_taken(optimizer))
    for _ in range(2):  # the gradients are still there
        with pytest.raises(FloatingPointError, match="1 gradient elements are Inf or NaN"):
            getattr(optimizer, through)()
        assert state_bits(optimizer) == before
        assert optimizer.last_outcome.kind is StepKind.SKIPPED
        assert optimizer.last_outcome.nonfinite == 1
    optimizer.zero_grad()
    train(optimizer, 3)
    assert optimizer.last_outcome.kind is StepKind.COMMITTED
    getattr(optimizer, through)()  # without gradients
    outcome = optimizer.last_outcome
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
    give_gradients(optimizer, 5, speculative=True)
    optimizer.rollback()
    assert (counts.accepted, counts.respeculated, counts.dropped) == (2, 2, 4)
    assert (counts.committed, counts.clipped, counts.skipped, counts.steps) == (2, 2, 2, 6)
    seconds = [counts.norm_seconds, counts.update_seconds, counts.speculate_seconds, counts.resolve_seconds]
    assert min(*seconds, counts.commit_seconds) > 0


@pytest.mark.parametrize("is_open", [False, True])
def test_times_of_a_step_add_up_to_no_more_than_it_took(is_open: bool) -> None:
    dtype = torch.bfloat16 if is_open else torch.float32
    optimizer = SpeculativeCPUAdamW([parameter(2 << 20, dtype=dtype)], max_grad_norm=1.0)
    counts, spent = optimizer.statistics, [0.0] * 3
    for seed in range(5):
        give_gradients(optimizer, seed, speculative=is_open)
        before, begin = spent, time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - begin
        followed = counts.resolve_seconds if is_open else counts.update_seconds
        spent = [counts.norm_seconds, followed, counts.commit_seconds]
        each = [now - then for now, then in zip(spent, before, strict=True)]
        assert min(each) > 0
        assert sum(each) <= took
        optimizer.clip_grad_norm_(1.0)
        assert counts.norm_seconds > spent[0]
        spent[0] = counts.norm_seconds


def _written(optimizer: SpeculativeCPUAdam) -> None:
    with torch.no_grad():
        parameters_of(optimizer)[0][0] = 7.0


CHANGES = [
    {"lr": 0.05},
    {"betas": (0.5, 0.9)},
    {"eps": 1e-3},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"amsgrad": True},
    {"maximize": True},
]


def _edited(**edits: Any) -> Callable[[SpeculativeCPUAdam], object]:
    return lambda optimizer: optimizer.param_groups[0].update(edits)


def _first_gradient(edit: Callable[[Any], object]) -> Callable[[SpeculativeCPUAdam], object]:
    return lambda optimizer: edit(parameters_of(optimizer)[0])


def _put_back(one: Any) -> None:
    """Put the handle of a gradient that was given back into `.grad` again."""
    handle = one.grad
    handle.add_(0.25)
    one.grad = handle


FATES: dict[str, tuple[Callable[[SpeculativeCPUAdam], object], tuple[int, int, int]]] = {
    "accepted": (lambda optimizer: None, (2, 0, 0)),
    "one was written to": (_written, (1, 1, 0)),
    "one was written to, and the state read": (lambda optimizer: (_written(optimizer), optimizer.state), (0, 2, 0)),
    **{f"changed {'-'.join(change)}": (_edited(**change), (0, 2, 0)) for change in CHANGES},
    "limit": (lambda optimizer: optimizer.clip_grad_norm_(0.5), (0, 2, 0)),
    "torch's limit": (lambda optimizer: torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.5), (0, 2, 0)),
    "one without gradient": (_first_gradient(lambda one: setattr(one, "grad", None)), (1, 0, 1)),
    "one was edited": (_first_gradient(lambda one: one.grad.add_(0.25)), (1, 0, 1)),
    "one was edited and put back": (_first_gradient(_put_back), (1, 0, 1)),
    "one was replaced": (_first_gradient(lambda one: setattr(one, "grad", torch.ones_like(one))), (1, 0, 1)),
    "one was scaled": (_first_gradient(lambda one: one.grad.mul_(0.5)), (1, 1, 0)),
    "one is NaN": (_first_gradient(lambda one: one.grad.mul_(math.nan)), (0, 0, 2)),
    "another gradient": (lambda one: give_gradients(one, 3, speculative=True), (2, 0, 2)),
    "zero_grad": (SpeculativeCPUAdam.zero_grad, (0, 0, 2)),
    "rollback": (SpeculativeCPUAdam.rollback, (0, 0, 2)),
    "added group": (lambda optimizer: optimizer.add_param_group({"params": [parameter(3)]}), (0, 0, 2)),
    "added group, another gradient": (
        lambda one: [FATES[name][0](one) for name in ("added group", "another gradient")],
        (2, 0, 2),
    ),
    "scheduler": (lambda one: OffloadScheduler(one, torch.nn.ParameterList(parameters_of(one))).close(), (0, 0, 2)),
    "loaded": (lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()), (0, 0, 2)),
}


@pytest.mark.parametrize("fate", FATES)
def test_statistics_tell_what_became_of_speculation(fate: str) -> None:
    """And whatever it was, the step is the one without it."""
    happen, expected = FATES[fate]
    optimizer, twin = trained(make(torch.bfloat16), [1]), trained(make(torch.bfloat16), [1])
    for one in (optimizer, twin):
        give_gradients(one, 2, speculative=one is optimizer)
        happen(one)
        if one is twin:
            one.rollback()
        one.step()
    counts = optimizer.statistics
    assert (counts.accepted, counts.respeculated, counts.dropped) == expected
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


def test_foreign_parameter_is_refused() -> None:
    optimizer = make()
    give_gradients(optimizer, 1)
    for use in (optimizer.speculate, optimizer.reload_masters):
        with refused(optimizer, ValueError, "a parameter that is in no group"):
            use([parameters_of(optimizer)[0], parameter(3)])
    optimizer.step()


@pytest.mark.slow
def test_more_than_a_thousand_tiny_parameters() -> None:
    """3000 parameters of one element make the steps of one parameter of 1500."""
    whole = SpeculativeCPUAdamW([parameter(1500)])
    pieces = SpeculativeCPUAdamW([torch.nn.Parameter(piece) for piece in parameter(1500).detach().clone().split(1)])
    for seed in range(2):
        give_gradients(whole, seed)
        for one, piece in zip(parameters_of(pieces), parameters_of(whole)[0].grad.split(1), strict=True):
            one.grad = piece.clone()
        whole.step()
        pieces.step()
    found, (expected,) = torch.cat([one.detach() for one in parameters_of(pieces)]), parameters_of(whole)
    assert torch.equal(found.view(torch.int32), expected.detach().view(torch.int32))


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_clip_grad_norm_sets_the_limit_of_one_step(speculative: bool, limit: float) -> None:
    """Which is forgotten with the gradients."""
    optimizer, twin = make(), make(max_grad_norm=limit or 1e-300)  # whose factor rounds to zero, as an fp32 number
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
    optimizer.clip_grad_norm_(limit)
    optimizer.zero_grad()
    give_gradients(optimizer, 2)
    assert optimizer.resolve().kind is StepKind.COMMITTED


@EACH_DTYPE
@pytest.mark.parametrize("limit", [None, 0.5, 5.0])
@pytest.mark.parametrize("torchs", [0.3, 3.0, 1e9])
@pytest.mark.parametrize("foreach", [False, True])
def test_limits_of_torch_and_of_the_optimizer(dtype, limit, torchs, foreach):
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
        rel = 1e-2 if dtype.itemsize == 2 else 1e-5  # torch rounds what it has clipped
        assert told.clip_coefficient == pytest.approx(coefficients[0] * plain.clip_coefficient, rel=rel)
        assert told.kind is (StepKind.CLIPPED if told.clip_coefficient != 1.0 else StepKind.COMMITTED)
        if coefficients[0] == 1.0:
            assert told == plain
        else:
            assert told.grad_norm == pytest.approx(plain.grad_norm / coefficients[0], rel=rel)


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_grad_norm", value) for value in (0, -1.0, math.nan, -math.inf, "one", 1j, torch.ones(2))),
        *(("on_nonfinite", value) for value in ("ignore", None, True, 3)),
    ],
    ids=str,
)
def test_bad_limit_is_refused(name: str, value: object) -> None:
    optimizer = make(max_grad_norm=2.0)
    sentence = f"is .*expected {'a positive number, or None' if name == 'max_grad_norm' else '.skip. or .raise.'}"
    with refused(optimizer, ValueError, f"{name} {sentence}"):
        setattr(optimizer, name, value)
    with pytest.raises(ValueError, match=f"{name} {sentence}"):
        make(**{name: value})
    if name == "max_grad_norm" and str(value) != "0":  # which is no limit to a Trainer, and here would train nothing
        with refused(optimizer, ValueError, "max_norm is .*expected a number of at least 0, or math.inf"):
            optimizer.clip_grad_norm_(value)
    assert (optimizer.max_grad_norm, optimizer.on_nonfinite) == (2.0, "skip")


BAD_VALUES = {
    "lr": [math.nan, math.inf, "0.1", None, 10**400, torch.ones(2), torch.tensor(math.nan)],
    "betas": [(1.0, 0.9), (0.9, -0.1), (math.nan, 0.9), 0.9, (0.9,), (0.9, 0.9, 0.9), None, (0.9, "b")],
    "eps": [-1e-8, math.nan, math.inf, None, [1], torch.tensor(1j), 10**5000],
    "weight_decay": [-0.1, math.nan, math.inf, None, 1j],
    "amsgrad": ["no"],
    "maximize": [torch.tensor(True)],
    "decoupled_weight_decay": [0.5],
}
BAD_VALUES["lr"] += [torch.ones((), device="meta"), torch.zeros(200, 200)]
BAD_VALUES["betas"] += [[torch.ones(100)] * 100]
BAD_PAIRS = [(key, value) for key, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(
    ("key", "value"), BAD_PAIRS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
@pytest.mark.parametrize("is_open", [False, True])
def test_bad_hyperparameter_is_refused(key: str, value: object, is_open: bool) -> None:
    with pytest.raises(ValueError, match=r"Invalid .*(expected|must be)") as caught:
        make(**{key: value})
    assert len(str(caught.value)) < 200
    optimizer = trained(make(torch.bfloat16), [1])
    give_gradients(optimizer, 2, speculative=is_open)
    with refused(optimizer, ValueError, r"expected|must be"):
        optimizer.add_param_group({"params": [parameter(3)], key: value})
    assert are_taken(optimizer) == [is_open] * 2
    good = optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value  # as schedulers do; noticed by whatever needs it next
    before = state_bits(optimizer)
    for use in (optimizer.step, optimizer.resolve, optimizer.speculate, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="expected"):
            use()
        assert state_bits(optimizer) == before
        assert are_taken(optimizer) == [is_open] * 2
    optimizer.param_groups[0][key] = good
    optimizer.step()
    assert state_bits(optimizer) == state_bits(trained(make(torch.bfloat16), [1, 2]))
