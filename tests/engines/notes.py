"""When each request of an engine comes to its next stage, noted by the connector's and the engine's own functions."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Notes:
    """When each request of an engine came to its next stage, by the process's own clock."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, float]] = defaultdict(dict)

    def note(self, request: str, stage: str, at: float | None = None) -> None:
        """Note that a request of vLLM came to a stage, the first time."""
        name = request.partition("-")[0]
        self.times[name].setdefault(stage, time.perf_counter() if at is None else at)

    def install(self) -> None:
        """Note what the connector's and the engine's functions do from now on."""
        from vllm import LLMEngine

        from kvplan.protocol import Reads
        from kvplan_nixl.vllm import KvplanConnector

        def before(owner: type, function: str, names: Callable[..., list[str]], stage: str) -> None:
            original = getattr(owner, function)

            @functools.wraps(original)
            def noted(*given: Any, **options: Any) -> Any:
                for name in names(*given, **options):
                    self.note(name, stage)
                return original(*given, **options)

            setattr(owner, function, noted)

        before(KvplanConnector, "on_new_request", lambda _, request: [request.request_id], "arrival")
        before(
            KvplanConnector,
            "update_state_after_alloc",
            lambda _, request, blocks, count: [request.request_id] if count else [],
            "queue",
        )
        before(Reads, "submit", lambda _, partial: [partial.request] if partial.read else [], "step")
        poll = Reads.poll
        step = LLMEngine.step

        def noted_poll(reads: Reads) -> Any:
            results = poll(reads)
            for result in results:
                now = time.perf_counter()
                began_at = now - result.seconds
                self.note(result.request, "post", began_at + result.post_seconds)
                self.note(result.request, "bytes", began_at + result.transfer_seconds)
                self.note(result.request, "lease", now)
            return results

        def noted_step(engine: LLMEngine) -> Any:
            outputs = step(engine)
            for output in outputs:
                self.note(output.request_id, "first token")
            return outputs

        Reads.poll = noted_poll  # type: ignore[assignment, method-assign]
        LLMEngine.step = noted_step  # type: ignore[method-assign]
