"""Reads over NIXL: handshake by HTTP, transfers, leases that end, and a source that is gone or started again.

Direct ones, and those through a staging region.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

import attrs
import numpy as np
import pytest

from kvplan import Blocks, Group, Region, Worker, view_of
from kvplan.protocol import Claims, Handoff, Handshakes, Leases, Listener, PartialRead, Read, ReadResult, prompt_digest
from kvplan_nixl import NixlExecutor
from kvplan_nixl.kernel import with_staging
from kvplan_nixl.reads import make_reads, pipeline_of
from kvplan_nixl.serving import Access, Driver
from tests.blocking import wait_until

LOGGER = logging.getLogger("test")
WAIT_S = 60.0


PROMPT = prompt_digest(range(40))


class Prefill:
    """An engine of two workers, each with half of the heads in blocks of 16 tokens. A seed fills their caches."""

    def __init__(self, seed: int) -> None:
        self.caches = np.random.default_rng(seed).standard_normal((2, 8, 2, 16, 2, 8)).astype(np.float32)
        self.executors = [NixlExecutor(self.worker(rank)) for rank in range(2)]
        self.leases = Leases(Driver())
        envelopes = [executor.envelope() for executor in self.executors]
        self.listener = Listener("prefill", "127.0.0.1", envelopes, self.leases, system=Driver())

    def worker(self, rank: int) -> Worker:
        cache, heads = self.caches[rank], (2 * rank, 2 * rank + 2, 4)
        region = Region("kv", cache.ctypes.data, cache.nbytes)
        pattern = "block kv token head dim"
        view = view_of(cache, pattern, name="layers.0.attn", group="attn", region=region, shards={"head": heads})
        return Worker("prefill", rank, [region], [Group("attn", 16)], [view])

    def hand_off(self, request: str) -> Handoff:
        """A request of 40 tokens in blocks 5, 2 and 6."""
        lease = self.leases.grant(request)
        return Handoff(self.listener.source, lease, 40, PROMPT, {"attn": Blocks([5, 2, 6])})

    def token(self, position: int) -> np.ndarray:
        """K and V of all heads."""
        block = [5, 2, 6][position // 16]
        return np.concatenate([self.caches[rank, block, :, position % 16] for rank in range(2)], axis=1)

    def close(self) -> None:
        self.listener.close()
        for executor in self.executors:
            executor.close()


class Decode:
    """An engine of one worker, with blocks of 24 tokens and heads outside them."""

    def __init__(self, staging_bytes: int) -> None:
        self.cache = np.zeros((6, 2, 4, 24, 8), np.float32)
        region = Region("kv", self.cache.ctypes.data, self.cache.nbytes)
        view = view_of(self.cache, "block kv head token dim", name="layers.0.attn", group="attn", region=region)
        worker, copier = with_staging(Worker("decode", 0, [region], [Group("attn", 24)], [view]), staging_bytes)
        self.executor = NixlExecutor(worker)
        self.claims = Claims(LOGGER, Driver())
        self.reads = make_reads(
            self.executor,
            self.claims,
            LOGGER,
            key=Access().key,
            system=Driver(),
            pipeline=pipeline_of(self.executor, copier),
            handshakes=Handshakes(WAIT_S),
        )
        self.pipeline = self.reads._pipeline

    def read(self, handoff: Handoff) -> ReadResult:
        """Read a request into blocks 4 and 1, but for its first 10 tokens."""
        read = Read(
            request="r",
            source=handoff.source,
            lease=handoff.lease,
            local={"attn": Blocks([4, 1])},
            remote=handoff.blocks,
            tokens={"attn": (10, 40)},
        )
        self.claims.claim(handoff.source, handoff.lease, "r")
        self.reads.submit(PartialRead("r", read))
        (ended,) = wait_until(self.reads.poll, WAIT_S)
        assert self.pipeline is None or ended.error is not None or self.pipeline.num_chunks > 0
        self.claims.release(handoff.source, handoff.lease, "r")
        return ended

    def close(self) -> None:
        """Let prefill know what has ended, before it closes, as long as it answers: else that is a line in a log."""
        self.claims.close()
        wait_until(lambda: not self.claims._by_source, WAIT_S)
        self.executor.close()

    def token(self, position: int) -> np.ndarray:
        return self.cache[[4, 1][position // 24], :, :, position % 24]


@pytest.fixture(params=[0, 1 << 20], ids=["directly", "staged"])
def staging_bytes(request: pytest.FixtureRequest) -> int:
    """The size of decode's staging region."""
    return int(request.param)


def opened(stack: ExitStack, staging_bytes: int) -> tuple[Prefill, Decode]:
    prefill, decode = Prefill(1), Decode(staging_bytes)
    stack.callback(prefill.close)
    stack.callback(decode.close)
    return prefill, decode


def test_a_request_is_read_and_its_lease_ends(staging_bytes: int) -> None:
    """Every value of the range arrives, none before it is touched, and prefill may free the blocks at once."""
    with ExitStack() as stack:
        prefill, decode = opened(stack, staging_bytes)
        result = decode.read(prefill.hand_off("request 1"))
        assert result.error is None
        assert result.is_staged == (staging_bytes > 0)
        directly = 30 * 2 * 4  # a head of a token is contiguous on both sides, K and V apart
        assert result.num_descriptors == directly if not staging_bytes else 0 < result.num_descriptors < directly
        assert 0 < result.post_seconds < result.transfer_seconds < result.seconds
        assert all((decode.token(position) == prefill.token(position)).all() for position in range(10, 40))
        assert not any(decode.token(position).any() for position in range(10))
        assert wait_until(lambda: prefill.leases.take_ended().done, WAIT_S) == ("request 1",)


def test_a_handoff_is_read_once(staging_bytes: int) -> None:
    """Read, done, and read once more: the blocks may be another request's by then, and the second read fails."""
    with ExitStack() as stack:
        prefill, decode = opened(stack, staging_bytes)
        handoff = prefill.hand_off("request 1")
        assert decode.read(handoff).error is None
        wait_until(lambda: prefill.leases.take_ended().done, WAIT_S)
        prefill.caches[...] = 7
        error = decode.read(handoff).error
        assert error is not None
        assert error.code == "LEASE"


def test_a_source_that_is_gone_and_comes_back(staging_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a source that is gone fails; one of its next start, under the same name, is read.

    By UCX's own copies it would fail when the source's process ends, which is this one.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    with ExitStack() as stack:
        prefill, decode = opened(stack, staging_bytes)
        assert decode.read(prefill.hand_off("first")).error is None
        handoff = prefill.hand_off("lost")
        prefill.close()
        error = decode.read(handoff).error
        assert error is not None
        assert error.code in ("PEER", "TRANSFER")
        again = Prefill(2)
        stack.callback(again.close)
        assert decode.read(again.hand_off("second")).error is None
        assert all((decode.token(position) == again.token(position)).all() for position in range(10, 40))


def test_a_stranger_does_not_take_a_workers_place(staging_bytes: int) -> None:
    """One handoff of an engine that offered ``prefill/0`` as its own made all reads from the real one fail."""
    with ExitStack() as stack:
        prefill, decode = opened(stack, staging_bytes)
        assert decode.read(prefill.hand_off("first")).error is None
        stranger = Prefill(3)
        stack.callback(stranger.close)
        envelopes = [executor.envelope() for executor in stranger.executors]
        evil = Listener("evil", "127.0.0.1", envelopes, stranger.leases, system=Driver())
        stack.callback(evil.close)
        forged = attrs.evolve(stranger.hand_off("forged"), source=evil.source)
        assert "expected workers of evil, got worker prefill/0" in str(decode.read(forged).error)
        assert "which still answers" in str(decode.read(stranger.hand_off("forged")).error)
        assert decode.read(prefill.hand_off("second")).error is None
        assert all((decode.token(position) == prefill.token(position)).all() for position in range(10, 40))


def test_an_old_handoff_is_refused(staging_bytes: int) -> None:
    """A handoff of an earlier start, at the address of the present one, is not read from the wrong blocks."""
    with ExitStack() as stack:
        prefill, decode = opened(stack, staging_bytes)
        handoff = prefill.hand_off("request 1")
        old = attrs.evolve(handoff, source=attrs.evolve(handoff.source, start="earlier"))
        assert "restarted" in str(decode.read(old).error)
        assert not decode.cache.any()
