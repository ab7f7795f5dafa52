"""The digest kernel adds up what torch's operations do, for any engine that can be drawn, by Triton's interpreter."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction

from kvplan import Context, Worker
from kvplan.protocol.digest import DIVIDED
from kvplan.testing.strategies import NUM_CHOICES, Case, case_of, cases
from kvplan.verification import FakeMemory
from kvplan_nixl import digest, digest_kernel
from kvplan_nixl.digest_kernel import DigestKernel, WordTable
from kvplan_nixl.kernel import ELEMENTS
from property_tests import fewer
from tests.nixl.test_digest import ALL_AXES, TorchWorker, noise
from tests.nixl.test_kernel import changed


@contextmanager
def by_kernel(function: Callable[..., None] = digest_kernel.add_words) -> Iterator[DigestKernel]:
    """Digests of main memory are those of a kernel that Triton interprets."""
    interpreted = DigestKernel("cpu", InterpretedFunction(function))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digest, "kernel_on", lambda device: interpreted)
        # the interpreter has sums, which Triton's own function reaches only with TRITON_INTERPRET set
        patched.setattr(tl, "sum", lambda values: tl.reduce(values, 0, tl.standard._sum_combine))
        yield interpreted


def differs(case: Case, divided: tuple[str, ...], within: Context | None = None, **options: Any) -> bool:
    """Whether digests of destinations by the kernel are others than by torch."""
    workers = case.destinations
    with FakeMemory(workers) as memory:
        noise(memory, workers, 1)
        return any(worker_differs(memory, case, worker, divided, within, **options) for worker in workers)


def worker_differs(
    memory: FakeMemory, case: Case, worker: Worker, divided: tuple[str, ...], within: Context | None, **options: Any
) -> bool:
    """Whether digests of one worker differ."""
    tables = {group.name: case.tables[0][group.name] for group in worker.groups}
    tokens = case.tokens[0]
    if isinstance(tokens, Mapping):
        tokens = {name: span for name, span in tokens.items() if name in tables}
    held = TorchWorker.of(memory, worker)
    names = {view.name for view in worker.views}
    expected = held.digests(names, tables, tokens, divided, within)
    with by_kernel(**options):
        return held.digests(names, tables, tokens, divided, within) != expected


def drawn() -> Iterator[Case]:
    """The same cases every time."""
    generator = random.Random(5)
    while True:
        yield case_of(generator.randbytes(NUM_CHOICES))


@fewer(2)
@given(cases(), st.sampled_from([ALL_AXES, DIVIDED, ()]), st.sampled_from([None, Context(1, 2, 1)]))
@example(next(drawn()), DIVIDED, None)
def test_digests_are_those_of_torch(case: Case, divided: tuple[str, ...], within: Context | None) -> None:
    """Bit by bit, whatever the strides, digits, contexts, parts and alignment."""
    assert not differs(case, divided, within)


@pytest.mark.parametrize("limits", [(16, 1), (16, 1000), (4, 2)])
def test_tiles_and_items_of_any_size(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of a part fill several tiles, and blocks of a request several items."""
    monkeypatch.setattr(digest_kernel, "MAX_TILE", limits[0])
    monkeypatch.setattr(digest_kernel, "MIN_TILE", 4)
    monkeypatch.setattr(digest_kernel, "BLOCKS_OF_ITEM", limits[1])
    assert not any(differs(case, DIVIDED) for case in islice(drawn(), 25))


def test_a_request_takes_no_table_to_the_device_again() -> None:
    """Tables of words are taken there by the first request, and stay as long as what was prepared."""
    case = next(case for case in drawn() if case.destinations[0].views)
    worker = case.destinations[0]
    tables = {group.name: case.tables[0][group.name] for group in worker.groups}
    tokens = case.tokens[0]
    if isinstance(tokens, Mapping):
        tokens = {name: span for name, span in tokens.items() if name in tables}
    with FakeMemory([worker]) as memory, by_kernel(), pytest.MonkeyPatch.context() as patched:
        noise(memory, [worker], 1)
        held = TorchWorker.of(memory, worker)
        prepared = digest.WorkerDigests(held.worker, held.memories)
        first = prepared.of(tables, tokens)
        made: list[int] = []
        flat = WordTable.on

        def counted(table: WordTable, device: torch.device) -> torch.Tensor:
            made.append(device not in table._copies)
            return flat(table, device)

        patched.setattr(WordTable, "on", counted)
        assert prepared.of(tables, tokens) == first
        assert made
        assert not any(made)


KERNEL_FAULTS = {
    "blocks side by side": ("tl.load(ids + number) * block_stride", "tl.load(ids + number) * num_words"),
    "blocks in the table's order": ("start = address + tl.load(ids + number)", "start = address + number"),
    "words with their sign": (".to(tl.int64) & MASK", ".to(tl.int64)"),
    "a lost last block": ("range(first, stop)", "range(first, stop - 1)"),
    "no weights": ("total * weight", "total"),
    "keys of the first slot": ("number * num_slots + slot", "number * num_slots"),
    "keys of the first block": ("number * num_slots + slot", "slot"),
    "one tile for all": ("tile * TILE + tl.arange", "tl.arange"),
    "one part for all": ("tl.load(view + 8) + part", "tl.load(view + 8)"),
    "sums of another view": ("tl.load(view + 8) + part", "part"),
}
TABLE_FAULTS = {
    "parts that share tiles": ("starts = (np.cumsum(tiles) - tiles) * tile", "starts = firsts"),
    "words in another order than weights": ("row[at] = np.broadcast_to(column, extents).reshape(-1)[order]",
                                             "row[at] = np.broadcast_to(column, extents).reshape(-1)"),
    "a lost last tile": ("tiles = -(-counts // tile)", "tiles = np.maximum(counts // tile, 1)"),
    "items of the first blocks alone": ("np.arange(0, num_blocks, BLOCKS_OF_ITEM)", "np.arange(0, min(num_blocks, 1))"),
}  # fmt: skip


def is_seen(**options: Any) -> bool:
    """Whether one of the first cases finds a fault."""
    try:
        return any(differs(case, DIVIDED, **options) for case in islice(drawn(), 60))
    except (ValueError, IndexError):  # of a table that does not fit together
        return True


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_of_the_kernel_are_seen(fault: str, tmp_path: Path) -> None:
    assert is_seen(function=changed(digest_kernel, tmp_path, *KERNEL_FAULTS[fault]).add_words)


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_faults_of_tables_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_kernel, "MAX_TILE", 16)
    faulty = changed(digest_kernel, tmp_path, *TABLE_FAULTS[fault])
    monkeypatch.setattr(faulty, "MAX_TILE", 16)
    monkeypatch.setattr(faulty, "BLOCKS_OF_ITEM", 1)
    monkeypatch.setattr(digest, "WordTable", faulty.WordTable)
    monkeypatch.setattr(digest_kernel, "_items", faulty._items)
    assert is_seen()


def test_a_device_is_tried_before_a_digest(tmp_path: Path) -> None:
    """A kernel whose sums of a trial are not those of torch is left out."""
    with by_kernel() as kernel:
        assert digest.try_out(kernel, "cpu")
    for fault in ("words with their sign", "keys of the first slot", "blocks in the table's order", "one part for all"):
        with by_kernel(changed(digest_kernel, tmp_path, *KERNEL_FAULTS[fault]).add_words) as kernel:
            assert not digest.try_out(kernel, "cpu"), fault


def test_torch_adds_up_on_a_cpu() -> None:
    assert digest.kernel_on(torch.device("cpu")) is None


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_the_compiler_takes_it(word_bytes: int, arch: int) -> None:
    """For A100 and H100. Each program adds one number to a sum, in one instruction."""
    constants = {"ELEMENT": ELEMENTS[word_bytes], "MASK": -1, "TILE": 1024}
    signature = {**dict.fromkeys(("data", "items", "sums"), "*i64"), **dict.fromkeys(constants, "constexpr")}
    source = triton.compiler.ASTSource(fn=digest_kernel.compiled(), signature=signature, constexprs=constants)
    target = GPUTarget("cuda", arch, 32)
    text = triton.compile(
        source, target=target, options={"num_warps": digest_kernel.NUM_WARPS, "enable_fp_fusion": True}
    ).asm["ptx"]
    assert len(re.findall(r"atom\.global[\w.]*add\.u64", text)) == 1
