"""kvplan: plans that move a request's KV cache between engines, verified byte for byte.

Describe what each worker keeps, plan once for each remote engine, bind each request:

>>> from kvplan import Blocks, Model, plan_reads, verify
>>> model = Model.shipped("qwen3-0.6b")
>>> prefill = model.engine("prefill", tp=2, layout="LBNHC", tokens_per_block=16, num_blocks=100)
>>> (decode,) = model.engine("decode", tokens_per_block=64, num_blocks=30)
>>> plan = plan_reads(decode, prefill)
>>> local, remote = {"attn": Blocks([7])}, {"attn": Blocks([12, 5, 31])}
>>> specs = plan.bind(local=local, remote=remote, tokens=(0, 40))
>>> [(spec.remote, spec.num_bytes) for spec in specs]
[(('prefill', 0), 2293760), (('prefill', 1), 2293760)]
>>> verify(plan, local=local, remote=remote, tokens=(0, 40)).ok
True

describe          Worker of Region, Group (with a Context) and View (of Axis);
                  from a tensor: region_of, view_of
from a model      Model.shipped, Model.from_config, then model.engine
plan              plan_reads, plan_writes: a TransferPlan; plan_mesh: a MeshPlan;
                  contacts: which workers exchange bytes
bind a request    plan.bind with a Request of Blocks (and a Workspace): each ReadSpec;
                  tails: bytes to zero
check             verify, verify_together, certify
shake hands       encode, decode, problems, compare; Budget: what plans with peers may cost
execute           Executor, with a Transfer of a Status
look              explain, show; plan.cost()
errors            KVPlanError; PeerError, for a peer's message

Each package has further names: kvplan.describe, plan, verification, handshake, models
and display; kvplan.bridges, with from_vllm and others for what engines have allocated;
kvplan.staging, for transfers in two steps; kvplan.protocol, for what engines say to each other and
store; kvplan.testing, for a connector's tests. The package kvplan_nixl executes plans on real
memory, serves and stores. ``kvplan --help`` is the command line.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvplan._version import __version__ as __version__
from kvplan.budget import Budget
from kvplan.describe import (
    Axis,
    Blocks,
    Context,
    Group,
    Region,
    Request,
    View,
    Worker,
    region_of,
    view_of,
)
from kvplan.errors import KVPlanError
from kvplan.plan import (
    MeshPlan,
    ReadSpec,
    TransferPlan,
    Workspace,
    contacts,
    plan_mesh,
    plan_reads,
    plan_writes,
    tails,
)

if TYPE_CHECKING:
    from kvplan.display import explain, show
    from kvplan.executor import Executor, Status, Transfer
    from kvplan.handshake import PeerError, compare, decode, encode, problems
    from kvplan.models import Model
    from kvplan.verification import certify, verify, verify_together

LATER: Final = MappingProxyType(
    {
        **dict.fromkeys(("Executor", "Status", "Transfer"), "executor"),
        **dict.fromkeys(("PeerError", "compare", "decode", "encode", "problems"), "handshake"),
        "Model": "models",
        **dict.fromkeys(("explain", "show"), "display"),
        **dict.fromkeys(("certify", "verify", "verify_together"), "verification"),
    }
)
"""The module of each name that loads on first use: a process pays for what it uses."""

PACKAGES: Final = (
    *("describe", "plan", "verification", "handshake", "models"),
    *("bridges", "staging", "protocol", "display", "testing"),
)
"""The packages with further public names, which load on first use too."""

__all__ = [
    "Axis",
    "Blocks",
    "Budget",
    "Context",
    "Executor",
    "Group",
    "KVPlanError",
    "MeshPlan",
    "Model",
    "PeerError",
    "ReadSpec",
    "Region",
    "Request",
    "Status",
    "Transfer",
    "TransferPlan",
    "View",
    "Worker",
    "Workspace",
    "certify",
    "compare",
    "contacts",
    "decode",
    "encode",
    "explain",
    "plan_mesh",
    "plan_reads",
    "plan_writes",
    "problems",
    "region_of",
    "show",
    "tails",
    "verify",
    "verify_together",
    "view_of",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(f"kvplan.{LATER[name]}"), name)
    if name in PACKAGES:
        return importlib.import_module(f"kvplan.{name}")
    where = "" if name.startswith("_") else _where(name)
    raise AttributeError(
        f"module 'kvplan' has no attribute {name!r}{where}",
        name=name,
        obj=importlib.import_module("kvplan"),
    )


def _where(name: str) -> str:
    """For a message: which package has a public name that ``kvplan`` does not list."""
    packages = (
        importlib.import_module(package)
        for package in (*(f"kvplan.{name}" for name in PACKAGES), "kvplan_nixl")
    )
    return next(
        (f"; {package.__name__} has it" for package in packages if name in package.__all__), ""
    )


def __dir__() -> list[str]:
    return sorted([*__all__, *PACKAGES])
