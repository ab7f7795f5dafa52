"""vLLM's scheduler part where prefill and decode get a request at once: what is published, and what is read of it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.simulation.test_vllm_scheduler import BLOCK, PROMPT, SAID, Engines, blocks_of, engines, ids_of, request_of
from tests.simulation.vllm_objects import RequestStatus, scheduled

__all__ = ["engines"]

ROOM = "transfer 1"
COMPUTE = {"do_remote_decode": True, "transfer_id": ROOM}
READ = {"do_remote_prefill": True, "transfer_id": ROOM, "remote_bootstrap_addr": "http://prefill:5600"}
EARLY = 2 * BLOCK
KINDS = [("full",), ("full", "window"), ("full", "state")]


@attrs.define(eq=False)
class Pair:
    """Prefill and decode with a request in a room, of which prefill has computed some positions."""

    engines: Engines
    kinds: tuple[str, ...]
    prompt: Any = None
    answer: Any = None
    prefill: Any = attrs.field(init=False)
    decode: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.prefill = self.engines.start(*self.kinds, early_tokens=EARLY)
        self.decode = self.engines.start(*self.kinds, name="decode", prefill_timeout_s=60.0)
        self.prompt = request_of(SAID[:PROMPT], COMPUTE)
        self.answer = request_of(SAID[:PROMPT], READ)
        self.prefill.add(self.prompt)
        self.decode.add(self.answer)
        # vLLM shows a request's blocks by its managers
        tables = blocks_of(self.kinds, PROMPT).blocks
        for manager, table in zip(self.engines.managers["prefill"], tables, strict=True):
            manager.req_to_blocks = {"r": table}

    def begin(self, num_found: int = 0) -> None:
        """Let prefill begin, with some positions in its cache."""
        self.prompt.num_computed_tokens = num_found
        self.prefill.publish(scheduled(new=("r",)))

    def compute(self, num_tokens: int, in_flight: int = 0) -> None:
        """Let prefill compute positions, of which the last ones are in flight, and decode hear of it."""
        self.prompt.num_computed_tokens = num_tokens
        self.prompt.num_in_flight_tokens = in_flight
        self.prefill.publish(scheduled())
        self.engines.run()

    def finish(self, **fields: Any) -> Any:
        """Let prefill end the prompt."""
        tokens = SAID[: self.prompt.num_prompt_tokens]
        params = self.prefill.hand_over(request_of(tokens, COMPUTE, [7], **fields), ids_of(self.kinds, len(tokens)))
        self.engines.run()
        return params

    def allocate(self, num_cached: int = 0) -> Any:
        """Give decode's request blocks, and return its step."""
        num_tokens = self.decode.count_tokens_to_read(self.answer, num_cached)
        assert num_tokens is not None
        cached = (num_cached // BLOCK,) * len(self.kinds)
        self.decode.begin_read(self.answer, blocks_of(self.kinds, num_cached + num_tokens, cached), num_tokens)
        return self.decode.take_step()


def test_a_part_may_have_all_positions_that_are_read(engines: Engines) -> None:
    """All but the last one, which decode computes: of these the whole blocks."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(PROMPT - 1)
    step = pair.allocate()
    assert step.refused == {}
    assert step.parts[0].tokens == {"group0": (0, 96)}


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_prompt_is_read_while_it_is_computed(engines: Engines, kinds: tuple[str, ...]) -> None:
    """Full blocks first, then the rest with windows and states, all under one lease that decode claims."""
    pair = Pair(engines, kinds)
    assert pair.decode.count_tokens_to_read(pair.answer, 0) is None
    pair.begin()
    pair.compute(40)
    assert pair.decode.count_tokens_to_read(pair.answer, 0) == PROMPT - 1
    first = pair.allocate()
    assert (first.reads, first.refused) == ([], {})
    (part,) = first.parts
    assert part.tokens == {"group0": (0, 32)}
    assert part.local["group0"].ids.tolist() == part.remote["group0"].ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert {group: len(table.ids) for group, table in part.local.items() if group != "group0"} == dict.fromkeys(
        [f"group{number}" for number in range(1, len(kinds))], 0
    )
    # less than a chunk more
    pair.compute(40 + EARLY - 1)
    assert pair.decode.take_step().parts == []
    pair.compute(90)
    (part,) = pair.decode.take_step().parts
    assert part.tokens == {"group0": (32, 80)}
    params = pair.finish()
    step = pair.decode.take_step()
    (last,) = step.reads
    assert (step.parts, last.tokens["group0"], last.lease) == ([], (80, PROMPT - 1), part.lease)
    assert params["remote_lease"] == last.lease
    assert last.local.keys() == last.tokens.keys() | {f"group{kinds.index('state')}" for _ in kinds if "state" in kinds}
    assert all(len(table.ids) for table in last.local.values())
    # the claim outlives the first lease
    engines.run(100.0)
    assert pair.prefill.take_step().released == set()
    pair.decode.end_reads({"r"})
    engines.run()
    assert pair.prefill.take_step().released == {"r"}
    assert pair.decode.take_step().refused == {}


def test_a_short_prompt_is_read_as_a_whole(engines: Engines) -> None:
    """Nothing is published of it before."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(EARLY - 1)
    assert pair.decode.count_tokens_to_read(pair.answer, 0) is None
    pair.finish()
    step = pair.allocate(BLOCK)
    assert step.parts == []
    assert step.reads[0].tokens == {"group0": (BLOCK, PROMPT - 1)}


def test_a_step_under_way_is_not_published(engines: Engines) -> None:
    """Nor what the prefix cache has of a request whose first step is under way: another one may compute it."""
    pair = Pair(engines, ("full",))
    pair.begin(48)
    pair.compute(80, in_flight=32)
    assert pair.decode.count_tokens_to_read(pair.answer, 0) is None
    pair.compute(96, in_flight=16)
    (part,) = pair.allocate().parts
    assert part.tokens == {"group0": (0, 80)}


def test_what_decode_has_cached_is_not_read(engines: Engines) -> None:
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(40)
    assert pair.allocate(64).parts == []
    pair.compute(90)
    assert pair.decode.take_step().parts[0].tokens == {"group0": (64, 80)}


def test_what_decode_has_cached_wholly_is_not_read_at_all(engines: Engines) -> None:
    """Prefill frees its blocks at once."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.finish()
    step = pair.allocate(PROMPT - 1)
    engines.run()
    assert (step.parts, step.reads, step.refused) == ([], [], {})
    assert pair.prefill.take_step().released == {"r"}


def test_a_preempted_prompt_is_read_no_further(engines: Engines) -> None:
    """Its lease is revoked before another request gets its blocks, and nobody waits for its second time."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(40)
    (part,) = pair.allocate().parts
    pair.prompt.num_computed_tokens = 0
    pair.prompt.status = RequestStatus.PREEMPTED
    pair.prefill.publish(scheduled(preempted=("r",)))
    assert not pair.prefill._exporter.leases.is_valid(part.lease)
    engines.run(10.0)
    assert pair.decode.take_step().refused["r"].code == "LEASE"
    pair.prompt.status = RequestStatus.RUNNING
    pair.begin()
    pair.compute(64)
    assert pair.decode.take_step().parts == []
    assert pair.finish() is None
    assert (len(pair.prefill._exporter), pair.prefill._rooms) == (0, {})


def test_a_prompt_that_is_preempted_before_anybody_reads_it_is_handed_over(engines: Engines) -> None:
    """Under another lease: decode has not heard of the first one."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.prompt.num_computed_tokens = 40
    pair.prefill.publish(scheduled())
    first = pair.prefill._exporter._requests["r"].lease
    pair.prefill.publish(scheduled(preempted=("r",)))
    pair.begin()
    pair.compute(64)
    (part,) = pair.allocate().parts
    assert part.lease != first
    assert pair.finish()["remote_lease"] == part.lease


def test_a_prompt_that_was_computed_again_is_refused(engines: Engines) -> None:
    """If decode's claim was on its way when the first lease was revoked: what was read is of other blocks."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(40)
    (part,) = pair.allocate().parts
    pair.prefill._exporter.leases._leases[part.lease].claims_end_at.clear()
    pair.prefill.publish(scheduled(preempted=("r",)))
    pair.begin()
    pair.compute(64)
    error = pair.decode.take_step().refused["r"]
    assert error.code == "LEASE"
    assert "prefill has given it up, and computed it again" in str(error)


def test_prefill_has_time_for_each_part(engines: Engines) -> None:
    """Not for all of them together."""
    pair = Pair(engines, ("full",))
    pair.begin()
    engines.run(50.0)
    pair.compute(40)
    assert len(pair.allocate().parts) == 1
    engines.run(50.0)
    pair.compute(90)
    step = pair.decode.take_step()
    assert (len(step.parts), step.refused) == (1, {})
    engines.run(50.0)
    assert pair.decode.take_step().refused == {}
    engines.run(11.0)
    assert pair.decode.take_step().refused["r"].code == "PEER"


@pytest.mark.parametrize("num_computed", [0, 40])
def test_an_aborted_prompt_is_given_up(engines: Engines, num_computed: int) -> None:
    """Its blocks are free, and decode hears of it, or waits no longer than it has to."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(num_computed)
    if num_computed:
        pair.allocate()
    assert pair.finish(status=RequestStatus.FINISHED_ABORTED) is None
    exporter = pair.prefill._exporter
    assert (len(exporter), pair.prefill._rooms, len(exporter.leases)) == (0, {}, 0)
    if num_computed:
        engines.run(10.0)
        assert pair.decode.take_step().refused["r"].code == "LEASE"
    else:
        engines.run(50.0)
        assert pair.decode.count_tokens_to_read(pair.answer, 0) is None
        engines.run(10.0)
        assert pair.allocate().refused["r"].code == "PEER"


def test_a_request_that_decode_gives_up_frees_prefill(engines: Engines) -> None:
    """Before it has blocks, and while a part is read: then workers say when no byte moves."""
    for is_read in (False, True):
        with_engines = Engines()
        pair = Pair(with_engines, ("full",))
        pair.begin()
        pair.compute(40)
        if is_read:
            pair.allocate()
        pair.answer.status = RequestStatus.FINISHED_ABORTED
        assert pair.decode.hand_over(pair.answer, ids_of(("full",), PROMPT)) is None
        assert pair.decode.take_step().refused.keys() == ({"r"} if is_read else set())
        pair.decode.end_reads({"r"} if is_read else set())
        with_engines.run()
        # the request goes on, and nobody is told that its blocks are free
        assert pair.prefill.take_step().released == set()
        pair.compute(90)
        assert pair.prefill.take_step().released == set()
        assert pair.finish() is None
        assert pair.prefill.take_step().released == set()
        with_engines.loop.close()


def test_a_failed_part_is_the_last_one(engines: Engines) -> None:
    """vLLM waits for the workers' last word."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(40)
    pair.allocate()
    pair.decode.end_reads(set(), {"r"})
    pair.compute(90)
    step = pair.decode.take_step()
    assert (step.parts, [*step.refused]) == ([], ["r"])
    assert pair.decode.take_step().refused == {}


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"transfer_id": 7}, "TYPE"),
        ({"transfer_id": "x" * 129}, "RANGE"),
        ({"remote_bootstrap_addr": None}, "TYPE"),
        ({"remote_bootstrap_addr": ""}, "NAME"),
        ({"remote_bootstrap_addr": "nowhere"}, "NAME"),
        ({"remote_bootstrap_addr": "nowhere:1"}, "PEER"),
    ],
)
def test_bad_parameters(engines: Engines, params: dict[str, Any], code: str) -> None:
    """The request fails, at once or when prefill has not answered in time; prefill computes it all the same."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode", prefill_timeout_s=5.0)
    prompt, answer = request_of(SAID[:PROMPT], COMPUTE | params), request_of(SAID[:PROMPT], READ | params)
    prefill.add(prompt)
    decode.add(answer)
    engines.run(10.0)
    num_tokens = decode.count_tokens_to_read(answer, 0)
    decode.begin_read(answer, blocks_of(("full",), PROMPT), num_tokens)
    assert decode.take_step().refused["r"].code == code


def test_a_client_chooses_no_listener(engines: Engines) -> None:
    """Decode asked any address that a request named; now one that no operator has listed is not asked at all."""
    decode = engines.start("full", name="decode", bootstrap_servers=("prefill:5601", "*.example"))
    answer = request_of(SAID[:PROMPT], READ)
    decode.add(answer)
    decode.begin_read(answer, blocks_of(("full",), PROMPT), decode.count_tokens_to_read(answer, 0))
    assert decode.take_step().refused["r"].code == "NAME"


def test_a_router_that_names_no_address(engines: Engines) -> None:
    decode = engines.start("full", name="decode")
    answer = request_of(SAID[:PROMPT], {"do_remote_prefill": True, "transfer_id": ROOM})
    decode.add(answer)
    decode.begin_read(answer, blocks_of(("full",), PROMPT), decode.count_tokens_to_read(answer, 0))
    error = decode.take_step().refused["r"]
    assert (error.code, error.expected) == ("KEY", "a key 'remote_bootstrap_addr'")


@pytest.mark.parametrize("num_computed", [40, PROMPT])
def test_a_room_of_another_prompt(engines: Engines, num_computed: int) -> None:
    """A part of one, and a whole one, are refused."""
    pair = Pair(engines, ("full",))
    pair.answer._all_token_ids[3] = 1000
    pair.begin()
    pair.compute(num_computed)
    if num_computed == PROMPT:
        pair.finish()
    assert pair.allocate().refused["r"].code == "PROMPT"


def test_a_room_is_one_request(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """A second one of the same name is computed, and handed over with its answer alone."""
    pair = Pair(engines, ("full",))
    second = request_of(SAID[:50], COMPUTE, request_id="second")
    pair.prefill.add(second)
    assert (
        "request 'second': KV is not published while it is computed: NAME: cannot open room transfer 1" in caplog.text
    )
    pair.begin()
    pair.finish()
    assert pair.allocate().reads[0].tokens == {"group0": (0, PROMPT - 1)}


def test_a_room_is_free_again(engines: Engines) -> None:
    """When its request was read or given up."""
    pair = Pair(engines, ("full",))
    pair.finish(status=RequestStatus.FINISHED_ABORTED)
    pair.prefill.add(pair.prompt)
    pair.begin()
    pair.finish()
    pair.allocate()
    pair.decode.end_reads({"r"})
    engines.run()
    assert pair.prefill.take_step().released == {"r"}
    assert pair.prefill._rooms == {}


def test_a_handoff_goes_before_an_id(engines: Engines) -> None:
    """A router that waits for prefill passes its parameters on, and what it has given to both."""
    pair = Pair(engines, ("full",))
    params = pair.finish()
    decode = engines.start("full", name="another")
    decode.add(request_of(SAID[:PROMPT], READ | params))
    assert not decode._importer._requests["r"].room
    assert decode.count_tokens_to_read(request_of(SAID[:PROMPT], READ | params), 0) == PROMPT - 1


def test_all_children_of_a_request_read_one_room(engines: Engines) -> None:
    """Each claims the lease, which ends with the last one."""
    pair = Pair(engines, ("full",))
    twin = request_of(SAID[:PROMPT], READ, request_id="twin")
    pair.decode.add(twin)
    pair.begin()
    pair.compute(40)
    num_tokens = pair.decode.count_tokens_to_read(twin, 0)
    pair.decode.begin_read(twin, blocks_of(("full",), PROMPT - 1), num_tokens)
    assert [part.request for part in pair.allocate().parts] == ["twin", "r"]
    pair.finish()
    assert [read.request for read in pair.decode.take_step().reads] == ["twin", "r"]
    for name, released in (("r", set()), ("twin", {"r"})):
        pair.decode.end_reads({name})
        engines.run()
        assert pair.prefill.take_step().released == released


def test_a_prompt_that_draws_on_drafts_is_published_one_short(engines: Engines) -> None:
    """What drafts cache at the last position is of the next token."""
    pair = Pair(engines, ("full",))
    pair.prefill._drafts_know_next = True
    pair.begin()
    pair.compute(48)
    (part,) = pair.allocate().parts
    assert part.tokens == {"group0": (0, 32)}


def test_a_reset_ends_what_is_published(engines: Engines) -> None:
    """Decode hears that the lease has ended, and prefill hands the request to nobody."""
    pair = Pair(engines, ("full",))
    pair.begin()
    pair.compute(40)
    pair.allocate()
    pair.prefill.reset()
    assert pair.prefill.take_step().released == set()
    pair.compute(90)
    engines.run(10.0)
    assert pair.decode.take_step().refused["r"].code == "LEASE"
    assert pair.finish() is None
