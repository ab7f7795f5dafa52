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

from kvplan.bridges.assembly import Seat
from kvplan.bridges.lmcache import from_lmcache
from kvplan.bridges.recipes import from_sglang, from_tensorrt_llm, from_vllm
from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Blocks
from kvplan.describe.tensors import region_of, view_of
from kvplan.describe.views import Context, Group, Region, View
from kvplan.describe.worker import Worker
from kvplan.errors import CODES, KVPlanError
from kvplan.handshake.comparison import Comparison, Difference, compare
from kvplan.handshake.decoding import decode, problems
from kvplan.handshake.encoding import encode, fingerprint
from kvplan.handshake.errors import PeerError, Problem
from kvplan.models.model import Model
from kvplan.plan.bind import Workspace
from kvplan.plan.cost import Cost
from kvplan.plan.mesh import Completions, MeshPlan, completions, contacts, plan_mesh
from kvplan.plan.rows import Table
from kvplan.plan.specs import ReadSpec
from kvplan.plan.tails import tails
from kvplan.plan.transfer import Pair, TransferPlan, plan_reads, plan_writes
from kvplan.show.pictures import Picture, show
from kvplan.show.text import explain
from kvplan.staging.choice import Choice, Option, choose
from kvplan.staging.outlay import Outlay
from kvplan.staging.pipeline import Pipeline, StagedTransfer
from kvplan.staging.plan import Chunk, StagedPlan, stage, stage_writes
from kvplan.staging.rates import Rates
from kvplan.verification.certificate import Certificate
from kvplan.verification.memory import FakeMemory
from kvplan.verification.report import Report
from kvplan.verification.verifier import verify, verify_together

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
