"""`superadam plan`: its answers, its refusals, and what it never does."""

import json
import re
from typing import Any

import pytest

from superadam.cli.main import build_parser, main
from superadam.cli.plan import command

transformers: Any = pytest.importorskip("transformers")

from support.presets import peaks_found_once  # noqa: E402, F401

from superadam.cli.console import Console  # noqa: E402
from superadam.cli.plan.operations import operations  # noqa: E402
from superadam.plan.memory import Setting, Subject  # noqa: E402

SMALL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "num_hidden_layers": 4}
SMALL |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SMALL))
    return str(folder)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    found = capsys.readouterr()
    return status, " ".join(found.out.split()), found.err


def numbers(found: Any, path: str = "") -> Any:
    """Yield the paths of numbers that say nothing of their kind."""
    if isinstance(found, dict):
        for name, one in found.items():
            if not (name == "value" and "kind" in found):
                yield from numbers(one, f"{path}/{name}")
    elif isinstance(found, list):
        for one in found:
            yield from numbers(one, path)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path


def test_every_number_says_how_far_it_can_be_trusted(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "--json", "--clipped", "0.5", "--seq", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {path for path in numbers(found) if not path.startswith("/setting/")} == set()  # which are given
    assert found["parameters"]["kind"] == "exact"
    assert found["trains"] is True
    assumed = [{"value": value, "kind": "assumed"} for value in (0.45, 0.55, 0.65)]
    assert [one["efficiency"] for one in found["times"]] == assumed


def test_an_efficiency_that_is_given_replaces_the_range(monkeypatch, folder, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # which cuts no word
    status, out, _ = said(capsys, folder, "--seq", "64", "--gpu-efficiency", "0.5")
    assert all(word in out for word in ("weights", "fragments", "activations"))
    assert status == 0
    assert "training fits" in out
    assert re.search(r"of its peak 0\.50a ", out)
    assert "seconds without overlap" in out
    assert "█" in out


def test_what_does_not_fit_ends_with_1_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "llama-3.1-8b", "--machine", "rtx4090-desktop", "--batch", "2")
    assert status == 1
    assert "training does not fit: the host needs" in out
    assert "it fits with --moments bf16 --master 24bit" in out
    assert re.search(r"publication over the link takes [\d.]+[mpa] s of each step", out)
    assert "larger than a bucket, and cut: model.embed_tokens.weight" in out


def test_measured_passes_are_a_machine(monkeypatch, tmp_path, folder, capsys):
    monkeypatch.setattr("superadam.cli.bench.command.NUMEL", 4096)
    monkeypatch.setattr("superadam.cli.bench.command.PAIRS", 3)
    file = tmp_path / "here.toml"
    assert main(["plan", "--machine", "h200", "--measure", str(file)]) == 0
    assert 'kind = "measured", source = "superadam bench: ' in file.read_text()
    assert main(["plan", folder, "--seq", "64", "--machine", str(file), "--gpu-efficiency", "0.5"]) == 0
    status, _, err = said(capsys, "--measure", str(file))
    assert status == 2
    assert "exists, expected a new file; name another" in err


MISTRAL = {"model_type": "mistral", "head_dim": 8}  # which says nothing of its layers' types
LATENT = {"model_type": "minicpm3", "v_head_dim": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6}  # 10 for scores
GEMMA = {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 4, "head_dim": 8}


@pytest.mark.parametrize("model", [GEMMA, MISTRAL, LATENT], ids=lambda model: model["model_type"])
@pytest.mark.parametrize("tokens", [32, 64, 65, 200])
def test_attention_looks_at_as_many_pairs_as_are_counted(tokens: int, model: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(**SMALL | model, sliding_window=64)
    pairs = sum(min(64, position) for position in range(1, tokens + 1))
    found = operations(Subject.of(config), Setting(1, tokens, checkpointing=False, loss="full")).repeated
    assert found == pytest.approx(0.5 * 4 * 8 * 4 * 4 * pairs, rel=0.04)  # 4 heads in 4 layers


@pytest.mark.parametrize("loss", ["chunked", "full"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_what_is_computed_again_is_counted(checkpointing: bool, loss: Any) -> None:
    """Layers with checkpointing, and logits that are computed in chunks; what follows backward has both."""
    subject = Subject.of(transformers.AutoConfig.for_model(**SMALL))
    once, found = (
        operations(subject, Setting(2, 64, checkpointing=layers, loss=logits))
        for layers, logits in ((False, "full"), (checkpointing, loss))
    )
    head = 2 * 256 * 64 * 2 * 64
    layers = once.forward - head
    assert found.repeated - once.repeated == pytest.approx(checkpointing * layers + (loss == "chunked") * head)
    shares = found.by_parameter["lm_head.weight"], found.by_parameter["model.layers.0.self_attn.q_proj.weight"]
    assert shares[0] / shares[1] == pytest.approx(4 * (2 + (loss == "chunked")) / (2 + checkpointing))


def test_words_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80, force_terminal=True).print("GH200 [node 3] :smile: [/b]")
    assert capsys.readouterr().out == "GH200 [node 3] :smile: [/b]\n"


def test_presets_bring_their_setting() -> None:
    setting, machine = command.setting_of(build_parser().parse_args(["plan", "qwen3-30b-a3b", "--seq", "1024"]))
    assert (setting.ranks, setting.tokens, machine) == (2, 1024, "gh200")


def test_the_parts_of_a_step_are_all_of_it(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["phi-4"], [folder, "--flow", "--clipped", "0.5"]):
        status, told, _ = said(capsys, *words, "--gpu-efficiency", "0.5")
        assert status == 0
        seconds = {name: float(re.findall(rf"{name} ([0-9.]+)a", told)[0]) for name in ("of a step", "and backward")}
        exposed = sum(map(float, re.findall(r"exposed: .+? ([0-9.]+)a", told)))
        assert seconds["of a step"] == pytest.approx(seconds["and backward"] + exposed, abs=4e-3)
    assert said(capsys, "phi-4")[1].count("waiting for the link") == 1  # in the table: there is nothing to draw
