"""How soon the first token comes where decode reads chunk by chunk: ``python -m tests.engines.chunked [rate]``.

Prefill and decode are on hosts of their own, with a link of a rate in the words of ``tc``. Each prompt reaches both at
once. Prefill computes it in chunks, and publishes each of them, or the whole prompt alone. The table has medians.
"""

from __future__ import annotations

import datetime
import random
import statistics
import sys
import time
from importlib.metadata import version

from tests.engines.__main__ import FOLDER
from tests.engines.hosts import Host, Network
from tests.engines.models import VOCABULARY, build
from tests.engines.process import free_port
from tests.engines.sglang_judge import CHUNKED, KEY, SglangEngine, room_at

MODEL = "llama, 16 KiB a token"
LENGTHS = (1024, 2048, 4096)
CHUNK_TOKENS = 512
ROUNDS = 5
NEVER = 1 << 30
ROOMS_PORT = 8998

Times = dict[int, list[float]]
Tokens = list[list[int]]


def start(role: str, host: Host, early_tokens: int) -> SglangEngine:
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
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if role == "prefill":
        environment["KVPLAN_EARLY_TOKENS"] = f"{early_tokens}"
    return SglangEngine(settings, FOLDER / f"logs/chunked.{role}.log", host, **environment)


def timed(rate: str, early_tokens: int) -> tuple[Times, Tokens]:
    """Milliseconds to the second token of each prompt by length, which is decode's first one, and the tokens."""
    rng = random.Random(0)
    times: Times = {length: [] for length in LENGTHS}
    tokens: Tokens = []
    with Network() as network:
        hosts = network.host(), network.host()
        network.limit(hosts[0], rate)
        engines = [start(role, host, early_tokens) for role, host in zip(("prefill", "decode"), hosts, strict=True)]
        try:
            prefill, decode = (engine.ready() for engine in engines)
            # the first one of each length is not counted
            for number in range(ROUNDS + 1):
                for length in LENGTHS:
                    prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                    room = room_at(hosts[0].address, ROOMS_PORT, length * 100 + number)
                    began = time.perf_counter()
                    prefill.submit(prompt, 1, room)
                    answer = decode.wait(decode.submit(prompt, 2, room))
                    tokens.append(answer.tokens)
                    if number:
                        times[length].append(1000 * (time.perf_counter() - began))
        finally:
            for engine in engines:
                engine.kill()
    return times, tokens


def main(rate: str = "1gbit") -> int:
    """Prints the table. Returns 1 if tokens differ."""
    build(MODEL, FOLDER / MODEL)
    whole, right = timed(rate, NEVER)
    chunks, tokens = timed(rate, CHUNK_TOKENS)
    is_right = tokens == right and all(right)
    print(f"| tokens, over {rate} | as a whole, ms | chunk by chunk, ms | whole / chunks |")
    print("|---:|---:|---:|---:|")
    for length in LENGTHS:
        slow, fast = (statistics.median(times[length]) for times in (whole, chunks))
        print(f"| {length} | {slow:.0f} | {fast:.0f} | {slow / fast:.2f} |")
    print(
        f"\nSGLang {version('sglang')}, {datetime.date.today()}; {ROUNDS} prompts; {'right' if is_right else 'WRONG'}"
    )
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
