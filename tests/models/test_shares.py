"""Shares: pages of one rank, and blocks that make the pages of all groups equal."""

from __future__ import annotations

import pytest

from kvplan import KVPlanError
from kvplan.models.shares import Share, equal_blocks, kernel_blocks, stated_blocks
from kvplan.models.states import mamba2
from kvplan.models.tensors import attention, quantized, sparse_latent

QUANTIZED = quantized(attention(4, 8), 8, "float32", None)


@pytest.mark.parametrize(
    ("scales", "pages"),
    [
        ("inline", {"attn.attn": [["attn", "attn.scale"]]}),
        ("page", {"attn.attn": [["attn"], ["attn.scale"]]}),
        ("region", {"attn.attn": [["attn"]], "attn.attn.scale": [["attn.scale"]]}),
    ],
)
def test_scales_stand_where_they_are_asked_to(scales: str, pages: dict[str, list[list[str]]]) -> None:
    """In the strip of their values, in a strip of their own, or in a page and a pool of their own."""
    made = dict(Share(0, 2, {"attn": 16}, scales=scales).pages(QUANTIZED))
    assert {pool: [[held.name for held in strip] for strip in page.strips] for pool, page in made.items()} == pages


def test_pages_are_named_after_their_layer() -> None:
    """The prefix stands before the page and each of its tensors."""
    made = dict(Share(0, 1, {"attn": 16}).pages(sparse_latent(512, 64, 128), "layers.3."))
    assert [page.name for page in made.values()] == ["layers.3.attn", "layers.3.index"]
    assert [held.name for held in made["attn.index"].tensors] == ["layers.3.index", "layers.3.index.scale"]


def test_the_rank_with_most_counts() -> None:
    """Of 3 heads on 2 ranks each holds two, and blocks are made equal by those."""
    layers = [attention(3, 8, "swa"), attention(2, 8)]
    assert equal_blocks(layers, 2, {"swa": 16, "attn": 16}, "bfloat16") == {"swa": 16, "attn": 32}


def test_a_page_that_does_not_divide_the_largest_keeps_its_block() -> None:
    """3 heads and 2 heads have no common page, so no block grows."""
    layers = [attention(3, 8, "swa"), attention(2, 8)]
    assert equal_blocks(layers, 1, {"swa": 16, "attn": 16}, "bfloat16") == {"swa": 16, "attn": 16}


def test_a_layer_of_both_kinds_counts_for_both() -> None:
    """Where one layer attends and keeps a state, a block of its attention is made as large as its state."""
    both = (*attention(2, 8), *mamba2(4, 8, 1, 4, 3, "bfloat16", "float32"))
    state = 3 * 2 * (4 * 8 + 2 * 4) + 4 * 4 * 8 * 4
    assert kernel_blocks([both], 1, 2, "content", "bfloat16") == -(-state // (2 * 2 * 2 * 8 * 2))


def test_stated_blocks_are_of_each_group() -> None:
    """A group left out, or one too many, is refused with the groups there are."""
    for given in ({}, {"attn": 16, "state": 16}):
        with pytest.raises(KVPlanError, match="page m: expected tokens_per_block of attn, got") as caught:
            stated_blocks("m", ("attn",), given)
        assert caught.value.code == "NAME"
