"""Generates `docs/reference/models.md` from the families: `python -m tests.models.page` writes it.

What vLLM allocates for each family is in vllm_verdicts.json, which ``.ci/engines models`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kvplan.models import FAMILIES, REFUSED
from kvplan.models.caches import block_indexed, mla, sparse_mla
from kvplan.models.families import OUTER, Family
from kvplan.models.values import NUM_HEADS

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parent.parent / "docs" / "reference" / "models.md"
VERDICTS: Final = HERE / "vllm_verdicts.json"

Verdicts = Mapping[str, Sequence[tuple[str, str]]]
"""For each family, the result at TP 1, 2 and 3, and the reason; at TP 1 alone if that is not equal."""

TOP: Final = """# Model types

Find the `model_type` of a `config.json` on this page: kvplan reads it, reads it as another type, or refuses it with a
reason. [Use a model](../how-to/models.md#other-models) says what to do about a type that is not read, or not listed.

## Types that are read

Layers cache *K and V* of each head, *latents* for all heads (MLA), the keys of an *indexer*, or recurrent *states*;
*window* means that some or all layers may slide. The last column is [what vLLM 0.32
allocates](../how-to/models.md#what-vllm-allocates) for a tiny model of the type at TP 1, 2 and 3: *equal* to what
kvplan plans, or why there is no comparison.

| layers cache | `model_type` | vLLM |
|---|---|---|
"""

OUTSIDE: Final = """
## Read as another type

These files are read as the type on the left, or have a decoder of that type under a key such as `text_config`. If the
decoder states a `model_type`, that one counts.

| read as | `model_type` of the file |
|---|---|
"""

NOT_READ: Final = """
## Types that are not read

| reason | `model_type` |
|---|---|
"""


def verdicts() -> Verdicts:
    """Return what the judge has written."""
    found: Verdicts = json.loads(VERDICTS.read_text())
    return found


def write_verdicts(by_family: Verdicts) -> None:
    """Write what the judge has found: one family a line."""
    rows = (f"{json.dumps(name)}: {json.dumps(results)}" for name, results in sorted(by_family.items()))
    VERDICTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def page() -> str:
    """Return the text of the page."""
    judged = verdicts()
    read = _grouped(((_caches(model), _says(judged[model])), model) for model in judged)
    outer = _grouped(((_code(inner),), model_type) for model_type, inner in OUTER.items())
    refused = _grouped(((reason,), model_type) for model_type, reason in REFUSED.items())
    return "".join((TOP, *read, OUTSIDE, *outer, NOT_READ, *refused))


def _grouped(rows: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[str]:
    """Return one row of a table for all models of which it says the same, in order; the second cell lists them."""
    models: dict[tuple[str, ...], list[str]] = {}
    for texts, model in sorted(rows):
        models.setdefault(texts, []).append(_code(model))
    return (f"| {' | '.join((first, ', '.join(listed), *rest))} |\n" for (first, *rest), listed in models.items())


def _code(model: str) -> str:
    """Return a model type as code, with its architecture if it has several."""
    model_type, _, architecture = model.partition("/")
    return f"`{model_type}` ({architecture})" if architecture else f"`{model_type}`"


def _caches(model: str) -> str:
    """Return what the layers of a family cache, in words."""
    family = FAMILIES[model.partition("/")[0]]
    words = _attention(family)
    if family.state is not None:
        words.append("states")
    return ", ".join(words)


def _attention(family: Family) -> list[str]:
    if family.state is not None and not {*family.defaults} & {*NUM_HEADS[:1], "num_key_value_heads"}:
        return []
    words = ["latents" if family.attention in (mla, sparse_mla) else "K and V"]
    if family.attention in (sparse_mla, block_indexed):
        words.append("indexer")
    if any("window" in key or key == "attention_chunk_size" for key in family.defaults):
        words.append("window")
    return words


def _says(results: Sequence[tuple[str, str]]) -> str:
    """Return the results at each size of TP, those that are equal first."""
    equal = [str(ranks) for ranks, (result, _) in enumerate(results, 1) if result == "equal"]
    if len(equal) == len(results):
        return "equal"
    words = [f"equal at TP {', '.join(equal)}"] if equal else []
    for ranks, (result, reason) in enumerate(results, 1):
        if result != "equal":
            at = f" at TP {ranks}" if equal else ""
            words.append(f"{result}{at}: {reason}")
    return "; ".join(words)


if __name__ == "__main__":
    PAGE.write_text(page())
