"""Sides: the command line's words for an engine, a comma list such as ``tp=4,block=16,layout=LBNHC``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import integer
from kvplan._text import meant
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.model import Model

MAX_WORKERS: Final = 4096
"""A side has fewer workers than this."""

MAX_TOKENS: Final = 1 << 24
"""A request asked for on the command line ends at most here."""

AUTO: Final = "auto"
"""The block that is as large as a state."""

BITS: Final[Mapping[int, tuple[Any, ...]]] = MappingProxyType({8: (8,), 4: (4, "float8_e4m3fn", 16)})
"""What the command line quantizes a cache to, in the words of :meth:`Model.quantized`: 8 bits, and NVFP4."""


def in_bits(model: Model, bits: int) -> Model:
    """The model with K and V of so many bits, one of :data:`BITS`.

    >>> print(in_bits(Model.shipped("llama-3.2-1b"), 8))
    llama-3.2-1b: 16 layers, bfloat16, groups attn
    """
    return model.quantized(*BITS[bits])


def load(model: str, bits: str | None = None) -> Model:
    """A shipped model by its name, or the model of a config.json by its path, in ``bits``. Raises ``CONFIG``."""
    if bits is not None:
        return in_bits(load(model), int(bits))
    if model in Model.names():
        return Model.shipped(model)
    path = Path(model)
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _not_loaded(model, error) from None
    return Model.from_config(config)


def _not_loaded(model: str, error: Exception) -> KVPlanError:
    """The error for what is no model: a file's trouble, or a name, with those that are like it."""
    is_file, lacks = model.endswith(".json"), isinstance(error, FileNotFoundError)
    reason = "no such file" if lacks else (error.strerror if isinstance(error, OSError) else None) or str(error)
    got = repr(model) if lacks and not is_file and "/" not in model else f"{model!r}: {reason}"
    named = lacks and not is_file
    alike = meant(model.rpartition("/")[2], Model.names()) if named else ""
    hint = " ".join(filter(None, (alike, "'kvplan --help' lists all" if named else "")))
    expected = "the name of a shipped model, or the path of a config.json"
    return KVPlanError("CONFIG", "load a model", expected=expected, got=got, hint=hint, model=model)


def count(text: str, what: str, low: int, high: int) -> int:
    """The number that ``text`` writes in decimal digits, in ``[low, high)``.

    >>> count("16", "tp of --src", 1, 4096)
    16
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise KVPlanError("TYPE", f"read {what}", expected="an integer in decimal digits", got=repr(text), value=text)
    return integer(int(text), what, low=low, high=high)


def token_range(text: str, what: str) -> tuple[int, int]:
    """``STOP`` or ``START:STOP``, a half-open range of positions.

    >>> token_range("1000", "--tokens"), token_range("37:1000", "--tokens")
    ((0, 1000), (37, 1000))
    """
    start, colon, stop = text.rpartition(":")
    first = count(start, what, 0, MAX_TOKENS + 1) if colon else 0
    return first, count(stop, what, first, MAX_TOKENS + 1)


def _block(text: str, what: str) -> int | None:
    return None if text == AUTO else count(text, what, 1, MAX_TOKENS)


def _stages(text: str, what: str) -> tuple[int, ...]:
    return tuple(count(layers, what, 1, MAX_WORKERS) for layers in text.split("+", MAX_WORKERS))


def _flag(text: str, what: str) -> bool:
    return bool(count(text, what, 0, 2))


def _word(text: str, what: str) -> str:
    return text


def _key(reader: Callable[..., Any], default: Any, **limits: int) -> Any:
    """A field of a side, whose text ``reader`` reads."""
    return attrs.field(default=default, metadata={"reader": partial(reader, **limits)})


@attrs.frozen
class Side:
    """One engine as the command line describes it, by the options of :meth:`Model.engine`.

    ``block`` None (``auto``) is as large as a state, ``blocks`` None as many as the request needs, and some. ``stages``
    are layers per pipeline stage (``10+22``), ``kernel`` the tokens of a kernel block, ``spread`` is ``pcp_spreads``.
    ``shared`` (1 or 0) lays the model's groups over each other, :meth:`Model.grouped`. ``draft`` names a shipped model.

    >>> side = Side.parse("tp=4,layout=LBNHC,stages=10+22", "--src")
    >>> side.tp, side.stages, side.block, str(side)
    (4, (10, 22), 16, 'tp=4,layout=LBNHC,stages=10+22')
    """

    tp: int = _key(count, 1, low=1, high=MAX_WORKERS)
    pp: int = _key(count, 1, low=1, high=MAX_WORKERS)
    dcp: int = _key(count, 1, low=1, high=MAX_WORKERS)
    pcp: int = _key(count, 1, low=1, high=MAX_WORKERS)
    interleave: int = _key(count, 1, low=1, high=MAX_TOKENS)
    block: int | None = _key(_block, 16)
    layout: str = _key(_word, "LBHNC")
    kv: str = _key(_word, "content")
    pad: int = _key(count, 0, low=0, high=1 << 40)
    blocks: int | None = _key(count, None, low=1, high=1 << 31)
    conv: str = _key(_word, "DS")
    stages: tuple[int, ...] | None = _key(_stages, None)
    kernel: int | None = _key(count, None, low=1, high=MAX_TOKENS)
    shared: bool = _key(_flag, False)
    scales: str = _key(_word, "inline")
    spread: bool = _key(_flag, False)
    draft: str | None = _key(_word, None)

    @classmethod
    def parse(cls, text: str, what: str) -> Side:
        """The side that a comma list describes; ``what`` is the option that messages name.

        Raises ``LAYOUT`` for an unknown key, ``NAME`` for one given twice, ``TYPE`` or ``RANGE`` for a bad number.
        """
        readers = {field.name: field.metadata["reader"] for field in attrs.fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in readers:
                known = ", ".join(readers)
                hint = meant(key, readers)
                raise KVPlanError(
                    "LAYOUT", f"read {what}", expected=f"keys of {known}", got=repr(key), hint=hint, key=key
                )
            if key in values:
                raise KVPlanError("NAME", f"read {what}", expected="each key once", got=f"{key!r} twice", key=key)
            values[key] = readers[key](value, f"{key} of {what}")
        side = cls(**values)
        stages = side.pp if side.stages is None else max(side.pp, len(side.stages))
        integer(side.tp * stages * side.pcp, f"tp * pp * pcp of {what}", high=MAX_WORKERS)
        return side

    def __str__(self) -> str:
        given = attrs.asdict(self, recurse=False, filter=lambda field, value: value != field.default)
        return ",".join(f"{key}={_text(value)}" for key, value in given.items()) or "tp=1"

    def engine(self, model: Model, engine_id: str, num_blocks: int) -> tuple[Worker, ...]:
        """The model's workers on this side, each with a pool of ``num_blocks``."""
        if self.draft is not None:
            model = model.with_draft(Model.shipped(self.draft))
        if self.shared:
            model = model.grouped()
        return model.engine(
            engine_id,
            tp=self.tp,
            pp=self.pp,
            dcp=self.dcp,
            layout=self.layout,
            tokens_per_block=self.block,
            num_blocks=num_blocks,
            pcp=self.pcp,
            interleave=self.interleave,
            pcp_spreads=self.spread,
            kv=self.kv,
            pad=self.pad,
            kernel_tokens=self.kernel,
            conv_order=self.conv,
            scales=self.scales,
            shared=self.shared,
            layers_per_stage=self.stages,
        )


def _text(value: Any) -> str:
    """What :meth:`Side.parse` reads as ``value``."""
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return AUTO if value is None else str(int(value) if isinstance(value, bool) else value)
