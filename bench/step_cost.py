"""Puts a result of `bench/compare.py steps --json` into docs/step_cost.md: its tables, and the picture next to it.

    python bench/step_cost.py bench/results/NAME.json

With --page FILE, which has the same two comments, another page is written to.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from measures import step_cost as measures

PAGE = Path(__file__).parents[1] / "docs" / "step_cost.md"
FIGURES = re.compile(r"(?<=<!-- figures: python bench/step_cost.py -->\n).*(?=<!-- end of figures -->)", re.DOTALL)


def main(words: Sequence[str] | None = None) -> int:
    """Write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    asked = parser.parse_args(words)
    costs, picture = measures.StepCosts(asked.result), asked.page.with_suffix(".svg")
    text = asked.page.read_text()
    if not FIGURES.search(text):
        parser.error(f"{asked.page} lacks the comments around figures; copy them from {PAGE}")
    link = os.path.relpath(asked.result.resolve(), asked.page.resolve().parent)
    figures = measures.page(costs, picture.name, link)
    picture.write_text(measures.draw(costs))
    asked.page.write_text(FIGURES.sub(lambda _: figures, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
