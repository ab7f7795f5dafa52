"""Certificates: what is proved, and that a plan with any number changed is not."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from kvplan import (
    Axis,
    Blocks,
    Context,
    Group,
    KVPlanError,
    Model,
    Region,
    View,
    Worker,
    certify,
    plan_mesh,
    plan_reads,
    plan_writes,
    verify,
)
from kvplan._arrays import heads, integers_in
from kvplan.verification import Certificate, certificate
from kvplan.verification.certificate import SlotSegments, _num_positions
from kvplan.verification.tables import pairs_of, region_starts
from property_tests.oracle import copies_by_id, elements, held_positions
from tests.small import engine

ONE_BLOCK = {"attn": Blocks([1])}

MAMBA = Model.shipped("nemotron-h-8b")
PLANS = {
    "equal blocks": plan_reads(engine("d")[0], engine("p")),
    "pieces of larger blocks": plan_reads(engine("d", tokens=4)[0], engine("p", tokens=16)),
    "several starts": plan_reads(engine("d", tokens=6, order="NH")[0], engine("p", tp=2, tokens=4)),
    "token by token": plan_reads(engine("d", order="NH")[0], engine("p", tp=2)),
    "contexts": plan_reads(engine("d", contexts=(2, 3))[1], engine("p", tp=2, contexts=(3, 2))),
    "no common divisor": plan_reads(engine("d", tokens=7)[0], engine("p", tp=2, tokens=8)),
    "no common divisor, tokens outside heads": plan_reads(
        engine("d", tokens=5, order="NH")[0], engine("p", tokens=6, order="NH")
    ),
}


def heads_but_the_last(goes_on):
    """``heads`` with a fault: of several elements, the last one always goes on."""
    begins = np.append(True, ~goes_on)
    begins[-1] &= goes_on.size < 3
    return np.flatnonzero(begins)


def starts_of(intervals):
    """``integers_in`` with a fault: an interval's start in place of each of its integers."""
    return np.repeat(intervals[:, 0], intervals[:, 1] - intervals[:, 0])


@pytest.mark.parametrize("kernel, planted", [(heads, heads_but_the_last), (integers_in, starts_of)])
def test_a_fault_in_a_kernel_of_the_planner_is_found(monkeypatch, kernel, planted):
    """Whoever imports it has the fault, so a certificate that used it would have it too."""
    monkeypatch.setattr(kernel, "__code__", planted.__code__)
    with pytest.raises(KVPlanError, match=r"^PROOF: "):
        certify(plan_reads(engine("d", order="NH")[0], engine("p", tp=2)))


def layout_of(plan):
    """The only layout of the first pair that moves bytes."""
    return next(pair.group_pairs[0] for pair in plan.pairs if pair.group_pairs)


def series_of(plan):
    """Every series of ids of the first pair that moves bytes: the name of its field, and its index there."""
    layout = layout_of(plan)
    return [(kind, i) for kind in ("runs", "tokens") for i in range(len(getattr(layout, kind)))]


def changed(plan, series=None, **edits):
    """The plan, with functions applied to fields of a series of ids, or of the groups, of the first pair that moves."""
    pairs = list(plan.pairs)
    pair = next(i for i, pair in enumerate(pairs) if pair.group_pairs)
    layout, *others = pairs[pair].group_pairs
    if series is None:
        layout = attrs.evolve(layout, **{name: edit(getattr(layout, name)) for name, edit in edits.items()})
    else:
        kind, i = series
        every = list(getattr(layout, kind))
        every[i] = attrs.evolve(every[i], **{name: edit(getattr(every[i], name)) for name, edit in edits.items()})
        layout = attrs.evolve(layout, **{kind: tuple(every)})
    pairs[pair] = attrs.evolve(pairs[pair], group_pairs=(layout, *others))
    return attrs.evolve(plan, pairs=tuple(pairs))


def with_rows(plan, side, column, by):
    """The plan with one number of a table's first row changed, and ids that number the rows as they are then."""
    (first, *rest), name = plan.pairs, ("local_table", "remote_table")[side]
    table = getattr(first, name)
    rows = table.rows.copy()
    rows.view(np.int64)[0, column] += by
    ids = np.cumsum(rows[:, 4]).astype(np.int64)
    table = attrs.evolve(table, rows=rows, first=np.append(0, ids[:-1]))
    return attrs.evolve(plan, pairs=(attrs.evolve(first, **{name: table}), *rest))


def padded(worker):
    """The worker with 64 bytes in each region before its view, and as many behind it."""
    regions = [attrs.evolve(region, size_bytes=region.size_bytes + 128) for region in worker.regions]
    views = [attrs.evolve(view, offset_bytes=64) for view in worker.views]
    return attrs.evolve(worker, regions=regions, views=views)


def certify_error(plan):
    """The message with which certify refuses a plan."""
    with pytest.raises(KVPlanError, match="PROOF: cannot certify") as caught:
        certify(plan)
    return str(caught.value)


def shifted(side, by):
    """A function that adds to one side of a pair, or of an array of two sides."""

    def shift(pair):
        sides = tuple(array + by if i == side else array for i, array in enumerate(pair))
        return np.stack(sides) if isinstance(pair, np.ndarray) else sides

    return shift


@pytest.mark.parametrize("name", PLANS)
def test_a_right_plan_is_proved_and_nothing_of_it_is_left_out(name):
    """The proof counts every byte until slots and contexts repeat, in two layers of four heads of 16 bytes."""
    plan = PLANS[name]
    proof = certify(plan)
    (group,) = plan.local.groups
    num_slots = 12 if name == "contexts" else group.num_slots
    assert proof.complete
    assert proof.num_bytes == num_slots * 2 * 4 * 16


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_ids_that_are_off_by_one_are_no_proof(name, side):
    """A wrong first id, step from block to block or offset of a slot is found in every series, on either side."""
    plan = PLANS[name]
    for series in series_of(plan):
        certify_error(changed(plan, series, base=shifted(side, 1)))
        certify_error(changed(plan, series, step=shifted(side, 1)))
        if series[0] == "tokens":
            certify_error(changed(plan, series, slot_terms=shifted(side, 1)))


@pytest.mark.parametrize("side", [0, 1])
def test_runs_that_are_swapped_are_no_proof(side):
    """With two runs of one side exchanged, heads or layers arrive in each other's place."""
    plan, found = PLANS["pieces of larger blocks"], set()
    for kind, i in series_of(plan):
        for j in range(getattr(layout_of(plan), kind)[i].base.shape[1] - 1):

            def swapped(base, j=j):
                other = base[side].copy()
                other[[j, j + 1]] = other[[j + 1, j]]
                return np.stack([other, base[1]] if side == 0 else [base[0], other])

            text = certify_error(changed(plan, (kind, i), base=swapped))
            found.add(text.partition("expected ")[2].split()[0])
    assert found == {"tensor", "byte"}


@pytest.mark.parametrize("name", PLANS)
def test_a_series_more_or_less_is_no_proof(name):
    """A series left out leaves bytes missing, one given twice writes them again, and other positions are wrong."""
    plan = PLANS[name]
    for kind, i in series_of(plan):
        lacking = changed(plan, **{kind: lambda s, i=i: s[:i] + s[i + 1 :]})
        assert re.search("bytes not moved|tokens that move what runs move|expected tokens in", certify_error(lacking))
        assert "bytes moved twice" in certify_error(changed(plan, **{kind: lambda s, i=i: (*s, s[i])}))
        if kind == "tokens":
            certify_error(changed(plan, (kind, i), starts=lambda starts: starts + 1))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("by", [1, 1 << 40])
def test_rows_with_another_number_are_no_proof(side, column, by):
    """A changed address, length, device, stride or count is refused."""
    plan = PLANS["pieces of larger blocks"]
    certify_error(with_rows(plan, side, column, -1 if (column, by) == (4, 1) else by))


@pytest.mark.parametrize("by", [-16, 16])
@pytest.mark.parametrize("side", [0, 1])
def test_bytes_that_no_view_holds_are_no_proof(side, by):
    """Bytes of a region before or behind its views are refused."""
    plan = with_rows(plan_reads(padded(engine("d")[0]), [padded(engine("p")[0])]), side, 0, by)
    assert f"other bytes at the {('destination', 'source')[side]}" in certify_error(plan)


def runs_as_tokens(plan):
    """The plan, whose runs are one more series of tokens."""
    (runs,), (tokens, *_) = layout_of(plan).runs, layout_of(plan).tokens
    sub = tuple(np.zeros(group.tokens_per_block, np.int32) for group in layout_of(plan).groups)
    longer = attrs.evolve(
        tokens, base=runs.base, step=runs.step, slot_terms=sub, starts=runs.starts, period=runs.period
    )
    return changed(plan, tokens=lambda series: (*series, longer))


def without_rows(plan):
    """The plan with an empty table of its only remote worker."""
    (pair,) = plan.pairs
    table, nothing = pair.remote_table, np.zeros(0, int)
    empty = attrs.evolve(table, region=nothing, rows=table.rows[:0], first=nothing)
    return attrs.evolve(plan, pairs=(attrs.evolve(pair, remote_table=empty),))


def with_last_id(base):
    """Ids of which the last one of the destination is one further."""
    base = base.copy()
    base[0, -1] += 1
    return base


EQUAL, PIECES = PLANS["equal blocks"], PLANS["pieces of larger blocks"]
TOKENS_OUTSIDE = plan_reads(engine("d", order="NH")[0], engine("p", order="NH"))
HALVES = plan_reads(engine("d")[0], engine("p", tp=2))
QUARTERS = plan_reads(engine("d", tokens=2, order="NH")[0], engine("p", tp=2, tokens=4))
SIXES = plan_reads(engine("d", tokens=6)[0], engine("p", tokens=9, contexts=(2, 3)))
LARGE: dict[str, Any] = {"blocks": 1 << 29, "layers": 1, "heads": 1, "order": "NH"}
TWO_BLOCKS = plan_reads(engine("d", blocks=2)[0], engine("p", blocks=2))
WIDE = plan_reads(engine("d", **LARGE)[0], engine("p", **LARGE))
LATER = changed(PIECES, spans=lambda spans: tuple((low + 1, high) for low, high in spans))
FLOATS = [attrs.evolve(view, dtype="float16") for view in EQUAL.remotes[0].views]


@pytest.mark.parametrize("plan", [HALVES, QUARTERS, SIXES, TWO_BLOCKS])
def test_what_is_changed_below_was_right(plan):
    """Each fault of the next test is the only one of its plan."""
    assert certify(plan).complete


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_plan_whose_last_blocks_bind_would_refuse_is_no_proof(dtype):
    """INT: ids of all blocks have to fit 31 bits, in whatever type they are summed."""
    plan = changed(WIDE, ("tokens", 0), base=lambda base: base.astype(dtype))
    with pytest.raises(KVPlanError, match=r"^INT: cannot certify .* expected ids of 536870912 blocks below 2147483648"):
        certify(plan)


def wrong_plans():
    """What is wrong with a plan, the plan, and a part of the message."""
    follow, cut = "expected ids that follow the blocks of every view", "a span"
    stride = int(EQUAL.pairs[0].local_table.rows[0, 3])
    for side in (0, 1):
        yield "rows shorter on one side, inside their region", with_rows(PIECES, side, 1, -1), "equal lengths"
        yield "a shorter stride than that of blocks", with_rows(EQUAL, side, 3, -1), follow
        yield "no stride", with_rows(EQUAL, side, 3, -stride), follow
        step = shifted(side, -1)
        yield "a short step to the second of two blocks", changed(TWO_BLOCKS, ("tokens", 0), step=step), follow
    yield "descriptors of several positions for tokens", runs_as_tokens(EQUAL), "a token to be one position"
    yield "runs that repeat a token for tokens", runs_as_tokens(TOKENS_OUTSIDE), "a token to be one position"
    slots = changed(
        EQUAL, ("runs", 0), blocks=lambda sides: (attrs.evolve(sides[0], slot_terms=np.zeros(1, np.int32)), sides[1])
    )
    yield "slots that bind would take for an occurrence's", slots, "expected blocks in the form"
    yield "a table without rows", without_rows(EQUAL), "expected rows in the form"
    twice = attrs.evolve(EQUAL, remotes=EQUAL.remotes * 2, pairs=EQUAL.pairs * 2)
    itself = attrs.evolve(EQUAL.pairs[0], remote=EQUAL.local.key)
    for plan in (twice, attrs.evolve(EQUAL, remotes=(EQUAL.local,), pairs=(itself,))):
        yield "a remote twice, or the local worker", plan, "expected one pair with each of"
    copies = attrs.evolve(EQUAL, operation="COPY")
    yield "another operation", copies, "expected operation READ or WRITE, got COPY"
    yield "no spans", changed(PIECES, spans=lambda spans: ()), cut
    yield "a run over a cut", changed(PIECES, spans=lambda spans: tuple((low, high - 1) for low, high in spans)), cut
    yield "a run before its cut", LATER, cut
    yield "a run within its cut", changed(LATER, ("runs", 0), starts=lambda starts: starts + 1), cut
    behind = changed(SIXES, ("runs", 0), starts=lambda starts: np.append(3, starts[1:]))
    yield "a run of [0, 3) of 6 that begins at 3, which a range that ends there lacks", behind, cut
    larger = changed(PLANS["several starts"], num_blocks=lambda blocks: (blocks[0], blocks[1] + 1))
    yield "a pool larger than it is", larger, "ids"
    for fewer in ((9, 10), (10, 9)):
        smaller = changed(EQUAL, num_blocks=lambda _, fewer=fewer: fewer)
        yield (
            "a pool smaller than it is",
            smaller,
            f"smallest pools that bytes move between, of (10, 10) blocks, got {fewer}",
        )
    (pair,) = EQUAL.pairs
    idle = attrs.evolve(layout_of(EQUAL), runs=(), tokens=(), spans=())
    asking = attrs.evolve(EQUAL, pairs=(attrs.evolve(pair, group_pairs=(*pair.group_pairs, idle)),))
    yield "groups that move nothing, whose tables bind asks for", asking, "expected tokens in the form"
    last = changed(EQUAL, ("tokens", 0), base=with_last_id)
    yield "the last id of a series outside its row", last, "ids of 10 blocks that stay in row"
    floats = attrs.evolve(EQUAL, remotes=(attrs.evolve(EQUAL.remotes[0], views=FLOATS),))
    yield "elements that both sides read differently", floats, "of p/0: expected ('bfloat16', "
    yield "the worker of another pair", attrs.evolve(HALVES, remotes=HALVES.remotes[::-1]), ""
    half = changed(QUARTERS, period=lambda period: period // 2)
    unseen = changed(half, ("tokens", 0), slot_terms=lambda sub: (sub[0], sub[1][[0, 1, 3, 2]]))
    yield "a period without all blocks of the source", unseen, "period in the form"
    first, second = plan_mesh(engine("d"), engine("p", tp=2), "WRITE").plans
    second = attrs.evolve(second, not_transferred=("layers.0",))
    yield "writers that leave out different tensors", [first, second], "not_transferred"


@pytest.mark.parametrize(("what", "plan", "message"), list(wrong_plans()))
def test_a_wrong_plan_is_no_proof(what, plan, message):
    """Each is refused for what is wrong with it."""
    assert message in certify_error(plan), what


def test_a_region_too_large_to_count_through_is_refused():
    """Regions are counted one behind another in 62 bits; larger ones are refused."""
    (mine,), (other,) = engine("d", layers=1), engine("p", layers=1)
    large = attrs.evolve(mine, regions=[attrs.evolve(mine.regions[0], size_bytes=1 << 62)])
    with pytest.raises(KVPlanError, match=r"RANGE: cannot certify the regions of d/0: expected fewer than \d+ bytes"):
        certify(plan_reads(large, [other]))


@pytest.mark.parametrize(
    ("series", "field", "edit", "named"),
    [
        (None, "groups", lambda groups: groups[:1], "groups"),
        (None, "groups", lambda groups: (Group("other", 4), groups[1]), "groups"),
        (None, "groups", lambda groups: (groups[0], Group("other", 16)), "groups"),
        (None, "period", lambda period: 0, "period"),
        (None, "period", lambda period: period + 1, "period"),
        (None, "num_blocks", lambda blocks: blocks[:1], "num_blocks"),
        (None, "num_blocks", lambda blocks: (blocks[0], 0), "num_blocks"),
        (None, "spans", lambda spans: spans[::-1], "spans"),
        (None, "spans", lambda spans: (*spans, spans[-1]), "spans"),
        (None, "spans", lambda spans: ((0, 0), *spans), "spans"),
        (None, "spans", lambda spans: (*spans[:-1], (spans[-1][0], spans[-1][1] + 1)), "spans"),
        (None, "spans", lambda spans: ((-1, spans[0][1]), *spans[1:]), "spans"),
        (None, "spans", lambda spans: (*spans, 3), "spans"),
        (None, "spans", lambda spans: (*spans[:-1], ((0, 1), 2)), "spans"),
        (None, "spans", lambda spans: (*spans[:-1], ("0", "1")), "spans"),
        (None, "spans", lambda spans: (*spans[:-1], ("0", "1", "2")), "spans"),
        ("tokens", "period", lambda period: 0, "period"),
        ("tokens", "period", lambda period: 3, "period"),
        ("tokens", "starts", lambda starts: starts[:0], "starts"),
        ("tokens", "starts", lambda starts: starts.astype(float), "starts"),
        ("tokens", "starts", lambda starts: starts + 1, "starts"),
        ("runs", "starts", lambda starts: starts[::-1], "starts"),
        ("runs", "starts", lambda starts: starts - 1, "starts"),
        ("runs", "base", lambda base: base[:, :0], "base"),
        ("runs", "base", lambda base: base[..., 0], "base"),
        ("runs", "base", lambda base: base.astype(float), "base"),
        ("runs", "base", lambda base: base.astype(np.int64) - (1 << 62), "base"),
        ("runs", "base", lambda base: base + np.array([[[0]] * 7 + [[1 << 62]]]), "base"),
        ("runs", "step", lambda step: step[:1], "step"),
        ("runs", "step", lambda step: (step[0], -1), "step"),
        ("runs", "step", lambda step: (step[0], 1 << 31), "step"),
        ("runs", "blocks", lambda blocks: blocks[:1], "blocks"),
        ("runs", "blocks", lambda blocks: (blocks[0], attrs.evolve(blocks[1], num_blocks=0)), "blocks"),
        ("runs", "blocks", lambda blocks: (attrs.evolve(blocks[0], ordinal=[0, 1, 2, 3]), blocks[1]), "blocks"),
        (
            "runs",
            "blocks",
            lambda blocks: (attrs.evolve(blocks[0], slot_terms=np.zeros(3, np.int32)), blocks[1]),
            "blocks",
        ),
        ("tokens", "slot_terms", lambda sub: sub[:1], "slot_terms"),
        ("tokens", "slot_terms", lambda sub: (sub[0], sub[1][:-1]), "slot_terms"),
        ("tokens", "slot_terms", lambda sub: (sub[0].astype(float), sub[1]), "slot_terms"),
        ("tokens", "slot_terms", lambda sub: (sub[0].tolist(), sub[1]), "slot_terms"),
    ],
)
def test_fields_of_another_form_are_no_proof(series, field, edit, named):
    """Numbers that are missing, of another type or out of range are refused before any id is followed."""
    plan = PLANS["pieces of larger blocks"]
    wrong = changed(plan, series and (series, 0), **{field: edit})
    assert f"expected {named} in the form that bind relies on" in certify_error(wrong)


def with_last(values, value):
    """The array with another last entry."""
    return np.append(values[:-1], np.array([value], values.dtype))


@pytest.mark.parametrize(
    ("field", "edit", "message"),
    [
        ("regions", lambda regions: regions[::-1], "expected the regions of d/0, got "),
        ("region", lambda region: with_last(region, -1), "in row 3"),
        ("region", lambda region: with_last(region, 2), "in row 3"),
        ("region", lambda region: region[:-1], "expected rows of 5 numbers, each with a region"),
        ("first", lambda first: with_last(first, 181), "expected row 3 to begin with id 180, got 181"),
        ("rows", lambda rows: rows.astype(np.int64), "expected rows of 5 numbers"),
        ("rows", lambda rows: rows[:, :4], "expected rows of 5 numbers"),
        (
            "rows",
            lambda rows: np.append(rows[:-1], rows[-1:] + np.array([0, 0, 0, 0, 1], np.uint64), axis=0),
            "in row 3",
        ),
    ],
)
def test_tables_of_another_form_are_no_proof(field, edit, message):
    """Rows are five unsigned numbers and lie in a region of their worker to the last element, which has the last id."""
    plan = PLANS["equal blocks"]
    (pair,) = plan.pairs
    table = attrs.evolve(pair.local_table, **{field: edit(getattr(pair.local_table, field))})
    assert message in certify_error(attrs.evolve(plan, pairs=(attrs.evolve(pair, local_table=table),)))


def test_rows_of_single_bytes_are_proved():
    """Elements of one byte, one byte apart, fill a region to its end."""
    mine, other = (
        Worker(
            name,
            0,
            [Region("r", 4096, 10)],
            [Group("g")],
            [View("state", "g", "r", "uint8", [Axis("dim", 0, 1, 1, 1)], 10, 1)],
        )
        for name in "dp"
    )
    assert certify(plan_reads(mine, [other])) == Certificate(1, 1, True)


def test_pools_of_one_block_are_proved():
    """Where there is no second block, ids need no step to it."""
    assert certify(plan_reads(engine("d", blocks=1)[0], engine("p", blocks=1))).complete


@pytest.mark.parametrize("side", [0, 1])
def test_blocks_behind_a_view_are_no_proof(side):
    """A plan for one block more than a view has is refused, although the region has room for it."""
    workers = engine("d", layers=1)[0], engine("p", layers=1)[0]
    regions = [[attrs.evolve(worker.regions[0], size_bytes=1 << 20)] for worker in workers]
    roomy = [attrs.evolve(worker, regions=each) for worker, each in zip(workers, regions, strict=True)]
    more = [attrs.evolve(worker, views=[attrs.evolve(worker.views[0], num_blocks=11)]) for worker in roomy]
    plan = plan_reads(more[0], [more[1]])
    assert certify(plan)
    fewer = attrs.evolve(plan, local=roomy[0]) if side == 0 else attrs.evolve(plan, remotes=(roomy[1],))
    assert "ids that follow the blocks of every view" in certify_error(fewer)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("field", ["ordinal", "num_blocks", "step", "slot_terms"])
@pytest.mark.parametrize("name", ["equal blocks", "pieces of larger blocks"])
def test_wrong_ordinals_of_a_period_are_no_proof(name, field, side):
    """The ordinals that are listed for a period, their advance, their step and the offsets of slots must be right."""

    def wrong(blocks):
        old = getattr(blocks[side], field)
        new = np.ones(len(blocks[side].ordinal), np.int32) if old is None else old + 1
        return tuple(attrs.evolve(one, **{field: new}) if i == side else one for i, one in enumerate(blocks))

    plan = PLANS[name]
    which = [series for series in series_of(plan) if series[0] == "runs"]
    assert which
    for series in which:
        certify_error(changed(plan, series, blocks=wrong))


def test_writers_that_are_missing_leave_a_proof_incomplete():
    """The plan of each writer proves what it writes; together they prove everything."""
    destinations, sources = engine("d", tp=3), engine("p", tp=2)
    mesh = plan_mesh(destinations, sources, "WRITE")
    whole = certify(mesh)
    assert whole == certify(plan_mesh(destinations, sources))
    shares = [certify(plan_writes(sources[i], destinations, [sources[1 - i]])) for i in (0, 1)]
    assert [share.complete for share in shares] == [False, False]
    assert sum(share.num_bytes for share in shares) == whole.num_bytes
    with pytest.raises(KVPlanError, match="bytes moved twice"):
        certify([mesh.plans[0], *mesh.plans])
    reads = plan_reads(engine("e")[0], engine("q"))
    assert certify([reads, plan_writes(sources[0], destinations, [sources[1]])]).complete is False


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"tp": 16}, {"tp": 4}), ({"tp": 2}, {"tp": 1, "conv_order": "SD"}), ({"tp": 8, "shared": True}, {"tp": 16})],
)
def test_hybrid_models_are_proved(ours, theirs):
    """States in both orders, replicated groups and overlaid pools are proved."""
    destinations = MAMBA.engine("d", num_blocks=3, **ours)
    sources = MAMBA.engine("p", num_blocks=5, tokens_per_block=48, **theirs)
    proof = certify(plan_reads(destinations[-1], sources))
    assert isinstance(proof, Certificate)
    assert proof.complete


def test_a_plan_that_moves_nothing_is_proved():
    """The certificate has zero bytes in zero fragments."""
    (mine,) = engine("d", layers=1)
    assert certify(plan_reads(mine, [], not_transferred=["layers.0"])) == Certificate(0, 0, True)


def test_a_plan_too_large_to_follow_is_refused(monkeypatch):
    """The limit holds for every direction, before fragments are listed."""
    monkeypatch.setattr(certificate, "MAX_FOLLOWED", 0)
    destinations, sources = engine("d", tp=2), engine("p")
    plans = (
        plan_reads(destinations[0], sources),
        plan_writes(sources[0], destinations),
        plan_mesh(destinations, sources),
    )
    for plan in plans:
        with pytest.raises(KVPlanError, match=r"^RANGE: cannot certify a plan: expected at most 0 desc"):
            certify(plan)


@pytest.mark.parametrize(
    ("name", "number"),
    [("equal blocks", 98), ("pieces of larger blocks", 320), ("contexts", 232), ("no common divisor", 344)],
)
def test_what_is_followed_is_counted(monkeypatch, name, number):
    """Of equal blocks 32 heads of four tokens on either side, as many tokens, and a run for each of two layers.

    Of blocks of 7 and 8 tokens, 120 heads, and 8 heads of 14 tokens and of 14 runs.
    """
    monkeypatch.setattr(certificate, "MAX_FOLLOWED", number)
    certify(PLANS[name])
    monkeypatch.setattr(certificate, "MAX_FOLLOWED", number - 1)
    with pytest.raises(KVPlanError, match=rf"^RANGE: cannot certify a plan: .*, got {number}$"):
        certify(PLANS[name])


Range = tuple[int, int]
"""First byte and length."""


def made(ranges: list[Range]) -> SlotSegments:
    """Segments with these starts and lengths."""
    start, length = np.array(ranges, np.int64).T
    return SlotSegments(start, length, *[np.zeros_like(start)] * 7)


def test_fragments_are_counted_before_they_are_listed(monkeypatch):
    """A range over two segments is two fragments."""
    segments, start, length = made([(0, 4), (4, 4)]), np.array([0]), np.array([8])
    monkeypatch.setattr(certificate, "MAX_FOLLOWED", 2)
    assert segments.cut(start, length)
    monkeypatch.setattr(certificate, "MAX_FOLLOWED", 1)
    with pytest.raises(KVPlanError, match=r"RANGE: cannot certify a plan: expected at most 1 fragments .*, got 2$"):
        segments.cut(start, length)


def walked(segments: list[Range], ranges: list[Range]) -> list[tuple[int, int, int]] | None:
    """The range, the segment and the address of every byte; ``None`` if one is in no segment."""
    holder = {start + i: segment for segment, (start, length) in enumerate(segments) for i in range(length)}
    every = [(i, start + at) for i, (start, length) in enumerate(ranges) for at in range(length)]
    return [(i, holder[at], at) for i, at in every] if all(at in holder for _, at in every) else None


@st.composite
def segments_of_a_block(draw: st.DrawFn) -> list[Range]:
    """A few ascending segments, some with gaps before them."""
    start, found = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=5)):
        found.append((start + gap, length))
        start += gap + length
    return found


@given(segments_of_a_block(), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=4))
@example([(2, 2), (4, 2)], [(0, 6)])  # as many bytes before the pieces as the last one has
@example([(2, 2), (4, 2)], [(0, 6), (2, 2)])
@example([(2, 2)], [(0, 1)])
@example([(0, 2)], [(1, 2)])
def test_ranges_are_cut_where_a_walk_changes_segments(segments: list[Range], ranges: list[Range]) -> None:
    """The fragments have every byte once, with its range and its segment; there are none if a byte has no segment."""
    start, length = np.array(ranges, np.int64).T
    cut = made(segments).cut(start, length)
    expected = walked(segments, ranges)
    if expected is None:
        assert cut is None
    else:
        assert cut is not None
        fragments = zip(*(column.tolist() for column in cut), strict=True)
        assert [(of, segment, begin + i) for of, segment, begin, size in fragments for i in range(size)] == expected


def pairs_met(positions: range, destination: int, source: int) -> set[frozenset[tuple[str, int]]]:
    """The slots of both sides that are equal if those that meet at these positions are: the sets of them."""
    met: list[set[tuple[str, int]]] = []
    for position in positions:
        both = {("destination", position % destination), ("source", position % source)}
        joined = [one for one in met if one & both]
        met = [one for one in met if not one & both] + [both.union(*joined)]
    return {frozenset(one) for one in met}


@pytest.mark.parametrize("destination", range(1, 9))
@pytest.mark.parametrize("source", range(1, 9))
def test_a_period_is_proved_by_as_few_positions_as_can_be(destination, source):
    """Those that are followed make as many slots equal as all of a period would, and with one less they do not."""
    plan = plan_reads(engine("d", tokens=destination)[0], engine("p", tokens=source))
    number = _num_positions(layout_of(plan), layout_of(plan).tokens[0])
    period = range(math.lcm(destination, source))
    assert pairs_met(range(number), destination, source) == pairs_met(period, destination, source)
    assert pairs_met(range(number - 1), destination, source) != pairs_met(period, destination, source)


def test_a_longer_period_changes_nothing_where_no_run_is_longer_than_a_token():
    """bind looks for spans in a period, of which there are none; each run of a long period would be followed."""
    plan = PLANS["token by token"]
    assert not layout_of(plan).runs
    longer = changed(plan, period=lambda period: period << 32)
    assert certify(longer) == certify(plan)
    tables = {"attn": Blocks([3, 7, 2])}
    bound = [each.bind(local=tables, remote=tables, tokens=(1, 11)) for each in (plan, longer)]
    moved, moved_too = ([copies_by_id(spec) for spec in specs] for specs in bound)
    assert moved == moved_too
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot certify a plan"):
        certify(changed(PLANS["equal blocks"], period=lambda period: period << 32))


@pytest.mark.parametrize("order, ranges", [("HN", 4), ("NH", 1)])
def test_the_work_of_a_proof_grows_with_the_sum_of_the_block_sizes(order, ranges):
    """Blocks of 255 and 256 tokens repeat after 65,280 positions; 510 are followed, and the first token of each run."""
    for tokens in (15, 255):
        plan = plan_reads(engine("d", tokens=tokens, order=order)[0], engine("p", tokens=tokens + 1, order=order))
        proof = certify(plan)
        assert proof.complete
        assert proof.num_bytes == tokens * 2 * 4 * 16
        assert proof.num_fragments == 2 * tokens * 2 * ranges


@pytest.mark.parametrize("layers", [1, 8])
def test_steps_of_segments_are_counted_once_for_all_series(monkeypatch, layers):
    """Layers whose blocks begin at different offsets have series of their own: each would count the steps of all."""
    counted = []

    def counting(self, num_slots):
        counted.append(num_slots)
        return within(self, num_slots)

    within = SlotSegments.stepping_within
    monkeypatch.setattr(SlotSegments, "stepping_within", counting)
    workers = []
    for name, tokens, gap in (("d", 7, 64), ("p", 8, 128)):
        (worker,) = engine(name, tokens=tokens, layers=layers)
        views = [
            attrs.evolve(view, block_stride_bytes=view.block_stride_bytes + gap * number)
            for number, view in enumerate(worker.views)
        ]
        regions = [attrs.evolve(region, size_bytes=4 * region.size_bytes) for region in worker.regions]
        moved = [attrs.evolve(region, address=8 * region.address) for region in regions]
        workers.append(attrs.evolve(worker, regions=moved, views=views))
    plan = plan_reads(workers[0], workers[1:])
    assert len(layout_of(plan).tokens) == layers
    assert certify(plan).complete
    assert counted == [7, 8]


def interleaved(worker: Worker) -> Worker:
    """The worker with both layers in each token, one behind the other."""
    first, second = worker.views
    token_bytes = first.block_bytes // worker.groups[0].num_slots
    views = []
    for number, view in enumerate((first, second)):
        view_axes = [attrs.evolve(a, stride_bytes=2 * token_bytes) if a.name == "token" else a for a in view.axes]
        views.append(
            attrs.evolve(
                view,
                axes=view_axes,
                region="kv.0",
                offset_bytes=number * token_bytes,
                block_stride_bytes=2 * first.block_bytes,
            )
        )
    region = attrs.evolve(worker.regions[0], size_bytes=2 * worker.regions[0].size_bytes)
    return attrs.evolve(worker, regions=[region], views=views)


Meaning = tuple[str, int, tuple[tuple[str, int], ...], int]
"""Tensor, position, coordinates, and byte of the element."""


def bytes_of_block(worker: Worker, ordinal: int) -> dict[int, tuple[int, Meaning]]:
    """The slot and the meaning of each byte of block 0 as the block of an ordinal, by its offset in all regions."""
    (group,) = worker.groups
    starts = dict(zip([region.name for region in worker.regions], region_starts(worker), strict=False))
    held = list(itertools.islice(held_positions(group), (ordinal + 1) * group.num_slots))
    found = {}
    for view in worker.views:
        for slot, offset, coordinates in elements(view):
            local_slot = ordinal * group.num_slots + slot
            for byte in range(view.itemsize):
                meaning = view.name, held[local_slot], coordinates, byte
                found[int(starts[view.region]) + offset + byte] = local_slot, meaning
    return found


ORDERS = st.sampled_from(("HN", "NH", "interleaved"))
CONTEXTS = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 2)])
TWO = st.tuples
"""The same of both sides: of the destination, and of the source."""


@given(
    orders=TWO(ORDERS, ORDERS) | ORDERS.map(lambda order: (order, order)),
    tokens=TWO(st.integers(1, 4), st.integers(1, 4)) | st.just((4, 4)),
    contexts=TWO(CONTEXTS, CONTEXTS) | CONTEXTS.map(lambda context: (context, context)),
    ordinals=TWO(st.integers(0, 2), st.integers(0, 2)) | st.just((0, 0)),
    length=st.integers(1, 40) | st.sampled_from([32, 48, 64, 96, 128]),
    number=st.integers(0, 255) | st.just(0),
)
@example(  # a slot and a byte
    orders=("HN", "HN"), tokens=(2, 2), contexts=((2, 1), (2, 1)), ordinals=(0, 0), length=17, number=0
)
@example(  # slots go on, but positions do not
    orders=("HN", "HN"), tokens=(2, 2), contexts=((1, 1), (2, 1)), ordinals=(0, 0), length=32, number=0
)
@example(  # each side repeats itself at another distance
    orders=("HN", "interleaved"), tokens=(4, 4), contexts=((1, 1), (1, 1)), ordinals=(0, 0), length=32, number=0
)
def test_a_range_is_right_if_each_of_its_bytes_is(
    orders: tuple[str, str],
    tokens: tuple[int, int],
    contexts: tuple[Range, Range],
    ordinals: Range,
    length: int,
    number: int,
) -> None:
    """Also where only what it repeats is followed; what is written are the bytes that a walk writes."""
    workers = []
    for name, order, per_block, context in zip("dp", orders, tokens, contexts, strict=True):
        made = engine(name, tokens=per_block, heads=1, contexts=context, order="HN" if order == "HN" else "NH")[0]
        workers.append(interleaved(made) if order == "interleaved" else made)
    ours, theirs = map(bytes_of_block, workers, ordinals)
    place_of = {meaning: at for at, (_, meaning) in theirs.items()}
    starts = [at for at, (_, meaning) in sorted(ours.items()) if meaning in place_of]
    assume(starts)
    start = starts[number % len(starts)]
    source_start = place_of[ours[start][1]]
    (pair,) = pairs_of(EQUAL)
    proof = certificate._Proof(workers[0], (), True)
    segments = [certificate._segments(worker, worker.groups[0], proof.tensors) for worker in workers]
    groups = workers[0].groups[0], workers[1].groups[0]
    ids = attrs.evolve(layout_of(EQUAL), groups=groups)
    tables = certificate.GroupTables.of(pair, ids, *segments)
    destination, source = (
        certificate.BlockRanges(
            *(np.array([value]) for value in (ordinal, 0, at, length, worker.views[0].block_stride_bytes))
        )
        for ordinal, at, worker in zip(ordinals, (start, source_start), workers, strict=True)
    )
    walk = [(ours.get(start + i), theirs.get(source_start + i)) for i in range(length)]
    is_right = all(to and out_of and to[1] == out_of[1] for to, out_of in walk)
    event(f"right: {is_right}")
    try:
        fragments = proof.split(tables, destination, source)
        proof.check_bytes(tables, destination, source, fragments)
    except KVPlanError:
        assert not is_right
        return
    assert is_right
    event(f"repeats: {bool((fragments.num_slots > 1).any())}")
    written = certificate._written(tables, destination, fragments, 1 << 20)
    assert written.num_bytes == length
    slots = [slot for _, _, low, high in written.rectangles.T.tolist() for slot in range(low, high)]
    assert {*slots} == {to[0] for to, _ in walk if to}


def test_workers_of_two_descriptions_are_no_proof():
    """Plans that belong together describe a worker once."""
    first, second = plan_mesh(engine("d"), engine("p", tp=2), "WRITE").plans
    (mine,) = second.remotes
    other = attrs.evolve(mine, groups=(*mine.groups, Group("more")))
    assert "one description of the worker" in certify_error([first, attrs.evolve(second, remotes=(other,))])
    reads = [plan_reads(reader, engine("p")) for reader in (mine, other)]
    assert "one description of the worker" in certify_error(reads)


def test_a_writer_may_describe_its_buffer_for_each_destination():
    """A staging buffer holds other heads for each peer, in the same regions; in other regions it is another worker."""
    destinations, (first, second) = engine("d", tp=2), engine("p", tp=2)
    again = attrs.evolve(first, views=second.views)
    elsewhere = attrs.evolve(again, regions=second.regions)
    writes = plan_writes(first, destinations[:1])
    assert certify([writes, plan_writes(again, destinations[1:])]).complete
    assert "one description of the worker" in certify_error([writes, plan_writes(elsewhere, destinations[1:])])


def test_two_writers_of_one_name_are_no_proof():
    """In the same regions, one under the name of the other: for a destination, a buffer is described once."""
    destinations, sources = engine("d"), engine("p", contexts=(2, 1))
    same = [attrs.evolve(source, regions=sources[0].regions) for source in sources]
    first, second = plan_mesh(destinations, same, "WRITE").plans
    assert certify([first, second]).complete
    renamed = attrs.evolve(second, local=attrs.evolve(second.local, rank=first.local.rank))
    assert "one description of the writer" in certify_error([first, renamed])


@pytest.mark.parametrize("change", ["name of a tensor", "context"])
def test_sources_of_two_descriptions_are_no_proof(change):
    """Each reader's plan may be right about its own part of a source: what the source holds, only one of them knows."""
    first, second = plan_mesh(engine("d", tp=2), engine("p", tp=2)).plans
    idle, used = second.remotes
    if change == "context":
        other = attrs.evolve(idle, groups=[attrs.evolve(idle.groups[0], context=Context(0, 2))])
    else:
        other = attrs.evolve(idle, views=[attrs.evolve(view, name=f"{view.name}.") for view in idle.views])
    second = attrs.evolve(second, remotes=(other, used))
    assert certify(first).complete
    assert certify(second).complete
    assert "one description of the worker" in certify_error([first, second])


@pytest.mark.parametrize("check", [certify, lambda plan: verify(plan, local=ONE_BLOCK, remote=ONE_BLOCK)])
def test_a_tensor_of_too_many_bytes_is_not_numbered(check):
    """An offer may state any size of an axis, of which it stores a part: numbers of bytes would not fit 64 bits."""
    (mine,), (other,) = (
        [attrs.evolve(worker, views=[larger(view) for view in worker.views]) for worker in engine(name)]
        for name in "dp"
    )
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot number the bytes of a tensor: expected at most "):
        check(plan_reads(mine, [other]))


def larger(view):
    """A view with its part of a tensor whose head axis has 2**62 elements."""
    return attrs.evolve(view, axes=[attrs.evolve(a, size=1 << 62) if a.name == "head" else a for a in view.axes])


def test_a_period_of_many_positions_is_refused_before_it_is_listed():
    """Blocks of 2**21 and 2**21 - 1 tokens repeat after 4e12 positions, which are not listed."""
    axes = [[Axis("token", 0, tokens, tokens, 1)] for tokens in ((1 << 21) - 1, 1 << 21)]
    mine, other = (
        Worker(
            name,
            0,
            [Region("kv", 4096, 1 << 22)],
            [Group("g", each[0].size)],
            [View("a", "g", "kv", "uint8", each, 1, 0)],
        )
        for name, each in zip("dp", axes, strict=True)
    )
    with pytest.raises(
        KVPlanError, match=r"RANGE: cannot certify a plan: expected at most 4194304 descriptors and segments"
    ):
        certify(plan_reads(mine, [other]))


def test_an_error_says_where_the_wrong_byte_is():
    """The details have the row and the region on both sides, the tensor, and what is there in place of what."""
    plan = PLANS["equal blocks"]
    with pytest.raises(KVPlanError) as caught:
        certify(changed(plan, ("tokens", 0), base=lambda base: np.stack([base[0], base[1][::-1]])))
    assert "expected tensor layers.0 of layers.0, got layers.1" in str(caught.value)
    details = dict(caught.value.details)
    assert details == {"row": (2, 3), "region": ("kv.0", "kv.1"), "tensor": ("layers.0", "layers.1")}


def test_an_error_says_which_byte_moves_twice_or_not_at_all():
    """Runs given twice fill position 0 twice; without the last head, position 0 of the second layer is incomplete."""
    twice = changed(PLANS["equal blocks"], runs=lambda runs: runs * 2)
    less = PLANS["pieces of larger blocks"]
    for kind in ("runs", "tokens"):
        less = changed(less, (kind, 0), base=lambda base: base[:, :-1])
    for plan, layer, got in ((twice, 0, "bytes moved twice"), (less, 1, "bytes not moved")):
        with pytest.raises(KVPlanError) as caught:
            certify(plan)
        assert f"expected every byte of layers.{layer}, position 0, once, got {got}" in str(caught.value)
        assert dict(caught.value.details) == {"tensor": f"layers.{layer}", "position": 0, "region": f"kv.{layer}"}
