"""One vLLM engine in a process of its own, told what to do through a pipe."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.sampling_params import RequestOutputKind

import tests.engines.yielding.sitecustomize  # noqa: F401  # for this process, which is forked
from tests.engines import device
from tests.engines.flips import flip_bits
from tests.engines.hosts import Host, enter
from tests.engines.notes import Notes


def count_parts(connector: Any) -> list[str]:
    """Returns a list that gets the name of a request whenever a part of it is read."""
    names: list[str] = []
    if connector is not None:
        build = connector.build_connector_meta

        def build_counted(scheduled: Any) -> Any:
            step = build(scheduled)
            names.extend(read.request for read in getattr(step, "parts", ()))
            return step

        connector.build_connector_meta = build_counted
    return names


def serve(
    pipe: Connection, settings: dict[str, Any], environment: dict[str, str], log: str, host: Host | None = None
) -> None:
    """Starts an engine, on a host, and steps it until its pipe closes: answers go back as each request finishes.

    The process leads a group of its own, so that killing the group ends the engine's workers too.
    """
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    if host is not None:
        enter(host)
    # vLLM 0.32's kernel for CPUs returns no state from inside a prompt. So chunks have to end where a state is cached.
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
    if "copies" in settings:
        device.install(settings.pop("copies"))
    notes = Notes()
    if settings.pop("stages", False):
        notes.install()
    config = EngineArgs(**settings).create_engine_config()
    # vLLM turns it off on a CPU, whatever the settings say.
    config.scheduler_config.async_scheduling = settings.get("async_scheduling", False)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    scheduler = engine.engine_core.engine_core.scheduler
    preempted: set[str] = set()
    flips: dict[str, int] = {}
    drafts: dict[str, list[list[int]]] = {}
    parts = count_parts(scheduler.connector)
    pipe.send(("ready",))
    while True:
        while pipe.poll():
            try:
                verb, *arguments = pipe.recv()
            except EOFError:
                return
            if verb == "add":
                name, prompt, max_tokens, transfer, adapter, salt, num_answers = arguments
                sampling = SamplingParams(
                    n=num_answers,
                    max_tokens=max_tokens,
                    temperature=0 if num_answers == 1 else 1,
                    seed=0,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"kv_transfer_params": transfer} if transfer else None,
                )
                tokens = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
                lora = None
                if adapter:
                    folder = f"{settings['model']}/adapter-{adapter}"
                    lora = LoRARequest(adapter, int(adapter), folder)
                engine.add_request(name, tokens, sampling, lora_request=lora)
            elif verb == "abort":
                engine.abort_request(arguments)
            elif verb == "forget":
                engine.reset_prefix_cache(reset_connector=arguments[0])
            elif verb == "held":
                pool = scheduler.kv_cache_manager.block_pool
                # One block is vLLM's null block, which is never free.
                pipe.send(("held", pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), len(scheduler.requests)))
            elif verb == "flip":
                flips = flip_bits(get_kv_transfer_group()._worker, *arguments)
            elif verb == "flips":
                pipe.send(("flips", flips))
            elif verb == "stages":
                pipe.send(("stages", dict(notes.times)))
            elif verb == "drafts":
                pipe.send(("drafts", drafts))
            elif verb == "parts":
                pipe.send(("parts", [name.partition("-")[0] for name in parts]))
            elif verb == "preempted":
                pipe.send(("preempted", [name.partition("-")[0] for name in preempted]))
        outputs = engine.step()
        preempted.update(name for name, request in scheduler.requests.items() if request.num_preemptions)
        for name, request in scheduler.requests.items():
            if request.spec_token_ids:
                drafts.setdefault(name.partition("-")[0], []).append([*request.spec_token_ids])
        for request in outputs:
            if not request.finished:
                continue
            of_all = (request.kv_transfer_params, request.num_cached_tokens)
            answers = [([*each.token_ids], each.finish_reason, *of_all) for each in request.outputs]
            pipe.send(("done", request.request_id, *answers))
        if not scheduler.running:
            time.sleep(0.002)  # vLLM's own loop rests too where nothing runs
