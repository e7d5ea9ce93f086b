"""One parameter: which can be held, which gradients fit, every layout, and parameters that kernels cannot reach."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.optimizers import EACH_DTYPE, trained
from support.visible import are_taken, bits, give_gradients, parameter, parameters_of, refused, state_bits, train
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from superadam import SpeculativeCPUAdam
from superadam.devices import PlainDevice
from superadam.state.new_values import NewValues
from superadam.state.parameter import ParameterState
from superadam.state.table import ParameterTable

# -- parameters --------------------------------------------------------------------------------------------------------

UNFIT: dict[str, tuple[Callable[[], Tensor], str]] = {
    "float8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn).requires_grad_(), "is torch.float8_e4m3fn, expected one"),
    "scaled integers": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "is torch.qint8, expected one of float32",
    ),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), "is complex .*torch.view_as_real"),
    "lazy": (torch.nn.UninitializedParameter, "has no shape yet.*run the model once"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "has layout torch.sparse_coo.*to_dense"),
    "of inference mode": (lambda: torch.inference_mode()(torch.zeros)(3), "was made in inference mode.*clone"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "has layout torch.sparse_csr.*to_dense"),
    "two tensors": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "is a TwoTensor, a wrapper around other tensors"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNFIT)
def test_unfit_parameter_is_refused(kind: str) -> None:
    make, sentence = UNFIT[kind]
    with pytest.raises(TypeError, match=f"parameter 0 of group 0 {sentence}"):
        SpeculativeCPUAdam([make()])
    with pytest.raises(TypeError, match=f"^weight {sentence}"):
        SpeculativeCPUAdam([("weight", make())])
    optimizer = trained(SpeculativeCPUAdam([parameter(3)]), [1])
    with refused(optimizer, TypeError, f"parameter 1 of group 1 {sentence}"):
        optimizer.add_param_group({"params": [parameter(3), make()]})
    optimizer.param_groups[0]["params"][0] = make()  # as a framework does that converts the model
    with pytest.raises(TypeError, match=f"parameter 0 of group 0 {sentence}"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(4, 3), (2, 1)])
def test_expanded_parameter_is_refused(shape: tuple[int, ...]) -> None:
    one = torch.nn.Parameter(torch.zeros(1).expand(shape))
    one.grad = torch.ones(shape)
    optimizer = SpeculativeCPUAdam([torch.nn.Parameter(torch.ones(3).as_strided((1, 3), (0, 1))), one])
    for use in (optimizer.step, optimizer.speculate):
        with refused(optimizer, ValueError, "parameter 1 of group 0 is expanded"):
            use()


def test_what_has_no_elements_is_not_expanded_whatever_its_strides() -> None:
    """Those of numpy's empty arrays are 0, as of state that was saved through numpy."""
    p = torch.nn.Parameter(torch.zeros(0, 64).as_strided((0, 64), (0, 0)))
    optimizer = trained(SpeculativeCPUAdam([p, parameter(64)]), [1])
    saved = optimizer.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][key] = saved["state"][0][key].as_strided((0, 64), (0, 0))
    trained(optimizer, [2])
    optimizer.load_state_dict(saved)
    trained(optimizer, [3])
    assert [int(entry["step"]) for entry in optimizer.state.values()] == [3, 3]


# -- gradients ---------------------------------------------------------------------------------------------------------


def _replaced(gradient: Tensor) -> Callable[[Tensor], None]:
    """Put a gradient past the checks of `.grad = `."""

    def spoil(one: Tensor) -> None:
        one.grad = torch.ones_like(one)
        one.grad.data = gradient

    return spoil


def _double(one: Tensor) -> None:
    one.data = one.data.double()
    one.grad = torch.ones_like(one)
    one.grad.data = torch.ones(4, 4)


def _sparse(one: Tensor) -> None:
    torch.nn.functional.embedding(torch.tensor([1]), one, sparse=True).sum().backward()


BAD_GRADIENTS: dict[str, tuple[Callable[[Tensor], None], type[Exception], str]] = {
    "another shape": (_replaced(torch.ones(4, 5)), ValueError, r"has shape \(4, 5\), expected .*\(4, 4\)"),
    "as many elements": (_replaced(torch.ones(16)), ValueError, r"has shape \(16,\), expected .*\(4, 4\)"),
    "float64": (_replaced(torch.ones(4, 4).double()), TypeError, "is torch.float64, expected float32, bfloat16"),
    "of a double parameter": (_double, TypeError, "is torch.float32, expected float64"),
    "integers": (_replaced(torch.ones(4, 4).int()), TypeError, "is torch.int32, expected float32, bfloat16"),
    "sparse": (_sparse, TypeError, "is sparse, expected a dense one; use torch.optim.SparseAdam"),
}


@pytest.mark.parametrize("kind", BAD_GRADIENTS)
def test_bad_gradient_is_refused(kind: str) -> None:
    spoil, error, sentence = BAD_GRADIENTS[kind]
    optimizer = trained(SpeculativeCPUAdam([("weight", parameter(5, 5)), ("bias", parameter(4, 4))]), [1])
    parameters_of(optimizer)[0].grad = torch.ones(5, 5)
    spoil(parameters_of(optimizer)[1])
    before = state_bits(optimizer)
    for use in (optimizer.step, optimizer.speculate, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(error, match=f"^the gradient of bias {sentence}"):
            use()
        assert state_bits(optimizer) == before
        assert parameters_of(optimizer)[0].grad is not None
    assert optimizer.statistics.steps == 1


@EACH_DTYPE
@pytest.mark.parametrize("layout", ["as the parameter", "transposed"])
def test_nothing_belongs_to_the_graphs_of_autograd(dtype: torch.dtype, layout: str) -> None:
    """Whatever thread it is made in: each has a mode of its own."""
    state = ParameterState(parameter(4, 4, dtype=dtype), 0, "p")
    gradient = torch.ones(4, 4, dtype=dtype, requires_grad=True) * 2
    with torch.enable_grad():
        got = state.host_gradient(gradient if layout == "as the parameter" else gradient.t())
        state.create_state(with_max=True)
    assert torch.equal(got, gradient)
    made = [got, state.master, state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq]
    assert not any(one.requires_grad for one in made if one is not None)


# -- layouts -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values.clone(),
    "channels last": lambda values: values.clone(memory_format=torch.channels_last),
    "permuted": lambda values: values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "sliced": lambda values: torch.stack([values, values], dim=-1)[..., 1],
    "every other row": lambda values: values.repeat_interleave(2, 0)[::2],
    "misaligned": lambda values: torch.cat([values.flatten()[:1], values.flatten()])[1:].view_as(values),
    "negated lazily": lambda values: torch._neg_view(-values),
}
GRADIENTS = {**LAYOUTS, "under way": AsyncCollectiveTensor}
NOT_TAKEN = ("sliced", "every other row", "misaligned", "negated lazily", "under way")


def _alone(view: Tensor) -> Tensor:
    """Return the same memory, strides and all, without the tensor that this is a view of: it can be taken."""
    if view.is_neg() or type(view) is not Tensor:
        return view
    whole = torch.empty(0, dtype=view.dtype)
    return whole.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradient_layout", GRADIENTS)
@pytest.mark.parametrize("speculative", [False, True])
def test_every_layout_has_the_same_bits(dtype, layout, gradient_layout, speculative):
    plain = SpeculativeCPUAdam([parameter(4, 3, 5, 2, dtype=dtype)], amsgrad=True, max_grad_norm=0.5)
    laid_out = SpeculativeCPUAdam(
        [torch.nn.Parameter(LAYOUTS[layout](parameter(4, 3, 5, 2).detach().to(dtype)))], amsgrad=True, max_grad_norm=0.5
    )
    (one,) = parameters_of(laid_out)
    strides = one.stride()
    for seed in range(3):
        for optimizer in (plain, laid_out):
            give_gradients(optimizer, seed)
        one.grad = _alone(GRADIENTS[gradient_layout](one.grad))
        plain.step()
        if speculative:
            laid_out.speculate()
            assert are_taken(laid_out) == [gradient_layout not in NOT_TAKEN]
            laid_out.resolve()
        else:
            laid_out.step()
    assert state_bits(laid_out, without=["master"]) == state_bits(plain, without=["master"])
    assert one.stride() == strides


# -- parameters that kernels cannot reach ------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every parameter as one on another device: a working copy behind a staging tensor, even in fp32."""
    monkeypatch.setattr(PlainDevice, "is_host", lambda self, parameter: False)


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.usefixtures("elsewhere")
def test_what_is_staged_is_speculated_on(limit: float | None) -> None:
    optimizer = SpeculativeCPUAdam([parameter(70), parameter(4, dtype=torch.float64)], max_grad_norm=limit)
    counts = trained(optimizer, range(3), speculative=True).statistics
    assert (counts.accepted, counts.respeculated) == ((4, 0) if limit is None else (0, 4))
    one = parameters_of(optimizer)[0]
    assert bits(optimizer.state[one]["master"]) == bits(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_step_is_a_new_version_of_its_parameter(dtype: torch.dtype) -> None:
    one = parameter(70, dtype=dtype)
    optimizer, versions = SpeculativeCPUAdam([one]), [one._version]
    for seed, is_speculative in enumerate((False, True, False, True)):
        train(optimizer, seed, speculative=is_speculative)
        versions.append(one._version)
    assert versions == [versions[0] + count for count in range(5)]


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t[:, :64], lambda t: t[:64].t(), lambda t: t[::2]])
def test_a_copy_stores_its_moments_as_the_original(make: Callable[[Tensor], Tensor]) -> None:
    """Also of a parameter with gaps in its memory, which copies lose."""
    optimizer = trained(SpeculativeCPUAdam([torch.nn.Parameter(make(torch.randn(128, 128)))], moments="8bit"), [1, 2])
    other = copy.deepcopy(optimizer)
    for one in (optimizer, other):
        train(one, 3)
    assert state_bits(optimizer, without=["master"]) == state_bits(other, without=["master"])


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_memory_that_has_moved_is_used_no_longer(name: str) -> None:
    """Which users may replace by `.data`; whatever still reads it is an error, until the row is bound again."""
    state = ParameterState(torch.zeros(2, dtype=torch.bfloat16), 0, "weight")
    state.create_state(with_max=True)
    table = ParameterTable([state], NewValues())
    assert table.moved_arrays(table.all_rows) == {}
    before = getattr(state, name).data
    getattr(state, name).data = torch.ones(2)
    for _ in range(2):  # and where the same memory comes back
        assert table.moved_arrays(table.all_rows) == {0: [name]}
        assert table.job(table.all_rows, [torch.zeros(2, dtype=torch.bfloat16)])[name] == [0]
        getattr(state, name).data = before
    state.put({name: getattr(state, name)})
    assert table.moved_arrays(table.all_rows) == {}
    assert table.job(table.all_rows, [torch.zeros(2, dtype=torch.bfloat16)])[name] == [before.data_ptr()]
