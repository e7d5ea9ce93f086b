"""The callables that a model calls: for a gradient that is ready, before a forward, and for a state dict.

They hold the scheduler weakly, and a copy or a pickle of them does nothing, so that a deep copied or saved model is a
plain model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Taker(Protocol):
    """What gradients are reported to."""

    def gradient_ready(self, parameter: Tensor) -> None:
        """`parameter.grad` is complete for this backward."""


class Listener(Protocol):
    """What forwards and state dicts are reported to."""

    def forward_begins(self, module: nn.Module) -> None:
        """A module is about to read parameters."""

    def state_dict_taken(self, module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        """A module has put its own parameters into a state dict, under names that begin with `prefix`."""

    def state_dict_loads(self, module: nn.Module) -> None:
        """A state dict is about to be copied into a module's own parameters."""


_Reported = TypeVar("_Reported")


class Hook(Generic[_Reported]):
    """A callable that reports to a listener as long as that lives."""

    def __init__(self, listener: _Reported | None) -> None:
        self._listener: Callable[[], _Reported | None] = (lambda: None) if listener is None else weakref.ref(listener)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that reports to nobody."""
        return type(self), (None,)


class GradientReady(Hook[Taker]):
    """A post-accumulate-grad hook."""

    def __call__(self, parameter: Tensor) -> None:
        """Report the parameter."""
        listener = self._listener()
        if listener is not None:
            listener.gradient_ready(parameter)


class ForwardBegins(Hook[Listener]):
    """A forward pre-hook of a module that holds parameters, itself or in its submodules."""

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Report the module."""
        listener = self._listener()
        if listener is not None:
            listener.forward_begins(module)


class StateDictTaken(Hook[Listener]):
    """A state dict post-hook of a module that owns parameters."""

    def __call__(self, module: nn.Module, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Report the module and its entries."""
        listener = self._listener()
        if listener is not None:
            listener.state_dict_taken(module, entries, prefix)


class StateDictLoads(Hook[Listener]):
    """A pre-hook of the loading of state dicts, of a module that owns parameters."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Report the module."""
        listener = self._listener()
        if listener is not None:
            listener.state_dict_loads(module)


def attach(model: nn.Module, parameters: list[Tensor], listener: Listener, taker: Taker) -> list[RemovableHandle]:
    """Hook every given parameter that is trained, and every module of the model that holds any of them."""
    ready, begins = GradientReady(taker), ForwardBegins(listener)
    taken, loads = StateDictTaken(listener), StateDictLoads(listener)
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
    handles: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(ready) for p in trained]  # type: ignore[no-untyped-call]
    listed = set(parameters)
    for module in model.modules():
        if not listed.isdisjoint(module.parameters()):
            handles.append(module.register_forward_pre_hook(begins, prepend=True))
        if not listed.isdisjoint(module.parameters(recurse=False)):
            handles.append(module.register_state_dict_post_hook(taken))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(loads))  # type: ignore[no-untyped-call]
    return handles
