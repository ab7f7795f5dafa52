"""Values of a config.json: each is read by its key, in its exact type, or refused by its key.

Files of different families have different names for one value: :data:`NUM_LAYERS` and others here
have all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any, Final

from kvplan._checks import integer
from kvplan.describe.views import ITEMSIZE, dtype_name
from kvplan.errors import KVPlanError
from kvplan.models.tensors import MAX_COUNT

Config = Mapping[str, Any]

Keys = str | tuple[str, ...]
"""A key, or several names of one value: the first name that has a value counts."""

MAX_LAYERS: Final = 1 << 14

NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
LATENT: Final = ("kv_lora_rank", "qk_rope_head_dim")
KV_HEADS: Final = ("num_key_value_heads", "num_attention_groups", "multi_query_group_num")
HEAD_DIMS: Final = ("attention_head_dim", "head_dim", "kv_channels")
LAYER_LISTS: Final = ("layer_types", "layers_block_type")
DRAFTS: Final = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
)

SIZES: Final = frozenset((*NUM_LAYERS, *NUM_HEADS, *HIDDEN, *LATENT)) - {"num_heads"}
"""Keys that a file always states.

Only a nested decoder leaves them out if it has the defaults of its class.
"""


def integer_of(
    config: Config,
    keys: Keys,
    default: int | None = None,
    *,
    low: int = 1,
    high: int = MAX_COUNT,
) -> int:
    """Return the integer under a key.

    Raises ``CONFIG`` if there is none, or if it lies outside ``[low, high)``.

    >>> integer_of({"n_groups": None, "mamba_n_groups": 8}, ("n_groups", "mamba_n_groups"))
    8
    """
    key = stated_key(config, keys)
    value = config.get(key, default)
    if value is None:
        raise missing(config, key)
    try:
        return integer(value, key, low=low, high=high)
    except KVPlanError:
        raise unusable(key, f"an integer in [{low}, {high})", value) from None


def optional_integer_of(config: Config, keys: Keys) -> int | None:
    """Return the positive integer under a key, or None if the file lacks it or states null.

    No other value counts as a missing one. Raises ``CONFIG`` as :func:`integer_of` does.
    """
    is_stated = config.get(stated_key(config, keys)) is not None
    return integer_of(config, keys) if is_stated else None


def integers_of(values: Any, key: str, allowed: Collection[int], expected: str) -> list[int] | None:
    """Return the list of integers that a file has under a key, or None if it has none.

    Raises ``CONFIG``, with what is ``expected``, unless all are integers that are ``allowed``.

    >>> integers_of([1, 3], "full_attn_idxs", range(4), "layers of 0 to 3")
    [1, 3]
    """
    # Only null says that there is no list: an empty mapping or 0 is something else.
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise unusable(key, expected, values)
    for value in values:
        # Text and floats may look like an integer, and a bool may be equal to one.
        if type(value) is not int or value not in allowed:
            raise unusable(key, expected, values)
    return [*values]


def flag_of(config: Config, key: str, default: bool = False) -> bool:
    """Return the flag under a key, or ``default`` if the file lacks it or states null.

    Raises ``CONFIG`` for anything but true and false: the text "false" would count as true.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise unusable(key, "true or false", value)
    return value


def mapping_of(config: Config, key: str, contents: str = "keys") -> Mapping[Any, Any]:
    """Return the mapping under a key, which is empty if the file lacks it or states null.

    Raises ``CONFIG`` for anything else, with what the mapping has as ``contents``.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise unusable(key, f"a mapping of {contents}", value)
    return value


def dtype_of(config: Config, default: str, keys: Keys = ("dtype", "torch_dtype")) -> str:
    """Return the element type under a key.

    ``dtype`` takes precedence over ``torch_dtype``, as in transformers.
    """
    key = stated_key(config, keys)
    value = config.get(key)
    if value is None:
        value = default
    dtype = dtype_name(value)
    if dtype not in ITEMSIZE:
        raise unusable(key, f"a dtype of {', '.join(ITEMSIZE)}", value)
    return dtype


def stated_key(config: Config, keys: Keys) -> str:
    """Return the first of the keys that has a value, or else the first that file or family has."""
    if isinstance(keys, str):
        return keys
    with_value = [key for key in keys if config.get(key) is not None]
    known_keys = [key for key in keys if key in config]
    return next(itertools.chain(with_value, known_keys, keys))


def unusable(key: str, expected: str, value: Any, got: str = "") -> KVPlanError:
    """Return the error for a value that no model can have, by default in its own words."""
    action = f"use {key!r} of a model configuration"
    got = got or repr(value)
    return KVPlanError("CONFIG", action, expected=expected, got=got, key=key, value=value)


def missing(config: Config, key: str) -> KVPlanError:
    """Return the error for a key without a value."""
    of_type = f" of type {config.get('model_type')!r}"
    got = "null" if key in config else "no such key"
    return refusal(of_type, f"a value for key {key!r}", got, key=key)


def refusal(suffix: str, expected: str, got: str, hint: str = "", **details: Any) -> KVPlanError:
    """Return the error for a file that cannot be read. ``suffix`` says of which type it is."""
    action = f"read a model configuration{suffix}"
    return KVPlanError("CONFIG", action, expected=expected, got=got, hint=hint, **details)
