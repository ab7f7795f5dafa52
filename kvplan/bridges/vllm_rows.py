"""Rows that a kernel of vLLM packs itself: the order of their bytes inside a block.

A spec declares the size of a row (``state_content_bytes``, or ``head_size`` bytes of ``uint8``),
and a connector gets a view of rows of that size. A row of values and scales does not always lie
where the view has it. Two orders are in use, here for a block of three rows, each of six bytes and
two of scales:

==============================  =========================================================
scales behind each row          ``vvvvvvss vvvvvvss vvvvvvss``
scales behind all rows          ``vvvvvv vvvvvv vvvvvv ss ss ss``, then the block's padding
==============================  =========================================================

Whole blocks of equal size can be copied without knowing the order. The last block of a request, of
which some rows are read, cannot, nor can blocks of unequal size. So a row of the second kind is two
tensors, values and scales, as in :func:`~kvplan.models.tensors.sparse_latent`.

Where the order is not known, a whole block is one value, in a group of its own. It moves between
engines with equal blocks, and plans refuse others.

Sources, of vLLM 0.32 and 0.33: ``fp8_ds_mla`` and ``nvfp4_ds_mla`` of DeepSeek-V3.2 in
vllm/v1/attention/backends/mla/flashmla_sparse.py; those of DeepSeek-V4 and V4.1 in cache_utils.py
of vllm/models/deepseek_v4/common/ops and of vllm/models/deepseek_v41/common/ops; keys of an indexer
in ``indexer_k_quant_and_cache`` of csrc/cache_kernels.cu, and in fused_compress_quant_cache.py of
the former folder; summaries of Step-5 in vllm/models/step5/nvidia/sparse_summary_cache.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kvplan.describe.views import dtype_name
from kvplan.models.tensors import FULL, Layer, Tensor

BYTES: Final = ("uint8", "int8")
"""Dtypes in which vLLM keeps rows that a kernel packs."""

PAGE: Final = "page"
"""The kind of a tensor that is a whole block, since the order of its bytes is not known."""


class PackedRow(NamedTuple):
    """The bytes of a row. Its ``scales``, if any, are behind the values of all rows of a block."""

    values: int
    scales: int = 0


RECORDS: Final[Mapping[tuple[str | None, int], PackedRow]] = MappingProxyType(
    {
        (None, 656): PackedRow(656),
        (None, 352): PackedRow(352),
        ("deepseek_v4", 584): PackedRow(576, 8),
        ("deepseek_v4", 528): PackedRow(528),
        ("deepseek_v4", 288): PackedRow(288),
    }
)
"""Latents by a spec's ``model_version`` and ``state_content_bytes``."""

KEYS: Final[Mapping[int, PackedRow]] = MappingProxyType(
    {
        17: PackedRow(16, 1),
        34: PackedRow(32, 2),
        36: PackedRow(32, 4),
        68: PackedRow(64, 4),
        132: PackedRow(128, 4),
    }
)
"""An indexer's keys by ``head_size``: fp8 with a scale in fp32, or MXFP4 with one byte for 32."""

INDEXERS: Final = frozenset(
    {
        "DEEPSEEK_V32_INDEXER",
        "DEEPSEEK_V4_INDEXER",
        "DEEPSEEK_V41_INDEXER",
        "DEEPSEEK_V41_SPARSE_INDEXER",
        "CPU_V4_INDEXER",
    }
)
"""Attention backends of caches of an indexer's keys."""

PLAIN_ROWS: Final = frozenset({"STEP5_CSA_SUMMARY"})
"""Attention backends of caches of bytes that lie as the spec's view has them."""


def is_packed(spec: Any) -> bool:
    """Return whether a spec has rows of bytes for all heads, in an order that it does not state."""
    dtype = dtype_name(getattr(spec, "dtype", ""))
    if dtype not in BYTES or getattr(spec, "head_size_v", None) != 0:
        return False
    # vLLM keeps fp8 values without scales as bytes too.
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    return mode == "NONE" or getattr(spec, "state_content_bytes", None) is not None


def packed_row(spec: Any, module: Any, *, tiled_keys: bool = False) -> PackedRow | None:
    """Return the order of the bytes of a packed row, None if it is not known.

    ``module`` is the layer, whose attention backend says what a row without a record is.
    ``tiled_keys``: an indexer's keys lie in tiles of 16 tokens, as on ROCm.
    """
    record_bytes = getattr(spec, "state_content_bytes", None)
    if record_bytes is not None:
        return RECORDS.get((getattr(spec, "model_version", None), int(record_bytes)))
    backend = _backend_of(module)
    size = int(spec.head_size)
    role = getattr(getattr(spec, "cache_role", None), "value", "")
    if role == "indexer" or backend in INDEXERS:
        tiled = tiled_keys or getattr(module, "uses_shuffled_layout", False)
        return None if tiled else KEYS.get(size)
    return PackedRow(size) if backend in PLAIN_ROWS else None


def _backend_of(module: Any) -> str:
    find = getattr(module, "get_attn_backend", None)
    return "" if find is None else str(find().get_name())


def packed_tensors(spec: Any, row: PackedRow | None, kind: str) -> Layer:
    """Return the tensors of a cache of packed rows, or of whole blocks if ``row`` is None."""
    if row is None:
        # A page without its padding, which nothing reads.
        num_bytes = int(spec.num_heads * spec.num_states * spec.state_content_size_bytes)
        return (Tensor(PAGE, FULL, (("byte", num_bytes),), dtype="uint8", pool=kind),)
    values = Tensor(kind, FULL, (("byte", row.values),), dtype="uint8")
    if not row.scales:
        return (values,)
    return (
        values,
        Tensor(f"{kind}.scale", FULL, (("byte", row.scales),), dtype="uint8", pool=kind),
    )
