"""`superadam.cli.train.verification`: the reference agrees with a right run and notices each single fault."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training_runs import DEVICES, tiny_trainer

from superadam import StepKind, StepOutcome
from superadam.cli.train import verification
from superadam.cli.train.loop import Trainer
from superadam.cli.train.presets import PRESETS
from superadam.cli.train.verification import NORM_TOLERANCE, Reference, Verification, count_differing
from superadam.kernels import native
from superadam.state.parameter import Master, Moments, Storage
from superadam.testing import round_by_thresholds

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def reference_of(trainer: Trainer) -> Reference:
    """Return the reference of a trainer that is at work."""
    assert trainer.reference is not None
    return trainer.reference


def verified_steps(trainer: Trainer, steps: int) -> Verification:
    """Run some steps with a NaN in the second one, and compare."""
    with trainer:
        for number in range(steps):
            trainer.step(inject_nan=number == 1)
        return reference_of(trainer).compare()


def feed(reference: Reference, gradients: Sequence[torch.Tensor]) -> None:
    """Run a backward that gives each parameter this gradient."""
    for parameter in reference._parameters:
        parameter.grad = None
    loss = sum((p * gradient).sum() for p, gradient in zip(reference._parameters, gradients, strict=True))
    loss.backward()  # type: ignore[union-attr]


def check_right(trainer: Trainer, steps: int) -> None:
    """Check that a run of committed, clipped and skipped steps differs in nothing."""
    found = verified_steps(trainer, steps)
    assert (found.elements, found.elements_differing, found.parameters_differing) == (3 * trainer.parameters, 0, 0)
    assert found.verdicts_differing == 0
    assert found.norm_max_relative_difference <= NORM_TOLERANCE
    assert {record.kind for record in trainer.history.steps} == set(StepKind)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("master", ["fp32", "24bit"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_right_run_differs_in_nothing(
    dtype: str,
    moments: str,
    master: str,
    overlap: bool,
    checkpointing: bool,
    tied: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = PRESETS["tiny"]
    other = dataclasses.replace(tiny, shape=dataclasses.replace(tiny.shape, tied=tied), checkpointing=checkpointing)
    monkeypatch.setitem(PRESETS, "tiny", other)
    options = {"dtype": dtype, "moments": moments, "master": master, "overlap": overlap, "device": device}
    check_right(tiny_trainer(is_verified=True, **options), 8)


def test_run_of_skipped_steps_alone_differs_in_nothing() -> None:
    with tiny_trainer(is_verified=True) as trainer:
        trainer.step(inject_nan=True)
        found = reference_of(trainer).compare()
    assert found.elements > 0
    assert found.elements_differing + found.parameters_differing + found.verdicts_differing == 0


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one fp32 element."""
    tensor.view(-1).view(torch.int32)[index] ^= 1 << bit


@pytest.mark.parametrize("bit", [0, 22])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_planted_bit_is_one_differing_element(dtype: str, key: str, bit: int) -> None:
    with tiny_trainer(is_verified=True, dtype=dtype) as trainer:
        trainer.step()
        parameter = trainer.optimizer.param_groups[0]["params"][1]
        state = trainer.optimizer.state[parameter]
        tensor = state.get(key, parameter.detach())
        flip(tensor, tensor.numel() - 1, bit)
        assert reference_of(trainer).compare().elements_differing == 1


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_one_planted_bit_of_a_moment_in_bf16_is_one_differing_element(key: str) -> None:
    with tiny_trainer(is_verified=True, moments="bf16") as trainer:
        trainer.step()
        tensor = trainer.optimizer.state[trainer.optimizer.param_groups[0]["params"][1]][key]
        tensor.view(-1).view(torch.int16)[-1] ^= 1
        assert reference_of(trainer).compare().elements_differing == 1


def test_every_way_to_store_state_has_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = PRESETS["tiny"]
    in_blocks = dataclasses.replace(tiny, shape=dataclasses.replace(tiny.shape, width=64, feed_forward=64))
    monkeypatch.setitem(PRESETS, "tiny", in_blocks)
    for storage in itertools.starmap(Storage, itertools.product(Moments, Master)):
        with tiny_trainer(is_verified=True, moments=storage.moments.value, master=storage.master.value) as trainer:
            assert any(storage.of(parameter) == storage for parameter in trainer.model.parameters())
            for _ in range(3):
                trainer.step()
            found = reference_of(trainer).compare()
        assert (found.elements, found.elements_differing) == (3 * trainer.parameters, 0)
        assert found.parameters_differing == 0


def test_moments_that_are_rounded_otherwise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To nearest, or by the thresholds of another step."""

    def later(values: torch.Tensor, step: int, bits: int) -> torch.Tensor:
        return round_by_thresholds(values, step + 1, bits)

    def to_nearest(values: torch.Tensor, step: int, bits: int) -> torch.Tensor:
        return values.bfloat16().float()

    for other in (later, to_nearest):
        with tiny_trainer(is_verified=True, moments="bf16") as trainer:
            monkeypatch.setattr(verification, "round_by_thresholds", other)
            trainer.step()
            assert reference_of(trainer).compare().elements_differing > trainer.parameters // 4


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # it is overridden here, to plant the bit
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_planted_bit_in_the_models_parameter_is_noticed_after_the_step(
    dtype: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(is_verified=True, dtype=dtype, max_grad_norm=math.inf, overlap=overlap)
    step = trainer.optimizer.step

    def step_and_flip() -> None:
        step()
        if trainer.scheduler is not None:
            trainer.scheduler.synchronize()
        parameter = trainer.optimizer.param_groups[0]["params"][1]
        integers = torch.int16 if dtype == "bf16" else torch.int32
        parameter.data.view(-1).view(integers)[3] ^= 1

    monkeypatch.setattr(trainer.optimizer, "step", step_and_flip)
    with trainer:
        trainer.step()
        assert reference_of(trainer).compare().parameters_differing == 1


def test_wrong_hyperparameter_is_noticed() -> None:
    with tiny_trainer(is_verified=True) as trainer:
        trainer.step()
        trainer.step()
        trainer.optimizer.param_groups[0]["maximize"] = True  # the reference knows nothing of it
        trainer.step()
        assert reference_of(trainer).compare().elements_differing > 0


@pytest.mark.parametrize(
    ("change", "verdicts", "is_norm_off"),
    [
        ({"kind": StepKind.COMMITTED}, 1, False),
        ({"kind": StepKind.SKIPPED}, 1, False),
        ({"clip_coefficient": 1.0}, 1, False),
        ({"clip_coefficient": 0.25}, 1, False),
        ({"grad_norm": 3.0}, 0, True),
        ({"grad_norm": math.nan}, 0, True),
        ({}, 0, False),
    ],
)
def test_wrong_outcome_is_noticed(change: dict[str, object], verdicts: int, is_norm_off: bool) -> None:
    trainer = tiny_trainer(dtype="fp32", max_grad_norm=0.5)
    reference = Reference(trainer.optimizer, trainer.model)
    gradients = [torch.zeros_like(parameter) for parameter in reference._parameters]
    gradients[0].view(-1)[:2] = torch.tensor([3.0, 4.0])
    coefficient = float(np.float32(0.5 / (5.0 + 1e-6)))
    outcome = StepOutcome(StepKind.CLIPPED, 5.0, coefficient)
    feed(reference, gradients)
    reference.step(dataclasses.replace(outcome, **change))  # type: ignore[arg-type]
    found = reference.compare()
    assert found.verdicts_differing == verdicts
    assert (not found.norm_max_relative_difference <= NORM_TOLERANCE) is is_norm_off


def test_skipping_is_the_only_right_verdict_over_a_nan() -> None:
    trainer = tiny_trainer(dtype="fp32")
    reference = Reference(trainer.optimizer, trainer.model)
    for kind, differing in ((StepKind.SKIPPED, 0), (StepKind.COMMITTED, 1)):
        feed(reference, [torch.full_like(parameter, math.nan) for parameter in reference._parameters])
        reference.step(StepOutcome(kind, math.nan, 1.0))
        assert reference._verdicts_differing == differing


@pytest.mark.parametrize(("moments", "master"), [("fp32", "fp32"), ("bf16", "24bit"), ("8bit", "fp32")])
def test_reference_never_runs_our_kernels(moments: str, master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(moments=moments, master=master)
    with trainer:
        trainer.step()
    reference = Reference(trainer.optimizer, trainer.model)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the reference called superadam's kernels")

    monkeypatch.setattr(native, "run", refuse)
    feed(reference, [torch.ones_like(parameter) for parameter in reference._parameters])
    reference.step(StepOutcome(StepKind.CLIPPED, 1.0, 0.5))


def test_closed_reference_takes_nothing() -> None:
    with tiny_trainer(is_verified=True) as trainer:
        trainer.step()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())
    assert reference_of(trainer).compare().elements_differing == 0


@pytest.mark.parametrize(
    "change",
    [
        {"elements_differing": 1},
        {"parameters_differing": 1},
        {"verdicts_differing": 1},
        {"norm_max_relative_difference": 2 * NORM_TOLERANCE},
        {"norm_max_relative_difference": math.nan},
    ],
)
def test_any_difference_is_a_failure(change: dict[str, float]) -> None:
    good = Verification(300, 0, 0, 0, 1e-15)
    assert not good.is_failed
    assert dataclasses.replace(good, **change).is_failed  # type: ignore[arg-type]


NAN_PATTERNS = st.sampled_from([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF])
PATTERNS = st.one_of(NAN_PATTERNS, st.sampled_from([0, 0x80000000, 0x7F800000, 0x00000001]), st.integers(0, 2**32 - 1))


@given(
    pairs=st.lists(st.tuples(PATTERNS, PATTERNS), max_size=40), same=st.lists(st.booleans(), min_size=40, max_size=40)
)
def test_count_is_that_of_bit_patterns_with_nan_equal_to_nan(pairs: list[tuple[int, int]], same: list[bool]) -> None:
    pairs = [(a, a) if keep else (a, b) for (a, b), keep in zip(pairs, same, strict=False)]
    columns = [np.array([pair[side] for pair in pairs], dtype=np.uint32) for side in (0, 1)]
    values: list[npt.NDArray[np.float32]] = [column.view(np.float32) for column in columns]
    expected = sum(
        a != b and not (math.isnan(x) and math.isnan(y)) for (a, b), x, y in zip(pairs, *values, strict=True)
    )
    assert count_differing(torch.from_numpy(values[0]), torch.from_numpy(values[1])) == expected
