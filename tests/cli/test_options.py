"""Engine options: what each key means, what is refused, and which model a name loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError, Model
from kvplan.cli.inputs import EngineInput
from kvplan.cli.model_files import load, quantize_model
from kvplan.cli.options import token_range
from kvplan.models.options import MAX_TOKENS, EngineOptions
from tests.conftest import Cli

ALL_KEYS = (
    "tp=4,pp=2,dp=7,dcp=3,pcp=5,interleave=6,block=7,layout=BLHNC,kv=axis,pad=8,blocks=9,conv=SD,stages=10+22,kernel=11,"
    "shared=1,scales=page,draft=qwen3-0.6b,dtype=float16,ssm=bfloat16"
)


def error_code(read: Callable[[str, str], object], text: str) -> str | None:
    """The code with which a text is refused, or ``None``."""
    try:
        read(text, "--option")
    except KVPlanError as error:
        return error.code
    return None


def test_every_key_is_read_and_written() -> None:
    """Each key sets its own field, there are no others, and the text of the options has all keys in their order."""
    expected = (4, 2, 7, 3, 5, 6, 7, "BLHNC", "axis", 8, 9, "SD", (10, 22), 11, True, "page", "qwen3-0.6b")
    options = EngineOptions(*expected, dtype="float16", ssm="bfloat16")
    assert EngineOptions.parse(ALL_KEYS, "--src") == options
    assert [item.partition("=")[0] for item in ALL_KEYS.split(",")] == [f.name for f in attrs.fields(EngineOptions)]
    assert str(EngineOptions.parse(ALL_KEYS, "--src")) == ALL_KEYS


def test_every_default() -> None:
    """Without keys an engine is one worker with blocks of 16 tokens, as Model.engine makes it by default."""
    defaults = (1, 1, 1, 1, 1, 1, 16, "LBHNC", "content", 0, None, "DS", None, None, False, "inline", None)
    assert EngineOptions.parse("", "--src") == EngineOptions(*defaults, dtype=None, ssm=None)
    assert str(EngineOptions()) == "tp=1"
    model = Model.shipped("granite-4.0-h-tiny")
    assert EngineOptions().engine(model, "e") == model.engine("e")


@given(
    st.builds(
        EngineOptions,
        tp=st.integers(1, 63),
        pad=st.integers(0, 9),
        layout=st.sampled_from(["LBHNC", "BLHNC"]),
        block=st.none() | st.integers(1, 99),
        stages=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
        shared=st.booleans(),
        draft=st.none() | st.sampled_from(Model.names()),
    )
)
def test_the_text_of_options_reads_back(options: EngineOptions) -> None:
    """The text of options is read as the same options."""
    assert EngineOptions.parse(str(options), "--src") == options


@given(st.text() | st.from_regex(r"[a-z]+=[\w٣²-]*(,[a-z]+=\w*)*", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Any text is read as options, or refused with a code; nothing else is raised."""
    assert error_code(EngineOptions.parse, text) in (None, "LAYOUT", "NAME", "TYPE", "RANGE")


@given(st.text(alphabet="0123456789:-٣ "))
def test_any_token_range_is_read_or_refused(text: str) -> None:
    """Any text is read as a range, or refused with a code."""
    assert error_code(token_range, text) in (None, "TYPE", "RANGE")


@given(st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS))
def test_a_range_that_is_read_is_in_order(start: int, stop: int) -> None:
    """A range is read if its start is at most its stop, else refused."""
    if start <= stop:
        assert token_range(f"{start}:{stop}", "--tokens") == (start, stop)
    else:
        assert error_code(token_range, f"{start}:{stop}") == "RANGE"


def test_an_empty_range_is_a_range() -> None:
    """A range may have no positions."""
    assert token_range("5:5", "--tokens") == (5, 5)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(("stages=1+", "TYPE"), ("stages=", "TYPE"), ("stages=0+4", "RANGE")),
        *(("shared=yes", "TYPE"), ("shared=2", "RANGE"), ("block=none", "TYPE"), ("kernel=0", "RANGE")),
        *(("tp=64,stages=" + "+".join(["1"] * 64), "RANGE"), ("tp=4096", "RANGE"), ("tp=4095", None)),
        *(("tp=1,tp=1", "NAME"), ("tpp=1", "LAYOUT"), ("TP=1", "LAYOUT"), ("tp=1,,pp=1", None)),
    ],
)
def test_what_no_engine_has_is_refused(text: str, code: str | None) -> None:
    """Stages are numbers of layers, flags are 1 or 0, and stages count towards the number of workers."""
    assert error_code(EngineOptions.parse, text) == code


@pytest.mark.parametrize("text", ["tp=", "tp=1.5", "tp=1_0", "tp=4 2", "tp=+4", "tp=٣"])
def test_only_decimal_digits_are_a_number(text: str) -> None:
    """Texts that Python's int() would accept are refused."""
    with pytest.raises(KVPlanError, match="TYPE: cannot read tp of --src"):
        EngineOptions.parse(text, "--src")


@pytest.mark.parametrize(
    "model, text, arguments",
    [
        ("llama-3.2-1b", "tp=2,pp=2,blocks=9", {"tp": 2, "pp": 2, "num_blocks": 9}),
        ("llama-3.2-1b", "stages=3+13", {"layers_per_stage": (3, 13)}),
        ("llama-3.2-1b", "tp=16,dcp=2,interleave=4", {"tp": 16, "dcp": 2, "interleave": 4}),
        (
            "llama-3.2-1b",
            "block=64,kernel=16,layout=LHBNC",
            {"tokens_per_block": 64, "kernel_tokens": 16, "layout": "LHBNC"},
        ),
        ("llama-3.2-1b", "kv=split,pad=256", {"kv": "split", "pad": 256}),
        ("falcon-mamba-7b", "conv=SD", {"conv_order": "SD"}),
        ("nemotron-3-nano-30b-a3b", "tp=4,block=auto,kv=split", {"tp": 4, "tokens_per_block": None, "kv": "split"}),
    ],
)
def test_every_key_reaches_the_engine(model: str, text: str, arguments: dict[str, Any]) -> None:
    """An engine is the one that Model.engine makes with the same arguments, and each key makes a difference."""
    loaded, items = Model.shipped(model), text.split(",")
    made = EngineOptions.parse(text, "--src").engine(loaded, "e")
    assert made == loaded.engine("e", **arguments)
    for item in items[1:]:
        others = ",".join(each for each in items if each != item)
        assert made != EngineOptions.parse(others, "--src").engine(loaded, "e")
    assert made != loaded.engine("e")


def test_scales_a_shared_pool_and_a_draft_reach_the_engine() -> None:
    """Keys that change the model do so: scales of quantized values, groups that share a pool, layers of a draft."""
    quantized = quantize_model(Model.shipped("llama-3.2-1b"), 8)
    (worker,) = EngineOptions.parse("scales=region", "--src").engine(quantized, "e")
    assert len(worker.regions) == 2 * 16
    (worker,) = EngineOptions.parse("shared=1", "--src").engine(Model.shipped("qwen3-next-80b"), "e")
    assert [group.name for group in worker.groups] == ["state", "state.1", "state.2", "attn"]
    assert len(worker.regions) == 12
    (worker,) = EngineOptions.parse("draft=qwen3-0.6b", "--src").engine(Model.shipped("llama-3.2-1b"), "e")
    assert len(worker.views) == 16 + 28


def test_a_pool_has_the_blocks_asked_for() -> None:
    """The number of blocks is the caller's, else that of the options, else 4096."""
    model, options = Model.shipped("llama-3.2-1b"), EngineOptions(blocks=9)
    pools = [options.engine(model, "e", 5), options.engine(model, "e"), EngineOptions().engine(model, "e")]
    assert [worker.views[0].num_blocks for (worker,) in pools] == [5, 9, 4096]


@pytest.mark.parametrize(
    ("sizes", "group"), [("layers=2,kv_heads=3,head_dim=40", None), ("layers=2,kv_heads=3,head_dim=40,window=64", 64)]
)
def test_a_model_of_sizes(sizes: str, group: int | None) -> None:
    """A model without a known file is given by its sizes."""
    model = load(sizes)
    assert [(dict(t.axes), t.window) for (t,) in model.layers] == [({"kv": 2, "head": 3, "dim": 40}, group)] * 2


@pytest.mark.parametrize(
    ("sizes", "code"),
    [
        ("layers=2,kv_heads=3", "CONFIG"),
        ("layers=2,kv_heads=3,head_dim=40,pp=3", "CONFIG"),
        ("layers=2,kv_heads=3,head_dim=40,heads=4", "CONFIG"),
        ("layers=2,kv_heads=x,head_dim=40", "TYPE"),
        ("layers=0,kv_heads=3,head_dim=40", "RANGE"),
    ],
)
def test_wrong_sizes_of_a_model(sizes: str, code: str) -> None:
    """A missing, an unknown and an unusable size are refused."""
    with pytest.raises(KVPlanError, match=f"^{code}: "):
        load(sizes)


def test_a_directory_has_a_configuration(tmp_path: Path) -> None:
    """MODEL can be the directory of a downloaded model."""
    keys = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 40}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert load(str(tmp_path)).layers == load("layers=2,kv_heads=3,head_dim=40").layers


def test_names_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shipped models if the cache is the same, else what was downloaded to this machine."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name, shipped in (
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("GPT-OSS-20B", "gpt-oss-20b"),
    ):
        assert load(name) == Model.shipped(shipped)
    for name in ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-14B", "a/b/qwen3-32b", "./qwen3-32b", "x" * 300):
        with pytest.raises(KVPlanError, match="CONFIG: cannot load a model"):
            load(name)
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-14B" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    keys = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 40}
    (folder / "config.json").write_text(json.dumps(keys))
    assert load("Qwen/Qwen3-14B").layers == load("layers=2,kv_heads=3,head_dim=40").layers


def test_a_file_of_an_unknown_type_is_read_like_another(tmp_path: Path) -> None:
    """--like names the type; keys of another cache, a known type and a refused one are still refused."""
    keys = {"model_type": "mine", "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 40}
    path = tmp_path / "config.json"

    def code(like: str, **more: Any) -> str | None:
        path.write_text(json.dumps({**keys, **more}))
        return error_code(lambda text, what: load(text, like=like), str(path))

    assert code("llama") is None
    assert load(str(path), like="llama").layers == load("layers=2,kv_heads=3,head_dim=40").layers
    assert code("llama", model_type="outer", text_config=keys) is None
    assert code("lama") == code("llama", num_attention_groups=1) == "CONFIG"
    assert code("llama", model_type="mistral") == code("llama", model_type="rwkv") == "CONFIG"


@pytest.mark.parametrize(
    "more",
    [
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"block_configs": [{"attention": {"n_heads_in_group": 1}}] * 2},
        {"cache_of_layer": ["full", "none"]},
        {"cache_of_layer": {"0": "full", "1": "none"}},
        {"cache_pattern": "M*"},
    ],
)
def test_a_file_of_an_unknown_type_may_not_hide_its_cache(tmp_path: Path, more: dict[str, Any]) -> None:
    """A size that is null, and a list of the layers that the known type does not read, are refused by their key."""
    keys = {"model_type": "mine", "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 40}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys | more))
    with pytest.raises(KVPlanError, match=f"CONFIG: .*'{next(iter(more))}'"):
        load(str(path), like="llama")


def test_only_a_file_of_an_unknown_type_is_read_like_another() -> None:
    """A shipped model and sizes say themselves what they cache."""
    for model in ("llama-3.1-8b", "layers=2,kv_heads=3,head_dim=40"):
        with pytest.raises(KVPlanError, match="CONFIG: cannot read a model like 'llama'"):
            load(model, like="llama")


@pytest.mark.parametrize("command", ["verify", "explain", "show", "advise", "models"])
def test_the_first_line_says_what_nobody_checked(cli: Cli, tmp_path: Path, command: str) -> None:
    """Each command begins with layers, KV heads, head dim and dtype, if they are those of another type."""
    keys = {"model_type": "mine", "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 40}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**keys, "hidden_size": 120, "torch_dtype": "float16"}))
    first, *_ = cli(command, str(path), "--like", "llama").out.replace("\n    ", " ").splitlines()
    assert first.startswith(f"assumed, not checked: {path} caches as a llama does")
    assert first.endswith("attn [kv 2, head 3, dim 40] float16 in 2 layers")


def test_a_model_of_a_file_has_its_name(tmp_path: Path) -> None:
    """Messages name the file, and rules of engines know its type."""
    path = tmp_path / "config.json"
    keys = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    path.write_text(json.dumps({"model_type": "gpt_oss", **keys}))
    model = load(str(path))
    assert (model.name, model.model_type) == (str(path), "gpt_oss")
    assert load("layers=2,kv_heads=3,head_dim=40").name == "layers=2,kv_heads=3,head_dim=40"


@pytest.mark.parametrize(
    ("model", "word", "num_bytes"),
    [
        ("deepseek-v3.2", "fp8", 656),
        ("deepseek-v3.2", "fp8_ds_mla", 656),
        ("deepseek-v3.2", "float8_e4m3fn", 576),
        ("deepseek-v3.2", "bfloat16", 1152),
        ("deepseek-v3", "fp8", 576),
        ("qwen3-8b", "fp8", 2048),
        ("qwen3-8b", "fp8_e5m2", 2048),
        ("qwen3-8b", "bf16", 4096),
        ("qwen3-8b", "fp16", 4096),
        ("qwen3-8b", "auto", 4096),
    ],
)
def test_words_of_engines_are_dtypes(model: str, word: str, num_bytes: int) -> None:
    """fp8 is one byte for a value, and rows of 656 bytes for a model with an indexer."""
    cached = EngineOptions.parse(f"dtype={word}", "a side").cached(Model.shipped(model))
    assert cached.tensor_bytes(tokens_per_block=1)[0]["attn"] == num_bytes


def test_engines_resolve_dtypes() -> None:
    """Sparse latents are rows of fp8 only if fp8 is asked for, by a setting or by the model's file."""
    sparse = Model.shipped("deepseek-v3.2")
    for engine in ("vllm", "sglang"):
        for keys, num_bytes in (("", 1152), (",dtype=auto", 1152), (",dtype=fp8", 656)):
            options = EngineInput.parse(f"{engine}{keys}", "--src").options(sparse)
            assert options.cached(sparse).tensor_bytes(tokens_per_block=1)[0]["attn"] == num_bytes
        stated = attrs.evolve(sparse, dtype="float8_e4m3fn")
        assert (
            EngineInput.parse(engine, "--src")
            .options(stated)
            .cached(stated)
            .tensor_bytes(tokens_per_block=1)[0]["attn"]
            == 656
        )


def test_a_rank_of_data_parallel_engines_is_an_engine() -> None:
    """A request is on one of them, also with spaces between keys."""
    model = Model.shipped("qwen3-0.6b")
    assert EngineOptions.parse("dp=4, tp=2", "--src").engine(model, "e") == EngineOptions(tp=2).engine(model, "e")


def test_rows_are_of_sparse_latents() -> None:
    """No other model has them."""
    options = EngineOptions.parse("dtype=fp8_ds_mla", "a side")
    with pytest.raises(KVPlanError, match=r"DTYPE: .*got 'fp8_ds_mla'"):
        options.cached(Model.shipped("qwen3-8b"))


def test_the_refusal_shows_what_to_type(tmp_path: Path) -> None:
    """An unknown type is no dead end."""
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    with pytest.raises(KVPlanError, match=r"--like llama.*layers=40,kv_heads=10,head_dim=128.*Views of Workers"):
        load(str(tmp_path))


def test_the_file_of_modelopt_is_read(tmp_path: Path) -> None:
    """It states the dtype of the cache, unless config.json has a quantization of its own, as in vLLM and SGLang."""
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    assert load(str(tmp_path)).dtype == load(str(tmp_path / "config.json")).dtype == "float8_e4m3fn"
    assert Model.from_config(sizes, quantization={}).dtype == "bfloat16"
    sizes["quantization_config"] = {"quant_method": "fp8"}
    assert Model.from_config(sizes, quantization=file).dtype == "bfloat16"
    with pytest.raises(KVPlanError, match="quantization of a model"):
        Model.from_config(sizes, quantization=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    ["non-default args: {'tensor_parallel_size': 2, 'x': <object>}", "non-default args: {" + "[" * 9999 + "}"],
)
def test_a_log_that_is_no_literal_is_refused(line: str) -> None:
    with pytest.raises(KVPlanError) as refused:
        EngineInput.parse(f"vllm serve {line}", "--src")
    assert refused.value.code == "NAME"


TRANSFER = '{"kv_connector":"NixlConnector","x":["a","b"]}'


@pytest.mark.parametrize(
    "text",
    [
        """command: ["vllm", "serve"]
        args: ["a/b", "--tensor-parallel-size", "4", "--block-size=32", "--kv-transfer-config", TRANSFER]
        """,
        """- args: ["serve",
            "a/b", "--tensor-parallel-size", "4",
            "--block-size=32"
            , "--kv-transfer-config", TRANSFER ]
          command: ["vllm"]
        """,
        """command: ["vllm", "serve"]
        args:
        - a/b
        - --tensor-parallel-size
        - "4"
        - --block-size=32
        - --kv-transfer-config
        - '{"kv_connector":"NixlConnector","x":["a","b"]}'
        """,
        """ENTRYPOINT ["vllm", "serve"]
        CMD ["a/b", "--tensor-parallel-size", "4", "--block-size=32", "--kv-transfer-config", TRANSFER]
        """,
    ],
)
def test_arguments_of_a_container_are_read(tmp_path: Path, text: str) -> None:
    """As lists in brackets or of lines, after a command of their own: all flags are taken, and JSON stays whole."""
    (tmp_path / "pod.yaml").write_text(text.replace("TRANSFER", json.dumps(TRANSFER)))
    side = EngineInput.parse(str(tmp_path / "pod.yaml"), "--src")
    assert (side.keys, side.connector, side.unread) == ("tp=4,block=32", "NixlConnector", ())
    assert side.model == (None if text.startswith("- args") else "a/b")


@pytest.mark.parametrize("options", ["--model a/b --tensor_parallel_size=4", "a/b --tp 4"])
def test_arguments_that_are_sorted_before_their_command_are_read(tmp_path: Path, options: str) -> None:
    """As kubectl prints them. What comes before a command that has options of its own is no argument of it."""
    lines = "".join(f"    - {word}\n" for word in options.split())
    command = "    command:\n    - vllm\n    - serve\n    image: vllm/vllm-openai:latest\n"
    (tmp_path / "pod.yaml").write_text(f"  containers:\n  - args:\n{lines}{command}")
    side = EngineInput.parse(str(tmp_path / "pod.yaml"), "--src")
    assert (side.keys, side.unread, side.model) == ("tp=4", (), "a/b" if "--model" in options else None)
    assert EngineInput.parse("run --tp 4 -- vllm serve a/b --pp 2", "--src").keys == "pp=2"


@pytest.mark.parametrize(
    "text, keys, model",
    [
        ("vllm serve a/b --tensor-parallel-size 8 -tp 4", "tp=4", "a/b"),
        ("vllm serve a/b -tp 4 -dp 2 --tensor_parallel_size=8", "dp=2,tp=8", "a/b"),
        ("vllm serve a/b --block-size 16 --block-size 32", "block=32", "a/b"),
        ("vllm serve a/b --model c/d", "", "c/d"),
        ("sglang serve --model-path a/b --tp 4 --tensor-parallel-size 8 --tp-size 2", "tp=2", "a/b"),
        ("sglang serve --model a/b --model-path c/d --page-size 64 --page-size 1", "block=1", "c/d"),
    ],
)
def test_the_last_of_options_that_set_the_same_wins(text: str, keys: str, model: str) -> None:
    """As in vLLM and SGLang, by whichever of its names."""
    side = EngineInput.parse(text, "--src")
    assert (side.keys, side.model, side.unread) == (keys, model, ())


@pytest.mark.parametrize("sizes", ["--cp {cp} --dcp {dcp}", "--dcp {dcp} --cp {cp}"])
@pytest.mark.parametrize("dcp, interleave", [(8, 8), (1, 4)])
def test_the_older_option_of_interleaving_wins_if_it_is_not_1(sizes: str, dcp: int, interleave: int) -> None:
    """vLLM has a field for each of the two options (adjust_dcp_kv_cache_interleave_size in vllm/config/vllm.py)."""
    options = sizes.format(cp=4, dcp=dcp).replace("cp ", "cp-kv-cache-interleave-size ", 2)
    assert EngineInput.parse(f"vllm serve a/b {options}", "--src").keys == f"interleave={interleave}"


@pytest.mark.parametrize("second", ["--tp-size 4", "-tp 4", "--tensor-parallel-size=4", "--tensor_parallel_size 4"])
def test_arguments_without_a_command_may_not_differ(second: str) -> None:
    """They may be those of two engines, by whichever name. A size that is said twice is one."""
    with pytest.raises(KVPlanError, match=r"^NAME: cannot read --src: expected one engine, got --tp 2 and --t.* 4"):
        EngineInput.parse(f"--tp 2 --pp 2 {second}", "--src")
    assert EngineInput.parse("--tp 4 --pp 2 " + second, "--src").keys == "pp=2,tp=4"


def test_a_long_word_of_a_log_is_read_at_once() -> None:
    side = EngineInput.parse(f"sglang serve server_args=ServerArgs(tp_size=2, {'a' * 30_000})", "--src")
    assert side.keys == "tp=2"
