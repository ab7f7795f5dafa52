"""Why plans differ. Each explanation holds for the differences of its rule alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from kvplan.testing.conformance import PairCase
from tests.second_opinion.copies import Finding


@attrs.frozen
class Explanation:
    """The cause of differences with some peers, and whose fault they are. ``holds`` is its rule."""

    peers: tuple[str, ...]
    whose: str
    text: str
    holds: Callable[[PairCase, Finding], bool]


def _divide(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _no_multiple(pair: PairCase, finding: Finding) -> bool:
    return not _divide(pair.source.tp, pair.destination.tp)


def _replicas_send(pair: PairCase, finding: Finding) -> bool:
    sends_again = pair.source.has_heads and pair.source.tp > max(pair.source.heads, pair.destination.tp)
    return sends_again and not (finding.wrong or finding.missing or finding.foreign)


def _blocks_and_contexts(pair: PairCase, finding: Finding) -> bool:
    spread = max(pair.source.contexts, pair.destination.contexts) > 1
    return spread and pair.source.tokens != pair.destination.tokens


SGLANG: Final = ("SGLang Mooncake", "SGLang NIXL")

EXPLANATIONS: Final = (
    Explanation(
        SGLANG,
        "theirs, right bytes more often than needed",
        "The source has more ranks than heads. Every rank with a copy of a head sends it, so the same bytes are "
        "written once for each copy. kvplan reads one copy.",
        _replicas_send,
    ),
    Explanation(
        SGLANG,
        "theirs, wrong bytes",
        "Neither TP size is a multiple of the other. `_resolve_rank_mapping` divides them and drops the remainder, and "
        "`compute_head_slice_params` takes heads modulo those of a rank, so slices go to wrong ranks and slots.",
        _no_multiple,
    ),
    Explanation(
        ("vLLM NIXL (pull)",),
        "theirs, wrong bytes",
        "Ranks share the positions of latents (DCP) on one side or both, and blocks differ in size. "
        "`_apply_dcp_prefix_caching` pairs blocks by ordinal before `_map_block_ids_for_block_size_ratio` accounts for "
        "their different numbers of positions. No check that runs here refuses these pairs.",
        _blocks_and_contexts,
    ),
)


def explain(peer: str, pair: PairCase, finding: Finding) -> Explanation | None:
    """The first explanation that holds, or None."""
    return next((one for one in EXPLANATIONS if peer in one.peers and one.holds(pair, finding)), None)
