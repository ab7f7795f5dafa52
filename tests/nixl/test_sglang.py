"""SGLang's plugin, with stand-ins for SGLang's objects: pages of 4 are read into pages of 16.

Real engines judge it where SGLang is: tests/engines/sglang_judge.py.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import ModuleType
from typing import Any, NamedTuple

import attrs
import pytest
import torch

import kvplan_nixl.sglang
from kvplan import Blocks, KVPlanError
from kvplan.protocol import Handoff, Listener, Source
from kvplan.protocol.keys import SharedKey
from kvplan_nixl import Envelope
from kvplan_nixl.serving import Access, Driver
from kvplan_nixl.serving.host_key import host_key
from kvplan_nixl.sglang.bootstrap import BootstrapServer
from tests.blocking import (
    ask,
    fetch,
    no_more_threads,
    poll_rooms,
    publish,
    reserved_port,
    unblocked,
    wait_until,
    waited,
)
from tests.bridges.sglang_pools import DSATokenToKVPool, MHATokenToKVPool, SWAKVPool
from tests.nixl.sglang_objects import (
    DecodeRequest,
    DisaggregationMode,
    Env,
    GroupCoordinator,
    KVPoll,
    LoRARef,
    MetadataBuffers,
    ModelConfig,
    ModelRunner,
    ParallelContext,
    Queue,
    RadixAttention,
    Req,
    Runtime,
    Scheduler,
    Spec,
    SpeculativeAlgorithm,
    StateType,
    TpModelWorker,
    kv_args,
)

CONFIG = {
    "model_type": "a type that nobody has heard of",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "torch_dtype": "float32",
}
TOKENS, ROOM = 37, 5
SECRET = b"a secret of all engines"
KEY = SharedKey.of(SECRET)


class World:
    """Ranks on threads, and what each of them says to all."""

    def __init__(self, size: int) -> None:
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def parallel(self, rank: int, kind: str) -> ParallelContext:
        """What SGLang tells a rank, of pipeline stages, of context parallelism, or with requests of its own."""
        size = len(self._said)

        def gather(found: list[Any], one: Any) -> None:
            self._said[rank] = one
            self._barrier.wait()
            found[:] = self._said
            self._barrier.wait()

        places: Any = {f"{kind}_rank": rank, f"{kind}_size": size}
        return ParallelContext(GroupCoordinator(rank, size, gather), **places)


DRAFT = ModelConfig({**CONFIG, "model_type": "qwen3", "num_key_value_heads": 1, "num_hidden_layers": 1}, "draft")


@pytest.fixture
def engine() -> Runtime:
    return Runtime(CONFIG, World(1).parallel(0, "pp"), spec=Spec("EAGLE", "draft"), draft=DRAFT)


@pytest.fixture
def plugin(engine: Runtime, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, one, group: group(found, one))
    return engine.plugin(monkeypatch, ("changes", "identity", "description", "prompt", "manager", "prefill", "decode"))


class Side:
    """A rank with its pool of K and V [layer, slot, head, dim], and the buffers of first tokens.

    In the layout ``hnd`` heads are outside the slots of a page. With a window, layer 0 attends to that many tokens
    before, and has a pool of its own. A rank may hold some ``layers``. A draft, of the model's files or of another
    model's, is a layer in a pool of its own, with ``draft_heads``. A ``sparse`` model has latents, and index keys and
    their scales in pages of bytes.
    """

    def __init__(
        self,
        plugin: ModuleType,
        mode: str,
        page: int,
        window: int | None = None,
        layout: str = "nhd",
        layers: range = range(2),
        draft_heads: int = 0,
        sparse: bool = False,
        modules: Sequence[RadixAttention] = (),
    ) -> None:
        shape = (2, 160, 2, 8) if layout == "nhd" else (2, 160 // page, 2, page, 8)
        self.k, self.v = torch.zeros(2, *shape)
        self.page = page
        self.metadata = MetadataBuffers(4)
        held = slice(layers.start, layers.stop)
        pool: Any = MHATokenToKVPool(
            self.k[held], self.v[held], page, len(layers), start_layer=layers.start, kv_cache_layout=layout
        )
        states = []
        if window is not None:
            states = [StateType.SWA]
            pool = SWAKVPool(pool, pool, {0: (0, True), 1: (1, False)})
        if sparse:
            states = [StateType.DSA]
            self.latents = torch.zeros(2, 160, 1, 24)
            self.keys = torch.zeros(2, 160 // page, page * 132, dtype=torch.uint8)
            pool = DSATokenToKVPool(self.latents, page, 2, index_k_with_scale_buffer=self.keys)
        draft_pool = None
        if draft_heads:
            self.draft = torch.zeros(2, 1, 160, draft_heads, 8)
            draft_pool = MHATokenToKVPool(self.draft[0], self.draft[1], page, 1, head_num=draft_heads)
        args = kv_args(self.metadata, page, states)
        self.manager = plugin.manager.Manager(args, DisaggregationMode(mode), plugin.identity.get_server_args())
        runner = ModelRunner(plugin.identity.process_model_config(), modules)
        scheduler = Scheduler(TpModelWorker(runner), TpModelWorker(ModelRunner(DRAFT)), window)
        self.queue = Queue(pool, draft_pool, self.metadata, scheduler)
        self.manager.start(self.queue)
        self.senders: list[Any] = []

    def rows(self, pages: list[int]) -> torch.Tensor:
        """K and V of the request's tokens, in the slots of its pages."""
        slots = [pages[i // self.page] * self.page + i % self.page for i in range(TOKENS)]
        by_slot = [memory if memory.dim() == 4 else memory.transpose(2, 3).flatten(1, 2) for memory in (self.k, self.v)]
        return torch.stack([memory[:, slots] for memory in by_slot])


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0, system=Driver())
    yield server
    server.close()


@pytest.fixture
def prefill(plugin: ModuleType) -> Iterator[Side]:
    side = Side(plugin, "prefill", 4)
    for memory in (side.k, side.v):
        memory.copy_(torch.randn(memory.shape))
    side.metadata.output_ids[2, 0], side.metadata.bootstrap_room[2, 0] = 29, ROOM
    yield side
    # requests that could not be published are tried again for 30 s, and each time is a line in the log of another test
    for sender in side.senders:
        sender._has_room = False


@pytest.fixture
def decode(plugin: ModuleType) -> Side:
    return Side(plugin, "decode", 16)


THEIRS, OURS = [9, 3, 30, 12, 7, 8, 1, 22, 5, 6], [4, 1, 8]


def sent(plugin: ModuleType, prefill: Side, server: BootstrapServer, room: int = ROOM) -> Any:
    """A request that prefill has computed in two chunks."""
    sender = plugin.prefill.Sender(prefill.manager, server.address, room)
    prefill.senders.append(sender)
    sender.req = request_of()
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(len(THEIRS), 2)
    sender.send(torch.tensor(THEIRS[:6]).numpy(), None, 24)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.send(torch.tensor(THEIRS[6:]).numpy(), [], 13)
    return sender


def computed(
    plugin: ModuleType, prefill: Side, server: BootstrapServer, states: Sequence[Any] = (), **changes: Any
) -> Any:
    """A request that prefill has computed at once."""
    sender = plugin.prefill.Sender(prefill.manager, server.address, ROOM)
    sender.req = request_of(**changes)
    sender.init(len(THEIRS), 2)
    sender.send(torch.tensor(THEIRS).numpy(), [*states], TOKENS)
    return sender


def request_of(num_tokens: int = TOKENS, **changes: Any) -> Req:
    """SGLang's request."""
    return Req(**{"origin_input_ids": [*range(num_tokens)], **changes})


def published(server: BootstrapServer) -> Any:
    """What prefill has published, when it has."""
    return wait_until(lambda: ask(server.address, [ROOM]))[ROOM]


def received(
    plugin: ModuleType, decode: Side, server: BootstrapServer, num_tokens: int = TOKENS, **changes: Any
) -> Any:
    receiver = plugin.decode.Receiver(decode.manager, server.address, ROOM)
    receiver.req = request_of(num_tokens, **changes)
    receiver.init(0)
    return receiver


def published_to(receiver: Any) -> Handoff:
    """The latest handoff that a receiver has."""
    found = receiver._rank.importer._requests[receiver._name].found
    assert found is not None
    handoff: Handoff = found.handoff
    return handoff


def until(ends: Any, state: int) -> None:
    """Poll a sender or a receiver until it has a state."""
    polled = list[int]()

    def has_state() -> bool:
        polled.append(ends.poll())
        return polled[-1] == state

    wait_until(has_state)


def until_transfers(receiver: Any) -> None:
    """Poll a receiver until its rank has begun transfers."""

    def are_begun() -> bool:
        if any(job.transfers for job in receiver._rank.reads._jobs):
            return True
        assert receiver.poll() == KVPoll.Transferring
        return False

    wait_until(are_begun)


def allocated(receiver: Any, pages: Sequence[int] = OURS, cached: int = 0, states: Sequence[Any] = ()) -> None:
    """Give a request pages, when prefill has published it."""
    until(receiver, KVPoll.WaitingForInput)
    receiver.send_metadata(torch.tensor(pages).numpy(), 3, [*states], cached)


def test_a_request_is_read(plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer) -> None:
    """Decode waits for prefill, reads what it has not cached, and then prefill frees the pages."""
    receiver = received(plugin, decode, server)
    assert receiver.poll() == KVPoll.Bootstrapping
    sender = sent(plugin, prefill, server)
    allocated(receiver, OURS[1:], cached=16)
    until(receiver, KVPoll.Success)
    ours, theirs = decode.rows(OURS), prefill.rows(THEIRS)
    assert torch.equal(ours[:, :, 16:], theirs[:, :, 16:])
    assert not ours[:, :, :16].any()
    assert (decode.metadata.output_ids[3, 0], decode.metadata.bootstrap_room[3, 0]) == (29, ROOM)
    assert sender.poll() == KVPoll.Transferring
    receiver.clear()
    until(sender, KVPoll.Success)


class Moving:
    """The progress of a transfer that hangs."""

    is_settled = False


def hang(monkeypatch: pytest.MonkeyPatch, executor: Any) -> None:
    """Let transfers seem to move for ever, also those that NIXL carries out while it posts them."""
    post = executor._agent.post
    monkeypatch.setattr(executor._agent, "post", lambda handle: post(handle) and False)
    monkeypatch.setattr(executor, "poll", lambda transfer: Moving())


class Forwards:
    """SGLang's stream of forwards, of which one is under way until a test ends it."""

    def __init__(self) -> None:
        self.is_over = False

    def record_event(self) -> Forwards:
        return self

    def query(self) -> bool:
        return self.is_over


@pytest.mark.parametrize("is_aborted", [False, True])
def test_pages_are_read_into_after_the_forward_that_may_write_them(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer, *, is_aborted: bool
) -> None:
    """A request that has ended is in SGLang's next batch too, and has had the same pages. No byte comes before it."""
    decode.queue.scheduler.forward_stream = forwards = Forwards()
    receiver = received(plugin, decode, server)
    sent(plugin, prefill, server)
    allocated(receiver)
    for _ in range(50):
        assert receiver.poll() == KVPoll.WaitingForInput
        time.sleep(0.001)
    assert not decode.rows(OURS).any()
    if is_aborted:  # SGLang frees the pages at once
        receiver.abort()
        assert not receiver.abort_notified
        receiver.clear()
    forwards.is_over = True
    if is_aborted:
        for _ in range(50):
            assert receiver.poll() == KVPoll.Failed
            time.sleep(0.001)
        assert not decode.rows(OURS).any()
    else:
        until(receiver, KVPoll.Success)
        assert torch.equal(decode.rows(OURS), prefill.rows(THEIRS))


def moved(plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer, *states: Any) -> Any:
    """A receiver that has begun to read what prefill has computed. Both sides list their pages for each state too."""
    computed(plugin, prefill, server, [torch.tensor(THEIRS).numpy() for _ in states])
    receiver = received(plugin, decode, server)
    allocated(receiver, states=[torch.tensor(OURS).numpy() for _ in states])
    return receiver


def test_index_keys_are_read_with_the_latents(plugin: ModuleType, server: BootstrapServer) -> None:
    """SGLang lists their pages a second time."""
    prefill, decode = Side(plugin, "prefill", 4, sparse=True), Side(plugin, "decode", 16, sparse=True)
    prefill.latents.copy_(torch.randn(prefill.latents.shape))
    prefill.keys.copy_(torch.randint(256, prefill.keys.shape))
    receiver = moved(plugin, prefill, decode, server, "dsa")
    until(receiver, KVPoll.Success)
    receiver.clear()
    for i in range(TOKENS):
        (theirs, their_slot), (ours, our_slot) = (THEIRS[i // 4], i % 4), (OURS[i // 16], i % 16)
        latents = prefill.latents[:, theirs * 4 + their_slot], decode.latents[:, ours * 16 + our_slot]
        assert torch.equal(*latents)
        # the keys of all slots of a page come before their scales
        for size, their_start, our_start in ((128, 0, 0), (4, 4 * 128, 16 * 128)):
            starts = their_start + their_slot * size, our_start + our_slot * size
            keys = prefill.keys[:, theirs, starts[0] :][:, :size], decode.keys[:, ours, starts[1] :][:, :size]
            assert torch.equal(*keys)


@pytest.mark.parametrize("draft_path, draft_heads", [("tiny", 2), (None, 2), ("draft", 1)])
def test_a_draft_is_read_with_its_target(
    plugin: ModuleType,
    server: BootstrapServer,
    engine: Runtime,
    draft_path: str | None,
    draft_heads: int,
) -> None:
    """Its layers are in the model's files, or those of another model with other heads."""
    engine.spec.speculative_draft_model_path = draft_path
    prefill, decode = (
        Side(plugin, mode, page, draft_heads=draft_heads) for mode, page in (("prefill", 4), ("decode", 16))
    )
    for memory in (prefill.k, prefill.v, prefill.draft):
        memory.copy_(torch.randn(memory.shape))
    receiver = moved(plugin, prefill, decode, server)
    until(receiver, KVPoll.Success)
    receiver.clear()
    assert torch.equal(decode.rows(OURS), prefill.rows(THEIRS))
    for i in range(TOKENS):
        theirs, ours = THEIRS[i // 4] * 4 + i % 4, OURS[i // 16] * 16 + i % 16
        assert torch.equal(decode.draft[:, :, ours], prefill.draft[:, :, theirs])


def test_a_draft_on_one_side_alone_is_refused(plugin: ModuleType, prefill: Side, server: BootstrapServer) -> None:
    """Decode needs the cache of its draft from prefill."""
    decode = Side(plugin, "decode", 16, draft_heads=1)
    receiver = moved(plugin, prefill, decode, server)
    until(receiver, KVPoll.Failed)
    with pytest.raises(KVPlanError, match=r"^MODEL: .* draft\.config\.head_dim 8, .* draft\.config\.head_dim none"):
        receiver.failure_exception()
    receiver.clear()


def test_a_draft_in_one_stage_is_refused(plugin: ModuleType, engine: Runtime) -> None:
    """Only the last stage would have its cache."""
    engine.parallel.pp_size = 2
    with pytest.raises(KVPlanError, match=r"^LAYOUT: .* expected pp_size = 1, got 2"):
        Side(plugin, "prefill", 4, draft_heads=1)


@pytest.mark.parametrize("staging_bytes", [0, 1 << 20])
def test_a_request_is_staged_where_layouts_leave_short_runs(
    plugin: ModuleType, server: BootstrapServer, monkeypatch: pytest.MonkeyPatch, staging_bytes: int
) -> None:
    """Unless decode has no staging region. Prefill needs none."""
    monkeypatch.setenv("KVPLAN_STAGING_BYTES", f"{staging_bytes}")
    prefill, decode = Side(plugin, "prefill", 4, layout="hnd"), Side(plugin, "decode", 16)
    for memory in (prefill.k, prefill.v):
        memory.copy_(torch.randn(memory.shape))
    sender, receiver = sent(plugin, prefill, server), received(plugin, decode, server)
    allocated(receiver)
    until(receiver, KVPoll.Success)
    assert torch.equal(decode.rows(OURS), prefill.rows(THEIRS))
    receiver.clear()
    until(sender, KVPoll.Success)
    pipeline = decode.manager.rank.reads._pipeline
    assert (pipeline.num_chunks if staging_bytes else pipeline) == (1 if staging_bytes else None)
    sizes = [
        {region.name: region.size_bytes for region in side.manager.rank.memory.executor.worker.regions}
        for side in (prefill, decode)
    ]
    assert [found.get("staging", 0) for found in sizes] == [0, staging_bytes]


def test_another_engine_knows_the_first_token_alone(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer
) -> None:
    """A token takes the place of SGLang's rows, of which nothing stays from the request before."""
    sent(plugin, prefill, server)
    publish(
        server.address, ROOM, {"handoff": published(server)["handoff"], "token": 7}, owner=prefill.manager.rank.owner
    )
    decode.metadata.output_ids[3] = 1
    receiver = received(plugin, decode, server)
    allocated(receiver)
    until(receiver, KVPoll.Success)
    assert decode.metadata.output_ids[3].tolist() == [7] + [0] * 15
    assert decode.metadata.bootstrap_room[3, 0] == ROOM


def test_weights_of_another_version_are_refused(
    plugin: ModuleType,
    prefill: Side,
    decode: Side,
    server: BootstrapServer,
    engine: Runtime,
) -> None:
    """Weights may be updated while the engine keeps its model's name: both sides have to name the same version."""
    engine.serving.weight_version = "2"
    sender = sent(plugin, prefill, server)
    published(server)
    for version, state in (("default", KVPoll.Failed), ("3", KVPoll.Failed), ("2", KVPoll.WaitingForInput)):
        engine.serving.weight_version = version
        receiver = received(plugin, decode, server)
        until(receiver, state)
        if state == KVPoll.Failed:
            own = "that of the start" if version == "default" else "'3'"
            with pytest.raises(KVPlanError, match=f"^MODEL: .* expected weights_version {own}, got '2'"):
                receiver.failure_exception()
        receiver.clear()
    until(sender, KVPoll.Success)


def test_changed_weights_never_have_an_earlier_name(plugin: ModuleType, engine: Runtime) -> None:
    """Also not when they had one of their own: the name of the first weights, or of those before."""
    weights = plugin.changes.Weights()

    def name(version: str) -> str:
        engine.serving.weight_version = version
        weights.name(version)
        found: str = weights.version
        return found

    assert name("1") == "1"
    assert name("default") == "", "weights that have not changed have any name"
    assert name("1") == "1"
    weights.change()
    weights.flush()
    assert name("2") == "2"
    for version in ("default", "", "1"):
        assert name(version) == f"unnamed {weights.token}"
        assert name("2") == "2"


@pytest.mark.parametrize("is_session", [False, True])
def test_a_name_that_other_weights_had_before_a_flush_is_not_that_of_new_ones(
    plugin: ModuleType, engine: Runtime, *, is_session: bool
) -> None:
    """Where the others were flushed, in another engine, they are known by that name."""
    weights = plugin.changes.Weights()

    def load(version: str) -> None:
        if is_session:
            weights.begin()
        # in parts, each of which names the version; SGLang takes parts in a session alone
        for _ in range(1 + is_session):
            weights.change()
            engine.serving.weight_version = version
            weights.name(version)
        if is_session:
            weights.end(loads_now=False)

    load("2")
    load("2")
    weights.flush()
    assert not weights.is_known
    load("3")
    weights.flush()
    assert weights.version == "3"


def test_weights_that_others_write_in_a_session_may_be_named_there(plugin: ModuleType, engine: Runtime) -> None:
    """And again when it has ended, since only then the engine uses them."""
    weights = plugin.changes.Weights()
    weights.begin()
    engine.serving.weight_version = "2"
    weights.name("2")
    weights.end(loads_now=True)
    weights.name("2")
    weights.flush()
    assert weights.version == "2"


def test_a_part_of_a_prompt_has_the_weights_that_computed_it(
    plugin: ModuleType, prefill: Side, server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is published later, on a thread."""
    prefill.manager.rank.exporter._early_tokens = 1
    weights = plugin.changes.Weights()
    monkeypatch.setattr(plugin.prefill, "WEIGHTS", weights)
    sender = plugin.prefill.Sender(prefill.manager, server.address, ROOM)
    sender.req = request_of()
    versions = []
    monkeypatch.setattr(sender, "_publish", lambda entry: versions.append(entry["handoff"]["remote_weights_version"]))
    sender.init(len(THEIRS), 2)
    is_free = threading.Event()
    sender._publisher.submit(unblocked(is_free.wait))
    sender.send(torch.tensor(THEIRS[:6]).numpy(), None, 24)
    weights.change()
    is_free.set()
    waited(sender._publisher.submit(unblocked(lambda: None)))
    assert versions == [""]
    sender.abort()


def test_windows_that_decode_alone_keeps_are_read(plugin: ModuleType, prefill: Side, server: BootstrapServer) -> None:
    """Prefill has one pool, which keeps all positions."""
    decode = Side(plugin, "decode", 16, 7)
    computed(plugin, prefill, server)
    receiver = received(plugin, decode, server)
    first, ours = TOKENS - 7, [6, 2, 5]
    allocated(receiver, states=[torch.tensor(ours[first // 16 :]).numpy()])
    until(receiver, KVPoll.Success)
    assert torch.equal(decode.rows(OURS)[:, 1], prefill.rows(THEIRS)[:, 1])
    assert torch.equal(decode.rows(ours)[:, 0, first:], prefill.rows(THEIRS)[:, 0, first:])
    receiver.clear()


@pytest.mark.parametrize(
    ("mode", "attended", "caches_prefixes", "window"),
    [("prefill", 6, False, 7), ("decode", 6, False, 6), ("decode", 8, False, 7), ("decode", 6, True, 7)],
)
def test_a_reader_needs_what_its_layers_attend_to(
    plugin: ModuleType,
    engine: Runtime,
    mode: str,
    attended: int,
    caches_prefixes: bool,
    window: int,
) -> None:
    """SGLang's scheduler keeps one position more for a model that does not say its window, as Laguna.

    A prefix cache takes all that it keeps as valid, also for requests that share less of the prompt.
    """
    engine.server_args.disaggregation_decode_enable_radix_cache = caches_prefixes
    side = Side(plugin, mode, 16, 7, modules=[RadixAttention(0, attended), RadixAttention(1, -1)])
    worker = side.manager.rank.memory.executor.worker
    assert json.loads(worker.extensions)["kvplan.windows"] == {"swa": window}


@pytest.mark.parametrize("lora_id, state", [("one", KVPoll.WaitingForInput), ("two", KVPoll.Failed)])
def test_an_adapter_is_its_content(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer, lora_id: str, state: int
) -> None:
    """SGLang's id says its name and path."""
    for name, content in (("sql", "5f"), ("one", "5f"), ("two", "c0")):
        plugin.changes.ADAPTERS.note(name, content)
    computed(plugin, prefill, server, lora_id="sql")
    receiver = received(plugin, decode, server, lora_id=lora_id)
    until(receiver, state)
    receiver.clear()


def test_an_adapter_that_was_loaded_anew_under_its_id_is_no_other_engines(plugin: ModuleType) -> None:
    """SGLang's own cache has what the adapter before has computed, under that id."""
    adapters = plugin.changes.Adapters()
    adapters.note("sql", "5f")
    adapters.note("sql", "5f")
    assert adapters.content_of("sql") == "5f"
    adapters.note("sql", "c0")
    assert adapters.content_of("sql") not in ("5f", "c0")
    assert (
        adapters.content_of("unseen") == adapters.content_of("unseen") != plugin.changes.Adapters().content_of("unseen")
    )


def folder_of_adapter(path: Any, scale: int) -> Any:
    """An adapter's files."""
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"lora_alpha": scale}))
    (path / "adapter_model.bin").write_bytes(b"weights")
    return LoRARef("sql", f"{path}")


def test_an_adapter_has_what_its_folder_had_when_it_was_loaded(plugin: ModuleType, tmp_path: Any) -> None:
    """Not what it has later; if it was written while it was loaded, nobody knows."""
    changes = plugin.changes
    changes.ADAPTERS.contents.clear()
    ref = folder_of_adapter(tmp_path / "sql", 8)
    assert changes.load_folder(lambda manager, ref: "loaded", None, ref) == "loaded"
    first = changes.ADAPTERS.content_of("sql")
    folder_of_adapter(tmp_path / "sql", 16)
    assert changes.ADAPTERS.content_of("sql") == first
    copy = folder_of_adapter(tmp_path / "copy", 8)
    copy.lora_id = "copy"
    changes.load_folder(lambda manager, ref: None, None, copy)
    assert changes.ADAPTERS.content_of("copy") == first
    copy.lora_id = "torn"
    changes.load_folder(lambda manager, ref: folder_of_adapter(tmp_path / "copy", 16), None, copy)
    assert changes.ADAPTERS.content_of("torn") not in (first, changes._adapter(f"{tmp_path / 'copy'}"))


def test_an_adapter_of_tensors_is_their_content(plugin: ModuleType) -> None:
    """And that of its configuration."""
    changes = plugin.changes
    changes.ADAPTERS.contents.clear()
    contents = set()
    for scale, value in ((8, 1.0), (8, 1.0), (16, 1.0), (8, 2.0)):
        ref = LoRARef(f"{len(changes.ADAPTERS.contents)}")
        changes.note_tensors(ref, {"a": torch.full((2, 2), value)}, {"lora_alpha": scale})
        contents.add(changes.ADAPTERS.content_of(ref.lora_id))
    assert len(contents) == 3


def test_claims_that_come_too_late_are_logged_once(prefill: Side, caplog: pytest.LogCaptureFixture) -> None:
    """Each claim, however often the engine looks."""
    rank = prefill.manager.rank
    for _ in range(2):
        rank.exporter.leases.claim("a lease that has ended", "decode")
        for _ in range(3):
            rank._note_ended()
    assert caplog.text.count("1 renewals came after their lease expired") == 2


def test_a_bootstrap_server_that_is_late(plugin: ModuleType, prefill: Side, decode: Side) -> None:
    """Prefill publishes again until somebody takes it."""
    with reserved_port() as port:
        gone = BootstrapServer("127.0.0.1", port, system=Driver())
        gone.close()
        sender = sent(plugin, prefill, gone)
        time.sleep(0.1)
        with closing(BootstrapServer("127.0.0.1", port, system=Driver())) as server:
            receiver = received(plugin, decode, server)
            until(receiver, KVPoll.WaitingForInput)
            receiver.clear()
            until(sender, KVPoll.Success)


def test_a_bootstrap_server_that_is_gone_holds_up_no_other(
    plugin: ModuleType, prefill: Side, server: BootstrapServer
) -> None:
    """Requests name their server: one that nobody answers for is asked again, while others are published."""
    with reserved_port() as port:
        gone = BootstrapServer("127.0.0.1", port, system=Driver())
        gone.close()
        sent(plugin, prefill, gone, ROOM + 1)
        sent(plugin, prefill, server)
        published(server)


def test_a_room_that_has_another_owner_holds_up_no_other(
    plugin: ModuleType, prefill: Side, server: BootstrapServer
) -> None:
    """A request that cannot be published is tried again until its pages are free, while others are published."""
    publish(server.address, ROOM + 1, {"token": 3}, owner=OWNER)
    sent(plugin, prefill, server, ROOM + 1)
    sent(plugin, prefill, server)
    published(server)


def test_what_decides_a_prompt(plugin: ModuleType) -> None:
    """Each fact has a digest of its own. What another process has in its memory has no digest twice."""
    facts: list[dict[str, Any]] = [
        {},
        {"origin_input_ids": [*range(TOKENS - 1), 99]},
        {"lora_id": "sql"},
        {"cache_salt": "a tenant"},
        {"input_embeds": [[0.5] * 8] * TOKENS},
        {"input_embeds": [[0.5] * 8] * (TOKENS - 1) + [[0.25] * 8]},
        {"token_type_ids": [1] * TOKENS},
        {"token_type_ids": [1] * (TOKENS - 1) + [0]},
    ]
    digests = [plugin.prompt.prompt_of(request_of(**each), TOKENS) for each in facts]
    assert [plugin.prompt.prompt_of(request_of(**each), TOKENS) for each in facts] == digests
    assert len({*digests}) == len(facts)
    # the last position differs alone, and is not digested
    shorter = [plugin.prompt.prompt_of(request_of(**each), TOKENS - 1) for each in facts]
    assert (shorter[1], shorter[5], shorter[7]) == (shorter[0], shorter[4], shorter[6])
    overridden = request_of(positional_embed_overrides="in the memory of another process")
    assert plugin.prompt.prompt_of(overridden, TOKENS) != plugin.prompt.prompt_of(overridden, TOKENS)


def test_an_abort_ends_what_nobody_reads_yet(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer
) -> None:
    """SGLang polls what it has aborted: a sender without its pages, and a receiver that waits, have failed."""
    sender = plugin.prefill.Sender(prefill.manager, server.address, ROOM)
    receiver = received(plugin, decode, server)
    for ends in (sender, receiver):
        ends.abort()
        assert ends.poll() == KVPoll.Failed
        with pytest.raises(RuntimeError, match="aborted"):
            ends.failure_exception()
    receiver.clear()


def test_the_last_chunk_is_wanted_though_it_is_empty(
    plugin: ModuleType, prefill: Side, server: BootstrapServer
) -> None:
    """States come with it; any other chunk without a page is left out."""
    sender = plugin.prefill.Sender(prefill.manager, server.address, ROOM)
    chunks = [(1, False), (0, False), (0, True), (1, True)]
    assert [sender.should_send_kv_chunk(*chunk) for chunk in chunks] == [True, False, True, True]


def test_a_retracted_request_fails(plugin: ModuleType, decode: Side, server: BootstrapServer) -> None:
    """Prefill would have to compute its prompt and answer again, with new weights."""
    receiver = plugin.decode.Receiver(decode.manager, server.address, ROOM)
    plugin._tell_receiver(DecodeRequest(request_of(), receiver, is_rebootstrap=True))
    receiver.init(0)
    decode.manager.submit_prefill_recompute(receiver)
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVPlanError, match="PROMPT: cannot read request 5 again"):
        receiver.failure_exception()
    receiver.clear()


def test_requests_of_sglangs_warm_up_stay_as_they_are(plugin: ModuleType) -> None:
    """Their senders and receivers are of SGLang's own classes, beside any backend."""
    req = Req(disagg_kv_sender="SGLang's own")
    plugin._tell_sender(True, None, req)
    plugin._tell_receiver(DecodeRequest(req, "SGLang's own", is_rebootstrap=True))


def test_a_window_of_single_tokens_has_no_prefix_cache(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's tree would keep a position that nobody transfers."""
    decode = Side(plugin, "decode", 1, 7)
    monkeypatch.setattr(decode.manager, "_caches_prefixes", True)
    with pytest.raises(KVPlanError, match="expected disaggregation_decode_enable_radix_cache = False, got True"):
        decode.manager.start(decode.queue)


def test_a_room_that_was_cleared_is_another_s(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer
) -> None:
    """SGLang may clear a request twice: the one that has the room meanwhile keeps it."""
    first = received(plugin, decode, server)
    first.clear()
    second = received(plugin, decode, server)
    first.clear()
    third = received(plugin, decode, server)
    assert third.poll() == KVPoll.Failed
    with pytest.raises(KVPlanError, match="NAME"):
        third.failure_exception()
    second.clear()
    third.clear()


def test_pages_of_an_aborted_request_stay_while_it_is_read(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer
) -> None:
    """On decode until its bytes have moved, on prefill until decode is done."""
    sender, receiver = sent(plugin, prefill, server), received(plugin, decode, server)
    allocated(receiver)
    receiver.abort()
    sender.abort()
    assert (receiver.conclude_state, receiver.abort_notified) == (None, True)
    assert sender.poll() == KVPoll.Transferring
    until(receiver, KVPoll.Failed)
    assert decode.manager.is_abort_release_safe(ROOM, 0)
    assert torch.equal(decode.rows(OURS), prefill.rows(THEIRS))
    receiver.clear()
    until(sender, KVPoll.Failed)


def test_pages_that_are_none_fail_their_request(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer
) -> None:
    """What cannot be read fails its request, no other one, and keeps no page: no byte of it moves."""
    sender, receiver = sent(plugin, prefill, server), received(plugin, decode, server)
    allocated(receiver, [-1, *OURS[1:]])
    assert receiver.poll() == KVPoll.Failed
    assert not receiver.abort_notified
    assert decode.manager.is_abort_release_safe(ROOM, 0)
    receiver.clear()
    until(sender, KVPoll.Success)


def test_pages_of_a_read_that_hangs_stay(
    plugin: ModuleType,
    prefill: Side,
    decode: Side,
    server: BootstrapServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request fails when its source may reuse its pages; decode's pages stay until no byte can land in them."""
    sender, receiver = sent(plugin, prefill, server), received(plugin, decode, server)
    until(receiver, KVPoll.WaitingForInput)
    with monkeypatch.context() as hanging:
        hang(hanging, decode.manager.rank.memory.executor)
        receiver.send_metadata(torch.tensor(OURS).numpy(), 3, [], 0)
        until_transfers(receiver)
        hanging.setattr("kvplan.protocol.read_jobs.ASK_S", 0.0)
        prefill.manager.rank.exporter.leases.release(
            published_to(receiver).lease, decode.manager.rank.importer._name_of(receiver._name)
        )
        until(receiver, KVPoll.Failed)
        with pytest.raises(KVPlanError, match=r"LEASE: .* expected a valid lease, got one that has ended"):
            receiver.failure_exception()
        assert receiver.abort_notified
        for _ in range(3):
            assert not decode.manager.is_abort_release_safe(ROOM, 0)
            time.sleep(0.002)
    assert vars(decode.queue.transfer_queue) == {
        "enable_deferred_kv_release": True,
        "deferred_kv_release_timeout": math.inf,
    }
    wait_until(lambda: decode.manager.is_abort_release_safe(ROOM, 0))
    assert not receiver.abort_notified
    receiver.clear()
    assert not decode.manager.rank.ended
    until(sender, KVPoll.Success)


def test_a_request_that_is_dropped_while_it_is_read_leaves_nothing(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes its result."""
    sender, receiver = sent(plugin, prefill, server), received(plugin, decode, server)
    with monkeypatch.context() as hanging:
        hang(hanging, decode.manager.rank.memory.executor)
        allocated(receiver)
        until_transfers(receiver)
        receiver.clear()
        assert not decode.manager.is_abort_release_safe(ROOM, 0)
    wait_until(lambda: decode.manager.is_abort_release_safe(ROOM, 0))
    assert not decode.manager.rank.ended
    until(sender, KVPoll.Success)


MALFORMED = {
    "no base64": {"metadata": ["a"]},
    "other characters": {"metadata": ["\u00e9" * 4]},
    "numbers": {"metadata": [1, 2]},
    "one number": {"metadata": 1},
    "rows of other lengths": {"metadata": ["AAAA"]},
    "no first token": {"is_whole": True},
    "a token that is none": {"token": "29"},
    "a token that no row holds": {"token": 1 << 70},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_first_token_fails_its_request(
    plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer, changes: dict[str, Any]
) -> None:
    """With an error of kvplan, not with whatever reads it. Nothing signs what is beside the handoff."""
    sender = sent(plugin, prefill, server)
    published(server)
    receiver = received(plugin, decode, server)
    until(receiver, KVPoll.WaitingForInput)
    found = receiver._rank.importer._requests[receiver._name].found
    entry = {"handoff": found.entry["handoff"], **changes}
    receiver._rank.importer._requests[receiver._name].found = attrs.evolve(found, entry=entry)
    receiver.send_metadata(torch.tensor(OURS).numpy(), 3, [], 0)
    until(receiver, KVPoll.Failed)
    with pytest.raises(KVPlanError, match=r"cannot read (the first token|metadata|token) of"):
        receiver.failure_exception()
    assert not decode.metadata.output_ids.any()
    receiver.clear()
    until(sender, KVPoll.Success)


@pytest.mark.parametrize(
    "field, got, message",
    [
        ("attn_dcp_size", 4, "attn_dcp_size = 1, got 4"),
        ("attn_cp_size", 2, "attn_cp_size = 1, got 2"),
        ("enable_cp_tp_group_sharing", True, "enable_cp_tp_group_sharing = False, got True"),
        ("enable_dsa_cache_layer_split", True, "enable_dsa_cache_layer_split = False, got True"),
        ("enable_kv_cache_sharding", True, "enable_kv_cache_sharding = False, got True"),
        ("spec_algorithm", SpeculativeAlgorithm.DFLASH, ".* = EAGLE or EAGLE3 or NGRAM or NONE or .*, got DFLASH"),
        ("state_types", [StateType.SWA, StateType.DSA_TAIL], r"state_types = \['swa'\], got \['swa', 'dsa_tail'\]"),
        ("state_types", [StateType.SWA], "num_groups = 2, got 1"),
        ("enable_hisparse", True, "enable_hisparse = False, got True"),
        ("disaggregation_ib_device", "mlx5_0", "disaggregation_ib_device = None, got mlx5_0"),
        ("disaggregation_decode_allocation_policy", "prefill_complete", ".* = early, got prefill_complete"),
        ("SGLANG_DISAGG_STAGING_BUFFER", Env(True), "SGLANG_DISAGG_STAGING_BUFFER = False, got True"),
    ],
)
def test_what_is_not_served(engine: Runtime, decode: Side, field: str, got: Any, message: str) -> None:
    """An engine that the plugin can't serve does not start."""
    owners = (engine.parallel, engine.server_args, engine.envs, decode.queue.scheduler, decode.manager.kv_args)
    (owner,) = (owner for owner in owners if hasattr(owner, field))
    setattr(owner, field, got)
    with pytest.raises(KVPlanError, match=f"^LAYOUT: cannot serve this SGLang by kvplan: expected {message}$"):
        decode.manager.start(decode.queue)


def two_ranks(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str, page: int, kind: str = "pp"
) -> list[Side]:
    """An engine of two ranks: pipeline stages, each with a layer, or of another kind, with all layers."""
    world, here = World(2), threading.local()

    def start(rank: int) -> Side:
        here.parallel = world.parallel(rank, kind)
        side = Side(plugin, mode, page, layers=range(rank, rank + 1) if kind == "pp" else range(2))
        for memory in (side.k, side.v):
            memory.copy_(torch.randn(memory.shape))
        return side

    with monkeypatch.context() as starting, ThreadPoolExecutor(2) as threads:
        starting.setattr(plugin.manager, "get_parallel", lambda: here.parallel)
        return [*threads.map(start, range(2))]


@pytest.mark.parametrize(("mode", "page"), [("prefill", 4), ("decode", 16)])
def test_ranks_with_requests_of_their_own(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str, page: int
) -> None:
    """With DP attention each rank is an engine of its own: it serves its own pages, and claims its own requests."""
    memories = [rank.manager.rank.memory for rank in two_ranks(plugin, monkeypatch, mode, page, "attn_dp")]
    assert all(memory.is_first for memory in memories)
    assert len({memory.info.engine_id for memory in memories}) == 2


@pytest.mark.parametrize("ranks", [(1, 0), (0, 1)])
def test_ranks_of_dp_listen_side_by_side(
    plugin: ModuleType, engine: Runtime, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    """Each engine of DP has a port of its own: each replica, and each rank of DP attention."""
    ports = []
    replica, attention_rank = ranks

    def listen(*arguments: Any, port: int, **options: Any) -> Listener:
        ports.append(port)
        return Listener(*arguments, **options)

    monkeypatch.setenv("KVPLAN_PORT", "5600")
    monkeypatch.setitem(plugin.manager.PrefillRank.__init__.__globals__, "Listener", listen)
    side = Side(plugin, "prefill", 4)
    side.manager.kv_args.system_dp_rank = replica
    engine.parallel.attn_dp_rank = attention_rank
    side.manager.start(side.queue)
    assert ports == [5600, 5601]


def test_context_parallelism_of_prefill(
    plugin: ModuleType, decode: Side, server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank publishes the request, is read and waits for its readers: the other one may compute still."""
    first, second = two_ranks(plugin, monkeypatch, "prefill", 4, "attn_cp")
    assert first.manager.rank.exporter.source == second.manager.rank.exporter.source
    offers = fetch(first.manager.rank.exporter.source, 10).workers
    assert [Envelope.unpack(offer).worker.rank for offer in offers] == [0]
    receiver = received(plugin, decode, server)
    senders = [plugin.prefill.Sender(side.manager, server.address, ROOM) for side in (second, first)]
    for sender in senders:
        assert not ask(server.address, [ROOM])
        sender.req = request_of()
        sender.init(len(THEIRS), 2)
        sender.send(torch.tensor(THEIRS).numpy(), [], TOKENS)
        waited(sender._publisher.submit(unblocked(lambda: None)))
    allocated(receiver)
    until(receiver, KVPoll.Success)
    assert torch.equal(decode.rows(OURS), first.rows(THEIRS))
    assert [sender.poll() for sender in senders] == [KVPoll.Success, KVPoll.Transferring]
    receiver.clear()
    until(senders[1], KVPoll.Success)


def test_a_draft_beside_context_parallelism_is_refused(plugin: ModuleType, engine: Runtime) -> None:
    """SGLang divides the heads of a draft among all ranks, also those of context parallelism."""
    engine.parallel.attn_cp_size = 2
    with pytest.raises(KVPlanError, match="expected attn_cp_size = 1, got 2"):
        Side(plugin, "prefill", 4, draft_heads=1)


def test_stages_of_decode(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one reads its own layers; the first one tells prefill when all have."""
    stages = two_ranks(plugin, monkeypatch, "decode", 16)
    workers = [stage.manager.rank.memory.executor.worker for stage in stages]
    assert [(worker.rank, *worker.tensors) for worker in workers] == [(0, "layers.0.attn"), (1, "layers.1.attn")]
    assert [stage.manager.rank.memory.is_first for stage in stages] == [True, False]


OWNER = "ab" * 16


def part(stage: int, attempt: str = "a") -> dict[str, Any]:
    """What a pipeline stage publishes."""
    group = f"attn.pp{stage}"
    source = Source("prefill", "a", "127.0.0.1", 5600 + stage)
    handoff = Handoff(source, "lease 7", 4, "8f2c", {group: Blocks([7])}, {group: stage})
    return {"handoff": handoff.params(host_key()), "metadata": stage, "attempt": attempt}


def test_a_room_has_the_stages_of_one_request(server: BootstrapServer) -> None:
    """However often a stage publishes."""
    for stage in (0, 1, 1):
        publish(server.address, ROOM, part(stage), stage, 2, owner=OWNER)
    entry = ask(server.address, [ROOM])[ROOM]
    handoff = Handoff.of_params(entry["handoff"], host_key())
    assert (handoff.source.port, handoff.kept, entry["metadata"]) == (5600, {"attn.pp0": 0, "attn.pp1": 1}, 0)
    assert {group: blocks.ids.tolist() for group, blocks in handoff.blocks.items()} == {
        "attn.pp0": [7],
        "attn.pp1": [7],
    }


@pytest.mark.parametrize(
    "num_attempts", [kvplan_nixl.sglang.bootstrap.MAX_ATTEMPTS, kvplan_nixl.sglang.bootstrap.MAX_ATTEMPTS + 1]
)
def test_a_room_keeps_few_attempts(server: BootstrapServer, num_attempts: int) -> None:
    """The newest ones: of one attempt too many, the oldest is gone when its last stage comes."""
    for number in range(num_attempts):
        publish(server.address, ROOM, part(0, f"{number}"), 0, 2, owner=OWNER)
    publish(server.address, ROOM, part(1, "0"), 1, 2, owner=OWNER)
    assert (ROOM in ask(server.address, [ROOM])) == (num_attempts == kvplan_nixl.sglang.bootstrap.MAX_ATTEMPTS)


def test_no_stage_of_one_attempt_is_joined_with_another(server: BootstrapServer) -> None:
    """A request that is computed again in its room has other pages: the newest attempt that is whole is the room's."""

    def publish_stage(attempt: str, stage: int) -> None:
        publish(server.address, ROOM, part(stage, attempt), stage, 2, owner=OWNER)

    publish_stage("first", 0)
    publish_stage("second", 1)
    assert ask(server.address, [ROOM]) == {}
    publish_stage("first", 1)
    assert ask(server.address, [ROOM])[ROOM]["attempt"] == "first"
    publish_stage("second", 0)
    assert ask(server.address, [ROOM])[ROOM]["attempt"] == "second"
    for number in range(9):
        publish_stage(f"{number}", 0)
    assert ask(server.address, [ROOM]) == {}


def test_a_request_that_comes_again_is_another_attempt(
    plugin: ModuleType, server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its id, in its room. A stage whose withdrawal was lost was joined with the other one's new pages."""
    ranks = two_ranks(plugin, monkeypatch, "prefill", 4)

    def send(stage: int) -> Any:
        sender = plugin.prefill.Sender(ranks[stage].manager, server.address, ROOM)
        sender.req = request_of()
        sender.init(len(THEIRS), 2)
        sender.send(torch.tensor(THEIRS).numpy(), [], TOKENS)
        waited(sender._publisher.submit(unblocked(lambda: None)))
        return sender

    first, lost = plugin.prefill.Sender(ranks[0].manager, server.address, ROOM), send(1)
    first.abort()
    lost._rank.exporter.abort(lost._name)
    again = send(0)
    assert ask(server.address, [ROOM]) == {}
    send(1)
    handoff = Handoff.of_params(ask(server.address, [ROOM])[ROOM]["handoff"], host_key())
    assert handoff.lease == again._rank.exporter._requests[again._name].lease


@pytest.mark.parametrize("stage, stages", [("first", 2), (0, "1/2"), (2, 2), (-1, 2), (0, 0), (0, 257)])
def test_what_is_no_stage(server: BootstrapServer, stage: Any, stages: Any) -> None:
    """A stage that cannot be is refused."""
    with pytest.raises(KVPlanError, match=r"^PEER: .* got 40[04]"):
        publish(server.address, ROOM, part(0), stage, stages)


@pytest.mark.parametrize("entry", [{}, {"handoff": {}}, {"handoff": {**part(0)["handoff"], "remote_kept": {"a": "b"}}}])
def test_stages_that_cannot_be_merged(
    plugin: ModuleType, decode: Side, server: BootstrapServer, entry: dict[str, Any]
) -> None:
    """Their request fails with the reason, and other rooms are there."""
    publish(server.address, ROOM + 1, {"token": 3})
    publish(server.address, ROOM, {"attempt": "a", **entry}, 0, 2, owner=OWNER)
    publish(server.address, ROOM, part(1), 1, 2, owner=OWNER)
    assert ask(server.address, [ROOM + 1]) == {ROOM + 1: {"token": 3}}
    receiver = received(plugin, decode, server)
    until(receiver, KVPoll.Failed)
    with pytest.raises(KVPlanError, match=f"MESSAGE: cannot read what room {ROOM} has: .* got room {ROOM}: "):
        receiver.failure_exception()


def test_stages_that_do_not_agree(server: BootstrapServer) -> None:
    """Their room is not there; others are."""
    publish(server.address, ROOM + 1, {"token": 3})
    for stages in (3, 1):
        publish(server.address, ROOM, part(0), 0, stages, owner=OWNER)
        publish(server.address, ROOM, part(1), 1, 2, owner=OWNER)
        assert ask(server.address, [ROOM, ROOM + 1]) == {ROOM + 1: {"token": 3}}


def test_with_a_key_stages_are_signed(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage signs its own tables, and decode gets all of them, signed."""
    access = Access(key=KEY)
    server = BootstrapServer("127.0.0.1", 0, system=Driver(access))
    monkeypatch.setenv("KVPLAN_KEY", SECRET.decode())
    stages = two_ranks(plugin, monkeypatch, "prefill", 4)
    senders = [plugin.prefill.Sender(stage.manager, server.address, ROOM) for stage in stages]
    for sender in senders:
        sender.req = request_of()
        sender.init(len(THEIRS), 2)
        sender.send(torch.tensor(THEIRS).numpy(), [], TOKENS)
    entries = wait_until(lambda: ask(server.address, [ROOM], access))
    handoff = Handoff.of_params(entries[ROOM]["handoff"], KEY)
    assert handoff.blocks.keys() == {"attn.pp0", "attn.pp1"}
    with pytest.raises(KVPlanError, match=r"PEER: .* got status 401"):
        ask(server.address, [ROOM])
    server.close()


def test_a_client_chooses_no_bootstrap_server(plugin: ModuleType) -> None:
    """Prefill posted handoff and first token to any address, and 300 requests held 300 threads for 30 s."""
    prefill = Side(plugin, "prefill", 4)
    with closing(socket.create_server(("127.0.0.2", 0))) as theirs, no_more_threads():
        theirs.settimeout(0.2)
        address = f"127.0.0.2:{theirs.getsockname()[1]}"
        senders = [plugin.prefill.Sender(prefill.manager, address, room) for room in range(300)]
        for sender in senders:
            assert sender.poll() == KVPoll.Failed
            with pytest.raises(KVPlanError, match=r"NAME: cannot ask .*bootstrap_servers"):
                sender.failure_exception()
        with pytest.raises(TimeoutError):
            theirs.accept()


def test_engines_with_a_key(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is read with one key on both sides; when it has been read, its room is empty; another key gets none."""
    access = Access(key=KEY)
    server = BootstrapServer("127.0.0.1", 0, system=Driver(access))
    monkeypatch.setenv("KVPLAN_KEY", SECRET.decode())
    prefill, decode = Side(plugin, "prefill", 4), Side(plugin, "decode", 16)
    prefill.k.fill_(3)
    receiver = received(plugin, decode, server)
    sender = sent(plugin, prefill, server)
    allocated(receiver)
    until(receiver, KVPoll.Success)
    assert torch.equal(decode.rows(OURS), prefill.rows(THEIRS))
    assert ask(server.address, [ROOM], access).keys() == {ROOM}
    receiver.clear()
    until(sender, KVPoll.Success)
    sender.clear()
    wait_until(lambda: not ask(server.address, [ROOM], access))
    forged = {
        "handoff": Handoff(Source("evil", "a", "127.0.0.1", 1), "l", TOKENS, "p", {}).params(
            SharedKey.of(b"a key of somebody else")
        ),
        "token": 666,
    }
    publish(server.address, ROOM, forged, access=access)
    victim = received(plugin, decode, server)
    until(victim, KVPoll.Failed)
    with pytest.raises(KVPlanError, match="MESSAGE: cannot read a handoff: expected the signature"):
        victim.failure_exception()
    server.close()


@pytest.mark.parametrize("setting, got", [("KVPLAN_KEY", None), ("KVPLAN_LEASE_S", "with the key of this host")])
def test_doors_open_where_sglang_says(
    plugin: ModuleType, engine: Runtime, monkeypatch: pytest.MonkeyPatch, setting: str, got: str | None
) -> None:
    """On all addresses only with a key that an operator has set."""
    monkeypatch.setenv(setting, {"KVPLAN_KEY": SECRET.decode()}.get(setting, "30"))
    engine.serving.host = "0.0.0.0"
    opened = [lambda: plugin.manager.serve_rooms("0.0.0.0", 0), lambda: Side(plugin, "prefill", 4)]
    for start in opened:
        if got is None:
            start()
        else:
            with pytest.raises(KVPlanError, match=f"PEER: cannot listen on 0.0.0.0 {got}: .*set one key on all"):
                start()


# Prompts that prefill computes in chunks


class Chunks:
    """A request that prefill computes in chunks, which it publishes, and decode reads."""

    def __init__(self, plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer) -> None:
        assert prefill.manager.rank.exporter._early_tokens == 1024
        prefill.manager.rank.exporter._early_tokens = 1
        self.sender = plugin.prefill.Sender(prefill.manager, server.address, ROOM)
        self.sender.req = request_of()
        self.sender.init(len(THEIRS), 2)
        self.receiver = received(plugin, decode, server)

    def send(self, start: int, stop: int, states: Any = None) -> None:
        """Compute the pages from ``start`` to ``stop``."""
        num_tokens = min(stop * 4, TOKENS) - start * 4
        self.sender.send(torch.tensor(THEIRS[start:stop]).numpy(), states, num_tokens)

    def read(self) -> None:
        """Let decode read what is published, until nothing moves."""
        allocated(self.receiver)
        self.settle()

    def settle(self) -> None:
        """Poll decode until nothing moves."""

        def is_settled() -> bool:
            if not self.receiver._rank.reads.is_moving(self.receiver._name):
                return True
            assert self.receiver.poll() == KVPoll.Transferring
            return False

        wait_until(is_settled)
        assert self.receiver.poll() == KVPoll.Transferring


@pytest.fixture
def chunks(plugin: ModuleType, prefill: Side, decode: Side, server: BootstrapServer) -> Iterator[Chunks]:
    chunks = Chunks(plugin, prefill, decode, server)
    yield chunks
    chunks.receiver.clear()


@pytest.mark.parametrize("event", ["aborted", "sent as a whole", "followed by more"])
def test_a_chunk_that_waits_is_not_published(chunks: Chunks, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """When it could be, the request was given up, or something newer is there."""
    published = []

    def publish(entry: dict[str, Any]) -> bool:
        published.append(entry["handoff"]["remote_num_tokens"])
        return True

    monkeypatch.setattr(chunks.sender, "_publish", publish)
    publisher = chunks.sender._publisher
    may_publish = threading.Event()
    publisher.submit(lambda: may_publish.wait(30))
    chunks.send(0, 5)
    if event == "aborted":
        chunks.sender.abort()
    else:
        stop = 10 if event == "sent as a whole" else 7
        chunks.send(5, stop, [] if stop == 10 else None)
    may_publish.set()
    waited(publisher.submit(unblocked(lambda: None)))
    assert published == {"aborted": [], "sent as a whole": [TOKENS], "followed by more": [28]}[event]


def test_what_may_be_published_is_withdrawn(
    plugin: ModuleType, chunks: Chunks, server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has it, and its answer is lost: it would keep the room from other engines."""
    publish = plugin.prefill.publish

    async def publish_in_vain(*arguments: Any, **options: Any) -> None:
        await publish(*arguments, **options)
        raise KVPlanError("PEER", "reach the server", expected="an answer", got="none")

    monkeypatch.setattr(plugin.prefill, "publish", publish_in_vain)
    publisher = chunks.sender._publisher
    chunks.send(0, 6)
    waited(publisher.submit(unblocked(lambda: None)))
    assert poll_rooms(server.address, {f"{ROOM}": ""})
    chunks.sender.abort()
    waited(publisher.submit(unblocked(lambda: None)))
    assert poll_rooms(server.address, {f"{ROOM}": ""}) == {}
    chunks.receiver.clear()


def test_a_request_that_is_cleared_between_chunks_leaves_nothing(decode: Side, chunks: Chunks) -> None:
    """SGLang clears some requests without an abort: workers learn that no chunk follows."""
    chunks.send(0, 6)
    chunks.read()
    chunks.receiver.clear()
    rank = decode.manager.rank
    assert (len(rank.importer), rank._rooms_read, rank.reads._requests) == (0, {}, {})


def test_decode_gives_up_between_chunks(prefill: Side, decode: Side, chunks: Chunks) -> None:
    """Nothing moves, so its pages are free; prefill computes to the end, and nobody has to read."""
    chunks.send(0, 6)
    chunks.read()
    chunks.receiver.abort()
    assert chunks.receiver.poll() == KVPoll.Failed
    assert decode.manager.is_abort_release_safe(ROOM, 0)
    chunks.receiver.clear()

    def are_free() -> bool:
        prefill.manager.rank.poll()
        return not len(prefill.manager.rank.exporter.leases)

    wait_until(are_free)
    chunks.send(6, 10, [])
    until(chunks.sender, KVPoll.Success)
    assert not prefill.manager.rank.ended


class Computed(NamedTuple):
    """An event of SGLang's stream."""

    synchronize: Callable[[], Any]


def test_a_chunk_that_is_not_computed_yet_is_not_published(chunks: Chunks, server: BootstrapServer) -> None:
    """SGLang sends a cached prefix while the forward pass of the request that has it may still run."""
    is_computed = threading.Event()
    chunks.sender._early_send_wait_event = Computed(is_computed.wait)
    chunks.send(0, 6)
    time.sleep(0.05)
    assert poll_rooms(server.address, {f"{ROOM}": ""}) == {}
    is_computed.set()
    until(chunks.receiver, KVPoll.WaitingForInput)
    assert poll_rooms(server.address, {f"{ROOM}": ""}).keys() == {f"{ROOM}"}
    chunks.receiver.clear()


def test_a_chunk_that_waited_is_published_unless_a_later_one_is(prefill: Side, chunks: Chunks) -> None:
    """A few positions more, which are not published, do not hold it up."""
    prefill.manager.rank.exporter._early_tokens = 8
    is_free = threading.Event()
    chunks.sender._publisher.submit(unblocked(is_free.wait))
    for start, stop in ((0, 2), (2, 6), (6, 7)):
        chunks.send(start, stop)
    is_free.set()
    until(chunks.receiver, KVPoll.WaitingForInput)
    assert published_to(chunks.receiver).num_tokens == 24


def test_a_partial_entry_is_for_those_who_poll(chunks: Chunks, server: BootstrapServer) -> None:
    """A proxy gets whole prompts alone; who has seen a version gets the next one."""
    chunks.send(0, 6)
    waited(chunks.sender._publisher.submit(unblocked(lambda: None)))
    assert ask(server.address, [ROOM]) == {}
    part = poll_rooms(server.address, {f"{ROOM}": ""})[f"{ROOM}"]
    assert part.entry["handoff"]["remote_num_tokens"] == 24
    assert poll_rooms(server.address, {f"{ROOM}": part.version}) == {}
    chunks.send(6, 10, [])
    waited(chunks.sender._publisher.submit(unblocked(lambda: None)))
    whole = poll_rooms(server.address, {f"{ROOM}": part.version})[f"{ROOM}"]
    assert ask(server.address, [ROOM]) == {ROOM: whole.entry}
    assert whole.entry["handoff"]["remote_lease"] == part.entry["handoff"]["remote_lease"]
    chunks.receiver.clear()
