"""vLLM's scheduler part without vLLM: what is read of a handoff, what is handed over, and what operators can count."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pytest
import torch

from kvplan import KVPlanError
from kvplan.protocol import Handoff
from kvplan.protocol.claims import RENEW_S
from kvplan.protocol.digest_requests import DigestRequest, fetch_digests
from kvplan.protocol.listener import fetch
from kvplan.testing.simulation.fleet import places_of
from kvplan.testing.simulation.network import Host, Network
from kvplan.testing.simulation.tasks import TaskLoop
from tests.bridges.vllm_objects import AttentionSpec
from tests.seen_steps import Seen
from tests.simulation.vllm_connector import KEY, SCHEDULER, SECRET, WORKER, cache_of, config_of
from tests.simulation.vllm_objects import (
    BlockPool,
    KVCacheBlock,
    KVCacheBlocks,
    Request,
    RequestStatus,
    SingleTypeKVCacheManager,
    scheduled,
)

PROMPT, ANSWER, BLOCK, WINDOW = 100, 12, 16, 44
SAID = [*range(PROMPT + ANSWER)]
COMPUTED = PROMPT + ANSWER - 1  # the last token of an answer is in no cache
ASKED = {"do_remote_decode": True}
KINDS = [("full",), ("window",), ("full", "window"), ("full", "state"), ("full", "window", "state")]


def request_of(
    tokens: list[int], params: Any = None, answer: list[int] | None = None, in_flight: int = 0, **fields: Any
) -> Request:
    """A request that has generated an answer, of which the last token is not computed, if there is one."""
    said = [*tokens, *(answer or [])]
    values: dict[str, Any] = {
        "request_id": "r",
        "kv_transfer_params": params,
        "prompt_token_ids": [*tokens],
        "_all_token_ids": said,
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": len(said) - 1 + in_flight if answer else 0,
        "num_in_flight_tokens": in_flight,
        "status": RequestStatus.FINISHED_STOPPED if answer else RequestStatus.RUNNING,
        "max_tokens": ANSWER,
    }
    return Request(**values | fields)


def blocks_of(kinds: tuple[str, ...], num_tokens: int, cached: tuple[int, ...] = ()) -> Any:
    """Tables of a request: of windows and states without old blocks, and of each group a number of cached blocks."""
    groups = []
    for group, kind in enumerate(kinds):
        num_null = {"full": 0, "window": (num_tokens - WINDOW + 1) // BLOCK, "state": (num_tokens - 1) // BLOCK}[kind]
        num_cached = cached[group] if cached else 0
        blocks = []
        for ordinal in range(-(-num_tokens // BLOCK)):
            is_null = ordinal < num_null
            block_hash = b"hash" if ordinal < num_cached and not is_null else None
            block_id = 0 if is_null else ordinal + 1
            blocks.append(KVCacheBlock(block_id, is_null, block_hash))
        groups.append(blocks)
    return KVCacheBlocks(groups)


def ids_of(kinds: tuple[str, ...], num_tokens: int) -> Any:
    """The ids of a request's blocks, by group."""
    return blocks_of(kinds, num_tokens).get_block_ids()


class Digests(NamedTuple):
    """A worker's report of digests."""

    digests: dict[Any, Any]


class SeenScheduler(SCHEDULER.Scheduler):  # type: ignore[misc, name-defined]
    """A scheduler whose steps are easy to compare."""

    def take_step(self) -> Any:
        return Seen(super().take_step())


@attrs.define
class TellsStore:
    """The store's part of a scheduler: what it is told to leave out."""

    left_out: list[tuple[str, str, int]] = attrs.field(factory=list)

    def leave_out(self, request: str, group: str, stop: int) -> None:
        self.left_out.append((request, group, stop))


@attrs.define(eq=False)
class Engines:
    """The schedulers of engines on a virtual network."""

    hosts: dict[str, Host] = attrs.field(factory=dict)
    managers: dict[str, list[Any]] = attrs.field(factory=dict)
    loop: TaskLoop = attrs.field(init=False)
    network: Network = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.loop = TaskLoop()
        self.network = Network(self.loop, 1, ())

    def start(self, *kinds: str, name: str = "prefill", is_zeroed: bool = False, **options: Any) -> Any:
        """Start an engine's scheduler. Options are those of vLLM's configuration, and settings."""
        of_config = {
            label: options.pop(label) for label in ("is_producer", "caches_prefixes", "num_drafts") if label in options
        }
        settings = SCHEDULER.ConnectorSettings(
            **{"host": name, "port": 5600, "key": SECRET, "bootstrap_servers": ("*",)} | options
        )
        host = Host(name, self.network, random.Random(name), check=settings.access().check_server)
        self.hosts[name] = host
        cache = cache_of(kinds, BLOCK, WINDOW, is_zeroed=is_zeroed)
        scheduler = SeenScheduler(config_of(name, **of_config), cache, settings, host)
        pool = BlockPool()
        self.managers[name] = [SingleTypeKVCacheManager(BLOCK, pool) for _ in kinds]
        scheduler.set_managers(self.managers[name])
        scheduler.serve_offers([b"offer of worker 0", b"offer of worker 1"])
        return scheduler

    def decode(self, *kinds: str, **options: Any) -> Any:
        """Start an engine that keeps its answers for next turns."""
        defaults: dict[str, Any] = {"name": "decode", "is_producer": False, "bidirectional_kv_xfer": True}
        return self.start(*kinds, **defaults | options)

    def run(self, duration_s: float = 1.0) -> None:
        """Let time pass."""
        until = self.loop.now + duration_s
        while self.loop.advance(until):
            continue
        self.loop.now = until
        assert self.loop.errors == []

    def ask(self, name: str, question: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question over the network, or the code of its error."""
        answers: list[Any] = []

        async def run() -> None:
            try:
                answers.append(await question())
            except KVPlanError as error:
                answers.append(error.code)

        self.hosts[name].start("ask", run)
        self.run(5.0)
        return answers[0]


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.loop.close()


def computed(prefill: Any, kinds: tuple[str, ...] = ("full",), tokens: list[int] = SAID[:PROMPT], **fields: Any) -> Any:
    """The parameters that prefill returns for a prompt which it has computed."""
    request = request_of(tokens, ASKED, [7], **fields)
    return prefill.hand_over(request, ids_of(kinds, len(tokens)))


def answered(decode: Any, kinds: tuple[str, ...] = ("full",), num_in_flight: int = 0, **fields: Any) -> Any:
    """The parameters that decode returns for a prompt which it has read and answered."""
    request = request_of(SAID[:PROMPT], {"do_remote_prefill": True}, SAID[PROMPT:], num_in_flight, **fields)
    return decode.hand_over(request, ids_of(kinds, COMPUTED))


def step_of(reader: Any, kinds: tuple[str, ...], tokens: list[int], params: Any, cached: tuple[int, ...] = ()) -> Any:
    """The step that begins a request's read; with numbers of cached blocks by group."""
    request = request_of(tokens, params)
    reader.add(request)
    num_cached = max(cached, default=0) * BLOCK
    num_tokens = reader.count_tokens_to_read(request, num_cached)
    reader.begin_read(request, blocks_of(kinds, num_cached + num_tokens or 1, cached), num_tokens)
    return reader.take_step()


def read_of(reader: Any, kinds: tuple[str, ...], tokens: list[int], params: Any, cached: tuple[int, ...] = ()) -> Any:
    """What is read of a request, None if it is computed."""
    step = step_of(reader, kinds, tokens, params, cached)
    assert step.refused == {}
    return step.reads[0] if step.reads else None


def observed(scheduler: Any) -> dict[str, list[int]]:
    """What an operator sees of a step."""
    scheduler.take_step()
    stats = scheduler.stats.take()
    return {} if stats is None else {key: values for key, values in stats.data.items() if values}


# What is handed over


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_decode_reads_a_prompt(engines: Engines, kinds: tuple[str, ...]) -> None:
    """All positions but the last, of a window those that it reaches and of states the last one, into its own blocks."""
    prefill, decode = engines.start(*kinds), engines.start(*kinds, name="decode")
    prompt = request_of(SAID[:PROMPT], ASKED)
    prefill.add(prompt)
    num_tokens = prompt.num_prompt_tokens
    # a window or a state would have passed what decode needs
    assert num_tokens == (PROMPT if kinds == ("full",) else PROMPT - 1)
    params = computed(prefill, kinds, SAID[:num_tokens])
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    read = read_of(decode, kinds, SAID[:PROMPT], params)
    assert (read.request, read.source.engine_id, read.lease) == ("r", "prefill", params["remote_lease"])
    first = (PROMPT - 1 - WINDOW + 1) // BLOCK * BLOCK
    starts = {"full": 0, "window": first}
    expected = {f"group{number}": (starts[kind], PROMPT - 1) for number, kind in enumerate(kinds) if kind in starts}
    assert read.tokens == expected
    num_blocks = -(-PROMPT // BLOCK)
    for number, kind in enumerate(kinds):
        (last, *_) = read.local[f"group{number}"].ids[::-1]
        assert last == read.remote[f"group{number}"].ids[-1] == num_blocks
        assert len(read.local[f"group{number}"].ids) == {"full": 7, "window": 4, "state": 1}[kind]
    assert read.to_block_end


def test_a_handoff_that_says_nothing_of_a_group_has_all_of_it(engines: Engines) -> None:
    """As engines without windows may write it."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    handoff = attrs.evolve(Handoff.of_params(computed(prefill), KEY), kept={})
    params = handoff.params(KEY) | {"do_remote_prefill": True}
    assert read_of(decode, ("full",), SAID[:PROMPT], params).tokens == {"group0": (0, PROMPT - 1)}


def test_a_cache_of_another_kind_is_refused(engines: Engines) -> None:
    """Before anything is served: what its blocks hold is not known."""
    cache = cache_of(["full"], BLOCK)
    cache.transfer_groups[0].kv_cache_spec = AttentionSpec(BLOCK)
    settings = SCHEDULER.ConnectorSettings(host="prefill", key=SECRET)
    host = Host("prefill", engines.network, random.Random(1))
    with pytest.raises(KVPlanError, match="LAYOUT: cannot transfer a cache of vLLM"):
        SCHEDULER.Scheduler(config_of("prefill"), cache, settings, host)


def test_an_engine_that_needs_zeros_reads_no_more_than_positions(engines: Engines) -> None:
    prefill, decode = engines.start("full"), engines.start("full", name="decode", is_zeroed=True)
    assert not read_of(decode, ("full",), SAID[:PROMPT], computed(prefill)).to_block_end


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_next_turn_reads_the_answer(engines: Engines, kinds: tuple[str, ...]) -> None:
    """Prefill reads all that decode has computed, and computes new tokens. Proxies pass parameters on as they are."""
    params = answered(engines.decode(*kinds), kinds)
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_num_tokens"] == COMPUTED
    read = read_of(engines.start(*kinds), kinds, [*SAID, 7, 8, 9], params)
    first = (COMPUTED - WINDOW + 1) // BLOCK * BLOCK
    starts = {"full": 0, "window": first}
    expected = {f"group{number}": (starts[kind], COMPUTED) for number, kind in enumerate(kinds) if kind in starts}
    assert read.tokens == expected


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("tokens", [[*SAID[:PROMPT], 7, 8], SAID[:PROMPT]], ids=["rewritten", "repeated"])
def test_another_text_in_place_of_the_answer(
    engines: Engines, caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...], tokens: list[int]
) -> None:
    """The prompt is read if all of it is there, but its last token. States and windows have passed it."""
    caplog.set_level(logging.WARNING)
    read = read_of(engines.start(*kinds), kinds, tokens, answered(engines.decode(*kinds), kinds))
    if kinds == ("full",):
        assert read.tokens == {"group0": (0, min(PROMPT, len(tokens) - 1))}
    else:
        assert read is None
    assert ("request 'r': the prompt is recomputed" in caplog.text) == (read is None)


def test_a_whole_prompt_has_no_prefix(engines: Engines) -> None:
    """What prefill computes is one prompt; decode's answer is known by the prompt before it too."""
    assert computed(engines.start("full"))["remote_prefixes"] == []
    ((num_prompt, _),) = answered(engines.decode("full"))["remote_prefixes"]
    assert num_prompt == PROMPT


def test_nothing_is_handed_over_unless_asked(engines: Engines) -> None:
    """Neither an answer that nobody keeps, nor a request that was aborted, has no block, or is of no proxy."""
    assert answered(engines.start("full", is_producer=False)) is None
    assert answered(engines.start("full", name="keeps nothing")) is None
    prefill = engines.start("full", name="prefill-2")
    assert computed(prefill, status=RequestStatus.FINISHED_ABORTED) is None
    assert prefill.hand_over(request_of([1, 2], ASKED, [7]), ([],)) is None
    assert prefill.hand_over(request_of([1, 2], None, [7]), ids_of(("full",), 2)) is None
    for status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
        assert computed(prefill, status=status) is not None


def test_an_engine_that_serves_no_offers_hands_nothing_over(engines: Engines) -> None:
    """A consumer does not, unless it keeps answers; what has no worker is refused."""
    consumer = engines.start("full", name="consumer", is_producer=False)
    assert computed(consumer) is None
    assert consumer.take_step().released == set()
    consumer.take_digests(Digests({}))
    consumer.close()
    for options in ({"is_producer": True}, {"is_producer": False, "bidirectional_kv_xfer": True}):
        scheduler = engines.start("full", name=f"{options}", **options)
        assert computed(scheduler) is not None
        with pytest.raises(KVPlanError, match="name KvplanConnector before other connectors") as caught:
            scheduler.serve_offers([])
        assert caught.value.code == "WORKER"


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_step_under_way_is_not_handed_over(engines: Engines, kinds: tuple[str, ...]) -> None:
    """Its positions may be written late. A state would be changed in place, so it is of no known position."""
    params = answered(engines.decode(*kinds), kinds, num_in_flight=1)
    assert (params is None) == ("state" in kinds)
    if params is not None:
        assert params["remote_num_tokens"] == COMPUTED


def test_no_more_is_handed_over_than_tokens_are_known(engines: Engines) -> None:
    """Drafts that were computed and not accepted are no tokens of the request."""
    request = request_of(SAID[:PROMPT], ASKED, [7], num_computed_tokens=PROMPT + 5)
    params = engines.start("full").hand_over(request, ids_of(("full",), PROMPT))
    assert params["remote_num_tokens"] == PROMPT + 1


def test_what_a_window_has_freed_is_not_kept(engines: Engines) -> None:
    params = answered(engines.decode("full", "window"), ("full", "window"))
    first = (COMPUTED - WINDOW + 1) // BLOCK
    assert params["remote_kept"] == {"group0": 0, "group1": first * BLOCK}


# Prompts that stop short


@pytest.mark.parametrize("kinds", [("full",), ("window",), ("full", "state")], ids="+".join)
@pytest.mark.parametrize("asked", [ASKED, {"do_remote_decode": False}, None])
def test_a_prompt_stops_short_where_decode_would_lack_something(
    engines: Engines, kinds: tuple[str, ...], asked: dict[str, Any] | None
) -> None:
    """Of a request for decode, whose last token frees blocks of a window or changes a state."""
    prefill = engines.start(*kinds)
    request = request_of(SAID[:PROMPT], asked)
    prefill.add(request)
    is_short = asked is ASKED and kinds != ("full",)
    num_tokens = PROMPT - is_short
    assert request.prompt_token_ids == request._all_token_ids == SAID[:num_tokens]
    assert (request.num_prompt_tokens, request.max_tokens) == (num_tokens, 1 if is_short else ANSWER)
    assert request.sampling_params.allowed_token_ids is None


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_whole_prompt_is_computed_where_decode_does_not_compute_its_last_token(
    engines: Engines, kinds: tuple[str, ...]
) -> None:
    """It begins with prefill's token, as SGLang does: states are those after the prompt."""
    prefill = engines.start(*kinds)
    request = request_of(SAID[:PROMPT], {**ASKED, "whole_prompt": True}, [7])
    prefill.add(request)
    assert request.prompt_token_ids == SAID[:PROMPT]
    assert request.max_tokens == ANSWER
    params = prefill.hand_over(request, ids_of(kinds, PROMPT))
    assert params["remote_num_tokens"] == PROMPT


def test_a_prompt_of_one_token_does_not_stop_short(engines: Engines) -> None:
    """Nothing would be left of it; of two tokens one is."""
    prefill = engines.start("window")
    for tokens, left in (([5], [5]), ([5, 6], [5])):
        request = request_of(tokens, ASKED)
        prefill.add(request)
        assert request.prompt_token_ids == left
        assert request.num_prompt_tokens == 1


def test_embeddings_stop_short_too(engines: Engines) -> None:
    prefill = engines.start("window")
    request = request_of([5, 6, 7], ASKED, prompt_token_ids=None, prompt_embeds=torch.zeros(3, 2))
    prefill.add(request)
    assert request.prompt_embeds.shape == (2, 2)
    assert request._all_token_ids == [5, 6]


@pytest.mark.parametrize(
    ("num_drafts", "last_token", "fields", "is_forced"),
    [
        (1, 6, {}, True),
        (0, 6, {}, False),
        (1, 1000, {}, False),
        (1, 6, {"use_structured_output": True}, False),
        (1, 6, {"sampling_params": None}, False),
    ],
    ids=["drafts", "no drafts", "no token of the vocabulary", "a grammar", "pooled"],
)
def test_drafts_get_the_token_that_comes_next(
    engines: Engines, num_drafts: int, last_token: int, fields: dict[str, Any], is_forced: bool
) -> None:
    """Prefill must generate the token that it leaves out, where drafts cache something of it."""
    request = request_of([5, last_token], ASKED, **fields)
    engines.start("window", num_drafts=num_drafts).add(request)
    if request.sampling_params is not None:
        assert request.sampling_params.allowed_token_ids == ([last_token] if is_forced else None)


def test_what_drafts_cache_of_another_token_is_computed(engines: Engines) -> None:
    """That of the last position is of the token that came next then; decode goes on with that token."""
    params = answered(engines.decode("full"))
    prefill = engines.start("full", num_drafts=1)
    assert read_of(prefill, ("full",), [*SAID, 7], params).tokens == {"group0": (0, COMPUTED - 1)}
    reader = engines.start("full", name="reader", num_drafts=1)
    as_decode = computed(engines.start("full", name="prefill-2"))
    assert read_of(reader, ("full",), [*SAID[:PROMPT], 7], as_decode).tokens == {"group0": (0, PROMPT)}


# What is read


@pytest.mark.parametrize(
    "params", [None, {"do_remote_decode": True}, {"do_remote_decode": True, "remote_block_ids": None}]
)
def test_a_request_of_no_handoff_is_computed(engines: Engines, params: dict[str, Any] | None) -> None:
    scheduler = engines.start("full")
    assert read_of(scheduler, ("full",), SAID, params) is None
    assert observed(scheduler) == {}


@pytest.mark.parametrize(("threshold", "is_read"), [(COMPUTED - 4 * BLOCK, True), (COMPUTED - 4 * BLOCK + 1, False)])
def test_prefill_computes_what_is_little(engines: Engines, threshold: int, is_read: bool) -> None:
    """Fewer positions than the threshold are not read, beside those that are cached. Decode reads them in any case."""
    params = answered(engines.decode("full"))
    prefill = engines.start("full", kv_recompute_threshold=threshold)
    read = read_of(prefill, ("full",), [*SAID, 7], params, (4,))
    assert (read is not None) == is_read
    reader = engines.start("full", name="reader", kv_recompute_threshold=threshold)
    as_decode = params | {"do_remote_prefill": True, "do_remote_decode": False}
    as_decode = signed(as_decode)
    assert read_of(reader, ("full",), [*SAID, 7], as_decode, (4,)).tokens == {"group0": (4 * BLOCK, COMPUTED)}


def signed(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with other flags, which no signature covers."""
    flags = {label: params[label] for label in ("do_remote_prefill", "do_remote_decode")}
    return Handoff.of_params(params, KEY).params(KEY) | flags


def test_all_that_could_be_read_is_cached(engines: Engines) -> None:
    """Nothing is read, the claim ends, and prefill may free the blocks."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    params = computed(prefill, tokens=SAID[:65])
    assert read_of(decode, ("full",), SAID[:65], params, (4,)) is None
    engines.run()
    assert prefill.take_step().released == {"r"}


def test_a_group_that_has_cached_less_reads_more(engines: Engines) -> None:
    """vLLM takes the hit of full attention, where the connector restores states: those of windows may lag behind."""
    kinds = ("full", "window", "state")
    prefill = engines.start(*kinds, kv_recompute_threshold=0)
    read = read_of(prefill, kinds, [*SAID, 7], answered(engines.decode(*kinds), kinds), (6, 0, 0))
    assert read.tokens == {"group0": (6 * BLOCK, COMPUTED), "group1": (4 * BLOCK, COMPUTED)}
    assert "group2" in read.local


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_a_block_that_is_read_in_part_is_not_cached(engines: Engines, caches_prefixes: bool) -> None:
    """The source lacks the beginning of a block here; this engine hands no more over than it has read."""
    kinds = ("window",)
    params = answered(engines.decode(*kinds), kinds)
    # a source whose blocks are smaller has freed half of a block here
    first = (COMPUTED - WINDOW + 1) // BLOCK * BLOCK
    handoff = attrs.evolve(Handoff.of_params(params, KEY), kept={"group0": COMPUTED - WINDOW + 1})
    params = handoff.params(KEY) | {"do_remote_prefill": True, "do_remote_decode": False}
    scheduler = engines.start(*kinds, caches_prefixes=caches_prefixes, kv_recompute_threshold=0)
    read = read_of(scheduler, kinds, [*SAID, 7], params)
    partial_from = COMPUTED - WINDOW + 1
    assert read.tokens == {"group0": (partial_from, COMPUTED)}
    (manager,) = engines.managers["prefill"]
    assert manager.num_cached_block == ({"r": partial_from // BLOCK + 1} if caches_prefixes else {})
    # what it has computed since does not begin earlier
    request = request_of([*SAID, 7], ASKED, [8])
    assert scheduler.hand_over(request, ids_of(kinds, COMPUTED))["remote_kept"] == {"group0": partial_from}
    assert scheduler.hand_over(request, ids_of(kinds, COMPUTED))["remote_kept"] == {"group0": first}


def test_a_store_is_told_where_a_block_is_read_in_part(engines: Engines) -> None:
    """Of each group that has one, before the request can end."""
    kinds = ("full", "window")
    partial_from = COMPUTED - WINDOW + 1
    handoff = Handoff.of_params(answered(engines.decode(*kinds), kinds), KEY)
    scheduler, store = engines.start(*kinds), TellsStore()
    scheduler.stores.append(store)
    for kept, told in ((partial_from // BLOCK * BLOCK, []), (partial_from, [("r", "group1", partial_from)])):
        params = attrs.evolve(handoff, kept={"group0": 0, "group1": kept}).params(KEY) | {"do_remote_prefill": True}
        assert read_of(scheduler, kinds, [*SAID, 7], params) is not None
        assert store.left_out == told
        scheduler.end_reads({"r"})
        scheduler.hand_over(request_of([*SAID, 7], None, [8]), ids_of(kinds, COMPUTED))


def test_a_source_may_call_its_groups_otherwise(engines: Engines) -> None:
    """Each group reads what its own one there has: the positions of its window that are kept."""
    kinds = ("full", "window")
    params = answered(engines.decode(*kinds), kinds)
    partial_from = COMPUTED - WINDOW + 1
    handoff = Handoff.of_params(params, KEY)
    tables = {"attn": handoff.blocks["group0"], "swa": handoff.blocks["group1"]}
    handoff = attrs.evolve(handoff, blocks=tables, kept={"attn": 0, "swa": partial_from})
    params = handoff.params(KEY) | {"do_remote_prefill": True, "do_remote_decode": False}
    read = read_of(engines.start(*kinds), kinds, [*SAID, 7], params)
    assert read.tokens == {"group0": (0, COMPUTED), "group1": (partial_from, COMPUTED)}


def test_blocks_that_are_cached_already_stay_so(engines: Engines) -> None:
    """vLLM counts them; a read in part before them takes nothing away."""
    kinds = ("window",)
    handoff = Handoff.of_params(answered(engines.decode(*kinds), kinds), KEY)
    params = attrs.evolve(handoff, kept={"group0": COMPUTED - WINDOW + 1}).params(KEY)
    scheduler = engines.start(*kinds)
    (manager,) = engines.managers["prefill"]
    manager.num_cached_block["r"] = 100
    assert read_of(scheduler, kinds, [*SAID, 7], params | {"do_remote_prefill": True}) is not None
    assert manager.num_cached_block == {"r": 100}


def test_a_sibling_may_not_store_a_block_that_is_read_in_part(engines: Engines) -> None:
    """Another connector of the engine would store it by its hash; whole blocks it may."""
    kinds = ("window",)
    handoff = Handoff.of_params(answered(engines.decode(*kinds), kinds), KEY)
    scheduler = engines.start(*kinds)
    scheduler.set_siblings({"OffloadingConnector"})
    part = attrs.evolve(handoff, kept={"group0": COMPUTED - WINDOW + 1}).params(KEY) | {"do_remote_prefill": True}
    step = step_of(scheduler, kinds, [*SAID, 7], part)
    assert step.reads == []
    assert step.refused["r"].code == "BLOCKS"
    assert "from 80 on" in step.refused["r"].expected
    scheduler.end_reads({"r"})
    whole = handoff.params(KEY) | {"do_remote_prefill": True}
    assert read_of(scheduler, kinds, [*SAID, 7], whole) is not None


def test_a_request_is_read_once(engines: Engines) -> None:
    """Also if vLLM asks again, with blocks of another attempt."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    request = request_of(SAID[:PROMPT], computed(prefill))
    decode.add(request)
    assert decode.count_tokens_to_read(request, 0) == PROMPT - 1
    assert decode.count_tokens_to_read(request, BLOCK) == PROMPT - 1 - BLOCK
    decode.begin_read(request, blocks_of(("full",), PROMPT - 1, (1,)), PROMPT - 1 - BLOCK)
    assert decode.take_step().reads[0].tokens == {"group0": (BLOCK, PROMPT - 1)}
    assert decode.count_tokens_to_read(request, 0) == 0
    decode.begin_read(request, blocks_of(("full",), PROMPT - 1), 0)
    decode.begin_read(request, blocks_of(("full",), PROMPT - 1), PROMPT - 1)
    assert decode.take_step().reads == []
    stranger = request_of(SAID, request_id="another")
    decode.begin_read(stranger, blocks_of(("full",), PROMPT), PROMPT)
    assert decode.take_step().reads == []


def test_what_a_window_needs_and_the_source_has_freed_is_refused(engines: Engines) -> None:
    """Decode cannot compute it: the request fails, and nothing is read."""
    kinds = ("window",)
    params = answered(engines.decode(*kinds), kinds)
    as_decode = signed(params | {"do_remote_prefill": True, "do_remote_decode": False})
    step = step_of(engines.start(*kinds), kinds, SAID[:PROMPT], as_decode)
    assert step.reads == []
    assert step.refused["r"].code == "BLOCKS"


def test_a_state_of_another_position_is_refused(engines: Engines) -> None:
    """A state cannot be cut: it is of the last position alone."""
    kinds = ("full", "state")
    params = answered(engines.decode(*kinds), kinds)
    as_decode = signed(params | {"do_remote_prefill": True, "do_remote_decode": False})
    scheduler = engines.start(*kinds)
    step = step_of(scheduler, kinds, SAID[:PROMPT], as_decode)
    assert step.refused["r"].code == "TOKENS"
    assert step.refused["r"].details["stop"] == PROMPT - 1
    # all is cached: no state is needed
    scheduler.end_reads({"r"})
    assert read_of(scheduler, kinds, SAID[: 6 * BLOCK + 1], as_decode, (6, 6)) is None


# Claims


def test_another_conversation_is_refused(engines: Engines) -> None:
    """It fails, nothing of it is read, and nothing is claimed."""
    params = answered(engines.decode("full"))
    prefill = engines.start("full")
    step = step_of(prefill, ("full",), [7, *SAID[1:]], params)
    assert step.reads == []
    assert step.refused["r"].code == "PROMPT"
    assert observed(prefill) == {}


def test_a_lease_that_is_over_is_not_read(engines: Engines) -> None:
    """Its claim is refused before the request has blocks; both engines count it."""
    prefill, decode = engines.start("full", lease_s=5.0), engines.start("full", name="decode")
    params = computed(prefill)
    engines.run(6.0)
    assert observed(prefill) == {"num_kv_expired_reqs": [1]}
    request = request_of(SAID[:PROMPT], params)
    decode.add(request)
    engines.run()
    decode.begin_read(request, blocks_of(("full",), PROMPT), PROMPT - 1)
    step = decode.take_step()
    assert step.reads == []
    assert step.refused["r"].code == "LEASE"
    assert observed(decode) == {"num_claims": [1], "num_refused_claims": [1]}
    assert observed(prefill) == {"num_notifications_after_expiry": [1]}
    # the claim is forgotten with its request
    decode.end_reads({"r", "of another engine"})
    assert [*places_of(params["remote_lease"], decode)] == []


def test_requests_that_nobody_reads_are_named(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """And released once, as those that are done are."""
    caplog.set_level(logging.WARNING)
    prefill = engines.start("full", lease_s=5.0)
    computed(prefill)
    engines.run(4.0)
    assert prefill.take_step().released == set()
    assert caplog.text == ""
    engines.run(2.0)
    assert prefill.take_step().released == {"r"}
    assert prefill.take_step().released == set()
    assert "cannot export 'r': expected a reader that claims it within 5 s" in caplog.text
    assert "renewals came" not in caplog.text


def test_a_reader_that_only_claims_has_a_time(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """Its claims kept prefill's blocks for ever, and nothing said so: gauges do, and the log when it ends."""
    caplog.set_level(logging.WARNING)
    prefill, decode = engines.start("full", max_lease_s=60.0), engines.start("full", name="decode")
    params = computed(prefill)
    request = request_of(SAID[:PROMPT], params)
    decode.add(request)
    engines.run(50.0)
    assert prefill.take_step().released == set()
    stats = prefill.stats.take().data
    assert (stats["num_pinned_blocks"][0] > 0, stats["oldest_lease"]) == (True, [50])
    engines.run(15.0)
    assert prefill.take_step().released == {"r"}
    assert prefill.stats.take().data["oldest_lease"] == [0]
    assert "cannot export 'r': expected a reader that is done within 60 s, which is max_lease_s" in caplog.text
    assert "no reader has claimed" not in caplog.text
    engines.run(10.0)
    decode.begin_read(request, blocks_of(("full",), PROMPT), PROMPT - 1)
    assert decode.take_step().refused["r"].code == "LEASE"


def test_claims_that_come_too_late_are_logged(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    prefill, decode = engines.start("full", lease_s=5.0), engines.start("full", name="decode")
    params = computed(prefill)
    engines.run(6.0)
    assert prefill.take_step().released == {"r"}
    decode.add(request_of(SAID[:PROMPT], params))
    engines.run()
    prefill.take_step()
    assert caplog.text.count("1 renewals came after their lease expired") == 1
    prefill.take_step()
    assert caplog.text.count("renewals came after their lease expired") == 1


def test_a_source_that_is_gone_leaves_claims_unanswered(engines: Engines) -> None:
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    params = computed(prefill)
    engines.hosts["prefill"].die()
    decode.add(request_of(SAID[:PROMPT], params))
    engines.run(0.5)
    assert observed(decode) == {"num_claims": [1], "num_failed_notifications": [1]}


def test_an_answer_is_kept_until_the_next_turn(engines: Engines) -> None:
    """For as long as the setting says, which is longer than a lease; what prefill computes for one lease."""
    decode = engines.decode("full", lease_s=5.0, decoder_kv_blocks_ttl=50.0)
    answered(decode)
    engines.run(49.0)
    assert decode.take_step().released == set()
    engines.run(2.0)
    assert decode.take_step().released == {"r"}
    computed(decode)
    engines.run(6.0)
    assert decode.take_step().released == {"r"}


def test_a_kept_answer_gives_way_to_a_request_that_waits(engines: Engines) -> None:
    """It was kept for minutes while a request had no blocks, which another turn may never come for.

    The oldest goes first, none while the blocks of others are still on their way, and none of what was computed for
    another engine. One that a reader has claimed goes last: the reader ends its claim, and computes the prefix.
    """
    decode = engines.decode("full", decoder_kv_blocks_ttl=500.0)
    pool = engines.managers["decode"][0].block_pool
    computed(decode, request_id="computed")
    claimed = answered(decode, request_id="claimed")
    for name in ("first", "second", "third"):
        answered(decode, request_id=name)
    prefill = engines.start("full", kv_recompute_threshold=0)
    claimer = request_of([*SAID, 1, 2], claimed)
    prefill.add(claimer)
    engines.run(0.5)
    assert decode.take_step().released == set()

    def waits(num_free: int) -> set[str]:
        """What a step releases in which a request of two blocks was looked at, and got none."""
        pool.num_free = num_free
        waiting = request_of(SAID[: 2 * BLOCK], request_id="waits")
        decode.count_tokens_to_read(waiting, 0)
        released: set[str] = decode.take_step().released
        return released

    assert waits(0) == {"first"}
    assert waits(0) == set()
    decode.end_exports({"first"})
    decode.count_tokens_to_read(request_of(SAID, request_id="gets"), 0)
    decode.begin_read(request_of(SAID, request_id="gets"), blocks_of(("full",), len(SAID)), 0)
    assert decode.take_step().released == set()
    # vLLM reserves some: one answer a time
    assert waits(100) == {"second"}
    decode.end_exports({"second"})
    assert waits(0) == {"third"}
    decode.end_exports({"third"})
    assert waits(0) == set()
    prefill.take_step()
    assert prefill.count_tokens_to_read(claimer, 0) == COMPUTED
    # a renewal is answered before another step
    engines.run(RENEW_S)
    prefill.take_step()
    engines.run(0.5)
    assert prefill.count_tokens_to_read(claimer, 0) == 0
    assert decode.take_step().released == {"claimed"}


def test_a_kept_answer_gives_way_to_a_request_that_is_preempted(engines: Engines) -> None:
    """It gets its first blocks again in each step that it is looked at, and then too few to end."""
    decode = engines.decode("full", decoder_kv_blocks_ttl=500.0)
    answered(decode, request_id="kept")
    decode.publish(scheduled(preempted={"short"}))
    assert decode.take_step().released == {"kept"}


def test_a_claim_lasts_until_all_workers_have_read(engines: Engines) -> None:
    """Then prefill frees the blocks; so it does if the request is aborted before it is read."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    read_of(decode, ("full",), SAID[:PROMPT], computed(prefill))
    engines.run(100.0)
    assert prefill.take_step().released == set()
    # an abort of a request that is read ends no claim: bytes may still move
    request = request_of(SAID[:PROMPT], status=RequestStatus.FINISHED_ABORTED)
    assert decode.hand_over(request, ids_of(("full",), PROMPT)) is None
    engines.run()
    assert prefill.take_step().released == set()
    decode.end_reads({"r"})
    engines.run()
    assert prefill.take_step().released == {"r"}
    waiting = request_of(SAID[:PROMPT], computed(prefill), status=RequestStatus.FINISHED_ABORTED)
    decode.add(waiting)
    engines.run()
    assert decode.hand_over(waiting, ([],)) is None
    engines.run()
    assert prefill.take_step().released == {"r"}


def test_a_reset_ends_handoffs(engines: Engines) -> None:
    """Their requests are released, and their leases are over."""
    decode = engines.decode("full")
    assert answered(decode) is not None
    assert decode.take_step().released == set()
    decode.reset()
    assert decode.take_step().released == {"r"}


def test_an_engine_that_is_closed_answers_nobody(engines: Engines) -> None:
    """Its offers are not served, it hands nothing over, and no thread of its claims stays."""
    prefill, decode = engines.start("full"), engines.start("full", name="decode")
    source = Handoff.of_params(computed(prefill), KEY).source
    decode.add(request_of(SAID[:PROMPT], computed(prefill)))
    host = engines.hosts["decode"]
    offers = engines.ask("decode", lambda: fetch(source, 1.0, system=host))
    assert offers.workers == (b"offer of worker 0", b"offer of worker 1")
    prefill.close()
    assert engines.ask("decode", lambda: fetch(source, 1.0, system=host)) == "PEER"
    assert computed(prefill) is None
    assert prefill.take_step().released == set()
    assert engines.loop.num_tasks == 1
    decode.close()
    engines.run()
    assert engines.loop.num_tasks == 0


# Digests


def test_workers_digest_what_readers_ask_for(engines: Engines) -> None:
    """Of a valid lease, from the blocks that are lent; replicas are asked once."""
    prefill = engines.start("full")
    engines.start("full", name="decode")
    handoff = Handoff.of_params(computed(prefill), KEY)
    host = engines.hosts["decode"]
    asked = DigestRequest.of(handoff.lease, {"group0": (0, PROMPT)})
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await fetch_digests(handoff.source, asked, 5.0, system=host))

    host.start("ask", ask)
    engines.run(1.0)
    step = prefill.take_step()
    assert step.digests.keys() == {asked}
    assert step.digests[asked]["group0"].ids.tolist() == [*range(1, 8)]
    assert prefill.take_step().digests == {}
    digest: dict[str, Any] = {"boxes": [], "digests": []}
    prefill.take_digests(Digests({asked: [digest, digest]}))
    engines.run(1.0)
    assert answers == [[digest]]


def test_a_lease_that_has_ended_is_not_digested(engines: Engines) -> None:
    """Between a reader's question and the step of its source; nothing of the lease is kept."""
    prefill = engines.start("full")
    engines.start("full", name="decode")
    handoff = Handoff.of_params(computed(prefill), KEY)
    host = engines.hosts["decode"]
    asked = DigestRequest.of(handoff.lease, {"group0": (0, 8)})
    codes: list[str] = []

    async def ask() -> None:
        with pytest.raises(KVPlanError) as caught:
            await fetch_digests(handoff.source, asked, 1.0, system=host)
        codes.append(caught.value.code)

    host.start("ask", ask)
    engines.run(0.01)
    prefill.reset()
    assert prefill.take_step().digests == {}
    assert [*places_of(handoff.lease, prefill)] == []
    engines.run(5.0)
    assert codes == ["LEASE"]


def test_a_step_discards_what_other_agents_have_sent(engines: Engines) -> None:
    """NIXL would keep the messages of whoever reaches a worker's agent, on either side."""
    settings = SCHEDULER.ConnectorSettings(host="prefill", port=5600, key=SECRET)
    host = Host("prefill", engines.network, random.Random(1), check=settings.access().check_server)
    worker = WORKER.Worker(config_of("prefill"), cache_of(("full",), BLOCK, WINDOW), settings, host)
    discarded: list[str] = []
    worker._executor = SimpleNamespace(discard_messages=lambda: discarded.append("all"))
    worker._reads = SimpleNamespace(poll=list, late=dict, num_held=0)
    for _ in range(3):
        worker.results()
    assert discarded == ["all"] * 3
