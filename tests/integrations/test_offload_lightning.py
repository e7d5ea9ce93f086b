"""`superadam.integrations.lightning.Offload`: a callback, and a Lightning Trainer trains with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from integrations.test_frameworks_lightning import Manual, Module
from support.frameworks import Sentences, dtypes
from support.visible import bits, state_bits
from torch.utils.data import DataLoader

from superadam.integrations.lightning import Offload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("one_torch_thread", "no_network"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def fit(module: Module, folder: Path, callbacks: list[Any], **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=2, callbacks=callbacks, enable_model_summary=False, **{**quiet, **options}
    )
    trainer.fit(module, DataLoader(Sentences(), batch_size=2))


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 1.0},
    "micro-batches": {"accumulate_grad_batches": 2},
}


@dtypes
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
def test_training_has_the_bits_of_training_without_the_callback(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    seen = []
    for callbacks in ([], [Offload(num_threads=1, bucket_numel=500)]):
        module = Module(dtype)
        fit(module, tmp_path, callbacks, **WAYS[way])
        assert module.optimizer is not None
        logged = [bits(value) for one in module.logged for value in one.values()]
        seen.append((state_bits(module.optimizer), logged))
    assert seen[0] == seen[1]
    assert callbacks[0].schedulers == []
    assert (module.optimizer.statistics.accepted > 0) is (dtype == torch.bfloat16)


def test_a_loop_of_its_own(tmp_path: Path) -> None:
    seen = []
    for callbacks in ([], [Offload(num_threads=1, bucket_numel=500)]):
        module = Manual(torch.bfloat16, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"})
        fit(module, tmp_path, callbacks)
        assert module.optimizer is not None
        seen.append(state_bits(module.optimizer))
    assert seen[0] == seen[1]
    assert module.optimizer.statistics.accepted > 0


def test_an_error_closes_the_scheduler(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 3:
                assert offload.schedulers
                raise KeyError("planted")
            return super().training_step(batch, index)

    module, offload = Failing(torch.bfloat16), Offload(num_threads=1)
    with pytest.raises(KeyError, match="planted"):
        fit(module, tmp_path, [offload])
    assert offload.schedulers == []
    assert not any(one._post_accumulate_grad_hooks for one in module.parameters())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="bucket_size"):
        Offload(bucket_size=3)
    module = Module(torch.bfloat16)
    module.optimizer = torch.optim.AdamW(module.parameters())  # type: ignore[assignment]
    with pytest.raises(TypeError, match="expected a SpeculativeCPUAdam"):
        fit(module, tmp_path, [Offload()])
