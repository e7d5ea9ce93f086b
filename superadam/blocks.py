"""Which parameters a module's forward must find in place, when parameters arrive block by block.

A module's forward may read any parameter below it, and some modules are never called (`out_proj` of
`nn.MultiheadAttention`). Only elements of an `nn.ModuleList` or `nn.Sequential` are taken to be blocks: they read their
own parameters when they are called themselves. A subclass with a forward of its own may read them before that.
"""

from __future__ import annotations

from collections.abc import Set

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

_FORWARDS = (nn.ModuleList.forward, nn.Sequential.forward)
"""Forwards that read no parameter but by calling elements."""


def awaited_parameters(model: nn.Module) -> dict[nn.Module, frozenset[int]]:
    """Return, for every module of a model, the ids of the parameters that must be there when its forward begins.

    Nothing inside a compiled module is a block: hooks there may not run.
    """
    compiled = {below for module in model.modules() if _is_compiled(module) for below in module.modules()}
    return {module: frozenset(_needed(module, compiled)) for module in model.modules()}


def _needed(module: nn.Module, compiled: Set[nn.Module]) -> set[int]:
    if module in compiled:
        return set(map(id, module.parameters()))
    needed = set(map(id, module.parameters(recurse=False)))
    if not _holds_blocks(module):
        needed.update(*(_needed(child, compiled) for child in module.children()))
    return needed


def _holds_blocks(module: nn.Module) -> bool:
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    return is_container and getattr(module.forward, "__func__", None) in _FORWARDS


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
