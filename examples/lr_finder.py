"""A learning rate finder: save model and optimizer, try ever larger rates, restore both, and train.

    python examples/lr_finder.py

- Copy both state dicts. `model.state_dict()` refers to the weights, which the sweep changes.
- The scheduler may stay open all the time: loading drops what was speculated on.
- Restore model and optimizer in either order. Elements of the weights that come back as they were keep the fp32 masters
  that come back with the optimizer.
- Drop the last gradients, or the first backward of training adds to those of the sweep.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of one batch."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    loss: Tensor = (model(x).float() - x.float().square().mean(-1, keepdim=True)).square().mean()
    return loss


def find(model: nn.Module, optimizer: torch.optim.Optimizer, lowest: float = 1e-5, highest: float = 1.0) -> float:
    """Return a learning rate well below that of the lowest loss; model and optimizer stay as they are."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    rates = torch.logspace(math.log10(lowest), math.log10(highest), 40).tolist()
    losses: list[float] = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(0.7 * losses[-1] + 0.3 * loss.item() if losses else loss.item())
        if losses[-1] > 4 * min(losses):
            break
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])  # and with it the learning rates
    optimizer.zero_grad()
    return float(rates[losses.index(min(losses))]) / 3


def train(steps: int = 60) -> tuple[nn.Module, float, list[float]]:
    """Find a rate, and train with it; return the model, the rate and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters())
    losses = []
    with OffloadScheduler(optimizer, model):
        rate = find(model, optimizer)
        optimizer.param_groups[0]["lr"] = rate
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, 1000 + step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, rate, losses


def main() -> None:
    """Print the rate that was found, the first loss and the last."""
    _, rate, losses = train()
    print(f"found lr={rate:.1e}; loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} after {len(losses)}")


if __name__ == "__main__":
    main()
