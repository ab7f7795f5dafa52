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
from types import SimpleNamespace
from typing import Any

if __name__ == "__mp_main__":  # in a process that SGLang has started
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    # DP attention asks on a CPU how long a padded sequence is; intel_amx, which SGLang has for that, says the same.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1

    # On a CPU, SGLang looks up windows that have a pool of their own by slots of the other pool.
    def in_own_pool(forward: Any) -> Any:
        def wrapped(backend: Any, q: Any, k: Any, v: Any, layer: Any, *arguments: Any, **options: Any) -> Any:
            pool, requests = backend.token_to_kv_pool, backend.req_to_token_pool
            if backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
                slots = pool.translate_loc_from_full_to_swa(requests.req_to_token)
                backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
            try:
                return forward(backend, q, k, v, layer, *arguments, **options)
            finally:
                backend.req_to_token_pool = requests

        return wrapped

    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, in_own_pool(getattr(TorchNativeAttnBackend, name)))

    # HiCache calls a kernel of CUDA's between its host memory and the pools, and pins the one for the other.
    from sglang.srt.mem_cache.pool_host import common, mha, mla

    def copy_slots(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        for source, destination in zip(src_layers, dst_layers, strict=True):
            destination[dst_indices] = source[src_indices]

    mha.transfer_kv_direct = mla.transfer_kv_direct = copy_slots
    common._cuda_host_register = lambda buffer, granularity: None

STANDINS = Path(__file__).with_name("standins")

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": os.environ.get("SGLANG_HOST_IP", "127.0.0.1"),
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

    A request's ``transfer`` are its ``bootstrap_*`` parameters, and other fields of SGLang's own requests.
    """
    settings = {**SETTINGS, **settings}
    os.environ.update(ENVIRONMENT)
    if settings["tp_size"] * settings.get("pp_size", 1) > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    sys.path.insert(0, str(STANDINS))
    from sglang.srt.entrypoints.engine import Engine as Sglang
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine = Sglang(**settings)
    pipe.send(("ready",))

    async def answer(
        name: str, prompt: list[int], max_tokens: int, transfer: dict[str, Any] | None, *more: Any
    ) -> None:
        assert more == ("", "", 1, {}), "SGLang's own fields say what a request is besides"
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        fields = dict(transfer or {})
        sampling |= fields.pop("sampling_params", {})
        try:
            ask = {"rid": rid_of(name), "input_ids": prompt, "sampling_params": sampling, **fields}
            done = await engine.async_generate(**ask)
            facts = done["meta_info"]
            reason = facts["finish_reason"]["type"]
            log_probs = [facts.get(f"output_{of}_logprobs") for of in ("token", "top")]
            pipe.send(("done", name, (done["output_ids"], reason, None, facts["cached_tokens"], log_probs)))
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
                emptied = await engine.tokenizer_manager.flush_cache()
                pipe.send(("emptied", emptied.success))
            elif verb == "pause":
                await engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=arguments[0]))
            elif verb == "continue":
                going_on = ContinueGenerationReqInput(torch_empty_cache=False)
                await engine.tokenizer_manager.continue_generation(going_on)
            elif verb == "held":
                loads = await engine.tokenizer_manager.get_loads()
                num_requests = sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)
                num_requests += sum(load.disaggregation.prefill_inflight_queue_reqs for load in loads)
                pipe.send(("held", sum(load.num_used_tokens for load in loads), num_requests))

    engine.loop.run_until_complete(listen())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
