"""Parameters larger than a bucket are cut: the bits are those without a scheduler, whatever happens to a piece."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.overlap import ThreadDevice, adam, fail_at
from support.visible import state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam, StepKind
from superadam.devices import Device
from superadam.devices.worker import WorkerError
from superadam.kernels.native import CHUNK
from superadam.state.parameter import Phase, piece_length
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("one_torch_thread")

DEEP = os.environ.get("SUPERADAM_DEEP") == "1"
STEPS = 4
PIECES = {"embedding.weight": 4, "transposed": 2, "image": 3}
"""Of parameters, where buckets are shorter than a chunk; all others are one."""


class Text(nn.Module):
    """An embedding, whose gradient comes last, and weights in several orders of memory."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.embedding = nn.Embedding(220, 64, dtype=dtype)  # the last piece is shorter
        self.transposed = nn.Parameter((torch.randn(100, 64, dtype=dtype) * 0.1).t())
        channels_last = torch.randn(16, 64, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
        self.image = nn.Parameter(channels_last * 0.1)
        self.gaps = nn.Parameter((torch.randn(64, 200, dtype=dtype) * 0.1)[:, ::2])
        self.last = nn.Linear(116, 1, dtype=dtype)

    def forward(self, step: int) -> Tensor:
        words = torch.randint(220, (48,), generator=torch.Generator().manual_seed(step))
        hidden = self.embedding(words)
        seen = nn.functional.conv2d(hidden.view(48, 64, 1, 1), self.image, padding=1).view(48, 16)
        read = (hidden @ self.transposed).tanh() + hidden @ self.gaps
        return 9.0 * (self.last(torch.cat([seen, read], 1)).float() - 1).square().mean()


Change = Callable[[nn.Module, SpeculativeCPUAdam, int], object]


def train(
    change: Change | None = None,
    dtype: torch.dtype = torch.bfloat16,
    limit: float | None = None,
    storage: tuple[tuple[str, str], ...] = (),
    hook: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> tuple[list[Any], SpeculativeCPUAdam, OffloadScheduler | None]:
    """Make steps, each after a change; return outcomes and bits, the optimizer, and its scheduler if it has options."""
    model = Text(dtype)
    optimizer = adam(model, lr=0.02, max_grad_norm=limit, **dict(storage))
    for parameter in model.parameters() if hook is not None else ():
        parameter.register_post_accumulate_grad_hook(hook)
    scheduler = OffloadScheduler(optimizer, model, **options) if options else None
    seen: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(step).backward()
        if change is not None:
            change(model, optimizer, step)
        try:
            optimizer.step()
        except (WorkerError, torch.OutOfMemoryError):  # nothing was changed
            optimizer.step()
        seen.append(optimizer.last_outcome)
        assert all(parameter.grad is not None for parameter in model.parameters())
    seen.append(state_bits(optimizer, without=["master"] if dtype in (torch.float32, torch.float64) else []))
    if scheduler is not None:
        scheduler.close()
    return seen, optimizer, scheduler


@functools.cache
def expected(change: Change | None = None, **options: Any) -> Any:
    return train(change, **options)[0]


def pieces_of_each(scheduler: OffloadScheduler, model: nn.Module) -> dict[str, int]:
    states = scheduler._transaction.table.states
    counts = {name: len(state.pieces) for (name, _), state in zip(model.named_parameters(), states, strict=True)}
    return {name: count for name, count in counts.items() if count > 1}


# ---- where parameters are cut ----------------------------------------------------------------------------------------


@given(st.integers(0, 20 * CHUNK), st.one_of(st.none(), st.integers(1, 12 * CHUNK)))
def test_pieces_are_whole_chunks_no_longer_than_a_bucket(numel: int, most: int | None) -> None:
    length = piece_length(torch.empty(numel, device="meta"), most)
    if most is None or numel <= max(most, CHUNK):
        assert length == numel
    else:
        assert length % CHUNK == 0
        assert length < max(most, CHUNK) + CHUNK
        assert -(-numel // length) <= -(-numel // max(most, CHUNK))  # no more of them than are needed


def test_dense_working_copies_are_cut_in_any_order_of_memory() -> None:
    """Not those with gaps in memory, nor own masters, of which no new value travels."""
    for dtype, device, cut in [
        (torch.bfloat16, SimulatedDevice(0), PIECES),
        (torch.float32, SimulatedDevice(0), PIECES),
        (torch.float32, ThreadDevice(), {}),
    ]:
        model = Text(dtype)
        with OffloadScheduler(adam(model), model, bucket_numel=1, device=device) as scheduler:
            assert pieces_of_each(scheduler, model) == cut


# ---- the bits --------------------------------------------------------------------------------------------------------


KINDS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float32, "limit": 60.0},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16, "storage": (("moments", "8bit"),), "limit": 60.0},
    {"dtype": torch.bfloat16, "storage": (("moments", "bf16"), ("master", "24bit"))},
]
PLACES: list[tuple[Callable[[], Device], int, int]] = [
    (lambda: SimulatedDevice(0), 1, 0),
    (lambda: SimulatedDevice(1), 1, 2),
    (lambda: SimulatedDevice(2), 2 * CHUNK, 1),
    (lambda: SimulatedDevice(3), CHUNK, 10**6),
    (ThreadDevice, 1, 0),
]
"""Device, and elements of a bucket and how many of them stay."""


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_cut_parameters_train_to_the_same_bits(number: int) -> None:
    """Each kind in some places, all if `DEEP`; programs are drawn in all in test_programs_random.py."""
    kind = KINDS[number]
    theirs = expected(**kind)
    kinds = {StepKind.COMMITTED, StepKind.CLIPPED} if "limit" in kind else {StepKind.COMMITTED}
    assert {outcome.kind for outcome in theirs[:-1]} == kinds
    for device, bucket_numel, gpu_buckets in PLACES if DEEP else (PLACES * 2)[number : number + 5 : 2]:
        options = {"bucket_numel": bucket_numel, "gpu_buckets": gpu_buckets, "num_threads": 1, "device": device()}
        ours, optimizer, scheduler = train(**kind, **options)
        assert ours == theirs, (bucket_numel, gpu_buckets)
        assert (scheduler.statistics.resident_buckets > 0) is (gpu_buckets > 0)
        if "limit" not in kind and kind["dtype"] is torch.bfloat16:  # also of a parameter of which a part is resident
            assert gpu_buckets or optimizer.statistics.accepted == (STEPS - 1) * 6  # parameters, however they are cut
            assert optimizer.statistics.respeculated == 0


# ---- what happens to some pieces -------------------------------------------------------------------------------------


def test_nan_in_the_last_piece_undoes_all() -> None:
    """Its norm comes when the others were speculated on."""
    model = Text()
    optimizer = adam(model, lr=0.02, max_grad_norm=None)

    def spoil(parameter: Tensor) -> None:
        if optimizer.statistics.steps == 2:
            parameter.grad.view(-1)[-1] = torch.nan

    model.embedding.weight.register_post_accumulate_grad_hook(spoil)
    with OffloadScheduler(optimizer, model, bucket_numel=1, device=SimulatedDevice(0)) as scheduler:
        for step in range(4):
            optimizer.zero_grad()
            model(step).backward()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            dropped = optimizer.statistics.dropped
            if step == 2:
                scheduler._catch_up()
                assert len(scheduler._transaction.in_phase(Phase.SPECULATED)) == 3 + sum(PIECES.values())
            optimizer.step()
            after = [torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True)]
            assert (optimizer.last_outcome.kind is StepKind.SKIPPED) is (step == 2)
            assert all(after) if step == 2 else not any(after)
            assert optimizer.statistics.dropped - dropped == (6 if step == 2 else 0)


def spread_out(model: nn.Module, optimizer: SpeculativeCPUAdam, step: int) -> None:
    """Let a cut parameter have gaps in its memory."""
    if step == 1:
        weight = max(model.parameters(), key=torch.Tensor.numel)
        weight.data = torch.stack([weight.data, torch.full_like(weight.data, torch.nan)], dim=-1)[..., 0]


def written(model: nn.Module, optimizer: SpeculativeCPUAdam, step: int) -> None:
    """Write to a part of a cut parameter."""
    if step == STEPS - 2:
        with torch.no_grad():
            max(model.parameters(), key=torch.Tensor.numel)[:3].mul_(0.5)


@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("change", [spread_out, written])
def test_a_cut_parameter_may_be_moved_and_written_to_wherever_its_state_is(change: Change, kept: int) -> None:
    seen, _, scheduler = train(change, bucket_numel=CHUNK, gpu_buckets=kept, device=SimulatedDevice(3))
    assert seen == expected(change)
    assert (scheduler.statistics.resident_buckets > 0) is (kept > 0)


def turned(parameter: Tensor) -> None:
    """Let a gradient lie in another order of memory."""
    if parameter.ndim == 2 and parameter.grad is not None:
        rows, columns = parameter.shape
        strides = (1, rows) if parameter.is_contiguous() else (columns, 1)
        memory = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype)
        parameter.grad = memory.copy_(parameter.grad)


def test_gradients_in_another_order_of_memory_are_cut_in_the_parameters() -> None:
    seen, optimizer, scheduler = train(hook=turned, bucket_numel=1, device=SimulatedDevice(4))
    assert seen == expected()
    assert optimizer.statistics.accepted == 6 * (STEPS - 1)
    assert scheduler.statistics.given_back_gradients == 0


# ---- failures --------------------------------------------------------------------------------------------------------


WORKING = SimulatedDevice(0)


@pytest.mark.parametrize("link", ["auto", torch.float16], ids=str)
@pytest.mark.parametrize("method", ["pack", "host_empty"])
def test_a_piece_without_memory_is_left_to_the_step(method, link, monkeypatch):
    """Also where gradients are rounded on their way: what does not travel is rounded alike."""
    options = {"dtype": torch.float32, "transfer_dtype": link, "limit": 60.0, "bucket_numel": CHUNK}
    theirs = expected(**options, device=WORKING)
    for number in range(14, 26) if DEEP else (14, 19, 25):  # in the second step
        device = SimulatedDevice(number)
        with monkeypatch.context() as patch:
            fail_at(patch, device, method, number, torch.OutOfMemoryError("planted"))
            ours, _, _ = train(**options, device=device)
        assert ours == theirs, number
