"""The weights and adapters with which a running engine computes, as its scheduler knows them.

An engine starts with an identity (:mod:`kvplan_nixl.identity`). Later its weights may change, as in
reinforcement learning. Each change begins a *version*. A trainer that updates several engines alike
can name the version, and engines that started with equal facts share caches again under that name;
until it is named, no other engine has it.

Adapters are loaded, replaced and evicted, too. A cache is handed over, or stored, under what was
loaded when it was computed: an adapter is the content that workers have loaded, whatever its folder
holds now, and whatever its name is. A request is *current* while nothing has changed since its
first position was computed. Only such a request is handed over or stored; others end as usual.

vLLM's prefix cache knows an adapter by its name, and weights not at all. So a request that begins
with blocks of the prefix cache is not current if weights, or the content of its adapter's name,
have changed since that cache was last empty: the blocks may be older. A reset of the prefix cache
(``reset_prefix_cache``) makes all later requests current.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import torch
from vllm.v1.request import Request

from kvplan.protocol import prompt_digest
from kvplan_nixl.identity import DIGEST_BYTES, FIRST_WEIGHTS, Facts
from kvplan_nixl.weights import adapter_of

Fact = tuple[int, str]

OUTDATED: Final = (
    "weights or its adapter have changed since it began, or since the prefix cache was reset"
)


@attrs.frozen
class LoadedAdapter:
    """An adapter as a worker has loaded it: its id and name in vLLM, and a digest of its files."""

    adapter_id: int
    name: str
    content: str


@attrs.frozen
class AdapterChanges:
    """The adapters that workers have loaded, and the ids of those that they have dropped."""

    loaded: tuple[LoadedAdapter, ...] = ()
    dropped: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.loaded or self.dropped)


@attrs.frozen
class _Origin:
    """What decided the first position of a request: the version of the weights, and the adapter.

    ``num_changes`` counts what has changed before. A version may have the name of an earlier one.
    """

    version: str
    adapter: str
    num_changes: int


class EngineState:
    """The weights and adapters of an engine, and whether requests are current.

    ``started`` are the facts of its identity at the start, and ``version`` is that of its weights,
    empty for those of the start. All calls come from the thread of vLLM's engine core.
    """

    def __init__(self, started: Mapping[str, Any], token_hex: Callable[[int], str]) -> None:
        self.started: Facts = dict(started)
        self.version = ""
        self._token_hex = token_hex
        self._has_changed = False
        self._num_changes = 0
        # by the name of an adapter
        self._num_replaced = Counter[str]()
        # by id
        self._adapters: dict[int, LoadedAdapter] = {}
        # by name, as they were loaded last
        self._contents: dict[str, str] = {}
        self._has_computed = False
        self._has_old_weights = False
        self._explains_reset = False
        self._old_names: set[str] = set()
        # by request; None where blocks of the prefix cache may be older than what is loaded
        self._origins: dict[str, _Origin | None] = {}
        # requests whose cache comes from another engine, or from a store
        self._loaded: set[str] = set()

    # What vLLM does

    def weights_changed(self) -> None:
        """Begin a version without a name: weights have changed, or may have."""
        self._has_changed = True
        self._num_changes += 1
        self._begin_version()
        self._explains_reset = True
        self._has_old_weights |= self._has_computed

    def _begin_version(self) -> None:
        self.version = f"unnamed {self._token_hex(DIGEST_BYTES)}"

    def weights_named(self, version: str) -> None:
        """Name the version of the weights, which may have changed with it.

        The first name is that of the weights of the start.
        """
        before = self.version
        if version != FIRST_WEIGHTS:
            self.version = version
        elif not self._has_changed:
            self.version = ""
        self._explains_reset = True
        if self.version != before:
            self._num_changes += 1
            self._has_old_weights |= self._has_computed

    def prefix_cache_reset(self) -> None:
        """Note that nothing that was computed before is found any more."""
        self._has_computed = False
        self._has_old_weights = False
        self._old_names.clear()

    def store_reset(self) -> None:
        """Begin a version without a name, unless the weights have changed since the last reset.

        After a reset nothing that was stored before may be found. Other engines use the store too,
        so pages stay and keys have to change. A change of the weights, or a name for their version,
        has changed them already.
        """
        if not self._explains_reset:
            self._begin_version()
        self._explains_reset = False

    def step_begun(self) -> None:
        """Note that blocks are computed, which the prefix cache may keep."""
        self._has_computed = True

    def adapters_changed(self, changes: Iterable[AdapterChanges]) -> None:
        """Take what the workers have loaded and dropped, each of them for itself."""
        by_id: dict[int, set[LoadedAdapter]] = {}
        for change in changes:
            for adapter_id in change.dropped:
                self._adapters.pop(adapter_id, None)
            for adapter in change.loaded:
                by_id.setdefault(adapter.adapter_id, set()).add(adapter)
        for adapters in by_id.values():
            adapter, *others = sorted(adapters, key=lambda each: each.content)
            if others:
                # ranks have read a folder while it was written
                contents = " ".join(each.content for each in (adapter, *others))
                adapter = attrs.evolve(adapter, content=f"unequal in ranks: {contents}")
            self._load(adapter)

    def adapter_added(self, adapter: LoadedAdapter, *, is_replaced: bool) -> None:
        """Take an adapter that an operator has added, until the workers say what they loaded."""
        if is_replaced or adapter.adapter_id not in self._adapters:
            self._load(adapter)

    def _load(self, adapter: LoadedAdapter) -> None:
        if self._contents.get(adapter.name, adapter.content) != adapter.content:
            self._old_names.add(adapter.name)
            self._num_replaced[adapter.name] += 1
        self._contents[adapter.name] = adapter.content
        self._adapters[adapter.adapter_id] = adapter

    # What connectors ask

    def note_origin(self, request: Request, num_cached: int) -> None:
        """Note the weights and adapter of a request that is about to be computed.

        The prefix cache has its first ``num_cached`` positions, which may be older.
        """
        adapter = request.lora_request
        is_old = self._has_old_weights or (
            adapter is not None and adapter.lora_name in self._old_names
        )
        self._origins[request.request_id] = None if is_old and num_cached else self._now(request)

    def is_current(self, request: Request) -> bool:
        """Return whether all of a request was computed with what is loaded now."""
        now = self._now(request)
        return self._origins.get(request.request_id, now) == now

    def _now(self, request: Request) -> _Origin:
        """Return what decides the positions of a request that are computed now."""
        adapter = request.lora_request
        num_replaced = 0 if adapter is None else self._num_replaced[adapter.lora_name]
        return _Origin(self.version, self.adapter_of(request), self._num_changes + num_replaced)

    def load(self, request: str) -> None:
        """Note that a request's cache comes from another engine, or from a store."""
        self._loaded.add(request)

    def is_loaded_wrongly(self, request: Request) -> bool:
        """Return whether a request was loaded under another adapter than its workers have now.

        Its first step has computed a token by the new adapter, from the cache of the old one. Later
        ones are vLLM's own: it may replace an adapter under requests that run.
        """
        is_first_step = request.request_id in self._loaded and not request.num_output_tokens
        return is_first_step and not self.is_current(request)

    def forget(self, request: str) -> None:
        """Drop what is known of a request that has ended."""
        self._origins.pop(request, None)
        self._loaded.discard(request)

    def adapter_of(self, request: Request) -> str:
        """Return the content of a request's adapter: as loaded, or what its folder has now."""
        adapter = request.lora_request
        if adapter is None:
            return ""
        loaded = self._adapters.get(adapter.lora_int_id)
        return adapter_of(adapter.lora_path) if loaded is None else loaded.content

    def facts_of(self, request: Request) -> list[Fact]:
        """Return what decides a request's cache besides tokens and embeddings, each by position.

        A fact decides the cache from its position on. They are the extra keys of vLLM's prefix
        cache (``generate_block_hash_extra_keys`` in vllm/v1/core/kv_cache_utils.py), with a digest
        of the adapter's content instead of its name.
        """
        facts = list[Fact]()
        if request.cache_salt is not None:
            facts.append((0, f"salt {request.cache_salt}"))
        if request.lora_request is not None:
            facts.append((0, f"adapter {self.adapter_of(request)}"))
        for feature in request.mm_features:
            span = feature.mm_position
            text = f"input {feature.identifier} at {span.offset}, {span.length} positions"
            facts.append((int(span.offset), text))
        return facts

    def prompt_of(self, request: Request, num_tokens: int) -> str:
        """Digest the first positions of a request, and the facts that decide their cache too."""
        facts = [
            text
            for position, text in self.facts_of(request)
            if position < num_tokens or not position
        ]
        if request.prompt_embeds is not None:
            embeddings = request.prompt_embeds[:num_tokens].contiguous()
            data = embeddings.view(torch.uint8).cpu().numpy()
            digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
            facts.append(f"embeddings {digest} at {request.prompt_is_token_ids}")
        return prompt_digest(request._all_token_ids[:num_tokens], facts)

    def store_facts_of(self, request: Request) -> list[Fact]:
        """Return the facts that a store's keys have: also the version of the weights."""
        version = self.version
        first = [(0, f"weights version {version}")] if version else []
        return [*first, *self.facts_of(request)]


def changes_of(metadata: Any) -> tuple[AdapterChanges, ...]:
    """Return the changes of adapters in what workers report of a step."""
    changes = getattr(metadata, "adapters", ())
    return tuple(change for change in changes if isinstance(change, AdapterChanges))
