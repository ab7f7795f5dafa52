"""The part of a rank that all its requests share: its memory, its peers, and what they have read."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.utils.network import get_local_ip_auto

from kvplan import KVPlanError, Model, Worker
from kvplan.bridges import RankInfo, from_sglang
from kvplan.connector import Claims, Leases, Listener, send_claims
from kvplan.connector.leases import LEASE_S
from kvplan_nixl import NixlExecutor
from kvplan_nixl.reads import make_reads
from kvplan_nixl.rearrange import with_staging
from kvplan_nixl.sglang.bootstrap import Rooms
from kvplan_nixl.weights import weights_of

logger = logging.getLogger(f"sglang.{__name__}")

POLL_S: Final = 0.001
"""Seconds between two looks at what has been read, however many requests ask."""

STAGING_BYTES: Final = 64 << 20
"""Bytes of a rank's staging region on decode."""

STATES: Final = frozenset({"swa", "mamba"})
"""The parts of a cache with block tables of their own that are transferred, by SGLang's names."""


class Manager(BaseKVManager):
    """A rank of prefill or decode. It begins when :meth:`start` is called."""

    enable_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.is_prefill: bool = mode.value == "prefill"
        self._caches_prefixes = bool(
            getattr(server_args, "disaggregation_decode_enable_radix_cache", False)
        )
        self.timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        self.prefill_info_table: dict[str, Any] = {}
        self._open_rooms: set[int] = set()

    def register_to_bootstrap(self) -> None:
        """Nothing is registered: a handoff says where the offers are."""

    def try_ensure_parallel_info(self, address: str) -> bool:
        """Whatever prefill's sizes are, its offers say it."""
        self.prefill_info_table[address] = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
        return True

    def start(self, queue: Any) -> None:
        """Register the memory of the pool of a queue; on decode, read; on prefill, serve what all ranks offer."""
        parallel = get_parallel()
        _check("attn_dcp_size", 1, parallel.attn_dcp_size)
        _check(
            "attn_tp_size", parallel.tp_size, parallel.attn_tp_size
        )  # which CP and DP make smaller
        _check("draft_token_to_kv_pool", None, queue.draft_token_to_kv_pool)
        group, tp = (
            parallel.world_group,
            parallel.attn_tp_group,
        )  # all ranks, and those of this stage
        self.stage, self.num_stages = parallel.pp_rank, parallel.pp_size
        self.is_first, self.is_first_of_stage = group.rank_in_group == 0, tp.rank_in_group == 0
        engine_id = group.broadcast_object(
            f"sglang-{uuid.uuid4().hex[:12]}" if self.is_first else None, src=0
        )
        info = RankInfo(engine_id, group.rank_in_group, tp.rank_in_group, tp.world_size)
        self.worker = self._worker(queue, info)
        kinds = [kind.value for kind in self.kv_args.state_types]
        windows = {
            group: queue.scheduler.sliding_window_size + 1
            for group, kind in zip(self.groups[1:], kinds, strict=True)
            if kind == "swa"
        }
        self.windows: dict[str, int | None] = {self.groups[0]: None, **windows}
        if windows and self.kv_args.page_size == 1:
            # SGLang's tree keeps one position of a window that no backend transfers.
            _check("disaggregation_decode_enable_radix_cache", False, self._caches_prefixes)
        self.metadata = queue.metadata_buffers
        key = os.environ.get("KVPLAN_KEY", "").encode()
        num_bytes = (
            0 if self.is_prefill else int(os.environ.get("KVPLAN_STAGING_BYTES", STAGING_BYTES))
        )
        self.worker, copier = with_staging(self.worker, num_bytes)
        self._executor = NixlExecutor(self.worker, key=key)
        if self.is_prefill:
            offers: list[bytes] = [b""] * group.world_size
            torch.distributed.all_gather_object(
                offers, self._executor.envelope(), group=group.cpu_group
            )
            self.leases = Leases(float(os.environ.get("KVPLAN_LEASE_S", LEASE_S)))
            host = os.environ.get("KVPLAN_HOST", get_local_ip_auto())
            bind = os.environ.get("KVPLAN_BIND", host)
            self.listener = (
                Listener(engine_id, host, offers, self.leases, bind=bind) if self.is_first else None
            )
            self.source = group.broadcast_object(self.listener and self.listener.source, src=0)
            self.publisher = ThreadPoolExecutor(1, "kvplan publish")
            self._num_refused = 0
        else:
            self.claims = Claims(logger, send_claims)
            self.reads = make_reads(self._executor, self.claims, logger, key=key, copier=copier)
            queue.transfer_queue.enable_deferred_kv_release = True
            queue.transfer_queue.deferred_kv_release_timeout = (
                math.inf
            )  # until the read has ended, however late
            self.rooms = Rooms(logger)
        self.ended: dict[str, KVPlanError | None] = {}
        self.under_way: dict[str, int] = {}  # the rooms of requests whose bytes may move
        self._polled = 0.0
        logger.info("%s", self.worker)

    def _worker(self, queue: Any, info: RankInfo) -> Worker:
        kinds = [kind.value for kind in self.kv_args.state_types]
        _check("state_types", [kind for kind in kinds if kind in STATES], kinds)
        pool, config = queue.token_to_kv_pool, queue.scheduler.model_config
        # SGLang writes into the configuration that it has read, so it is read once more.
        fields, _ = config.hf_config.get_config_dict(config.model_path, revision=config.revision)
        weights = os.environ.get("KVPLAN_WEIGHTS") or weights_of(config.model_path, config.revision)
        model = Model.from_config(fields, f"{get_serving().served_model_name}, weights {weights}")
        states = pool.mamba_pool.mamba_cache.temporal.dtype if hasattr(pool, "mamba_pool") else None
        dtypes = (dtype and str(dtype).removeprefix("torch.") for dtype in (pool.dtype, states))
        worker = from_sglang(model.with_dtypes(*dtypes), info, pool)
        _check("num_groups", 1 + len(kinds), len(worker.groups))
        if self.is_prefill and self.num_stages > 1:
            worker = _with_groups_of(worker, self.stage)
        self.groups = tuple(group.name for group in worker.groups)
        return worker

    def should_verify_kv_checksum(self, address: str) -> bool:
        """Answer no: SGLang digests whole pages, also the slots after a prompt, which are not transferred."""
        return False

    def submit_prefill_recompute(self, *_: Any, **__: Any) -> None:
        """Recompute nothing: receivers of retracted requests have failed."""

    def open_room(self, room: int) -> None:
        """Refuse a room that another request has now: SGLang gives all children of one with ``n`` > 1 the same one."""
        if room in self._open_rooms:
            expected = "a room of its own for each request"
            raise KVPlanError(
                "NAME",
                f"open room {room}",
                expected=expected,
                got="one in use",
                hint="ask for n = 1",
            )
        self._open_rooms.add(room)

    def close_room(self, room: int) -> None:
        """Let another request have a room."""
        self._open_rooms.discard(room)

    def poll(self) -> None:
        """See which reads of decode have ended, and which requests of prefill are read."""
        now = time.monotonic()
        if now - self._polled < POLL_S:
            return
        self._polled = now
        if self.is_prefill:
            ended = self.leases.take_ended()
            self.ended.update(dict.fromkeys(ended.done))
            for request in ended.late:
                expected = f"a reader that claims it within {self.leases.lease_s:g} s"
                self.ended[request] = KVPlanError(
                    "LEASE", f"lend {request!r}", expected=expected, got="none"
                )
            num_stale = self.leases.num_refused - self._num_refused
            if num_stale:
                self._num_refused += num_stale
                logger.error(
                    "%d claims came for leases that are over: their requests fail", num_stale
                )
            return
        for result in self.reads.poll():
            self.under_way.pop(result.request, None)
            self.ended[result.request] = result.error
        self.ended.update(self.reads.late())

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        """Whether no byte of a request can move any more."""
        self.poll()
        return room not in self.under_way.values()

    def clear_deferred_abort_state(self, room: int) -> None:
        """Nothing is kept of it."""


def _with_groups_of(worker: Worker, stage: int) -> Worker:
    """The worker with groups that no other stage has: each stage has block tables of its own."""
    groups = [attrs.evolve(group, name=f"{group.name}.pp{stage}") for group in worker.groups]
    views = [attrs.evolve(view, group=f"{view.group}.pp{stage}") for view in worker.views]
    return attrs.evolve(worker, groups=groups, views=views)


def _check(field: str, expected: Any, got: Any) -> None:
    """Refuse an engine that the plugin does not serve, by a field of SGLang's or of its worker."""
    if got != expected:
        action, details = "serve this SGLang by kvplan", {field: got}
        raise KVPlanError(
            "LAYOUT", action, expected=f"{field} = {expected}", got=f"{got}", **details
        )
