"""Runs what docs/deploy/compose.yaml runs, without containers: ``python -m tests.engines.composed``.

Each service has an address of its own on loopback, which takes the place of its name. The model is small, on CPUs.
Prompts go through the proxy, and must get the tokens that decode generates alone, which must have read them. Where
Prometheus is installed, it scrapes both engines, and each expression of the dashboard must have an answer.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import yaml

from tests.engines.__main__ import FOLDER
from tests.engines.models import build
from tests.engines.process import TIMEOUT_S, EngineFailedError, environment, free_port
from tests.engines.routers import MODEL, VLLM, Process, program
from tests.engines.served import answered, flags, metadata
from tests.engines.trials import TOKENS, prompts

DEPLOY = Path("docs/deploy")
ADDRESSES = {"prefill": "127.0.0.2", "decode": "127.0.0.3", "proxy": "127.0.0.4"}
KEY = "a secret of all engines"
SCRAPES_S = 15
"""Seconds in which Prometheus scrapes several times: rates are of two scrapes."""


def replaced(text: str, name: str) -> str:
    """A text of a service, with addresses in place of names, and a small model in place of the guide's."""
    for service, address in ADDRESSES.items():
        text = re.sub(rf"(?<=//){service}(?=:)|^{service}$|(?<=\[){service}(?=:)", address, text)
    text = re.sub(r"^\$\{MODEL:-.*\}$", f"{FOLDER / MODEL}", text)
    return text.replace("0.0.0.0", ADDRESSES[name]) if name in ADDRESSES else text


def start(name: str, service: dict[str, Any], log: Path) -> Process:
    """Starts a service."""
    command = [replaced(word, name) for word in service["command"]]
    path = os.pathsep.join([f"{metadata(log.parent)}", f"{Path.cwd()}", environment(0)["PYTHONPATH"]])
    given = {key: replaced(value, name) for key, value in service.get("environment", {}).items() if value[0] != "$"}
    variables = {**environment(0), **given, "KVPLAN_KEY": KEY, "PYTHONPATH": path}
    if command[0] == "vllm":
        command = [program("vllm"), *command[1:], "--host", ADDRESSES[name], *flags(VLLM)]
    else:
        command[0] = sys.executable
    return Process(command, variables, log)


def wait(url: str, processes: list[Process]) -> None:
    """Waits until a server is well."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for process in processes:
            process.check()
        try:
            urlopen(url, timeout=TIMEOUT_S).close()
            return
        except OSError:
            time.sleep(0.5)
    raise EngineFailedError(f"hung: {url}")


def metric(name: str) -> float:
    """A metric of decode."""
    with urlopen(f"http://{ADDRESSES['decode']}:8000/metrics", timeout=TIMEOUT_S) as response:
        return sum(map(float, re.findall(rf"^{name}\S* (\S+)$", response.read().decode(), re.MULTILINE)))


def ask(server: str, body: dict[str, Any]) -> Any:
    """What a server says to one request for completions."""
    request = Request(
        f"http://{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def unanswered(prometheus: str) -> list[str]:
    """The expressions of the dashboard that Prometheus has no answer to."""
    board = json.loads((DEPLOY / "grafana/kvplan.json").read_text())
    without = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "30s")
            with urlopen(
                f"{prometheus}/api/v1/query?{urlencode({'query': expression})}", timeout=TIMEOUT_S
            ) as response:
                answer = json.load(response)
            if not answer["data"]["result"]:
                without.append(target["expr"])
    return without


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # services are ended on the way out
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    build(MODEL, FOLDER / MODEL)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    tokens = prompts(70)
    with ExitStack() as ending:
        processes = []
        for name in ADDRESSES:
            processes.append(start(name, services[name], logs / f"composed-{name}.log"))
            ending.callback(processes[-1].kill)
        proxy = f"{ADDRESSES['proxy']}:8080"
        wait(f"http://{proxy}/health", processes)
        prometheus = f"http://127.0.0.1:{free_port()}"
        if which("prometheus"):
            config = logs / "prometheus.yml"
            config.write_text(replaced((DEPLOY / "prometheus.yml").read_text(), "prometheus"))
            command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={logs / 'prometheus'}"]
            command.append(f"--web.listen-address={prometheus.removeprefix('http://')}")
            processes.append(Process(command, {}, logs / "composed-prometheus.log"))
            ending.callback(processes[-1].kill)
            wait(f"{prometheus}/-/ready", processes)
            time.sleep(SCRAPES_S)
        through = answered(partial(ask, proxy), tokens, TOKENS)
        num_read = metric("vllm:external_prefix_cache_hits_total")
        alone = answered(partial(ask, f"{ADDRESSES['decode']}:8000"), tokens, TOKENS)
        num_same = sum(one.tokens == other.tokens != [] for one, other in zip(through, alone, strict=True))
        print(f"{num_same} of {len(tokens)} answers are decode's own, {num_read:g} positions were read")
        is_right = num_same == len(tokens) and num_read > 0
        if which("prometheus"):
            time.sleep(SCRAPES_S)
            without = unanswered(prometheus)
            print(f"Prometheus has no answer to {without}")
            # no request has failed, so no code is known
            is_right &= all("failed_reads" in expression for expression in without)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
