"""One engine as operators have it: a command line, a transfer configuration, a log.

A side of a command is ``KEY=VALUE,...``, or one of these, or a file that has one. What is taken
from it becomes keys; everything else is listed as not read.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.engines import CONNECTOR, SGLANG, VLLM, engine_named, with_defaults
from kvplan.models.options import EngineOptions, items_of

INTERLEAVE_FLAGS: Final = ("dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size")
"""They set one field each in vLLM, which takes the first unless it is 1 (vllm/config/vllm.py)."""

FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("tensor-parallel-size", "tp-size", "tp"), "tp"),
        **dict.fromkeys(("pipeline-parallel-size", "pp-size", "pp"), "pp"),
        **dict.fromkeys(("data-parallel-size", "dp-size", "dp"), "dp"),
        **dict.fromkeys(("decode-context-parallel-size", "dcp-size", "dcp"), "dcp"),
        **dict.fromkeys(("prefill-context-parallel-size", "pcp"), "pcp"),
        **dict.fromkeys(("block-size", "page-size"), "block"),
        **dict.fromkeys(("mamba-ssm-cache-dtype", "mamba-ssm-dtype"), "ssm"),
        **dict.fromkeys(INTERLEAVE_FLAGS, "interleave"),
        "kv-cache-dtype": "dtype",
        "num-gpu-blocks-override": "blocks",
    }
)
"""Keys by the options of vLLM and SGLang that say the same."""

MODEL_FLAGS: Final = ("model", "model-path", "model-tag")

LAYOUTS: Final = MappingProxyType(
    {
        **dict.fromkeys(("NHD", "0", "false"), "LBNHC"),
        **dict.fromkeys(("HND", "1", "true"), "LBHNC"),
    }
)
SETTINGS: Final = MappingProxyType(
    {
        "VLLM_KV_CACHE_LAYOUT": "layout",
        "VLLM_SSM_CONV_STATE_LAYOUT": "conv",
        "SGLANG_USE_HND_KVCACHE": "layout",
    }
)
"""Keys by the environment variables that set them; layouts may have words of their own."""

POOL: Final = (
    r"(?:GPU KV cache size:|max_total_num_tokens=|KV Cache is allocated. #tokens:) *([\d,]+)"
)
"""The tokens of a pool in a log of vLLM or SGLang."""


COMMAND: Final = r"(^|\s)--?[a-z]|\b(vllm|sglang) serve\b|vllm\.entrypoints|sglang\.launch_server"
"""What a command line has, and no list of keys."""

STRING: Final = r'"(?:[^"\\\n]|\\["\\/bfnrt])*"'
LIST: Final = rf"(?m)^[ \t-]*\w+:?[ \t]*(\[\s*{STRING}(?:\s*,\s*{STRING})*\s*\])"
"""Arguments as a list of strings after a key in YAML, or after an instruction in a Dockerfile."""


@attrs.frozen
class EngineInput:
    """One engine as it was given: its keys, and the engine and connector whose defaults count.

    ``tokens`` is the size of its pool if a log says so, ``weights`` its ``--dtype``. ``unread`` are
    options that were not used.
    """

    keys: str
    engine: str | None = None
    connector: str | None = None
    model: str | None = None
    tokens: int | None = None
    weights: str | None = None
    source: str | None = None
    unread: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, subject: str) -> EngineInput:
        """Read a side. Raises what :meth:`EngineOptions.parse` does, ``NAME`` or ``CONFIG``."""
        source = ""
        if "=" not in text and 0 < len(text) < 256 and Path(text).is_file():
            source = text
            text = Path(text).read_text(errors="replace")
        elif text.lstrip().startswith("{"):
            source = "its transfer configuration"
        elif re.search(COMMAND, text):
            source = "its command line"
        if not source:
            engine, keys = engine_named(text)
            EngineOptions.parse(keys, subject)
            return cls(keys, engine)
        side = _read(text, subject, source)
        EngineOptions.parse(side.keys, f"{subject}, {source},")
        return side

    def options(self, model: Model) -> EngineOptions:
        """Return the options for a model, with the defaults of the engine that is named."""
        keys = self.keys
        if self.weights and "dtype" not in items_of(keys) and "float8" not in model.dtype:
            keys = f"{keys},dtype={self.weights}"
        if self.engine is None:
            return EngineOptions.parse(keys, "a side")
        keys = with_defaults(model, self.engine, keys, self.connector or CONNECTOR)
        options = EngineOptions.parse(keys, self.engine)
        if self.tokens and options.blocks is None and options.block and model.groups == ("attn",):
            options = attrs.evolve(options, blocks=max(self.tokens // options.block, 1))
        return options

    def line(self, engine_id: str) -> str:
        """Return what was taken from an input that is no list of keys."""
        taken = [f"{self.engine}", self.keys.replace(",", ", ")]
        connector = f"connector {self.connector or f'{CONNECTOR} (assumed)'}"
        taken += [connector] if self.engine == VLLM else []
        taken += [f"weights in {self.weights}"] if self.weights else []
        taken += [f"a pool of {self.tokens:,} tokens"] if self.tokens else []
        unread = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        return f"{engine_id} by {self.source}: {', '.join(filter(None, taken))}{unread}"


def _read(text: str, subject: str, source: str) -> EngineInput:
    """Return what a command line, a transfer configuration or a log says of an engine."""
    flags = {} if text.lstrip().startswith("{") else _flags(text, subject)
    transfer = flags.pop("kv-transfer-config", None)
    if text.lstrip().startswith("{"):
        transfer = text
    is_sglang = re.search(r"sglang|server_args=|max_total_num_tokens", text) is not None
    pool = re.search(POOL, text)
    if not flags and transfer is None and pool is None:
        action = f"read {subject}"
        expected = "keys, or a command line, transfer configuration or log of vLLM or SGLang"
        raise KVPlanError("NAME", action, expected=expected, got=source)
    keys = {FLAGS[flag]: str(value) for flag, value in flags.items() if flag in FLAGS}
    model = next((flags[flag] for flag in MODEL_FLAGS if flag in flags), None)
    weights = str(flags.get("dtype", "auto"))
    interleave = [str(flags[flag]) for flag in INTERLEAVE_FLAGS if flag in flags]
    if interleave:
        keys["interleave"] = next((size for size in interleave if size != "1"), "1")
    # an attention rank of SGLang has the heads of tp divided by dp
    if flags.get("enable-dp-attention") is True and keys.get("dp", "").isdigit():
        keys["tp"] = str(max(int(keys.get("tp", "1")) // int(keys["dp"]), 1))
    for name, key in SETTINGS.items():
        found = re.search(rf"\b{name}\b\W+(?:value\W+)?(\w+)", text)
        if found:
            keys[key] = LAYOUTS.get(found[1], found[1])
    logged = re.search(r"KV cache layout ([LBHNC]{5})\b", text)
    if logged:
        keys["layout"] = logged[1]
    used = {*FLAGS, *MODEL_FLAGS, "dtype", "enable-dp-attention"}
    return EngineInput(
        ",".join(f"{key}={value}" for key, value in keys.items()),
        SGLANG if is_sglang else VLLM,
        None if transfer is None else _connector(f"{transfer}", subject),
        None if model is None else str(model),
        int(pool[1].replace(",", "")) if pool else None,
        None if weights == "auto" else weights,
        source,
        tuple(f"--{flag}" for flag in flags if flag not in used),
    )


def _flags(text: str, subject: str) -> dict[str, Any]:
    """Return the options of an engine by their names, without dashes in front."""
    vllm = re.search(r"non-default args: (\{.*\})", text)
    if vllm:
        return _logged_by_vllm(vllm[1], subject)
    sglang = re.search(r"server_args=ServerArgs\((.*)\)", text)
    return _logged_by_sglang(sglang[1]) if sglang else _on_command_line(text, subject)


def _logged_by_vllm(arguments: str, subject: str) -> dict[str, Any]:
    try:
        options = ast.literal_eval(arguments)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        action, got = f"read {subject}", "another text"
        expected = "non-default args as a dict of plain values"
        raise KVPlanError("NAME", action, expected=expected, got=got) from None
    return {key.replace("_", "-"): value for key, value in options.items()}


def _logged_by_sglang(arguments: str) -> dict[str, Any]:
    """Return the options that are read: SGLang logs all that it has, most of them defaults."""
    pairs = re.findall(r"\b(\w+)=('[^']*'|[^,]+)", arguments)
    values = {key.replace("_", "-"): value.strip("'") for key, value in pairs}
    return {key: values[key] for key in values if key in FLAGS or key in MODEL_FLAGS}


def _on_command_line(text: str, subject: str) -> dict[str, Any]:
    """Return the options of a command: the last of those that set the same, by any of its names.

    So do the parsers of vLLM and SGLang. Arguments without a command may be those of two engines,
    and are refused if they differ.
    """
    text = re.sub(LIST, lambda found: shlex.join(json.loads(found[1], strict=False)), text)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        action = f"read {subject}"
        raise KVPlanError("NAME", action, expected="closed quotes", got=f"{error}") from None
    starts = [index for index, word in enumerate(words) if _is_start(words, index, word)]
    if len(starts) > 1:
        got = f"{len(starts)} commands"
        raise KVPlanError("NAME", f"read {subject}", expected="one engine", got=got)
    first = starts[0] if starts else 0
    # where the keys of YAML are sorted, as by kubectl, arguments come before their command
    is_sorted = _has_options(words[:first]) and not _has_options(words[first:])
    words = words[:first] if is_sorted else words[first:]
    # a list in YAML may have a dash and an argument on each line
    words = [word for word in words if word not in ("-", "args:")]
    flags: dict[str, Any] = {}
    # charts have options without a command
    index = 0 if words and words[0].startswith("-") else 1
    if words[1:2] == ["serve"]:
        index = 2
        if words[2:3] and not words[2].startswith("-"):
            flags["model"] = words[2]
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"--?[a-z]", word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        has_value = index < len(words) and not re.match(r"--?[a-z]", words[index])
        if not equals and has_value:
            value = words[index]
            index += 1
        name = name.replace("_", "-")
        for same in [flag for flag in flags if _setting(flag) == _setting(name)]:
            earlier = flags.pop(same)
            if name in FLAGS and not starts and earlier != (value or True):
                got = f"--{same} {earlier} and --{name} {value}"
                raise KVPlanError("NAME", f"read {subject}", expected="one engine", got=got)
        flags[name] = value or True
    return flags


def _setting(flag: str) -> str:
    if flag in MODEL_FLAGS:
        return "model"
    return flag if flag in INTERLEAVE_FLAGS else FLAGS.get(flag, flag)


def _has_options(words: list[str]) -> bool:
    names = [word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")]
    return any(name.replace("_", "-") in FLAGS for name in names)


def _is_start(words: list[str], index: int, word: str) -> bool:
    is_serve = words[index + 1 : index + 2] == ["serve"] and word.endswith(("vllm", "sglang"))
    return is_serve or word.endswith(("vllm.entrypoints.openai.api_server", "sglang.launch_server"))


def _connector(transfer: str, subject: str) -> str:
    """Return the connector that a transfer configuration names, kvplan's by any of its names.

    A shell may have removed the quotes of JSON, so it is not parsed.
    """
    names: list[str] = re.findall(r"\bkv_connector\W+(\w+)", transfer)
    if not names:
        action = f"read the transfer configuration of {subject}"
        raise KVPlanError("CONFIG", action, expected="a kv_connector", got="none")
    if "kvplan_nixl" in transfer:
        return CONNECTOR
    return next((name for name in names if name != "MultiConnector"), names[0])
