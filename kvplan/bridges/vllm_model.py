"""What a vLLM rank caches, read off the engine's own specs and layers: no model type is needed.

A spec (vllm/v1/kv_cache_interface.py, 0.32 and 0.33) declares what a block of its layers holds *on
this rank*: heads, sizes, a dtype, shapes of states. A plan also needs the whole tensor: how many
heads there are in all, and which channels of a convolution are replicated. Most of it follows from
the rank's part and the number of ranks, since vLLM divides evenly, and replicates only where there
are fewer heads than ranks:

==================================  ==============================================================
a spec declares                     the tensor
==================================  ==============================================================
``max_tp_shards`` 1, or the fields  a latent, or rows of bytes, which every rank has whole
of MLA                              (:mod:`kvplan.bridges.vllm_rows`)
several KV heads                    that many on each of ``tp`` ranks
one KV head                         1 to ``tp`` heads, each on several ranks: ``kv_heads`` says how
                                    many, since the spec does not
``tokens_per_state``                one row for so many tokens, in a group of its own
no slots of tokens                  a ring: one block of a request, in which position ``p`` has slot
                                    ``p % size``. It moves whole, as a state does
``shapes`` of a Mamba kind          the tensors of :mod:`kvplan.models.tensors`, rank times ``tp``
``shapes`` of any other kind        one tensor for each state and rank: such states move between
                                    ranks of equally many, and to no others
==================================  ==============================================================

Only what a spec declares counts, never its class or the type of the model. A spec that declares
something else is refused, with what it declares.

Tensors are named by the number in vLLM's name of a layer (``layers.3.attn``), as
:class:`~kvplan.Model` names them. Where a name has no number, or several, or where one number has
several caches of one kind, their names include vLLM's name of the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import attrs

from kvplan._checks import INT64_END, instance, integer
from kvplan.bridges.assembly import (
    ObservedModel,
    RankInfo,
    contradiction,
    rank_prefix,
    reads_engine,
    total_heads,
    unknown_states,
)
from kvplan.bridges.vllm_rows import PAGE, is_packed, packed_row, packed_tensors
from kvplan.describe.views import dtype_name
from kvplan.models.layouts import HEAD
from kvplan.models.model import NamedLayer
from kvplan.models.tensors import (
    FP8_DTYPES,
    STATE,
    Layer,
    Tensor,
    attention,
    convolution,
    delta,
    lightning,
    mamba1,
    mamba2,
)

DRAFT_MODULES: Final = frozenset({"draft_model", "mtp"})
"""Modules whose layers vLLM numbers from 0, though they are draft layers of the model.

Other draft layers are numbered after those of the model: ``DraftModelProposer`` of
vllm/v1/spec_decode/draft_model.py, and the models of vllm/model_executor/models whose names end
with mtp, eagle or eagle3.
"""

PLAIN_MODES: Final = ("NONE", "FP8_PER_TENSOR")
"""Values of ``kv_quant_mode`` for which a cache holds one value for each element and no scales."""

KvHeads = Callable[[str, int | None, bool], int | None]
"""Returns how many KV heads a layer has on all ranks together, or None where that is not known.

Its arguments are vLLM's name of the layer, its number, None where the name has not exactly one, and
whether it is a draft layer, numbered from 0.
"""


class CachedLayer(NamedTuple):
    """A layer with a cache of its own: vLLM's name, its spec and the index of its group."""

    name: str
    spec: Any
    group: int

    @property
    def role(self) -> str:
        """Which of the caches of a layer this is: a state, an indexer's keys, or attention."""
        if is_ring(self.spec):
            return "ring"
        if holds_state(self.spec):
            return "state"
        return "index" if is_indexer(self.spec) else "attn"


def holds_state(spec: Any) -> bool:
    """Return whether a block of a spec holds one state of a request and not values of tokens."""
    return hasattr(spec, "shapes") or is_ring(spec)


def is_ring(spec: Any) -> bool:
    """Return whether a spec is a ring's: it maps no tokens to slots.

    Neither do specs of raw memory, but these have no view.
    """
    has_slots = getattr(spec, "uses_slot_mapping", True)
    return not has_slots and getattr(spec, "has_layer_views", True)


def is_latent(spec: Any) -> bool:
    """Return whether every rank holds the whole cache of a spec's layers.

    A spec declares that by ``max_tp_shards``, or by a field that specs of MLA alone have, since
    some latents lack the former (vllm/models/deepseek_v41/attention.py). To have no V is no sign:
    ranks divide Inkling's convolutions (vllm/models/inkling/nvidia/sconv_swa_attn.py).
    """
    return getattr(spec, "max_tp_shards", None) == 1 or hasattr(spec, "cache_dtype_str")


def is_indexer(spec: Any) -> bool:
    """Return whether a spec is that of an indexer's keys."""
    return getattr(getattr(spec, "cache_role", None), "value", "") == "indexer"


def cached_layers(kv_cache_config: Any) -> Iterator[CachedLayer]:
    """Yield the layers of groups that are transferred, without those that use another's cache."""
    held = set[str]()
    for tensor in kv_cache_config.kv_cache_tensors:
        held.update(tensor.layers)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if getattr(group, "enable_kv_transfer", True):
            # The layers of a group may have specs of their own.
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            for name in group.layer_names:
                if name in held:
                    yield CachedLayer(name, specs.get(name, group.kv_cache_spec), index)


def tokens_per_state(spec: Any) -> int:
    """Return how many tokens share one value in the blocks of a spec.

    Raises ``LAYOUT`` where a token has several.
    """
    if holds_state(spec):
        return 1
    tokens = getattr(spec, "tokens_per_state", 1)
    if tokens != int(tokens) or tokens < 1:
        raise contradiction(
            "LAYOUT", "read a cache of vLLM", "tokens_per_state of 1 or more", f"{tokens}"
        )
    return int(tokens)


BLOCK: Final = 0
"""Instead of a number of tokens: a whole block, whatever its size."""


def units_of(spec: Any) -> list[int]:
    """Return for how many tokens a value of a spec may be: one number, or two possible ones.

    Rows of bytes in an unknown order move as whole blocks. Whether the order is known may depend on
    the layer, which a scheduler does not have.
    """
    units = [tokens_per_state(spec)]
    if not holds_state(spec) and is_packed(spec) and packed_row(spec, None) is None:
        # A record that is not known has no other order.
        has_record = getattr(spec, "state_content_bytes", None) is not None
        units = [BLOCK] if has_record else [*units, BLOCK]
    return units


def unit_of(spec: Any, tensors: Layer) -> int:
    """Return for how many tokens one value of a layer with these tensors is."""
    is_page = any(tensor.kind == PAGE for tensor in tensors)
    return BLOCK if is_page else tokens_per_state(spec)


def group_name(index: int, tokens: int = 1) -> str:
    """Return the name of one of vLLM's groups, or of its layers with a value for several tokens.

    >>> group_name(0), group_name(2, tokens=4), group_name(2, tokens=BLOCK)
    ('group0', 'group2.4', 'group2.block')
    """
    return f"group{index}" + {1: "", BLOCK: ".block"}.get(tokens, f".{tokens}")


@reads_engine("vLLM 0.33")
def vllm_group_names(index: int, spec: Any) -> list[str]:
    """Return kvplan's names of one of vLLM's cache groups, or of its layers of one spec.

    A worker has some of them, and a scheduler, which has no layers, knows all: rows of bytes may
    move one by one or as whole blocks. Raises ``LAYOUT`` where a token has several values.
    """
    return [group_name(integer(index, "index of a group"), unit) for unit in units_of(spec)]


@reads_engine("vLLM 0.33")
def vllm_model(
    model_name: Mapping[str, Any] | str,
    info: RankInfo,
    kv_cache_config: Any,
    layers: Mapping[str, Any],
    *,
    kv_heads: KvHeads = lambda name, number, is_draft: None,
    num_layers: int | None = None,
    conv: str = "DS",
    tiled_keys: bool = False,
) -> ObservedModel:
    """Return what a vLLM rank caches, for :func:`~kvplan.bridges.from_vllm`.

    ``layers`` is ``vllm_config.compilation_config.static_forward_context``. Layers from number
    ``num_layers`` on are drafts; None: none are, except those of :data:`DRAFT_MODULES`. ``conv`` is
    vLLM's order of a convolution's state: ``DS`` or ``SD`` (``get_conv_state_layout``).
    ``tiled_keys``: an indexer's keys of fp8 lie in tiles, as on ROCm.

    Groups are named after their index, ``group0``; one whose values are of 4 tokens ``group0.4``.

    Raises ``LAYOUT`` for a cache that has no description, ``SIZE`` where the number of KV heads of
    a layer is not known or contradicts its spec, ``DTYPE`` for an unknown dtype.
    """
    instance(RankInfo, info, "info")
    cached = [*cached_layers(kv_cache_config)]
    first_draft = INT64_END if num_layers is None else num_layers
    # A number that has several caches of one role does not tell them apart.
    holders = Counter((_number(layer.name), layer.role) for layer in cached)
    observed: dict[Hashable, NamedLayer] = {}
    for layer in cached:
        number = _number(layer.name)
        is_draft = is_in_draft_module(layer.name)
        # Other drafts are numbered behind the model's layers.
        if number is not None and not is_draft and number >= first_draft:
            is_draft = True
            number -= first_draft
        prefix = f"{layer.name}."
        if number is not None:
            prefix = f"draft.{number}." if is_draft else f"layers.{number}."
            if holders[_number(layer.name), layer.role] > 1:
                prefix += f"{_after_number(layer.name)}."
        module = layers.get(layer.name)
        if is_ring(layer.spec):
            tensors = _ring(layer, cached, info, kv_heads(layer.name, number, is_draft))
        elif holds_state(layer.spec):
            tensors = _states(layer, module, info, conv)
        else:
            total = kv_heads(layer.name, number, is_draft)
            tensors = _values(layer, module, info.tp, total, tiled_keys=tiled_keys)
        group = group_name(layer.group, unit_of(layer.spec, tensors))
        in_group = tuple(tensor.in_group(group) for tensor in tensors)
        observed[layer.name] = NamedLayer(prefix, in_group)
    return ObservedModel(model_name, MappingProxyType(observed))


def numbers_in(name: str) -> list[int]:
    """Return the numbers in vLLM's name of a layer."""
    return [int(part) for part in name.split(".") if part.isdecimal()]


def is_in_draft_module(name: str) -> bool:
    """Return whether vLLM's name of a layer is in a module whose layers are numbered from 0."""
    return not DRAFT_MODULES.isdisjoint(name.split("."))


def _number(name: str) -> int | None:
    """Return the number in vLLM's name of a layer, None unless there is exactly one."""
    numbers = numbers_in(name)
    return numbers[0] if len(numbers) == 1 else None


def _after_number(name: str) -> str:
    parts = name.split(".")
    (index_of_number,) = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[index_of_number + 1 :])


def _values(
    layer: CachedLayer, module: Any, tp: int, total: int | None, *, tiled_keys: bool
) -> Layer:
    """Return the tensors of a cache with values of tokens."""
    spec = layer.spec
    action = f"read the cache of {layer.name!r}"
    for field in ("head_size", "num_kv_heads"):
        if not hasattr(spec, field):
            got = f"{type(spec).__name__} without {field}"
            raise contradiction("LAYOUT", action, "a spec of heads, or of states", got)
    dtype = _dtype(spec, module, action)
    size = int(spec.head_size)
    kind = "index" if is_indexer(spec) else "attn"
    packed_bytes = getattr(spec, "state_content_bytes", None)
    slots = getattr(spec, "num_head_slots", None)
    quantization = getattr(getattr(spec, "kv_quant_mode", None), "name", PLAIN_MODES[0])
    value_size = getattr(spec, "head_size_v", size)
    if slots not in (None, spec.num_kv_heads) or (
        packed_bytes is None and quantization not in PLAIN_MODES
    ):
        got = f"{quantization} in {slots} slots of {packed_bytes} bytes"
        raise contradiction("LAYOUT", action, "values of each head side by side", got)
    whole = is_latent(spec)
    heads = int(spec.num_kv_heads) if whole else _heads_of(layer, tp, total)
    sharded = None if whole or heads == 1 else HEAD
    if dtype == "uint8" and is_packed(spec) and sharded is None and spec.num_kv_heads == 1:
        row = packed_row(spec, module, tiled_keys=tiled_keys)
        return packed_tensors(spec, row, kind)
    if packed_bytes is None and value_size:
        return _with_dtype(attention(heads, size, value_dim=int(value_size)), dtype)
    # One vector of each head, or of all. Bytes that a kernel packs are a row of their own.
    content = ("dim", size) if packed_bytes is None else ("byte", int(packed_bytes))
    dtype = dtype if packed_bytes is None else "uint8"
    if sharded is None and heads == 1:
        return (Tensor(kind, "attn", (content,), dtype=dtype),)
    shards = heads if sharded else 1
    axes = ((HEAD, heads), content)
    return (Tensor(kind, "attn", axes, sharded=sharded, shards=shards, dtype=dtype),)


def _ring(
    layer: CachedLayer, cached: Iterable[CachedLayer], info: RankInfo, total: int | None
) -> Layer:
    """Return what a ring holds: the last tokens of a request, some of which have no row yet.

    Ranks divide it as they divide the rows of its layer, which are made of these tokens.
    """
    spec = layer.spec
    number = _number(layer.name)
    rows = [
        other
        for other in cached
        if _number(other.name) == number
        and not holds_state(other.spec)
        and tokens_per_state(other.spec) > 1
    ]
    slots = int(spec.num_heads)
    size = spec.state_content_size_bytes
    content = (("slot", slots), ("position", int(spec.num_states)), ("byte", int(size)))
    if rows and all(is_latent(row.spec) for row in rows):
        return (Tensor("ring", STATE, content, paged=False, dtype="uint8"),)
    if rows and slots == 1:
        heads = _heads_of(rows[0], info.tp, total)
        axes = ((HEAD, heads), *content[1:])
        return (
            Tensor("ring", STATE, axes, paged=False, sharded=HEAD, shards=heads, dtype="uint8"),
        )
    kind = f"{rank_prefix(info)}ring"
    return (Tensor(kind, STATE, content, paged=False, dtype="uint8", pool="ring"),)


def _with_dtype(layer: Layer, dtype: str) -> Layer:
    return tuple(attrs.evolve(tensor, dtype=dtype) for tensor in layer)


def _dtype(spec: Any, module: Any, action: str) -> str:
    """Return the dtype of a cache. vLLM stores fp8 as bytes; the layer says which fp8 that is."""
    dtype = dtype_name(spec.dtype)
    words = getattr(spec, "cache_dtype_str", None), getattr(module, "kv_cache_dtype", None)
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
    if dtype != "uint8" or mode != "FP8_PER_TENSOR" or is_packed(spec):
        return dtype
    for word in words:
        if word is not None and word in FP8_DTYPES:
            return FP8_DTYPES[word]
    raise contradiction("DTYPE", action, f"one of {', '.join(FP8_DTYPES)}", f"{words}")


def _heads_of(layer: CachedLayer, tp: int, total: int | None) -> int:
    action = f"count the KV heads of {layer.name!r}"
    local = int(layer.spec.num_kv_heads)
    return total_heads(action, local, tp, total, "set kv_heads of the connector")


def _states(layer: CachedLayer, module: Any, info: RankInfo, conv: str) -> Layer:
    """Return the tensors of a recurrent state, by the kind of state that its spec declares."""
    spec = layer.spec
    dtypes = [dtype_name(dtype) for dtype in spec.dtypes]
    shapes = [tuple(map(int, shape)) for shape in spec.shapes]
    kind = getattr(getattr(spec, "mamba_type", None), "name", "")
    ranks = 1 if getattr(spec, "tp_replicated", False) else info.tp
    reader = STATE_READERS.get((kind, len(shapes)))
    if reader is not None:
        # A first state of two dimensions is that of a convolution, whose order `conv` says.
        if conv == "SD" and len(shapes[0]) == 2:
            shapes[0] = shapes[0][::-1]
        return _whole(reader(shapes, dtypes, ranks, module), ranks, info)
    return unknown_states("" if ranks == 1 else rank_prefix(info), shapes, dtypes)


def _whole(tensors: Layer, ranks: int, info: RankInfo) -> Layer:
    """Mark tensors as undivided if every rank holds them whole."""
    if ranks == info.tp:
        return tensors
    return tuple(attrs.evolve(tensor, sharded=None, shards=1) for tensor in tensors)


StateSizes = list[tuple[int, ...]]


def _mamba1(shapes: StateSizes, dtypes: list[str], ranks: int, module: Any) -> Layer:
    channels, steps = shapes[0]
    return mamba1(channels * ranks, shapes[1][1], steps, dtypes[0], dtypes[1])


def _mamba2(shapes: StateSizes, dtypes: list[str], ranks: int, module: Any) -> Layer:
    channels, steps = shapes[0]
    heads, dim, state = shapes[1]
    local_groups, rest = divmod(channels - heads * dim, 2 * state)
    if rest or local_groups < 1:
        expected = f"{heads * dim} channels of x, and B and C of {state} a group"
        raise contradiction("SIZE", "read the convolution of a Mamba-2 layer", expected, channels)
    groups = local_groups * ranks
    if local_groups == 1 and ranks > 1:
        # One group on each rank is either its own, or the only one, which all ranks have. The
        # layer's own norm is made for the groups that the model has (MambaMixer2 of
        # vllm/model_executor/layers/mamba/mamba_mixer2.py).
        found = getattr(getattr(module, "norm", None), "n_groups", None)
        if found not in (1, ranks):
            action = "count the groups of a Mamba-2 layer"
            raise contradiction("SIZE", action, f"1 or {ranks} in its norm", f"{found}")
        groups = int(found)
    return mamba2(heads * ranks, dim, groups, state, steps, dtypes[0], dtypes[1])


def _delta(shapes: StateSizes, dtypes: list[str], ranks: int, module: Any) -> Layer:
    channels, steps = shapes[0]
    value_heads, value_dim, key_dim = shapes[1]
    # q and k have as many channels as each other, v the rest.
    key_heads, rest = divmod(channels - value_heads * value_dim, 2 * key_dim)
    if rest or key_heads < 1:
        expected = f"{value_heads * value_dim} channels of v, and q and k of {key_dim} a head"
        raise contradiction("SIZE", "read the convolution of a delta layer", expected, channels)
    sizes = (key_heads * ranks, key_dim, value_heads * ranks, value_dim)
    return delta(*sizes, steps, dtypes[0], dtypes[1])


def _lightning(shapes: StateSizes, dtypes: list[str], ranks: int, module: Any) -> Layer:
    ((heads, dim, _),) = shapes
    return lightning(heads * ranks, dim, dtypes[0])


def _short_conv(shapes: StateSizes, dtypes: list[str], ranks: int, module: Any) -> Layer:
    channels, steps = shapes[0]
    return convolution(channels * ranks, steps, dtypes[0])


StatesReader = Callable[[StateSizes, list[str], int, Any], Layer]

STATE_READERS: Final[Mapping[tuple[str, int], StatesReader]] = MappingProxyType(
    {
        ("MAMBA1", 2): _mamba1,
        ("MAMBA2", 2): _mamba2,
        ("GDN_ATTN", 2): _delta,
        ("LINEAR", 1): _lightning,
        ("SHORT_CONV", 1): _short_conv,
    }
)
"""The states of a layer by vLLM's ``mamba_type`` and their number.

They are made by ``MambaStateShapeCalculator`` of vllm/model_executor/layers/mamba/mamba_utils.py.
"""
