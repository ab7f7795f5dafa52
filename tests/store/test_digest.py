"""The digest of a page's data: every kind of damage changes it, and it is what the page on the format says."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan.protocol.pages import COLUMNS, FACTOR, ROW_BYTES, ROWS_AT_ONCE, DataDigest

SECTOR = 4096
NUM_ROWS = ROWS_AT_ONCE + 16
DATA = np.random.default_rng(1).integers(0, 256, NUM_ROWS * ROW_BYTES - 1000, np.uint8).tobytes()


def digest(data: bytes, rows: int = 1) -> str:
    """The digest of data that comes so many rows at a time."""
    made = DataDigest()
    for start in range(0, len(data), rows * ROW_BYTES):
        made.update(memoryview(data)[start : start + rows * ROW_BYTES])
    return made.hexdigest()


def specified(data: bytes) -> str:
    """The digest in the words of docs/store.md, in Python's integers."""
    columns = [0] * COLUMNS
    sums = []
    for start in range(0, len(data), ROW_BYTES):
        row = data[start : start + ROW_BYTES].ljust(ROW_BYTES, b"\0")
        words = [row[8 * column : 8 * column + 8] for column in range(COLUMNS)]
        pairs = zip(columns, words, strict=True)
        columns = [(value * FACTOR + int.from_bytes(word, "little")) % 2**64 for value, word in pairs]
        total = 0
        for word in words:
            total = (total * FACTOR + int.from_bytes(word, "big")) % 2**64
        sums.append(total)
    return hashlib.sha256(b"".join(value.to_bytes(8, "little") for value in [*columns, *sums])).hexdigest()


def test_the_digest_is_the_specified_one() -> None:
    """However many rows come at a time."""
    assert {digest(DATA, rows) for rows in (1, 9, NUM_ROWS)} == {specified(DATA)}


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


ROWS = st.lists(st.integers(0, NUM_ROWS - 2), min_size=1, max_size=4, unique=True)
COLUMN = st.integers(0, COLUMNS - 1)


@given(ROWS, COLUMN, st.integers(1, 2**64 - 1))
def test_a_change_of_an_integer_in_each_of_some_rows_is_seen(rows: list[int], column: int, change: int) -> None:
    """By the sums of the rows, whatever the sum of the column says."""
    damaged = np.frombuffer(DATA.ljust(NUM_ROWS * ROW_BYTES, b"\0"), np.uint64).reshape(NUM_ROWS, COLUMNS).copy()
    damaged[rows, column] ^= np.uint64(change)
    assert digest(damaged.tobytes()) != digest(DATA)


@given(ROWS, st.sets(COLUMN, min_size=1, max_size=4), st.integers(0, 63))
@example([3, 7], {1, 8}, 7)
@example([3, 7], {1, 8}, 63)
def test_a_bit_that_is_wrong_in_rows_and_columns_is_seen(rows: list[int], columns: set[int], bit: int) -> None:
    """The highest bits of two integers cancel out in the sums of one kind. In those of the other they do not."""
    damaged = np.frombuffer(DATA.ljust(NUM_ROWS * ROW_BYTES, b"\0"), np.uint64).reshape(NUM_ROWS, COLUMNS).copy()
    damaged[np.ix_(rows, sorted(columns))] ^= np.uint64(1 << bit)
    assert digest(damaged.tobytes()) != digest(DATA)
