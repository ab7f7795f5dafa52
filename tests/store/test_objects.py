"""Objects: what a bucket has lost, torn or mixed up is a miss or an error. A server that fails costs pages alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan_nixl.serving.store import open_backend
from tests.blocking import wait_until
from tests.conftest import Cli
from tests.store.engines import (
    BLOCKS,
    PROMPT,
    QWEN,
    EngineWithStore,
    check_third_page_fails,
    check_third_page_is_saved_again,
    saved,
)
from tests.store.s3 import S3Server, s3_server

obstore = pytest.importorskip("obstore")
pytest.importorskip("moto")

from obstore.store import MemoryStore  # noqa: E402

from kvplan_nixl.serving.store.objects import MARK_STEP_S, TIMEOUT_S, ObjectBackend  # noqa: E402

PAGE = f"{'0' * 16}/{'0' * 64}"
NAME = f"{PAGE}/{'a' * 32}"
SHORT_S, LONG_S = 0.3, 60.0


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "cut short": lambda data, other: data[: len(data) // 2],
    "emptied": lambda data, other: b"",
    "a bit of the data": lambda data, other: data[:-1] + bytes([data[-1] ^ 4]),
    "a bit of the header": lambda data, other: data[:100] + bytes([data[100] ^ 4]) + data[101:],
    "longer": lambda data, other: data + b"x",
    "another page": lambda data, other: other,
    "something else": lambda data, other: b"<Error><Code>SlowDown</Code></Error>",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_object_is_an_error_then_a_miss(kind: str, bucket: str) -> None:
    """No byte of the page arrives, the object is deleted, and the next engine saves it again."""
    backend = open_backend(bucket)
    writer = saved(backend)
    chain = writer.caches[0].client.chain(PROMPT)
    shard = min(backend.files(f"{chain.space}/{chain.keys[2]}"))
    name, other = (f"{chain.space}/{chain.keys[page]}/{shard}" for page in (2, 3))
    data, other_data = (backend.get(file) or b"" for file in (name, other))
    backend.put(name, [DAMAGES[kind](data, other_data)])
    reader = EngineWithStore.of(QWEN, backend)
    check_third_page_fails(reader)
    check_third_page_is_saved_again(reader, writer)


def test_objects_of_others_are_no_files(bucket: str) -> None:
    """What else a bucket has is neither listed nor evicted."""
    backend = open_backend(bucket)
    backend.put(NAME, [b"x"])
    other = open_backend(bucket.rpartition("/")[0])
    other.put(NAME, [b"y"])
    assert [entry.name for entry in other.entries()] == [NAME]
    assert (other.get(NAME), backend.get(NAME)) == (b"y", b"x")


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that a test may stop."""
    with s3_server() as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        yield server


@pytest.mark.parametrize("fault", ["gone", "slow"])
def test_a_server_that_is_gone_costs_pages_alone(fault: str, own_server: S3Server) -> None:
    """Searches and loads fail in time, saves are counted, and what comes next does not wait again."""
    url = own_server.bucket("caches")
    # a busy machine takes longer than SHORT_S to save
    assert saved(ObjectBackend.of_url(url, timeout_s=LONG_S)).find(PROMPT) == 96
    writer = EngineWithStore.of(QWEN, ObjectBackend.of_url(url, timeout_s=SHORT_S, pause_s=60.0), seed=5)
    client = writer.caches[0].client
    (own_server.kill if fault == "gone" else own_server.pause)()
    began_s = time.monotonic()
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot list .* an answer of s3://caches, got HTTP error"):
        writer.find(PROMPT)
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot list .* got none a moment ago"):
        writer.load(PROMPT, BLOCKS, 96)
    assert writer.save(PROMPT, BLOCKS, 96) == 0
    client.use(client.chain(PROMPT), 96)
    assert time.monotonic() - began_s < TIMEOUT_S
    assert client.faults == {"BACKEND": 2}


def test_a_server_that_is_back_is_asked_again(own_server: S3Server) -> None:
    """After a pause."""
    url = own_server.bucket("caches")
    saved(ObjectBackend.of_url(url, timeout_s=LONG_S))
    reader = EngineWithStore.of(QWEN, ObjectBackend.of_url(url, timeout_s=SHORT_S, pause_s=0.0))
    own_server.pause()
    with pytest.raises(KVPlanError, match=r"^BACKEND"):
        reader.find(PROMPT)
    own_server.resume()

    def found() -> int:
        with suppress(KVPlanError):  # a busy machine takes longer than SHORT_S now and then
            return reader.find(PROMPT)
        return 0

    assert wait_until(found) == 96


def test_a_bucket_that_is_none_is_no_empty_store(server: S3Server) -> None:
    """Searches raise, and saves are counted."""
    writer = EngineWithStore.of(QWEN, ObjectBackend.of_url("s3://no-bucket", pause_s=0.0), seed=5)
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot list .* got Server returned non-2xx status code: 404"):
        writer.find(PROMPT)
    assert writer.save(PROMPT, BLOCKS, 96) == 0
    backend = writer.caches[0].client.backend
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot write .* expected a bucket at s3://no-bucket"):
        backend.put(NAME, [b"x"])
    with pytest.raises(KVPlanError, match=r"^BACKEND: cannot list all"):
        [*backend.entries()]


def test_commands_take_a_url(bucket: str, cli: Cli) -> None:
    """They list, check and evict what a bucket has, marks and pins apart."""
    client = saved(open_backend(bucket)).caches[0].client
    client.use(client.chain(PROMPT), 96)
    client.pin(client.chain(PROMPT), 16)
    run = cli("store", "ls", bucket)
    assert (run.status, "6 pages of 16 tokens, 1 pinned, " in run.out) == (0, True)
    assert cli("store", "verify", bucket).out.startswith(f"{bucket}: 24 files of 24 whole, 0 damaged")
    assert cli("store", "gc", bucket, "--max-gib", "0").out.startswith(f"{bucket}: deleted 5 pages")
    assert cli("store", "ls", "s3://no-bucket").status == 2


class CountingStore(ObjectBackend):
    """Counts the requests of each kind."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory")
        self.requests: list[str] = []

    def _ask(self, verb: str, name: str, request: Callable[[], Any]) -> Any:
        self.requests.append(verb)
        return super()._ask(verb, name, request)


def test_a_page_is_marked_once_in_a_while() -> None:
    """A second use of that time asks for nothing, a later one takes the mark's place, and no page is left unmarked."""
    backend = CountingStore()
    backend.put(NAME, [b"x"])
    backend.touch([PAGE], 9 * MARK_STEP_S + 1)
    assert backend.requests == ["write", "list", "write"]
    backend.touch([PAGE], 9 * MARK_STEP_S + 2)
    assert backend.requests == ["write", "list", "write"]
    assert {entry.used_s for entry in backend.entries()} == {9 * MARK_STEP_S}
    other = ObjectBackend(backend._store, "the same store in another process")
    other.touch([PAGE], 10 * MARK_STEP_S)
    assert sorted(backend.files(PAGE)) == ["a" * 32, f"used.{10 * MARK_STEP_S:.5f}"]
    backend.touch([PAGE], 8 * MARK_STEP_S)
    assert {entry.used_s for entry in backend.entries()} == {10 * MARK_STEP_S}


def test_a_url_is_one_of_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are refused, and so is S3 without its package."""
    with pytest.raises(KVPlanError, match="NAME: cannot open a store: expected a folder or a URL of s3, got 'ftp://x'"):
        open_backend("ftp://x")
    with pytest.raises(KVPlanError, match="BACKEND: cannot open s3:// of a store: expected the URL of a bucket"):
        open_backend("s3://")
    monkeypatch.setitem(sys.modules, "kvplan_nixl.serving.store.objects", None)
    with pytest.raises(
        KVPlanError, match=r"BACKEND: cannot open s3://kv: .* got none \(pip install 'kvplan-nixl\[s3\]'\)"
    ):
        open_backend("s3://kv")
