"""Tests of random and of enumerated geometries."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def fewer(times: int, **others: Any) -> settings:
    """The profile's settings with so many times fewer examples, and ``others``; for costly tests."""
    return settings(max_examples=max(1, settings().max_examples // times), **others)
