"""What tests of fleets share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Connectors log each fault that they suffer."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
