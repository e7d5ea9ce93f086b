"""State of parameters: fp32 masters and moments, where they live, and the gradients that are pending on them."""

from superadam.state.parameter import ParameterState
from superadam.state.tiers import StateTier

__all__ = ["ParameterState", "StateTier"]
