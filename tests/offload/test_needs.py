"""What a run takes: the sums are those of a real one, and a scheduler compares them before anything is attached."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measures.paced_device import H200, PacedDevice
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdam
from superadam.devices import Device, PlainDevice
from superadam.devices.flat import aligned
from superadam.host.memory import HostMemory
from superadam.offload.needs import bytes_of_state as bytes_of_one
from superadam.offload.needs import needs_of, needs_of_run
from superadam.offload.placement import Placement
from superadam.state.storage import Master, Moments, Storage
from superadam.state.uncertain import list_bytes
from superadam.testing import SimulatedDevice

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PLACED = Placement(gpu_buckets=0, bucket_numel=100, transfer_dtype=None, num_threads=1)
SIZES = (300, 7, 64)


def make(dtype: torch.dtype, amsgrad: bool = False) -> tuple[nn.Module, SpeculativeCPUAdam]:
    model = nn.Module()
    model.weights = nn.ParameterList(torch.ones(size, dtype=dtype) for size in SIZES)
    first, *others = model.parameters()
    return model, SpeculativeCPUAdam([{"params": [first], "amsgrad": amsgrad}, {"params": others}])


def step(model: nn.Module, optimizer: SpeculativeCPUAdam) -> None:
    sum((weight * weight).sum() for weight in model.parameters()).backward()
    optimizer.step()


def bytes_of_state(optimizer: SpeculativeCPUAdam) -> int:
    return sum(tensor.nbytes for entry in optimizer.state.values() for name, tensor in entry.items() if name != "step")


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("device", [PlainDevice(), SimulatedDevice(1)], ids=["plain", "simulated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_needs_are_what_a_run_takes(dtype: torch.dtype, device: Device, amsgrad: bool) -> None:
    model, optimizer = make(dtype, amsgrad)
    needs = needs_of_run(optimizer, device, PLACED)
    assert needs.present == 0
    with OffloadScheduler(optimizer, model, device=device, bucket_numel=1, num_threads=1) as scheduler:
        for _ in range(3):
            optimizer.zero_grad()
            step(model, optimizer)
        scheduler.synchronize()
        assert needs.state == bytes_of_state(optimizer)
        assert needs.pending == scheduler.statistics.downloaded_bytes / 3
        flat = sum(map(aligned, SIZES)) * dtype.itemsize
        on_device = 0 if isinstance(device, PlainDevice) else sum(SIZES) * dtype.itemsize
        own = isinstance(device, PlainDevice) and dtype.itemsize >= 4
        assert scheduler.statistics.shadow_bytes == (0 if own else flat)
        assert needs.shadows + on_device == (0 if own else sum(SIZES) * dtype.itemsize)
        gradients = [parameter.grad for parameter in model.parameters()]
        assert needs.gradients == (sum(one.nbytes for one in gradients if one is not None) if not on_device else 0)
        later = needs_of_run(optimizer, device, PLACED)
    assert later.total == needs.total
    assert later.missing == needs.total - needs.state - needs.gradients


@given(st.lists(st.integers(0, 999), min_size=1, max_size=5), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1))
def test_one_large_parameter_takes_what_many_small_ones_do(sizes, dtype, is_on_host, num_threads):
    """So that an estimate can be made before there is a model."""
    parameters = [
        nn.Parameter(torch.empty(size, dtype=dtype, device="cpu" if is_on_host else "meta")) for size in sizes
    ]
    run = needs_of_run(SpeculativeCPUAdam(parameters), PlainDevice(), Placement(0, 1, None, num_threads))
    one = needs_of(torch.empty(sum(sizes), dtype=dtype, device="meta"), is_on_host=is_on_host)
    assert run.state == one.state
    gap = sum(map(aligned, sizes)) - aligned(sum(sizes))
    assert run.gradients + run.pending == one.gradients + one.pending + (0 if is_on_host else gap * dtype.itemsize)
    assert run.shadows == (one.shadows if num_threads else 0)
    has_lists = num_threads and dtype in (torch.bfloat16, torch.float16)
    assert run.lists == (sum(list_bytes(size) for size in sizes) if has_lists else 0)
    assert num_threads or run.largest == 0


def test_readme_has_the_bytes_of_a_parameter() -> None:
    parameter, taken = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta"), []
    for storage in (Storage(), Storage(Moments.BFLOAT16), Storage(Moments.EIGHT_BIT, Master.TWENTY_FOUR_BIT)):
        needs = needs_of(parameter, is_on_host=False, storage=storage)
        taken.append(re.escape(f"{(needs.state + needs.pending + needs.lists) / parameter.numel():.1f}"))
    words = r"\| {} \(master, [^)]*\); {} with bf16 moments, {} with 8-bit ones and 24-bit masters"
    assert re.search(words.format(*taken), (Path(__file__).parents[2] / "README.md").read_text())


def test_frozen_parameters_take_nothing() -> None:
    model, optimizer = make(torch.bfloat16, amsgrad=True)
    whole = needs_of_run(optimizer, PlainDevice(), PLACED)
    model.weights[0].requires_grad_(False)
    part = needs_of_run(optimizer, PlainDevice(), PLACED)
    assert whole.total - part.total == 300 * (16 + 2 + 2) + list_bytes(300, with_max=True)


@pytest.mark.parametrize("transfer_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_travel_have_the_dtype_of_the_link(dtype, transfer_dtype):
    _, optimizer = make(dtype)
    optimizer.add_param_group({"params": nn.Parameter(torch.empty(0, dtype=torch.bfloat16))})  # the narrowest is last
    needs = needs_of_run(optimizer, SimulatedDevice(1), Placement(0, 100, transfer_dtype, 1))
    size = (dtype if transfer_dtype is None or dtype is torch.float64 else transfer_dtype).itemsize
    assert needs.pending == sum(map(aligned, SIZES)) * size
    assert needs.largest == (aligned(300) + aligned(100)) * max(size, dtype.itemsize)
    assert needs.gradients == 0


@pytest.mark.parametrize(("free", "waiting"), [(10**6, 0), (742, 0), (700, 42), (0, 742), (-1, 742)])
def test_new_values_wait_on_the_host_where_the_device_has_no_room(free: int, waiting: int) -> None:
    _, optimizer = make(torch.bfloat16, amsgrad=True)
    for more in (0, 2, 9):  # buckets, whose state takes room as well: that of the model at most
        device = PacedDevice(H200, free_bytes=free + min(more * 100, 371) * int(bytes_of_one(amsgrad=True)))
        assert needs_of_run(optimizer, device, Placement(more, 100, None, 1)).shadows == waiting


def test_a_state_that_users_have_damaged_is_passed_over() -> None:
    """Binding refuses it, in its own words."""
    model, optimizer = make(torch.bfloat16)
    step(model, optimizer)
    optimizer.state[model.weights[0]] = 5
    optimizer.state[model.weights[1]]["exp_avg"] = "nothing"
    assert needs_of_run(optimizer, PlainDevice(), PLACED).present > 0
    with pytest.raises(ValueError, match="expected a dict"):
        OffloadScheduler(optimizer, model)


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def remembering(monkeypatch: pytest.MonkeyPatch, limit: int, available: int) -> None:
    """Pretend that there is so much memory."""
    monkeypatch.setattr(HostMemory, "of", lambda host: HostMemory(10**13, limit, available))


class Paced(PacedDevice):
    def __init__(self) -> None:
        super().__init__(H200)


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("device", [PlainDevice, Paced])
def test_scheduler_refuses_what_the_host_can_never_hold(device, num_threads, monkeypatch, caplog):
    """State counts although it does not exist yet; and nothing was attached, allocated or changed."""
    monkeypatch.setattr(device, "idle_cores", lambda self: num_threads)
    model, optimizer = make(torch.bfloat16)
    total = needs_of_run(optimizer, device(), Placement(0, 100, None, num_threads)).total
    assert total >= sum(SIZES) * (12 + 2)
    remembering(monkeypatch, total - 1, 10**13)
    with pytest.raises(MemoryError, match=r"^training \(0\.00 GB of state, .*; allow this process more memory, train"):
        OffloadScheduler(optimizer, model, device=device(), bucket_numel=100)
    assert not optimizer.state
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    remembering(monkeypatch, total, total - 1)  # the limit suffices; what is available is an estimate
    scheduler = OffloadScheduler(optimizer, model, device=device(), bucket_numel=100)
    (record,) = caplog.records
    assert "more host memory, but by the system's estimate" in record.getMessage()
    step(model, optimizer)
    scheduler.close()
    caplog.clear()
    present = bytes_of_state(optimizer)  # is not to come any more
    if device is PlainDevice:
        present += sum(SIZES) * 2  # gradients
    remembering(monkeypatch, total - 1, total - present)  # but counts
    with pytest.raises(MemoryError, match="this process can have"):
        OffloadScheduler(optimizer, model, device=device(), bucket_numel=100)
    remembering(monkeypatch, total, total - present)
    with OffloadScheduler(optimizer, model, device=device(), bucket_numel=100):
        assert not caplog.records


def test_buffers_are_bounded_by_a_bucket_however_large_a_parameter_is() -> None:
    parameter = torch.empty(1000, 1 << 20, dtype=torch.bfloat16, device="meta")
    assert needs_of(parameter, is_on_host=False).largest == parameter.nbytes
    assert needs_of(parameter, is_on_host=False, piece_numel=1 << 24).largest <= 2 << 24
    assert needs_of(parameter.t()[:, ::2], is_on_host=False, piece_numel=1 << 24).largest == parameter.nbytes // 2
    _, optimizer = make(torch.bfloat16)
    one, more = (needs_of_run(optimizer, Paced(), Placement(0, numel, None, 1)) for numel in (sum(SIZES), 10**12))
    assert one.total == more.total  # a bucket holds the model at most


# ---- what is told of a run that the host cannot hold -----------------------------------------------------------------

BF16, LESS, LEAST = "make the optimizer with moments='bf16'", "moments='bf16' and master='24bit'", "moments='8bit' and"
NARROWER = "transfer_dtype=torch.bfloat16"
LARGE = Placement(gpu_buckets=0, bucket_numel=1 << 20, transfer_dtype=None, num_threads=1)


def linear(dtype: torch.dtype, **storage: str) -> tuple[nn.Module, SpeculativeCPUAdam]:
    model = nn.Linear(512, 2048, bias=False, dtype=dtype)
    return model, SpeculativeCPUAdam(model.parameters(), **storage)


def told(model: nn.Module, optimizer: SpeculativeCPUAdam, excess: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the sentence of a host that has so many bytes too few."""
    remembering(monkeypatch, needs_of_run(optimizer, Paced(), LARGE).total - excess, 10**13)
    with pytest.raises(MemoryError) as caught:
        OffloadScheduler(optimizer, model, device=Paced(), bucket_numel=1 << 20, num_threads=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "excess", "named"),
    [
        (torch.bfloat16, 1, [BF16, LESS, LEAST]),
        (torch.bfloat16, 5 << 20, [LESS, LEAST]),  # bytes, of 1 Mi parameters
        (torch.bfloat16, 6 << 20, [LEAST]),
        (torch.bfloat16, 9 << 20, []),
        (torch.float32, 1, [BF16, LESS, LEAST, NARROWER]),
    ],
)
def test_only_what_suffices_is_named(dtype, excess, named, monkeypatch):
    """Formats of state, and a narrower link where gradients are wide."""
    sentence = told(*linear(dtype), excess, monkeypatch)
    assert [words for words in (BF16, LESS, LEAST, NARROWER) if words in sentence] == named
    assert "allow this process more memory, train fewer parameters" in sentence


@pytest.mark.parametrize(
    ("words", "storage"), [(BF16, {"moments": "bf16"}), (f"with {LESS}", {"moments": "bf16", "master": "24bit"})]
)
def test_the_bytes_of_a_remedy_are_those_of_a_run_with_its_arguments(words, storage):
    (_, plain), (_, smaller) = linear(torch.bfloat16), linear(torch.bfloat16, **storage)
    changes = needs_of_run(plain, PlainDevice(), LARGE).changes()
    assert changes[words] == needs_of_run(smaller, PlainDevice(), LARGE).total
    _, least = linear(torch.bfloat16, moments="8bit", master="24bit")
    assert not needs_of_run(least, PlainDevice(), LARGE).changes()
