"""`python -m tests.second_opinion.verdicts`: runs planners on the cases of the conformance kit.

It writes the table, `docs/verdicts.md`. `--peer NAME --case NAME` runs one cell and prints all of it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

import attrs

from benchmarks.peers import environment
from benchmarks.peers.environment import ROOT, VERSIONS
from kvplan.testing.conformance import ConnectorContract, EngineMemory, PairCase, Rows, Verdict
from tests.second_opinion.page import remarked
from tests.second_opinion.peers import KVPLAN, NotRunError, Peer

PAGE: Final = ROOT / "docs" / "verdicts.md"

WRONG: Final = ("wrong", "repeated")

TOP: Final = """---
hide: [toc]
---

# Which planner is right

Each planner ran on the cases of the [conformance kit](how-to/debugging.md#test-a-whole-connector), with its own
functions as released ([how](second-opinion.md#how-it-is-run)), and [`verify`][kvplan.verify] checked every byte that it
copies.

- *repeated*: all bytes are right, and some are written more than once
- *refused*: the planner raises an error before it copies
- *not run*: the planner does not plan for what the case has

"""

REFUSED: Final = "The messages, with `#` for numbers; `--peer` and `--case`, as above, print that of one cell."

NOT_RUN: Final = """
Planners that were not run: LMCache's prefill-decode mode (the receiver allocates chunks, so there is no plan without
its transport); Mooncake's reshard planner for KV caches (not released: 0.3.13.post1 plans weights only); SGLang's MoRI
manager (needs the `mori` package); TensorRT-LLM and Dynamo (planned in C++, CUDA and Rust).
"""


@attrs.frozen
class PeerContract(ConnectorContract):
    """A planner as a connector of the kit."""

    peer: Peer

    @property
    def order(self) -> str:  # type: ignore[override]
        return self.peer.order

    def copies(self, case: PairCase, source: EngineMemory, destination: EngineMemory) -> Rows:
        found = self.peer.plan(case, source, destination)
        return zip(found.reads.tolist(), found.writes.tolist(), found.lengths.tolist(), strict=True)

    def verdict(self, case: PairCase) -> Verdict:
        try:
            verdict = super().verdict(case)
        except NotRunError as error:
            return Verdict("not run", str(error))
        why = re.sub(r", first: .*| \(as in .*", "", verdict.why.partition("\n")[0])
        is_repeated = verdict.word == "wrong" and verdict.why.startswith("DISJOINT") and "\n" not in verdict.why
        return Verdict("repeated" if is_repeated else verdict.word, why)


def page(peers: Iterable[Peer]) -> str:
    """The page: a table, and the first line of each verdict that is wrong with the command that repeats it."""
    verdicts = {peer: PeerContract(peer).verdicts() for peer in peers}
    cases = [*next(iter(verdicts.values()))]
    head = " | ".join(f"{peer.name} {VERSIONS.get(peer.package, '')}".strip() for peer in verdicts)
    rows = [f"| case | {head} |", "|---|" + "---|" * len(verdicts)]
    for case in cases:
        words = (found[case].word for found in verdicts.values())
        cells = " | ".join(f"**{word}**" if word in WRONG else word for word in words)
        rows.append(f"| {case} | {cells} |")
    lines = ["", "## What is wrong", ""]
    for peer, found in verdicts.items():
        for case, verdict in found.items():
            if verdict.word in WRONG:
                lines.append(f"- **{peer.name}, {case}**: `{verdict.why}`")
                lines.append(f"    - `python -m tests.second_opinion.verdicts --peer '{peer.name}' --case '{case}'`")
    lines += ["", "## What is refused", "", REFUSED, ""]
    for peer, found in verdicts.items():
        reasons = {re.sub(r"-?\d+", "#", each.why): None for each in found.values() if each.word == "refused"}
        if reasons:
            lines += [f"- {peer.name}:", *(f"    - {remarked(why)}" for why in reasons)]
    return TOP + "\n".join([*rows, *lines]) + "\n" + NOT_RUN


def main() -> int:
    """Run here, or with the interpreter of the environment."""
    parser = argparse.ArgumentParser(prog="python -m tests.second_opinion.verdicts", description="a table of planners")
    parser.add_argument("--peer")
    parser.add_argument("--case")
    given = parser.parse_args()
    if not environment.is_there():
        print("no planners here: `python -m benchmarks.peers.environment` makes their environment")
        return 0
    if not environment.PYTHON.parent.parent.samefile(sys.prefix):
        command = [str(environment.PYTHON), "-m", "tests.second_opinion.verdicts", *sys.argv[1:]]
        return subprocess.run(command, cwd=environment.ROOT).returncode
    from benchmarks.peers import loading
    from tests.second_opinion import megatron, sglang_send, vllm_mooncake, vllm_moriio, vllm_nixl, vllm_offloading

    loading.load()
    peers = (
        KVPLAN, vllm_nixl.PEER, vllm_moriio.PEER, vllm_mooncake.PEER, sglang_send.NIXL, sglang_send.MOONCAKE,
        vllm_offloading.PEER, megatron.PEER,
    )  # fmt: skip
    if given.peer:
        (peer,) = (peer for peer in peers if peer.name == given.peer)
        contract = PeerContract(peer)
        case = contract.cases()[given.case]
        print(case, ConnectorContract.verdict(contract, case), sep="\n")
        return 0
    PAGE.write_text(page(peers))
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
