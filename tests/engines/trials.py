"""What two engines are put through. Each trial returns the requests' answers and the tokens that were right."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable
from typing import Any

from tests.engines.models import VOCABULARY, build
from tests.engines.process import Answer, Engine, free_port
from tests.engines.served import Server, chosen, completed, proxy, text

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies send to prefill."""

LENGTHS = (7, 33, 64, 65, 100, 200)
TOKENS = 12  # that decode generates
FLIPS = 10_000  # bits that are flipped in a decode engine's cache
IDLE_S = 180  # within which engines free everything, also what nobody reads any more

Outcome = tuple[list[Answer], list[list[int]]]
Start = Callable[..., Engine]


def prompts(seed: int, lengths: Any = LENGTHS) -> list[list[int]]:
    """Random prompts; another seed for each use, so that no block already holds what has to be moved."""
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def alone(engine: Engine | Server, tokens: list[list[int]], max_tokens: int = TOKENS) -> list[list[int]]:
    """What an engine generates undisturbed: nothing transferred, nothing cached."""
    engine.forget()
    return [answer.tokens for answer in engine.generate(tokens, max_tokens)]


def agreed(tokens: list[list[int]], *engines: Engine | Server, max_tokens: int = TOKENS) -> list[list[int]]:
    """What all engines generate undisturbed, after the transfer, so that it leaves nothing behind to find.

    The first engine does it in both orders: where tokens depend on the batch, equal tokens say nothing.
    """
    first, *others = [alone(engine, tokens, max_tokens) for engine in engines]
    others.append(alone(engines[0], tokens[::-1], max_tokens)[::-1])
    if any(other != first for other in others):
        raise AssertionError("void: undisturbed engines generate different tokens")
    return first


def offered(answer: Answer) -> dict[str, Any]:
    """What prefill tells decode; without it, decode would compute the prompt itself."""
    if not answer.transfer:
        raise AssertionError(f"failed: prefill offers nothing, finish reason {answer.reason}")
    # vLLM's decode would report this as its own cached tokens, in place of what it has loaded.
    return {key: value for key, value in answer.transfer.items() if key != "remote_prefill_cached_tokens"}


def loaded(answers: list[Answer], tokens: list[list[int]]) -> list[Answer]:
    """Answers of decode engines, which have computed the last token of each prompt and loaded the others."""
    for answer, prompt in zip(answers, tokens, strict=True):
        if answer.reason != "error" and answer.cached < len(prompt) - 1:
            raise AssertionError(
                f"void: decode has computed {len(prompt) - answer.cached} of {len(prompt)} tokens itself"
            )
    return answers


def moved(prefill: Engine, decode: Engine, tokens: list[list[int]]) -> list[Answer]:
    """Prefill computes all prompts, then decode reads them."""
    answers = prefill.generate(tokens, 1, [ASK] * len(tokens))
    return loaded(decode.generate(tokens, TOKENS, [offered(answer) for answer in answers]), tokens)


def idle(*engines: Engine) -> None:
    """Waits until engines hold no block and no request."""
    deadline = time.monotonic() + IDLE_S
    for engine in engines:
        while (held := engine.held()) != (0, 0):
            if time.monotonic() > deadline:
                raise AssertionError(f"leaked: {held[0]} blocks of {held[1]} requests are still held")
            time.sleep(0.05)


def transfer(start: Start) -> Outcome:
    """Prompts of several lengths."""
    prefill, decode = start("prefill"), start("decode")
    tokens = prompts(1)
    answers = moved(prefill.ready(), decode.ready(), tokens)
    idle(prefill, decode)
    return answers, agreed(tokens, prefill, decode)


def continued(start: Start) -> Outcome:
    """Prompts end in a token that prefill alone has generated, and decode has to go on as an engine alone goes on.

    Decode computes a prompt's last token from a state that it reads, as an engine computes what it has generated. Where
    a state is rounded, that is another result than of a prompt that is computed at once.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(1)
    generated = alone(prefill, tokens, TOKENS + 1)
    ended = [[*prompt, one[0]] for prompt, one in zip(tokens, generated, strict=True)]
    answers = moved(prefill, decode, ended)
    idle(prefill, decode)
    right = agreed(tokens, prefill, decode, max_tokens=TOKENS + 1)
    return answers, [one[1:] for one in right]


def prefix(start: Start) -> Outcome:
    """Decode has the first half of each prompt cached: it reads what is missing."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(2, (100, 150, 200))
    decode.generate([prompt[: len(prompt) // 2] for prompt in tokens], 1)
    answers = moved(prefill, decode, tokens)
    idle(prefill, decode)
    return answers, agreed(tokens, prefill, decode)


def prefix_on_prefill(start: Start) -> Outcome:
    """Prefill has the first half of each prompt cached, which it has computed for nobody else."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(2, (100, 150, 200))
    prefill.generate([prompt[: len(prompt) // 2] for prompt in tokens], 1)
    answers = moved(prefill, decode, tokens)
    idle(prefill, decode)
    return answers, agreed(tokens, prefill, decode)


def not_copied(start: Start) -> Outcome:
    """A control: an engine leaves out a copy between main memory and its device, so that answers have to be wrong."""
    answers, right = transfer(start)
    if [answer.tokens for answer in answers] == right:
        raise AssertionError("void: the tokens are right without a copy")
    return [], []


def burst(start: Start) -> Outcome:
    """200 requests of mixed lengths in flight, each sent to decode as soon as prefill has answered."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(3, [random.Random(0).randrange(2, 300) for _ in range(200)])
    asked = [prefill.submit(prompt, 1, ASK) for prompt in tokens]
    reading = [
        decode.submit(prompt, TOKENS, offered(prefill.wait(name))) for prompt, name in zip(tokens, asked, strict=True)
    ]
    answers = loaded([decode.wait(name) for name in reading], tokens)
    idle(prefill, decode)
    return answers, agreed(tokens, prefill, decode)


def at_once(prefill: Engine, decode: Engine, port: int, tokens: list[list[int]]) -> tuple[list[str], list[str]]:
    """Sends prompts to both engines, which know them by transfer ids: their names on prefill and on decode."""
    sent, read = [], []
    for prompt in tokens:
        room = {"transfer_id": f"transfer {uuid.uuid4()}"}
        sent.append(prefill.submit(prompt, 1, {**ASK, **room}))
        address = {"do_remote_prefill": True, "remote_bootstrap_addr": f"http://localhost:{port}"}
        read.append(decode.submit(prompt, TOKENS, {**address, **room}))
    return sent, read


def chunks(start: Start) -> Outcome:
    """60 requests of many chunks reach both engines at once, and decode reads a chunk after the other."""
    port = free_port()
    prefill, decode = start("prefill", port=port), start("decode")
    tokens = prompts(26, [random.Random(0).randrange(300, 480) for _ in range(60)])
    sent, read = at_once(prefill.ready(), decode.ready(), port, tokens)
    answers = loaded([decode.wait(name) for name in read], tokens)
    for name in sent:
        prefill.wait(name)
    num_parted = len({*decode.parts()})
    if num_parted < 5:
        raise AssertionError(f"void: {num_parted} of {len(read)} requests were read in parts")
    idle(prefill, decode)
    return answers, agreed(tokens, prefill, decode)


def aborted_chunks(start: Start) -> Outcome:
    """A quarter of 40 such requests are aborted on both engines at once, and some others while they are read."""
    port = free_port()
    prefill, decode = start("prefill", port=port), start("decode")
    tokens = prompts(27, (450,) * 40)
    sent, read = at_once(prefill.ready(), decode.ready(), port, tokens)
    prefill.abort(sent[::4])
    decode.abort(read[::4])
    until = time.monotonic() + IDLE_S / 6
    gone: set[str] = set()
    while len(gone) < 5 and time.monotonic() < until:
        begun = {*decode.parts()} & {*read[1::4]} - gone
        decode.abort([*begun])
        prefill.abort([sent[read.index(name)] for name in begun])
        gone |= begun
    if not gone:
        raise AssertionError("void: no request was aborted while it was read")
    kept = [n for n in range(len(tokens)) if n % 4 > 1]
    tokens = [tokens[n] for n in kept]
    answers = loaded([decode.wait(read[n]) for n in kept], tokens)
    idle(prefill, decode)
    return answers, agreed(tokens, prefill, decode)


def preempted_chunks(start: Start) -> Outcome:
    """Prefill preempts such requests, whose blocks others get: those that were read in part fail on decode."""
    port = free_port()
    prefill, decode = start("prefill", port=port), start("decode")
    tokens = prompts(28, (300,) * 6)
    prefill.ready()
    others = [prefill.submit(prompt, 8 * TOKENS) for prompt in prompts(29, (30,) * 8)]
    sent, read = at_once(prefill, decode.ready(), port, tokens)
    answers = [decode.wait(name) for name in read]
    for name in (*sent, *others):
        prefill.wait(name)
    preempted = prefill.preempted() & {*sent}
    num_failed = sum(answer.reason == "error" for answer in answers)
    if not preempted or not num_failed:
        raise AssertionError(f"void: {len(preempted)} requests were preempted, {num_failed} have failed")
    if num_failed > len(preempted):
        raise AssertionError(f"failed: {num_failed} requests, of which {len(preempted)} were preempted")
    idle(prefill, decode)
    return answers, unless_failed(answers, agreed(tokens, prefill, decode))


def preempted_on_decode(start: Start) -> Outcome:
    """Decode has blocks for all prompts, not for all that it generates: it preempts requests while it reads others."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens, max_tokens = prompts(12, (60,) * 32), 5 * TOKENS
    answers = prefill.generate(tokens, 1, [ASK] * len(tokens))
    transfers = [offered(answer) for answer in answers]
    read = loaded(decode.generate(tokens, max_tokens, transfers), tokens)
    if not decode.preempted():
        raise AssertionError("void: decode has preempted nothing")
    idle(prefill, decode)
    return read, agreed(tokens, prefill, decode, max_tokens=max_tokens)


def preempted_on_prefill(start: Start) -> Outcome:
    """Prefill generates for others in the same blocks: it preempts prompts of which it has computed some chunks."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(13, (300,) * 6)
    others = [prefill.submit(prompt, 8 * TOKENS) for prompt in prompts(14, (30,) * 8)]
    asked = [prefill.submit(prompt, 1, ASK) for prompt in tokens]
    # Each is read at once: prefill has no blocks for all of them.
    reading = [
        decode.submit(prompt, TOKENS, offered(prefill.wait(name))) for prompt, name in zip(tokens, asked, strict=True)
    ]
    if not prefill.preempted() & {*asked}:
        raise AssertionError("void: prefill has preempted none of the requests that decode reads")
    read = loaded([decode.wait(name) for name in reading], tokens)
    for name in others:
        prefill.wait(name)
    idle(prefill, decode)
    return read, agreed(tokens, prefill, decode)


def several(start: Start) -> Outcome:
    """Two decode engines read from two prefill engines, all at the same time."""
    prefills, decodes = [[start(side), start(side)] for side in ("prefill", "decode")]
    tokens = prompts(4, LENGTHS * 4)
    asked = [prefills[n % 2].ready().submit(prompt, 1, ASK) for n, prompt in enumerate(tokens)]
    reading = [
        decodes[n // 2 % 2].ready().submit(prompt, TOKENS, offered(prefills[n % 2].wait(name)))
        for n, (prompt, name) in enumerate(zip(tokens, asked, strict=True))
    ]
    answers = loaded([decodes[n // 2 % 2].wait(name) for n, name in enumerate(reading)], tokens)
    idle(*prefills, *decodes)
    return answers, agreed(tokens, *prefills, *decodes)


def aborted(start: Start) -> Outcome:
    """Half of the requests are aborted: some before they are read, some while."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(5, LENGTHS * 4)
    answers = prefill.generate(tokens, 1, [ASK] * len(tokens))
    names = [decode.submit(prompt, TOKENS, offered(answer)) for prompt, answer in zip(tokens, answers, strict=True)]
    decode.abort(names[::4])
    time.sleep(0.01)
    decode.abort(names[1::4])
    kept = [n for n in range(len(names)) if n % 4 > 1]
    tokens = [tokens[n] for n in kept]
    read = loaded([decode.wait(names[n]) for n in kept], tokens)
    idle(prefill, decode)
    return read, agreed(tokens, prefill, decode)


def prefill_dies(start: Start) -> Outcome:
    """Prefill is killed between prefill and decode: those requests fail, others go on, a new prefill is read from."""
    others, lost, expected = bereft(start)
    return [*others, *lost], [*expected[: len(others)], *[[]] * len(lost)]


def recomputed(start: Start) -> Outcome:
    """The same where decode is told to recompute what it cannot load."""
    others, lost, expected = bereft(start)
    return [*others, *lost], expected


def bereft(start: Start) -> tuple[list[Answer], list[Answer], list[list[int]]]:
    """Kills prefill before decode reads: the answers to other requests, to those that it has lost, and the tokens."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    before, local, after, lost = prompts(7), prompts(8), prompts(9), prompts(6)
    read = moved(prefill, decode, before)
    answers = prefill.generate(lost, 1, [ASK] * len(lost))
    prefill.kill()
    reading = [decode.submit(prompt, TOKENS, offered(answer)) for prompt, answer in zip(lost, answers, strict=True)]
    read += decode.generate(local, TOKENS)
    successor = start("prefill").ready()
    read += moved(successor, decode, after)
    failed = [decode.wait(name) for name in reading]
    idle(successor, decode)
    return read, failed, agreed([*before, *local, *after, *lost], successor, decode)


def prefill_restarts(start: Start) -> Outcome:
    """Prefill restarts under its name and port: what it had computed before fails, what it computes then is read."""
    where = {"name": "prefill", "port": free_port()}
    prefill, decode = start("prefill", **where).ready(), start("decode").ready()
    before, lost, after = prompts(15), prompts(16), prompts(17)
    read = moved(prefill, decode, before)
    answers = prefill.generate(lost, 1, [ASK] * len(lost))
    prefill.kill()
    prefill = start("prefill", **where).ready()
    names = [decode.submit(prompt, TOKENS, offered(answer)) for prompt, answer in zip(lost, answers, strict=True)]
    read += moved(prefill, decode, after)
    failed = [decode.wait(name) for name in names]
    idle(prefill, decode)
    right = agreed([*before, *after], prefill, decode)
    return [*read, *failed], [*right, *[[]] * len(lost)]


def prefill_freezes(start: Start) -> Outcome:
    """Prefill stops answering before decode knows it: its requests fail in time, others go on."""
    frozen, prefill, decode = start("prefill").ready(), start("prefill").ready(), start("decode").ready()
    lost, others = prompts(18), prompts(19)
    answers = frozen.generate(lost, 1, [ASK] * len(lost))
    frozen.freeze()
    names = [decode.submit(prompt, TOKENS, offered(answer)) for prompt, answer in zip(lost, answers, strict=True)]
    read = moved(prefill, decode, others)
    failed = [decode.wait(name, timeout_s=IDLE_S) for name in names]
    frozen.kill()
    idle(prefill, decode)
    return [*read, *failed], [*agreed(others, prefill, decode), *[[]] * len(lost)]


def prefill_freezes_under_reads(start: Start) -> Outcome:
    """Prefill stops answering while decode reads: those requests fail in time, others go on.

    The blocks of requests that have failed are not used again before prefill goes on.
    """
    frozen, prefill, decode = start("prefill").ready(), start("prefill").ready(), start("decode").ready()
    before, begun, lost, others = prompts(20), prompts(21), prompts(22), prompts(23)
    read = moved(frozen, decode, before)
    answers = frozen.generate([*begun, *lost], 1, [ASK] * len(begun + lost))
    transfers = [offered(answer) for answer in answers]
    names = [decode.submit(prompt, TOKENS, one) for prompt, one in zip(begun, transfers, strict=False)]
    frozen.freeze()
    names += [decode.submit(prompt, TOKENS, one) for prompt, one in zip(lost, transfers[len(begun) :], strict=True)]
    read += moved(prefill, decode, others)
    ended = [decode.wait(name, timeout_s=IDLE_S) for name in names]
    num_failed = sum(answer.reason == "error" for answer in ended)
    if decode.held()[1] != num_failed:
        raise AssertionError(f"unsafe: blocks of {decode.held()[1]} requests are held, {num_failed} have failed")
    frozen.thaw()
    idle(frozen, prefill, decode)
    right = agreed([*before, *others, *begun], prefill, decode)
    early = [[] if answer.reason == "error" else one for answer, one in zip(ended, right[-len(begun) :], strict=False)]
    return [*read, *ended], [*right[: -len(begun)], *early, *[[]] * len(lost)]


def decode_dies(start: Start) -> Outcome:
    """A decode engine is killed while it reads: prefill frees its blocks and serves the next decode engine."""
    prefill, victim, decode = start("prefill").ready(), start("decode").ready(), start("decode").ready()
    tokens = prompts(10, (300,) * 20)
    answers = prefill.generate(tokens, 1, [ASK] * len(tokens))
    for prompt, answer in zip(tokens, answers, strict=True):
        victim.submit(prompt, TOKENS, offered(answer))
    victim.kill()
    tokens = prompts(11)
    read = moved(prefill, decode, tokens)
    idle(prefill, decode)
    return read, agreed(tokens, prefill, decode)


def separate(tokens: list[list[int]], *engines: Engine) -> list[list[int]]:
    """Generates for prompts one after another, with nothing cached: all engines must agree."""
    first, *others = [[alone(engine, [prompt])[0] for prompt in tokens] for engine in engines]
    if any(other != first for other in others):
        raise AssertionError("void: undisturbed engines generate different tokens")
    return first


def unless_failed(answers: list[Answer], right: list[list[int]]) -> list[list[int]]:
    """Returns what is right where a request may fail: its tokens, or none."""
    pairs = zip(answers, right, strict=True)
    return [[] if answer.reason == "error" else tokens for answer, tokens in pairs]


def use_blocks(prefill: Engine, decode: Engine) -> None:
    """Fills all blocks of both engines once: those that nothing fills again hold other prompts."""
    for prompt in prompts(25, (400,) * 8):
        moved(prefill, decode, [prompt])


def shared_prefix(start: Start) -> Outcome:
    """Decode reads a prompt, then reads or computes a shorter one that shares its first 96 tokens.

    What the first read has left in decode's prefix cache must be what the second prompt has there.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    use_blocks(prefill, decode)
    tokens: list[list[int]] = []
    answers: list[Answer] = []
    for seed in range(26, 32):
        common, long_end, short_end = prompts(seed, (96, 25, 4))
        answers += moved(prefill, decode, [[*common, *long_end]])
        short = [*common, *short_end]
        answers += moved(prefill, decode, [short]) if seed % 2 else decode.generate([short], TOKENS)
        tokens += [[*common, *long_end], short]
    idle(prefill, decode)
    return answers, separate(tokens, prefill, decode)


def shared_prefix_beside(start: Start) -> Outcome:
    """The same where another connector stores blocks: a request of which decode can't read whole ones fails."""
    answers, right = shared_prefix(start)
    return answers, unless_failed(answers, right)


def conversation(start: Start) -> Outcome:
    """Two conversations of five turns, in which the engine that has read a turn computes the next.

    The prompt of a turn is all that was said before and new tokens.
    """
    computing, reading = start("prefill").ready(), start("decode").ready()
    use_blocks(computing, reading)
    tokens: list[list[int]] = []
    answers: list[Answer] = []
    for seed in (32, 33):
        said: list[int] = []
        for turn in prompts(seed, (110, 30, 40, 30, 35)):
            said = [*said, *turn]
            tokens.append(said)
            answers += moved(computing, reading, [said])
            said = [*said, *answers[-1].tokens]
            computing, reading = reading, computing
    idle(computing, reading)
    return answers, separate(tokens, computing, reading)


CONVERSATIONS = 4
TURNS = ((110, 70, 33, 7), (30, 64, 1, 90), (40, 2, 31, 32), (30, 30, 30, 30), (35, 65, 5, 129))
"""New tokens in each turn of each conversation."""


def used(start: Start) -> tuple[Engine, Engine]:
    """Starts prefill and decode, and fills all blocks of both once with other prompts."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    for engine in (prefill, decode):
        engine.generate(prompts(25, (400,) * 8), 1)
    return prefill, decode


def turn(prefill: Engine, decode: Engine, said: list[list[int]], handoffs: list[Any]) -> list[Answer]:
    """Prefill computes what handoffs of the last turn lack, and decode answers with handoffs for the next one."""
    computed = prefill.generate(said, 1, handoffs)
    for answer, handoff in zip(computed, handoffs, strict=True):
        if answer.cached < (num_tokens := handoff.get("remote_num_tokens") or 0):
            raise AssertionError(f"void: prefill has read {answer.cached} of {num_tokens} tokens")
    return loaded(decode.generate(said, TOKENS, [offered(answer) for answer in computed]), said)


def farewell(engine: Engine, said: list[list[int]], answered: list[Answer]) -> tuple[list[list[int]], list[Answer]]:
    """Lets an engine go on with conversations itself, from decode's handoffs: their prompts, and its answers."""
    following = [[*before, *answer.tokens] for before, answer in zip(said, answered, strict=True)]
    last = [{**offered(answer), "do_remote_prefill": True, "do_remote_decode": False} for answer in answered]
    return following, loaded(engine.generate(following, TOKENS, last), following)


def turns(start: Start) -> Outcome:
    """Four conversations at a time, of five turns: prefill reads from decode what was said, decode from prefill."""
    prefill, decode = used(start)
    said: list[list[int]] = [[]] * CONVERSATIONS
    handoffs: list[Any] = [ASK] * CONVERSATIONS
    tokens: list[list[int]] = []
    answers: list[Answer] = []
    for seed, lengths in enumerate(TURNS, start=60):
        said = [[*before, *new] for before, new in zip(said, prompts(seed, lengths), strict=True)]
        tokens += said
        answered = turn(prefill, decode, said, handoffs)
        answers += answered
        last = said
        said = [[*before, *answer.tokens] for before, answer in zip(said, answered, strict=True)]
        handoffs = [offered(answer) for answer in answered]
    following, ended = farewell(prefill, last, answered)
    idle(prefill, decode)
    return [*answers, *ended], separate([*tokens, *following], prefill, decode)


def crowded(start: Start) -> Outcome:
    """Decode keeps answers for an hour until it has no block left: the oldest give way to requests that wait.

    The last ones stay: prefill reads them with the next turns.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    said = prompts(67, (100,) * 24)
    answers: list[Answer] = []
    for first in range(0, len(said), 3):
        answers += turn(prefill, decode, said[first : first + 3], [ASK] * 3)
    following, ended = farewell(prefill, said[-2:], answers[-2:])
    idle(prefill)
    return [*answers, *ended], separate([*said, *following], prefill, decode)


def rewritten(start: Start) -> Outcome:
    """In place of decode's answer, the next prompt has another text, or nothing: prefill reads what it shares.

    It computes the rest, also what is too short to be read. With another conversation's handoff it fails.
    """
    return next_turns(start, expected_reads=(100, 0, 129, 0))


def rewritten_in_window(start: Start) -> Outcome:
    """The same where decode's first block of a window begins before that of the shorter prompt.

    Prefill stops one token short of a prompt.
    """
    return next_turns(start, expected_reads=(100, 0, 128, 0))


def rewritten_after_state(start: Start) -> Outcome:
    """The same where decode has no state any more from which to go on: prefill computes all."""
    return next_turns(start, expected_reads=(0, 0, 0, 0))


def next_turns(start: Start, expected_reads: tuple[int, ...]) -> Outcome:
    """A prefill engine that has cached nothing reads from decode, and has to read so many positions."""
    prefill, decode = used(start)
    successor = start("prefill").ready()
    said = prompts(65, (100, 40, 130, 101))
    answered = turn(prefill, decode, said, [ASK] * len(said))
    new = prompts(66, (60, 20, 0, 120))
    following = [[*before, *more] for before, more in zip([*said[:3], []], new, strict=True)]
    computed = successor.generate(following, 1, [offered(answer) for answer in answered])
    if (reads := tuple(answer.cached for answer in computed)) != expected_reads:
        raise AssertionError(f"void: prefill has read {reads} positions, expected {expected_reads}")
    *others, failed = computed
    again = loaded(decode.generate(following[:3], TOKENS, [offered(answer) for answer in others]), following[:3])
    lasts, ended = farewell(successor, [*following[:3], said[3]], [*again, answered[3]])
    idle(prefill, decode, successor)
    right = separate([*said, *following[:3], *lasts], successor, decode)
    return [*answered, *again, *ended, failed], [*right, []]


def another_prompt(start: Start) -> Outcome:
    """Decode is sent prompts with the handoff of another prompt of the same length: they fail.

    A request with two prompts comes to that: prefill answers with one handoff, with which decode
    reads both. Nothing of what has failed is cached: decode computes the same prompts afterwards.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens, others = prompts(34, (100,) * 4), prompts(35)
    computed = [tokens[0], *tokens[2:]]
    first, *swapped = [offered(answer) for answer in prefill.generate(computed, 1, [ASK] * 3)]
    answers = decode.generate(tokens, TOKENS, [first, first, *reversed(swapped)])
    own = decode.generate(tokens, TOKENS)
    read = moved(prefill, decode, others)
    idle(prefill, decode)
    right = agreed([*tokens, *others], prefill, decode)
    expected = [*unless_failed(answers[:1], right[:1]), *[[]] * 3]
    return [*answers, *own, *read], [*expected, *right]


def read_twice(start: Start) -> Outcome:
    """Handoffs are read once more when prefill has used their blocks again: right, or failed."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(36)
    transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]
    read = loaded(decode.generate(tokens, TOKENS, transfers), tokens)
    idle(prefill, decode)
    prefill.generate(prompts(37, (400,) * 8), 1)
    again = decode.generate(tokens, TOKENS, transfers)
    idle(prefill, decode)
    right = agreed(tokens, prefill, decode)
    return [*read, *again], [*right, *unless_failed(again, right)]


def reset(start: Start) -> Outcome:
    """Prefill's caches are reset, as for other weights: what it had computed fails, and its blocks are free."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    lost, others = prompts(67), prompts(68)
    transfers = [offered(answer) for answer in prefill.generate(lost, 1, [ASK] * len(lost))]
    prefill.forget()
    idle(prefill)
    failed = decode.generate(lost, TOKENS, transfers)
    read = moved(prefill, decode, others)
    idle(prefill, decode)
    return [*failed, *read], [*[[]] * len(lost), *agreed(others, prefill, decode)]


def twelve_answers(start: Start) -> Outcome:
    """A request for twelve answers, whose children wait for blocks of decode, while prefill computes others."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    (prompt,) = prompts(38, (200,))
    (computed,) = prefill.generate([prompt], 1, [ASK])
    name = decode.submit(prompt, TOKENS, offered(computed), num_answers=12)
    prefill.generate(prompts(39, (400,) * 16), 1)
    answers = decode.wait_all(name)
    idle(prefill, decode)
    right = [answer.tokens for answer in decode.wait_all(decode.submit(prompt, TOKENS, num_answers=12))]
    if len({tuple(tokens) for tokens in right}) < 2:
        raise AssertionError("void: all answers are the same")
    return answers, right


def twelve_readers(start: Start) -> Outcome:
    """Twelve requests read one handoff, as a router's retries do, and wait for blocks of decode.

    Prefill computes others meanwhile. The first of the twelve is right, others are right or fail.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(38, (200,)) * 12
    (answer,) = prefill.generate(tokens[:1], 1, [ASK])
    names = [decode.submit(prompt, TOKENS, offered(answer)) for prompt in tokens]
    first = decode.wait(names[0])
    prefill.generate(prompts(39, (400,) * 8), 1)
    answers = [first, *(decode.wait(name) for name in names[1:])]
    idle(prefill, decode)
    (right,) = agreed(tokens[:1], prefill, decode)
    return answers, [right, *unless_failed(answers[1:], [right] * 11)]


def another_adapter(start: Start) -> Outcome:
    """A request reads what its own LoRA adapter has computed, and fails with that of another."""
    return marked(start, {"adapter": "1"}, {"adapter": "2"}, {})


def another_salt(start: Start) -> Outcome:
    """A request reads what was computed with its own ``cache_salt``, and fails with another."""
    return marked(start, {"salt": "one"}, {"salt": "two"}, {})


def marked(start: Start, *marks: dict[str, str]) -> Outcome:
    """Reads prompts of all marks with all marks: unequal ones fail, and leave no block cached."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(40, (100,) * len(marks) ** 2)
    trips = list(zip(tokens, itertools.product(marks, repeat=2), strict=True))
    answers: list[Answer] = []
    expected: list[list[int]] = []
    for prompt, (mark, other) in trips:
        (computed,) = prefill.generate([prompt], 1, [ASK], **mark)
        answers += decode.generate([prompt], TOKENS, [offered(computed)], **other)
        answers += decode.generate([prompt], TOKENS, **other)
    idle(prefill, decode)
    for prompt, (mark, other) in trips:
        decode.forget()
        (undisturbed,) = decode.generate([prompt], TOKENS, **other)
        right = undisturbed.tokens
        expected += [right if mark == other else [], right]
    return answers, expected


def unlike(start: Start) -> Outcome:
    """Engines that generate different tokens: all that prefill has computed fails on decode.

    Decode then computes the same prompts itself, where nothing of what has failed may be cached.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(50)
    transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]
    answers = decode.generate(tokens, TOKENS, transfers)
    own = decode.generate(tokens, TOKENS)
    idle(prefill, decode)
    right = agreed(tokens, decode)
    if alone(prefill, tokens) == right:
        raise AssertionError("void: both engines generate the same tokens")
    return [*answers, *own], [*[[]] * len(tokens), *right]


def put_adapter(engine: Engine, number: int, *, times_kept: bool) -> None:
    """Writes the files of one of a model's adapters over those of its adapter 3, perhaps with the times of the last."""
    folder = engine.model / "adapter-3"
    folder.mkdir(exist_ok=True)
    for file in (engine.model / f"adapter-{number}").iterdir():
        copy = folder / file.name
        before_ns = copy.stat().st_mtime_ns if copy.exists() else 0
        shutil.copyfile(file, copy)
        if times_kept:
            os.utime(copy, ns=(before_ns, before_ns))


def adapter_replaced(start: Start) -> Outcome:
    """An adapter's files are replaced while some engines have the old one loaded. Others load the new one."""
    return replaced(start, times_kept=False)


def adapter_replaced_times_kept(start: Start) -> Outcome:
    """The same, and the times of the files do not show it."""
    return replaced(start, times_kept=True)


def replaced(start: Start, *, times_kept: bool) -> Outcome:
    """Engines read from each other under one adapter's name: right where both have the same one, else right or failed.

    The new adapter is loaded by engines that start, by one that has unloaded the old one, and in place.
    """
    old, decode = start("prefill").ready(), start("decode").ready()
    put_adapter(old, 1, times_kept=times_kept)
    all_tokens = [prompts(seed, (40, 100, 200)) for seed in range(70, 77)]
    answers: list[list[Answer]] = []

    def read(prefill: Engine, reader: Engine) -> None:
        tokens = all_tokens[len(answers)]
        computed = prefill.generate(tokens, 1, [ASK] * len(tokens), adapter="3")
        answers.append(reader.generate(tokens, TOKENS, [offered(answer) for answer in computed], adapter="3"))

    read(old, decode)
    put_adapter(old, 2, times_kept=times_kept)
    new, fresh = start("prefill").ready(), start("decode").ready()
    read(old, fresh)
    read(new, decode)
    read(old, decode)
    decode.unload("3")
    read(new, decode)
    read(old, decode)
    old.load("3")
    read(old, fresh)
    idle(old, new, decode, fresh)
    expected = []
    for tokens, found, (adapter, must_be_read) in zip(
        all_tokens,
        answers,
        (("1", True), ("2", False), ("1", False), ("1", False), ("2", True), ("2", False), ("2", True)),
        strict=True,
    ):
        decode.forget()
        right = [answer.tokens for answer in decode.generate(tokens, TOKENS, adapter=adapter)]
        expected += right if must_be_read else unless_failed(found, right)
    return [answer for found in answers for answer in found], expected


def adapter_overwritten(start: Start) -> Outcome:
    """Another adapter is written into a folder when decode has read, and before it loads it: no request is answered."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    put_adapter(prefill, 1, times_kept=False)
    computed = prefill.generate(prompts(1), 1, [ASK] * len(LENGTHS), adapter="3")
    answers = decode.generate(prompts(1), TOKENS, [offered(answer) for answer in computed], adapter="3")
    return answers, [[]] * len(answers)


def weights_reloaded(start: Start) -> Outcome:
    """Running engines load other weights from a folder."""
    return weights_changed(start, "reload")


def weights_updated(start: Start) -> Outcome:
    """Running engines get other weights from a trainer."""
    return weights_changed(start, "update")


def weights_changed(start: Start, way: str) -> Outcome:
    """Prefill gets other weights, with and without a reset, then decode does: right where both are of one version.

    Where they are not, a request fails, and one whose prompt prefill has computed before may be right. Versions without
    a name may fail, too.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    others = prefill.model.parent / "llama, other weights"
    build("llama, other weights", others)
    all_tokens = [prompts(seed) for seed in range(80, 86)]
    first = [alone(decode, tokens) for tokens in all_tokens]

    def read() -> None:
        answers.append(decode.generate(all_tokens[len(answers)], TOKENS, compute(all_tokens[len(answers)])))

    def compute(tokens: list[list[int]]) -> list[Any]:
        return [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]

    answers = [moved(prefill, decode, all_tokens[0])]
    before = compute(all_tokens[1])
    prefill.change_weights(way, others)
    answers.append(decode.generate(all_tokens[1], TOKENS, before))
    read()
    prefill.forget()
    read()
    decode.change_weights(way, others)
    decode.forget()
    read()
    for engine in (prefill, decode):
        engine.name_weights("2")
        engine.forget()
    answers.append(moved(prefill, decode, all_tokens[5]))
    idle(prefill, decode)
    last = [alone(decode, tokens) for tokens in all_tokens]
    if last == first:
        raise AssertionError("void: the weights have not changed")
    right = [*first[:4], *last[4:]]
    middle = [unless_failed(*each) for each in zip(answers[1:5], right[1:5], strict=True)]
    return [*itertools.chain(*answers)], [*right[0], *itertools.chain(*middle), *right[5]]


def drafted(start: Start) -> Outcome:
    """Decode drafts what it drafts alone, token by token: it has read the draft's cache too.

    Blocks of both engines hold other prompts before.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    use_blocks(prefill, decode)
    tokens = prompts(52)
    transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]
    reading = [decode.submit(prompt, TOKENS, one) for prompt, one in zip(tokens, transfers, strict=True)]
    answers = loaded([decode.wait(name) for name in reading], tokens)
    idle(prefill, decode)
    right = agreed(tokens, prefill, decode)
    decode.forget()
    undisturbed = [decode.submit(prompt, TOKENS) for prompt in tokens]
    for name in undisturbed:
        decode.wait(name)
    drafts = decode.drafts()
    if not drafts.keys() & {*reading}:
        raise AssertionError("void: decode has drafted nothing")
    pairs = zip(reading, undisturbed, strict=True)
    num_different = sum(drafts.get(name) != drafts.get(other) for name, other in pairs)
    if num_different:
        raise AssertionError(f"different: drafts of {num_different} of {len(tokens)} requests")
    return answers, right


def refused(start: Start) -> Outcome:
    """Decode must not read from prefill: whatever prefill has computed fails."""
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens = prompts(53)
    transfers = [offered(answer) for answer in prefill.generate(tokens, 1, [ASK] * len(tokens))]
    answers = decode.generate(tokens, TOKENS, transfers)
    idle(prefill, decode)
    return answers, [[]] * len(tokens)


def served(start: Callable[..., Server]) -> Outcome:
    """``vllm serve``, twice, and a proxy between them.

    A list of prompts with three answers to each, and a beam search, have the choices that decode alone has.
    """
    prefill, decode = (start(side, served=True) for side in ("prefill", "decode"))
    tokens = prompts(24)
    for server in (prefill, decode):
        completed(server.ready().port, prompts(51, (7,)), 2)  # the first step compiles, which may outlast a lease
    common = {"max_tokens": TOKENS, "ignore_eos": True}
    several = {"prompt": [text(prompt) for prompt in tokens[:3]], "n": 3, "temperature": 1, "seed": 1}
    beams = {"prompt": text(tokens[3]), "n": 2, "temperature": 0, "use_beam_search": True}
    bodies = [{**common, **several}, {**common, **beams}]
    with proxy(prefill.ready(), decode.ready()) as port:
        answers = completed(port, tokens, TOKENS)
        if decode.num_read() < sum(len(prompt) - 1 for prompt in tokens) and all(answer.tokens for answer in answers):
            raise AssertionError("void: decode has computed prompts itself")
        answers += [answer for body in bodies for answer in chosen(port, body)]
    right = [answer.tokens for body in bodies for answer in chosen(decode.port, body)]
    return answers, [*agreed(tokens, prefill, decode), *right]


def served_at_once(start: Callable[..., Server]) -> Outcome:
    """``vllm serve``, twice, and a proxy that asks both at once, each rank of prefill in its turn."""
    prefill, decode = (start(side, served=True) for side in ("prefill", "decode"))
    tokens = prompts(66)
    for server in (prefill, decode):
        completed(server.ready().port, prompts(67, (7,)), 2)
    with proxy(prefill, decode, prefill_ranks=2) as port:
        answers = completed(port, tokens, TOKENS)
    if decode.num_read() < sum(len(prompt) - 1 for prompt in tokens) and all(answer.tokens for answer in answers):
        raise AssertionError("void: decode has computed prompts itself")
    return answers, agreed(tokens, prefill, decode)


def beside(start: Start) -> Outcome:
    """Both engines have other connectors too, which store what was computed or read: that has to be right later.

    Each prompt is computed and read, then asked of decode without a handoff, and then computed and read again. Blocks
    are free long before a lease ends, whoever has loaded a request. A third engine without other connectors tells
    what is right.
    """
    prefill, decode, other = start("prefill").ready(), start("decode").ready(), start("decode", alone=True).ready()
    tokens = prompts(60, (*LENGTHS, 150, 300) * 2)
    answers = moved(prefill, decode, tokens)
    idle(prefill, decode)
    decode.forget(stored=False)
    again = decode.generate(tokens, TOKENS)
    if sum(answer.cached for answer in again) < 300:
        raise AssertionError("void: the other connectors have stored nothing on decode")
    for engine in (prefill, decode):
        engine.forget(stored=False)
    computed = prefill.generate(tokens, 1, [ASK] * len(tokens))
    if sum(answer.cached for answer in computed) < 300:
        raise AssertionError("void: the other connectors have stored nothing on prefill")
    answers += [*again, *decode.generate(tokens, TOKENS, [offered(answer) for answer in computed])]
    idle(prefill, decode)
    return answers, agreed(tokens, other) * 3


def served_beside(start: Callable[..., Any]) -> Outcome:
    """``vllm serve``, twice, each with other connectors beside this one: what it has read is in its metrics."""
    prefill, decode = (start(side, served=True) for side in ("prefill", "decode"))
    other = start("decode", alone=True).ready()
    tokens = prompts(61)
    for server in (prefill, decode):
        completed(server.ready().port, prompts(62, (7,)), 2)
    with proxy(prefill, decode) as port:
        answers = completed(port, tokens, TOKENS)
    figures = {
        name: decode.metric(f"vllm:{name}")
        for name in (
            "nixl_xfer_time_seconds_count",
            "nixl_post_time_seconds_count",
            "nixl_bytes_transferred_count",
            "nixl_num_descriptors_count",
            "kvplan_read_time_seconds_count",
            "kvplan_num_direct_reads_total",
            "kvplan_num_claims_total",
        )
    }
    # The guide's decode has two ranks, of which each one counts its reads; its scheduler counts claims.
    num_claims = figures.pop("kvplan_num_claims_total")
    if set(figures.values()) != {2 * len(tokens)} or num_claims != len(tokens):
        raise AssertionError(f"void: decode's metrics of {len(tokens)} requests are {figures}, {num_claims} claims")
    sizes = [decode.metric(f"vllm:nixl_{name}_sum") for name in ("bytes_transferred", "num_descriptors")]
    failed = [server.metric("vllm:nixl_num_failed_transfers_total") for server in (prefill, decode)]
    expired = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    if not all(sizes) or any(failed) or expired:
        raise AssertionError(f"void: metrics say {sizes} read, {failed} failed, {expired} expired")
    return answers, agreed(tokens, other)


def flipped(start: Start) -> Outcome:
    """Decode verifies what it has read. One bit of a request's cache is flipped before it does: the request fails.

    Before that, thousands of others are flipped and restored. Requests whose bits stay as they are are right.
    """
    prefill, decode = start("prefill").ready(), start("decode").ready()
    tokens, spoilt = prompts(40), prompts(41)
    read = moved(prefill, decode, tokens)
    decode.flip(FLIPS // len(spoilt))
    answers = prefill.generate(spoilt, 1, [ASK] * len(spoilt))
    lost = decode.generate(spoilt, TOKENS, [offered(answer) for answer in answers])
    counts = decode.flips()
    if counts != {"flips": FLIPS // len(spoilt) * len(spoilt), "unseen": 0}:
        raise AssertionError(f"unsafe: {counts}")
    idle(prefill, decode)
    return [*read, *lost], [*agreed(tokens, prefill, decode), *[[]] * len(spoilt)]


def flipped_chunks(start: Start) -> Outcome:
    """The same chunk by chunk: decode verifies each chunk, and the request fails with the first that was changed."""
    port = free_port()
    prefill, decode = start("prefill", port=port).ready(), start("decode").ready()
    tokens, spoilt = prompts(42, (450,) * 20), prompts(43, (450,) * 20)
    _, read = at_once(prefill, decode, port, tokens)
    answers = loaded([decode.wait(name) for name in read], tokens)
    num_parted = len({*decode.parts()})
    if num_parted < 5:
        raise AssertionError(f"void: {num_parted} of {len(read)} requests were read in parts")
    decode.flip(FLIPS // 100)
    _, read = at_once(prefill, decode, port, spoilt)
    lost = [decode.wait(name) for name in read]
    counts = decode.flips()
    if counts["unseen"] or counts["flips"] < FLIPS // 100 * len(spoilt):
        raise AssertionError(f"unsafe: {counts}")
    idle(prefill, decode)
    return [*answers, *lost], [*agreed(tokens, prefill, decode), *[[]] * len(spoilt)]


def unmoved(start: Start) -> Outcome:
    """The control: decode alone, told that all is loaded."""
    decode = start("decode").ready()
    tokens = prompts(1)
    answers = decode.generate(tokens, TOKENS, [{"do_remote_prefill": True}] * len(tokens))
    return answers, agreed(tokens, decode)
