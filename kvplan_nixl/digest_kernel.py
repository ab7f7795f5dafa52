"""The digest kernel: one Triton function that adds up the words of a request by their weights.

The words of a block are put in an order in which those of one part follow each other, and cut into
tiles, each of one part. An *item* is one tile of some blocks of one view: a program loads where its
words are and what they weigh once, and then goes from block to block. It needs no more than a word
and a position's key for each word of the cache, and adds one number to its part's sum at the end.
All views of one worker whose words are as wide are items of one launch.

Sums are modulo 2**64, so their order does not matter, and the result is that of
:meth:`kvplan_nixl.digest.ViewWords.digests`, bit by bit. Triton's interpreter runs the kernel on a
CPU, for tests.
"""

# Triton reads the annotations of a kernel as values, so this module has no postponed ones.
# Constants of a kernel are written in capitals.
# ruff: noqa: N803
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import torch

from kvplan.protocol.digest import BlockPositions, Residues
from kvplan.support import Ints
from kvplan_nixl.kernel import ELEMENTS, has_triton

MAX_TILE: Final = 1024
"""The most words of a tile."""

MIN_TILE: Final = 16

BLOCKS_OF_ITEM: Final = 16
"""The most blocks of an item. Not tuned on a GPU yet."""

NUM_WARPS: Final = 4

NUMBERS_OF_VIEW: Final = 9
"""What the kernel reads of a view, in this order: see :func:`add_words`."""

if has_triton:
    import triton
    import triton.language as tl

    def add_words(  # type: ignore[no-untyped-def]
        data, items, sums, ELEMENT: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr
    ):
        """Add one item, (view, tile, first block, block after the last), to the sum of its part."""
        item = items + tl.program_id(0) * 4
        view = data + tl.load(item + 0)
        tile = tl.load(item + 1)
        first = tl.load(item + 2)
        stop = tl.load(item + 3)
        address = tl.load(view + 0)
        block_stride = tl.load(view + 1)
        # tables stay on the device, so they are found by address
        words = tl.load(view + 2).to(tl.pointer_type(tl.int64), bitcast=True)
        num_words = tl.load(view + 3)
        ids = data + tl.load(view + 4)
        keys = data + tl.load(view + 5)
        num_slots = tl.load(view + 6)
        part_of_tile = tl.load(view + 7).to(tl.pointer_type(tl.int64), bitcast=True)
        part = tl.load(part_of_tile + tile)
        at = tile * TILE + tl.arange(0, TILE)
        offset = tl.load(words + at)
        weight = tl.load(words + num_words + at)
        slot = tl.load(words + 2 * num_words + at)
        total = tl.full((TILE,), 0, tl.int64)
        for number in range(first, stop):
            start = address + tl.load(ids + number) * block_stride
            pointers = (start + offset).to(tl.pointer_type(ELEMENT), bitcast=True)
            # the words that fill up a tile weigh nothing
            word = tl.load(pointers, mask=weight != 0, other=0).to(tl.int64) & MASK
            total += word * tl.load(keys + number * num_slots + slot)
        tl.atomic_add(sums + tl.load(view + 8) + part, tl.sum(total * weight))

    @cache
    def compiled() -> Any:
        """Return the kernel for a GPU. Triton compiles it once for each width of words and tile."""
        return triton.jit(add_words)


@attrs.frozen(eq=False)
class WordTable:
    """The words of a block, in tiles: ``numbers`` (3, tiles x tile) are offset, weight and slot.

    ``part_of_tile`` has the index of each tile's part. Words that fill up a tile weigh 0.
    """

    tile: int
    numbers: Ints
    part_of_tile: Ints
    _copies: dict[torch.device, torch.Tensor] = attrs.field(factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the numbers and then the parts, on a device, where they stay."""
        if device not in self._copies:
            flat = np.concatenate([self.numbers.reshape(-1), self.part_of_tile])
            self._copies[device] = torch.from_numpy(flat).to(device)
        return self._copies[device]

    @classmethod
    def of(
        cls,
        extents: Sequence[int],
        strides_bytes: Sequence[int],
        weights: Residues,
        slots: Ints,
        parts: Ints,
    ) -> "WordTable":
        """Return the words of a box, given arrays with an extent of 1 where a value is the same.

        >>> weights, slots = np.full((1, 2), 7, np.uint64), np.array([[0], [1], [2]])
        >>> table = WordTable.of((3, 2), (2, 1), weights, slots, np.zeros((1, 2)))
        >>> table.part_of_tile.tolist(), table.numbers[:, [0, 1, 2, 3, 16]].tolist()
        ([0, 1], [[0, 2, 4, 0, 1], [7, 7, 7, 0, 7], [0, 1, 2, 0, 0]])
        """
        offsets = np.zeros((), np.int64)
        for extent, stride in zip(extents, strides_bytes, strict=True):
            offsets = np.add.outer(offsets, np.arange(extent) * stride)
        part_of_word = np.broadcast_to(np.arange(parts.size).reshape(parts.shape), extents)
        part_of_word = part_of_word.reshape(-1)
        # words of one part together, as they lie in memory
        order = np.argsort(part_of_word, kind="stable")
        counts = np.bincount(part_of_word, minlength=parts.size)
        tile = min(MAX_TILE, max(MIN_TILE, 1 << int(counts.max() - 1).bit_length()))
        tiles = -(-counts // tile)
        firsts = np.cumsum(counts) - counts
        starts = (np.cumsum(tiles) - tiles) * tile
        at = np.arange(order.size) + np.repeat(starts - firsts, counts)
        numbers = np.zeros((3, int(tiles.sum()) * tile), np.int64)
        columns = (offsets, weights.view(np.int64), slots)
        for row, column in zip(numbers, columns, strict=True):
            row[at] = np.broadcast_to(column, extents).reshape(-1)[order]
        return cls(tile, numbers, np.repeat(np.arange(parts.size), tiles))


class ViewWork(NamedTuple):
    """A view to add up: its words and their width, where block 0 begins, and its blocks."""

    table: WordTable
    word_bytes: int
    address: int
    block_stride_bytes: int
    positions: BlockPositions
    num_parts: int


class DigestKernel:
    """Sums of views by the kernel, on torch's present stream of a device.

    ``kernel`` is the compiled kernel, or Triton's interpreter of it on a CPU, for tests.
    """

    def __init__(self, device: torch.device | str, kernel: Any = None) -> None:
        self._device = torch.device(device)
        self._kernel = compiled() if kernel is None else kernel

    def sums(self, work: Sequence[ViewWork]) -> torch.Tensor:
        """Return the sums of each view's parts, one view after another.

        What the kernel reads of a request goes to the device in one piece.
        """
        data = _Data()
        # the first array has a row for each view, which is made last
        data.size = len(work) * NUMBERS_OF_VIEW
        rows: list[tuple[int, ...]] = []
        launches: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
        num_sums = 0
        for view in work:
            table = view.table
            positions = view.positions
            table_address = table.on(self._device).data_ptr()
            of_launch = launches.setdefault((view.word_bytes, table.tile), {})
            of_shape = of_launch.setdefault((table.part_of_tile.size, positions.ids.size), [])
            of_shape.append(len(rows) * NUMBERS_OF_VIEW)
            rows.append(
                (
                    view.address,
                    view.block_stride_bytes,
                    table_address,
                    table.numbers.shape[1],
                    data.add(positions.ids),
                    data.add(positions.keys),
                    positions.keys.shape[1],
                    table_address + table.numbers.nbytes,
                    num_sums,
                )
            )
            num_sums += view.num_parts
        items = {
            key: np.concatenate(
                [_items(np.array(views), *shape) for shape, views in shapes.items()]
            )
            for key, shapes in launches.items()
        }
        starts = {key: data.add(listed) for key, listed in items.items()}
        sums = torch.zeros(num_sums, dtype=torch.int64, device=self._device)
        if not data.size:
            return sums
        constants = self._on_device(data.array(np.array(rows)))
        for (word_bytes, tile), listed in items.items():
            start = starts[word_bytes, tile]
            if listed.size:
                here = constants[start : start + listed.size]
                self._launch(len(listed), constants, here, sums, word_bytes, tile)
        return sums

    def _launch(
        self,
        num_items: int,
        data: torch.Tensor,
        items: torch.Tensor,
        sums: torch.Tensor,
        word_bytes: int,
        tile: int,
    ) -> None:
        mask = -1 if word_bytes == 8 else (1 << 8 * word_bytes) - 1
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            self._kernel[(num_items,)](
                data,
                items,
                sums,
                ELEMENT=ELEMENTS[word_bytes],
                MASK=mask,
                TILE=tile,
                num_warps=NUM_WARPS,
            )

    def _on_device(self, array: Ints) -> torch.Tensor:
        host = torch.from_numpy(array)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


class _Data:
    """Arrays of int64, one after another, each array once."""

    def __init__(self) -> None:
        self.size = 0
        self._arrays: list[Ints] = []
        # the arrays are kept, so that no other one gets the id of one
        self._offsets: dict[int, tuple[Any, int]] = {}

    def add(self, array: Any) -> int:
        """Return where an array begins: at an even index, so that pointers are aligned alike."""
        if id(array) not in self._offsets:
            if self.size % 2:
                self._arrays.append(np.zeros(1, np.int64))
                self.size += 1
            self._offsets[id(array)] = (array, self.size)
            signed = array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)
            self._arrays.append(signed.reshape(-1))
            self.size += signed.size
        return self._offsets[id(array)][1]

    def array(self, first: Ints) -> Ints:
        """Return all of them as one, after the first array."""
        return np.concatenate([first.reshape(-1), *self._arrays])


def _items(views: Ints, num_tiles: int, num_blocks: int) -> Ints:
    """Return the items of views that have as many tiles and blocks: a few blocks at a time."""
    firsts = np.arange(0, num_blocks, BLOCKS_OF_ITEM)
    tiles = np.arange(num_tiles)
    items = np.empty((views.size, firsts.size, num_tiles, 4), np.int64)
    items[..., 0] = views[:, None, None]
    items[..., 1] = tiles
    items[..., 2] = firsts[:, None]
    items[..., 3] = np.minimum(firsts + BLOCKS_OF_ITEM, num_blocks)[:, None]
    return items.reshape(-1, 4)
