"""Judges stores: ``python -m tests.engines.stored [ROW ...]``. An engine saves and is killed, another engine loads.

The other one is asked what follows each answer: a conversation's next turn, whose prompt has the first turn and more.

Answers must be those of the engine that saved, which computed everything, and the engine must count the cached tokens.
The control has a store with the same pages of zeros: its answers differ, so that the bytes of pages matter.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kvplan.protocol.pages import pack
from kvplan_nixl.serving.store import Backend, FileEntry, open_backend, read_file
from tests.blocking import wait_until
from tests.engines.__main__ import CONNECTORS, ENGINE, FOLDER
from tests.engines.models import THETA, VOCABULARY, YARN, build
from tests.engines.process import TIMEOUT_S, Engine, free_port
from tests.engines.sglang_judge import SglangEngine, Side
from tests.engines.trials import ASK, offered, put_adapter
from tests.store.s3 import s3_server

LENGTHS = (70, 130, 200)
MAX_TOKENS = 12
PAGE = 64
ENDS_OF_PAGES = tuple(number * PAGE - MAX_TOKENS + 1 for number in (1, 2, 3))
"""Lengths of prompts whose answers end where a page does, but for the last token, which no cache has."""

QUIET_S = 2.0
"""Seconds without a new file after which an SGLang engine has saved all."""

ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}

CONVERSATIONS = {
    "a conversation": (
        "llama",
        PAGE,
        (Side("vllm", 32), Side("sglang", 16), Side("vllm", 64, tp=2), Side("vllm", 32)),
    ),
    "a conversation, windows apart": (
        "mellum",
        16,
        (Side("sglang", 16), Side("sglang", 16, tp=2), Side("sglang", 16)) * 2,
    ),
}
"""Models, the tokens of a page, and the engines that answer the turns of a conversation.

Each is killed after its turn. SGLang keeps windows up to a turn's end: of larger pages it lacks more.
"""


class Row(NamedTuple):
    """A model, the engine that saves and the one that loads, the lengths of prompts, and the adapter of requests.

    The store is a folder, or a bucket of a server that speaks S3.
    """

    model: str
    saves: Side
    loads: Side
    lengths: tuple[int, ...] = LENGTHS
    adapter: str = ""
    in_bucket: bool = False


ROWS = {
    "blocks 32 to 64": Row("llama", Side("vllm", 32), Side("vllm", 64)),
    "TP 1 to 2": Row("llama", Side("vllm", 32), Side("vllm", 64, tp=2)),
    "TP 2 to 1": Row("llama", Side("vllm", 64, tp=2), Side("vllm", 32)),
    "latents": Row("deepseek-v3", Side("vllm", 32), Side("vllm", 64)),
    "windows": Row("gemma-3", Side("vllm", 64), Side("vllm", 32)),
    "states, TP 1 to 2": Row("granite-hybrid", Side("vllm", 32), Side("vllm", 32, tp=2), ENDS_OF_PAGES),
    "adapters": Row("qwen3", Side("vllm", 32, more=ADAPTERS), Side("vllm", 64, more=ADAPTERS), adapter="1"),
    "vLLM 32 to SGLang 16": Row("llama", Side("vllm", 32), Side("sglang", 16)),
    "SGLang 16 to vLLM 32": Row("llama", Side("sglang", 16), Side("vllm", 32)),
    "vLLM 32 to SGLang 16, in a bucket": Row("llama", Side("vllm", 32), Side("sglang", 16), in_bucket=True),
    "TP 2 to 1, in a bucket": Row("llama", Side("vllm", 64, tp=2), Side("vllm", 32), in_bucket=True),
    "SGLang 16 to 64, TP 2 to 1": Row("llama", Side("sglang", 16, tp=2), Side("sglang", 64)),
    "SGLang 16 to vLLM 32, windows": Row("gemma-3", Side("sglang", 16), Side("vllm", 32)),
    "SGLang 64 to 16, windows apart": Row("mellum", Side("sglang", 64), Side("sglang", 16)),
    "SGLang 16 to 64, TP 1 to 2, windows apart": Row("mellum", Side("sglang", 16), Side("sglang", 64, tp=2)),
}

BESIDE = {
    "beside KvplanConnector": Row("llama", Side("vllm", 32), Side("vllm", 32)),
    "beside KvplanConnector, windows": Row("gemma-3", Side("vllm", 32), Side("vllm", 64), (70, 120, 184)),
}
"""Prefill and decode, both of which save what they have.

Where a window begins in the second half of a block of decode, prefill has freed the first half.
"""

OTHER_WEIGHTS = "llama, other weights"

HALF = {"dtype": "bfloat16"}
UNLIKE = {
    "RoPE theta on one side": (Side("vllm", 32, more={"hf_overrides": THETA}), Side("vllm", 32)),
    "YaRN on one side": (Side("vllm", 32), Side("vllm", 32, more={"hf_overrides": YARN})),
    "int8 weights on one side": (
        Side("vllm", 32, more={**HALF, "quantization": "int8_per_channel_weight_only"}),
        Side("vllm", 32, more=HALF),
    ),
}
"""Engines of one model that compute other values."""

UPDATES = {"weights reloaded": "reload", "weights updated": "update"}
"""Ways to change the weights of a running engine."""

REPLACED = {"an adapter replaced": False, "an adapter replaced, times kept": True}
"""Whether the new files of an adapter have the times of the old ones."""


def start(model: str, side: Side, store: str, name: str, page: int = PAGE) -> Engine:
    """An engine with a store of pages of some tokens."""
    (FOLDER / "logs").mkdir(parents=True, exist_ok=True)
    log = FOLDER / "logs" / f"store {name}.log".replace(" ", "_")
    folder = FOLDER / model
    if not folder.exists():
        build(model, folder)
    settings = {**(vllm if side.engine == "vllm" else sglang)(side, store, page), **side.more}
    if side.engine == "vllm":
        return Engine({**ENGINE, **settings, "model": str(folder)}, log, free_port()).ready()
    return SglangEngine({**settings, "model_path": str(folder)}, log).ready()


def vllm(side: Side, store: str, page: int = PAGE) -> dict[str, Any]:
    """The settings of a vLLM engine."""
    transfer = {
        "kv_connector": "KvplanStore",
        "kv_connector_module_path": "kvplan_nixl.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"folder": store, "tokens_per_page": page},
    }
    return {"block_size": side.block, "tensor_parallel_size": side.tp, "kv_transfer_config": transfer}


def sglang(side: Side, store: str, page: int) -> dict[str, Any]:
    """The settings of an SGLang engine. Its io backend is the one that copies whole layers."""
    storage = {
        "backend_name": "kvplan",
        "module_path": "kvplan_nixl.sglang",
        "class_name": "KvplanStore",
        "interface_v1": 1,
        "prefetch_threshold": side.block,
        "folder": store,
        "tokens_per_page": page,
    }
    return {
        "page_size": side.block,
        "tp_size": side.tp,
        "disable_radix_cache": False,
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(storage),
        "hicache_storage_prefetch_policy": "wait_complete",
    }


def answers(engine: Engine, prompts: list[list[int]], **marks: Any) -> list[tuple[list[int], int]]:
    """The tokens of each answer, and how many tokens of its prompt were cached."""
    transfers = None
    if isinstance(engine, SglangEngine):
        # SGLang's own fields say what a request is besides
        transfers = [{"cache_salt": marks.pop("salt", None)}] * len(prompts)
    return [(answer.tokens, answer.cached) for answer in engine.generate(prompts, MAX_TOKENS, transfers, **marks)]


def parts(backend: Backend) -> list[FileEntry]:
    """The files of pages, without marks of their uses."""
    return [entry for entry in backend.entries() if "." not in entry.name]


@contextmanager
def empty_store(in_bucket: bool) -> Iterator[str]:
    """An empty store, which is gone in the end."""
    if not in_bucket:
        with TemporaryDirectory() as temporary:
            yield f"{temporary}/kv"
        return
    with s3_server() as server:
        # engines inherit the environment
        os.environ.update(server.environment)
        yield f"{server.bucket('caches')}/kv"


def blank(store: str) -> None:
    """Replace the data of all pages with zeros, with right digests."""
    backend = open_backend(store)
    for entry in parts(backend):
        header, data = read_file(backend, entry.name)
        backend.delete(entry.name)
        backend.put(entry.name, pack(header.key, header.stop, header.shard, memoryview(bytes(len(data)))))


def damage(store: str) -> None:
    """Flip a bit of every page that is not the first."""
    backend = open_backend(store)
    for entry in parts(backend):
        header, _ = read_file(backend, entry.name)
        data = backend.get(entry.name)
        if header.stop > PAGE and data is not None:
            backend.delete(entry.name)
            backend.put(entry.name, [data[:-1] + bytes([data[-1] ^ 4])])


def saved(engine: Engine, store: str, num_pages: int) -> None:
    """Wait until an engine has saved its answers, with which the store has some pages.

    vLLM holds blocks until they are saved. SGLang does not say it, and of windows it saves what it still has.
    """
    if not isinstance(engine, SglangEngine):
        wait_until(lambda: not engine.held()[0], TIMEOUT_S)
        return
    backend = open_backend(store)
    deadline = time.monotonic() + TIMEOUT_S
    changed_at = time.monotonic()
    num_files: Counter[str] = Counter()
    while time.monotonic() < deadline:
        before, num_files = num_files, Counter(entry.page for entry in parts(backend))
        if num_files != before:
            changed_at = time.monotonic()
        if len(num_files) == num_pages and time.monotonic() - changed_at > QUIET_S:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{num_files} instead of {num_pages} pages")


def forget(engine: Engine) -> None:
    """Empty the caches of an SGLang engine as soon as it lets go of them; vLLM has none here."""
    if isinstance(engine, SglangEngine):
        wait_until(engine.empty, TIMEOUT_S)


def judge(name: str) -> str:
    """What came of a row."""
    row = ROWS[name]
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in row.lengths]
    mark = {"adapter": row.adapter} if row.adapter else {}
    with empty_store(row.in_bucket) as store:
        with closing_engine(start(row.model, row.saves, store, "saves")) as writer:
            answered = answers(writer, prompts, **mark)
            saved(writer, store, num_pages(prompts))
            # what is asked next, computed by the engine that saves, with nothing of the store
            asked = [[*prompt, *answer, *prompt[:9]] for prompt, (answer, _) in zip(prompts, answered, strict=True)]
            computed = answers(writer, asked, salt="computed", **mark)
            saved(writer, store, num_pages(prompts) + num_pages(asked))
        with closing_engine(start(row.model, row.loads, store, "loads")) as reader:
            loaded = answers(reader, asked, **mark)
            others = {"salt": answers(reader, asked, salt="blue", **mark)}
            if row.adapter:
                others["adapter"] = answers(reader, asked, adapter="2")
            saved(reader, store, num_pages(prompts) + 2 * num_pages(asked))
            forget(reader)
            blank(store)
            blanked = answers(reader, asked, **mark)
            forget(reader)
            damage(store)
            damaged = answers(reader, asked, **mark)
    tokens = [answer for answer, _ in computed]
    findings = {
        "nothing computed is cached": not any(cached for _, cached in [*answered, *computed]),
        "same tokens": [answer for answer, _ in loaded] == tokens,
        "hits": [cached for _, cached in loaded]
        == [(length + MAX_TOKENS - 1) // PAGE * PAGE for length in row.lengths],
        "another salt: same tokens": [answer for answer, _ in others["salt"]] == tokens,
        "another salt or adapter: no hits": not any(cached for found in others.values() for _, cached in found),
        "pages of zeros: other tokens": all(a != b for (a, _), b in zip(blanked, tokens, strict=True)),
        "damaged pages: same tokens": [answer for answer, _ in damaged][1:] == tokens[1:],
        "damaged pages: no hits": not any(cached for _, cached in damaged[1:]),
    }
    if row.adapter:
        findings["another adapter: other tokens"] = all(
            a != b for (a, _), b in zip(others["adapter"], tokens, strict=True)
        )
    wrong = [name for name, is_so in findings.items() if not is_so]
    cached = [[number for _, number in each] for each in (computed, loaded, *others.values(), blanked, damaged)]
    return f"{name}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}; cached {cached}"


def converse(name: str) -> str:
    """What came of a conversation that moves between engines, and returns after all have restarted."""
    model, page, sides = CONVERSATIONS[name]
    rng = random.Random(name)
    said: list[int] = []
    wrong, found, pages = [], [], 0
    with empty_store(in_bucket=False) as store:
        for turn, side in enumerate(sides):
            stored = (len(said) - 1) // page * page if said else 0
            said += [rng.randrange(3, VOCABULARY) for _ in range(70)]
            with closing_engine(start(model, side, store, f"turn {turn}", page)) as engine:
                ((computed, num_computed),) = answers(engine, [said], salt=f"computed in turn {turn}")
                ((answer, cached),) = answers(engine, [said])
                # the pages of a turn, those of the last one apart, and the same with a salt
                length = (len(said) + MAX_TOKENS - 1) // page
                pages += 2 * length - stored // page
                saved(engine, store, pages)
            found.append(cached)
            if (answer, num_computed, cached) != (computed, 0, stored):
                wrong.append(f"turn {turn}")
            said += answer
    return f"{name}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}; cached {found}"


def beside(name: str) -> str:
    """What came of a store beside a transfer from prefill to decode, both of which save. A third engine loads."""
    rng = random.Random(name)
    row = BESIDE[name]
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in row.lengths]
    with empty_store(in_bucket=False) as store:
        kept = vllm(Side("vllm", 32), store)["kv_transfer_config"]
        sides = []
        for role, side in (("kv_producer", row.saves), ("kv_consumer", row.loads)):
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [{**CONNECTORS["kvplan"], "kv_role": role}, kept]},
            }
            sides.append(side._replace(more={"kv_transfer_config": transfer}))
        with (
            closing_engine(start(row.model, sides[0], store, "prefill")) as prefill,
            closing_engine(start(row.model, sides[1], store, "decode")) as decode,
        ):
            offers = [offered(answer) for answer in prefill.generate(prompts, 1, [ASK] * len(prompts))]
            read = decode.generate(prompts, MAX_TOKENS, offers)
            answered = [answer.tokens for answer in read]
            for engine in (prefill, decode):
                saved(engine, store, 0)
        asked = [[*prompt, *answer, *prompt[:9]] for prompt, answer in zip(prompts, answered, strict=True)]
        with closing_engine(start(row.model, sides[1], store, "next")) as reader:
            loaded = answers(reader, asked)
            computed = answers(reader, asked, salt="computed")
            answered_alone = answers(reader, prompts, salt="computed, too")
    pages = [(length + MAX_TOKENS - 1) // PAGE * PAGE for length in row.lengths]
    findings = {
        "read": [answer.cached for answer in read] == [length - 1 for length in row.lengths],
        "same tokens": [answer for answer, _ in loaded] == [answer for answer, _ in computed],
        "same tokens of decode": answered == [answer for answer, _ in answered_alone],
        "hits": [cached for _, cached in loaded] == pages,
        "no hits": not any(cached for _, cached in [*computed, *answered_alone]),
    }
    wrong = [name for name, is_so in findings.items() if not is_so]
    cached = [cached for _, cached in loaded]
    return f"{name}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}; cached {cached}"


def sequels(prompts: list[list[int]], answered: list[tuple[list[int], int]]) -> list[list[int]]:
    """What is asked next: prompts, their answers and some tokens more."""
    return [[*prompt, *answer, *prompt[:9]] for prompt, (answer, _) in zip(prompts, answered, strict=True)]


def tokens_of(answered: list[tuple[list[int], int]]) -> list[list[int]]:
    return [answer for answer, _ in answered]


def report(name: str, findings: dict[str, bool], **cached: list[tuple[list[int], int]]) -> str:
    """Whether all findings are so, and what was cached of each prompt."""
    wrong = [finding for finding, is_so in findings.items() if not is_so]
    numbers = {what: [number for _, number in answered] for what, answered in cached.items()}
    return f"{name}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}; cached {numbers}"


def unlike(name: str) -> str:
    """What came of a store between two engines that compute other values of the same tokens: nothing is loaded."""
    saves, loads = UNLIKE[name]
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    with empty_store(in_bucket=False) as store:
        with closing_engine(start("llama", saves, store, "saves")) as writer:
            asked = sequels(prompts, answers(writer, prompts))
            saved(writer, store, 0)
            own = answers(writer, asked)
            saved(writer, store, 0)
        with closing_engine(start("llama", loads, store, "loads")) as reader:
            loaded = answers(reader, asked)
            computed = answers(reader, asked, salt="computed")
    if tokens_of(own) == tokens_of(computed):
        return f"{name}: void: both engines generate the same tokens; cached {[cached for _, cached in loaded]}"
    findings = {
        "the store is used": all(cached for _, cached in own),
        "same tokens": tokens_of(loaded) == tokens_of(computed),
        "no hits": not any(cached for _, cached in loaded),
    }
    return report(name, findings, own=own, loaded=loaded)


def updated(name: str) -> str:
    """What came of a store when a running engine got other weights. Engines of the old and the new weights load too."""
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    side = Side("vllm", 32, more={"weight_transfer_config": {"backend": "folder"}})
    others = FOLDER / OTHER_WEIGHTS
    build(OTHER_WEIGHTS, others)
    with empty_store(in_bucket=False) as store:
        with closing_engine(start("llama", side, store, "updated")) as engine:
            asked = sequels(prompts, answers(engine, prompts))
            saved(engine, store, 0)
            before = answers(engine, asked)
            engine.change_weights(UPDATES[name], others)
            at_once = answers(engine, asked)
            engine.forget()
            after = answers(engine, asked)
            computed = answers(engine, asked, salt="computed")
            saved(engine, store, 0)
        with closing_engine(start("llama", side, store, "old weights")) as engine:
            old = answers(engine, asked)
        with closing_engine(start(OTHER_WEIGHTS, side, store, "new weights")) as engine:
            new = answers(engine, asked)
    findings = {
        "the store is used": all(cached for _, cached in before),
        "weights differ": tokens_of(before) != tokens_of(computed),
        "at once: same tokens": tokens_of(at_once) == tokens_of(computed),
        "after a reset: same tokens": tokens_of(after) == tokens_of(computed),
        "old weights: same tokens": tokens_of(old) == tokens_of(before),
        "new weights: same tokens": tokens_of(new) == tokens_of(computed),
    }
    return report(name, findings, before=before, at_once=at_once, after=after, old=old, new=new)


def replaced(name: str) -> str:
    """What came of a store when an adapter's files were replaced while an engine had the old ones loaded."""
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS * 2]
    side = Side("vllm", 32, more=ADAPTERS)
    with empty_store(in_bucket=False) as store:
        with closing_engine(start("llama", side, store, "old adapter")) as engine:
            put_adapter(engine, 1, times_kept=REPLACED[name])
            answered = answers(engine, prompts[:3], adapter="3")
            saved(engine, store, 0)
            put_adapter(engine, 2, times_kept=REPLACED[name])
            answered += answers(engine, prompts[3:], adapter="3")
            asked = sequels(prompts, answered)
            saved(engine, store, 0)
            old = answers(engine, asked, adapter="3")
            computed_old = answers(engine, asked, adapter="3", salt="computed by the old one")
            saved(engine, store, 0)
        with closing_engine(start("llama", side, store, "new adapter")) as engine:
            new = answers(engine, asked, adapter="3")
            computed_new = answers(engine, asked, adapter="3", salt="computed by the new one")
    findings = {
        "adapters differ": tokens_of(computed_old) != tokens_of(computed_new),
        "old adapter: same tokens": tokens_of(old) == tokens_of(computed_old),
        "new adapter: same tokens": tokens_of(new) == tokens_of(computed_new),
    }
    return report(name, findings, old=old, new=new)


def num_pages(prompts: list[list[int]]) -> int:
    """How many pages prompts and their answers have, but for the last token of each."""
    return sum((len(prompt) + MAX_TOKENS - 1) // PAGE for prompt in prompts)


@contextmanager
def closing_engine(engine: Engine) -> Iterator[Engine]:
    """Kills an engine at the end."""
    try:
        yield engine
    finally:
        engine.kill()


def main() -> None:
    """Judges rows."""
    trials = {
        **dict.fromkeys(ROWS, judge),
        **dict.fromkeys(CONVERSATIONS, converse),
        **dict.fromkeys(BESIDE, beside),
        **dict.fromkeys(UNLIKE, unlike),
        **dict.fromkeys(UPDATES, updated),
        **dict.fromkeys(REPLACED, replaced),
    }
    for row in sys.argv[1:] or trials:
        print(trials[row](row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    main()
