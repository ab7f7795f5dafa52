"""Integers: addresses of 64 bits and ids of 31 are exact, or refused."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Group, KVPlanError, ReadSpec, View, Worker, decode, encode, plan_reads, verify
from kvplan.verification import Report
from tests.edits import edited_specs
from tests.known_bugs.faults import asking, by_hand, worker_of
from tests.known_bugs.known_bug import Outcome, known_bug, seen
from tests.small import engine

HIGH = 0xFFFF81AB54E01000


def placed(worker: Worker, address: int) -> Worker:
    """A worker of one region at another address."""
    (region,) = worker.regions
    return attrs.evolve(worker, regions=[attrs.evolve(region, address=address)])


@known_bug("I1", "sgl-project/sglang#24188, sgl-project/sglang#24648, sgl-project/sglang#27415", "verify: VALUE")
def test_addresses_of_64_bits() -> tuple[Outcome, Outcome]:
    """Addresses above 2**63 plus signed offsets became floats, which lose the last bits."""
    (source,) = engine("prefill", layers=1)
    source = placed(source, HIGH)
    plan = plan_reads(engine("decode", 2, layers=1)[1], [source])
    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9])}, (0, 8))
    (spec,) = plan.bind(**request)
    local, remote = spec.descriptors()
    offset = (remote[:, 0] - np.uint64(HIGH)).astype(np.int64)
    floats = np.uint64(HIGH) + offset
    wrong = by_hand(spec, local, np.stack([floats.astype(np.uint64), *remote[:, 1:].T], axis=1))
    return lambda: verify(edited_specs(plan, wrong), **request), lambda: verify(plan, **request)


@known_bug("I2", "ai-dynamo/nixl#2142", "verify: COVER, BOUNDS")
def test_the_end_of_the_address_space() -> tuple[Outcome, Outcome]:
    """A range whose end wraps around was accepted as inside a region, and one that ends at 2**64 was not."""
    (source,), (destination,) = engine("prefill", layers=1), engine("decode", layers=1)
    source = placed(source, (1 << 64) - source.regions[0].size_bytes)
    plan = plan_reads(destination, [source])
    request = asking({"attn": Blocks([8])}, {"attn": Blocks([9])}, (0, 4))
    (spec,) = plan.bind(**request)
    ranges = [np.array(side) for side in spec.descriptors()]
    for side in ranges:
        side[:, 1] = (1 << 64) - 8
    return lambda: verify(edited_specs(plan, by_hand(spec, *ranges)), **request), lambda: verify(plan, **request)


@known_bug("I3", "ai-dynamo/nixl#1048", "refused: MESSAGE")
def test_messages_cut_short() -> tuple[Outcome, Outcome]:
    """A message shorter than its header had a negative size, which was read as a huge one."""
    (source,), (destination,) = engine("prefill"), engine("decode")
    message = encode(source)

    def cut_anywhere() -> str:
        return ", ".join({seen(functools.partial(_read, message[:size])) for size in range(len(message))})

    request = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9])}, (0, 8))
    return cut_anywhere, lambda: verify(plan_reads(destination, [decode(message)]), **request)


def _read(message: bytes) -> str:
    return str(decode(message))


@known_bug("I4", "vllm-project/vllm#51952 and vLLM 0.33.0, base_worker.py", "verify: COVER, IDS")
def test_ids_of_31_bits() -> tuple[Outcome, Outcome]:
    """Ids were computed in 32 bits, too few for 128 tensors of 20 million blocks."""
    layers, blocks = 128, 20_000_000
    source, destination = (_states(name, layers, blocks) for name in ("prefill", "decode"))
    request = asking({"state": Blocks([blocks - 1])}, {"state": Blocks([blocks - 2])})
    whole = plan_reads(destination, [source])
    halves = [plan_reads(destination, [source], not_transferred=list(destination.tensors)[i::2]) for i in (0, 1)]
    (pair,) = whole.pairs
    first = np.arange(layers, dtype=np.int32) * blocks
    ids = first + (blocks - 1), first + (blocks - 2)
    spec = ReadSpec("READ", ("decode", 0), ("prefill", 0), pair.local_table, pair.remote_table, *ids)

    def in_two_plans() -> Report:
        assert spec.local_ids[-1] == -1_734_967_297
        with pytest.raises(KVPlanError, match="INT: cannot number"):
            whole.bind(**request)
        return verify(halves, **request)

    return lambda: verify(edited_specs(whole, spec), **request), in_two_plans


def _states(name: str, layers: int, blocks: int) -> Worker:
    """A worker with one state of a byte for each layer and block."""
    views = [
        View(f"layers.{i}", "state", f"{i}", "uint8", (Axis("dim", 0, 1, 1, 1),), blocks, 1) for i in range(layers)
    ]
    return worker_of(name, [Group("state")], views)
