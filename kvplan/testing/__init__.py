"""Tests for connectors and executors: an assertion, Hypothesis strategies, and the executor contract.

- :func:`assert_copies` checks the descriptors that a connector makes, by any test runner.
- :mod:`kvplan.testing.strategies` has random requests for your engines, and random engines. It needs the ``testing``
  extra.
- :mod:`kvplan.testing.executors` has the tests that every :class:`kvplan.Executor` passes.
"""

from kvplan.testing.asserts import assert_copies

__all__ = ["assert_copies"]
