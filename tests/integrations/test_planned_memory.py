"""A run that a GPU or the host cannot hold is refused before its weights are loaded, with what to do."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.machines import machine

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("trl")

from support.presets import PRESETS, peaks_found_once  # noqa: E402, F401

from superadam.host.machine import Host  # noqa: E402
from superadam.integrations.planned_memory import check_memory, setting_of  # noqa: E402
from superadam.plan.memory import Setting  # noqa: E402

pytestmark = pytest.mark.slow

GIB = 1 << 30
LLAMA = PRESETS["llama-3.1-8b"].config


def host_of(folder: Path, gibibytes: int) -> Host:
    kilobytes = gibibytes << 20
    return machine(folder, {"/proc/meminfo": f"MemTotal: {kilobytes} kB\nMemAvailable: {kilobytes} kB\n"})


def test_what_fits_or_cannot_be_planned_is_not_refused(tmp_path):
    check_memory(LLAMA, Setting(1, 1024), 80 * GIB, host_of(tmp_path, 512))
    check_memory(transformers.T5Config(d_model=16, num_layers=1), Setting(), 1, host_of(tmp_path / "small", 1))


@pytest.mark.parametrize(
    ("setting", "gpu", "host", "words"),
    [
        (Setting(4, loss="full"), 24, 512, r"GPU's memory at head and loss, .*; choose --loss_type nll or --per_d"),
        (Setting(4, 1024), 21, 512, r"GPU's memory at .*; choose --per_device_train_batch_size 1 or 4 ranks, each"),
        (Setting(checkpointing=False), 20, 512, r"GPU's memory at .*; choose --activation_checkpointing true or"),
        (Setting(), 80, 110, r"host's memory, .*; choose --moments bf16 --master 24bit or 2 ranks, each with as much"),
        (Setting(), 80, 60, r"host's memory, .*; choose --moments 8bit --master 24bit or 2 ranks, each with as much"),
        (Setting(), 17, 512, r"GPU's memory at .*; choose 4 ranks, each with as much memory$"),
        (Setting(), 20, 9, r"host's memory, .*; choose 16 ranks, each with as much memory$"),
        (Setting(), 20, 2, r"; no option of this program suffices: train a smaller model"),
    ],
)
def test_what_does_not_fit_names_moment_and_remedies(tmp_path, setting, gpu, host, words):
    with pytest.raises(MemoryError, match=r"^training needs about .* of the (GPU|host)'s memory") as error:
        check_memory(LLAMA, replace(setting, tokens=1024), gpu * GIB, host_of(tmp_path, host))
    assert re.search(words, str(error.value))


def test_options_of_trl_are_those_of_a_plan():
    sizes = {"per_device_train_batch_size": 4, "max_length": 4096, "gradient_accumulation_steps": 1, "world_size": 1}
    setting = setting_of(SimpleNamespace(**sizes, loss_type="nll", activation_checkpointing=True), "fp32", "fp32")
    assert setting == Setting(sequences=4, tokens=4096, micro_batches=1, ranks=1, loss="chunked", checkpointing=True)
    unlimited = SimpleNamespace(**sizes | {"max_length": None}, loss_type="sft", activation_checkpointing=False)
    assert setting_of(unlimited, "fp32", "fp32") == replace(setting, tokens=1024, loss="full", checkpointing=False)
