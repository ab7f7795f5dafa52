"""Advice: which changes are planned, what is printed, and that every figure is the cost of a plan."""

from __future__ import annotations

import attrs
import pytest

from kvplan import KVPlanError, Model, plan_mesh
from kvplan.cli.advise import Advice, Suggestion, advise, changed_options
from kvplan.cli.matrix import shortened
from kvplan.cli.options import EngineOptions
from kvplan.plan import Cost

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
PLAIN = EngineOptions()


def cost(src: str, dst: str, tokens: int = 100) -> Cost:
    """The cost of a plan between two engines."""
    sources, destinations = (
        EngineOptions.parse(side, name).engine(TINY, name, 4096) for name, side in (("src", src), ("dst", dst))
    )
    return plan_mesh(destinations, sources).cost(tokens)


def advice(src: str, dst: str, tokens: int = 100) -> Advice:
    return advise(TINY, EngineOptions.parse(src, "src"), EngineOptions.parse(dst, "dst"), tokens)


def keys(model: Model, side: EngineOptions = PLAIN, other: EngineOptions = PLAIN) -> list[str]:
    """The changes of an engine."""
    return [*changed_options(model, side, other)]


def test_changes_are_those_that_make_sense_for_a_model() -> None:
    """Latents have no kv form and attention has no convolution; no change is what the engine has already."""
    assert {change.partition("=")[0] for change in keys(TINY)} == {"layout", "kv", "block"}
    assert {change.partition("=")[0] for change in keys(Model.shipped("deepseek-v3"))} == {"layout", "block"}
    assert {change.partition("=")[0] for change in keys(Model.shipped("falcon-mamba-7b"))} == {"layout", "conv"}
    assert not {"layout=LBHNC", "kv=content", "block=16", "conv=DS"} & {*keys(TINY), *keys(HYBRID)}


def test_the_other_engines_block_size_is_tried() -> None:
    """The block size of the other engine is one of the changes, also if it is auto."""
    assert "block=48" in keys(TINY, other=EngineOptions(block=48))
    assert "block=auto" in keys(HYBRID, other=EngineOptions(block=None))
    assert "block=auto" not in keys(HYBRID, EngineOptions(block=None), EngineOptions(block=None))


def test_every_figure_is_that_of_a_plan() -> None:
    """Each suggestion costs what a plan of its engines costs, and so do the changes of the same cost."""
    src, dst = "tp=2,layout=LBNHC", "block=32"
    found = advice(src, dst)
    assert found.now.lengths == cost(src, dst).lengths
    assert found.options
    for option in found.options:
        for named in (option.changes, *option.same_cost):
            sides = {"src": EngineOptions.parse(src, "src"), "dst": EngineOptions.parse(dst, "dst")}
            for side, change in named.items():
                key, _, value = change.partition("=")
                others = [part for part in str(sides[side]).split(",") if not part.startswith(f"{key}=")]
                sides[side] = EngineOptions.parse(",".join([*others, f"{key}={value}"]), side)
            assert option.lengths == cost(str(sides["src"]), str(sides["dst"])).lengths


def test_options_are_in_order_and_the_best_pair_is_first() -> None:
    """With heads inside tokens on both engines, no single change helps as much as the best pair."""
    found = advice("tp=2,layout=LBNHC", "layout=LBNHC")
    numbers = [option.descriptors for option in found.options]
    assert numbers == sorted(numbers)
    assert [set(option.changes) for option in found.options].count({"src", "dst"}) == 1
    assert set(found.options[0].changes) == {"src", "dst"}
    assert numbers[0] < numbers[1]


def test_a_pair_that_is_no_better_is_left_out() -> None:
    """If one change does all that can be done, no pair is suggested."""
    found = advice("layout=BLNHC,block=100", "layout=BLNHC,block=16")
    best = found.options[0]
    assert best.descriptors == 1
    assert best.changes == {"dst": "block=100"}


def test_changes_that_cost_the_same_are_one_line() -> None:
    """Changes of one engine with the same figures share a line: keys joined by or, values by slashes."""
    option = Suggestion.of({"src": "layout=BLHNC"}, cost("", ""))
    option = attrs.evolve(option, same_cost=({"src": "layout=LBHNC"}, {"src": "block=64"}))
    assert str(option) == "src layout=BLHNC/LBHNC or block=64"
    sides = {"src": EngineOptions(tp=2, layout="LBNHC"), "dst": PLAIN}
    options = advice("tp=2,layout=LBNHC", "").options
    for name, other in (("src", "dst"), ("dst", "src")):
        alone = [option for option in options if option.changes.keys() == {name}]
        figures = [(option.rows, *option.lengths.items()) for option in alone]
        assert len(set(figures)) == len(figures)
        found = [changes[name] for option in alone for changes in (option.changes, *option.same_cost)]
        assert sorted(found) == sorted(keys(TINY, sides[name], sides[other]))


def test_what_helps_is_printed_and_no_change_is_last() -> None:
    """At most a dozen lines have the changes that need fewer descriptors, then the engines as they are."""
    found = advice("tp=2,layout=LBNHC", "")
    heading, *lines = str(found).splitlines()
    assert heading.split() == ["descriptors", "fewer", "size", "rows", "change"]
    assert lines[-1].endswith("no change")
    assert len(lines) == len(found.helpful) + 1 < 12
    best = found.options[0].descriptors
    assert lines[0].split()[:2] == [f"{best:,}", f"{found.now.descriptors / best:.4g}x"]


def test_if_nothing_helps_one_line_says_so() -> None:
    """If both engines have whole blocks in one piece, no change saves a descriptor."""
    found = advice("layout=BLNHC,block=128", "layout=BLNHC,block=128")
    assert found.helpful == ()
    assert str(found).splitlines()[-1] == f"No change helps ({len(found.options)} tried)."


def test_a_change_without_effect_is_left_out() -> None:
    """With one head, memory is the same with heads outside blocks and inside, so that is no change."""
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
    found_changes = [
        change for option in found.options for named in (option.changes, *option.same_cost) for change in named.values()
    ]
    assert "layout=LBNHC" in found_changes
    assert "layout=LHBNC" not in found_changes
    assert found.refused == ()


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    """A change that other options rule out is refused with the reason, and the others are planned."""
    found = advise(HYBRID, EngineOptions(shared=True), EngineOptions(shared=True), 16)
    refused = {tuple(each["changes"].items()): each["reason"] for each in found.refused}
    assert refused[("src", "layout=BHLNC"),].startswith("LAYOUT: cannot ")
    assert found.options


def test_engines_that_cannot_be_are_an_error() -> None:
    """Engines that can't be planned without a change raise what planning raises."""
    with pytest.raises(KVPlanError, match="LAYOUT: cannot spread positions"):
        advise(TINY, EngineOptions(tp=4, dcp=2), EngineOptions(), 10)


def test_usual_size_is_where_most_bytes_are() -> None:
    """Many short descriptors at the end of a request don't hide that nearly all bytes move in long ones."""
    option = Suggestion.of({}, cost("", "", 20))
    (short, many), (long, few) = option.lengths.items()
    assert many > few
    assert option.usual_bytes == long > short
    assert Suggestion.of({}, cost("", "", 0)).usual_bytes == 0
