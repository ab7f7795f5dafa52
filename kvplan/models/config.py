"""Reading a Hugging Face config.json: what each layer caches, or a refusal that names the key.

:func:`read_config` applies what the file's family says (:mod:`kvplan.models.families`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Final, NamedTuple

import attrs

from kvplan._checks import is_one_of
from kvplan._text import meant, plain, shown
from kvplan.errors import KVPlanError
from kvplan.models.families import CACHE_KEYS, FAMILIES, OUTER, REFUSED, Family
from kvplan.models.kinds import BOTH, LAYER_TYPES, NONE, TYPE_NEEDS
from kvplan.models.tensors import FULL, SLIDING, STATE, Layer, Layers
from kvplan.models.values import (
    DRAFTS,
    HEAD_DIMS,
    KV_HEADS,
    LAYER_LISTS,
    MAX_LAYERS,
    NUM_HEADS,
    NUM_LAYERS,
    SIZES,
    Config,
    dtype_of,
    flag_of,
    integer_of,
    mapping_of,
    missing,
    refusal,
    stated_key,
    unusable,
)

QUANTIZATION: Final = "quantization_config"

NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a file has its decoder."""

VIEWS: Final = "describe its tensors as Views of Workers"
WAY_OUT: Final = (
    f"layers=40,kv_heads=10,head_dim=128 if it keeps K and V of each head; else {VIEWS}"
)
LIKE: Final = f"add --like llama if it caches as a llama does; {WAY_OUT}"
"""What to do about a type that is not known."""


class ModelConfig(NamedTuple):
    """The caches of a model, as its config.json states them: what a Model has after its name.

    ``layers`` and ``drafts`` have the tensors of each layer and draft layer. ``dtype`` is that of
    the attention cache. ``query_heads`` counts the heads that attend, if the file states it.
    """

    layers: Layers
    dtype: str
    drafts: Layers
    query_heads: int | None
    model_type: str


def read_config(
    config: Any,
    with_drafts: bool = False,
    like: str | None = None,
    quantization: Config | None = None,
) -> ModelConfig:
    """Return what the layers of a model cache, by its config.json.

    ``config`` is a parsed config.json. A decoder under one of the keys :data:`NESTED` is read as a
    model of its own; if it has no ``model_type``, that of the outer one says which.
    ``per_layer_config`` states the exceptions of single layers. The last ``num_kv_shared_layers``
    layers use the cache of an earlier layer, so they have no tensors. ``with_drafts`` adds
    ``num_nextn_predict_layers`` draft layers (multi-token prediction), with the tensors of the
    model's attention layers. A decoder of an unknown type is read as one of the type ``like``.
    ``quantization`` is a parsed hf_quant_config.json, which counts as in vLLM: only if the file has
    no ``quantization_config``.

    Raises ``TYPE`` if ``config`` is not a mapping, ``CONFIG`` for an unknown model type, a missing
    key, an unusable value, or one of the :data:`CACHE_KEYS` that the file's family doesn't read.

    >>> keys = {"model_type": "deepseek_v3", "num_hidden_layers": 61}
    >>> sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    >>> model = read_config({**keys, **sizes})
    >>> len(model.layers), model.layers[0][0].axes, model.dtype
    (61, (('dim', 576),), 'bfloat16')
    """
    decoder = _decoder(config, like)
    stated = mapping_of(config, QUANTIZATION) or mapping_of(decoder.stated, QUANTIZATION)
    stated = stated or (quantization or {})
    # ModelOpt nests its keys in a file of its own.
    inner = mapping_of(stated, "quantization") or stated
    try:
        return _read_decoder(decoder, inner, with_drafts)
    except KVPlanError as error:
        raise _with_stated_key(error, decoder) from None


def _read_decoder(decoder: _Decoder, quantization: Config, with_drafts: bool) -> ModelConfig:
    """Return the caches of a decoder."""
    config = decoder.config
    family = decoder.family
    cache_dtype = _cache_dtype(quantization, config["dtype"])
    kinds = _kinds(config, family)
    # Layers that own a cache come first, then those that share the cache of an owner.
    num_owners = _num_owners(config, family, kinds)
    owners = _owners(config, family, kinds, num_owners)
    sharers: Layers = ((),) * (len(kinds) - num_owners)
    num_drafts = integer_of(config, DRAFTS, high=MAX_LAYERS) if with_drafts else 0
    drafts = (_draft(config, owners, num_drafts),) * num_drafts
    has_heads = config.get(stated_key(config, NUM_HEADS)) is not None
    query_heads = integer_of(config, NUM_HEADS) if has_heads else None
    layers = (*owners, *sharers)
    return ModelConfig(layers, cache_dtype, drafts, query_heads, config["model_type"])


def _with_stated_key(error: KVPlanError, decoder: _Decoder) -> KVPlanError:
    """Return the error with the key that the file states instead of one that was computed."""
    computed_key = str(error.details.get("key"))
    if decoder.family.keys is None or computed_key not in decoder.computed:
        return error
    key = decoder.family.keys.sources[computed_key]
    stated_value = decoder.stated.get(key)
    # The family computes nothing from a key without a value.
    if stated_value is None:
        return missing(decoder.stated, key)
    computed_value = decoder.computed[computed_key]
    if computed_value == stated_value:
        return unusable(key, error.expected, stated_value)
    expected = f"{error.expected} as {computed_key!r}"
    return unusable(key, expected, stated_value, f"{computed_value!r} from {stated_value!r}")


def _cache_dtype(quantization: Config, weights_dtype: str) -> str:
    """Return fp8 if a quantized file says so, else the dtype of the weights.

    The keys are ``kv_cache_scheme`` and ``kv_cache_quant_algo``.
    """
    key = stated_key(quantization, ("kv_cache_scheme", "kv_cache_quant_algo"))
    scheme = quantization.get(key)
    if scheme is None:
        return weights_dtype
    if isinstance(scheme, Mapping):
        is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    else:
        is_fp8 = str(scheme).lower() == "fp8"
    if not is_fp8:
        expected = "fp8; remove it and plan any other cache with Model.quantized or --bits"
        raise unusable(key, expected, scheme)
    return "float8_e4m3fn"


def _num_owners(config: Config, family: Family, kinds: Sequence[str]) -> int:
    """Return how many layers have a cache of their own; the last ones may share earlier caches."""
    if "num_kv_shared_layers" not in family.defaults:
        return len(kinds)
    num_shared = integer_of(config, "num_kv_shared_layers", 0, low=0, high=len(kinds))
    num_owners = len(kinds) - num_shared
    if not {*kinds[num_owners:]} <= {*kinds[:num_owners]}:
        earlier = "an earlier layer of the same kind that has one"
        expected = f"for each layer that shares a cache, {earlier}"
        raise unusable("num_kv_shared_layers", expected, config["num_kv_shared_layers"])
    return num_owners


def _owners(config: Config, family: Family, kinds: Sequence[str], num_owners: int) -> Layers:
    """Return the tensors of each layer with a cache of its own. Equal layers share one tuple."""
    exceptions = _exceptions(config, len(kinds))
    all_slide = FULL not in kinds and BOTH not in kinds
    layer_of: dict[tuple[str, str], Layer] = {}
    layers: list[Layer] = []
    for layer_number, kind in enumerate(kinds[:num_owners]):
        own_keys = exceptions.get(layer_number, {})
        # Layers of one kind with equal keys of their own are equal.
        content = kind, json.dumps(own_keys, sort_keys=True, default=str)
        if content not in layer_of:
            layer = family.cache(kind, {**config, **own_keys})
            # Layers that all slide form the one group that full layers form.
            layer_of[content] = _as_full(layer) if all_slide else layer
        layers.append(layer_of[content])
    return tuple(layers)


def _as_full(layer: Layer) -> Layer:
    return tuple(tensor.in_group(FULL) if tensor.group == SLIDING else tensor for tensor in layer)


def _draft(config: Config, layers: Layers, num_drafts: int) -> Layer:
    """Return the tensors of a draft layer: those of the first layer with full attention."""
    layer = next(filter(_attends_to_all, layers), ())
    if num_drafts and not layer:
        expected = "none in a model without attention layers"
        raise unusable(stated_key(config, DRAFTS), expected, num_drafts)
    return tuple(tensor for tensor in layer if tensor.paged)


def _attends_to_all(layer: Layer) -> bool:
    return any(tensor.group == FULL for tensor in layer)


def _exceptions(config: Config, num_layers: int) -> dict[int, Config]:
    """Return what ``per_layer_config`` states of single layers, by their number."""
    contents = "layers to mappings of keys"
    per_layer = mapping_of(config, "per_layer_config", contents)
    # JSON has the numbers of layers as text; transformers pads them with zeros, as "05".
    texts = [str(layer) for layer in per_layer]
    numbers = [int(text) if text.isdecimal() and len(text) < 8 else -1 for text in texts]
    has_layers = {*numbers} <= {*range(num_layers)} and len({*numbers}) == len(numbers)
    if not has_layers or not all(isinstance(keys, Mapping) for keys in per_layer.values()):
        raise unusable("per_layer_config", f"a mapping of {contents}", per_layer)
    return dict(zip(numbers, per_layer.values(), strict=True))


@attrs.frozen
class _Decoder:
    """A decoder: its family, the keys that its file states, and those that the family computes.

    What the file leaves out has the default of the family; ``dtype`` is that of the weights.
    """

    family: Family
    stated: Config
    computed: Config

    @property
    def config(self) -> Config:
        """All keys; those that are computed count before those that are stated."""
        return {**self.stated, **self.computed}


def _decoder(config: Any, like: str | None) -> _Decoder:
    """Return the decoder of a file, which may be nested in it."""
    if not isinstance(config, Mapping):
        got = type(config).__name__
        expected = "a mapping, as json.load makes it of a config.json"
        raise KVPlanError("TYPE", "read a model configuration", expected=expected, got=got)
    weights_dtype = dtype_of(config, "bfloat16")
    stated_always = SIZES
    # A file of several modalities has its decoder inside, perhaps more than one level deep.
    while not flag_of(config, "is_encoder_decoder"):
        keys = [key for key in NESTED if config.get(key) is not None]
        if not keys:
            break
        decoder = mapping_of(config, keys[0])
        config = {"model_type": OUTER.get(plain(config.get("model_type"))), **decoder}
        stated_always = frozenset()
        weights_dtype = dtype_of(config, weights_dtype)
    model_type = _model_type(config, like)
    family = FAMILIES[model_type]
    if model_type == like:
        _check_unknown(config, family)
    defaults = {key: value for key, value in family.defaults.items() if key not in stated_always}
    config = {**defaults, **config, "model_type": model_type, "dtype": weights_dtype}
    _check_keys(config, family)
    # Rules compute from what the file states and from the defaults of its family.
    computed = family.keys.compute(config) if family.keys else {}
    return _Decoder(family, config, computed)


def _model_type(config: Config, like: str | None) -> str:
    """Return the type as which to read a decoder. Raises ``CONFIG`` if there is none."""
    model_type = config.get("model_type")
    model_type = OUTER.get(plain(model_type), model_type)
    reason = REFUSED.get(plain(model_type))
    if flag_of(config, "is_encoder_decoder"):
        reason = REFUSED["whisper"]
    if reason:
        of_type = f" of type {model_type!r}"
        expected = "a cache that kvplan describes"
        raise refusal(of_type, expected, reason, VIEWS, model_type=model_type)
    if like is not None and (model_type is None or isinstance(model_type, str)):
        if model_type in FAMILIES:
            expected = "one of an unknown type"
            got = repr(model_type)
            raise refusal(f" like {like!r}", expected, got, model_type=model_type)
        model_type = like
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        expected = f"one of the {len(FAMILIES)} types in models.FAMILIES"
        if model_type is None:
            hint = f"is this a config.json? {LIKE}"
            raise refusal("", expected, "no model_type", hint, model_type=None)
        hint = f"{meant(plain(model_type), FAMILIES)} {LIKE}".strip()
        raise refusal("", expected, shown(model_type), hint, model_type=plain(model_type))
    return model_type


def _check_keys(config: Config, family: Family) -> None:
    """Raise ``CONFIG`` for a key that changes the cache, but that the family doesn't read."""
    foreign_keys = {*CACHE_KEYS} - {*family.defaults}
    # Files often state the window that their model doesn't use, or layer types decide about it.
    slides = config.get("sliding_window") is not None
    if config.get("use_sliding_window") is False or config.get("layer_types") or not slides:
        foreign_keys = {key for key in foreign_keys if "window" not in key}
    # A file of a model without attention may state heads all the same, and one whose class knows
    # no grouped heads may state as many KV heads as it has heads.
    if not {*NUM_HEADS} & {*family.defaults}:
        foreign_keys -= {*KV_HEADS, *HEAD_DIMS}
    num_heads = config.get(stated_key(config, NUM_HEADS))
    for key in sorted(foreign_keys & {*config}):
        if key in KV_HEADS and config[key] == num_heads:
            continue
        if config[key] not in (None, False, 0, [], {}):
            expected = f"no {key!r}, which this type doesn't have"
            hint = f"remove {key!r} if the model doesn't use it; {WAY_OUT}"
            of_type = f" of type {config['model_type']!r}"
            raise refusal(of_type, expected, repr(config[key]), hint, key=key)


def _check_unknown(config: Config, family: Family) -> None:
    """Raise ``CONFIG`` for what a file of an unknown type may mean, and the family doesn't read.

    A size that is null may be stated by another key. A list of mappings, one with an item for each
    layer, a text with a letter for each layer, or a mapping of layers by their numbers, may give
    layers different caches.
    """
    num_layers = config.get(stated_key(config, NUM_LAYERS))
    for key, value in config.items():
        # Each family says what null means for a size that it reads.
        if value is None and key in SIZES | {*KV_HEADS, *HEAD_DIMS}:
            expected = f"a number under {key!r}, since null may mean anything in an unknown type"
            hint = "state the number in the file"
            raise refusal("", expected, "null", hint, key=key)
        is_read = key in family.defaults or key in LAYER_LISTS
        if not is_read and _is_of_layers(value, num_layers):
            expected = f"no {key!r}, which may give each layer a cache of its own"
            hint = f"remove {key!r} if all layers cache the same"
            raise refusal("", expected, shown(value), hint, key=key)


def _is_of_layers(value: Any, num_layers: Any) -> bool:
    """Return whether the value of an unknown key may differ by layer."""
    if isinstance(value, Mapping):
        return bool(value) and all(str(key).isdecimal() for key in value)
    # A pattern such as MEM*M, and no word such as silu.
    if isinstance(value, str):
        return value.isupper() and 1 < len(value) == num_layers
    if not isinstance(value, list | tuple):
        return False
    has_mappings = any(isinstance(item, Mapping) for item in value)
    return has_mappings or 1 < len(value) == num_layers


def _kinds(config: Config, family: Family) -> list[str]:
    """Return the kind of each layer: as the file lists them, or by the rule of the family."""
    key = stated_key(config, LAYER_LISTS)
    is_listed = config.get(key) is not None
    kinds = _listed_kinds(config, key, family) if is_listed else family.layers(config)
    return kinds if family.last is None else [*kinds[:-1], family.last]


def _possible_types(family: Family) -> list[str]:
    """Return the layer types that files of a family may list."""
    kinds = {FULL, SLIDING, NONE}
    if family.state:
        kinds |= {STATE, BOTH}
    layer_types = []
    for layer_type, kind in LAYER_TYPES.items():
        needed_key = TYPE_NEEDS.get(layer_type)
        if kind in kinds and (needed_key is None or needed_key in family.defaults):
            layer_types.append(layer_type)
    return layer_types


def _listed_kinds(config: Config, key: str, family: Family) -> list[str]:
    """Return the kind of each layer type under a key: as many as the file has layers."""
    possible_types = _possible_types(family)
    types = config[key]
    is_sequence = isinstance(types, list | tuple) and 0 < len(types) <= MAX_LAYERS
    is_list_of_types = is_sequence and all(is_one_of(item, possible_types) for item in types)
    # A file with a list need not state the number of its layers.
    default = len(types) if is_list_of_types else None
    num_layers = integer_of(config, NUM_LAYERS, default, high=MAX_LAYERS)
    if not is_list_of_types or len(types) != num_layers:
        raise unusable(key, f"{num_layers} of {', '.join(possible_types)}", types)
    return [LAYER_TYPES[layer_type] for layer_type in types]


def shipped_configs() -> dict[str, Any]:
    """Return the configurations that come with this package, by model name in lower case.

    They are reduced to the keys that matter.

    >>> shipped_configs()["llama-3.1-8b"]["num_key_value_heads"]
    8
    """
    file = resources.files("kvplan.models").joinpath("shipped.json")
    configs: dict[str, Any] = json.loads(file.read_bytes())
    return configs
