"""The copy kernel: one Triton function that moves a request by its plan, and what launches it.

A program moves tiles of :data:`~kvplan_nixl.copy_plan.TILE_BYTES`: rows of words, each row a part
of one run. It takes every n-th tile of every entry, n being the number of programs, which is the
limit on how much of a GPU a copy uses beside running requests. Addresses are computed in the kernel
by rules K1 and K2 of :mod:`kvplan_nixl.copy_plan`. Triton's interpreter runs the same function on a
CPU, where tests compare its bytes with fake memory; nothing but tests uses it there.
"""

# Triton reads the annotations of a kernel as values, so this module has no postponed ones.
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import attrs
import numpy as np
import torch

from kvplan.errors import KVPlanError
from kvplan_nixl.copy_plan import TILE_BYTES, BoundCopy, Launch, PairCopy
from kvplan_nixl.rearrange import TorchCopier

has_triton: Final = find_spec("triton") is not None

if has_triton:
    import triton
    import triton.language as tl

    def copy_runs(
        arrays,
        entries,
        tables,
        num_entries,
        ELEMENT: tl.constexpr,
        PER_WORD: tl.constexpr,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        INDEX: tl.constexpr,
        HAS_CONTEXT: tl.constexpr,
    ):
        """Move the runs of some entries, of which :class:`~kvplan_nixl.copy_plan.Field` says how.

        ``PER_WORD`` elements make a word, to which all addresses and lengths are aligned.
        """
        programs = tl.num_programs(0).to(INDEX)
        first_tile = tl.program_id(0).to(INDEX)
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        ALIGNMENT: tl.constexpr = PER_WORD * (ELEMENT.primitive_bitwidth // 8)
        for number in range(num_entries):
            entry = entries + number * 24
            first = tl.load(entry + 0).to(INDEX)
            count = tl.load(entry + 1).to(INDEX)
            runs = tl.load(entry + 2).to(INDEX)
            elements = tl.multiple_of(tl.load(entry + 3).to(INDEX), PER_WORD)
            num_starts = tl.load(entry + 4).to(INDEX)
            starts = arrays + tl.load(entry + 5)
            period = tl.load(entry + 6).to(INDEX)
            to_slots = tl.load(entry + 10).to(INDEX)
            to_table = tables + tl.load(entry + 11)
            to_terms = arrays + tl.load(entry + 12)
            by_slot = tl.load(entry + 13).to(INDEX)
            to_origins = arrays + tl.load(entry + 14)
            to_step = tl.load(entry + 15)
            from_slots = tl.load(entry + 18).to(INDEX)
            from_table = tables + tl.load(entry + 19)
            from_terms = arrays + tl.load(entry + 20)
            from_origins = arrays + tl.load(entry + 22)
            from_step = tl.load(entry + 23)
            chunks = (elements + (WIDTH - 1)) // WIDTH
            items = runs * count * chunks
            tiles = (items + (ROWS - 1)) // ROWS
            for tile in range(first_tile, tiles, programs):
                item = tile * ROWS + row
                is_item = item < items
                piece = item // chunks
                offset = (item - piece * chunks) * WIDTH
                run = piece // count
                # where the run occurs, rule K1
                occurrence = first + piece - run * count
                turn = occurrence // num_starts
                start = occurrence - turn * num_starts
                position = turn * period + tl.load(starts + start, mask=is_item, other=0).to(INDEX)
                # its block and slot on each side, rule K2
                to_index = position
                from_index = position
                if HAS_CONTEXT:
                    to_cycle = tl.load(entry + 8).to(INDEX)
                    to_interleave = tl.load(entry + 9).to(INDEX)
                    from_cycle = tl.load(entry + 16).to(INDEX)
                    from_interleave = tl.load(entry + 17).to(INDEX)
                    to_index = position // to_cycle * to_interleave + position % to_interleave
                    from_index = (
                        position // from_cycle * from_interleave + position % from_interleave
                    )
                to_ordinal = to_index // to_slots
                from_ordinal = from_index // from_slots
                to_term = tl.where(by_slot != 0, to_index - to_ordinal * to_slots, start)
                from_term = tl.where(by_slot != 0, from_index - from_ordinal * from_slots, start)
                to_block = tl.load(to_table + to_ordinal, mask=is_item, other=-1).to(tl.int64)
                from_block = tl.load(from_table + from_ordinal, mask=is_item, other=-1).to(tl.int64)
                is_listed = is_item & (to_block >= 0)
                to_address = tl.load(to_origins + run, mask=is_listed, other=0)
                to_address += to_block * to_step
                to_address += tl.load(to_terms + to_term, mask=is_listed, other=0)
                from_address = tl.load(from_origins + run, mask=is_listed, other=0)
                from_address += from_block * from_step
                from_address += tl.load(from_terms + from_term, mask=is_listed, other=0)
                to_row = to_address.to(tl.pointer_type(ELEMENT), bitcast=True)
                from_row = from_address.to(tl.pointer_type(ELEMENT), bitcast=True)
                # without these, loads and stores are of single elements
                to_row = tl.multiple_of(to_row, ALIGNMENT)
                from_row = tl.multiple_of(from_row, ALIGNMENT)
                at = offset[:, None] + column[None, :]
                is_inside = is_listed[:, None] & (at < elements)
                words = tl.load(from_row[:, None] + at, mask=is_inside)
                tl.store(to_row[:, None] + at, words, mask=is_inside)
            # the next entry's tiles go on where these end
            first_tile = (first_tile + programs - tiles % programs) % programs

    ELEMENTS: Final = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

    @cache
    def compiled() -> Any:
        """Return the kernel for a GPU. Triton compiles it once for each :class:`Launch`."""
        return triton.jit(copy_runs)


def constants(launch: Launch, tile_bytes: int = TILE_BYTES) -> dict[str, Any]:
    """Return what a launch fixes of the kernel."""
    elements = max(tile_bytes // launch.element, launch.width)
    return {
        "ELEMENT": ELEMENTS[launch.element],
        "PER_WORD": launch.word // launch.element,
        "WIDTH": launch.width,
        "ROWS": elements // launch.width,
        "INDEX": tl.int64 if launch.is_long else tl.int32,
        "HAS_CONTEXT": launch.has_context,
    }
