"""Plans: from the descriptions of two engines to the descriptor ids of a request."""

from kvplan.plan.bind import Workspace
from kvplan.plan.cost import Cost, PairCost
from kvplan.plan.mesh import Completions, MeshPlan, completions, contacts, plan_mesh
from kvplan.plan.rows import Table
from kvplan.plan.specs import Pair, ReadSpec
from kvplan.plan.tails import tails
from kvplan.plan.transfer import TransferPlan, plan_reads, plan_writes

__all__ = [
    "Completions",
    "Cost",
    "MeshPlan",
    "Pair",
    "PairCost",
    "ReadSpec",
    "Table",
    "TransferPlan",
    "Workspace",
    "completions",
    "contacts",
    "plan_mesh",
    "plan_reads",
    "plan_writes",
    "tails",
]
