"""Stores that hold anything: whatever lies in the folder, no command ends, nothing outside changes, right bytes load.

``HYPOTHESIS_PROFILE=long`` draws 1,600 stores in place of 8, and kills writers and evictors a thousand times.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.cli import main
from kvplan_nixl.serving.store import Evicted, FileBackend, Limits, evict
from property_tests import fewer
from tests.blocking import wait_until
from tests.store.engines import BLOCKS, PAGE, PROMPT, QWEN, EngineWithStore, saved
from tests.store.test_attacks import IDS, IS_ROOT, KINDS, STRANGER, VERIFIED, files_of, in_time, leave

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
KILL_ROUNDS = 250 if IS_LONG else 4
"""Each kills four processes."""

ACTS = ["damage", "leave", "replace", "swap", "own", "date", "unfinished", "empty", "sparse"]


def act(what: str, number: int, store: Path, elsewhere: Path) -> None:
    """Do something to a file, or a folder, of a store."""
    rng = random.Random(number)
    files = [path for path in files_of(store) if path.parent.name != "tmp"]
    if not files:
        return
    path, other = rng.choice(files), rng.choice(files)
    folder = rng.choice([path, path.parent, path.parent.parent, path.parent.parent.parent])
    if what in ("damage", "swap") and max(path.stat().st_size, other.stat().st_size) > 1 << 20:
        return  # sparse files of a terabyte, which nothing here reads into memory
    if what == "damage":
        data = path.read_bytes()
        if len(data) > 4096:
            path.write_bytes(VERIFIED[rng.choice(sorted(VERIFIED))](data))
    elif what == "leave":
        name = rng.choice([".nfs01", "f" * 32, "0" * 64, "abc", "0" * 16, "tmp", "pin", "used.1.00000", "\x1b[2J"])
        place = rng.choice([path.parent, path.parent.parent, path.parent.parent.parent, store]) / name
        if not os.path.lexists(place):
            leave(rng.choice(["file", *KINDS]), place, elsewhere)
    elif what == "replace":
        folder.rename(folder.with_name(f"away {number}"))
        leave(rng.choice(KINDS), folder, elsewhere)
    elif what == "swap":
        data, other_data = path.read_bytes(), other.read_bytes()
        path.write_bytes(other_data)
        other.write_bytes(data)
    elif what == "own" and IS_ROOT:
        os.chown(folder, STRANGER, STRANGER)
    elif what == "date":
        os.utime(path, (rng.choice([0, -1e6, 1e9, 4e9, 2e12]),) * 2)
    elif what == "unfinished":
        (store / "tmp" / f"left {number}").write_bytes(b"x" * 1000)
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "sparse":
        os.truncate(path, rng.choice([1 << 20, 1 << 40]))


@given(acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9999)), max_size=6), size=st.integers(0, 7))
@fewer(12)
def test_a_store_that_holds_anything(acts: list[tuple[str, int]], size: int) -> None:
    """Loads are right or fail, saves repair, evictions keep limits, and nothing outside of the store changes."""
    with tempfile.TemporaryDirectory() as folder:
        store, elsewhere = Path(folder) / "kv", Path(folder) / "elsewhere"
        backend = FileBackend(store, synchronize=False)
        writer = saved(backend)
        saved(FileBackend(elsewhere, synchronize=False))
        for what, number in acts:
            try:
                act(what, number, store, elsewhere)
            except OSError:  # the same act again
                continue
        before = {path: path.read_bytes() for path in files_of(elsewhere)}

        def use() -> None:
            for _ in range(3):
                reader = EngineWithStore.of(QWEN, backend)
                stop = reader.find(PROMPT)
                try:
                    reader.load(PROMPT, BLOCKS, stop)
                except KVPlanError as error:
                    assert error.code in ("PAGE", "VERSION", "TYPE", "RANGE", "BACKEND"), error
                    continue
                ids = IDS[: stop // PAGE]
                assert reader.caches[0].contents(ids) == writer.caches[0].contents(ids)
            reader.caches[0].client.use(reader.caches[0].client.chain(PROMPT), 96)
            writer.save(PROMPT, BLOCKS, 96)
            for command in ("ls", "verify"):
                assert main(["store", command, str(store)]) in (0, 1)
            entries = [*backend.entries()]
            limits = Limits(max_bytes=size * 24_000)
            evicted = evict(backend, limits, time.time(), unfinished_s=0.0)
            assert evicted.faults or evicted.left_bytes <= size * 24_000
            assert evicted.left_bytes + evicted.num_bytes == sum(entry.num_bytes for entry in entries)

        in_time(use, 60.0)
        assert {path: path.read_bytes() for path in files_of(elsewhere)} == before


def work(kind: str, folder: Path, seed: int) -> None:
    """Write, load or evict until the process is killed."""
    rng = random.Random(seed)
    backend = FileBackend(folder, synchronize=False)
    engine = EngineWithStore.of(QWEN, backend, seed=5)
    while True:
        first = 1000 * rng.randrange(4)
        prompt = range(first, first + 100)
        if kind == "writer":
            engine.save(prompt, BLOCKS, 96)
            client = engine.caches[0].client
            client.use(client.chain(prompt), 96)
        else:
            # what is written has to stay for a while, so that some of it can be loaded
            time.sleep(rng.uniform(0.0, 0.05))
            evict(backend, Limits(max_bytes=rng.randrange(100_000, 400_000)), time.time(), unfinished_s=0.0)


def wait_for_a_prefix(backend: FileBackend) -> None:
    """Wait until workers have saved a page, which takes long on a busy machine."""
    reader = EngineWithStore.of(QWEN, backend)
    wait_until(lambda: any(reader.find(range(n, n + 100)) for n in range(0, 4000, 1000)))


def kill_workers(folder: Path, rounds: int, seed: int) -> None:
    """Kill two writers and two evictors, again and again; each file that has its name is whole."""
    rng = random.Random(seed)
    reference = EngineWithStore.of(QWEN, FileBackend(folder / "other"), seed=5)
    store = folder / "kv"
    backend = FileBackend(store, synchronize=False)
    num_loaded = 0
    for number in range(rounds):
        children: list[int] = []
        statuses: list[int] = []
        try:
            for kind in ("writer", "writer", "evictor", "evictor"):
                child = os.fork()
                if not child:
                    try:
                        work(kind, store, rng.randrange(1 << 30) + len(children))
                    finally:
                        os._exit(1)
                children.append(child)
            wait_for_a_prefix(backend)
            time.sleep(rng.uniform(0.02, 0.25))
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                statuses.append(os.waitpid(child, 0)[1])
        assert all(map(os.WIFSIGNALED, statuses)), f"round {number}: a worker ended by itself"
        for first in range(0, 4000, 1000):
            prompt = range(first, first + 100)
            reader = EngineWithStore.of(QWEN, backend)
            stop = reader.find(prompt)
            reader.load(prompt, BLOCKS, stop)
            num_loaded += stop
            ids = IDS[: stop // PAGE]
            assert reader.caches[0].contents(ids) == reference.caches[0].contents(ids)
        assert main(["store", "verify", str(store)]) in (0, 1)
        outcome = evict(backend, Limits(), time.time(), unfinished_s=0.0)
        assert (outcome.faults, outcome.unfinished_bytes) == ((), 0)
        assert [*(store / "tmp").glob("*")] == []
    assert num_loaded, "nothing was ever stored"


def test_workers_that_are_killed_leave_whole_files(tmp_path: Path) -> None:
    """While writing and evicting, and nothing unfinished is left after the next look."""
    kill_workers(tmp_path, KILL_ROUNDS, 3)


@pytest.mark.parametrize("num_evictors", [2, 4])
def test_evictions_of_one_folder_delete_each_page_once(num_evictors: int, tmp_path: Path) -> None:
    """Processes that look at the same moment count no page that is left, and leave what a single one leaves."""
    engine = EngineWithStore.of(QWEN, FileBackend(tmp_path, synchronize=False), seed=5)
    for first in range(0, 9000, 1000):
        prompt = range(first, first + 100)
        engine.save(prompt, BLOCKS, 96)
        client = engine.caches[0].client
        client.use(client.chain(prompt), 96)
    total = sum(entry.num_bytes for entry in FileBackend(tmp_path).entries())
    limits, now_s = Limits(max_bytes=total // 2), time.time()
    outcomes: list[Evicted] = []
    barrier = threading.Barrier(num_evictors)

    def run() -> None:
        backend = FileBackend(tmp_path)
        barrier.wait()
        outcomes.append(evict(backend, limits, now_s))

    threads = [threading.Thread(target=run) for _ in range(num_evictors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = sum(entry.num_bytes for entry in FileBackend(tmp_path).entries())
    assert (left, {outcome.faults for outcome in outcomes}) == (total // 2, {()})
    # the prompt that was used last is whole
    assert engine.find(range(8000, 8100)) == 96
