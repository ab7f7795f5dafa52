"""Faults: what is damaged, torn, evicted or gone is a miss or an error, and never a byte in a cache."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan_nixl.serving.store import FileBackend, Limits, MemoryBackend, evict, read_file
from tests.store.engines import (
    BLOCKS,
    PROMPT,
    QWEN,
    EngineWithStore,
    check_third_page_fails,
    check_third_page_is_saved_again,
    saved,
)

DAMAGES = ["cut short", "emptied", "a bit of the data", "a bit of the header", "a bit of the prefix", "another page"]


def file_of(folder: Path, engine: EngineWithStore, page: int) -> Path:
    """A file of the n-th page of the prompt."""
    chain = engine.caches[0].client.chain(PROMPT)
    return min((folder / chain.space / chain.keys[page][:3] / chain.keys[page]).iterdir())


def damage(path: Path, other: Path, kind: str) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    if kind == "another page":
        data[:] = other.read_bytes()
    elif kind in ("cut short", "emptied"):
        del data[len(data) // 2 if kind == "cut short" else 0 :]
    else:
        place = {"a bit of the data": len(data) - 1, "a bit of the header": 100, "a bit of the prefix": 20}[kind]
        data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_page_is_an_error_then_a_miss(kind: str, tmp_path: Path) -> None:
    """No byte of the page arrives, the file is deleted, and the next engine saves it again."""
    backend = FileBackend(tmp_path)
    writer = saved(backend)
    path = file_of(tmp_path, writer, 2)
    damage(path, file_of(tmp_path, writer, 3), kind)
    reader = EngineWithStore.of(QWEN, backend)
    check_third_page_fails(reader)
    assert not path.exists()
    check_third_page_is_saved_again(reader, writer)


def test_a_file_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    """The version comes before all that it could have changed."""
    backend = FileBackend(tmp_path)
    path = file_of(tmp_path, saved(backend), 0)
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    (entry, *_) = (entry for entry in backend.entries() if entry.name.endswith(path.name))
    name = f"{entry.name.split('/')[0]}/{path.parent.name}/{path.name}"
    with pytest.raises(KVPlanError, match=r"^VERSION: cannot read page .* expected version 1, got 2"):
        read_file(backend, name)


def test_a_page_that_is_evicted_meanwhile_is_an_error_and_no_byte(tmp_path: Path) -> None:
    """What was found and is gone when it is loaded makes the load fail."""
    backend = MemoryBackend()
    saved(backend)
    reader = EngineWithStore.of(QWEN, backend)
    assert reader.find(PROMPT) == 96
    evict(backend, Limits(max_bytes=0), 0.0)
    with pytest.raises(KVPlanError, match=r"^PAGE: cannot load page .* got less"):
        reader.load(PROMPT, BLOCKS, 96)
    assert reader.find(PROMPT) == 0


def test_a_full_store_loses_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that finds no room is counted, what fits is a hit, and nothing is raised."""
    # the first files fit, and no thread overtakes another
    monkeypatch.setattr("kvplan_nixl.serving.store.client.FILES_AT_ONCE", 1)
    backend = MemoryBackend(max_bytes=100_000)
    writer = saved(backend)
    assert writer.caches[0].client.faults == {"BACKEND": 1}
    assert 0 < writer.find(PROMPT) < 96


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename"])
def test_a_failing_disk_leaves_nothing(number: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call fails, no file is there afterwards, not even an unfinished one."""
    backend = FileBackend(tmp_path)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"os.{step}", fail)
    writer = saved(backend)
    assert writer.caches[0].client.faults == {"BACKEND": 1}
    monkeypatch.undo()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert writer.find(PROMPT) == 0


def test_a_disk_that_is_full_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path) -> None:
    """A file may not grow beyond a limit of the process, as if the disk was full."""
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from kvplan_nixl.serving.store import FileBackend\n"
        "from kvplan import KVPlanError\n"
        "backend = FileBackend(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n    backend.put('0' * 16 + '/' + '0' * 64 + '/' + 'a' * 32, [b'x' * 30_000])\n"
        "except KVPlanError as error:\n    print(error.code)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert run.stdout == "BACKEND\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_store_that_is_gone_fails_searches_and_loads(tmp_path: Path) -> None:
    """A folder that vanishes is not an empty store."""
    backend = FileBackend(tmp_path / "kv")
    writer = saved(backend)
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot open the folder of a store"):
        writer.find(PROMPT)
    assert writer.save(PROMPT, BLOCKS, 96) == 0
    assert writer.caches[0].client.faults["BACKEND"] == 1


def write_forever(folder: Path, pipe: int) -> None:
    """Write the pages of a prompt, then files of one size, and a byte to a pipe after each."""
    saved(FileBackend(folder))
    backend, number = FileBackend(folder), 0
    while True:
        number += 1
        backend.put(f"{0:016x}/{os.getpid():032x}{number:032x}/{0:032x}", [b"y" * 300_000])
        os.write(pipe, b".")


def test_a_writer_that_is_killed_leaves_whole_files_alone(tmp_path: Path) -> None:
    """Whenever writers are killed, each file has all its bytes; what was unfinished is swept."""
    rng = random.Random(3)
    num_written = 0
    for _ in range(20):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_forever(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        num_files = rng.randrange(8)
        try:
            for _ in range(num_files):
                assert os.read(reading, 1), "the writer has ended by itself"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reading)
        num_written += num_files
    backend = FileBackend(tmp_path)
    entries = [*backend.entries()]
    for entry in entries:
        if entry.name.startswith("0" * 16):
            assert (entry.num_bytes, backend.get(entry.name)) == (300_000, b"y" * 300_000)
        else:
            read_file(backend, entry.name)
    assert len(entries) >= num_written > 20
    evict(backend, Limits(), 4e9, unfinished_s=0.0)
    assert [*(tmp_path / "tmp").iterdir()] == []


def test_writers_and_evictors_at_once_never_lose_a_write(tmp_path: Path) -> None:
    """Threads write the same pages, others evict them: every load that does not fail has the right bytes."""
    writer = EngineWithStore.of(QWEN, FileBackend(tmp_path), seed=5)
    faults: list[BaseException] = []
    is_over = threading.Event()

    def run(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            faults.append(error)

    def write() -> None:
        own = EngineWithStore.of(QWEN, FileBackend(tmp_path, synchronize=False), seed=5)
        for _ in range(20):
            own.save(PROMPT, BLOCKS, 96)
            assert not own.caches[0].client.faults

    def remove() -> None:
        backend = FileBackend(tmp_path)
        while not is_over.is_set():
            evict(backend, Limits(max_bytes=0), 0.0)

    def read() -> None:
        own = EngineWithStore.of(QWEN, FileBackend(tmp_path))
        ids = BLOCKS["attn"].ids.tolist()
        for _ in range(40):
            stop = own.find(PROMPT)
            try:
                own.load(PROMPT, BLOCKS, stop)
            except KVPlanError as error:
                assert error.code == "PAGE", error
            else:
                number = stop // 16
                assert own.caches[0].contents(ids[:number]) == writer.caches[0].contents(ids[:number])

    evictor = threading.Thread(target=run, args=[remove])
    others = [threading.Thread(target=run, args=[work]) for work in (write, write, read)]
    for thread in (evictor, *others):
        thread.start()
    for thread in others:
        thread.join()
    is_over.set()
    evictor.join()
    assert faults == []


@pytest.mark.parametrize("moment", ["while it is made", "after it was made"])
def test_a_folder_that_an_evictor_removes_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a page is empty before its first file has its name, so an evictor may remove it."""
    key = "1" * 64
    name = f"{'0' * 16}/{key}/{'a' * 32}"
    removed: list[str] = []
    make = os.mkdir

    def mkdir(path: Any, *arguments: Any, dir_fd: int | None = None) -> None:
        make(path, *arguments, dir_fd=dir_fd)
        if path == key and not removed:
            os.rmdir(path, dir_fd=dir_fd)
            removed.append(path)
            if moment == "while it is made":
                raise FileExistsError  # as where another writer's folder was there, and then is not

    monkeypatch.setattr("os.mkdir", mkdir)
    backend = FileBackend(tmp_path)
    backend.put(name, [b"bytes"])
    assert (backend.get(name), len(removed)) == (b"bytes", 1)


def test_a_folder_that_vanishes_while_it_is_listed_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another evictor has removed it, which is no failure of the backend."""
    backend = FileBackend(tmp_path)
    names = [f"{'0' * 16}/{digit * 64}/{'a' * 32}" for digit in "123"]
    for name in names:
        backend.put(name, [b"bytes"])
    status = os.fstat

    def fstat(descriptor: int) -> Any:
        # each folder is looked at when it has been opened
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("2" * 64):
            monkeypatch.undo()
            FileBackend(tmp_path).delete(names[1])
        return status(descriptor)

    monkeypatch.setattr("os.fstat", fstat)
    assert sorted(entry.name for entry in backend.entries()) == [names[0], names[2]]
