"""The programs that docs/recipes.md lists: they run, and end in the same bits with a scheduler and without."""

import gc
import importlib.util
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from support.overlap import ThreadDevice
from support.programs import frozen
from torch import nn

from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.devices import Device
from superadam.testing import SimulatedDevice

ROOT = Path(__file__).resolve().parents[2]
NEEDS_MORE = {"long_sequences.py", "finetune.py", "finetune_options.py", "train.py", "with_superadam.py"}
"""Than one process and torch; other tests run them."""
PRINTS = {
    "gan.py": r"mean of what is generated: .* of data: 1\.00",
    "sam.py": r"loss .* after 30",
    "lookahead.py": r"resumed after 23 steps: the same weights is True",
    "lr_finder.py": r"found lr=.*e-0\d; loss .* after 60",
    "own_scheduler.py": r"loss .* after 40",
}

FEWER: dict[str, dict[str, int]] = {"gan.py": {"rounds": 5}, "sam.py": {"steps": 5}, "lr_finder.py": {"steps": 5}}
"""Steps that are enough to compare bits."""

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


def recipe(name: str) -> ModuleType:
    """Return a recipe as a module of its own."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), ROOT / "examples" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(name: str, device: Callable[[], Device] | None) -> tuple[Any, list[OffloadScheduler]]:
    """Train as a recipe does; return what it returns as bits, and its schedulers."""
    module: Any = recipe(name)
    opened: list[OffloadScheduler] = []

    def open_scheduler(optimizer: Any, model: nn.Module) -> Any:
        if device is None:
            return MagicMock(optimizer=optimizer)  # does nothing
        opened.append(OffloadScheduler(optimizer, model, device=device(), bucket_numel=100))
        return opened[-1]

    module.OffloadScheduler = open_scheduler
    values = [
        one.state_dict() if isinstance(one, nn.Module) else one.model.state_dict() if hasattr(one, "model") else one
        for one in module.train(**FEWER.get(name, {}))
    ]
    for scheduler in opened:
        scheduler.close()
    return frozen(values), opened


def test_index_lists_every_recipe() -> None:
    listed = set(re.findall(r"\]\(\.\./examples/(\w+\.py)\)", (ROOT / "docs" / "recipes.md").read_text()))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")} == set(PRINTS) | NEEDS_MORE


@pytest.mark.parametrize("name", PRINTS)
def test_recipe_prints_what_it_has_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = recipe(name)
    assert f"python examples/{name}" in str(module.__doc__)
    module.main()
    assert re.search(PRINTS[name], capsys.readouterr().out)


@pytest.mark.parametrize("name", PRINTS)
def test_recipe_has_the_bits_of_training_without_a_scheduler(name: str) -> None:
    plain, _ = trained(name, None)
    for device in (ThreadDevice, lambda: SimulatedDevice(3)):
        ours, schedulers = trained(name, device)
        assert ours == plain
        assert all(scheduler.statistics.buckets for scheduler in schedulers)
        counts = [scheduler.optimizer.statistics for scheduler in schedulers]
        match name:
            case "gan.py":
                generator, critic = counts
                assert generator.accepted > 0
                assert critic.accepted == 0  # whose weights are clamped in every step
            case "sam.py":
                assert counts[0].accepted == 0
                assert counts[0].dropped == 0  # the gradients of the first backward were not taken
            case _:
                assert all(one.accepted for one in counts)


def test_learning_rate_finder_leaves_everything_as_it_was() -> None:
    module = recipe("lr_finder.py")
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=0.01)
    with OffloadScheduler(optimizer, model, device=ThreadDevice()):
        for step in range(3):
            optimizer.zero_grad()
            module.loss_of(model, step).backward()
            optimizer.step()
        before = frozen([model.state_dict(), optimizer.state_dict()])
        module.find(model, optimizer)
        assert frozen([model.state_dict(), optimizer.state_dict()]) == before
        assert all(parameter.grad is None for parameter in model.parameters())


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "superadam-worker"}


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the recipe of an optimizer that opens its own scheduler, which has a thread on every machine."""
    module: Any = recipe("own_scheduler.py")
    monkeypatch.setattr(module, "OffloadScheduler", lambda o, m: OffloadScheduler(o, m, device=ThreadDevice()))
    return module


def test_framework_that_makes_its_optimizer_again_leaves_no_scheduler_open(overlapped: Any) -> None:
    before = workers()
    framework = overlapped.Framework(recipe_model(), overlapped.OverlappedAdamW, lr=3e-3)
    forgotten = []
    for number in range(3):
        framework.fit(range(4))
        assert len(workers() - before) == 1
        assert framework.optimizer.statistics.accepted > 0  # no older scheduler takes its gradients
        forgotten.append(weakref.ref(framework.optimizer))
        framework.set_options(lr=1e-3 * (number + 1))
        assert workers() <= before
        gc.collect()
        assert [one() for one in forgotten] == [None] * len(forgotten)


def test_optimizer_that_was_closed_trains_on_and_is_freed(overlapped: Any) -> None:
    before = workers()
    framework, twin = (
        overlapped.Framework(recipe_model(), kind, lr=3e-3)
        for kind in (overlapped.OverlappedAdamW, SpeculativeCPUAdamW)
    )
    framework.optimizer.register_step_post_hook(lambda optimizer, *_: None)
    framework.fit(range(3))
    framework.optimizer.close()
    framework.fit(range(3, 6))
    assert workers() <= before
    twin.fit(range(6))
    assert frozen(framework.model.state_dict()) == frozen(twin.model.state_dict())
    model, optimizer = weakref.ref(framework.model), weakref.ref(framework.optimizer)
    del framework
    gc.collect()
    assert (model(), optimizer()) == (None, None)


def test_tensors_that_are_no_parameters_overlap_and_train_as_ever(overlapped: Any) -> None:
    """Alone, as those that are fitted to data, and next to parameters and integers that are not trained."""
    ends = []
    for kind in (overlapped.OverlappedAdamW, SpeculativeCPUAdamW):
        for others in ([], [nn.Parameter(torch.ones(64)), torch.ones(3, dtype=torch.int8)]):
            points = torch.zeros(64, dtype=torch.bfloat16, requires_grad=True)
            optimizer = kind([points, *others], lr=3e-3)
            for step in range(4):
                optimizer.zero_grad()
                (points - step - 1).float().square().sum().backward()
                optimizer.step()
            ends.append(frozen([points.detach(), optimizer.state_dict()]))
            if kind is overlapped.OverlappedAdamW:
                assert optimizer.statistics.accepted > 0
                optimizer.close()
    assert ends[:2] == ends[2:]


def recipe_model() -> nn.Module:
    torch.default_generator.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
