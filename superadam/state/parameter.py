"""State of one parameter: its fp32 master and moments, and the gradient that is pending on its pieces.

A parameter that is fp32 or fp64, dense and on the CPU is its own master. Any other is a *working copy*, whose master
lies next to the moments on the CPU.
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from superadam.distributed import shards
from superadam.handles.taken_gradient import TakenGradient
from superadam.kernels import native, torch_private
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Hyperparameters, Interval, Scale
from superadam.kernels.torch_private import dtensor_like
from superadam.state import compact
from superadam.state.places import VERSION, places_of
from superadam.state.storage import Master, Moments, Storage, dense
from superadam.state.uncertain import NARROWER, Listed

if TYPE_CHECKING:
    from superadam.state.new_values import Shadow

TENSORS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
"""What the state of a parameter consists of; checkpoints, kernels and `ParameterState` have the same names."""

SECONDS = {"exp_avg": "exp_avg_exponents", "exp_avg_sq": "exp_avg_sq_exponents", "master": "master_low"}
"""The second array of each of these where it is encoded: what does not fit in the first."""

ARRAYS = (*TENSORS, *SECONDS.values())
"""Attributes of a `ParameterState` that hold memory on which kernels work; they have the same names there."""


class Phase(enum.Enum):
    """Where the transaction of a piece stands."""

    __hash__ = object.__hash__  # in C; that of enum.Enum is Python's, and each step calls it for each parameter

    CLEAN = "clean"
    """Nothing is pending; the working copy is the rounded master."""
    SPECULATED = "speculated"
    """A gradient waits for its verdict; parameter and state are unchanged."""
    ACCEPTED = "accepted"
    """The verdict was good, and the parameter has its new value; the commit that updates the state is still to come."""


class Prediction(NamedTuple):
    """For which factor new values are computed, and for which others they are to hold; None for no others."""

    factor: float
    interval: Interval | None = None


class Slot(NamedTuple):
    """Where the new value of one piece lies."""

    shadow: Shadow
    position: int

    @property
    def value(self) -> Tensor:
        """The tensor that kernels write."""
        return self.shadow.values[self.position]


@dataclass(slots=True, eq=False)
class Pending:
    """One piece's gradient from when it is sent until its commit, with all that its step depends on, by value.

    Attributes:
        taken: the record of the gradient; weak, so that nothing here keeps a gradient that was given back.
        version: of `taken`, whose gradient this is.
        gradient: as kernels read it, once it has arrived: on the host in the piece's layout, or on the device.
        slot: of the speculated value; None where only the norm is computed, and once the value is not needed.
        is_resident: whether the gradient is on the device, where its step is made.
        step: the step that this gradient makes, counted from 1; of this and all below, speculation says what they are.
        scale: factor on the gradient in the speculated value.
        interval: factors for which all elements that are not listed have the same speculated value; None for `scale`
            alone.
        listed: the others.
        is_stale: whether what speculation has read may have been written to since.
    """

    taken: weakref.ref[TakenGradient]
    version: int
    hyper: Hyperparameters
    gradient: Tensor
    slot: Slot | None = None
    is_resident: bool = False
    step: int = 0
    scale: Scale = Scale()  # noqa: RUF009 (immutable)
    interval: Interval | None = None
    listed: Listed | None = None
    is_stale: bool = False

    @staticmethod
    def of(taken: TakenGradient, hyper: Hyperparameters, gradient: Tensor, **known: Any) -> Pending:
        """Return the record of a gradient as it is now."""
        return Pending(weakref.ref(taken), taken.version, hyper, gradient, **known)

    def expect(self, step: int, unscaling: float, prediction: Prediction) -> None:
        """Let speculation be for a step and the predicted factor, which may be the usual one, `unscaling`."""
        self.step, self.interval, taken = step, prediction.interval, self.taken()
        dtype = self.gradient.dtype if taken is None or taken.is_unrounded else taken.dtype
        factor = prediction.factor
        self.scale = Scale.recorded(factor, dtype) if factor == unscaling else Scale(factor)

    def can_be_patched(self, scale: Scale) -> bool:
        """Whether new values of the listed elements alone make the speculated value that of another factor."""
        covers = self.interval is not None and self.interval.covers(scale.factor)
        return covers and self.listed is not None and self.listed.is_complete


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise TypeError unless this is a dense real tensor of a supported dtype, not Partial, that counts versions.

    One that is not trained may have another dtype, as quantized weights do: it takes no part.
    """
    if is_lazy(parameter):
        raise TypeError(
            f"{name} has no shape yet, expected one with values; run the model once before making the optimizer"
        )
    if parameter.is_complex():
        raise TypeError(
            f"{name} is complex ({parameter.dtype}), expected a real dtype; optimize torch.view_as_real of it instead"
        )
    local = shards.local_of(parameter)
    if hasattr(local, "__tensor_flatten__") and not local.data_ptr():
        raise TypeError(
            f"{name} is a {type(local).__name__}, a wrapper around other tensors, expected one that has its values in "
            "memory of its own; optimize it with torch.optim"
        )
    if parameter.layout is not torch.strided:
        raise TypeError(f"{name} has layout {parameter.layout}, expected torch.strided; convert it with to_dense()")
    shards.check_placement(parameter, name)
    if parameter.dtype not in DTYPES and (parameter.requires_grad or parameter.is_quantized):
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"{name} is {parameter.dtype}, expected one of {expected}; convert it with .to() before optimizing"
        )
    if parameter.is_inference():
        raise TypeError(
            f"{name} was made in inference mode, expected a tensor that autograd tracks; clone() it outside that mode"
        )


def differing(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors of one dtype differ in any bit; NaN equals NaN, +0 and -0 differ."""
    bits = getattr(torch, f"int{8 * first.dtype.itemsize}")
    one, other = first.contiguous().resolve_neg().view(bits), second.contiguous().view(bits)
    return (one != other) & ~(first.isnan() & second.isnan())


def piece_length(parameter: Tensor, most: int | None) -> int:
    """Return the elements of the pieces that a parameter is cut into, of which the last may have fewer.

    They are multiples of a chunk of the norm, and no more than `most` (None: no limit) rounded up to that. A parameter
    with gaps in its memory is one piece.
    """
    numel = parameter.numel()
    if most is None or numel <= max(most, native.CHUNK) or parameter.stride() != dense(parameter).stride():
        return numel
    count = -(-numel // max(most, native.CHUNK))
    return native.CHUNK * -(-numel // (native.CHUNK * count))


class Piece:
    """Elements of a parameter that are consecutive in memory: they travel, are speculated on and committed together.

    A parameter that is not cut is its own only piece.

    Attributes:
        row: in the table of kernels' jobs; its position in the optimizer, of a parameter.
        begin: its first element, in the order of memory.
        shape, strides: of its tensors: the parameter's, or one dimension where that is cut.
        dtype: that steps compute in, and of masters: fp32, or fp64 for fp64 parameters.
        parameter_dtype: of the working copy.
        is_double: whether steps compute in fp64.
        is_narrow: whether the parameter's dtype is narrower than its master's: new values of many factors are one.
        reference: the weak reference to the parameter's state that all share, so that taking a gradient makes none.
        state: of the parameter; found in C, because passes ask often.
    """

    row = -1
    state = property(operator.methodcaller("reference"))

    def __init__(
        self,
        reference: weakref.ref[ParameterState],
        begin: int,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
        parameter_dtype: torch.dtype,
    ) -> None:
        self.reference, self.begin, self.shape, self.strides = reference, begin, shape, strides
        self.dtype, self.parameter_dtype = dtype, parameter_dtype
        self.is_double, self.is_narrow = dtype == torch.float64, parameter_dtype in NARROWER
        self.phase = Phase.CLEAN
        self.pending: Pending | None = None

    def elements_of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor in the layout of the parameter's state."""
        begin, numel = part_of(tensor, self)
        return tensor.detach().as_strided((numel,), self.strides, tensor.storage_offset() + begin)

    @property
    def working_copy(self) -> Tensor:
        """These elements of the parameter."""
        return self.elements_of(self.state.local)

    def host_copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor of this shape on the CPU, in this layout; of its own dtype by default."""
        copy = torch.empty_strided(tensor.shape, self.strides, dtype=dtype or tensor.dtype, device="cpu")
        return copy.copy_(tensor.detach().resolve_neg())  # copy_ of fp16 to fp32 forgets the sign

    def waits_with(self, taken: TakenGradient) -> bool:
        """Whether this gradient waits for its verdict, unchanged."""
        pending = self.pending if self.phase is Phase.SPECULATED else None
        return pending is not None and pending.taken() is taken and pending.version == taken.version


def part_of(tensor: Tensor, piece: Piece) -> tuple[int, int]:
    """Return which elements of a tensor belong to a piece: the first, and how many; there may be one for each block."""
    each = max(1, piece.state.shape.numel()) // max(1, tensor.numel())
    return piece.begin // each, piece.shape.numel() // each


def pieces_of(states: Iterable[ParameterState]) -> list[Piece]:
    """Return all pieces of some parameters."""
    return [piece for state in states for piece in state.pieces]


class ParameterState(Piece):
    """State of one parameter; its tensors are None until the first gradient arrives.

    Attributes:
        parameter: the model's tensor, whose `.grad` counts.
        local: this rank's part of it, on which kernels work; without DTensor the same tensor. So are all tensors below.
        is_distributed: whether the model's tensor is a DTensor.
        parameter_dtype, shape: of `local` when it was bound.
        name: in error messages.
        strides: layout of master, moments and the gradients that kernels read: dense, in the order of the parameter.
        cuts: the pieces that it is cut into; none where it is its own only piece.
        asked, storage: how it was to be stored, and how it is.
        first_threshold: position of its first element among the thresholds, which begin again after each block.
        encodings: of those of `TENSORS` that are encoded in two arrays.
        shown: by key, the stand-ins for its `TENSORS` in `optimizer.state`: a write to one is a write to the state.
        is_own_master: whether the parameter itself is the master; `master` is that of a working copy.
        is_staged: whether kernels cannot write the parameter directly: on another device, not dense, or negated lazily.
        exp_avg, exp_avg_sq, max_exp_avg_sq: moments, as in torch.optim.Adam, or the first arrays of encoded ones.
        exp_avg_exponents, exp_avg_sq_exponents, master_low: the second arrays, with one dimension, of what is encoded.
        arrays: those of its `TENSORS` that a program has assigned from memory that an array (numpy, DLPack) may have.
        wholes: the DTensors, by attribute, as whose part users see the four tensors above; empty for other parameters.
    """

    def __init__(
        self,
        parameter: Tensor,
        row: int,
        name: str,
        *,
        is_on_host: bool | None = None,
        piece_numel: int | None = None,
        storage: Storage = Storage(),  # noqa: B008 (immutable)
    ) -> None:
        check_parameter(parameter, name)
        local = shards.local_of(parameter)
        dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
        layout = dense(local)
        super().__init__(weakref.ref(self), 0, local.shape, layout.stride(), dtype, local.dtype)
        self.row, self.parameter, self.local, self.name = row, parameter, local, name
        self.is_distributed = local is not parameter
        on_host = local.is_cpu if is_on_host is None else is_on_host
        self.is_staged = not on_host or not self.has_layout(local)
        self.is_own_master = local.dtype == self.dtype and not self.is_staged
        self.asked, self.storage = storage, storage.of(local)
        self.first_threshold = shards.first_position(parameter) % compact.BLOCK if layout.is_contiguous() else 0
        self.encodings: dict[str, compact.Encoding] = {}
        if self.storage.moments is Moments.EIGHT_BIT:
            self.encodings |= {"exp_avg": compact.EXP_AVG, "exp_avg_sq": compact.EXP_AVG_SQ}
        if self.storage.master is Master.TWENTY_FOUR_BIT:
            self.encodings |= {"master": compact.MASTERS[local.dtype]}
        self.shown: dict[str, Tensor] = {}  # not weak references, with which torch.utils.swap_tensors refuses them
        self.master: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.max_exp_avg_sq: Tensor | None = None
        self.exp_avg_exponents: Tensor | None = None
        self.exp_avg_sq_exponents: Tensor | None = None
        self.master_low: Tensor | None = None
        self.arrays: set[str] = set()
        self.wholes: dict[str, Tensor] = {}
        self._changed: weakref.WeakMethod[Callable[[ParameterState, Collection[str]], None]] | None = None
        self.cuts: tuple[Piece, ...] = ()
        length, numel = piece_length(local, None if self.is_own_master else piece_numel), local.numel()
        if length < numel:
            parts = ((begin, torch.Size([min(length, numel - begin)])) for begin in range(0, numel, length))
            self.cuts = tuple(Piece(self.reference, *part, (1,), dtype, local.dtype) for part in parts)

    def elements_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, in the order of memory."""
        return self.cuts or (self,)

    def waits_with(self, taken: TakenGradient) -> bool:
        """Whether this gradient waits for its verdict with all pieces, unchanged."""
        return all(piece.waits_with(taken) for piece in self.cuts) if self.cuts else super().waits_with(taken)

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of a gradient; raise TypeError unless it is distributed as the parameter."""
        local = shards.part_of(gradient, self.parameter)
        if local is None:
            raise TypeError(
                f"the gradient of {self.name} is {shards.described(gradient)}, expected it like its parameter, "
                f"{shards.described(self.parameter)}; redistribute() it before the step"
            )
        return local

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this state as users see it: distributed as the parameter."""
        return dtensor_like(self.parameter, tensor) if self.is_distributed else tensor

    def whole_of(self, key: str) -> Tensor:
        """Return the tensor of one attribute as users see it, always the same while the attribute is."""
        tensor = getattr(self, key)
        if shards.local_of(self.wholes.get(key)) is not tensor:
            self.wholes[key] = self.whole(tensor)
        return self.wholes[key]

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype in which users see one of its `TENSORS`."""
        return self.dtype if key == "master" or self.is_double else self.storage.moments.dtype

    def zeros(self, key: str) -> dict[str, Tensor]:
        """Return the arrays of one of its `TENSORS` with the value zero, by their names."""
        encoding = self.encodings.get(key)
        dtype = self.dtype_of(key) if encoding is None else encoding.dtypes[0]
        arrays = {key: torch.zeros_like(self.local, dtype=dtype, device="cpu", requires_grad=False)}
        if encoding is not None:
            numel = self.shape.numel() // encoding.numel_per_second
            arrays[SECONDS[key]] = torch.zeros(numel, dtype=encoding.dtypes[1], device="cpu")
        return arrays

    def watch(self, changed: Callable[[ParameterState, Collection[str]], None] | None) -> None:
        """Call a method, which this does not keep alive, with the names of arrays whenever they become other ones."""
        self._changed = None if changed is None else weakref.WeakMethod(changed)

    def put(self, arrays: Mapping[str, Tensor | None]) -> None:
        """Have these arrays from now on, by name; nothing else changes what the state consists of."""
        for name, tensor in arrays.items():
            setattr(self, name, tensor)
        changed = None if self._changed is None else self._changed()
        if changed is not None:
            changed(self, arrays.keys())

    def values_of(self, key: str) -> Tensor:
        """Return one of the `TENSORS` that it has in the dtype that users see: itself, or a copy of what is encoded."""
        if key not in self.encodings:
            values: Tensor = getattr(self, key)
            return values
        values = torch.empty_strided(self.shape, self.strides, dtype=self.dtype_of(key), device="cpu")
        self.decode(key, values)
        return values

    def decode(self, key: str, values: Tensor) -> None:
        """Write what is encoded into a tensor in the layout of the state."""
        compact.decode(self.encodings[key], flat(getattr(self, key)), getattr(self, SECONDS[key]), flat(values))

    def store(self, key: str, values: Tensor, *, in_place: bool = False) -> bool:
        """Store a copy of values in the dtype and layout of the state, to nearest; return whether a bit changed.

        What is encoded is stored `in_place`, or in new arrays where a program may have put the old ones elsewhere.
        """
        if key not in self.encodings:
            self.put({key: self.host_copy(values, self.dtype_of(key))})
            return True
        values = flat(values.detach() if self.has_layout(values) else self.host_copy(values))
        arrays = {name: getattr(self, name) for name in (key, SECONDS[key])} if in_place else self.zeros(key)
        is_changed = compact.encode(self.encodings[key], values, *map(flat, arrays.values()))
        if not in_place:
            self.put(arrays)
        return is_changed or not in_place

    def adopt(self, key: str, values: Tensor, before: Tensor | None = None) -> bool:
        """Store those elements that differ from the state's, as rounded to the dtype of `values`; return if any do.

        So what has fewer bits than the state, and was not written to, changes nothing. What the state was `before`, an
        earlier call, takes its place.
        """
        if values.dtype == self.dtype_of(key) and key in self.encodings:
            return self.store(key, values, in_place=True)
        stored = self.values_of(key)
        given = values.detach().cpu()
        where = differing(given, (stored if before is None else before).to(given.dtype))
        is_any = bool(where.any())
        if not is_any and before is None:
            return False
        with torch_private.inference_mode(stored.is_inference()), torch.no_grad():  # where alone it can be written
            if before is not None:
                stored.copy_(before)
            stored[where] = given[where].to(stored.dtype)
            if key in self.encodings:
                self.store(key, stored, in_place=True)
        return is_any

    def inherit(self, other: ParameterState) -> None:
        """Have what the stand-ins of a parameter's state before this one stand for."""
        for key, shown in other.shown.items():
            first, second = [(s.shape, s.strides, s.dtype_of(key), s.encodings.get(key)) for s in (self, other)]
            if first == second:
                self.put({name: getattr(other, name) for name in (key, SECONDS.get(key)) if name})
                self.shown[key] = shown

    def show(self, key: str, shown: Tensor) -> None:
        """Write the state's values into a tensor of any dtype, layout and device."""
        if key in self.encodings and self.has_layout(shown):
            self.decode(key, shown)
        else:
            shown.copy_(self.values_of(key))

    def take_encoded(self, key: str, encoding: compact.Encoding, arrays: tuple[Tensor, Tensor]) -> bool:
        """Have these arrays from now on; return whether they are encoded as here, and could be taken."""
        first, second = arrays
        if self.encodings.get(key) is not encoding or (first.shape, first.stride()) != (self.shape, self.strides):
            return False
        self.shown.pop(key, None)
        self.put({key: first, SECONDS[key]: second})
        return True

    def has_layout(self, tensor: Tensor) -> bool:
        """Whether kernels read a tensor where it lies: on the CPU in the layout of the state."""
        return tensor.is_cpu and tensor.stride() == self.strides and not tensor.is_neg()

    def forget(self, key: str) -> None:
        """Have none of one of its `TENSORS`; what stood for it does so no longer."""
        self.shown.pop(key, None)
        self.arrays.discard(key)
        self.put(dict.fromkeys((key, SECONDS[key]) if key in SECONDS else (key,)))

    def fault_of(self, gradient: Tensor) -> TypeError | ValueError | None:
        """Return the error to raise if a gradient does not fit."""
        if self.parameter_dtype not in DTYPES:
            return TypeError(
                f"{self.name} is {self.parameter_dtype} and has a gradient, expected none; set its .grad to None, or "
                "convert the parameter with .to() before optimizing"
            )
        if gradient.layout is not torch.strided:
            return TypeError(
                f"the gradient of {self.name} is sparse, expected a dense one; "
                "use torch.optim.SparseAdam for this parameter"
            )
        if gradient.dtype not in DTYPES or (gradient.dtype == torch.float64) != self.is_double:
            expected = "float64" if self.is_double else "float32, bfloat16 or float16"
            return TypeError(
                f"the gradient of {self.name} is {gradient.dtype}, expected {expected}; convert it before the step"
            )
        if gradient.shape != self.shape:
            return ValueError(
                f"the gradient of {self.name} has shape {tuple(gradient.shape)}, expected that of the parameter, "
                f"{tuple(self.shape)}; recompute it"
            )
        if gradient.is_meta:
            return ValueError(
                f"the gradient of {self.name} is on the meta device and has no values, expected some; materialize the "
                "model before training"
            )
        if not gradient.is_cpu and gradient.device != self.local.device:
            return ValueError(
                f"the gradient of {self.name} is on {gradient.device}, expected it on the parameter's device "
                f"{self.local.device} or on the CPU; move the model before the backward pass"
            )
        return None

    def check_gradient(self, gradient: Tensor) -> None:
        """Raise TypeError or ValueError if a gradient does not fit."""
        if (fault := self.fault_of(gradient)) is not None:
            raise fault

    def host_gradient(self, gradient: Tensor) -> Tensor:
        """Return a checked gradient on the CPU in the layout of the state, as kernels read it; copied if need be."""
        self.check_gradient(gradient)
        if gradient.is_cpu and not gradient.data_ptr() and gradient.numel():
            raise ValueError(
                f"the gradient of {self.name} has no data, because its storage was freed or it is a wrapper around "
                "other tensors, expected its values in memory; recompute it"
            )
        if self.has_layout(gradient):
            return gradient.detach() if gradient.requires_grad else gradient
        return self.host_copy(gradient)

    @property
    def has_state(self) -> bool:
        """Whether master and moments exist."""
        return self.exp_avg is not None and (self.is_own_master or self.master is not None)

    @property
    def master_version(self) -> int:
        """Version counter of the master, which kernels leave alone, with that of its whole."""
        return int(places_of([self.master, self.wholes.get("master")])[:, VERSION].sum())

    def check_largest(self) -> None:
        """Raise ValueError where the largest second moment cannot be stored, whatever the shape."""
        if self.asked.moments is Moments.EIGHT_BIT:
            raise ValueError(
                f"amsgrad is True for {self.name}, whose moments have 8 bits, expected False; "
                "set amsgrad=False, or make the optimizer with moments='bf16'"
            )

    def create_state(self, *, with_max: bool) -> None:
        """Create what a step reads and writes: zero moments, and the master from the parameter's present value."""
        if self.exp_avg is None:
            self.put(self.zeros("exp_avg") | self.zeros("exp_avg_sq"))
        if not self.is_own_master and self.master is None:  # also after loading moments that came without masters
            self.store("master", self.local)
        if with_max and self.max_exp_avg_sq is None:
            self.put(self.zeros("max_exp_avg_sq"))


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
