"""The other end of an engine's pipe: starts it, asks it, ends it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.engines.engine import serve
from tests.engines.hosts import Host

YIELDING = Path(__file__).with_name("yielding")

TIMEOUT_S = 300  # for a start, and for all answers to one call: far more than either takes on busy cores

# Processes are forked from one that has loaded vLLM, which takes longer than to start a tiny engine.
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["tests.engines.engine"])


class EngineFailedError(Exception):
    """An engine ended, or did not answer in time."""


class Answer(NamedTuple):
    """What one request came to: ``reason`` is vLLM's finish reason, ``transfer`` its kv_transfer_params.

    ``log_probs`` has those of each token, where an engine was asked for them.
    """

    tokens: list[int]
    reason: str
    transfer: dict[str, Any] | None
    cached: int
    log_probs: Any = None


class Engine:
    """One engine. ``settings`` are vLLM's own; ``port`` is where vLLM's NixlConnector listens.

    ``variables`` are more of its environment.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        log: Path,
        port: int,
        transports: str = "",
        host: Host | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
        given = {**environment(port), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(variables or {})}
        if transports:
            given["UCX_TLS"] = transports
        if host is not None:
            # processes of two hosts here are of one kernel, out of whose memory UCX would copy
            given |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "VLLM_NIXL_SIDE_CHANNEL_HOST": host.address}
        backend = {"distributed_executor_backend": "mp" if ranks > 1 else "uni"}
        self.log = log
        self.model = Path(settings["model"])
        self._pipe, theirs = forked.Pipe()
        self._process = forked.Process(target=serve, args=(theirs, {**backend, **settings}, given, str(log), host))
        self._process.start()
        theirs.close()
        self._started = False
        self._count = 0
        self._answers: dict[str, list[Answer]] = {}

    def ready(self) -> Engine:
        """Waits until the engine has started."""
        if not self._started:
            self._receive("ready", time.monotonic() + TIMEOUT_S)
            self._started = True
        return self

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        transfer: dict[str, Any] | None = None,
        adapter: str = "",
        salt: str = "",
        num_answers: int = 1,
        **sampling: Any,
    ) -> str:
        """Adds a request and returns its name. ``transfer`` travels as JSON, as through a proxy.

        ``adapter`` is the number of a LoRA adapter, ``salt`` is the request's ``cache_salt``. Several answers are
        drawn at random, with a seed each. ``sampling`` are more of vLLM's own parameters.
        """
        self._count += 1
        sent = json.loads(json.dumps(transfer))
        self._send("add", f"{self._count}", prompt, max_tokens, sent, adapter, salt, num_answers, sampling)
        return f"{self._count}"

    def wait(self, name: str, timeout_s: float = TIMEOUT_S) -> Answer:
        """The answer to a request."""
        (answer,) = self.wait_all(name, timeout_s)
        return answer

    def wait_all(self, name: str, timeout_s: float = TIMEOUT_S) -> list[Answer]:
        """Returns all answers to a request."""
        deadline = time.monotonic() + timeout_s
        while name not in self._answers:
            self._note(*self._receive("done", deadline))
        return self._answers.pop(name)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        transfers: Any = None,
        **marks: Any,
    ) -> list[Answer]:
        """Returns the answers to requests that are in flight together.

        ``marks`` are the adapter or the salt of all, as in ``submit``.
        """
        names = [
            self.submit(prompt, max_tokens, transfer, **marks)
            for prompt, transfer in zip(prompts, transfers or [None] * len(prompts), strict=True)
        ]
        return [self.wait(name) for name in names]

    def abort(self, names: list[str]) -> None:
        self._send("abort", *names)

    def forget(self, stored: bool = True) -> None:
        """Empties the prefix cache, and what connectors have ``stored``, or keep for other engines."""
        self._send("forget", stored)

    def load(self, adapter: str) -> None:
        """Loads an adapter, also where the engine has one of its name."""
        self._send("load", adapter)

    def unload(self, adapter: str) -> None:
        """Takes an adapter out of the engine."""
        self._send("unload", adapter)

    def change_weights(self, way: str, model: Path) -> None:
        """Loads the weights of another model into the running engine: by ``reload`` or ``update``."""
        self._send(way, str(model))
        (error,) = self._receive("changed", time.monotonic() + TIMEOUT_S)
        if error:
            raise EngineFailedError(f"refused: {error}")

    def name_weights(self, version: str) -> None:
        """Says which version the engine's weights are, as a trainer does."""
        self._send("version", version)

    def held(self) -> tuple[int, int]:
        """How many blocks and how many requests the engine holds."""
        self._send("held")
        blocks, requests = self._receive("held", time.monotonic() + TIMEOUT_S)
        return blocks, requests

    def preempted(self) -> set[str]:
        """The names of requests that the engine has preempted."""
        self._send("preempted")
        (names,) = self._receive("preempted", time.monotonic() + TIMEOUT_S)
        return set(names)

    def parts(self) -> list[str]:
        """The name of a request for each part of it that was read before all was computed."""
        self._send("parts")
        (names,) = self._receive("parts", time.monotonic() + TIMEOUT_S)
        return list(names)

    def drafts(self) -> dict[str, list[list[int]]]:
        """The tokens that the engine has drafted for each request, step by step."""
        self._send("drafts")
        (drafts,) = self._receive("drafts", time.monotonic() + TIMEOUT_S)
        return dict(drafts)

    def stages(self) -> dict[str, dict[str, float]]:
        """When each request came to its next stage, where the engine notes ``stages``."""
        self._send("stages")
        (times,) = self._receive("stages", time.monotonic() + TIMEOUT_S)
        return dict(times)

    def flip(self, num_flips: int) -> None:
        """Flips bits of each request that is read from now on, while the engine verifies it."""
        self._send("flip", num_flips)

    def flips(self) -> dict[str, int]:
        """How many bits were flipped, and how many of them the engine has not seen."""
        self._send("flips")
        (counts,) = self._receive("flips", time.monotonic() + TIMEOUT_S)
        return dict(counts)

    def cpu_s(self) -> float:
        """Returns the seconds of processor time that the engine and its workers have taken."""
        process = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def freeze(self) -> None:
        """Stops the engine and its workers where they are: reachable and silent."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends the engine and its workers at once, where that was not done before."""
        if self._pipe.closed:
            return
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join()
        self._pipe.close()

    def _send(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise EngineFailedError(f"crashed: {last_error(self.log)}") from None

    def _receive(self, kind: str, deadline: float) -> list[Any]:
        rest: list[Any]
        while True:
            try:
                if not self._pipe.poll(max(0, deadline - time.monotonic())):
                    raise EngineFailedError(f"hung: no {kind!r} in time")
                received, *rest = self._pipe.recv()
            except (EOFError, OSError):
                raise EngineFailedError(f"crashed: {last_error(self.log)}") from None
            if received == kind:
                return rest
            if received == "done":  # while something else was asked
                self._note(*rest)

    def _note(self, name: str, *answers: tuple[Any, ...]) -> None:
        self._answers[name.partition("-")[0]] = [Answer(*answer) for answer in answers]


def environment(port: int) -> dict[str, str]:
    """What an engine needs on a CPU. ``port`` is where vLLM's NixlConnector listens."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(YIELDING), os.environ.get("PYTHONPATH")])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no log")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
