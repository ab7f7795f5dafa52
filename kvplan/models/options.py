"""One engine as text: ``tp=4,block=16,layout=LBNHC``, the arguments of ``Model.engine``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan._text import meant
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.layouts import LETTERS, ORDERS
from kvplan.models.model import Model
from kvplan.models.tensors import FP8_DTYPES

AUTO: Final = "auto"
"""The value of ``block`` that makes a block of attention as large as a recurrent state."""

MAX_TOKENS: Final = 1 << 24
"""The last position of a request, plus one, is at most this."""

MAX_WORKERS: Final = 4096
"""An engine has fewer workers than this."""

DEFAULT_NUM_BLOCKS: Final = 4096
"""The blocks of a pool for which neither the options nor a request say how many."""

ROW_WORDS: Final = ("fp8", "fp8_e4m3", "fp8_ds_mla")
"""The words that make vLLM and SGLang keep sparse latents in rows of fp8 values and scales.

(``_canonicalize_sparse_mla_kv_cache_dtype`` of vLLM's mla_attention.py, 0.33)
"""

SHORT_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", **FP8_DTYPES}
)
"""Dtypes by the words of engines."""

OTHER_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tp"),
        **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "pp"),
        **dict.fromkeys(("data_parallel_size", "dp_size"), "dp"),
        **dict.fromkeys(("decode_context_parallel_size", "dcp_size"), "dcp"),
        "prefill_context_parallel_size": "pcp",
        **dict.fromkeys(("block_size", "page_size", "page", "tokens_per_block"), "block"),
        "kv_cache_dtype": "dtype",
        "mamba_ssm_cache_dtype": "ssm",
        "kv_cache_layout": "layout",
        **dict.fromkeys(("num_blocks", "num_gpu_blocks", "num_gpu_blocks_override"), "blocks"),
    }
)
"""Our keys by the names that vLLM, SGLang and :meth:`Model.engine` have for them."""

NO_KEYS: Final = ("ep", "expert_parallel_size", "ep_size", "enable_expert_parallel")
"""Options of engines that change no cache."""

LAYOUTS: Final = f"{', '.join(ORDERS)}; vLLM's NHD is LBNHC, its HND is LBHNC"
KV_PLACES: Final = (
    "content (K next to V for each token and head), axis (K, then V, in each block and layer), "
    "split (separate regions)"
)


def read_decimal(text: str, subject: str, low: int, high: int) -> int:
    """Return the integer in ``[low, high)`` that ``text`` writes in ASCII digits.

    Raises ``TYPE`` or ``RANGE``.
    """
    # int() would read underscores, signs, spaces and digits of any script
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        expected = "an integer in decimal digits"
        raise KVPlanError("TYPE", f"read {subject}", expected=expected, got=repr(text), value=text)
    return integer(int(text), subject, low=low, high=high)


def items_of(text: str) -> dict[str, str]:
    """Return the values of a text such as ``tp=4, block=16``, by key."""
    items = [item.partition("=") for item in text.split(",") if item.strip()]
    return {key.strip(): value.strip() for key, _, value in items}


def _block(text: str, subject: str) -> int | None:
    return None if text == AUTO else read_decimal(text, subject, 1, MAX_TOKENS)


def _stages(text: str, subject: str) -> tuple[int, ...]:
    sizes = text.split("+", MAX_WORKERS)
    return tuple(read_decimal(num_layers, subject, 1, MAX_WORKERS) for num_layers in sizes)


def _dtype(text: str, subject: str) -> str | None:
    return None if text == AUTO else text


def _option(
    default: Any,
    about: str,
    reader: Callable[..., Any] = read_decimal,
    argument: str = "",
    **limits: int,
) -> Any:
    """Return a field whose text ``reader`` converts, for an argument of :meth:`Model.engine`."""
    if default is not None:
        about += f" (default: {int(default) if isinstance(default, bool) else default})"
    reader = partial(reader, **limits)
    metadata = {"reader": reader, "about": about, "argument": argument}
    return attrs.field(default=default, metadata=metadata)


_size_option = partial(_option, 1, low=1, high=MAX_WORKERS)
_word_option = partial(_option, reader=lambda text, subject: text)
_flag_option = partial(
    _option, False, reader=lambda text, subject: bool(read_decimal(text, subject, 0, 2))
)


@attrs.frozen
class EngineOptions:
    """One engine: parallel sizes, block size and memory layout, as in :meth:`Model.engine`.

    ``block`` is in tokens; None (``auto``) is the size of a recurrent state. ``blocks`` None is
    enough for the request. A request is on one of ``dp`` data-parallel ranks, whose workers are
    those of the engine.

    >>> options = EngineOptions.parse("tp=4, layout=LBNHC, stages=10+22", "--src")
    >>> options.tp, options.stages, options.block, str(options)
    (4, (10, 22), 16, 'tp=4,layout=LBNHC,stages=10+22')
    """

    tp: int = _size_option("tensor-parallel size")
    pp: int = _size_option("pipeline-parallel size")
    dp: int = _size_option("data-parallel size: a request is on one of these ranks")
    dcp: int = _size_option("decode context-parallel size")
    pcp: int = _size_option("prefill context-parallel size")
    interleave: int = _option(
        1, "consecutive positions on one context-parallel rank", low=1, high=MAX_TOKENS
    )
    block: int | None = _option(
        16, f"tokens per block; {AUTO}: as a recurrent state", _block, "tokens_per_block"
    )
    layout: str = _word_option(
        "LBHNC", f"memory order, slowest dimension first ({LETTERS}): {LAYOUTS}"
    )
    kv: str = _word_option("content", f"where K and V are: {KV_PLACES}")
    pad: int = _option(0, "bytes of padding after each block", low=0, high=1 << 40)
    blocks: int | None = _option(
        None, "blocks in the pool", argument="num_blocks", low=1, high=1 << 31
    )
    conv: str = _word_option(
        "DS",
        "convolution state: DS (channel, step) or SD (step, channel)",
        argument="conv_order",
    )
    stages: tuple[int, ...] | None = _option(
        None, "layers per pipeline stage, such as 10+22", _stages, "layers_per_stage"
    )
    kernel: int | None = _option(
        None, "tokens per kernel block", argument="kernel_tokens", low=1, high=MAX_TOKENS
    )
    shared: bool = _flag_option("1: the KV cache groups of a hybrid model share one pool")
    scales: str = _word_option(
        "inline", "where scales of quantized K and V are: inline, page, region"
    )
    draft: str | None = _word_option(None, "shipped model that drafts tokens")
    dtype: str | None = _option(
        None,
        "dtype of K and V, or latents, such as bfloat16, or an engine's word: fp8",
        _dtype,
    )
    ssm: str | None = _option(None, "dtype of SSM states", _dtype)

    @classmethod
    def parse(cls, text: str, subject: str) -> EngineOptions:
        """Return the options in comma-separated ``KEY=VALUE`` form; messages name the ``subject``.

        Raises ``LAYOUT`` for an unknown key, ``NAME`` for a repeated one, ``TYPE`` or ``RANGE`` for
        a bad number.
        """
        action = f"read {subject}"
        readers = {field.name: field.metadata["reader"] for field in attrs.fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(str.strip, text.split(",")):
            key, _, value = map(str.strip, item.partition("="))
            if key not in readers:
                plain = key.replace("-", "_")
                hint = meant(OTHER_KEYS.get(plain, key), readers)
                if plain in NO_KEYS:
                    hint = "expert parallelism changes no cache: leave it out"
                expected = "a key in --help" if hint else f"one of {', '.join(readers)}"
                raise KVPlanError(
                    "LAYOUT", action, expected=expected, got=repr(key), hint=hint, key=key
                )
            if key in values:
                got = f"{key!r} twice"
                raise KVPlanError("NAME", action, expected="each key once", got=got, key=key)
            values[key] = readers[key](value, f"{key} of {subject}")
        options = cls(**values)
        # pp or the list of stages says how many there are
        num_stages = max(options.pp, len(options.stages or ()))
        num_workers = options.tp * num_stages * options.pcp
        integer(num_workers, f"tp * pp * pcp of {subject}", high=MAX_WORKERS)
        return options

    def __str__(self) -> str:
        items = []
        for field in attrs.fields(EngineOptions):
            value = getattr(self, field.name)
            if value != field.default:
                items.append(f"{field.name}={_written(value)}")
        return ",".join(items) or "tp=1"

    def cached(self, model: Model) -> Model:
        """Return a model in the dtypes in which the engine caches it. Raises ``DTYPE``.

        >>> [EngineOptions(dtype="fp8").cached(Model.shipped(name)).tensor_bytes()[0]["attn"]
        ...  for name in ("llama-3.1-8b", "deepseek-v3.2")]
        [32768, 10496]
        """
        has_rows = any(tensor.plain_axes for tensor in model.tensors)
        as_the_file_says = self.dtype is None or (has_rows and self.dtype in ROW_WORDS)
        dtype = None if as_the_file_says else SHORT_DTYPES.get(str(self.dtype), self.dtype)
        return model.with_dtypes(dtype, SHORT_DTYPES.get(str(self.ssm), self.ssm))

    def served(self, model: Model) -> Model:
        """Return a model as the engine serves it: its dtypes, draft layers and groups."""
        model = self.cached(model)
        # a draft model adds layers before groups are made of all
        if self.draft is not None:
            model = model.with_draft(Model.shipped(self.draft))
        return model.grouped() if self.shared else model

    def engine(
        self, model: Model, engine_id: str, num_blocks: int | None = None
    ) -> tuple[Worker, ...]:
        """Return the engine's workers, each with a pool of ``num_blocks``.

        None: of ``blocks``, else of :data:`DEFAULT_NUM_BLOCKS`.
        """
        # dp, draft and dtypes are no arguments of Model.engine; others have another name there
        arguments = {}
        for field in attrs.fields(EngineOptions):
            if field.name not in ("dp", "draft", "dtype", "ssm"):
                arguments[field.metadata["argument"] or field.name] = getattr(self, field.name)
        arguments["num_blocks"] = num_blocks or self.blocks or DEFAULT_NUM_BLOCKS
        return self.served(model).engine(engine_id, **arguments)


def _written(value: Any) -> str:
    """Return a value in the form that :meth:`EngineOptions.parse` reads."""
    if value is None:
        return AUTO
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(int(value) if isinstance(value, bool) else value)
