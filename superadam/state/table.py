"""All parameters of one optimizer, and their pieces, as rows of pointers; the kernel passes over chosen rows.

A pass reads the hyper-parameters of a `CoefficientTable`, and sums squares into a `GradientNorm`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from superadam.kernels import native
from superadam.kernels.dtypes import DTYPES
from superadam.kernels.hyperparameters import Coefficients, Hyperparameters, Interval, Scale
from superadam.kernels.native import Dtype, Format, Pass
from superadam.state.new_values import NewValues, Patch, Shadow
from superadam.state.parameter import ARRAYS, SECONDS, TENSORS, ParameterState, Pending, Piece, part_of
from superadam.state.places import ADDRESS, NOWHERE, Fingerprints, compare, places_of
from superadam.state.resident import ResidentStates

Rows = npt.NDArray[np.int64]  # of a `ParameterTable`, in the order in which a job visits them
_get_row = operator.attrgetter("row")
Segments = npt.NDArray[np.void]  # a kernel job: rows of `superadam.kernels.native.SEGMENT`
Runs = Sequence[tuple[Hyperparameters, int]]  # hyper-parameters, and how many consecutive states have them
Indices = Sequence[int] | npt.NDArray[np.int32]  # of each row's coefficients in a `CoefficientTable`


class CoefficientTable:
    """Collects the coefficient `sets` of one job, by index; what gives equal sets is looked up once."""

    def __init__(self) -> None:
        self.sets: list[Coefficients] = []
        # With the hyper-parameters, so that no id in a key is used again.
        self._found: dict[tuple[int, int, Scale, bool, Interval | None], tuple[int, Hyperparameters]] = {}

    def index(
        self, hyper: Hyperparameters, step: int, scale: Scale, double: bool, interval: Interval | None = None
    ) -> int:
        """Return the index of the coefficients of this step, with the interval test's where its proof holds."""
        key = (id(hyper), step, scale, double, interval)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = len(self.sets), hyper
            coefficients = Coefficients.at_step(hyper, step, scale.factor, rounds=scale.rounds, double=double)
            self.sets.append(coefficients if interval is None else coefficients.over(interval) or coefficients)
        return found[0]

    def array(self) -> npt.NDArray[np.void]:
        """Return the sets as kernels read them."""
        return np.array([coefficients.row() for coefficients in self.sets], native.COEFFICIENTS)


@dataclass(frozen=True, slots=True, eq=False)
class GradientNorm:
    """Norm of gradients: sum of squares and number of Inf and NaN for each chunk of each gradient, in order."""

    sums: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.int64]

    @staticmethod
    def zeros(chunks: int) -> GradientNorm:
        """Return a norm of this number of chunks, all zero."""
        return GradientNorm(np.zeros(chunks, np.float64), np.zeros(chunks, np.int64))

    def copy(self) -> GradientNorm:
        """Return an independent copy."""
        return GradientNorm(self.sums.copy(), self.nonfinite.copy())

    def clear(self, where: slice = slice(None)) -> None:
        """Set entries to zero."""
        self.sums[where] = 0
        self.nonfinite[where] = 0

    def scale(self, where: slice, factor: float) -> None:
        """Multiply the gradients of these entries by a factor, an fp32 number that is not 0."""
        self.sums[where] *= factor * factor

    @property
    def count(self) -> int:
        """Number of Inf and NaN."""
        return int(self.nonfinite.sum())

    @property
    def total(self) -> float:
        """The 2-norm, summed in the order of the entries."""
        return math.sqrt(native.ordered_sum(self.sums))


class ParameterTable:
    """Rows of pointers for a fixed list of parameters, and behind them for the pieces of those that are cut.

    Attributes:
        states, parameters, fingerprints: in the order of the optimizer's groups; the parameters are the model's.
        numel: elements of all parameters.
        is_distributed: whether any of them is a DTensor.
        is_cut, is_any_encoded: whether any of them is cut, or has state that is encoded.
        pieces, owners: of each row, the piece, and the row of its parameter.
        steps: accepted steps of each parameter.
        resident: where state is newer than here; None without a device that makes steps.
        is_staged: whether kernels on the CPU can neither read nor write the row's elements of the parameter.
        is_published: whether the optimizer's `state`, as users see it, holds what the parameter's row holds.
        created: state of the step under way: what it lacked before, and whether its row was published.
        plain_layouts: of a gradient that kernels read where it lies, and whose dtype is the parameter's.
        is_held: whether a program may refer to what is in the row's entry of `state`. It may then write to it, move it
            or free it at any time, so that nothing reads that memory but calls of the program, which look first.
        is_any_held: whether any row is.
        is_exposed: whether programs were given such references since it was last found out which ones they hold.
        norm: of the gradients of the open step, per (parameter, chunk); 0 where a parameter takes no part.
    """

    def __init__(
        self, states: Sequence[ParameterState], new_values: NewValues, resident: ResidentStates | None = None
    ) -> None:
        self.states = list(states)
        self.parameters = tuple(state.parameter for state in self.states)
        self.is_distributed = any(state.is_distributed for state in self.states)
        self._states_by_id = {id(state.parameter): state for state in self.states}
        self.all_rows = np.arange(len(self.states))
        self.is_any_encoded = any(state.encodings for state in self.states)
        self.numel = sum(state.shape.numel() for state in self.states)
        parts = [state.local for state in self.states]
        self.fingerprints = Fingerprints(parts, self.parameters if self.is_distributed else None)
        self.steps = np.zeros(len(self.states), np.int64)
        self.is_published = np.ones(len(self.states), bool)
        self.created: list[tuple[ParameterState, list[str], bool]] = []
        self.is_held, self.is_any_held, self.is_exposed = np.ones(len(self.states), bool), True, True
        self.new_values = new_values
        self.resident = resident
        is_plain = [not (s.is_staged or s.is_distributed) and s.parameter_dtype in DTYPES for s in self.states]
        self.plain_layouts = np.where(is_plain, self.fingerprints.layouts, 0)
        self._first_chunks = np.cumsum([0, *(native.chunk_count(state.shape.numel()) for state in self.states)])
        self.norm = GradientNorm.zeros(int(self._first_chunks[-1]))
        self.pieces: list[Piece] = [*self.states, *(piece for state in self.states for piece in state.cuts)]
        self.is_cut = len(self.pieces) > len(self.states)
        for row, piece in enumerate(self.pieces):
            piece.row = row
        self.owners = np.array([piece.state.row for piece in self.pieces], np.int64)
        begins = np.array([piece.begin for piece in self.pieces], np.int64)
        self._begin_chunks = self._first_chunks[self.owners] + begins // native.CHUNK
        self._rows = np.zeros(len(self.pieces), native.SEGMENT)
        self._bytes = self._rows.view(f"V{self._rows.itemsize}")  # which numpy copies at once, not field by field
        self._rows["length"] = [piece.shape.numel() for piece in self.pieces]
        self._rows["sums"] = self.norm.sums.ctypes.data + 8 * self._begin_chunks
        self._rows["nonfinite"] = self.norm.nonfinite.ctypes.data + 8 * self._begin_chunks
        usual = [DTYPES.get(piece.parameter_dtype, Dtype.NONE) for piece in self.pieces]  # NONE: it takes no part
        self._rows["gradient_dtype"] = usual
        is_own_master = np.array([piece.state.is_own_master for piece in self.pieces], bool)
        self._rows["out_dtype"] = np.where(is_own_master, Dtype.NONE, self._rows["gradient_dtype"])
        self._rows["format"] = [piece.state.storage.format for piece in self.pieces]
        self._rows["first_threshold"] = [piece.state.first_threshold for piece in self.pieces]
        self._is_double = np.array([piece.is_double for piece in self.pieces], bool)
        self._are_alike = len({*self._is_double.tolist()}) == 1
        self.is_staged = np.array([piece.state.is_staged for piece in self.pieces], bool)
        self._is_any_staged, self.has_copies = bool(self.is_staged.any()), not is_own_master.all()
        self._arrays: list[Tensor | None] = [None for _ in ARRAYS for _ in self.states]  # of all states, row by row
        self._places = places_of(self._arrays)  # when they were last bound
        self._known_masters = [(0, 0)] * len(self.states)  # version, and the step count from which it is as rounded
        self._former_masters: dict[int, Tensor] = {}  # by row: values before writes that were adopted since the step
        for state in self.states:
            self._point_at(state, ARRAYS)
            self._point_at_parameter(state)
            state.watch(self._point_at)

    def _point_at(self, state: ParameterState, names: Collection[str]) -> None:
        """Let the rows of a state point at these arrays, which were created, moved, replaced or dropped."""
        tensors = [getattr(state, name) for name in names]
        places = places_of(tensors)
        for name, tensor, place in zip(names, tensors, places, strict=True):
            position = len(ARRAYS) * state.row + ARRAYS.index(name)
            is_other = self._arrays[position] is not tensor or self._places[position, ADDRESS] != place[ADDRESS]
            self._arrays[position], self._places[position] = tensor, place
            if is_other and name == "master":  # else what others have written to it still counts
                self._former_masters.pop(state.row, None)
                self.remember_master(state)
            if name != "master" or not state.is_own_master:  # which the parameter is
                self._point(state, name, tensor)

    def _point_at_parameter(self, state: ParameterState, *, is_there: bool = True) -> None:
        name = "master" if state.is_own_master else "out"
        self._point(state, name, state.local if is_there and not state.is_staged else None)

    def _point(self, state: ParameterState, name: str, tensor: Tensor | None) -> None:
        for piece in (state, *state.cuts):
            begin = 0 if tensor is None else part_of(tensor, piece)[0] * tensor.element_size()
            self._rows[piece.row][name] = 0 if tensor is None else tensor.data_ptr() + begin

    @property
    def has_state(self) -> bool:
        """Whether any parameter has one."""
        return bool(np.count_nonzero(self._rows["exp_avg"]))

    def create_state(self, states: Sequence[ParameterState], each: Sequence[Hyperparameters]) -> None:
        """Create what a step of these parameters reads and writes, where they lack any of it.

        Creates nothing if it raises, as ValueError where one cannot have a largest second moment.
        """
        for state, hyper in zip(states, each, strict=True):
            if hyper.amsgrad:
                state.check_largest()
        try:
            for state, hyper in zip(states, each, strict=True):
                if not state.has_state or (hyper.amsgrad and state.max_exp_avg_sq is None):
                    self.bring_home(state.pieces)
                    missing = [key for key in TENSORS if getattr(state, key) is None]
                    self.created.append((state, missing, bool(self.is_published[state.row])))
                    state.create_state(with_max=hyper.amsgrad)
                    self.is_published[state.row] = False
        except BaseException:  # as of memory
            self.forget_created()
            raise

    def forget_created(self) -> None:
        """Undo what has created state in a step that has changed nothing else."""
        for state, keys, is_published in self.created:
            for key in keys:
                state.forget(key)
            self.is_published[state.row] = is_published
        self.created.clear()

    def adopt_outside_write(self, state: ParameterState, *, is_final: bool) -> None:
        """Adopt in the master what others wrote to a parameter, on which nothing is pending, and know it as it is.

        Unless that `is_final`, elements of the parameter that become again what they were get their masters back.
        """
        if state.master is not None:
            former = self._former_masters.pop(state.row, None)
            if state.master_version != self._known_masters[state.row][0]:  # others have written to the master
                former = None
            kept = former if former is not None or is_final else state.values_of("master").clone()
            if state.adopt("master", state.local, former) and kept is not None and not is_final:
                self._former_masters[state.row] = kept
        self.fingerprints.remember(state.row)
        self._point_at_parameter(state)
        self.remember_master(state)
        if state.has_state:  # another tensor may stand for the master
            self.is_published[state.row] = False

    def forget_former_masters(self, rows: Rows) -> None:
        """Let go of what masters were before writes that were adopted: a step of these rows goes on from those."""
        for row in rows.tolist() if self._former_masters else ():
            self._former_masters.pop(row, None)

    def forget_all_but(self, states: Collection[ParameterState]) -> None:
        """Let go of the tensors of all other states, to which much may refer still; the table is used no more.

        What has stand-ins stays there, as these may have fewer bits.
        """
        self._arrays = []
        for state in {*self.states}.difference(states):
            state.watch(None)
            for key in {*TENSORS}.difference(state.shown):
                state.forget(key)

    def look(self) -> list[ParameterState]:
        """Look at every parameter; return the states of those that have moved, whose pointers are no longer used."""
        rows = self.fingerprints.look()
        found = [self.states[row] for row in rows] if rows else []
        for state in found:
            self._point_at_parameter(state, is_there=False)
        return found

    def held_states(self) -> list[ParameterState]:
        """Return the states of which programs may hold something."""
        return [self.states[row] for row in np.flatnonzero(self.is_held).tolist()]

    def moved_arrays(self, rows: Rows) -> dict[int, list[str]]:
        """Look at the arrays of these rows' states; return the names of those that have moved, by row.

        Their pointers are no longer used: whatever reads them before they are refreshed is an error.
        """
        width, places, chosen = len(ARRAYS), self._places.shape[1], rows.tolist()
        arrays = [array for row in chosen for array in self._arrays[width * row : width * (row + 1)]]
        found: dict[int, list[str]] = {}
        # numpy's arithmetic and indices of two dimensions fail without an error when memory is short.
        before = self._places.reshape(-1, width, places).take(rows, axis=0).reshape(-1, places)
        for number in compare(arrays, before)[0]:
            row, name = chosen[number // width], ARRAYS[number % width]
            found.setdefault(row, []).append(name)
            self._places[width * row + number % width, ADDRESS] = NOWHERE  # until it is bound again
            self._point(self.states[row], name, None)
        return found

    def has_moved_arrays(self) -> bool:
        """Whether any array of a state lies elsewhere than when it was bound."""
        return bool(compare(self._arrays, self._places)[0])

    def state_of(self, parameter: Tensor) -> ParameterState | None:
        """Return the state of a parameter; None if it has no row."""
        return self._states_by_id.get(id(parameter))

    def states_of(self, parameters: Iterable[Tensor] | None, call: str) -> list[ParameterState]:
        """Return the states of these parameters, by default all; raise ValueError for one that has no row."""
        found = []
        for parameter in self.parameters if parameters is None else parameters:
            state = self.state_of(parameter)
            if state is None:
                raise ValueError(
                    f"{call} got a parameter that is in no group of this optimizer; call add_param_group() first"
                )
            found.append(state)
        return [*dict.fromkeys(found)]

    def rows_of(self, pieces: Sequence[Piece]) -> Rows:
        """Return the row numbers of these pieces, in their order."""
        return np.fromiter(map(_get_row, pieces), np.int64, len(pieces))

    def hand_on(self, other: ParameterTable) -> None:
        """Tell the next table which parameters and masters of both others have written to, unless these are forgotten.

        States of this table may be those of the other one by now.
        """
        written = {*self.fingerprints.look(), *self.fingerprints.seen_hints(self.all_rows)} if self._arrays else ()
        masters = slice(ARRAYS.index("master"), None, len(ARRAYS))
        bound = zip(self._arrays[masters], self._places[masters, ADDRESS].tolist(), strict=False)
        for row, (parameter, (master, address)) in enumerate(zip(self.parameters, bound, strict=False)):
            state = other.state_of(parameter)
            if state is None:
                continue
            is_same = master is not None and state.master is master and master.data_ptr() == address
            if is_same and row in self._former_masters and state.master_version == self._known_masters[row][0]:
                other._former_masters[state.row] = self._former_masters[row]
            if row in written:
                other.fingerprints.distrust(state.row)
            elif is_same:
                other.fingerprints.remember(state.row)
                other._known_masters[state.row] = self._known_masters[row]

    def are_ready(self, rows: Rows, runs: Runs) -> bool:
        """Whether these rows have everything that a step reads and writes."""
        chosen: Any = slice(len(rows)) if rows is self.all_rows else rows
        for name in ("exp_avg", "master"):
            if np.count_nonzero(self._rows[name][chosen]) < len(rows):
                return False
        amsgrad = [hyper.amsgrad for hyper, _ in runs]
        if True not in amsgrad:
            return True
        needs_max = np.repeat(amsgrad, [count for _, count in runs])
        return bool(self._rows["max_exp_avg_sq"][chosen][needs_max].all())

    def job(self, rows: Rows, gradients: Sequence[Tensor], addresses: npt.NDArray[np.uint64] | None = None) -> Segments:
        """Return the job over these rows that reads gradients in the form that kernels read.

        With `addresses` they lie as `plain_layouts` says; others are looked at one by one.
        """
        if self.resident is not None:
            self.bring_home(self.pieces[row] for row in rows)
        chosen = self._bytes[: len(rows)].copy() if rows is self.all_rows else self._bytes[rows]
        segments = chosen.view(native.SEGMENT)
        if addresses is None:
            segments["gradient"] = [gradient.data_ptr() for gradient in gradients]
            segments["gradient_dtype"] = [DTYPES[gradient.dtype] for gradient in gradients]
        else:
            segments["gradient"] = addresses
        return segments

    def bring_home(self, pieces: Iterable[Piece] | None = None) -> None:
        """Bring the state of these pieces, by default all, to the host; return when it is there."""
        if self.resident is not None:
            for piece in self.resident.bring_home(self.pieces if pieces is None else pieces):
                self.remember_master(piece.state)

    def newest_master(self, piece: Piece) -> tuple[Tensor, ...]:
        """Return the arrays of the newest master of a working copy, on the host or flat on the device."""
        names = ("master", SECONDS["master"]) if "master" in piece.state.encodings else ("master",)
        distant = None if self.resident is None else self.resident.arrays_of(piece)
        if distant is not None:
            return tuple(distant[name] for name in names)
        return tuple(piece.elements_of(getattr(piece.state, name)) for name in names)

    def remember_master(self, state: ParameterState) -> None:
        """Note the master's version: while it stays, a working copy that differs was written to by others."""
        self._known_masters[state.row] = state.master_version, 0

    def is_master_edited(self, state: ParameterState) -> bool:
        """Whether others have written to a master since the parameter's last step."""
        version, first_step = self._known_masters[state.row]
        if state.master_version != version:
            self._former_masters.pop(state.row, None)
            self._known_masters[state.row] = state.master_version, int(self.steps[state.row]) + 1
            return True
        return bool(self.steps[state.row] < first_step)

    def differing(self, rows: Rows, *, everything: bool) -> Rows:
        """Return those rows whose parameter, in host memory, is not the rounded master, in samples or at all."""
        return native.differing(self._rows, rows, everything=everything)

    def put_norm(self, rows: Rows, norm: GradientNorm) -> None:
        """Copy a norm of these rows that was computed elsewhere into `norm`."""
        begin = 0
        for row in rows:
            there = self.chunks_of(row)
            end = begin + there.stop - there.start
            self.norm.sums[there], self.norm.nonfinite[there] = norm.sums[begin:end], norm.nonfinite[begin:end]
            begin = end

    def each_chunk(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return one value of each parameter for each of its chunks."""
        return np.repeat(np.array(values, np.int64), np.diff(self._first_chunks))

    def chunks_of(self, row: int) -> slice:
        """Return the entries of one row in a norm of all parameters."""
        begin = int(self._begin_chunks[row])
        return slice(begin, begin + native.chunk_count(self.pieces[row].shape.numel()))

    def compute_norm(
        self, segments: Segments, into: GradientNorm | None = None, num_threads: int | None = None
    ) -> None:
        """Compute the norm of a job's gradients into `norm`; or into another one, at which the job then points."""
        if into is not None:
            for name in ("sums", "nonfinite"):
                segments[name] -= np.uint64(getattr(self.norm, name).ctypes.data)
                segments[name] += np.uint64(getattr(into, name).ctypes.data)
        native.run(Pass.NORM, segments, threads=num_threads)

    def run_speculation(
        self,
        rows: Rows,
        pending: Sequence[Pending],
        coefficients: CoefficientTable,
        indices: Indices,
        accepted: Sequence[Pending],
        num_threads: int | None,
    ) -> None:
        """Write new values to the slots of these gradients as if they were a step; sum squares, fill lists.

        The same pass folds `accepted`, the gradients of the step before, into the state; without them the state stays
        as it is. `num_threads` is a maximum; None for all.
        """
        segments = self.job(rows, [record.gradient for record in pending])
        segments["coefficients"] = indices
        segments["uncertain"] = [record.listed.records.ctypes.data if record.listed else 0 for record in pending]
        segments["out"] = [record.slot.value.data_ptr() for record in pending if record.slot]
        which = Pass.SPECULATE
        if accepted:
            which = Pass.COMMIT_AND_SPECULATE
            segments["accepted_gradient"] = [record.gradient.data_ptr() for record in accepted]
            segments["accepted_coefficients"] = self.indices_of(rows, accepted, coefficients)
        native.run(which, segments, coefficients.array(), threads=num_threads)

    def run_patch(
        self, rows: Rows, pending: Sequence[Pending], coefficients: CoefficientTable, indices: Indices
    ) -> int:
        """Give listed elements the new values of these coefficients, and return how many there are; state stays."""
        slots = [record.slot for record in pending if record.slot]
        records = np.concatenate([record.listed.records for record in pending if record.listed])
        segments = np.zeros(len(rows), native.SEGMENT)
        segments["coefficients"], segments["out_dtype"] = indices, self._rows["out_dtype"][rows]
        segments["gradient_dtype"] = [DTYPES[record.gradient.dtype] for record in pending]
        has_planes = self._rows["format"][rows] & Format.MASTER_24BIT != 0
        segments["format"] = np.where(has_planes, Format.LISTED_24BIT, Format.PLAIN)
        segments["first_threshold"], segments["length"] = self._rows["first_threshold"][rows], records["count"]
        for name in ("gradient", *TENSORS, "index"):
            segments[name] = records[name]
        numbers_by_shadow: dict[Shadow, list[int]] = {}
        for number, slot in enumerate(slots):
            numbers_by_shadow.setdefault(slot.shadow, []).append(number)
        patches: list[Patch] = []
        for shadow, numbers in numbers_by_shadow.items():
            patch = Patch(shadow, [slots[number].position for number in numbers], records["count"][numbers].tolist())
            patches.append(patch)
            segments["begin"][numbers] = patch.begins
            for name, tensors in (("out", patch.values), ("target", patch.targets), ("places", patch.places)):
                segments[name][numbers] = [tensor.data_ptr() for tensor in tensors] or 0
        native.run(Pass.SPECULATE, segments, coefficients.array())
        for patch in patches:
            patch.send()
        return int(segments["length"].sum())

    def run_commit(self, rows: Rows, accepted: Sequence[Pending], num_threads: int | None) -> None:
        """Fold accepted gradients, which working copies show already, into the state."""
        coefficients = CoefficientTable()
        segments = self.job(rows, [record.gradient for record in accepted])
        segments["coefficients"] = self.indices_of(rows, accepted, coefficients)
        segments["sums"] = segments["nonfinite"] = 0
        native.run(Pass.COMMIT, segments, coefficients.array(), threads=num_threads)

    def is_reached(self, rows: Rows) -> bool:
        """Whether kernels on the CPU read and write all of these rows where they are."""
        return not self._is_any_staged or not self.is_staged[rows].any()

    def prepared_update(
        self, rows: Rows, segments: Segments, coefficients: CoefficientTable, indices: Indices
    ) -> Callable[[], None]:
        """Return what makes one step in place, once: state, own masters and working copies.

        Its memory is allocated now, so that it does not fail for want of it; the job is overwritten.
        """
        segments["coefficients"] = indices
        segments["sums"] = segments["nonfinite"] = 0
        direct, table = segments, coefficients.array()
        in_turn: list[tuple[list[Piece], Segments]] = []
        if self._is_any_staged and (is_staged := self.is_staged[rows]).any():
            direct = segments[~is_staged]
            in_turn = [
                ([self.pieces[row] for row in rows[some]], segments[some])
                for some in _cut(np.flatnonzero(is_staged), segments["length"], self.new_values.staged_numel)
            ]
        stage = self.new_values.stage([pieces for pieces, _ in in_turn]) if in_turn else iter(())

        def run() -> None:
            if len(direct):
                native.run(Pass.UPDATE, direct, table)
            for slots, (pieces, job) in zip(stage, in_turn, strict=True):
                job["out"] = [slots[piece].value.data_ptr() for piece in pieces]
                native.run(Pass.UPDATE, job, table)
                self.new_values.publish(slots)

        return run

    def prepared_count(self, rows: Rows) -> Callable[[], None]:
        """Return what counts a step of parameters once they have their new values; it needs no memory of its own."""
        rows = np.unique(self.owners[rows]) if self.is_cut else rows
        bump, steps = self.fingerprints.prepared_bump(rows), self.steps[rows] + 1

        def count() -> None:
            bump()
            self.steps[rows] = steps
            self.is_published[rows] = False

        return count

    def indices_of(self, rows: Rows, pending: Sequence[Pending], coefficients: CoefficientTable) -> list[int]:
        """Return the coefficients that each of these gradients was captured with, after adding them to the table."""
        return [
            coefficients.index(record.hyper, record.step, record.scale, double, record.interval)
            for record, double in zip(pending, self._is_double[rows].tolist(), strict=True)
        ]

    def indices_of_next_step(self, rows: Rows, runs: Runs, scale: Scale, coefficients: CoefficientTable) -> Indices:
        """Return the coefficients of each row's next step, as `indices_of`."""
        indices = np.empty(len(rows), np.int32)
        begin = 0
        for hyper, count in runs:
            part = slice(begin, begin + count)
            begin += count
            steps = self.steps[part if rows is self.all_rows else rows[part]]
            first = int(steps[0]) if count else 0
            if self._are_alike and np.count_nonzero(steps == first) == count:  # usual, and faster
                indices[part] = coefficients.index(hyper, first + 1, scale, bool(self._is_double[0]))
                continue
            distinct, inverse = np.unique(2 * (steps + 1) + self._is_double[rows[part]], return_inverse=True)
            found = [coefficients.index(hyper, key // 2, scale, key % 2 == 1) for key in distinct.tolist()]
            indices[part] = np.array(found, np.int32)[inverse]
        return indices


def _cut(chosen: Rows, lengths: npt.NDArray[np.uint64], numel: int) -> list[Rows]:
    """Split positions in a job into runs of about `numel` elements, each with at least one position."""
    begins = np.cumsum(lengths[chosen]) - lengths[chosen]
    return np.split(chosen, 1 + np.flatnonzero(np.diff(begins // np.uint64(numel))))
