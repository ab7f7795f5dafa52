"""Handoffs: what prefill tells decode about a request, in the request's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np

from kvplan._checks import instance, integer, members, name, seconds, settle, wrong_type
from kvplan.describe.blocks import POSITION_END, Blocks, Range
from kvplan.errors import KVPlanError

PORT_END: Final = 1 << 16

MAX_BLOCKS: Final = 1 << 22
"""Blocks of one group that a handoff may list: a request of 64 million tokens in blocks of 16."""


@attrs.frozen
class Source:
    """An engine that others read from: its id, a name of this start of it, and where its :class:`Listener` is."""

    engine_id: str
    start: str
    host: str
    port: int

    def __attrs_post_init__(self) -> None:
        settle(self, "a source", name, "engine_id", "start", "host")
        settle(self, "a source", integer, "port", high=PORT_END)

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.host}:{self.port}"


@attrs.frozen
class Handoff:
    """A request that an engine has computed for another one, which may read it until ``deadline``.

    ``num_tokens`` positions are computed, whose blocks are in ``blocks``, by group. ``deadline`` is in seconds on the
    source's own clock. :meth:`params` are plain values, for JSON; :meth:`of_params` reads them, which a stranger may
    have written.

    >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
    >>> handoff = Handoff(source, "request 1", 40, 1234.5, {"attn": Blocks([12, 5, 31]), "swa": Blocks([0, 7], null=0)})
    >>> handoff.params()["remote_block_ids"]
    {'attn': [0, [12, 5, 31]], 'swa': [1, [7]]}
    >>> Handoff.of_params(handoff.params()).blocks["swa"]
    Blocks([7], first=1)
    """

    source: Source
    request: str
    num_tokens: int
    deadline: float
    blocks: Mapping[str, Blocks]

    def __attrs_post_init__(self) -> None:
        instance(Source, self.source, "source of a handoff")
        settle(self, "a handoff", name, "request")
        settle(self, "a handoff", integer, "num_tokens", high=POSITION_END)
        settle(self, "a handoff", seconds, "deadline")
        members(Blocks, instance(Mapping, self.blocks, "blocks of a handoff").values(), "blocks of a handoff")

    def params(self) -> dict[str, Any]:
        """The handoff as plain values."""
        return {
            "remote_engine_id": self.source.engine_id,
            "remote_start": self.source.start,
            "remote_host": self.source.host,
            "remote_port": self.source.port,
            "remote_request_id": self.request,
            "remote_num_tokens": self.num_tokens,
            "remote_deadline": self.deadline,
            "remote_block_ids": {group: _listed(blocks) for group, blocks in self.blocks.items()},
        }

    @classmethod
    def of_params(cls, params: Mapping[str, Any]) -> Handoff:
        """The handoff in a request's parameters, of which others are ignored. Raises ``KEY``, ``TYPE`` and others."""
        missing = sorted(PARAMS - instance(Mapping, params, "parameters of a request").keys())
        if missing:
            raise KVPlanError("KEY", "read a handoff", expected=f"a key {missing[0]!r}", got="none")
        tables = instance(Mapping, params["remote_block_ids"], "remote_block_ids")
        return cls(
            Source(*(params[f"remote_{key}"] for key in ("engine_id", "start", "host", "port"))),
            params["remote_request_id"],
            params["remote_num_tokens"],
            params["remote_deadline"],
            {name(group, "a group"): _blocks(listed) for group, listed in tables.items()},
        )


PARAMS: Final = frozenset(Handoff(Source("-", "-", "-", 0), "-", 0, 0, {}).params())


def _listed(blocks: Blocks) -> list[Any]:
    """A table as plain values: the first ordinal and the ids, -1 at a gap."""
    ids = np.full(blocks.stop - blocks.first, -1)
    ids[blocks.ordinals - blocks.first] = blocks.ids
    return [blocks.first, ids.tolist()]


def _blocks(listed: Any) -> Blocks:
    if not isinstance(listed, list | tuple) or len(listed) != 2:
        raise wrong_type("a block table", "[first, ids]", listed)
    first, ids = listed
    ids = members(int, ids, "block ids")
    if len(ids) > MAX_BLOCKS:
        raise KVPlanError("RANGE", "read a block table", expected=f"at most {MAX_BLOCKS} ids", got=f"{len(ids)}")
    if -1 not in ids:
        return Blocks(ids, first)
    there = [i for i, block in enumerate(ids) if block != -1]
    first = integer(first, "first of a block table", high=POSITION_END)
    return Blocks([ids[i] for i in there], ordinals=[first + i for i in there])


def attended(start: int, stop: int, window: int | None) -> Range:
    """The positions of ``[start, stop)`` that the token at ``stop`` and later ones attend to: all, or a window's last.

    With a window of ``w`` tokens, a token at ``p`` attends to positions above ``p - w``.

    >>> attended(0, 100, 64), attended(50, 100, 64), attended(0, 100, None)
    ((37, 100), (50, 100), (0, 100))
    """
    start, stop = integer(start, "start of a range"), integer(stop, "stop of a range")
    window = None if window is None else integer(window, "window", low=1)
    return (start if window is None else min(max(start, stop - window + 1), stop), stop)
