"""The logical tensors of one layer's cache: their axes, global sizes, and how ranks divide them.

Each kind of cache has one function here that returns its tensors: K and V by head
(:func:`attention`), latents (:func:`latent`, :func:`sparse_latent`), and the states of recurrent
layers (:func:`mamba1`, :func:`mamba2`, :func:`delta`). A new kind of cache is a new function;
:mod:`kvplan.models.families` calls it for the models that have it.

A recurrent layer has two states: a convolution's last inputs, ``steps`` for each channel, and a
matrix for each head (or a vector for each channel). The convolution's channels are several tensors,
because tensor parallelism divides each by its own heads or groups. All lie in the same rows::

    Mamba1    conv [x]            ssm [channel, state]
    Mamba2    conv [x | B | C]    ssm [head, dim, state]    B and C by group
    GDN, KDA  conv [q | k | v]    ssm [head, value, key]    q, k by key head; v, ssm by value head

The shapes are those of ``MambaStateShapeCalculator`` in vLLM 0.33
(vllm/model_executor/layers/mamba/mamba_utils.py). Where the number of ranks does not divide the
number of groups, a rank holds the groups that its heads use, so several ranks hold the same group.

The states are fp32, and the convolution has the dtype of the weights, unless a file or
``Model.with_dtypes`` says otherwise. SGLang has the same defaults (``mamba2_state_dtype`` of
sglang/srt/configs/mamba_utils.py, 0.5.23), and so has vLLM for Nemotron-H and KDA. For other models
vLLM stores the state in the dtype of the weights as well, unless ``--mamba-ssm-cache-dtype`` is
given (``MambaStateDtypeCalculator``).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import check_fields, integer, is_one_of, name
from kvplan._text import shown
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError
from kvplan.models.layouts import HEAD, KV, STEP

FULL: Final = "attn"
"""The group of layers that attend to all positions, and of all attention layers of one kind."""

SLIDING: Final = "swa"
"""The group of layers that attend to a sliding window, in a model that has both kinds."""

STATE: Final = "state"
"""The group of layers with a recurrent state."""

SSM: Final = "ssm"
"""The kind of the recurrent state itself, as opposed to the state of its convolution."""

MAX_COUNT: Final = 1 << 24

FP8_DTYPES: Final = MappingProxyType(
    {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
)
"""The dtypes of caches that engines store as bytes, by their own words (``kv_cache_dtype``)."""


@attrs.frozen
class Tensor:
    """One logical tensor of a layer's cache: ``layers.{i}.{kind}``, in blocks of ``group``.

    ``axes`` are names with global sizes. A ``paged`` tensor also has a token axis. ``sharded`` is
    the axis that tensor parallelism divides into ``shards`` equal units (heads) that stay whole;
    None: every rank holds the whole tensor. ``dtype`` None is the dtype of the model's cache.

    Tensors of one layer with the same ``pool`` share a page, and those with the same ``section``
    are interleaved in it (:mod:`kvplan.models.layouts`); both default to ``kind``. ``scale_of``
    names the section whose values the tensor scales. ``window`` is how many tokens back the layer
    attends, or if it is ``chunked`` the size of the chunks inside which it does. ``plain_axes`` are
    the axes of a tensor of packed bytes when the cache has another dtype.

    >>> sizes = (("kv", 2), ("head", 12), ("dim", 64))
    >>> tensor = Tensor("attn", "attn", sizes, sharded="head", shards=12)
    >>> head_axes = [tensor.local_axes(rank, 8)[1] for rank in range(8)]
    >>> [(axis.start, axis.stop) for axis in head_axes]
    [(0, 2), (1, 3), (3, 5), (4, 6), (6, 8), (7, 9), (9, 11), (10, 12)]
    """

    kind: str
    group: str
    axes: tuple[tuple[str, int], ...]
    paged: bool = True
    sharded: str | None = None
    shards: int = 1
    dtype: str | None = None
    pool: str = attrs.field(default=attrs.Factory(lambda self: self.kind, takes_self=True))
    section: str = attrs.field(default=attrs.Factory(lambda self: self.kind, takes_self=True))
    scale_of: str | None = None
    window: int | None = None
    plain_axes: tuple[tuple[str, int], ...] | None = None
    chunked: bool = False

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a tensor", name, "kind", "group")
        check_fields(self, "a tensor", integer, "shards", low=1, high=MAX_COUNT)
        sizes = dict(self.axes)
        sharded = self.sharded
        if sharded is not None and (sharded not in sizes or sizes[sharded] % self.shards):
            action = f"describe tensor {self.kind!r}"
            expected = f"an axis {sharded!r} whose size {self.shards} shards divide"
            got = f"{sizes}"
            shards = self.shards
            raise KVPlanError(
                "SIZE", action, expected=expected, got=got, sharded=sharded, shards=shards
            )

    def in_group(self, group: str) -> Tensor:
        """Return the tensor in blocks of another group."""
        return attrs.evolve(self, group=group)

    def first_attended(self, position: int) -> int:
        """Return the first position to which the token at ``position`` attends.

        (``get_num_skipped_tokens`` of vllm/v1/core/single_type_kv_cache_manager.py, 0.33)
        """
        if self.window is None:
            return 0
        if self.chunked:
            return position // self.window * self.window
        return max(position + 1 - self.window, 0)

    def shards_of(self, rank: int, ranks: int) -> range:
        """Return the shards that tensor-parallel rank ``rank`` of ``ranks`` holds."""
        if self.sharded is None:
            return range(self.shards)
        # Both ends are rounded outwards, so neighbouring ranks share a shard that both use.
        return range(rank * self.shards // ranks, -(-(rank + 1) * self.shards // ranks))

    def replicas(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks hold each shard, at least; they are consecutive."""
        if self.sharded is None:
            return ranks
        num_holders = []
        for shard in range(self.shards):
            first_rank = shard * ranks // self.shards
            num_holders.append(-(-(shard + 1) * ranks // self.shards) - first_rank)
        return min(num_holders)

    def local_axes(self, rank: int, ranks: int) -> tuple[Axis, ...]:
        """Return the part of each axis that the rank holds. Strides are 0; a layout sets them."""
        shards = self.shards_of(rank, ranks)
        axes = []
        for axis_name, size in self.axes:
            start, stop = 0, size
            if axis_name == self.sharded:
                start = shards.start * size // self.shards
                stop = shards.stop * size // self.shards
            axes.append(Axis(axis_name, start, stop, size, 0))
        return tuple(axes)


Layer = tuple[Tensor, ...]
Layers = tuple[Layer, ...]


def attention(
    heads: int,
    dim: int,
    group: str = FULL,
    window: int | None = None,
    value_dim: int | None = None,
) -> Layer:
    """Return K and V of each head.

    If V has another size, ``value_dim``, its elements follow those of K on one axis.

    >>> attention(8, 128)[0].axes
    (('kv', 2), ('head', 8), ('dim', 128))
    >>> attention(8, 192, value_dim=128)[0].axes
    (('head', 8), ('dim', 320))
    """
    axes: tuple[tuple[str, int], ...] = ((KV, 2), (HEAD, heads), ("dim", dim))
    # Elements of K and V that differ in number have no axis over K and V.
    if value_dim not in (None, dim):
        axes = ((HEAD, heads), ("dim", dim + value_dim))
    return (Tensor("attn", group, axes, sharded=HEAD, shards=heads, window=window),)


def latent(rank: int, rope: int, group: str = FULL, window: int | None = None) -> Layer:
    """Return the compressed latent with the rotary key behind it, one for all heads (MLA).

    >>> latent(512, 64)[0].axes
    (('dim', 576),)
    """
    return (Tensor("attn", group, (("dim", rank + rope),), window=window),)


def sparse_latent(rank: int, rope: int, index: int) -> Layer:
    """Return an fp8 latent and the keys of an indexer (DeepSeek-V3.2), in bytes per token.

    The latent of a token is ``rank`` fp8 values, an fp32 scale for each 128 of them, and ``rope``
    bfloat16 values (``fp8_ds_mla`` in vllm/v1/attention/backends/mla/flashmla_sparse.py, 0.33). If
    the cache has another dtype, the latent is a plain one. The indexer has ``index`` fp8 values per
    token in either case. A block stores the values of all its tokens first, then an fp32 scale for
    each 128 values of each token (``DeepseekV32IndexerCache`` in
    vllm/model_executor/models/deepseek_v2.py, ``indexer_k_quant_and_cache`` in
    csrc/cache_kernels.cu).

    >>> [dict(tensor.axes) for tensor in sparse_latent(512, 64, 128)]
    [{'byte': 656}, {'byte': 128}, {'byte': 4}]
    """
    # One fp8 byte for each value, and four bytes for each scale of 128 values.
    latent_bytes = rank + 4 * -(-rank // 128) + 2 * rope
    scale_bytes = 4 * -(-index // 128)
    plain_axes = (("dim", rank + rope),)
    return (
        Tensor("attn", FULL, (("byte", latent_bytes),), dtype="uint8", plain_axes=plain_axes),
        Tensor("index", FULL, (("byte", index),), dtype="uint8"),
        Tensor("index.scale", FULL, (("byte", scale_bytes),), dtype="uint8", pool="index"),
    )


def with_index_keys(layer: Layer, dim: int) -> Layer:
    """Return a layer with the keys of an indexer, one for all heads, in the dtype of the cache.

    >>> dict(with_index_keys(attention(4, 128), 128)[1].axes)
    {'dim': 128}
    """
    return (*layer, Tensor("index", FULL, (("dim", dim),)))


def mamba1(channels: int, state: int, steps: int, dtype: str, ssm_dtype: str) -> Layer:
    """Return a Mamba layer: every channel has its own convolution and its own state vector.

    >>> [tensor.kind for tensor in mamba1(8192, 16, 3, "bfloat16", "float32")]
    ['conv.x', 'ssm']
    """
    return (
        _conv("x", channels, 1, steps, dtype),
        _ssm((("channel", channels), ("state", state)), ssm_dtype),
    )


def mamba2(
    heads: int, dim: int, groups: int, state: int, steps: int, dtype: str, ssm_dtype: str
) -> Layer:
    """Return a Mamba-2 layer: the heads of a group share B and C, which are convolved too.

    With one group and two ranks, each rank holds the group:

    >>> x, b, c, ssm = mamba2(48, 64, 1, 128, 3, "bfloat16", "float32")
    >>> [str(b.local_axes(rank, 2)[0]) for rank in range(2)]
    ['channel [0, 128) of 128 stride 0', 'channel [0, 128) of 128 stride 0']
    """
    return (
        _conv("x", heads, dim, steps, dtype),
        _conv("B", groups, state, steps, dtype),
        _conv("C", groups, state, steps, dtype),
        _ssm(((HEAD, heads), ("dim", dim), ("state", state)), ssm_dtype),
    )


def delta(
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    steps: int,
    dtype: str,
    ssm_dtype: str,
) -> Layer:
    """Return a gated delta layer (GDN), or Kimi delta attention (KDA).

    KDA has as many key heads as value heads.

    >>> layer = delta(16, 128, 32, 128, 3, "bfloat16", "float32")
    >>> [(tensor.kind, tensor.shards) for tensor in layer]
    [('conv.q', 16), ('conv.k', 16), ('conv.v', 32), ('ssm', 32)]
    """
    return (
        _conv("q", key_heads, key_dim, steps, dtype),
        _conv("k", key_heads, key_dim, steps, dtype),
        _conv("v", value_heads, value_dim, steps, dtype),
        _ssm(((HEAD, value_heads), ("value", value_dim), ("key", key_dim)), ssm_dtype),
    )


def convolution(channels: int, steps: int, dtype: str) -> Layer:
    """Return a short convolution, whose last inputs are all that the layer keeps.

    >>> convolution(2048, 2, "bfloat16")[0].axes
    (('channel', 2048), ('step', 2))
    """
    return (_conv("x", channels, 1, steps, dtype),)


def lightning(heads: int, dim: int, dtype: str) -> Layer:
    """Return a lightning attention layer: a matrix for each head, without a convolution.

    >>> lightning(64, 128, "float32")[0].axes
    (('head', 64), ('key', 128), ('value', 128))
    """
    return (_ssm(((HEAD, heads), ("key", dim), ("value", dim)), dtype),)


def _conv(part: str, units: int, width: int, steps: int, dtype: str) -> Tensor:
    """Return the channels of a convolution that belong to ``units`` heads, groups or channels.

    Each unit has ``width`` channels.
    """
    return Tensor(
        kind=f"conv.{part}",
        group=STATE,
        axes=(("channel", units * width), (STEP, steps)),
        paged=False,
        sharded="channel",
        shards=units,
        dtype=dtype,
        pool=STATE,
        section="conv",
    )


def _ssm(axes: tuple[tuple[str, int], ...], dtype: str) -> Tensor:
    """Return a matrix for each unit of the first axis."""
    sharded, shards = axes[0]
    return Tensor(
        SSM, STATE, axes, paged=False, sharded=sharded, shards=shards, dtype=dtype, pool=STATE
    )


def convert(layer: Layer, dtype: str | None, ssm_dtype: str | None) -> Layer:
    """Return the layer with an attention cache of ``dtype`` and SSM states of ``ssm_dtype``.

    None changes nothing. Raises ``DTYPE``.

    >>> convert(sparse_latent(512, 64, 128), "bfloat16", None)[0].axes
    (('dim', 576),)
    """
    for new_dtype in (dtype, ssm_dtype):
        if new_dtype is not None:
            _check_dtype("store a cache", new_dtype)
    tensors = []
    for tensor in layer:
        if dtype and tensor.plain_axes:
            tensor = attrs.evolve(tensor, axes=tensor.plain_axes, dtype=None, plain_axes=None)
        if ssm_dtype and tensor.kind == SSM:
            tensor = attrs.evolve(tensor, dtype=ssm_dtype)
        tensors.append(tensor)
    return tuple(tensors)


def group_evenly(layers: Layers) -> Layers:
    """Return the layers with each group divided so that all have about the same number of layers.

    That number is the size of the smallest group, or of the largest if that is less than one and a
    half times as large. If a group is divided into ``n``, its i-th layer goes to number ``i % n``,
    so each pipeline stage has layers of all (``_get_kv_cache_groups_uniform_page_size`` of
    vllm/v1/core/kv_cache_planning.py, 0.33). The first keeps the name, the others append their
    number.

    >>> swa, full = attention(8, 64, "swa", 128), attention(8, 64)
    >>> [tensor.group for (tensor,) in group_evenly((swa, swa, full, swa))]
    ['swa', 'swa.1', 'attn', 'swa.2']
    """
    layer_indices: dict[str, list[int]] = {}  # by group
    for layer_index, layer in enumerate(layers):
        for group in dict.fromkeys(tensor.group for tensor in layer):
            layer_indices.setdefault(group, []).append(layer_index)
    # Groups are divided into parts of this many layers.
    sizes = [*map(len, layer_indices.values())] or [1]
    size = max(sizes) if 2 * max(sizes) < 3 * min(sizes) else min(sizes)
    new_group = {}  # by group and layer
    for group, indices in layer_indices.items():
        # Layers go to the new groups in turn.
        num_groups = -(-len(indices) // size)
        for nth, layer_index in enumerate(indices):
            number = nth % num_groups
            new_group[group, layer_index] = f"{group}.{number}" if number else group
    new_layers = []
    for layer_index, layer in enumerate(layers):
        groups = [new_group[tensor.group, layer_index] for tensor in layer]
        new_layers.append(tuple(map(Tensor.in_group, layer, groups)))
    return tuple(new_layers)


def quantize(layer: Layer, bits: int, scale_dtype: str, scale_elements: int | None) -> Layer:
    """Return the layer with K and V of ``bits`` bits each, and a tensor of scales for each of them.

    Each ``scale_elements`` elements of a token's head have one scale; None: the whole head has one.
    Values are packed into bytes. Raises ``SIZE`` if a head is not a whole number of bytes or of
    scales.

    >>> values, scales = quantize(attention(8, 128), 4, "float8_e4m3fn", 16)
    >>> values.axes, scales.kind, scales.axes[2]
    ((('kv', 2), ('head', 8), ('byte', 64)), 'attn.scale', ('scale', 8))
    """
    bits = integer(bits, "bits of a value", low=1, high=65)
    _check_dtype("scale a cache", scale_dtype)
    tensors: list[Tensor] = []
    for tensor in layer:
        if tensor.paged and tensor.sharded == HEAD:
            tensors += _values_and_scales(tensor, bits, scale_dtype, scale_elements)
        else:
            tensors.append(tensor)
    return tuple(tensors)


def _values_and_scales(
    tensor: Tensor, bits: int, scale_dtype: str, scale_elements: int | None
) -> Layer:
    """Return the packed values of a tensor with heads, and their scales."""
    action = f"scale each head of {tensor.kind!r}"
    sizes = dict(tensor.axes)
    if KV not in sizes or "dim" not in sizes:
        # A quantized tensor has bytes or scales instead of elements.
        elements = "of elements on an axis 'dim', not quantized yet"
        expected = f"K and V {elements if KV in sizes else 'of equal sizes'}"
        raise KVPlanError("SIZE", action, expected=expected, got=f"{sizes}", kind=tensor.kind)
    dim = sizes["dim"]
    per_scale = dim if scale_elements is None else scale_elements
    per_scale = integer(per_scale, "scale_elements", low=1, high=MAX_COUNT)
    if dim % per_scale:
        expected = f"scale_elements that divide its {dim} elements"
        got = f"{per_scale}"
        raise KVPlanError(
            "SIZE", action, expected=expected, got=got, elements=dim, scale_elements=per_scale
        )
    head_bytes, spare_bits = divmod(dim * bits, 8)
    if spare_bits:
        action = f"pack each head of {tensor.kind!r} into bytes"
        expected = "a whole number of bytes"
        got = f"{dim} elements of {bits} bits"
        hint = "the next head would begin inside a byte"
        raise KVPlanError(
            "SIZE", action, expected=expected, got=got, hint=hint, elements=dim, bits=bits
        )
    # Values and scales have the heads of the tensor, and one axis of their own.
    outer_axes = tuple(axis for axis in tensor.axes if axis[0] != "dim")
    values = attrs.evolve(tensor, axes=(*outer_axes, ("byte", head_bytes)), dtype="uint8")
    kind = f"{tensor.kind}.scale"
    scales = attrs.evolve(
        tensor,
        kind=kind,
        axes=(*outer_axes, ("scale", dim // per_scale)),
        dtype=scale_dtype,
        section=kind,
        scale_of=tensor.section,
    )
    return values, scales


def _check_dtype(action: str, dtype: str) -> None:
    if not is_one_of(dtype, ITEMSIZE):
        expected = f"a dtype of {', '.join(ITEMSIZE)}"
        raise KVPlanError("DTYPE", action, expected=expected, got=shown(dtype), dtype=shown(dtype))
