"""What the commands have in common: the options of an engine, the model that it runs, JSON output and consoles.

An engine is written as ``tp=4,block=16,layout=LBNHC`` on the command line.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs
import click
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from kvplan._checks import integer
from kvplan._text import WIDTH, meant
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.handshake import decode
from kvplan.models import Model
from kvplan.models.layouts import LETTERS, ORDERS

MAX_WORKERS: Final = 4096
"""An engine has fewer workers than this."""

MAX_TOKENS: Final = 1 << 24
"""The last position of a request, plus one, is at most this."""

POOL: Final = 4096
"""Blocks in the pool of an engine for which neither the options nor a request say how many."""

AUTO: Final = "auto"
"""The value of ``block`` that makes a block of attention as large as a recurrent state."""

BITS: Final[Mapping[int, tuple[Any, ...]]] = MappingProxyType(
    {8: (8,), 4: (4, "float8_e4m3fn", 16)}
)
"""Arguments of :meth:`Model.quantized` for each value of ``--bits``: 8 bits, and NVFP4."""

MODEL: Final = "a config.json or its directory, or sizes: layers=40,kv_heads=10,head_dim=128 (and window=4096, heads=40)"
"""What MODEL is on the command line, beside a shipped name."""

LAYOUTS: Final = f"{', '.join(ORDERS)}; vLLM's NHD is LBNHC, its HND is LBHNC"
KV_PLACES: Final = "content (K beside V for each token and head), axis (K, then V, in each block and layer), split (separate regions)"


def in_bits(model: Model, bits: int) -> Model:
    """The model with K and V quantized to ``bits``, a key of :data:`BITS`."""
    return model.quantized(*BITS[bits])


@attrs.frozen
class EngineViews:
    """The workers of two engines, ``src`` and ``dst``, from a file of their offers: of a model that kvplan cannot read.

    ``kvplan explain --json`` writes such a file.
    """

    workers: Mapping[str, tuple[Worker, ...]]

    @classmethod
    def of(cls, offers: Any) -> EngineViews:
        """From the offers by engine. Raises ``CONFIG`` if there are none of one engine, and what ``decode`` raises."""
        if not isinstance(offers, dict) or not all(
            isinstance(offers.get(key), list) for key in ("src", "dst")
        ):
            expected = "a list of offers for each of src and dst"
            raise KVPlanError(
                "CONFIG", "load offers", expected=expected, got=f"{type(offers).__name__}"
            )
        return cls(
            {
                key: tuple(decode(json.dumps(offer).encode()) for offer in offers[key])
                for key in ("src", "dst")
            }
        )


def load(model: str, bits: str | None = None, like: str | None = None) -> Model:
    """The model of a shipped name, of the path of a config.json or its directory, or of sizes. Raises ``CONFIG``.

    ``bits`` quantizes it. ``like`` is the type as which a file of an unknown type is read.

    >>> print(load("layers=40,kv_heads=10,head_dim=128,window=4096"))
    mistral: 40 layers, bfloat16, groups attn
    """
    return model_only(load_engines(model, bits, like), model)


def model_only(found: Model | EngineViews, name: str) -> Model:
    """``found``, which must be a model. Raises ``CONFIG`` for offers."""
    if isinstance(found, EngineViews):
        expected = "a model, since this command changes its engines"
        raise KVPlanError(
            "CONFIG", "load a model", expected=expected, got=f"{name!r}: offers", model=name
        )
    return found


def load_engines(
    model: str, bits: str | None = None, like: str | None = None
) -> Model | EngineViews:
    """The model, or the engines in a file with the key ``offers``, which don't take ``bits``."""
    if bits is not None:
        return in_bits(load(model, None, like), int(bits))
    if model in Model.names():
        return Model.shipped(model)
    if "=" in model and not Path(model).exists():
        return _sized(model)
    path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
    try:
        config = json.loads(path.read_bytes())
        if isinstance(config, dict) and "offers" in config:
            return EngineViews.of(config["offers"])
        return Model.from_config(config, like=like)
    except KVPlanError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if missing else getattr(error, "strerror", None) or str(error)
    got, hint = f"{model!r}: {reason}", ""
    if missing and not model.endswith(".json"):  # it may be a name
        got = got if "/" in model else repr(model)
        hint = f"{meant(model.rpartition('/')[2], Model.names())} 'kvplan --help' lists all".strip()
    expected = f"the name of a shipped model, {MODEL}"
    raise KVPlanError("CONFIG", "load a model", expected=expected, got=got, hint=hint, model=model)


def _sized(text: str) -> Model:
    """A model that keeps K and V of each head, of its sizes. The number of query ``heads`` is only for engines."""
    keys = {
        "layers": "num_hidden_layers",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
    }
    optional = {"window": "sliding_window", "heads": "num_attention_heads"}
    given = dict(item.partition("=")[::2] for item in text.split(","))
    if not {*keys} <= {*given} <= {*keys, *optional}:
        expected = f"each of {', '.join(keys)}, and maybe {' and '.join(optional)}"
        got = ", ".join(given)
        raise KVPlanError(
            "CONFIG", "read the sizes of a model", expected=expected, got=got, model=text
        )
    keys |= optional
    sizes = {
        keys[key]: decimal(value, f"{key} of the model", 1, MAX_TOKENS)
        for key, value in given.items()
    }
    return Model.from_config({"model_type": "mistral" if "window" in given else "llama", **sizes})


def decimal(text: str, what: str, low: int, high: int) -> int:
    """The integer in ``[low, high)`` that ``text`` writes in ASCII digits. Raises ``TYPE`` or ``RANGE``."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise KVPlanError(
            "TYPE",
            f"read {what}",
            expected="an integer in decimal digits",
            got=repr(text),
            value=text,
        )
    return integer(int(text), what, low=low, high=high)


def token_range(text: str, what: str) -> tuple[int, int]:
    """``STOP`` or ``START:STOP`` as a half-open range of positions.

    >>> token_range("1000", "--tokens"), token_range("37:1000", "--tokens")
    ((0, 1000), (37, 1000))
    """
    start, colon, stop = text.rpartition(":")
    first = decimal(start, what, 0, MAX_TOKENS + 1) if colon else 0
    return first, decimal(stop, what, first, MAX_TOKENS + 1)


def _block(text: str, what: str) -> int | None:
    return None if text == AUTO else decimal(text, what, 1, MAX_TOKENS)


def _stages(text: str, what: str) -> tuple[int, ...]:
    return tuple(decimal(layers, what, 1, MAX_WORKERS) for layers in text.split("+", MAX_WORKERS))


def _flag(text: str, what: str) -> bool:
    return bool(decimal(text, what, 0, 2))


def _key(
    default: Any,
    about: str,
    reader: Callable[..., Any] = decimal,
    argument: str = "",
    **limits: int,
) -> Any:
    """A field: ``reader`` converts its text, ``about`` is its help, ``argument`` its name in :meth:`Model.engine`."""
    about += (
        f" (default: {int(default) if isinstance(default, bool) else default})"
        if default is not None
        else ""
    )
    metadata = {"reader": partial(reader, **limits), "about": about, "argument": argument}
    return attrs.field(default=default, metadata=metadata)


_size = partial(_key, 1, low=1, high=MAX_WORKERS)
_word = partial(_key, reader=lambda text, what: text)


@attrs.frozen
class EngineOptions:
    """One engine: parallel sizes, block size and memory layout, as arguments of :meth:`Model.engine`.

    ``block`` is in tokens; None (``auto``) is the size of a recurrent state. ``blocks`` None is enough for the request.

    >>> options = EngineOptions.parse("tp=4,layout=LBNHC,stages=10+22", "--src")
    >>> options.tp, options.stages, options.block, str(options)
    (4, (10, 22), 16, 'tp=4,layout=LBNHC,stages=10+22')
    """

    tp: int = _size("tensor-parallel size")
    pp: int = _size("pipeline-parallel size")
    dcp: int = _size("decode context-parallel size")
    pcp: int = _size("prefill context-parallel size")
    interleave: int = _key(
        1, "consecutive positions on one context-parallel rank", low=1, high=MAX_TOKENS
    )
    block: int | None = _key(
        16, f"tokens per block; {AUTO}: as a recurrent state", _block, "tokens_per_block"
    )
    layout: str = _word("LBHNC", f"memory order, slowest dimension first ({LETTERS}): {LAYOUTS}")
    kv: str = _word("content", f"where K and V are: {KV_PLACES}")
    pad: int = _key(0, "bytes of padding after each block", low=0, high=1 << 40)
    blocks: int | None = _key(
        None, "blocks in the pool", argument="num_blocks", low=1, high=1 << 31
    )
    conv: str = _word(
        "DS", "convolution state: DS (channel, step) or SD (step, channel)", argument="conv_order"
    )
    stages: tuple[int, ...] | None = _key(
        None, "layers per pipeline stage, such as 10+22", _stages, "layers_per_stage"
    )
    kernel: int | None = _key(
        None, "tokens per kernel block", argument="kernel_tokens", low=1, high=MAX_TOKENS
    )
    shared: bool = _key(False, "1: the KV cache groups of a hybrid model share one pool", _flag)
    scales: str = _word("inline", "where scales of quantized K and V are: inline, page, region")
    spread: bool = _key(
        False, "1: prefill context-parallel ranks hold different positions", _flag, "pcp_spreads"
    )
    draft: str | None = _word(None, "shipped model that drafts tokens")

    @classmethod
    def parse(cls, text: str, what: str) -> EngineOptions:
        """The options in comma-separated ``KEY=VALUE`` form; messages call them ``what``.

        Raises ``LAYOUT`` for an unknown key, ``NAME`` for a repeated one, ``TYPE`` or ``RANGE`` for a bad number.
        """
        readers = {field.name: field.metadata["reader"] for field in attrs.fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in readers:
                expected, hint = f"keys of {', '.join(readers)}", meant(_short(key), readers)
                raise KVPlanError(
                    "LAYOUT", f"read {what}", expected=expected, got=repr(key), hint=hint, key=key
                )
            if key in values:
                raise KVPlanError(
                    "NAME", f"read {what}", expected="each key once", got=f"{key!r} twice", key=key
                )
            values[key] = readers[key](value, f"{key} of {what}")
        options = cls(**values)
        stages = options.pp if options.stages is None else max(options.pp, len(options.stages))
        integer(options.tp * stages * options.pcp, f"tp * pp * pcp of {what}", high=MAX_WORKERS)
        return options

    def title(self, model: Model | EngineViews) -> str:
        """The options, or that offers stand for them."""
        return "as offered" if isinstance(model, EngineViews) else str(self)

    def __str__(self) -> str:
        given = attrs.asdict(
            self, recurse=False, filter=lambda field, value: value != field.default
        )
        return ",".join(f"{key}={_text(value)}" for key, value in given.items()) or "tp=1"

    def engine(
        self, model: Model | EngineViews, engine_id: str, num_blocks: int | None = None
    ) -> tuple[Worker, ...]:
        """The engine's workers, each with a pool of ``num_blocks``; None: of ``blocks``, else :data:`POOL`."""
        if isinstance(model, EngineViews):
            if self != EngineOptions():
                what, expected = f"change engine {engine_id}", "no keys, since offers say all"
                raise KVPlanError("LAYOUT", what, expected=expected, got=str(self))
            return model.workers[engine_id]
        if self.draft is not None:
            model = model.with_draft(Model.shipped(self.draft))
        if self.shared:
            model = model.grouped()
        fields = [field for field in attrs.fields(EngineOptions) if field.name != "draft"]
        arguments = {
            field.metadata["argument"] or field.name: getattr(self, field.name) for field in fields
        }
        return model.engine(
            engine_id, **arguments | {"num_blocks": num_blocks or self.blocks or POOL}
        )


def _short(key: str) -> str:
    """The key for what :meth:`Model.engine`, vLLM or SGLang call by another name; any other text as it is.

    >>> _short("tokens_per_block"), _short("page_size"), _short("tpp")
    ('block', 'block', 'tpp')
    """
    arguments = {field.metadata["argument"]: field.name for field in attrs.fields(EngineOptions)}
    return {**arguments, "": "", "block_size": "block", "page_size": "block"}.get(key, key)


def _text(value: Any) -> str:
    """``value`` in the form that :meth:`EngineOptions.parse` reads."""
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return AUTO if value is None else str(int(value) if isinstance(value, bool) else value)


@attrs.frozen
class Engines:
    """Two engines as a command is given them: ``name`` is MODEL, ``model`` what it stands for."""

    name: str
    model: Model | EngineViews
    src: EngineOptions
    dst: EngineOptions

    def __str__(self) -> str:
        return f"{self.name}, {self.src.title(self.model)} -> {self.dst.title(self.model)}"

    def workers(self) -> tuple[tuple[Worker, ...], tuple[Worker, ...]]:
        """The workers of the source engine, and of the destination engine."""
        return self.src.engine(self.model, "src"), self.dst.engine(self.model, "dst")

    def to_json(self) -> dict[str, str]:
        """As plain data."""
        return {"model": self.name, "src": str(self.src), "dst": str(self.dst)}


Command = TypeVar("Command", bound=Callable[..., Any])


class EngineCommand(click.Command):
    """A command that takes :func:`engine_options`: its help ends with what MODEL and the keys of an engine mean."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the end of the help."""
        formatter.write_paragraph()
        offers = "For verify, explain and show, MODEL can be a file of offers, as 'kvplan explain --json' prints them."
        formatter.write_text(f"MODEL is a shipped name such as llama-3.1-8b, {MODEL}. {offers}")
        with formatter.section("Keys of --src and --dst"):
            formatter.write_dl(
                [(field.name, field.metadata["about"]) for field in attrs.fields(EngineOptions)]
            )


_like = click.option(
    "--like", metavar="TYPE", help="Read a config.json of an unknown model_type as one of TYPE."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def model_argument(command: Command) -> Command:
    """MODEL and ``--like``."""
    return click.argument("model")(_like(command))


_engine = partial(
    click.option,
    default="",
    metavar="KEY=VALUE,...",
    callback=lambda context, option, text: EngineOptions.parse(text, option.opts[0]),
)


def engine_options(command: Callable[..., int]) -> Callable[..., int]:
    """A command's first argument, :class:`Engines`: MODEL, ``--like``, ``--src``, ``--dst`` and ``--bits``."""

    @wraps(command)
    def run(
        model: str,
        like: str | None,
        src: EngineOptions,
        dst: EngineOptions,
        bits: str | None,
        **options: Any,
    ) -> int:
        return command(Engines(model, load_engines(model, bits, like), src, dst), **options)

    bits_help = "Quantize K and V: 8 has a scale for each head of a token, 4 has one for each 16 values (NVFP4)."
    run = click.option("--bits", type=click.Choice([str(bits) for bits in BITS]), help=bits_help)(
        run
    )
    run = _engine("--dst", help="The decode engine (destination).")(run)
    return model_argument(_engine("--src", help="The prefill engine (source).")(run))


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else str(value)


def echo_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document. A frozen value becomes an object of its fields."""
    click.echo(json.dumps(document, indent=2, default=_plain))


def plain_console() -> Console:
    """A console for stdout that reads no markup. It wraps text on a terminal alone, and colours it there."""
    return Console(markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())


def terminal_width() -> int:
    """Characters in a line of the terminal, at least 40; 120 where there is none."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, 40)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; those without indent are headings, which are bold on a terminal."""
    console = plain_console()
    for line in lines:
        console.print(Text(line, style="bold" if line[:1].strip() else ""))


def progress_bar(disable: bool = False) -> Progress:
    """A progress bar on stderr, which is erased at the end. It is only drawn if stderr is a terminal."""
    console = Console(stderr=True)
    hidden = disable or not (sys.stderr.isatty() and console.is_terminal)
    return Progress(
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=hidden,
    )
