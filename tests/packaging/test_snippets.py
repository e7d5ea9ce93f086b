"""Every block of code in README and docs/ runs as it is printed, and every command in them exists.

The Python blocks of a page run in order, with the names that earlier ones have left. A comment in front of a block says
what else it needs: `<!-- given: NAME -->` calls the function of that name below for names that stand for the reader's
own, and `<!-- not run: REASON -->` leaves a block out.
"""

import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
import train
from check_wheel import tag_of
from support import deepspeed_run
from torch import nn
from torch.distributed import run as torchrun

import superadam
from superadam import OffloadScheduler, SpeculativeCPUAdamW
from superadam.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(?:^<!-- (given|not run): ([^>]*) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`((?:superadam|make|python|pytest) [^`]+)`")
ELSEWHERE = {"git", "pip", "sudo", "echo", "export", "cat", "ulimit", "numactl", "pytest"}
ELSEWHERE |= {".venv/bin/pip", ".venv/bin/python"}
"""Programs whose commands are not tried."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Names = dict[str, Any]


class Block(NamedTuple):
    """A block of code: `given` or `not run` and what follows that in its comment, its language, and its text."""

    kind: str
    name: str
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def named(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("page", paths, ids=lambda path: path.relative_to(ROOT).as_posix())


@pytest.fixture(autouse=True)
def _light(one_torch_thread):
    """Compute with one thread, and leave no process group."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def training(folder: Path) -> Names:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    optimizer = SpeculativeCPUAdamW(model.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(8, 16).to(torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(1)
    names: Names = {"torch": torch, "OffloadScheduler": OffloadScheduler, "folder": folder, "step": 3}
    return {**names, "model": model, "optimizer": optimizer, "train": train}


def one_rank(folder: Path) -> Names:
    """Return nothing; start a group of one rank, where programs have what torchrun starts."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {}


def trainer(folder: Path) -> Names:
    transformers: Any = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 16)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model, tokens = transformers.LlamaForCausalLM(config).to(torch.bfloat16), torch.arange(8)
    options = {"max_steps": 3, "learning_rate": 1e-3, "report_to": "none", "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **options)
    dataset = [{"input_ids": tokens, "labels": tokens}] * 8
    return {"transformers": transformers, "model": model, "dataset": dataset, "arguments": arguments}


def zero_run(folder: Path) -> Names:
    pytest.importorskip("safetensors")
    shutil.copytree(ROOT / "tests/integrations/deepspeed_data/zero3-2", folder / "run")
    model = deepspeed_run.Model().to(torch.bfloat16)
    return {"model": model, "optimizer": SpeculativeCPUAdamW(deepspeed_run.groups_of(model)), "folder": folder}


GIVEN = {function.__name__: function for function in (training, one_rank, trainer, zero_run)}


@named([page for page in PAGES if any(block.language == "python" for block in blocks_of(page))])
def test_python_blocks_run_as_printed(page, tmp_path):
    names = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.language != "python" or block.kind == "not run":
            continue
        if block.kind == "given":
            names.update(GIVEN[block.name](tmp_path))
        exec(compile(block.text, str(page), "exec"), names)


@named(PAGES)
def test_commands_exist(page):
    consoles = [block.text for block in blocks_of(page) if block.language == "console"]
    lines = [line[2:] for text in consoles for line in text.splitlines() if line.startswith("$ ")]
    for command in [*lines, *(quoted for quoted in COMMAND.findall(page.read_text()) if "..." not in quoted)]:
        check(command)


def check(command: str) -> None:
    match shlex.split(command, comments=True):
        case ["superadam", *arguments]:
            if not {argument for argument in arguments if argument.isupper()}:  # which stand for the reader's own
                build_parser().parse_args(arguments)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        case [variable, *program] if re.fullmatch("[A-Z_]+=.*", variable):
            check(shlex.join(program))
        case ["torchrun", *arguments]:
            started = torchrun.parse_args(arguments)
            if started.module:
                check(shlex.join([started.training_script, *started.training_script_args]))
            elif started.training_script != "program.py":  # the reader's own
                assert (ROOT / started.training_script).exists(), command
        case ["python", "examples/train.py", *arguments]:
            train.make_parser().parse_args(arguments)
        case ["python", script, *_]:
            assert (ROOT / script).exists(), command
        case ["accelerate", "launch", *arguments]:
            assert all((ROOT / each).exists() for each in arguments if each.startswith("examples/")), command
        case [program, *_]:
            assert program in ELSEWHERE, command


def test_each_first_page_has_the_same_ways_to_install():
    """With the wheel that is built, extras that exist, and words that a shell hands over as they are."""
    pages = [ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/quickstart.md"]
    ways = re.compile(r"^\| (?:from source|editable|as a wheel) \| `(.*?)` \|", re.M)
    tables = [ways.findall(page.read_text()) for page in pages]
    source, editable, wheel = tables[0]
    assert tables == [[source, editable, wheel]] * 3
    assert [shlex.split(one)[-1] for one in (source, editable)] == [".[cli]"] * 2
    assert shlex.split(wheel)[-1] == f"dist/superadam-{superadam.__version__}-{tag_of('x86_64')}.whl[cli]"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cli", "plan", "finetune"} <= project["optional-dependencies"].keys()
    clone = f"$ git clone {project['urls']['Repository']} && cd superadam\n"
    assert all(clone in page.read_text() for page in pages)


def test_the_readme_and_its_first_program_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    first = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    assert len([line for line in first.text.splitlines() if line]) <= 16


def test_each_program_of_the_quickstart_has_at_most_three_new_lines():
    counts = [block.text.count("# new\n") for block in blocks_of(ROOT / "docs/quickstart.md")]
    programs = [block for block in blocks_of(ROOT / "docs/quickstart.md") if "import torch\n" in block.text]
    assert len(programs) == 4
    assert [count for count in counts if count] == [3, 2, 3, 3]
    for block in programs:
        assert all("# new" in line for line in block.text.splitlines() if "superadam" in line)


def test_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "timeline.py"))["picture"]()
    assert drawn == (ROOT / "docs" / "timeline.svg").read_text()


def test_api_page_shows_all_that_the_package_exports_and_every_public_method():
    page = (ROOT / "docs/api.md").read_text()
    shown = re.findall(r"auto(?:class|function):: superadam\.(\w+)$", page, re.MULTILINE)
    assert set(shown) == set(superadam.__all__)
    shown = re.findall(r"auto(?:method|property):: (\w+)$", page, re.MULTILINE)
    names = [*vars(superadam.SpeculativeCPUAdam), *vars(superadam.OffloadScheduler)]
    assert {name for name in names if not name.startswith("_")} <= set(shown)
