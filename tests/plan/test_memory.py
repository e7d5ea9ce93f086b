"""What fits, what does not, and what the answer says of it; sums are those of the scheduler."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from support.presets import PRESETS, peaks_found_once  # noqa: F401
from transformers import AutoConfig

from superadam.offload.needs import needs_of
from superadam.plan import machines
from superadam.plan.memory import RESUMING, SAVING, TRAINING, Memory, Setting, Subject, memory_of, total
from superadam.plan.remedies import remedies

pytestmark = pytest.mark.slow

Planned = tuple[Subject, Setting, Memory]


def planned(name: str, machine: str, **chosen: Any) -> Planned:
    preset = PRESETS[name]
    setting = replace(preset.setting, **chosen)
    subject = Subject.of(preset.config)
    return subject, setting, memory_of(subject, setting, machines.read(machine))


@pytest.fixture(scope="module")
def gpt_oss() -> Planned:
    return planned("gpt-oss-20b", "gh200", sequences=4, tokens=8192)


def test_whole_logits_of_gpt_oss_are_refused_and_named() -> None:
    subject, setting, memory = planned("gpt-oss-20b", "gh200", sequences=4, tokens=8192, loss="full")
    assert not memory.trains
    place, stage, size, limit = memory.problems[0]
    assert (place, stage, limit) == ("GPU", "head and loss", 96_000_000_000)
    assert round((size - memory.gpu[stage]["context and fragments"]) / 1e9) == 126
    assert remedies(subject, setting, machines.read("gh200"))[0].words == "--loss chunked"


def test_resuming_gpt_oss_is_refused_where_training_fits(gpt_oss: Planned) -> None:
    """Its logits are in chunks."""
    memory = gpt_oss[2]
    assert memory.trains
    assert max(map(total, memory.gpu.values())) < memory.gpu_limit
    assert not memory.resumes
    assert total(memory.host[RESUMING]) == pytest.approx(544e9, rel=0.005)
    assert total(memory.host[TRAINING]) - memory.waiting == pytest.approx(307e9, rel=0.005)


def test_sums_of_the_host_are_those_of_the_scheduler(gpt_oss: Planned) -> None:
    subject, _, memory = gpt_oss
    each = [needs_of(one, is_on_host=False) for one in subject.model.parameters()]
    host = memory.host[TRAINING]
    assert host["state"] == sum(one.state for one in each)
    assert host["gradients"] == sum(one.pending for one in each)
    assert host["lists of uncertain elements"] == sum(one.lists for one in each)


@given(scales=st.lists(st.floats(0.0, 3.0), min_size=40, max_size=40))
def test_measured_categories_replace_those_of_a_plan(gpt_oss: Planned, scales: list[float]) -> None:
    """It fits if no stage of the measured ones exceeds its limit, whatever was planned."""
    memory, numbers = gpt_oss[2], iter(scales)
    gpu, host = copy.deepcopy((memory.gpu, memory.host))
    for stage in [*gpu.values(), *host.values()]:
        stage.update({name: int(next(numbers, 1.0) * size) for name, size in stage.items()})
    found = replace(memory, gpu=gpu, host=host)
    fits = all(total(one) <= found.gpu_limit for one in found.gpu.values())
    assert found.trains is (fits and total(found.host[TRAINING]) <= found.host_limit)


def test_layers_are_found_by_their_number_whatever_their_list_is_called() -> None:
    """Ranks gather one of them: if none were found, all of the model would count as gathered."""
    config = AutoConfig.for_model("gpt2", n_layer=3, n_embd=64, n_head=4, vocab_size=500)
    subject = Subject.of(config)
    layer = sum(parameter.numel() for parameter in subject.model.transformer.h[0].parameters())
    assert (subject.unit, subject.root) == (layer, subject.parameters - 3 * layer)


def test_ranks_divide_what_they_shard_and_train_on_tokens_of_their_own() -> None:
    assert Setting(2, 100, micro_batches=3, ranks=4).tokens_of_step == 2400
    machine = machines.read("h200")
    subject = Subject.of(PRESETS["qwen3-30b-a3b"].config)
    two, four = (memory_of(subject, Setting(ranks=ranks), machine) for ranks in (2, 4))
    assert four.host[TRAINING]["state"] == pytest.approx(two.host[TRAINING]["state"] / 2, rel=1e-3)
    layer = (subject.parameters - subject.root) / subject.config.num_hidden_layers
    for memory in (two, four):  # two layers, and what belongs to none, in bf16
        assert memory.gpu["forward"]["gathered weights"] == 2 * (subject.root + 2 * layer)


def test_one_memory_holds_both(gpt_oss: Planned) -> None:
    subject, setting, _ = gpt_oss
    memory = memory_of(subject, setting, machines.read("mi300a"))
    problems = {stage: both for place, stage, both, _ in memory.problems if place == "GPU and host"}
    assert problems[TRAINING] == total(memory.host[TRAINING]) + memory.gpu_limit - memory.free
    assert problems[SAVING] > problems[TRAINING]
    assert problems[RESUMING] > total(memory.host[RESUMING])


def test_state_that_is_smaller_already_is_made_smaller_still() -> None:
    subject, setting, memory = planned("llama-3.1-8b", "gh200", moments="8bit")
    machine = machines.read("gh200")
    smaller = memory_of(subject, replace(setting, master="24bit"), machine)
    limit = (total(smaller.host[TRAINING]) + total(memory.host[TRAINING])) / 2
    machine = replace(machine, host_memory=replace(machine.host_memory, value=limit))
    words = [remedy.words for remedy in remedies(subject, setting, machine)]
    assert [each for each in words if "--moments" in each] == ["--moments 8bit --master 24bit"]


def test_accumulated_gradients_stay_on_the_gpu(gpt_oss: Planned) -> None:
    subject, setting, memory = gpt_oss
    accumulated = memory_of(subject, replace(setting, micro_batches=2), machines.read("gh200"))
    assert total(accumulated.gpu["forward"]) - total(memory.gpu["forward"]) == 2 * subject.parameters


def test_weights_that_flow_leave_the_gpu() -> None:
    _, _, memory = planned("phi-4", "rtx4090-workstation", sequences=1, flows=True)
    assert memory.trains
    assert memory.waiting == 0
    assert memory.gpu["forward"]["weights"] == 0
    assert memory.host[TRAINING]["weights"] == 2 * PRESETS["phi-4"].parameters
