"""Reading a Hugging Face config.json: what each layer caches, or a refusal that names the key.

:func:`read` applies what the file's :class:`Family` says; the families are in :mod:`kvplan.models.families`. The other
functions read single values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError
from kvplan.models.tensors import FULL, MAX_COUNT, SLIDING, STATE, Layer, Layers

MAX_LAYERS: Final = 1 << 14

Config = Mapping[str, Any]

Keys = str | tuple[str, ...]
"""A key, or several names of one value: the first name that has a value counts."""


BOTH: Final = "both"
"""The kind of a layer that attends and has a state. The kinds of other layers are the names of their groups."""

NONE: Final = "none"
"""The kind of a layer without a cache."""

CacheReader = Callable[[Config], Layer]
"""Reads the tensors that a layer of one kind caches. ``dtype`` of the configuration is that of the weights."""

LayerRule = Callable[[Config], list[str]]
"""The kind of each layer of a file that has no list of layer types."""

LAYER_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": FULL,
        "sliding_attention": SLIDING,
        "linear_attention": STATE,
        "hybrid": BOTH,
        "moe": NONE,
        "mlp": NONE,
        "indexed_attention": FULL,
        "attention": FULL,
        "mamba": STATE,
        "deepseek_sparse_attention": FULL,
    }
)
"""The kind of a layer by its type; the last three are older names (``remap_legacy_layer_types`` of transformers)."""


@attrs.frozen
class Family:
    """How to read the files of one ``model_type``: what each kind of layer caches, and of which kind each layer is.

    ``layers`` is the rule for files without a list of layer types; ``lists`` are the keys that such a list may have.
    ``defaults`` are the values of keys that a file leaves out. ``last`` is the kind of the last layer, whatever the
    list or the rule says.
    """

    caches: Mapping[str, CacheReader]
    layers: LayerRule
    defaults: Config = attrs.field(factory=dict)
    lists: Keys | None = "layer_types"
    last: str | None = None


def read(
    config: Any, families: Mapping[str, Family], nested: Mapping[str, str], drafts: bool = False
) -> tuple[str, Layers, Layers, str]:
    """The model type, the tensors of each layer and of each draft layer, and the dtype of the weights.

    ``config`` is a parsed config.json. A decoder under ``text_config`` is read as a model of its own; if it has no
    ``model_type``, ``nested`` has it by the outer one. The last ``num_kv_shared_layers`` layers use the cache of an
    earlier layer, so they have no tensors. With ``drafts``, there are ``num_nextn_predict_layers`` draft layers
    (multi-token prediction), with the tensors of the model's attention layers.

    Raises ``TYPE`` if ``config`` is not a mapping, ``CONFIG`` for an unknown model type, a missing key or an unusable
    value.

    >>> from kvplan.models.families import FAMILIES, NESTED
    >>> keys = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    >>> model_type, layers, _, weights = read(keys, FAMILIES, NESTED)
    >>> len(layers), layers[0][0].axes, weights
    (61, (('dim', 576),), 'bfloat16')
    """
    config, family = _decoder(config, families, nested)
    caches = {kind: reader(config) for kind, reader in family.caches.items()}
    kinds = _kinds(config, family)
    if FULL not in kinds:  # if all layers slide, they form the one group that they form if none does
        caches[SLIDING] = tuple(attrs.evolve(tensor, group=FULL) for tensor in caches.get(SLIDING, ()))
    owners = len(kinds)
    if "num_kv_shared_layers" in family.defaults:
        owners -= count(config, "num_kv_shared_layers", low=0, high=len(kinds))
        if not {*kinds[owners:]} <= {*kinds[:owners]}:
            expected = "for each layer that shares a cache, an earlier layer of the same kind that has one"
            raise unusable("num_kv_shared_layers", expected, config["num_kv_shared_layers"])
    layers = tuple(caches[kind] if layer < owners else () for layer, kind in enumerate(kinds))
    number = count(config, "num_nextn_predict_layers", high=MAX_LAYERS) if drafts else 0
    if number and FULL not in caches:
        raise unusable("num_nextn_predict_layers", "none in a model without attention layers", number)
    return config["model_type"], layers, (caches.get(FULL, ()),) * number, config["dtype"]


def _decoder(config: Any, families: Mapping[str, Family], nested: Mapping[str, str]) -> tuple[dict[str, Any], Family]:
    """The keys of the decoder with the defaults of its family and the weights' ``dtype``, and the family."""
    if not isinstance(config, Mapping):
        raise KVPlanError("TYPE", "read a model configuration", expected="a mapping", got=type(config).__name__)
    outer, weights = config, dtype(config, "bfloat16")
    if isinstance(config.get("text_config"), Mapping):
        config = {"model_type": nested.get(str(config.get("model_type"))), **config["text_config"]}
        weights = dtype(config, weights)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        raise KVPlanError(
            "CONFIG",
            "read a model configuration",
            expected=f"model_type of {', '.join(families)}",
            got=repr(model_type if model_type is not None else outer.get("model_type")),
            hint="describe the caches of any other model as Views of Workers",
            model_type=model_type,
        )
    family = families[model_type]
    return {**family.defaults, **config, "dtype": weights}, family


def _kinds(config: Config, family: Family) -> list[str]:
    """The kind of each layer: as the file lists them, or by the rule of the family."""
    key = key_of(config, family.lists) if family.lists else ""
    types = config.get(key)
    if types is None:
        kinds = family.layers(config)
    else:
        known = [layer_type for layer_type, kind in LAYER_TYPES.items() if kind in family.caches]
        listed = isinstance(types, list | tuple) and 0 < len(types) <= MAX_LAYERS and {*map(str, types)} <= {*known}
        layers = count(config, "num_hidden_layers", len(types) if listed else None, high=MAX_LAYERS)
        if not listed or len(types) != layers:
            raise unusable(key, f"{layers} of {', '.join(known)}", types)
        kinds = [LAYER_TYPES[layer_type] for layer_type in types]
    return kinds if family.last is None else [*kinds[:-1], family.last]


def shipped_configs() -> dict[str, Any]:
    """The configurations that come with this package, by model name in lower case, reduced to the keys that matter.

    >>> shipped_configs()["llama-3.1-8b"]["num_key_value_heads"]
    8
    """
    found: dict[str, Any] = json.loads(resources.files("kvplan.models").joinpath("shipped.json").read_bytes())
    return found


def count(config: Config, keys: Keys, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
    """The integer under a key. Raises ``CONFIG`` if there is none, or if it lies outside ``[low, high)``.

    >>> count({"n_groups": None, "mamba_n_groups": 8}, ("n_groups", "mamba_n_groups"))
    8
    """
    key = key_of(config, keys)
    value = config.get(key, default)
    if value is None:
        what = f"read a model configuration of type {config.get('model_type')!r}"
        got = "null" if key in config else "no such key"
        raise KVPlanError("CONFIG", what, expected=f"a value for key {key!r}", got=got, key=key)
    try:
        return integer(value, key, low=low, high=high)
    except KVPlanError:
        raise unusable(key, f"an integer in [{low}, {high})", value) from None


def dtype(config: Config, default: str, keys: Keys = ("dtype", "torch_dtype")) -> str:
    """The element type under a key. ``dtype`` takes precedence over ``torch_dtype``, as in transformers."""
    given = config.get(key_of(config, keys))
    given = default if given is None else given
    found = str(given).removeprefix("torch.")
    if found not in ITEMSIZE:
        raise unusable(keys if isinstance(keys, str) else keys[0], f"a dtype of {', '.join(ITEMSIZE)}", given)
    return found


def key_of(config: Config, keys: Keys) -> str:
    """The first of the keys that has a value, or else the first."""
    if isinstance(keys, str):
        return keys
    return next((key for key in keys if config.get(key) is not None), keys[0])


def unusable(key: str, expected: str, value: Any) -> KVPlanError:
    """The error for a value that no model can have."""
    what = f"use {key!r} of a model configuration"
    return KVPlanError("CONFIG", what, expected=expected, got=repr(value), key=key, value=value)
