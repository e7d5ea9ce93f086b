"""torch's default Adam on aarch64 has the bits of superadam where torch computes with NEON.

Run by `make arm-test` in the emulated Python; on x86-64 the ordinary tests compare with torch's fused Adam. torch uses
its SVE code only at a vector length of 256 bits, and rounds otherwise there.
"""

import itertools
import platform

import pytest
import torch

import superadam

LENGTH = 4096 + 64
"""A multiple of every vector length: torch rounds the elements of its scalar tail differently."""


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    # 1e-20 squares to a denormal, 1e15 is far from overflowing when squared; and many zeros.
    made = [torch.randn(LENGTH, generator=generator) * scale for scale in (1.0, 1e-3, 1e-20, 1e15)]
    return [gradient * (torch.rand(LENGTH, generator=generator) > 0.1) for gradient in made]


@pytest.mark.parametrize(
    ("amsgrad", "maximize", "decoupled", "weight_decay"),
    list(itertools.product([False, True], [False, True], [False, True], [0.0, 0.1])),
)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5)], ids=str)
def test_bits_of_torch(betas, amsgrad, maximize, decoupled, weight_decay):
    assert platform.machine() == "aarch64"
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"  # torch's name for NEON
    start = torch.randn(LENGTH, generator=torch.Generator().manual_seed(2))
    theirs = torch.nn.Parameter(start.clone())
    ours = torch.nn.Parameter(start.clone())
    settings = {"lr": 1e-3, "betas": betas, "amsgrad": amsgrad, "maximize": maximize, "weight_decay": weight_decay}
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **settings)
    optimizer = superadam.SpeculativeCPUAdam([ours], decoupled_weight_decay=decoupled, **settings)
    for step, gradient in enumerate(gradients(), start=1):
        theirs.grad, ours.grad = gradient.clone(), gradient.clone()
        reference.step()
        optimizer.step()
        expected, actual = reference.state[theirs], optimizer.state[ours]
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]:
            assert torch.equal(actual[name].view(torch.int32), expected[name].view(torch.int32)), f"{name}, step {step}"
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), f"parameter, step {step}"
