"""An optimizer class for frameworks that make the optimizer themselves: it opens its scheduler and closes older ones.

    python examples/own_scheduler.py

- Pass the class where a framework wants one: `optimizer_cls_and_kwargs=(OverlappedAdamW, {"lr": 1e-5})` for a
  transformers.Trainer, `NeuralNet(..., optimizer=OverlappedAdamW, optimizer__lr=1e-5)` for skorch.
- The scheduler is opened after the first step: by then the framework has moved the model to its device. Nothing is
  lost, because a parameter's first step is never speculated on.
- An open scheduler has a thread, which keeps optimizer and parameters in memory. Frameworks that change a setting make
  a new optimizer and forget the old one, so each new one closes those that train the same parameters. Call `close()`
  when training is over.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW


class OverlappedAdamW(SpeculativeCPUAdamW):
    """`SpeculativeCPUAdamW` with an `OffloadScheduler` of its own, from its second step on."""

    _open: ClassVar[list[OffloadScheduler]] = []

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._close_those_of({parameter for group in self.param_groups for parameter in group["params"]})
        self._is_new = True  # the hook stays: while hooks run, none may be taken away
        self.register_step_post_hook(lambda optimizer, *_: optimizer.attach())

    @classmethod
    def _close_those_of(cls, parameters: set[nn.Parameter]) -> None:
        for scheduler in list(cls._open):
            groups = scheduler.optimizer.param_groups
            if any(parameter in parameters for group in groups for parameter in group["params"]):
                scheduler.close()
                cls._open.remove(scheduler)

    def attach(self) -> None:
        """Open the scheduler; called after each step, does nothing after the first."""
        if self._is_new:
            self._is_new = False
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            # Of tensors that are no parameters, which optimizers take, too, the list would make new ones.
            model = nn.ParameterList([one for one in parameters if isinstance(one, nn.Parameter)])
            self._open.append(OffloadScheduler(self, model))

    def close(self) -> None:
        """Close the scheduler; training may go on without one."""
        self._is_new = False
        self._close_those_of({parameter for group in self.param_groups for parameter in group["params"]})


class Framework:
    """Stands for a framework: makes the optimizer from a class and its options, anew whenever an option is changed."""

    def __init__(self, model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> None:
        self.model, self.optimizer_class, self.options = model, optimizer_class, options
        self.set_options()

    def set_options(self, **options: Any) -> None:
        """Make a new optimizer."""
        self.options.update(options)
        self.optimizer = self.optimizer_class(self.model.parameters(), **self.options)

    def fit(self, steps: range) -> list[float]:
        """Make steps; return the losses."""
        losses = []
        for step in steps:
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            loss = (self.model(x).float() - x.float().square().mean(-1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def train(optimizer_class: type[SpeculativeCPUAdamW] = OverlappedAdamW) -> tuple[Framework, list[float]]:
    """Train with one learning rate and then with another; return the framework's object and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    framework = Framework(model, optimizer_class, lr=3e-3)
    losses = framework.fit(range(20))
    framework.set_options(lr=1e-3)
    losses += framework.fit(range(20, 40))
    return framework, losses


def main() -> None:
    """Print the first loss and the last."""
    framework, losses = train()
    framework.optimizer.close()  # type: ignore[attr-defined]
    print(f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} after {len(losses)}")


if __name__ == "__main__":
    main()
