"""Scattering: every element of the sources reaches its tensor, bit by bit, by Triton and by plain torch."""

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gpu_arrays import BACKENDS, DEVICE, Launches, asked_for, needs_triton, offsets_with_gaps
from support.gpu_checks import check_scatter
from support.strategies import lengths

from superadam import gpu
from superadam.gpu import scatter
from superadam.kernels.dtypes import DTYPES


@given(st.data())
def test_every_element_arrives(data):
    """From any number of buffers, at any places in them, of one dtype or of several."""
    dtypes = data.draw(st.lists(st.sampled_from([*DTYPES]), min_size=1, max_size=3), "dtypes")
    sizes = data.draw(st.lists(lengths(), max_size=6), "lengths")
    gaps = data.draw(st.sampled_from([(), (64,), (3, 0, 40)]), "gaps")
    places, numel = offsets_with_gaps(sizes, gaps, data.draw(st.permutations(range(len(sizes))), "order"))
    starts = data.draw(st.sampled_from([(0,), (0, 1, 3)]), "starts")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    for name in BACKENDS:
        with asked_for(name):
            check_scatter(dtypes, sizes, places, numel, starts, seed)


@needs_triton
def test_many_tensors_take_one_launch():
    """From two buffers."""
    launches = Launches(scatter.scatter_kernel)
    targets = [torch.zeros(1 + n % 7, device=DEVICE) for n in range(100)]
    total = sum(one.numel() for one in targets)
    values = torch.arange(float(total), device=DEVICE).split([one.numel() for one in targets])
    sources = [*values[:40], *torch.cat(values[40:]).split([one.numel() for one in targets[40:]])]
    assert sources[39].untyped_storage().data_ptr() != sources[40].untyped_storage().data_ptr()
    with asked_for("triton"), mock.patch.object(scatter, "scatter_kernel", launches):
        gpu.scatter_values(sources, targets)
    assert launches.grids == [(100,)]
    assert torch.cat(targets).tolist() == list(range(total))


def test_layouts_and_version_counters(implementation):
    """Elements count in the order of memory, on both sides."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, device=DEVICE).permute(2, 0, 1))
    version = parameter._version
    buffer = torch.arange(30.0, device=DEVICE)
    for source in (buffer[3:27], buffer[3:27].view(6, 4), buffer[3:27].view(6, 4).t()):
        gpu.scatter_values([source], [parameter])
        assert parameter.data.permute(1, 2, 0).flatten().tolist() == list(range(3, 27))
        parameter.data.zero_()
    assert parameter._version == version


def test_nothing_to_scatter_is_allowed(implementation):
    empty = torch.zeros(0, device=DEVICE)
    gpu.scatter_values([], [])
    gpu.scatter_values([empty, empty], [empty, empty])
