"""Whether a model will fit on a machine, and how long its steps will take there."""


class UnplannableError(ValueError):
    """A model or a machine of which nothing can be said; the message says what was wrong, and what to do."""
