"""superadam: Adam on the CPU that runs speculatively, validates afterwards, and never changes a bit."""

from superadam.native import active_isa, available_isas

__all__ = ["active_isa", "available_isas"]
