"""`superadam train` on several ranks: one run with one report, verified bit by bit, and one fate for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import on_ranks, run
from support.training_runs import OPTIONS, SENTENCES, TINY, TINY_SHAPE, are_same, read_report, write_text

from superadam import OffloadScheduler, StepKind
from superadam.cli.main import main
from superadam.cli.train import ranks as train_ranks
from superadam.cli.train.loop import Trainer
from superadam.cli.train.memory import needed_bytes
from superadam.cli.train.model import build_model, next_byte_loss
from superadam.cli.train.presets import PRESETS
from superadam.cli.train.ranks import Ranks
from superadam.cli.train.settings import Settings
from superadam.cli.train.text import Text
from superadam.cli.usage import UsageError
from superadam.integrations.distributed_checkpoint import peek

pytestmark = pytest.mark.slow

SHAPES = {"bytes": None, "tied": TINY_SHAPE, "untied": dataclasses.replace(TINY_SHAPE, tied=False)}


def train(*words: object) -> tuple[int, str, str]:
    """Run `superadam train` on this rank, and return its exit status and what it printed to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["train", *map(str, words)])
        except SystemExit as error:
            status = int(error.code or 0)
    return status, out.getvalue(), err.getvalue()


def train_with(rank: int, words: tuple[object, ...]) -> tuple[int, str, str]:
    return train(*words)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "overlap", "checkpointing"),
    [("bytes", "bf16", True, False), ("tied", "bf16", True, True), ("untied", "fp32", False, True)],
)
@on_ranks(3)
def test_every_bit_is_that_of_torch(rank: int, name: str, dtype: str, overlap: bool, checkpointing: bool) -> None:
    settings = dataclasses.replace(
        TINY, shape=SHAPES[name], dtype=dtype, overlap=overlap, checkpointing=checkpointing, batch=6, max_grad_norm=0.6
    )
    trainer = Trainer(settings, Text.of_bytes("sentences", SENTENCES, settings.seq), Ranks(rank, 3, rank, 3))
    reference = trainer.verify()
    with trainer:
        trainer.measure_held_out()
        kinds = [trainer.step(inject_nan=number == 3).kind for number in range(6)]
        if overlap:
            assert trainer.scheduler is not None
            assert trainer.scheduler.statistics.given_back_gradients == 0
        found = reference.compare()
    assert kinds[3] is StepKind.SKIPPED
    assert StepKind.CLIPPED in kinds
    assert found.elements == 3 * trainer.parameters
    assert (found.elements_differing, found.parameters_differing, found.verdicts_differing) == (0, 0, 0)
    assert found.norm_max_relative_difference <= 1e-12


@on_ranks(2)
def test_what_differs_on_one_rank_is_found_by_all(rank: int) -> None:
    trainer = Trainer(TINY, Text.of_bytes("sentences", SENTENCES, TINY.seq), Ranks(rank, 2, rank, 2))
    reference = trainer.verify()
    step = reference.step

    def misled(outcome: Any) -> None:
        if rank == 1:
            reference._copies[0].grad.view(-1)[0] += 1.0  # type: ignore[union-attr]
        step(outcome)

    with trainer, mock.patch.object(reference, "step", misled):
        trainer.step()
    found = reference.compare()
    assert found.norm_max_relative_difference > 0.1
    assert found.verdicts_differing == 1  # the coefficient differs, too
    assert found.elements_differing > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
@on_ranks(3)
def test_initial_weights_and_loss_are_those_of_one_process(rank: int, name: str, dtype: str) -> None:
    settings = dataclasses.replace(TINY, shape=SHAPES[name], dtype=dtype)
    alone, shards = build_model(settings), build_model(settings, Ranks(rank, 3))
    whole: dict[str, Any] = {key: value.full_tensor() for key, value in shards.state_dict().items()}
    assert {value.dtype for value in whole.values()} == {torch.float32}
    assert are_same(whole, {key: value.float() for key, value in alone.state_dict().items()})
    windows = torch.arange(34).view(2, 17)
    with torch.no_grad():  # activations are fp32 on the CPU, whatever the dtype of the weights
        assert torch.equal(next_byte_loss(alone, windows), next_byte_loss(shards, windows))


def test_run_is_nearly_that_of_one_process(tmp_path: Path) -> None:
    """Losses differ by the order of fp32 sums: 24 steps of roundings of 2**-24, which Adam's quotients magnify."""
    words = (*OPTIONS, "--steps", 24, "--batch", 4, "--dtype", "fp32", "--text", write_text(tmp_path), "--no-save")
    assert train(*words, "--out", tmp_path / "one", "--report", tmp_path / "one.json")[0] == 0
    several = run(train_with, 2, words=(*words, "--out", tmp_path / "two", "--report", tmp_path / "two.json"))
    assert [status for status, _, _ in several] == [0, 0]
    one, two = read_report(tmp_path / "one.json"), read_report(tmp_path / "two.json")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert two["grad_norms"][0] == pytest.approx(one["grad_norms"][0], rel=1e-5)
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=1e-4)
    assert (one["ranks"], two["ranks"]) == (1, 2)


# ---- one report ------------------------------------------------------------------------------------------------------


def test_first_rank_alone_prints_and_writes(tmp_path: Path) -> None:
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--report", tmp_path / "report.json")
    first, second = run(train_with, 2, words=(*words, "--verify", "--inject-nan", 3, "--trace", tmp_path / "trace"))
    assert second == (0, "", "")
    assert first[::2] == (0, "")
    assert "sharded over 2 processes" in first[1]
    assert "verified: 0 of 33,936 fp32 elements" in first[1].replace("\n", " ")
    assert sorted(os.listdir(tmp_path / "run")) == ["shards", "training.png"]
    report = read_report(tmp_path / "report.json")
    assert (report["ranks"], report["skipped"], report["elements"]) == (2, 1, 3 * report["parameters"])
    assert json.loads((tmp_path / "trace").read_text())


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, bytes]:
    """Return the files of the newest checkpoint that hold tensors."""
    (newest,) = (folder / "shards").glob("save-*")
    return {path.name: path.read_bytes() for path in newest.glob("*.distcp")}


def test_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    words = (*OPTIONS, "--text", write_text(tmp_path), "--inject-nan", 6)
    whole, parts = (("--out", tmp_path / name, "--report", tmp_path / f"{name}.json") for name in ("whole", "parts"))
    assert run(train_with, 2, words=(*words, *whole))[0][0] == 0
    status, printed, _ = run(train_with, 2, words=(*words[:-2], *parts, "--stop-at", 4))[0]
    assert status == 0
    assert "go on with: torchrun ... -m superadam train --resume" in printed.replace("\n", " ")
    resumed = run(train_with, 2, words=(*parts[2:], "--resume", tmp_path / "parts", "--inject-nan", 6))
    assert [status for status, _, _ in resumed] == [0, 0]
    one, two = read_report(tmp_path / "whole.json"), read_report(tmp_path / "parts.json")
    assert two["sessions"] == 2
    assert are_same(one["losses"], two["losses"])
    assert are_same(one["grad_norms"], two["grad_norms"])
    assert state_of(tmp_path / "whole") == state_of(tmp_path / "parts")


def test_run_is_continued_by_another_number_of_ranks(tmp_path: Path) -> None:
    """The steps before are its own; those after differ by the order of sums, as from one process's."""
    words = (*OPTIONS, "--batch", 6, "--text", write_text(tmp_path))
    whole, parts = (("--out", tmp_path / name, "--report", tmp_path / f"{name}.json") for name in ("whole", "parts"))
    assert run(train_with, 3, words=(*words, *whole))[0][0] == 0
    assert run(train_with, 3, words=(*words, *parts, "--stop-at", 4))[0][0] == 0
    assert run(train_with, 2, words=(*parts, "--resume", tmp_path / "parts", "--verify"))[0][0] == 0
    one, two = read_report(tmp_path / "whole.json"), read_report(tmp_path / "parts.json")
    assert one["losses"][:4] == two["losses"][:4]
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-3)


def test_damaged_shards_and_other_texts_are_refused_in_a_sentence(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    words = (*OPTIONS, "--text", text, "--out", tmp_path / "run")
    assert run(train_with, 2, words=(*words, "--stop-at", 2))[0][0] == 0

    def refusal(*more: object) -> str:
        ended = run(train_with, 2, words=("--resume", tmp_path / "run", *more))
        (sentence,) = (err for _, _, err in ended if err)
        assert sorted(status for status, _, _ in ended) == [1, 2]
        assert [out for _, out, _ in ended] == ["", ""]
        assert sentence.count("\n") == 1
        return str(sentence)

    other = tmp_path / "other"
    other.write_bytes(SENTENCES[::-1])
    assert "was trained on other bytes than" in refusal("--text", other)
    assert "has --lr 0.01, not 1.0" in refusal("--lr", 1.0)
    (shard,) = (tmp_path / "run").glob("shards/save-*/__1_0.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    assert "__1_0.distcp is damaged" in refusal()
    values = shard.with_name("values.pt")
    values.write_bytes(values.read_bytes()[:-5])
    assert "values.pt is damaged" in refusal()


def test_checkpoints_of_one_process_and_of_several_are_told_apart(tmp_path: Path) -> None:
    words = (*OPTIONS, "--text", write_text(tmp_path), "--stop-at", 1)
    assert train(*words, "--out", tmp_path / "one")[0] == 0
    assert run(train_with, 2, words=(*words, "--out", tmp_path / "two"))[0][0] == 0
    assert train("--resume", tmp_path / "two") == (
        2,
        "",
        f"superadam: the run in {tmp_path}/two was made by several processes; continue it under torchrun\n",
    )
    ended = run(train_with, 2, words=("--resume", tmp_path / "one"))
    assert {err for _, _, err in ended} == {
        "",
        f"superadam: the run in {tmp_path}/one was made by one process; continue it without torchrun\n",
    }


# ---- options ---------------------------------------------------------------------------------------------------------


def test_options_that_do_not_suit_several_ranks_are_refused(tmp_path: Path) -> None:
    words = (*OPTIONS, "--batch", 3, "--text", write_text(tmp_path), "--out", tmp_path / "run")
    ended = run(train_with, 2, words=words)
    told = "superadam: --batch is 3, expected a multiple of 2: as many sequences for each process\n"
    assert sorted(ended) == [(1, "", ""), (2, "", told)]
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=r"--device is cuda:1, expected cuda without a number"):
        Ranks(0, 2, 0, 2).device("cuda:1")
    with (
        mock.patch("torch.cuda.device_count", return_value=1),
        pytest.raises(UsageError, match=r"2 processes were started on a machine with 1 GPUs"),
    ):
        Ranks(1, 2, 1, 2).device("cuda")


@pytest.mark.parametrize("rank", [0, 1])
def test_words_that_no_option_takes_are_told_once(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", rank), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    status, _, err = train("--frobnicate")
    assert status == 2
    assert err.count("\n") == (rank == 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["1b", "8b"])
def test_each_process_needs_its_share(name: str, device: str) -> None:
    settings = Settings(shape=PRESETS[name].shape, batch=16, seq=128, device=device, checkpointing=True)
    needs = [needed_bytes(settings, is_verified=True, processes=count) for count in (2, 4, 8, 16)]
    assert needs == sorted(needs, reverse=True)
    parameters = PRESETS[name].shape.parameters
    for count, (host, _) in zip((2, 4, 8, 16), needs, strict=True):
        assert host > (12 + 16) * parameters / count  # masters, moments and the reference
    assert needs[0][0] - needs[1][0] > 28 * parameters / 4


# ---- interruptions and errors ----------------------------------------------------------------------------------------


def interrupted(rank: int, words: tuple[object, ...]) -> tuple[int, str, str]:
    """Train, and send a signal to the second rank at the beginning of the third step."""
    step = Trainer.step

    def acting(trainer: Trainer, *, inject_nan: bool = False) -> Any:
        if rank == 1 and len(trainer.history.steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, inject_nan=inject_nan)

    with mock.patch.object(Trainer, "step", acting):
        return train(*words)


def test_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    words = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run", "--report", tmp_path / "report.json")
    first, second = run(interrupted, 2, words=words)
    assert (first[0], second) == (128 + signal.SIGINT, (128 + signal.SIGINT, "", ""))
    assert "stopped by SIGINT after step 3 of 8" in first[1]
    assert read_report(tmp_path / "report.json")["steps"] == 3
    assert run(train_with, 2, words=("--resume", tmp_path / "run"))[0][0] == 0


FAULTS: dict[str, Any] = {
    "step": mock.patch.object(Trainer, "measure_held_out", side_effect=OSError("no luck today")),
    "hook": mock.patch.object(OffloadScheduler, "_take", side_effect=OSError("no luck today")),
    "building": mock.patch("superadam.cli.train.loop.build_model", side_effect=MemoryError),
    "saving": mock.patch(
        "superadam.integrations.distributed_checkpoint._contents", side_effect=OSError("no luck today")
    ),
    "report": mock.patch("superadam.cli.train.report.replace_file", side_effect=UsageError("no luck today")),
}


def failing(rank: int, words: tuple[object, ...], where: str, on: int, folder: str) -> None:
    """Train with a fault on one rank, write what came of it, and end as a process of torchrun does."""

    def tells_late(error: BaseException) -> bool:
        time.sleep(1)  # the others have noticed by now
        return tells(error)

    tells = train_ranks._tells
    with contextlib.ExitStack() as stack:
        if rank == on:
            stack.enter_context(FAULTS[where])
        if rank == on and where == "hook":
            stack.enter_context(mock.patch.object(train_ranks, "_tells", tells_late))
        ended = train(*words)
    Path(folder, f"{rank}.json").write_text(json.dumps(ended))
    os._exit(ended[0])


@pytest.mark.parametrize(("where", "on"), [("step", 1), ("hook", 1), ("building", 0), ("saving", 1), ("report", 0)])
def test_error_of_one_rank_is_one_sentence_and_ends_all(where: str, on: int, tmp_path: Path) -> None:
    words: tuple[object, ...] = (*OPTIONS, "--text", write_text(tmp_path), "--out", tmp_path / "run")
    run(failing, 2, words=(*words, "--report", tmp_path / "report"), where=where, on=on, folder=str(tmp_path))
    ended = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert all(status != 0 for status, _, _ in ended)
    (sentence,) = (err for _, _, err in ended if err)
    assert re.fullmatch(r"superadam: [^\n]+\n", sentence)
    assert "memory" in sentence if where == "building" else "no luck today" in sentence
    assert not (tmp_path / "report").exists()


def test_process_tells_although_the_store_does_not_answer() -> None:
    """As where the process that has it is stopped."""
    answer = threading.Event()
    store = mock.Mock(check=lambda keys: answer.wait())
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError, match="planted") as caught:
            raise RuntimeError("planted")
        with (
            mock.patch.object(torch.distributed.distributed_c10d, "_get_default_store", return_value=store),
            mock.patch.object(train_ranks, "_PATIENCE", 0.1),
        ):
            assert train_ranks._tells(caught.value)
    finally:
        answer.set()
        signal.signal(signal.SIGTERM, handler)


def test_timeout_is_that_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with mock.patch.object(torch.distributed, "init_process_group", side_effect=RuntimeError("planted")) as init:
        assert train("--timeout", 7)[::2] == (2, mock.ANY)
        assert init.call_args.kwargs == {"timeout": timedelta(seconds=7)}
        for word in ("0.5", "nan", "inf", "-1"):
            told = f"superadam: --timeout is {float(word)}; expected seconds from 1 to 86400\n"
            assert train(f"--timeout={word}") == (2, "", told)


def launched(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "superadam", "train", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


def wait_for_skipped_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any("skipped" in line for line in iter(process.stdout.readline, ""))


@pytest.mark.subprocess
def test_ctrl_c_to_torchrun_stops_all_and_saves(tmp_path: Path) -> None:
    words = (*OPTIONS, "--steps", 100000, "--inject-nan", 3, "--text", write_text(tmp_path), "--out", tmp_path / "run")
    process = launched(*words)
    wait_for_skipped_step(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert "superadam: " not in err
    (stopped,) = re.findall(r"stopped by SIGINT after step (\d+) of 100000", out)
    assert len(peek(tmp_path / "run" / "shards")["history"]["steps"]) == int(stopped)
