"""The manager: an object that SGLang makes in each rank, and asks about the rank's requests."""

from __future__ import annotations

import uuid
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import attrs
from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from kvplan import Worker
from kvplan.bridges import RankInfo
from kvplan.protocol import keeping
from kvplan_nixl.kernel import with_staging
from kvplan_nixl.mapped import make_executor
from kvplan_nixl.serving import Driver
from kvplan_nixl.sglang.bootstrap import BootstrapServer
from kvplan_nixl.sglang.decode import DecodeRank
from kvplan_nixl.sglang.description import attended_window, require, worker_of
from kvplan_nixl.sglang.identity import facts_of
from kvplan_nixl.sglang.prefill import PrefillRank
from kvplan_nixl.sglang.rank import PAGED_WITH_TOKENS, RankMemory, gather, logger
from kvplan_nixl.sglang.settings import settings_of

STATE_KINDS: Final = PAGED_WITH_TOKENS | {"swa", "mamba"}
"""The kinds of cache besides K and V or latents that are transferred, by SGLang's names."""

DRAFTING: Final = frozenset({"NONE", "NGRAM", "EAGLE", "EAGLE3", "STANDALONE"})
"""Algorithms of speculative decoding that are served, by SGLang's names."""

UNSERVED: Final = MappingProxyType(
    {
        "enable_hisparse": False,
        "enable_memory_saver": False,
        "enable_multi_layer_eagle": False,
        "enable_pd_role_switch": False,
        "enable_unified_memory": False,
        "disaggregation_decode_allocation_policy": "early",
        "disaggregation_enable_kv_checksum": False,
        "disaggregation_ib_device": None,
    }
)
"""Settings of SGLang that the plugin would ignore, or that move or lay out memory in other ways."""

UNSERVED_PARALLEL: Final = MappingProxyType(
    {
        "attn_dcp_size": 1,
        "enable_cp_tp_group_sharing": False,
        "enable_dsa_cache_layer_split": False,
        "enable_kv_cache_sharding": False,
    }
)
"""Settings of SGLang that divide positions, pages, layers or states among ranks in other ways."""


class Manager(BaseKVManager):
    """A rank as SGLang sees it. Its ``rank``, of prefill or decode, begins with :meth:`start`."""

    enable_deferred_decode_kv_release = True

    rank: PrefillRank | DecodeRank

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self._server_args = server_args
        self._is_prefill: bool = mode.value == "prefill"
        self._caches_prefixes = bool(
            getattr(server_args, "disaggregation_decode_enable_radix_cache", False)
        )
        self._timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        self._settings = settings_of()
        self.prefill_info_table: dict[str, Any] = {}

    def register_to_bootstrap(self) -> None:
        """SGLang calls this when it starts. A handoff says where the offers are."""

    def try_ensure_parallel_info(self, address: str) -> bool:
        """SGLang asks whether it knows a prefill engine's sizes. Its offers say them later."""
        self.prefill_info_table[address] = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
        return True

    def start(self, queue: Any) -> None:
        """Register the memory of a queue's pool, and begin as a rank of prefill or decode.

        Raises ``LAYOUT`` for an engine that the plugin does not serve.
        """
        for setting, expected in UNSERVED.items():
            require(setting, expected, getattr(self._server_args, setting, expected))
        variable = "SGLANG_DISAGG_STAGING_BUFFER"
        require(variable, False, getattr(envs, variable).get())
        parallel = get_parallel()
        for setting, size_or_switch in UNSERVED_PARALLEL.items():
            require(setting, size_or_switch, getattr(parallel, setting))
        # SGLang divides a prompt on prefill alone, and a draft's heads in another way then.
        if not self._is_prefill or queue.draft_token_to_kv_pool is not None:
            require("attn_cp_size", 1, parallel.attn_cp_size)
        algorithm = queue.scheduler.spec_algorithm.name
        if algorithm not in DRAFTING:
            require("speculative_algorithm", " or ".join(sorted(DRAFTING)), algorithm)
        if queue.draft_token_to_kv_pool is not None:
            # only the last stage would have the draft's cache
            require("pp_size", 1, parallel.pp_size)
        info = _rank_info(parallel)
        worker = self._describe(queue, info, parallel)
        windows = self._windows(queue, worker)
        # The next token attends to itself and to one position less than its window.
        kept = {group: window - 1 for group, window in windows.items() if window is not None}
        worker = keeping(worker, kept, whole_prompts=True)
        settings = self._settings
        access = settings.access()
        if settings.port:
            # The engines of DP listen side by side: replicas, or the ranks of DP attention, which
            # does not run inside replicas.
            dp_rank = (self.kv_args.system_dp_rank or 0) + parallel.attn_dp_rank
            settings = attrs.evolve(settings, port=settings.port + dp_rank)
        # Only a reader stages.
        worker, copier = with_staging(worker, 0 if self._is_prefill else settings.staging_bytes)
        memory = RankMemory(
            args=self.kv_args,
            info=info,
            stage=parallel.pp_rank,
            num_stages=parallel.pp_size,
            cp_rank=parallel.attn_cp_rank,
            windows=windows,
            executor=make_executor(
                worker,
                settings.backends,
                map_memory=settings.map_memory,
                logger=logger,
                key=access.key,
            ),
            key=access.key,
        )
        system = Driver(access)
        if self._is_prefill:
            self.rank = PrefillRank(memory, partial(gather, parallel), settings, system)
        else:
            self.rank = DecodeRank(memory, queue, copier, settings, self._timeout_s, system)
        logger.info("%s", worker)

    def _describe(self, queue: Any, info: RankInfo, parallel: Any) -> Worker:
        """Return the rank's worker. Raises ``LAYOUT`` for a cache with states of another kind."""
        kinds = [kind.value for kind in self.kv_args.state_types]
        require("state_types", [kind for kind in kinds if kind in STATE_KINDS], kinds)
        pool, draft_pool = queue.token_to_kv_pool, queue.draft_token_to_kv_pool
        scheduler = queue.scheduler
        draft_config = None
        if draft_pool is not None:
            # all runners of a draft have its configuration
            (_, draft_runner), *_ = scheduler.draft_worker.weight_update_runners()
            draft_config = draft_runner.model_config
        facts = facts_of(self._settings, has_draft_cache=draft_pool is not None)
        runner = scheduler.tp_worker.model_runner
        worker = worker_of(facts, info, pool, draft_pool, runner, draft_config, self._settings)
        require("num_groups", 1 + len(self._table_kinds()), len(worker.groups))
        # The page tables of prefill's stages may differ, and decode tells them apart by group.
        if self._is_prefill and parallel.pp_size > 1:
            return _with_own_groups(worker, parallel.pp_rank)
        return worker

    def _table_kinds(self) -> list[str]:
        """Return the kinds of states that have a separate block table."""
        kinds = [kind.value for kind in self.kv_args.state_types]
        return [kind for kind in kinds if kind not in PAGED_WITH_TOKENS]

    def _windows(self, queue: Any, worker: Worker) -> dict[str, int | None]:
        """Return the window of each token group, None of full attention.

        Prefill keeps what its scheduler says. Decode needs what its layers attend to, which may be
        less, unless its prefix cache takes all of that as valid for later requests.
        """
        scheduler = queue.scheduler
        token_group, *state_groups = (group.name for group in worker.groups)
        windows: dict[str, int | None] = {token_group: None}
        for group, kind in zip(state_groups, self._table_kinds(), strict=True):
            if kind == "swa":
                num_kept = scheduler.sliding_window_size
                if not self._is_prefill and not self._caches_prefixes:
                    attended = attended_window(scheduler.tp_worker.model_runner.model)
                    num_kept = min(num_kept, attended or num_kept)
                windows[group] = num_kept + 1
        if len(windows) > 1 and self.kv_args.page_size == 1:
            # SGLang's tree keeps one position of a window that no backend transfers.
            require("disaggregation_decode_enable_radix_cache", False, self._caches_prefixes)
        return windows

    def submit_prefill_recompute(self, *_: Any, **__: Any) -> None:
        """SGLang calls this for retracted requests, whose receivers have failed here."""

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        """Return whether no byte of a request can move any more."""
        self.rank.poll()
        return not self.rank.is_written(room)

    def clear_deferred_abort_state(self, room: int) -> None:
        """SGLang calls this when it frees an aborted request's pages. Nothing is kept of it."""


def serve_rooms(host: str, port: int) -> BootstrapServer:
    """Start the bootstrap server where SGLang says. It keeps rooms for as long as leases last."""
    settings = settings_of()
    return BootstrapServer(
        host, port, system=Driver(settings.access()), keep_s=2 * settings.lease_s
    )


def _rank_info(parallel: Any) -> RankInfo:
    """Return the rank among those with the same requests, which are one engine.

    Ranks of context parallelism have the same cache: each computes some of a prompt's tokens, and
    gathers K and V of the rest from the others, ``materialize_full_kv`` in sglang/srt/layers/cp.
    """
    rank_in_world = parallel.world_group.rank_in_group
    ranks = gather(parallel, rank_in_world)
    engine_id, *_ = gather(parallel, f"sglang-{uuid.uuid4().hex[:12]}")
    tp_group = parallel.attn_tp_group
    rank = ranks.index(rank_in_world)
    return RankInfo(engine_id, rank, tp_group.rank_in_group, tp_group.world_size)


def _with_own_groups(worker: Worker, stage: int) -> Worker:
    """Return a worker whose groups no other stage has: each stage has its own block tables."""
    groups = [attrs.evolve(group, name=f"{group.name}.pp{stage}") for group in worker.groups]
    views = [attrs.evolve(view, group=f"{view.group}.pp{stage}") for view in worker.views]
    return attrs.evolve(worker, groups=groups, views=views)
