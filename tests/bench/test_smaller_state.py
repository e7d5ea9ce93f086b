"""`bench/smaller_state.py`: its measures are what they say, and a run at a tiny size."""

import dataclasses
import functools
import json
import math

import pytest
import smaller_state
import torch
from measures import state_training
from measures.state_formats import FORMATS, OverMasters
from measures.state_training import FINE_TUNING, FROM_SCRATCH, SpreadOfRuns
from torch.optim import AdamW

BETAS = (0.9, 0.999)


@pytest.fixture
def exact_one(monkeypatch):
    """Return the name of a format that is torch's own AdamW in fp32."""

    def make(groups, betas):
        return OverMasters(groups, lambda g: AdamW(g, lr=0.0, betas=betas))

    monkeypatch.setitem(FORMATS, "torch", dataclasses.replace(FORMATS["fp32"], name="torch", make=make))
    return "torch"


def _parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 64, generator=generator).bfloat16().requires_grad_() for _ in range(2)]


def _new_gradients(parameters: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = (1e-3 * torch.randn(2, 64, generator=generator)).to(parameter.dtype)


def test_an_error_is_that_of_the_update(exact_one):
    """That of another AdamW in fp32 is nothing; a state in fewer bits has one, and a worse one has a larger one."""
    parameters = _parameters()
    names = ("fp32", exact_one, "bf16", "8bit")
    errors = state_training.UpdateErrors(parameters, BETAS, names, marks=[10, 20])
    for step in range(1, 21):
        _new_gradients(parameters, step)
        errors.follow(step)
    found = errors.at_marks()
    assert found.keys() == {exact_one, "bf16", "8bit"}
    assert all([mark for mark, _ in values] == [10, 20] for values in found.values())
    (_, exact), (_, half), (_, byte) = (found[name][-1] for name in names[1:])
    assert exact < 1e-6
    assert 1e-4 < half < 0.02
    assert 0.02 < byte < 0.2


def test_a_drift_is_that_of_masters(exact_one):
    parameters = _parameters()
    groups = [{"params": parameters, "weight_decay": 0.01}]
    leader = FORMATS["fp32"].make(groups, BETAS)
    names = (exact_one, "24bit", "bf16 master to nearest")
    drifts = state_training.Drifts(groups, BETAS, names)
    for step in range(1, 11):
        _new_gradients(parameters, step)
        drifts.follow(1e-4)
        leader.step(1e-4)
    drifts.measure(10, leader)
    (_, exact), (_, kept), (_, lost) = (drifts.at_marks()[name][0] for name in names)
    assert exact < 1e-3  # fp32 masters near 1 that move by 1e-3
    assert 1e-3 < kept < 0.1
    assert lost > 0.5


def test_formats_of_others_round_what_they_say():
    for name, of_moments in (("bf16 moments to nearest", True), ("bf16 master to nearest", False)):
        (parameter, _) = _parameters()
        side = FORMATS[name].make([{"params": [parameter], "weight_decay": 0.0}], BETAS)
        assert isinstance(side, OverMasters)
        for step in (1, 2):
            _new_gradients([parameter], step)
            side.step(1e-3)
        (state,) = side._optimizer.state.values()
        (master,) = side.masters()
        tensors = state["exp_avg"], state["exp_avg_sq"], master
        is_rounded = [torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors]
        assert is_rounded == [of_moments, of_moments, not of_moments]
        assert torch.equal(parameter.detach().flatten(), master.bfloat16())


def test_the_spread_of_runs_is_that_of_one_more():
    among = SpreadOfRuns.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (among.least, among.most, among.mean) == (1.0, 5.0, 3.0)
    width = 2.776445 * math.sqrt(2.5) * math.sqrt(1.2)  # the 97.5 % quantile with 4 degrees of freedom
    assert among.high - 3.0 == pytest.approx(width, rel=1e-4) == 3.0 - among.low
    assert SpreadOfRuns.of([0.0, 1.0]).high - 0.5 == pytest.approx(12.7062 * math.sqrt(0.5 * 1.5), rel=1e-3)  # with 1


def _tiny(tmp_path, monkeypatch, formats):
    """Let runs be tiny, and return the words that start them."""
    texts = [
        state_training.Text.of(name, "".join(f"{name} {number}\n" for number in range(1000)).encode(), 48)
        for name in ("text", "other")
    ]
    sizes = {"width": 64, "layers": 1, "fine_tuning_steps": 5, "fine_tuning_lrs": (1e-5,), "held_out": 4}
    settings = functools.partial(state_training.Settings, **sizes, formats=tuple(formats))
    monkeypatch.setattr(smaller_state, "read_texts", lambda seq: tuple(texts))
    monkeypatch.setattr(smaller_state, "Settings", settings)
    return ["--steps", "10", "--beta2", "0.9", "--perturbed", "1", "--json", str(tmp_path / "found.json")]


@pytest.mark.slow
def test_a_run_of_training_writes_tables_json_and_a_picture_and_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    ours = ["fp32", "8bit", "24bit"]
    formats = [*ours, "bf16 moments to nearest", "bf16 master to nearest"]
    words = _tiny(tmp_path, monkeypatch, formats)
    before = torch.get_num_threads()
    assert smaller_state.main([*words, "--picture", str(tmp_path / "found.svg")]) == 0
    assert torch.get_num_threads() == before
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed  # nothing was cut off
    for word in ("held out", "error of the update", "drift of masters", " of 2", *formats):
        assert word in printed
    assert "<svg" in (tmp_path / "found.svg").read_text()

    read = json.loads((tmp_path / "found.json").read_text())
    assert read["settings"]["steps"] == 10
    assert len({text["sha256"] for text in read["texts"]}) == 2
    runs = {(row["run"]["part"], row["run"]["format"], row["run"]["seed"]): row for row in read["runs"]}
    parts = (FROM_SCRATCH, FINE_TUNING)
    each = [*((name, 1) for name in ours), *((name, 0) for name in formats)]
    assert runs.keys() == {(part, *one) for part in parts for one in each}
    scratch, tuned = (runs[part, "fp32", 0] for part in parts)
    assert scratch["errors"].keys() == {"8bit", "bf16 moments to nearest"}
    assert tuned["drifts"].keys() == set(formats[1:])
    for row in runs.values():
        every = 2 if row["run"]["part"] == FROM_SCRATCH else 1
        assert [step for step, _ in row["held_out"]] == [every * n for n in range(1, 6)]
        assert 0.0 < row["held_out"][-1][1] < 6.0
    assert len({row["sha256"] for row in runs.values()}) > len(formats) + 1  # formats and seeds change weights

    monkeypatch.setattr(state_training.Training, "carry_out", None)  # what is in the file is not run again
    assert smaller_state.main(words) == 0
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit):
        smaller_state.main([*words, "--steps", "11"])
    assert "has other settings" in capsys.readouterr().err


def test_a_run_that_was_stopped_goes_on_with_the_same_weights(tmp_path, monkeypatch):
    """Fine-tuning begins with weights of a run from scratch, which another process may have made."""
    words = _tiny(tmp_path, monkeypatch, ["fp32"])
    file = tmp_path / "found.json"
    assert smaller_state.main(words) == 0
    whole = json.loads(file.read_text())
    first, tuned, *_ = whole["runs"]
    assert (first["run"]["part"], tuned["run"]["part"]) == (FROM_SCRATCH, FINE_TUNING)
    file.write_text(json.dumps({**whole, "runs": [first]}))
    assert smaller_state.main(words) == 0
    again = json.loads(file.read_text())
    assert [row["sha256"] for row in again["runs"]] == [row["sha256"] for row in whole["runs"]]
