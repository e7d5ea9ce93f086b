"""Which parameters a module's forward must find in place, when parameters arrive block by block.

A module's forward may read any parameter below it, and some modules are never called (`out_proj` of
`nn.MultiheadAttention`). Only elements of an `nn.ModuleList` or `nn.Sequential` are taken to be blocks: they read their
own parameters when they are called themselves.
"""

from __future__ import annotations

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule


def awaited_parameters(model: nn.Module) -> dict[nn.Module, frozenset[int]]:
    """Return, for every module of a model, the ids of the parameters that must be there when its forward begins.

    Nothing inside a compiled module is a block: hooks there may not run.
    """
    awaited: dict[nn.Module, frozenset[int]] = {}
    _collect(model, awaited, is_compiled=False)
    return awaited


def _collect(module: nn.Module, awaited: dict[nn.Module, frozenset[int]], *, is_compiled: bool) -> frozenset[int]:
    if module in awaited:
        return awaited[module]
    is_compiled = is_compiled or isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    needed = set(map(id, module.parameters(recurse=False)))
    for child in module.children():
        below = _collect(child, awaited, is_compiled=is_compiled)
        if is_compiled or not isinstance(module, nn.ModuleList | nn.Sequential):
            needed |= below
    awaited[module] = frozenset(needed)
    return awaited[module]
