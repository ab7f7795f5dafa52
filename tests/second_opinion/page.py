"""The page of the second opinion, `docs/second-opinion.md`, made of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Final

from tests.second_opinion.driver import Row, Tally
from tests.second_opinion.environment import PEERS, ROOT

PAGE: Final = ROOT / "docs" / "second-opinion.md"

TOP: Final = """# A second opinion

kvplan beside planners that others wrote and released, on pairs of engines that both accept. A peer's own functions
run as they were released, on the same arrays in memory that kvplan is told of, and say what they would copy. Both
plans are laid out byte by byte, as addresses read and addresses written, and compared. A judge that knows only what
each byte of the arrays means says who is right where they differ.

{versions}

    python -m tests.second_opinion.environment     # once: an environment of its own in .second_opinion
    python -m tests.second_opinion                 # this page; --every 20 for a quick look

No default run of tests starts this, and nothing of the peers is part of this repository.

| peer | pairs | refused by them | refused by us | compared | the same bytes from and to the same addresses \
| from another copy of the same bytes | different | descriptors: theirs, ours |
|---|---|---|---|---|---|---|---|---|
"""

NOTES: Final = """
{compared} pairs were compared. "From another copy" are those of which several source workers hold the same bytes and
the two plans read different ones of them; every byte is right in both. Of the {ours} pairs that kvplan planned, those
included that peers refuse, {wrong} had a byte wrong, missing, written twice or written beyond the request.

Descriptors are what each would post for the pairs of which both are right. vLLM's offloading connector copies twice,
into a page and out of it. Its NIXL connector posts a descriptor for each block and layer, which NIXL merges where they
are neighbours; where blocks differ in size and heads stand outside slots it posts fewer than kvplan, as it copies
slots to where they don't belong, and a kernel puts them in order afterwards. These requests have blocks in no order.
"""

DIFFERS: Final = """## What differs

Quoted is what `kvplan.verify` says first of the example, when it is given the peer's copies in place of its own."""

REMARKS: Final = {
    "_init_hetero_tp_prep_handle": "also where one size of TP divides the other, if the source has more ranks than "
    "heads and the destination more than it: `num_groups` becomes 0. Mooncake's manager plans these pairs right.",
    "a check of _validate_remote_agent_handshake": "the source has more ranks than heads, and than the destination.",
}
"""What a reason does not say."""


def text(tallies: Iterable[Tally]) -> str:
    """The whole page."""
    tallies = list(tallies)
    planned = sum(tally.pairs - _total(tally.refused_by_us.values()) for tally in tallies)
    wrong = sum(tally.we_are_wrong for tally in tallies)
    parts = [TOP.format(versions=_versions()) + "".join(_row(tally) for tally in tallies)]
    compared = sum(tally.compared for tally in tallies)
    parts.append(NOTES.format(compared=f"{compared:,}", ours=f"{planned:,}", wrong=f"{wrong:,}" if wrong else "none"))
    parts += [DIFFERS, *(line for tally in tallies for line in _differences(tally))]
    parts += [
        "",
        "## What peers refuse",
        "",
        "kvplan plans these pairs.",
        *(line for tally in tallies for line in _refusals(tally)),
    ]
    return "\n".join([*parts, HOW])


def _versions() -> str:
    names = ("numpy", "torch")
    installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    peers = " and ".join(f"{name} {version}" for name, version in PEERS.items())
    return f"Run on {datetime.date.today()} with {peers}; Python {platform.python_version()}, {installed}, on a CPU."


def _row(tally: Tally) -> str:
    theirs, ours = tally.posted
    counts = (
        tally.pairs, _total(tally.refused.values()), _total(tally.refused_by_us.values()), tally.compared, tally.same,
        tally.replica, tally.num_different,
    )  # fmt: skip
    cells = " | ".join(f"{count:,}" for count in counts)
    return f"| {tally.peer.name} | {cells} | {theirs:,}, {ours:,} |\n"


def _total(rows: Iterable[Row]) -> int:
    return sum(row.count for row in rows)


def _differences(tally: Tally) -> list[str]:
    lines = []
    for explanation, row in tally.differ.items():
        whose, why = (explanation.whose, explanation.text) if explanation else ("NOT EXPLAINED", "")
        lines += [f"- **{tally.peer.name}, {row.count:,} pairs: {whose}.** {why} Such as `{row.example}`"]
        lines += [f"  > {row.first}"]
    for code, row in tally.refused_by_us.items():
        lines += [f"- **{tally.peer.name}, {row.count:,} pairs: kvplan refuses, {code}.** Such as `{row.example}`"]
    return ["", *lines] if lines else []


def _refusals(tally: Tally) -> list[str]:
    rows = sorted(tally.refused.items(), key=lambda item: -item[1].count)
    lines = [f"- {row.count:,}: {_remarked(reason)}" for reason, row in rows]
    return ["", f"{tally.peer.name}:", "", *lines] if rows else []


def _remarked(reason: str) -> str:
    return "; ".join([reason, *(remark for start, remark in REMARKS.items() if reason.startswith(start))])


HOW: Final = """
## How it is run

| peer | its own code that runs | what is set by hand |
|---|---|---|
| vLLM offloading | `derive_canonical_mappings`, with the checks that it makes of itself | a configuration of sizes |
| vLLM NIXL (pull) | `NixlPullConnectorWorker`: its construction, `register_kv_caches`, `handshake_target_ranks`, \
`add_remote_agent`, `_read_blocks_for_req`, `get_transfer_results` | the agent, which notes what it is told; the \
platform; messages pass without a socket, and all engines count as compatible |
| SGLang Mooncake, SGLang NIXL | `try_ensure_parallel_info`, `_prepare_payload_xfer`, `send_kvcache`, \
`send_kvcache_slice`, `send_kvcache_dcp` | the agent or engine, which notes what it is told; a manager's attributes, \
without its processes and sockets; the choice between pages and slices, as in `transfer_worker` |

vLLM's blocks are put in order after a transfer where sizes differ: `get_transfer_results` does so, on addresses in
place of values. SGLang is asked without its staging buffers. Modules that the planners import and never call are
empty stand-ins, and calling one is an error. Requests are whole blocks, which is how most of these paths count;
kvplan is exact to the position. SGLang's MoRI manager is not run: its descriptors are objects of the `mori` package.

In examples an engine is the order of its cache, from the slowest dimension to the fastest (L layer, B block, K before
V, H head, N slot, D dim; LBND are latents), and all sizes but 1: heads of the model, TP, tokens of a block, ranks that
positions spread over (DCP, PCP) and the interleave.
"""
