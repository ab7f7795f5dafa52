"""Handoffs: what prefill tells decode about a request, in the request's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np

from kvplan._checks import instance, integer, interval, members, name, settle, wrong_type
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
    """A request that an engine has computed for others, which may read it while ``lease`` stands.

    ``num_tokens`` positions are computed, of the prompt that ``prompt`` is the
    :func:`~kvplan.connector.prompt_digest` of. ``blocks`` are those that are left, by group; positions before
    ``kept`` of a group are not, or not whole. :meth:`params` are plain values, for JSON; :meth:`of_params` reads them,
    which a stranger may have written.

    >>> source = Source("prefill", "a1", "10.0.0.1", 5600)
    >>> blocks = {"attn": Blocks([12, 5, 31]), "swa": Blocks([0, 7], null=0)}
    >>> handoff = Handoff(source, "request 1", 40, "8f2c", blocks, kept={"swa": 16})
    >>> handoff.params()["remote_block_ids"]
    {'attn': [0, [12, 5, 31]], 'swa': [1, [7]]}
    >>> Handoff.of_params(handoff.params()).blocks["swa"]
    Blocks([7], first=1)
    """

    source: Source
    lease: str
    num_tokens: int
    prompt: str
    blocks: Mapping[str, Blocks]
    kept: Mapping[str, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        instance(Source, self.source, "source of a handoff")
        settle(self, "a handoff", name, "lease", "prompt")
        settle(self, "a handoff", integer, "num_tokens", high=POSITION_END)
        members(
            Blocks,
            instance(Mapping, self.blocks, "blocks of a handoff").values(),
            "blocks of a handoff",
        )
        for group, position in instance(Mapping, self.kept, "kept of a handoff").items():
            integer(position, f"kept of group {group}", high=POSITION_END)

    def params(self) -> dict[str, Any]:
        """Return the handoff as plain values."""
        return {
            "remote_engine_id": self.source.engine_id,
            "remote_start": self.source.start,
            "remote_host": self.source.host,
            "remote_port": self.source.port,
            "remote_lease": self.lease,
            "remote_num_tokens": self.num_tokens,
            "remote_prompt": self.prompt,
            "remote_block_ids": {group: _listed(blocks) for group, blocks in self.blocks.items()},
            "remote_kept": dict(self.kept),
        }

    @classmethod
    def of_params(cls, params: Mapping[str, Any]) -> Handoff:
        """Read the handoff in a request's parameters, of which others are ignored. Raises ``KEY`` and others."""
        missing = sorted(PARAMS - instance(Mapping, params, "parameters of a request").keys())
        if missing:
            raise KVPlanError("KEY", "read a handoff", expected=f"a key {missing[0]!r}", got="none")
        tables = instance(Mapping, params["remote_block_ids"], "remote_block_ids")
        kept = instance(Mapping, params["remote_kept"], "remote_kept")
        return cls(
            Source(*(params[f"remote_{key}"] for key in ("engine_id", "start", "host", "port"))),
            params["remote_lease"],
            params["remote_num_tokens"],
            params["remote_prompt"],
            {name(group, "a group"): _blocks(listed) for group, listed in tables.items()},
            {name(group, "a group"): position for group, position in kept.items()},
        )

    def check_prompt(self, digest: str) -> None:
        """Refuse a request with another prompt than the one that was computed. Raises ``PROMPT``."""
        if name(digest, "digest of a prompt") != self.prompt:
            raise KVPlanError(
                "PROMPT",
                f"read {self.lease!r} from {self.source}",
                expected=f"the prompt that was computed, of digest {self.prompt}",
                got=f"one of digest {digest}",
                hint="a handoff serves one prompt, with one adapter, salt and set of images",
            )


PARAMS: Final = frozenset(Handoff(Source("-", "-", "-", 0), "-", 0, "-", {}).params())


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
        raise KVPlanError(
            "RANGE", "read a block table", expected=f"at most {MAX_BLOCKS} ids", got=f"{len(ids)}"
        )
    if -1 not in ids:
        return Blocks(ids, first)
    there = [i for i, block in enumerate(ids) if block != -1]
    first = integer(first, "first of a block table", high=POSITION_END)
    return Blocks([ids[i] for i in there], ordinals=[first + i for i in there])


@attrs.frozen
class WholeBlocks:
    """The positions of a group that a request reads, and the first one of which all its blocks are whole.

    A block that starts before ``first_whole`` was read in part, so no other request may find it in a prefix cache.
    """

    start: int
    stop: int
    first_whole: int


def whole_blocks(
    tokens: Range, attended: int, tokens_per_block: int, listed: int, kept: int
) -> WholeBlocks:
    """Choose the positions of ``tokens`` that a group reads, so that each block that it fills is whole.

    A prefix cache keeps blocks, not positions: of a block that was read from the middle it keeps bytes that nobody
    wrote, for a later request whose window reaches further back. So a group reads from the first block that it
    ``listed``, a position, also where its window begins later, at ``attended``. Where the source has ``kept`` less
    than that, the group reads what there is, and says from where blocks are whole. Raises ``BLOCKS`` where the source
    lacks positions that are attended to.

    >>> whole_blocks((0, 100), attended=37, tokens_per_block=32, listed=32, kept=32)
    WholeBlocks(start=32, stop=100, first_whole=32)
    >>> whole_blocks((0, 100), attended=70, tokens_per_block=64, listed=64, kept=68)
    WholeBlocks(start=68, stop=100, first_whole=128)
    """
    first, stop = interval(tokens, "tokens", POSITION_END)
    attended = integer(attended, "attended", high=POSITION_END)
    size = integer(tokens_per_block, "tokens_per_block", low=1, high=POSITION_END)
    begin = max(first, integer(listed, "listed", high=POSITION_END))
    kept = integer(kept, "kept", high=POSITION_END)
    needed = max(first, attended)
    if needed < min(kept, stop):
        raise KVPlanError(
            "BLOCKS",
            "read all positions that a window reaches",
            expected=f"positions from {needed} on",
            got=f"those from {kept} on",
        )
    start = min(max(begin, kept), stop)
    first_whole = start if start == begin else -(-start // size) * size
    return WholeBlocks(start, stop, first_whole)


def attended(start: int, stop: int, window: int | None) -> Range:
    """The positions of ``[start, stop)`` that the token at ``stop`` and later ones attend to: all, or a window's last.

    With a window of ``w`` tokens, a token at ``p`` attends to positions above ``p - w``.

    >>> attended(0, 100, 64), attended(50, 100, 64), attended(0, 100, None)
    ((37, 100), (50, 100), (0, 100))
    """
    start, stop = integer(start, "start of a range"), integer(stop, "stop of a range")
    window = None if window is None else integer(window, "window", low=1)
    return (start if window is None else min(max(start, stop - window + 1), stop), stop)
