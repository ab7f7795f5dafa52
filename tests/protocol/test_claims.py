"""Claims are taken, renewed and ended; no answer is no refusal, and one engine's silence is no other's."""

from __future__ import annotations

import logging
import threading

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.protocol import Claims, Leases, Source
from kvplan.protocol.claims import RENEW_S, Claim, ClaimAnswer, ClaimMessage, SourceClaims, answer_claims
from kvplan.protocol.leases import LEASE_S, MAX_READERS
from kvplan.protocol.system import RETRY_S
from kvplan_nixl.serving import Driver
from tests.blocking import Answered, Clock, error_of, wait_until, waited

LOGGER = logging.getLogger("test")
SOURCE = Source("prefill", "a1", "127.0.0.1", 1)
SILENCE = KVPlanError("PEER", "reach", expected="an answer", got="none")


def yes(message: ClaimMessage) -> ClaimAnswer:
    """Says that all leases stand."""
    claims, done, asks = ((True,) * len(part) for part in (message.claims, message.done, message.asks))
    return ClaimAnswer(claims, done, asks)


def test_a_claim_is_renewed_until_it_ends() -> None:
    """It is due when it begins and every RENEW_S; its end is sent once."""
    source_claims = SourceClaims(SOURCE)
    source_claims.claim(("l", "x"), 3.0)
    assert source_claims.next_due(3.0) == 3.0
    message = source_claims.take_message(3.0)
    assert message == ClaimMessage("a1", claims=(("l", "x"),))
    assert source_claims.take_answer(message, yes(message), 3.0) == []
    assert source_claims.next_due(4.0) == 3.0 + RENEW_S
    assert source_claims.take_message(3.0 + RENEW_S).claims == (("l", "x"),)
    source_claims.release(("l", "x"))
    assert source_claims.take_message(4.0) == ClaimMessage("a1", done=(("l", "x"),))
    assert source_claims.next_due(5.0) is None


def test_renewals_come_more_often_than_claims_end() -> None:
    """A renewal can be lost, and lost again, before a claim ends for want of it."""
    assert 3 * (RENEW_S + RETRY_S) < LEASE_S


def test_no_answer_is_no_refusal() -> None:
    """A claim without an answer is sent again soon."""
    source_claims = SourceClaims(SOURCE)
    source_claims.claim(("l", "x"), 0.0)
    source_claims.take_failure(source_claims.take_message(0.0), SILENCE, 7.0)
    assert source_claims.next_due(7.0) == 7.0 + RETRY_S
    assert source_claims.refusals == {}


def test_a_refused_claim_is_not_sent_again() -> None:
    """It is a refusal until it ends, which the engine is not told."""
    source_claims = SourceClaims(SOURCE)
    source_claims.claim(("l", "x"), 0.0)
    message = source_claims.take_message(0.0)
    (refusal,) = source_claims.take_answer(message, ClaimAnswer((False,), (), ()), 0.0)
    assert "LEASE: cannot read 'l' from prefill at 127.0.0.1:1" in str(refusal)
    assert source_claims.refusals == {("l", "x"): refusal}
    assert source_claims.next_due(0.0) is None
    source_claims.release(("l", "x"))
    assert (source_claims.refusals, source_claims.next_due(0.0)) == ({}, None)


def test_an_engine_asks_for_claimed_blocks() -> None:
    """As long as it needs them; the claim holds meanwhile, and all of it is forgotten when it ends."""
    source_claims, leases = SourceClaims(SOURCE), Leases(Clock())
    wanted, other = leases.grant("r"), leases.grant("s")
    claims = {(wanted, "x"), (other, "x")}
    for now, needed, expected in ((0.0, {wanted, "another"}, {(wanted, "x")}), (10.0, set[str](), set[Claim]())):
        leases.wanted = frozenset(needed)
        for claim in claims:
            source_claims.claim(claim, now)
        message = source_claims.take_message(now)
        answer = answer_claims(leases, "a1", message)
        assert source_claims.take_answer(message, ClaimAnswer.of_fields(message, answer.fields()), now) == []
        assert source_claims.wanted == expected
    source_claims.claim((wanted, "x"), 20.0)
    message = source_claims.take_message(20.0)
    source_claims.take_answer(message, attrs.evolve(yes(message), wanted=(wanted,)), 20.0)
    source_claims.release((wanted, "x"))
    assert source_claims.wanted == set()


def test_a_claim_that_ends_while_it_is_sent_is_forgotten() -> None:
    """Its answer, or none, begins nothing again."""
    for fails in (False, True):
        source_claims = SourceClaims(SOURCE)
        source_claims.claim(("l", "x"), 0.0)
        message = source_claims.take_message(0.0)
        source_claims.release(("l", "x"))
        if fails:
            source_claims.take_failure(message, SILENCE, 0.0)
        else:
            source_claims.take_answer(message, yes(message), 0.0)
        assert source_claims.take_message(0.0) == ClaimMessage("a1", done=(("l", "x"),))
        assert source_claims.next_due(100.0) is None


def test_who_asks_is_told() -> None:
    """Each question gets the answer to a message that was sent after it, or why there is none."""
    source_claims = SourceClaims(SOURCE)
    first, again, over = source_claims.ask("l"), source_claims.ask("l"), source_claims.ask("o")
    message = source_claims.take_message(0.0)
    later = source_claims.ask("l")
    assert message.asks == ("l", "o")
    source_claims.take_answer(message, ClaimAnswer((), (), (True, False)), 0.0)
    assert (first.result(), again.result()) == (None, None)
    with pytest.raises(KVPlanError, match="LEASE"):
        over.result()
    assert not later.done
    source_claims.take_failure(source_claims.take_message(0.0), SILENCE, 0.0)
    assert later.error is SILENCE


def test_one_engine_that_hangs_delays_no_other() -> None:
    """Each engine has its own coroutine."""
    hangs = threading.Event()

    def send(address: str, message: ClaimMessage) -> ClaimAnswer:
        if address != SOURCE.address:
            hangs.wait(60)
        return yes(message)

    claims = Claims(LOGGER, Answered(send))
    claims.claim(Source("frozen", "a1", "127.0.0.1", 2), "l", "x")
    waited(claims.ask(SOURCE, "l"))
    hangs.set()
    claims.close()


def test_a_question_to_one_engine_too_many_is_answered_at_once() -> None:
    """By an error, as the answer of an engine would be: whoever asks waits for no thread."""
    claims = Claims(LOGGER, Answered(lambda _, message: yes(message)), max_sources=1)
    claims.claim(SOURCE, "l", "x")
    error = error_of(claims.ask(Source("another", "a1", "127.0.0.1", 2), "l"))
    assert isinstance(error, KVPlanError)
    assert error.code == "RANGE"
    claims.close()


def test_a_claim_too_many_is_refused_alone() -> None:
    """The other claims of its message are renewed: they ran out when the whole message was refused each second."""
    leases = Leases(Driver())
    crowded, other = leases.grant("r"), leases.grant("s")
    for number in range(MAX_READERS):
        assert leases.claim(crowded, f"{number}")
    message = ClaimMessage("a1", claims=((crowded, "x"), (other, "x"), (crowded, "0")))
    assert answer_claims(leases, "a1", message).claims == (False, True, True)


def test_a_refusal_is_found_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever begins a claim can ask later whether it was refused."""
    claims = Claims(LOGGER, Answered(lambda _, message: answer_claims(Leases(Driver()), "a1", message)))
    assert (claims.refusal(SOURCE, "l", "x"), claims.is_wanted(SOURCE, "l", "x")) == (None, False)
    claims.claim(SOURCE, "l", "x")
    assert not claims.is_wanted(SOURCE, "another", "x")
    refusal = wait_until(lambda: claims.refusal(SOURCE, "l", "x"))
    assert refusal is not None
    assert not claims.is_wanted(SOURCE, "l", "x")
    # the source does not say which of its reasons it is
    assert (refusal.code, "too many readers" in refusal.got, "has ended" in refusal.got) == ("LEASE", True, True)
    claims.release(SOURCE, "l", "x")
    assert claims.refusal(SOURCE, "l", "x") is None
    # it is logged by the thread that has found it, after that
    wait_until(lambda: "expected a valid lease" in caplog.text)
    assert (claims.num_refused, claims.num_unanswered) == (1, 0)
    claims.close()


def test_messages_without_an_answer_are_counted() -> None:
    """Each is one, however many claims and questions it has."""

    def send(address: str, message: ClaimMessage) -> ClaimAnswer:
        raise SILENCE

    claims = Claims(LOGGER, Answered(send))
    assert isinstance(error_of(claims.ask(SOURCE, "l")), KVPlanError)
    assert (claims.num_refused, claims.num_unanswered) == (0, 1)
    claims.close()


def test_silence_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """When it begins, and again after an answer; all messages without one are counted."""
    silent = [True, True, False, True]

    def send(address: str, message: ClaimMessage) -> ClaimAnswer:
        if silent.pop(0):
            raise SILENCE
        return yes(message)

    claims = Claims(LOGGER, Answered(send))
    for num_logged in (1, 1, 1, 2):
        error_of(claims.ask(SOURCE, "l"))
        assert caplog.text.count("leases may expire: prefill does not answer") == num_logged
    assert claims.num_unanswered == 3
    claims.close()


def test_a_thread_without_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing is claimed any more, an engine's thread ends; a later claim starts another one."""
    monkeypatch.setattr("kvplan.protocol.claims.IDLE_S", 0.01)
    claims = Claims(LOGGER, Answered(lambda _, message: yes(message)))
    for _ in range(2):
        claims.claim(SOURCE, "l", "x")
        claims.release(SOURCE, "l", "x")
        wait_until(lambda: not claims._by_source)
    claims.close()


def test_close_sends_what_has_ended() -> None:
    """An engine that stops lets go of what it claims, and then sends nothing."""
    sent: list[ClaimMessage] = []

    def send(_: str, message: ClaimMessage) -> ClaimAnswer:
        sent.append(message)
        return yes(message)

    claims = Claims(LOGGER, Answered(send))
    claims.claim(SOURCE, "l", "x")
    claims.release(SOURCE, "l", "x")
    claims.close()
    wait_until(lambda: not claims._by_source)
    assert [message.done for message in sent if message.done] == [(("l", "x"),)]


class Network:
    """Readers, their by_reader and one engine's leases, over a network that loses messages and answers."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.leases = Leases(self.clock, lease_s=LEASE_S)
        self.by_reader: dict[int, SourceClaims] = {}
        self.freed: set[str] = set()
        self.names: list[str] = []

    def free(self) -> None:
        """The engine gives away the blocks whose leases have ended."""
        ended = self.leases.take_ended()
        self.freed.update([*ended.done, *ended.late])

    def exchange(self, reader: int, loses: int) -> None:
        """A reader's message, if one is due, reaches the engine or is lost, and so does the answer."""
        source_claims = self.by_reader[reader]
        due = source_claims.next_due(self.clock.now)
        if due is None or due > self.clock.now:
            return
        message = source_claims.take_message(self.clock.now)
        if loses != 1:
            answer = answer_claims(self.leases, "a1", message)
        if loses:
            source_claims.take_failure(message, SILENCE, self.clock.now)
        else:
            source_claims.take_answer(message, answer, self.clock.now)


STEPS = st.one_of(
    st.tuples(st.just("grant"), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["begin", "read", "end"]), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.sampled_from(["exchange", "exchange", "die"]), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("pass"), st.integers(1, 40), st.just(0)),
)


@given(st.lists(STEPS, max_size=80))
def test_no_schedule_confirms_what_was_given_away(steps: list[tuple[str, int, int]]) -> None:
    """Requests arrive, wait, are read, retried and forgotten; readers die and messages are lost.

    A read that its source confirms had its blocks until then. In the end all blocks are free.
    """
    network = Network()
    network.by_reader = {reader: SourceClaims(SOURCE) for reader in range(4)}
    begun: dict[int, list[Claim]] = {reader: [] for reader in range(4)}
    for action, number, other in steps:
        if action == "grant":
            network.names.append(network.leases.grant(f"r{len(network.names)}"))
        elif action == "pass":
            network.clock.now += number
        elif action == "die":
            network.by_reader[number] = SourceClaims(SOURCE)
            begun[number] = []
        elif action == "exchange":
            network.exchange(number, other)
        elif action == "begin" and network.names:
            claim = network.names[other % len(network.names)], f"{number}"
            begun[number].append(claim)
            network.by_reader[number].claim(claim, network.clock.now)
        elif action == "read" and begun[number]:
            lease = begun[number][other % len(begun[number])][0]
            had_its_blocks = lease.partition(" ")[0] not in network.freed
            answer = network.by_reader[number].ask(lease)
            network.exchange(number, 0)
            if answer.error is None:
                assert had_its_blocks
                assert lease.partition(" ")[0] not in network.freed
        elif action == "end" and begun[number]:
            network.by_reader[number].release(begun[number].pop(other % len(begun[number])))
        network.free()
    network.clock.now += 2 * LEASE_S
    network.free()
    assert network.freed == {name.partition(" ")[0] for name in network.names}
    assert len(network.leases) == 0


def test_a_busy_reader_keeps_its_blocks() -> None:
    """A request that waits for an hour is read: its claim was renewed all the time, with a message in three lost."""
    network = Network()
    network.by_reader = {0: SourceClaims(SOURCE)}
    lease = network.leases.grant("r0")
    network.by_reader[0].claim((lease, "x"), 0.0)
    for second in range(3600):
        network.clock.now = float(second)
        network.exchange(0, second % 3 == 0)
        network.free()
    assert network.leases.is_valid(lease)
