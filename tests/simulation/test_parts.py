"""The parts of a simulation alone: tasks that take turns, hosts and their network, and the fabric."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import pytest

from kvplan import Blocks, KVPlanError, Status
from kvplan.protocol.system import Route
from kvplan.testing.simulation import BrokenRuleError, Site
from kvplan.testing.simulation.catalog import Catalog, Shape
from kvplan.testing.simulation.fabric import Fabric, Port, Trouble, VirtualExecutor
from kvplan.testing.simulation.memory import LabelledMemory, Numbers, prefix_labels
from kvplan.testing.simulation.network import Disturbance, Host, Network
from kvplan.testing.simulation.scenario import (
    HEALED_S,
    Arrival,
    Death,
    Freeze,
    Member,
    Rival,
    Scenario,
    Update,
    Visit,
)
from kvplan.testing.simulation.tasks import TaskLoop


class World:
    """A prefill and a decode host on a network, with a worker each."""

    def __init__(
        self, *disturbances: Disturbance, troubles: tuple[Trouble, ...] = (), has_copies: bool = False
    ) -> None:
        self.has_copies = has_copies
        self.loop = TaskLoop()
        self.network = Network(self.loop, 1, disturbances)
        self.fabric = Fabric(1, troubles, Catalog())
        self.prefill = self.port("prefill")
        self.decode = self.port("decode")
        self.offer = self.fabric.register(self.prefill)
        self.executor = VirtualExecutor(self.fabric, self.decode)
        self.plan = self.fabric.catalog.plan(self.decode.worker, [self.prefill.worker])
        tables = {"attn": Blocks([1, 2])}
        (self.spec,) = self.plan.bind(local=tables, remote=tables, tokens=(0, 8))

    def port(self, name: str) -> Port:
        """A host's memory, at another start if it is asked for again."""
        (worker,) = self.fabric.catalog.workers(name, Shape())
        host = Host(name, self.network, random.Random(f"{name} {len(self.fabric.ports)}"))
        memory = LabelledMemory(worker, Shape().groups, Numbers.of([worker]), has_copies=self.has_copies)
        return Port(host, worker, memory)

    def run(self, seconds: float = 100.0) -> None:
        """Let all events of some time happen."""
        until = self.loop.now + seconds
        while self.loop.advance(until):
            continue

    def close(self) -> None:
        self.loop.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def code(call: Any, *arguments: Any) -> str:
    """The code of the error that a call raises."""
    with pytest.raises(KVPlanError) as caught:
        call(*arguments)
    return caught.value.code


def test_a_transfer_moves_the_labels_of_its_source(world: World) -> None:
    """It runs until its last part has landed; meanwhile its blocks are known to be in use."""
    world.executor.connect(world.offer)
    world.executor.connect(world.offer)  # changes nothing
    world.executor.prepare(world.plan)
    world.prefill.memory.cells[:] = 7
    transfer = world.executor.start(world.spec, "r")
    assert world.executor.poll(transfer) is Status.RUNNING
    assert code(world.executor.release, transfer) == "TRANSFER"
    assert world.decode.memory.is_landing("attn", 1)
    assert not world.decode.memory.is_landing("attn", 3)
    world.run()
    assert world.executor.poll(transfer) is Status.DONE
    world.executor.release(transfer)
    assert not world.decode.memory.is_landing("attn", 1)
    assert world.decode.memory.cells.sum() == 7 * world.spec.num_bytes


def test_what_lands_in_copies_is_copied_to_the_device() -> None:
    """Not while bytes may land, and with no byte that was not read."""
    world = World(has_copies=True)
    decode, memory = world.decode, world.decode.memory
    memory.read_into_copies()
    memory.cells[:] = 3
    site = Site(decode.host, [decode.worker], Shape().groups, [world.executor], [], [], world.fabric)
    copy_blocks = partial(site.copy_blocks, world.executor, "attn")
    world.executor.connect(world.offer)
    world.executor.prepare(world.plan)
    world.prefill.memory.exported[:] = 7
    world.executor.start(world.spec, "r")
    for to_device in (False, True):
        with pytest.raises(BrokenRuleError, match=r"GIVEN: block 1 of decode is copied while bytes may land in it"):
            copy_blocks([1], to_device=to_device)
    world.run()
    assert (memory.cells == 3).all()
    copy_blocks([1, 2], to_device=True)
    assert (memory.cells == 7).sum() == world.spec.num_bytes
    with pytest.raises(
        BrokenRuleError, match="OWN: block 3 of decode is copied to the device with bytes that were not"
    ):
        copy_blocks([3], to_device=True)
    copy_blocks([3], to_device=False)
    copy_blocks([3], to_device=True)
    assert (memory.exported == 3).sum() == memory.cells_of_block("attn", 3).size
    world.close()


def test_connections_are_those_of_one_start(world: World) -> None:
    """Nothing starts without a connection and a plan that was prepared for it, and a dead worker is not connected."""
    assert code(world.executor.disconnect, world.prefill.worker) == "PEER"
    assert code(world.executor.prepare, world.plan) == "PEER"
    assert code(world.executor.start, world.spec, "r") == "PEER"
    world.executor.connect(world.offer)
    assert code(world.executor.start, world.spec, "r") == "TRANSFER"
    again = world.fabric.register(world.port("prefill"))
    assert code(world.executor.connect, again) == "PEER"
    world.executor.prepare(world.plan)
    transfer = world.executor.start(world.spec, "r")
    world.executor.disconnect(world.prefill.worker)
    world.run()
    assert world.executor.poll(transfer) is Status.CANCELLED
    world.prefill.host.die()
    assert code(world.executor.connect, world.offer) == "PEER"
    world.executor.connect(again)


def test_a_lost_connection_fails_later_transfers_too(world: World) -> None:
    """Until somebody connects again; a transfer that is cancelled reads no further part."""
    world.executor.connect(world.offer)
    world.executor.prepare(world.plan)
    cancelled = world.executor.start(world.spec, "cancelled")
    world.executor.cancel(cancelled)
    world.run()
    assert world.executor.poll(cancelled) is Status.CANCELLED
    world.executor.cancel(cancelled)  # changes nothing
    lost = world.executor.start(world.spec, "lost")
    world.prefill.host.die()
    world.run()
    assert world.executor.poll(lost) is Status.FAILED
    assert world.executor.start(world.spec, "later").status is Status.FAILED


@pytest.mark.parametrize("breaks", [False, True])
def test_transfers_are_slow_or_break(breaks: bool) -> None:
    """As the troubles of their time say."""
    world = World(troubles=(Trouble(0.0, 1.0, "prefill", 1.0, 50.0, breaks),))
    world.executor.connect(world.offer)
    world.executor.prepare(world.plan)
    transfer = world.executor.start(world.spec, "r")
    world.run(0.5)
    assert world.executor.poll(transfer) is Status.RUNNING
    world.run(200.0)
    assert world.executor.poll(transfer) is (Status.FAILED if breaks else Status.DONE)
    world.close()


def test_workers_that_exchange_nothing_need_no_connection(world: World) -> None:
    """Of two ranks at equal TP, a rank reads from one; the other read is done at once."""
    catalog = world.fabric.catalog
    (local, _), remotes = (catalog.workers(f"{role} of two", Shape(tp=2)) for role in ("decode", "prefill"))
    tables = {"attn": Blocks([1, 2])}
    moving, idle = catalog.plan(local, remotes).bind(local=tables, remote=tables, tokens=(0, 8))
    assert (moving.num_bytes > 0, idle.num_bytes) == (True, 0)
    transfer = world.executor.start(idle, "r")
    assert (transfer.status, world.executor.poll(transfer)) == (Status.DONE, Status.DONE)
    assert code(world.executor.start, moving, "r") == "PEER"


def exchanges(world: World, path: str, *, sent: bytes | None = None) -> list[str]:
    """Ask the prefill host from decode, and return what comes."""
    got: list[str] = []

    async def ask() -> None:
        try:
            answer = await world.decode.host.exchange("prefill", "prefill:1", path, 3.0, sent)
            got.append(answer.decode())
        except KVPlanError as error:
            got.append(error.got)

    world.decode.host.start("ask", ask)
    world.run()
    return got


def test_hosts_answer_as_servers_do(world: World) -> None:
    """Nobody listens, no such page, nonsense, an answer; and a server that is closed answers no more."""
    assert exchanges(world, "/") == ["a reset"]

    def answer(body: bytes) -> bytes:
        return b"%d" % (2 * int(body))

    server = world.prefill.host.serve("prefill", 1, {"POST /twice": Route(answer)})
    assert exchanges(world, "/") == ["status 404"]
    assert exchanges(world, "/twice", sent=b"x") == ["status 400"]
    assert exchanges(world, "/twice", sent=b"21") == ["42"]
    world.prefill.host.freeze(world.loop.now + 2.0)
    assert exchanges(world, "/twice", sent=b"3") == ["6"]
    server.close()
    server.close()
    assert exchanges(world, "/twice", sent=b"21") == ["a reset"]


def test_links_lose_repeat_and_reset() -> None:
    """A message that is lost gets no answer in time, one that comes twice gets one, and a reset is told at once."""
    for options, expected in (
        ({"loss": 1.0}, "nothing in time"),
        ({"duplication": 1.0}, "ok"),
        ({"reset": 1.0}, "a reset"),
    ):
        world = World(Disturbance(0.0, 1.0, "decode", "*", **options))
        world.prefill.host.serve("prefill", 1, {"GET /": Route(lambda _: b"ok")})
        assert exchanges(world, "/") == [expected]
        world.close()


def test_tasks_wait(world: World) -> None:
    """A task sleeps by its host's clock, and ends with it; an error of a task is kept."""
    woken: list[float] = []

    async def run() -> None:
        await world.decode.host.sleep(5.0)
        woken.append(world.loop.now)
        raise ZeroDivisionError

    world.decode.host.start("sleeper", run)
    world.decode.host.start("too late", lambda: world.decode.host.sleep(500.0))
    world.run()
    assert woken == [pytest.approx(5.0, abs=0.01)]
    assert [type(error) for error in world.loop.errors] == [ZeroDivisionError]
    assert world.loop.num_tasks == 1
    world.decode.host.die()
    assert world.loop.num_tasks == 0


def test_a_task_that_was_woken_and_dies_does_not_go_on(world: World) -> None:
    """What would have let it go on comes when it has ended."""
    went_on: list[bool] = []
    signal = world.decode.host.signal()

    async def run() -> None:
        await signal.wait(50.0)
        went_on.append(True)

    def wake_and_die() -> None:
        signal.set()
        world.decode.host.die()

    world.decode.host.start("waits", run)
    world.loop.at(1.0, wake_and_die)
    world.run()
    assert went_on == []
    assert world.loop.errors == []
    assert world.loop.num_tasks == 0


def test_incidents_know_their_engines() -> None:
    """A scenario says what it has, and which engines it needs."""
    scenario = Scenario(1, (), (Death(1.0, "a", None), Freeze(2.0, "b", 3.0), Rival(1.5, "c", 2.0)))
    assert [name for name in "abcd" if scenario.mentions(name)] == ["a", "b", "c"]
    assert str(scenario).index("Rival") < str(scenario).index("Freeze")
    assert scenario.may_fail("PEER")
    assert Disturbance(0.0, 1.0, "a", "b").engines == ("a", "b")
    assert Trouble(0.0, 1.0, "a", 1.0).engines == ("a",)


def test_a_moment_excuses_no_lease_that_ends() -> None:
    """Unless clocks are so far apart that one renewal which is lost is too much."""
    moment = Disturbance(1.0, 4.0, "*", "*", loss=1.0)
    for rates, excused in (((1.0, 1.03), False), ((0.5, 2.0), True)):
        members = tuple(Member(f"engine-{rate}", rate=rate) for rate in rates)
        scenario = Scenario(1, members, (moment,))
        assert scenario.may_fail("LEASE") == excused
        assert scenario.may_fail("PEER")
    long = attrs.evolve(moment, ends_at=9.0)
    assert Scenario(1, (), (long,)).may_fail("LEASE")
    assert not Scenario(1, (), (Trouble(0.0, 9.0, "*", 1.0, 60.0),)).may_fail("LEASE")
    assert str(Scenario(1, (), (long, moment))).count("Disturbance") == 2


def test_a_fault_excuses_what_it_explains_and_when() -> None:
    """Not what failed before it, or came long after it, nor errors that have nothing to do with it."""
    restart = Scenario(1, (), (Death(10.0, "a", 12.0),))
    assert [restart.may_fail("PEER", since, now) for since, now in ((0.0, 9.0), (0.0, 11.0), (18.0, 19.0))] == [
        False,
        True,
        False,
    ]
    assert [restart.may_fail(code) for code in ("LEASE", "MESSAGE", "TYPE", "MODEL")] == [True, True, False, False]
    assert Scenario(1, (), (Death(10.0, "a", None),)).may_fail("PEER", 50.0, 51.0)
    slow, breaking, refusing = (
        Trouble(0.0, 9.0, "*", 1.0, **kind) for kind in ({}, {"breaks": True}, {"refuses": 0.5})
    )
    explained = [
        [Scenario(1, (), (each,)).may_fail(code) for code in ("PEER", "TRANSFER")]
        for each in (slow, breaking, refusing)
    ]
    assert explained == [[False, False], [True, True], [False, True]]
    reset, update = Update(1.0, 0.1), Update(1.0, 0.1, "version 1")
    assert [Scenario(1, (), (each,)).may_fail("MODEL") for each in (reset, update)] == [False, True]
    lossy, garbling = (Disturbance(1.0, 9.0, "*", "*", **{kind: 0.3}) for kind in ("loss", "garbling"))
    assert [Scenario(1, (), (each,)).may_fail("TYPE") for each in (lossy, garbling)] == [False, True]


def test_a_request_may_fail_by_what_its_readers_are() -> None:
    """Late, several, or taken for another request; in a room it may be another one's."""
    sure = Arrival(0.0, "request", (1, 2, 3), 1, "prefill", (Visit("decode"),))
    late = attrs.evolve(sure, visits=(Visit("decode", delay_s=20.0),))
    other = attrs.evolve(sure, visits=(Visit("decode", tokens=(4, 5)),))
    assert [each.excused(comes_to_both=False) for each in (sure, late, other)] == [
        (),
        ("LEASE",),
        ("PROMPT", "TOKENS"),
    ]
    assert late.excused(comes_to_both=True) == ("LEASE", "NAME", "PEER")


def test_nothing_begins_when_faults_are_over() -> None:
    """An engine that would start again later stays dead."""
    incidents = [incident for seed in range(300) for incident in Scenario.of(seed).incidents]
    restarts = [incident.restarts_at for incident in incidents if isinstance(incident, Death)]
    assert None in restarts
    assert max(at for at in restarts if at is not None) < HEALED_S


def test_a_signal_wakes_one_that_waits_or_will_wait(world: World) -> None:
    """At once if it was set before; else when it is set, or after the time."""
    signal, woken = world.decode.host.signal(), list[float]()

    async def run() -> None:
        for timeout_s in (None, 50.0, 50.0, 2.0):
            await signal.wait(timeout_s)
            woken.append(world.loop.now)

    signal.set()
    world.decode.host.start("waits", run)
    world.loop.at(3.0, signal.set)
    world.loop.at(5.0, signal.set)
    world.run()
    assert woken == [pytest.approx(at, abs=0.01) for at in (0.0, 3.0, 5.0, 7.0)]


def test_two_facts_do_not_cancel_each_other() -> None:
    """Requests whose adapters and salts differ in the same letters have other labels."""
    facts = [((0, f"adapter {adapter}"), (0, f"salt {salt}")) for adapter in "abc" for salt in "abc"]
    assert len({prefix_labels((7,), each).tobytes() for each in facts}) == len(facts)
    assert all((prefix_labels((7,), each) == prefix_labels((7,), each[::-1])).all() for each in facts)
