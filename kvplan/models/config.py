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
from kvplan._text import meant
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError
from kvplan.models.tensors import FULL, MAX_COUNT, SLIDING, STATE, Layer, Layers

MAX_LAYERS: Final = 1 << 14

Config = Mapping[str, Any]

Keys = str | tuple[str, ...]
"""A key, or several names of one value: the first name that has a value counts."""

CacheReader = Callable[[Config], Layer]
"""Reads the tensors that a layer of one kind caches. ``dtype`` of the configuration is that of the weights."""

LayerRule = Callable[[Config], list[str]]
"""The kind of each layer of a file that has no list of layer types."""

BOTH: Final = "both"
"""The kind of a layer that attends and has a state. The kinds of other layers are the names of their groups."""

NONE: Final = "none"
"""The kind of a layer without a cache."""

LAYER_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": FULL,
        "sliding_attention": SLIDING,
        "chunked_attention": SLIDING,
        "indexed_attention": FULL,
        "linear_attention": STATE,
        "conv": STATE,
        "hybrid": BOTH,
        "moe": NONE,
        "mlp": NONE,
        "attention": FULL,
        "mamba": STATE,
        "recurrent": STATE,
        "deepseek_sparse_attention": FULL,
    }
)
"""The kind of a layer by its type; the last four are older names (``remap_legacy_layer_types`` of transformers)."""

NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
SIZES: Final = frozenset((*NUM_LAYERS, *NUM_HEADS, *HIDDEN, "kv_lora_rank", "qk_rope_head_dim")) - {"num_heads"}
"""Keys that a file always states. Only a nested decoder leaves them out if it has the defaults of its class."""

ANYWHERE: Final = frozenset(("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "num_heads"))
"""Keys that a file of any family may state, whether the model reads them or not."""

NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a file has its decoder."""

WAY_OUT: Final = (
    "a model that keeps K and V of each head is known by its sizes: {'model_type': 'llama', 'num_hidden_layers': 40, "
    "'num_key_value_heads': 10, 'head_dim': 128}, or 'layers=40,kv_heads=10,head_dim=128' on the command line; "
    "describe any other as Views of Workers, and verify a file of their offers"
)
LIKE: Final = "if it stores what a known type does, add --like llama, or like='llama';"


@attrs.frozen
class Family:
    """How to read the files of one ``model_type``: what each kind of layer caches, and of which kind each layer is.

    ``defaults`` are the keys that the family reads, with the values of those that a file leaves out. ``keys`` computes
    more of them from the others. ``layers`` is the rule for files without a list of layer types. ``attention`` and
    ``state`` read what a layer caches that attends or has a state. ``last`` is the kind of the last layer, whatever the
    list or the rule says.
    """

    defaults: Config
    layers: LayerRule
    attention: Callable[[Config, str, int | None], Layer]
    state: CacheReader | None = None
    keys: Callable[[Config], Config] | None = None
    last: str | None = None

    def cache(self, kind: str, config: Config) -> Layer:
        """What a layer of a kind caches. ``swa_head_dim`` is the ``head_dim`` of layers that slide, and so on."""
        attends: Layer = ()
        prefix = "swa_" if kind == SLIDING else "full_"
        own = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
        config = {**config, **{key: value for key, value in own.items() if value is not None}}
        if kind == SLIDING:
            attends = self.attention(config, SLIDING, count(config, "sliding_window"))
        elif kind in (FULL, BOTH):
            attends = self.attention(config, FULL, None)
        return (*attends, *(self.state(config) if self.state and kind in (STATE, BOTH) else ()))


def read(
    config: Any,
    families: Mapping[str, Family],
    nested: Mapping[str, str],
    refused: Mapping[str, str],
    drafts: bool,
    like: str | None = None,
) -> tuple[str, Layers, Layers, str, int | None]:
    """The model type, the tensors of each layer and draft layer, the cache's dtype, and how many query heads there are.

    ``config`` is a parsed config.json. A decoder under one of the keys :data:`NESTED` is read as a model of its own; if
    it has no ``model_type``, ``nested`` has it by the outer one. ``per_layer_config`` states the exceptions of single
    layers. The last ``num_kv_shared_layers`` layers use the cache of an earlier layer, so they have no tensors. With
    ``drafts``, there are ``num_nextn_predict_layers`` draft layers (multi-token prediction), with the tensors of the
    model's attention layers. A decoder of an unknown type is read as one of the type ``like``.

    Raises ``TYPE`` if ``config`` is not a mapping, ``CONFIG`` for an unknown model type, a missing key, an unusable
    value, or a key that changes the cache in another family but isn't read in this one.

    >>> from kvplan.models.families import FAMILIES, OUTER, REFUSED
    >>> keys = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    >>> model_type, layers, _, weights, _ = read(keys, FAMILIES, OUTER, REFUSED, drafts=False)
    >>> len(layers), layers[0][0].axes, weights
    (61, (('dim', 576),), 'bfloat16')
    """
    quantized = config.get("quantization_config") if isinstance(config, Mapping) else None
    config, family = _decoder(config, families, nested, refused, like)
    cache = _cache_dtype(quantized or config.get("quantization_config"), config["dtype"])
    kinds = _kinds(config, family)
    owners = len(kinds)
    if "num_kv_shared_layers" in family.defaults:
        owners -= count(config, "num_kv_shared_layers", 0, low=0, high=len(kinds))
        if not {*kinds[owners:]} <= {*kinds[:owners]}:
            expected = "for each layer that shares a cache, an earlier layer of the same kind that has one"
            raise unusable("num_kv_shared_layers", expected, config["num_kv_shared_layers"])
    exceptions = _exceptions(config, len(kinds))
    made: dict[tuple[str, str], Layer] = {}
    layers: list[Layer] = []
    for layer, kind in enumerate(kinds[:owners]):
        of_layer = exceptions.get(layer, {})
        key = kind, json.dumps(of_layer, sort_keys=True, default=str)
        if key not in made:
            made[key] = family.cache(kind, {**config, **of_layer})
            if FULL not in kinds and BOTH not in kinds:  # if all slide, they form the one group that full layers form
                swap = (attrs.evolve(t, group=FULL) if t.group == SLIDING else t for t in made[key])
                made[key] = tuple(swap)
        layers.append(made[key])
    number = count(config, DRAFTS, high=MAX_LAYERS) if drafts else 0
    draft = next((layer for layer in layers if any(t.group == FULL for t in layer)), ())
    if number and not draft:
        raise unusable(key_of(config, DRAFTS), "none in a model without attention layers", number)
    draft = tuple(tensor for tensor in draft if tensor.paged)
    heads = count(config, NUM_HEADS) if config.get(key_of(config, NUM_HEADS)) is not None else None
    return config["model_type"], (*layers, *[()] * (len(kinds) - owners)), (draft,) * number, cache, heads


DRAFTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")


def _cache_dtype(quantized: Any, weights: str) -> str:
    """fp8 if a quantized file says so (``kv_cache_scheme``, ``kv_cache_quant_algo``), else the dtype of the weights."""
    if not isinstance(quantized, Mapping):
        return weights
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    scheme = quantized.get(key_of(quantized, keys))
    stated = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, Mapping) else str(scheme).lower()
    if scheme is not None and stated not in (("float", 8), "fp8"):
        expected = "fp8; remove it and plan any other cache with Model.quantized or --bits"
        raise unusable(key_of(quantized, keys), expected, scheme)
    return weights if scheme is None else "float8_e4m3fn"


def _exceptions(config: Config, layers: int) -> dict[int, Config]:
    """What ``per_layer_config`` states of single layers, by their number."""
    given = config.get("per_layer_config") or {}
    numbers = {str(layer): layer for layer in range(layers)}
    if not isinstance(given, Mapping) or not all(
        str(layer) in numbers and isinstance(keys, Mapping) for layer, keys in given.items()
    ):
        raise unusable("per_layer_config", "a mapping of layers to mappings of keys", given)
    return {numbers[str(layer)]: keys for layer, keys in given.items()}


def _decoder(
    config: Any, families: Mapping[str, Family], nested: Mapping[str, str], refused: Mapping[str, str], like: str | None
) -> tuple[dict[str, Any], Family]:
    """The keys of the decoder with the defaults of its family and the weights' ``dtype``, and the family."""
    if not isinstance(config, Mapping):
        expected, got = "a mapping, as json.load makes it of a config.json", type(config).__name__
        raise KVPlanError("TYPE", "read a model configuration", expected=expected, got=got)
    weights, sizes = dtype(config, "bfloat16"), SIZES
    inner: Any
    while isinstance(config, Mapping) and not config.get("is_encoder_decoder"):
        inner = next((config[key] for key in NESTED if isinstance(config.get(key), Mapping)), None)
        if inner is None:
            break
        config, sizes = {"model_type": nested.get(str(config.get("model_type"))), **inner}, frozenset()
        weights = dtype(config, weights)
    model_type = config.get("model_type")
    model_type = nested.get(str(model_type), model_type)
    reason = refused.get(str(model_type))
    if config.get("is_encoder_decoder"):
        reason = "the decoder also reads a cache of the encoder's outputs, which has no block table"
    if like is not None and not reason:
        if model_type in families:
            what, expected = f"read a model configuration like {like!r}", "one of an unknown type"
            raise KVPlanError("CONFIG", what, expected=expected, got=repr(model_type), model_type=model_type)
        model_type = like
    if not isinstance(model_type, str) or model_type not in families or reason:
        raise KVPlanError(
            "CONFIG",
            f"read a model configuration of type {model_type!r}" if reason else "read a model configuration",
            expected="a model whose cache is known"
            if reason
            else f"one of the {len(families)} types in models.FAMILIES",
            got=reason or repr(model_type),
            hint=WAY_OUT if reason else f"{meant(str(model_type), families)} {LIKE} {WAY_OUT}".strip(),
            model_type=model_type,
        )
    family = families[model_type]
    defaults = {key: value for key, value in family.defaults.items() if key not in sizes}
    config = {**defaults, **config, "model_type": model_type, "dtype": weights}
    _check_keys(config, family, families)
    return {**config, **(family.keys(config) if family.keys else {})}, family


def _check_keys(config: Config, family: Family, families: Mapping[str, Family]) -> None:
    """Raises ``CONFIG`` for a key that changes the cache in some family, but that this one doesn't read."""
    known = {"use_cla", *(key for other in families.values() for key in other.defaults)} - {*family.defaults} - ANYWHERE
    if config.get("use_sliding_window") is False or config.get("layer_types") or config.get("sliding_window") is None:
        known = {key for key in known if "window" not in key}
    for key in sorted(known & {*config}):
        if config[key] not in (None, False, 0, [], {}):
            what = f"read a model configuration of type {config['model_type']!r}"
            hint = f"remove {key!r} if the model doesn't use it; {WAY_OUT}"
            raise KVPlanError(
                "CONFIG",
                what,
                expected=f"no {key!r}, which this type doesn't have",
                got=repr(config[key]),
                hint=hint,
                key=key,
            )


def _kinds(config: Config, family: Family) -> list[str]:
    """The kind of each layer: as the file lists them, or by the rule of the family."""
    key = key_of(config, ("layer_types", "layers_block_type"))
    types = config.get(key)
    if types is None:
        kinds = family.layers(config)
    else:
        has = {FULL, SLIDING, NONE, *([STATE, BOTH] if family.state else [])}
        needs = {"chunked_attention": "attention_chunk_size", "indexed_attention": "index_head_dim"}
        known = [
            layer_type
            for layer_type, kind in LAYER_TYPES.items()
            if kind in has and needs.get(layer_type, "hidden_size") in {*family.defaults, "hidden_size"}
        ]
        listed = isinstance(types, list | tuple) and 0 < len(types) <= MAX_LAYERS and {*map(str, types)} <= {*known}
        layers = count(config, NUM_LAYERS, len(types) if listed else None, high=MAX_LAYERS)
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
