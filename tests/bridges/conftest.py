"""Memory for the engines of these tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def zeros() -> Any:
    """Makes memory that lives as long as what keeps it: the engine's objects, or the worker that describes it."""

    def make(*shape: int, dtype: Any = np.int32) -> Any:
        return np.zeros(shape, dtype)

    return make
