"""kvplan: plans that move a request's cache between engines of any layout, verified byte for byte."""

from kvplan.axes import Axis
from kvplan.bind import Blocks
from kvplan.errors import CODES, KVPlanError
from kvplan.plan import MeshPlan, Pair, TransferPlan, plan_mesh, plan_reads, plan_writes
from kvplan.specs import ReadSpec
from kvplan.tables import Table
from kvplan.tensors import view_of
from kvplan.views import Context, Group, Region, View
from kvplan.workers import Worker

__all__ = [
    "CODES",
    "Axis",
    "Blocks",
    "Context",
    "Group",
    "KVPlanError",
    "MeshPlan",
    "Pair",
    "ReadSpec",
    "Region",
    "Table",
    "TransferPlan",
    "View",
    "Worker",
    "plan_mesh",
    "plan_reads",
    "plan_writes",
    "view_of",
]
