"""All ranks decide alike, or all raise: nothing hangs, and nothing is changed on some ranks only."""

import itertools
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.ranks import ENDED, on_ranks, raises, run
from support.shards import gathered, local, wrap
from support.visible import bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from superadam import SpeculativeCPUAdamW, StepKind
from superadam.distributed.agreement import Description, Question, Ranks, _bound
from superadam.integrations.distributed_checkpoint import CheckpointError, load, save
from superadam.state.parameter import ParameterState
from superadam.state.table import ParameterTable


def cut(*shape: int, mesh: Any = None, placements: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """Return a parameter of ones, with a gradient of ones."""
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(shape, dtype=dtype), mesh, placements or [Shard(0)]))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def seen(*parameters: Any) -> list[Any]:
    return [bits(local(parameter)) for parameter in parameters]


@pytest.mark.parametrize("speculative", [False, True], ids=["step", "speculate"])
@pytest.mark.parametrize("shape", [None, (2, 1), (1, 2)], ids=["1-D", "HSDP 2 x 1", "HSDP 1 x 2"])
@on_ranks(2)
def test_nan_on_one_rank(rank, shape, speculative):
    """Under HSDP 2 x 1 the second rank has replicas only, none of which counts for the norm."""
    options = {} if shape is None else {"mesh": init_device_mesh("cpu", shape), "placements": [Replicate(), Shard(0)]}
    parameters = [cut(n, 3, dtype=torch.bfloat16, **options) for n in (5, 1)]
    optimizer = SpeculativeCPUAdamW(parameters)
    optimizer.step()
    before = seen(*parameters)
    for bad_rank, value in itertools.product((0, 1), (math.nan, math.inf)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if rank == bad_rank:
            local(parameters[0].grad)[-1] = value
        if speculative:
            optimizer.speculate()
        optimizer.step()
        outcome = optimizer.last_outcome
        assert (outcome.kind, outcome.nonfinite) == (StepKind.SKIPPED, 3)
        assert not math.isfinite(outcome.grad_norm)
        optimizer.on_nonfinite = "raise"
        raises(FloatingPointError, "^3 gradient elements are Inf or NaN", optimizer.step)
        optimizer.on_nonfinite = "skip"
        assert seen(*parameters) == before
    assert optimizer.state[parameters[0]]["step"].item() == 1


@on_ranks(3)
def test_the_norm_is_that_of_all_ranks(rank):
    """In which replicas count once; it has the same bits on each, though the sum of three depends on their order."""
    replicas = [cut(2, placements=[Replicate()]), cut(placements=[Replicate()])]
    parameters = [cut(7, 2), cut(1), cut(4, 3, placements=[Shard(1)]), *replicas]
    double = cut(9, 5, dtype=torch.float64)
    for seed in range(20):
        torch.manual_seed(3 * seed + rank)
        local(double.grad).normal_()
        assert len({*gathered(SpeculativeCPUAdamW([double]).clip_grad_norm_(1.5).item())}) == 1
    optimizer = SpeculativeCPUAdamW(parameters, max_grad_norm=2.0)
    for parameter in parameters:
        torch.manual_seed(rank if parameter.placements != (Replicate(),) else 7)
        local(parameter.grad).normal_()
    whole = [parameter.grad.full_tensor() for parameter in parameters]
    expected = torch.cat([one.flatten() for one in whole]).double().square().sum().sqrt().item()
    asked = optimizer.clip_grad_norm_(1.5).item()
    assert asked == pytest.approx(expected, rel=1e-14)  # summed in another order
    assert gathered(asked) == [asked] * 3
    optimizer.step()
    outcome = optimizer.last_outcome
    assert outcome.grad_norm == asked
    assert outcome.clip_coefficient == torch.tensor(1.5 / (asked + 1e-6), dtype=torch.float64).float().item()
    optimizer.step()
    assert optimizer.last_outcome.clip_coefficient == torch.tensor(2.0 / (asked + 1e-6), dtype=torch.float64).float()


def test_what_is_no_answer_of_another_rank_is_refused(monkeypatch):
    ranks = Ranks([0, 1])
    monkeypatch.setattr(ranks, "_exchange", lambda mine: [mine, mine._replace(magic=1.0)])
    told = r"^the ranks are not at the same point: rank 0 is in call 1 \(step\(\)\) and rank 1 sent something else"
    ask: Any = partial(ranks.norm, Question.STEP, None, 0, lambda classes: [0.0])
    raises(RuntimeError, told, ask)
    monkeypatch.setattr(ranks, "_exchange", lambda mine: [mine._replace(number=0.0)] * 2)
    raises(RuntimeError, "the answer is that to an older question", ask)
    monkeypatch.setattr(torch.distributed, "all_gather_object", Mock(side_effect=RuntimeError("planted")))
    raises(RuntimeError, r"^ranks \[0, 1\] could not agree on a step, .* \(planted\)", ranks._exchange_descriptions)
    first = Ranks([0, 1])
    monkeypatch.setattr(torch.distributed, "all_gather", Mock(side_effect=RuntimeError("planted")))
    raises(RuntimeError, r"could not agree on a step, .* \(planted\)", partial(first.norm, *ask.args))
    assert first.agreed != first.number  # so that it counts as a step that nobody made


def test_nobody_makes_a_step_with_nan():
    ranks = Ranks([0])
    assert ranks.norm(Question.STEP, None, 3, lambda classes: [math.nan]).count == 3
    assert ranks.agreed == 0


def test_copies_whose_elements_are_added_alike_have_to_be_the_same():
    groups = ((0,), (1,))
    by_rank = {
        rank: [Description("copied", (3, 5), (rank,), "all"), Description("other", (7,), (0, 1))] for rank in (0, 1)
    }
    assert _bound(groups, {"copied": groups}, by_rank) == 0.0
    by_rank[1][0] = by_rank[1][0]._replace(part="all, in another order")
    assert _bound(groups, {"copied": groups}, by_rank) == 15 * 2.0**-51


def test_any_number_of_kinds_of_copies_has_room(monkeypatch):
    """Also where they need one word more or less than there are: two for each, and one for what has no copies."""
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda received, sent, group: [one.copy_(sent) for one in received]
    )
    for count in (7, 8, 15, 16, 31, 32):
        ranks = Ranks([0, 1])
        ranks._copies = dict.fromkeys((((0,),) * number for number in range(2, 2 + count)), 0.0)
        norm = ranks.norm(Question.STEP, None, 0, lambda classes, count=count: [1.0] * (1 + 2 * count))
        assert norm.total == math.sqrt(2 + count)


@on_ranks(2)
def test_gradients_on_one_rank_only(rank):
    """A rank without any gradient takes part all the same."""
    parameter = cut(4)
    optimizer = SpeculativeCPUAdamW([parameter])
    if rank:
        parameter.grad = None
    assert optimizer.clip_grad_norm_(9.0).item() == 2**0.5
    optimizer.step()
    parameter.grad = None
    optimizer.step()
    assert optimizer.last_outcome.grad_norm == 0.0


def placed(placement: Any) -> DTensor:
    """Return a gradient of another placement than its parameter's."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return DTensor.from_local(torch.ones(4, dtype=torch.bfloat16), mesh, [placement])


WRONG_STATE = "state"
GRADIENT = "^the gradient of parameter 0 of group 0 "
WRONGS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "shape": (
        lambda adam, p: setattr(p.grad, "_local_tensor", torch.ones(1, 1)),
        GRADIENT + r"has shape \(1, 1\), expected",
    ),
    "placement": (
        lambda adam, p: setattr(p, "grad", placed(Replicate())),
        GRADIENT + r"is a DTensor of shape \(4,\) placed \[Replicate",
    ),
    "partial": (
        lambda adam, p: setattr(p, "grad", placed(Partial())),
        GRADIENT + r"is .*Partial.*, expected it like its .*redistribute\(\)",
    ),
    "ordinary": (
        lambda adam, p: setattr(p, "grad", torch.ones(4, dtype=torch.bfloat16)),
        GRADIENT + r"is an ordinary tensor of shape \(4,\), expected it like",
    ),
    "rate": (lambda adam, p: adam.param_groups[0].update(lr=math.nan), "Invalid learning rate: nan; expected"),
    WRONG_STATE: (
        lambda adam, p: adam.state[p].update(step=torch.tensor(0.5)),
        "^the state of parameter 0 .* has step",
    ),
    "twice": (lambda adam, p: adam.param_groups[0].update(params=[p, p]), "are the same parameter"),
}


@pytest.mark.parametrize("is_bound", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("call", ["step", "clip_grad_norm_"])
@on_ranks(2)
def test_an_error_on_one_rank(rank, call, is_bound):
    """The rank raises its error, the other one a sentence; afterwards they are at the same point."""
    for bad_rank, (what, (spoil, sentence)) in itertools.product((0, 1), WRONGS.items()):
        parameter = cut(4, dtype=torch.bfloat16)
        optimizer = SpeculativeCPUAdamW([parameter], lr=0.1)
        if is_bound or what == WRONG_STATE:
            optimizer.step()
        group, before, gradient = {**optimizer.param_groups[0]}, seen(parameter), torch.ones_like(parameter)
        ask = optimizer.step if call == "step" else lambda: optimizer.clip_grad_norm_(1.0)  # noqa: B023
        if rank == bad_rank:
            spoil(optimizer, parameter)
            raises((TypeError, ValueError), sentence, ask)
        else:
            raises(RuntimeError, rf"^{call}\(\) failed on ranks \[{bad_rank}\], so nothing was changed", ask)
        assert seen(parameter) == before
        parameter.grad = gradient
        optimizer.param_groups[0].update(group)
        if rank == bad_rank and what == WRONG_STATE:
            optimizer.state[parameter]["step"] = torch.tensor(1.0)
        optimizer.step()
        assert seen(parameter) != before
        assert optimizer.last_outcome.grad_norm == 2.0


@on_ranks(2)
def test_an_error_of_a_rank_that_is_about_to_ask_is_told(rank):
    optimizer = SpeculativeCPUAdamW([parameter := cut(4)])
    optimizer.step()
    before = seen(parameter)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(ParameterTable, "each_chunk", Mock(side_effect=MemoryError("planted")))
            raises(MemoryError, "planted", optimizer.step)
        else:
            raises(RuntimeError, r"^step\(\) failed on ranks \[1\]", optimizer.step)
    assert seen(parameter) == before
    optimizer.step()
    assert optimizer.last_outcome.grad_norm == 2.0


@on_ranks(3)
def test_ranks_that_are_not_at_the_same_point(rank):
    optimizer = SpeculativeCPUAdamW([parameter := cut(6)])
    for ask in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        ask()
    before = seen(parameter)
    ask = optimizer.step if rank < 2 else lambda: optimizer.clip_grad_norm_(1.0)
    told = r"rank 0 is in call 3 \(step\(\)\) and rank 2 is in call 3 \(clip_grad_norm_\(\)\), expected each call"
    raises(RuntimeError, "^the ranks are not at the same point: " + told, ask)
    assert seen(parameter) == before


@on_ranks(2)
def test_optimizers_in_different_order(rank):
    optimizers = [SpeculativeCPUAdamW([cut(4)]), SpeculativeCPUAdamW([cut(2, 2)])]
    told = r"^parameter 0 of group 0 is \(4,\) on ranks \[0, 1\] and \(2, 2\) on ranks \[0, 1\], expected the same "
    raises(RuntimeError, told, optimizers[rank].step)
    optimizers = [SpeculativeCPUAdamW([cut(4)]) for _ in range(2)]  # of equal parameters, whose order changes later
    for optimizer in optimizers:
        optimizer.step()
    before = seen(*(optimizer.param_groups[0]["params"][0] for optimizer in optimizers))
    told = r"^ranks 0 and 1 are in step\(\) of different optimizers, expected the same one on all ranks"
    raises(RuntimeError, told, optimizers[rank].step)
    assert before == seen(*(optimizer.param_groups[0]["params"][0] for optimizer in optimizers))


@on_ranks(2)
def test_limits_that_differ_or_are_invalid_on_one_rank(rank):
    parameters = [cut(4), cut(4)]
    optimizer = SpeculativeCPUAdamW(parameters, max_grad_norm=[None, 1.0][rank])
    before = seen(*parameters)
    raises(RuntimeError, "^the limit of the gradient norm is inf on rank 0 and 1.0 on rank 1, expected", optimizer.step)
    if rank:
        raises(ValueError, "^max_norm is -1.0", lambda: optimizer.clip_grad_norm_(-1.0))
    else:
        raises(RuntimeError, r"^clip_grad_norm_\(\) failed on ranks \[1\]", lambda: optimizer.clip_grad_norm_(1.0))
    assert seen(*parameters) == before
    optimizer.max_grad_norm = None
    parameters[1].grad = None
    optimizer.step()
    assert optimizer.last_outcome.grad_norm == 2.0  # no sums are left of the step that failed


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize(("owner", "name", "passes"), [(ParameterState, "create_state", []), (Ranks, "_check", [None])])
@on_ranks(2)
def test_an_error_after_the_verdict(rank, victims, owner, name, passes, tmp_path):
    """A rank that has missed a step cannot go on with those that made it; where all missed it, or load, they can."""
    parameter = cut(4, dtype=torch.bfloat16)
    model, optimizer = nn.ParameterList([parameter]), SpeculativeCPUAdamW([parameter], lr=0.1)
    before = seen(parameter)
    save(tmp_path, model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if rank in victims:
            patch.setattr(owner, name, Mock(side_effect=[*passes, torch.OutOfMemoryError("planted")]))
            raises(torch.OutOfMemoryError, "planted", optimizer.step)
            assert seen(parameter) == before
        else:
            optimizer.step()
    after = seen(parameter)
    if rank in victims:
        raises(RuntimeError, "^an error has kept this rank from a step that others may have made", optimizer.state_dict)
    parameter.grad = torch.ones_like(parameter)
    for ask in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        if len(victims) == 2:
            ask()
        else:
            raises(RuntimeError, rf"^an error on ranks \[{victims[0]}\] has kept them from a step that the others", ask)
            assert seen(parameter) == after
    if len(victims) == 2:
        assert optimizer.state_dict()["state"][0]["step"].item() == 2.0
        return
    optimizer.param_groups[0]["lr"] = math.nan if rank in victims else 0.1  # before it asks: still it is behind
    if rank in victims:
        raises(ValueError, "Invalid learning rate: nan; expected", optimizer.step)
    else:
        raises(RuntimeError, rf"^an error on ranks \[{victims[0]}\] has kept them from a step", optimizer.step)
    raises(CheckpointError, "^cannot save a checkpoint to .* kept ", lambda: save(tmp_path, model, optimizer))
    load(tmp_path, model, optimizer)
    assert seen(parameter) == before
    optimizer.step()
    assert (seen(parameter) == before, seen(parameter) == after) == (False, rank not in victims)
    save(tmp_path, model, optimizer)


@on_ranks(2)
def test_what_a_handler_raises_in_a_step_keeps_no_rank_from_it(rank):
    """Nor do ranks without parameters."""
    parameter, gather, world = nn.Parameter(torch.ones(3)), torch.distributed.all_gather, torch.distributed.group.WORLD
    optimizer = SpeculativeCPUAdamW([{"params": [] if rank else [parameter]}], process_group=world)
    before = signal.signal(signal.SIGTERM, Mock(side_effect=ValueError("preempted")))
    parameter.grad = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        waiting = Mock(side_effect=lambda *given, **how: (signal.raise_signal(signal.SIGTERM), gather(*given, **how)))
        patch.setattr(torch.distributed, "all_gather", waiting)
        raises(ValueError, "preempted", optimizer.step)
    signal.signal(signal.SIGTERM, before)
    assert [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == [1.0] * (1 - rank)


@on_ranks(2)
def test_ranks_that_begin_anew_count_their_calls_anew(rank, tmp_path):
    """Also if the first one cannot be made on one of them."""
    optimizer = SpeculativeCPUAdamW([cut(4), ordinary := nn.Parameter(torch.zeros(3))])
    saved = optimizer.state_dict()
    optimizer.step()
    if rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather", Mock(side_effect=RuntimeError("planted")))
            raises(RuntimeError, r"could not agree on a step, .* \(planted\)", optimizer.step)
    torch.distributed.destroy_process_group()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    optimizer.load_state_dict(saved)
    if rank:
        ordinary.data = torch.zeros(1).expand(3)
    kind, words = (ValueError, "expanded") if rank else (RuntimeError, r"failed on ranks \[1\]")
    raises(kind, words, optimizer.step)
    ordinary.data = torch.zeros(3)
    optimizer.param_groups[0]["lr"] = math.nan if rank else 0.1
    kind, words = (ValueError, "Invalid learning rate: nan") if rank else (RuntimeError, r"failed on ranks \[1\]")
    raises(kind, words, optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert optimizer.last_outcome.grad_norm == 2.0


@on_ranks(2)
def test_a_rank_that_has_missed_a_step_is_told_of_by_ranks_that_begin_anew(rank, tmp_path):
    optimizer = SpeculativeCPUAdamW([cut(4)])
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Ranks, "_check", Mock(side_effect=[None, torch.OutOfMemoryError("planted")]))
            raises(torch.OutOfMemoryError, "planted", optimizer.step)
        else:
            optimizer.step()
    torch.distributed.destroy_process_group()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    optimizer.add_param_group({"params": [cut(4)]})
    optimizer.process_group = torch.distributed.group.WORLD
    raises(RuntimeError, r"^an error on ranks \[1\] has kept them from a step", optimizer.step)


def end_of_rank_1(rank: int) -> str:
    optimizer = SpeculativeCPUAdamW([parameter := cut(4)])
    optimizer.step()
    before = seen(parameter)
    torch.distributed.barrier()
    if rank == 1:
        os._exit(1)
    raises(RuntimeError, r"^ranks \[0, 1\] could not agree on a step, because one of them has ended", optimizer.step)
    parameter.grad = torch.ones(4)  # and an error of its own is raised although nobody hears of it
    raises(TypeError, "^the gradient of parameter 0", optimizer.step)
    assert seen(parameter) == before
    return "raised"


@pytest.mark.slow
def test_a_rank_that_ends():
    assert run(end_of_rank_1, 2) == ["raised", ENDED]


HELD: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda gradient: None,
    "gradient": lambda gradient: gradient,
    "part": lambda gradient: gradient._local_tensor,
    "alias": lambda gradient: gradient.to_local(),
    "storage": lambda gradient: gradient._local_tensor.untyped_storage(),
}


@on_ranks(2)
def test_gradients_that_others_hold_are_not_taken(rank):
    results = []
    for held, hold in HELD.items():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
        for p in model.parameters():
            nn.init.constant_(p, 0.25)
        wrap([model[0], model])
        optimizer = SpeculativeCPUAdamW(model.parameters(), lr=0.1)
        for is_second in (False, True):
            model(torch.ones(2, 4).bfloat16()).sum().backward()
            alias = hold(model[0].weight.grad)
            if is_second:
                optimizer.speculate()
            if held == "storage":
                alias = torch.empty(0, dtype=torch.bfloat16).set_(alias)
            if alias is not None:
                alias.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            del alias
        results.append([bits(local(optimizer.state[p]["exp_avg"])) for p in optimizer.param_groups[0]["params"]])
        assert (optimizer.statistics.accepted == 4) is (held == "nothing")
    del results[4]  # of all gradients in that storage
    assert results[1] == results[2] == results[3] != results[0]
