"""The digest of a page's data: every kind of damage changes it, and it is what the page on the format says."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplan.protocol.pages import FOLD, ROW_BYTES, DataDigest

SECTOR = 4096
NUM_ROWS = 5
DATA = np.random.default_rng(1).integers(0, 256, NUM_ROWS * ROW_BYTES - 1000, np.uint8).tobytes()


def digest(data: bytes, rows: int = 1) -> str:
    """The digest of data that comes so many rows at a time."""
    made = DataDigest()
    for start in range(0, len(data), rows * ROW_BYTES):
        made.update(memoryview(data)[start : start + rows * ROW_BYTES])
    return made.hexdigest()


def specified(data: bytes) -> str:
    """The digest in the words of docs/store.md, in Python's integers."""
    lanes = [0] * (ROW_BYTES // 8)
    for start in range(0, len(data), ROW_BYTES):
        row = data[start : start + ROW_BYTES].ljust(ROW_BYTES, b"\0")
        mixed = [lane * FOLD % 2**64 for lane in lanes]
        words = [int.from_bytes(row[8 * lane : 8 * lane + 8], "little") for lane in range(len(lanes))]
        lanes = [((y ^ (y >> 32)) + word) % 2**64 for y, word in zip(mixed, words, strict=True)]
    return hashlib.sha256(b"".join(lane.to_bytes(8, "little") for lane in lanes)).hexdigest()


def test_the_digest_is_the_specified_one() -> None:
    """However many rows come at a time."""
    assert {digest(DATA, rows) for rows in (1, 2, 9)} == {specified(DATA)}


@given(st.lists(st.integers(0, 8 * len(DATA) - 1), min_size=1, max_size=3, unique=True))
def test_flipped_bits_are_seen(bits: list[int]) -> None:
    """Wherever they are, in one row or in several."""
    damaged = bytearray(DATA)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    assert digest(bytes(damaged)) != digest(DATA)


@given(
    st.integers(0, NUM_ROWS * ROW_BYTES // SECTOR - 2),
    st.integers(0, NUM_ROWS * ROW_BYTES // SECTOR - 2),
    st.sampled_from(["lost", "copied", "swapped", "torn"]),
)
def test_damaged_sectors_are_seen(first: int, second: int, how: str) -> None:
    """Ones that are lost, are those of another place, have changed places, or of which all from one on are lost."""
    if first == second:
        return
    damaged = bytearray(DATA)
    here, there = (slice(SECTOR * number, SECTOR * (number + 1)) for number in (first, second))
    if how == "torn":
        damaged[here.start :] = bytes(len(damaged) - here.start)
    elif how == "lost":
        damaged[here] = bytes(SECTOR)
    else:
        damaged[here] = DATA[there]
        damaged[there] = DATA[here] if how == "swapped" else DATA[there]
    assert digest(bytes(damaged)) != digest(DATA)


@given(st.integers(0, NUM_ROWS - 2), st.integers(0, ROW_BYTES // 8 - 1))
def test_signs_of_two_elements_a_row_apart_are_seen(row: int, lane: int) -> None:
    """The highest bit of an integer stays the highest when it is multiplied; the shift carries it on."""
    damaged = bytearray(DATA)
    for number in (row, row + 1):
        damaged[(ROW_BYTES * number + 8 * lane + 7) % len(DATA)] ^= 0x80
    assert digest(bytes(damaged)) != digest(DATA)
