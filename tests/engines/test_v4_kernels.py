"""DeepSeek-V4's caches between vLLM's own kernels: those for CPUs, which keep the bytes that those for GPUs keep.

Kernels of a prefill engine compute the first tokens of a request into its caches. They are moved, and the kernels of a
decode engine compute the others: they read windows and compressed rows, and make new rows of what compressors still
have of the first tokens. The same kernels compute all tokens in a third engine, and every output is the same to the
bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import attrs
import pytest

from kvplan import plan_reads
from kvplan.protocol.groups import first_listed
from kvplan.protocol.read import request_of
from kvplan.protocol.retention import keeping
from kvplan_nixl.serving.store import MemoryBackend, StoreClient, find
from tests.engines import specs
from tests.engines.specs import allocated, engine_config, spec_of
from tests.engines.test_specs import Engine, copy, described, description, managers_of, read_of, tables

torch = pytest.importorskip("torch")
ops = pytest.importorskip("vllm._custom_ops")
cpu_utils = pytest.importorskip("vllm.models.deepseek_v4.cpu.cpu_utils")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._C, "flash_mla_with_kvcache_cpu"), reason="needs vLLM's kernels for CPUs"
)

HEADS, DIM, ROPE, EPS = 8, 512, 64, 1e-6
TOKENS = 700


@attrs.frozen(eq=False)
class Rank:
    """A rank of an engine: its caches, the views of them, and the blocks of a request in each group."""

    planned: Any
    views: dict[str, Any]
    ids: list[list[int]]

    def spec(self, layer: str) -> Any:
        """The spec of a layer's cache."""
        return next(spec_of(group, layer) for group in self.planned.kv_cache_groups if layer in group.layer_names)

    def blocks(self, layer: str) -> Any:
        """The block table of a request for a layer."""
        groups = zip(self.planned.kv_cache_groups, self.ids, strict=True)
        return torch.tensor(next(ids for group, ids in groups if layer in group.layer_names))

    def rows(self, layer: str) -> Any:
        """The cache of a layer as its kernels get it: ``[block, row, content]``."""
        return self.views[layer].squeeze(1)

    def pages(self, layer: str) -> Any:
        """The cache of a layer as ``[block, byte]``."""
        rows = self.rows(layer)
        return rows.view(rows.shape[0], -1)

    def slots(self, layer: str, positions: Any) -> Any:
        """The slots of positions, or of the rows that they are in."""
        spec = self.spec(layer)
        ratio = int(spec.tokens_per_state)
        block = self.blocks(layer)[positions // spec.block_size]
        return block * (spec.block_size // ratio) + positions % spec.block_size // ratio


def random_of(name: str, tokens: range, *shape: int) -> Any:
    """What a model computes of tokens: the same of each, whoever computes it."""
    return _of_all_tokens(name, shape)[tokens.start : tokens.stop]


@cache
def _of_all_tokens(name: str, shape: tuple[int, ...]) -> Any:
    return torch.randn(TOKENS, *shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def rotations() -> Any:
    """Cosines, then sines, of each position."""
    angles = torch.outer(torch.arange(1024.0), 1.0 / 10000 ** (torch.arange(0, ROPE, 2) / ROPE))
    return torch.cat([angles.cos(), angles.sin()], -1)


def compute(rank: Rank, tokens: range) -> Iterator[Any]:
    """Compute tokens of a request, and yield the attention of each layer."""
    positions = torch.arange(tokens.start, tokens.stop)
    request = torch.zeros(len(tokens), dtype=torch.int32)
    for number, ratio in enumerate((0, 4, 128, 4, 128)):
        name = f"model.layers.{number}.attn"
        swa = f"{name}.swa_cache"
        window = rank.spec(swa)
        q = random_of(f"{name} q", tokens, HEADS, DIM).bfloat16()
        kv = random_of(f"{name} kv", tokens, DIM).bfloat16()
        queries = ops.fused_qnorm_rope_kv_insert_cpu(
            q,
            kv,
            positions,
            rank.pages(swa),
            rank.slots(swa, positions),
            rotations(),
            HEADS,
            EPS,
            window.block_size,
        )
        # like forward_mqa of vllm/models/deepseek_v4/cpu/cpu_sparse.py
        reached = (positions - 127).clamp(min=0).unsqueeze(-1) + torch.arange(128)
        reached = torch.where(reached <= positions.unsqueeze(-1), reached, -1)
        table = rank.blocks(swa).unsqueeze(0).int()
        slots = cpu_utils.map_local_to_global_slots_cpu(reached, request, table, window.block_size)
        compressed, page, size = slots.new_full((len(tokens), 0), -1), rank.pages(swa), 1
        if ratio:
            compress(rank, name, f"{name}.compressor.state_cache", tokens, ratio, DIM)
            spec = rank.spec(name)
            size = spec.block_size // ratio
            rows = torch.arange(TOKENS // ratio).expand(len(tokens), -1)
            rows = torch.where(rows < ((positions + 1) // ratio).unsqueeze(-1), rows, -1)
            table = rank.blocks(name).unsqueeze(0).int()
            compressed = cpu_utils.map_local_to_global_slots_cpu(rows, request, table, size)
            page = rank.pages(name)
        if ratio == 4:
            keys = f"{name}.indexer.k_cache"
            compress(rank, keys, f"{name}.indexer.compressor.state_cache", tokens, ratio, 128)
            spec = rank.spec(keys)
            # rows that a later token may look up: keys, then their scales
            num_rows = spec.block_size // ratio
            for row in range(tokens.stop // ratio):
                page_of_row = rank.pages(keys)[rank.blocks(keys)[row // num_rows]]
                slot = row % num_rows
                yield page_of_row[slot * 128 : slot * 128 + 128].clone()
                yield page_of_row[num_rows * 128 + slot * 4 :][:4].clone()
        out = torch.zeros(len(tokens), HEADS, DIM, dtype=torch.bfloat16)
        sink = torch.zeros(HEADS)
        ops.flash_mla_with_kvcache_cpu(
            out, queries, rank.pages(swa), slots, window.block_size, page, compressed, size, sink, DIM**-0.5
        )
        yield from out


def compress(rank: Rank, rows: str, states: str, tokens: range, ratio: int, dim: int) -> None:
    """Keep what a compressor still needs of tokens, and store a row where one is complete."""
    positions = torch.arange(tokens.start, tokens.stop)
    overlap = 2 if ratio == 4 else 1
    kv = random_of(f"{states} kv", tokens, overlap * dim)
    score = random_of(f"{states} score", tokens, overlap * dim)
    bias = random_of(f"{states} ape", range(ratio), overlap * dim)
    kept, block_size = rank.rows(states), rank.spec(states).block_size
    ops.save_partial_states_cpu(kv, score, bias, positions, kept, rank.slots(states, positions))
    window = overlap * ratio
    reached = positions.unsqueeze(-1) - window + 1 + torch.arange(window)
    table = rank.blocks(states).unsqueeze(0).int()
    request = torch.zeros(len(tokens), dtype=torch.int32)
    gathered = cpu_utils.map_local_to_global_slots_cpu(reached, request, table, block_size)
    store = ops.compress_norm_rope_store_cpu if dim == DIM else ops.compress_norm_rope_store_indexer_cpu
    spec = rank.spec(rows)
    store(
        kept,
        gathered,
        positions,
        rank.slots(rows, positions),
        torch.ones(dim),
        EPS,
        rotations(),
        rank.pages(rows),
        spec.block_size // ratio,
        ratio,
    )


def computed_alone(engine: Engine, stop: int, last: range) -> list[Any]:
    """What one engine computes of the last positions, after those before ``stop``."""
    reference = rank_of(engine, blocks_of(engine.cache, 0, last.stop), 1)
    list(compute(reference, range(stop)))
    return list(compute(reference, last))


@pytest.mark.parametrize("stop", [129, 511, 515])
def test_kernels_go_on(stop: int) -> None:
    """A decode engine of two ranks and larger blocks goes on where prefill has stopped, in the middle of rows."""
    prefill, alone = (Engine(name, specs.deepseek_v4) for name in ("prefill", "alone"))
    decode = Engine("decode", partial(specs.deepseek_v4, block=512, window_block=128), 2)
    last = range(stop, stop + 140)
    expected = computed_alone(alone, stop, last)
    sender = rank_of(prefill, blocks_of(prefill.cache, 0, stop), 2)
    list(compute(sender, range(stop)))
    source = described(prefill, sender.planned, sender.views, 0)
    sent = tables.BlockTables(engine_config(), sender.planned)
    received = tables.BlockTables(engine_config(), decode.cache)
    read = read_of(sent, received, sender.ids, blocks_of(decode.cache, stop, stop), (0, stop))
    for number in range(2):
        rank = rank_of(decode, blocks_of(decode.cache, stop, last.stop), 10 + number)
        plan = plan_reads(described(decode, rank.planned, rank.views, number), [source])
        for spec in plan.bind(**request_of(read, plan, to_block_end=False)):
            copy(spec)
        found = list(compute(rank, last))
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


PAGE = 256


@pytest.mark.parametrize("stop", [256, 512])
def test_kernels_go_on_from_a_store(stop: int) -> None:
    """An engine of two ranks and larger blocks loads a prefix whose request has ended where a page does.

    Rows of 4 and 128 tokens are in pages as tokens are. What compressors still need is at the ends of pages: the last
    8 and 128 positions before them, of which an engine keeps no others.
    """
    writer, alone = (Engine(name, specs.deepseek_v4) for name in ("writer", "alone"))
    reader = Engine("reader", partial(specs.deepseek_v4, block=512, window_block=128), 2)
    last = range(stop, stop + 140)
    expected = computed_alone(alone, stop, last)
    saving = rank_of(writer, blocks_of(writer.cache, 0, stop), 2)
    list(compute(saving, range(stop)))
    backend = MemoryBackend()
    save(writer, saving, stop, backend)
    received = tables.BlockTables(engine_config(), reader.cache)
    ranks = [rank_of(reader, blocks_of(reader.cache, stop, last.stop), 10 + number) for number in range(2)]
    clients = [client_of(reader, rank, number, backend) for number, rank in enumerate(ranks)]
    assert find(clients, clients[0].chain(range(stop + 100))) == stop
    for rank, loading in zip(ranks, clients, strict=True):
        loading.load(loading.chain(range(stop)), held(received.of_ids(rank.ids), loading), loading.needs(0, stop))
        found = list(compute(rank, last))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("stop", "found"), [(256, 256), (258, 256), (259, 0), (511, 0), (512, 512)])
def test_a_prefix_is_found_where_a_request_has_ended(stop: int, found: int) -> None:
    """A few tokens behind a page, vLLM has freed what a compressor had at its end."""
    engine, backend = Engine("writer", specs.deepseek_v4), MemoryBackend()
    rank = rank_of(engine, blocks_of(engine.cache, 0, stop), 2)
    client = save(engine, rank, stop, backend)
    assert client.find(client.chain(range(stop + 1))) == found


def save(engine: Engine, rank: Rank, stop: int, backend: MemoryBackend) -> StoreClient:
    """Save a request of some tokens that has ended, and return the client that has."""
    client, groups = client_of(engine, rank, 0, backend), tables.BlockTables(engine_config(), rank.planned)
    ids = held(groups.of_ids(without_skipped(rank.planned, rank.ids, stop)), client)
    spans = {name: (first_listed(blocks, groups.block_sizes[name]), stop) for name, blocks in ids.items()}
    client.save(client.chain(range(stop)), ids, spans)
    return client


def without_skipped(planned: Any, ids: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The blocks of a request without those that vLLM may have freed after some tokens."""
    kept = []
    for manager, block_ids in zip(managers_of(planned, 0), ids, strict=True):
        num_freed = manager.get_num_skipped_tokens(num_tokens) // manager.block_size
        kept.append([*[0] * num_freed, *block_ids[num_freed:]])
    return kept


def held(ids: dict[str, Any], client: StoreClient) -> dict[str, Any]:
    """The block tables of the groups that a worker has."""
    return {group.name: ids[group.name] for group in client.groups}


def client_of(engine: Engine, rank: Rank, number: int, backend: MemoryBackend) -> StoreClient:
    """The client of a rank, as vLLM's connector to a store has it."""
    worker = attrs.evolve(described(engine, rank.planned, rank.views, number), model="DeepSeek-V4")
    attended = tables.BlockTables(engine_config(), rank.planned).first_loaded
    worker = keeping(worker, description.windows_of(rank.planned))
    return StoreClient(backend, worker, tokens_per_page=PAGE, attended=attended)


def test_a_compressor_keeps_scores_with_the_bias_of_their_positions() -> None:
    """SGLang's kernels keep scores alone, and add the bias as they read: a copy between the two would be wrong."""
    rank = rank_of(engine := Engine("prefill", specs.deepseek_v4), blocks_of(engine.cache, 0, 8), 1)
    name = "model.layers.1.attn"
    states = f"{name}.compressor.state_cache"
    compress(rank, name, states, range(8), 4, DIM)
    slots = rank.slots(states, torch.arange(8))
    kept = rank.rows(states).reshape(-1, 4 * DIM)[slots]
    score, bias = random_of(f"{states} score", range(8), 2 * DIM), random_of(f"{states} ape", range(4), 2 * DIM)
    assert torch.equal(kept[:, : 2 * DIM], random_of(f"{states} kv", range(8), 2 * DIM))
    assert torch.equal(kept[:, 2 * DIM :], score + bias.repeat(2, 1))
    assert not torch.equal(kept[:, 2 * DIM :], score)


def rank_of(engine: Engine, ids: list[list[int]], seed: int) -> Rank:
    """A rank whose cache has something in each byte."""
    planned = engine.cache
    _, views = allocated(planned, engine.layout, seed)
    return Rank(planned, views, ids)


def blocks_of(planned: Any, num_loaded: int, num_tokens: int) -> list[list[int]]:
    """The blocks of a request of which a connector loads the first tokens, and of the tokens behind them."""
    kept = managers_of(planned, 3 + num_loaded % 5)
    if num_loaded:
        for manager in kept:
            manager.add_local_computed_blocks("request", [], 0, num_loaded)
        for manager in kept:
            manager.allocate_external_computed_blocks("request", 0, num_loaded)
    for manager in kept:
        manager.allocate_new_blocks("request", num_tokens, num_tokens)
    return [[block.block_id for block in manager.req_to_blocks["request"]] for manager in kept]
