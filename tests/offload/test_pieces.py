"""Parameters larger than a bucket are cut: the bits are those without a scheduler, whatever happens to a piece."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.deep import DEEP
from support.overlap import ThreadDevice, adam, fail_at
from support.programs import EIGHT_BITS, HALF_MOMENTS, OTHERS, SHORT_MASTERS, Program, Run, Setting, differences
from support.visible import state_bits
from torch import Tensor, nn

from superadam import OffloadScheduler, StepKind
from superadam.devices import Device
from superadam.devices.worker import WorkerError
from superadam.handles.gradient_handle import taken_of
from superadam.kernels.native import CHUNK
from superadam.state.parameter import piece_length
from superadam.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS, SPOILED = 5, 2
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
        dense = torch.randn(64, 100, dtype=dtype) * 0.1
        self.gaps = nn.Parameter(torch.stack([dense, torch.full_like(dense, torch.nan)], dim=-1)[..., 0])
        self.last = nn.Linear(116, 1, dtype=dtype)

    def forward(self, step: int) -> Tensor:
        hidden = self.embedding(torch.randint(220, (48,), generator=torch.Generator().manual_seed(step)))
        seen = nn.functional.conv2d(hidden.view(48, 64, 1, 1), self.image, padding=1).view(48, 16)
        read = (hidden @ self.transposed).tanh() + hidden @ self.gaps
        return 9.0 * (self.last(torch.cat([seen, read], 1)).float() - 1).square().mean()


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
            counts = [len(state.pieces) for state in scheduler._transaction.table.states]
            names = [name for name, _ in model.named_parameters()]
            assert {name: count for name, count in zip(names, counts, strict=True) if count > 1} == cut


def train(run: Run) -> None:
    """In one step there is a NaN in the last piece, whose norm comes when others were speculated on."""
    model = Text(run.dtype)
    optimizer = run.adamw(model.parameters(), lr=0.02)

    def spoil(parameter: Tensor) -> None:
        if optimizer.statistics.steps == SPOILED:
            parameter.grad.view(-1)[-1] = torch.nan

    model.embedding.weight.register_post_accumulate_grad_hook(spoil)
    # In another order of memory than the parameter:
    model.transposed.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad.contiguous()))
    with run.overlap(optimizer, model) as scheduler:
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
            model(step).backward()
            run.see(gradients=[torch.nn.utils.get_total_norm([parameter.grad]) for parameter in model.parameters()])
            optimizer.step()
            outcome = optimizer.last_outcome
            assert (outcome.kind is StepKind.SKIPPED) is (step == SPOILED)
            run.see([outcome.kind.value, outcome.grad_norm, outcome.clip_coefficient], list(model.parameters()))
        if scheduler is not None and scheduler._device.has_link:
            taken = [one for parameter in model.parameters() if (one := taken_of(parameter.grad)) is not None]
            assert taken
            # All have moved to where they, or their pieces, were sent.
            assert all(one._joined is not None if one.owner().cuts else one.pending._is_view() for one in taken)
    run.see(gradients=[parameter.grad for parameter in model.parameters()])
    counts = optimizer.statistics
    assert not run.setting.clips or (counts.committed and counts.clipped)
    if scheduler is not None:
        kept = run.setting.gpu_buckets
        assert (scheduler.statistics.resident_buckets > 0) is bool(kept)
        if run.dtype is torch.bfloat16 and not run.setting.clips:  # also of a parameter of which a part is resident
            # Parameters, however they are cut.
            assert kept or (counts.accepted, counts.dropped) == ((STEPS - 2) * 6, 6)
            assert counts.respeculated == 0


MORE = [
    Setting("fp32-kept", torch.float32, lambda: SimulatedDevice(1), gpu_buckets=2, clips=True),
    Setting("8bit-simulated", torch.bfloat16, lambda: SimulatedDevice(0), clips=True, storage=(EIGHT_BITS,)),
    Setting(
        "all-kept", torch.bfloat16, lambda: SimulatedDevice(3), CHUNK, 10**6, storage=(HALF_MOMENTS, SHORT_MASTERS)
    ),
    Setting("fp64-thread", torch.float64, ThreadDevice),
]


@pytest.mark.parametrize("setting", [*OTHERS, *MORE], ids=str)
def test_cut_parameters_train_to_the_same_bits(setting: Setting) -> None:
    assert differences(Program("text", train, torch=False, limit=60.0), [setting]) == []


def trained(device: Device, link: Any) -> Any:
    """Make steps, some of them clipped, again where memory ran out; return outcomes and bits."""
    model = Text(torch.float32)
    optimizer = adam(model, lr=0.02, max_grad_norm=60.0)
    outcomes = []
    with OffloadScheduler(optimizer, model, device=device, transfer_dtype=link, bucket_numel=CHUNK):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(step).backward()
            try:
                optimizer.step()
            except (WorkerError, torch.OutOfMemoryError):  # nothing was changed
                optimizer.step()
            outcomes.append(optimizer.last_outcome)
    return outcomes, state_bits(optimizer)


@pytest.mark.parametrize("link", ["auto", torch.float16], ids=str)
@pytest.mark.parametrize("method", ["pack", "host_empty"])
def test_a_piece_without_memory_is_left_to_the_step(method, link, monkeypatch):
    """Also where gradients are rounded on their way: what does not travel is rounded alike."""
    expected = trained(SimulatedDevice(0), link)
    for number in range(14, 26) if DEEP else (14, 19, 25):  # in the second step
        device = SimulatedDevice(number)
        with monkeypatch.context() as patch:
            fail_at(patch, device, method, number, torch.OutOfMemoryError("planted"))
            assert trained(device, link) == expected, number
