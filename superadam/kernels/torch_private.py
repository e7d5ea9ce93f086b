"""All names of PyTorch that it may change without notice; no other module may use one.

Those that the optimizer needs by itself come with a public way to do the same, slower. All others serve gradients that
are taken out of `.grad`: where torch lacks one of these, `missing` names it, and no gradient is taken. All work is then
left to `step()`, with the same bits.

Names are bound when this is imported, but for those of modules that take seconds to import.
`tests/kernels/test_torch_private.py` fails with the name of one that is gone or has changed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from superadam.host.signals import THIS_THREAD
from superadam.kernels import _places

FOUND: dict[str, bool] = {}
"""Whether torch has each name that is bound here, by its path below `torch`."""

missing: list[str] = []
"""Names that torch lacks and taking gradients needs."""


def _find(path: str, otherwise: Any = None) -> Any:
    """Return what is at a path below `torch`; where there is nothing, `otherwise`, without which it is `missing`."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    FOUND[path] = found is not None
    if found is None and otherwise is None:
        missing.append(path)
    return otherwise if found is None else found


# -- what the optimizer needs by itself --------------------------------------------------------------------------------


@contextlib.contextmanager
def _public_modes(mode: bool) -> Iterator[None]:
    with torch.inference_mode(mode), torch.no_grad():
        yield


inference_mode: Callable[[bool], AbstractContextManager[Any]] = _find("_C._InferenceMode", _public_modes)
"""Sets inference mode, and restores the gradient mode as well, in one call into C, between whose parts no signal
handler runs. Of the public managers, a handler that raises between them could leave gradients disabled."""

_find("autograd.profiler._is_profiler_enabled", False)  # bound anew by each profiler
is_profiling: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", False)
"""Whether a profiler looks at some thread."""

_find("autograd.graph._allow_mutation_on_saved_tensors_enabled", False)  # bound anew by each use of the mode
may_graphs_survive_writes: Callable[[], bool] = functools.partial(
    getattr, torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False
)
"""Whether torch copies what graphs have saved before an operation writes to it; it sees no writes of kernels."""

_find("autograd.forward_ad._current_level", -1)  # bound anew by each level
forward_level: Callable[[], int] = functools.partial(getattr, torch.autograd.forward_ad, "_current_level", -1)
"""Returns the level of forward-mode differentiation, in which tensors may have tangents; -1 outside of it."""

without_transforms: Any = _find("_C._DisableFuncTorch", contextlib.nullcontext)
"""Lets operations inside work on ordinary tensors within a transform of torch.func."""
without_fake_mode: Any = _find("_subclasses.fake_tensor.unset_fake_temporarily", contextlib.nullcontext)
"""Lets operations inside work on ordinary tensors in a mode of fake tensors."""
_without_modes: Any = _find("utils._python_dispatch._disable_current_modes", contextlib.nullcontext)


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Let operations inside give ordinary tensors, without gradients, also in inference mode, in a transform of
    torch.func and in a mode of fake tensors. Without these names, what is made in such a call is no good later.

    Signals are deferred inside: a handler that raised while Python enters or leaves this manager would leave gradients
    disabled for as long as its exception is held, or from then on."""
    with THIS_THREAD.deferred_signals, inference_mode(False):
        torch.set_grad_enabled(False)  # until inference_mode restores it
        with without_transforms(), _without_modes():
            yield


call_after_backward: Callable[[Callable[[], object]], object] = _find(
    "autograd.Variable._execution_engine.queue_callback", lambda function: None
)
"""Calls a function when the backward that this thread is in has ended; RuntimeError outside of one. Otherwise never."""

uncompiled: Callable[..., Any] = _find("_compile._disable_dynamo", torch.compiler.disable)
"""Lets torch.compile call a function as it is. The public decorator imports the compiler at once."""

_fresh = itertools.count(-2, -1)

version_of: Callable[[Tensor], int] = (
    operator.attrgetter("_version") if _find("Tensor._version", False) else lambda tensor: next(_fresh)
)
"""Returns the version counter, which counts writes. Otherwise a number lower than all before, so that every tensor
counts as written to since any earlier look, and values are compared."""


def _count_up(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    for tensor, version in zip(tensors, versions, strict=True):
        torch.autograd.graph.increment_version([tensor] * (version - version_of(tensor)))


_set_versions = _find("_C._autograd._unsafe_set_version_counter", _count_up)
raise_versions: Callable[[Sequence[Tensor], Sequence[int]], object] = (
    _set_versions if FOUND["Tensor._version"] else _count_up
)
"""Sets version counters to higher numbers at once; otherwise it counts up to them, which takes longer each step."""

_WeakReference: Any = _find("multiprocessing.reductions.StorageWeakRef")
_has_address: bool = _find("UntypedStorage._cdata") is not None and _WeakReference is not None

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata") if _has_address else id
"""Returns the address of torch's StorageImpl, which identifies a storage while it lives, or a weak reference to it.
Otherwise that of its Python object, which lives as long."""

storage_reference: Callable[[torch.UntypedStorage], Any] = _WeakReference if _has_address else lambda storage: storage
"""Returns what reserves the key of a storage, but not its memory. Otherwise the storage, whose memory stays, too."""


def _found_looks() -> ModuleType | None:
    """Return what looks at many tensors in C; None where torch lacks something that it calls."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # of DLPack, and not private
    if exchange is None or not _has_address or not FOUND["Tensor._version"]:
        return None
    methods = (Tensor.untyped_storage, torch.UntypedStorage.nbytes, Tensor.is_neg)
    try:
        _places.use(exchange, (Tensor, *methods, "_cdata", "_version", "grad"))
    except ValueError:  # of another version of DLPack
        return None
    return _places


looks: ModuleType | None = _found_looks()


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


foreach_copy_: Callable[..., Any] = _find("_foreach_copy_", _copy_each)

_MEMORY_RAN_OUT = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",  # pinned memory
    "HIP error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]:  Code: 2,",
)


def is_short_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory ran out, on the host or on a device; some only say so in their text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_RAN_OUT)


class MayLackMemory:
    """Leaves the block where memory runs out in it, and goes on behind it; other errors are raised."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return is_short_of_memory(error)


def are_flattened(parameters: Iterable[Tensor]) -> bool:
    """Return whether some are shards of FSDP1, by its mark; without a mark, whether any module is wrapped in it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported, so not used
    if fsdp is None:
        return False
    mark = getattr(sys.modules.get("torch.distributed.fsdp._common_utils"), "FSDP_FLATTENED", None)
    if mark is not None:
        return any(hasattr(parameter, mark) for parameter in parameters)
    return any(issubclass(type(module), fsdp.FullyShardedDataParallel) for module in gc.get_objects())


WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module")
"""What compiled models and activation checkpointing put into the names of parameters."""

STEP_MARK = "_opt_called"
"""The attribute of an optimizer with which `torch.optim.lr_scheduler` sees a step; without it, it warns."""

TEMPLATE_STEP = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")
"""The module and the function that make a step to get state to load into; if torch renames them, that step counts."""

_wrap_step: Callable[..., Any] = _find("optim.Optimizer.profile_hook_step", lambda step: step)
step_wrapper = _wrap_step(lambda optimizer: None).__code__
"""The code of what torch wraps `step()` in, for hooks and profilers; without that name, of nothing."""
hooks_of_all_steps: list[Any] = [
    _wrap_step.__globals__.get(f"_global_optimizer_{when}_hooks", ["unknown"]) for when in ("pre", "post")
]
hooks_of_steps: Callable[[Any], tuple[Any, Any]] = operator.attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)
"""Returns the hooks of one optimizer."""
hooks_of_loading: Callable[[Any], tuple[Any, Any]] = operator.attrgetter(
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
)
"""Returns those of its `load_state_dict()`."""

register_tree_node: Callable[..., None] = _find("utils._pytree.register_pytree_node", lambda *_, **__: None)
"""Makes containers of a class transparent to `torch.utils._pytree`."""
tree_key: Callable[[Any], Any] = _find("utils._pytree.MappingKey", lambda key: key)
"""What `torch.utils._pytree` calls a key of a dict."""

# -- handles: gradients that were taken out of `.grad` -----------------------------------------------------------------

make_wrapper_subclass: Callable[..., Any] = _find("Tensor._make_wrapper_subclass")
"""Makes a tensor without memory."""
no_torch_function: Any = _find("_C._disabled_torch_function_impl")
"""Keeps `.shape` and the like of a subclass fast."""
forbid_memory: Callable[[Tensor], None] = _find("_C._set_throw_on_mutable_data_ptr")
"""Makes C++ that asks for a handle's memory get an exception, not address 0."""
foreach_types: list[Any] = _find("utils._foreach_utils._foreach_supported_types") or []
"""The classes that torch's clipping and norms treat in lists; per tensor they would round differently."""
tensor_use_count: Callable[[Tensor], int] = _find("Tensor._use_count")
storage_use_count: Callable[[int], int] = _find("_C._storage_Use_Count")  # of the storage with this key
"""Count references to a gradient and to its memory, also those of C++."""
has_internal_overlap: Callable[[Tensor], int] = _find("_debug_has_internal_overlap")
"""Returns 0 if no two elements share memory."""
_find("Tensor._base")
base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""Returns the tensor that a view refers to, which holds its memory, too."""
_find("ops.aten.detach.default._schema")
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""Returns which arguments an operation writes to."""


@functools.cache
def is_foreach(operation: Any) -> bool:
    """Return whether an operation works on each tensor of a list."""
    return schema_of(operation).name.startswith("aten::_foreach_")  # type: ignore[no-any-return]


TRUSTED_NAMESPACES = ("aten", "_c10d_functional")
"""Of operations whose schemas say which results alias arguments; of others, any may alias any."""

foreach_abs: Callable[..., Sequence[Tensor]] = _find("_foreach_abs")
foreach_norm: Any = _find("ops.aten._foreach_norm.Scalar")
foreach_zero_: Any = _find("ops.aten._foreach_zero_.default")
foreach_products: dict[str, dict[str, Any]] = {
    "mul_": {"Tensor": _find("ops.aten._foreach_mul_.Tensor"), "Scalar": _find("ops.aten._foreach_mul_.Scalar")},
    "div_": {"Tensor": _find("ops.aten._foreach_div_.Tensor"), "Scalar": _find("ops.aten._foreach_div_.Scalar")},
}
check_and_unscale: Any = _find("ops.aten._amp_foreach_non_finite_check_and_unscale_.default")
"""What clipping and a GradScaler call for lists of handles."""

_tracing_context: Callable[[], Any] = _find("_guards.TracingContext.try_get")


def is_tracing() -> bool:
    """Return whether a compiler traces tensors; only `compiled_autograd_enabled` shows that compiled autograd does."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # importing it takes seconds
    is_collecting = bool(getattr(compiled_autograd, "compiled_autograd_enabled", False))
    return is_collecting or torch.compiler.is_compiling() or _tracing_context() is not None


def _uncounted(counted: object) -> Any:
    return 0


if missing:  # modules count references once when they are imported
    tensor_use_count = storage_use_count = base_of = _uncounted


# -- process groups ----------------------------------------------------------------------------------------------------


def timeout_of(group: Any) -> timedelta | None:
    """Return how long the collectives of a process group wait for other ranks; None, torch's default, where unknown."""
    try:
        name = group._device_types[0]
        timeout = group._get_backend(name).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


# -- DTensors: torch.distributed.tensor takes long to import, and is not imported here ---------------------------------


def dtensor_part(tensor: Any) -> Tensor:
    """Return the very tensor that holds this rank's part; without `_local_tensor`, what stands for it, or a view."""
    try:
        local: Tensor = tensor._local_tensor
    except AttributeError:
        with torch.no_grad():
            local = tensor.to_local()
    return local


def set_dtensor_part(tensor: Any, local: Tensor) -> None:
    """Let a DTensor have another part; only for those that `can_have_handle`."""
    tensor._local_tensor = local


def can_have_handle(tensor: Any) -> bool:
    """Whether a handle can become the part of a DTensor; if not, no gradient is taken."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "_spec")


def check_can_take(parameters: Iterable[Any], what: str) -> None:
    """Raise RuntimeError unless gradients of these can be taken; `what` was asked for and needs that."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if missing or not all(can_have_handle(tensor) for tensor in parameters if isinstance(tensor, dtensor)):
        raise RuntimeError(
            f"{what}, but torch {torch.__version__} lacks what taking gradients needs "
            f"({', '.join(missing) or 'DTensor._local_tensor, DTensor._spec'}), expected a torch that superadam was "
            "tested with; do without it"
        )


def dtensor_like(tensor: Any, local: Tensor) -> Tensor:
    """Return a DTensor that is distributed as `tensor` is, with this part on this rank, wherever that lies.

    The public way, which `_spec` spares us, moves the part to the device of the mesh; it must lie there.
    """
    whole: Tensor
    mesh, spec = tensor.device_mesh, getattr(tensor, "_spec", None)
    if spec is not None:
        if local.dtype != tensor.dtype:
            like: Any = torch.empty_like(tensor, dtype=local.dtype, device="meta", requires_grad=False)
            spec = like._spec
        whole = type(tensor)(local, spec, requires_grad=False)
        return whole
    if local.device.type != mesh.device_type:
        raise RuntimeError(
            f"torch {torch.__version__} has no DTensor._spec, without which a part on {local.device} cannot belong to "
            f"a mesh of {mesh.device_type} devices; install a torch that superadam was tested with"
        )
    with torch.no_grad():
        whole = sys.modules["torch.distributed.tensor"].DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return whole


# -- modes, which `superadam plan` and `superadam.testing` need, and no training: importing them takes a while ---------


def dispatch_mode() -> Any:
    """Return the class of modes that see every operation; raises ImportError where torch has it no longer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode
