"""Arguments that commands share: MODEL, and the two engines ``--src`` and ``--dst``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

import attrs
import click
from click.shell_completion import CompletionItem

from kvplan.cli.caches import cache_lines, caches_of
from kvplan.cli.console import wrapped
from kvplan.cli.inputs import EngineInput
from kvplan.cli.model_files import BITS, MODEL_FORMS, load
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.models import Model
from kvplan.models.engines import ENGINES, reasons
from kvplan.models.options import MAX_TOKENS, EngineOptions, read_decimal

Command = TypeVar("Command", bound=Callable[..., Any])


def token_range(text: str, subject: str) -> tuple[int, int]:
    """Return ``STOP`` or ``START:STOP`` as a half-open range of positions.

    >>> token_range("1000", "--tokens"), token_range("37:1000", "--tokens")
    ((0, 1000), (37, 1000))
    """
    start_text, colon, stop_text = text.rpartition(":")
    start = read_decimal(start_text, subject, 0, MAX_TOKENS + 1) if colon else 0
    return start, read_decimal(stop_text, subject, start, MAX_TOKENS + 1)


@attrs.frozen
class Engines:
    """Two engines as a command line names them: ``name`` is MODEL, ``model`` is what it means.

    A file of an unknown type was read as one of the type ``like``. ``sides`` are the engines as
    they were given, ``src`` and ``dst`` what that means for the model.
    """

    name: str
    model: Model
    src: EngineOptions
    dst: EngineOptions
    like: str | None = None
    sides: Mapping[str, EngineInput] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, {self.src} -> {self.dst}"

    def workers(self) -> tuple[tuple[Worker, ...], tuple[Worker, ...]]:
        """Return the workers of the source engine, and of the destination engine."""
        return self.src.engine(self.model, "src"), self.dst.engine(self.model, "dst")

    @property
    def named(self) -> dict[str, str]:
        """The real engine of each side that names one."""
        return {key: side.engine for key, side in self.sides.items() if side.engine is not None}

    def heading(self, title: str | None = None) -> list[str]:
        """Return the first lines of an output: what was assumed, the engines, and their caches."""
        source, destination = self.src.cached(self.model), self.dst.cached(self.model)
        caches = cache_lines(source)
        if source != destination:
            caches = cache_lines(source, "src") + cache_lines(destination, "dst")
        assumed = assumed_lines(self.name, self.model, self.like)
        return [*wrapped([*assumed, *self.read_lines()]), title or str(self), *wrapped(caches)]

    def read_lines(self) -> list[str]:
        """Return what was taken from a side that is no list of keys, in a line for each."""
        return [side.line(key) for key, side in self.sides.items() if side.source is not None]

    def to_json(self) -> dict[str, Any]:
        document = {"model": self.name, "src": str(self.src), "dst": str(self.dst)}
        return document if self.like is None else {**document, "assumed_like": self.like}

    def unsupported(self) -> dict[str, dict[str, list[str]]]:
        """Return the reasons why the engines that are named do not support ``src`` and ``dst``.

        A side without a name is asked of the engine of the other side.
        """
        sides = {}
        for side, options in (("src", self.src), ("dst", self.dst)):
            by_engine = reasons(self.model, options)
            named = [self.named[side]] if side in self.named else self.named.values()
            sides[side] = {engine: by_engine[engine] for engine in named}
        return sides


def support_lines(sides: Mapping[str, Mapping[str, list[str]]]) -> Iterator[str]:
    """Yield a line for each reason of a side, and one for each engine that supports its sides."""
    for engine in ENGINES.values():
        asked = {side: found[engine] for side, found in sides.items() if engine in found}
        # a reason that holds for both sides has one line
        sides_of_reason: dict[str, list[str]] = {}
        for side, found in asked.items():
            for reason in found:
                sides_of_reason.setdefault(reason, []).append(side)
        for reason, names in sides_of_reason.items():
            yield f"{engine} does not support {' and '.join(names)}: {reason}"
        if asked and not sides_of_reason:
            yield f"{engine} supports {' and '.join(asked)}"


def assumed_lines(name: str, model: Model, like: str | None) -> list[str]:
    """Return the line that says what was assumed of a file of an unknown type, if it is of one."""
    if like is None:
        return []
    contents = "; ".join(map(str, caches_of(model)))
    return [f"assumed, not checked: {name} caches as a {like} does, {contents}"]


class EngineCommand(click.Command):
    """A command with :func:`engine_options`: its help ends with MODEL and the keys of an engine."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the end of the help."""
        formatter.write_paragraph()
        formatter.write_text(
            "MODEL is a shipped name such as llama-3.1-8b, its name on Hugging Face, "
            f"{MODEL_FORMS} (and window=4096, heads=40)."
        )
        formatter.write_paragraph()
        formatter.write_text(
            "ENGINE is KEY=VALUE,... or 'vllm serve ...', a command line of SGLang, a "
            "--kv-transfer-config, or a file with one of these or with an engine's log. "
            "vllm,tp=4 has the defaults of vLLM with kvplan's connector for all other keys, "
            "sglang those of SGLang; the output says whether the named engine supports the side."
        )
        keys = [(field.name, field.metadata["about"]) for field in attrs.fields(EngineOptions)]
        with formatter.section("Keys of --src and --dst"):
            formatter.write_dl(keys)


def _completed_models(
    ctx: click.Context, param: click.Parameter, text: str
) -> list[CompletionItem]:
    # a text that begins no name is the path of a config.json
    names = [name for name in Model.names() if name.startswith(text)]
    return [CompletionItem(name) for name in names] or [CompletionItem(text, type="file")]


like_option = click.option(
    "--like",
    metavar="TYPE",
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
    metavar="ENGINE",
    callback=lambda context, option, text: EngineInput.parse(text, option.opts[0]),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def model_argument(required: bool) -> Callable[[Command], Command]:
    """Return what adds the argument MODEL and ``--like`` to a command."""
    argument = click.argument("model", required=required, shell_complete=_completed_models)
    return lambda command: argument(like_option(command))


def engine_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add MODEL, ``--like``, ``--src``, ``--dst`` and ``--bits``.

    The command gets all of them as its first argument, :class:`Engines`. MODEL may be left out if
    a command line of an engine names it.
    """

    @wraps(command)
    def run(
        model: str | None,
        like: str | None,
        src: EngineInput,
        dst: EngineInput,
        bits: str | None,
        **options: Any,
    ) -> int:
        name = model or src.model or dst.model
        if name is None:
            expected = "MODEL, or an engine's command line that names it"
            raise KVPlanError("NAME", "read the command line", expected=expected, got="no MODEL")
        loaded = load(name, bits, like)
        sides = {"src": src, "dst": dst}
        engines = Engines(name, loaded, src.options(loaded), dst.options(loaded), like, sides)
        return command(engines, **options)

    run = _bits(run)
    run = _engine("--dst", help="The decode engine (destination).")(run)
    run = _engine("--src", help="The prefill engine (source).")(run)
    return model_argument(required=False)(run)
