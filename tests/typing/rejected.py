"""Mistakes that type checkers find. Each is ignored by its error code, and an unused ignore is an error itself.

It is checked, but never run.
"""

from __future__ import annotations

import kvplan
from kvplan import Axis, Blocks, Executor, MeshPlan, ReadSpec, Region, Request, TransferPlan, View, Worker
from kvplan.testing import assert_copies
from kvplan_nixl import NixlExecutor


def described(region: Region, worker: Worker) -> None:
    """Wrong types, a missing stride, a changed value."""
    Axis("token", 0, 16, 16)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Axis("token", "0", 16, 16, 256)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Region("kv", 0, 4096, "DRAM", "cuda:0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    View("k", "attn", region, "bfloat16", Axis("dim", 0, 4, 4, 2), 64, 8)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    worker.rank = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def planned(decode: Worker, prefill: list[Worker]) -> None:
    """One worker in place of several, several in place of one, and an unknown operation."""
    kvplan.plan_reads(decode, prefill[0])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    kvplan.plan_reads(prefill, prefill)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    kvplan.plan_mesh(prefill, prefill, operation="PUSH")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    kvplan.plan_reads(decode, prefill, [])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def bound(plan: TransferPlan, tables: dict[str, Blocks]) -> None:
    """Ids without Blocks, a length in place of a range, positional tables, and several specs in place of one."""
    plan.bind(local={"attn": [5, 9]}, remote=tables)  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    plan.bind(local=tables, remote=tables, tokens=100)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    request: Request = {"local": tables, "remote": tables, "tokens": 100}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
    plan.bind(**request)
    plan.bind(tables, tables)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    spec: ReadSpec = plan.bind(local=tables, remote=tables)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(spec)


def verified(plan: TransferPlan, worker: Worker, tables: dict[str, Blocks]) -> None:
    """A missing request, and copies without keys."""
    kvplan.verify(plan)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    assert_copies([worker], [worker], [([], [])], local=tables, remote=tables)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def executed(executor: Executor, plan: TransferPlan, mesh: MeshPlan, worker: Worker) -> None:
    """A mesh in place of a plan, a plan in place of a spec, an object that is no executor, and a wrong key."""
    executor.prepare(mesh)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    executor.start(plan, "request 1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    unable: Executor = plan  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    NixlExecutor(worker, key=len)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    print(unable)
