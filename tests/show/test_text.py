"""explain: short, true, and equal layers told once."""

from __future__ import annotations

import pytest

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    PeerError,
    Region,
    View,
    Worker,
    decode,
    plan_mesh,
    plan_reads,
    plan_writes,
)
from kvplan._text import size
from kvplan.models.model import Model
from kvplan.show.text import explain
from kvplan.staging import stage, stage_writes
from tests.small import engine
from tests.staged import with_staging

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODEL = Model.from_config(CONFIG)
PREFILL = MODEL.engine("prefill", tp=4, num_blocks=8)
DECODE = MODEL.engine("decode", tp=2, num_blocks=8)


def test_a_worker_tells_equal_layers_once() -> None:
    """A worker has a line for each group, and one for all regions and views of one geometry."""
    lines = explain(PREFILL[1]).splitlines()
    assert lines[0] == str(PREFILL[1])
    assert lines[1] == "  group attn: 16 tokens a block"
    assert sum("region" in line for line in lines[1:]) == 1
    assert [line for line in lines if "view" in line][1].startswith("  views layers.0-2.attn in group attn: bfloat16, ")
    assert "    head [0, 1) of 2 step 0" in lines


def test_views_that_differ_are_told_apart() -> None:
    """K and V in views of their own are two lines of views."""
    split = MODEL.engine("split", kv="split", num_blocks=8)[0]
    assert explain(split).count("views layers.0-2.attn in group attn") == 2


def test_a_read_plan_lists_the_workers_that_it_reads_from() -> None:
    """A plan names the remote workers that move bytes, and no others."""
    lines = explain(plan_reads(DECODE[1], PREFILL)).splitlines()
    assert lines[0] == "decode/1 reads from 1 of 4 workers"
    assert all(line.startswith("  <- prefill/") for line in lines[1:])
    assert not any("prefill/0" in line or "prefill/1" in line for line in lines)


def test_a_write_plan_points_the_other_way() -> None:
    """A plan that writes says so."""
    lines = explain(plan_writes(PREFILL[0], DECODE, PREFILL[1:])).splitlines()
    assert lines[0] == "prefill/0 writes to 1 of 2 workers"
    assert all(line.startswith("  -> decode/") for line in lines[1:])


def test_a_mesh_counts_completions() -> None:
    """A mesh tells each plan, and how many completions each source awaits."""
    mesh = plan_mesh(DECODE, PREFILL)
    text = explain(mesh)
    assert text.startswith("2 plans of 6 workers\n  decode/0 reads from 1 of 4 workers\n")
    awaited = sum(len(each.awaits) for each in mesh.completions.values())
    moving = sum(bool(len(pair.local_table.rows)) for plan in mesh.plans for pair in plan.pairs)
    assert awaited == moving
    assert text.count(" <- ") == moving


def test_completions_are_those_of_each_worker() -> None:
    """Of several workers that await as many, the line says that each does; of one, that it does."""
    text = explain(plan_mesh(DECODE, PREFILL))
    assert text.endswith("\n  prefill/0,3: each awaits 1 completion\n  prefill/1-2: each awaits 0 completions")
    alone = MODEL.engine("alone", num_blocks=8)
    assert explain(plan_mesh(DECODE, alone)).endswith("\n  alone/0 awaits 2 completions")


def test_a_spec_tells_what_moves() -> None:
    """A spec tells bytes, descriptors and their lengths; one that moves nothing says so."""
    blocks = {"attn": Blocks([3, 5])}
    specs = plan_reads(DECODE[0], PREFILL).bind(local=blocks, remote=blocks, tokens=(0, 20))
    texts = [explain(spec) for spec in specs]
    moving = [(spec, text) for spec, text in zip(specs, texts, strict=True) if spec.num_bytes]
    assert moving
    for spec, text in moving:
        assert text.startswith(f"decode/0 <- {spec.remote[0]}/{spec.remote[1]}: {size(spec.num_bytes)} in ")
        assert f" {spec.num_descriptors} descriptors of " in text
    assert "decode/0 <- prefill/3: nothing" in texts


@pytest.mark.parametrize(
    "value, text",
    [
        (Axis("head", 4, 8, 8, 4096), "axis head [4, 8) of 8 step 4096"),
        (Region("kv", 4096, 512), "region kv: 512 bytes at 0x1000, DRAM 0"),
        (Group("state"), "group state: one state a block"),
        (Group("attn", 1), "group attn: 1 token a block"),
        (Context(), "context: one worker"),
        (Context(1, 2), "context: worker 1 of 2 in turns of 1 position"),
        (Blocks([4, 9], first=3), "blocks [3, 5) of a request: ids 4, 9"),
        (Blocks(range(100)), "blocks [0, 100) of a request: ids 0, 1, 2, 3, 4, 5, 6, 7, ... 99"),
        (Blocks([9, 5], ordinals=[30, 10]), "2 of blocks [10, 31) of a request: ids 5, 9"),
        (Blocks([]), "blocks [0, 0) of a request: ids none"),
        (KVPlanError("INT", "count", expected="1", got="2"), "INT: cannot count: expected 1, got 2"),
        (
            View("k", "attn", "kv", "uint8", [Axis("token", 0, 4, 4, 1)], 1, 0),
            "view k in group attn: uint8, 4 bytes in each of 1 block, step 0\n  token [0, 4) of 4 step 1",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_small_value_is_a_line(value: object, text: str) -> None:
    """Each value class has a short form."""
    assert explain(value) == text


def test_tables_and_pairs_tell_their_rows() -> None:
    """A pair tells whom it is with, and both sides' rows are counted by length."""
    pair = plan_reads(DECODE[0], PREFILL).pairs[0]
    assert explain(pair).startswith("pair with prefill/0: ")
    assert explain(pair.local_table).startswith(f"table: {pair.local_table.num_ids} ids in ")


def test_other_values_are_refused() -> None:
    """What is no value of kvplan is refused by its type."""
    with pytest.raises(KVPlanError, match="TYPE: cannot explain a value: expected a value of kvplan, got dict"):
        explain({})


def test_an_unknown_detail_is_refused() -> None:
    """How much is told is one of three words."""
    with pytest.raises(
        KVPlanError, match="NAME: cannot explain a value: expected detail in line, workers, rows, got 3"
    ):
        explain(MODEL, detail=3)  # type: ignore[arg-type]


def test_rows_of_many_lengths_are_one_list() -> None:
    """Rows of three lengths and more stand in one list, the longest first."""
    made = Model.shipped("granite-4.0-h-tiny")
    plan = plan_reads(made.engine("d", tp=2, num_blocks=8)[0], made.engine("s", tp=4, num_blocks=8))
    first = explain(plan).splitlines()[1]
    assert first.endswith("36 local rows of 385.5 KiB, 4 of 8192 bytes, 36 of 4608 bytes and 4 of 512 bytes")


def test_a_refused_message_is_told_with_all_its_problems() -> None:
    """The first problem of a peer's message is the line, all of them stand below."""
    with pytest.raises(PeerError) as caught:
        decode(b'{"kvplan": 1, "engine_id": "", "rank": true}')
    title, *others = explain(caught.value).splitlines()
    assert (title, explain(caught.value, detail="line")) == (str(caught.value)[: len(title)], title)
    assert others[-2:] == [
        "  engine_id: NAME: cannot read engine_id: expected a non-empty string of printable characters, got ''",
        "  rank: TYPE: cannot read rank: expected an integer, got True",
    ]


def test_a_worker_without_views_is_explained() -> None:
    """A worker that keeps nothing is a line."""
    assert explain(Worker("e", 0, [], [], [])) == "e/0: 0 views of 0 tensors in 0 regions, 0 groups"


def test_a_staged_plan_says_what_one_leg_takes_and_what_two_do() -> None:
    """Descriptors and bytes between workers, copies, chunks, staging memory and, where there is any, excess."""
    (decode, _), (prefill,) = (engine(name, tp, order=order) for name, tp, order in (("d", 2, "NH"), ("p", 1, "HN")))
    assert explain(stage_writes(with_staging(prefill), [decode], staging="staging")) == (
        "p/0 writes to 1 of 1 worker in two legs: 8192 positions at a time\n"
        "  4 tokens directly: 256 bytes in 16 descriptors of 16 bytes\n"
        "  4 tokens staged: 256 bytes in 2 descriptors of 128 bytes\n"
        "    at most 2 local copies in 1 chunk, 1048576 bytes of staging memory"
    )
    plan = stage(with_staging(decode), [prefill], staging="staging", whole=True)
    assert explain(plan).splitlines()[2:] == [
        "  4 tokens staged: 512 bytes in 2 descriptors of 256 bytes",
        "    at most 2 local copies in 1 chunk, 1048576 bytes of staging memory",
        "    read amplification: 2 bytes read for each byte needed",
    ]
    assert explain(plan, detail="line") == "d/0 reads from 1 of 1 worker in two legs: 4096 positions at a time"


def test_what_staged_plans_are_made_of_is_told_in_a_line() -> None:
    """Outlays as they print; chunks and copies in a line."""
    (decode,), (prefill,) = engine("d", order="NH"), engine("p")
    plan = stage(with_staging(decode), [prefill], staging="staging")
    assert explain(plan.cost(8)) == str(plan.cost(8))
    assert explain(plan.cost(8), detail="line") == "8 tokens staged: 1024 bytes in 4 descriptors of 256 bytes"
    blocks = {"attn": Blocks([4])}
    (chunk,) = plan.bind(local=blocks, remote=blocks)
    assert explain(chunk) == "chunk of attn [0, 4): 512 bytes read, 512 bytes put in order"
    assert explain(chunk.copies[0]) == "copy kv.0-1 <- staging: 2 times 1 box of 4 x 4 x 16 bytes"
