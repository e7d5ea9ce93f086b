"""Sharpness-aware minimization: an optimizer class around another one, which makes the step.

    python examples/sam.py

- Give the scheduler the inner optimizer, `sam.base_optimizer`. The wrapper is no `SpeculativeCPUAdam`.
- The first backward only says where to climb to. `scheduler.accumulate()` around it says that no step follows, and its
  gradients are left alone.
- Weights are written between the two backwards, so that nothing is speculated: only the norm of gradients is taken
  during backward. The bits are those of training without a scheduler.
- Save the inner optimizer: `sam.base_optimizer.state_dict()`. SAM's own state lives from the first step to the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from superadam import OffloadScheduler, SpeculativeCPUAdamW


class SAM(Optimizer):
    """Steps with the gradient of a worse point nearby: Foret et al., https://arxiv.org/abs/2010.01412."""

    def __init__(self, params: Any, base: Callable[..., Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb; drop the gradients."""
        trained = [(g["rho"], p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for _, p in trained])
        for rho, parameter in trained:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad * (rho / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Return to where the weights were, and step from there; drop the gradients."""
        for parameter, kept in self.state.items():
            parameter.copy_(kept["before"])
        self.state.clear()
        self.base_optimizer.step()
        self.zero_grad()


def train(steps: int = 30) -> tuple[nn.Module, list[float]]:
    """Fit a small network; return it and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    x = torch.randn(256, 16, dtype=torch.bfloat16)
    y = x.float().square().mean(-1, keepdim=True)
    sam = SAM(model.parameters(), SpeculativeCPUAdamW, rho=0.05, lr=3e-3)

    losses = []
    with OffloadScheduler(sam.base_optimizer, model) as scheduler:
        for _ in range(steps):
            for is_first in (True, False):
                with scheduler.accumulate() if is_first else contextlib.nullcontext():
                    loss = (model(x).float() - y).square().mean()
                    loss.backward()
                sam.first_step() if is_first else sam.second_step()
            losses.append(loss.item())
    return model, losses


def main() -> None:
    """Print the first loss and the last."""
    losses = train()[-1]
    print(f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} after {len(losses)}")


if __name__ == "__main__":
    main()
