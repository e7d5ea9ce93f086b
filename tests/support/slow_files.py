"""Which files of tests are slow as a whole: told from their text, because importing some of them takes seconds."""

import re
from pathlib import Path

_IS_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)


def is_slow(path: Path) -> bool:
    """Whether a file marks all its tests as slow."""
    return _IS_SLOW.search(path.read_text()) is not None
