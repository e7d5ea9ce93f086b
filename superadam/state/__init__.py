"""The state of parameters: master and moments, where they live, and what is pending on them."""

from superadam.state.parameter import ParameterState
from superadam.state.tiers import StateTier

__all__ = ["ParameterState", "StateTier"]
