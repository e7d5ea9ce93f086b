"""State tiers: where optimizer state can live other than in the host's tensors."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from torch import Tensor

from superadam.kernels.hyperparameters import Coefficients
from superadam.state.parameter import ParameterState


class StateTier(abc.ABC):
    """A place where master and moments of some parameters live, newer there than in the tensors on the host.

    State moves to a tier when a step is made there, and leaves it when the host's tensors are read. The host's tensors
    stay allocated; only their contents go back and forth. All methods are called by one thread at a time, with the
    model's stream current.
    """

    @abc.abstractmethod
    def holds(self, state: ParameterState) -> bool:
        """Return whether this parameter's state is newer here than on the host."""

    @abc.abstractmethod
    def bring_home(self, states: Iterable[ParameterState]) -> None:
        """Copy these states back to the host's tensors and stop holding them; return when that is done.

        Args:
            states: any states; those that are not held here are left alone.
        """

    def master_of(self, state: ParameterState) -> Tensor | None:
        """Return the master of a state that is held here, to be read in the order of its memory on the current stream.

        It is compared with the parameter, to find writes that leave no hint. By default None: then it is left out.
        """
        return None

    @abc.abstractmethod
    def update(
        self,
        states: Sequence[ParameterState],
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        sets: Sequence[Coefficients],
    ) -> None:
        """Make a step in place, parameters included, with the formula of `superadam.kernels.formula`, bit for bit.

        State that is on the host moves here first. Parameters are written past their version counters.

        Args:
            states: of distinct parameters, with everything that the step reads.
            gradients: one for each, on the model's device, in the shape and strides of the state; written on the
                current stream, so that work on other streams has to wait for it; neither scaled nor clipped, which the
                coefficients do.
            indices: for each, the index of its coefficients in `sets`.
            sets: the coefficients.

        Raises:
            torch.OutOfMemoryError: there is no memory for state that is not here yet; nothing was changed, and the step
                is made on the host.
        """
