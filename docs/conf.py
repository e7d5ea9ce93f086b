"""Builds the documentation site from docs/*.md and the package's docstrings: `make docs` writes it to build/docs."""

import re
import sys
from importlib.metadata import version as version_of
from typing import Any

project = "superadam"
release = version_of("superadam")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"superadam {release}"
html_copy_source = False
html_show_sphinx = html_show_copyright = False

myst_heading_anchors = 3
highlight_language = "none"  # of blocks that name none
default_role = "code"  # docstrings write `name`
napoleon_use_ivar = True  # attributes of records as a list, not as entries of their own
napoleon_custom_sections = ["Source"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say what arguments are
autodoc_mock_imports = ["transformers", "lightning"]  # which the site is built without
python_use_unqualified_type_names = True


class Absent:
    """Lets them not be found where they are installed, either, as sphinx would import them to read their sources."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise what is raised where a module is not installed."""
        if name.partition(".")[0] in autodoc_mock_imports:
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Absent)  # autodoc's stand-ins go before

PAGE = re.compile(r"https://github\.com/superadam/superadam/blob/main/docs/(\w+)\.md")


def _join_names(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Let `committed, clipped: steps` be two names, not a type and a name; let addresses of pages be links to them."""
    for number, line in enumerate(lines):
        lines[number] = line = PAGE.sub(r":doc:`\1`", line)
        match = re.match(r":ivar [\w, ]+:", line)
        if match:
            lines[number] = match[0].replace(", ", ",") + line[match.end() :]


def setup(app: Any) -> None:
    """Add the step that follows napoleon's."""
    app.connect("autodoc-process-docstring", _join_names, priority=900)
