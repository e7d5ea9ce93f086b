"""Optimizers and schedulers that share parameters: each makes the steps that it makes alone."""

import pytest
from support.overlap import loss_of, mlp
from support.programs import OTHERS, Program, Run, Setting, differences, in_settings

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def together(run: Run, *, is_alternating: bool = False) -> None:
    model = mlp(run.dtype)
    every, some = list(model.parameters()), list(model.parameters())[2:]
    optimizers = [run.adamw(every, lr=0.05), run.adamw(some, lr=0.02)]
    with run.overlap(optimizers[0], model) as first, run.overlap(optimizers[1], model) as second:
        for seed in range(12):
            loss_of(model, seed).backward()
            for optimizer in optimizers[seed % 2 :][:1] if is_alternating else optimizers:
                optimizer.step()
            model.zero_grad()
            run.see(parameters=every)
        assert first is None or first.statistics.buckets + second.statistics.buckets > 0


def alternating(run: Run) -> None:
    together(run, is_alternating=True)


FP32 = [one for one in OTHERS if one.name == "fp32-simulated"]


@in_settings([Program("together", together, settings=FP32), Program("alternating", alternating, limit=20.0)])
def test_two_optimizers_with_schedulers_over_the_same_parameters(program: Program, settings: list[Setting]) -> None:
    assert differences(program, settings) == []
