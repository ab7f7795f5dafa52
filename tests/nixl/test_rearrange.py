"""Bytes put in order by torch: the same as by numpy, whatever the copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from benchmarks.real_memory import Memory, placed, synchronized
from kvplan import Blocks, KVPlanError, Model, Region, Worker
from kvplan.staging.plan import StagedPlan, stage, stage_writes
from kvplan.staging.rearrange import Copy, Side, run
from kvplan_nixl.calibrate import copied
from kvplan_nixl.rearrange import TorchCopier
from tests.small import engine
from tests.staged import NAME, with_staging

Make = Callable[..., StagedPlan]


def filled(worker: Worker, device: str) -> tuple[Worker, Memory]:
    """A worker in memory of a device, with bytes of all kinds, numbers and others."""
    there, memory = placed(worker, device)
    for i, tensor in enumerate(memory.values()):
        tensor.copy_(torch.from_numpy(np.random.default_rng(i).integers(0, 256, tensor.numel(), np.uint8)))
        tensor[: tensor.numel() // 8] = 0xFF  # no number, of any float
    synchronized(device)
    return there, memory


def check(make: Make, local: Worker, remotes: tuple[Worker, ...], request: dict[str, Any], device: str) -> None:
    """Every chunk of a request, put in order by torch and by numpy."""
    there, memory = filled(local, device)
    plan = make(there, remotes, staging=NAME)
    copier = TorchCopier(memory)
    for chunk in plan.bind(**request):
        expected = {name: tensor.cpu().numpy().copy() for name, tensor in memory.items()}
        run(chunk.copies, expected)
        copied(copier, chunk.copies)
        assert all(np.array_equal(memory[name].cpu().numpy(), expected[name]) for name in memory)


WAYS = [stage, stage_writes]
LAYOUTS = [("LBNHC", "LBHNC"), ("LBHNC", "LBNHC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")]


@pytest.mark.parametrize("tokens", [(0, 192), (5, 187), (64, 65)])
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("make", WAYS)
def test_layouts_of_a_model(make: Make, layouts: tuple[str, str], tokens: tuple[int, int], device: str) -> None:
    """Whole blocks and ranges that cut them, of other block lengths, into one region and into one for each layer."""
    model = Model.shipped("llama-3.2-1b")
    model = attrs.evolve(model, layers=model.layers[:3])
    others = model.engine("others", tp=2, layout=layouts[0], num_blocks=20)
    (local,) = model.engine("local", layout=layouts[1], num_blocks=10, tokens_per_block=48)
    tables = {"local": {"attn": Blocks([7, 3, 9, 0])}, "remote": {"attn": Blocks(np.arange(12) * 7 % 20)}}
    check(make, with_staging(local, 3 << 20), others, {**tables, "tokens": tokens}, device)


@pytest.mark.parametrize("tokens", [(0, 60), (7, 55)])
@pytest.mark.parametrize("make", WAYS)
def test_context_parallel_workers(make: Make, tokens: tuple[int, int], device: str) -> None:
    """Tokens that lie here and there on both sides."""
    one = Blocks(np.arange(12) * 7 % 20)
    (there,), context = engine("one", tokens=5, blocks=20), engine("many", tokens=4, contexts=(3, 2), order="NH")
    for local, others in [(local, (there,)) for local in context] if make is stage else [(there, context)]:
        tables = [Blocks([7, 3, 9, 0, 1]), one][:: 1 if make is stage else -1]
        request = {"local": {"attn": tables[0]}, "remote": {"attn": tables[1]}, "tokens": tokens}
        check(make, with_staging(local, 1 << 14), others, request, device)


@pytest.mark.parametrize("odd", [0, 1, 2, 4, 8])
def test_words_of_any_width(odd: int, device: str) -> None:
    """Bytes are copied by words of 16, 1, 2, 4 and 8 bytes, as offsets allow."""
    regions, memory = {}, {}
    for name in ("kv", NAME):
        memory[name] = torch.arange(200, device=device).to(torch.uint8)
        regions[name] = Region(name, memory[name].data_ptr(), 200)
    memory["kv"].zero_()
    synchronized(device)
    into = Side(((regions["kv"], odd),), (3,), (64,), (np.array([2, 0]),), ())
    out_of = Side(((regions[NAME], 0),), (3,), (48,), (np.array([0, 1]),), ())
    copied(TorchCopier(memory), [Copy(into, out_of, (), 16)])
    found = memory["kv"].cpu().numpy()
    assert found[128 + odd : 144 + odd].tolist() == list(range(16))
    assert found[odd : 16 + odd].tolist() == list(range(48, 64))
    assert np.count_nonzero(found) == 31


@pytest.mark.parametrize("out_of", [[0, 1, 2, 3, 4], [4, 0, 3, 1, 2]])
@pytest.mark.parametrize("into", [[0, 1, 2, 3, 4], [2, 4, 0, 3, 1]])
def test_blocks_in_any_order(into: list[int], out_of: list[int], device: str) -> None:
    """Blocks that follow each other, or do not, on either side."""
    kv, staging = torch.zeros(80, dtype=torch.uint8, device=device), torch.arange(80, device=device).to(torch.uint8)
    synchronized(device)
    destination, source = (
        Side(((Region(name, tensor.data_ptr(), 80), 0),), (5,), (16,), (np.array(blocks),), ())
        for name, tensor, blocks in (("kv", kv, into), (NAME, staging, out_of))
    )
    copied(TorchCopier({"kv": kv, NAME: staging}), [Copy(destination, source, (), 16)])
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
    into = Side(((regions["kv"], 16), (regions["other"], 0)), (2,), (16,), (np.array([1, 0]),), ())
    out_of = Side(((regions[NAME], 0), (regions[NAME], 32)), (2,), (16,), (np.array([0, 1]),), ())
    copied(TorchCopier({"kv": kv, "other": other, NAME: staging}), [Copy(into, out_of, (), 16)])
    assert storage.tolist() == [0] * 48 + [*range(16, 32), *range(16)] + [0] * 16
    assert other.tolist() == [*range(48, 64), *range(32, 48)]


def side(name: str, tensor: Any, block: int = 0) -> Side:
    """A block of 16 bytes of a tensor."""
    region = Region(name, tensor.data_ptr(), tensor.numel())
    return Side(((region, 0),), (block + 1,), (16,), (np.array([block]),), ())


@pytest.mark.parametrize("what", ["another", "no", "short"])
def test_memory_that_no_tensor_has(what: str, device: str) -> None:
    """Copies are refused between other regions than tensors were given for, and beyond them."""
    kv, staging = (torch.zeros(64, dtype=torch.uint8, device=device) for _ in range(2))
    copier = TorchCopier({"kv": kv, NAME: staging} if what != "no" else {NAME: staging})
    into = side("kv", staging if what == "another" else kv, block=9 if what == "short" else 0)
    with pytest.raises(KVPlanError, match="MEMORY: cannot put bytes"):
        copier.begin([Copy(into, side(NAME, staging), (), 16)])
    assert not kv.any()


@pytest.mark.parametrize("devices", [[], ["cpu", "meta"]])
def test_tensors_on_one_device(devices: list[str]) -> None:
    """A copier has the tensors of one device."""
    with pytest.raises(KVPlanError, match="MEMORY: cannot put bytes in order by torch: expected tensors on one device"):
        TorchCopier({device: torch.zeros(8, device=device) for device in devices})


def test_copies_that_have_failed(device: str) -> None:
    """What torch says of a GPU's copies is an error of the copies."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    copier = TorchCopier({NAME: torch.zeros(8, device=device)})
    with pytest.raises(KVPlanError, match="illegal memory access"):
        copier.done(Broken())
