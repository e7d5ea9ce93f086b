"""superadam: Adam on the CPU that runs speculatively, validates afterwards, and ends with the bits of a plain step."""

from importlib.metadata import version as _version

# First, because it says in one sentence when kernels are missing.
from superadam.kernels.native import active_isa, available_isas, get_num_threads, set_num_threads  # isort: skip

try:
    import torch as _torch  # noqa: F401
except (ImportError, OSError) as _error:
    _reason = str(_error)

    def __getattr__(name: str) -> object:  # the command line says it without a traceback
        if name.startswith("_"):
            raise AttributeError(name)
        raise ImportError(f"superadam needs torch ({_reason}), expected 2.10 or later; pip install torch")
else:
    from superadam.devices.worker import WorkerError
    from superadam.offload.placement import Placement
    from superadam.offload.scheduler import OffloadScheduler
    from superadam.offload.statistics import OverlapStatistics
    from superadam.optim.adam import SpeculativeCPUAdam, SpeculativeCPUAdamW
    from superadam.step.outcome import Statistics, StepKind, StepOutcome

__all__ = [
    "OffloadScheduler",
    "OverlapStatistics",
    "Placement",
    "SpeculativeCPUAdam",
    "SpeculativeCPUAdamW",
    "Statistics",
    "StepKind",
    "StepOutcome",
    "WorkerError",
    "active_isa",
    "available_isas",
    "get_num_threads",
    "set_num_threads",
]

__version__ = _version("superadam")
