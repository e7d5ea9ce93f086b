"""`superadam.GradScaler`: torch's dynamic loss scaling for gradients that the scheduler takes as they arrive.

torch's own scaler looks for Inf in `.grad`, which is empty by then. This one takes the optimizer's verdict instead.
The scale is undone inside the formula, with the clip coefficient, in one multiplication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from superadam.optimizer import SpeculativeCPUAdam
from superadam.outcome import StepKind


class GradScaler(torch.amp.GradScaler):
    """A drop-in for `torch.amp.GradScaler` beside an `OffloadScheduler(..., grad_scaler=scaler)`.

    `scale`, `step`, `update` and checkpoints work as in torch. `unscale_` does nothing, because the optimizer clips
    unscaled gradients anyway; set `max_grad_norm`.
    """

    _known_scale: float | None = None

    @property
    def inverse_scale(self) -> float:
        """Factor that undoes the present scale; 1.0 when disabled."""
        if not self.is_enabled():
            return 1.0
        if self._known_scale is None:
            self._known_scale = self.get_scale()
        return 1.0 / self._known_scale

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the next scale, as in torch; it is read here, where a GPU has little to do, and not amid backward."""
        super().update(new_scale)
        self._known_scale = self.get_scale() if self.is_enabled() else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, as in torch."""
        super().load_state_dict(state_dict)
        self._known_scale = None

    def unscale_(self, optimizer: Optimizer) -> None:
        """Do nothing for the optimizer whose gradients are taken; otherwise as in torch."""
        if not isinstance(optimizer, SpeculativeCPUAdam):
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer and note whether it skipped; it does both the unscaling and the check.

        Raises:
            RuntimeError: called twice before `update()`.
        """
        if not self.is_enabled() or not isinstance(optimizer, SpeculativeCPUAdam):
            return super().step(optimizer, *args, **kwargs)
        if not optimizer.bound_with_sums().is_open:  # nothing was taken: what there is lies in `.grad`
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() was called twice since the last update(); call update() after each step()")
        result = optimizer.step(*args, **kwargs)
        skipped = optimizer.last_outcome is not None and optimizer.last_outcome.kind is StepKind.SKIPPED
        assert self._scale is not None
        found = torch.full((), float(skipped), dtype=torch.float32, device=self._scale.device)
        state["found_inf_per_device"] = {self._scale.device: found}
        state["stage"] = OptState.STEPPED
        return result
