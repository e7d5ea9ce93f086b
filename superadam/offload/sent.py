"""What was sent to the worker: gradients of one bucket, with what they were when they left."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from superadam.devices.flat import FlatTensors
from superadam.handles.taken_gradient import TakenGradient
from superadam.offload.shadow import FlatShadow
from superadam.state.parameter import ParameterState, Place


@dataclass(frozen=True, slots=True)
class HostTensors:
    """Gradients that did not travel."""

    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Sent:
    """Gradients of one bucket and dtype, copied together, in the form in which a worker reads them.

    What a worker can make of this is left to it, because the training thread has no time.

    Attributes:
        states: of their parameters.
        taken: weak references to their records.
        gradients: to be read once they have arrived.
        versions: of the records when they were sent.
        shadow: for the new values of all of them, in this order; None where none is speculated on.
    """

    states: Sequence[ParameterState]
    taken: Sequence[weakref.ref[TakenGradient]]
    gradients: FlatTensors | HostTensors
    versions: Sequence[int]
    shadow: FlatShadow | None = None

    @staticmethod
    def of(
        group: Mapping[ParameterState, TakenGradient],
        gradients: FlatTensors | HostTensors,
        shadow: FlatShadow | None = None,
    ) -> Sent:
        """Return gradients as they are now."""
        every = group.values()
        return Sent([*group], [*map(weakref.ref, every)], gradients, [taken.version for taken in every], shadow)

    def places(self, speculated: Set[ParameterState]) -> dict[ParameterState, Place]:
        """Return the places of those that are speculated on."""
        places = {} if self.shadow is None else self.shadow.places()
        return {state: place for state, place in places.items() if state in speculated}
