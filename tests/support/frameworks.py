"""The same training with and without an `OffloadScheduler`, in frameworks that bring their own loop.

No framework's loop is changed: a test hands over the optimizer, and opens the scheduler where a user would.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Before any framework is imported: nothing is looked up, reported or asked for.
os.environ.update(
    DO_NOT_TRACK="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
)
if "huggingface_hub.constants" in sys.modules:  # another file's test has imported it
    sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True

import pytest
import torch
from support.visible import bits, visible
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

from superadam import OffloadScheduler, SpeculativeCPUAdamW

VOCABULARY = 40
WIDTH = 16

DTYPES = [torch.bfloat16, torch.float32]
"""What models are trained in: working copies that are speculated on, and parameters that are their own masters."""

MARKS = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("one_torch_thread", "no_network"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Predictor(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Sentences(Dataset[Tensor]):
    """Seven batches of two random sentences."""

    def __init__(self, count: int = 14, length: int = 9) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def adamw(model: nn.Module, **options: Any) -> SpeculativeCPUAdamW:
    """Return an optimizer of what is trainable, with steps so large that a wrong one is seen in every bit."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return SpeculativeCPUAdamW(trained, **{"lr": 1e-2, **options})


class Run:
    """A training run, with the schedulers that were opened, the optimizers to compare, and what was logged."""

    def __init__(self, *, scheduled: bool) -> None:
        self.scheduled = scheduled
        self.schedulers: list[OffloadScheduler] = []
        self.optimizers: list[Optimizer] = []
        self.logged: list[dict[str, Any]] = []

    def open(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Let an optimizer train a model: with a scheduler, if there is to be one, and buckets of a few parameters."""
        assert isinstance(optimizer, SpeculativeCPUAdamW)
        self.optimizers.append(optimizer)
        if self.scheduled:
            self.schedulers.append(OffloadScheduler(optimizer, model, num_threads=1, bucket_numel=500))

    def everything(self) -> dict[str, Any]:
        logged = {
            f"log {index} {name}": value for index, entry in enumerate(self.logged) for name, value in entry.items()
        }
        named = {name: bits(value) if isinstance(value, Tensor) else repr(value) for name, value in logged.items()}
        for number, optimizer in enumerate(self.optimizers):
            seen = visible(optimizer)
            for kind in ("gradient", "parameter"):
                named |= {f"{kind} {number}.{index}": value for index, value in enumerate(seen[f"{kind}s"])}
            for index, state in seen["state"].items():
                named |= {f"state {number}.{index} {name}": value for name, value in state.items()}
        return named


Training = Callable[[Run], None]
"""Makes model and optimizer, trains, and adds to the lists of the run."""


def everything_in(training: Training, *, scheduled: bool, accepts: bool | None = None) -> dict[str, Any]:
    """Train, and return what the run came to.

    With a scheduler, `accepts` is whether it must have accepted some of what it speculated on; None if it may have
    speculated on nothing.
    """
    run = Run(scheduled=scheduled)
    try:
        training(run)
        everything = run.everything()  # while schedulers are at work, which readers need not know
    finally:
        for scheduler in run.schedulers:
            scheduler.close()
    assert bool(run.schedulers) == scheduled
    for scheduler in run.schedulers if accepts is not None else ():
        assert scheduler.statistics.speculated_buckets > 0
        assert scheduler.optimizer.statistics.accepted > 0 or not accepts
    return everything


def assert_same(plain: Mapping[str, Any], scheduled: Mapping[str, Any]) -> None:
    """Compare what two runs came to, bit for bit; name what differs, in the order in which it was seen."""
    assert scheduled.keys() == plain.keys()
    differing = [name for name in plain if scheduled[name] != plain[name]]
    assert not differing, f"{len(differing)} of {len(plain)} differ: {', '.join(differing[:12])}"


def compare(training: Training, dtype: torch.dtype = torch.bfloat16, *, accepts: bool | None = True) -> dict[str, Any]:
    """Train without and with a scheduler, and check that both come to the same bits; return what both came to.

    Parameters of fp32 in host memory are not speculated on. Speculation is not accepted where every step is clipped,
    and may not be tried (None) where all gradients are edited.
    """
    plain = everything_in(training, scheduled=False)
    speculates = None if dtype is torch.float32 else accepts
    assert_same(plain, everything_in(training, scheduled=True, accepts=speculates))
    return plain
