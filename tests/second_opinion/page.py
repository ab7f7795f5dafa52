"""The page of the second opinion, `docs/second-opinion.md`, made of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Final

from benchmarks.peers.environment import PEERS, ROOT
from tests.second_opinion.driver import Row, Tally

PAGE: Final = ROOT / "docs" / "second-opinion.md"

TOP: Final = """# A second opinion

kvplan compared with the planners of vLLM and SGLang, on pairs of engines that both accept. A peer's functions run as
released, on the same arrays in memory that kvplan plans for, and give the copies that they would make. Both plans are
expanded to addresses read and written, byte by byte, and compared. Where they differ, an oracle that knows only the
meaning of each byte (`property_tests/oracle.py`) decides which is right.

{versions}

    python -m benchmarks.peers.environment     # once: a virtual environment in .second_opinion
    python -m tests.second_opinion             # this page; --every 20 for a quick look

The default test run does not include this, and the repository contains no code of the peers.

| peer | pairs | refused by them | refused by us | compared | the same bytes from and to the same addresses \
| from another copy of the same bytes | different | descriptors: theirs, ours |
|---|---|---|---|---|---|---|---|---|
"""

NOTES: Final = """
{compared} pairs were compared. "From another copy" means that several source workers hold the same bytes, and that the
two plans read different ones of these workers; every byte is right in both. kvplan planned {ours} pairs, including
those that peers refuse, and {wrong} of them had a byte wrong, missing, written twice or written beyond the request.

The descriptors are those that each planner would post, for the pairs that both plan right. vLLM's offloading connector
copies twice, into a page and out of it. vLLM's NIXL connector posts a descriptor for each block and layer, and NIXL
merges contiguous ones. Where blocks differ in size and heads are outside slots, it posts fewer descriptors than kvplan:
it copies slots to the wrong places, and a kernel reorders them afterwards. All requests have scattered blocks.
"""

DIFFERS: Final = """## What differs

Each quote is the first failure that `kvplan.verify` reports for the peer's copies of the example."""

REMARKS: Final = {
    "_init_hetero_tp_prep_handle": "also where one size of TP divides the other, if the source has more ranks than "
    "heads and the destination more than it: `num_groups` becomes 0. Mooncake's manager plans these pairs correctly.",
    "a check of _validate_remote_agent_handshake": "the source has more ranks than heads, and than the destination.",
}
"""Remarks on reasons that peers give."""


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
| vLLM offloading | `derive_canonical_mappings` and its own checks | a configuration of sizes |
| vLLM NIXL (pull) | `NixlPullConnectorWorker`: its construction, `register_kv_caches`, `handshake_target_ranks`, \
`add_remote_agent`, `_read_blocks_for_req`, `get_transfer_results` | a recording agent; the \
platform; handshakes without sockets, and all engines count as compatible |
| SGLang Mooncake, SGLang NIXL | `try_ensure_parallel_info`, `_prepare_payload_xfer`, `send_kvcache`, \
`send_kvcache_slice`, `send_kvcache_dcp` | a recording agent or engine; a manager's attributes, \
without its processes and sockets; the choice between pages and slices, as in `transfer_worker` |

Where block sizes differ, vLLM reorders slots after a transfer; `get_transfer_results` does so here on addresses in
place of values. SGLang runs without its staging buffers. Modules that the planners import but never call are empty
stand-ins, and calling one is an error. Requests are whole blocks, because most peers count in blocks; kvplan is exact
to the position. SGLang's MoRI manager does not run here, because its descriptors are objects of the `mori` package.

An example names an engine by the order of its cache, from the slowest dimension to the fastest (L layer, B block, K
before V, H head, N slot, D dim; LBND are latents), and by all sizes except 1: heads of the model, TP, tokens of a
block, context-parallel ranks (DCP, PCP) and the interleave.
"""
