"""Post-accumulate-grad hooks, which call the scheduler when a parameter's gradient is ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle


class GradientReady:
    """A hook that calls a method while the method's object lives.

    A copy or a pickle of it does nothing, so that a deep copied or saved model is a plain model.
    """

    def __init__(self, method: Any) -> None:
        self._owner: Callable[[], Any] = (lambda: None) if method is None else weakref.ref(method.__self__)
        self._function: Any = getattr(method, "__func__", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)

    def __call__(self, parameter: Tensor) -> None:
        """Call the method with the parameter, which no compiler traces."""
        owner = self._owner()
        if owner is None:
            return
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            _call_untraced(self._function, owner, parameter)
        else:
            self._function(owner, parameter)


@_disable_dynamo  # which takes as long as what it calls
def _call_untraced(function: Any, owner: Any, parameter: Tensor) -> None:
    function(owner, parameter)


class Hooks:
    """At most one hook on each parameter, all of which call one method."""

    def __init__(self, method: Callable[[Tensor], None]) -> None:
        self._ready = GradientReady(method)
        self._handles: list[RemovableHandle] = []
        self._frozen: list[Tensor] = []

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Hook these parameters, and no others."""
        self.remove()
        self._frozen = list(parameters)
        self.look_for_unfrozen()

    def look_for_unfrozen(self) -> None:
        """Hook those of the parameters that were frozen before and are trained now."""
        parameters, self._frozen = self._frozen, []
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                hook: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(hook(self._ready))
            else:
                self._frozen.append(parameter)

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
