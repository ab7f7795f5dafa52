"""kvplan: plans that move a request's cache between engines of any layout, verified byte for byte."""

from kvplan.axes import Axis
from kvplan.blocks import Blocks
from kvplan.errors import CODES, KVPlanError
from kvplan.explain import explain
from kvplan.memory import FakeMemory
from kvplan.mesh import Completions, MeshPlan, completions, contacts, plan_mesh
from kvplan.models import Model
from kvplan.plan import Pair, TransferPlan, plan_reads, plan_writes
from kvplan.report import Report
from kvplan.specs import ReadSpec
from kvplan.tables import Table
from kvplan.tails import tails
from kvplan.tensors import view_of
from kvplan.verify import verify, verify_together
from kvplan.views import Context, Group, Region, View
from kvplan.workers import Worker

__all__ = [
    "CODES",
    "Axis",
    "Blocks",
    "Completions",
    "Context",
    "FakeMemory",
    "Group",
    "KVPlanError",
    "MeshPlan",
    "Model",
    "Pair",
    "ReadSpec",
    "Region",
    "Report",
    "Table",
    "TransferPlan",
    "View",
    "Worker",
    "completions",
    "contacts",
    "explain",
    "plan_mesh",
    "plan_reads",
    "plan_writes",
    "tails",
    "verify",
    "verify_together",
    "view_of",
]
