"""Digests of a request's cache by logical coordinate: equal for equal contents in any layout.

A prefill worker computes the digests of what it hands over, and a decode worker those of what has
arrived. :func:`mismatch` compares them, whatever block size, parallel sizes and axis order each
side has. :class:`kvplan_nixl.digest.WorkerDigests` computes them.

- digest.D1: A digest is a sum modulo 2**64 with one term for each element: its bits as an unsigned
  integer, times the product of one odd key for each axis, which depends on the axis name and the
  coordinate. A position is the coordinate along ``token``; that of a state is its block ordinal.
- digest.D2: Along the *packed* axis, the longest one that is not divided, 8 bytes share a key. An
  element of ``s`` bytes at coordinate ``c`` is multiplied by ``2 ** (8 * (c * s % 8))``, and has
  the key of coordinate ``c * s // 8``. So 8 bytes in a row are one integer.
- digest.D3: Any change of one element changes the digest: the element's term is a non-zero
  difference below 2**64, times an odd number. Elements that change places change it unless the sum
  of many pseudo-random terms is 0 modulo 2**64.
- digest.D4: The digest of disjoint boxes together is the sum of their digests. Tensors have one
  digest for each *part*: a coordinate of each divided axis, or an equal share of a long one.
- digest.D5: The *coverage* of a part is the same sum, without positions, over ones in place of
  elements. It tells which elements a worker has of the part.

Several sources may hold the same elements. A destination's digest is right if it is that of one of
them, and no source is added twice.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from kvplan._arrays import Ints, heads, integers_in
from kvplan._checks import at_most, instance, integer, interval, members, name, wrong_type
from kvplan.describe.blocks import (
    POSITION_END,
    Blocks,
    Range,
    Tokens,
    check_blocks,
    check_listed,
)
from kvplan.describe.views import TOKEN, Context, Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.plan.align import before, position_of
from kvplan.plan.bind import check_names, range_of

__all__ = [
    "DIVIDED",
    "WORD_BYTES",
    "BlockPositions",
    "Residues",
    "TensorDigests",
    "divided_axes",
    "joined",
    "keys",
    "mismatch",
    "packed_axis",
    "parts_of",
    "positions_by_group",
    "to_json",
]

DIVIDED: Final = ("head", "channel")
"""The axes that tensor-parallel workers divide."""

MAX_AXIS_PARTS: Final = 48
"""An axis has at most this many parts: 2, 3, 4, 6, 8, 12, 16 or 24 equal shares consist of them."""

MAX_DIGEST_SLOTS: Final = 1 << 24
"""Slots that the digests of a worker may name in one group: a million blocks of 16."""

MAX_SUMS: Final = 1 << 12
"""The most ways to choose a source for each of several boxes of one part."""

WORD_BYTES: Final = 8
SUM_END: Final = 1 << 64

Residues = npt.NDArray[np.uint64]
"""Numbers modulo 2**64: keys, coverages and digests."""


def keys(axis: str, coordinate: Ints) -> Residues:
    """Return the key of each coordinate along an axis: odd, in the shape of ``coordinate``.

    >>> keys("head", np.arange(2))
    array([ 9294791048832139679, 12582562633687104707], dtype=uint64)
    """
    seed = int.from_bytes(hashlib.sha256(axis.encode()).digest()[:WORD_BYTES], "little")
    with np.errstate(over="ignore"):
        # The finalizer of splitmix64: every bit of a coordinate changes half of the key's bits.
        mixed = (coordinate.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)) | np.uint64(1))


def parts_of(size: int) -> int:
    """Return the number of parts of an axis: its largest divisor up to :data:`MAX_AXIS_PARTS`.

    >>> parts_of(8), parts_of(8192), parts_of(3072)
    (8, 32, 48)
    """
    return next(parts for parts in range(min(size, MAX_AXIS_PARTS), 0, -1) if size % parts == 0)


def divided_axes(sizes: Mapping[str, int], divided: Iterable[str]) -> dict[str, int]:
    """Return those axes of a tensor that digests are apart along, with their sizes, by name."""
    return {axis: sizes[axis] for axis in sorted(divided) if sizes.get(axis, 1) > 1}


def packed_axis(sizes: Mapping[str, int], divided: Iterable[str]) -> str | None:
    """Return the axis of rule digest.D2, or ``None`` for a tensor without one.

    >>> packed_axis({"head": 8, "token": 16, "kv": 2, "dim": 128}, DIVIDED)
    'dim'
    """
    not_packed = {TOKEN, *divided}
    lengths = [(size, axis) for axis, size in sizes.items() if axis not in not_packed and size > 1]
    return max(lengths)[1] if lengths else None


@attrs.frozen
class Positions:
    """The positions in some local slots of a context, as far as another context holds them too.

    ``slots`` are intervals, ascending. For a state group a slot is a block ordinal.

    >>> Positions(Context(1, 2, 2), Context(), ((0, 3),)).listed.tolist()
    [2, 3, 6]
    """

    context: Context
    within: Context
    slots: tuple[Range, ...]

    @cached_property
    def listed(self) -> Ints:
        """The positions, ascending."""
        # the local index of each slot, then its position, then those that both contexts hold
        local = integers_in(np.array(self.slots, np.int64).reshape(-1, 2))
        positions = position_of(Group("-", 1, self.context), local)
        return positions[holds(self.within, positions)]

    @cached_property
    def key(self) -> int:
        """The sum of the keys of all positions, modulo 2**64."""
        return total(keys(TOKEN, self.listed))

    def values(self) -> list[Any]:
        """Return plain values, for JSON, which :meth:`of_values` reads."""
        contexts = [[*attrs.astuple(context)] for context in (self.context, self.within)]
        return [*contexts, [[*span] for span in self.slots]]

    @classmethod
    def of_values(cls, values: Any) -> Positions:
        """Read what an untrusted peer has sent as :meth:`values`. Raises ``TYPE``, ``RANGE``."""
        context, within, spans = members(list, _several(values, 3), "positions of digests")
        intervals = [interval(span, "slots of digests", POSITION_END) for span in spans]
        ends = list(itertools.chain.from_iterable(intervals))
        if ends != sorted(ends):
            raise wrong_type("slots of digests", "ascending intervals", spans)
        number = sum(stop - start for start, stop in intervals)
        at_most(MAX_DIGEST_SLOTS, number, "slots in one group", "read digests")
        own_context = Context(*_several(context, 3))
        other_context = Context(*_several(within, 3))
        return cls(own_context, other_context, tuple(intervals))


def holds(context: Context, positions: Ints) -> npt.NDArray[np.bool_]:
    """Return for each position whether a context holds it, in the shape of ``positions``."""
    return np.asarray(positions // context.interleave_tokens % context.size == context.rank)


def total(values: Residues) -> int:
    """Return the sum of an array modulo 2**64."""
    return int(values.sum(dtype=np.uint64))


@attrs.frozen(eq=False)
class BlockPositions:
    """The blocks of a request that hold some of its positions, in one group.

    ``ids`` are those blocks, (n,) int32, and ``keys`` the key of the position in each slot, (n,
    slots) uint64: 0 in a slot whose position is not asked for. ``positions`` are all of them.
    """

    ids: npt.NDArray[np.int32]
    keys: Residues
    positions: Positions

    @classmethod
    def of(cls, group: Group, table: Blocks, span: Range | None, within: Context) -> BlockPositions:
        """Return the positions of ``span`` in a block table; without a span, all in its blocks.

        Positions in gaps of the table are left out. Raises ``BLOCKS`` for a span that the table
        does not cover.

        >>> block_positions = BlockPositions.of(Group("a", 4), Blocks([7, 3, 9]), (2, 7), Context())
        >>> block_positions.ids.tolist(), (block_positions.keys > 0).astype(int).tolist()
        ([7, 3], [[0, 0, 1, 1], [1, 1, 1, 0]])
        """
        size = group.num_slots
        # One row for each block of the table: the local index and the position of each slot.
        local = np.add.outer(table.ordinals * size, np.arange(size))
        position = position_of(group, local)
        is_asked = np.ones(local.shape, bool)
        if span is not None:
            low = before(group, span[0])
            high = before(group, span[1])
            if low < high:
                check_listed(group.name, low // size, -(-high // size), *table.listed, "")
            is_asked = (low <= local) & (local < high)
        # Where a slot has several tokens, positions count slots, and so do contexts.
        within = _of_slots(within, group.tokens_per_slot)
        context = _of_slots(group.context, group.tokens_per_slot)
        # Slots are listed before the other context leaves some of their positions out.
        positions = Positions(context, within, _intervals(local[is_asked]))
        is_asked &= holds(within, position)
        has_any = is_asked.any(axis=1)
        position_keys = np.where(is_asked, keys(TOKEN, position), np.uint64(0))
        return cls(table.ids[has_any], position_keys[has_any], positions)


def positions_by_group(
    worker: Worker, blocks: Mapping[str, Blocks], tokens: Tokens, within: Context
) -> dict[str, BlockPositions]:
    """Return the positions of a request in each of its block tables on one worker.

    ``blocks`` and ``tokens`` are as ``bind`` takes them. Raises what it does.
    """
    groups = {group.name: group for group in worker.groups}
    check_names(groups, blocks, "block table")
    check_names(groups, tokens if isinstance(tokens, Mapping) else (), "token range")
    for geometry in worker.geometries:
        group = geometry.group.name
        if group in blocks:
            check_blocks(group, blocks[group], geometry.num_blocks, is_destination=False)
    return {
        name: BlockPositions.of(groups[name], table, range_of(tokens, groups[name]), within)
        for name, table in blocks.items()
    }


def _of_slots(context: Context, tokens_per_slot: int) -> Context:
    """Return the context whose positions are slots of several tokens."""
    interleave = max(context.interleave_tokens // tokens_per_slot, 1)
    return Context(context.rank, context.size, interleave)


def _intervals(numbers: Ints) -> tuple[Range, ...]:
    """Return ascending integers as intervals that do not touch."""
    if not numbers.size:
        return ()
    # the index of the first number of each interval, and how many numbers follow it
    first = heads(numbers[1:] == numbers[:-1] + 1)
    length = np.diff(first, append=numbers.size)
    start = numbers[first]
    return tuple(zip(start.tolist(), (start + length).tolist(), strict=True))


@attrs.frozen(eq=False)
class TensorDigests:
    """The digests of one tensor in one group of a worker.

    ``axes`` are its divided axes with their sizes. Row ``i`` of the arrays, (n,), is a part: its
    number in ``parts``, int64 and ascending; its coverage, by rule digest.D5; and its digest. Parts
    are numbered along the axes in order, the last one fastest.
    """

    name: str
    positions: Positions
    axes: Mapping[str, int]
    parts: Ints
    coverage: Residues
    digests: Residues


def to_json(tensors: Iterable[TensorDigests]) -> dict[str, Any]:
    """Return the digests of a worker as plain values that JSON can hold.

    ``boxes`` has once what equal layers share; a row of ``digests`` has the name of a
    tensor, the number of its box, and a digest of 8 bytes for each part, in base64.
    """
    number_of_box: dict[Any, int] = {}
    number_of_objects: dict[tuple[int, ...], int] = {}
    boxes: list[list[Any]] = []
    rows: list[list[Any]] = []
    # in a list they all live until the end, so that no two objects have one id
    for tensor in [*tensors]:
        # Equal layers have equal boxes, mostly made of the same objects.
        own = (tensor.positions, tensor.axes, tensor.parts, tensor.coverage)
        objects = tuple(map(id, own))
        if objects not in number_of_objects:
            axes = tuple(tensor.axes.items())
            box = (tensor.positions, axes, tensor.parts.tobytes(), tensor.coverage.tobytes())
            number = number_of_box.setdefault(box, len(boxes))
            if number == len(boxes):
                values = [tensor.positions.values(), dict(tensor.axes), tensor.parts.tolist()]
                boxes.append([*values, _text(tensor.coverage)])
            number_of_objects[objects] = number
        rows.append([tensor.name, number_of_objects[objects], _text(tensor.digests)])
    return {"boxes": boxes, "digests": rows}


def of_json(values: Any) -> list[TensorDigests]:
    """Return the digests of a worker, from untrusted values.

    Raises ``KEY``, ``NAME``, ``TYPE``, ``RANGE`` or ``SIZE``.
    """
    missing = {"boxes", "digests"} - instance(Mapping, values, "digests").keys()
    if missing:
        raise KVPlanError("KEY", "read digests", expected=f"a key {min(missing)!r}", got="none")
    boxes = []
    for box in members(list, values["boxes"], "boxes of digests"):
        positions, axes, parts, coverage = _several(box, 4)
        sizes = {}
        for axis, size in instance(Mapping, axes, "axes of digests").items():
            sizes[name(axis, "an axis of digests")] = integer(size, "size of an axis", low=1)
        numbers = [integer(part, "a part of digests") for part in members(int, parts, "parts")]
        if numbers != sorted({*numbers}):
            raise wrong_type("parts of digests", "ascending integers", parts)
        part_numbers = np.array(numbers, np.int64)
        part_coverage = _array(coverage, part_numbers.size)
        held = Positions.of_values(positions)
        boxes.append(TensorDigests("", held, sizes, part_numbers, part_coverage, part_coverage))
    tensors = []
    for row in members(list, values["digests"], "rows of digests"):
        tensor, number, text = _several(row, 3)
        without_digests = boxes[integer(number, "number of a box", high=len(boxes))]
        digests = _array(text, without_digests.parts.size)
        label = name(tensor, "a tensor of digests")
        tensors.append(attrs.evolve(without_digests, name=label, digests=digests))
    return tensors


def joined(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the digests of several workers as one mapping, those of replicas once.

    Raises what :func:`of_json` does.
    """
    tensors: dict[Any, TensorDigests] = {}
    for record in records:
        for tensor in of_json(record):
            arrays = (tensor.parts, tensor.coverage, tensor.digests)
            key = (tensor.name, tensor.positions, *(array.tobytes() for array in arrays))
            tensors.setdefault(key, tensor)
    return to_json(tensors.values())


def _several(values: Any, number: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != number:
        raise wrong_type("digests", f"a list of {number} values", values)
    return values


def _text(values: Residues) -> str:
    return base64.b64encode(values.astype("<u8").tobytes()).decode()


def _array(text: Any, size: int) -> Residues:
    encoded = instance(str, text, "digests")
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise wrong_type("digests", "base64", text) from None
    if len(data) != WORD_BYTES * size:
        expected = f"{size} digests of {WORD_BYTES} bytes"
        raise KVPlanError("SIZE", "read digests", expected=expected, got=f"{len(data)} bytes")
    return np.frombuffer(data, "<u8").astype(np.uint64)


@attrs.frozen
class PartBox:
    """The box of a part that one worker holds: positions, and elements by their coverage."""

    positions: Positions
    coverage: int

    @property
    def elements(self) -> int:
        """The sum of rule digest.D1 over ones in place of elements."""
        return self.positions.key * self.coverage % SUM_END


DigestsByBox = dict[PartBox, set[int]]
"""The digests of each box of one part: of all workers that hold it, equal ones once."""


def mismatch(
    expected: Iterable[Mapping[str, Any]],
    actual: Iterable[Mapping[str, Any]],
) -> KVPlanError | None:
    """Return the first difference between the digests of sources and destinations, or ``None``.

    ``expected`` has the digests of all sources, as :func:`to_json` returns them. ``actual`` has
    those of one destination, or of several whose positions make up those of a source only
    together. Everything that destinations have digested is compared: leave out what they have not
    received. Sources digest the same positions, or ranges and contexts that make them up.

    The error is ``TRANSFER`` for other contents, or if sources say nothing at all, and ``COVER``
    where their digests are of other elements, so that nothing can be said. Raises what
    :func:`of_json` does.
    """
    offered: dict[str, list[TensorDigests]] = {}
    for source in expected:
        for digests in of_json(source):
            offered.setdefault(digests.name, []).append(digests)
    received: dict[str, list[TensorDigests]] = {}
    for destination in actual:
        for digests in of_json(destination):
            received.setdefault(digests.name, []).append(digests)
    if received and not offered:
        return KVPlanError("TRANSFER", "compare digests", expected="digests of sources", got="none")
    # Most parts equal a part of one source. The others are compared by boxes, which takes longer.
    comparison = BoxComparison()
    for tensor, held in received.items():
        sources = offered.get(tensor, [])
        for digests in held:
            for part in _unequal(digests, sources).tolist():
                error = comparison.error(part, held, sources)
                if error is not None:
                    return error
    return None


def _unequal(digests: TensorDigests, sources: Iterable[TensorDigests]) -> Ints:
    """Return the parts for which no source has the same elements with the same digest."""
    is_equal = np.zeros(digests.parts.size, bool)
    for source in sources:
        if source.positions == digests.positions and source.parts.size:
            # The row of each part at the source, or another row where it lacks the part.
            row = np.searchsorted(source.parts, digests.parts).clip(max=source.parts.size - 1)
            has_part = source.parts[row] == digests.parts
            has_elements = source.coverage[row] == digests.coverage
            is_equal |= has_part & has_elements & (source.digests[row] == digests.digests)
    return digests.parts[~is_equal]


class BoxComparison:
    """Compares parts whose digests do not equal those of any one source."""

    def __init__(self) -> None:
        self._is_within: dict[tuple[Positions, tuple[Positions, ...]], bool] = {}

    def error(
        self,
        part: int,
        held: Sequence[TensorDigests],
        sources: Iterable[TensorDigests],
    ) -> KVPlanError | None:
        """Return what is wrong with a part of a tensor."""
        received = _boxes(part, held)
        tensor = held[0].name
        label = " ".join([tensor, *_words(part, held[0].axes)])
        right = self._right_sums(_boxes(part, sources), received, label)
        if not right:
            return KVPlanError(
                "COVER",
                f"compare digests of {label}",
                expected="digests of the same elements from the sources",
                got="digests of others, or none",
                hint="both sides digest the same positions, and parts that neither side cuts",
                tensor=tensor,
                part=part,
            )
        wrong = _sums(received, label) - right
        if not wrong:
            return None
        return KVPlanError(
            "TRANSFER",
            f"use {label}",
            expected=f"the sources' digest {min(right):016x}",
            got=f"{min(wrong):016x}",
            tensor=tensor,
            part=part,
        )

    def _right_sums(self, offered: DigestsByBox, received: DigestsByBox, label: str) -> set[int]:
        """Return the sources' digests of all that was received, or none if nothing makes it up."""
        elements = _elements(received)
        # Sources that have all of it each are alternatives.
        alternatives = [digests for box, digests in offered.items() if box.elements == elements]
        if alternatives:
            return set().union(*alternatives)
        for boxes in self._choices(offered, received):
            if boxes and _elements(boxes) == elements:
                return _sums({box: offered[box] for box in boxes}, label)
        return set()

    def _choices(self, offered: DigestsByBox, received: DigestsByBox) -> Iterator[list[PartBox]]:
        """Yield boxes of sources that may make up what was received, together."""
        # first the same boxes, as between equal engines
        yield [box for box in received if box in offered]
        # then boxes that hold some of the positions: of the same elements, and of any
        asked = tuple(dict.fromkeys(box.positions for box in received))
        inside = [box for box in offered if self._holds(asked, box.positions)]
        coverages = {box.coverage for box in received}
        yield [box for box in inside if box.coverage in coverages]
        yield inside

    def _holds(self, asked: tuple[Positions, ...], positions: Positions) -> bool:
        key = (positions, asked)
        if key not in self._is_within:
            asked_positions = np.concatenate([held.listed for held in asked])
            self._is_within[key] = bool(np.isin(positions.listed, asked_positions).all())
        return self._is_within[key]


def _boxes(part: int, tensors: Iterable[TensorDigests]) -> DigestsByBox:
    boxes: DigestsByBox = {}
    for tensor in tensors:
        row = int(np.searchsorted(tensor.parts, part))
        if row < tensor.parts.size and tensor.parts[row] == part:
            box = PartBox(tensor.positions, int(tensor.coverage[row]))
            boxes.setdefault(box, set()).add(int(tensor.digests[row]))
    return boxes


def _elements(boxes: Iterable[PartBox]) -> int:
    return sum(box.elements for box in boxes) % SUM_END


def _sums(boxes: DigestsByBox, label: str) -> set[int]:
    """Return the digests of all boxes together, for each choice between unequal replicas."""
    choices = math.prod(len(digests) for digests in boxes.values())
    at_most(MAX_SUMS, choices, "choices between unequal replicas", f"compare digests of {label}")
    return {sum(choice) % SUM_END for choice in itertools.product(*boxes.values())}


def _words(part: int, axes: Mapping[str, int]) -> list[str]:
    """Return what a part has of each divided axis, in words.

    >>> _words(17, {"channel": 3072, "head": 8})
    ['channel [128, 192)', 'head 1']
    """
    words: list[str] = []
    rest = part
    for axis, size in reversed([*axes.items()]):
        rest, number = divmod(rest, parts_of(size))
        share = size // parts_of(size)
        start = number * share
        interval_text = f"[{start}, {start + share})"
        words.insert(0, f"{axis} {start if share == 1 else interval_text}")
    return words
