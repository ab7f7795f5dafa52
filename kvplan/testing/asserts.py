"""Assertions on copies that other code than kvplan's makes up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvplan.plan.mesh import plan_mesh
from kvplan.verification.verifier import verify

if TYPE_CHECKING:
    from kvplan.describe.blocks import Blocks, Tokens
    from kvplan.describe.worker import Worker
    from kvplan.verification.report import Report
    from kvplan.verification.requests import KeyPair


def assert_copies(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    copies: Mapping[KeyPair, tuple[Any, Any]],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    operation: Literal["READ", "WRITE"] = "READ",
    not_transferred: Iterable[str] = (),
) -> Report:
    """Assert that ``copies`` put every byte of a request where it belongs, each once, and write no other byte.

    Workers say what is where, as for :func:`kvplan.plan_mesh`; ``local``, ``remote`` and ``tokens`` are the request,
    as ``bind`` takes it. ``copies`` are those of :func:`kvplan.verify`: by (local key, remote key) the local and the
    remote descriptors, rows of (address, length, device), the nth of one side with the nth of the other. Destinations
    are the local workers of a ``READ``, sources those of a ``WRITE``. How copies are cut and ordered does not matter.

    Returns the report where it is right. Raises AssertionError with the report where it is not: for each destination
    and promise how many bytes, and the first by its coordinates on both sides. KVPlanError is for what is no request
    or no copies, as ``plan_mesh`` and ``verify`` raise it.

    >>> from kvplan import Blocks, Model
    >>> decode, prefill = (Model.shipped("qwen2.5-1.5b").engine(name, num_blocks=9) for name in ("decode", "prefill"))
    >>> request = {"local": {"attn": Blocks([7, 3])}, "remote": {"attn": Blocks([2, 8])}, "tokens": (0, 20)}
    >>> (plan,) = plan_mesh(decode, prefill).plans
    >>> copies = {(spec.local, spec.remote): spec.descriptors() for spec in plan.bind(**request)}
    >>> print(assert_copies(decode, prefill, copies, **request))
    verified: 573440 bytes in 84 descriptors to 1 worker, 12 unused slots; VALUE, COVER, DISJOINT, BOUNDS, OWN hold
    >>> ((pair, (ours, theirs)),) = copies.items()
    >>> assert_copies(decode, prefill, {pair: (ours[1:], theirs[1:])}, **request)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: not verified: 571392 bytes in 83 descriptors to 1 worker
    COVER: at decode/0: 2048 bytes missing, first: layers.0.attn dim 0 head 0 kv 0 byte 0 of position 16 (...
    """
    __tracebackhide__ = True
    mesh = plan_mesh(destinations, sources, operation, not_transferred=not_transferred)
    report = verify(mesh, local=local, remote=remote, tokens=tokens, copies=copies)
    if not report:
        raise AssertionError(str(report))
    return report
