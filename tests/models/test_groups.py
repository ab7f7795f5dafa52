"""Groups: how layers are divided into block tables, and what their windows still see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.models.groups import grouped, visible, windows
from kvplan.models.model import Model
from kvplan.models.states import mamba1
from kvplan.models.tensors import FULL, SLIDING, STATE, Layer, attention

OF_KIND: dict[str, Layer] = {
    SLIDING: attention(2, 8, SLIDING, 64),
    FULL: attention(2, 8),
    STATE: mamba1(8, 4, 3, "bfloat16", "float32"),
    "both": (*attention(2, 8), *mamba1(8, 4, 3, "bfloat16", "float32")),
}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gemma-3-27b", {"swa": [9, 9, 9, 9, 8, 8], "attn": [10]}),
        ("gemma-4-31b", {"swa": [10] * 5, "attn": [10]}),
        ("gpt-oss-120b", {"swa": [18], "attn": [18]}),
        ("nemotron-h-8b", {"state": [4] * 6, "attn": [4]}),
        ("nemotron-3-nano-30b-a3b", {"state": [6, 6, 6, 5], "attn": [6]}),
        ("qwen3-next-80b", {"state": [12] * 3, "attn": [12]}),
        ("granite-4.0-h-tiny", {"state": [4] * 9, "attn": [4]}),
        ("jamba-v0.1", {"state": [4] * 7, "attn": [4]}),
        ("llama-3.1-8b", {"attn": [32]}),
    ],
)
def test_groups_have_as_many_layers_as_the_smallest(model: str, sizes: dict[str, list[int]]) -> None:
    """Layers of each group of a real model, as vLLM divides them."""
    found: dict[str, dict[str, int]] = {}
    for layer in Model.shipped(model).grouped().layers:
        for group in {tensor.group for tensor in layer}:
            of_kind = found.setdefault(group.partition(".")[0], {})
            of_kind[group] = of_kind.get(group, 0) + 1
    assert {kind: sorted(counts.values(), reverse=True) for kind, counts in found.items()} == sizes


def test_a_kind_that_is_little_larger_stays_one_group() -> None:
    """12 sliding and 13 full layers are one group each; 12 and 18 are three."""
    for full, groups in ((13, 2), (17, 2), (18, 3)):
        (layers,) = grouped((OF_KIND[SLIDING],) * 12 + (OF_KIND[FULL],) * full)
        assert len({tensor.group for layer in layers for tensor in layer}) == groups


@given(st.lists(st.sampled_from(sorted(OF_KIND)), max_size=40), st.lists(st.sampled_from(sorted(OF_KIND)), max_size=9))
def test_only_the_names_of_groups_change(kinds: list[str], drafts: list[str]) -> None:
    """Each layer keeps its tensors, groups of one kind differ by a layer at most, and each begins with its kind."""
    parts = tuple(OF_KIND[kind] for kind in kinds), tuple(OF_KIND[kind] for kind in drafts)
    made = grouped(*parts)
    assert [len(part) for part in made] == [len(part) for part in parts]
    counts: dict[str, dict[str, int]] = {}
    for part, new in zip(parts, made, strict=True):
        for layer, divided in zip(part, new, strict=True):
            assert [(t.kind, t.axes) for t in layer] == [(t.kind, t.axes) for t in divided]
            for before, after in {(a.group, b.group) for a, b in zip(layer, divided, strict=True)}:
                assert after.partition(".")[0] == before
                of_kind = counts.setdefault(before, {})
                of_kind[after] = of_kind.get(after, 0) + 1
    assert all(max(c.values()) - min(c.values()) <= 1 for c in counts.values())


def test_the_farthest_window_of_a_group_counts() -> None:
    """A draft that attends to all positions, or farther, makes its group do so."""
    assert windows([attention(2, 8, "g", 64), attention(2, 8, "g", 32)]) == {"g": 64}
    for layers in ([attention(2, 8, "g", 64), attention(2, 8, "g")], [attention(2, 8, "g"), attention(2, 8, "g", 64)]):
        assert windows(layers) == {"g": None}


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 50))
def test_what_is_left_out_is_never_seen_again(start: int, length: int, window: int) -> None:
    """A position moves exactly where some token at the stop or later attends to it."""
    stop = start + length
    (low, high) = visible({"g": window}, start, stop)["g"]
    seen = [p for p in range(start, stop) if any(p > token - window for token in range(stop, stop + 60))]
    assert list(range(low, high)) == seen


@pytest.mark.parametrize(("start", "stop", "code"), [(5, 4, "RANGE"), (-1, 4, "RANGE"), (0, 4.0, "TYPE")])
def test_a_range_that_is_none_is_refused(start: int, stop: int, code: str) -> None:
    """Ranges are of integers, from start to stop."""
    with pytest.raises(KVPlanError, match="of a token range") as caught:
        visible({"g": None}, start, stop)
    assert caught.value.code == code
