"""Lookahead: a wrapper that keeps slow weights in the state of the optimizer that it wraps, and in its checkpoints.

    python examples/lookahead.py

- Give the scheduler the inner optimizer, `lookahead.base_optimizer`.
- `optimizer.state[p]` is an ordinary dict: what a wrapper adds to it is saved and loaded along with the rest.
- Do not keep `optimizer.state`, or anything in it, from step to step. While a program holds a part of it, each step is
  finished at once instead of in idle time. The bits are the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW


class Lookahead:
    """Slow weights follow the fast ones every `k` steps: Zhang et al., https://arxiv.org/abs/1907.08610."""

    def __init__(self, base_optimizer: torch.optim.Optimizer, alpha: float = 0.5, k: int = 5) -> None:
        self.base_optimizer, self.alpha, self.k = base_optimizer, alpha, k
        for group in base_optimizer.param_groups:
            group.setdefault("lookahead_step", 0)  # in the group, so that checkpoints hold it

    def step(self) -> None:
        """Make a step; in every k-th, move both weights to a point between them."""
        self.base_optimizer.step()
        for group in self.base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % self.k == 0:
                self._synchronize(group["params"])

    @torch.no_grad()
    def _synchronize(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            entry = self.base_optimizer.state[parameter]
            if not entry:
                continue  # it never had a gradient
            slow = entry.setdefault("slow", parameter.clone())
            slow.lerp_(parameter, self.alpha)
            parameter.copy_(slow)


def make() -> tuple[nn.Module, Lookahead]:
    """Return a small network in bf16 and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    return model, Lookahead(SpeculativeCPUAdamW(model.parameters(), lr=3e-3))


def fit(model: nn.Module, lookahead: Lookahead, steps: range) -> list[float]:
    """Make steps; return the losses."""
    losses = []
    with OffloadScheduler(lookahead.base_optimizer, model):  # type: ignore[arg-type]
        for step in steps:
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            loss = (model(x).float() - x.float().square().mean(-1, keepdim=True)).square().mean()
            lookahead.base_optimizer.zero_grad()
            loss.backward()
            lookahead.step()
            losses.append(loss.item())
    return losses


def train() -> tuple[nn.Module, nn.Module, list[float]]:
    """Train 40 steps; and once more, saved and resumed after 23; return both networks and the losses."""
    model, lookahead = make()
    losses = fit(model, lookahead, range(23))
    saved: dict[str, Any] = copy.deepcopy(
        {"model": model.state_dict(), "optimizer": lookahead.base_optimizer.state_dict()}
    )
    losses += fit(model, lookahead, range(23, 40))

    resumed, again = make()
    resumed.load_state_dict(saved["model"])
    again.base_optimizer.load_state_dict(saved["optimizer"])
    fit(resumed, again, range(23, 40))
    return model, resumed, losses


def main() -> None:
    """Print losses, and whether the resumed run ended in the same weights."""
    model, resumed, losses = train()
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    print(f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} after {len(losses)}")
    print(f"resumed after 23 steps: the same weights is {all(one.equal(other) for one, other in pairs)}")


if __name__ == "__main__":
    main()
