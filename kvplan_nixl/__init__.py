"""kvplan_nixl: moves the bytes of kvplan's plans in real memory, through NIXL.

The packages are ``vllm`` and ``sglang``, one engine's connectors each, over ``serving``, which runs
:mod:`kvplan.protocol` and stores. Between them are the modules of this folder, by what they do::

    transfers over NIXL        agent, backends, envelope, executor, events
    memory of the same host    cma, mapping, mapped, kernel
    copies, zeros, digests     rearrange, calibrate, digest, digest_kernel
    what connectors share      settings, identity, weights, reads, mover
    for operators              doctor, probe, proxy

All calls of NIXL are in ``agent``. The names below load on first use, so that ``python -m
kvplan_nixl`` can say which package is missing.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvplan_nixl.backends import UCX
    from kvplan_nixl.envelope import Envelope
    from kvplan_nixl.events import Peer, TransferEvent
    from kvplan_nixl.executor import NixlExecutor, NixlTransfer, settle
    from kvplan_nixl.reads import make_reads

LATER: Final = MappingProxyType(
    {
        "UCX": "backends",
        "Envelope": "envelope",
        **dict.fromkeys(("Peer", "TransferEvent"), "events"),
        **dict.fromkeys(("NixlExecutor", "NixlTransfer", "settle"), "executor"),
        "make_reads": "reads",
    }
)
"""The module of each name."""

__all__ = [
    "UCX",
    "Envelope",
    "NixlExecutor",
    "NixlTransfer",
    "Peer",
    "TransferEvent",
    "make_reads",
    "settle",
]


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'kvplan_nixl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvplan_nixl.{LATER[name]}"), name)
