"""What the model calls: gradients, forwards and state dicts are reported, once, to a listener that still lives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from overlap import batch, mlp
from torch import Tensor, nn

from superadam.hooks import ForwardBegins, GradientReady, StateDictTaken, attach


class Recorder:
    """A listener that remembers what it heard."""

    def __init__(self) -> None:
        self.ready: list[Tensor] = []
        self.begun: list[nn.Module] = []
        self.taken: list[tuple[nn.Module, str, list[str]]] = []

    def gradient_ready(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.ready.append(parameter)

    def forward_begins(self, module: nn.Module) -> None:
        self.begun.append(module)

    def state_dict_taken(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        self.taken.append((module, prefix, [name for name in entries if name.startswith(prefix)]))


def attached(model: nn.Module) -> tuple[Recorder, list[Any]]:
    recorder = Recorder()
    return recorder, attach(model, list(model.parameters()), recorder, recorder)


def test_each_gradient_once_in_the_order_of_backward() -> None:
    model = mlp()
    recorder, _ = attached(model)
    model(model(batch(0))).sum().backward()
    assert len(recorder.ready) == 6
    assert set(recorder.ready) == set(model.parameters())
    assert recorder.ready[0] in set(model[4].parameters())


def test_forwards_of_modules_that_hold_parameters() -> None:
    model = mlp()
    recorder, _ = attached(model)
    model(batch(0))
    assert recorder.begun == [model, model[0], model[2], model[4]]


def test_forward_is_reported_before_the_hooks_of_others() -> None:
    model = nn.Linear(8, 8)
    order: list[str] = []
    model.register_forward_pre_hook(lambda *_: order.append(f"other, after {len(recorder.begun)}"))
    recorder, _ = attached(model)
    model(batch(0))
    assert order == ["other, after 1"]


def test_state_dicts_of_modules_that_own_parameters() -> None:
    model = mlp()
    recorder, _ = attached(model)
    model.state_dict()
    assert recorder.taken == [(model[i], f"{i}.", [f"{i}.weight", f"{i}.bias"]) for i in (0, 2, 4)]


def test_only_the_given_parameters() -> None:
    model = mlp()
    recorder = Recorder()
    attach(model, [model[2].weight], recorder, recorder)
    model(batch(0)).sum().backward()
    model.state_dict()
    assert recorder.begun == [model, model[2]]
    assert [module for module, *_ in recorder.taken] == [model[2]]
    assert list(map(id, recorder.ready)) == [id(model[2].weight)]


def test_handles_remove_everything() -> None:
    model = mlp()
    recorder, handles = attached(model)
    for handle in handles:
        handle.remove()
    model(batch(0)).sum().backward()
    model.state_dict()
    assert not (recorder.ready)
    assert not (recorder.begun)
    assert not (recorder.taken)


def test_listener_is_held_weakly() -> None:
    model = mlp()
    recorder, _ = attached(model)
    alive = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert alive() is None
    model(batch(0)).sum().backward()
    model.state_dict()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("kind", [GradientReady, ForwardBegins, StateDictTaken])
@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_copies_report_to_nobody(kind: type, how: Any) -> None:
    recorder = Recorder()
    inert = how(how(kind(recorder)))
    assert type(inert) is kind
    parameter = nn.Parameter(torch.ones(2))
    arguments = {
        GradientReady: (parameter,),
        ForwardBegins: (nn.Linear(2, 2), ()),
        StateDictTaken: (nn.Linear(2, 2), {}, "", {}),
    }[kind]
    inert(*arguments)
    assert not (recorder.ready)
    assert not (recorder.begun)
    assert not (recorder.taken)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_report_without_breaking_the_graph(backend: str) -> None:
    model = mlp()
    recorder, _ = attached(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(batch(0)).sum().backward()
    assert len(recorder.ready) == 3 * 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
