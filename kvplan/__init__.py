"""kvplan: plans that move a request's cache between engines of any layout, verified byte for byte."""

from kvplan.assembly import Seat
from kvplan.axes import Axis
from kvplan.bind import Workspace
from kvplan.blocks import Blocks
from kvplan.certificate import Certificate
from kvplan.chunks import from_lmcache
from kvplan.compare import Comparison, Difference, compare
from kvplan.cost import Cost
from kvplan.errors import CODES, KVPlanError
from kvplan.explain import explain
from kvplan.findings import PeerError, Problem
from kvplan.memory import FakeMemory
from kvplan.mesh import Completions, MeshPlan, completions, contacts, plan_mesh
from kvplan.models import Model
from kvplan.offers import encode, fingerprint
from kvplan.peers import decode, problems
from kvplan.pictures import Picture, show
from kvplan.plan import Pair, TransferPlan, plan_reads, plan_writes
from kvplan.recipes import from_sglang, from_tensorrt_llm, from_vllm
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
    "Certificate",
    "Comparison",
    "Completions",
    "Context",
    "Cost",
    "Difference",
    "FakeMemory",
    "Group",
    "KVPlanError",
    "MeshPlan",
    "Model",
    "Pair",
    "PeerError",
    "Picture",
    "Problem",
    "ReadSpec",
    "Region",
    "Report",
    "Seat",
    "Table",
    "TransferPlan",
    "View",
    "Worker",
    "Workspace",
    "compare",
    "completions",
    "contacts",
    "decode",
    "encode",
    "explain",
    "fingerprint",
    "from_lmcache",
    "from_sglang",
    "from_tensorrt_llm",
    "from_vllm",
    "plan_mesh",
    "plan_reads",
    "plan_writes",
    "problems",
    "show",
    "tails",
    "verify",
    "verify_together",
    "view_of",
]
