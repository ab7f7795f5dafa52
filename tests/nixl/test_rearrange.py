"""Copies by torch: the same bytes as by numpy, whatever the copies."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from benchmarks.real_memory import Memory, placed, synchronized
from kvplan import Blocks, KVPlanError, Model, Region, Worker
from kvplan.staging import Copy
from kvplan.staging.copies import CopySide
from kvplan_nixl import kernel, rearrange
from kvplan_nixl.calibrate import copy_and_wait
from kvplan_nixl.rearrange import STAGING, TorchCopier, is_even
from tests.small import engine
from tests.staged import NAME, Request, plans_of, request_of, run, with_staging


def filled(worker: Worker, device: str) -> tuple[Worker, Memory]:
    """A worker in memory of a device, filled with bytes of which an eighth is no number of any float."""
    there, memory = placed(worker, device)
    for i, tensor in enumerate(memory.values()):
        tensor.copy_(torch.from_numpy(np.random.default_rng(i).integers(0, 256, tensor.numel(), np.uint8)))
        tensor[: tensor.numel() // 8] = 0xFF
    synchronized(device)
    return there, memory


def check(local: Worker, remotes: tuple[Worker, ...], request: Request, device: str) -> None:
    """Carry out the copies of every chunk of a request by torch and by numpy."""
    there, memory = filled(local, device)
    (plan,) = plans_of(remotes, [there])
    copier = TorchCopier(memory)
    for chunk in plan.bind(**request):
        expected = {name: tensor.cpu().numpy().copy() for name, tensor in memory.items()}
        run(chunk.copies, expected)
        copy_and_wait(copier, chunk.copies)
        assert all(np.array_equal(memory[name].cpu().numpy(), expected[name]) for name in memory)


def test_a_copier_by_the_addresses_of_regions(device: str) -> None:
    """It copies between a worker's own memory and a staging region of the same device."""
    there, memory = filled(engine("decode")[0], device)
    worker, copier = kernel.with_staging(there, 1 << 12)
    assert copier is not None
    kv, staging = worker.regions[0], worker.regions[-1]
    assert (staging.name, staging.size_bytes, staging.memory) == (STAGING, 1 << 12, kv.memory)
    into, out_of = CopySide(((staging, 64),), np.array([0]), ()), CopySide(((kv, 32),), np.array([0]), ())
    copy_and_wait(copier, [Copy(into, out_of, (), 256)])
    expected = memory[kv.name].clone()
    memory[kv.name].zero_()
    synchronized(device)
    copy_and_wait(copier, [Copy(out_of, into, (), 256)])
    assert torch.equal(memory[kv.name][32:288], expected[32:288])
    assert not memory[kv.name][288:].any()
    assert kernel.with_staging(there, 0) == (there, None)


LAYOUTS = [("LBNHC", "LBHNC"), ("LBHNC", "LBNHC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")]


@pytest.mark.parametrize("tokens", [(0, 192), (5, 187), (64, 65)])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layouts_of_a_model(layouts: tuple[str, str], tokens: tuple[int, int], device: str) -> None:
    """Whole blocks and ranges that cut them, of other block lengths, into one region and into one for each layer."""
    model = Model.shipped("llama-3.2-1b")
    model = attrs.evolve(model, layers=model.layers[:3])
    others = model.engine("others", tp=2, layout=layouts[0], num_blocks=20)
    (local,) = model.engine("local", layout=layouts[1], num_blocks=10, tokens_per_block=48)
    tables = {"local": {"attn": Blocks([7, 3, 9, 0])}, "remote": {"attn": Blocks(np.arange(12) * 7 % 20)}}
    check(with_staging(local, 3 << 20), others, {**tables, "tokens": tokens}, device)


@pytest.mark.parametrize("tokens", [(0, 60), (7, 55)])
def test_context_parallel_workers(tokens: tuple[int, int], device: str) -> None:
    """Tokens that are scattered on both sides."""
    one = Blocks(np.arange(12) * 7 % 20)
    (there,), context = engine("one", tokens=5, blocks=20), engine("many", tokens=4, contexts=(3, 2), order="NH")
    request = request_of(Blocks([7, 3, 9, 0, 1]), one, tokens)
    for local in context:
        check(with_staging(local, 1 << 14), (there,), request, device)


@pytest.mark.parametrize("odd", [0, 1, 2, 4, 8])
def test_words_of_any_width(odd: int, device: str) -> None:
    """Bytes are copied by words of 16, 1, 2, 4 and 8 bytes, as offsets allow."""
    regions, memory = {}, {}
    for name in ("kv", NAME):
        memory[name] = torch.arange(200, device=device).to(torch.uint8)
        regions[name] = Region(name, memory[name].data_ptr(), 200)
    memory["kv"].zero_()
    synchronized(device)
    into = CopySide(((regions["kv"], odd),), np.array([128, 0]), ())
    out_of = CopySide(((regions[NAME], 0),), np.array([0, 48]), ())
    copy_and_wait(TorchCopier(memory), [Copy(into, out_of, (), 16)])
    found = memory["kv"].cpu().numpy()
    assert found[128 + odd : 144 + odd].tolist() == list(range(16))
    assert found[odd : 16 + odd].tolist() == list(range(48, 64))
    assert np.count_nonzero(found) == 31


@pytest.mark.parametrize("out_of", [[0, 1, 2, 3, 4], [4, 0, 3, 1, 2]])
@pytest.mark.parametrize("into", [[0, 1, 2, 3, 4], [2, 4, 0, 3, 1]])
@pytest.mark.parametrize("chunk_bytes", [1, 32, 1 << 20])
def test_blocks_in_any_order(
    into: list[int], out_of: list[int], chunk_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that follow each other, or do not, on either side; in one go, two at a time, or each alone."""
    monkeypatch.setattr(rearrange, "CHUNK_BYTES", chunk_bytes)
    kv, staging = torch.zeros(80, dtype=torch.uint8, device=device), torch.arange(80, device=device).to(torch.uint8)
    synchronized(device)
    destination, source = (
        CopySide(((Region(name, tensor.data_ptr(), 80), 0),), 16 * np.array(blocks), ())
        for name, tensor, blocks in (("kv", kv, into), (NAME, staging, out_of))
    )
    copy_and_wait(TorchCopier({"kv": kv, NAME: staging}), [Copy(destination, source, (), 16)])
    found = kv.cpu().numpy().reshape(5, 16)
    assert found[into].tolist() == np.arange(80).reshape(5, 16)[out_of].tolist()


def test_regions_within_a_storage(device: str) -> None:
    """A region that begins inside its tensor's storage, and several origins in it and in another tensor."""
    storage, staging = (
        torch.zeros(96, dtype=torch.uint8, device=device),
        torch.arange(64, device=device).to(torch.uint8),
    )
    kv, other = storage[32:], torch.zeros(32, dtype=torch.uint8, device=device)
    synchronized(device)
    regions = {
        name: Region(name, tensor.data_ptr(), tensor.numel())
        for name, tensor in (("kv", kv), ("other", other), (NAME, staging))
    }
    into = CopySide(((regions["kv"], 16), (regions["other"], 0)), np.array([16, 0]), ())
    out_of = CopySide(((regions[NAME], 0), (regions[NAME], 32)), np.array([0, 16]), ())
    copy_and_wait(TorchCopier({"kv": kv, "other": other, NAME: staging}), [Copy(into, out_of, (), 16)])
    assert storage.tolist() == [0] * 48 + [*range(16, 32), *range(16)] + [0] * 16
    assert other.tolist() == [*range(48, 64), *range(32, 48)]


def side(name: str, tensor: Any, offset: int = 0) -> CopySide:
    """A box in a tensor."""
    return CopySide(((Region(name, tensor.data_ptr(), tensor.numel()), 0),), np.array([offset]), ())


@pytest.mark.parametrize("what", ["another", "no", "short"])
def test_memory_that_no_tensor_has(what: str, device: str) -> None:
    """Copies are refused in regions without a tensor, in other memory than the tensor's, and beyond it."""
    kv, staging = (torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(2))
    copier = TorchCopier({"kv": kv, NAME: staging} if what != "no" else {NAME: staging})
    into = side("kv", staging if what == "another" else kv, offset=144 if what == "short" else 0)
    with pytest.raises(KVPlanError, match="MEMORY: cannot rearrange bytes"):
        copier.begin([Copy(into, side(NAME, staging), (), 16)])
    assert not kv.any()


@pytest.mark.parametrize("devices", [[], ["cpu", "meta"]])
def test_tensors_on_one_device(devices: list[str]) -> None:
    """A copier refuses tensors of no device, and of two."""
    with pytest.raises(KVPlanError, match="MEMORY: cannot rearrange bytes by torch: expected tensors on one device"):
        TorchCopier({device: torch.zeros(8, device=device) for device in devices})


def test_copies_that_have_failed(device: str) -> None:
    """An error that torch raises for a GPU's copies is an error of the copies."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    copier = TorchCopier({NAME: torch.zeros(8, device=device)})
    with pytest.raises(KVPlanError, match="illegal memory access"):
        copier.done(Broken())


class Stream:
    """A stand-in for a stream of CUDA, which notes what it is told in one list with the writes to a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.noted = tensor, list[str]()

    def note(self, text: str) -> None:
        self.noted.append(f"{text}, {'written' if self.tensor.any() else 'not written'}")

    def wait_stream(self, other: str) -> None:
        self.note(f"waits for {other}")

    def synchronize(self) -> None:
        self.note("synchronized")

    def record_event(self) -> str:
        self.note("event")
        return "the event"

    def __enter__(self) -> None:
        self.note("entered")

    def __exit__(self, *_: object) -> None:
        self.note("left")


@pytest.mark.parametrize("fails", [False, True])
def test_copies_on_a_gpu_wait_for_the_present_stream(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies begin after what the present stream does, on a stream of their own; a failure ends what had begun."""
    kv, staging = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    copier, stream = TorchCopier({"kv": kv, NAME: staging}), Stream(kv)
    monkeypatch.setattr(copier, "_stream", stream)  # as on a GPU
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the present one")
    monkeypatch.setattr(torch.cuda, "stream", lambda chosen: chosen)
    right, wrong = (Copy(side("kv", kv), side(NAME, staging, offset), (), 16) for offset in (0, 144))
    if fails:
        with pytest.raises(KVPlanError, match="MEMORY"):
            copier.begin([right, wrong])
    else:
        assert copier.begin([right]) == "the event"
    first = ["waits for the present one, not written", "entered, not written"]
    assert stream.noted == [*first, "synchronized, written" if fails else "event, written", "left, written"]


def test_no_event_is_queried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would end the capture with an error. The copies are not done before."""
    copier = TorchCopier({NAME: torch.zeros(8)})
    monkeypatch.setattr(copier, "_stream", object())  # as on a GPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not copier.done(object())
    assert copier.done(None)


@pytest.mark.parametrize(
    ("at", "found"),
    [
        ([5], True),
        ([5, 7, 9], True),
        ([5, 5], True),
        ([0, 2, 5], False),
        ([4, 2], False),
    ],
)
def test_offsets_are_even_if_one_stride_leads_through_them(at: list[int], found: bool) -> None:
    """A single one always; never backwards."""
    assert is_even(np.array(at)) is found
