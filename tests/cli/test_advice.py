"""Advice: what is planned, what is told, and that every figure is a plan's."""

from __future__ import annotations

import pytest

from kvplan import KVPlanError, Model, plan_mesh
from kvplan.cli.advice import Advice, Option, advise, changes
from kvplan.cli.matrix import shortened
from kvplan.cli.sides import Side
from kvplan.plan.cost import Cost

TINY = Model.from_config(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
)
HYBRID = shortened(Model.shipped("granite-4.0-h-tiny"))
PLAIN = Side()


def cost(src: str, dst: str, tokens: int = 100) -> Cost:
    """What a plan between two sides costs."""
    sources, destinations = (
        Side.parse(side, name).engine(TINY, name, 4096) for name, side in (("src", src), ("dst", dst))
    )
    return plan_mesh(destinations, sources).cost(tokens)


def advice(src: str, dst: str, tokens: int = 100) -> Advice:
    return advise(TINY, Side.parse(src, "src"), Side.parse(dst, "dst"), tokens)


def keys(model: Model, side: Side = PLAIN, other: Side = PLAIN) -> list[str]:
    """The changes of a side."""
    return [change for change, _ in changes(model, side, other)]


def test_changes_are_those_that_mean_something_to_a_model() -> None:
    """Latents have no kv form and attention no convolution; no change is what the side has already."""
    assert {change.partition("=")[0] for change in keys(TINY)} == {"layout", "kv", "block"}
    assert {change.partition("=")[0] for change in keys(Model.shipped("deepseek-v3"))} == {"layout", "block"}
    assert {change.partition("=")[0] for change in keys(Model.shipped("falcon-mamba-7b"))} == {"layout", "conv"}
    assert not {"layout=LBHNC", "kv=content", "block=16", "conv=DS"} & {*keys(TINY), *keys(HYBRID)}


def test_the_other_sides_block_is_tried() -> None:
    """Whatever block the other side has is a change worth trying, auto as well."""
    assert "block=48" in keys(TINY, other=Side(block=48))
    assert "block=auto" in keys(HYBRID, other=Side(block=None))
    assert "block=auto" not in keys(HYBRID, Side(block=None), Side(block=None))


def test_every_figure_is_that_of_a_plan() -> None:
    """Each option costs what its sides cost when they are planned, and so do all options said to be alike."""
    src, dst = "tp=2,layout=LBNHC", "block=32"
    found = advice(src, dst)
    assert found.now.cost.lengths == cost(src, dst).lengths
    assert found.options
    for option in found.options:
        for named in (option.changes, *option.alike):
            sides = {"src": Side.parse(src, "src"), "dst": Side.parse(dst, "dst")}
            for side, change in named.items():
                key, _, value = change.partition("=")
                kept = [part for part in str(sides[side]).split(",") if not part.startswith(f"{key}=")]
                sides[side] = Side.parse(",".join([*kept, f"{key}={value}"]), side)
            assert option.cost.lengths == cost(str(sides["src"]), str(sides["dst"])).lengths


def test_options_are_in_order_and_the_best_pair_is_first() -> None:
    """With heads inside tokens on both sides, no change of one helps as much as the right one of both."""
    found = advice("tp=2,layout=LBNHC", "layout=LBNHC")
    numbers = [option.cost.num_descriptors for option in found.options]
    assert numbers == sorted(numbers)
    assert [set(option.changes) for option in found.options].count({"src", "dst"}) == 1
    assert set(found.options[0].changes) == {"src", "dst"}
    assert numbers[0] < numbers[1]


def test_a_pair_that_is_no_better_is_not_told() -> None:
    """Where one change does all that can be done, no second one is asked for."""
    found = advice("layout=BLNHC,block=100", "layout=BLNHC,block=16")
    best = found.options[0]
    assert best.cost.num_descriptors == 1
    assert best.changes == {"dst": "block=100"}


def test_changes_that_cost_the_same_are_one_line() -> None:
    """Changes of one side with the same figures are folded, keys in words and values behind each other."""
    option = Option({"src": "layout=BLHNC"}, cost("", ""), ({"src": "layout=LBHNC"}, {"src": "block=64"}))
    assert str(option) == "src layout=BLHNC/LBHNC or block=64"
    for name in ("src", "dst"):
        alone = [option for option in advice("tp=2,layout=LBNHC", "").options if option.changes.keys() == {name}]
        figures = [(option.cost.num_rows, *option.cost.lengths.items()) for option in alone]
        assert len(set(figures)) == len(figures)


def test_what_helps_is_told_and_what_is_now_last() -> None:
    """At most a dozen lines have what takes fewer descriptors, then what there is now."""
    found = advice("tp=2,layout=LBNHC", "")
    heading, *lines = str(found).splitlines()
    assert heading.split() == ["descriptors", "fewer", "mostly", "of", "rows", "change"]
    assert lines[-1].endswith("as it is")
    assert len(lines) == len(found.helpful) + 1 < 12
    best = found.options[0].cost.num_descriptors
    assert lines[0].split()[:2] == [f"{best:,}", f"{found.now.cost.num_descriptors / best:.4g}x"]


def test_where_nothing_helps_that_is_said() -> None:
    """Where both engines keep a request's blocks whole, no change makes one descriptor fewer."""
    found = advice("layout=BLNHC,block=128", "layout=BLNHC,block=128")
    assert found.helpful == ()
    assert str(found).splitlines()[-1] == f"Nothing helps, of {len(found.options)} changes."


def test_a_change_that_changes_nothing_is_no_option() -> None:
    """With one head it is the same memory whether heads are outside blocks or inside, so that is no change."""
    model = Model.from_config(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
        }
    )
    assert "layout=LHBNC" in keys(model)
    found = advise(model, PLAIN, PLAIN, 100)
    told = [
        change for option in found.options for named in (option.changes, *option.alike) for change in named.values()
    ]
    assert "layout=LBNHC" in told
    assert "layout=LHBNC" not in told
    assert found.refused == ()


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    """A change that a side's other words rule out is left out, with the reason, and the others are planned."""
    found = advise(HYBRID, Side(shared=True), Side(shared=True), 16)
    refused = {tuple(changed.items()): reason for changed, reason in found.refused}
    assert refused[("src", "layout=BHLNC"),].startswith("LAYOUT: cannot place pools")
    assert found.options


def test_a_pair_of_sides_that_cannot_be_is_an_error() -> None:
    """What can't be planned without any change is refused as planning refuses it."""
    with pytest.raises(KVPlanError, match="LAYOUT: cannot spread positions"):
        advise(TINY, Side(tp=4, dcp=2), Side(), 10)


def test_usual_bytes_are_where_most_bytes_are() -> None:
    """Many short descriptors at a request's end do not hide that nearly all bytes move in long ones."""
    option = Option({}, cost("", "", 1000))
    assert option.usual_bytes == max(option.cost.lengths)
    assert Option({}, cost("", "", 0)).usual_bytes == 0
