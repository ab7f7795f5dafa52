"""Keys: how the values of a config.json are read, and refused with the key that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvplan._checks import integer
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError
from kvplan.models.tensors import MAX_COUNT

MAX_LAYERS: Final = 1 << 14

Config = Mapping[str, Any]


def count(config: Config, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
    """The integer under ``key``. Raises ``CONFIG`` where there is none, or none in ``[low, high)``.

    >>> count({"num_hidden_layers": 32}, "num_hidden_layers")
    32
    """
    value = config.get(key, default)
    if value is None:
        raise KVPlanError(
            "CONFIG",
            f"read a model configuration of type {config.get('model_type')!r}",
            expected=f"a value for key {key!r}",
            got="null" if key in config else "no such key",
            key=key,
        )
    try:
        return integer(value, key, low=low, high=high)
    except KVPlanError:
        raise unusable(key, f"an integer in [{low}, {high})", value) from None


def first_of(config: Config, keys: Sequence[str]) -> str:
    """The first of ``keys`` with a value, or else the first: newer and older names of one thing.

    >>> first_of({"n_groups": None, "mamba_n_groups": 1}, ("n_groups", "mamba_n_groups"))
    'mamba_n_groups'
    """
    return next((key for key in keys if config.get(key) is not None), keys[0])


def dtype(config: Config, default: str, keys: Sequence[str] = ("dtype", "torch_dtype")) -> str:
    """The element type under the first of ``keys`` that has a value; ``dtype`` counts first in transformers too.

    >>> dtype({"torch_dtype": "torch.float16"}, "bfloat16")
    'float16'
    """
    given = config.get(first_of(config, keys))
    given = default if given is None else given
    found = str(given).removeprefix("torch.")
    if found not in ITEMSIZE:
        raise unusable(keys[0], f"a dtype of {', '.join(ITEMSIZE)}", given)
    return found


def unusable(key: str, expected: str, value: Any) -> KVPlanError:
    """The error for a value that no model can have."""
    what = f"use {key!r} of a model configuration"
    return KVPlanError("CONFIG", what, expected=expected, got=repr(value), key=key, value=value)
