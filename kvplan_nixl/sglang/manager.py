"""The manager: what SGLang makes in each rank, and asks about all requests of it."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any, Final

import attrs
from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel, get_serving

from kvplan import KVPlanError, Model, Worker
from kvplan.bridges import RankInfo, from_sglang
from kvplan_nixl import NixlExecutor
from kvplan_nixl.rearrange import with_staging
from kvplan_nixl.settings import Settings
from kvplan_nixl.sglang.decode import DecodeRank
from kvplan_nixl.sglang.prefill import PrefillRank
from kvplan_nixl.sglang.rank import RankMemory, logger
from kvplan_nixl.sglang.settings import settings_of
from kvplan_nixl.weights import weights_of

STATE_KINDS: Final = frozenset({"swa", "mamba"})
"""The parts of a cache with block tables of their own that are transferred, by SGLang's names."""


class Manager(BaseKVManager):
    """A rank as SGLang sees it. Its ``rank``, of prefill or decode, begins with :meth:`start`."""

    enable_deferred_decode_kv_release = True

    rank: PrefillRank | DecodeRank

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self._is_prefill: bool = mode.value == "prefill"
        self._caches_prefixes = bool(
            getattr(server_args, "disaggregation_decode_enable_radix_cache", False)
        )
        self._timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        self._settings = settings_of()
        self.prefill_info_table: dict[str, Any] = {}

    def register_to_bootstrap(self) -> None:
        """Register nothing: a handoff says where the offers are."""

    def try_ensure_parallel_info(self, address: str) -> bool:
        """Return yes, whatever prefill's sizes are: its offers say them."""
        self.prefill_info_table[address] = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
        return True

    def start(self, queue: Any) -> None:
        """Register the memory of a queue's pool, and begin as a rank of prefill or decode.

        Raises ``LAYOUT`` for an engine that the plugin does not serve.
        """
        parallel = get_parallel()
        _require("attn_dcp_size", 1, parallel.attn_dcp_size)
        # CP and DP make the attention's TP smaller
        _require("attn_tp_size", parallel.tp_size, parallel.attn_tp_size)
        _require("draft_token_to_kv_pool", None, queue.draft_token_to_kv_pool)
        info = _rank_info(parallel)
        worker = self._describe(queue, info, parallel)
        windows = self._windows(queue, worker)
        settings = self._settings
        # Only a reader stages.
        worker, copier = with_staging(worker, 0 if self._is_prefill else settings.staging_bytes)
        memory = RankMemory(
            args=self.kv_args,
            info=info,
            stage=parallel.pp_rank,
            num_stages=parallel.pp_size,
            windows=windows,
            executor=NixlExecutor(worker, settings.backends, key=settings.key),
        )
        if self._is_prefill:
            self.rank = PrefillRank(memory, parallel.world_group, settings)
        else:
            self.rank = DecodeRank(memory, queue, copier, settings, self._timeout_s)
        logger.info("%s", worker)

    def _describe(self, queue: Any, info: RankInfo, parallel: Any) -> Worker:
        """Return the rank's worker. Raises ``LAYOUT`` for a cache with states of another kind."""
        kinds = self._state_kinds()
        _require("state_types", [kind for kind in kinds if kind in STATE_KINDS], kinds)
        pool = queue.token_to_kv_pool
        # a model with Mamba layers caches their states in a dtype of its own
        state_dtype = None
        if hasattr(pool, "mamba_pool"):
            state_dtype = pool.mamba_pool.mamba_cache.temporal.dtype
        model = _model(queue.scheduler.model_config, self._settings)
        model = model.with_dtypes(_dtype_name(pool.dtype), _dtype_name(state_dtype))
        worker = from_sglang(model, info, pool)
        _require("num_groups", 1 + len(kinds), len(worker.groups))
        # The page tables of prefill's stages may differ, and decode tells them apart by group.
        if self._is_prefill and parallel.pp_size > 1:
            return _with_own_groups(worker, parallel.pp_rank)
        return worker

    def _state_kinds(self) -> list[str]:
        return [kind.value for kind in self.kv_args.state_types]

    def _windows(self, queue: Any, worker: Worker) -> dict[str, int | None]:
        """Return the window of each token group, None of full attention."""
        token_group, *state_groups = (group.name for group in worker.groups)
        windows: dict[str, int | None] = {token_group: None}
        for group, kind in zip(state_groups, self._state_kinds(), strict=True):
            if kind == "swa":
                windows[group] = queue.scheduler.sliding_window_size + 1
        if len(windows) > 1 and self.kv_args.page_size == 1:
            # SGLang's tree keeps one position of a window that no backend transfers.
            _require("disaggregation_decode_enable_radix_cache", False, self._caches_prefixes)
        return windows

    def should_verify_kv_checksum(self, address: str) -> bool:
        """Return no: SGLang digests whole pages, and slots after a prompt are not transferred."""
        return False

    def submit_prefill_recompute(self, *_: Any, **__: Any) -> None:
        """Recompute nothing: receivers of retracted requests have failed."""

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        """Return whether no byte of a request can move any more."""
        self.rank.poll()
        return not self.rank.is_written(room)

    def clear_deferred_abort_state(self, room: int) -> None:
        """Clear nothing: no state of an abort is kept."""


def _rank_info(parallel: Any) -> RankInfo:
    """Return the place of this rank among all, which agree on an engine id."""
    ranks = parallel.world_group
    stage_ranks = parallel.attn_tp_group
    engine_id = f"sglang-{uuid.uuid4().hex[:12]}" if ranks.rank_in_group == 0 else None
    engine_id = ranks.broadcast_object(engine_id, src=0)
    tp_rank = stage_ranks.rank_in_group
    return RankInfo(engine_id, ranks.rank_in_group, tp_rank, stage_ranks.world_size)


def _model(config: Any, settings: Settings) -> Model:
    """Return the model by its files: SGLang writes into the configuration that it has read."""
    name = settings.model or get_serving().served_model_name
    fields, _ = config.hf_config.get_config_dict(config.model_path, revision=config.revision)
    weights = settings.weights or weights_of(config.model_path, config.revision)
    return Model.from_config(fields, f"{name}, weights {weights}")


def _dtype_name(dtype: Any) -> str | None:
    """Return the name of a dtype of torch, None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _with_own_groups(worker: Worker, stage: int) -> Worker:
    """Return a worker whose groups no other stage has: each stage has its own block tables."""
    groups = [attrs.evolve(group, name=f"{group.name}.pp{stage}") for group in worker.groups]
    views = [attrs.evolve(view, group=f"{view.group}.pp{stage}") for view in worker.views]
    return attrs.evolve(worker, groups=groups, views=views)


def _require(field: str, expected: Any, got: Any) -> None:
    """Refuse an engine that the plugin does not serve, by a field of SGLang's or of its worker."""
    if got != expected:
        raise KVPlanError(
            "LAYOUT",
            "serve this SGLang by kvplan",
            expected=f"{field} = {expected}",
            got=f"{got}",
            **{field: got},
        )
