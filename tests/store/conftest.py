"""Backends of all kinds, the empty store of each. Those of S3 are skipped where obstore or moto is not installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvplan_nixl.serving.store import Backend, FileBackend, MemoryBackend, open_backend
from tests.store.s3 import IS_INSTALLED, S3Server, s3_server

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def _server() -> Iterator[S3Server]:
    if not IS_INSTALLED:
        pytest.skip("obstore and moto are not installed")
    with s3_server() as server:
        yield server


@pytest.fixture
def server(_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that the environment names."""
    for variable, value in _server.environment.items():
        monkeypatch.setenv(variable, value)
    return _server


@pytest.fixture
def bucket(server: S3Server) -> str:
    """The URL of an empty bucket's prefix."""
    return f"{server.bucket(f'bucket{next(NUMBERS)}')}/kv"


@pytest.fixture(params=["memory", "files", "S3"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """An empty store of each kind."""
    kinds: dict[str, Callable[[], Backend]] = {
        "memory": MemoryBackend,
        "files": lambda: FileBackend(tmp_path / "kv"),
        "S3": lambda: open_backend(request.getfixturevalue("bucket")),
    }
    return kinds[request.param]()
