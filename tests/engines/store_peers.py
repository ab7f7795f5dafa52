"""Other stores of vLLM beside ours: ``python -m tests.engines.store_peers``.

An engine saves and is killed, and another one loads. Each row says how many tokens of a prompt that was saved, and of
the next turn of its conversation, the engine counts as cached, and whether its answers are those of an engine that has
no store. LMCache 0.5.6 has nothing that moves a CPU's cache in vLLM, nor has vLLM's OffloadingConnector.
"""

from __future__ import annotations

import os
import random
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.engines.models import VOCABULARY
from tests.engines.process import Engine
from tests.engines.sglang_judge import Side
from tests.engines.stored import MAX_TOKENS, PAGE, answers, closing_engine, start, vllm

LENGTHS = (130, 260)
SETTLE_S = 5.0
"""Seconds for which a peer may go on saving after its answers."""


class Pair(NamedTuple):
    """A model, the engine that saves and the one that loads."""

    model: str
    saves: Side
    loads: Side


PAIRS = {
    "equal": Pair("llama", Side("vllm", 32), Side("vllm", 32)),
    "blocks 32 to 64": Pair("llama", Side("vllm", 32), Side("vllm", 64)),
    "TP 1 to 2": Pair("llama", Side("vllm", 32), Side("vllm", 32, tp=2)),
    "TP 2 to 1": Pair("llama", Side("vllm", 32, tp=2), Side("vllm", 32)),
}


def ours(store: str) -> dict[str, Any]:
    """KvplanStore."""
    transfer: dict[str, Any] = vllm(Side("vllm", 32), store)["kv_transfer_config"]
    return transfer


def example(store: str) -> dict[str, Any]:
    """vLLM's own example, which keeps a folder of files for each prompt."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": store},
    }


PEERS = {"KvplanStore": ours, "ExampleConnector": example}


def started(side: Side, model: str, transfer: dict[str, Any] | None, name: str) -> Engine:
    """An engine with a store, or with none."""
    return start(model, side._replace(more={"kv_transfer_config": transfer}), "", name)


def judge(peer: str, name: str) -> str:
    """What a peer loads of a pair, beside an engine without a store."""
    pair = PAIRS[name]
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    with closing_engine(started(pair.loads, pair.model, None, "peer computes")) as engine:
        computed = [tokens for tokens, _ in answers(engine, prompts)]
        turns = [[*prompt, *answer, *prompt[:9]] for prompt, answer in zip(prompts, computed, strict=True)]
        computed += [tokens for tokens, _ in answers(engine, turns)]
    with TemporaryDirectory() as temporary:
        transfer = PEERS[peer](f"{temporary}/kv")
        with closing_engine(started(pair.saves, pair.model, transfer, "peer saves")) as writer:
            answers(writer, prompts)
            time.sleep(SETTLE_S)
        with closing_engine(started(pair.loads, pair.model, transfer, "peer loads")) as reader:
            loaded = answers(reader, [*prompts, *turns])
    cached = [number for _, number in loaded]
    is_right = [tokens for tokens, _ in loaded] == computed
    most = [(length - 1) // PAGE * PAGE for length in LENGTHS]
    most += [(length + MAX_TOKENS - 1) // PAGE * PAGE for length in LENGTHS]
    return f"{peer}, {name}: cached {cached} of {most}, {'right' if is_right else 'WRONG'}"


def main() -> None:
    """Judges all peers, or those that are named, on all pairs."""
    for peer in sys.argv[1:] or PEERS:
        for name in PAIRS:
            try:
                print(judge(peer, name), flush=True)
            except Exception as error:
                print(f"{peer}, {name}: {type(error).__name__}: {str(error)[-200:]}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    main()
