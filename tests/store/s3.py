"""A server that speaks S3, on this host: moto's, as a process of its own, so that it can be stopped and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final
from urllib.request import Request, urlopen

import attrs

IS_INSTALLED: Final = find_spec("obstore") is not None and find_spec("moto") is not None
ANSWER_S: Final = 60.0
SERVE: Final = """
import threading
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@attrs.frozen
class S3Server:
    """A server and its process."""

    process: subprocess.Popen[str]
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
        with urlopen(Request(f"{self.endpoint}/{name}", method="PUT"), timeout=ANSWER_S):
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
    command = [sys.executable, "-W", "ignore", "-c", SERVE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        assert process.stdout is not None
        server = S3Server(process, f"http://127.0.0.1:{process.stdout.readline().strip()}")
        try:
            yield server
        finally:
            server.kill()
