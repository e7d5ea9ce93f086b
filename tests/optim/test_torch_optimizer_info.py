"""What torch's own tests ask of every optimizer in `optim_db`, of ours, in each configuration that ours has."""

from __future__ import annotations

import copy
import itertools
import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optim.test_torch_cases import CASES, CONFIGURATIONS, REFUSED, options_of
from support.optimizers import EACH_DTYPE, copy_weights, through_disk, trained
from support.visible import (
    entry_bits,
    give_gradients,
    parameter,
    parameters_of,
    state_bits,
    train,
    visible,
)
from torch.testing._internal.common_optimizers import optim_db

INFO = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in CASES}
EACH = pytest.mark.parametrize("name", CASES)
CONFIGURED = pytest.mark.parametrize(
    ("name", "description"), [(name, one) for name, one in CONFIGURATIONS if one not in REFUSED]
)
BOTH_WAYS = pytest.mark.parametrize("speculative", [False, True])
SHAPES = [(64,), (16, 12), ()]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def make(name: str, description: str = "default", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    made = [parameter(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(SHAPES)]
    return CASES[name][0](made, **{**copy.deepcopy(options_of(name)[description]), **options})


# -- steps -------------------------------------------------------------------------------------------------------------


def descend(cls: type, schedulers: list[Callable[[Any], Any]], **options: Any) -> Iterator[Any]:
    """Fit a line with momentum from autograd; yield the loss and what can be seen."""
    weight, bias = parameter(64), parameter(64, seed=1)
    x, y = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    optimizer: Any = cls([{"params": [weight]}, {"params": [bias], "lr": 0.01}], **options)
    made = [scheduler(optimizer) for scheduler in schedulers]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x + bias - y).square().sum() * (-1 if options.get("maximize") else 1)
        loss.backward()
        return loss

    for step in range(8):
        loss = closure()
        if step % 2:
            loss = optimizer.step(closure)
        else:
            optimizer.step()
        for one in made:
            one.step(*([loss] if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        yield abs(loss.item()), state_bits(optimizer)


@CONFIGURED
@pytest.mark.parametrize("chosen", range(-1, max(len(info.scheduler_inputs) for info in INFO.values())))
def test_goes_in_the_right_direction(name: str, description: str, chosen: int) -> None:
    """With closures and with each list of schedulers in `optim_db`: downhill, and in torch's bits."""
    inputs = INFO[name].scheduler_inputs
    schedulers = [] if chosen < 0 else inputs[chosen % len(inputs)]
    options = options_of(name)[description]
    ours = list(descend(CASES[name][0], schedulers, **copy.deepcopy(options)))
    assert ours[-1][0] < ours[0][0]
    if platform.machine() == "x86_64":  # elsewhere torch's fused kernel rounds differently from itself here
        assert ours == list(descend(CASES[name][1], schedulers, fused=True, **copy.deepcopy(options)))


@CONFIGURED
@pytest.mark.parametrize("dimensions", [0, 1, 2])
def test_tensor_lr_of_any_shape(name: str, description: str, dimensions: int) -> None:
    optimizer, twin = make(name, description, lr=0.01), make(name, description, lr=torch.full((1,) * dimensions, 0.01))
    twin.param_groups[0]["lr"] = twin.param_groups[0]["lr"].double()
    twin.param_groups[0]["lr"].fill_(0.01)
    for one in (optimizer, twin):
        trained(one)
    assert state_bits(optimizer) == state_bits(twin)


@CONFIGURED
@BOTH_WAYS
@pytest.mark.parametrize("has_state", [False, True])
def test_nothing_happens_without_gradients(name: str, description: str, speculative: bool, has_state: bool) -> None:
    optimizer = make(name, description)
    if has_state:
        trained(optimizer)
    before = visible(optimizer)
    if speculative:
        optimizer.speculate()
    optimizer.step()
    assert optimizer.step(lambda: 1) == 1
    assert visible(optimizer) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


@CONFIGURED
def test_meta_gradients_are_refused(name: str, description: str) -> None:
    """The optimizer can be made; a step needs values."""
    optimizer = CASES[name][0]([torch.nn.Parameter(torch.ones(3, device="meta"))], **options_of(name)[description])
    (p,) = parameters_of(optimizer)
    optimizer.step()
    p.grad = torch.ones_like(p)
    for use in (optimizer.step, optimizer.speculate, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="the gradient of parameter 0 of group 0 is on meta, expected values on"):
            use()
    p.grad = None
    assert optimizer.state_dict()["state"] == {}


# -- state dicts and copies --------------------------------------------------------------------------------------------


@CONFIGURED
@BOTH_WAYS
@EACH_DTYPE
def test_state_dict_goes_on_alike(name: str, description: str, speculative: bool, dtype: torch.dtype) -> None:
    """Through a file of weights alone, with schedulers that have changed the groups."""
    optimizer, fresh = make(name, description, dtype), make(name, description, dtype, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for seed in range(3):
        train(optimizer, seed, speculative=speculative)
        scheduler.step()
    saved = through_disk(optimizer.state_dict())
    assert visible(optimizer)["state"] == {row: entry_bits(entry) for row, entry in saved["state"].items()}
    copy_weights(fresh, optimizer)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]
    for one in (optimizer, fresh):
        trained(one, range(3, 6), speculative=speculative and one is fresh)
    assert visible(fresh) == visible(optimizer)


@CONFIGURED
def test_state_dict_is_older_than_any_of_the_later_flags(name: str, description: str) -> None:
    flags = [*INFO[name].not_og_supported_flags, "decoupled_weight_decay"]
    source = trained(make(name, description))
    for count in range(len(flags) + 1):
        saved = copy.deepcopy(source.state_dict())
        reference = CASES[name][1]([torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES])
        fresh = make(name, "amsgrad")
        for flag in flags[:count]:
            del saved["param_groups"][0][flag]
        if count:
            saved["state"][0]["step"] = int(saved["state"][0]["step"])  # a number then
        fresh.load_state_dict(copy.deepcopy(saved))
        reference.load_state_dict(saved)
        assert {**fresh.param_groups[0], "params": 0} == {**reference.param_groups[0], "params": 0}
        trained(fresh)


@EACH
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_state_dict_does_not_depend_on_what_had_a_gradient_first(name: str, order: tuple[int, ...]) -> None:
    optimizer, twin = make(name), make(name)
    for one, rows in ((optimizer, order), (twin, range(3))):
        for row in rows:
            give_gradients(one, 1)
            for other, p in enumerate(parameters_of(one)):
                p.grad = p.grad if other == row else None
            one.step()
            one.zero_grad()
    assert visible(optimizer) == visible(twin)
    fresh = make(name)
    fresh.load_state_dict(optimizer.state_dict())
    assert state_bits(fresh)["state"] == state_bits(twin)["state"]


@EACH
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


@CONFIGURED
def test_deepcopy_copies_every_public_attribute(name: str, description: str) -> None:
    optimizer = trained(make(name, description))
    other = copy.deepcopy(optimizer)
    public = {key for key in dir(optimizer) if not key.startswith("_")}
    assert public == {key for key in dir(other) if not key.startswith("_")}
    assert other.defaults == optimizer.defaults
    assert repr(other) == repr(optimizer)
    assert visible(other) == visible(optimizer)
