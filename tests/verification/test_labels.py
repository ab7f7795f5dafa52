"""Labels: which positions a worker needs, where its views have them, and what is stored at an address."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Group, Region, View, Worker
from kvplan.verification import FakeMemory
from kvplan.verification.labels import label_tensors, locate, window

TOKEN = (Axis("token", 0, 2, 2, 24), Axis("token", 0, 2, 2, 4))
AXES = (Axis("head", 3, 5, 6, 8), *TOKEN, Axis("dim", 0, 2, 2, 2))
VIEW = View("layers.0", "attn", "kv", "bfloat16", AXES, 6, 50, 9)
WORKER = Worker("decode", 1, [Region("kv", 4096, 400, device_id=2)], [Group("attn", 4)], [VIEW])


def test_labels_are_as_many_as_bytes_and_all_different() -> None:
    """Every byte of every element of every position has a number of its own, for two tensors."""
    other = View("layers.1", "attn", "kv", "uint8", (Axis("token", 0, 4, 4, 1),), 6, 4)
    tensors = label_tensors([(VIEW, np.arange(5, 8)), (other, np.arange(5, 8))])
    assert (tensors["layers.0"].base, tensors["layers.0"].end) == (1, 1 + 3 * 6 * 2 * 2)
    assert (tensors["layers.1"].base, tensors["layers.1"].end) == (73, 76)
    described = {tensors["layers.0"].describe(label) for label in range(1, 73)}
    assert len(described) == 72
    assert "layers.0 dim 1 head 5 byte 0 of position 7" in described


def test_a_window_finds_each_byte_by_the_formula_of_the_view() -> None:
    """Token digits, a part of the heads, an offset and a pad: label and address agree for every byte."""
    tensors = label_tensors([(VIEW, np.arange(2, 11))])
    blocks = Blocks([4, 2], first=1)
    with FakeMemory([WORKER], label_bytes=4) as memory:
        seen = window(memory, WORKER, VIEW, tensors["layers.0"], blocks)
        assert seen.positions.tolist() == [4, 5, 6, 7, 8, 9, 10]
        for index, labels in seen.chunks():
            seen.cells[index] = labels
        for position in seen.positions.tolist():
            block, slot = (4, 2)[position // 4 - 1], position % 4
            for head in (3, 4):
                for dim in (0, 1):
                    at = 4096 + 9 + block * 50 + (head - 3) * 8 + slot // 2 * 24 + slot % 2 * 4 + dim * 2
                    (label, _) = memory.read(WORKER, at, 2).tolist()
                    words = f"layers.0 dim {dim} head {head} byte 0 of position {position}"
                    assert tensors["layers.0"].describe(label) == words
                    slots = f"group attn block {block} slot {slot}, address {at:#x} of decode/1"
                    assert str(locate(WORKER, at, 2)) == f"layers.0 dim {dim} head {head} byte 0 in {slots}"
        assert np.count_nonzero(memory.array(WORKER, VIEW)) == 7 * 2 * 2 * 2


def test_a_source_is_labelled_only_where_the_destination_has_coordinates() -> None:
    """Heads that the destination does not have get no labels; if its heads are in digits, all heads get labels."""
    part = attrs.evolve(VIEW, axes=(attrs.evolve(AXES[0], start=4, stop=6), *AXES[1:]))
    other = attrs.evolve(VIEW, axes=(attrs.evolve(AXES[0], start=0, stop=2), *AXES[1:]))
    digits = attrs.evolve(VIEW, axes=(Axis("head", 1, 2, 2, 0), Axis("head", 0, 2, 3, 8), *AXES[1:]))
    for view, source, heads in ((part, VIEW, {"head 4"}), (other, VIEW, set()), (digits, VIEW, {"head 3", "head 4"})):
        labels = label_tensors([(view, np.arange(4, 8))])["layers.0"]
        with FakeMemory([WORKER], label_bytes=4) as memory:
            seen = window(memory, WORKER, source, labels, Blocks([0], first=1))
            words = [labels.describe(label) for _, some in seen.chunks() for label in some.reshape(-1).tolist()]
        assert len(words) == 4 * 2 * 2 * len(heads)
        assert {" ".join(word.split()[3:5]) for word in words} == heads


@pytest.mark.parametrize(
    ("address", "device", "place"),
    [
        (4096, 2, "padding of region kv"),
        (4096 + 9 + 23, 2, "padding of region kv"),
        (4096 + 399, 2, "padding of region kv"),
        (4096 + 400, 2, "no region"),
        (4095, 2, "no region"),
        (4105, 0, "no region"),
    ],
)
def test_an_address_of_no_element_is_padding_or_nowhere(address: int, device: int, place: str) -> None:
    """Bytes before, between and after the elements are padding."""
    assert str(locate(WORKER, address, device)) == f"{place}, address {address:#x} of decode/1"
