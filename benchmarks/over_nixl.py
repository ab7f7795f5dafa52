"""What kvplan_nixl costs, compared with calls of NIXL by hand: ``python -m benchmarks.over_nixl``.

All is between two processes of one machine.

kvplan_nixl binds and starts a request. In turns with it the same descriptors go to NIXL's own calls, with ids from a
bind just before. Both times contain NIXL's post, which gives each descriptor to UCX: most of the time of 40,960.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.real_memory import PeerProcess, placed
from kvplan import Blocks, Model, ReadSpec, Worker, plan_reads
from kvplan_nixl import UCX, NixlExecutor, settle

TIMEOUT_S = 60.0


def worker(engine_id: str, layers: int, blocks: int) -> Worker:
    """A worker whose blocks of 4 tokens are 256 bytes in each layer."""
    keys = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 4}
    (only_worker,) = Model.from_config(keys).engine(engine_id, tokens_per_block=4, num_blocks=blocks)
    return only_worker


def overhead(layers: int, blocks: int, rounds: int) -> None:
    """Bind, make and post by kvplan_nixl, and make and post by hand, in turns."""
    pool, rng = 2 * blocks, np.random.default_rng(1)
    local, _ = placed(worker("decode", layers, pool))
    tables: Any = {side: {"attn": Blocks(rng.permutation(pool)[:blocks])} for side in ("local", "remote")}
    with PeerProcess(worker("prefill", layers, pool), UCX) as peer, NixlExecutor(local) as executor:
        plan = plan_reads(local, [executor.connect(peer.ask("envelope"))])
        executor.prepare(plan)

        def bind() -> ReadSpec:
            (spec,) = plan.bind(**tables, tokens=(0, 4 * blocks))
            return spec

        spec = bind()
        assert spec.local_ids.size == spec.num_descriptors == layers * blocks
        rows = executor._peers["prefill", 0].rows[spec.remote_table]
        nixl = executor._agent._agent
        message = b'["decode", 0, "request"]'
        seconds = list[tuple[float, float, float]]()
        for _ in range(rounds + rounds // 10):
            began = time.perf_counter()
            spec = bind()
            bound = time.perf_counter()
            transfer = executor.start(spec, "request")
            started = time.perf_counter()
            assert settle(executor, [transfer], TIMEOUT_S)
            assert transfer.error is None
            executor.release(transfer)
            spec = bind()
            began_by_hand = time.perf_counter()
            handle = nixl.make_prepped_xfer(
                "READ", rows.local.nixl, spec.local_ids, rows.remote.nixl, spec.remote_ids, message
            )
            state = nixl.transfer(handle)
            posted_by_hand = time.perf_counter()
            while state == "PROC":
                state = nixl.check_xfer_state(handle)
            handle.release()
            seconds.append((bound - began, started - began, posted_by_hand - began_by_hand))
    # the first tenth warms up
    bind_us, kvplan_us, by_hand_us = 1e6 * np.median(seconds[rounds // 10 :], axis=0)
    more_us = kvplan_us - by_hand_us
    print(
        f"{layers * blocks} descriptors: {kvplan_us:.0f} us, of which bind {bind_us:.0f} us, "
        f"by hand {by_hand_us:.0f} us, {more_us:+.0f} us, {100 * more_us / by_hand_us:+.1f}% "
        f"(medians of {rounds} in turns)"
    )


def main() -> None:
    for layers, blocks, rounds in ((2, 32, 1000), (80, 512, 10)):
        overhead(layers, blocks, rounds)


if __name__ == "__main__":
    main()
