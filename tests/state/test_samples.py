"""Writes that leave no hint are found by samples of each working copy, and nothing is found where nobody wrote."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.optimizers import trained
from support.overlap import ImmediateDevice, ThreadDevice, everything
from support.visible import give_gradients, parameter, parameters_of, state_bits, train
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device
from superadam.kernels import native
from superadam.kernels.dtypes import DTYPES
from superadam.state.samples import FULL_STEPS, STAGED_ROWS, Samples, blocks_of
from superadam.testing import SimulatedDevice

STEPS = 5


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets what each search has found."""
    found: list[list[int]] = []
    find_written = Samples.find_written

    def noted(self: Samples, rows: Any) -> list[int]:
        found.append(find_written(self, rows))
        return found[-1]

    monkeypatch.setattr(Samples, "find_written", noted)
    return found


def sampled_places(length: int) -> list[int]:
    count, width, distance = blocks_of(length)
    return sorted({distance * block + i for block in range(count) for i in range(width)})


def differs(copy: Tensor, master: Tensor, **options: Any) -> bool:
    segment = np.zeros(1, native.SEGMENT)
    segment["length"], segment["master"], segment["out_dtype"] = len(copy), master.data_ptr(), DTYPES[copy.dtype]
    segment["out"] = copy.data_ptr()
    return len(native.differing(segment, np.zeros(1, np.int64), **options)) > 0


# ---- what is looked at ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@given(length=st.one_of(st.integers(1, 40), st.integers(1, 300_000), st.integers(270_000, 300_000)), data=st.data())
def test_kernels_look_at_the_same_places(dtype: torch.dtype, length: int, data: st.DataObject) -> None:
    """A difference is found exactly where `blocks_of` says, and anywhere when everything is compared."""
    master = torch.linspace(-1, 1, length)
    copy = master.to(dtype)
    assert not differs(copy, master, everything=False)
    assert not differs(copy, master, everything=True)
    places = sampled_places(length)
    place = data.draw(st.one_of(st.sampled_from(places), st.integers(0, length - 1)))
    copy[place] += 1
    assert differs(copy, master, everything=False) == (place in places)
    assert differs(copy, master, everything=True)


@pytest.mark.parametrize("length", [8, 9, *(n * native.CHUNK + more for n in (1, 2, 63, 64) for more in (0, 1))])
def test_kernels_look_at_the_same_places_where_another_chunk_begins(length: int) -> None:
    copy, master, places = torch.ones(length, dtype=torch.bfloat16), torch.zeros(length), sampled_places(length)
    copy[places] = 0
    assert not differs(copy, master, everything=False)
    for place in places:
        copy[place] = 1
        assert differs(copy, master, everything=False)
        copy[place] = 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pair_of_bit_patterns_differs_as_bits_do(dtype: torch.dtype) -> None:
    """NaN equals NaN, +0 and -0 differ, and masters are rounded as torch rounds them."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for masters in (every.float(), torch.nextafter(every.float(), torch.tensor(0.0)), every.float() * 1.0001):
        rounded = masters.to(dtype)
        for copies, expected in ((rounded, rounded), (-rounded, rounded), (every, rounded), (rounded.flip(0), rounded)):
            same = (copies.view(torch.int16) == expected.view(torch.int16)) | (copies.isnan() & expected.isnan())
            segments = np.zeros(len(every), native.SEGMENT)
            segments["length"], segments["out_dtype"] = 1, DTYPES[dtype]
            segments["master"] = masters.data_ptr() + 4 * np.arange(len(every))
            segments["out"] = copies.contiguous().data_ptr() + 2 * np.arange(len(every))
            for whole in (False, True):
                for rows in (np.arange(len(every)), np.arange(len(every))[::-3].copy()):
                    found = native.differing(segments, rows, everything=whole)
                    assert found.tolist() == rows[~same.numpy()[rows]].tolist()


def test_large_parameters_are_compared_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 100 * native.CHUNK + 5
    master = torch.ones(length)
    copy = master.to(torch.bfloat16)
    monkeypatch.setattr(native, "_num_threads", 2)
    assert not differs(copy, master, everything=True)
    for place in (0, 77_777, length - 1):
        copy[place] = 2
        assert differs(copy, master, everything=True)
        copy[place] = 1


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values.clone(),
    "transposed": lambda values: values.t().clone(memory_format=torch.contiguous_format).t(),
    "sliced": lambda values: torch.stack([values.t(), values.t()], dim=-1)[..., 0].t(),
    "negated lazily": lambda values: torch._neg_view(-values),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_a_write_to_a_sampled_element_of_any_working_copy_is_found(dtype, layout, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 80)), min_size=1, max_size=3))
    ones = [LAYOUTS[layout](parameter(*shape, seed=i).detach().to(dtype)) for i, shape in enumerate(shapes)]
    optimizer = SpeculativeCPUAdam([nn.Parameter(one) for one in ones], lr=0.01)
    twin = SpeculativeCPUAdam([nn.Parameter(LAYOUTS[layout](one)) for one in ones], lr=0.01)
    row = data.draw(st.integers(0, len(shapes) - 1))
    place = data.draw(st.sampled_from(sampled_places(math.prod(shapes[row]))))
    for one in (optimizer, twin):
        train(one, 1, speculative=one is optimizer)
        values = parameters_of(one)[row].data if one is optimizer else parameters_of(one)[row].detach()
        memory = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
        memory[np.unravel_index(place, tuple(memory.shape))] += 1
        train(one, 2, speculative=one is optimizer)
    assert state_bits(optimizer) == state_bits(twin)


# ---- nothing is found where nobody wrote ----------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all kinds; the loss reaches all of them but the empty one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(70, 70).to(dtype))
        self.sliced = nn.Parameter(torch.randn(70, 2).to(dtype)[:, 0])
        self.transposed = nn.Parameter(torch.randn(5, 70).to(dtype).t())
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, dtype=dtype))
        self.nan = nn.Parameter(torch.full((20,), math.nan, dtype=dtype))
        self.other = nn.Parameter(torch.randn(9, dtype=torch.float16))

    def forward(self, seed: int, size: float) -> Tensor:
        x = torch.randn(4, 70, generator=torch.Generator().manual_seed(seed)).to(self.weight.dtype)
        x = (x @ self.weight + self.sliced) @ self.transposed * self.scale
        ignored = self.nan.nan_to_num().sum() + self.empty.sum()
        return size * (x.square().mean() + self.other.to(x.dtype).sum()) + ignored


DEVICES: dict[str, Callable[[], Device] | None] = {
    "no scheduler": None,
    "thread": ThreadDevice,
    "immediate": ImmediateDevice,
    "simulated": lambda: SimulatedDevice(5),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("where", [*DEVICES, "kept", "some kept"])
def test_nothing_is_found_where_nobody_wrote(dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In accepted, clipped, skipped and rolled back steps, and in those that follow them."""
    finds: list[list[int]] = []

    def find_written(self: Samples, rows: Any) -> list[int]:
        finds.extend(self._differing(rows, everything=everything) for everything in (False, True))
        return []

    monkeypatch.setattr(Samples, "find_written", find_written)
    model = Odd(dtype)
    optimizer = SpeculativeCPUAdam(model.parameters(), lr=0.05, max_grad_norm=1e4, amsgrad=where == "simulated")
    with optional_scheduler(optimizer, model, where):
        for seed, size in enumerate([1.0, 1.0, 1e6, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0]):
            optimizer.zero_grad()
            model(seed, size).backward()
            if seed == 6:
                optimizer.rollback()
            if seed == 7:
                model.scale.grad = None
            optimizer.step()
            if seed == 9:
                optimizer.load_state_dict(optimizer.state_dict())
    assert len(finds) == 22
    assert not any(finds)


def optional_scheduler(optimizer: SpeculativeCPUAdam, model: nn.Module, where: str) -> Any:
    """Return a context in which a scheduler runs, as named in `DEVICES` or with buckets that stay on the device."""
    if where == "no scheduler":
        return contextlib.nullcontext()
    make: Any = DEVICES.get(where) or DEVICES["simulated"]
    kept = {"kept": 1000, "some kept": 2}.get(where, 0)
    return OffloadScheduler(optimizer, model, device=make(), bucket_numel=100, gpu_buckets=kept)


@pytest.mark.parametrize("where", ["no scheduler", "immediate"])
def test_edits_of_masters_count(where: str) -> None:
    """In a working copy that nobody wrote to, also if a skipped step lies in between."""

    def run(*, samples: bool) -> dict[str, Any]:
        model = nn.Linear(40, 40, dtype=torch.bfloat16)
        counted(model.weight, parameter(40, 40).detach().to(torch.bfloat16))
        counted(model.bias, torch.zeros(40, dtype=torch.bfloat16))
        optimizer = SpeculativeCPUAdam(model.parameters(), lr=0.01)
        with pytest.MonkeyPatch.context() as patch, optional_scheduler(optimizer, model, where):
            if not samples:
                patch.setattr(Samples, "find_written", lambda self, rows: [])
            for seed, size in enumerate([1.0, 1.0, math.nan, 1.0]):
                if seed == 2:
                    optimizer.state[model.weight]["master"].add_(1)
                give_gradients(optimizer, seed, size)
                optimizer.step()
                optimizer.zero_grad()
            if samples:
                through_data(model.weight, model.weight.detach() + 1)  # a later write is found
            else:
                counted(model.weight, model.weight.detach() + 1)
            for seed in (7, 8):
                give_gradients(optimizer, seed)
                optimizer.step()
            return everything(model, optimizer)

    assert run(samples=True) == run(samples=False)


@pytest.mark.parametrize("master", ["fp32", "24bit"])
def test_an_edit_of_a_master_that_is_not_counted_yields_to_the_parameter_but_for_24_bits(master: str) -> None:
    one: Any = parameter(64, dtype=torch.bfloat16)
    optimizer = trained(SpeculativeCPUAdam([one], lr=0.0, master=master), [1])
    before = one.detach().clone()
    optimizer.state[one]["master"].data.fill_(9)
    train(optimizer, 2)
    assert torch.equal(one, before if master == "fp32" else torch.full_like(before, 9))


def finding(*lengths: int) -> tuple[SpeculativeCPUAdam, list[Tensor]]:
    """Return an optimizer after its first step, and its parameters."""
    ones: list[Tensor] = [parameter(length, dtype=torch.bfloat16, seed=length) for length in lengths]
    return trained(SpeculativeCPUAdam(ones, lr=0.01), [0]), ones


def finding_strided(count: int) -> SpeculativeCPUAdam:
    """Return an optimizer after its first step, whose parameters kernels cannot read."""
    ones = [parameter(4, 2, dtype=torch.bfloat16, seed=seed).detach()[:, 0] for seed in range(count)]
    return trained(SpeculativeCPUAdam(map(nn.Parameter, ones), lr=0.01), [0])


def test_after_a_finding_every_element_is_compared_for_a_while(finds, caplog):
    optimizer, (one, other) = finding(1000, 2000)
    hidden = 500
    assert hidden not in sampled_places(1000)
    one.data[hidden] = 7.0
    train(optimizer, 1)
    assert finds[-1] == []
    assert one[hidden].item() < 6
    one.data[hidden] = 7.0
    other.data[0] = 7.0
    train(optimizer, 2)
    assert finds[-1] == [0, 1]
    assert one[hidden].item() > 6
    for seed in range(FULL_STEPS - 1):
        train(optimizer, seed)
    one.data[hidden] = 7.0
    train(optimizer, 3)
    assert finds[-1] == [0]
    for seed in range(FULL_STEPS):
        train(optimizer, seed)
    one.data[hidden] = 7.0
    train(optimizer, 4)
    assert finds[-1] == []
    (record,) = caplog.records
    assert "parameter 0 of group 0, or its master, was written to past its version counter" in record.getMessage()
    assert "optimizer.reload_masters()" in record.getMessage()


def test_a_finding_keeps_masters_and_speculation_of_what_was_not_written(finds: list[list[int]]) -> None:
    optimizer, (one, other) = finding(1000, 2000)
    twin, (its_one, _) = finding(1000, 2000)
    through_data(one, one.detach() + 1)
    counted(its_one, its_one.detach() + 1)
    before = optimizer.statistics.accepted
    for each in (optimizer, twin):
        train(each, 1, speculative=True)
    assert finds == [[], [0], []] or finds[-2:] == [[0], []]
    assert optimizer.statistics.accepted == before + 1
    assert state_bits(optimizer) == state_bits(twin)
    assert (optimizer.state[other]["master"] != other.float()).any()


def test_parameters_that_kernels_cannot_read_take_turns(finds: list[list[int]]) -> None:
    count = 2 * STAGED_ROWS + 5
    optimizer = finding_strided(count)
    written = [STAGED_ROWS - 4, count - 1]  # whose turns differ
    turns = []
    for seed in range(3):
        for row in written:
            parameters_of(optimizer)[row].data += 1
        train(optimizer, seed)
        turns.append(finds[-1])
    assert turns[:2] == [[], written]


def test_an_edited_master_hides_no_write_to_another_parameter(finds: list[list[int]]) -> None:
    optimizer = finding_strided(2)
    edited, written = parameters_of(optimizer)
    optimizer.state[edited]["master"].add_(0)  # an edit that rounds to the same working copy
    for row, one in ((1, written), (0, edited)):  # nor later ones to its own
        one.data += 1
        train(optimizer, 1)
        assert finds[-1] == [row]


# ---- programs -------------------------------------------------------------------------------------------------------

Write = Callable[[Tensor, Tensor], None]


def counted(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def through_data(parameter: Tensor, values: Tensor) -> None:
    parameter.data.copy_(values)


def memory_of(parameter: Tensor) -> np.ndarray[Any, Any]:
    return parameter.detach().view(torch.int16).numpy()


def through_numpy(parameter: Tensor, values: Tensor) -> None:
    memory_of(parameter)[...] = memory_of(values)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(7)
        self.words = nn.Embedding(50, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.to(torch.bfloat16)

    def forward(self, seed: int) -> Tensor:
        words = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(seed))
        return (self.layers(self.words(words)) - 1).float().square().sum()


Kept = dict[str, list[Tensor]]
"""What a program keeps from step to step."""


def lookahead(model: Net, write: Write, kept: Kept, step: int) -> None:
    """Every second step goes back half of the way to the slow weights."""
    slow = kept.setdefault("slow", [p.detach().clone() for p in model.parameters()])
    for mine, p in zip(slow, model.parameters(), strict=True) if step % 2 else ():
        mine.add_(p.detach() - mine, alpha=0.5)
        write(p, mine)


def clamp(model: Net, write: Write, kept: Kept, step: int, most: float = 0.1) -> None:
    """WGAN."""
    for p in model.parameters():
        write(p, p.detach().clamp(-most, most))


def clamp_of_few(model: Net, write: Write, kept: Kept, step: int) -> None:
    """A clamp that reaches few elements: some step reaches a sample, and later ones lose nothing."""
    clamp(model, write, kept, step, 2.2)


def averages_swapped_in_and_out(model: Net, write: Write, kept: Kept, step: int) -> None:
    averages = kept.setdefault("averages", [p.detach().clone() for p in model.parameters()])
    for average, p in zip(averages, model.parameters(), strict=True):
        average.lerp_(p.detach(), 0.25)
        before = p.detach().clone()
        write(p, average)
        write(p, before)


def initialised_again(model: Net, write: Write, kept: Kept, step: int) -> None:
    for p in model.parameters() if step == 2 else ():
        if p.dim() > 1:
            values = torch.empty_like(p, requires_grad=False)
            write(p, nn.init.xavier_normal_(values, generator=torch.Generator().manual_seed(1)))


def padding_row(model: Net, write: Write, kept: Kept, step: int, row: int = 0) -> None:
    """A row of an embedding stays 0, mostly the first one."""
    values = model.words.weight.detach().clone()
    values[row] = 0
    write(model.words.weight, values)


def row_in_the_middle(model: Net, write: Write, kept: Kept, step: int) -> None:
    padding_row(model, write, kept, step, 20)


SAVED = (lookahead, clamp, initialised_again, averages_swapped_in_and_out, padding_row)


def run_of(body: Callable[..., None], where: str, write: Write, *, reloads: bool = False) -> dict[str, Any]:
    model, kept = Net(), dict[str, list[Tensor]]()
    if write is through_numpy:  # as from another process
        model.share_memory()
    optimizer = SpeculativeCPUAdam(model.parameters(), lr=0.02, max_grad_norm=50.0)
    with optional_scheduler(optimizer, model, where):
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
            if step < STEPS:
                body(model, write, kept, step)
                if reloads:
                    optimizer.reload_masters()
    return everything(model, optimizer)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", [*DEVICES, "kept"])
@pytest.mark.parametrize("write", [through_data, through_numpy])
@pytest.mark.parametrize("body", [*SAVED, clamp_of_few, row_in_the_middle])
def test_uncounted_writes_are_found_or_need_reload_masters(body, write, where):
    """Programs end in the bits of counted writes, or need `reload_masters()` for that."""
    expected = run_of(body, where, counted)
    assert (run_of(body, where, write) == expected) is (body in SAVED)
    assert body in SAVED or run_of(body, where, write, reloads=True) == expected
