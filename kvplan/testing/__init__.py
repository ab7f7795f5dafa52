"""Tests for connectors and executors.

Assertions, fakes, Hypothesis strategies, and the executor contract:

- :func:`assert_copies` checks the descriptors that a connector makes, by any test runner.
- :func:`assert_memory` checks that an engine's memory is as its workers describe it.
- :class:`FakeNetwork` has executors over fake memory, and :class:`FakeCopier` copies there.
- :mod:`kvplan.testing.strategies` has random requests for your engines, and random engines. It
  needs the ``testing`` extra.
- :mod:`kvplan.testing.conformance` has the tests of a connector, by the field's bug reports. It
  needs the extra too.
- :mod:`kvplan.testing.executors` has the tests that every :class:`kvplan.Executor` passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kvplan._checks import wrong_type
from kvplan.describe import Blocks, Worker
from kvplan.describe.blocks import Tokens
from kvplan.describe.worker import Key
from kvplan.plan import plan_mesh
from kvplan.testing.memory import Values, assert_memory
from kvplan.testing.network import FakeCopier, FakeExecutor, FakeNetwork
from kvplan.verification import Report, verify

__all__ = ["FakeCopier", "FakeExecutor", "FakeNetwork", "Values", "assert_copies", "assert_memory"]


def assert_copies(
    destinations: Iterable[Worker],
    sources: Iterable[Worker],
    copies: Mapping[tuple[Key, Key], tuple[Any, Any]],
    *,
    local: Mapping[str, Blocks],
    remote: Mapping[str, Blocks],
    tokens: Tokens = None,
    operation: Literal["READ", "WRITE"] = "READ",
    not_transferred: Iterable[str] = (),
) -> Report:
    """Assert that ``copies`` write every byte of a request once, and write no other byte.

    The workers describe their memory, as for :func:`kvplan.plan_mesh`. ``local``, ``remote`` and
    ``tokens`` are the request, as ``bind`` takes it: destinations are the local workers of a
    ``READ``, sources those of a ``WRITE``. ``copies`` are those of :func:`kvplan.verify`: by (local
    key, remote key) the local and the remote descriptors, rows of (address, length, device), where
    the nth of one side pairs with the nth of the other. Their cuts and their order do not matter.

    Returns the report where all is right. Otherwise raises AssertionError with the report: for each
    promise how many bytes fail at which destinations, what they have in common, and the first by
    its coordinates on both sides.
    Raises KVPlanError, as ``plan_mesh`` and ``verify`` do, where the request or the copies are
    malformed.

    >>> from kvplan import Blocks, Model
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> decode, prefill = (model.engine(name, num_blocks=9) for name in ("decode", "prefill"))
    >>> request = {
    ...     "local": {"attn": Blocks([7, 3])}, "remote": {"attn": Blocks([2, 8])}, "tokens": (0, 20)
    ... }
    >>> (plan,) = plan_mesh(decode, prefill).plans
    >>> copies = {(spec.local, spec.remote): spec.descriptors() for spec in plan.bind(**request)}
    >>> assert_copies(decode, prefill, copies, **request).num_descriptors
    84
    >>> ((pair, (local, remote)),) = copies.items()
    >>> copies = {pair: (local[1:], remote[1:])}
    >>> assert_copies(decode, prefill, copies, **request)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: not verified: 571392 bytes in 83 descriptors to 1 worker
    COVER: at decode/0: 2048 bytes missing: layers.0.attn, positions 16-19, head 0
      first: layers.0.attn dim 0 head 0 kv 0 byte 0 of position 16 (...
    """
    __tracebackhide__ = True
    # a connector may return nothing; verify would then carry out the plan instead
    if copies is None:
        raise wrong_type("copies", "a mapping of pairs of workers to descriptors", copies)
    mesh = plan_mesh(destinations, sources, operation, not_transferred=not_transferred)
    report = verify(mesh, local=local, remote=remote, tokens=tokens, copies=copies)
    if not report:
        raise AssertionError(str(report))
    return report
