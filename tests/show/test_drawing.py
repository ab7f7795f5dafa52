"""Drawings: exact texts that a person can check by hand, narrow whatever is drawn."""

from __future__ import annotations

import pytest

from kvplan import Axis, Group, Model, Region, View, Worker, plan_reads, plan_writes
from kvplan.show.drawing import draw_page, draw_panel, draw_panels, draw_worker
from kvplan.show.pages import pages
from kvplan.show.panels import panels
from tests.small import engine

LLAMA = Model.shipped("llama-3.1-8b")


def state(parts: int, step_bytes: int) -> Worker:
    """A state of so many tensors of 2 heads of 16 bytes, with room for more."""
    region = Region("ssm", 4096, 1 << 20)
    axes = (Axis("head", 0, 2, 2, 16), Axis("dim", 0, 2, 2, 8))
    views = [View(f"layers.0.part{i}", "g", region, "float64", axes, 4, 8192, step_bytes * i) for i in range(parts)]
    return Worker("e", 0, [region], [Group("g")], views)


def text(drawing: str) -> str:
    """A drawing as it stands in a test."""
    return "\n".join(line.strip() for line in drawing.strip().splitlines())


def test_heads_outside_tokens() -> None:
    """Head by head, token by token, K before V: a head of one token is 16 bytes, easy to check by hand."""
    (page,) = pages(engine("e", tp=2)[0])
    assert draw_page(page) == text("""
        head  │ 0                                     │ 1                                     │
        token │ 0       │ 1       │ 2       │ 3       │ 0       │ 1       │ 2       │ 3       │
        kv    │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │
        byte  │ 0  │ 8  │ 16 │ 24 │ 32 │ 40 │ 48 │ 56 │ 64 │ 72 │ 80 │ 88 │ 96 │ 104│ 112│ 120│
    """)


def test_tokens_outside_heads() -> None:
    """The other order has the rows exchanged."""
    (page,) = pages(engine("e", tp=2, tokens=2, order="NH")[0])
    assert draw_page(page) == text("""
        token │ 0                 │ 1                 │
        head  │ 0       │ 1       │ 0       │ 1       │
        kv    │ K  │ V  │ K  │ V  │ K  │ V  │ K  │ V  │
        byte  │ 0  │ 8  │ 16 │ 24 │ 32 │ 40 │ 48 │ 56 │
    """)


def test_what_does_not_belong_to_the_page_is_hatched() -> None:
    """Between heads outside blocks are other blocks, and behind a padded page is its pad."""
    (page,) = pages(LLAMA.engine("e", tp=4, layout="LHBNC", num_blocks=10)[1])
    assert draw_page(page, 100) == text("""
        head  │ 2                                  │ ░   │ 3                                            │
        token │ 0       │ 1       │ ···│ 15        │     │ 0           │ 1           │ ···│ 15          │
        kv    │ K  │ V  │ K  │ V  │    │ K   │ V   │     │ K    │ V    │ K    │ V    │    │ K    │ V    │
        byte  │ 0  │ 256│ 512│ 768│    │ 7680│ 7936│ 8192│ 81920│ 82176│ 82432│ 82688│    │ 89600│ 89856│
    """)
    (page,) = pages(Model.shipped("deepseek-v3").engine("e", pad=64, num_blocks=10)[0])
    assert draw_page(page) == text("""
        token │ 0  │ 1   │ 2   │ ···│ 15   │ ░    │
        byte  │ 0  │ 1152│ 2304│    │ 17280│ 18432│
    """)


def test_what_lies_between_tensors_is_hatched() -> None:
    """Tensors of a page that are aligned have bytes of nobody between them."""
    (page,) = pages(state(parts=2, step_bytes=40))
    assert draw_page(page) == text("""
        tensor │ part0   │ ░  │ part1   │ ░  │
        head   │ 0  │ 1  │    │ 0  │ 1  │    │
        byte   │ 0  │ 16 │ 32 │ 40 │ 56 │ 72 │
    """)


def test_a_tensor_of_one_axis_is_whole() -> None:
    """What has no axis but its elements is drawn as all of them."""
    region = Region("ssm", 4096, 4096)
    view = View("layers.0.state", "g", region, "float32", (Axis("dim", 0, 8, 8, 4),), 4, 32)
    (page,) = pages(Worker("e", 0, [region], [Group("g")], [view]))
    assert draw_page(page) == text("""
        dim  │ 0-7│
        byte │ 0  │
    """)


def test_a_page_of_many_tensors_is_drawn_in_parts() -> None:
    """Where even the coarsest drawing is too wide, it goes on below, each part with its rows."""
    (page,) = pages(state(parts=14, step_bytes=32))
    assert draw_page(page, 100) == text("""
        tensor │ part0│ part1│ part2│ part3│ part4│ part5│ part6│ part7│ part8│ part9│ part10│ part11│
        head   │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1  │ 0-1   │ 0-1   │
        byte   │ 0    │ 32   │ 64   │ 96   │ 128  │ 160  │ 192  │ 224  │ 256  │ 288  │ 320   │ 352   │

        tensor │ part12│ part13│ ░  │
        head   │ 0-1   │ 0-1   │    │
        byte   │ 384   │ 416   │ 448│
    """)


def test_a_plan_shows_both_sides_and_which_bytes_are_the_same() -> None:
    """Two sources with tokens outside heads, two blocks each, and a destination with heads outside tokens."""
    plan = plan_reads(engine("decode")[0], engine("prefill", tp=2, tokens=2, order="NH"))
    (panel,) = panels(plan)
    assert draw_panel(panel, "READ") == text("""
        layers.0-1
        positions [0, 4) of one of 2 equal layers: 256 bytes in 16 copies of 16 bytes
        worker   │ prefill/0                             │ prefill/1                             │
        block    │ 0                 │ 1                 │ 0                 │ 1                 │
        position │ 0       │ 1       │ 2       │ 3       │ 0       │ 1       │ 2       │ 3       │
        head     │ 0  │ 1  │ 0  │ 1  │ 0  │ 1  │ 0  │ 1  │ 2  │ 3  │ 2  │ 3  │ 2  │ 3  │ 2  │ 3  │
        byte     │ 0  │ 16 │ 32 │ 48 │ 0  │ 16 │ 32 │ 48 │ 0  │ 16 │ 32 │ 48 │ 0  │ 16 │ 32 │ 48 │
        copy     │ a  │ e  │ b  │ f  │ c  │ g  │ d  │ h  │ i  │ m  │ j  │ n  │ k  │ o  │ l  │ p  │

        copy     │ a  │ b  │ c  │ d  │ e  │ f  │ g  │ h  │ i  │ j  │ k  │ l  │ m  │ n  │ o  │ p  │
        byte     │ 0  │ 16 │ 32 │ 48 │ 64 │ 80 │ 96 │ 112│ 128│ 144│ 160│ 176│ 192│ 208│ 224│ 240│
        position │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │ 0  │ 1  │ 2  │ 3  │
        head     │ 0                 │ 1                 │ 2                 │ 3                 │
        block    │ 0                                                                             │
        worker   │ decode/0                                                                      │
    """)


def test_a_writer_stands_above() -> None:
    """Bytes go from above to below, whoever moves them."""
    (panel,) = panels(plan_writes(engine("prefill")[0], engine("decode", tp=2)))
    workers = [line for line in draw_panel(panel, "WRITE").splitlines() if line.startswith("worker")]
    assert [line.split("│")[1].strip() for line in workers] == ["prefill/0", "decode/0"]


def test_bytes_that_do_not_move_are_told_by_their_coordinates() -> None:
    """A destination of one head takes half a page, and the other half says which head it is."""
    (panel,) = panels(plan_reads(engine("decode", tp=4)[1], engine("prefill", tp=2)))
    assert draw_panel(panel, "READ").splitlines()[4:7] == [
        "head   │ 0  │ 1   │",
        "byte   │ 0  │ 64  │",
        "copy   │ ░  │ a   │",
    ]


def halves(engine_id: str, rank: int, tp: int, tokens: int, num_blocks: int) -> Worker:
    """A cache of shape (2, blocks, tokens, heads, dim): all K in one half of the region, all V in the other."""
    heads, row = 6 // tp, 6 // tp * 16
    half = num_blocks * tokens * row
    axes = (
        Axis("kv", 0, 2, 2, half),
        Axis("token", 0, tokens, tokens, row),
        Axis("head", rank * heads, rank * heads + heads, 6, 16),
        Axis("dim", 0, 8, 8, 2),
    )
    region = Region("kv", (rank + 1) << 40, 2 * half)
    view = View("layers.0.attn", "attn", region, "bfloat16", axes, num_blocks, tokens * row)
    return Worker(engine_id, rank, [region], [Group("attn", tokens)], [view])


def test_both_halves_of_a_cache_are_opened() -> None:
    """Where K and V stand far apart, the first, the second and the last token of both are shown, with all heads."""
    assert draw_worker(halves("e", 0, 3, 16, 10)) == text("""
        layers.0.attn
        1024 bytes in each of 10 blocks of group attn, step 512
        kv    │ K                                          │ ░  │ V                                                  │
        token │ 0       │ 1       │ 2       │ ···│ 15      │    │ 0         │ 1         │ 2         │ ···│ 15        │
        head  │ 0  │ 1  │ 0  │ 1  │ 0  │ 1  │    │ 0  │ 1  │    │ 0   │ 1   │ 0   │ 1   │ 0   │ 1   │    │ 0   │ 1   │
        byte  │ 0  │ 16 │ 32 │ 48 │ 64 │ 80 │    │ 480│ 496│ 512│ 5120│ 5136│ 5152│ 5168│ 5184│ 5200│    │ 5600│ 5616│

        ░ padding, or of others
    """)


def test_a_plan_of_halves_shows_both_ends_of_the_request() -> None:
    """The first, second and last position are shown of K and V, and so are both blocks that the source has of them."""
    plan = plan_reads(halves("decode", 0, 2, 32, 10), [halves("prefill", rank, 3, 16, 20) for rank in range(3)])
    assert draw_panels(panels(plan), "READ") == text("""
        layers.0.attn
        positions [0, 32): 3072 bytes in 128 copies of 16 bytes to 32 bytes
        worker   │ prefill/0                                        │
        block    │ 0                          │ ···│ 1              │
        kv       │ K       │ ···│ V           │    │ K  │ ···│ V    │
        position │ 0  │ 1  │    │ 0    │ 1    │    │ 31 │    │ 31   │
        byte     │ 0  │ 32 │    │ 10240│ 10272│    │ 480│    │ 10720│
        copy     │ a  │ b  │    │ d    │ e    │    │ c  │    │ f    │

        worker   │ prefill/1                                                           │
        block    │ 0                                      │ ···│ 1                     │
        kv       │ K            │ ···│ V                  │    │ K  │ ···│ V           │
        position │ 0       │ 1  │    │ 0           │ 1    │    │ 31 │    │ 31          │
        head     │ 2  │ 3  │ 2  │    │ 2    │ 3    │ 2    │    │ 2  │    │ 2    │ 3    │
        byte     │ 0  │ 16 │ 32 │    │ 10240│ 10256│ 10272│    │ 480│    │ 10720│ 10736│
        copy     │ g  │ ░  │ h  │    │ j    │ ░    │ k    │    │ i  │    │ l    │ ░    │

        copy     │ a  │ g  │ b  │ h  │    │ c   │ i   │ ░   │ d    │ j    │ e    │ k    │    │ f    │ l    │
        byte     │ 0  │ 32 │ 48 │ 80 │    │ 1488│ 1520│ 1536│ 15360│ 15392│ 15408│ 15440│    │ 16848│ 16880│
        head     │ 0-1│ 2  │ 0-1│ 2  │    │ 0-1 │ 2   │     │ 0-1  │ 2    │ 0-1  │ 2    │    │ 0-1  │ 2    │
        position │ 0       │ 1       │ ···│ 31        │     │ 0           │ 1           │ ···│ 31          │
        kv       │ K                                  │ ░   │ V                                            │
        block    │ 0                                                                                       │
        worker   │ decode/0                                                                                │

        ░ not moved
    """)


def test_what_hatching_means_is_told_once() -> None:
    """A legend stands below all drawings, where any of them has what is hatched."""
    text = draw_panels(panels(plan_reads(engine("decode", tp=4)[1], engine("prefill", tp=2))), "READ")
    assert text.endswith("\n\n░ not moved")
    assert text.count("not moved") == 1
    assert "░" not in draw_panels(panels(plan_reads(engine("decode")[0], engine("prefill"))), "READ")
    assert draw_worker(state(parts=2, step_bytes=40)).endswith("\n\n░ padding, or of others")
    assert "░" not in draw_worker(engine("e")[0])


def test_a_part_ends_where_the_coarsest_axis_goes_on() -> None:
    """A drawing that is too wide is cut between workers rather than within one, if not much of the line is lost."""
    (panel,) = panels(plan_reads(engine("decode")[0], engine("prefill", tp=2, tokens=2, order="NH")))
    rows = [line.split("│")[1:-1] for line in draw_panel(panel, "READ", 60).splitlines() if line.startswith("worker")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["prefill/0"],
        ["prefill/1"],
        ["decode/0"],
        ["decode/0"],
    ]


@pytest.mark.parametrize(
    "name", ["llama-3.1-70b", "deepseek-v3.2", "granite-4.0-h-tiny", "qwen3-next-80b", "gemma-4-31b"]
)
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_drawings_are_narrow(name: str, layout: str, columns: int) -> None:
    """Whatever the model and the layout, no line of a drawing is too wide, but for the names above it."""
    model = Model.shipped(name)
    sources = model.engine("prefill", tp=3, num_blocks=9)
    (local,) = model.engine("decode", layout=layout, tokens_per_block=64, num_blocks=9)
    drawings = [draw_worker(local, columns), draw_panels(panels(plan_reads(local, sources)), "READ", columns)]
    rows = [line for drawing in drawings for line in drawing.splitlines() if "│" in line]
    assert max(map(len, rows)) <= columns
