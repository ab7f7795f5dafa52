"""Caches of vLLM's sparse and hybrid models: the specs that their layers declare, and where their kernels put a row.

A spec is what a connector gets. What it does not say, the order of bytes inside a block, is here as the engine's
kernels have it, so that a test can write and read a cache without kvplan. Sources are of vLLM 0.32 and 0.33:

* ``fp8_ds_mla`` of DeepSeek-V4, 584 bytes: the 576 bytes of values of all rows of a block, then 8 bytes of scales of
  each (``quantize_and_insert_k_kernel`` in vllm/models/deepseek_v4/common/ops/cache_utils.py);
* DeepSeek-V4.1 on SM100, 528 and 288 bytes: a row's scales follow its values
  (vllm/models/deepseek_v41/common/ops/cache_utils.py);
* an indexer's keys, 132 bytes (fp8) or 68 (MXFP4): keys of all rows, then 4 bytes of scales of each
  (vllm/models/deepseek_v4/common/ops/fused_compress_quant_cache.py);
* a ring has position ``p`` in row ``p % rows`` of the one block of a request;
* all else is ``[head, row, content]``, as the spec's cache is viewed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="needs vLLM")
layouts = pytest.importorskip("vllm.v1.kv_cache_layout")


class Cached(NamedTuple):
    """A layer's cache: its spec, and what is not in it.

    A row has ``values`` and ``scales`` bytes; scales are behind all values of a block. ``heads`` is the number that
    all ranks have together, None where each rank has all. ``ring`` is the number of a ring's rows. ``backend`` is what
    the layer's attention backend calls itself.
    """

    spec: Any
    values: int
    scales: int = 0
    heads: int | None = None
    ring: int = 0
    backend: str = "CompressorBackend"

    @property
    def tokens(self) -> int:
        """The tokens of a row."""
        return 1 if self.ring else int(self.spec.tokens_per_state)


Caches = dict[str, Cached]


def deepseek_v4(tp: int, block: int = 256, window_block: int = 64) -> Caches:
    """DeepSeek-V4 with ``--kv-cache-dtype fp8``: layers of ratio 4 and 128, and one that only slides."""
    caches: Caches = {}
    packed = {
        "num_kv_heads": 1,
        "max_tp_shards": 1,
        "dtype": torch.uint8,
        "alignment": 576,
    }
    rows = {
        **packed,
        "head_size": 512,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
        "kv_quant_mode": interface.get_kv_quant_mode("fp8_ds_mla"),
    }
    for layer, ratio in enumerate((0, 4, 128, 4, 128)):
        name = f"model.layers.{layer}.attn"
        window = interface.SlidingWindowMLASpec(block_size=window_block, sliding_window=128, **rows)
        caches[f"{name}.swa_cache"] = Cached(window, 576, 8, backend="DEEPSEEK_SPARSE_SWA")
        if ratio:
            main = interface.MLAAttentionSpec(block_size=block, tokens_per_state=ratio, **rows)
            caches[name] = Cached(main, 576, 8, backend="FLASHMLA_SPARSE_DSV4")
            caches[f"{name}.compressor.state_cache"] = _compressor(ratio, 512)
        if ratio == 4:
            keys = interface.MLAAttentionSpec(block_size=block, tokens_per_state=4, head_size=132, **packed)
            caches[f"{name}.indexer.k_cache"] = Cached(keys, 128, 4, backend="DEEPSEEK_V4_INDEXER")
            caches[f"{name}.indexer.compressor.state_cache"] = _compressor(ratio, 128)
    return caches


def _compressor(ratio: int, dim: int) -> Cached:
    """The tokens that DeepSeek-V4's compressor may still need: a row of each, in a window."""
    overlap = 2 if ratio == 4 else 1
    size = 2 * overlap * dim
    spec = interface.SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=size,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
        alignment=576,
    )
    return Cached(spec, 4 * size)


def deepseek_v41(
    tp: int, block: int = 128, window_block: int = 32, record: int = 528, replay: bool = True, drafts: int = 0
) -> Caches:
    """DeepSeek-V4.1: windows that are recomputed after a prefix hit, layers of ratio 1 and 2, and rings.

    ``record`` is 528 on SM100, 288 beside it with ``nvfp4_ds_mla``, and 584 on other GPUs.
    """
    caches: Caches = {}
    alignment = 576 if record == 584 else 512
    dtype = "nvfp4_ds_mla" if record == 288 else "fp8_ds_mla"
    rows = {
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": torch.uint8,
        "alignment": alignment,
        "cache_dtype_str": dtype,
        "model_version": "deepseek_v4",
        "kv_quant_mode": interface.get_kv_quant_mode(dtype),
    }
    window_record = 584 if record == 584 else 528
    split = (576, 8) if record == 584 else (record, 0)
    window_split = (576, 8) if record == 584 else (528, 0)
    stride = None if record == 584 else int(np.lcm(window_record, record))
    for layer, ratio in enumerate((1, 2, 0, 2)):
        name = f"model.layers.{layer}.attn"
        window = interface.SlidingWindowMLASpec(
            block_size=window_block,
            max_tp_shards=1,
            sliding_window=128,
            bounded_replay=replay,
            state_content_bytes=window_record,
            block_stride_alignment=stride,
            **rows,
        )
        caches[f"{name}.swa_cache"] = Cached(window, *window_split, backend="DEEPSEEK_SPARSE_SWA")
        if not ratio:
            continue
        main = interface.MLAAttentionSpec(block_size=block, tokens_per_state=ratio, state_content_bytes=record, **rows)
        caches[name] = Cached(main, *split, backend="FLASHMLA_SPARSE_DSV41")
        keys = interface.MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=132,
            dtype=torch.uint8,
            tokens_per_state=ratio,
            alignment=alignment,
        )
        caches[f"{name}.indexer.k_cache"] = Cached(keys, 128, 4, backend="DEEPSEEK_V41_INDEXER")
        if ratio > 1:
            capacity = max(8, 1 << (drafts + 1).bit_length())
            ring = interface.CircularBufferSpec(
                block_size=capacity, num_kv_heads=1, head_size=1024, head_size_v=0, dtype=torch.float32
            )
            caches[f"{name}.compressor.state_cache"] = Cached(ring, 4096, ring=capacity)
    return caches


def qwen4(tp: int, block: int = 64, drafts: int = 0) -> Caches:
    """Qwen4-Exp: K and V, compressed keys of an indexer, and rings of the keys that are not compressed yet."""
    caches: Caches = {}
    ratio, heads = 16, 2
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn"
        values = interface.FullAttentionSpec(
            block_size=block,
            num_kv_heads=max(1, heads // tp),
            head_size=32,
            head_size_v=32,
            dtype=torch.bfloat16,
        )
        caches[f"{name}.attn"] = Cached(values, 128, heads=heads, backend="QWEN4_EXP_QSA_TRITON")
        keys = interface.MLAAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, tokens_per_state=ratio
        )
        caches[f"{name}.indexer.compressed_key_cache"] = Cached(keys, 128, backend="QWEN4_EXP_EXP_QSA_STATE")
        capacity = -(-(ratio + drafts) // ratio) * ratio
        ring = interface.CircularBufferSpec(
            block_size=capacity, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.bfloat16
        )
        raw = f"{name}.indexer.raw_key_cache"
        caches[raw] = Cached(ring, 128, ring=capacity, backend="QWEN4_EXP_EXP_QSA_STATE")
    return caches


def glm5_next(tp: int, block: int = 128, drafts: int = 0) -> Caches:
    """GLM-5-Next: latents, pooled keys of an indexer, and rings of the tokens of the pool that is not full yet."""
    caches: Caches = {}
    pool = 4
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        latent = interface.MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=576,
            dtype=torch.uint8,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
            kv_quant_mode=interface.get_kv_quant_mode("fp8_ds_mla"),
        )
        caches[f"{name}.attn"] = Cached(latent, 656, backend="FLASHMLA_SPARSE")
        keys = interface.MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=132,
            dtype=torch.uint8,
            tokens_per_state=pool,
            cache_role=interface.SparseCacheRole.INDEXER,
        )
        caches[f"{name}.indexer.k_cache"] = Cached(keys, 128, 4, backend="DEEPSEEK_V32_INDEXER")
        capacity = pool * (1 << (-(-(pool + drafts) // pool) - 1).bit_length())
        ring = interface.CircularBufferSpec(
            block_size=capacity,
            num_kv_heads=2,
            head_size=128,
            head_size_v=0,
            dtype=torch.bfloat16,
            dcp_sharded=False,
        )
        # two slots that every rank has: a key, and its gate
        caches[f"{name}.indexer.tail_cache"] = Cached(ring, 256, ring=capacity, backend="KPOOL_TAIL")
    return caches


def step5(tp: int, block: int = 64) -> Caches:
    """Step-5: K and V, summaries of eight tokens each, and a ring of one page of K and V, of each head.

    A rank has one head, so there are at most as many heads as ranks.
    """
    caches: Caches = {}
    heads, dim = 2, 64
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        values = interface.FullAttentionSpec(
            block_size=block, num_kv_heads=max(1, heads // tp), head_size=dim, dtype=torch.bfloat16
        )
        caches[f"{name}.attn"] = Cached(values, 4 * dim, heads=heads, backend="STEP5_DSA")
        summary = interface.FullAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=256,
            head_size_v=0,
            dtype=torch.uint8,
            tokens_per_state=8,
        )
        caches[f"{name}.summary"] = Cached(summary, 256, heads=heads, backend="STEP5_CSA_SUMMARY")
        page = values.page_size_bytes
        ring = interface.CircularBufferSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=page // (2 * block),
            head_size_v=0,
            dtype=torch.bfloat16,
            block_stride_alignment=1024,
        )
        caches[f"{name}.tail"] = Cached(ring, 1024, heads=heads, ring=page // 1024, backend="STEP5_CSA_TAIL_RING")
    return caches


def inkling(tp: int, block: int = 64) -> Caches:
    """Inkling: K and V in all positions or a window, and the last inputs of convolutions, divided by heads."""
    caches: Caches = {}
    heads, dim = 4, 32
    for layer in range(4):
        name = f"model.layers.{layer}.attn"
        fields = {
            "block_size": block,
            "num_kv_heads": max(1, heads // tp),
            "head_size": dim,
            "dtype": torch.bfloat16,
        }
        spec = (
            interface.FullAttentionSpec(**fields)
            if layer == 3
            else interface.SlidingWindowSpec(**fields, sliding_window=48)
        )
        caches[name] = Cached(spec, 4 * dim, heads=heads, backend="FLASH_ATTN")
        conv = interface.SlidingWindowSpec(
            block_size=4,
            num_kv_heads=max(1, heads // tp),
            head_size=256,
            head_size_v=0,
            dtype=torch.bfloat16,
            sliding_window=4,
        )
        caches[f"{name}.sconv"] = Cached(conv, 512, heads=heads, backend="INKLING_SCONV_SWA")
    return caches


def dots3_note(tp: int, block: int = 64) -> Caches:
    """dots3.note: latents in a window, and in all positions, padded to one width."""
    caches: Caches = {}
    for layer in range(4):
        fields = {
            "block_size": block,
            "num_kv_heads": 1,
            "max_tp_shards": 1,
            "head_size": 160,
            "dtype": torch.bfloat16,
            "cache_dtype_str": "auto",
        }
        spec = (
            interface.MLAAttentionSpec(**fields)
            if layer % 2
            else interface.SlidingWindowMLASpec(**fields, sliding_window=96)
        )
        caches[f"model.layers.{layer}.self_attn.attn"] = Cached(spec, 320, backend="FLASHMLA_SPARSE")
    return caches


def plain(tp: int, block: int = 16) -> Caches:
    """Llama: K and V of each layer, in all positions."""
    return _attending(tp, block, windows=0)


def windows(tp: int, block: int = 16) -> Caches:
    """Gemma-3 or gpt-oss: K and V of equal shape in all layers, of which more have a window than have not."""
    return _attending(tp, block, windows=5)


def _attending(tp: int, block: int, windows: int) -> Caches:
    caches: Caches = {}
    heads, dim = 4, 32
    fields = {"block_size": block, "num_kv_heads": max(1, heads // tp), "head_size": dim, "dtype": torch.bfloat16}
    for layer in range(windows + 3):
        spec = (
            interface.SlidingWindowSpec(**fields, sliding_window=100)
            if layer < windows
            else interface.FullAttentionSpec(**fields)
        )
        caches[f"model.layers.{layer}.self_attn.attn"] = Cached(spec, 4 * dim, heads=heads, backend="FLASH_ATTN")
    return caches


MODELS: dict[str, Callable[..., Caches]] = {
    "DeepSeek-V4": deepseek_v4,
    "DeepSeek-V4.1": deepseek_v41,
    "Qwen4-Exp": qwen4,
    "GLM-5-Next": glm5_next,
    "Step-5": step5,
    "Inkling": inkling,
    "dots3.note": dots3_note,
}


def engine_config(layout: str = "BLHNC", dcp: int = 1) -> Any:
    """What vLLM's planning of caches reads of its configuration."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layouts.KVCacheLayout[layout],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
    )


def planned(caches: Caches, layout: str, num_blocks: int) -> Any:
    """The ``KVCacheConfig`` that vLLM's own planning makes of these caches."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # before 0.33
        from vllm.v1.core import kv_cache_utils as planning
    config = engine_config(layout)
    groups = planning.get_kv_cache_groups(config, {name: cached.spec for name, cached in caches.items()})
    block_bytes = planning._get_kv_cache_bytes_per_block(groups, layouts.KVCacheLayout[layout])
    return planning.get_kv_cache_config_from_groups(config, groups, num_blocks * block_bytes)


def spec_of(group: Any, name: str) -> Any:
    """The spec of a layer as it was planned: with the block size and the padding that its group has."""
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)


def allocated(cache: Any, layout: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The bytes of one allocation, with something in each, and vLLM's view of each layer's cache."""
    (size,) = {tensor.size for tensor in cache.kv_cache_tensors}
    memory = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    raw = torch.from_numpy(memory).view(torch.int8)
    views: dict[str, Any] = {}
    for tensor in cache.kv_cache_tensors:
        group = next(group for group in cache.kv_cache_groups if tensor.layers[0] in group.layer_names)
        spec = spec_of(group, tensor.layers[0])
        made = interface.create_kv_cache_views(raw, spec, cache.num_blocks, layouts.KVCacheLayout[layout], tensor)
        views.update(zip(tensor.layers, made, strict=True))
    return memory, views


class Placed(NamedTuple):
    """Where the blocks of a layer are: the first one's offset, and the bytes from block to block.

    ``layers`` is how many layers have their blocks side by side, this one among them.
    """

    offset: int
    stride: int
    layers: int = 1


def places(cache: Any) -> dict[str, Placed]:
    """Where each layer is, as a ``KVCacheConfig`` says."""
    return {
        name: Placed(tensor.offset + number * tensor.layer_stride, tensor.block_stride, len(tensor.layers))
        for tensor in cache.kv_cache_tensors
        for number, name in enumerate(tensor.layers)
    }


def row_bytes(
    cached: Cached, spec: Any, placed: Placed, block: int, row: int, head: int, order: str = "HN"
) -> Iterator[tuple[int, int]]:
    """The byte ranges of a row of a block, and of one of this rank's heads: offset and length."""
    page = placed.offset + block * placed.stride
    rows = cached.ring or spec.num_states
    heads = int(spec.num_heads)
    if cached.scales:
        yield page + row * cached.values, cached.values
        yield page + rows * cached.values + row * cached.scales, cached.scales
    elif order == "HN":
        yield page + (head * rows + row) * cached.values, cached.values
    elif order == "LN":  # each head has the rows of all layers
        yield page + (head * placed.layers * rows + row) * cached.values, cached.values
    else:
        yield page + (row * heads + head) * cached.values, cached.values


def label(name: str, row: int, head: int, size: int) -> Any:
    """The bytes of a row of a layer, the same wherever it is kept."""
    return np.random.default_rng([zlib.crc32(name.encode()), row, head]).integers(0, 256, size, np.uint8)
