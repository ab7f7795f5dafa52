"""The copy kernel moves the bytes that fake memory moves, for any pair of engines that can be drawn.

Triton's interpreter runs the kernel on a CPU. It sees every address and every byte, and not what only a GPU does: order
between streams, registers, speed. What the compiler makes of the kernel is looked at in PTX, which takes no GPU either.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton
from hypothesis import event, given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget

from kvplan import Blocks, KVPlanError, Model, Region, plan_mesh, plan_reads
from kvplan.staging import Copy, StagedPlan, copy_plan, stage
from kvplan.staging.copies import CopySide
from kvplan.staging.copy_plan import BoundCopy, CopyPlan, Field, Launch, SideField, copy_of_boxes, width_of
from kvplan.testing.strategies import NUM_CHOICES, Case, case_of, cases
from kvplan.verification import FakeMemory
from kvplan_nixl import kernel
from kvplan_nixl.kernel import KernelCopier, KernelCopies, TorchCopies
from property_tests import fewer
from tests.nixl.interpreted import (
    CheckedCopies,
    RealMemory,
    WildAccessError,
    moved,
    randomized,
    with_ids,
    without_ids,
)
from tests.staged import NAME, cells, in_least_memory, run

SHAPES = [(1, 8192), (3, 16), (2, 64)]
"""Programs, and bytes of a tile."""


def narrowed(bound: BoundCopy) -> BoundCopy:
    """The same copies in rows of one word, so that all longer runs take several rows."""
    launches = tuple((launch._replace(width=launch.word // launch.element), rows) for launch, rows in bound.launches)
    return attrs.evolve(bound, launches=launches)


def plans_of(case: Case, operation: str) -> list[Any]:
    """The plans of all workers that read or write."""
    return [*map(case.reads, case.destinations)] if operation == "READ" else [*map(case.writes, case.sources)]


@given(
    cases(),
    st.sampled_from(["READ", "WRITE"]),
    st.sampled_from(SHAPES),
    st.sampled_from([narrowed, lambda bound: bound]),
)
def test_bytes_are_those_of_fake_memory(
    case: Case, operation: str, shape: tuple[int, int], change: Callable[[BoundCopy], BoundCopy]
) -> None:
    """Reads or writes of all workers, by one program or several, in tiles of any size."""
    words = set[int]()

    def seen(bound: BoundCopy) -> BoundCopy:
        words.update(launch.word for launch, _ in bound.launches)
        return change(bound)

    workers = (*case.destinations, *case.sources)
    assert moved(workers, plans_of(case, operation), case.request, CheckedCopies(*shape), seen) == []
    for word in words:
        event(f"words of {word} bytes")


@fewer(10)
@given(cases(), st.sampled_from(["READ", "WRITE"]), st.booleans())
def test_listed_ids_and_torch_move_the_same(case: Case, operation: str, by_torch: bool) -> None:
    """A spec with ids moves by the kernel too, and torch's operations are a fallback for it."""
    workers = (*case.destinations, *case.sources)
    mover = TorchCopies if by_torch else CheckedCopies(2)
    for bind in (without_ids, with_ids):
        assert moved(workers, plans_of(case, operation), case.request, mover, bind=bind) == []


PAIRS = [
    ("gemma-3-27b", {"tp": 2, "tokens_per_block": 16, "layout": "BHLNC"}, {"tp": 4, "tokens_per_block": 48}),
    ("deepseek-v3.2", {"tokens_per_block": 64}, {"tp": 2, "tokens_per_block": 16}),
    ("granite-4.0-h-tiny", {"tp": 1}, {"tp": 2}),
    ("qwen2.5-1.5b", {"tokens_per_block": 16, "layout": "BLHNC"}, {"tokens_per_block": 64, "layout": "BLHNC"}),
    ("qwen2.5-1.5b", {"dcp": 2, "tp": 4, "tokens_per_block": 16}, {"tokens_per_block": 32, "layout": "LHBNC"}),
]


@pytest.mark.parametrize(
    ("model", "src", "dst"), PAIRS, ids=[f"{pair[0]} {number}" for number, pair in enumerate(PAIRS)]
)
def test_published_models(model: str, src: dict[str, Any], dst: dict[str, Any]) -> None:
    """Real geometry, of a few layers: sliding windows, latents with an index, states, one piece a block, contexts."""
    from tests.shortened import shortened

    few = shortened(Model.shipped(model))
    sources, destinations = (few.engine(n, num_blocks=12, **side) for n, side in (("prefill", src), ("decode", dst)))
    mesh = plan_mesh(destinations, sources)

    def request(plan: Any) -> dict[str, Any]:
        tables: list[dict[str, Blocks]] = []
        for workers in ((plan.local,), plan.remotes):
            rank = random.Random(len(tables))
            table: dict[str, Blocks] = {}
            for worker in workers:
                for group in worker.groups:
                    size = group.tokens_per_block or 1
                    number = -(-100 // (size * group.context.size)) if group.tokens_per_block else 1
                    table.setdefault(group.name, Blocks(rank.sample(range(12), min(number, 12))))
            tables.append(table)
        return {"local": tables[0], "remote": tables[1], "tokens": (3, 100)}

    assert moved((*destinations, *sources), mesh.plans, request, CheckedCopies(2, 8192)) == []


def drawn() -> Iterator[Case]:
    """The same cases every time."""
    generator = random.Random(5)
    while True:
        yield case_of(generator.randbytes(NUM_CHOICES))


def mutant(tmp_path: Path, old: str, new: str) -> Callable[..., None]:
    """The kernel with a fault."""
    return changed(kernel, tmp_path, old, new).copy_runs  # type: ignore[no-any-return]


def changed(module: ModuleType, tmp_path: Path, old: str, new: str) -> Any:
    """A module with a fault: a part of its text, which stands there once, is another one."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


FAULTS = {
    "swapped strides": ("to_block * to_step", "to_block * from_step"),
    "a stride of the source": ("from_block * from_step", "from_block * to_step"),
    "a lost tail of a run": ("chunks = (elements + (WIDTH - 1)) // WIDTH", "chunks = elements // WIDTH"),
    "a lost last word": ("(at < elements)", "(at < elements - PER_WORD)"),
    "a word too many": ("(at < elements)", "(at < elements + PER_WORD)"),
    "a lost last tile": ("tiles = (items + (ROWS - 1)) // ROWS", "tiles = items // ROWS"),
    "a row too many": ("is_item = item < items", "is_item = item <= items"),
    "the range begins one late": ("occurrence = first + piece", "occurrence = first + 1 + piece"),
    "the range ends one early": ("count = tl.load(entry + 1).to(INDEX)", "count = tl.load(entry + 1).to(INDEX) - 1"),
    "a period too short": ("turn * period", "turn * (period - 1)"),
    "starts in another order": ("starts + start", "starts + num_starts - 1 - start"),
    "slots of the other side": ("to_ordinal = to_index // to_slots", "to_ordinal = to_index // from_slots"),
    "terms by start alone": ("by_slot = tl.load(entry + 13).to(INDEX)", "by_slot = 0"),
    "terms of the other side": ("to_terms + to_term", "from_terms + from_term"),
    "no terms of the source": ("tl.load(from_terms + from_term, mask=is_listed, other=0)", "0"),
    "origins of another run": ("from_origins + run", "from_origins + (run + 1) % runs"),
    "runs by their number in a row": ("run = piece // count", "run = piece % runs"),
    "contexts are ignored": ("if HAS_CONTEXT:", "if False:"),
    "contexts are swapped": ("// to_cycle * to_interleave", "// from_cycle * from_interleave"),
    "bytes for gaps": ("is_listed = is_item & (to_block >= 0)", "is_listed = is_item"),
    "a program's tiles twice as far": ("range(first_tile, tiles, programs)", "range(first_tile, tiles, 2 * programs)"),
    "all entries begin at the same program": (
        "first_tile = (first_tile + programs - tiles % programs) % programs",
        "first_tile = (first_tile + programs - tiles) % programs + tiles % programs",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_kernel_are_seen(tmp_path: Path, fault: str) -> None:
    """Each fault is found by one of the first cases: a wrong byte, or an access that is not aligned."""
    movers = [CheckedCopies(*shape, mutant(tmp_path, *FAULTS[fault])) for shape in SHAPES]
    assert is_seen(movers)


def is_seen(movers: list[CheckedCopies], change: Callable[[BoundCopy], BoundCopy] = lambda bound: bound) -> bool:
    """Return whether one of the first cases, or a request with gaps, finds a fault."""
    try:
        if any(with_gaps(mover, change) for mover in movers):
            return True
        for number, case in zip(range(200), drawn(), strict=False):
            workers = (*case.destinations, *case.sources)
            if moved(workers, plans_of(case, "READ"), case.request, movers[number % len(movers)], change):
                return True
    except WildAccessError:
        return True
    return False


def with_gaps(mover: CheckedCopies, change: Callable[[BoundCopy], BoundCopy] = lambda bound: bound) -> list[str]:
    """Move a request whose destination has left its first blocks, and one in the middle."""
    model = Model.from_config(
        {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    )
    decode, prefill = (model.engine(name, num_blocks=12, tokens_per_block=4) for name in ("decode", "prefill"))
    plan = plan_reads(decode[0], prefill)
    request = {
        "local": {"attn": Blocks([0, 0, 7, 0, 3], null=0)},
        "remote": {"attn": Blocks([5, 9, 2, 8, 1])},
        "tokens": (1, 19),
    }
    return moved((*decode, *prefill), [plan], lambda plan: request, mover, change)


@pytest.mark.parametrize("shape", SHAPES)
def test_gaps_receive_nothing(shape: tuple[int, int]) -> None:
    assert with_gaps(CheckedCopies(*shape)) == []


def wider(bound: BoundCopy) -> BoundCopy:
    """Words twice as wide as plans say. Rows have as many bytes."""
    launches = []
    numbers = bound.numbers.copy()
    for launch, rows in bound.launches:
        word = 2 * launch.word
        changed = launch._replace(word=word)
        scale = changed.element // launch.element
        numbers[rows, Field.ELEMENTS] //= scale
        launches.append((changed._replace(width=max(word // changed.element, launch.width // scale)), rows))
    return attrs.evolve(bound, launches=tuple(launches), numbers=numbers)


def later(bound: BoundCopy) -> BoundCopy:
    """Ranges that end an occurrence early."""
    numbers = bound.numbers.copy()
    numbers[:, Field.COUNT] = np.maximum(numbers[:, Field.COUNT] - 1, 0)
    return attrs.evolve(bound, numbers=numbers)


def shifted(bound: BoundCopy) -> BoundCopy:
    """Block tables that begin one block early."""
    numbers = bound.numbers.copy()
    numbers[:, Field.SOURCE + SideField.TABLE] -= 1
    tables = np.roll(bound.tables, -1)
    return attrs.evolve(bound, numbers=numbers, tables=np.append(tables[1:], tables[:1]))


@pytest.mark.parametrize("change", [wider, later, shifted])
def test_faults_of_bound_copies_are_seen(change: Callable[[BoundCopy], BoundCopy]) -> None:
    assert is_seen([CheckedCopies(*shape) for shape in SHAPES], change)


@fewer(6)
@given(cases(), st.booleans(), st.sampled_from(SHAPES), st.sampled_from([0, 1000, 10_000]))
def test_staged_copies_are_those_of_numpy(case: Case, whole: bool, shape: tuple[int, int], more: int) -> None:
    """The kernel puts the bytes of a staging buffer in place, chunk by chunk, for any engines that can be drawn."""
    for plan in map(case.reads, case.destinations):
        skipped = [name for name in case.not_transferred if name in plan.local.tensors]
        make = partial(stage, remotes=case.sources, staging=NAME, whole=whole, not_transferred=skipped)
        assert boxes_differ(in_least_memory(plan.local, 0, more, make), case.request(plan), CheckedCopies(*shape)) == []


def boxes_differ(plan: StagedPlan, request: Any, copies: CheckedCopies) -> list[str]:
    """Carry the local copies of a request out by the kernel and by numpy, and return the regions that differ."""
    local = plan.direct.local
    with FakeMemory([local]) as memory:
        randomized([local], memory)
        real = RealMemory([local], memory)
        regions = dict(zip(local.regions, real.regions_of(local), strict=True))
        copies.regions = real.spans
        copier = KernelCopier(real.tensors, copies)
        for chunk in plan.bind(**request):
            run(chunk.copies, cells(memory, local))
            copier.begin([elsewhere(copy, regions) for copy in chunk.copies])
        return real.differences()


def elsewhere(copy: Copy, regions: dict[Region, Region]) -> Copy:
    """The same copy where the regions are in this process."""
    sides = [
        attrs.evolve(side, origins=tuple((regions[region], offset) for region, offset in side.origins))
        for side in (copy.destination, copy.source)
    ]
    return Copy(sides[0], sides[1], copy.extents, copy.length_bytes)


def box(at: tuple[int, int], offsets: Any, strides: tuple[int, int], sizes: tuple[int, int]) -> tuple[Copy, list[Any]]:
    """A copy of boxes of two runs of 8 bytes, with one origin, and the memory of both sides."""
    arrays = [np.arange(size, dtype=np.uint64).astype(np.uint8) for size in sizes]
    regions = [Region(f"{i}", array.ctypes.data, array.size) for i, array in enumerate(arrays)]
    sides = [
        CopySide(((region, start),), np.array(each), (stride,))
        for region, start, each, stride in zip(regions, at, offsets, strides, strict=True)
    ]
    return Copy(sides[0], sides[1], (2,), 8), arrays


def test_boxes_whose_offsets_no_table_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are numbers of 32 bits. Boxes beyond them are runs of their own, with addresses of 64."""
    copy, arrays = box((16, 0), ([96, 0, 40], [0, 16, 32]), (8, 8), (256, 64))
    monkeypatch.setattr(copy_plan, "INT32_END", 4)
    bound = copy_of_boxes([copy])
    assert (bound.num_runs, bound.tables.tolist()) == (6, [0, 0])
    copies = CheckedCopies()
    copies.regions = [(array.ctypes.data, array.ctypes.data + array.size) for array in arrays]
    expected = [array.copy() for array in arrays]
    run([copy], {"0": expected[0], "1": expected[1]})
    copies.begin(bound)
    assert np.array_equal(arrays[0], expected[0])


def test_no_copies_are_done_at_once() -> None:
    """A chunk from whose sources nothing is needed."""
    copier = KernelCopier({}, CheckedCopies())
    assert copier.done(copier.begin([]))


def test_a_device_is_tried_before_a_request(tmp_path: Path) -> None:
    """A kernel whose bytes are wrong there is left out."""

    def tried(kernel_function: Any) -> None:
        copies = CheckedCopies(kernel=kernel_function)
        copies.regions = [(0, 1 << 62)]
        kernel.try_out(copies, "cpu")

    tried(kernel.copy_runs)
    with pytest.raises(KVPlanError, match=r"MEMORY: cannot copy by a kernel.*wrong bytes in runs of 64"):
        tried(mutant(tmp_path, "to_block * to_step", "(to_block + 1) * to_step"))


BOX_FAULTS = {
    "ids from the first offset": ("behind = offsets - offsets.min()", "behind = offsets - offsets[0]"),
    "a step twice as long": (
        "behind // step if step else behind), step",
        "behind // step if step else behind), 2 * step",
    ),
    "strides of the other side": ("copy.extents, side.strides_bytes", "copy.extents, copy.source.strides_bytes"),
    "origins by the first region": ("region.address + at for region, at", "side.origins[0][0].address + at for _, at"),
    "a lost box": ("num_ids = 1 if are_runs else sides[0].offsets.size", "num_ids = 1"),
}


@pytest.mark.parametrize("fault", BOX_FAULTS)
def test_faults_of_boxes_are_seen(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found by one of the first cases, as a wrong byte or an access outside memory."""
    faulty = changed(copy_plan, tmp_path, *BOX_FAULTS[fault]).copy_of_boxes
    monkeypatch.setattr(kernel, "copy_of_boxes", faulty)

    def is_wrong() -> bool:
        for case in islice(drawn(), 60):
            for plan in map(case.reads, case.destinations):
                skipped = [name for name in case.not_transferred if name in plan.local.tensors]
                make = partial(stage, remotes=case.sources, staging=NAME, not_transferred=skipped)
                try:
                    if boxes_differ(in_least_memory(plan.local, 0, 1000, make), case.request(plan), CheckedCopies(2)):
                        return True
                except WildAccessError:
                    return True
        return False

    assert is_wrong()


class Cuda:
    """A stand-in for streams of CUDA: it notes what they are told, and on which one the kernel is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        self.grids: list[int] = []
        self.is_capturing = False
        self.error: Exception | None = None
        self.present = CudaStream("the engine's", self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: CudaStream("its own", self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.present)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        properties = SimpleNamespace(multi_processor_count=7)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(KernelCopies, "_on_device", lambda copies, array: torch.tensor(array))

    @contextmanager
    def entered(self, stream: CudaStream) -> Iterator[None]:
        self.present, before = stream, self.present
        try:
            yield
        finally:
            self.present = before

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self.launched, grid[0])

    def launched(self, grid: int, *arguments: Any, **constants: Any) -> None:
        self.grids.append(grid)
        self.noted.append(f"launched on {self.present.name}")
        if self.error is not None:
            raise self.error


class CudaStream:
    """A stream of :class:`Cuda`, and an event of it."""

    def __init__(self, name: str, cuda: Cuda) -> None:
        self.name, self.cuda, self.is_over = name, cuda, False

    def wait_stream(self, other: CudaStream) -> None:
        self.cuda.noted.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.noted.append(f"{self.name} is waited for")

    def record_event(self) -> CudaStream:
        self.cuda.noted.append(f"an event of {self.name}")
        return self

    def query(self) -> bool:
        if self.cuda.error is not None:
            raise self.cuda.error
        return self.is_over


def small_copy() -> BoundCopy:
    """A request of several launches: latents and index keys have words of other widths."""
    (decode,), (prefill,) = (Model.shipped("deepseek-v3.2").engine(name, num_blocks=99) for name in ("d", "p"))
    blocks = {group.name: Blocks(range(9)) for group in decode.groups}
    (bound,) = CopyPlan(plan_reads(decode, [prefill])).bind(local=blocks, remote=blocks).values()
    assert len(bound.launches) > 1
    return bound


def test_copies_run_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits once for what the engine has queued, and the engine's stream waits for nothing."""
    cuda, bound = Cuda(monkeypatch), small_copy()
    copies = KernelCopies("cuda:0", kernel=cuda)
    copies.prepare(bound.pair)
    cuda.noted.clear()
    ticket = copies.begin(bound)
    launched = ["launched on its own"] * len(bound.launches)
    assert cuda.noted == ["its own waits for the engine's", *launched, "an event of its own"]
    assert cuda.present.name == "the engine's"
    cuda.noted.clear()
    assert not copies.done(ticket)
    ticket.is_over = cuda.is_capturing = True
    assert not copies.done(ticket)  # CUDA allows no query of an event while a graph is captured
    cuda.is_capturing = False
    assert copies.done(ticket)
    assert cuda.noted == []
    copies.wait()
    assert cuda.noted == ["its own is waited for"]


@pytest.mark.parametrize(("programs", "most"), [(None, 7 * kernel.PROGRAMS_PER_MULTIPROCESSOR), (3, 3)])
def test_copies_take_no_more_programs_than_they_may(
    programs: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So running requests keep the rest of the GPU."""
    cuda, bound = Cuda(monkeypatch), small_copy()
    KernelCopies("cuda:0", programs=programs, tile_bytes=128, kernel=cuda).begin(bound)
    assert max(cuda.grids) == most


def test_a_launch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is being copied when the error comes; a copy that fails later is told of when it is asked for."""
    cuda, bound = Cuda(monkeypatch), small_copy()
    copies = KernelCopies("cuda:0", kernel=cuda)
    ticket = copies.begin(bound)
    cuda.noted.clear()
    cuda.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(KVPlanError, match="illegal memory access"):
        copies.begin(bound)
    assert cuda.noted[-1] == "its own is waited for"
    with pytest.raises(KVPlanError, match="illegal memory access"):
        copies.done(ticket)


def test_missing_blocks_are_refused_before_a_byte_moves() -> None:
    """As ``bind`` of the plan refuses them."""
    model = Model.from_config(
        {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    )
    (decode,), (prefill,) = (model.engine(n, num_blocks=9, tokens_per_block=t) for n, t in (("d", 4), ("p", 6)))
    plan = plan_reads(decode, [prefill])
    bound = CopyPlan(plan)
    tables: dict[str, Any] = {"local": {"attn": Blocks([7, 3])}, "remote": {"attn": Blocks([5])}}
    for request in ({**tables, "tokens": (0, 8)}, {**tables, "tokens": (0, 9)}, {**tables, "tokens": (2, 8)}):
        with pytest.raises(KVPlanError) as by_plan:
            plan.bind(**request)
        with pytest.raises(KVPlanError) as by_copies:
            bound.bind(**request)
        assert (by_copies.value.code, by_copies.value.details) == (by_plan.value.code, by_plan.value.details)
    assert bound.bind(**{**tables, "tokens": (0, 6)})


@pytest.mark.parametrize("length", [*range(1, 40), 96, 100, 656, 1000, 4096, 8192, 10_000, 65536, 1 << 20])
@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
def test_rows_of_tiles(length: int, word: int) -> None:
    """Rows are powers of 2, whole words, and no longer than a tile."""
    width = width_of(length * word, word)
    element = min(word, 8)
    assert width & (width - 1) == 0
    assert width * element % word == 0
    assert width * element <= 8192
    assert width < 4 * length * word // element


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "launch", [Launch(16, 1024, False, False), Launch(16, 64, False, True), Launch(8, 64, True, False)]
)
def test_the_compiler_keeps_wide_words(launch: Launch, arch: int) -> None:
    """Compiled for A100 and H100, bytes are loaded and stored in words of 16 bytes, where a plan says so.

    Triton splits them into words of 8 where it is not told how addresses and lengths are aligned.
    """
    constants = kernel.constants(launch)
    arguments = {"arrays": "*i64", "entries": "*i64", "tables": "*i32", "num_entries": "i32"}
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    options = {"num_warps": kernel.NUM_WARPS, "enable_fp_fusion": True}
    source = triton.compiler.ASTSource(fn=kernel.compiled(), signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    stores = set(re.findall(r"st\.global[\w.:]*", compiled.asm["ptx"]))
    assert stores == {"st.global.v2.b64" if launch.word == 16 else "st.global.b64"}
