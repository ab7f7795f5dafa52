"""Stands in for a library of sound files, which SGLang's server imports and a request of tokens does not need."""

from __future__ import annotations


def available_formats() -> dict[str, str]:
    """No formats."""
    return {}
