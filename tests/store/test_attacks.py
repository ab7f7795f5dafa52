"""Attacks: what else somebody, or a killed process, may leave in a store's folder harms no other page or file.

Each test is an attack on folders of the test, and the store's answer to it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvplan import KVPlanError
from kvplan_nixl.serving.store import FileBackend, Limits, MemoryBackend, evict, open_backend, read_file
from kvplan_nixl.serving.store.backends import is_pin
from kvplan_nixl.serving.store.client import pin_name
from tests.blocking import wait_until
from tests.conftest import Cli
from tests.store.engines import BLOCKS, PAGE, PROMPT, QWEN, EngineWithStore, saved

IDS = BLOCKS["attn"].ids.tolist()
ALL = Limits(max_bytes=0)
IS_ROOT = os.geteuid() == 0
STRANGER = 54321


def page_folder(store: Path, engine: EngineWithStore, page: int) -> Path:
    """The folder of the n-th page of the prompt."""
    chain = engine.caches[0].client.chain(PROMPT)
    return store / chain.space / chain.keys[page][:3] / chain.keys[page]


def files_of(folder: Path) -> list[Path]:
    """The regular files below a folder, which are not links."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def in_time(work: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What a function returns, which must not hang."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


def loaded(backend: Any, stop: int) -> dict[str, bytes]:
    """The blocks of an engine that has loaded a prefix."""
    reader = EngineWithStore.of(QWEN, backend)
    reader.load(PROMPT, BLOCKS, stop)
    return reader.caches[0].contents(IDS[: stop // PAGE])


def leave(kind: str, path: Path, elsewhere: Path) -> None:
    """Leave something of a kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        (path / "in it").mkdir(parents=True)
    elif kind == "file":
        path.write_bytes(b"left")
    elif kind == "link to a file":
        target = elsewhere / "file"
        target.write_bytes(b"not of the store")
        path.symlink_to(target)
    elif kind == "link to a folder":
        (elsewhere / "folder").mkdir(exist_ok=True)
        path.symlink_to(elsewhere / "folder")
    elif kind == "dangling link":
        path.symlink_to(elsewhere / "none")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name[:100])
        finally:
            os.chdir(here)
    elif kind == "closed folder":
        path.mkdir()
        path.chmod(0)


KINDS = ["folder", "link to a file", "link to a folder", "dangling link", "pipe", "socket"]


@pytest.mark.parametrize("name", [".nfs000000000000001", "0" * 32, "notes.txt", "x y"])
@pytest.mark.parametrize("kind", ["file", *KINDS])
def test_a_leftover_in_a_page_ends_no_eviction(kind: str, name: str, tmp_path: Path, cli: Cli) -> None:
    """All other files of all pages go, at the first look, whatever lies among them."""
    store, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    engine = saved(FileBackend(store))
    leave(kind, page_folder(store, engine, 2) / name, elsewhere)
    evicted = in_time(lambda: evict(FileBackend(store), ALL, time.time()))
    assert evicted.num_pages == 6
    assert in_time(lambda: engine.find(PROMPT)) == 0
    assert in_time(lambda: cli("store", "gc", str(store), "--max-gib", "0")).status == 0
    assert in_time(lambda: engine.save(PROMPT, BLOCKS, 96)) == 6
    in_time(lambda: cli("store", "ls", str(store)))
    in_time(lambda: cli("store", "verify", str(store)))
    assert loaded(FileBackend(store), 96) == engine.caches[0].contents(IDS)


@pytest.mark.parametrize("kind", ["file", *KINDS, "closed folder"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_leftover_beside_pages_ends_no_eviction(kind: str, level: int, tmp_path: Path) -> None:
    """Nor does one with the name of a space, of a folder of pages, or of a page."""
    store, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    engine = saved(FileBackend(store))
    space = engine.caches[0].client.chain(PROMPT).space
    name = ["f" * 16, f"{space}/fff", f"{space}/000/{'0' * 64}"][level]
    leave(kind, store / name, elsewhere)
    assert in_time(lambda: evict(FileBackend(store), ALL, time.time())).num_pages == 6


def test_a_file_that_cannot_be_deleted_ends_no_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go, those that are newer too if that is what the limit takes, and it is said which one stays."""
    engine = saved(FileBackend(tmp_path))
    stuck = page_folder(tmp_path, engine, 5)
    engine.caches[0].client.use(engine.caches[0].client.chain(PROMPT), 96)
    unlink = os.unlink

    def fail(path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None and os.readlink(f"/proc/self/fd/{dir_fd}") == str(stuck):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr("os.unlink", fail)
    page_bytes = sum(path.stat().st_size for path in files_of(stuck))
    evicted = evict(FileBackend(tmp_path), Limits(max_bytes=2 * page_bytes), time.time())
    assert (evicted.num_pages, evicted.left_bytes) == (4, 2 * page_bytes)
    assert any("Operation not permitted" in fault for fault in evicted.faults)
    assert engine.find(PROMPT) == 16


@pytest.mark.parametrize("what", ["space", "folder of pages", "page", "shard", "tmp"])
def test_links_lead_nowhere(what: str, tmp_path: Path, cli: Cli) -> None:
    """Files elsewhere are not read, listed, dated, replaced or deleted, though they are pages, and named so."""
    store, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    saved(FileBackend(elsewhere))
    engine = saved(FileBackend(store))
    client = engine.caches[0].client
    folder = page_folder(store, engine, 0)
    name = f"{folder.parent.parent.name}/{folder.name}/{files_of(folder)[0].name}"
    place = {
        "space": folder.parent.parent,
        "folder of pages": folder.parent,
        "page": folder,
        "shard": files_of(folder)[0],
        "tmp": store / "tmp",
    }[what]
    target = elsewhere / place.relative_to(store)
    if what == "tmp":
        (target / "of somebody").write_bytes(b"old")
    place.rename(tmp_path / "away")
    place.symlink_to(target)
    for path in files_of(elsewhere):
        os.utime(path, (1e9, 1e9))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_of(elsewhere)}
    assert EngineWithStore.of(QWEN, FileBackend(store)).find(PROMPT) == (96 if what == "tmp" else 0)
    assert (FileBackend(store).get(name) is None) == (what != "tmp")
    client.use(client.chain(PROMPT), 96)
    try:
        client.pin(client.chain(PROMPT), 96)
        client.unpin(client.chain(PROMPT), 96)
    except KVPlanError as error:
        assert error.code == "BACKEND"
    backend = FileBackend(store)
    for page in {entry.page for entry in FileBackend(elsewhere).entries()}:
        for shard in FileBackend(elsewhere).files(page):
            backend.delete(f"{page}/{shard}")
    evict(backend, ALL, 4e9)
    cli("store", "gc", str(store), "--max-gib", "0")
    cli("store", "verify", str(store), "--delete")
    engine.save(PROMPT, BLOCKS, 96)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_of(elsewhere)} == before


def test_the_folder_of_a_store_may_be_a_link(tmp_path: Path) -> None:
    """An operator has made it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    engine = saved(FileBackend(tmp_path / "kv"))
    assert engine.find(PROMPT) == 96
    assert evict(FileBackend(tmp_path / "kv"), ALL, 0.0).num_pages == 6


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
@pytest.mark.parametrize("what", ["file", "page", "folder of pages", "space", "tmp"])
def test_files_of_strangers_are_none(what: str, tmp_path: Path) -> None:
    """They are neither loaded nor deleted, unless the store's folder is of a group."""
    engine = saved(FileBackend(tmp_path))
    folder = page_folder(tmp_path, engine, 0)
    one = files_of(folder)[0]
    (tmp_path / "tmp" / "old").write_bytes(b"")
    places = {"file": one, "page": folder, "folder of pages": folder.parent, "space": folder.parent.parent}
    place = {**places, "tmp": tmp_path / "tmp"}[what]
    os.chown(place, STRANGER, STRANGER)
    backend = FileBackend(tmp_path)
    is_hit = what == "tmp"
    assert EngineWithStore.of(QWEN, backend).find(PROMPT) == 96 * is_hit
    evict(backend, ALL, 4e9, unfinished_s=0.0)
    assert (tmp_path / "tmp" / "old" if what == "tmp" else one).exists()
    # the folder of a group has files of all its members
    tmp_path.chmod(0o770)
    if not is_hit:
        assert one.name in FileBackend(tmp_path).files(f"{folder.parent.parent.name}/{folder.name}")
    evict(FileBackend(tmp_path), ALL, 4e9, unfinished_s=0.0)
    assert files_of(tmp_path) == []


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_folder_of_everybody_is_one_of_a_single_user(tmp_path: Path) -> None:
    """Whoever may write there could put any cache under any key: what others have written is none."""
    engine = saved(FileBackend(tmp_path))
    tmp_path.chmod(0o777)
    assert engine.find(PROMPT) == 96
    for path in files_of(page_folder(tmp_path, engine, 0)):
        os.chown(path, STRANGER, STRANGER)
    assert engine.find(PROMPT) == 0
    evict(FileBackend(tmp_path), ALL, 4e9)
    assert {path.stat().st_uid for path in files_of(tmp_path)} == {STRANGER}


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_files_of_the_owner_of_the_folder_count(tmp_path: Path) -> None:
    """Root looks after a store of another user."""
    engine = saved(FileBackend(tmp_path))
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, STRANGER, STRANGER)
    assert engine.find(PROMPT) == 96


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    """Pages are private; in the folder of a group they are the group's."""
    for mode, file_mode, folder_mode in ((0o755, 0o600, 0o700), (0o770, 0o660, 0o770)):
        store = tmp_path / f"{mode}"
        store.mkdir()
        store.chmod(mode)
        saved(FileBackend(store))
        assert {path.stat().st_mode & 0o777 for path in files_of(store)} == {file_mode}
        assert {path.stat().st_mode & 0o777 for path in store.rglob("*") if path.is_dir()} == {folder_mode}
    FileBackend(tmp_path / "made" / "kv")
    assert (tmp_path / "made" / "kv").stat().st_mode & 0o777 == 0o700


def cut(number: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:number]


def flipped(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def restated(**fields: Any) -> Callable[[bytes], bytes]:
    """A header with other fields and its right digest."""

    def change(data: bytes) -> bytes:
        old = int.from_bytes(data[12:16], "little")
        header = json.dumps({**json.loads(data[48 : 48 + old]), **fields}, separators=(",", ":")).encode()
        start = -(-(48 + old) // 4096) * 4096
        text = data[:12] + len(header).to_bytes(4, "little") + hashlib.sha256(header).digest() + header
        return text.ljust(-(-(48 + len(header)) // 4096) * 4096, b"\0") + data[start:]

    return change


HEADERS = {
    **{f"cut at {number}": cut(number) for number in (0, 10, 47, 48, 100, 4096)},
    **{f"a bit of byte {place}": flipped(place) for place in (0, 8, 12, 15, 16, 47, 48, 100, 900)},
    "a description that is none": restated(offer="\ud800"),
    "a number that is none": restated(stop="16"),
    "no object": lambda data: data[:16] + hashlib.sha256(b"[]").digest() + b"[]",
}


@pytest.mark.parametrize("page", [0, 2])
@pytest.mark.parametrize("how", HEADERS)
def test_a_damaged_header_is_a_miss_that_is_saved_again(how: str, page: int, tmp_path: Path) -> None:
    """Whichever page it is of: it is found or not, deleted when it is read, and written anew."""
    backend = FileBackend(tmp_path)
    writer = saved(backend)
    path = files_of(page_folder(tmp_path, writer, page))[0]
    path.write_bytes(HEADERS[how](path.read_bytes()))
    damaged = path.read_bytes()
    for _ in range(2):
        reader = EngineWithStore.of(QWEN, backend)
        try:
            reader.load(PROMPT, BLOCKS, 96)
        except KVPlanError as error:
            assert error.code in ("PAGE", "VERSION", "TYPE", "RANGE"), error
        writer = EngineWithStore.of(QWEN, backend, seed=5)
        writer.save(PROMPT, BLOCKS, 96)
    assert path.read_bytes() != damaged
    assert EngineWithStore.of(QWEN, backend).find(PROMPT) == 96
    assert loaded(backend, 96) == writer.caches[0].contents(IDS)


def test_a_search_survives_a_shard_that_describes_nothing(tmp_path: Path) -> None:
    """A file whose name is that of its description, which is no offer, is not read."""
    backend = FileBackend(tmp_path)
    writer = saved(backend)
    folder = page_folder(tmp_path, writer, 0)
    for offer in ("no offer", "{}", "[" * 5000):
        name = hashlib.sha256(offer.encode()).hexdigest()[:32]
        data = restated(offer=offer)(files_of(folder)[0].read_bytes())
        (folder / name).write_bytes(data)
    assert EngineWithStore.of(QWEN, backend).find(PROMPT) == 96


VERIFIED = {
    **HEADERS,
    "a bit of the padding": flipped(3000),
    "a bit of the data": flipped(4096),
    "longer": lambda data: data + b"\0",
    "shorter": lambda data: data[:-1],
    "another end": restated(stop=64),
    "an end in a page": restated(stop=17),
    "no end": restated(stop=0),
    "more bytes": restated(num_bytes=1 << 40),
    "another digest": restated(digest="0" * 64),
}


@pytest.mark.parametrize("how", VERIFIED)
def test_verify_finds_each_corruption(how: str, tmp_path: Path, cli: Cli) -> None:
    """Of padding and ends too; it deletes the file, and then the page is incomplete until it is saved again."""
    backend = FileBackend(tmp_path)
    writer = saved(backend)
    path = files_of(page_folder(tmp_path, writer, 1))[0]
    path.write_bytes(VERIFIED[how](path.read_bytes()))
    assert cli("store", "verify", str(tmp_path)).status == 1
    assert path.exists()
    assert cli("store", "verify", str(tmp_path), "--delete").status == 1
    assert not path.exists()
    run = cli("store", "verify", str(tmp_path))
    assert (run.status, "1 page incomplete" in run.out, " of 4 of layers." in run.out) == (1, True, True)
    EngineWithStore.of(QWEN, backend, seed=5).save(PROMPT, BLOCKS, 96)
    assert cli("store", "verify", str(tmp_path)).status == 0


@pytest.mark.parametrize("how", ["a bit of the padding", "another end", "longer", "more bytes"])
def test_what_verify_finds_is_not_loaded(how: str, tmp_path: Path) -> None:
    """No byte of it arrives."""
    writer = saved(FileBackend(tmp_path))
    path = files_of(page_folder(tmp_path, writer, 2))[0]
    path.write_bytes(VERIFIED[how](path.read_bytes()))
    with pytest.raises(KVPlanError, match=r"^PAGE"):
        loaded(FileBackend(tmp_path), 96)
    assert not path.exists()


def test_a_page_in_the_folder_of_another_model_is_damaged(tmp_path: Path, cli: Cli) -> None:
    """The space is a digest of the model and of the tokens per page."""
    saved(FileBackend(tmp_path))
    (space,) = (path for path in tmp_path.iterdir() if path.name != "tmp")
    space.rename(tmp_path / ("0" * 16))
    assert "24 damaged" in cli("store", "verify", str(tmp_path)).out


def test_a_sparse_file_takes_no_memory(tmp_path: Path, cli: Cli) -> None:
    """Its header is right, and it says that a TB follows: it is damaged, and takes nothing of a limit."""
    backend = FileBackend(tmp_path)
    writer = saved(backend)
    path = files_of(page_folder(tmp_path, writer, 2))[0]
    name = f"{path.parent.parent.parent.name}/{path.parent.name}/{path.name}"
    size = 1 << 40
    path.write_bytes(restated(num_bytes=size - 4096)(path.read_bytes()))
    os.truncate(path, size)
    tracemalloc.start()
    try:
        for _ in range(2):
            with pytest.raises(KVPlanError, match=r"^PAGE"):
                read_file(backend, name)
        assert cli("store", "verify", str(tmp_path)).status == 1
        cli("store", "ls", str(tmp_path))
        assert evict(backend, Limits(max_bytes=1 << 30), time.time()).num_pages == 0
        assert writer.find(PROMPT) == 96
        with pytest.raises(KVPlanError, match=r"^PAGE"):
            loaded(backend, 96)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert not path.exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["shard", "page"])
def test_what_has_the_name_of_a_shard_is_out_of_the_way(kind: str, what: str, tmp_path: Path, cli: Cli) -> None:
    """Nothing waits for it, and the next save puts the page in its place."""
    store, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    backend = FileBackend(store)
    writer = saved(backend)
    folder = page_folder(store, writer, 0)
    shard = files_of(folder)[0]
    if what == "shard":
        shard.unlink()
        leave(kind, shard, elsewhere)
    else:
        folder.rename(tmp_path / "away")
        leave(kind, folder, elsewhere)
    reader = EngineWithStore.of(QWEN, backend)
    assert in_time(lambda: reader.find(PROMPT)) == 0
    in_time(lambda: cli("store", "ls", str(store)))
    in_time(lambda: cli("store", "verify", str(store)))
    assert in_time(lambda: writer.save(PROMPT, BLOCKS, 96)) == 1
    assert not writer.caches[0].client.faults
    assert loaded(backend, 96) == writer.caches[0].contents(IDS)
    if kind == "link to a file":
        assert (elsewhere / "file").read_bytes() == b"not of the store"


@pytest.mark.parametrize(
    "location", ["s3://user:secret@caches/kv", "https://user:secret@host/kv", "s3://kv?key=secret"]
)
def test_no_command_prints_a_password(location: str, cli: Cli) -> None:
    """A URL with one is refused, without it."""
    for command in ("ls", "verify", "gc"):
        run = cli("store", command, location)
        assert (run.status, "secret" in run.out + run.err) == (2, False)
    with pytest.raises(KVPlanError) as raised:
        open_backend(location)
    assert "secret" not in f"{raised.value!r}{raised.value.__dict__}"


def test_a_full_disk_says_how_many_pages_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is whole counts, although the save has failed."""
    engine = EngineWithStore.of(QWEN, FileBackend(tmp_path), seed=5)
    write, num_written = os.write, 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal num_written
        if memoryview(data).nbytes >= 2048:
            num_written += 1
            if num_written > 20:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr("kvplan_nixl.serving.store.client.FILES_AT_ONCE", 1)
    monkeypatch.setattr("os.write", full)
    num_saved = engine.save(PROMPT, BLOCKS, 96)
    assert engine.caches[0].client.faults == {"BACKEND": 1}
    assert num_saved == engine.find(PROMPT) // PAGE == 2
    memory = EngineWithStore.of(QWEN, MemoryBackend(max_bytes=60_000), seed=5)
    assert memory.save(PROMPT, BLOCKS, 96) == memory.find(PROMPT) // PAGE > 0


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EPERM])
def test_a_use_that_is_not_noted_is_counted(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is read-only, for one; and one page that fails ends no loop over others."""
    engine = saved(FileBackend(tmp_path))
    client = engine.caches[0].client
    chain = client.chain(PROMPT)
    first = page_folder(tmp_path, engine, 0)
    utime = os.utime

    def fail(path: Any, *arguments: Any, dir_fd: int | None = None, **options: Any) -> None:
        if dir_fd is None or os.readlink(f"/proc/self/fd/{dir_fd}") == str(first):
            raise OSError(number, os.strerror(number))
        utime(path, *arguments, dir_fd=dir_fd, **options)

    for path in files_of(tmp_path):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr("os.utime", fail)
    client.use(chain, 96)
    assert client.faults == {"BACKEND": 1}
    assert all(path.stat().st_mtime > 1e9 for path in files_of(page_folder(tmp_path, engine, 5)))


@pytest.mark.parametrize("ahead_s", [-1e6, -120.0, 120.0, 1e9])
def test_what_a_killed_writer_leaves_goes_by_the_clock_of_the_files(ahead_s: float, tmp_path: Path) -> None:
    """Whatever its own clock said. Until then it counts; what is being written stays, and counts too."""
    engine = saved(FileBackend(tmp_path))
    engine.caches[0].client.use(engine.caches[0].client.chain(PROMPT), 96)
    left, written = tmp_path / "tmp" / "left", tmp_path / "tmp" / "written"
    for path in (left, written):
        path.write_bytes(b"x" * 100_000)
    total = sum(path.stat().st_size for path in files_of(tmp_path))
    with open(written, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # what has just been left is not told from what another host is writing
        evicted = evict(FileBackend(tmp_path), Limits(max_bytes=total), time.time())
        assert (evicted.num_pages, evicted.num_unfinished, evicted.unfinished_bytes) == (0, 0, 200_000)
        assert evict(FileBackend(tmp_path), Limits(max_bytes=total - 1), time.time()).num_pages == 1
        now_s = time.time()
        for path in (left, written):
            os.utime(path, (now_s + ahead_s, now_s + ahead_s))
        assert evict(FileBackend(tmp_path), Limits(), time.time()).num_unfinished == 1
        assert (left.exists(), written.exists()) == (False, True)
    assert evict(FileBackend(tmp_path), Limits(), time.time()).num_unfinished == 1
    assert engine.find(PROMPT) == 80


def test_a_page_of_a_wrong_clock_is_evicted_in_the_end(tmp_path: Path) -> None:
    """It counts as used at the first look, and not for as long as the clock was ahead."""
    engine = saved(FileBackend(tmp_path))
    now_s = time.time()
    for path in files_of(page_folder(tmp_path, engine, 0)):
        os.utime(path, (now_s + 1e9, now_s + 1e9))
    limits = Limits(max_age_s=100.0)
    assert evict(FileBackend(tmp_path), limits, now_s).num_pages == 0
    assert evict(FileBackend(tmp_path), limits, now_s + 1000.0).num_pages == 6


def test_two_writers_write_a_page_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one leaves to the first what that is writing; both say what they have written."""
    engines = [EngineWithStore.of(QWEN, FileBackend(tmp_path), seed=5) for _ in range(2)]
    is_over = threading.Event()
    fsync, written = os.fsync, list[int]()

    def slow(descriptor: int) -> None:
        written.append(descriptor)
        is_over.wait(60)
        fsync(descriptor)

    monkeypatch.setattr("kvplan_nixl.serving.store.client.FILES_AT_ONCE", 24)
    monkeypatch.setattr("os.fsync", slow)
    saves: list[int] = []
    first = threading.Thread(target=lambda: saves.append(engines[0].save(PROMPT, BLOCKS, 96)))
    first.start()
    wait_until(lambda: len(written) == 24)
    assert in_time(lambda: engines[1].save(PROMPT, BLOCKS, 96)) == 0
    is_over.set()
    first.join()
    assert (saves, len(written)) == ([6], 24)
    assert engines[1].find(PROMPT) == 96


def test_a_writer_goes_on_where_another_one_was_killed(tmp_path: Path) -> None:
    """Its unfinished file has no lock any more."""
    backend = FileBackend(tmp_path)
    engine = saved(backend)
    names = [entry.name for entry in backend.entries()]
    evict(backend, ALL, 0.0)
    for name in names:
        (tmp_path / "tmp" / name.replace("/", "-")).write_bytes(b"half of it")
    assert engine.save(PROMPT, BLOCKS, 96) == 6
    assert loaded(backend, 96) == engine.caches[0].contents(IDS)


def test_pins_have_a_limit_and_owners(tmp_path: Path) -> None:
    """Pages that were pinned first stay; an owner's pins are taken by their owner alone."""
    backend = FileBackend(tmp_path)
    engine = saved(backend)
    client = engine.caches[0].client
    chain = client.chain(PROMPT)
    client.pin(chain, 32, "a secret of one tenant")
    time.sleep(0.02)
    client.pin(chain, 96, "another one")
    client.use(chain, 96)
    page_bytes = sum(path.stat().st_size for path in files_of(page_folder(tmp_path, engine, 0)))
    assert evict(backend, Limits(max_bytes=0), time.time()).num_pages == 0
    evicted = evict(backend, Limits(max_bytes=0, max_pinned_bytes=3 * page_bytes), time.time())
    assert evicted.num_pages == 3
    assert all(page_folder(tmp_path, engine, page).exists() for page in (0, 1))
    client.unpin(chain, 96)
    client.unpin(chain, 96, "another one")
    client.unpin(chain, 96, "a guess")
    assert evict(backend, Limits(max_bytes=0), time.time()).num_pages == 1
    assert engine.find(PROMPT) == 32
    assert not any("tenant" in path.name for path in tmp_path.rglob("*"))
    client.unpin(chain, 96, "a secret of one tenant")
    assert evict(backend, Limits(max_bytes=0), time.time()).num_pages == 2


def test_a_pin_that_cannot_be_deleted_leaves_no_others() -> None:
    """As where one object of a bucket is locked: the pins of all other pages are taken away."""
    backend = MemoryBackend()
    client = saved(backend).caches[0].client
    chain = client.chain(PROMPT)
    client.pin(chain, 96, "one")
    locked = f"{chain.space}/{chain.keys[1]}/{pin_name('one')}"
    delete = backend.delete

    def refuse(name: str) -> bool:
        if name == locked:
            raise KVPlanError("BACKEND", "delete", expected="a file that can be deleted", got="a lock")
        return delete(name)

    with patch.object(backend, "delete", refuse), pytest.raises(KVPlanError, match="BACKEND"):
        client.unpin(chain, 96, "one")
    pins = [entry.name for entry in backend.entries() if is_pin(entry.name.rpartition("/")[2])]
    assert pins == [locked]


@pytest.mark.parametrize("first", [0, 1])
def test_a_later_pin_takes_nothing_from_an_earlier_one(first: int, tmp_path: Path) -> None:
    """Whatever their names are: of two prompts, of which one has place, that stays which was pinned first."""
    backend = FileBackend(tmp_path)
    engine = EngineWithStore.of(QWEN, backend, seed=5)
    client = engine.caches[0].client
    prompts = [range(1000, 1016), range(2000, 2016)]
    for prompt in prompts:
        engine.save(prompt, BLOCKS, PAGE)
    for prompt in (prompts[first], prompts[1 - first]):
        client.pin(client.chain(prompt), PAGE)
        time.sleep(0.02)
    page_bytes = sum(path.stat().st_size for path in files_of(tmp_path)) // 2
    assert evict(backend, Limits(max_bytes=0, max_pinned_bytes=page_bytes), time.time()).num_pages == 1
    assert [engine.find(prompt) for prompt in prompts] == [PAGE * (number == first) for number in (0, 1)]
