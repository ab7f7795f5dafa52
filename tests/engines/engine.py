"""One vLLM engine in a process of its own, told what to do through a pipe."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.sampling_params import RequestOutputKind

import tests.engines.yielding.sitecustomize  # noqa: F401  # for this process, which is forked
from tests.engines import device
from tests.engines.flips import flip_bits
from tests.engines.hosts import Host, enter
from tests.engines.notes import Notes
from tests.engines.trainer import WeightsInFolder


def count_parts(connector: Any) -> list[str]:
    """Returns a list that gets the name of a request whenever a part of it is read that others follow."""
    names: list[str] = []
    if connector is not None:
        build = connector.build_connector_meta

        def build_counted(scheduled: Any) -> Any:
            step = build(scheduled)
            names.extend(read.request for read in getattr(step, "partial_reads", ()) if not read.is_last)
            return step

        connector.build_connector_meta = build_counted
    return names


def error_of(function: Callable[..., Any], *arguments: Any) -> str:
    """The error of a call, if there is one."""
    try:
        function(*arguments)
    except Exception as error:  # which the judge shows
        return f"{type(error).__name__}: {error}"
    return ""


def adapter_of(name: str, model: str) -> LoRARequest:
    """A LoRA adapter in the folder of its model."""
    return LoRARequest(name, int(name), f"{model}/adapter-{name}")


def overwrite_before_load(model: str) -> None:
    """Another adapter is written into the folder of adapter 3 just before vLLM loads it."""
    load = WorkerLoRAManager._load_adapter

    def load_adapter(manager: Any, lora_request: LoRARequest) -> Any:
        if lora_request.lora_name == "3":
            shutil.copytree(f"{model}/adapter-2", f"{model}/adapter-3", dirs_exist_ok=True)
        return load(manager, lora_request)

    WorkerLoRAManager._load_adapter = load_adapter


def reload(engine: LLMEngine, folder: str) -> None:
    """Loads other weights into a running engine, from a folder, whose name is that of the weights' version."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    engine.set_weight_version(folder.rpartition("/")[2])


def update(engine: LLMEngine, folder: str) -> None:
    """Updates weights as a trainer does, by vLLM's ``weight_transfer_config``."""
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"folder": folder}})
    engine.collective_rpc("finish_weight_update")
    engine.set_weight_version(folder.rpartition("/")[2])


def log_probs(output: Any) -> list[float] | None:
    """The log probability of each token of an answer, where a request asks for them."""
    if output.logprobs is None:
        return None
    return [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]


WEIGHTS = {"reload": reload, "update": update}
"""Ways to change the weights of a running engine."""


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
    overwrites = settings.pop("overwrites", False)
    WeightTransferEngineFactory.register_engine("folder", WeightsInFolder)
    config = EngineArgs(**settings).create_engine_config()
    # vLLM turns it off on a CPU, whatever the settings say.
    config.scheduler_config.async_scheduling = settings.get("async_scheduling", False)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    if overwrites:
        overwrite_before_load(settings["model"])
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
                name, prompt, max_tokens, transfer, adapter, salt, num_answers, more = arguments
                sampling = SamplingParams(
                    n=num_answers,
                    max_tokens=max_tokens,
                    temperature=0 if num_answers == 1 else 1,
                    seed=0,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"kv_transfer_params": transfer} if transfer else None,
                    **more,
                )
                tokens = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
                lora = adapter_of(adapter, settings["model"]) if adapter else None
                engine.add_request(name, tokens, sampling, lora_request=lora)
            elif verb == "abort":
                engine.abort_request(arguments)
            elif verb == "forget":
                engine.reset_prefix_cache(reset_connector=arguments[0])
            elif verb == "load":
                loaded = adapter_of(arguments[0], settings["model"])
                loaded.load_inplace = True
                engine.add_lora(loaded)
            elif verb == "unload":
                engine.remove_lora(adapter_of(arguments[0], settings["model"]).lora_int_id)
            elif verb == "version":
                engine.set_weight_version(*arguments)
            elif verb in WEIGHTS:
                pipe.send(("changed", error_of(WEIGHTS[verb], engine, *arguments)))
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
            answers = [([*each.token_ids], each.finish_reason, *of_all, log_probs(each)) for each in request.outputs]
            pipe.send(("done", request.request_id, *answers))
        if not scheduler.running:
            time.sleep(0.002)  # vLLM's own loop rests too where nothing runs
