"""Memory for the engines of these tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def zeros() -> Any:
    """Makes memory that lives as long as its test, which reads it by address."""
    owned: list[Any] = []

    def make(*shape: int, dtype: Any = np.int32) -> Any:
        owned.append(np.zeros(shape, dtype))
        return owned[-1]

    return make
