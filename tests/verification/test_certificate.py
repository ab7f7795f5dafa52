"""Certificates: what is proved, and that a plan with any number changed is not."""

from __future__ import annotations

import re

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan import (
    Axis,
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
)
from kvplan.verification import Certificate
from kvplan.verification.certificate import Pieces
from tests.small import engine

MAMBA = Model.shipped("nemotron-h-8b")
PLANS = {
    "equal blocks": plan_reads(engine("d")[0], engine("p")),
    "pieces of larger blocks": plan_reads(engine("d", tokens=4)[0], engine("p", tokens=16)),
    "several starts": plan_reads(engine("d", tokens=6, order="NH")[0], engine("p", tp=2, tokens=4)),
    "token by token": plan_reads(engine("d", order="NH")[0], engine("p", tp=2)),
    "contexts": plan_reads(engine("d", contexts=(2, 3))[1], engine("p", tp=2, contexts=(3, 2))),
}


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


def refused(plan):
    """The message with which certify refuses a plan."""
    with pytest.raises(KVPlanError, match="PROOF: cannot certify") as caught:
        certify(plan)
    return str(caught.value)


def shifted(side, by):
    """A function that adds to one side of a pair of arrays, or of an array of two sides."""

    def shift(pair):
        sides = tuple(array + by if i == side else array for i, array in enumerate(pair))
        return np.stack(sides) if isinstance(pair, np.ndarray) else sides

    return shift


@pytest.mark.parametrize("name", PLANS)
def test_a_right_plan_is_proved_and_nothing_of_it_is_left_out(name):
    """The proof counts every byte of a period: its positions, in two layers of four heads of 16 bytes."""
    plan = PLANS[name]
    proof = certify(plan)
    (group,) = plan.local.groups
    period = max(layout.period for pair in plan.pairs for layout in pair.group_pairs)
    assert proof.complete
    assert proof.num_bytes == period // group.context.size * 2 * 4 * 16


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_ids_that_are_off_by_one_are_no_proof(name, side):
    """A wrong first id, step from block to block or offset of a slot is found in every series, on either side."""
    plan = PLANS[name]
    for series in series_of(plan):
        refused(changed(plan, series, base=shifted(side, 1)))
        refused(changed(plan, series, step=lambda step: tuple(n + (j == side) for j, n in enumerate(step))))
        if series[0] == "tokens":
            refused(changed(plan, series, sub=shifted(side, 1)))


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

            text = refused(changed(plan, (kind, i), base=swapped))
            found.add(text.partition("expected ")[2].split()[0])
    assert found == {"tensor", "byte"}


@pytest.mark.parametrize("name", PLANS)
def test_a_series_more_or_less_is_no_proof(name):
    """A series left out leaves bytes missing, one given twice writes them again, and other positions are wrong."""
    plan = PLANS[name]
    for kind, i in series_of(plan):
        lacking = changed(plan, **{kind: lambda s, i=i: s[:i] + s[i + 1 :]})
        assert re.search("bytes not moved|tokens that move what runs move", refused(lacking))
        assert "bytes moved twice" in refused(changed(plan, **{kind: lambda s, i=i: (*s, s[i])}))
        if kind == "tokens":
            refused(changed(plan, (kind, i), carried=lambda carried: carried + 1))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("by", [1, 1 << 40])
def test_rows_with_another_number_are_no_proof(side, column, by):
    """A changed address, length, device, stride or count is refused."""
    plan = PLANS["pieces of larger blocks"]
    refused(with_rows(plan, side, column, -1 if (column, by) == (4, 1) else by))


@pytest.mark.parametrize("side", [0, 1])
def test_descriptors_of_unequal_lengths_are_no_proof(side):
    """Rows that are shorter on one side are refused, although they stay inside their region."""
    assert "equal lengths" in refused(with_rows(PLANS["pieces of larger blocks"], side, 1, -1))


@pytest.mark.parametrize("side", [0, 1])
def test_rows_of_other_strides_are_no_proof(side):
    """A shorter stride, or none, is not the blocks' stride, although every row stays inside its region."""
    plan = PLANS["equal blocks"]
    stride = int((plan.pairs[0].local_table, plan.pairs[0].remote_table)[side].rows[0, 3])
    for by in (-1, -stride):
        assert "follow the blocks of every view" in refused(with_rows(plan, side, 3, by))


@pytest.mark.parametrize("by", [-16, 16])
@pytest.mark.parametrize("side", [0, 1])
def test_bytes_that_no_view_holds_are_no_proof(side, by):
    """Bytes of a region before or behind its views are refused."""
    plan = with_rows(plan_reads(padded(engine("d")[0]), [padded(engine("p")[0])]), side, 0, by)
    assert f"other bytes at the {('destination', 'source')[side]}" in refused(plan)


def test_a_region_too_large_to_count_through_is_refused():
    """Regions are counted one behind another in 62 bits; larger ones are refused."""
    (mine,), (other,) = engine("d", layers=1), engine("p", layers=1)
    large = attrs.evolve(mine, regions=[attrs.evolve(mine.regions[0], size_bytes=1 << 62)])
    with pytest.raises(KVPlanError, match=r"RANGE: cannot certify the regions of d/0: expected fewer than \d+ bytes"):
        certify(plan_reads(large, [other]))


def test_runs_that_pass_for_tokens_are_no_proof():
    """A descriptor that moves token by token, at the ends of a range, must be of one position."""
    plan = PLANS["equal blocks"]
    (runs,) = layout_of(plan).runs
    one = layout_of(plan).tokens[0]
    subs = tuple(np.zeros(group.tokens_per_block, np.int32) for group in layout_of(plan).groups)
    longer = attrs.evolve(one, base=runs.base, step=runs.step, sub=subs, carried=runs.starts, every=runs.every)
    assert "a token to be one position" in refused(changed(plan, tokens=lambda tokens: (*tokens, longer)))


def test_cuts_that_are_no_cuts_are_no_proof():
    """Cuts ascend, are not empty, do not overlap, and lie in one period."""
    plan = PLANS["pieces of larger blocks"]
    for wrong in (
        lambda cuts: cuts[::-1],
        lambda cuts: (*cuts, cuts[-1]),
        lambda cuts: ((0, 0), *cuts),
        lambda cuts: (*cuts[:-1], (cuts[-1][0], cuts[-1][1] + 1)),
        lambda cuts: ((-1, cuts[0][1]), *cuts[1:]),
        lambda cuts: (*cuts, 3),
        lambda cuts: (*cuts[:-1], ((0, 1), 2)),
        lambda cuts: (*cuts[:-1], ("0", "1")),
        lambda cuts: (*cuts[:-1], ("0", "1", "2")),
    ):
        assert "expected cuts in the form" in refused(changed(plan, cuts=wrong))


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
        ("tokens", "every", lambda every: 0, "every"),
        ("tokens", "every", lambda every: 3, "every"),
        ("tokens", "carried", lambda carried: carried[:0], "starts"),
        ("tokens", "carried", lambda carried: carried.astype(float), "starts"),
        ("tokens", "carried", lambda carried: carried + 1, "starts"),
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
        ("runs", "blocks", lambda blocks: (attrs.evolve(blocks[0], sub=np.zeros(3, np.int32)), blocks[1]), "blocks"),
        ("tokens", "sub", lambda sub: sub[:1], "sub"),
        ("tokens", "sub", lambda sub: (sub[0], sub[1][:-1]), "sub"),
        ("tokens", "sub", lambda sub: (sub[0].astype(float), sub[1]), "sub"),
        ("tokens", "sub", lambda sub: (sub[0].tolist(), sub[1]), "sub"),
    ],
)
def test_fields_of_another_form_are_no_proof(series, field, edit, named):
    """Numbers that are missing, of another type or out of range are refused before any id is followed."""
    plan = PLANS["pieces of larger blocks"]
    wrong = changed(plan, series and (series, 0), **{field: edit})
    assert f"expected {named} in the form that bind relies on" in refused(wrong)


def test_slots_of_one_start_are_no_proof():
    """A series that begins at one position of a period has no term of slots: bind would take it for an occurrence's."""
    zero = np.zeros(1, np.int32)
    wrong = changed(
        PLANS["equal blocks"], ("runs", 0), blocks=lambda blocks: (attrs.evolve(blocks[0], sub=zero), blocks[1])
    )
    assert "expected blocks in the form" in refused(wrong)


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
    assert message in refused(attrs.evolve(plan, pairs=(attrs.evolve(pair, local_table=table),)))


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


def test_a_table_without_rows_is_no_proof():
    """Ids of a pair that moves bytes number the rows of both tables."""
    plan = PLANS["equal blocks"]
    (pair,) = plan.pairs
    empty = attrs.evolve(
        pair.remote_table, region=np.zeros(0, int), rows=pair.remote_table.rows[:0], first=np.zeros(0, int)
    )
    wrong = attrs.evolve(plan, pairs=(attrs.evolve(pair, remote_table=empty),))
    assert "expected rows in the form" in refused(wrong)


def test_a_remote_given_twice_is_no_proof():
    """A plan has one pair for each remote worker, and no remote is the local worker."""
    plan = PLANS["equal blocks"]
    twice = attrs.evolve(plan, remotes=plan.remotes * 2, pairs=plan.pairs * 2)
    itself = attrs.evolve(plan, remotes=(plan.local,), pairs=(attrs.evolve(plan.pairs[0], remote=plan.local.key),))
    for wrong in (twice, itself):
        assert "expected one pair with each of" in refused(wrong)


def test_another_operation_is_no_proof():
    """A plan reads or writes."""
    assert "expected operation READ or WRITE, got COPY" in refused(attrs.evolve(PLANS["contexts"], operation="COPY"))


def test_a_run_across_a_cut_is_no_proof():
    """A range may split a run only at a cut; without cuts, a run would leave the range."""
    plan = PLANS["pieces of larger blocks"]
    assert "a cut" in refused(changed(plan, cuts=lambda cuts: ()))
    assert "a cut" in refused(changed(plan, cuts=lambda cuts: tuple((low, high - 1) for low, high in cuts)))
    later = changed(plan, cuts=lambda cuts: tuple((low + 1, high) for low, high in cuts))
    assert "a cut" in refused(later)
    assert "a cut" in refused(changed(later, ("runs", 0), starts=lambda starts: starts + 1))


def test_a_run_that_begins_behind_its_cut_is_no_proof():
    """A rank has positions [0, 3) of every 6: if their run began at 3, a range that ends there would not have it."""
    plan = plan_reads(engine("d", tokens=6)[0], engine("p", tokens=9, contexts=(2, 3)))
    assert certify(plan).complete
    assert "a cut" in refused(changed(plan, ("runs", 0), starts=lambda starts: np.append(3, starts[1:])))


def test_pools_of_one_block_are_proved():
    """Where there is no second block, ids need no step to it."""
    assert certify(plan_reads(engine("d", blocks=1)[0], engine("p", blocks=1))).complete


@pytest.mark.parametrize("side", [0, 1])
def test_a_step_to_the_second_of_two_blocks_is_followed(side):
    """Where a pool has two blocks, the ids of the second one are as far from the first as its bytes are."""
    plan = plan_reads(engine("d", blocks=2)[0], engine("p", blocks=2))
    wrong = changed(plan, ("tokens", 0), step=lambda step: tuple(n - (i == side) for i, n in enumerate(step)))
    assert "expected ids that follow the blocks of every view" in refused(wrong)


def test_pools_larger_than_they_are_are_no_proof():
    """A layout states how many blocks may be bound; the ids of more blocks would leave their row."""
    plan = PLANS["several starts"]
    assert "ids" in refused(changed(plan, num_blocks=lambda blocks: (blocks[0], blocks[1] + 1)))
    assert certify(changed(plan, num_blocks=lambda blocks: (blocks[0] - 1, blocks[1])))


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
    assert "ids that follow the blocks of every view" in refused(fewer)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("field", ["ordinal", "num_blocks", "step", "sub"])
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
        refused(changed(plan, series, blocks=wrong))


def test_one_id_outside_its_row_is_no_proof():
    """The last run of a series alone, one id further, would leave its row in the last block of the pool."""

    def further(base):
        more = np.zeros_like(base)
        more[0, -1] = 1
        return base + more

    assert "ids of 10 blocks that stay in row" in refused(changed(PLANS["equal blocks"], ("tokens", 0), base=further))


@pytest.mark.parametrize("side", [0, 1])
def test_blocks_behind_one_of_two_views_are_no_proof(side):
    """Runs that join two tensors of a block may be bound for no more blocks than the smaller pool has."""
    axes = [Axis("token", 0, 4, 4, 8), Axis("dim", 0, 8, 8, 1)]
    views = [View(name, "attn", "kv", "uint8", axes, 9, 64, offset) for name, offset in (("a", 0), ("b", 32))]
    workers = [Worker(name, 0, [Region("kv", 4096, 576)], [Group("attn", 4)], views) for name in "dp"]
    plan = plan_reads(workers[0], [workers[1]])
    assert certify(plan)
    less = attrs.evolve(workers[side], views=[views[0], attrs.evolve(views[1], num_blocks=8)])
    fewer = attrs.evolve(plan, local=less) if side == 0 else attrs.evolve(plan, remotes=(less,))
    assert "ids that follow the blocks of every view" in refused(fewer)


def test_a_source_of_another_dtype_is_no_proof():
    """Bytes of elements that the two sides read differently are not the same bytes, wherever they go."""
    plan = PLANS["equal blocks"]
    (source,) = plan.remotes
    other = attrs.evolve(source, views=[attrs.evolve(view, dtype="float16") for view in source.views])
    assert "of p/0: expected ('bfloat16', " in refused(attrs.evolve(plan, remotes=(other,)))


def test_a_plan_of_another_source_is_no_proof():
    """Tables of one pair used with the worker of another read heads of the wrong rank."""
    plan = plan_reads(engine("d")[0], engine("p", tp=2))
    swapped = attrs.evolve(plan, remotes=plan.remotes[::-1])
    refused(swapped)


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


def test_sources_that_repeat_after_unequal_periods_are_proved():
    """Blocks of 8 tokens repeat twice while those of 16 do once, and cuts with them."""
    sources = [engine("p", tp=2, tokens=tokens)[rank] for rank, tokens in enumerate((8, 16))]
    proof = certify(plan_reads(engine("d")[0], sources))
    assert (proof.num_bytes, proof.complete) == (16 * 2 * 4 * 16, True)


def test_a_plan_that_moves_nothing_is_proved():
    """The certificate has zero bytes in zero parts."""
    (mine,) = engine("d", layers=1)
    assert certify(plan_reads(mine, [], not_transferred=["layers.0"])) == Certificate(0, 0, True)


def test_a_plan_too_large_to_follow_is_refused(monkeypatch):
    """The limit holds for every direction, before parts are listed."""
    destinations, sources = engine("d", tp=2), engine("p")
    plans = (
        plan_reads(destinations[0], sources),
        plan_writes(sources[0], destinations),
        plan_mesh(destinations, sources),
    )
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", 0)
    for plan in plans:
        with pytest.raises(KVPlanError, match=r"RANGE: cannot certify .*: expected at most 0 parts"):
            certify(plan)


def test_the_limit_is_for_all_series_of_a_destination_together(monkeypatch):
    """Two sources, each with the tokens of two layers: 2 * 8 descriptors of one token, and as many parts of them."""
    plan = plan_reads(engine("d", tp=2, order="NH")[0], engine("p", tp=4, order="NH")[:2])
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", 32)
    assert certify(plan)
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", 31)
    with pytest.raises(KVPlanError, match=r"RANGE: .*: expected at most 31 parts to follow, got 32"):
        certify(plan)


def test_the_pieces_of_a_worker_are_counted_before_they_are_listed(monkeypatch):
    """A token of a layer has four heads: of two layers, in blocks of four tokens, these are 32 pieces."""
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", 31)
    with pytest.raises(KVPlanError, match=r"RANGE: cannot certify pieces of d/0: expected at most 31 .* got 32"):
        certify(PLANS["equal blocks"])


@pytest.mark.parametrize(("name", "number"), [("pieces of larger blocks", 416), ("contexts", 296)])
def test_the_limit_is_for_all_starts_of_all_periods(monkeypatch, name, number):
    """Runs that begin at four positions are followed four times; a cycle of the contexts, as often as they repeat."""
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", number)
    assert certify(PLANS[name])
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", number - 1)
    with pytest.raises(KVPlanError, match=rf"RANGE: .*: expected at most {number - 1} parts to follow, got {number}"):
        certify(PLANS[name])


def test_ids_of_32_bits_are_no_proof_where_a_pool_has_more():
    """Ids that bind computes in 32 bits stay below 2**31 in every block of the pool, also where the row goes on."""
    (mine,), (other,) = (engine(name, blocks=1 << 29, layers=1, heads=1, order="NH") for name in "dp")
    plan = plan_reads(mine, [other])
    (one,) = layout_of(plan).tokens
    assert one.base.dtype == np.int64
    assert certify(plan)
    narrow = changed(plan, ("tokens", 0), base=lambda base: base.astype(np.int32))
    assert "ids of 536870912 blocks that stay in row" in refused(narrow)


Range = tuple[int, int]
"""First byte and length."""


def made(ranges: list[Range]) -> Pieces:
    """Pieces with these starts and lengths."""
    start, length = np.array(ranges, np.int64).T
    return Pieces(start, length, *[np.zeros_like(start)] * 5)


def test_parts_are_counted_before_they_are_listed(monkeypatch):
    """RANGE: a range over two pieces is two parts."""
    pieces, start, length = made([(0, 4), (4, 4)]), np.array([0]), np.array([8])
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", 2)
    assert pieces.cut(start, length)
    monkeypatch.setattr("kvplan.verification.certificate.MAX_PARTS", 1)
    with pytest.raises(KVPlanError, match=r"RANGE: cannot certify parts of descriptors: expected at most 1 .* got 2"):
        pieces.cut(start, length)


def walked(pieces: list[Range], ranges: list[Range]) -> list[tuple[int, int, int]] | None:
    """The range, the piece and the address of every byte; ``None`` if one is in no piece."""
    holder = {start + i: piece for piece, (start, length) in enumerate(pieces) for i in range(length)}
    every = [(i, start + at) for i, (start, length) in enumerate(ranges) for at in range(length)]
    return [(i, holder[at], at) for i, at in every] if all(at in holder for _, at in every) else None


@st.composite
def pieces_of_a_block(draw: st.DrawFn) -> list[Range]:
    """A few ascending pieces, some with gaps before them."""
    start, found = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=5)):
        found.append((start + gap, length))
        start += gap + length
    return found


@given(pieces_of_a_block(), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=4))
@example([(2, 2), (4, 2)], [(0, 6)])  # as many bytes before the pieces as the last one has
@example([(2, 2), (4, 2)], [(0, 6), (2, 2)])
@example([(2, 2)], [(0, 1)])
@example([(0, 2)], [(1, 2)])
def test_ranges_are_cut_where_a_walk_changes_pieces(pieces: list[Range], ranges: list[Range]) -> None:
    """The parts have every byte once, with its range and its piece; there are no parts if a byte has no piece."""
    start, length = np.array(ranges, np.int64).T
    cut = made(pieces).cut(start, length)
    expected = walked(pieces, ranges)
    if expected is None:
        assert cut is None
    else:
        assert cut is not None
        parts = zip(*(column.tolist() for column in cut), strict=True)
        assert [(of, piece, begin + i) for of, piece, begin, size in parts for i in range(size)] == expected


def test_a_period_without_all_blocks_of_the_source_is_no_proof():
    """A period that repeats before the blocks of the source do would leave some of their slots unseen."""
    plan = plan_reads(engine("d", tokens=2, order="NH")[0], engine("p", tp=2, tokens=4))
    wrong = changed(plan, period=lambda period: period // 2)
    assert "period in the form" in refused(
        changed(wrong, ("tokens", 0), sub=lambda sub: (sub[0], sub[1][[0, 1, 3, 2]]))
    )


def test_writers_that_leave_out_different_tensors_are_no_proof():
    """The plans of all writers agree on what is not transferred."""
    mesh = plan_mesh(engine("d"), engine("p", tp=2), "WRITE")
    first, second = mesh.plans
    assert "not_transferred" in refused([first, attrs.evolve(second, not_transferred=("layers.0",))])


def test_workers_of_two_descriptions_are_no_proof():
    """Plans that belong together describe a worker once."""
    first, second = plan_mesh(engine("d"), engine("p", tp=2), "WRITE").plans
    (mine,) = second.remotes
    other = attrs.evolve(mine, groups=(*mine.groups, Group("more")))
    assert "one description of the worker" in refused([first, attrs.evolve(second, remotes=(other,))])
    reads = [plan_reads(reader, engine("p")) for reader in (mine, other)]
    assert "one description of the worker" in refused(reads)


def test_a_writer_may_describe_its_buffer_for_each_destination():
    """A staging buffer holds other heads for each peer, in the same regions; in other regions it is another worker."""
    destinations, (first, second) = engine("d", tp=2), engine("p", tp=2)
    again = attrs.evolve(first, views=second.views)
    elsewhere = attrs.evolve(again, regions=second.regions)
    writes = plan_writes(first, destinations[:1])
    assert certify([writes, plan_writes(again, destinations[1:])]).complete
    assert "one description of the worker" in refused([writes, plan_writes(elsewhere, destinations[1:])])


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
    assert "one description of the worker" in refused([first, second])


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
    with pytest.raises(KVPlanError, match="RANGE: cannot certify parts of descriptors: expected at most"):
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
