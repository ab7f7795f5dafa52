"""One SGLang engine in a process of its own, told what to do through a pipe as a vLLM engine is.

SGLang starts processes of its own, which load this module again: it must not load vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STANDINS = Path(__file__).with_name("standins")

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "PYTHONPATH": os.pathsep.join([str(STANDINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
}

SETTINGS = {
    "device": "cpu",
    "tp_size": 1,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "dtype": "float32",
    "max_total_tokens": 4096,
    "context_length": 512,
    "max_running_requests": 16,
    "mem_fraction_static": 0.1,
    "disable_radix_cache": True,
    "disaggregation_decode_retraction_backup": "cpu_tensor",  # the default one needs CUDA
    "log_level": "info",
}


def rid_of(name: str) -> str:
    """The name of a request to SGLang, which aborts all whose names begin with the one that is given."""
    return f"{name}-"


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """Starts an engine with SGLang's own settings, and answers requests until its pipe closes.

    A request's ``transfer`` are its ``bootstrap_*`` parameters.
    """
    settings = {**SETTINGS, **settings}
    os.environ.update(ENVIRONMENT)
    if settings["tp_size"] * settings.get("pp_size", 1) > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    sys.path.insert(0, str(STANDINS))
    from sglang.srt.entrypoints.engine import Engine as Sglang

    engine = Sglang(**settings)
    pipe.send(("ready",))

    async def answer(
        name: str, prompt: list[int], max_tokens: int, transfer: dict[str, Any] | None, *more: Any
    ) -> None:
        assert more == ("", "", 1), "no trial of SGLang has adapters, salts or several answers"
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        try:
            ask = {"rid": rid_of(name), "input_ids": prompt, "sampling_params": sampling, **(transfer or {})}
            done = await engine.async_generate(**ask)
            reason = done["meta_info"]["finish_reason"]["type"]
            pipe.send(("done", name, (done["output_ids"], reason, None, done["meta_info"]["cached_tokens"])))
        except Exception:  # an aborted request
            pipe.send(("done", name, ([], "error", None, 0)))

    async def listen() -> None:
        tasks = set()
        while True:
            try:
                verb, *arguments = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            if verb == "add":
                tasks.add(asyncio.create_task(answer(*arguments)))
            elif verb == "abort":
                for name in arguments:
                    engine.tokenizer_manager.abort_request(rid_of(name))
            elif verb == "forget":
                await engine.tokenizer_manager.flush_cache()
            elif verb == "held":
                (load,) = await engine.tokenizer_manager.get_loads()
                num_queued = load.num_waiting_reqs + load.disaggregation.prefill_inflight_queue_reqs
                pipe.send(("held", load.num_used_tokens, load.num_running_reqs + num_queued))

    engine.loop.run_until_complete(listen())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
