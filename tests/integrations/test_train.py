"""`examples/train.py`, as a person runs it: what it tells and writes, what it notices, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train

from superadam import OffloadScheduler, SpeculativeCPUAdamW

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

TINY = ["--model", "tiny", "--steps", "8", "--max-grad-norm", "2"]
"""A run of which some steps are clipped and some are not."""

SENTENCES = b"".join(b"%d bottles of milk on the wall, and %d on the floor.\n" % (n, n * n % 97) for n in range(200))


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sentences.txt").write_bytes(SENTENCES)
    yield
    torch.use_deterministic_algorithms(False)


def run(*words: str, out: str = "run") -> tuple[int, dict[str, Any]]:
    report = Path(f"{out}.json")
    status = train.main([*TINY, "--text", "sentences.txt", "--out", out, "--report", str(report), *words])
    return status, json.loads(report.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(("dtype", "overlap"), [("bf16", True), ("bf16", False), ("fp32", True)])
def test_verified_run(device, dtype, overlap, capsys):
    words = ["--verify", "--dtype", dtype, "--device", device, "--inject-nan", "3", "--inject-nan", "5"]
    words += ["--trace", "trace.json"] if overlap else ["--no-overlap"]
    status, found = run(*words)
    printed = capsys.readouterr().out
    assert status == 0
    assert f"\nverified: 0 of {3 * found['parameters']:,} elements of p, m and v differ from " in printed
    assert found["verified"] is True
    assert found["elements"] == 3 * found["parameters"]
    assert [found[name] for name in ("elements_differing", "parameters_differing", "steps_differing")] == [0, 0, 0]
    assert found["skipped"] == 2
    assert min(found["committed"], found["clipped"]) > 0
    assert found["committed"] + found["clipped"] + found["skipped"] == found["steps"] == len(found["losses"]) == 8
    assert [number for number, norm in enumerate(found["grad_norms"], 1) if norm is None] == [3, 5]
    assert sum(norm > 2 for norm in found["grad_norms"] if norm is not None) == found["clipped"]
    for number in (3, 5):
        assert f"step    {number} of 8" in printed
    assert "skipped" in printed
    assert ("hidden" in printed) is (found["buckets"] > 0) is overlap
    assert Path("trace.json").exists() is overlap


def test_reports_add_up_and_runs_of_the_same_seed_alone_have_the_same_losses():
    _, found = run("--seed", "3", out="found")
    _, plain = run("--seed", "3", "--no-overlap", out="plain")
    _, other = run("--seed", "4", out="other")
    assert found["losses"] == plain["losses"] != other["losses"]
    assert all(loss < found["losses"][0] for loss in found["losses"][3:])  # it learns
    assert 0.0 <= found["hidden_seconds"] <= found["work_seconds"]
    assert found["hidden_share"] == pytest.approx(found["hidden_seconds"] / found["work_seconds"])
    waited = found["hook_seconds"] + found["waited_seconds"] + found["step_seconds"]
    assert found["work_seconds"] == pytest.approx(found["hidden_seconds"] + waited)
    assert 0.0 < waited <= found["seconds"]
    assert found["accepted"] > 0
    assert found["peak_host_bytes"] > 1 << 20
    assert "elements" not in found  # nothing was compared
    assert (plain["hidden_share"], plain["buckets"]) == (0.0, 0)


def test_a_run_without_a_limit_clips_nothing():
    _, found = run("--max-grad-norm", "inf", "--steps", "2")
    assert (found["clipped"], found["max_grad_norm"]) == (0, "inf")


@pytest.mark.parametrize("fault", ["master", "exp_avg", "exp_avg_sq", "parameter", "norm"])
def test_planted_difference_is_found(fault, monkeypatch, capsys):
    """The run without superadam differs by one bit of what it leaves, or in a step."""

    class Faulty(train.TorchAdamW):
        def state_dict(self) -> Any:
            state = super().state_dict()
            if fault in state["state"][2]:
                state["state"][2][fault].view(torch.int32).view(-1)[7] ^= 1
            return state

        def step(self) -> None:
            super().step()
            with torch.no_grad():
                if fault == "parameter":
                    self.parameters[-1].view(torch.int16).view(-1)[0] ^= 1
            if fault == "norm":
                was = self.last_outcome
                self.last_outcome = type(was)(was.kind, was.grad_norm * (1 + 1e-9), was.clip_coefficient)

    monkeypatch.setattr(train, "PLAIN", Faulty)
    status, found = run("--verify", "--steps", "2")
    assert status == 1
    assert "\nNOT verified: " in capsys.readouterr().out
    assert found["verified"] is False
    differing = [found[f"{name}_differing"] for name in ("elements", "parameters", "steps")]
    if fault == "parameter":
        assert differing[1] > 0
    else:
        assert differing == ([0, 0, 2] if fault == "norm" else [1, 0, 0])


def test_where_torch_rounds_otherwise_plain_steps_are_compared_with(monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(train, "PLAIN", SpeculativeCPUAdamW)
    monkeypatch.setattr(train, "OffloadScheduler", lambda *a, **k: opened.append(1) or OffloadScheduler(*a, **k))
    assert run("--verify", "--steps", "2")[0] == 0
    assert "differ from plain steps in any bit" in capsys.readouterr().out
    assert len(opened) == 1


def test_models_have_sizes_at_which_torch_rounds_alike():
    for shape in train.MODELS.values():
        with torch.device("meta"):
            model = train.Decoder(shape, torch.float32)
        assert all(parameter.numel() % 64 == 0 for parameter in model.parameters())


def test_all_of_the_model_learns_and_the_text_is_the_library():
    model = train.Decoder(train.MODELS["tiny"], torch.float32)
    model(torch.randint(256, (1, 17))).backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())
    text = bytes(train.read_text(None, 17).numpy())
    assert b"class ArgumentParser" in text
    assert b"class TestCase" in text
    with pytest.raises(ValueError, match="the text has 10656 bytes, but a sequence 20000"):
        train.read_text(Path("sentences.txt"), 20_000)


BAD = [
    (["--text", "missing.txt"], "cannot use missing.txt: No such file or directory"),
    (["--text", "short.txt"], "the text has 5 bytes, but a sequence 17; give a longer one with --text"),
    (["--steps", "0"], "--steps is 0; give a number above 0"),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (["--lr", "nan"], "--lr is nan; give a number above 0"),
    (["--max-grad-norm", "-1"], "--max-grad-norm is -1.0; give a number above 0"),
    (["--model", "8b"], "argument --model: invalid choice: '8b'"),
    (["--device", "abacus"], "--device abacus is not available here; give cpu, or cuda with a GPU"),
    (["--device", "meta"], "--device meta is not available here"),
    (["--device", "cuda:99", "--verify"], "--device cuda:99 is not available here"),
    (["--inject-nan", "9"], "--inject-nan is 9; give a step from 1 to 8"),
    (["--trace", "trace.json", "--no-overlap"], "--trace needs a run that overlaps"),
    (["--report", "short.txt"], "short.txt would be overwritten; move it away, or give another name"),
    (["--report", "new.json", "--trace", "new.json"], "new.json would be overwritten"),
    (["--out", "short.txt/below"], "cannot use short.txt/below: Not a directory; give another place"),
    (["--wings"], "unrecognized arguments: --wings"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(words, sentence, capsys):
    Path("short.txt").write_text("short")
    before = {path: path.read_bytes() for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--text", "sentences.txt", "--out", "run", *words])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.err.startswith(f"train.py: {sentence}")
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert {path: path.read_bytes() for path in Path().rglob("*")} == before
