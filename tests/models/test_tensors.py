"""Tensors: which shards a rank holds of each kind of cache, and what quantization makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan import KVPlanError, Model
from kvplan.models.tensors import Layer, Tensor, attention, delta, latent, mamba1, mamba2, quantize, sparse_latent


@pytest.mark.parametrize("query_heads", [24, 48])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("heads", [1, 2, 4, 12])
def test_a_rank_holds_the_heads_that_its_query_heads_read(heads: int, tp: int, query_heads: int) -> None:
    """Query head q reads KV head q * K // Q; a rank has exactly those of its share of the query heads."""
    tensor = Tensor("attn", "attn", (("head", heads),), sharded="head", shards=heads)
    share = query_heads // tp
    for rank in range(tp):
        read_by = {q * heads // query_heads for q in range(rank * share, (rank + 1) * share)}
        assert set(tensor.shards_of(rank, tp)) == read_by


def test_shards_stay_whole() -> None:
    """An axis of 32 channels in 4 shards goes to 3 ranks by shards of 8 channels."""
    tensor = Tensor("conv", "state", (("step", 3), ("channel", 32)), paged=False, sharded="channel", shards=4)
    parts = [next(part for part in tensor.local_axes(rank, 3) if part.name == "channel") for rank in range(3)]
    assert [(part.start, part.stop, part.size) for part in parts] == [(0, 16, 32), (8, 24, 32), (16, 32, 32)]


@pytest.mark.parametrize(("sharded", "shards"), [("head", 3), ("channel", 1)])
def test_shards_divide_an_axis_of_the_tensor(sharded: str, shards: int) -> None:
    """The sharded axis exists, and its size is a multiple of its shards."""
    with pytest.raises(KVPlanError, match=r"^SIZE: "):
        Tensor("attn", "attn", (("head", 8),), sharded=sharded, shards=shards)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("groups", [1, 2, 3, 8, 24])
def test_a_rank_holds_the_groups_of_its_heads(groups: int, tp: int) -> None:
    """Head h uses group h * G // H; a rank has exactly those of its heads, fewer, as many or more than ranks."""
    heads = 24
    x, b, c, ssm = mamba2(heads, 4, groups, 8, 3, "bfloat16", "float32")
    for rank in range(tp):
        used = {head * groups // heads for head in ssm.shards_of(rank, tp)}
        assert set(b.shards_of(rank, tp)) == set(c.shards_of(rank, tp)) == used
        assert x.shards_of(rank, tp) == ssm.shards_of(rank, tp)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16, 32])
def test_a_rank_holds_the_key_heads_of_its_value_heads(tp: int) -> None:
    """Of 16 key heads and 32 value heads, q and k follow the value heads that use them."""
    q, k, v, ssm = delta(16, 4, 32, 4, 3, "bfloat16", "float32")
    for rank in range(tp):
        used = {head // 2 for head in v.shards_of(rank, tp)}
        assert set(q.shards_of(rank, tp)) == set(k.shards_of(rank, tp)) == used
        assert v.shards_of(rank, tp) == ssm.shards_of(rank, tp)


def test_a_mamba_layer_divides_channel_by_channel() -> None:
    """Without heads any number of ranks has its share of channels, in the convolution and in the SSM."""
    x, ssm = mamba1(10, 4, 3, "bfloat16", "float32")
    assert [x.shards_of(rank, 3) for rank in range(3)] == [range(4), range(3, 7), range(6, 10)]
    assert [ssm.shards_of(rank, 3) for rank in range(3)] == [range(4), range(3, 7), range(6, 10)]


@pytest.mark.parametrize(
    ("layer", "widths", "ssm"),
    [
        (mamba1(12, 4, 3, "float16", "float32"), {"x": 12}, (("channel", 12), ("state", 4))),
        (
            mamba2(6, 5, 2, 4, 3, "float16", "float32"),
            {"x": 30, "B": 8, "C": 8},
            (("head", 6), ("dim", 5), ("state", 4)),
        ),
        (
            delta(2, 3, 4, 5, 3, "float16", "float32"),
            {"q": 6, "k": 6, "v": 20},
            (("head", 4), ("value", 5), ("key", 3)),
        ),
    ],
)
def test_states_have_the_axes_of_the_engines(layer: Layer, widths: dict[str, int], ssm: tuple[Any, ...]) -> None:
    """The convolution's channels come in the engines' order, and the state's axes from the slowest to the fastest."""
    *convs, state = layer
    assert [(tensor.kind, tensor.axes) for tensor in convs] == [
        (f"conv.{part}", (("channel", width), ("step", 3))) for part, width in widths.items()
    ]
    assert (state.axes, state.dtype, {tensor.dtype for tensor in convs}) == (ssm, "float32", {"float16"})


@pytest.mark.parametrize(("elements", "bits", "size"), [(128, 4, 64), (16, 6, 12), (5, 8, 5), (8, 1, 1)])
def test_values_are_packed(elements: int, bits: int, size: int) -> None:
    """The values of a head follow each other bit by bit."""
    values, _ = quantize(attention(2, elements), bits, "float32", None)
    assert values.axes == (("kv", 2), ("head", 2), ("byte", size))


def test_a_head_that_ends_inside_a_byte_is_refused() -> None:
    """3 elements of 4 bits end inside a byte, where the next head would begin."""
    with pytest.raises(
        KVPlanError, match=r"pack each head of 'attn' into bytes: .*, got 3 elements of 4 bits"
    ) as caught:
        quantize(attention(2, 3), 4, "float32", None)
    assert (caught.value.code, dict(caught.value.details)) == ("SIZE", {"elements": 3, "bits": 4})


def test_scales_divide_like_their_heads() -> None:
    """Whichever heads a rank holds, it holds their scales."""
    values, scales = quantize(attention(12, 128), 8, "float32", None)
    for tp in (1, 5, 12, 24):
        for rank in range(tp):
            assert values.shards_of(rank, tp) == scales.shards_of(rank, tp)
    assert dict(scales.axes)["scale"] == 1


@pytest.mark.parametrize("layer", [latent(12, 4), sparse_latent(128, 64, 128)])
def test_latents_are_not_scaled_by_head(layer: Any) -> None:
    """What has no heads stays as it is."""
    assert quantize(layer, 8, "float32", None) == layer


@pytest.mark.parametrize(
    ("options", "code"), [((8, "float32", 3), "SIZE"), ((8, "fp4", None), "DTYPE"), ((0, "float32", None), "RANGE")]
)
def test_scales_that_cannot_be_are_refused(options: tuple[int, str, int | None], code: str) -> None:
    """Scales divide a head, and are of a known dtype."""
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        quantize(attention(2, 8), *options)


def test_replicas_are_counted_rank_by_rank() -> None:
    """The fewest ranks that hold a shard are those that shards_of names, for any number of ranks and shards."""
    for shards in range(1, 9):
        tensor = Tensor("t", "g", (("head", shards),), sharded="head", shards=shards)
        for ranks in range(1, 20):
            held = [sum(unit in tensor.shards_of(rank, ranks) for rank in range(ranks)) for unit in range(shards)]
            assert tensor.replicas(ranks) == min(held)
    assert latent(12, 4)[0].replicas(7) == 7


def test_k_and_v_of_unequal_sizes_are_beside_each_other() -> None:
    """V follows K in each head of a token; they have no axis of their own to be placed or scaled apart."""
    model = Model("unequal", (attention(4, 192, value_dim=128),))
    (worker,) = model.engine("decode", layout="LBNHC", tokens_per_block=16, num_blocks=2)
    assert [(axis.name, axis.extent, axis.stride_bytes) for axis in worker.views[0].axes] == [
        ("token", 16, 2560),
        ("head", 4, 640),
        ("dim", 320, 2),
    ]
    for kv in ("axis", "split"):
        with pytest.raises(KVPlanError, match=r"unequal sizes are next to each other: kv=content") as caught:
            model.engine("decode", kv=kv)
        assert caught.value.code == "LAYOUT"
    with pytest.raises(KVPlanError, match="K and V of equal sizes") as caught:
        model.quantized()
    assert caught.value.code == "SIZE"


@pytest.mark.parametrize(
    "model",
    [
        Model("packed", (attention(4, 64),)).quantized(8),
        Model("by hand", ((Tensor("attn", "attn", (("kv", 2), ("head", 4)), sharded="head", shards=4),),)),
    ],
)
def test_heads_without_elements_are_not_quantized(model: Model) -> None:
    """Bytes and scales of a quantized cache are no elements, so it cannot be quantized again."""
    with pytest.raises(KVPlanError, match=r"^SIZE: .*K and V of elements on an axis 'dim'"):
        model.quantized(8)
