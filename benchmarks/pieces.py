"""How long the pieces on the wire are: for pairs of engines as their connectors ask for them, by strategy. Counted.

    python -m benchmarks.pieces                     # a minute on an idle core
    python -m benchmarks.pieces --model llama-3.1-8b --tokens 1024

Each row is what rank 0 of decode reads for a request whose blocks are scattered. *Direct* pieces are put where they
belong at once. *Staged* ones are read into a buffer and put in order there, and *whole* ones bring all heads of a block
where some are needed. Each cell has the number of pieces, their mean length, and how many times the bytes that are
needed move. In brackets is the share of bytes in pieces below 32 KiB.

A source that packs would send what is needed in one piece for each chunk. The last column is the least that the other
three take, in times of that: a piece is taken to cost as much as 32 KiB more, 0.7 µs at 50 GB/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from kvplan import KVPlanError, Model, Region, Worker
from kvplan.models.engines import engine_named, with_defaults
from kvplan.models.options import EngineOptions
from kvplan.plan import Cost
from kvplan.staging import choose
from kvplan.staging.choice import STRATEGIES
from kvplan.staging.cost import StagedCost

PIECE_BYTES: Final = 32 << 10
STAGING_BYTES: Final = 1 << 30

MODELS: Final = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-235b-a22b",
    "deepseek-v3",
    "deepseek-v3.2",
    "gemma-3-27b",
    "gpt-oss-120b",
    "granite-4.0-h-tiny",
    "qwen3-next-80b",
)

ENGINES: Final[Mapping[str, tuple[str, str]]] = {
    "vLLM": ("vllm", "vllm"),
    "vLLM 16 to 64": ("vllm,block=16", "vllm,block=64"),
    "vLLM, blocks of 64": ("vllm,block=64", "vllm,block=64"),
    "vLLM, LBHNC": ("vllm,layout=LBHNC", "vllm,layout=LBHNC"),
    "vLLM, LBNHC": ("vllm,layout=LBNHC", "vllm,layout=LBNHC"),
    "vLLM, BHLNC on prefill": ("vllm,layout=BHLNC", "vllm"),
    "vLLM 16 to 64, BHLNC on prefill": ("vllm,block=16,layout=BHLNC", "vllm,block=64"),
    "vLLM, BHLNC": ("vllm,layout=BHLNC", "vllm,layout=BHLNC"),
    "SGLang, pages of 64": ("sglang,block=64", "sglang,block=64"),
    "SGLang, pages of 64, HND on prefill": ("sglang,block=64,layout=LBHNC", "sglang,block=64"),
    "vLLM to SGLang": ("vllm", "sglang,block=64"),
    "vLLM to SGLang, BHLNC on prefill": ("vllm,layout=BHLNC", "sglang,block=64"),
}

TP: Final = ((1, 1), (1, 2), (2, 1), (4, 8), (8, 4), (1, 8))


@attrs.frozen
class Pieces:
    """What moves by one strategy, where ``needed_bytes`` are needed."""

    moved: Cost
    needed_bytes: int

    @property
    def mean_bytes(self) -> float:
        return self.moved.num_bytes / self.moved.num_descriptors

    @property
    def taken(self) -> float:
        """What it takes, in times of what a packing source sends."""
        taken_bytes = self.moved.num_bytes + PIECE_BYTES * self.moved.num_descriptors
        return taken_bytes / (self.needed_bytes + PIECE_BYTES)

    def __str__(self) -> str:
        num_bytes = self.moved.num_bytes
        short = sum(length * number for length, number in self.moved.lengths.items() if length < PIECE_BYTES)
        mean = f"{round(self.mean_bytes / 1024, 1):,g} KiB"
        more = f", {num_bytes / self.needed_bytes:.3g}x" if num_bytes > self.needed_bytes else ""
        share = f" ({short / num_bytes:.0%})" if short else ""
        return f"{self.moved.num_descriptors:,} of {mean}{more}{share}"


def workers(model: Model, side: str, tp: int, engine_id: str) -> tuple[Worker, ...]:
    """An engine of a model with its defaults."""
    engine, keys = engine_named(f"{side},tp={tp}")
    assert engine is not None
    options = EngineOptions.parse(with_defaults(model, engine, keys), "a side")
    made: tuple[Worker, ...] = options.engine(model, engine_id)
    return made


def pieces(model: Model, sides: tuple[str, str], tp: tuple[int, int], tokens: int) -> Iterator[Pieces | None]:
    """What moves by each strategy; None where it is not possible."""
    sources = workers(model, sides[0], tp[0], "prefill")
    local = workers(model, sides[1], tp[1], "decode")[0]
    local = attrs.evolve(local, regions=(*local.regions, Region("staging", 1 << 60, STAGING_BYTES)))
    plans = {
        option.strategy: option.plan for option in choose(local, sources, tokens=tokens, staging="staging").options
    }
    needed = None
    for strategy in STRATEGIES:
        plan = plans.get(strategy)
        if plan is None:
            yield None
            continue
        cost = plan.cost(tokens)
        moved = cost.transfers if isinstance(cost, StagedCost) else cost
        needed = moved.num_bytes if needed is None else needed
        yield Pieces(moved, needed)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pieces")
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=ENGINES)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    summary: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    print("| engines | model | TP | direct | staged | whole | least, times packed |\n|---|---|---|---|---|---|---:|")
    for name in options.engines:
        for model_name in options.model:
            for tp in TP:
                try:
                    found = list(pieces(Model.shipped(model_name), ENGINES[name], tp, options.tokens))
                except KVPlanError as error:
                    cells = [error.code, "", "", ""]
                else:
                    cells = ["-" if each is None else f"{each}" for each in found]
                    least = min(each.taken for each in found if each is not None)
                    cells.append(f"{least:.2f}")
                    are_short = all(each is None or each.mean_bytes < PIECE_BYTES for each in found)
                    ranks = "more ranks" if tp[1] > tp[0] else "as many ranks or fewer"
                    summary.setdefault((name, ranks), []).append((are_short, least))
                print(f"| {name} | {model_name} | {tp[0]} to {tp[1]} | {' | '.join(cells)} |", flush=True)
    print("\n| engines | decode has | cases | pieces are below 32 KiB by all ways | least, times packed |")
    print("|---|---|---:|---:|---:|")
    for (name, ranks), rows in summary.items():
        num_short = sum(are_short for are_short, _ in rows)
        mean = statistics.mean(least for _, least in rows)
        print(f"| {name} | {ranks} | {len(rows)} | {num_short} | {mean:.2f} |")


if __name__ == "__main__":
    main()
