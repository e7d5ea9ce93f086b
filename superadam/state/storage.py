"""How state is stored: the bits of moments and of masters, and which parameters have them."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from superadam.kernels.native import Format
from superadam.state import compact
from superadam.state.uncertain import NARROWER


class Moments(enum.Enum):
    """How moments are stored; those of fp64 parameters are fp64."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    EIGHT_BIT = "8bit"

    @property
    def dtype(self) -> torch.dtype:
        """In which users see them; exact."""
        return torch.float32 if self is Moments.FLOAT32 else torch.bfloat16


class Master(enum.Enum):
    """How masters of working copies are stored; those of fp64 parameters are fp64."""

    FLOAT32 = "fp32"
    TWENTY_FOUR_BIT = "24bit"


def dense(parameter: Tensor) -> Tensor:
    """Return a tensor in the layout of a parameter's state, in the order of the parameter; it has no memory."""
    return torch.empty_like(parameter, device="meta")


class Storage(NamedTuple):
    """How the state of an optimizer is stored."""

    moments: Moments = Moments.FLOAT32
    master: Master = Master.FLOAT32

    def of(self, parameter: Tensor) -> Storage:
        """Return how the state of a parameter, this rank's part of it, is stored.

        Moments of 8 bits are for parameters of two dimensions or more, in order in memory, whose last one is whole
        blocks; shards of their rows consist of whole blocks, too. Others have bf16 ones. Gaps in memory change nothing,
        as copies have none. Masters of 24 bits are for working copies of 16 bits.
        """
        if parameter.dtype == torch.float64:
            return Storage()
        is_whole = parameter.dim() > 1 and dense(parameter).is_contiguous() and parameter.shape[-1] % compact.BLOCK == 0
        is_refused = self.moments is Moments.EIGHT_BIT and not is_whole
        is_narrow = parameter.dtype in NARROWER
        return Storage(Moments.BFLOAT16 if is_refused else self.moments, self.master if is_narrow else Master.FLOAT32)

    @property
    def format(self) -> Format:
        """How kernels are to read and write it."""
        moments = {Moments.BFLOAT16: Format.MOMENTS_BFLOAT16, Moments.EIGHT_BIT: Format.MOMENTS_8BIT}
        master = Format.MASTER_24BIT if self.master is Master.TWENTY_FOUR_BIT else Format.PLAIN
        return moments.get(self.moments, Format.PLAIN) | master

    def bytes_of(self, parameter: Tensor) -> tuple[float, int]:
        """Return the bytes of one element of a moment, and of the master of a working copy."""
        if parameter.dtype == torch.float64:
            return 8, 8
        moments, master = self.of(parameter)
        of_moment = {Moments.FLOAT32: 4, Moments.BFLOAT16: 2, Moments.EIGHT_BIT: 1 + 1 / compact.BLOCK}
        return of_moment[moments], 3 if master is Master.TWENTY_FOUR_BIT else 4
