"""Envelopes as untrusted data, and what an executor does with them."""

from __future__ import annotations

import attrs
import pytest

from benchmarks.real_memory import placed
from kvplan import KVPlanError, PeerError, plan_reads
from kvplan_nixl import Envelope, NixlExecutor
from kvplan_nixl.serving.host_key import host_key
from tests.small import engine

(WORKER,) = engine("prefill")
GOOD = Envelope(WORKER, "prefill.0.a1", b"metadata", b"handles")


def authentic(content: bytes) -> bytes:
    """Any content of an unmodified envelope."""
    return b"kvplan_nixl 3\n" + bytes.fromhex(host_key().sign("envelope", content)) + content


def test_an_envelope_comes_out_as_it_went_in() -> None:
    """Unpacking returns the worker, agent name and metadata that were packed."""
    assert Envelope.unpack(GOOD.pack()) == GOOD


def test_an_envelope_cut_short() -> None:
    """A truncated envelope is refused."""
    for length in range(len(GOOD.pack())):
        with pytest.raises(PeerError):
            Envelope.unpack(GOOD.pack()[:length])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "starts with 'kvplan_nixl 3'"),
        (b"kvplan_nixl 1\n" + bytes(44), "starts with 'kvplan_nixl 3'"),
        (authentic(b"\xff" * 16), "at most 1024 bytes of name"),
        (authentic(GOOD.pack()[46:] + b" "), "by its own lengths"),
        (GOOD.pack() + b" ", "a bad signature"),
        (Envelope(WORKER, "decode.0.a1", b"").pack(), "the name of an agent of worker prefill/0"),
        (
            authentic(GOOD.pack()[46:].replace(b"prefill.0.", b"prefill.0\n")),
            "the name of an agent of worker prefill/0",
        ),
        (authentic(GOOD.pack()[46:].replace(b"0.a1", b"0.\n1")), "the name of an agent of worker prefill/0"),
    ],
    ids=["empty", "version", "lengths", "too long", "appended", "agent", "line", "end of line"],
)
def test_what_is_no_envelope(data: bytes, text: str) -> None:
    """Other bytes are refused in one line that says what was expected."""
    with pytest.raises(PeerError, match=text) as caught:
        Envelope.unpack(data)
    assert caught.value.code == "MESSAGE"


def test_an_envelope_is_bytes() -> None:
    """A str is the caller's mistake, not the peer's."""
    with pytest.raises(KVPlanError, match="TYPE: cannot read an envelope: expected a value of type bytes"):
        Envelope.unpack("kvplan_nixl 1\n")  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", [b"", b"metadata", bytes(4096)])
def test_metadata_that_nixl_cannot_read(metadata: bytes) -> None:
    """Bytes that are no metadata are refused, and the worker stays unknown."""
    there, _ = placed(engine("decode")[0])
    with NixlExecutor(there) as executor:
        for _ in range(2):
            with pytest.raises(KVPlanError, match=r"PEER: cannot load the metadata of NIXL agent 'prefill\.0\.a1'"):
                executor.connect(Envelope(WORKER, "prefill.0.a1", metadata).pack())


def test_metadata_of_another_agent() -> None:
    """An envelope with the metadata of an agent of another name is refused."""
    there, _ = placed(engine("decode")[0])
    source, _ = placed(WORKER)
    with NixlExecutor(there) as executor, NixlExecutor(source) as other:
        sent = Envelope.unpack(other.envelope())
        with pytest.raises(KVPlanError, match=r"PEER: .* expected that agent's, got those of 'prefill\.0\."):
            executor.connect(Envelope(sent.worker, "prefill.0.forged", sent.metadata).pack())
        assert executor.connect(other.envelope()) == source


def test_rows_outside_the_registered_memory() -> None:
    """An offer of more memory than its agent has registered is refused before any byte moves."""
    there, _ = placed(engine("decode", layers=1)[0])
    source, _ = placed(engine("prefill", layers=1)[0])
    (boast,) = engine("prefill", layers=1, blocks=1 << 20)
    boast = attrs.evolve(boast, regions=[attrs.evolve(boast.regions[0], address=source.regions[0].address)])
    with NixlExecutor(there) as executor, NixlExecutor(source) as other:
        sent = Envelope.unpack(other.envelope())
        executor.connect(Envelope(boast, sent.agent, sent.metadata).pack())
        with pytest.raises(KVPlanError, match=r"BACKEND: cannot prepare 2 rows of 'prefill\.0\."):
            executor.prepare(plan_reads(there, [boast]))


def test_an_envelope_with_one_byte_changed() -> None:
    """A changed byte of the HMAC or of what it covers is found before any of it is read."""
    data = bytearray(GOOD.pack(b"a secret of all engines"))
    for at in range(14, len(data)):
        data[at] ^= 1
        with pytest.raises(PeerError, match="a bad signature"):
            Envelope.unpack(bytes(data), b"a secret of all engines")
        data[at] ^= 1


def test_envelopes_of_another_key() -> None:
    """An executor takes envelopes with its own key alone. A key is bytes."""
    there, _ = placed(engine("decode")[0])
    source, _ = placed(WORKER)
    with NixlExecutor(there, key=b"a key of engines") as executor:
        for key in (None, b"a key of other engines"):
            with NixlExecutor(source, key=key) as other, pytest.raises(PeerError, match="a bad signature"):
                executor.connect(other.envelope())
        with NixlExecutor(source, key=b"a key of engines") as other:
            assert executor.connect(other.envelope()) == source
    with pytest.raises(KVPlanError, match="TYPE: cannot read a key: expected a value of type bytes"):
        Envelope.unpack(GOOD.pack(), "one")  # type: ignore[arg-type]
    with pytest.raises(KVPlanError, match="TYPE: cannot read a key: expected a value of type bytes"):
        GOOD.pack("one")  # type: ignore[arg-type]


def test_connecting_twice() -> None:
    """The same envelope again changes nothing. Another process is refused under a connected name, as is oneself."""
    there, _ = placed(engine("decode")[0])
    source, _ = placed(WORKER)
    with NixlExecutor(there) as executor, NixlExecutor(source) as other, NixlExecutor(source) as second:
        executor.connect(other.envelope())
        assert executor.connect(other.envelope()) == source
        with pytest.raises(KVPlanError, match=r"PEER: cannot connect prefill/0: .* got another process"):
            executor.connect(second.envelope())
        with pytest.raises(KVPlanError, match=r"PEER: cannot connect decode/0: .* got this worker"):
            executor.connect(executor.envelope())
        executor.disconnect(source)
        executor.connect(other.envelope())


def test_an_executor_that_was_closed() -> None:
    """A closed executor can be closed again, and refuses everything else."""
    there, _ = placed(engine("decode")[0])
    executor = NixlExecutor(there)
    executor.close()
    executor.close()
    with pytest.raises(KVPlanError, match="BACKEND: cannot use a NIXL agent"):
        executor.envelope()
