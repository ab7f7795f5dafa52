"""Of which kind each layer of a file is: by its list of layer types, or by a rule of its family.

families.json states rules. A list is a period, which repeats. A name is a function of
:data:`RULES`; with arguments, it is a mapping that has the name as ``rule``.

>>> layer_rule(["swa", "swa", "attn"])({"num_hidden_layers": 5})
['swa', 'swa', 'attn', 'swa', 'swa']
>>> rule = {"rule": "all_but_each", "kind": "state", "period": "full_attention_interval"}
>>> layer_rule(rule)({"num_hidden_layers": 4, "full_attention_interval": 2})
['state', 'attn', 'state', 'attn']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kvplan.models.tensors import FULL, SLIDING, STATE
from kvplan.models.values import (
    MAX_LAYERS,
    NUM_LAYERS,
    Config,
    flag_of,
    integer_of,
    integers_of,
    mapping_of,
    unusable,
)

BOTH: Final = "both"
"""The kind of a layer that attends and has a state. Other kinds are the names of their groups."""

NONE: Final = "none"
"""The kind of a layer without a cache."""

LAYER_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": FULL,
        "sliding_attention": SLIDING,
        "chunked_attention": SLIDING,
        "indexed_attention": FULL,
        "minimax_m3_sparse": FULL,
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
"""The kind of a layer by its type.

The last four are older names (``remap_legacy_layer_types`` of transformers).
"""

TYPE_NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chunked_attention": "attention_chunk_size",
        "indexed_attention": "index_head_dim",
        "minimax_m3_sparse": "sparse_attention_config",
    }
)
"""The key that a family must read for its files to have layers of a type."""

LayerRule = Callable[[Config], list[str]]
"""The kind of each layer of a file that has no list of layer types."""


def layer_rule(stated: Any) -> LayerRule:
    """Return a rule of families.json."""
    if isinstance(stated, Mapping):
        arguments = {key: value for key, value in stated.items() if key != "rule"}
        made: LayerRule = RULES[stated["rule"]](**arguments)
        return made
    return RULES[stated] if isinstance(stated, str) else repeat(stated)


def repeat(
    period: Sequence[str],
    first: Sequence[str] = (),
    last: str | None = None,
    needs: str | None = None,
    *,
    from_last: bool = False,
) -> LayerRule:
    """Return the rule that layers are of the kinds of a ``period``, which repeats.

    It begins with the first layer, or ``from_last`` with the last one. The ``first`` layers and the
    ``last`` one may have kinds of their own. The last one also has the kind that the model
    ``needs``, if no other layer is of it, as in a short file.

    >>> repeat(["swa", "attn"], first=["attn"], last="attn")({"num_hidden_layers": 5})
    ['attn', 'attn', 'swa', 'attn', 'attn']
    """

    def rule(config: Config) -> list[str]:
        num_layers = num_layers_of(config)
        kinds = [period[layer % len(period)] for layer in range(num_layers)]
        if from_last:
            kinds.reverse()
        kinds = [*first, *kinds[len(first) :]][:num_layers]
        final = needs if needs is not None and needs not in kinds else last
        return kinds if final is None else [*kinds[:-1], final]

    return rule


def all_slide(config: Config) -> list[str]:
    """All layers slide if the file has a window in use, else none, as in transformers."""
    return [SLIDING if _uses_window(config) else FULL] * num_layers_of(config)


def _uses_window(config: Config) -> bool:
    # Families whose files have no such flag use the window that they state.
    in_use = flag_of(config, "use_sliding_window", "use_sliding_window" not in config)
    return in_use and config.get("sliding_window") is not None


def all_but_each(kind: str, period: str, offset: str | int | None = None) -> LayerRule:
    """Return the rule that all layers are of one kind, except one of each period.

    That one attends to all positions; it is the one at ``offset``, or the last of the period. A
    file has the length of the period under the key ``period``, and may have the offset under a key.

    >>> rule = all_but_each(SLIDING, "sliding_window_pattern")
    >>> rule({"num_hidden_layers": 4, "sliding_window_pattern": 3})
    ['swa', 'swa', 'attn', 'swa']
    """

    def rule(config: Config) -> list[str]:
        length = integer_of(config, period)
        full = length - 1 if offset is None else offset
        if isinstance(full, str):
            full = integer_of(config, full, low=0, high=length)
        return [FULL if layer % length == full else kind for layer in range(num_layers_of(config))]

    return rule


def full_behind_groups(config: Config) -> list[str]:
    """All layers have a state but the last of each group, and those behind the last whole group.

    >>> full_behind_groups({"num_hidden_layers": 5, "layer_group_size": 2})
    ['state', 'attn', 'state', 'attn', 'attn']
    """
    kinds = all_but_each(STATE, "layer_group_size")(config)
    # Layers behind the last whole group
    num_behind = len(kinds) % integer_of(config, "layer_group_size")
    return kinds[: len(kinds) - num_behind] + [FULL] * num_behind


def lower_half_caches(config: Config) -> list[str]:
    """The lower half and the next two layers cache; those above attend to the last cache of these.

    One layer of each ``mb_per_layer`` has a state. Of the others, those of the lower half slide
    (phi4flash.py of vLLM 0.10).

    >>> keys = {"num_hidden_layers": 8, "mb_per_layer": 2, "sliding_window": 512}
    >>> lower_half_caches(keys)
    ['state', 'swa', 'state', 'swa', 'state', 'attn', 'none', 'none']
    """
    period = integer_of(config, "mb_per_layer")
    slides = all_slide(config)
    half = len(slides) // 2
    kinds = []
    for layer, kind in enumerate(slides):
        # Above, attention reads the last cache below, and Mamba the last output.
        if layer >= half + 2:
            kinds.append(NONE)
        elif layer % period == 0:
            kinds.append(STATE)
        else:
            kinds.append(kind if layer < half else FULL)
    return kinds


def by_list(key: str, absent: str, listed: str = FULL) -> LayerRule:
    """Return the rule that a list under ``key`` has the layers of the kind ``listed``.

    The others have a state. Without such a list, all layers are of the kind ``absent``.
    """

    def rule(config: Config) -> list[str]:
        layers = range(num_layers_of(config))
        numbers = integers_of(config.get(key), key, layers, f"layers of 0 to {len(layers) - 1}")
        if numbers is None:
            return [absent for _ in layers]
        return [listed if layer in numbers else STATE for layer in layers]

    return rule


def upper_slide(config: Config) -> list[str]:
    """Layers from ``max_window_layers`` on slide, if sliding is in use (Qwen2Config)."""
    layers = range(num_layers_of(config))
    in_use = _uses_window(config)
    # Where nothing slides, the file need not state the key.
    first = integer_of(config, "max_window_layers", low=0) if in_use else len(layers)
    return [SLIDING if layer >= first else FULL for layer in layers]


def every_other_lower_slides(config: Config) -> list[str]:
    """Every other layer below ``max_window_layers`` slides, if any does (Qwen2MoeConfig)."""
    in_use = flag_of(config, "use_sliding_window")
    end = integer_of(config, "max_window_layers", low=0) if in_use else 0
    sliding_layers = range(0, end, 2)
    return [SLIDING if layer in sliding_layers else FULL for layer in range(num_layers_of(config))]


# M is Mamba, * is attention; an MLP (-) and an expert (E) cache nothing.
_LETTERS: Final = MappingProxyType({"M": STATE, "*": FULL, "-": NONE, "E": NONE})


def by_letter(config: Config) -> list[str]:
    """``hybrid_override_pattern`` has a letter for each layer (NemotronHConfig).

    >>> by_letter({"hybrid_override_pattern": "M-M*"})
    ['state', 'none', 'state', 'attn']
    """
    pattern = config.get("hybrid_override_pattern")
    letters = pattern if isinstance(pattern, str) else ""
    if not 0 < len(letters) < MAX_LAYERS or {*letters} - {*_LETTERS}:
        expected = f"a letter of {' '.join(_LETTERS)} for each layer"
        raise unusable("hybrid_override_pattern", expected, pattern)
    return [_LETTERS[letter] for letter in letters]


def by_block(config: Config) -> list[str]:
    """Layers of ``block_configs`` attend, unless replaced by a linear layer or nothing."""
    kinds = []
    for block in nas_attention(config):
        is_replaced = flag_of(block, "no_op") or flag_of(block, "replace_with_linear")
        kinds.append(NONE if is_replaced else FULL)
    return kinds


def nas_attention(config: Config) -> list[Config]:
    """Return the keys of each layer's attention in ``block_configs``. None has a window."""
    blocks = config.get("block_configs")
    num_layers = num_layers_of(config)
    expected = f"a mapping with an 'attention' for each of {num_layers} layers"
    if not isinstance(blocks, list | tuple) or len(blocks) != num_layers:
        raise unusable("block_configs", expected, blocks)
    layers = []
    for block in blocks:
        # A block has an attention and an FFN, which caches nothing.
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise unusable("block_configs", expected, block)
        if attention.get("window_length") is not None:
            raise unusable("block_configs", "no window_length", attention["window_length"])
        layers.append(attention)
    return layers


def numbered_from_one(config: Config) -> list[str]:
    """``linear_attn_config`` lists the layers, numbered from 1 (KimiLinearConfig)."""
    num_layers = num_layers_of(config)
    key = "linear_attn_config"
    stated = mapping_of(config, key)
    # A file without the lists has the class's: each fourth layer attends, but not layer 0.
    if "full_attn_layers" not in stated or "kda_layers" not in stated:
        return [FULL if layer and layer % 4 == 0 else STATE for layer in range(num_layers)]
    numbers = range(1, num_layers + 1)
    expected = f"each of the layers 1 to {num_layers} once"
    full_numbers = integers_of(stated["full_attn_layers"], key, numbers, expected) or []
    state_numbers = integers_of(stated["kda_layers"], key, numbers, expected) or []
    if sorted(full_numbers + state_numbers) != [*numbers]:
        raise unusable(key, expected, stated)
    return [FULL if number in full_numbers else STATE for number in numbers]


def by_flags(key: str, kinds: Mapping[str, str], otherwise: Any = None) -> LayerRule:
    """Return the rule that ``key`` has a number for each layer, of one of the kinds.

    Files that lack it follow the rule ``otherwise``.

    >>> rule = by_flags("attn_type_list", {"0": STATE, "1": FULL})
    >>> rule({"num_hidden_layers": 2, "attn_type_list": [0, 1]})
    ['state', 'attn']
    """

    def rule(config: Config) -> list[str]:
        num_layers = num_layers_of(config)
        expected = f"{num_layers} of {', '.join(kinds)}"
        flags = integers_of(config.get(key), key, [*map(int, kinds)], expected) or []
        if not flags and otherwise is not None:
            return layer_rule(otherwise)(config)
        if len(flags) != num_layers:
            raise unusable(key, expected, config.get(key))
        return [kinds[str(flag)] for flag in flags]

    return rule


def by_period(config: Config) -> list[str]:
    """``sliding_window_pattern`` is a number, or the letters of a period (Exaone4Config)."""
    pattern = config.get("sliding_window_pattern")
    # Without a window, a pattern does not count.
    if config.get("sliding_window") is None:
        return [FULL] * num_layers_of(config)
    if not isinstance(pattern, str):
        return all_but_each(SLIDING, "sliding_window_pattern")(config)
    if not pattern or {*pattern} - {*"LG"}:
        raise unusable("sliding_window_pattern", "a number, or letters of L and G", pattern)
    num_layers = num_layers_of(config)
    # The letters of all periods, at least as many as there are layers; the last layer is full.
    letters = pattern * (num_layers // len(pattern) + 1)
    kinds = [SLIDING if letter == "L" else FULL for letter in letters[:num_layers]]
    return [*kinds[:-1], FULL]


def after_dense(config: Config) -> list[str]:
    """The first layers may have a pattern of their own (Cohere2MoeConfig)."""
    num_layers = num_layers_of(config)
    num_dense = integer_of(config, "first_k_dense_replace", 0, low=0)
    if num_dense > num_layers:
        raise unusable("first_k_dense_replace", f"at most {num_layers} layers", num_dense)
    dense_kinds = _pattern(config, "prefix_dense_sliding_window_pattern", num_dense)
    other_kinds = _pattern(config, "sliding_window_pattern", num_layers - num_dense)
    return dense_kinds + other_kinds


def _pattern(config: Config, key: str, num_layers: int) -> list[str]:
    """Return the kinds of ``num_layers`` layers that slide, except one of each period."""
    if not num_layers:
        return []
    return all_but_each(SLIDING, key)({**config, "num_hidden_layers": num_layers})


def num_layers_of(config: Config) -> int:
    return integer_of(config, NUM_LAYERS, high=MAX_LAYERS)


_RULES: Final = (
    *(repeat, all_but_each, by_list, by_flags),
    *(all_slide, upper_slide, every_other_lower_slides, by_period, after_dense),
    *(full_behind_groups, lower_half_caches, by_letter, by_block, numbered_from_one),
)

RULES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {rule.__name__: rule for rule in _RULES}
)
"""The rules that families.json names; the first four have arguments."""
