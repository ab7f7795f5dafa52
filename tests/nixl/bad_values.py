"""Every public function of kvplan_nixl with a right call.

``NIXL_LOG_LEVEL=FATAL python -m tests.nixl.bad_values > tests/golden/bad-values-nixl.txt`` writes the page of what each
does with values that are wrong for most of its parameters.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Any, Final

import attrs
import numpy as np
import torch

from benchmarks.real_memory import placed
from kvplan import Blocks, Context, plan_reads, region_of
from kvplan.protocol import Claims, Handshakes
from kvplan.staging import Copy
from kvplan.staging.copies import CopySide
from kvplan_nixl import UCX, Envelope, NixlExecutor, make_reads, settle
from kvplan_nixl.calibrate import calibrate
from kvplan_nixl.digest import WorkerDigests
from kvplan_nixl.rearrange import TorchCopier, memories_of
from kvplan_nixl.serving import Driver
from tests.bad_values import Calls, closed, page
from tests.small import engine

LOGGER: Final = logging.getLogger("kvplan.tests")

MADE: Final = ("NixlTransfer", "Peer", "TransferEvent")
"""Classes whose values executors make."""


KEY = b"a secret of these engines"


def calls() -> Calls:
    """The executors are closed behind the last call."""
    with ExitStack() as stack:
        yield from calls_of(stack)


def calls_of(stack: ExitStack) -> Calls:
    """Two workers in this process. Calls that change what others need come last."""
    ((local, _), (source, _)) = (placed(engine(name)[0]) for name in "dp")
    ours, theirs = (stack.enter_context(NixlExecutor(worker, key=KEY)) for worker in (local, source))
    envelope = theirs.envelope()
    plan = plan_reads(local, [ours.connect(envelope)])
    ours.prepare(plan)
    (spec,) = plan.bind(local={"attn": Blocks([3])}, remote={"attn": Blocks([0])}, tokens=(1, 3))

    yield "Envelope", Envelope, {"worker": source, "agent": "p.0.a1", "metadata": b"...", "handles": b""}
    opened = Envelope.unpack(envelope, KEY)
    yield "Envelope.pack", opened.pack, {"key": KEY}
    yield "Envelope.unpack", Envelope.unpack, {"data": envelope, "key": KEY}

    given: dict[str, Any] = {"worker": local, "backends": UCX, "key": KEY}
    yield "NixlExecutor", closed(NixlExecutor), given
    yield "NixlExecutor.connect", ours.connect, {"envelope": envelope}
    yield "NixlExecutor.prepare", ours.prepare, {"plan": plan}
    yield "NixlExecutor.start", ours.start, {"spec": spec, "request": "r"}
    transfer = ours.start(spec, "r")
    assert settle(ours, [transfer], 10)
    for name in ("poll", "backend_of", "cancel", "release"):
        yield f"NixlExecutor.{name}", getattr(ours, name), {"transfer": transfer}
    driver = Driver()
    claims = Claims(LOGGER, driver)
    reading: dict[str, Any] = {"executor": ours, "claims": claims, "logger": LOGGER, "key": driver.access.key}
    yield "make_reads", make_reads, {**reading, "system": driver, "digest": len, "handshakes": Handshakes()}
    yield "settle", settle, {"executor": ours, "transfers": [transfer], "timeout_s": 1.5}
    yield "NixlExecutor.attach", ours.attach, {"worker": placed(engine("file")[0])[0]}
    yield "NixlExecutor.disconnect", ours.disconnect, {"worker": source, "force": False}

    described = engine("digested", layers=1)[0]
    memory = torch.zeros(described.regions[0].size_bytes, dtype=torch.uint8)
    placed_worker = attrs.evolve(described, regions=[attrs.evolve(region_of(memory), name=described.regions[0].name)])
    held: dict[str, Any] = {"worker": placed_worker, "memories": memories_of([memory])}
    yield "digest.WorkerDigests", WorkerDigests, {**held, "divided": ("head",)}
    ranges = {"blocks": {"attn": Blocks([3])}, "tokens": (1, 3), "within": Context()}
    yield "digest.WorkerDigests.of", WorkerDigests(**held).of, ranges

    cache = torch.zeros(64, dtype=torch.uint8)
    copier = TorchCopier({"kv": cache})
    yield "rearrange.TorchCopier", TorchCopier, {"tensors": {"kv": cache}}
    into, out_of = (CopySide(((region_of(cache, "kv"), 0),), np.array([at]), ()) for at in (0, 32))
    yield "rearrange.TorchCopier.begin", copier.begin, {"copies": [Copy(into, out_of, (), 16)]}
    yield "rearrange.TorchCopier.done", copier.done, {"ticket": None}
    yield "calibrate.calibrate", calibrate, {"device": "cpu", "size": 4 << 20}


if __name__ == "__main__":
    sys.stdout.write(page(calls()))
