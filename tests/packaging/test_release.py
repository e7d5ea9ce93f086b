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
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()


def test_version_changelog_citation_and_tag_agree():
    """A commit without a tag, as where this is no clone, may have changes that are in no version yet."""
    version = PROJECT["version"]
    assert superadam.__version__ == version
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [version]
    command = ["git", "-C", ROOT, "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    assert set(tags) <= {f"v{version}"}
    newest = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    dated = re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest)
    assert dated or (newest == "Unreleased" and not tags)


def test_actions_of_the_release_are_pinned_by_commit():
    used = re.findall(r"uses: (.+)", WORKFLOW)
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", one)] == []


def test_python_is_run_in_every_version_that_the_metadata_names():
    versions = re.findall(r'"([\d.]+)"', re.search(r"python: \[(.+)\]", WORKFLOW)[1])
    assert versions == [one.split(" :: ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
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
