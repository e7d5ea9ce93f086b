"""Post-accumulate-grad hooks, which call the scheduler when a parameter's gradient is ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superadam.kernels.torch_private import uncompiled


class GradientReady:
    """A hook that calls a method while the method's object lives.

    A copy or a pickle of it does nothing, so that a deep copied or saved model is a plain model.
    """

    def __init__(self, method: Callable[[Tensor], None] | None) -> None:
        self._method: Any = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)

    @uncompiled
    def __call__(self, parameter: Tensor) -> None:
        """Call the method with the parameter."""
        method = self._method()
        if method is not None:
            method(parameter)


class Hooks:
    """At most one hook on each parameter, all of which call one method; before all other hooks if `is_first`."""

    def __init__(self, method: Callable[[Tensor], None], *, is_first: bool = False) -> None:
        self._ready = GradientReady(method)
        self._is_first = is_first
        self._handles: list[RemovableHandle] = []
        self._frozen: list[Tensor] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Hook these parameters, and no others."""
        self.remove()
        self._frozen = list(parameters)
        self.look_for_unfrozen()

    def look_for_unfrozen(self) -> None:
        """Hook those of the parameters that were frozen before and are trained now."""
        unseen, self._frozen = self._frozen, []
        try:
            while unseen:
                if unseen[-1].requires_grad and unseen[-1].is_leaf:
                    self._hook(unseen[-1])
                else:
                    self._frozen.append(unseen[-1])
                unseen.pop()
        finally:
            self._frozen += unseen

    def _hook(self, parameter: Tensor) -> None:
        hook: Any = parameter.register_post_accumulate_grad_hook
        self._handles.append(hook(self._ready))
        if self._is_first:  # as torch does with hooks of modules that are to be prepended
            hooks: Any = self._handles[-1].hooks_dict_ref()
            hooks.move_to_end(self._handles[-1].id, last=False)

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
