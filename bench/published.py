"""Published figures side by side with what the plan's model says, and the presets' table of docs/plan.md.

    python bench/published.py figures    all rows of bench/published/figures.csv, and the assumption that decides each
    python bench/published.py gains      the gain of overlap by tokens of a step, on one GH200
    python bench/published.py presets    what `superadam plan` says of each preset on its machine

Nothing is tuned: where a row does not say on which GPU efficiency or CPU it was measured, the stated assumption stands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import published


def main(words: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["figures", "gains", "presets"])
    asked = parser.parse_args(words)
    tables = {"figures": published.figures_table, "gains": published.gain_table, "presets": published.presets_table}
    lines = tables[asked.what]()
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
