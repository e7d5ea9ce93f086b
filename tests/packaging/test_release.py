"""A release is one version everywhere: the metadata, the changelog, CITATION.cff and the tag agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from check_wheel import tag_of

import superadam

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()


def tags() -> list[str]:
    """Return the tags of this commit that name a version; none where this is no clone."""
    command = ["git", "-C", ROOT, "tag", "--points-at", "HEAD", "v*"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()


def disagreements(version: str, changelog: str, citation: str, tags: list[str]) -> list[str]:
    """Return what speaks of another version than `version`; an untagged commit may have changes without one."""
    newest = re.findall(r"^## (.+)$", changelog, re.MULTILINE)[0]
    found = [f"tag {tag}" for tag in tags if tag != f"v{version}"]
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest) and (tags or newest != "Unreleased"):
        found.append(f"changelog {newest}")
    if re.findall(r"^version: (.+)$", citation, re.MULTILINE) != [version]:
        found.append("citation")
    return found


def test_version_changelog_citation_and_tag_agree():
    assert superadam.__version__ == PROJECT["version"]
    assert disagreements(PROJECT["version"], CHANGELOG, (ROOT / "CITATION.cff").read_text(), tags()) == []


@pytest.mark.parametrize(
    ("heading", "cited", "tags", "expected"),
    [
        ("Unreleased", "1.2.0", [], []),
        ("1.2.0 - 2026-11-23", "1.2.0", ["v1.2.0"], []),
        ("Unreleased", "1.2.0", ["v1.2.0"], ["changelog Unreleased"]),
        ("1.1.0 - 2026-11-23", "1.2.0", [], ["changelog 1.1.0 - 2026-11-23"]),
        ("1.2.0 - 2026-11-23", "1.2.0", ["v1.3.0"], ["tag v1.3.0"]),
        ("1.2.0 - 2026-11-23", "1.1.0", ["v1.2.0"], ["citation"]),
    ],
)
def test_a_disagreement_is_found(heading, cited, tags, expected):
    changelog = f"# Changelog\n\n## {heading}\n\n## 1.0.0 - 2026-01-01\n"
    assert disagreements("1.2.0", changelog, f"cff-version: 1.2.0\nversion: {cited}\n", tags) == expected


def test_actions_of_the_release_are_pinned_by_commit():
    used = re.findall(r"uses: (.+)", WORKFLOW)
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", one)] == []


def test_python_is_run_in_every_version_that_the_metadata_names():
    tested = re.search(r"python: \[(.+)\]", WORKFLOW)
    versions = re.findall(r'"([\d.]+)"', tested[1])
    named = [one.split(" :: ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert versions == named
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert tag_of("x86_64").startswith(f"cp{versions[0].replace('.', '')}-abi3-")


def test_the_build_finds_its_checks_where_python_leaves_out_the_folder_of_a_script():
    program = "import runpy, sys; runpy.run_path(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", program, ROOT / "tools" / "wheels.py"], check=True)


@pytest.mark.parametrize("file", [".github/workflows/release.yml", "tests/arm/run"])
def test_what_runs_tests_names_those_that_exist(file):
    named = re.findall(r"tests/[\w/]+(?:\{[\w,]+\})?[\w*]*(?:\.py)?", (ROOT / file).read_text())
    assert len(named) >= 5
    command = ["bash", "-c", f"shopt -s failglob; ls -d {' '.join(named)}"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
