"""User code that type checkers accept, with the types that they infer. It is checked, but never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import assert_type

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis.strategies import SearchStrategy

import kvplan
from kvplan import (
    Axis,
    Blocks,
    Context,
    Executor,
    Group,
    KVPlanError,
    MeshPlan,
    Model,
    ReadSpec,
    Region,
    Request,
    Status,
    Transfer,
    TransferPlan,
    View,
    Worker,
    Workspace,
    certify,
)
from kvplan.bridges import RankInfo, from_sglang, from_tensorrt_llm, from_vllm
from kvplan.handshake import Comparison, Problem, fingerprint
from kvplan.plan import Cost
from kvplan.staging import Copy, Pipeline, StagedPlan, StagedTransfer, stage
from kvplan.testing import FakeCopier, FakeNetwork, assert_copies
from kvplan.testing.executors import Cluster, ExecutorContract
from kvplan.testing.strategies import requests
from kvplan.verification import Certificate, Report
from kvplan_nixl import NixlExecutor, settle

Key = tuple[str, int]
Rows = npt.NDArray[np.uint64]


def described(address: int) -> Worker:
    """Lists are accepted where values have tuples, and defaults may be omitted."""
    region = Region("kv", address=address, size_bytes=1 << 20)
    axes = [Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)]
    view = View("layers.0.k", "attn", region, "bfloat16", axes, num_blocks=64, block_stride_bytes=4096)
    groups = [Group("attn", 16), Group("far", 16, Context(0, 2, 1)), Group("state", None)]
    worker = Worker("prefill", 0, [region], groups, [view])
    assert_type(worker.key, Key)
    assert_type(worker.regions, tuple[Region, ...])
    assert_type(worker.views, tuple[View, ...])
    assert_type(view.axes, tuple[Axis, ...])
    return worker


def read_from_a_tensor(tensor: object, region: Region) -> View:
    """Any tensor, and a group or its name."""
    kvplan.view_of(tensor, "block token dim", name="layers.0.mla", group=Group("attn", 16), region=region)
    return kvplan.view_of(
        tensor, "block head token dim", name="layers.0.k", group="attn", region=region, shards={"head": (0, 4, 8)}
    )


def version() -> None:
    """The version is text."""
    assert_type(kvplan.__version__, str)


def planned(decode: list[Worker], prefill: tuple[Worker, ...]) -> TransferPlan:
    """Any iterables of workers."""
    plan = kvplan.plan_reads(decode[0], iter(prefill), not_transferred=["layers.7.k"])
    assert_type(plan, TransferPlan)
    assert_type(kvplan.plan_writes(prefill[0], decode, siblings=prefill[1:]), TransferPlan)
    mesh = kvplan.plan_mesh(decode, prefill, operation="WRITE")
    assert_type(mesh, MeshPlan)
    assert_type(mesh.plans, tuple[TransferPlan, ...])
    assert_type(kvplan.contacts(decode, prefill), Mapping[Key, tuple[Key, ...]])
    assert_type(plan.pairs[0].local_table.rows, Rows)
    assert_type(certify(plan), Certificate)
    assert_type(plan.cost(tokens=1000), Cost)
    return plan.with_remotes(worker for worker in prefill)


def bound(plan: TransferPlan, ids: npt.NDArray[np.int64]) -> tuple[Rows, Rows]:
    """Block ids as lists, ranges and arrays; tokens for all groups, or for each."""
    local = {"attn": Blocks([5, 9, 7]), "swa": Blocks(range(3), first=2, null=0), "state": Blocks([4], ordinals=[100])}
    remote: Mapping[str, Blocks] = {name: Blocks(ids) for name in local}
    specs = plan.bind(local=local, remote=remote, tokens=(0, 100))
    assert_type(specs, tuple[ReadSpec, ...])
    plan.bind(local=local, remote=remote, tokens={"attn": (3, 5)}, workspace=Workspace())
    for spec in plan.bind(local=local, remote=remote):
        assert_type(spec.remote, Key)
        assert_type(spec.local_ids, npt.NDArray[np.int32])
        assert_type(spec.num_bytes, int)
    assert_type(kvplan.tails(plan.local, local, (0, 100)), dict[str, Rows])
    return specs[0].descriptors()


def verified(plan: TransferPlan, mesh: MeshPlan, tables: Mapping[str, Blocks]) -> Report:
    """A plan, a mesh or some plans, whole or in parts."""
    for what in (plan, mesh, [plan], mesh.plans):
        report = kvplan.verify(what, local=tables, remote=tables, tokens=(0, 100))
        assert_type(report, Report)
        assert_type(report.ok, bool)
    request: Request = {"local": tables, "remote": tables, "tokens": (0, 37)}
    assert_type(plan.bind(**request), tuple[ReadSpec, ...])
    assert_type(kvplan.verify(plan, **request), Report)
    plan.bind(**request, workspace=Workspace())
    return kvplan.verify_together([(plan, request), (mesh, request)], tokens=(0, 37))


def shaken_hands(worker: Worker, message: bytes) -> Worker:
    """Offers are bytes."""
    assert_type(kvplan.encode(worker), bytes)
    assert_type(kvplan.problems(message), tuple[Problem, ...])
    assert_type(kvplan.compare(worker, worker), Comparison)
    assert_type(fingerprint(worker), str)
    try:
        return kvplan.decode(message)
    except KVPlanError as error:
        assert_type(error.code, str)
        raise


def made_of_models(config: dict[str, object], engine_object: object) -> Worker:
    """Models, their engines, and recipes for what engines have allocated."""
    model = Model.from_config(config)
    assert_type(Model.names(), tuple[str, ...])
    assert_type(model.engine("decode", tp=2, layout="BLHNC", num_blocks=10), tuple[Worker, ...])
    assert_type(model.tokens(0, 100, model.engine("decode")[0]), dict[str, tuple[int, int]])
    info = RankInfo("decode", 0, tp_rank=0, tp=2)
    assert_type(from_sglang(model, info, engine_object), Worker)
    assert_type(from_tensorrt_llm(model, info, engine_object, "HND"), Worker)
    return from_vllm(model, info, engine_object, {"model.layers.0.self_attn.attn": engine_object})


def executed(executor: Executor, plan: TransferPlan, spec: ReadSpec) -> Transfer:
    """Code for any executor."""
    executor.prepare(plan)
    transfer = executor.start(spec, "request 1")
    assert_type(executor.poll(transfer), Status)
    assert_type(transfer.error, KVPlanError | None)
    return transfer


def executed_by_each(worker: Worker, plan: TransferPlan, spec: ReadSpec) -> None:
    """Fake memory and NIXL are executors."""
    executed(FakeNetwork([worker]).executor(worker), plan, spec)
    with NixlExecutor(worker, {"UCX": {}, "POSIX": {}}) as executor:
        assert_type(executor.connect(executor.envelope()), Worker)
        assert_type(settle(executor, [executed(executor, plan, spec)], timeout_s=1), bool)


def in_two_steps(network: FakeNetwork, local: Worker, source: Worker, blocks: Blocks) -> StagedTransfer:
    """Staged requests. A copier may return any ticket."""

    class Tickets:
        def begin(self, copies: Sequence[Copy]) -> list[int]:
            return [copy.num_bytes for copy in copies]

        def done(self, ticket: list[int]) -> bool:
            return bool(ticket)

    plan = stage(local, [source], staging="staging", whole=True)
    assert_type(plan, StagedPlan)
    pipeline = Pipeline(network.executor(local), "staging", Tickets())
    pipeline.prepare(plan)
    assert_type(pipeline.poll(), tuple[StagedTransfer, ...])
    Pipeline(network.executor(local), "staging", FakeCopier(network.memory, local.key))
    return pipeline.submit(plan, "request 1", local={"attn": blocks}, remote={"attn": blocks}, tokens=(0, 9))


def shown(worker: Worker, plan: MeshPlan) -> str:
    """Text and pictures."""
    assert_type(kvplan.explain(worker), str)
    return kvplan.show(plan)


class TestMine(ExecutorContract):
    """A backend's own executor under the contract."""

    def __init__(self, cluster: AbstractContextManager[Cluster]) -> None:
        self.cluster = cluster

    def open_cluster(self, workers: Sequence[Worker]) -> AbstractContextManager[Cluster]:
        return self.cluster


def tested(decode: list[Worker], prefill: list[Worker], tables: dict[str, Blocks]) -> Report:
    """A connector's copies as arrays or lists."""
    copies = {(("decode", 0), ("prefill", 0)): ([(4096, 64, 0)], np.zeros((1, 3), np.uint64))}
    return assert_copies(decode, prefill, copies, local=tables, remote=tables, tokens={"attn": (0, 4)})


def drawn(decode: list[Worker], prefill: list[Worker]) -> None:
    """Strategies have Hypothesis's types."""
    strategy = requests(decode, prefill)
    assert_type(strategy, SearchStrategy[Request])

    @given(strategy)
    def check(request: Request) -> None:
        assert_type(request["local"], Mapping[str, Blocks])

    check()
