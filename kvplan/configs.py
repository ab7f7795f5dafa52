"""Configs: which logical tensors the layers of a model cache, read from its Hugging Face config.json.

One table of families says which keys count and what they are where a file leaves them out. Defaults and rules
are those of transformers 5.23 (``configuration_*.py`` and, for ``head_dim``, ``modeling_*.py`` of each family):
``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null`` means ``hidden_size //
num_attention_heads``. Keys that every published file states (``num_hidden_layers``) have no default here: a guess
would plan another model's cache.

A decoder nested under ``text_config`` is read as a model of its own. Draft layers
(``num_nextn_predict_layers``) are not part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.axes import Axis, integer, name
from kvplan.errors import KVPlanError
from kvplan.layouts import HEAD, KV
from kvplan.views import ITEMSIZE

FULL: Final = "attn"
"""The group of layers that attend to all positions, and of all layers where they are of one kind."""

SLIDING: Final = "swa"
"""The group of layers that attend to a window, in a model that has both kinds."""

LAYER_TYPES: Final[Mapping[str, str]] = MappingProxyType({"full_attention": FULL, "sliding_attention": SLIDING})

MAX_COUNT: Final = 1 << 24
MAX_LAYERS: Final = 1 << 14

Config = Mapping[str, Any]


def _kind(value: Any) -> str:
    return name(value, "kind of a tensor")


def _group(value: Any) -> str:
    return name(value, "group of a tensor")


def _shards(value: Any) -> int:
    return integer(value, "shards of a tensor", low=1, high=MAX_COUNT)


@attrs.frozen
class Tensor:
    """One logical tensor of a layer's cache: ``layers.{i}.{kind}``, paged by the block table ``group``.

    ``axes`` are names with global sizes; ``paged`` tensors have a token axis beside them. ``sharded`` is the axis
    that tensor parallelism divides, in ``shards`` equal units (heads) that stay whole; None: every rank holds all.
    ``dtype`` None is the dtype of the model's cache.

    >>> heads = Tensor("attn", "attn", (("kv", 2), ("head", 12), ("dim", 64)), sharded="head", shards=12)
    >>> [(part.start, part.stop) for rank in range(8) for part in heads.parts(rank, 8) if part.name == "head"]
    [(0, 2), (1, 3), (3, 5), (4, 6), (6, 8), (7, 9), (9, 11), (10, 12)]
    """

    kind: str = attrs.field(converter=_kind)
    group: str = attrs.field(converter=_group)
    axes: tuple[tuple[str, int], ...]
    paged: bool = True
    sharded: str | None = None
    shards: int = attrs.field(default=1, converter=_shards)
    dtype: str | None = None

    def __attrs_post_init__(self) -> None:
        size = dict(self.axes).get(self.sharded or "", self.shards)
        if (self.sharded is not None and self.sharded not in dict(self.axes)) or size % self.shards:
            raise KVPlanError(
                "SIZE",
                f"describe tensor {self.kind!r}",
                expected=f"an axis {self.sharded!r} whose size {self.shards} shards divide",
                got=f"{dict(self.axes)}",
                sharded=self.sharded,
                shards=self.shards,
            )

    def units(self, rank: int, ranks: int) -> range:
        """The shards that tensor-parallel rank ``rank`` of ``ranks`` holds."""
        if self.sharded is None:
            return range(self.shards)
        return range(rank * self.shards // ranks, -(-(rank + 1) * self.shards // ranks))

    def parts(self, rank: int, ranks: int) -> tuple[Axis, ...]:
        """The part of each axis that the rank holds; strides are for a layout to set."""
        held = self.units(rank, ranks)
        return tuple(
            Axis(key, held.start * size // self.shards, held.stop * size // self.shards, size, 0)
            if key == self.sharded
            else Axis(key, 0, size, size, 0)
            for key, size in self.axes
        )


Layers = tuple[tuple[Tensor, ...], ...]


Slides = Callable[[int, Config], bool]
"""Whether a layer attends to a window, where the file has no ``layer_types``."""


def _never(layer: int, config: Config) -> bool:
    return False


def _every_other(layer: int, config: Config) -> bool:
    return layer % 2 == 0


def _all_but_each_nth(layer: int, config: Config) -> bool:
    return (layer + 1) % _count(config, "sliding_window_pattern") != 0


def _upper(layer: int, config: Config) -> bool:
    in_use = bool(config["use_sliding_window"]) and config["sliding_window"] is not None
    return in_use and layer >= _count(config, "max_window_layers", low=0)


def _every_other_lower(layer: int, config: Config) -> bool:
    in_use = bool(config["use_sliding_window"])
    return in_use and layer % 2 == 0 and layer < _count(config, "max_window_layers", low=0)


@attrs.frozen
class _Family:
    defaults: Config
    slides: Slides = _never
    latent: bool = False


def _family(heads: int | None, head_dim: int | None = None, slides: Slides = _never, **defaults: Any) -> _Family:
    return _Family({"num_key_value_heads": heads, "head_dim": head_dim, **defaults}, slides)


_QWEN: Final[Config] = MappingProxyType({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28})

FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "llama": _family(None),
        "mistral": _family(8),
        "ministral": _family(8),
        "ministral3": _family(8, 128),
        "mixtral": _family(8),
        "phi3": _family(None),
        "qwen2": _family(32, slides=_upper, **_QWEN),
        "qwen2_moe": _family(16, slides=_every_other_lower, **_QWEN),
        "qwen3": _family(32, 128, slides=_upper, **_QWEN),
        "qwen3_moe": _family(4),
        "gemma2": _family(4, 256, slides=_every_other, num_attention_heads=8),
        "gemma3_text": _family(4, 256, slides=_all_but_each_nth, num_attention_heads=8, sliding_window_pattern=6),
        "gpt_oss": _family(8, 64, slides=_every_other),
        "deepseek_v2": _Family({}, latent=True),
        "deepseek_v3": _Family({}, latent=True),
    }
)
"""The readable values of ``model_type``: attention only, every layer with a cache of its own."""

NESTED: Final[Mapping[str, str]] = MappingProxyType({"gemma3": "gemma3_text", "mistral3": "mistral"})
"""The family of a ``text_config`` that does not state its own, by the outer ``model_type``."""


def read(config: Config) -> tuple[str, Layers, str]:
    """The model type, the tensors of each layer and the cache dtype of a parsed config.json.

    Raises ``TYPE`` for what is no mapping, ``CONFIG`` for an unknown model type, a missing key or an unusable value.

    >>> model_type, layers, dtype = read({"model_type": "qwen3", "num_hidden_layers": 28, "num_key_value_heads": 8})
    >>> len(layers), layers[0][0].axes, dtype
    (28, (('kv', 2), ('head', 8), ('dim', 128)), 'bfloat16')
    """
    if not isinstance(config, Mapping):
        raise KVPlanError("TYPE", "read a model configuration", expected="a mapping", got=type(config).__name__)
    outer, dtype = config, _dtype(config, "bfloat16")
    if isinstance(config.get("text_config"), Mapping):
        config = {"model_type": NESTED.get(str(config.get("model_type"))), **config["text_config"]}
        dtype = _dtype(config, dtype)
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
    config = {**family.defaults, **config}
    groups = _groups(config, family)
    cache = _latent(config) if family.latent else _heads(config)
    return model_type, tuple((attrs.evolve(cache, group=group),) for group in groups), dtype


def _groups(config: Config, family: _Family) -> list[str]:
    """The group of each layer: by its kind, where the model has both."""
    count = _count(config, "num_hidden_layers", high=MAX_LAYERS)
    types = config.get("layer_types")
    if types is None:
        kinds = [SLIDING if family.slides(layer, config) else FULL for layer in range(count)]
    elif not isinstance(types, list | tuple) or len(types) != count or not {*map(str, types)} <= {*LAYER_TYPES}:
        raise _unusable("layer_types", f"{count} of {', '.join(LAYER_TYPES)}", types)
    else:
        kinds = [LAYER_TYPES[layer_type] for layer_type in types]
    return kinds if len(set(kinds)) > 1 else [FULL] * count


def _heads(config: Config) -> Tensor:
    """K and V of each head."""
    given = config.get("num_key_value_heads")
    heads = _count(config, "num_key_value_heads" if given is not None else "num_attention_heads")
    query_heads = _count(config, "num_attention_heads", heads)
    if query_heads % heads:
        raise _unusable("num_key_value_heads", f"a divisor of num_attention_heads {query_heads}", heads)
    if config.get("head_dim") is not None:
        dim = _count(config, "head_dim")
    else:
        dim, rest = divmod(_count(config, "hidden_size"), _count(config, "num_attention_heads"))
        if rest or not dim:
            raise _unusable("hidden_size", f"a multiple of num_attention_heads {query_heads}", config["hidden_size"])
    return Tensor("attn", FULL, ((KV, 2), (HEAD, heads), ("dim", dim)), sharded=HEAD, shards=heads)


def _latent(config: Config) -> Tensor:
    """The compressed latent and the rotary key behind it, one of each for all heads."""
    return Tensor("attn", FULL, (("dim", _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")),))


def _count(config: Config, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
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
        raise _unusable(key, f"an integer in [{low}, {high})", value) from None


def _dtype(config: Config, default: str) -> str:
    """The cache's dtype: the weights'. ``dtype`` counts before ``torch_dtype``, as it does in transformers."""
    given = next((config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), default)
    dtype = str(given).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise _unusable("dtype", f"a dtype of {', '.join(ITEMSIZE)}", given)
    return dtype


def _unusable(key: str, expected: str, value: Any) -> KVPlanError:
    what = f"use {key!r} of a model configuration"
    return KVPlanError("CONFIG", what, expected=expected, got=repr(value), key=key, value=value)
