"""Factors that were recorded on gradients, judged and applied as torch applies them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import make, trained
from support.visible import give_gradients, parameter, parameters_of, speculate, state_bits, train, visible
from torch import Tensor

from superadam import SpeculativeCPUAdam, StepKind
from superadam.handles.gradient_handle import take_reduced
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels.torch_private import check_and_unscale

TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133}


def _working_copy(values: Tensor) -> torch.nn.Parameter:
    """Return a parameter whose master is another tensor, also where its gradient is fp32."""
    return torch.nn.Parameter(torch.stack([values.detach()] * 2, dim=-1)[..., 0])


def _denormal(gradient: Tensor) -> None:
    gradient.copy_(TINY[gradient.dtype] * (2 * torch.arange(300, dtype=torch.float64) + 1))
    gradient[0] = 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [0.5, 0.3], ids=str)
@pytest.mark.parametrize("limit", [math.inf, 1e9, 0.9 * 0.5 * 2.0], ids=["no limit", "within", "clipped"])
@pytest.mark.parametrize("fill", [lambda gradient: None, _denormal], ids=["usual", "denormal"])
def test_bits_and_norm_are_those_of_the_product(fill, limit, factor, dtype):
    found = []
    for is_speculative in (False, True):
        optimizer = SpeculativeCPUAdam([_working_copy(parameter(300, dtype=dtype))], betas=(0.0, 0.99))
        train(optimizer, 1)
        give_gradients(optimizer, 2)
        (one,) = parameters_of(optimizer)
        fill(one.grad)
        if is_speculative:
            optimizer.speculate()
        one.grad.mul_(factor)
        norm = float(optimizer.clip_grad_norm_(limit))
        optimizer.step()
        found.append((visible(optimizer), norm))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("dtype", "value", "limit", "changes"),
    [
        (torch.float64, 1e170, 1.0, 2 * [lambda gradient: gradient.mul_(2.0**-540)]),  # whose squares overflow before
        (torch.float32, 1.0, None, [lambda gradient: gradient.mul_(0.0), lambda gradient: gradient.mul_(-0.0)]),
        (torch.float32, 1.0, None, 2 * [lambda gradient: gradient.div_(2**60 + 2**36 + 1)]),  # no power of two in fp32
    ],
    ids=["squares", "zeros", "integers"],
)
def test_bits_are_those_of_products_at_the_ends_of_what_is_recorded(dtype, value, limit, changes):
    found = []
    for is_speculative in (False, True):
        weights = [torch.nn.Parameter(torch.full((64,), -0.0, dtype=dtype)) for _ in changes]
        optimizer = SpeculativeCPUAdam(weights, betas=(0.0, 0.99), max_grad_norm=limit)
        for weight in weights:
            weight.grad = torch.full_like(weight, value)
        if is_speculative:
            optimizer.speculate()
        for weight, change in zip(weights, changes, strict=True):
            change(weight.grad)
        optimizer.step()
        found.append(state_bits(optimizer))
    assert found[0] == found[1]


PRODUCTS: dict[str, Callable[[list[Tensor]], object]] = {
    "by a number": lambda gradients: [one.mul_(0.3) for one in gradients],
    "by a tensor": lambda gradients: [one.mul_(torch.tensor(0.3)) for one in gradients],
    "of a list by a number": lambda gradients: torch._foreach_mul_(gradients, 0.3),
    "of a list by a tensor": lambda gradients: torch._foreach_mul_(gradients, torch.tensor(0.3)),
    "divided": lambda gradients: torch._foreach_div_(gradients, 4.0),
    "unscaled": lambda gradients: check_and_unscale(gradients, torch.zeros(()), torch.tensor(0.3)),
}


@pytest.mark.parametrize("limit", [None, 1e-3], ids=["no limit", "clipped"])
@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        *itertools.product([torch.float32, torch.bfloat16], PRODUCTS),
        *((torch.float16, product) for product in PRODUCTS if product != "unscaled"),  # which torch refuses to do
    ],
    ids=str,
)
def test_no_product_is_made_over_gradients_that_kernels_can_scale(dtype, limit, product, monkeypatch):
    """They have its bits all the same. A limit of the optimizer's own is a second product."""
    products: list[TakenGradient] = []
    scaled = TakenGradient.scaled
    monkeypatch.setattr(TakenGradient, "scaled", lambda self: products.append(self) or scaled(self))
    optimizer, twin = (
        SpeculativeCPUAdam([_working_copy(parameter(64, dtype=dtype)), _working_copy(parameter(3, 7, dtype=dtype))])
        for _ in range(2)
    )
    for one in (optimizer, twin):
        one.max_grad_norm = limit
        train(one, 1)
        give_gradients(one, 2, speculative=one is optimizer)
        PRODUCTS[product]([p.grad for p in parameters_of(one) if p.grad is not None])
        one.step()
    assert state_bits(optimizer) == state_bits(twin)
    assert len(products) == (2 if dtype == torch.float16 or limit is not None else 0)


def test_a_product_of_a_gradient_that_counts_unrounded_is_not_rounded() -> None:
    unrounded = torch.randn(70, generator=torch.Generator().manual_seed(5))
    found = []
    for is_recorded, waits in ((True, True), (True, False), (False, True)):
        optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)])
        train(optimizer, 1)
        (one,) = parameters_of(optimizer)
        binding = optimizer._binding
        one.grad = unrounded.bfloat16()
        values = unrounded.clone() if is_recorded else unrounded * 0.3
        take_reduced(one, values, binding._transaction.table.states[0], binding)
        if waits:
            optimizer.speculate()
        if is_recorded:
            one.grad.mul_(0.3)
        optimizer.step()
        found.append(state_bits(optimizer))
        assert optimizer.last_outcome.grad_norm > 1.0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("factor", [0.5, 0.3], ids=str)
def test_norm_without_a_limit_is_that_of_products_before_they_are_rounded(factor: float) -> None:
    optimizer = make(torch.bfloat16, SpeculativeCPUAdam)
    give_gradients(optimizer, 1)
    gradients = [p.grad.double() for p in parameters_of(optimizer) if p.grad is not None]
    optimizer.speculate([parameters_of(optimizer)[0]])
    torch._foreach_mul_([p.grad for p in parameters_of(optimizer)], torch.tensor(factor))
    optimizer.step()
    exact = gradients[0].mul(torch.tensor(factor).double())
    products = [exact, gradients[1].mul(torch.tensor(factor)).bfloat16().double()]  # that one was not taken
    norm = float(torch.cat([one.flatten() for one in products]).norm())
    assert optimizer.last_outcome.grad_norm == pytest.approx(norm, rel=1e-12)  # sums in fp64, in another order


@pytest.mark.parametrize(
    ("count", "unscale", "change", "expected"),
    [
        (1, 1.0, lambda g: g.mul_(0.5), (StepKind.COMMITTED, 1.0)),  # not told as that of all
        (2, 1.0, lambda g: g.mul_(-0.25), (StepKind.COMMITTED, 1.0)),
        (2, 0.3, lambda g: PRODUCTS["unscaled"]([g]) or g.mul_(0.25), (StepKind.CLIPPED, 0.25)),
        (2, 1.0, lambda g: g.div_(4.0), (StepKind.CLIPPED, 0.25)),
        (2, 1.0, lambda g: check_and_unscale([g], *torch.tensor([0.0, 1e39])) or g.div_(4.0), (StepKind.SKIPPED, 1.0)),
    ],
)
def test_factors_of_all_gradients_are_told(count, unscale, change, expected):
    optimizer = trained(make(torch.bfloat16, SpeculativeCPUAdam), [1])
    give_gradients(optimizer, 2)
    norm = optimizer.clip_grad_norm_(math.inf).item() * torch.tensor(unscale).item()
    optimizer.speculate(parameters_of(optimizer)[:count])
    for one in parameters_of(optimizer)[:count]:
        change(one.grad)
    optimizer.step()
    assert (optimizer.last_outcome.kind, optimizer.last_outcome.clip_coefficient) == expected
    assert optimizer.last_outcome.grad_norm == norm or expected[1] == 1.0  # as before clipping


def test_the_norm_so_far_is_of_gradients_as_they_arrived() -> None:
    optimizer = SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)])
    speculate(optimizer, 1)
    transaction: Any = optimizer._binding._transaction
    norm = transaction.norm_so_far()
    transaction.expected_scale = 0.5
    assert transaction.norm_so_far() == norm > 0.0


def test_memory_of_new_values_is_released_once_they_are_published() -> None:
    optimizer = trained(SpeculativeCPUAdam([parameter(70, dtype=torch.bfloat16)]), [1])
    give_gradients(optimizer, 2, speculative=True)
    pending = optimizer._binding._transaction.table.states[0].pending
    assert pending.slot is not None
    optimizer.step()
    assert (optimizer.statistics.accepted, pending.slot) == (1, None)
