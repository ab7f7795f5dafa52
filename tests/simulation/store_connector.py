"""vLLM's store beside its connector in a simulation: its scheduler's part, its workers' threads, and their clients.

All of the product's code runs: searches, saves, loads, files with their digests, eviction, and guards of calls that
stall. Threads take turns by the virtual clock (:mod:`tests.simulation.virtual_threads`). The bytes of a page are the
labels of the cells that were saved, so what is loaded has the labels of the tokens that it is of.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache, partial
from typing import Any
from unittest.mock import patch
from zlib import crc32

import attrs
import numpy as np

from kvplan import Group, KVPlanError, decode
from kvplan.describe import Axis, Blocks, Range, Region, View, Worker
from kvplan.describe.views import ITEMSIZE
from kvplan.plan import ReadSpec
from kvplan.plan.tables import Table
from kvplan.protocol import keeping, page_reads, page_shards
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.pages import ROW_BYTES
from kvplan.testing.simulation import (
    MODELS,
    BrokenRuleError,
    EngineRequest,
    Feature,
    FleetOutcome,
    Scenario,
    Simulation,
    Site,
    StepReport,
)
from kvplan.testing.simulation.catalog import NULL_BLOCK, GroupShape
from kvplan.testing.simulation.fleet import MakeParams
from kvplan.testing.simulation.memory import LabelledMemory
from kvplan.testing.simulation.scenario import Call, CallKind, Freeze, StoreTrouble, Update
from kvplan_nixl.serving.store import (
    BackgroundEviction,
    Evicted,
    MemoryBackend,
    MemoryMover,
    StallGuard,
    StoreClient,
    StoreReader,
    backends,
    client,
    eviction,
    page_files,
    parallel,
    readers,
    stalls,
)
from tests.simulation.virtual_threads import (
    EPOCH_S,
    THREADING,
    TIME,
    WORLD,
    VirtualPool,
    VirtualQueue,
    VirtualThread,
)
from tests.simulation.vllm_connector import (
    ENGINE_STATE,
    STORE_SCHEDULER,
    STORE_SEARCHES,
    STORE_WORKER,
    SeenRequest,
    VllmConnector,
)

STORE_MODELS = {name: model for name, model in MODELS.items() if name != "drafts"}
"""The models that a store takes: it refuses drafts that have a cache."""

STORE_FEATURES = (
    Feature.BURSTS
    | Feature.PREEMPTION
    | Feature.ASYNC_STEPS
    | Feature.NEAR_PROMPTS
    | Feature.FACTS
    | Feature.HOST_COPIES
    | Feature.SINKS
    | Feature.UPDATES
    | Feature.RESTARTS
    | Feature.RESHAPES
    | Feature.HANGUPS
    | Feature.REPEATS
    | Feature.CHILDREN
)
"""The features that change what a store has, or who uses it: others are of messages between engines."""

LABEL_BYTES = 8
MEMORY_ADDRESS, BUFFER_ADDRESS = 1 << 44, 1 << 45
"""Where plans have the labels of a worker, and a client's buffer: fleets have equal plans, of which most come again."""
BUFFER_BYTES = 12 << 10
"""Of a worker, for one page or a few: a prompt takes several runs."""
STALL_S = 3.0
LOOK_S = 2.0
LATE_S = 40.0
"""Seconds after which a trouble of the store has no consequences any more."""
CALL_S = 0.002
"""Seconds that a call of the store may take, and a move of bytes, where nothing is wrong."""

CALM_S = 1.0
"""Seconds within which searches end, or nothing is expected of them: they are given up later than that."""

SAVED_S = 4.0
"""The same of saves, which a worker begins within five seconds or never."""

PAGES = (4, 6, 20)
"""Tokens per page: fewer than a window, or more; blocks of some engines do not divide them."""

SHORT_PAGES = (4, 6, 12)
"""The same of popular prompts, most of which are longer."""

OTHER_SPACE = "0" * 16
"""Where a store has the pages of another model."""

PLANNING = ("lay_out", "of_group", "plan_reads", "plan_writes", "shards_of")
"""What pages are planned with: functions of values."""

MAX_BYTES = (0, 0, 60_000, 200_000)
"""Limits within which engines keep the store, 0 for none."""

FEW: dict[Any, dict[str, int]] = {
    client: {"PAGES_AT_ONCE": 2, "RUN_BYTES": 1, "MAX_PINS": 1},
    page_files: {"CHUNK_BYTES": ROW_BYTES},
    backends: {"MAX_FAULTS": 2},
    stalls: {"MAX_HANGING": 1},
    STORE_SEARCHES: {"NUM_THREADS": 1},
}
"""Limits of batches and lists that prompts of a fleet reach, as long ones do those of the product."""

NO_MEMORY = "no memory for bytes that move"
"""What an error says that is none of the store."""

NO_OWNERS: tuple[Any, ...] = ("", 7, True, ["client 0"], {})
"""What clients send as owners of pins that names none."""


class VirtualBackend(MemoryBackend):
    """A store of all engines of a fleet, whose calls take a while, and more if something is wrong."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._draw = random.Random(f"{scenario.seed} store")
        self.is_popular = Feature.POPULAR_PROMPTS in scenario.features
        self.tokens_per_page = self._draw.choice(SHORT_PAGES if self.is_popular else PAGES)
        # what other engines will load is still there
        scale = 6 if self.is_popular else 1
        self.max_bytes = scale * self._draw.choice(MAX_BYTES)
        # a part of the limit, so that there is room for others
        pins = random.Random(f"{scenario.seed} pins")
        self.max_pinned_bytes = pins.choice((0, self.max_bytes // 8, self.max_bytes // 3))
        shared = random.Random(f"{scenario.seed} shared store")
        self.is_shared = Feature.SHARED_STORE in scenario.features
        # of the files, those that an object lock or an attribute of the file system keeps
        self._held_share = shared.choice((0.0, 0.1, 0.3)) * self.is_shared
        self.max_model_bytes = scale * shared.choice((0, 0, 60_000)) * self.is_shared
        self.max_age_s = shared.choice((0.0, 0.0, 20.0)) * self.is_shared
        rough = random.Random(f"{scenario.seed} rough store")
        self.is_rough = Feature.ROUGH_STORE in scenario.features
        # of the files, those of a host that has lost its power
        self._headless = rough
        self._headless_share = rough.choice((0.0, 0.1, 0.3)) * self.is_rough
        # of the moves, those that fail by an error that is none of the store
        self._no_memory = random.Random(f"{scenario.seed} no memory")
        self._no_memory_share = self._no_memory.choice((0.0, 0.0, 0.05))
        is_small = self._draw.random() < 0.3
        super().__init__(max_bytes=scale * 100_000 if is_small else None)
        self.at_once = random.Random(f"{scenario.seed} store calls").choice((1, 1, 4))
        self._troubles = [item for item in scenario.incidents if isinstance(item, StoreTrouble)]
        # from then on engines are held up, what they have found is reset, or files are damaged
        harms = [item.at for item in scenario.incidents if isinstance(item, Freeze | Update)]
        damages = [trouble.begins_at for trouble in self._troubles if trouble.damages]
        damages += [-math.inf] if self._headless_share else []
        self._harmed_at = min((*harms, *damages), default=math.inf)
        # files leave that evictions delete, or whoever finds them damaged
        self._loses_files = self.evicts or bool(damages)
        # all have the same weights before, and what was saved is found
        updates = (item.at for item in scenario.incidents if isinstance(item, Update))
        self._updated_at = min(updates, default=math.inf)
        self._freezes = [(item.at, item.ends_at) for item in scenario.incidents if isinstance(item, Freeze)]
        # by the label of a page's last position, which is that of all tokens and facts before it: its name
        self._saved: dict[int, str] = {}
        # by group: the files of a page that engines write, each set of which is enough
        self.shards: dict[str, set[frozenset[str]]] = {}
        self._damaged: set[str] = set()
        # those that clients have deleted
        self._deleted: set[str] = set()
        # when each file of a pin was put
        self._pinned_at: dict[str, float] = {}
        # and when each page has lost one last
        self._unpinned_at: dict[str, float] = {}
        self.num_evicted = 0
        # by thread that evicts: the pages that pins keep
        self.kept: dict[Any, frozenset[str]] = {}
        # and of those that it deletes, whether a file could not be deleted
        self.tried: dict[Any, dict[str, bool]] = {}
        # by thread that notes the pages of a prefix as used: when each of them was then, if it is there
        self.noted: dict[Any, dict[str, float | None]] = {}
        # the pins that requests want to have, and to take away
        self.wanted: tuple[set[str], set[str]] = (set(), set())
        # they were there before, so they would keep all that may be pinned
        if self.max_pinned_bytes and not self.is_popular:
            self._put_others(pins)
        self.num_failures = 0
        # what threads have done wrong, which catch all errors
        self.broken: list[str] = []
        self.num_saved = 0

    def role_of(self, engine: str) -> str:
        """Draw the role of an engine at the store, which each start of it has."""
        draw = random.Random(f"{self._seed} {engine} store")
        return draw.choice(("kv_both",) * (12 if self.is_popular else 3) + ("kv_producer", "kv_consumer"))

    def is_healthy(self, now: float) -> bool:
        """Whether nothing is wrong with the store at a time, nor has been for a while."""
        is_late = any(each.begins_at <= now < each.ends_at + LATE_S for each in self._troubles)
        return now < self._harmed_at and not is_late

    def is_quick(self, now: float) -> bool:
        """Whether calls are neither slow nor given up at a time. They may fail."""
        late_s = {each: LATE_S if each.delay_s or each.move_s else CALM_S for each in self._troubles}
        spans = [(begins, ends + LATE_S) for begins, ends in self._freezes]
        spans += [(each.begins_at, each.ends_at + late_s[each]) for each in self._troubles]
        return not any(begins <= now < ends for begins, ends in spans)

    def is_held_up(self, now: float) -> bool:
        """Whether a client waits longer: its host is frozen, or a move ends before the client is given up."""
        moves = [(each.begins_at, each.ends_at) for each in self._troubles if each.move_s]
        return any(begins <= now < ends + LATE_S for begins, ends in (*moves, *self._freezes))

    def is_calm(self, now: float) -> bool:
        """Whether calls are quick at a time, and all engines have the same weights."""
        return now < self._updated_at and self.is_quick(now)

    def check_calls(self) -> None:
        """Raise what threads have done wrong."""
        if self.broken:
            raise BrokenRuleError("STORE", self.broken[0])

    def check_saved(self) -> None:
        """Refuse to save nothing of requests that are said to be saved, and to take a damaged file for a whole one."""
        pages = [files for page, files in self._files.items() if not page.startswith(OTHER_SPACE)]
        if self.num_saved and not self._loses_files and all(backends.is_pin(file) for files in pages for file in files):
            raise BrokenRuleError("STORE", f"{self.num_saved} requests are saved, and the store is empty")
        at_rest = MemoryBackend()
        at_rest._files = self._files
        for entry in at_rest.entries():
            if backends.is_pin(entry.name.rpartition("/")[2]) or entry.name.startswith(OTHER_SPACE):
                continue
            try:
                page_files.check_file(at_rest, entry.name)
                is_whole = True
            except KVPlanError:
                is_whole = False
            if is_whole is (entry.name in self._damaged):
                raise BrokenRuleError("STORE", f"{entry.name} is whole by a check: {is_whole}")

    @property
    def evicts(self) -> bool:
        """Whether pages leave that nobody has damaged."""
        return bool(self.max_bytes or self.max_model_bytes or self.max_age_s)

    def num_found(self, request: EngineRequest, groups: Sequence[GroupShape]) -> int:
        """The longest prefix of a request's prompt in whole pages of which the store has what an engine needs."""
        size = self.tokens_per_page
        # where blocks are freed, what is before the last token is another window, and another state
        most = request.num_prompt - any(group.window is not None for group in groups)
        ends = range(most // size * size, 0, -size)
        return next((end for end in ends if all(self._has_prefix(request, end, group) for group in groups)), 0)

    def _has_prefix(self, request: EngineRequest, end: int, group: GroupShape) -> bool:
        size = self.tokens_per_page
        first = group.first_needed(end)
        first = end - 1 if group.is_state else first - first % group.tokens_per_block
        pages = range(first // size, end // size)
        return all(self._has_saved(int(request.labels[(page + 1) * size - 1]), group) for page in pages)

    def _has_saved(self, label: int, group: GroupShape) -> bool:
        page = self._saved.get(label, "")
        # some blocks reach further back than the end of a page that is stored of a window
        is_end = not group.is_state and (group.window or math.inf) <= self.tokens_per_page
        whole = {file for file in self._files.get(page, ()) if f"{page}/{file}" not in self._damaged}
        return not is_end and any(files <= whole for files in self.shards[group.name])

    def note_saved(self, labels: Sequence[int], pages: Sequence[str]) -> int:
        """Note the pages that are saved, and return how many of them have no file, though none was damaged."""
        self._saved.update(zip(labels, pages, strict=True))
        damaged = {name.rpartition("/")[0] for name in self._damaged}
        return sum(page not in self._files and page not in damaged for page in pages)

    def lacks(self, page: str, group: str, own: frozenset[str]) -> bool:
        """Whether a page lacks files of a worker's group, and others have written none of the group."""
        # who finds a damaged file deletes it, maybe when somebody has written it anew
        damaged = {file for file in own if f"{page}/{file}" in self._damaged | self._deleted}
        files = self._files.get(page, {}).keys() | damaged
        return not own <= files and not files & (frozenset().union(*self.shards[group]) - own)

    def _put_others(self, draw: random.Random) -> None:
        """Put pages of another model in the store, of other sizes, which somebody has pinned."""
        uses = random.Random(f"{self._seed} uses of pages")
        for number in range(6):
            num_bytes = draw.randint(self.max_pinned_bytes // 10, self.max_pinned_bytes)
            at = -100.0 * draw.random()
            page = f"{OTHER_SPACE}/{number:064x}"
            # others have used it, or pinned it too, since then
            used_at, again_at = (at * uses.random() for _ in range(2))
            pins = {backends.PIN: at, f"{backends.PIN}.again": again_at}
            self._files[page] = {"data": backends._MemoryFile(bytes(num_bytes), EPOCH_S + used_at)}
            for pin, pinned_at in [*pins.items()][: uses.choice((1, 2))]:
                self._files[page][pin] = backends._MemoryFile(b"", EPOCH_S + pinned_at)
                self._pinned_at[f"{page}/{pin}"] = pinned_at
            self._num_bytes += num_bytes
            # the store has room for others besides
            self._max_bytes = self._max_bytes and self._max_bytes + num_bytes

    def kept_pages(self, max_bytes: int) -> frozenset[str]:
        """The pages that pins keep now: those that were pinned first, as far as they are within a limit."""
        firsts = dict[str, float]()
        for file, at in self._pinned_at.items():
            page = file.rpartition("/")[0]
            firsts[page] = min(at, firsts.get(page, at))
        kept = set[str]()
        for _, page in sorted((at, page) for page, at in firsts.items()):
            if self._num_bytes_of({*kept, page}) <= max_bytes:
                kept.add(page)
        return frozenset(kept)

    def _num_bytes_of(self, pages: Iterable[str]) -> int:
        return sum(len(file.data) for page in pages for file in self._files[page].values())

    def uses(self) -> dict[str, float]:
        """When each page that has no pin was used last."""
        return {
            page: max(file.used_s for file in files.values())
            for page, files in self._files.items()
            if not any(map(backends.is_pin, files))
        }

    def is_held(self, name: str) -> bool:
        """Whether a file cannot be deleted."""
        return crc32(name.encode()) < self._held_share * 2**32 and self.holds(name)

    def has_held(self, page: str) -> bool:
        """Whether a page has a file that cannot be deleted."""
        return any(self.is_held(f"{page}/{file}") for file in self._files.get(page, ()))

    def check_left(self, before: Mapping[str, float]) -> None:
        """Refuse that a page leaves, and another one stays that was used before it."""
        uses = {page: used_s for page, used_s in self.uses().items() if not self.has_held(page)}
        staying = [used_s for page, used_s in uses.items() if before.get(page) == used_s]
        gone = [page for page in before if page not in self._files]
        newest = max(gone, key=before.__getitem__, default=None)
        # others delete damaged files
        if newest is not None and before[newest] > min(staying, default=before[newest]) and not self._damaged:
            raise BrokenRuleError("STORE", f"an eviction deletes {newest}, and leaves a page that was used before it")

    def holds(self, name: str) -> bool:
        """Whether a file is there."""
        page, _, file = name.rpartition("/")
        return file in self._files.get(page, ())

    def contents(self) -> dict[str, list[Any]]:
        """The files that each page has now."""
        return {page: [*files.values()] for page, files in self._files.items()}

    @property
    def is_working(self) -> bool:
        """Whether nothing is wrong with the store now."""
        return not self._present()

    def _present(self) -> list[StoreTrouble]:
        assert WORLD.host is not None
        now = WORLD.host.loop.now
        return [trouble for trouble in self._troubles if trouble.begins_at <= now < trouble.ends_at]

    def move(self) -> None:
        """Let a move take its time, mostly little, or fail, also by an error that is none of kvplan."""
        slow_s = max((each.move_s for each in self._present()), default=0.0)
        WORLD.pause(CALL_S * self._draw.random() + (slow_s and slow_s * self._draw.random() ** 6))
        if self._fails():
            raise KVPlanError("TRANSFER", "move pages", expected="bytes", got="an error")
        if self._no_memory.random() < self._no_memory_share:
            self.num_failures += 1
            raise MemoryError(NO_MEMORY)

    def _fails(self) -> bool:
        """Draw whether a call or a move fails now."""
        has_failed = any(self._draw.random() < each.fails for each in self._present())
        self.num_failures += has_failed
        return has_failed

    def _wait(self, verb: str, name: str) -> None:
        """Let a call take its time, or fail."""
        slow_s = max((each.delay_s for each in self._present()), default=0.0)
        # most calls are quick, also then
        WORLD.pause(CALL_S * self._draw.random() + slow_s * self._draw.random() ** 12)
        if self._fails():
            raise backends.failed(verb, name, "an answer", "an error")

    def put(self, name: str, chunks: Sequence[backends.FileBytes]) -> bool:
        self._wait("write", name)
        data = b"".join(chunks)
        # a pin has no bytes
        if data and any(self._draw.random() < each.damages for each in self._present()):
            # of the data rather than the header
            index = len(data) - 1 - self._draw.randrange(len(chunks[-1]))
            flipped = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
            data = self._draw.choice((data[:index], flipped, flipped))
            return self._put(name, data, is_damaged=True)
        if data and self._headless_share and self._headless.random() < self._headless_share:
            # a name that is on disk before its bytes
            return self._put(name, self._headless.choice((b"", bytes(len(data)))), is_damaged=True)
        return self._put(name, data, is_damaged=False)

    def _put(self, name: str, data: bytes, *, is_damaged: bool) -> bool:
        """Put a file in the store, which may be full."""
        try:
            is_new = super().put(name, [data])
        except KVPlanError:
            self.num_failures += 1
            raise
        if is_new:
            assert WORLD.host is not None
            if backends.is_pin(name.rpartition("/")[2]):
                if name not in self.wanted[0]:
                    self.broken.append(f"no request wants {name}")
                self._check_pins(name.rpartition("/")[0])
                self._pinned_at[name] = WORLD.host.loop.now
            self._damaged.discard(name)
            self._damaged |= {name} if is_damaged else set()
        return is_new

    def check_pinned(self, files: Sequence[str], since: float) -> None:
        """Refuse that pins are not there which a request wanted that was saved, where nothing was evicted."""
        assert WORLD.host is not None
        now = WORLD.host.loop.now
        for file in files:
            page = file.rpartition("/")[0]
            num_owners = sum(map(backends.is_pin, self._files.get(page, ())))
            # now, or when it was to be pinned
            is_full = num_owners >= client.MAX_PINS or self._unpinned_at.get(page, -math.inf) > now - since
            if page in self._files and not (self.holds(file) or is_full or file in self.wanted[1]):
                raise BrokenRuleError("STORE", f"{file} is not there, which a request wanted {since:.1f} s ago")

    def check_unpinned(self, files: Sequence[str], at: float) -> None:
        """Refuse pins of before a time at which a request was saved that took them away."""
        left = [file for file in files if self._pinned_at.get(file, at) < at and not self.is_held(file)]
        if left:
            raise BrokenRuleError("STORE", f"{left[0]} is there, and a request has taken it away")

    def _check_pins(self, page: str) -> None:
        """Refuse another owner of a page that has as many as it may, but of clients that pin it at once."""
        assert WORLD.host is not None
        now = WORLD.host.loop.now
        owners = [file for file, at in self._pinned_at.items() if file.startswith(page) and at < now - CALM_S]
        if len(owners) >= client.MAX_PINS and self.is_calm(now):
            self.broken.append(f"{page} has {len(owners)} owners, and gets another one")

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        self._wait("read", name)
        return super().get(name, num_bytes)

    def delete(self, name: str) -> bool:
        assert WORLD.running is not None
        page, thread = name.rpartition("/")[0], WORLD.running.root
        kept, tried = self.kept.get(thread, frozenset[str]()), self.tried.get(thread)
        try:
            self._wait("delete", name)
        except KVPlanError:
            if tried is not None:
                tried[page] = True
            raise
        if tried is None:
            self._check_deleted(name)
            self._deleted.add(name)
        else:
            tried[page] = tried.get(page, False) or self.is_held(name)
            self.num_evicted += 1
        if page in kept:
            self.broken.append(f"an eviction deletes {name}, which a pin keeps")
        if self.is_held(name):
            raise backends.failed("delete", name, "a file that can be deleted", "Operation not permitted")
        if self._pinned_at.pop(name, None) is not None:
            assert WORLD.host is not None
            self._unpinned_at[page] = WORLD.host.loop.now
        return super().delete(name)

    def _check_deleted(self, name: str) -> None:
        """Refuse to delete what is whole, and pins that no request takes away, but to evict them."""
        page, _, shard = name.rpartition("/")
        file = self._files.get(page, {}).get(shard)
        # others may have written it since it was found damaged, where calls are slow
        is_new = file is not None and file.used_s > TIME.time() - CALM_S
        is_slow = any(each.delay_s for each in self._troubles)
        if file is None or (backends.is_pin(shard) and name in self.wanted[1]):
            return
        if backends.is_pin(shard) or not (name in self._damaged or is_new or is_slow):
            self.broken.append(f"a client deletes {name}, which is whole")

    def files(self, page: str) -> tuple[str, ...]:
        self._wait("list", page)
        return super().files(page)

    def touch(self, pages: Sequence[str], used_s: float, first_page: int = 0) -> None:
        noted = self.noted.get(WORLD.running, {})
        noted.update(dict.fromkeys(pages))
        self._wait("touch", "pages")
        super().touch(pages, used_s, first_page)
        for page in pages:
            files = self._files.get(page, {}).items()
            noted[page] = max((file.used_s for name, file in files if not backends.is_pin(name)), default=None)


class VirtualEviction(BackgroundEviction):
    """Looks at a store often, and refuses to leave more there than its limits allow."""

    def _look(self) -> None:
        backend: Any = self._backend
        before, began_s = backend.contents(), TIME.time()
        ages = {page: began_s - max(file.used_s for file in files) for page, files in before.items()}
        is_working = backend.is_working
        thread, uses = WORLD.running, backend.uses()
        kept = backend.kept[thread] = backend.kept_pages(self._limits.max_pinned_bytes or 0)
        tried: dict[str, bool] = {}
        backend.tried[thread] = tried
        outcomes = list[Evicted | KVPlanError]()
        report, self._report = self._report, outcomes.append
        super()._look()
        self._report = report
        del backend.kept[thread], backend.tried[thread]
        backend.check_calls()
        sizes, max_age_s = sizes_of(before), self._limits.max_age_s or math.inf
        old = {page for page, age_s in ages.items() if age_s > max_age_s}
        for outcome in outcomes:
            report(outcome)
            self._check_report(outcome, sizes, tried)
        self._check_needed(sizes, ages, old, tried)
        if is_working and backend.is_working:
            self._check_limits(before, old, kept)
            backend.check_left(uses)

    def _full_models(self, sizes: Mapping[str, int]) -> set[str]:
        """The models of a store that have more than they may, or all if the store has."""
        of_model = Counter[str]()
        for page, num_bytes in sizes.items():
            of_model[model_of(page)] += num_bytes
        most, most_of_model = self._limits.max_bytes or math.inf, self._limits.max_model_bytes or math.inf
        is_full = of_model.total() > most
        return {model for model, num_bytes in of_model.items() if is_full or num_bytes > most_of_model}

    def _check_report(
        self, outcome: Evicted | KVPlanError, sizes: Mapping[str, int], tried: Mapping[str, bool]
    ) -> None:
        """Refuse to say other than what was deleted, and what is left, also of files that cannot be deleted."""
        if isinstance(outcome, KVPlanError):
            raise BrokenRuleError("STORE", f"an eviction fails: {outcome}")
        deleted = [sizes[page] for page, has_failed in tried.items() if not has_failed]
        expected = len(deleted), sum(deleted), sum(sizes.values()) - sum(deleted)
        num_failed = min(sum(tried.values()), backends.MAX_FAULTS)
        got = outcome.num_pages, outcome.num_bytes, outcome.left_bytes
        if got != expected or len(outcome.faults) < num_failed:
            message = f"an eviction says {outcome}, and it is {expected} with {num_failed} pages that are left"
            raise BrokenRuleError("STORE", message)

    def _check_needed(
        self, sizes: Mapping[str, int], ages: Mapping[str, float], old: set[str], tried: Mapping[str, bool]
    ) -> None:
        """Refuse to delete a page when older ones that leave are enough for the limits."""
        left = dict(sizes)
        # pages of one age leave in the order of a list
        places = {page: place for place, page in enumerate(sizes)}
        for page in sorted(tried.keys() & sizes.keys(), key=lambda page: (-ages[page], places[page])):
            if page not in old and model_of(page) not in self._full_models(left):
                raise BrokenRuleError("STORE", f"an eviction deletes {page} from a store within {self._limits}")
            if not tried[page]:
                del left[page]

    def _check_limits(self, before: Mapping[str, Sequence[Any]], old: set[str], kept: frozenset[str]) -> None:
        """Refuse to leave what is beyond the limits, but for pages that a pin keeps, or that cannot be deleted."""
        backend: Any = self._backend
        # others may write meanwhile
        known = {id(file) for files in before.values() for file in files}
        contents = {page: [file for file in files if id(file) in known] for page, files in backend.contents().items()}
        sizes = sizes_of(contents)
        full = self._full_models(sizes)
        for page in sizes:
            is_beyond = page in old or model_of(page) in full
            if is_beyond and page not in kept and not backend.has_held(page):
                raise BrokenRuleError("STORE", f"an eviction leaves {page} in a store for {self._limits}")


def sizes_of(contents: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """How many bytes the files of each page have, of those that have any file."""
    return {page: sum(len(file.data) for file in files) for page, files in contents.items() if files}


def model_of(page: str) -> str:
    """The model of a page, by its name."""
    return page.partition("/")[0]


class VirtualMover(MemoryMover):
    """Moves the bytes of one spec after another, each of which takes a while, where they are in memory."""

    def __init__(self, client: VirtualClient) -> None:
        self._client = client
        self._local_shift = client.memory.cells.ctypes.data - MEMORY_ADDRESS
        self._remote_shift = client._buffer.ctypes.data - BUFFER_ADDRESS

    def move(self, specs: Sequence[ReadSpec]) -> None:
        backend: Any = self._client.backend
        for spec in specs:
            backend.move()
            self._client.check_move()
            local = shifted(spec.local_table, self._local_shift)
            remote = shifted(spec.remote_table, self._remote_shift)
            super().move([attrs.evolve(spec, local_table=local, remote_table=remote)])


def shifted(table: Table, num_bytes: int) -> Table:
    """The table of the same rows elsewhere."""
    rows = table.rows.copy()
    rows[:, 0] += np.int64(num_bytes).astype(np.uint64)
    return attrs.evolve(table, rows=rows)


class _Placed(StoreReader):
    """A reader whose plans have its buffer at one address."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "address": BUFFER_ADDRESS})


class VirtualClient(StoreClient, _Placed):
    """A client that says in which blocks bytes may land: those of a load, until it ends or the client is given up."""

    memory: LabelledMemory
    groups_of: Mapping[str, GroupShape]
    used_by: VirtualStoreWorker
    _cells: Sequence[int] = ()
    given_up_by: Any = None
    _has_failed = False
    _num_steps = 0
    _stepped_s: float | None = None

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """The steps, which show that its calls go on."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._num_steps = number
        self.check_patience()
        if self._stepped_s is not None:
            self._stepped_s = TIME.monotonic()

    def check_patience(self) -> None:
        """Refuse that a call makes no step for a while, and is not given up."""
        if self._stepped_s is None or self.given_up_by:
            return
        waited_s = TIME.monotonic() - self._stepped_s
        backend: Any = self.backend
        is_late = waited_s > 2 * STALL_S + CALM_S
        if is_late and WORLD.host is not None and not backend.is_held_up(WORLD.host.loop.now):
            self._tell(f"has waited {waited_s:.1f} s, and is not given up")

    @property
    def is_called(self) -> bool:
        """Whether a call is under way, maybe since it was given up."""
        return self._stepped_s is not None

    @contextmanager
    def _called(self, kind: str) -> Iterator[None]:
        """Note that a call is under way, and refuse it if nothing may begin any more."""
        self._has_failed = False
        self._stepped_s = TIME.monotonic()
        if self.given_up_by:
            self._tell("is called, and was given up")
        # the job that was under way
        self.used_by.num_late[kind] += self.used_by.is_closing
        if self.used_by.num_late[kind] > 1:
            self._tell(f"begins to {kind} when it closes")
        try:
            yield
        finally:
            self._stepped_s = None

    def save(self, chain: Chain, tables: Mapping[str, Blocks], positions: Mapping[str, Range]) -> int:
        with self._called("save"):
            return super().save(chain, tables, positions)

    def _save(self, chain: Chain, group: Group, table: Blocks, pages: range) -> int:
        self._has_failed = False
        self._outcomes: dict[int, set[bool | None]] = {}
        number = super()._save(chain, group, table, pages)
        num_new = sum(True in outcomes and None not in outcomes for outcomes in self._outcomes.values())
        if number != num_new:
            self._tell(f"has saved {num_new} pages, and says {number}")
        return number

    def _write_file(self, file: Any) -> bool | None:
        is_written = super()._write_file(file)
        self._has_failed |= is_written is None
        self._outcomes.setdefault(file.stop, set()).add(is_written)
        backend: Any = self.backend
        if is_written and not backend.holds(file.name):
            self._tell(f"says that it has written {file.name}")
        return is_written

    def _tell(self, broken: str) -> None:
        """Say what it has done wrong, in a thread that catches all errors."""
        backend: Any = self.backend
        backend.broken.append(f"a client of {self.worker.label} {broken}")

    def _read_file(self, file: Any) -> None:
        try:
            super()._read_file(file)
        except KVPlanError:
            self._has_failed = True
            raise

    def load(self, chain: Chain, tables: Mapping[str, Blocks], positions: Mapping[str, Range]) -> None:
        cells = list[int]()
        for name, (start, stop) in positions.items():
            group, table = self.groups_of[name], tables[name]
            size = group.tokens_per_block
            is_loaded = (table.ordinals * size < stop) & ((table.ordinals + 1) * size > start)
            blocks = table.ids if group.is_state else table.ids[is_loaded]
            cells += [
                cell for block in blocks for cell in self.memory.cells_of_block(group.name, int(block)).ravel().tolist()
            ]
        self._cells = cells
        self.memory.landing[cells] += 1
        try:
            with self._called("load"):
                super().load(chain, tables, positions)
        finally:
            self._let_go()

    def use(self, chain: Chain, stop: int) -> None:
        backend: Any = self.backend
        noted = backend.noted[WORLD.running] = dict[str, float | None]()
        super().use(chain, stop)
        del backend.noted[WORLD.running]
        times = [used_s for used_s in noted.values() if used_s is not None]
        if [*noted] != self._page_names(chain, stop) or times != sorted(times, reverse=True):
            self._tell("notes other pages as used, or later ones as used later")

    def abandon(self) -> None:
        super().abandon()
        self.given_up_by = WORLD.running
        self.used_by.gave_up_s[WORLD.running] = TIME.monotonic()
        self._let_go()

    def check_move(self) -> None:
        """Refuse to move bytes when the client was given up, since others may have the blocks, or a file has failed."""
        if self._has_failed:
            self._tell("goes on, of which a file has failed")
        if self.given_up_by:
            self._tell("moves bytes, and was given up")
        if self.used_by.is_closed:
            self._tell("moves bytes when it is closed")

    def _let_go(self) -> None:
        self.memory.landing[[*self._cells]] -= 1
        self._cells = ()


class VirtualGuard(StallGuard[VirtualClient]):
    """A guard that refuses a call for no other reason than that one was given up a moment ago, or that as many hang."""

    def call(self, use: Callable[[VirtualClient], Any]) -> Any:
        begun = list[VirtualClient]()

        def begin(made: VirtualClient) -> Any:
            begun.append(made)
            return use(made)

        try:
            return super().call(begin)
        except KVPlanError:
            worker: VirtualStoreWorker = self._make_client.__self__  # type: ignore[attr-defined]
            if not begun and worker.may_begin():
                worker.backend.broken.append(f"a call of {worker.described.label} does not begin, though none hangs")
            raise


class VirtualStoreWorker(STORE_WORKER.StoreWorker):  # type: ignore[misc, name-defined]
    """A worker's part, whose clients move the labels of a memory."""

    backend: VirtualBackend
    described: Worker
    memory: LabelledMemory
    groups: Sequence[GroupShape]
    num_late: Counter[str]
    # by thread: when it has given up a client
    gave_up_s: dict[Any, float]
    # all of its clients
    made: list[VirtualClient]
    is_closing = is_closed = False

    def close(self) -> None:
        self.is_closing = True
        super().close()
        self.is_closed = True

    def may_begin(self) -> bool:
        """Whether a call may begin in the thread that runs: none was given up a moment ago, nor hang as many as may."""
        is_paused = TIME.monotonic() < self.gave_up_s.get(WORLD.running, -math.inf) + stalls.PAUSE_S
        num_hanging = sum(each.given_up_by is WORLD.running and each.is_called for each in self.made)
        return not is_paused and num_hanging < stalls.MAX_HANGING

    def _client(self) -> StoreClient:
        made: VirtualClient = super()._client()
        made.memory, made.used_by = self.memory, self
        self.made.append(made)
        if not self.may_begin():
            made._tell("begins, though another one was given up a moment ago, or too many hang")
        made._mover = VirtualMover(made)
        made.groups_of = {f"group{index}": group for index, group in enumerate(self.groups)}
        return made


@lru_cache(maxsize=4096)
def label_worker(worker: Worker, groups: Sequence[GroupShape]) -> Worker:
    """The worker of the labels in a memory: each byte of a worker is an item of eight bytes.

    Its groups have the names that vLLM's connector gives them, and say how many positions they keep.
    """
    regions = []
    address = MEMORY_ADDRESS
    # as a memory has its cells
    for region in sorted(worker.regions, key=lambda region: region.address):
        regions.append(Region(region.name, address, LABEL_BYTES * region.size_bytes))
        address += regions[-1].size_bytes
    names = {group.name: f"group{index}" for index, group in enumerate(groups)}
    widened = attrs.evolve(
        worker,
        regions=regions,
        groups=[attrs.evolve(group, name=names[group.name]) for group in worker.groups],
        views=[label_view(view, names[view.group]) for view in worker.views],
    )
    kept = {names[group.name]: group.window - 1 for group in groups if group.window and not group.is_state}
    return keeping(widened, kept)


def label_view(view: View, group: str) -> View:
    """The view of the labels of a view's bytes."""
    axes = [attrs.evolve(axis, stride_bytes=LABEL_BYTES * axis.stride_bytes) for axis in view.axes]
    axes.append(Axis("byte", 0, ITEMSIZE[view.dtype], ITEMSIZE[view.dtype], LABEL_BYTES))
    return attrs.evolve(
        view,
        group=group,
        dtype="uint64",
        axes=axes,
        block_stride_bytes=LABEL_BYTES * view.block_stride_bytes,
        offset_bytes=LABEL_BYTES * view.offset_bytes,
    )


def pin_of(request: EngineRequest, *, has_bad: bool = False, is_popular: bool = False) -> dict[str, Any]:
    """The parameters with which a quarter of all requests pin their prompts, and another quarter unpins them.

    Half of all pin them if they are popular. With ``has_bad`` a third of them name no owner, since clients send what
    they like.
    """
    number = crc32(request.name.encode())
    rest = STORE_SCHEDULER.PIN if is_popular else ""
    label = (STORE_SCHEDULER.PIN, STORE_SCHEDULER.UNPIN, rest, "")[number % 4]
    bad = NO_OWNERS[number // 24 % len(NO_OWNERS)]
    owner = bad if has_bad and number // 8 % 3 == 0 else f"client {number // 4 % 2}"
    return {label: owner} if label else {}


@attrs.frozen
class _Look:
    """A look at a store: when, how many of its calls had failed by then, and how many files were evicted."""

    at: float
    num_failures: int
    num_evicted: int


class StoreConnector(VllmConnector):
    """``kvplan_nixl.vllm``'s connectors to other engines and to a store, as vLLM's MultiConnector has them.

    The first one that has positions of a request loads them, and blocks of a request that has ended stay until both
    have done with them. ``is_first`` is whether the store is asked first.
    """

    def __init__(self, site: Site, *, backend: VirtualBackend) -> None:
        super().__init__(site)
        self._host, self._backend = site.host, backend
        draw = random.Random(site.host.token_hex(8))
        self._is_first = draw.random() < 0.5
        self._name_role(backend.role_of(site.host.name))
        facts = {"model": "that of all engines"}
        self._store_state = ENGINE_STATE.EngineState(facts, site.host.token_hex)
        settings = STORE_WORKER.VllmStoreSettings(
            folder="store",
            tokens_per_page=backend.tokens_per_page,
            buffer_bytes=BUFFER_BYTES,
            stall_s=STALL_S,
            max_bytes=backend.max_bytes,
            max_pinned_bytes=backend.max_pinned_bytes,
            max_model_bytes=backend.max_model_bytes,
            max_age_s=backend.max_age_s,
        )
        # what the store had of each request when it was searched first, and what is to be saved
        self._looked: dict[str, tuple[_Look, int]] = {}
        self._saving: dict[str, tuple[_Look, list[int], list[str]]] = {}
        # the files that are to be there when it is: by page, group and worker
        self._expected: dict[str, list[tuple[str, str, frozenset[str]]]] = {}
        # the groups of each request that were read from the middle of a block
        self._partly_read = defaultdict[str, set[str]](set)
        # the pins that it wants then, and those that it takes away; those of requests that are saved, and since when
        self._pins: dict[str, list[list[str]]] = {}
        self._pinning: list[tuple[float, _Look, list[list[str]]]] = []
        # the pages that were saved before a reset, which this engine may not find any more
        self._pages, self._ended_pages = set[str](), set[str]()
        self._has_new_keys = False
        self._chosen: dict[str, bool] = {}
        self._num_holders = Counter[str]()
        self._exported = set[str]()
        self._num_loaded, self._num_saved = Counter[str](), Counter[str]()
        self._failed = set[str]()
        with WORLD.on(self._host):
            self._store = STORE_SCHEDULER.StoreScheduler(self._store_config, self._cache, settings, self._store_state)
            self._scheduler.stores.append(self._store)
            self._store_workers = []
            for described, executor in zip(site.workers, site.executors, strict=True):
                worker = VirtualStoreWorker(self._store_config, self._cache, settings, facts)
                worker.memory, worker.groups, worker.num_late = executor.port.memory, site.groups, Counter()
                worker.gave_up_s, worker.made = {}, []
                worker.backend, worker.described = backend, described
                worker.register(label_worker(described, tuple(site.groups)))
                self._store_workers.append(worker)
        for index, group in enumerate(site.groups):
            names = [self._shards(worker, f"group{index}")[0] for worker in self._store_workers]
            backend.shards.setdefault(group.name, set()).add(frozenset().union(*names))

    def _shards(self, worker: VirtualStoreWorker, name: str) -> tuple[frozenset[str], int]:
        """The files that a worker writes of each page of a group, and how many positions they have."""
        (group,) = (group for group in worker._worker.groups if group.name == name)
        own: Any = page_reads
        shards = own.shards_of(own.of_group(worker._worker, group), self._backend.tokens_per_page)
        return frozenset(shard.name for shard in shards), shards[0].num_tokens or 0

    def close(self, done: Callable[[], None]) -> None:
        """Close what searches, and each worker, all at once as processes of their own, and say when it is done."""
        left: list[Any] = [self._store, *self._store_workers]

        def close(part: Any) -> None:
            part.close()
            left.remove(part)
            if not left:
                self._host.loop.at(self._host.loop.now, done)

        with WORLD.on(self._host):
            for part in [*left]:
                VirtualThread(close, (part,)).start()

    def _name_role(self, role: str) -> None:
        """Let the store's connector save alone, load alone, or do both."""
        self._saves, self._loads = role != "kv_consumer", role != "kv_producer"
        transfers = attrs.evolve(
            self._config.kv_transfer_config, is_kv_producer=self._saves, is_kv_consumer=self._loads
        )
        self._store_config = attrs.evolve(self._config, kv_transfer_config=transfers)

    def _name_weights(self) -> None:
        if self._weights() != self._version:
            self._store_state.weights_named(self._weights())
            self._store_state.prefix_cache_reset()
            self._change_keys()
        super()._name_weights()

    def hear(self, call: Call, is_done: bool) -> None:
        super().hear(call, is_done)
        if call.kind in (CallKind.CHANGE, CallKind.FAILED_CHANGE, CallKind.NAME):
            self._change_keys()

    def _change_keys(self) -> None:
        """Note that the weights have changed, or got a name, under which there may be pages."""
        self._has_new_keys = True
        self._ended_pages.clear()

    def _states(self) -> list[Any]:
        return [*super()._states(), self._store_state]

    def reset(self) -> None:
        super().reset()
        self._store_state.prefix_cache_reset()
        self._store_state.store_reset()
        if not self._has_new_keys:
            self._ended_pages |= self._pages
        self._has_new_keys = False

    def _check_pages(self, name: str, pages: Iterable[str]) -> None:
        """Refuse pages that were saved before a reset that has ended them."""
        if not self._ended_pages.isdisjoint(pages):
            raise BrokenRuleError("STORE", f"{name} has pages of before a reset, and the same weights")

    def count_readable(self, request: EngineRequest, num_cached: int) -> int | None:
        self._name_weights()
        number = 0
        for is_store in (self._is_first, not self._is_first):
            if is_store:
                with WORLD.on(self._host):
                    found = self._count_found(request, num_cached)
            else:
                found = super().count_readable(request, num_cached)
            if found is None:
                return None
            # the engine computes the last token itself
            assert num_cached + found < request.num_prompt or not found
            if found and not number:
                number = found
                self._chosen[request.name] = is_store
        return number

    def _look(self) -> _Look:
        return _Look(self._host.loop.now, self._backend.num_failures, self._backend.num_evicted)

    def _loses_pages(self, look: _Look) -> bool:
        """Whether others have evicted pages since a look at the store."""
        return look.num_evicted < self._backend.num_evicted

    def _is_calm(self, look: _Look) -> bool:
        """Whether nothing has gone wrong with the store since a look at it, a moment ago, and weights are the same."""
        return self._backend.is_calm(self._host.loop.now) and self._is_quick(look, CALM_S)

    def _is_quick(self, look: _Look, most_s: float) -> bool:
        """Whether calls of the store were quick and have not failed since a look at it, some seconds ago at most."""
        is_recent = self._host.loop.now < look.at + most_s
        has_failed = look.num_failures < self._backend.num_failures
        is_quick = self._backend.is_quick(look.at) and self._backend.is_quick(self._host.loop.now)
        return is_recent and not has_failed and is_quick and not self._has_hung()

    def _has_hung(self) -> bool:
        """Whether a call of a worker hangs, or was given up a moment ago, so that others do not begin."""
        late_s = self._host.monotonic() - stalls.PAUSE_S - SAVED_S
        is_late = any(at > late_s for worker in self._store_workers for at in worker.gave_up_s.values())
        clients = (each for worker in self._store_workers for each in worker.made)
        return is_late or any(each.given_up_by and each.is_called for each in clients)

    def _count_found(self, request: EngineRequest, num_cached: int) -> int | None:
        """Search the store, and refuse to find less than what it had before."""
        if request.name not in self._looked:
            self._looked[request.name] = self._look(), self._num_there(request)
        look, number = self._looked[request.name]
        is_loaded = request.name in self._store._begun
        found: int | None = self._store.count_tokens_to_load(self._seen(request), num_cached)
        if found and not self._loads:
            raise BrokenRuleError("STORE", f"{request.name} is found by an engine that saves alone")
        is_sure = self._loads and self._is_calm(look) and not is_loaded
        if found is not None and found < number - num_cached and is_sure:
            number = min(number, self._num_there(request), request.num_prompt - 1)
            if found < number - num_cached:
                message = f"{num_cached + found} positions of {request.name} are found, and {number} are there"
                raise BrokenRuleError("STORE", message)
        return found

    def _num_there(self, request: EngineRequest) -> int:
        return self._backend.num_found(request, self._groups)

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        is_store = self._chosen.pop(request.name, False) and num_tokens > 0
        super().begin_read(request, 0 if is_store else num_tokens)
        with WORLD.on(self._host):
            table = self._table(request)
            self._store.begin_load(self._seen(request), table, num_tokens if is_store else 0)
        if is_store and (jobs := self._store._step.loads):
            chain, stop = jobs[-1].chain, jobs[-1].stop
            self._check_pages(request.name, pages_of(chain)[: stop // self._backend.tokens_per_page])

    def step(self) -> StepReport:
        report = super().step()
        for name, request in self._requests.items():
            self._partly_read[name] |= request.num_partial.keys()
        with WORLD.on(self._host):
            loaded = self._step_store()
        released = [name for name in (*report.released, *self._take_saved()) if self._let_go(name)]
        again = [name for name in loaded if name in self._failed]
        self._failed.difference_update(again)
        received = [*report.received, *(name for name in loaded if name not in again)]
        return attrs.evolve(report, received=received, released=released, recomputed=again)

    def _step_store(self) -> list[str]:
        """Let the workers begin what the scheduler says, and return the requests that all have loaded, or tried to."""
        self._store_state.step_begun()
        metadata = self._store.take_step()
        self._backend.check_calls()
        self._check_pins()
        ended = list[str]()
        reports = []
        for worker in self._store_workers:
            for each in worker.made:
                each.check_patience()
            worker.start_step(metadata)
            results = worker.results()
            self._failed |= results.failed_recving
            is_healthy = self._backend.is_healthy(self._host.loop.now)
            for name in sorted(results.failed_recving & self._looked.keys()):
                look = self._looked[name][0]
                has_failed = look.num_failures < self._backend.num_failures
                # what is evicted may have been found before
                if is_healthy and not (has_failed or self._loses_pages(look)):
                    raise BrokenRuleError("STORE", f"{name} cannot be loaded, though nothing is wrong with the store")
            self._num_saved.update(sorted(results.finished_sending))
            for name in sorted(results.finished_recving):
                self._num_loaded[name] += 1
                if self._num_loaded[name] == len(self._store_workers):
                    del self._num_loaded[name]
                    ended.append(name)
            reports.append(worker.take_report())
        offers = [offer for report in reports if report for offer in report.offers]
        if offers:
            self._store.set_offers(offers)
        return ended

    def _take_saved(self) -> list[str]:
        """Return the requests that all workers have saved since the last step."""
        saved = [name for name, number in self._num_saved.items() if number == len(self._store_workers)]
        self._backend.num_saved += len(saved) * self._backend.is_healthy(self._host.loop.now)
        for name in saved:
            del self._num_saved[name]
            look, labels, pages = self._saving.pop(name)
            expected, pins = self._expected.pop(name), self._pins.pop(name)
            if not self._is_quick(look, SAVED_S):
                continue
            self._pinning.append((self._host.loop.now, look, pins))
            num_lacking = self._backend.note_saved(labels, pages)
            # others may evict pages meanwhile
            if self._loses_pages(look):
                continue
            if num_lacking:
                raise BrokenRuleError("STORE", f"{name} is saved, and {num_lacking} of {len(pages)} pages are not")
            for page, group, files in expected:
                if self._backend.lacks(page, group, files):
                    raise BrokenRuleError("STORE", f"{name} is saved, and {page} lacks files of {group}")
        return saved

    def _check_pins(self) -> None:
        """Refuse that a request's pins are not there, or still there, a moment after it was saved."""
        now = self._host.loop.now
        while self._pinning and self._pinning[0][0] < now - CALM_S:
            _, look, (pinned, unpinned) = self._pinning.pop(0)
            if not self._is_quick(look, math.inf) or not self._backend.max_pinned_bytes:
                continue
            self._backend.check_unpinned(unpinned, look.at)
            if not self._loses_pages(look):
                self._backend.check_pinned(pinned, now - look.at)

    def _let_go(self, name: str) -> bool:
        """Note that one connector has done with a request's blocks, and return whether both have."""
        self._num_holders[name] -= 1
        if self._num_holders[name]:
            return False
        del self._num_holders[name]
        return True

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        params = super().finish(request)
        self._chosen.pop(request.name, None)
        self._looked.pop(request.name, None)
        with WORLD.on(self._host):
            seen = SeenRequest(request, {**(self._params(request) or {}), **self._pin_of(request)}, self._adapter)
            request.is_saved = self._store.begin_save(seen, self._ids(request))
            self._note_save(request)
        self._partly_read.pop(request.name, None)
        self._store_state.forget(request.name)
        if params is not None:
            self._exported.add(request.name)
        if request.is_saved or params is not None:
            self._num_holders[request.name] = request.is_saved + (params is not None)
        return params

    def _pin_of(self, request: EngineRequest) -> dict[str, Any]:
        return pin_of(request, has_bad=self._backend.is_shared, is_popular=self._backend.is_popular)

    def _note_save(self, request: EngineRequest) -> None:
        """Note what is saved of a request, and refuse to save nothing of one that has a page."""
        num_tokens = min(request.num_computed - request.num_in_flight, len(request.tokens))
        size = self._backend.tokens_per_page
        ends = range(size, num_tokens + 1, size)
        if request.is_saved and request.has_old_weights:
            raise BrokenRuleError("STORE", f"{request.name} is saved, which has positions of old weights")
        if request.is_saved and not self._saves:
            raise BrokenRuleError("STORE", f"{request.name} is saved by an engine that loads alone")
        if request.is_saved:
            pages = pages_of(self._store._chain(self._seen(request), num_tokens))
            pins = []
            for wanted, label in zip(self._backend.wanted, (STORE_SCHEDULER.PIN, STORE_SCHEDULER.UNPIN), strict=True):
                owner = self._pin_of(request).get(label)
                pinned = pages[: request.num_prompt // size] if isinstance(owner, str) and owner else ()
                pins.append([f"{page}/{client.pin_name(owner or '')}" for page in pinned])
                wanted.update(pins[-1])
            self._pins[request.name] = pins
            labels = [int(request.labels[end - 1]) for end in ends]
            self._check_pages(request.name, pages)
            self._check_ranges(request)
            self._pages.update(pages)
            self._saving[request.name] = self._look(), labels, pages
            self._expected[request.name] = [*self._files_of(request, pages)]
            return
        is_done = self._saves and request.is_complete and not request.is_aborted
        if is_done and ends and self._backend.is_calm(self._host.loop.now):
            raise BrokenRuleError("STORE", f"{request.name} has {num_tokens} positions, and is not saved")

    def _check_ranges(self, request: EngineRequest) -> None:
        """Refuse to save positions that are not computed or have no block, and a state that has gone on."""
        (job,) = (job for job in self._store._step.saves if job.request == request.name)
        num_computed = request.num_computed - request.num_in_flight
        for index, group in enumerate(self._groups):
            start, stop = job.positions.get(f"group{index}", (0, 0))
            table = request.blocks[group.name]
            first = first_block(table)
            if group.is_state:
                is_there = not stop or (stop == request.num_computed and not request.num_in_flight)
            else:
                is_there = stop <= num_computed and (start == stop or start >= first * group.tokens_per_block)
            if not is_there:
                raise BrokenRuleError(
                    "STORE", f"{request.name} has no positions {start} to {stop} of {group.name} any more"
                )

    def _files_of(self, request: EngineRequest, pages: Sequence[str]) -> Iterator[tuple[str, str, frozenset[str]]]:
        """The files of the pages of which an engine has all positions that they keep, and its states."""
        size = self._backend.tokens_per_page
        for (index, group), worker in itertools.product(enumerate(self._groups), self._store_workers):
            files, num_last = self._shards(worker, f"group{index}")
            table = request.blocks[group.name]
            first = first_block(table)
            for stop, page in zip(range(size, len(pages) * size + 1, size), pages, strict=True):
                if group.is_state:
                    is_there = request.num_computed == stop and not request.num_in_flight
                else:
                    is_there = stop - num_last >= first * group.tokens_per_block
                    is_there &= group.name not in self._partly_read[request.name]
                if is_there:
                    yield page, group.name, files

    def is_promised(self, request: str) -> bool:
        if request not in self._exported:
            return False
        self._exported.remove(request)
        return super().is_promised(request)


class StoreFleets(Simulation):
    """Fleets of vLLM's engines; those with the feature ``STORE`` have one beside them."""

    def __init__(self, make_params: MakeParams | None = None, **settings: Any) -> None:
        super().__init__(VllmConnector, make_params, **settings)

    def run(self, scenario: Scenario) -> FleetOutcome:
        if Feature.STORE not in scenario.features:
            return super().run(scenario)
        backend = VirtualBackend(scenario)
        self.backend = backend
        self._make_connector = partial(StoreConnector, backend=backend)
        try:
            with virtual_store(backend, scenario.seed):
                outcome = super().run(scenario)
                if outcome.error is None:
                    backend.check_saved()
            return outcome
        except BrokenRuleError as error:
            return attrs.evolve(outcome, error=error)
        finally:
            self._make_connector = VllmConnector


def first_block(table: Sequence[int]) -> int:
    """The ordinal from which on a table has blocks."""
    return max((ordinal + 1 for ordinal, block in enumerate(table) if block == NULL_BLOCK), default=0)


def pages_of(chain: Chain) -> list[str]:
    """The names of a prompt's pages."""
    return [f"{chain.space}/{key}" for key in chain.keys]


def check_warning(message: str, *values: object) -> None:
    """Stop a fleet at an error that the store's code takes for one of the store, which has another code."""
    codes = {value.code for value in values if isinstance(value, KVPlanError)}
    if codes - {"BACKEND", "PAGE", "TRANSFER"}:
        raise BrokenRuleError("CRASH", message % values)


def crash(*_: object) -> None:
    """Stop a fleet at an error that the store's code logs as a fault of its own, and goes on."""
    error = sys.exception()
    if not (isinstance(error, MemoryError) and error.args == (NO_MEMORY,)):
        raise BrokenRuleError("CRASH", repr(error))


@cache
def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of values, whose answers are kept: fleets describe and plan the same again and again."""
    answers: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        # equal workers may differ in their extensions
        key = tuple(
            (each, each.extensions) if isinstance(each, Worker) else tuple(each) if isinstance(each, list) else each
            for each in arguments
        )
        if key not in answers:
            answers[key] = function(*arguments)
        return answers[key]

    return call


@contextmanager
def virtual_store(backend: VirtualBackend, seed: int) -> Iterator[None]:
    """Let the store's code open one backend, and its threads and clocks be those of a simulation."""
    look = partial(VirtualEviction, look_s=LOOK_S)
    replaced: dict[Any, dict[str, Any]] = {
        backends: {"time": TIME},
        page_reads: {name: remembered(getattr(page_reads, name)) for name in PLANNING},
        page_shards: {"decode": remembered(decode)},
        readers: {"time": TIME},
        client: {"time": TIME, "threading": THREADING},
        stalls: {"time": TIME, "threading": THREADING},
        parallel: {"ThreadPoolExecutor": VirtualPool},
        eviction: {
            "time": TIME,
            "threading": THREADING,
            "random": random.Random(f"{seed} eviction"),
            "BackgroundEviction": look,
        },
        STORE_SEARCHES: {
            "time": TIME,
            "ThreadPoolExecutor": VirtualPool,
            "wait": lambda futures, timeout_s: wait(futures, 0.0 * timeout_s),
        },
        STORE_SCHEDULER: {"open_backend": lambda _: backend, "decode": remembered(decode)},
        STORE_WORKER: {
            "time": TIME,
            "threading": THREADING,
            "SimpleQueue": VirtualQueue,
            "open_backend": lambda _: backend,
            "StoreClient": VirtualClient,
            "StallGuard": VirtualGuard,
            "worker_of": lambda _config, _cache, worker, _settings: worker,
        },
        STORE_SEARCHES.logger: {"exception": crash, "warning": check_warning},
        STORE_WORKER.logger: {"exception": crash, "warning": check_warning},
    }
    with ExitStack() as stack:
        for module, values in (*replaced.items(), *(FEW.items() if backend.is_rough else ())):
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        stack.callback(WORLD.end)
        yield
