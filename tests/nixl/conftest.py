"""The devices that the tests run on: main memory, and the first GPU where there is one."""

from __future__ import annotations

import pytest

try:
    import torch
except ImportError:
    has_gpu = False
else:
    has_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)  # more threads wait for each other on busy cores

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not has_gpu, reason="no GPU"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where memory is, as torch names it."""
    return str(request.param)
