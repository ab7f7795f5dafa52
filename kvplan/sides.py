"""Sides: the command line's words for an engine, a comma list such as ``tp=4,block=16,layout=LBNHC``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.reading import integer
from kvplan.workers import Worker

MAX_WORKERS: Final = 4096
"""A side has fewer workers than this."""

MAX_TOKENS: Final = 1 << 24
"""A request asked for on the command line ends at most here."""

NUMBERS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        **dict.fromkeys(("tp", "pp", "dcp", "pcp"), (1, MAX_WORKERS)),
        "interleave": (1, MAX_TOKENS),
        "block": (1, MAX_TOKENS),
        "pad": (0, 1 << 40),
        "blocks": (1, 1 << 31),
    }
)
"""The keys of a side that take a number, each with the half-open interval it must lie in."""

WORDS: Final = ("layout", "kv", "conv")
"""The keys of a side that take a word."""


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


@attrs.frozen
class Side:
    """One engine as the command line describes it. ``blocks=None``: as many as the request needs, and some.

    >>> Side.parse("tp=4,layout=LBNHC", "--src")
    Side(tp=4, pp=1, dcp=1, pcp=1, interleave=1, block=16, layout='LBNHC', kv='content', pad=0, blocks=None,
         conv='DS')
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    block: int = 16
    layout: str = "LBHNC"
    kv: str = "content"
    pad: int = 0
    blocks: int | None = None
    conv: str = "DS"

    @classmethod
    def parse(cls, text: str, what: str) -> Side:
        """The side that a comma list describes; ``what`` is the option that messages name.

        Raises ``LAYOUT`` for an unknown key, ``NAME`` for one given twice, ``TYPE`` or ``RANGE`` for a bad number.
        """
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in NUMBERS and key not in WORDS:
                known = ", ".join((*NUMBERS, *WORDS))
                raise KVPlanError("LAYOUT", f"read {what}", expected=f"keys of {known}", got=repr(key), key=key)
            if key in values:
                raise KVPlanError("NAME", f"read {what}", expected="each key once", got=f"{key!r} twice", key=key)
            values[key] = count(value, f"{key} of {what}", *NUMBERS[key]) if key in NUMBERS else value
        side = cls(**values)
        integer(side.tp * side.pp * side.pcp, f"tp * pp * pcp of {what}", high=MAX_WORKERS)
        return side

    def __str__(self) -> str:
        given = attrs.asdict(self, filter=lambda field, value: value != field.default)
        return ",".join(f"{key}={value}" for key, value in given.items()) or "tp=1"

    def engine(self, model: Model, engine_id: str, num_blocks: int) -> tuple[Worker, ...]:
        """The model's workers on this side, each with a pool of ``num_blocks``."""
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
            kv=self.kv,
            pad=self.pad,
            conv_order=self.conv,
        )
