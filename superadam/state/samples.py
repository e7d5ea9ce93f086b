"""Samples of working copies find outside writes that left no hint: through `.data`, numpy or shared memory.

Each step compares blocks of 8 adjacent elements of each working copy with the rounded master: the first elements, the
last ones, and about one block for each 4096 elements in between, up to 64. After one difference, this step and the next
`FULL_STEPS` compare every element, because such a program writes again. `docs/guarantees.md` lists what is found.

Rows are compared between commit and verdict. A working copy is then the rounded master, unless others have written to
either; a master that others wrote to is left as it is.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from superadam.kernels import native
from superadam.kernels.memory import has_memory
from superadam.state import compact
from superadam.state.parameter import Piece, differing, flat, pieces_of
from superadam.state.table import ParameterTable, Rows

FULL_STEPS = 100
"""Steps after a finding that compare everything: a clamp may leave its samples alone for a while."""

STAGED_ROWS = 64
"""Pieces that kernels cannot read, as those on a device, take turns: torch takes microseconds for each."""

_logger = logging.getLogger("superadam")


class Samples:
    """Compares the working copies of one table with their masters.

    Nothing may be accepted and uncommitted on the rows that are compared, and hinted ones were adopted before.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._full_steps = 0
        self._has_warned = False
        self._blocks = [blocks_of(piece.shape.numel()) for piece in table.pieces]

    def find_written(self, rows: Rows) -> list[int]:
        """Return those rows that were written to without a hint, as far as samples show that there are any."""
        if not self._full_steps and not self._differing(rows, everything=False):
            return []
        found = self._differing(rows, everything=True)
        self._full_steps = FULL_STEPS if found else max(0, self._full_steps - 1)
        if found and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s, or its master, was written to past its version counter, as through .data, numpy or shared memory: "
                "superadam now compares all parameters with their masters in this and the next %d steps, which takes "
                "time; call optimizer.reload_masters() right after such writes, or make them under torch.no_grad()",
                self._table.states[found[0]].name,
                FULL_STEPS,
            )
        return found

    def _differing(self, rows: Rows, *, everything: bool) -> list[int]:
        table = self._table
        if not table.has_copies:
            return []
        found: list[int] = table.differing(rows, everything=everything).tolist()
        staged = rows[table.is_staged[rows]]
        if table.is_cut:
            staged = table.rows_of(pieces_of([table.states[row] for row in staged]))
        if len(staged):
            table.new_values.follow()
            if not everything:
                begin = STAGED_ROWS * int(table.steps[table.owners[staged]].max()) % len(staged)
                staged = np.roll(staged, -begin)[:STAGED_ROWS]
            pieces = [table.pieces[row] for row in staged.tolist()]
            pieces = [piece for piece in pieces if piece.state.master is not None and has_memory(piece.state.local)]
            found += dict.fromkeys(self._written(pieces) if everything else self._sampled(pieces))
        if everything:
            for row in set(rows.tolist()).difference(found):
                table.remember_master(table.states[row])
        return [row for row in found if not table.is_master_edited(table.states[row])] if found else found

    def _written(self, pieces: Sequence[Piece]) -> list[int]:
        found = []
        for piece in pieces:
            working_copy = piece.working_copy
            master = _values([flat(array).cpu() for array in self._table.newest_master(piece)])
            rounded = master.as_strided(piece.shape, piece.strides).to(working_copy.dtype)
            if differing(working_copy.detach().cpu(), rounded).any():
                found.append(piece.state.row)
        return found

    def _sampled(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the parameters' rows of which samples differ, after one copy to the host for each kind of parameter.

        The copy follows on the current stream what was published, so that nothing else has to be waited for.
        """
        kinds = defaultdict[object, list[tuple[int, Tensor, list[Tensor]]]](list)
        for piece in pieces:
            arrays, working_copy, blocks = self._table.newest_master(piece), piece.working_copy, self._blocks[piece.row]
            is_dense = working_copy.stride() == piece.strides
            samples = _cut(working_copy, blocks) if is_dense else _cut_with_gaps(working_copy, piece.strides, blocks)
            kinds[blocks[1], piece.parameter_dtype, working_copy.device, arrays[0].device, len(arrays)].append(
                (piece.state.row, samples, [_cut(array, blocks) for array in arrays])
            )
        found: list[int] = []
        for group in kinds.values():
            rows, parameters, masters = zip(*group, strict=True)
            # Without `out`, autocast to another dtype of 16 bits refuses to join these.
            joined = parameters[0].new_empty(sum(map(len, parameters)), parameters[0].shape[1])
            present = torch.cat(parameters, out=joined).cpu()
            rounded = _values([torch.cat(part).cpu() for part in zip(*masters, strict=True)]).to(parameters[0].dtype)
            where = differing(present, rounded).any(dim=1).numpy()
            if where.any():
                owners = np.repeat(np.array(rows), [len(parameter) for parameter in parameters])
                found += np.unique(owners[where]).tolist()
        return found


def _values(arrays: Sequence[Tensor]) -> Tensor:
    """Return the masters that one array holds, or two."""
    return arrays[0] if len(arrays) == 1 else compact.Planes.decode(*arrays)


def blocks_of(length: int) -> tuple[int, int, int]:
    """Return number, width and distance of the blocks that are compared, of this many elements, as `cpu/samples.c`."""
    width = min(length, native.SAMPLE_WIDTH)
    count = min(max(native.chunk_count(length), 2), native.SAMPLE_BLOCKS) if length > width else 1
    return count, width, (length - width) // (count - 1) if count > 1 else 0


def _cut(tensor: Tensor, blocks: tuple[int, int, int]) -> Tensor:
    count, width, distance = blocks
    return tensor.as_strided((count, width), (distance, 1))


def _cut_with_gaps(tensor: Tensor, strides: Sequence[int], blocks: tuple[int, int, int]) -> Tensor:
    count, width, distance = blocks
    positions = distance * np.arange(count)[:, None] + np.arange(width)
    layout = zip(strides, tensor.shape, tensor.stride(), strict=True)
    offsets = sum((positions // dense % size * stride for dense, size, stride in layout), np.zeros_like(positions))
    elements = tensor.as_strided((int(offsets.max()) + 1,), (1,))
    return elements[torch.from_numpy(offsets).to(elements.device)]
