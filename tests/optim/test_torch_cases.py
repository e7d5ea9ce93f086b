"""torch's own configurations and bad inputs of Adam and AdamW: each is done as torch does it, or refused by name."""

import copy
import platform
from typing import Any

import pytest
import torch
from support.optimizers import EACH_DTYPE, PAIRS, make, trained
from support.visible import bits, entry_bits, give_gradients, parameter, parameters_of, state_bits, train
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.testing._internal.common_optimizers import optim_db

INFOS = {info.optim_cls: info for info in optim_db}
CASES = {theirs.__name__: (ours, theirs, INFOS[theirs]) for ours, theirs in PAIRS}


def options_of(name: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """Return constructor arguments by description; MPS and CUDA add their own, with tensors on the CPU all the same."""
    inputs = CASES[name][2].optim_inputs_func
    return {one.desc: one.kwargs for device in ("cpu", "mps", "cuda") for one in inputs(device, dtype)}


CONFIGURATIONS = [(name, description) for name in CASES for description in options_of(name)]
REFUSED = {
    "capturable",
    "capturable, amsgrad",
    "Tensor lr with capturable and amsgrad",
    "Tensor lr, Tensor betas, with capturable and amsgrad",
    "Tensor lr, Tensor betas, with capturable",
}
"""Configurations that ours does not do: the update runs on the CPU, outside CUDA graphs."""

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run(cls: type, dtype: torch.dtype, *, speculative: bool = False, **options: Any) -> list[Any]:
    """Return parameters and state after each of five steps; every length is a multiple of 64."""
    optimizer = cls([parameter(64, dtype=dtype), parameter(16, 12, dtype=dtype, seed=1)], **options)
    seen = []
    for seed in range(5):
        train(optimizer, seed, speculative=speculative)
        seen.append(state_bits(optimizer))
    return seen


ACCEPTED = pytest.mark.parametrize(
    ("name", "description"), [(name, one) for name, one in CONFIGURATIONS if one not in REFUSED]
)

if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here

    @ACCEPTED
    @pytest.mark.parametrize("speculative", [False, True])
    @EACH_DTYPE
    def test_configuration_has_the_bits_of_torch(name, description, speculative, dtype):
        """A working copy has the rounded ones of torch's run in fp32."""
        ours, theirs, _ = CASES[name]
        options, wide = options_of(name, dtype)[description], torch.promote_types(dtype, torch.float32)
        optimizer = ours([parameter(64, dtype=dtype), parameter(16, 12, dtype=dtype, seed=1)], **options)
        masters = [torch.nn.Parameter(p.detach().to(wide, copy=True)) for p in parameters_of(optimizer)]
        reference = theirs(masters, fused=True, **options)
        for seed in range(5):
            give_gradients(optimizer, seed, speculative=speculative)
            for p, master in zip(parameters_of(optimizer), masters, strict=True):
                master.grad = p.grad.to(wide, copy=True)
            (optimizer.resolve if speculative else optimizer.step)()
            reference.step()
            for p, master in zip(parameters_of(optimizer), masters, strict=True):
                entry = entry_bits(optimizer.state[p])  # of what is held nothing is speculated on
                assert bits(p) == bits(master.to(dtype))
                assert entry.pop("master", bits(p)) == bits(master)
                assert entry == entry_bits(reference.state[master])
        # The first step makes the state; a parameter that is its own master is not speculated on.
        assert optimizer.statistics.accepted == (8 if speculative and dtype.itemsize == 2 else 0)


@pytest.mark.parametrize(("name", "description"), [(name, one) for name, one in CONFIGURATIONS if one in REFUSED])
def test_capturable_is_refused(name: str, description: str) -> None:
    """And the rest of such a configuration, tensors for lr and betas, is as with numbers."""
    cls = CASES[name][0]
    options = options_of(name)[description]
    with pytest.raises(RuntimeError, match="capturable=True is not possible, because the update runs on the CPU"):
        run(cls, torch.float32, **options)
    del options["capturable"]
    numbers = {key: float(value) if key == "lr" else value for key, value in options.items()}
    if "betas" in numbers:
        numbers["betas"] = tuple(map(float, numbers["betas"]))
    for speculative in (False, True):
        assert run(cls, torch.float32, speculative=speculative, **options) == run(cls, torch.float32, **numbers)


def test_every_refusal_is_a_configuration_of_torch() -> None:
    for name in CASES:
        assert options_of(name).keys() > REFUSED


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("index", range(len(INFOS[torch.optim.Adam].optim_error_inputs_func("cpu", torch.float32))))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bad_input_is_refused_as_by_torch(name: str, index: int, dtype: torch.dtype) -> None:
    ours, theirs, info = CASES[name]
    case = info.optim_error_inputs_func("cpu", dtype)[index]
    given = case.optimizer_error_input
    params = [parameter(3, dtype=dtype)] if given.params is None else given.params
    expect = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
    for cls in (theirs, ours):
        with expect(case.error_type, match=case.error_regex):
            cls(params, **given.kwargs)


@ACCEPTED
@pytest.mark.parametrize("dimensions", [0, 1, 2])
def test_tensor_lr_of_any_shape(name: str, description: str, dimensions: int) -> None:
    options = options_of(name)[description]
    optimizer, twin = (
        make(cls=CASES[name][0], **options | {"lr": lr}) for lr in (0.01, torch.full((1,) * dimensions, 0.01))
    )
    twin.param_groups[0]["lr"] = twin.param_groups[0]["lr"].double()
    twin.param_groups[0]["lr"].fill_(0.01)
    assert state_bits(trained(optimizer)) == state_bits(trained(twin))


@pytest.mark.parametrize("name", CASES)
def test_meta_gradients_are_refused(name: str) -> None:
    """The optimizer can be made; a step needs values."""
    optimizer = CASES[name][0]([torch.nn.Parameter(torch.ones(3, device="meta"))])
    (p,) = parameters_of(optimizer)
    optimizer.step()
    p.grad = torch.ones_like(p)
    for use in (optimizer.step, optimizer.speculate, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="of parameter 0 of group 0 is on the meta device and has no values, "):
            use()
    p.grad = None
    assert optimizer.state_dict()["state"] == {}


@ACCEPTED
def test_state_dict_is_older_than_any_of_the_later_flags(name: str, description: str) -> None:
    flags = [*CASES[name][2].not_og_supported_flags, "decoupled_weight_decay"]
    source = trained(make(cls=CASES[name][0], **options_of(name)[description]))
    for count in range(len(flags) + 1):
        saved = copy.deepcopy(source.state_dict())
        fresh, reference = (make(cls=cls, amsgrad=True) for cls in CASES[name][:2])
        for flag in flags[:count]:
            del saved["param_groups"][0][flag]
        if count:
            saved["state"][0]["step"] = int(saved["state"][0]["step"])  # a number then
        fresh.load_state_dict(copy.deepcopy(saved))
        reference.load_state_dict(saved)
        assert {**fresh.param_groups[0], "params": 0} == {**reference.param_groups[0], "params": 0}
        trained(fresh)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_named", [False, True])
def test_state_dict_between_named_and_unnamed_parameters(name: str, is_named: bool) -> None:
    """As torch: loaded names replace those there, and without any those there stay."""

    def build(cls: type, named: bool) -> Any:
        model = torch.nn.Linear(8, 8)
        return cls(model.named_parameters() if named else model.parameters())

    ours, theirs = CASES[name][:2]
    for first, second in ((ours, ours), (theirs, ours), (ours, theirs)):
        saved = trained(build(first, is_named)).state_dict()
        fresh, reference = build(second, not is_named), build(theirs, not is_named)
        for one in (fresh, reference):
            one.load_state_dict(copy.deepcopy(saved))
        assert fresh.param_groups[0].get("param_names") == reference.param_groups[0].get("param_names")
        assert fresh.param_groups[0]["param_names"] == ["weight", "bias"]
        trained(fresh)


def test_order_of_memory_that_changes_during_training() -> None:
    """As torch's default implementation; its fused kernel would give elements the moments of others."""
    ends = []
    for cls, options in ((CASES["AdamW"][0], {}), (torch.optim.AdamW, {"foreach": False})):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(4, 64, 3)
        optimizer = cls(model.parameters(), lr=0.01, **options)
        for step in range(4):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            (model(torch.randn(2, 4, 6, 6)) - 1).square().mean().backward()
            optimizer.step()
        ends.append([one.detach() for one in model.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # the two of torch's round differently


def test_state_that_is_asked_for_before_the_first_step() -> None:
    """Torch's checkpoints make a step to get it, which torch counts."""
    counts = []
    for cls in (CASES["AdamW"][0], torch.optim.AdamW):
        model = torch.nn.Linear(8, 8)
        optimizer = cls(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        counts.append({int(entry["step"]) for entry in optimizer.state.values()})
    assert counts == [{1}, {2}]
