"""What a store costs: ``python -m benchmarks.store rates|index|searches|buckets``.

``rates``: bytes per second saved and loaded by the length of prompts, beside ``cp`` and ``cat`` of the same files
and, where vLLM and LMCache are installed, the ExampleConnector and the disk backend, each the median of alternating
rounds; the last column compares processor time, which says more where others use the machine. ``index``: memory and
time of searches among many pages. ``searches``: how searches grow with the pages of a prompt that has them for full
attention, but not for windows. ``buckets``: saves, loads and searches in a bucket beside a folder; an S3-compatible
server has to run, which AWS's variables of the environment name, and ``--bucket`` is the URL of a bucket in it.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import attrs
import numpy as np

from kvplan import Blocks, Model, Region, Worker
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.page_shards import shards_of
from kvplan.protocol.pages import pack
from kvplan_nixl.serving.store import Backend, FileBackend, MemoryBackend, StoreClient, StoreReader, find, open_backend

PAGE: Final = 64
ROUNDS: Final = 9
VLLM_CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
LMCACHE: Final = "lmcache.v1"


def in_memory(worker: Worker) -> tuple[Worker, list[np.ndarray[Any, Any]]]:
    """A worker in memory of this process, which is random."""
    arrays = [np.random.default_rng(1).integers(0, 256, r.size_bytes, np.uint8) for r in worker.regions]
    regions = [Region(r.name, a.ctypes.data, a.size) for r, a in zip(worker.regions, arrays, strict=True)]
    return attrs.evolve(worker, regions=regions), arrays


def timed(action: Callable[..., Any], *arguments: Any) -> float:
    """The seconds that an action takes."""
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


def processor_s() -> float:
    """The processor time of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def shell(command: str) -> None:
    """Run a command."""
    subprocess.run(command, shell=True, check=True)


@attrs.frozen
class Prompt:
    """A prompt in the cache of a worker, whose memory the ``arrays`` keep."""

    worker: Worker
    arrays: list[np.ndarray[Any, Any]]
    tables: dict[str, Blocks]
    span: dict[str, tuple[int, int]]
    num_bytes: int

    @classmethod
    def of(cls, num_tokens: int) -> Self:
        """A prompt of Qwen3 0.6B in blocks of 16 tokens."""
        num_blocks = num_tokens // 16
        (plain,) = Model.shipped("qwen3-0.6b").engine("e", num_blocks=num_blocks + 1)
        worker, arrays = in_memory(plain)
        num_bytes = num_blocks * sum(view.block_bytes for view in worker.views)
        return cls(worker, arrays, {"attn": Blocks(range(num_blocks))}, {"attn": (0, num_tokens)}, num_bytes)

    def times(self, client: StoreClient, chain: Chain) -> list[float]:
        """The seconds that a store takes to save it, and to load it."""
        return [timed(action, chain, self.tables, self.span) for action in (client.save, client.load)]


def example_connector(prompt: Prompt, folder: Path) -> Callable[[], None]:
    """What loads the prompt by the connector that vLLM has as an example, which has saved it."""
    torch, example = (import_module(name) for name in ("torch", f"{VLLM_CONNECTORS}.example_connector"))
    layers = [torch.from_numpy(array).view(torch.bfloat16).reshape(-1, 8, 16, 256) for array in prompt.arrays]
    modules = {f"layers.{number}": SimpleNamespace(kv_cache=layer) for number, layer in enumerate(layers)}
    num_tokens = prompt.span["attn"][1]
    connector = object.__new__(example.ExampleConnector)
    connector._block_size, connector._storage_path = 16, str(folder)
    metadata = example.ExampleConnectorMetadata()
    connector._connector_metadata = metadata

    def set_request(is_store: bool) -> None:
        metadata.requests = []
        metadata.add_request(list(range(num_tokens)), list(range(num_tokens // 16)), 16, is_store, [])

    set_request(True)
    for name, module in modules.items():
        connector.save_kv_layer(name, module.kv_cache, None)
    set_request(False)
    context = SimpleNamespace(no_compile_layers=modules, attn_metadata=dict.fromkeys(modules))
    return lambda: connector.start_load_kv(context)


def lmcache_disk(prompt: Prompt, folder: Path) -> Callable[[], None]:
    """What loads the prompt by LMCache's disk backend, which has saved it, in chunks of 256 tokens into its buffers."""
    torch, utils = map(import_module, ("torch", "lmcache.utils"))
    settings, metadata, memory = (
        import_module(f"{LMCACHE}.{name}") for name in ("config", "metadata", "memory_management")
    )
    cpu, disk = (import_module(f"{LMCACHE}.storage_backend.local_{name}_backend") for name in ("cpu", "disk"))
    size_gb = prompt.num_bytes / 1e9 + 1
    of_disk = {"local_disk": f"file://{folder}/", "max_local_disk_size": size_gb}
    config = settings.LMCacheEngineConfig.from_defaults(local_cpu=False, max_local_cpu_size=size_gb, **of_disk)
    of_engine = metadata.LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, (len(prompt.arrays), 2, 256, 8, 128))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    buffers = cpu.LocalCPUBackend(config, of_engine, "cpu")
    backend = disk.LocalDiskBackend(config, loop, buffers, "cpu", None, of_engine)
    shape = torch.Size([2, len(prompt.arrays), 256, 1024])
    keys, chunks = [], []
    num_bytes = 256 * 2 * 1024 * 2  # of a chunk in one layer
    for number in range(prompt.span["attn"][1] // 256):
        keys.append(utils.CacheEngineKey("m", 1, 0, number, torch.bfloat16))
        chunks.append(buffers.allocate(shape, torch.bfloat16, memory.MemoryFormat.KV_2LTD))
        layers = [array[number * num_bytes : (number + 1) * num_bytes] for array in prompt.arrays]
        chunks[-1].tensor.view(torch.uint8).reshape(-1).copy_(torch.from_numpy(np.concatenate(layers)))
    saved: list[Any] = []
    backend.batched_submit_put_task(keys, chunks, None, saved.append)
    while len(saved) < len(keys):
        time.sleep(0.001)

    def drop(chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            chunk.ref_count_down()

    drop(chunks)
    return lambda: drop(backend.batched_get_blocking(keys))


def print_rates(folder: Path, sizes: Sequence[int]) -> None:
    """Print the rates of saving and loading prompts, and of reading and copying the same files, by their lengths."""
    peers = "`cp -r` | `cat` | ExampleConnector | LMCache"
    print(f"| tokens | MB | saved | loaded | {peers} | loaded / `cp -r`, each round | by processor time |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    store, copied, example, chunks = (folder / name for name in ("kv", "copy", "example", "chunks"))
    for num_tokens in sizes:
        prompt = Prompt.of(num_tokens)
        client = StoreClient(FileBackend(store), prompt.worker)
        chain = client.chain(range(num_tokens))
        saved = timed(client.save, chain, prompt.tables, prompt.span)
        peer = example_connector(prompt, example) if find_spec("vllm") else None
        lmcache = lmcache_disk(prompt, chunks) if find_spec("lmcache") else None
        rounds: list[list[float]] = []
        processor_ratios = []
        for _ in range(ROUNDS):
            # alternating, since others may use the machine
            before_s = processor_s()
            seconds = [timed(client.load, chain, prompt.tables, prompt.span)]
            loaded_s = processor_s()
            seconds += [timed(shell, f"cp -r {store} {copied}")]
            processor_ratios.append((processor_s() - loaded_s) / (loaded_s - before_s))
            seconds += [timed(shell, f"find {store} -type f -exec cat {{}} + > /dev/null")]
            seconds += [timed(other) if other else np.inf for other in (peer, lmcache)]
            rounds.append(seconds)
            shutil.rmtree(copied)
        for used in (store, example, chunks):
            shutil.rmtree(used, ignore_errors=True)
        times = [saved, *(float(np.median(each)) for each in zip(*rounds, strict=True))]
        rates = [f"{prompt.num_bytes / s / 1e6:,.0f} MB/s" for s in times]
        ratios = sorted(copying / loading for loading, copying, *_ in rounds)
        shown = f"{np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        shown += f" | {np.median(processor_ratios):.2f}"
        print(f"| {num_tokens:,} | {prompt.num_bytes / 1e6:,.0f} | {' | '.join(rates)} | {shown} |", flush=True)


class FarBackend:
    """A backend each of whose answers takes longer."""

    def __init__(self, backend: Backend, at_once: int, delay_s: float) -> None:
        self._backend = backend
        self._delay_s = delay_s
        self.at_once = at_once

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            time.sleep(self._delay_s)
            return getattr(self._backend, name)(*arguments)

        return call


def print_buckets(folder: Path, num_tokens: int, bucket: str) -> None:
    """Print the rates of saving and loading a prompt, and how long searches of 100 pages take."""
    print("| store | added to each answer | calls at once | saved | loaded | 100 pages found | none found |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    prompt = Prompt.of(num_tokens)
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 1}
    (small,) = Model.from_config(config, "m").engine("e", num_blocks=9)
    (shard,) = shards_of(small, PAGE)
    data = memoryview(bytes(shard.num_bytes))
    for location in (f"{folder}/kv", bucket):
        backend = open_backend(location)
        long = Chain.of("m", [5] * (100 * PAGE), tokens_per_page=PAGE)
        none = Chain.of("m", [6] * (100 * PAGE), tokens_per_page=PAGE)
        for page, key in enumerate(long.keys):
            backend.put(f"{long.space}/{key}/{shard.name}", pack(key, PAGE * (page + 1), shard, data))
        for delay_s in (0.0, 0.02):
            for at_once in (1, 8, 32):
                far: Any = FarBackend(backend, at_once, delay_s)
                client = StoreClient(far, prompt.worker)
                salt = f"salt {delay_s} {at_once}"
                chain = client.chain(range(num_tokens), [(0, salt)])
                times = prompt.times(client, chain)
                rates = [f"{num_tokens / PAGE / s:,.0f} pages/s, {prompt.num_bytes / s / 1e6:,.0f} MB/s" for s in times]
                reader = StoreReader(far, small)
                assert reader.find(long) == 100 * PAGE
                searches = [1e3 * timed(reader.find, sought) for sought in (long, none)]
                shown = " | ".join([*rates, *(f"{search_ms:.1f} ms" for search_ms in searches)])
                kind = "bucket" if location == bucket else "folder"
                print(f"| {kind} | {1e3 * delay_s:.0f} ms | {at_once} | {shown} |", flush=True)


def print_index(folder: Path, num_pages: int) -> None:
    """Print the memory and the time of searches among many pages: prompts of 100 pages, 10 tokens each."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 1}
    (worker,) = Model.from_config(config, "m").engine("e", num_blocks=9)
    (shard,) = shards_of(worker, PAGE)
    backend = FileBackend(folder / "kv", synchronize=False)
    data = memoryview(bytes(shard.num_bytes))
    chains = []
    for prompt in range(num_pages // 100):
        chain = Chain.of("m", [prompt] * (100 * PAGE), tokens_per_page=PAGE)
        chains.append(chain)
        for page, key in enumerate(chain.keys):
            backend.put(f"{chain.space}/{key}/{shard.name}", pack(key, PAGE * (page + 1), shard, data))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = StoreReader(FileBackend(folder / "kv"), worker)
    hits = [timed(reader.find, chain) for chain in chains[:200]]
    others = [Chain.of("m", [n] * (100 * PAGE), tokens_per_page=PAGE) for n in range(10**6, 10**6 + 200)]
    misses = [timed(reader.find, chain) for chain in others]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert reader.find(chains[0]) == 100 * PAGE
    keys = timed(lambda: Chain.of("m", range(100 * PAGE), tokens_per_page=PAGE))
    listed = timed(lambda: sum(1 for _ in backend.entries()))
    found, none = 1e3 * np.median(hits), 1e6 * np.median(misses)
    print(
        f"{num_pages:,} pages: a search that finds 100 pages takes {found:.2f} ms, one that finds none {none:.0f} µs,"
    )
    print(f"keys of 100 pages {1e3 * keys:.2f} ms, a list of all files {listed:.1f} s; {after - before} KiB of memory")


def print_searches() -> None:
    """Print the seconds of a search for prompts of more and more pages, by one rank and by eight."""
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "sliding_window": 512,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    }
    model = Model.from_config(config, "m")
    print("| ranks | pages | steps of a page | steps of 16 tokens |")
    print("|---:|---:|---:|---:|")
    for ranks in (1, 8):
        workers = model.engine("e", tp=ranks, num_blocks=9)
        for num_pages in (125, 250, 500, 1000, 2000):
            backend = MemoryBackend()
            attended = {"swa": lambda position: max(0, position - 511)}
            readers = [StoreReader(backend, worker, tokens_per_page=PAGE, attended=attended) for worker in workers]
            chain = readers[0].chain(range(num_pages * PAGE))
            full = {view.name for worker in workers for view in worker.views if view.group == "attn"}
            for shard in (shard for worker in workers for shard in shards_of(worker, PAGE)):
                if {view.name for view in shard.worker.views} <= full:
                    data = memoryview(bytes(shard.num_bytes))
                    for page, key in enumerate(chain.keys):
                        backend.put(f"{chain.space}/{key}/{shard.name}", pack(key, PAGE * (page + 1), shard, data))
            # plans are made once for an engine
            find(readers, chain, stop=PAGE)
            times = [timed(partial(find, readers, chain, step=step)) for step in (PAGE, 16)]
            print(f"| {ranks} | {num_pages} | {' | '.join(f'{seconds:.3f}' for seconds in times)} |", flush=True)


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["rates", "index", "searches", "buckets"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--bucket", help="the URL of an empty bucket, such as s3://caches")
    parser.add_argument("--folder", help="where to write, by default a temporary folder")
    arguments = parser.parse_args()
    if arguments.table == "searches":
        print_searches()
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.table == "rates":
            print_rates(Path(folder), [256, 1024, 4096, 16384])
        elif arguments.table == "buckets":
            print_buckets(Path(folder), arguments.tokens, arguments.bucket)
        else:
            print_index(Path(folder), arguments.pages)


if __name__ == "__main__":
    main()
