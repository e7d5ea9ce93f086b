"""The implementations that pack and scatter."""

import pytest
from support.gpu_arrays import BACKENDS, asked_for


@pytest.fixture(params=BACKENDS)
def implementation(request):
    with asked_for(request.param):
        yield request.param
