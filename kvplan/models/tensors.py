"""Caches: the logical tensors of one layer, with global sizes and the axis that tensor parallelism divides.

Attention caches are here: K and V by head, latents, and what comes beside them (an indexer's keys, scales). What
recurrent layers keep is in :mod:`kvplan.models.states`.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from kvplan._checks import integer, name
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError
from kvplan.models.layouts import HEAD, KV

FULL: Final = "attn"
"""The group of layers that attend to all positions, and of all attention layers where they are of one kind."""

SLIDING: Final = "swa"
"""The group of layers that attend to a window, in a model that has both kinds."""

STATE: Final = "state"
"""The group of layers that keep a state."""

SSM: Final = "ssm"
"""The kind of the tensor that is a layer's recurrent state proper, beside that of its convolution."""

MAX_COUNT: Final = 1 << 24


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

    Tensors of one layer with one ``pool`` share a page, and in it those with one ``strip`` stand side by side
    (:mod:`kvplan.models.layouts`); both are the ``kind`` where nothing is said. ``scale_of`` is the strip whose values
    the tensor scales. ``window`` is how many tokens back the layer attends. A tensor of packed bytes may say which
    ``plain`` axes it has in a cache of any other dtype.

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
    pool: str = attrs.field(default=attrs.Factory(lambda self: self.kind, takes_self=True))
    strip: str = attrs.field(default=attrs.Factory(lambda self: self.kind, takes_self=True))
    scale_of: str | None = None
    window: int | None = None
    plain: tuple[tuple[str, int], ...] | None = None

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

    def holders(self, ranks: int) -> int:
        """On how many of ``ranks`` tensor-parallel ranks each shard is, at least; they are neighbours.

        >>> Tensor("attn", "attn", (("head", 4),), sharded="head", shards=4).holders(8)
        2
        """
        if self.sharded is None:
            return ranks
        return min(-(-(unit + 1) * ranks // self.shards) - unit * ranks // self.shards for unit in range(self.shards))

    def parts(self, rank: int, ranks: int) -> tuple[Axis, ...]:
        """The part of each axis that the rank holds; strides are for a layout to set."""
        held = self.units(rank, ranks)
        return tuple(
            Axis(key, held.start * size // self.shards, held.stop * size // self.shards, size, 0)
            if key == self.sharded
            else Axis(key, 0, size, size, 0)
            for key, size in self.axes
        )


Layer = tuple[Tensor, ...]
Layers = tuple[Layer, ...]


def attention(heads: int, dim: int, group: str = FULL, window: int | None = None) -> Layer:
    """K and V of each head.

    >>> attention(8, 128)[0].axes
    (('kv', 2), ('head', 8), ('dim', 128))
    """
    axes = ((KV, 2), (HEAD, heads), ("dim", dim))
    return (Tensor("attn", group, axes, sharded=HEAD, shards=heads, window=window),)


def latent(rank: int, rope: int) -> Layer:
    """The compressed latent and the rotary key behind it, one of each for all heads (MLA).

    >>> latent(512, 64)[0].axes
    (('dim', 576),)
    """
    return (Tensor("attn", FULL, (("dim", rank + rope),)),)


def sparse_latent(rank: int, rope: int, index: int) -> Layer:
    """A latent in fp8 with an indexer's keys beside it (DeepSeek-V3.2), for each token in bytes.

    The latent is a row: ``rank`` values in fp8, an fp32 scale for each 128 of them, ``rope`` values in bfloat16
    (``fp8_ds_mla`` in vllm/v1/attention/backends/mla/flashmla_sparse.py, 0.33). In a cache of any other dtype it is a
    plain latent. The indexer keeps ``index`` values in fp8 either way, those of all tokens of a block first, and behind
    them an fp32 scale for each 128 values of each token (``DeepseekV32IndexerCache`` in
    vllm/model_executor/models/deepseek_v2.py, ``indexer_k_quant_and_cache`` in csrc/cache_kernels.cu).

    >>> [dict(tensor.axes) for tensor in sparse_latent(512, 64, 128)]
    [{'byte': 656}, {'byte': 128}, {'byte': 4}]
    """
    row = rank + 4 * -(-rank // 128) + 2 * rope
    return (
        Tensor("attn", FULL, (("byte", row),), dtype="uint8", plain=(("dim", rank + rope),)),
        Tensor("index", FULL, (("byte", index),), dtype="uint8"),
        Tensor("index.scale", FULL, (("byte", 4 * -(-index // 128)),), dtype="uint8", pool="index"),
    )


def kept_in(layer: Layer, dtype: str | None, ssm_dtype: str | None) -> Layer:
    """A layer as it is where its attention cache has ``dtype`` and its SSM states ``ssm_dtype``, None: as they are.

    Raises ``DTYPE``.

    >>> [tensor.axes for tensor in kept_in(sparse_latent(512, 64, 128), "bfloat16", None)][0]
    (('dim', 576),)
    """
    for given in (dtype, ssm_dtype):
        if given is not None:
            _check_dtype("keep a cache", given)
    made = [
        attrs.evolve(tensor, axes=tensor.plain, dtype=None, plain=None) if dtype and tensor.plain else tensor
        for tensor in layer
    ]
    return tuple(attrs.evolve(t, dtype=ssm_dtype) if ssm_dtype and t.kind == SSM else t for t in made)


def _check_dtype(action: str, dtype: str) -> None:
    if dtype not in ITEMSIZE:
        expected = f"a dtype of {', '.join(ITEMSIZE)}"
        raise KVPlanError("DTYPE", action, expected=expected, got=repr(dtype), dtype=dtype)


def packed_bytes(elements: int, bits: int, what: str) -> int:
    """How many bytes ``elements`` of ``bits`` bits take side by side. Raises ``SIZE`` where the last is not full.

    >>> packed_bytes(128, 4, "each head of 'attn'")
    64
    """
    whole, rest = divmod(elements * bits, 8)
    if rest:
        raise KVPlanError(
            "SIZE",
            f"pack {what} into bytes",
            expected="a whole number of bytes",
            got=f"{elements} elements of {bits} bits",
            hint="a cut behind them would fall inside a byte",
            elements=elements,
            bits=bits,
        )
    return whole


def quantized(layer: Layer, bits: int, scale_dtype: str, scale_elements: int | None) -> Layer:
    """A layer whose K and V are of ``bits`` bits, with a tensor of their scales behind each tensor.

    There is one scale for each ``scale_elements`` elements of a token's head, or one for all. Values are bytes,
    packed where they are smaller. Raises ``SIZE`` where a head is no whole number of bytes or of scales.

    >>> values, scales = quantized(attention(8, 128), 4, "float8_e4m3fn", 16)
    >>> values.axes, scales.kind, scales.axes
    ((('kv', 2), ('head', 8), ('byte', 64)), 'attn.scale', (('kv', 2), ('head', 8), ('scale', 8)))
    """
    bits = integer(bits, "bits of a value", low=1, high=65)
    _check_dtype("scale a cache", scale_dtype)
    made: list[Tensor] = []
    for tensor in layer:
        if not tensor.paged or tensor.sharded != HEAD:
            made.append(tensor)
            continue
        dim = dict(tensor.axes)["dim"]
        per_scale = integer(scale_elements or dim, "scale_elements", low=1, high=MAX_COUNT)
        if dim % per_scale:
            raise KVPlanError(
                "SIZE",
                f"scale each head of {tensor.kind!r}",
                expected=f"scale_elements that divide its {dim} elements",
                got=f"{per_scale}",
                elements=dim,
                scale_elements=per_scale,
            )
        outer = tuple(axis for axis in tensor.axes if axis[0] != "dim")
        size = packed_bytes(dim, bits, f"each head of {tensor.kind!r}")
        made.append(attrs.evolve(tensor, axes=(*outer, ("byte", size)), dtype="uint8"))
        kind = f"{tensor.kind}.scale"
        made.append(
            attrs.evolve(
                tensor,
                kind=kind,
                axes=(*outer, ("scale", dim // per_scale)),
                dtype=scale_dtype,
                strip=kind,
                scale_of=tensor.strip,
            )
        )
    return tuple(made)
