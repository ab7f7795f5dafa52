"""Every public function with a right call, and values that are wrong for most of its parameters.

``python -m tests.bad_values > tests/golden/bad-values.txt`` writes the page of what each does with them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import attrs
import numpy as np

import kvplan
from kvplan import (
    Axis,
    Blocks,
    Budget,
    Context,
    Group,
    KVPlanError,
    Model,
    Region,
    Status,
    Transfer,
    View,
    Worker,
    Workspace,
    encode,
    plan_mesh,
    plan_reads,
    plan_writes,
)
from kvplan.bridges import (
    ObservedModel,
    RankInfo,
    from_lmcache,
    from_sglang,
    from_tensorrt_llm,
    from_vllm,
    sglang_model,
    vllm_model,
)
from kvplan.executor import check_local, not_connected, not_planned_for, still_running, unprepared
from kvplan.protocol import (
    Claims,
    Connections,
    Handoff,
    Handshakes,
    Leases,
    Listener,
    PartialRead,
    Read,
    Reads,
    Source,
    prompt_digest,
)
from kvplan.protocol.claims import answer_claims
from kvplan.protocol.listener import Offers
from kvplan.staging import Pipeline, Rates, choose, stage
from kvplan.testing import FakeCopier, FakeNetwork, assert_copies
from kvplan.verification import FakeMemory
from kvplan_nixl.serving import Access, Driver, fingerprint, tls_contexts
from tests.blocking import KEY, Answered
from tests.bridges.vllm_objects import KVCacheConfig
from tests.small import engine

Calls = Iterable[tuple[str, Callable[..., Any], dict[str, Any]]]
"""The name of every public function, the function, and the arguments of a right call, by name."""

MADE: Final = """
Certificate Choice Chunk Comparison Copy CopySide Cost Difference EndedExports EndedLeases HandshakeResult KVPlanError
MeshPlan Option Pair PairCost PartialRead PeerError Problem ReadResult ReadSpec Report StagedCost StagedPlan
StagedTransfer Table Tail TransferPlan
"""
"""Classes whose values kvplan makes. Their methods are called here, their constructors are not."""

BAD: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "None": None,
        "True": True,
        "-1": -1,
        "0": 0,
        "1.5": 1.5,
        "nan": float("nan"),
        "1 << 70": 1 << 70,
        "''": "",
        "'x'": "x",
        "b''": b"",
        "()": (),
        "[None]": [None],
        "{}": {},
        "{None: None}": {None: None},
        "object()": object(),
        "int": int,
        "zeros(0)": np.zeros(0),
        "array([None])": np.array([None]),
        "masked_array([1, 2])": np.ma.masked_array([1, 2], [False, True]),
        "array([True])": np.array([True]),
    }
)


def of_torch() -> Mapping[str, Any]:
    """Tensors that are no numbers in host memory."""
    torch = importlib.import_module("torch")
    return {
        "meta": torch.empty(2, dtype=torch.int64, device="meta"),
        "sparse": torch.ones(3).to_sparse(),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    }


(OURS,), (THEIRS,) = engine("d"), engine("p", order="NH")
PLAN = plan_reads(OURS, [THEIRS])
MESH = plan_mesh([OURS], [THEIRS])
REQUEST: Final[dict[str, Any]] = {
    "local": {"attn": Blocks([3, 1])},
    "remote": {"attn": Blocks([0, 5])},
    "tokens": (1, 7),
}
SPEC = PLAN.bind(**REQUEST)[0]
STAGING = attrs.evolve(OURS, regions=(*OURS.regions, Region("staging", 1 << 50, 1 << 20)))
STAGED = stage(STAGING, [THEIRS], staging="staging")
MODEL = Model.shipped("qwen2.5-1.5b")
SOURCE = Source("p", "a", "127.0.0.1", 1)
COPIES = {(SPEC.local, SPEC.remote): SPEC.descriptors()}
TENSOR = np.zeros((4, 2, 3), np.float16)
LOGGER = logging.getLogger("kvplan.tests")
SYSTEM = Driver()
LOGGER.addHandler(logging.NullHandler())
HOOKS: dict[str, Any] = dict.fromkeys(("open_offer", "connect", "disconnect"), lambda *_: None)
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "torch_dtype": "bfloat16",
}


def memory() -> FakeMemory:
    return FakeMemory([OURS, THEIRS])


def started() -> Any:
    """An executor with a transfer under way."""
    executor = FakeNetwork([OURS, THEIRS]).executor(OURS)
    executor.prepare(PLAN)
    return executor, executor.start(SPEC, "r")


def pipeline() -> Pipeline:
    network = FakeNetwork([STAGING, THEIRS])
    made = Pipeline(network.executor(STAGING), "staging", FakeCopier(network.memory, STAGING.key))
    made.prepare(STAGED)
    return made


def reads() -> Reads:
    executor = FakeNetwork([OURS, THEIRS]).executor(OURS)
    claims = Claims(LOGGER, SYSTEM)
    return Reads(OURS, executor, LOGGER, connections=Connections(**HOOKS), claims=claims, system=SYSTEM)


def calls() -> Calls:
    """Those of kvplan and its rooms."""
    axes = [Axis("token", 0, 4, 4, 2), Axis("dim", 0, 1, 1, 2)]
    worker = {"engine_id": "d", "rank": 0, "regions": [], "groups": [], "views": [], "model": "m", "extensions": {}}
    yield "Axis", Axis, {"name": "head", "start": 0, "stop": 2, "size": 2, "stride_bytes": 8}
    yield "Blocks", Blocks, {"ids": [1, 2], "first": 0, "null": 1, "ordinals": None, "listed": None}
    yield "Blocks of ordinals", Blocks, {"ids": [1, 2], "first": 0, "null": None, "ordinals": [3, 4], "listed": (0, 9)}
    yield "Context", Context, {"rank": 0, "size": 2, "interleave_tokens": 1}
    yield "Group", Group, {"name": "attn", "tokens_per_block": 4, "context": Context()}
    yield "Region", Region, {"name": "kv", "address": 4096, "size_bytes": 64, "memory": "DRAM", "device_id": 0}
    view = {"name": "a", "group": "attn", "region": "kv", "dtype": "float16", "axes": axes, "num_blocks": 2}
    view |= {"block_stride_bytes": 8, "offset_bytes": 0}
    yield "View", View, view
    yield "Worker", Worker, worker
    yield "region_of", kvplan.region_of, {"tensor": TENSOR, "name": "kv"}
    view = {"tensor": TENSOR, "pattern": "block head dim", "name": "a", "group": "attn"}
    yield "view_of", kvplan.view_of, {**view, "region": kvplan.region_of(TENSOR), "shards": {"head": (0, 2, 4)}}

    sides = {"destinations": [OURS], "sources": [THEIRS]}
    options = {"not_transferred": (), "budget": Budget()}
    yield "contacts", kvplan.contacts, {**sides, **options}
    yield "plan_mesh", plan_mesh, {**sides, "operation": "READ", **options}
    yield "plan_reads", plan_reads, {"local": OURS, "remotes": [THEIRS], **options}
    yield "plan_writes", plan_writes, {"local": THEIRS, "remotes": [OURS], "siblings": [], **options}
    yield "TransferPlan.bind", PLAN.bind, {**REQUEST, "workspace": Workspace()}
    yield "TransferPlan.check", PLAN.check, REQUEST
    yield "TransferPlan.requested", PLAN.requested, REQUEST
    yield "TransferPlan.with_remotes", PLAN.with_remotes, {"remotes": [THEIRS]}
    yield "TransferPlan.cost", PLAN.cost, {"tokens": 9}
    yield "MeshPlan.cost", MESH.cost, {"tokens": 9}
    yield "tails", kvplan.tails, {"worker": OURS, "blocks": REQUEST["local"], "tokens": (0, 7)}
    yield "Workspace", Workspace, {}

    yield "certify", kvplan.certify, {"plan": PLAN}
    yield "verify", kvplan.verify, {"plan": PLAN, **REQUEST, "copies": COPIES}
    yield "verify_together", kvplan.verify_together, {"parts": [(PLAN, REQUEST)], "tokens": (1, 7)}
    yield "verification.FakeMemory", FakeMemory, {"workers": [OURS], "label_bytes": 1, "poison": 0}
    place = {"worker": OURS, "address": OURS.regions[0].address, "device_id": 0}
    yield "verification.FakeMemory.read", memory().read, {**place, "length": 8}
    yield "verification.FakeMemory.write", memory().write, {**place, "values": b"kv"}
    yield "verification.FakeMemory.region", memory().region, {"worker": OURS, "view": OURS.views[0]}
    yield "verification.FakeMemory.array", memory().array, {"worker": OURS, "view": OURS.views[0]}
    yield "verification.FakeMemory.writes", memory().writes, {"worker": OURS}
    yield "verification.FakeMemory.execute", memory().execute, {"spec": SPEC}
    writes, copied = SPEC.descriptors()
    ends = {"source": THEIRS, "destination": OURS.key}
    yield "verification.FakeMemory.move", memory().move, {**ends, "reads": copied, "writes": writes}

    yield "Budget", Budget, {"num_bytes": 1 << 30}
    yield "encode", encode, {"worker": OURS}
    yield "decode", kvplan.decode, {"data": encode(OURS)}
    yield "problems", kvplan.problems, {"data": encode(OURS)}
    yield "compare", kvplan.compare, {"local": OURS, "remote": THEIRS, "not_transferred": ()}
    yield "handshake.fingerprint", kvplan.handshake.fingerprint, {"worker": OURS}

    layer = MODEL.layers[0]
    yield "Model", Model, {"name": "m", "layers": (layer,), "dtype": "bfloat16", "drafts": ()}
    yield "Model.shipped", Model.shipped, {"model_name": "qwen3-0.6b"}
    yield (
        "Model.from_config",
        Model.from_config,
        {"config": CONFIG, "model_name": "m", "with_draft_layers": False},
    )
    yield "Model.with_draft", MODEL.with_draft, {"drafting": MODEL}
    yield "Model.with_dtypes", MODEL.with_dtypes, {"dtype": "float16", "ssm_dtype": "float32"}
    yield "Model.quantized", MODEL.quantized, {"bits": 8, "scale_dtype": "float32", "scale_elements": 128}
    yield "Model.tokens", MODEL.tokens, {"start": 0, "stop": 9, "worker": MODEL.engine("d", num_blocks=9)[0]}
    sizes = {"tp": 1, "tokens_per_block": 16}
    yield "Model.tensor_bytes", MODEL.tensor_bytes, {**sizes, "rank": 0}
    yield "Model.blocks", MODEL.blocks, sizes
    yield "Model.kernel_blocks", MODEL.kernel_blocks, {"tp": 1, "kernel_tokens": 16, "kv": "content"}
    parameters = inspect.signature(MODEL.engine).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    yield "Model.engine", MODEL.engine, {"engine_id": "d", **defaults, "num_blocks": 9}

    info = {"engine_id": "d", "rank": 0, "tp_rank": 0, "tp": 1, "context": Context()}
    yield "bridges.RankInfo", RankInfo, info
    pool: Any = SimpleNamespace(page_size=16, start_layer=0, layer_num=0)
    both = {"model": MODEL, "info": RankInfo("d")}
    yield "bridges.from_sglang", from_sglang, {**both, "pool": pool}
    observed = {"info": RankInfo("d"), "pool": pool, "written": [0], "state": (), "dtype": "float16"}
    yield "bridges.sglang_model", sglang_model, {"model_name": "m", **observed}
    config = KVCacheConfig([], [])
    caches: dict[str, Any] = {"kv_cache_config": config, "kv_caches": {}, "layers": {}, "kv_layout": "content"}
    yield "bridges.from_vllm", from_vllm, {**both, **caches}
    yield (
        "bridges.vllm_model",
        vllm_model,
        {"model_name": "m", "info": RankInfo("d"), "kv_cache_config": config, "layers": {}, "num_layers": 2},
    )
    yield "bridges.ObservedModel", ObservedModel, {"name": "m", "layers": {}, "dtype": "uint8"}
    manager = SimpleNamespace(max_attention_window_vec=[1], layer_offsets={}, tokens_per_block=16)
    yield "bridges.from_tensorrt_llm", from_tensorrt_llm, {**both, "kv_cache_manager": manager, "kv_layout": "HND"}
    raw = np.zeros(2 * 28 * 16 * 256 * 2, np.uint8)
    meta = SimpleNamespace(fmt=SimpleNamespace(name="KV_2LTD"), address=0, shapes=[(2, 28, 16, 256)])
    meta.dtypes = ["bfloat16"]
    chunk = SimpleNamespace(metadata=meta, raw_data=raw, parent_allocator=None)
    yield "bridges.from_lmcache", from_lmcache, {**both, "chunk": chunk, "layers": [range(28)]}

    stages = {"local": STAGING, "remotes": [THEIRS], "staging": "staging", **options}
    yield "staging.stage", stage, {**stages, "whole": False}
    rates = Rates("here", 1e-5, 1e-7, 1e-10, 1e-6, 1e-10)
    chosen = {**stages, "tokens": 9, "strategy": "auto", "rates": rates}
    yield "staging.choose", choose, chosen
    yield "staging.Rates", Rates, attrs.asdict(rates)
    counts = {"transfers": 1, "descriptors": 1, "num_bytes": 1, "copies": 1, "copied_bytes": 1}
    yield "staging.Rates.seconds", rates.seconds, counts
    yield "StagedPlan.bind", STAGED.bind, REQUEST
    yield "StagedPlan.requested", STAGED.requested, REQUEST
    yield "StagedPlan.cost", STAGED.cost, {"tokens": 9}
    network = FakeNetwork([STAGING, THEIRS])
    yield "testing.FakeCopier", FakeCopier, {"memory": network.memory, "key": STAGING.key}
    copier = FakeCopier(network.memory, STAGING.key)
    yield "testing.FakeCopier.begin", copier.begin, {"copies": next(STAGED.bind(**REQUEST)).copies}
    executor = network.executor(STAGING)
    yield "staging.Pipeline", Pipeline, {"executor": executor, "staging": "staging", "copier": copier}
    yield "staging.Pipeline.prepare", pipeline().prepare, {"plan": STAGED}
    submitted = {"plan": STAGED, "request": "r", **REQUEST}
    yield "staging.Pipeline.submit", pipeline().submit, submitted
    line = pipeline()
    yield "staging.Pipeline.cancel", line.cancel, {"transfer": line.submit(**submitted)}
    yield "staging.Pipeline.release", line.release, {"transfer": line.submit(**submitted)}

    yield "explain", kvplan.explain, {"value": PLAN, "detail": "workers"}
    yield "show", kvplan.show, {"value": PLAN, "width": 120}
    yield (
        "testing.assert_copies",
        assert_copies,
        {
            **sides,
            "copies": COPIES,
            **REQUEST,
            "operation": "READ",
            "not_transferred": (),
        },
    )

    moving = {"spec": SPEC, "request": "r"}
    yield "Transfer", Transfer, {**moving, "status": Status.RUNNING, "error": None}
    yield "executor.check_local", check_local, {"plan": PLAN, "worker": OURS}
    yield "executor.not_connected", not_connected, {"key": OURS.key}
    yield "executor.not_planned_for", not_planned_for, {"worker": OURS, "present": THEIRS, "side": "local"}
    yield "executor.still_running", still_running, {"request": "r", "action": "release a transfer"}
    yield "executor.unprepared", unprepared, {"spec": SPEC}
    yield "testing.FakeNetwork", FakeNetwork, {"workers": [OURS, THEIRS]}
    yield "testing.FakeNetwork.executor", FakeNetwork([OURS, THEIRS]).executor, {"worker": OURS}
    yield "testing.FakeNetwork.lose", FakeNetwork([OURS, THEIRS]).lose, {"worker": OURS}
    executor, transfer = started()
    yield "testing.FakeExecutor.prepare", executor.prepare, {"plan": PLAN}
    yield "testing.FakeExecutor.start", executor.start, moving
    yield "testing.FakeExecutor.poll", executor.poll, {"transfer": transfer}
    yield "testing.FakeExecutor.cancel", executor.cancel, {"transfer": transfer}
    executor.poll(transfer)
    yield "testing.FakeExecutor.release", executor.release, {"transfer": transfer}

    yield "protocol.Access", Access, {"key": b"a secret of all engines", "server_tls": None, "client_tls": None}
    files = ("certificate", "private_key", "authority")
    yield "protocol.tls_contexts", tls_contexts, dict.fromkeys(files, Path("no file"))
    yield "protocol.Source", Source, attrs.asdict(SOURCE)
    handoff = {
        "source": SOURCE,
        "lease": "r 0",
        "num_tokens": 7,
        "prompt": "a1",
        "blocks": REQUEST["remote"],
        "kept": {},
        "prefixes": {},
    }
    yield "protocol.Handoff", Handoff, handoff
    yield "protocol.Handoff.of_params", Handoff.of_params, {"params": Handoff(**handoff).params(KEY), "key": KEY}
    yield "protocol.Handoff.check_prompt", Handoff(**handoff).check_prompt, {"digest": "a1"}
    yield "protocol.Handoff.count_shared", Handoff(**handoff).count_shared, {"digest_of": {7: "a1"}.__getitem__}
    yield "protocol.Handoff.first_kept", Handoff(**handoff).first_kept, {"group": "attn", "attended": 9}
    yield "protocol.Offers", Offers, {"engine_id": "p", "start": "a", "workers": (b"",)}
    yield "protocol.Offers.decode", Offers.decode, {"data": b'{"engine_id":"p","start":"a","workers":[]}'}
    yield "protocol.prompt_digest", prompt_digest, {"tokens": [1, 2], "facts": ["salt a"]}
    yield "protocol.fingerprint", fingerprint, {"folder": "."}
    yield "protocol.Leases", Leases, {"system": SYSTEM, "lease_s": 1.5}
    leases = Leases(Driver())
    yield "protocol.Leases.grant", leases.grant, {"request": "r", "first_s": 9.5}
    for action in ("claim", "release"):
        yield f"protocol.Leases.{action}", getattr(leases, action), {"lease": "r 0", "reader": "d"}
    yield "protocol.Leases.is_valid", leases.is_valid, {"lease": "r 0"}
    door = {"port": 0, "bind": None, "system": SYSTEM}
    served = {"engine_id": "p", "host": "127.0.0.1", "workers": [b"offer"], "leases": leases, **door}
    yield "protocol.Listener", closed(Listener), served
    yield "protocol.Claims", closed(Claims), {"logger": LOGGER, "system": SYSTEM}
    claims = Claims(LOGGER, Answered(lambda _, message: answer_claims(leases, "a", message)))
    for action in ("claim", "release", "refusal", "is_wanted"):
        claim = {"source": SOURCE, "lease": "r 0", "reader": "d"}
        yield f"protocol.Claims.{action}", getattr(claims, action), claim
    yield "protocol.Claims.ask", claims.ask, {"source": SOURCE, "lease": "r 0"}
    read = {"request": "r", "source": SOURCE, **REQUEST, "tokens": {"attn": (1, 7)}, "lease": "r 0"}
    yield "protocol.Read", Read, read
    yield "protocol.Handshakes", Handshakes, {"timeout_s": 1.0, "budget_bytes": 1 << 20, "report": HOOKS["connect"]}
    yield "protocol.Connections", Connections, {**HOOKS, "handshakes": Handshakes()}
    given = {"worker": OURS, "executor": started()[0], "logger": LOGGER, "connections": Connections(**HOOKS)}
    given |= {"digest": HOOKS["connect"], "system": SYSTEM}
    yield "protocol.Reads", Reads, {**given, "claims": claims}
    yield "protocol.Reads.submit", reads().submit, {"partial_read": PartialRead("r", Read(**read))}


def closed(made: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of something that is closed at once."""
    return lambda **given: made(**given).close()


def outcome(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """What a call ends in: ``accepted``, a code, or the name of another error."""
    try:
        found = function(**given)
        if hasattr(found, "__next__"):
            list(found)
        str(found)
    except KVPlanError as error:
        str(error), repr(error)
        return error.code
    except AssertionError:
        return "bytes differ" if function is assert_copies else "AssertionError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def ends(calls: Calls, values: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """For every parameter: the values by what the call ends in."""
    for name, function, right in calls:
        for parameter in right:
            found: dict[str, list[str]] = {}
            for shown, value in values.items():
                found.setdefault(outcome(function, {**right, parameter: value}), []).append(shown)
            yield name, parameter, found


def page(calls: Calls) -> str:
    """What every parameter does with every bad value; a parameter's most frequent end stands last, without values."""
    lines = ["Bad values: " + ", ".join(BAD), ""]
    last = ""
    for name, parameter, found in ends(calls, BAD):
        if name != last:
            lines.append(name)
        *others, usual = sorted(found, key=lambda end: (len(found[end]), end))
        parts = [f"{end} {', '.join(found[end])}" for end in others] + [usual]
        lines.append(f"    {parameter:<16} {'; '.join(parts)}")
        last = name
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(calls()))
