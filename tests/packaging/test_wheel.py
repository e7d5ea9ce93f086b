"""The package as people install it: a wheel that needs nothing of the checkout, and an editable install."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import check_wheel
import pytest
import wheels

pytestmark = [pytest.mark.slow, pytest.mark.deep]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import runpy, superadam, superadam.cli.main, torch
parameter = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
parameter.grad = torch.full_like(parameter, 0.5)
optimizer = superadam.SpeculativeCPUAdam([parameter], lr=0.25, max_grad_norm=1.0)
optimizer.speculate()
print(superadam.__file__, optimizer.resolve().kind.value, float(parameter[0].detach()))
sys.argv = %r
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def pip(*arguments: str | Path, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, env=os.environ | environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def bare_python(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    return folder / "venv/bin/python"


def run(python: Path, program: str, site: Path | None = None) -> str:
    """Run a program away from any checkout; torch and the like come last, so that superadam is the one in `site`."""
    others = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    paths = f"import sys; sys.path[:0] = {[str(site)] if site else []!r}; sys.path.append({others!r})\n"
    how = {"cwd": python.parent, "env": {**os.environ, "PYTHONSAFEPATH": "1"}, "check": False}
    done = subprocess.run([python, "-c", paths + program], **how, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the wheel of `make wheels` installed in it, where no compiler is found."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = wheels.build_wheel(wheels.build_sdist(folder), platform.machine(), folder)
    assert list(check_wheel.refusals(wheel)) == []
    pip("install", "--no-deps", "--target", folder / "site", wheel, PATH="")
    return folder / "site"


def test_the_wheel_works_and_trains(site, tmp_path):
    script = str(ROOT / "examples" / "train.py")
    command = [script, "--model", "tiny", "--steps", "2", "--verify", "--out", str(tmp_path / "run")]
    file, kind, value, *_ = run(bare_python(tmp_path), PROGRAM % command, site).split()
    assert Path(file).is_relative_to(site)
    assert (kind, value) == ("clipped", "0.75")
    assert any((tmp_path / "run").iterdir())


def test_the_wheel_holds_the_package_and_nothing_else(site):
    (wheel,) = site.parent.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"superadam", f"superadam-{wheel.name.split('-')[1]}.dist-info"}
    assert "superadam/py.typed" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_an_editable_install_follows_the_sources(tmp_path):
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "demo", "__pycache__", ".*_cache", ".hypothesis", "*.so")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)
    python = bare_python(tmp_path)
    # Each of optimization and vectors would take as long again, and nothing here depends on them.
    quickly = ("--config-settings=cmake.build-type=Debug", "--config-settings=cmake.define.SUPERADAM_SIMD=OFF")
    pip("--python", python, "install", "--no-deps", *quickly, "--editable", checkout)
    with (checkout / "superadam/step/outcome.py").open("a") as source:
        source.write("\nEDITED = 'yes'\n")
    program = "import superadam; from superadam.step import outcome; print(outcome.EDITED, superadam.__file__)"
    edited, file = run(python, program).split()
    assert edited == "yes"
    assert Path(file).is_relative_to(checkout)
