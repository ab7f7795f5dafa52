"""Several hosts that evict from one folder on NFS, as far as one host can show it.

An NFS client renames a file that somebody has open to ``.nfs…`` in place of deleting it, and folders with such files
stay. What another host has deleted is stale: any call on it may fail with ESTALE. Each host is a process here, whose
calls of the system are made to behave so. What this cannot show: caches of attributes, and locks that are not shared.
"""

from __future__ import annotations

import errno
import io
import os
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan_nixl.serving.store import FileBackend, Limits, evict
from tests.store.engines import BLOCKS, PAGE, QWEN, EngineWithStore
from tests.store.test_fuzz import IS_LONG, wait_for_a_prefix

STALE_SHARE = 0.02
ROUNDS = 2000 if IS_LONG else 40
PROMPTS = [range(first, first + 100) for first in range(0, 4000, 1000)]
IDS = BLOCKS["attn"].ids.tolist()


def fail_as_stale(*_: Any, **__: Any) -> Any:
    """Fail as a call on what another host has deleted."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


class StaleFile:
    """An open file that another host deletes, perhaps, before the next bytes are read."""

    def __init__(self, descriptor: int, mode: str, buffering: int, is_stale: Callable[[], bool]) -> None:
        self._file = io.FileIO(descriptor, mode)
        self._is_stale = is_stale

    def readinto(self, memory: memoryview) -> int | None:
        return fail_as_stale() if self._is_stale() else self._file.readinto(memory)

    def close(self) -> None:
        self._file.close()


def behave_as_nfs(rng: random.Random) -> None:
    """Let calls of this process that name something in a folder behave as those of an NFS client."""

    def stale(call: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*arguments: Any, dir_fd: int | None = None, **options: Any) -> Any:
            if dir_fd is not None and rng.random() < STALE_SHARE:
                fail_as_stale()
            return call(*arguments, dir_fd=dir_fd, **options)

        return maybe

    unlink = os.unlink

    def silly_unlink(path: Any, *, dir_fd: int | None = None) -> None:
        if rng.random() < 0.5:
            os.rename(path, f".nfs{rng.getrandbits(64):016x}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    os.fdopen = partial(StaleFile, is_stale=lambda: rng.random() < STALE_SHARE)  # type: ignore[assignment]
    os.unlink = stale(silly_unlink)
    for name in ("open", "stat", "utime", "mkdir", "rmdir"):
        setattr(os, name, stale(getattr(os, name)))


def has_leftovers(store: Path) -> bool:
    """Whether a file of the store was renamed in place of being deleted."""
    return any(name.startswith(".nfs") for _, _, names in os.walk(store) for name in names)


def host(kind: str, folder: Path, seed: int) -> None:
    """Save and load, or evict, for a while. Whatever fails is a miss, a fault that is counted, or ``BACKEND``."""
    rng = random.Random(seed)
    backend = FileBackend(folder, synchronize=False)
    writer = EngineWithStore.of(QWEN, backend, seed=5)
    right = writer.caches[0].contents(IDS)
    behave_as_nfs(rng)
    rounds = count()
    # an evictor that others outrun still leaves something
    while next(rounds) < ROUNDS or (kind == "evictor" and not has_leftovers(folder)):
        try:
            if kind == "evictor":
                time.sleep(rng.uniform(0.0, 0.02))
                evicted = evict(backend, Limits(max_bytes=rng.randrange(200_000)), time.time(), unfinished_s=60.0)
                assert evicted.left_bytes >= 0
                continue
            prompt = rng.choice(PROMPTS)
            writer.save(prompt, BLOCKS, 96)
            reader = EngineWithStore.of(QWEN, backend)
            stop = reader.find(prompt)
            reader.load(prompt, BLOCKS, stop)
            num_blocks = stop // PAGE
            loaded = reader.caches[0].contents(IDS[:num_blocks])
            assert all(right[name].startswith(data) for name, data in loaded.items())
        except KVPlanError as error:
            assert error.code in ("BACKEND", "PAGE"), error


def test_hosts_that_evict_from_one_folder_on_nfs(tmp_path: Path) -> None:
    """No host ends, what is loaded is right, and leftovers of NFS are in nobody's way."""
    store = tmp_path / "kv"
    backend = FileBackend(store, synchronize=False)
    children: list[int] = []
    for seed, kind in enumerate(("writer", "writer", "evictor", "evictor")):
        child = os.fork()
        if not child:
            status = 1
            try:
                host(kind, store, seed)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
    # a host whose calls do not fail finds a store as usual
    engine = EngineWithStore.of(QWEN, backend, seed=5)
    for prompt in PROMPTS:
        engine.save(prompt, BLOCKS, 96)
        assert engine.find(prompt) == 96
    wait_for_a_prefix(backend)
    outcome = evict(backend, Limits(max_bytes=0), time.time(), unfinished_s=0.0)
    assert (outcome.left_bytes, outcome.unfinished_bytes, outcome.faults) == (0, 0, ())
    assert has_leftovers(store)


@pytest.mark.parametrize("call", ["open", "read", "listdir", "stat"])
def test_what_another_host_has_deleted_is_a_miss(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call says that it is stale, no error of the system comes out, and later it can be saved again."""
    backend = FileBackend(tmp_path)
    engine = EngineWithStore.of(QWEN, backend, seed=5)
    engine.save(PROMPTS[0], BLOCKS, 96)
    chain = engine.caches[0].client.chain(PROMPTS[0])
    page = f"{chain.space}/{chain.keys[0]}"
    name = f"{page}/{backend.files(page)[0]}"
    original = getattr(os, call)

    def stale(*arguments: Any, **options: Any) -> Any:
        is_meant = call == "listdir" or f"{arguments[0]}" in name.split("/")
        return (fail_as_stale if is_meant else original)(*arguments, **options)

    if call == "read":
        monkeypatch.setattr("os.fdopen", partial(StaleFile, is_stale=lambda: True))
        # it is empty for who has it open, and still listed
        assert backend.get(name) == b""
    else:
        monkeypatch.setattr(f"os.{call}", stale)
        assert call != "open" or backend.get(name) is None
        assert name.rpartition("/")[2] not in backend.files(page)
        assert name not in {entry.name for entry in backend.entries()}
    monkeypatch.undo()
    engine.save(PROMPTS[0], BLOCKS, 96)
    assert engine.find(PROMPTS[0]) == 96
