"""Configs: which logical tensors the layers of a model cache, read from its Hugging Face config.json.

A decoder nested under ``text_config`` is read as a model of its own. Layers that reuse the cache of an earlier layer
(``num_kv_shared_layers``, the last ones) have no tensors: only the owner's is a cache. Draft layers
(``num_nextn_predict_layers``) are not part of the model; :func:`draft` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvplan.errors import KVPlanError
from kvplan.models.families import FAMILIES, NESTED, Family
from kvplan.models.keys import MAX_LAYERS, Config, count, dtype, first_of, unusable
from kvplan.models.kinds import LAYER_TYPES
from kvplan.models.tensors import FULL, SLIDING, Layer, Layers


def read(config: Config) -> tuple[str, Layers, str]:
    """The model type, the tensors of each layer and the cache dtype of a parsed config.json.

    Raises ``TYPE`` for what is no mapping, ``CONFIG`` for an unknown model type, a missing key or an unusable value.

    >>> model_type, layers, dtype = read({"model_type": "qwen3", "num_hidden_layers": 28, "num_key_value_heads": 8})
    >>> len(layers), layers[0][0].axes, dtype
    (28, (('kv', 2), ('head', 8), ('dim', 128)), 'bfloat16')
    """
    config, family, weights = _family(config)
    caches = family.caches(config, weights)
    kinds = _kinds(config, family, caches)
    if FULL not in kinds:  # a model that slides everywhere has one block table, like one that slides nowhere
        caches = {**caches, SLIDING: tuple(attrs.evolve(t, group=FULL) for t in caches.get(SLIDING, ()))}
    owners = len(kinds)
    if "num_kv_shared_layers" in family.defaults:
        owners -= count(config, "num_kv_shared_layers", low=0, high=len(kinds))
        if not {*kinds[owners:]} <= {*kinds[:owners]}:
            expected = "for each layer that shares a cache, an earlier one of its kind that has one"
            raise unusable("num_kv_shared_layers", expected, config["num_kv_shared_layers"])
    layers = tuple(caches[kind] if layer < owners else () for layer, kind in enumerate(kinds))
    return config["model_type"], layers, weights


def draft(config: Config) -> Layers:
    """The tensors of each layer that drafts tokens (multi-token prediction), as many as the file states.

    They are like the model's own attention layers. Raises ``CONFIG`` where the file states none.

    >>> keys = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    >>> [tensor.axes for (tensor,) in draft({**keys, "num_nextn_predict_layers": 1})]
    [(('dim', 576),)]
    """
    config, family, weights = _family(config)
    number = count(config, "num_nextn_predict_layers", high=MAX_LAYERS)
    return (family.caches(config, weights)[FULL],) * number


def _family(config: Any) -> tuple[dict[str, Any], Family, str]:
    """The configuration of the decoder with the defaults of its family, the family, and the weights' dtype."""
    if not isinstance(config, Mapping):
        raise KVPlanError("TYPE", "read a model configuration", expected="a mapping", got=type(config).__name__)
    outer, weights = config, dtype(config, "bfloat16")
    if isinstance(config.get("text_config"), Mapping):
        config = {"model_type": NESTED.get(str(config.get("model_type"))), **config["text_config"]}
        weights = dtype(config, weights)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise KVPlanError(
            "CONFIG",
            "read a model configuration",
            expected=f"model_type of {', '.join(FAMILIES)}",
            got=repr(model_type if model_type is not None else outer.get("model_type")),
            hint="describe any other model's caches as Views of Workers",
            model_type=model_type,
        )
    family = FAMILIES[model_type]
    return {**family.defaults, **config}, family, weights


def _kinds(config: Config, family: Family, caches: Mapping[str, Layer]) -> list[str]:
    """The kind of each layer."""
    kinds = _stated_kinds(config, family, caches)
    return kinds if family.last is None else [*kinds[:-1], family.last]


def _stated_kinds(config: Config, family: Family, caches: Mapping[str, Layer]) -> list[str]:
    """The kinds that a list says, or else the rule of the family."""
    key = first_of(config, family.types) if family.types else ""
    types = config.get(key)
    if types is None:
        return family.kinds(config)
    known = [layer_type for layer_type, kind in LAYER_TYPES.items() if kind in caches]
    listed = isinstance(types, list | tuple) and 0 < len(types) <= MAX_LAYERS and {*map(str, types)} <= {*known}
    layers = count(config, "num_hidden_layers", len(types) if listed else None, high=MAX_LAYERS)
    if not listed or len(types) != layers:
        raise unusable(key, f"{layers} of {', '.join(known)}", types)
    return [LAYER_TYPES[layer_type] for layer_type in types]
