"""The commands that README and the guides start engines with are taken by the engines' own parsers, and what they set
is taken by kvplan's settings. Most of them need GPUs, so no test here runs them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest

sys.path.append(str(Path(__file__).with_name("standins")))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvplan import KVPlanError
from kvplan.cli.inputs import EngineInput
from kvplan.models.options import items_of
from kvplan_nixl.settings import StoreSettings
from kvplan_nixl.vllm.settings import check_engine, settings_of
from kvplan_nixl.vllm.store_settings import store_settings_of

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(*program: str) -> list[Any]:
    """The arguments with which pages' shell blocks call a program, up to the end of the command."""
    return [
        pytest.param([*takewhile(lambda word: word not in ("\n", "&"), words[end:])], id=f"{page}:{number}")
        for page, number, words in blocks()
        for end in range(len(program), len(words) + 1)
        if words[end - len(program) : end] == [*program]
    ]


def blocks() -> Iterator[tuple[str, int, list[str]]]:
    """The page, the number and the words of each shell block. Ends of lines outside quotes are words."""
    for path in PAGES:
        texts = re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
        for number, text in enumerate(texts):
            lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="\n&;|")
            lexer.whitespace, lexer.whitespace_split = " \t", True
            yield str(path.relative_to(ROOT)), number, [*lexer]


def vllm_settings(arguments: list[str]) -> Any:
    """Kvplan's settings of a vLLM engine that is started with these arguments."""
    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(arguments)
    transfer = AsyncEngineArgs.from_cli_args(parsed).kv_transfer_config
    assert transfer is not None
    assert parsed.model_tag
    assert importlib.import_module(transfer.kv_connector_module_path).__getattr__(transfer.kv_connector)
    read = {"KvplanConnector": settings_of, "KvplanStore": store_settings_of}[transfer.kv_connector]
    return read(VllmConfig(kv_transfer_config=transfer))


def test_routed_experts_are_refused() -> None:
    """Decode would return those of its own tokens alone."""
    config = VllmConfig()
    check_engine(config)
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(KVPlanError, match="SETTING: cannot set enable_return_routed_experts"):
        check_engine(config)


@pytest.mark.parametrize("arguments", commands("vllm", "serve"))
def test_vllm_takes_its_commands(arguments: list[str]) -> None:
    """By the parser of ``vllm serve``."""
    vllm_settings(arguments)


def test_a_wrong_command_of_vllm_is_seen() -> None:
    """Of its own options, and of kvplan's."""
    with pytest.raises(SystemExit):
        vllm_settings(["model", "--blocks-of", "64"])
    text = {"kv_connector": "KvplanConnector", "kv_connector_module_path": "kvplan_nixl.vllm", "kv_role": "kv_both"}
    vllm_settings(["model", "--kv-transfer-config", json.dumps(text)])
    with pytest.raises(KVPlanError, match="SETTING"):
        vllm_settings(["model", "--kv-transfer-config", json.dumps({**text, "kv_connector_extra_config": {"x": 1}})])
    with pytest.raises(AttributeError, match="KvplanConector"):
        vllm_settings(["model", "--kv-transfer-config", json.dumps({**text, "kv_connector": "KvplanConector"})])


@pytest.mark.parametrize("arguments", commands("sglang", "serve"))
def test_sglang_takes_its_commands(arguments: list[str]) -> None:
    """By its parser of server arguments, with kvplan's plugin. Its further checks need the model's files."""
    server_args = pytest.importorskip("sglang.srt.server_args", reason="needs SGLang")
    importlib.import_module("kvplan_nixl.sglang").register()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    if parsed.disaggregation_transfer_backend == "kvplan":
        assert parsed.disaggregation_mode in ("prefill", "decode")
        return
    options = json.loads(parsed.hicache_storage_backend_extra_config)
    assert (options["module_path"], options["class_name"]) == ("kvplan_nixl.sglang", "KvplanStore")
    sglangs = {"backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold"}
    StoreSettings.read({name: value for name, value in options.items() if name not in sglangs}, "options")


@pytest.mark.parametrize(
    "module, arguments",
    [
        pytest.param(module, *command.values, id=f"{command.id} {module}")
        for module in ("kvplan_nixl.vllm.proxy", "kvplan_nixl.sglang.proxy")
        for command in commands("python", "-m", module)
    ],
)
def test_the_proxies_take_their_commands(module: str, arguments: list[str]) -> None:
    """By their own parsers, which check addresses too."""
    main: click.Command = importlib.import_module(module).main
    assert main.make_context(module, arguments).params["prefill"]


SIZES = [
    "--tensor-parallel-size 8 -tp 4 -tp 2",
    "--tensor_parallel_size=2 --tensor-parallel-size 8 -tp=4 --block-size 64 --block-size=32",
    "-tp 4 --tensor-parallel-size 8 -pp 2 --pipeline-parallel-size 1",
]


@pytest.mark.parametrize("options", SIZES)
def test_kvplan_reads_repeated_options_as_vllm_does(options: str) -> None:
    """The last one counts, whichever of its names it has."""
    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(["a/b", *options.split()])
    sizes = {"tp": parsed.tensor_parallel_size, "pp": parsed.pipeline_parallel_size, "block": parsed.block_size}
    read = items_of(EngineInput.parse(f"vllm serve a/b {options}", "--src").keys)
    assert read == {key: str(size) for key, size in sizes.items() if key in read}
    assert "tp" in read


@pytest.mark.parametrize(
    "options", ["--tp 4 --tensor-parallel-size 8 --tp-size 2", "--page-size 64 --tp=2 --page-size 1"]
)
def test_kvplan_reads_repeated_options_as_sglang_does(options: str) -> None:
    """The last one counts, whichever of its names it has."""
    server_args = pytest.importorskip("sglang.srt.server_args", reason="needs SGLang")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "a/b", "--model", "c/d", *options.split()])
    side = EngineInput.parse(f"sglang serve --model-path a/b --model c/d {options}", "--src")
    read = items_of(side.keys)
    sizes = {"tp": parsed.tp_size, "block": parsed.page_size}
    assert read == {key: str(size) for key, size in sizes.items() if key in read}
    assert "tp" in read
    assert side.model == parsed.model_path


def test_commands_are_found() -> None:
    """README's three among them, each whole."""
    found = {
        program: [param.values[0] for param in commands(*program.split()) if str(param.id).startswith("README")]
        for program in ("vllm serve", "python -m kvplan_nixl.vllm.proxy")
    }
    assert [arguments[-1][-1] for arguments in found["vllm serve"]] == ["}", "}"]
    assert [arguments[-2:] for arguments in found["python -m kvplan_nixl.vllm.proxy"]] == [["--port", "8000"]]
    assert len(commands("sglang", "serve")) > 3
