"""What the documents point at is there: files that links name, and tests that prose names."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/**/*.md")]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
SITE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"] + "/blob/main/"
TEST = re.compile(r"`(tests/[\w./]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_tests_exist(document):
    text = document.read_text().replace(f"]({SITE}", f"]({ROOT}/")
    links = [document.parent / target for target in LINK.findall(text) if "://" not in target]
    assert not [path for path in [*links, *(ROOT / name for name in TEST.findall(text))] if not path.exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_end_at_headings(document):
    """Those of README, too, which the documentation's own check does not follow."""
    found = ANCHOR.findall(document.read_text().replace(f"]({SITE}", f"]({ROOT}/"))
    links = [
        (document.parent / target if target else document, anchor) for target, anchor in found if "://" not in target
    ]
    assert not [(path, anchor) for path, anchor in links if path.suffix == ".md" and anchor not in anchors_of(path)]


def anchors_of(page):
    """Return what a page's headings are called in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_of_the_readme_are_absolute():
    """A package index shows it, too."""
    assert [target for target in LINK.findall((ROOT / "README.md").read_text()) if not target.startswith(SITE)] == []
