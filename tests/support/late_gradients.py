"""Gradients that are still being computed, or copied to the host, when hooks see them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from superadam.devices import PlainDevice, Stream
from superadam.distributed import shards
from superadam.handles.gradient_handle import taken_of
from superadam.kernels.torch_private import set_dtensor_part
from superadam.testing import SimulatedDevice


class LateGradients:
    """Lets backward leave gradients that hold NaN until the stream of their hook has passed.

    Make it before the scheduler, whose hooks then come later.
    """

    def __init__(
        self,
        device: SimulatedDevice,  # on whose streams they are made
        parameters: Iterable[Tensor],
        stream_of: Callable[[Tensor], int],  # numbers; hooks run with a parameter's stream as the current one
        is_on_host: Callable[[Tensor], bool],  # whether a parameter's gradient lies in the host's memory
    ) -> None:
        self._device, self._stream_of, self._is_on_host = device, stream_of, is_on_host
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._depart)

    def _depart(self, parameter: Any) -> None:
        self._device.switch(self._stream_of(parameter))
        if parameter.grad is None or taken_of(parameter.grad) is not None:
            return
        late = self._device.late(shards.local_of(parameter.grad).contiguous(), on_host=self._is_on_host(parameter))
        if shards.is_distributed(parameter.grad):
            set_dtensor_part(parameter.grad, late)
        else:
            parameter.grad = late

    def settle(self) -> None:
        """Wait for all of them, as torch does at the end of backward; the model's first stream is the current one."""
        self._device.finish()
        self._device.switch(0)


def beside(device: PlainDevice, streams: SimulatedDevice) -> PlainDevice:
    """Return the device, beside an accelerator that has these streams."""
    device.mark_ready = lambda parameter: streams.record(Stream.CURRENT)  # type: ignore[method-assign]
    return device
