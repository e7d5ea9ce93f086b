"""Speculation on state that was changed before the verdict is not published, and one that is dropped loses no step."""

import math

import torch
from support.optimizers import trained
from support.visible import give_gradients, parameter, parameters_of, train, visible

from superadam import SpeculativeCPUAdam
from superadam.handles.gradient_handle import taken_of
from superadam.state.parameter import Phase


def test_an_accepted_step_is_kept_where_the_next_gradient_only_waits() -> None:
    """As it does where the parameter was written to."""
    optimizer, twin = (trained(SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)]), [1]) for _ in range(2))
    for one in (optimizer, twin):
        train(one, 2, speculative=one is optimizer)
        with torch.no_grad():
            parameters_of(one)[0][:9].add_(1)
        give_gradients(one, 3, speculative=one is optimizer)
        one.step()
    assert (optimizer.statistics.accepted, twin.statistics.accepted) == (1, 0)
    assert visible(optimizer) == visible(twin)


def test_a_gradient_that_is_set_aside_counts_only_once_it_is_back() -> None:
    optimizer, twin = (
        trained(SpeculativeCPUAdam([parameter(n, dtype=torch.bfloat16) for n in (70, 5)]), [1]) for _ in range(2)
    )
    norms = []
    for one in (optimizer, twin):
        give_gradients(one, 2, speculative=one is optimizer)
        first = parameters_of(one)[0]
        held, first.grad = first.grad, None
        norms.append(one.clip_grad_norm_(math.inf))
        train(one, 3)
        first.grad = held
        one.step()
    assert norms[0] == norms[1]
    assert visible(optimizer) == visible(twin)


def test_speculation_goes_on_after_a_write_was_adopted() -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)])
    train(optimizer, 1)
    with torch.no_grad():
        parameters_of(optimizer)[0].add_(1)
    train(optimizer, 2, speculative=True)
    assert optimizer.statistics.accepted == 0
    train(optimizer, 3, speculative=True)
    assert optimizer.statistics.accepted == 1


def test_zero_as_learning_rate_has_a_sign() -> None:
    optimizer = trained(SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)], lr=0.0), [1])
    give_gradients(optimizer, 2, speculative=True)
    optimizer.param_groups[0]["lr"] = -0.0
    optimizer.step()
    assert optimizer.statistics.accepted == 0


def test_as_much_is_committed_as_was_asked_for() -> None:
    optimizer = trained(SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16, seed=s) for s in range(3)]), [1])
    train(optimizer, 2, speculative=True)
    transaction = optimizer._binding._transaction
    assert transaction.commit(71) == 140
    assert transaction.in_phase(Phase.ACCEPTED) == transaction.table.states[2:]


def test_what_was_counted_is_of_the_gradient_that_waits() -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)])
    give_gradients(optimizer, 1)
    (one,) = parameters_of(optimizer)
    one.grad[:3] = math.nan
    optimizer.speculate()
    taken, transaction = taken_of(one.grad), optimizer._binding._transaction
    assert transaction.nonfinite_of(taken) == 3
    taken.version += 1
    assert transaction.nonfinite_of(taken) is None
