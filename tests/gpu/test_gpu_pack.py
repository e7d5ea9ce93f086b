"""Packing: what arrives in the buffer, and its norm, have the bits of the CPU kernels, by Triton and by plain torch."""

import itertools
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu_arrays import BACKENDS, DEVICE, Launches, asked_for, needs_triton, offsets_with_gaps
from support.gpu_checks import check_pack, stored_gradient, telling
from support.intervals import HALVES
from support.kernel_arrays import HALVES_AND_FLOAT32
from support.strategies import Magnitudes

from superadam import gpu
from superadam.gpu import language, obstacle, pack
from superadam.kernels.native import CHUNK, Dtype

ON_CPU, ON_GPU = torch.device("cpu"), torch.device("cuda")
LENGTHS = st.sampled_from([0, 1, 15, 16, 17, 255, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17])


def chunks_per_program(number: int) -> AbstractContextManager[object]:
    """Return a context for programs of another size, in the interpreter, whose time does not depend on it.

    Compiled programs keep theirs: larger ones take minutes to compile, and spill.
    """
    return mock.patch.object(pack, "CHUNKS_PER_PROGRAM", number) if language.IS_INTERPRETED else nullcontext()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=settings.default.max_examples // 10)
@given(st.data())
def test_packing_has_the_bits_of_the_cpu(data):
    link = data.draw(st.sampled_from([*HALVES_AND_FLOAT32, Dtype.FLOAT64]), "link")
    dtype = link if link is Dtype.FLOAT64 else data.draw(st.sampled_from(HALVES_AND_FLOAT32), "dtype")
    lengths = data.draw(st.lists(LENGTHS, min_size=1, max_size=5), "lengths")
    kinds = [data.draw(st.sampled_from(Magnitudes)) for _ in lengths]
    seeds, sprinkle = st.integers(0, 2**32 - 1), st.booleans()
    stored = [
        stored_gradient(data.draw(seeds), length, kind, dtype, data.draw(sprinkle))
        for length, kind in zip(lengths, kinds, strict=True)
    ]
    gaps = data.draw(st.sampled_from([(), (64,), (3, 0, 40)]), "gaps")
    places, numel = offsets_with_gaps(lengths, gaps, data.draw(st.permutations(range(len(lengths))), "order"))
    starts = data.draw(st.sampled_from([(0,), (0, 1, 3)]), "starts")
    with_norm = data.draw(st.integers(0, 9)) > 0
    per_program = data.draw(st.sampled_from([2, 8]), "chunks per program")
    for name in BACKENDS:
        with asked_for(name), chunks_per_program(per_program):
            check_pack(stored, dtype, link, places, numel, starts, with_norm and name == "triton")


@pytest.mark.parametrize(
    ("dtype", "link"),
    [*itertools.product(HALVES, HALVES_AND_FLOAT32), *itertools.product([Dtype.FLOAT32], HALVES)],
    ids=lambda dtype: dtype.name.lower(),
)
def test_every_half_and_rounding_beside_every_tie(implementation, dtype, link):
    """As tensors of 16 rows of lanes: the interpreter takes as long for one program as for a large one."""
    values = telling(dtype, link)
    pieces = np.split(values, range(256, len(values), 256))
    with chunks_per_program(1 << (len(pieces) - 1).bit_length()):
        check_pack(pieces, dtype, link, range(0, len(values), 256), len(values))


@needs_triton
def test_many_small_tensors_take_one_launch():
    lengths = [1 + number % 40 for number in range(300)]
    stored = [stored_gradient(n, length, Magnitudes.ORDINARY, Dtype.FLOAT32, False) for n, length in enumerate(lengths)]
    places, numel = offsets_with_gaps(lengths, (), range(len(lengths)))
    launches = Launches(pack.pack_kernel)
    with asked_for("triton"), chunks_per_program(64), mock.patch.object(pack, "pack_kernel", launches):
        check_pack(stored, Dtype.FLOAT32, Dtype.FLOAT32, places, numel)
        assert launches.grids == [(-(-300 // pack.CHUNKS_PER_PROGRAM),)]


def test_nothing_to_pack_is_allowed(implementation):
    empty, sums, counts = (torch.empty(0, dtype=d, device=DEVICE) for d in (torch.float32, torch.float64, torch.int64))
    norm = () if implementation == "torch" else (sums, counts)
    gpu.pack_gradients([], [], empty, *norm)
    gpu.pack_gradients([empty, empty], [0, 0], empty, *norm)


# -- which implementation runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.subprocess
def test_without_triton_or_a_compiler_torch_packs_and_says_so_once():
    """On each device; whatever Triton raises is noticed before training."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from superadam import gpu\n"
        "from superadam.gpu import language\n"
        "for _ in range(2): print(gpu.obstacle(torch.device('cuda')))\n"
        "buffer = torch.zeros(4)\n"
        "gpu.pack_gradients([torch.ones(3)], [1], buffer)\n"
        "gpu.scatter_values([buffer[1:]], [torch.zeros(3)])\n"
        "print(buffer.tolist())\n"
        "class Probe:\n"
        "    asked = 0\n"
        "    def __getitem__(self, grid):\n"
        "        Probe.asked += 1\n"
        "        raise RuntimeError('Failed to find C compiler.\\nPlease specify via CC')\n"
        "language.MISSING, language.IS_INTERPRETED, language.probe = None, False, Probe()\n"
        "torch.cuda.device = lambda device: torch.no_grad()\n"
        "for _ in range(3): reason = gpu.obstacle(torch.device('cuda', 0))\n"
        "print(Probe.asked, reason)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SUPERADAM_", "TRITON_"))}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("Triton cannot be imported") for line in lines[:2])
    assert lines[2:] == [
        "[0.0, 1.0, 1.0, 1.0]",
        "1 Triton cannot launch a kernel (RuntimeError: Failed to find C compiler.)",
    ]
    for device in ("cuda,", "cuda:0,"):
        assert done.stderr.count(f"superadam packs and scatters with plain torch on {device}") == 1


def test_an_unknown_implementation_is_refused(monkeypatch):
    monkeypatch.setenv("SUPERADAM_GPU", "fast")
    with pytest.raises(ValueError, match="SUPERADAM_GPU is 'fast', expected 'torch'; unset it"):
        obstacle(ON_CPU)


def test_torch_can_be_asked_for(monkeypatch, caplog):
    monkeypatch.setenv("SUPERADAM_GPU", "torch")
    assert obstacle(ON_GPU) == "SUPERADAM_GPU=torch asks for plain torch"
    assert not caplog.records


@needs_triton
def test_memory_out_of_reach_is_told(monkeypatch, caplog):
    monkeypatch.setattr(language, "IS_INTERPRETED", True)
    monkeypatch.setattr(language, "_told", set())
    assert "interpreter (TRITON_INTERPRET) do not reach memory of cuda" in obstacle(ON_GPU)
    assert len(caplog.records) == 1
    assert obstacle(ON_CPU) is None
    monkeypatch.setattr(language, "IS_INTERPRETED", False)
    assert obstacle(ON_CPU) == "Triton's compiled kernels do not reach memory of cpu"
    monkeypatch.setattr(language, "_obstacle_on", lambda device: None)
    assert obstacle(ON_GPU) is None
    assert len(caplog.records) == 1


@needs_triton
def test_gradients_of_several_dtypes_are_refused_before_anything_is_read():
    packed = torch.zeros(128, device=DEVICE)
    with pytest.raises(ValueError, match="gradients of 2 dtypes, expected one; pack those of each"):
        gpu.pack_gradients([torch.ones(64, device=DEVICE), torch.ones(64, device=DEVICE).half()], [0, 64], packed)
    assert not packed.any()
