"""superadam: Adam on the CPU that runs speculatively, validates afterwards, and ends with the bits of a plain step."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

# First, because it says in one sentence when kernels are missing.
from superadam.kernels.native import active_isa, available_isas, get_num_threads, set_num_threads  # isort: skip

if TYPE_CHECKING:
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


def __getattr__(name: str) -> object:
    """Import what needs torch at its first use: that takes seconds, in which the command line can be interrupted."""
    if name not in __all__:
        raise AttributeError(f"module 'superadam' has no attribute {name!r}")
    try:
        _import_module("torch")
    except (ImportError, OSError) as error:
        raise ImportError(f"superadam needs torch ({error}), expected 2.10 or later; pip install torch") from error
    homes = [_import_module(f"superadam.{home}") for home in ("devices.worker", "optim.adam", "step.outcome")]
    homes += [_import_module(f"superadam.offload.{home}") for home in ("placement", "scheduler", "statistics")]
    globals()[name] = found = next(getattr(home, name) for home in homes if hasattr(home, name))
    return found
