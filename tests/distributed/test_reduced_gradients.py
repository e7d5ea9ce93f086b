"""Gradients of bf16 shards count as they were reduced: those of a twin with fp32 shards, which arrive unrounded."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.overlap import PlantedError, RaiseInBackward
from support.ranks import on_ranks
from support.reference import flat, same_bits
from support.shards import DEVICES, ROUNDED, SHAPES, Oracle, local, ways_to_shard, wrap
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from superadam import OffloadScheduler, SpeculativeCPUAdamW, StepKind
from superadam.handles.gradient_handle import taken_of
from superadam.integrations.reduced_gradients import take_reduced_gradients
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.slow

LIMIT = 0.5

ALONE_OR_NOT = pytest.mark.parametrize("where", ["no scheduler", "simulated"])


class Layers(nn.Sequential):
    def forward(self, values: Tensor, of: slice, fails_at: int | None) -> Tensor:
        for place, layer in list(enumerate(self))[of]:
            values = layer(values)
            if place == fails_at:
                values = RaiseInBackward.apply(values, PlantedError("planted"))
        return values


def sharded(shapes: list[tuple[int, int]], dtype: torch.dtype, *, ignores: bool = False, **options: Any) -> Any:
    """Return layers whose values bf16 can hold."""
    torch.manual_seed(0)
    model = Layers(*[nn.Linear(inner, outer) for inner, outer in shapes]).to(torch.bfloat16).to(dtype)
    if ignores:
        model[1].bias = nn.Parameter(model[1].bias.detach().bfloat16())
        options["ignored_params"] = {model[1].bias}
    wrap([*model, model], mp_policy=MixedPrecisionPolicy(**ROUNDED), **options)
    return model


class Run:
    """A model with bf16 shards, its twin with fp32 shards, and the oracle over the gradients of the twin."""

    def __init__(self, rank: int, shapes: list[tuple[int, int]] = SHAPES[:3], **options: Any) -> None:
        self.rank, self.width = rank, shapes[0][0]
        self.model, self.twin = (sharded(shapes, dtype, **options) for dtype in (torch.bfloat16, torch.float32))
        self.scheduler: OffloadScheduler | None = None
        self.train(self.model.parameters())

    def train(self, parameters: Iterable[Any]) -> None:
        """Train these parameters with an optimizer, and an oracle, of their own."""
        twins = dict(zip(self.model.parameters(), self.twin.parameters(), strict=True))
        self.optimizer = SpeculativeCPUAdamW(parameters, lr=1e-2)
        self.oracle = Oracle(self.optimizer)
        self.oracle.twins = [twins[one] for one in self.oracle.tensors]
        take_reduced_gradients(self.optimizer, self.model)

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        if where == "no scheduler":
            yield
            return
        device, kept = DEVICES[where]()
        options: dict[str, Any] = {"device": device, "num_threads": 1, "bucket_numel": 8, "gpu_buckets": kept}
        with OffloadScheduler(self.optimizer, self.model, **options) as self.scheduler:
            self.scheduler._transfers.computes_norms = device.has_link  # as once another gradient's was asked for
            yield

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.oracle.tensors, self.oracle.twins, strict=True))

    @property
    def gradients(self) -> list[Tensor | None]:
        return [tensor.grad for tensor in self.oracle.tensors]

    def backward(
        self, step: int, micro: int = 0, of: slice = slice(None), *, scale: float = 1.0, fails_at: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + micro)
        inputs = torch.randn(3, self.width, generator=generator).to(torch.bfloat16)
        for model in (self.model, self.twin):
            loss = scale * (model(inputs[:, : model[of][0].in_features], of, fails_at) - 1).float().square().sum()
            with nullcontext() if fails_at is None else pytest.raises(PlantedError):
                loss.backward()
            if fails_at is not None:
                model.reset_iter_state()

    def check_gradients(self) -> None:
        """Compare every bit of the gradients, and what `.grad` shows."""
        for tensor, twin in self.pairs:
            if type(tensor) is nn.Parameter:
                distributed.all_reduce(tensor.grad)
                twin.grad.copy_(tensor.grad)
                assert taken_of(tensor.grad) is None
                continue
            exact, expected = taken_of(tensor.grad).exact(), local(twin.grad)
            assert same_bits(flat(exact, exact), flat(expected, expected))
            assert torch.equal(local(tensor.grad) + 0, expected.to(torch.bfloat16))
            assert torch._foreach_norm([local(tensor.grad)])[0].equal(torch._foreach_norm([expected])[0].bfloat16())

    def step(self, limit: float | None = None, *, set_to_none: bool = True) -> StepKind:
        """Make a step, and compare its norm; let the twin have the new values."""
        self.optimizer.max_grad_norm = limit
        has_factors = any(taken is not None and taken.factors for taken in map(taken_of, self.gradients))
        told = None if limit is None else float(self.optimizer.clip_grad_norm_(limit))
        self.optimizer.step()
        norm, outcome = self.oracle.step_all(limit), self.optimizer.last_outcome
        assert told is None or outcome.grad_norm == told or math.isnan(told)
        tolerance = 1e-6 if has_factors else 0.0  # factors are applied to the norm where speculation has computed it
        assert math.isclose(outcome.grad_norm, norm, rel_tol=tolerance) or not math.isfinite(norm)
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.twin.zero_grad(set_to_none=set_to_none)
        for tensor, twin in self.pairs:
            local(twin).copy_(local(tensor))
        return outcome.kind


@pytest.mark.parametrize(
    ("where", "mesh", "micro_batches", "syncs"),
    [
        ("no scheduler", "shard", 1, True),
        ("host", "shard", 2, True),
        ("simulated", "shard", 3, False),
        ("kept", "shard", 2, True),
        ("simulated", "replicate", 1, True),
        ("no scheduler", "columns", 1, True),
        ("simulated", "ignored", 1, True),
        ("no scheduler", "host", 1, True),
        ("simulated", "unsharded", 1, True),
    ],
)
@on_ranks(2)
def test_training(rank, where, mesh, micro_batches, syncs):
    extra = {"ignored": {"ignores": True}, "unsharded": {"reshard_after_forward": False}}.get(mesh, {})
    run = Run(rank, SHAPES[:3] if mesh == "shard" else [(8, 8)] * 2, **ways_to_shard(mesh), **extra)
    kinds = []
    with run.at(where):
        for step in range(6):
            for micro in range(micro_batches):
                for model in (run.model, run.twin):
                    model.set_requires_gradient_sync(syncs or micro == micro_batches - 1)
                run.backward(step, micro, scale=math.inf if (step, micro, rank) == (5, 0, 1) else 1.0)
            if step != 5:
                run.check_gradients()
            rounds = [not torch.equal(local(one.grad), local(one.grad).bfloat16().float()) for one in run.oracle.twins]
            assert step == 5 or any(rounds) or not any(local(one).numel() for one in run.oracle.twins)
            kinds.append(run.step(LIMIT if step % 3 == 1 else None, set_to_none=step % 4 != 2))
    run.oracle.check()
    assert set(kinds) == set(StepKind)
    if run.scheduler is not None:
        assert run.scheduler.statistics.given_back_gradients == 0 or mesh == "ignored"
        assert run.scheduler.optimizer.statistics.accepted > 0 or where == "kept"
        assert (run.scheduler.statistics.resident_buckets > 0) is (where == "kept")


# -- what programs do to gradients between backward and step -----------------------------------------------------------


def on_both(run: Run, edit: Callable[[Any], object]) -> None:
    for tensor, twin in run.pairs:
        edit(tensor)
        edit(twin)


def round_twin(run: Run, edit: Callable[[Any], object]) -> None:
    """Edit ordinary gradients, which are rounded."""
    for tensor, twin in run.pairs:
        local(twin.grad).copy_(local(twin.grad).bfloat16())
        edit(tensor)
        local_twin = nn.Parameter(local(twin).bfloat16())
        local_twin.grad = local(twin.grad).bfloat16()
        edit(local_twin)
        local(twin.grad).copy_(local_twin.grad)
        assert taken_of(tensor.grad) is None


def clip(run: Run) -> None:
    """The norm is that of the unrounded gradients, rounded as torch does for bf16; its factor applies to them."""
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)
    true = nn.utils.get_total_norm([twin.grad for twin in run.oracle.twins]).full_tensor()
    assert norm.dtype == local(norm).dtype == torch.bfloat16
    assert torch.allclose(norm.full_tensor().float(), true, rtol=2**-7)  # three roundings to bf16
    factor = torch.clamp(LIMIT / (norm.full_tensor() + 1e-6), max=1.0)
    assert factor < 1
    for twin in run.oracle.twins:
        local(twin.grad).mul_(factor)


def scale(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(run.optimizer)
    assert not scaler._found_inf_per_device(run.optimizer)[torch.device("cpu")]
    for twin in run.oracle.twins:
        torch._amp_foreach_non_finite_check_and_unscale_(
            [local(twin.grad)], torch.zeros(()), torch.tensor(3.0).double().reciprocal().float()
        )


def write_and_add(run: Run) -> None:
    """A gradient that was written to is an ordinary one until it is None."""
    round_twin(run, lambda p: p.grad.clamp_(-1, 1))
    before = [local(twin.grad).clone() for twin in run.oracle.twins]
    run.twin.zero_grad()
    run.backward(98)
    for one, (tensor, twin) in zip(before, run.pairs, strict=True):
        taken = taken_of(tensor.grad)
        assert taken is None or not taken.is_unrounded
        local(twin.grad).copy_(one.bfloat16() + local(twin.grad).bfloat16())


EDITS: dict[str, Callable[[Run], object]] = {
    "products": lambda run: (on_both(run, lambda p: p.grad.mul_(1 / 3)), on_both(run, lambda p: p.grad.div_(0.7))),
    "product and sum": lambda run: (on_both(run, lambda p: p.grad.mul_(1 / 3)), run.backward(97)),
    "clip_grad_norm_": clip,
    "unscale_": scale,
    "speculate": lambda run: run.optimizer.speculate(),
    "rollback": lambda run: (run.optimizer.speculate(), run.optimizer.rollback(), run.check_gradients()),
    "write": lambda run: round_twin(run, lambda p: p.grad.clamp_(-1, 1)),
    "write through .data": lambda run: round_twin(run, lambda p: p.grad.data.add_(1)),
    "write and add": write_and_add,
    "replace": lambda run: round_twin(run, lambda p: setattr(p, "grad", p.grad.clone() * 3)),
    "zero and add": lambda run: (on_both(run, lambda p: p.grad.zero_() if p.dim() > 1 else None), run.backward(99)),
    "drop": lambda run: on_both(run, lambda p: setattr(p, "grad", None) if p.dim() > 1 else None),
    "state_dict": lambda run: run.optimizer.state_dict(),
    "failed backward": lambda run: run.backward(96, fails_at=1),
    "close the scheduler": lambda run: run.scheduler and run.scheduler.close(),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("edit", EDITS)
@ALONE_OR_NOT
@on_ranks(2)
def test_edited_gradients_have_the_bits_of_the_plain_run(rank, where, edit):
    run = Run(rank)
    with run.at(where):
        for step in range(4):
            run.backward(step)
            if step % 2:
                EDITS[edit](run)
            run.step(LIMIT if step == 3 and edit not in ("clip_grad_norm_", "unscale_") else None)
    run.oracle.check()


@ALONE_OR_NOT
@on_ranks(2)
def test_hooks_of_others_see_handles(rank, where):
    """Also those that were there before, so that what they write counts."""
    run = Run(rank)
    with run.at(where):
        fresh = run.model[0].weight
        seen = []
        fresh.register_post_accumulate_grad_hook(lambda p: seen.append(taken_of(p.grad) is not None))
        fresh.register_post_accumulate_grad_hook(lambda p: p.grad.data.mul_(3))
        take_reduced_gradients(run.optimizer, run.model)
        for step in range(3):
            run.backward(step)
            local(run.twin[0].weight.grad).mul_(3)
            run.step()
        assert seen == [True] * 3
    run.oracle.check()


@ALONE_OR_NOT
@on_ranks(2)
def test_parameters_that_come_and_go(rank, where):
    """Unused, frozen, added and tied ones."""
    run = Run(rank, [(6, 6)] * 4)
    late = run.model[3].weight
    for model in (run.model, run.twin):
        model[1].weight.requires_grad_(False)
    run.train([one for one in run.oracle.tensors if one is not late])
    with run.at(where):
        for step in range(6):
            if step == 2:
                on_both(run, lambda p: p.requires_grad_())
            if step == 4:
                run.optimizer.add_param_group({"params": [late], "lr": 1e-2})
                before, run.oracle = run.oracle, Oracle(run.optimizer)
                run.oracle.parameters[:-1] = before.parameters
                run.oracle.twins = [*before.twins, run.twin[3].weight]
            run.backward(step, of=slice(step % 2, None))
            for tensor, twin in run.pairs:
                taken = taken_of(tensor.grad)
                assert (taken is None) is (tensor.grad is None) is (twin.grad is None)
                assert taken is None or torch.equal(taken.exact(), local(twin.grad))
            assert taken_of(late.grad) is not None or step < 4
            run.step()
            run.model.zero_grad()
            run.twin.zero_grad()
    run.oracle.check()


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@on_ranks(2)
def test_announced_micro_batches_and_a_narrow_link(rank, dtype):
    """Neither changes a bit."""
    run = Run(rank)
    device = SimulatedDevice(4, 0.5)
    options = {"bucket_numel": 8, "gpu_buckets": 2, "transfer_dtype": torch.bfloat16}
    with OffloadScheduler(run.optimizer, run.model, device=device, num_threads=1, **options) as scheduler:
        for step in range(4):
            with scheduler.accumulate(dtype):
                run.backward(step, 0)
                run.backward(step, 1)
                if step == 3:
                    run.optimizer.speculate()
            run.backward(step, 2, slice(2 * (step % 2), None))
            run.check_gradients()
            run.step(LIMIT if step == 2 else None)
        assert scheduler.statistics.resident_buckets > 0
    run.oracle.check()


@ALONE_OR_NOT
@on_ranks(2)
def test_optimizers_of_parts_of_a_model(rank, where):
    """Two of them have the option, the third is torch's."""
    run = Run(rank, SHAPES)
    tensors, twins = run.oracle.tensors, run.oracle.twins
    torchs = torch.optim.SGD(tensors[6:])
    run.train(tensors[3:6])
    others, oracle = run.optimizer, run.oracle
    run.train(tensors[:3])
    with run.at(where):
        for step in range(3):
            run.backward(step)
            assert [taken_of(tensor.grad) is None for tensor in tensors] == [False] * 6 + [True] * 2
            others.step()
            oracle.step_all(None)
            run.step()
            others.zero_grad()
            torchs.zero_grad()
            run.twin.zero_grad()
            for one, twin in zip(tensors, twins, strict=True):
                local(twin).copy_(local(one))
    run.oracle.check()
    oracle.check()


# -- what cannot be right ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_hook_that_fails_is_told_by_step_on_every_rank(rank):
    run = Run(rank)
    run.backward(0)
    run.step()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            planted = Mock(side_effect=RuntimeError("planted"))
            patch.setattr("superadam.integrations.reduced_gradients.take_reduced", planted)
        run.backward(1)
        with pytest.raises(RuntimeError, match="planted" if rank == 0 else r"step\(\) failed on ranks \[0\]"):
            run.optimizer.step()
    run.oracle.check()
    run.optimizer.zero_grad()
    run.twin.zero_grad()
    run.backward(2)
    run.step()
    run.oracle.check()


@on_ranks(2)
def test_group_that_does_not_show_its_gradients(rank):
    """As when something else sets the hook of one of two groups of the same size."""
    run = Run(rank, [(6, 6)] * 3)
    run.optimizer.param_groups[0]["params"] = list(run.model[0].parameters())
    run.model[0].set_all_reduce_hook(lambda buffer: None)
    run.backward(0)
    before = [local(one).clone() for one in run.oracle.tensors]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gradients in .grad are not those that were reduced last, expected"):
            run.optimizer.step()
    assert all(torch.equal(one, local(other)) for one, other in zip(before, run.oracle.tensors, strict=True))
    take_reduced_gradients(run.optimizer, run.model)
    run.optimizer.zero_grad()
    run.backward(1)
    run.optimizer.step()
    assert run.optimizer.statistics.steps == 1
