"""A server that speaks S3, on this host: moto's, as a process of its own, so that it can be stopped and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import attrs

IS_INSTALLED: Final = find_spec("obstore") is not None and find_spec("moto") is not None
START_S: Final = 60.0


@attrs.frozen
class S3Server:
    """A server and its process."""

    process: subprocess.Popen[bytes]
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "reader",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def bucket(self, name: str) -> str:
        """Make a bucket and return its URL."""
        with urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=START_S):
            return f"s3://{name}"

    def pause(self) -> None:
        """Let the server accept connections and answer nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it answer again."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Refuse connections from now on."""
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server on a free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = S3Server(process, f"http://127.0.0.1:{port}")
    try:
        _await(server)
        yield server
    finally:
        server.kill()


def _await(server: S3Server) -> None:
    """Return when a server answers, whatever it says."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urlopen(server.endpoint, timeout=START_S):
                return
        except HTTPError:
            return
        except URLError:
            time.sleep(0.05)
    raise TimeoutError(f"no answer of {server.endpoint}")
