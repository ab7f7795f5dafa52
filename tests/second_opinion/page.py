"""Generates the page of the second opinion, `docs/second-opinion.md`, from a run."""

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

Where kvplan's plans differ from those of released vLLM and SGLang, and which of them are right. The peers' own
functions run as released, on arrays at the addresses that kvplan's Workers describe. The test expands both plans to the
addresses of every byte that they read and write. Where they differ, a referee that knows only the meaning of each byte
decides.

{versions}

    python -m benchmarks.peers.environment         # once: makes a separate environment in .second_opinion
    python -m tests.second_opinion                 # writes this page; --every 20 for a quick look

The default test run does not include this, and the repository contains no code of the peers.

| peer | pairs | refused by them | refused by us | compared | same copies \
| another replica | different | descriptors: theirs, ours |
|---|---|---|---|---|---|---|---|---|
"""

NOTES: Final = """
- {compared} pairs were compared. kvplan planned {ours}, including those that peers refuse; {wrong} of them had a byte
  wrong, missing, written twice or written outside the request.
- *Same copies* read and write the same addresses. In *another replica*, several source workers hold the same bytes and
  the plans read different ones; both are right.
- *Descriptors* are those of the pairs that both plan right, with scattered blocks. vLLM's offloading connector copies
  twice, into a page and out of it. Its NIXL connector posts fewer than kvplan where block sizes differ and heads are
  outside slots: it copies slots to wrong places first, and a kernel rearranges them.
"""

DIFFERS: Final = """## What differs

Each quotation is the first line that `kvplan.verify` reports of the peer's copies in the example."""

REMARKS: Final = {
    "_init_hetero_tp_prep_handle": "this also happens if one TP size divides the other, when the source has more "
    "ranks than heads and the destination has more ranks than the source: `num_groups` becomes 0. Mooncake's manager "
    "plans these pairs right.",
    "a check of _validate_remote_agent_handshake": "the source has more ranks than heads and than the destination.",
}
"""What a peer's own message leaves out."""


def text(tallies: Iterable[Tally]) -> str:
    """The whole page."""
    tallies = list(tallies)
    planned = sum(tally.pairs - _total(tally.refused_by_us.values()) for tally in tallies)
    wrong = sum(tally.we_are_wrong for tally in tallies)
    parts = [TOP.format(versions=_versions()) + "".join(_row(tally) for tally in tallies)]
    compared = sum(tally.compared for tally in tallies)
    parts.append(NOTES.format(compared=f"{compared:,}", ours=f"{planned:,}", wrong=f"{wrong:,}" if wrong else "none"))
    told: set[str] = set()
    parts += [DIFFERS, *(line for tally in tallies for line in _differences(tally, told))]
    parts += [
        "",
        "## What peers refuse",
        "",
        "kvplan plans all of these pairs.",
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


def _differences(tally: Tally, told: set[str]) -> list[str]:
    """One item for each explanation, which is not told again of another peer."""
    lines = []
    for explanation, row in tally.differ.items():
        whose, why = (explanation.whose, explanation.text) if explanation else ("NOT EXPLAINED", "")
        head = f"- **{tally.peer.name}, {row.count:,} pairs: {whose}.**"
        if why in told:
            lines += [f"{head} As above."]
            continue
        told.update([why] if why else [])
        lines += [f"{head} {why} Such as `{row.example}`", f"  > {row.first}"]
    for code, row in tally.refused_by_us.items():
        lines += [f"- **{tally.peer.name}, {row.count:,} pairs: kvplan refuses, {code}.** Such as `{row.example}`"]
    return ["", *lines] if lines else []


def _refusals(tally: Tally) -> list[str]:
    rows = sorted(tally.refused.items(), key=lambda item: -item[1].count)
    lines = [f"- {row.count:,}: {remarked(reason)}" for reason, row in rows]
    return ["", f"{tally.peer.name}:", "", *lines] if rows else []


def remarked(reason: str) -> str:
    """A peer's message, with what it leaves out."""
    return "; ".join([reason, *(remark for start, remark in REMARKS.items() if reason.startswith(start))])


HOW: Final = """
## How it is run

| peer | its code that runs | what the tests replace |
|---|---|---|
| vLLM offloading | `derive_canonical_mappings`, with its own checks | the configuration, by sizes |
| vLLM NIXL (pull) | `NixlPullConnectorWorker`: its construction, `register_kv_caches`, `handshake_target_ranks`, \
`add_remote_agent`, `_read_blocks_for_req`, `get_transfer_results` | the agent, by one that records its calls; the \
platform; sockets, by direct calls; the compatibility check, which passes |
| SGLang Mooncake, SGLang NIXL | `try_ensure_parallel_info`, `_prepare_payload_xfer`, `send_kvcache`, \
`send_kvcache_slice`, `send_kvcache_dcp` | the agent or engine, by one that records its calls; the manager's \
processes and sockets; the choice between pages and slices, made as in `transfer_worker` |
| vLLM Mooncake | `register_kv_caches`, `handshake_target_ranks`, `_prepare_transfer_regions`, \
`_validate_asymmetric_region_lengths`, `_build_transfer_params` | the transfer engine; sockets and threads; \
the worker's construction |
| vLLM MoRI-IO (write) | `_write_tp_mapping`, `_prepare_transfer_plan` and all that they call | sessions; \
the worker's construction |
| Megatron-LM | `plan_kv_reshard` | addresses, which are no part of its plans: those of both arrays |

- If block sizes differ, vLLM rearranges blocks after a transfer; `get_transfer_results` does so here on addresses.
- SGLang runs without its staging buffers.
- The last three run on the cases of [the table of verdicts](verdicts.md) only.
- Modules that the planners import and do not call are empty stand-ins; calling one is an error.
- Requests are whole blocks, since most of these paths count in blocks.

The examples name an engine by the order of its cache, slowest dimension first (L layer, B block, K before V, H head, N
slot, D dim; LBND for latents), and by all sizes other than 1: heads, TP, tokens per block, the ranks that share
positions (DCP, PCP), and the interleave.
"""
