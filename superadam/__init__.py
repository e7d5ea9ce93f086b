"""superadam: Adam on the CPU that runs speculatively, validates afterwards, and never changes a bit."""

from superadam.native import active_isa, available_isas, get_num_threads, set_num_threads
from superadam.optimizer import SpeculativeCPUAdam, SpeculativeCPUAdamW
from superadam.outcome import Statistics, StepKind, StepOutcome
from superadam.overlap_statistics import OverlapStatistics
from superadam.placement import Placement
from superadam.scheduler import OffloadScheduler

__all__ = [
    "OffloadScheduler",
    "OverlapStatistics",
    "Placement",
    "SpeculativeCPUAdam",
    "SpeculativeCPUAdamW",
    "Statistics",
    "StepKind",
    "StepOutcome",
    "active_isa",
    "available_isas",
    "get_num_threads",
    "set_num_threads",
]
