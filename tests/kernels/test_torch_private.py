"""Every private name of torch stands in one module, does what it is relied on for, and can be done without."""

import ast
import contextlib
import functools
import json
import operator
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import without_names
from support.visible import parameter
from support.without_names import NEEDED_ALONE, NONE, OTHERS, VERSION
from torch import Tensor, distributed, nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import superadam
from superadam import SpeculativeCPUAdamW
from superadam.handles.gradient_handle import GradientHandle, take_gradient
from superadam.kernels import torch_private

pytestmark = pytest.mark.slow

ROOT = Path(superadam.__file__).parent

# -- where names stand -------------------------------------------------------------------------------------------------

HOME = "kernels/torch_private.py"
ALLOWED = {
    ("distributed/agreement.py", "_replace"): "of a named tuple: documented",
    ("kernels/hyperparameters.py", "_fields"): "of a named tuple: documented",
    ("cli/bench/passes.py", "_and_"): "a part of names of ours",
    ("devices/cuda.py", "_id"): "a part of public names of torch.cuda",
    ("kernels/native.py", "_kernels"): "a module of ours, in an error",
    ("integrations/rehearsal.py", "_shared_state"): "of Accelerate, which has no public way to be told so",
    ("integrations/zero_checkpoint.py", "_mp_rank_00_optim_states"): "a part of names of files of DeepSpeed",
}
OWNERS = (torch, torch._C, Tensor, torch.UntypedStorage, torch.ops.aten.add_.Tensor, torch.optim.Optimizer, nn.Module)
OF_TORCH = {name for owner in OWNERS for name in dir(owner) if re.fullmatch("_[^_].*", name)}


def defined(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names that these files define or set on objects of their own."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
            ):
                names.add(name)
    return names


def foreign(tree: ast.AST, own: set[str]) -> set[str]:
    """Return the private names that a file uses, but for those of the package itself."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                found |= {name} - own
            case ast.Attribute(attr=name):
                found |= {name} - (own - OF_TORCH)
            case ast.Import(names=names):
                found |= {part for name in names for part in name.name.split(".")}
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] != "superadam":
                found |= {*module.split("."), *(name.name for name in names)}
            case ast.Constant(value=str(text)) if node not in texts:
                found |= {*re.split(r"[^\w]", text)} - own
    return {name for name in found if re.fullmatch(r"_[^\W_]\w*", name)}


TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
OWN = defined(TREES.values())


def test_private_names_stand_in_one_module():
    """But for those that are allowed, all of which are there."""
    assert {"gpu/scatter.py", "handles/gradient_handle.py", HOME} <= TREES.keys()
    assert len(foreign(TREES[HOME], OWN)) > 20
    names = {(path, name) for path in TREES.keys() - {HOME} for name in foreign(TREES[path], OWN)}
    assert names == ALLOWED.keys(), f"these are private to another library; give them a place in {HOME}"


@pytest.mark.parametrize(
    "line",
    [
        "torch._C.f(gradient._use_count())",
        "from torch._guards import TracingContext",
        "from torch.utils import _foreach_utils",
        "def f():\n    import torch._compile as it",
        "sys.modules['torch._dynamo.compiled_autograd']",
        "f'_foreach_{kind}'",
        "optimizer._opt_called = True",
    ],
)
def test_private_names_are_seen(line):
    assert foreign(ast.parse(line), OWN)
    assert not foreign(ast.parse("self._device; state.parameter; '__name__'; from superadam import _kernels"), OWN)


# -- what names do -----------------------------------------------------------------------------------------------------

Check = Callable[[], bool]
RELIED_ON: dict[str, tuple[str, Check]] = {}


def relied_on(sentence: str, *paths: str) -> Callable[[Check], Check]:
    """Let a function check what these names, by their paths below torch, are relied on for."""

    def register(check: Check) -> Check:
        RELIED_ON.update(dict.fromkeys(paths, (sentence, check)))
        return check

    return register


@relied_on("says whether a profiler looks at any thread", "autograd.profiler._is_profiler_enabled")
def _() -> bool:
    with ThreadPoolExecutor(1) as others, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        is_seen = torch_private.is_profiling() and others.submit(torch_private.is_profiling).result()
    return is_seen and not torch_private.is_profiling()


@relied_on("wraps step(), and keeps hooks of all steps beside it", "optim.Optimizer.profile_hook_step")
def _() -> bool:
    class Wrapped(torch.optim.SGD): ...

    Wrapped.step = torch.optim.SGD.step
    Wrapped([nn.Parameter(torch.ones(1))])
    registered = []
    for register, hooks in zip(
        (register_optimizer_step_pre_hook, register_optimizer_step_post_hook),
        torch_private.hooks_of_all_steps,
        strict=True,
    ):
        handle = register(lambda *_: None)
        registered += [len(hooks)]
        handle.remove()
        registered += [len(hooks)]
    return Wrapped.step.__code__ is torch_private.step_wrapper and registered == [1, 0, 1, 0]


@relied_on("ends inference mode and restores both modes", "_C._InferenceMode")
def _() -> bool:
    with torch.inference_mode():
        with torch_private.inference_mode(False):
            torch.set_grad_enabled(False)
            inside = torch.empty(1).is_inference(), torch.is_grad_enabled()
        after = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    with torch_private.inference_mode(False):
        torch.set_grad_enabled(False)
    return (inside, after, torch.is_grad_enabled()) == ((False, False), (True, False), True)


@relied_on(
    "gives ordinary tensors in transforms and modes",
    "_C._DisableFuncTorch",
    "utils._python_dispatch._disable_current_modes",
    "_subclasses.fake_tensor.unset_fake_temporarily",
)
def _() -> bool:
    made: list[Tensor] = []

    def make(x: Tensor) -> Tensor:
        with torch_private.ordinary_tensors():
            made.append(torch.zeros(3))
        return x.sum()

    torch.func.grad(make)(torch.ones(3))
    torch.func.functionalize(make)(torch.ones(3))
    with FakeTensorMode():
        make(torch.ones(3))
        with torch_private.without_fake_mode():
            made.append(torch.zeros(3))
    return all(type(one) is Tensor and one.data_ptr() and not one.is_inference() for one in made)


@relied_on("tells of levels, outside of which no tensor has a tangent", "autograd.forward_ad._current_level")
def _() -> bool:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1))
        is_inside = torch_private.forward_level() == 0 and torch.autograd.forward_ad.unpack_dual(dual).tangent == 1
    with torch.autograd.forward_ad.dual_level():
        is_gone = torch.autograd.forward_ad.unpack_dual(dual).tangent is None
    return is_inside and is_gone and torch_private.forward_level() == -1


@relied_on(
    "tells of graphs that survive writes to what they have saved",
    "autograd.graph._allow_mutation_on_saved_tensors_enabled",
)
def _() -> bool:
    weight = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), torch.no_grad():
        is_seen = torch_private.may_graphs_survive_writes()
        with torch.enable_grad():
            product = weight * weight
        weight.copy_(weight)
        torch.utils.dlpack.from_dlpack(weight.detach()).zero_()
        product.backward()
    return is_seen and not torch_private.may_graphs_survive_writes() and weight.grad is not None and weight.grad == 2


@relied_on("names the keys of a dict in paths of trees", "utils._pytree.MappingKey")
def _() -> bool:
    paths = [path for path, _ in torch.utils._pytree.tree_flatten_with_path({"a": 1})[0]]
    return paths == [(torch_private.tree_key("a"),)]


@relied_on("lets trees go through a dict of a class of its own", "utils._pytree.register_pytree_node")
def _() -> bool:
    class Kind(dict[str, int]):
        pass

    torch_private.register_tree_node(Kind, lambda kind: (list(kind.values()), list(kind)), lambda values, _: values)
    return bool(torch.utils._pytree.tree_map(lambda value: value + 1, [Kind(a=1)]) == [[2]])


def compiled(work: Callable[[], object]) -> tuple[int, set[bool]]:
    """Compile a function; return how many graphs it has, and whether torch was seen to trace meanwhile."""
    traced: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(torch_private._tracing_context() is not None)
        return graph.forward

    torch.compile(work, backend=backend)()
    torch.compiler.reset()
    return len(traced), set(traced)


@relied_on("calls once this thread's backward has ended", "autograd.Variable._execution_engine.queue_callback")
def _() -> bool:
    one, seen = torch.ones(1, requires_grad=True), []
    with contextlib.suppress(RuntimeError):  # outside of a backward
        torch_private.call_after_backward(lambda: seen.append("outside"))
        return False
    one.register_hook(lambda _: torch_private.call_after_backward(lambda: seen.append(one.grad is not None)))
    one.sum().backward()
    return seen == [True]


@relied_on("lets the optimizer's step run uncompiled", "_compile._disable_dynamo")
def _() -> bool:
    one = parameter(3)
    one.grad = torch.ones(3)
    optimizer, value = SpeculativeCPUAdamW([one], lr=0.5), one.detach().clone()
    ones, inner = torch.ones(3), []
    note = torch_private.uncompiled(lambda: inner.append(torch.compiler.is_compiling()))

    def work() -> Tensor:
        before = ones + 1  # a graph before and one after
        note()
        optimizer.resolve()
        return before * 2

    graphs, _ = compiled(work)
    return graphs == 2 and inner == [False] and not torch.equal(one, value)


@relied_on("is None unless a compiler traces", "_guards.TracingContext.try_get")
def _() -> bool:
    ones = torch.ones(3)
    return compiled(lambda: ones + 1) == (1, {True}) and torch_private._tracing_context() is None


@relied_on("is true while compiled autograd collects", "_dynamo.compiled_autograd.compiled_autograd_enabled")
def _() -> bool:
    before = torch_private.is_tracing()
    with compiled_autograd._enable(lambda graph: graph):
        inside = torch_private.is_tracing()
    return (before, inside, torch_private.is_tracing()) == (False, True, False)


@relied_on(
    "identifies a storage, also after its memory was freed, while it is referenced weakly",
    "UntypedStorage._cdata",
    "multiprocessing.reductions.StorageWeakRef",
)
def _() -> bool:
    one = torch.empty(8)
    key, reference = (of(one.untyped_storage()) for of in (torch_private.storage_key, torch_private.storage_reference))
    same = key == torch_private.storage_key(one.view(2, 4)[1].untyped_storage()) and not reference.expired()
    del one
    others = [torch.empty(8) for _ in range(1000)]
    return same and reference.expired() and key not in {torch_private.storage_key(o.untyped_storage()) for o in others}


@relied_on("rises with each write, also through a view, and with `increment_version`", "Tensor._version")
def _() -> bool:
    one, seen = torch.zeros(2), []
    writes: list[Callable[[], object]] = [
        lambda: one.add_(1),
        lambda: one[0].fill_(2),
        lambda: torch.autograd.graph.increment_version(one),
        lambda: torch.autograd.graph.increment_version([one]),
        lambda: one + 1,
        lambda: one.data.add_(1),
    ]
    for write in writes:
        before = torch_private.version_of(one)
        write()
        seen.append(torch_private.version_of(one) - before)
    return seen == [1, 1, 1, 1, 0, 0]


@relied_on(
    "sets the version counters of tensors and their aliases, also without memory",
    "_C._autograd._unsafe_set_version_counter",
)
def _() -> bool:
    one, other = torch.zeros(2), without_memory()
    alias = one.detach()
    torch_private.raise_versions([one, other], [70, 2**31])
    one.add_(1)
    return (one._version, alias._version, other._version) == (71, 71, 2**31)


@relied_on("copies each tensor of a list to one of another dtype and layout", "_foreach_copy_")
def _() -> bool:
    sources = [torch.tensor([[1.0, 2.5], [3.0, 4.0]]), torch.tensor([5.0])]
    targets = [torch.zeros(2, 2, dtype=torch.bfloat16).t(), torch.zeros(1)]
    torch_private.foreach_copy_(targets, sources, non_blocking=True)
    return all(torch.equal(target.float(), source) for target, source in zip(targets, sources, strict=True))


@relied_on("returns new tensors", "_foreach_abs")
def _() -> bool:
    norms = [torch.tensor(2.0), torch.tensor(torch.nan)]
    copies = torch_private.foreach_abs(norms)
    copies[0].zero_()
    return norms[0].item() == 2.0 and bool(copies[1].isnan())


class Without(torch.Tensor):
    """A tensor without memory, which notes the operations on it."""

    called: list[Any] = []  # noqa: RUF012
    __torch_function__ = torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(operation)
        return torch.ones(4, 2).t()


def without_memory() -> Any:
    Without.called.clear()
    return torch_private.make_wrapper_subclass(Without, (2, 4), strides=(1, 2), dtype=torch.bfloat16, device="cpu")


@relied_on("makes a tensor of any layout whose operations reach `__torch_dispatch__`", "Tensor._make_wrapper_subclass")
def _() -> bool:
    one = without_memory()
    facts = type(one), tuple(one.shape), one.stride(), one.dtype, one.device.type
    return (
        facts == (Without, (2, 4), (1, 2), torch.bfloat16, "cpu") and type(one * 2) is Tensor and Without.called != []
    )


@relied_on("lets attributes and functions of a subclass pass by, to the dispatcher", "_C._disabled_torch_function_impl")
def _() -> bool:
    one = without_memory()
    shape, result = one.shape, torch.mul(one, 2)
    return shape == (2, 4) and Without.called == [torch.ops.aten.mul.Tensor] and type(result) is Tensor


@relied_on("makes C++ that asks for memory raise", "_C._set_throw_on_mutable_data_ptr")
def _() -> bool:
    one = without_memory()
    torch_private.forbid_memory(one)
    try:
        one.data_ptr()
    except RuntimeError:
        return True
    return False


@relied_on("gives a tensor without memory that of another, and leaves its version alone", "Tensor.data.__set__")
def _() -> bool:
    one, memory = without_memory(), torch.ones(2, 4, dtype=torch.bfloat16)
    torch_private.forbid_memory(one)
    version = torch_private.version_of(one)
    with torch.inference_mode(False):
        torch.Tensor.data.__set__(one, memory)
    return bool(one.data_ptr() == memory.data_ptr()) and torch_private.version_of(one) == version


def taken() -> Tensor:
    one = parameter(3)
    one.grad = torch.ones(3)
    assert take_gradient(one) is not None
    return one


@relied_on("lets torch's clipping call list operations for handles", "utils._foreach_utils._foreach_supported_types")
def _() -> bool:
    one: Any = taken()
    nn.utils.clip_grad_norm_([one], 0.5)
    return type(one.grad) is GradientHandle and [factor.is_of_list for factor in one.grad.taken.factors] == [True]


@relied_on("rises with each reference of C++ to a tensor, and not with those of Python", "Tensor._use_count")
def _() -> bool:
    leaf, one = torch.ones(2, requires_grad=True), torch.ones(2)
    count = torch_private.tensor_use_count
    counts = [count(one)]
    again = one
    counts.append(count(again))
    leaf.grad = one
    counts.append(count(one))
    graph = torch.nn.Parameter(torch.ones(2)) * one
    counts.append(count(one))
    del graph
    counts.append(count(one))
    first = counts[0]
    return counts[1] == first and counts[2] > first and counts[3] > counts[2] and counts[4] == counts[2]


@relied_on("rises with each further tensor over a storage", "_C._storage_Use_Count")
def _() -> bool:
    one = torch.ones(4)

    def count() -> float:
        return torch_private.storage_use_count(torch_private.storage_key(one.untyped_storage()))

    counts = [count()]
    others = [one.detach()]
    counts.append(count())
    others.append(others[0][1:].data)
    counts.append(count())
    others.clear()
    return [*counts, count()] == [counts[0], counts[0] + 1, counts[0] + 2, counts[0]]


@relied_on("is the tensor that a view refers to, also where no graph is recorded", "Tensor._base")
def _() -> bool:
    one = torch.ones(4)
    with torch.no_grad():
        view = one[1:]
    return torch_private.base_of(view) is one and torch_private.base_of(one) is None


@relied_on("is 0 only where no two elements share memory", "_debug_has_internal_overlap")
def _() -> bool:
    of = torch_private.has_internal_overlap
    overlapping = torch.ones(3, 1).expand(3, 2), torch.ones(9).as_strided((3, 3), (2, 1))
    return of(torch.ones(3, 2).t()) == 0 and all(of(one) != 0 for one in overlapping)


@relied_on(
    "tells which arguments an operation writes to and which its results may alias", "ops.aten.detach.default._schema"
)
def _() -> bool:
    aten = torch.ops.aten

    def told(operation: Any) -> list[Any]:
        arguments = torch_private.schema_of(operation).arguments
        return [(it.name, None if it.alias_info is None else it.alias_info.is_write) for it in arguments]

    return (
        told(aten.add_.Tensor) == [("self", True), ("other", None), ("alpha", None)]
        and told(aten.detach.default) == [("self", False)]
        and told(aten._foreach_add_.Scalar)[0] == ("self", True)
    )


@relied_on("holds collectives whose schemas tell all that they write to", "ops._c10d_functional")
def _() -> bool:
    one = torch.ops._c10d_functional.all_reduce.default
    arguments = torch_private.schema_of(one).arguments
    return one.namespace in torch_private.TRUSTED_NAMESPACES and all(it.alias_info is None for it in arguments)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(operation)
        return operation(*args, **(kwargs or {}))


def unscale(one: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([one]))
    assert one.grad[0] == 0.5


CALLS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "clipping": (
        lambda one: nn.utils.clip_grad_norm_([one], 0.5),
        ["ops.aten._foreach_norm.Scalar", "ops.aten._foreach_mul_.Tensor"],
    ),
    "a product of a list": (lambda one: torch._foreach_mul_([one.grad], 0.5), ["ops.aten._foreach_mul_.Scalar"]),
    "a quotient of a list": (lambda one: torch._foreach_div_([one.grad], 0.5), ["ops.aten._foreach_div_.Scalar"]),
    "a quotient by a tensor": (
        lambda one: torch._foreach_div_([one.grad], torch.tensor(2.0)),
        ["ops.aten._foreach_div_.Tensor"],
    ),
    "zero_grad()": (
        lambda one: torch.optim.SGD([one], foreach=True).zero_grad(set_to_none=False),
        ["ops.aten._foreach_zero_.default"],
    ),
    "a GradScaler": (unscale, ["ops.aten._amp_foreach_non_finite_check_and_unscale_.default"]),
}


def calls(work: Callable[[Any], object], paths: Iterable[str]) -> bool:
    one = parameter(3)
    one.grad = torch.ones(3)
    with Operations() as mode:
        work(one)
    return {operator.attrgetter(path)(torch) for path in paths} <= mode.seen


for _what, _call in CALLS.items():
    relied_on(f"is what {_what} calls", *_call[1])(functools.partial(calls, *_call))


def shard() -> Any:
    return distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])


@relied_on("is the very part of a DTensor, which may be replaced", "distributed.tensor.DTensor._local_tensor")
def _() -> bool:
    one, other = shard(), torch.zeros(4, 2)
    part = torch_private.dtensor_part(one)
    one.fill_(3.0)
    is_part = part[0, 0] == 3.0 and torch_private.dtensor_part(one) is part
    torch_private.set_dtensor_part(one, other)
    return bool(is_part and torch_private.can_have_handle(one) and one.to_local().data_ptr() == other.data_ptr())


@relied_on("makes a DTensor over a part that lies elsewhere or has another dtype", "distributed.tensor.DTensor._spec")
def _() -> bool:
    one, part = shard(), torch.zeros(4, 2, dtype=torch.float64)
    other: Any = torch_private.dtensor_like(one, part)
    elsewhere: Any = torch_private.dtensor_like(one, torch.empty(4, 2, device="meta"))
    same = (other.placements, other.device_mesh, other.shape) == (one.placements, one.device_mesh, one.shape)
    return (
        same
        and other.dtype == part.dtype
        and torch_private.dtensor_part(other) is part
        and elsewhere.to_local().is_meta
    )


def wrapped() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return distributed.fsdp.FullyShardedDataParallel(
            nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu")
        )


@relied_on("is on parameters of FSDP1, and on no others", "distributed.fsdp._common_utils.FSDP_FLATTENED")
def _() -> bool:
    return torch_private.are_flattened(wrapped().parameters()) and not torch_private.are_flattened([parameter(3)])


@relied_on("keeps schedulers of learning rates quiet", "optim.Optimizer._opt_called")
def _() -> bool:
    one = parameter(3)
    one.grad = torch.ones(3)
    optimizer = SpeculativeCPUAdamW([one])
    rates = torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.resolve()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates.step()
    return True


@relied_on("makes steps only to get state that it can load into", "distributed.checkpoint.state_dict")
def _() -> bool:
    model = nn.Linear(2, 2)
    optimizer = SpeculativeCPUAdamW(model.parameters())
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return optimizer.last_outcome is None and {int(entry["step"]) for entry in state.values()} == {0}


@relied_on("tells how long its collectives wait", "distributed.ProcessGroup")
def _() -> bool:
    group = torch.distributed.new_group([0], timeout=timedelta(seconds=77))
    found = torch_private.timeout_of(group)
    torch.distributed.destroy_process_group(group)
    return found == timedelta(seconds=77) and torch_private.timeout_of(None) is None


def test_every_name_is_checked():
    assert set(torch_private.FOUND) <= RELIED_ON.keys()


@pytest.mark.parametrize("path", RELIED_ON)
def test_torch_still_does_what_is_relied_on(path, one_rank):
    sentence, check = RELIED_ON[path]
    expected = f"torch.{path} {sentence}"
    assert torch_private.FOUND.get(path, True), f"{expected}: it is gone from torch {torch.__version__}"
    try:
        holds = check()
    except Exception as error:
        raise AssertionError(f"{expected}: it has changed in torch {torch.__version__}") from error
    assert holds, f"{expected}: it has changed in torch {torch.__version__}"


# -- without them ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs():
    done = subprocess.run([sys.executable, without_names.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_a_name_that_only_handles_need_no_gradient_is_taken(runs):
    assert runs["missing"] == {path: [] if path in NEEDED_ALONE else [path] for path in torch_private.FOUND}


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_without_names_the_bits_are_the_same(kind, runs):
    usual = runs[kind][NONE]
    for name, run in runs[kind].items():
        assert run["digests"] == usual["digests"], name
        takes = name in (VERSION, OTHERS, NONE)
        assert any(run["taken"]) is takes, name
        assert run["refused"] is not takes, name
        told = f"nothing overlaps: torch {torch.__version__} lacks {', '.join(run['missing'])}"
        assert run.get("told", []) == ([told] * 2 if kind == "plain" and not takes else []), name
    assert len(usual["digests"]) == {"plain": 1, "sharded": 2}[kind]


def test_without_a_spec_a_part_elsewhere_is_refused():
    one = SimpleNamespace(device_mesh=SimpleNamespace(device_type="cpu"))
    with pytest.raises(RuntimeError, match=r"no DTensor\._spec.* meta .* cpu devices; install"):
        torch_private.dtensor_like(one, torch.empty(4, 2, device="meta"))


def test_without_its_mark_fsdp1_is_seen_while_a_module_is_wrapped(one_rank, monkeypatch):
    model = wrapped()
    monkeypatch.delattr(distributed.fsdp._common_utils, "FSDP_FLATTENED")
    assert torch_private.are_flattened(model.parameters())


def test_without_the_flag_a_handle_met_by_a_compiler_is_given_back(monkeypatch):
    monkeypatch.delattr(compiled_autograd, "compiled_autograd_enabled")
    one = taken()
    assert one.grad.untyped_storage().nbytes() == 12
    assert one.grad.taken.given is not None
