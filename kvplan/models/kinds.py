"""Kinds: what each layer of a model does, by lists of types, patterns of letters, or a family's rule.

The rules are those of transformers 5.23, ``configuration_*.py`` of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from kvplan.models.keys import MAX_LAYERS, Config, count, unusable
from kvplan.models.tensors import FULL, SLIDING, STATE

BOTH: Final = "both"
"""A layer that attends and keeps a state."""

NONE: Final = "none"
"""A layer without a cache."""

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

PATTERN: Final[Mapping[str, str]] = MappingProxyType({"M": STATE, "*": FULL, "-": NONE, "E": NONE})
"""The kind of a layer by its letter in ``hybrid_override_pattern`` (NemotronHConfig)."""

Kinds = Callable[[Config], list[str]]
"""The kind of each layer, where the file has no list of types."""


def count_layers(config: Config) -> int:
    """How many layers the model has. Raises ``CONFIG`` where the file does not state it."""
    return count(config, "num_hidden_layers", high=MAX_LAYERS)


def all_of(kind: str) -> Kinds:
    """Layers of one kind.

    >>> all_of(FULL)({"num_hidden_layers": 2})
    ['attn', 'attn']
    """
    return lambda config: [kind] * count_layers(config)


ALL_FULL: Final = all_of(FULL)


def sliding(slides: Callable[[int, Config], bool]) -> Kinds:
    """Layers of which some slide over a window, and the others attend to all positions.

    >>> sliding(each_nth("pattern"))({"num_hidden_layers": 4, "pattern": 3})
    ['swa', 'swa', 'attn', 'swa']
    """
    return lambda config: [SLIDING if slides(layer, config) else FULL for layer in range(count_layers(config))]


def all_slide(config: Config) -> list[str]:
    """Every layer slides where the file has a window in use, and none otherwise (MistralConfig, Qwen3MoeConfig).

    >>> all_slide({"num_hidden_layers": 2, "sliding_window": 4096})
    ['swa', 'swa']
    """
    in_use = bool(config.get("use_sliding_window", True)) and config.get("sliding_window") is not None
    return [SLIDING if in_use else FULL] * count_layers(config)


def each_nth(key: str) -> Callable[[int, Config], bool]:
    """Every layer slides but each nth, with n under ``key`` (Gemma)."""
    return lambda layer, config: (layer + 1) % count(config, key) != 0


def upper(layer: int, config: Config) -> bool:
    """Layers from ``max_window_layers`` on slide, where sliding is in use (Qwen2Config)."""
    in_use = bool(config["use_sliding_window"]) and config["sliding_window"] is not None
    return in_use and layer >= count(config, "max_window_layers", low=0)


def every_other_lower(layer: int, config: Config) -> bool:
    """Every other layer below ``max_window_layers`` slides (Qwen2MoeConfig)."""
    in_use = bool(config["use_sliding_window"])
    return in_use and layer % 2 == 0 and layer < count(config, "max_window_layers", low=0)


def by_interval(config: Config) -> list[str]:
    """Each ``full_attention_interval``-th layer attends (Qwen3NextConfig)."""
    every = count(config, "full_attention_interval")
    return [STATE if (layer + 1) % every else FULL for layer in range(count_layers(config))]


def by_period(config: Config) -> list[str]:
    """One layer of each ``attn_layer_period``, at ``attn_layer_offset``, attends (JambaConfig)."""
    period = count(config, "attn_layer_period")
    offset = count(config, "attn_layer_offset", low=0, high=period)
    return [FULL if layer % period == offset else STATE for layer in range(count_layers(config))]


def by_letter(config: Config) -> list[str]:
    """A letter for each layer (NemotronHConfig).

    >>> by_letter({"hybrid_override_pattern": "M-M*"})
    ['state', 'none', 'state', 'attn']
    """
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or len(pattern) >= MAX_LAYERS or set(pattern) - {*PATTERN}:
        raise unusable("hybrid_override_pattern", f"a letter of {' '.join(PATTERN)} for each layer", pattern)
    return [PATTERN[letter] for letter in pattern]


def numbered_from_one(config: Config) -> list[str]:
    """Layers as ``linear_attn_config`` lists them, numbered from 1 (KimiLinearConfig)."""
    layers, given = count_layers(config), linear_config(config)
    if "full_attn_layers" not in given or "kda_layers" not in given:
        return [FULL if layer and layer % 4 == 0 else STATE for layer in range(layers)]
    listed = {key: given[key] for key in ("full_attn_layers", "kda_layers")}
    lists = [numbers if isinstance(numbers, list | tuple) else [None] for numbers in listed.values()]
    if sorted(str(number) for numbers in lists for number in numbers) != sorted(map(str, range(1, layers + 1))):
        raise unusable("linear_attn_config", f"each of the layers 1 to {layers} once", listed)
    return [FULL if layer + 1 in listed["full_attn_layers"] else STATE for layer in range(layers)]


def linear_config(config: Config) -> Mapping[str, Any]:
    """What a file keeps under ``linear_attn_config``, nothing where it lacks it. Raises ``CONFIG``."""
    given = config.get("linear_attn_config")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise unusable("linear_attn_config", "a mapping", given)
    return given
