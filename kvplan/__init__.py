"""kvplan: plans that move a request's KV cache between engines of any layout, verified byte for byte.

Describe what each worker keeps, plan once for each remote engine, bind each request:

>>> from kvplan import Blocks, Model, plan_reads, verify
>>> model = Model.shipped("qwen3-0.6b")
>>> prefill = model.engine("prefill", tp=2, layout="LBNHC", tokens_per_block=16, num_blocks=100)
>>> (decode,) = model.engine("decode", tokens_per_block=64, num_blocks=30)
>>> plan = plan_reads(decode, prefill)
>>> request = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([12, 5, 31])}, "tokens": (0, 40)}
>>> [(spec.remote, spec.num_bytes) for spec in plan.bind(**request)]
[(('prefill', 0), 2293760), (('prefill', 1), 2293760)]
>>> verify(plan, **request).ok
True

describe             Worker of Region, Group (with a Context) and View (of Axis); region_of, view_of: from a tensor
from a model         Model.shipped, Model.from_config, then model.engine
from an engine       from_vllm, from_sglang, from_tensorrt_llm, from_lmcache, each with a Seat
plan                 plan_reads, plan_writes: a TransferPlan of Pair and Table; plan_mesh: a MeshPlan
bind a request       plan.bind with Blocks (and a Workspace): a tuple of ReadSpec; tails: bytes to set to zero
in two legs          stage, stage_writes: a StagedPlan of Chunk; Pipeline: its requests, each a StagedTransfer
                     choose: the Choice that takes least time, by Rates
check                verify, verify_together: a Report; plan.certificate(); FakeMemory; kvplan.testing.assert_copies
shake hands          encode, decode, problems, compare, fingerprint; contacts; completions
look                 explain, show: a Picture; plan.cost()
what is refused      KVPlanError, with a code of CODES; PeerError, for a peer's message

The package kvplan_nixl carries plans out on real memory. ``kvplan --help`` is the command line.
"""

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
from kvplan.outlay import Outlay
from kvplan.peers import decode, problems
from kvplan.pictures import Picture, show
from kvplan.pipeline import Pipeline, StagedTransfer
from kvplan.plan import Pair, TransferPlan, plan_reads, plan_writes
from kvplan.rates import Rates
from kvplan.recipes import from_sglang, from_tensorrt_llm, from_vllm
from kvplan.report import Report
from kvplan.specs import ReadSpec
from kvplan.staging import Chunk, StagedPlan, stage, stage_writes
from kvplan.strategies import Choice, Option, choose
from kvplan.tables import Table
from kvplan.tails import tails
from kvplan.tensors import region_of, view_of
from kvplan.verify import verify, verify_together
from kvplan.views import Context, Group, Region, View
from kvplan.workers import Worker

__all__ = [
    "CODES",
    "Axis",
    "Blocks",
    "Certificate",
    "Choice",
    "Chunk",
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
    "Option",
    "Outlay",
    "Pair",
    "PeerError",
    "Picture",
    "Pipeline",
    "Problem",
    "Rates",
    "ReadSpec",
    "Region",
    "Report",
    "Seat",
    "StagedPlan",
    "StagedTransfer",
    "Table",
    "TransferPlan",
    "View",
    "Worker",
    "Workspace",
    "choose",
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
    "region_of",
    "show",
    "stage",
    "stage_writes",
    "tails",
    "verify",
    "verify_together",
    "view_of",
]
