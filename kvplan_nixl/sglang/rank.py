"""Ranks: the memory and the requests of a rank, in what prefill and decode have in common.

A request of SGLang is in a *room*, a number that it has in both engines.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import torch

from kvplan import Blocks, KVPlanError
from kvplan.bridges import RankInfo
from kvplan.protocol import CacheGroup, SharedKey, System
from kvplan.protocol.system import TOKEN_BYTES
from kvplan_nixl import NixlExecutor

logger = logging.getLogger(f"sglang.{__name__}")

MIN_POLL_S: Final = 0.001
"""Seconds between two looks at what has ended, however many requests ask."""


PAGED_WITH_TOKENS: Final = frozenset({"dsa", "minimax_index_k", "minimax_dense_kv"})
"""States, by SGLang's names, whose pages are those of the tokens: index keys of sparse attention,
and K and V of layers without it."""


def gather(parallel: Any, value: Any) -> list[Any]:
    """Return the values that all ranks with the same requests as this one call it with.

    With DP attention SGLang's engine is several of them: each has requests and a cache of its own.
    """
    world = parallel.world_group
    values: list[Any] = [None] * world.world_size
    numbered = (parallel.attn_dp_rank, value)
    torch.distributed.all_gather_object(values, numbered, group=world.cpu_group)
    return [value for dp_rank, value in values if dp_rank == parallel.attn_dp_rank]


class MetadataRow(NamedTuple):
    """A request's row of a buffer in which SGLang keeps first tokens and what belongs to them."""

    address: int
    num_bytes: int


@attrs.frozen(eq=False)
class RankMemory:
    """A rank's memory, registered with NIXL, and which rank of its engine it is.

    ``args`` are SGLang's KVArgs. ``stage`` of ``num_stages`` is the pipeline stage. ``cp_rank`` is
    that of context parallelism. ``windows`` has the window of each token group, None of full
    attention. ``key`` is that of the engines.
    """

    args: Any
    info: RankInfo
    stage: int
    num_stages: int
    cp_rank: int
    windows: Mapping[str, int | None]
    executor: NixlExecutor
    key: SharedKey

    @property
    def groups(self) -> dict[str, CacheGroup]:
        """The cache groups: those of windows and positions, and those of states."""
        page_size = self.args.page_size
        return {
            group.name: CacheGroup.of_window(page_size, self.windows[group.name])
            if group.name in self.windows
            else CacheGroup(None)
            for group in self.executor.worker.groups
        }

    @property
    def is_first(self) -> bool:
        """Whether the rank is the first one of its engine."""
        return self.info.rank == 0

    @property
    def token_group(self) -> str:
        """The name of the group whose pages hold all positions."""
        return self.executor.worker.groups[0].name

    def token_tables(self, pages: Sequence[int], first: int = 0) -> dict[str, Blocks]:
        """Return block tables by group, of ``pages`` with the positions from ``first`` on.

        Those of windows and states are empty.
        """
        tables = {group.name: Blocks([]) for group in self.executor.worker.groups}
        tables[self.token_group] = Blocks(pages, first // self.args.page_size)
        return tables

    @property
    def is_first_of_stage(self) -> bool:
        """Whether the rank is the first one of its pipeline stage."""
        return self.info.tp_rank == 0 and self.cp_rank == 0

    def block_tables(
        self, pages: Sequence[int], first: int, num_tokens: int, state_ids: Sequence[Any]
    ) -> dict[str, Blocks]:
        """Return a request's block tables by group, of ``num_tokens`` positions.

        ``pages`` hold the positions from ``first`` on. ``state_ids`` has an array of pages or slots
        for each of the cache's states, as SGLang lists them.
        """
        _, *state_groups = (group.name for group in self.executor.worker.groups)
        # of the whole prompt, also if ``pages`` begin later
        num_pages = -(-num_tokens // self.args.page_size)
        tables = self.token_tables(pages, first)
        next_group = iter(state_groups)
        for kind, array in zip(self.args.state_types, state_ids, strict=True):
            if kind.value in PAGED_WITH_TOKENS:
                continue
            ids = np.asarray(array).tolist()
            # A window ends with the last page of the prompt.
            first_page = num_pages - len(ids) if kind.value == "swa" else 0
            tables[next(next_group)] = Blocks(ids, first_page)
        return tables

    def metadata_rows(self, index: int) -> list[MetadataRow]:
        """Return the rows of a request, one for each buffer."""
        rows = []
        for address, num_bytes in zip(
            self.args.aux_data_ptrs, self.args.aux_item_lens, strict=True
        ):
            rows.append(MetadataRow(address + index * num_bytes, num_bytes))
        return rows


class Rank(ABC):
    """The requests of a rank, in either role.

    ``ended`` has the error of each request that has ended, None if it has none, by the name under
    which it is read or exported. Each request takes out its own.
    """

    def __init__(self, memory: RankMemory, system: System) -> None:
        self.memory = memory
        self.system = system
        self.ended: dict[str, KVPlanError | None] = {}
        self._polled_at = 0.0

    def name_of(self, room: int) -> str:
        """Return a name for a request in a room, which may be used again."""
        return f"{room} {self.system.token_hex(TOKEN_BYTES)}"

    def poll(self) -> None:
        """Note which requests have ended, if that was not done just now."""
        now = self.system.monotonic()
        if now - self._polled_at >= MIN_POLL_S:
            self._polled_at = now
            self.memory.executor.discard_messages()
            self._note_ended()

    @abstractmethod
    def is_written(self, room: int) -> bool:
        """Return whether bytes may still move into the pages of a room's request."""

    @abstractmethod
    def _note_ended(self) -> None: ...
