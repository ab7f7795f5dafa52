"""Offers: small, canonical, read back as what was written; and fingerprints of geometry alone."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from kvplan import Axis, Context, Group, KVPlanError, Model, Region, View, Worker, decode, encode
from kvplan.handshake import fingerprint
from kvplan.handshake.schema import MAX_AXES, MAX_LAYOUTS, MAX_ROWS
from kvplan.models.layouts import KV_FORMS, ORDERS
from tests.small import axes, engine

GOLDEN = Path(__file__).parents[1] / "golden"
DIM = Axis("dim", 0, 4, 4, 2)
TURNS = Group("kv", 2, Context(1, 2, 3))


def states(**changes) -> Worker:
    """A worker of one state group, whose names have no number and other scripts."""
    fields = {"regions": [Region("état", 64, 800)], "groups": [Group("𝔰𝔰𝔪")]}
    view = View("ssm", "𝔰𝔰𝔪", "état", "bfloat16", (DIM,), 9, 80)
    return Worker(**{"engine_id": "é", "rank": 7, **fields, "views": [view], **changes})


def turns() -> Worker:
    """A worker of a context, with K and V in two regions, one of them at the very end of memory."""
    held = (Axis("head", 4, 8, 8, 32), Axis("token", 0, 2, 2, 16))
    parts = [(*held, Axis("kv", i, i + 1, 2, 0), DIM) for i in (0, 1)]
    regions = [Region("kv.0", (1 << 64) - 2048, 2048, "VRAM", 3), Region("kv.1", 0, 2048, "FILE", 1)]
    views = [View("layers.1", "kv", f"kv.{i}", "bfloat16", parts[i], 5, 160, 7 * i) for i in (0, 1)]
    return Worker("p", 1, regions, [TURNS], views)


def named(*names: str, length: int = 1) -> Worker:
    """A worker with a region and a view for each name."""
    views = [View(name, "g", name, "uint8", (), 1, 0) for name in names]
    return Worker("p", 0, [Region(name, i, 1) for i, name in enumerate(names)], [Group("g")], views)


WORKERS = {
    "empty": Worker("p", 0, (), (), ()),
    "states": states(),
    "turns": turns(),
    "layers": engine(tp=2, layers=3)[1],
    "rank": attrs.evolve(engine()[0], rank=(1 << 63) - 1),
    "names": named("layers.0", "layers.00", "0", "1.5", "a{}", 'b"\\', "٣", "x" * 256, f"n{10**18}", f"n{10**17}"),
}

every_worker = pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)


@every_worker
def test_an_offer_decodes_as_the_worker(worker):
    """decode gives back an equal worker, with the order of regions, groups and views."""
    assert decode(encode(worker)) == worker


@every_worker
def test_an_offer_has_one_form(worker):
    """A decoded worker encodes to the same bytes."""
    assert encode(decode(encode(worker))) == encode(worker)


@every_worker
def test_an_offer_is_one_line_of_ascii_with_its_version_first(worker):
    """A message fits any log, and has its version in its first bytes."""
    assert encode(worker).startswith(b'{"kvplan":1,"engine_id":')
    assert encode(worker).decode("ascii").isprintable()


@pytest.mark.parametrize("model", Model.names())
def test_every_model_can_be_offered(model):
    """Workers of every shipped model decode as themselves, states and shared layers included."""
    for worker in Model.shipped(model).engine("p", tp=2, kv="split", num_blocks=10):
        assert decode(encode(worker)) == worker


@pytest.mark.parametrize("kv", KV_FORMS)
@pytest.mark.parametrize("layout", ORDERS)
def test_a_worker_of_80_layers_is_less_than_8_kib(layout, kv):
    """The offer of a Llama 70B at TP 8 stays below 8192 bytes in each layout, also with K and V in 160 regions."""
    worker = Model.shipped("llama-3.1-70b").engine("prefill-0", tp=8, layout=layout, kv=kv, num_blocks=4096)[3]
    assert len(worker.views) == (160 if kv == "split" else 80)
    assert len(encode(worker)) < 8192


def test_layers_of_one_geometry_share_it():
    """Another layer adds one row to each table and nothing else."""
    two, three = (json.loads(encode(engine(layers=layers)[0])) for layers in (2, 3))
    assert [len(two[part]) for part in ("layouts", "memories", "stems")] == [1, 1, 2]
    assert {key for key in two if two[key] != three[key]} == {"regions", "views"}


def of_layouts(number: int) -> Worker:
    """A worker in which every view has a different layout."""
    views = [View(f"v{i}", "g", f"r{i}", "uint8", (), 1 + i, 1) for i in range(number)]
    return Worker("p", 0, [Region(f"r{i}", i * number, number) for i in range(number)], [Group("g")], views)


def of_axes(number: int) -> Worker:
    """A worker of one view with so many axes."""
    held = [Axis(f"a{i}", 0, 1, 2, 0) for i in range(number)]
    return Worker("p", 0, [Region("r", 0, 9)], [Group("g")], [View("v", "g", "r", "uint8", held, 1, 0)])


REFUSED = {
    "name": (named("x" * 257), "at most 256 characters, got 257 (stems[0].before)"),
    "engine": (attrs.evolve(states(), engine_id="x" * 257), "at most 256 characters, got 257 (engine_id)"),
    "rows": (named(*(f"v{i}" for i in range(MAX_ROWS + 1))), "at most 4096 items, got 4097 (regions.stem)"),
    "layouts": (of_layouts(MAX_LAYOUTS + 1), "at most 1024 items, got 1025 (layouts)"),
    "axes": (of_axes(MAX_AXES + 1), "at most 16 items, got 17 (layouts[0].axes)"),
    "bytes": (named(*(f"a{i:05}{'x' * 250}" for i in range(MAX_ROWS))), "at most 1048576 bytes, got 1294411"),
}


@pytest.mark.parametrize("worker, message", REFUSED.values(), ids=REFUSED)
def test_what_no_peer_would_read_is_not_written(worker, message):
    """A worker that is too large for a message is refused by the side that encodes it."""
    with pytest.raises(KVPlanError) as caught:
        encode(worker)
    assert type(caught.value) is KVPlanError
    assert str(caught.value) == f"RANGE: cannot encode worker {worker.label}: expected {message}"


@pytest.mark.parametrize("worker", [of_layouts(MAX_LAYOUTS), of_axes(MAX_AXES), named("x" * 256)])
def test_what_just_fits_is_written(worker):
    """Each limit itself is allowed."""
    assert decode(encode(worker)) == worker


@pytest.mark.parametrize("call", [encode, fingerprint])
def test_only_workers_are_offered(call):
    """Anything but a worker raises TYPE."""
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read a worker: expected a Worker, got 'decode/0'$"):
        call("decode/0")


def test_a_worker_that_moves_keeps_its_fingerprint():
    """Engine, rank, and the names, addresses and devices of regions are not geometry."""
    worker = engine(layers=2)[0]
    regions = [attrs.evolve(r, name=f"at {r.address}", address=r.address + 5, device_id=3) for r in worker.regions]
    views = [attrs.evolve(view, region=region) for view, region in zip(worker.views, regions, strict=True)]
    assert fingerprint(worker) == fingerprint(Worker("other", 9, regions, worker.groups, views))


def changed() -> dict[str, Worker]:
    """The worker of two layers, with one thing changed each time."""
    worker = engine(layers=2)[0]
    (group,), (first, second), (view, other) = worker.groups, worker.regions, worker.views

    def viewing(**changes) -> Worker:
        return attrs.evolve(worker, views=[attrs.evolve(view, **changes), other])

    def axis(index: int, **changes) -> tuple[Axis, ...]:
        return tuple(attrs.evolve(axis, **(changes if i == index else {})) for i, axis in enumerate(view.axes))

    small = axes((0, 4, 4), 2)
    three = attrs.evolve(worker, regions=[first, second, Region("more", 0, first.size_bytes)])
    return {
        "nothing": worker,
        "region's size": attrs.evolve(worker, regions=[attrs.evolve(first, size_bytes=first.size_bytes + 1), second]),
        "region's memory": attrs.evolve(worker, regions=[attrs.evolve(first, memory="VRAM"), second]),
        "order of regions": attrs.evolve(worker, regions=[second, first]),
        "a region more": three,
        "a group more": attrs.evolve(worker, groups=[group, Group("more")]),
        "group's name": attrs.evolve(
            worker, groups=[Group("kv", 4)], views=[attrs.evolve(v, group="kv") for v in worker.views]
        ),
        "group's context": attrs.evolve(worker, groups=[Group("attn", 4, Context(0, 2))]),
        "group's rank": attrs.evolve(worker, groups=[Group("attn", 4, Context(1, 2))]),
        "group's turns": attrs.evolve(worker, groups=[Group("attn", 4, Context(0, 2, 4))]),
        "tokens per block": attrs.evolve(
            worker, groups=[Group("attn", 2)], views=[attrs.evolve(v, axes=small) for v in worker.views]
        ),
        "view's name": viewing(name="layers.7"),
        "view's dtype": viewing(dtype="float16"),
        "view's region": attrs.evolve(three, views=[attrs.evolve(view, region="more"), other]),
        "number of blocks": viewing(num_blocks=9),
        "block stride": viewing(num_blocks=9, block_stride_bytes=view.block_stride_bytes + 2),
        "offset": viewing(num_blocks=9, offset_bytes=2),
        "order of views": attrs.evolve(worker, views=[other, view]),
        "a view less": attrs.evolve(worker, views=[other]),
        "axis's name": viewing(axes=axis(1, name="kv-head")),
        "axis's part": viewing(axes=axis(1, start=4, stop=8, size=8)),
        "axis's size": viewing(axes=axis(1, size=8)),
        "order of axes": viewing(axes=view.axes[::-1]),
        "strides": viewing(axes=axes((0, 4, 4), 4, "NH")),
    }


def test_any_other_change_changes_the_fingerprint():
    """The fingerprint covers every part of the geometry: no two of these are equal."""
    fingerprints = {what: fingerprint(worker) for what, worker in changed().items()}
    assert len(set(fingerprints.values())) == len(fingerprints)


GOLDEN_FINGERPRINTS = {
    "offer-llama-3.1-8b.json": "73fe31c1365e373e10955d83abc3850b330ae3462c6fba18c2dbf1a9141cfcd7",
    "offer-nemotron-h-8b.json": "7938ac60b6bf992c7163909e2e5e58fbb3dce63ff236a8832093132219145372",
    "offer-turns.json": "4568a2d3cc766c9314cc6387677cf233bf98df1ee28cbe8cf50fbb39a25d062f",
}


@pytest.mark.parametrize("name, expected", GOLDEN_FINGERPRINTS.items())
def test_golden_offers_decode_and_encode_unchanged(name, expected):
    """Messages of version 1 decode, encode to the same bytes, and have the fingerprint that they had."""
    data = (GOLDEN / name).read_bytes()
    assert encode(decode(data)) == data
    assert fingerprint(decode(data)) == expected


def test_the_golden_offer_is_of_this_worker():
    """The golden message decodes to its worker, described by hand."""
    assert decode((GOLDEN / "offer-turns.json").read_bytes()) == turns()


def test_an_offer_with_extensions_is_of_the_same_worker():
    """Unknown extensions make no other worker of it. They stay with it."""
    data = (GOLDEN / "offer-with-extensions.json").read_bytes()
    assert decode(data) == turns()
    assert json.loads(decode(data).extensions) == json.loads(data)["extensions"]


def test_a_worker_carries_its_model_and_extensions():
    """The model is an extension of the message, among any others; a worker without any has no such key."""
    (worker,) = engine()
    assert b"extensions" not in encode(worker)
    worker = attrs.evolve(worker, model="tiny@5f0c", extensions={"example.org/b": [1, None], "example.org/a": "é"})
    offer = json.loads(encode(worker))
    assert list(offer["extensions"]) == ["kvplan/model", "example.org/a", "example.org/b"]
    found = decode(encode(worker))
    assert (found, found.model) == (worker, "tiny@5f0c")
    assert json.loads(found.extensions) == {"example.org/a": "é", "example.org/b": [1, None]}
    assert encode(found) == encode(worker)
    assert fingerprint(worker) != fingerprint(attrs.evolve(worker, model="other"))
    assert fingerprint(worker) == fingerprint(attrs.evolve(worker, extensions={}))


@pytest.mark.parametrize(
    "extensions, code",
    [
        ({"kvplan/model": "tiny"}, "NAME"),
        ({"x": 10**20}, "RANGE"),
        ({"x": [[]] * (1 << 15)}, "RANGE"),
        ({"x": "x" * (1 << 20)}, "RANGE"),
    ],
    ids=["model", "digits", "lists", "bytes"],
)
def test_extensions_that_no_offer_can_have(extensions, code):
    """What decode would refuse is not encoded, and the model is not hidden among extensions."""
    worker = attrs.evolve(engine()[0], extensions=extensions)
    with pytest.raises(KVPlanError, match=rf"^{code}: cannot encode worker prefill/0"):
        encode(worker)


def test_an_offer_may_be_as_long_as_a_message_and_no_longer(monkeypatch):
    """One byte too many is refused; the error has both numbers and no path."""
    (worker,) = engine()
    length = len(encode(worker))
    monkeypatch.setattr("kvplan.handshake.offers.MAX_BYTES", length)
    assert len(encode(worker)) == length
    monkeypatch.setattr("kvplan.handshake.offers.MAX_BYTES", length - 1)
    with pytest.raises(KVPlanError, match=rf"expected at most {length - 1} bytes, got {length}$") as caught:
        encode(worker)
    assert caught.value.hint == ""
