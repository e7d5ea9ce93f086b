"""`Offload()`: the callback with which a Lightning Trainer trains with superadam during backward."""

from __future__ import annotations

import inspect
from typing import Any

from superadam.offload.scheduler import OffloadScheduler

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(f"superadam.integrations.lightning needs lightning ({error}); pip install lightning") from error


class Offload(Callback):
    """Opens an `OffloadScheduler` for each optimizer that `configure_optimizers` returns, while `fit` runs.

    Each has to be a `SpeculativeCPUAdam`.

    Args:
        scheduler_options: of `superadam.OffloadScheduler`.

    Attributes:
        schedulers: one for each optimizer while `fit` runs.

    Raises:
        TypeError: the scheduler has no such option.
    """

    def __init__(self, **scheduler_options: Any) -> None:
        inspect.signature(OffloadScheduler).bind(None, None, **scheduler_options)
        self.schedulers: list[OffloadScheduler] = []
        self._options = scheduler_options

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load states where they stay: a strategy of one device moves them to it, with 12 bytes per parameter."""
        strategy = trainer.strategy
        if isinstance(strategy, SingleDeviceStrategy):
            strategy.load_optimizer_state_dict = lambda checkpoint: [  # type: ignore[method-assign, assignment]
                optimizer.load_state_dict(state)
                for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=False)
            ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the schedulers: the model is where it trains by now, and a checkpoint is loaded."""
        vars(trainer.strategy).pop("load_optimizer_state_dict", None)
        self._close()
        optimizers: list[Any] = trainer.optimizers
        for optimizer in optimizers:
            self.schedulers.append(OffloadScheduler(optimizer, pl_module, **self._options))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the schedulers."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the schedulers."""
        self._close()

    def _close(self) -> None:
        schedulers, self.schedulers = self.schedulers, []
        for scheduler in schedulers:
            scheduler.close()
