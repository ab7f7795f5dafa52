"""What engines on hosts of their own are put through: links that part, lose one way, are slow; a host that restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tests.engines.hosts import Host, Network
from tests.engines.process import Answer, Engine, free_port
from tests.engines.trials import (
    ASK,
    IDLE_S,
    TOKENS,
    Outcome,
    Start,
    agreed,
    idle,
    moved,
    offered,
    prompts,
    unless_failed,
)

SLOW = "1mbit"
"""The rate of a link on which the reads of a trial take seconds."""

FAULT_S = 45
"""Seconds that a fault lasts: longer than a lease of 30 s, and than decode waits for an answer."""


class Fault(NamedTuple):
    """How a fault between prefill's host and decode's begins, and how it ends."""

    begin: Callable[[Network, Host, Host], None]
    end: Callable[[Network, Host, Host], None]


PARTED = Fault(
    lambda network, prefill, decode: network.part(prefill),
    lambda network, prefill, decode: network.join(prefill),
)
UNANSWERED = Fault(
    lambda network, prefill, decode: network.lose(prefill, decode),
    lambda network, prefill, decode: network.find(prefill, decode),
)
UNASKED = Fault(
    lambda network, prefill, decode: network.lose(decode, prefill),
    lambda network, prefill, decode: network.find(decode, prefill),
)


def on_two_hosts(start: Start) -> Outcome:
    """Prefill and decode have a host each."""
    with Network() as network:
        prefill, decode = start("prefill", host=network.host()), start("decode", host=network.host())
        tokens = prompts(70)
        answers = moved(prefill.ready(), decode.ready(), tokens)
        idle(prefill, decode)
        return answers, agreed(tokens, prefill, decode)


def on_a_slow_link(start: Start) -> Outcome:
    """Prefill's host sends slowly: requests take seconds, and are right."""
    with Network() as network:
        host = network.host()
        prefill, decode = start("prefill", host=host), start("decode", host=network.host())
        tokens = prompts(71, (300,) * 12)
        before = moved(prefill.ready(), decode.ready(), prompts(70))
        network.limit(host, SLOW)
        began = time.monotonic()
        answers = moved(prefill, decode, tokens)
        print(f"all right after {time.monotonic() - began:.0f} s")
        idle(prefill, decode)
        return [*before, *answers], agreed([*prompts(70), *tokens], prefill, decode)


def hosts_parted(start: Start) -> Outcome:
    """Prefill's host can neither send nor receive for a while."""
    return under_fault(start, PARTED)


def answers_lost(start: Start) -> Outcome:
    """What prefill's host sends to decode's is lost for a while; what it receives is not."""
    return under_fault(start, UNANSWERED)


def questions_lost(start: Start) -> Outcome:
    """What decode's host sends to prefill's is lost for a while; what it receives is not."""
    return under_fault(start, UNASKED)


def under_fault(start: Start, fault: Fault) -> Outcome:
    """Decode reads under a fault: each request is right or fails, those of another prefill are right.

    Then the fault ends: what the first prefill computes from then on is right, and all blocks are free.
    """
    with Network() as network:
        host, other_host, decode_host = (network.host() for _ in range(3))
        prefill, other = start("prefill", host=host), start("prefill", host=other_host)
        decode = start("decode", host=decode_host)
        for engine in (prefill, other, decode):
            engine.ready()
        tokens, of_other = prompts(71, (300,) * 12), prompts(72)
        before = moved(prefill, decode, prompts(70))
        computed = prefill.generate(tokens, 1, [ASK] * len(tokens))
        network.limit(host, SLOW)
        names = submitted(decode, tokens, computed)
        time.sleep(1)  # some bytes have moved, most have not
        fault.begin(network, host, decode_host)
        began = time.monotonic()
        served = moved(other, decode, of_other)
        served_s = time.monotonic() - began
        time.sleep(max(0, began + FAULT_S - time.monotonic()))
        fault.end(network, host, decode_host)
        network.limit(host, "1gbit")
        began = time.monotonic()
        ended = [decode.wait(name, timeout_s=IDLE_S) for name in names]
        after = recovered(prefill, decode)
        recovered_s = time.monotonic() - began
        idle(prefill, other, decode)
        num_failed = sum(answer.reason == "error" for answer in ended)
        counts = f"{num_failed} of {len(ended)} failed"
        print(f"{counts}; others right in {served_s:.1f} s; all right again {recovered_s:.1f} s after the fault")
        if not num_failed:
            raise AssertionError("void: no request has failed under the fault")
        right = agreed([*prompts(70), *of_other, *prompts(73), *tokens], prefill, other, decode)
        lasting = len(right) - len(tokens)
        return [*before, *served, *after, *ended], [*right[:lasting], *unless_failed(ended, right[lasting:])]


def submitted(decode: Engine, tokens: list[list[int]], computed: list[Answer]) -> list[str]:
    """Let decode read what prefill has computed; the names of its requests."""
    pairs = zip(tokens, computed, strict=True)
    return [decode.submit(prompt, TOKENS, offered(answer)) for prompt, answer in pairs]


def recovered(prefill: Engine, decode: Engine) -> list[Answer]:
    """Read new prompts until none of them fails."""
    deadline = time.monotonic() + IDLE_S
    while True:
        tokens = prompts(73)
        computed = prefill.generate(tokens, 1, [ASK] * len(tokens))
        answers = decode.generate(tokens, TOKENS, [offered(answer) for answer in computed])
        if time.monotonic() > deadline or not any(answer.reason == "error" for answer in answers):
            return answers


def host_restarts(start: Start) -> Outcome:
    """Prefill's host goes away while decode reads, and comes back with a new engine of the same name and address."""
    with Network() as network:
        host, decode_host = network.host(), network.host()
        where = {"name": "prefill", "port": free_port(), "host": host}
        prefill, decode = start("prefill", **where).ready(), start("decode", host=decode_host).ready()
        tokens = prompts(71, (300,) * 12)
        before = moved(prefill, decode, prompts(70))
        computed = prefill.generate(tokens, 1, [ASK] * len(tokens))
        network.limit(host, SLOW)
        names = submitted(decode, tokens, computed)
        time.sleep(1)
        network.part(host)
        began = time.monotonic()
        prefill.kill()
        prefill = start("prefill", **where).ready()
        network.join(host)
        network.limit(host, "1gbit")
        back_s = time.monotonic() - began
        after = recovered(prefill, decode)
        recovered_s = time.monotonic() - began - back_s
        ended = [decode.wait(name, timeout_s=IDLE_S) for name in names]
        idle(prefill, decode)
        num_failed = sum(answer.reason == "error" for answer in ended)
        counts = f"{num_failed} of {len(ended)} failed"
        print(f"{counts}; away for {back_s:.0f} s; all right again {recovered_s:.1f} s later")
        right = agreed([*prompts(70), *prompts(73), *tokens], prefill, decode)
        lasting = len(right) - len(tokens)
        return [*before, *after, *ended], [*right[:lasting], *unless_failed(ended, right[lasting:])]
