"""Regions, groups and views: where a worker keeps its shard of a logical tensor.

The byte address of an element is a sum with one term per dimension::

    region.address + offset_bytes + block * block_stride_bytes
        + sum over axes of (coordinate - start) * stride_bytes

This formula is all that kvplan knows about memory layouts. The six axis orders, K and V interleaved
or apart, cross-layer blocks, padding and kernel blocks are strides in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import check_fields, instance, integer, members, name, wrong_type
from kvplan._text import brief_repr
from kvplan.describe.axes import Axis, Segments, global_sizes, segments
from kvplan.errors import KVPlanError

TOKEN: Final = "token"
"""The axis over the slots of a block; its global size is the group's ``num_slots``."""

ADDRESS_END: Final = 1 << 64

FLOAT8_NAMES: Final = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"

ITEMSIZE: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "int8", "uint8", *FLOAT8_NAMES.split()), 1),
        **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
        **dict.fromkeys(("int32", "uint32", "float32"), 4),
        **dict.fromkeys(("int64", "uint64", "float64"), 8),
    }
)
"""Bytes per element, by the type names of numpy and PyTorch."""


def dtype_name(dtype: Any) -> str:
    """Return the name of an element type, which may be an object of PyTorch.

    >>> dtype_name("torch.bfloat16")
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


MEMORY_KINDS: Final = ("DRAM", "VRAM", "FILE")
OTHER_KINDS: Final = ("BLOCK", "BLK", "OBJ")
"""NIXL's other kinds of memory, which kvplan's executor does not register."""


def _owners(owners: Any) -> tuple[Any, ...]:
    return members(object, owners, "owners of a region")


@attrs.frozen
class Region:
    """A memory range that a worker registers once: ``size_bytes`` at ``address``.

    It has a memory kind and a device. Address and end lie in ``[0, 2**64]``: a range that would
    wrap raises ``BOUNDS``. ``owners`` are objects that keep the memory allocated, and live as long
    as the region: :func:`kvplan.region_of` and the bridges give tensors. Without them, the caller
    keeps the memory allocated. Equal regions may have other owners. Copies of a region in this
    process have its owners, and none are pickled.

    >>> print(Region("kv.0", 0x7f0000000000, 4096))
    kv.0: 4096 bytes at 0x7f0000000000, DRAM 0
    """

    name: str
    address: int
    size_bytes: int
    memory: str = "DRAM"
    device_id: int = 0
    owners: tuple[Any, ...] = attrs.field(
        default=(), converter=_owners, eq=False, repr=False, kw_only=True
    )

    __repr__ = brief_repr

    def __copy__(self) -> Region:
        return self

    def __deepcopy__(self, _: object) -> Region:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.name, self.address, self.size_bytes, self.memory, self.device_id)

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a region", name, "name", "memory")
        check_fields(self, "a region", integer, "address", high=ADDRESS_END)
        check_fields(self, "a region", integer, "size_bytes", low=1)
        check_fields(self, "a region", integer, "device_id")
        if self.memory not in MEMORY_KINDS:
            hint = "FILE describes a block device or an object: offsets in it"
            raise KVPlanError(
                "NAME",
                f"describe region {self.name!r}",
                expected=f"memory in {', '.join(MEMORY_KINDS)}",
                got=f"{self.memory!r}",
                hint=hint if self.memory in OTHER_KINDS else "",
                memory=self.memory,
            )
        if self.end > ADDRESS_END:
            raise KVPlanError(
                "BOUNDS",
                f"describe region {self.name!r}",
                expected="address + size_bytes <= 2**64",
                got=f"{self.address:#x} + {self.size_bytes}",
                address=self.address,
                size_bytes=self.size_bytes,
            )

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.address + self.size_bytes

    def __str__(self) -> str:
        device = f"{self.memory} {self.device_id}"
        return f"{self.name}: {self.size_bytes} bytes at {self.address:#x}, {device}"


@attrs.frozen
class Context:
    """The positions that one context-parallel rank holds.

    ``interleave_tokens`` consecutive positions go to each rank in turn: position ``p`` belongs to
    rank ``p // interleave_tokens % size``.

    >>> [p for p in range(12) if p in Context(rank=1, size=2, interleave_tokens=3)]
    [3, 4, 5, 9, 10, 11]
    """

    rank: int = 0
    size: int = 1
    interleave_tokens: int = 1

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a context", integer, "rank")
        check_fields(self, "a context", integer, "size", "interleave_tokens", low=1)
        if self.rank >= self.size:
            raise KVPlanError(
                "RANGE",
                "describe a context",
                expected=f"rank < size {self.size}",
                got=f"rank {self.rank}",
                rank=self.rank,
                size=self.size,
            )
        if self.size == 1:
            object.__setattr__(self, "interleave_tokens", 1)

    def __contains__(self, position: int) -> bool:
        return position // self.interleave_tokens % self.size == self.rank


@attrs.frozen
class Group:
    """A KV cache group: its layers share a block table.

    A block of a token group holds the values of ``tokens_per_block`` tokens. Each of its slots has
    the value of one token, or one value of ``tokens_per_slot`` tokens: a compressed row of 4, or
    the scale of a whole block. Such a value cannot be divided or merged, so both sides must have
    one for equally many tokens. A state group has ``None``: each block holds one state, which is
    of all tokens before it.

    >>> scales = Group("scales", 64, tokens_per_slot=16)
    >>> scales.num_slots
    4
    """

    name: str
    tokens_per_block: int | None = None
    context: Context = Context()
    tokens_per_slot: int = 1

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a group", name, "name")
        if self.tokens_per_block is not None:
            check_fields(self, "a group", integer, "tokens_per_block", low=1, high=1 << 31)
        if not isinstance(self.context, Context):
            raise wrong_type(f"context of group {self.name!r}", "a Context", self.context)
        if self.is_state and self.context.size > 1:
            raise KVPlanError(
                "GROUP",
                f"describe group {self.name!r}",
                expected="no context for a state group",
                got=f"size {self.context.size}",
                size=self.context.size,
            )
        check_fields(self, "a group", integer, "tokens_per_slot", low=1, high=1 << 31)
        if self.tokens_per_slot > 1:
            self._check_slots_are_whole()

    def _check_slots_are_whole(self) -> None:
        """Check that no block and no turn of the context ends inside a slot."""
        counts = {"tokens_per_block": self.tokens_per_block or 1}
        if self.context.size > 1:
            counts["interleave_tokens"] = self.context.interleave_tokens
        for field, number in counts.items():
            if number % self.tokens_per_slot:
                raise KVPlanError(
                    "GROUP",
                    f"describe group {self.name!r}",
                    expected=f"{field} to be a multiple of tokens_per_slot {self.tokens_per_slot}",
                    got=f"{number}" if self.tokens_per_block else "a state group",
                    hint="one value of several tokens is in one block, on one rank",
                    tokens_per_slot=self.tokens_per_slot,
                )

    @property
    def is_state(self) -> bool:
        """Whether each block holds one state, and no tokens.

        >>> Group("state").is_state, Group("attn", 64).is_state
        (True, False)
        """
        return self.tokens_per_block is None

    @cached_property
    def num_slots(self) -> int:
        """Slots in a block; a state is one."""
        return (self.tokens_per_block or 1) // self.tokens_per_slot

    @cached_property
    def interleave_slots(self) -> int:
        """Consecutive slots that a rank of the context takes in turn."""
        return max(self.context.interleave_tokens // self.tokens_per_slot, 1)


def _group_name(group: Group | str) -> str:
    return group.name if isinstance(group, Group) else group


def _region_name(region: Region | str) -> str:
    return region.name if isinstance(region, Region) else region


def _axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return members(Axis, axes, "axes of a view")


_WITHOUT_ADDRESS: Final = ("group", "dtype", "axes", "num_blocks", "block_stride_bytes")
"""The fields of a view that depend on neither its name nor its address."""


@attrs.frozen
class View:
    """Where one worker keeps its shard of the logical tensor ``name``, in all blocks of a pool.

    ``group`` and ``region`` are names within the worker, or the objects themselves.
    ``offset_bytes`` is the offset in the region of the first element of block 0. ``dtype`` is a key
    of :data:`ITEMSIZE`; describe types of less than a byte as packed ``uint8``.

    >>> token_and_dim = (Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2))
    >>> view = View("layers.0.attn", "attn", "kv.0", "bfloat16",
    ...             (Axis("head", 4, 8, 8, 4096), *token_and_dim),
    ...             num_blocks=100, block_stride_bytes=16384)
    >>> view.block_bytes, view.end_bytes
    (16384, 1638400)
    """

    name: str
    group: str = attrs.field(converter=_group_name)
    region: str = attrs.field(converter=_region_name)
    dtype: str
    axes: tuple[Axis, ...] = attrs.field(converter=_axes)
    num_blocks: int
    block_stride_bytes: int
    offset_bytes: int = 0

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a view", name, "name", "group", "region", "dtype")
        check_fields(self, "a view", integer, "num_blocks", low=1, high=1 << 40)
        check_fields(self, "a view", integer, "block_stride_bytes", "offset_bytes")
        for axis_name, size in self.sizes.items():
            integer(size, f"the global size of axis {axis_name!r} of view {self.name!r}")
        if self.dtype not in ITEMSIZE:
            raise KVPlanError(
                "DTYPE",
                f"describe view {self.name!r}",
                expected=f"a dtype of {', '.join(ITEMSIZE)}",
                got=f"{self.dtype!r}",
                dtype=self.dtype,
            )
        self._check_token_axis_is_whole()
        self._check_elements_apart()

    def at(self, view_name: str, region: Region, offset_bytes: int) -> View:
        """Return this view under another name and at another address.

        Only these are checked, since nothing else of a view depends on them. :func:`attrs.evolve`
        checks everything.

        >>> axes = (Axis("dim", 0, 64, 64, 2),)
        >>> view = View("layers.0", "attn", "kv.0", "bfloat16", axes, 100, 128)
        >>> view.at("layers.1", Region("kv.1", 4096, 12864), 64) == attrs.evolve(
        ...     view, name="layers.1", region="kv.1", offset_bytes=64)
        True
        """
        # without the checks of the constructor, which this view has passed: layers are many
        moved = object.__new__(View)
        for field in _WITHOUT_ADDRESS:
            object.__setattr__(moved, field, getattr(self, field))
        object.__setattr__(moved, "name", name(view_name, "name of a view"))
        object.__setattr__(moved, "region", instance(Region, region, "region of a view").name)
        object.__setattr__(moved, "offset_bytes", integer(offset_bytes, "offset_bytes of a view"))
        return moved

    def _check_token_axis_is_whole(self) -> None:
        for axis in self.axes:
            if axis.name == TOKEN and axis.extent != axis.size:
                raise KVPlanError(
                    "SIZE",
                    f"describe view {self.name!r}",
                    expected=f"all {axis.size} slots of the token axis",
                    got=f"[{axis.start}, {axis.stop})",
                    hint="a Context spreads positions over workers: describe one for each rank",
                    start=axis.start,
                    stop=axis.stop,
                    size=axis.size,
                )

    def _check_elements_apart(self) -> None:
        """Check that no two elements share a byte.

        By ascending stride, each stride must clear the bytes that finer axes span.
        """
        steps = [(axis.stride_bytes, axis.extent, axis.name) for axis in self.axes]
        steps.append((self.block_stride_bytes, self.num_blocks, "block"))
        # `span` is how many bytes the finer axes reach over, gaps included
        span = self.itemsize
        for stride, extent, axis_name in sorted(step for step in steps if step[1] > 1):
            if stride < span:
                span_text = f"the {span} bytes that the finer axes span"
                raise KVPlanError(
                    "STRIDE",
                    f"describe view {self.name!r}",
                    expected=f"axis {axis_name!r} to step over {span_text}",
                    got=f"stride {stride}",
                    axis=axis_name,
                    stride_bytes=stride,
                    span_bytes=span,
                )
            span += (extent - 1) * stride

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of data in one block of this view, without gaps."""
        return self.itemsize * math.prod(axis.extent for axis in self.axes)

    @property
    def end_bytes(self) -> int:
        """The offset in the region at which the last block ends."""
        in_block = sum((axis.extent - 1) * axis.stride_bytes for axis in self.axes)
        last_block = self.offset_bytes + (self.num_blocks - 1) * self.block_stride_bytes
        return last_block + in_block + self.itemsize

    @property
    def sizes(self) -> dict[str, int]:
        """The logical tensor's global size by axis name."""
        return global_sizes(self.axes)


@attrs.frozen
class Geometry:
    """All that planning needs of a view, without its name and its address.

    Equal layers share a geometry.
    """

    axes: tuple[Axis, ...]
    dtype: str
    group: Group
    num_blocks: int
    block_stride_bytes: int

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def content_sizes(self) -> dict[str, int]:
        """The logical tensor's global size by axis name, the token axis left out."""
        sizes = global_sizes(self.axes)
        return {axis: size for axis, size in sizes.items() if axis != TOKEN}

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The logical tensor's global size by axis name.

        An axis of size 1 is as good as none, and is left out.
        """
        sizes = global_sizes(self.axes).items()
        return MappingProxyType({axis: size for axis, size in sizes if size > 1 or axis == TOKEN})

    @cached_property
    def segments(self) -> Mapping[str, Segments]:
        """The segments of each axis name. A state group has a token axis of one slot."""
        digits_of: dict[str, list[Axis]] = {axis_name: [] for axis_name in (TOKEN, *self.sizes)}
        for axis in self.axes:
            if axis.name in digits_of:
                digits_of[axis.name].append(axis)
        return MappingProxyType(
            {axis_name: segments(digits) for axis_name, digits in digits_of.items()}
        )
