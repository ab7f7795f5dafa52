"""transformers' continuous batching as an engine: a paged cache whose sliding layers are rings.

A ring keeps position p of a request in slot ``p % window`` of the request's blocks. Between two rings of one window the
slots are the positions to describe: the range is all slots that are in use, and the blocks need no wrap.

The engine's connector is an exporter and an importer of ``kvplan.protocol``: a handoff names the prompt, blocks stay
while a reader claims them, and what was read is right if the lease still stood after the last byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestState

from kvplan import Blocks, Group, Worker, region_of, view_of
from kvplan.protocol import (
    CacheGroup,
    Claims,
    Exporter,
    Importer,
    Leases,
    Listener,
    ReadResult,
    prompt_digest,
)
from kvplan_nixl import NixlExecutor, make_reads
from kvplan_nixl.serving import Driver
from tests.blocking import wait_until
from tests.engines.models import COMMON, MODELS

WINDOW = 56
RING = "sliding_attention"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "gemma-3": {"sliding_window": WINDOW, "layer_types": [RING, RING, "full_attention", RING]},
}
"""What differs from the models that other engines are judged with: blocks of rings and of other layers are unequal."""

TIMEOUT_S = 60.0

LOGGER = logging.getLogger(__name__)

Prefilled = tuple[int, Mapping[str, Any]]
"""The first token after a prompt, and the parameters of a request that decode gets."""


def digests_of(prompt: Sequence[int]) -> Callable[[int], str]:
    """The digests of a prompt's first tokens, by their number."""
    return lambda num_tokens: prompt_digest(prompt[:num_tokens])


class Engine:
    """One process's engine, with pages of ``page`` tokens, stepped by its caller."""

    def __init__(self, name: str, model: str, page: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**COMMON, **MODELS[model], **CHANGES[model]})
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="paged|eager")
        with torch.no_grad():
            made.get_input_embeddings().weight.mul_(0.1)
        self._manager = made.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page,
                num_blocks=16,
                max_batch_tokens=256,
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
        )
        self._manager.batch_processor = self._batches = self._manager._create_batch_processor()
        self._allocators = self._batches.cache.cache_allocators
        self.executor = NixlExecutor(self._worker(name))
        driver = Driver()
        self.key = driver.access.key
        groups = {
            kind: CacheGroup(None, ring_slots=WINDOW) if kind == RING else CacheGroup(allocator.tokens_per_page)
            for kind, allocator in self._allocators.items()
        }
        leases = Leases(driver)
        self.listener = Listener(name, "127.0.0.1", [self.executor.envelope()], leases, system=driver)
        self.exporter = Exporter(self.listener.source, leases, groups)
        self.claims = Claims(LOGGER, driver)
        self._importer = Importer(groups, self.claims, name, self.key)
        self._reads = make_reads(self.executor, self.claims, LOGGER, key=self.key, system=driver)

    def _blocks_of(self, kind: str) -> torch.Tensor:
        """The cache as blocks of a kind: each has a page for each layer of the kind, and a page K and then V."""
        one = self._allocators[kind]
        shape = (one.pages_per_block, 2, one.tokens_per_page, *one.cache_tensor.shape[2:])
        return self._batches.cache.cache_tensor.view(torch.float32).view(-1, *shape)

    def _worker(self, name: str) -> Worker:
        region, views = region_of(self._batches.cache.cache_tensor), []
        for kind, allocator in self._allocators.items():
            blocks = self._blocks_of(kind)
            for index, layer in enumerate(allocator.layer_indices):
                views.append(
                    view_of(
                        blocks[:, index],
                        "block kv token head dim",
                        name=f"layers.{layer}.attn",
                        group=kind,
                        region=region,
                    )
                )
        groups = [Group(kind, allocator.tokens_per_page) for kind, allocator in self._allocators.items()]
        return Worker(name, 0, [region], groups, views)

    def _add(self, request: str, tokens: Sequence[int], new: int, cached: int = 0) -> RequestState:
        """Queue a request of which the cache holds the first ``cached`` tokens."""
        state = RequestState(request, list(tokens), max_new_tokens=new, eos_token_id=-1)
        state.position_offset, state.remaining_prefill_tokens = cached, list(tokens[cached:])
        self._batches.scheduler.add_waiting_request(state)
        return state

    def _step(self) -> None:
        if self._batches.prepare_next_batch():
            self._batches._generation_step(self._manager.model)
            self._batches.update_batch()

    def _finish(self, state: RequestState) -> list[int]:
        while self._batches.has_pending_requests():
            self._step()
        return list(state.generated_tokens)

    def generate(self, prompt: Sequence[int], new: int) -> list[int]:
        """What the engine generates by itself."""
        return self._finish(self._add("alone", prompt, new))

    def _tables(self, request: str) -> dict[str, Blocks]:
        return {kind: Blocks(allocator.block_table[request]) for kind, allocator in self._allocators.items()}

    def prefill(self, request: str, prompt: Sequence[int]) -> Prefilled:
        """The first new token, and the handoff of the prompt, whose blocks stay for readers."""
        state = self._add(request, prompt, new=2)
        while not state.generated_tokens:
            self._step()
        handoff = self.exporter.finish(request, len(prompt), self._tables(request), digests_of(prompt))
        assert handoff is not None
        return state.generated_tokens[0], handoff.params(self.key)

    def free(self) -> tuple[str, ...]:
        """Free the blocks of requests whose leases have ended."""
        released = self.exporter.step().released
        for request in released:
            self._batches.scheduler.finish_request(request)
        return released

    def decode(
        self, request: str, prompt: Sequence[int], prefilled: Prefilled, new: int, left_out: str = ""
    ) -> list[int]:
        """The tokens that follow a prompt that was read, but its layers of the kind ``left_out``. Raises why not."""
        first, params = prefilled
        self._importer.claim(request, params, digests_of(prompt))
        self._batches.cache.cache_tensor.zero_()  # what this engine has generated itself is not to be found again
        state = self._add(request, [*prompt, first], new - 1, cached=len(prompt))
        assert self._batches.cache.can_store_request_tokens(RequestState(request, []), len(prompt))
        num_tokens = self._importer.count(request, 0, len(prompt))
        assert num_tokens is not None
        self._importer.read(request, self._tables(request), num_tokens)
        result = self._read()
        self._importer.end(request)
        if result.error is not None:
            self._batches.scheduler.finish_request(request)
            raise result.error
        if left_out:
            self._blocks_of(left_out)[self._allocators[left_out].block_table[request]] = 0
        return [first, *self._finish(state)]

    def _read(self) -> ReadResult:
        """Read what the importer says, until no byte can move any more."""
        for partial_read in self._importer.step():
            self._reads.submit(partial_read)
        (result,) = wait_until(self._reads.poll, TIMEOUT_S)
        return result


def serve(channel: Connection, model: str, page: int) -> None:
    """The prefill engine, in a process of its own: answer commands by its methods."""
    engine = Engine("prefill", model, page)
    while True:
        command, *arguments = channel.recv()
        channel.send(getattr(engine, command)(*arguments))
