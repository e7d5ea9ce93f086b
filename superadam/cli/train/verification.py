"""The reference of a verified run: torch's own AdamW, fed the same gradients and compared with the run's state.

It is an fp32 copy of every parameter, stepped by `torch.optim.AdamW(fused=True)`. It computes norms and verdicts with
torch and must never call superadam's arithmetic: a reference that shares the code shares the faults. Only the clip
coefficient is taken from the run, after checking that it is the reference's own to within one unit in its last place.
Where the run stores state in fewer bits, the reference rounds torch's after each step, with `superadam.testing`.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from superadam import SpeculativeCPUAdamW, StepKind, StepOutcome
from superadam.cli.train.device import wait_for
from superadam.state.parameter import Master, Moments, Storage
from superadam.testing.rounding import round_by_thresholds, round_to_8_bits

NORM_TOLERANCE = 1e-10
"""Largest relative difference of two norms that counts as equal. Both sum positive squares in fp64 in blocks, a few
thousand roundings of 2**-53 one after the other: below 1e-12 in any order, while a wrong element would show in fp32."""

_PADDING = 64
"""torch's fused kernel rounds the last `length mod 16` elements differently from its vectors; multiples of 64 have no
such rest."""

_COEFFICIENT_TOLERANCE = 2.0**-23
"""Relative: one unit in the last place of fp32. The run rounds its coefficient to fp32, the reference does not."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What the comparison found.

    Attributes:
        elements: of p, m and v, as they are stored, that were compared at the end.
        elements_differing: those that differ in any bit; NaN equals NaN, +0 differs from -0.
        parameters_differing: elements of the model's own parameters that differed from the rounded reference after any
            step, summed over steps.
        verdicts_differing: steps that were committed, clipped or skipped when the reference says otherwise.
        norm_max_relative_difference: largest over all steps, against torch in fp64.
    """

    elements: int
    elements_differing: int
    parameters_differing: int
    verdicts_differing: int
    norm_max_relative_difference: float

    @property
    def is_failed(self) -> bool:
        """Whether the run differs from the reference in anything."""
        differing = self.elements_differing or self.parameters_differing or self.verdicts_differing
        return bool(differing) or not self.norm_max_relative_difference <= NORM_TOLERANCE


def count_differing(a: Tensor, b: Tensor) -> int:
    """Return how many elements of two fp32 or two 16-bit tensors differ in any bit; NaN equals NaN."""
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    differ = a.contiguous().view(integers) != b.contiguous().view(integers)
    return int((differ & ~(a.isnan() & b.isnan())).sum())


class Reference:
    """`torch.optim.AdamW(fused=True)` over flat, padded fp32 copies of a run's parameters.

    It copies each gradient by a hook of its own during backward. Each step: backward, the optimizer's step, then
    `step()` with its outcome.

    It lies on the CPU, wherever the model is: 16 bytes of memory per parameter, and while a step is checked another 16
    per element of the largest one. A model on a GPU waits for the copy of each gradient and computes nothing meanwhile,
    so that its steps take longer than without a reference.

    Args:
        optimizer: whose present state the reference starts from.
        model: holds the optimizer's parameters, all of which get one gradient in each step.
    """

    def __init__(self, optimizer: SpeculativeCPUAdamW, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._storage = Storage(Moments(optimizer.moments), Master(optimizer.master))
        self._parameters: list[Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        entries = optimizer.state_dict()["state"]
        self._copies: list[Parameter] = []
        groups = []
        for group in optimizer.param_groups:
            start = len(self._copies)
            for index, parameter in enumerate(group["params"], start):
                master = entries.get(index, {}).get("master", parameter)
                self._copies.append(Parameter(_padded(master)))
            groups.append({**_hyperparameters(group), "params": self._copies[start:]})
        self._adamw = torch.optim.AdamW(groups, fused=True)
        for index, copy in enumerate(self._copies):
            if entry := entries.get(index):
                moments = {key: _padded(entry[key]) for key in ("exp_avg", "exp_avg_sq")}
                self._adamw.state[copy] = {"step": entry["step"].clone(), **moments}
        self._parameters_differing = 0
        self._verdicts_differing = 0
        self._norm_difference = 0.0
        self._hook_seconds = 0.0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._take, copy))  # type: ignore[no-untyped-call]
            for parameter, copy in zip(self._parameters, self._copies, strict=True)
        ]

    def _take(self, copy: Tensor, parameter: Tensor) -> None:
        """Copy a gradient, widened to fp32; called by autograd during backward."""
        wait_for(parameter.device)  # backward's time up to here is not the reference's
        begin = time.perf_counter()
        gradient = parameter.grad
        assert gradient is not None
        copy.grad = _padded(gradient)
        self._hook_seconds += time.perf_counter() - begin

    def take_hook_seconds(self) -> float:
        """Return the time inside the hooks since the last call, which passed in backward but is the reference's."""
        seconds, self._hook_seconds = self._hook_seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop taking gradients; the comparison is still possible."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def step(self, outcome: StepOutcome) -> None:
        """Apply `outcome` to the copied gradients, and compare norm, verdict and the model's parameters."""
        gradients = [copy.grad for copy in self._copies if copy.grad is not None]
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
        self._compare_verdict(outcome, is_finite, math.sqrt(squares))
        if outcome.kind is not StepKind.SKIPPED:
            if outcome.clip_coefficient != 1.0:
                for gradient in gradients:
                    gradient.mul_(outcome.clip_coefficient)
            for ours, theirs in zip(self._optimizer.param_groups, self._adamw.param_groups, strict=True):
                theirs.update(_hyperparameters(ours))
            self._adamw.step()
            self._round_state()
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            rounded = copy[: parameter.numel()].to(parameter.dtype)
            self._parameters_differing += count_differing(parameter.detach().cpu().flatten(), rounded)

    def _round_state(self) -> None:
        """Let the next step continue from what the run stores."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            state = self._adamw.state[copy]
            storage, step = self._storage.of(parameter), int(state["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                if storage.moments is Moments.BFLOAT16:
                    state[key].copy_(round_by_thresholds(state[key], step, 16))
                elif storage.moments is Moments.CODES:
                    state[key].copy_(round_to_8_bits(state[key], step, is_first=key == "exp_avg"))
            if storage.master is Master.PLANES:
                copy.copy_(round_by_thresholds(copy, step, 8))

    def _compare_verdict(self, outcome: StepOutcome, is_finite: bool, norm: float) -> None:
        limit = math.inf if self._optimizer.max_grad_norm is None else self._optimizer.max_grad_norm
        if is_finite:
            coefficient = min(1.0, limit / (norm + 1e-6))
            is_same = outcome.kind is (StepKind.COMMITTED if outcome.clip_coefficient == 1.0 else StepKind.CLIPPED)
            is_same &= abs(outcome.clip_coefficient - coefficient) <= _COEFFICIENT_TOLERANCE * coefficient
            difference = abs(outcome.grad_norm - norm) / max(norm, 1e-300)
            # max() alone would lose a NaN
            self._norm_difference = difference if math.isnan(difference) else max(self._norm_difference, difference)
        else:
            is_same = outcome.kind is StepKind.SKIPPED
        self._verdicts_differing += not is_same

    def compare(self) -> Verification:
        """Compare the run's p, m and v with the reference's, bit by bit; commits what is accepted."""
        elements = differing = 0
        entries = self._optimizer.state_dict()["state"]
        for index, (parameter, copy) in enumerate(zip(self._parameters, self._copies, strict=True)):
            ours, theirs = entries.get(index, {}), self._adamw.state.get(copy, {})
            zeros = torch.zeros_like(copy)[: parameter.numel()]
            pairs = [(ours.get("master", parameter.detach()), copy.detach())]
            pairs += [(ours.get(key, zeros), theirs.get(key, zeros)) for key in ("exp_avg", "exp_avg_sq")]
            for mine, reference in pairs:
                elements += mine.numel()
                differing += count_differing(mine.cpu().float().flatten(), reference[: mine.numel()])
        return Verification(
            elements, differing, self._parameters_differing, self._verdicts_differing, self._norm_difference
        )


def _padded(tensor: Tensor) -> Tensor:
    """Return a flat fp32 copy on the CPU, padded with zeros."""
    flat = torch.zeros(-(-tensor.numel() // _PADDING) * _PADDING, device="cpu")
    flat[: tensor.numel()] = tensor.detach().flatten()
    return flat


def _hyperparameters(group: dict[str, object]) -> dict[str, object]:
    return {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
