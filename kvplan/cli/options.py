"""Options of an engine, and the arguments that commands share.

An engine is written as ``tp=4,block=16,layout=LBNHC`` on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs
import click

from kvplan._checks import integer
from kvplan._text import meant
from kvplan.bridges.assembly import FP8_DTYPES
from kvplan.cli.caches import cache_lines, caches_of
from kvplan.cli.completion import completed_keys, completed_models, completed_types
from kvplan.cli.console import wrapped
from kvplan.cli.defaults import (
    AUTO,
    ENGINES,
    ROW_WORDS,
    engine_of,
    stored_dtype,
    with_defaults,
)
from kvplan.cli.model_files import (
    BITS,
    ENGINE_IDS,
    MAX_TOKENS,
    MODEL_FORMS,
    EngineViews,
    load_engines,
    model_only,
    read_decimal,
)
from kvplan.describe import Worker
from kvplan.describe.views import ITEMSIZE
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.layouts import CONV_ORDERS, KV_FORMS, LETTERS, ORDERS
from kvplan.models.parallel import SCALES

MAX_WORKERS: Final = 4096
"""An engine has fewer workers than this."""

DEFAULT_NUM_BLOCKS: Final = 4096
"""The blocks of a pool for which neither the options nor a request say how many."""

MODEL_KEYS: Final = ("draft", "dtype", "ssm")
"""Keys of an engine that change the model it runs."""

ENGINES_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tp"),
        **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "pp"),
        **dict.fromkeys(("decode_context_parallel_size", "dcp_size"), "dcp"),
        "prefill_context_parallel_size": "pcp",
        **dict.fromkeys(("block_size", "page_size"), "block"),
        "kv_cache_dtype": "dtype",
        "mamba_ssm_cache_dtype": "ssm",
        **dict.fromkeys(("num_gpu_blocks", "num_gpu_blocks_override"), "blocks"),
    }
)
"""Our keys by the names of options of vLLM and SGLang."""

LAYOUTS: Final = f"{', '.join(ORDERS)}; vLLM's NHD is LBNHC, its HND is LBHNC"
KV_PLACES: Final = (
    "content (K beside V for each token and head), axis (K, then V, in each block and layer), "
    "split (separate regions)"
)


def token_range(text: str, subject: str) -> tuple[int, int]:
    """Return ``STOP`` or ``START:STOP`` as a half-open range of positions.

    >>> token_range("1000", "--tokens"), token_range("37:1000", "--tokens")
    ((0, 1000), (37, 1000))
    """
    start_text, colon, stop_text = text.rpartition(":")
    start = read_decimal(start_text, subject, 0, MAX_TOKENS + 1) if colon else 0
    return start, read_decimal(stop_text, subject, start, MAX_TOKENS + 1)


def _read_block(text: str, subject: str) -> int | None:
    return None if text == AUTO else read_decimal(text, subject, 1, MAX_TOKENS)


def _read_stages(text: str, subject: str) -> tuple[int, ...]:
    sizes = text.split("+", MAX_WORKERS)
    return tuple(read_decimal(num_layers, subject, 1, MAX_WORKERS) for num_layers in sizes)


def _read_flag(text: str, subject: str) -> bool:
    return bool(read_decimal(text, subject, 0, 2))


def _option(
    default: Any,
    about: str,
    reader: Callable[..., Any] = read_decimal,
    argument: str = "",
    **limits: int,
) -> Any:
    """Return a field whose text ``reader`` converts.

    ``about`` is its help, ``argument`` its name in :meth:`Model.engine`.
    """
    if default is not None:
        about += f" (default: {int(default) if isinstance(default, bool) else default})"
    # the help, the parser and the call of Model.engine read these
    metadata = {"reader": partial(reader, **limits), "about": about, "argument": argument}
    return attrs.field(default=default, metadata=metadata)


_size_option = partial(_option, 1, low=1, high=MAX_WORKERS)
_text_option = partial(_option, reader=lambda text, subject: text)


@attrs.frozen
class EngineOptions:
    """One engine: parallel sizes, block size and memory layout, as in :meth:`Model.engine`.

    ``block`` is in tokens; None (``auto``) is the size of a recurrent state. ``blocks`` None is
    enough for the request.

    >>> options = EngineOptions.parse("tp=4,layout=LBNHC,stages=10+22", "--src")
    >>> options.tp, options.stages, options.block, str(options)
    (4, (10, 22), 16, 'tp=4,layout=LBNHC,stages=10+22')
    """

    tp: int = _size_option("tensor-parallel size")
    pp: int = _size_option("pipeline-parallel size")
    dcp: int = _size_option("decode context-parallel size")
    pcp: int = _size_option("prefill context-parallel size")
    interleave: int = _option(
        1, "consecutive positions on one context-parallel rank", low=1, high=MAX_TOKENS
    )
    block: int | None = _option(
        16, f"tokens per block; {AUTO}: as a recurrent state", _read_block, "tokens_per_block"
    )
    layout: str = _text_option(
        "LBHNC", f"memory order, slowest dimension first ({LETTERS}): {LAYOUTS}"
    )
    kv: str = _text_option("content", f"where K and V are: {KV_PLACES}")
    pad: int = _option(0, "bytes of padding after each block", low=0, high=1 << 40)
    blocks: int | None = _option(
        None, "blocks in the pool", argument="num_blocks", low=1, high=1 << 31
    )
    conv: str = _text_option(
        "DS", "convolution state: DS (channel, step) or SD (step, channel)", argument="conv_order"
    )
    stages: tuple[int, ...] | None = _option(
        None, "layers per pipeline stage, such as 10+22", _read_stages, "layers_per_stage"
    )
    kernel: int | None = _option(
        None, "tokens per kernel block", argument="kernel_tokens", low=1, high=MAX_TOKENS
    )
    shared: bool = _option(
        False, "1: the KV cache groups of a hybrid model share one pool", _read_flag
    )
    scales: str = _text_option(
        "inline", "where scales of quantized K and V are: inline, page, region"
    )
    spread: bool = _option(
        False,
        "1: prefill context-parallel ranks hold different positions",
        _read_flag,
        "pcp_spreads",
    )
    draft: str | None = _text_option(None, "shipped model that drafts tokens")
    dtype: str | None = _text_option(
        None, "dtype of K and V, or latents, such as float8_e4m3fn, or an engine's word: fp8"
    )
    ssm: str | None = _text_option(None, "dtype of SSM states")

    @classmethod
    def parse(cls, text: str, subject: str) -> EngineOptions:
        """Return the options in comma-separated ``KEY=VALUE`` form; messages name the ``subject``.

        Raises ``LAYOUT`` for an unknown key, ``NAME`` for a repeated one, ``TYPE`` or ``RANGE`` for
        a bad number.
        """
        action = f"read {subject}"
        readers = {field.name: field.metadata["reader"] for field in attrs.fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            got = repr(key)
            if key not in readers:
                # a name that is close says more than all of them
                hint = meant(_own_key(key), [*readers, *ENGINES])
                expected = "a key of --help" if hint else f"keys of {', '.join(readers)}"
                raise KVPlanError("LAYOUT", action, expected=expected, got=got, hint=hint, key=key)
            if key in values:
                expected = "each key once"
                raise KVPlanError("NAME", action, expected=expected, got=f"{got} twice", key=key)
            values[key] = readers[key](value, f"{key} of {subject}")
        options = cls(**values)
        # pp or the list of stages says how many there are
        num_stages = max(options.pp, len(options.stages or ()))
        integer(
            options.tp * num_stages * options.pcp, f"tp * pp * pcp of {subject}", high=MAX_WORKERS
        )
        return options

    def title(self, model: Model | EngineViews) -> str:
        """Return the options, or that offers stand for them."""
        return "as offered" if isinstance(model, EngineViews) else str(self)

    def __str__(self) -> str:
        items = []
        for field in attrs.fields(EngineOptions):
            value = getattr(self, field.name)
            if value != field.default:
                items.append(f"{field.name}={_written(value)}")
        return ",".join(items) or "tp=1"

    def engine(
        self,
        model: Model | EngineViews,
        engine_id: str,
        num_blocks: int | None = None,
    ) -> tuple[Worker, ...]:
        """Return the engine's workers, each with a pool of ``num_blocks``.

        None: of ``blocks``, else of :data:`DEFAULT_NUM_BLOCKS`.
        """
        if isinstance(model, EngineViews):
            if self != EngineOptions():
                action = f"change engine {engine_id}"
                expected = "no keys, since offers say all"
                raise KVPlanError("LAYOUT", action, expected=expected, got=str(self))
            return model.workers[engine_id]
        model = self.served(model)
        # all options but the draft are arguments of Model.engine, some by another name
        arguments = {}
        for field in attrs.fields(EngineOptions):
            if field.name not in MODEL_KEYS:
                arguments[field.metadata["argument"] or field.name] = getattr(self, field.name)
        arguments["num_blocks"] = num_blocks or self.blocks or DEFAULT_NUM_BLOCKS
        return model.engine(engine_id, **arguments)

    def served(self, model: Model) -> Model:
        """Return a model as the engine serves it: its dtypes, draft layers and groups."""
        model = self.cached(model)
        # a draft model adds layers before groups are made of all
        if self.draft is not None:
            model = model.with_draft(Model.shipped(self.draft))
        return model.grouped() if self.shared else model

    def cached(self, model: Model) -> Model:
        """Return a model in the dtypes in which the engine caches it. Raises ``DTYPE``."""
        return model.with_dtypes(stored_dtype(model, self.dtype), self.ssm)


VALUES_OF_KEYS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        **{field.name: () for field in attrs.fields(EngineOptions)},
        "layout": ORDERS,
        "kv": KV_FORMS,
        "block": (AUTO,),
        "conv": CONV_ORDERS,
        "scales": SCALES,
        "draft": Model.names(),
        "dtype": tuple(dict.fromkeys((*ITEMSIZE, *FP8_DTYPES, *ROW_WORDS))),
        "ssm": tuple(ITEMSIZE),
    }
)
"""The values of each key of an engine that can be listed, for the completion of a shell."""


def _own_key(key: str) -> str:
    """Return the key for a name that :meth:`Model.engine`, vLLM or SGLang have for it.

    Any other text stays as it is.

    >>> _own_key("tokens_per_block"), _own_key("tensor-parallel-size"), _own_key("tpp")
    ('block', 'tp', 'tpp')
    """
    keys = {field.metadata["argument"]: field.name for field in attrs.fields(EngineOptions)}
    # options without an argument name have the empty text, which stands for nothing
    keys |= {"": "", **ENGINES_KEYS}
    return keys.get(key.replace("-", "_"), key)


def _written(value: Any) -> str:
    """Return a value in the form that :meth:`EngineOptions.parse` reads."""
    if value is None:
        return AUTO
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(int(value) if isinstance(value, bool) else value)


@attrs.frozen
class Engines:
    """Two engines as a command line names them: ``name`` is MODEL, ``model`` is what it means.

    A file of an unknown type was read as one of the type ``like``. ``named`` has the real engine of
    each side that names one.
    """

    name: str
    model: Model | EngineViews
    src: EngineOptions
    dst: EngineOptions
    like: str | None = None
    named: Mapping[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, {self.src.title(self.model)} -> {self.dst.title(self.model)}"

    def workers(self) -> tuple[tuple[Worker, ...], tuple[Worker, ...]]:
        """Return the workers of the source engine, and of the destination engine."""
        return self.src.engine(self.model, "src"), self.dst.engine(self.model, "dst")

    def assumed_lines(self) -> list[str]:
        """Return the first line of what is printed, if nobody checked what the model caches."""
        if isinstance(self.model, EngineViews):
            return []
        return wrapped(assumed_lines(self.name, self.model, self.like))

    def cache_lines(self) -> list[str]:
        """Return the lines of what both engines cache, or of each one if they differ.

        Offers have none.
        """
        if isinstance(self.model, EngineViews):
            return []
        source = self.src.cached(self.model)
        destination = self.dst.cached(self.model)
        if source == destination:
            lines = cache_lines(source)
        else:
            lines = cache_lines(source, "src") + cache_lines(destination, "dst")
        return wrapped(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        document = {"model": self.name, "src": str(self.src), "dst": str(self.dst)}
        return document if self.like is None else {**document, "assumed_like": self.like}


def assumed_lines(name: str, model: Model, like: str | None) -> list[str]:
    """Return the line that says what was assumed of a file of an unknown type, if it is of one."""
    if like is None:
        return []
    contents = "; ".join(map(str, caches_of(model)))
    return [f"assumed and checked by nobody: {name} caches as a {like} does, {contents}"]


Command = TypeVar("Command", bound=Callable[..., Any])


class EngineCommand(click.Command):
    """A command that takes :func:`engine_options`.

    Its help ends with the meaning of MODEL, and of the keys of an engine.
    """

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the end of the help."""
        formatter.write_paragraph()
        formatter.write_text(
            f"MODEL is a shipped name such as llama-3.1-8b, {MODEL_FORMS} (and window=4096, "
            "heads=40). For verify, explain and show, MODEL can be a file of offers, as "
            "'kvplan explain --json' prints them."
        )
        keys = [(field.name, field.metadata["about"]) for field in attrs.fields(EngineOptions)]
        formatter.write_paragraph()
        formatter.write_text(
            "--src vllm,tp=4 takes vLLM's defaults for all keys that it leaves out, --src sglang "
            "those of SGLang. Only the engine that a side names is asked whether it runs the side."
        )
        with formatter.section("Keys of --src and --dst"):
            formatter.write_dl(keys)


like_option = click.option(
    "--like",
    metavar="TYPE",
    shell_complete=completed_types,
    help="Read a config.json of an unknown model_type as one of TYPE.",
)
_bits = click.option(
    "--bits",
    type=click.Choice([str(bits) for bits in BITS]),
    help=(
        "Quantize K and V: 8 has a scale for each head of a token, "
        "4 has one for each 16 values (NVFP4)."
    ),
)
_engine = partial(
    click.option,
    default="",
    metavar="[vllm|sglang,]KEY=VALUE,...",
    callback=lambda context, option, text: _Side.parse(text, option.opts[0]),
    shell_complete=lambda context, option, text: completed_keys(VALUES_OF_KEYS, text),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def model_argument(command: Command) -> Command:
    """Add the argument MODEL and ``--like``."""
    return click.argument("model", shell_complete=completed_models)(like_option(command))


@attrs.frozen
class _Side:
    """The options of one engine, and the real engine whose defaults the text leaves out, if any."""

    options: EngineOptions
    keys: str
    engine: str | None

    @classmethod
    def parse(cls, text: str, subject: str) -> _Side:
        """Read ``KEY=VALUE,...``, maybe after the name of an engine. Raises what the keys do."""
        engine, keys = engine_of(text)
        return cls(EngineOptions.parse(keys, subject), keys, engine)

    def of_model(self, model: Model | EngineViews) -> EngineOptions:
        """Return the options for a model, with the defaults of the engine that is named."""
        if self.engine is None:
            return self.options
        whole = model_only(model, f"{self.engine}, by its defaults, and")
        return EngineOptions.parse(with_defaults(whole, self.engine, self.keys), self.engine)


def engine_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add MODEL, ``--like``, ``--src``, ``--dst`` and ``--bits``.

    The command gets all of them as its first argument, :class:`Engines`.
    """

    @wraps(command)
    def run(
        model: str,
        like: str | None,
        src: _Side,
        dst: _Side,
        bits: str | None,
        **options: Any,
    ) -> int:
        loaded = load_engines(model, bits, like)
        sides = zip(ENGINE_IDS, (src, dst), strict=True)
        named = {engine_id: side.engine for engine_id, side in sides if side.engine is not None}
        engines = Engines(model, loaded, src.of_model(loaded), dst.of_model(loaded), like, named)
        return command(engines, **options)

    run = _bits(run)
    run = _engine("--dst", help="The decode engine (destination).")(run)
    run = _engine("--src", help="The prefill engine (source).")(run)
    return model_argument(run)
