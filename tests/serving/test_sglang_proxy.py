"""The proxy between vLLM and SGLang, as a program, between stand-ins for their servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from kvplan_nixl.proxy import Engines
from kvplan_nixl.serving import Driver
from kvplan_nixl.sglang.bootstrap import BootstrapServer
from kvplan_nixl.sglang.proxy import ToSglang, main
from tests.blocking import ask, publish, wait_until
from tests.serving.test_proxy import Body, Engine, Request, Running, generate, started

HANDOFF = {"remote_lease": "a lease"}


class Between(Running):
    """The proxy between two stand-ins."""

    def __init__(self, prefill: Engine, decode: Engine, *options: str) -> None:
        asks = self._start("kvplan_nixl.sglang", [prefill.server_port], [decode.server_port], options)
        assert asks in ("SGLang prefill and vLLM decode", "vLLM prefill and SGLang decode")


@contextmanager
def running(prefill: Engine, decode: Engine, *options: str) -> Iterator[Running]:
    with Between(prefill, decode, *options) as proxy:
        yield proxy
        proxy.end()


def compute(request: Request, body: Body) -> None:
    """What vLLM's prefill answers: a handoff, and the first token if that is asked for."""
    choice = {"token_ids": [42], "prompt_token_ids": [5, 6, 7]} if body.get("return_token_ids") else {"text": "whole"}
    request.send(200, {"choices": [choice], "kv_transfer_params": HANDOFF})


def read_room(request: Request, body: Body) -> None:
    """What SGLang's decode answers: the prompt, and what its room has."""
    address = f"{body['bootstrap_host']}:{body['bootstrap_port']}"
    entry = ask(address, [body["bootstrap_room"]])[body["bootstrap_room"]]
    request.send(200, {"choices": [{"index": 0, "text": json.dumps([body.get("prompt"), entry])}]})


def text_of(answer: Any) -> Any:
    return json.loads(answer["choices"][0]["text"])


@pytest.mark.parametrize(
    "path, body, prompt",
    [("/v1/completions", {"prompt": "A"}, [5, 6, 7]), ("/v1/chat/completions", {"messages": [{"role": "user"}]}, None)],
)
def test_sglang_reads_what_vllm_has_computed(path: str, body: Body, prompt: list[int] | None) -> None:
    """Prefill is asked for the whole prompt and one token; SGLang finds both in a room, which is gone afterwards."""
    with started(compute) as prefill, started(read_room) as decode, running(prefill, decode) as proxy:
        status, answer = proxy.ask({**body, "max_tokens": 30, "n": 1}, path)
        assert (status, text_of(answer)) == (200, [prompt, {"handoff": HANDOFF, "token": 42}])
        (asked,) = prefill.bodies
        assert (asked["max_tokens"], asked["kv_transfer_params"]["whole_prompt"]) == (1, True)
        (sent,) = decode.bodies
        assert (sent["max_tokens"], "kv_transfer_params" in sent) == (30, False)
        assert ask(f"127.0.0.1:{sent['bootstrap_port']}", [sent["bootstrap_room"]]) == {}


def test_vllm_alone_computes_what_sglang_would_not_read() -> None:
    """SGLang's decode computes no prompt."""
    with started(compute) as prefill, started(read_room) as decode, running(prefill, decode) as proxy:
        status, answer = proxy.ask({"prompt": "A", "echo": True})
        assert (status, answer["choices"][0]["text"]) == (200, "whole")
        assert decode.bodies == []


def test_a_prefill_that_keeps_no_cache_is_a_bad_gateway() -> None:
    with (
        started(generate) as prefill,
        started(read_room) as decode,
        running(prefill, decode) as proxy,
    ):
        status, answer = proxy.ask({"prompt": "A"})
        assert (status, "keeps no cache" in answer["error"]["message"]) == (502, True)
        assert decode.bodies == []


@contextmanager
def sglang(entries: Sequence[Body]) -> Iterator[tuple[Engine, BootstrapServer]]:
    """A stand-in for SGLang's prefill, which publishes entries of each room and answers when it is told to."""
    server = BootstrapServer("127.0.0.1", 0, system=Driver())

    def answer(request: Request, body: Body) -> None:
        room, owner = body["bootstrap_room"], ""
        for entry in entries:
            owner = publish(f"127.0.0.1:{body['bootstrap_port']}", room, entry, owner=owner)
        engine.read.wait(30)  # type: ignore[attr-defined]
        request.send(200 if entries else 503, {"choices": []})

    with closing(server), started(answer) as engine:
        engine.read = threading.Event()  # type: ignore[attr-defined]
        try:
            yield engine, server
        finally:
            engine.read.set()  # type: ignore[attr-defined]


def held(server: BootstrapServer) -> tuple[int, int]:
    """The rooms that a server is asked for, and the questions that it holds."""
    polls = server._polls._polls
    return len(polls._waiting), polls._num_waiting


def handoff_of(request: Request, body: Body) -> None:
    """What vLLM's decode answers: what it was handed."""
    request.send(200, {"choices": [{"index": 0, "text": json.dumps(body["kv_transfer_params"])}]})


def test_vllm_reads_what_sglang_has_computed() -> None:
    """SGLang answers only when its pages were read, so vLLM is asked before; a part of a prompt is not handed on."""
    entries: list[Body] = [{"handoff": {"remote_lease": "a lease", "part": 1}}, {"handoff": HANDOFF, "token": 5}]
    with sglang(entries) as (prefill, server), started(handoff_of) as decode:
        with running(prefill, decode, "--bootstrap", server.address) as proxy:
            status, answer = proxy.ask({"prompt": "A", "max_tokens": 30})
            assert (status, text_of(answer)) == (200, {"do_remote_prefill": True, **HANDOFF})
            (asked,) = prefill.bodies
            assert (asked["max_tokens"], "kv_transfer_params" in asked) == (1, False)
        prefill.read.set()  # type: ignore[attr-defined]


def test_a_prefill_of_sglang_that_fails_is_heard() -> None:
    """Its error goes to the client: decode is not asked."""
    with sglang([]) as (prefill, server), started(handoff_of) as decode:
        prefill.read.set()  # type: ignore[attr-defined]
        with running(prefill, decode, "--bootstrap", server.address) as proxy:
            assert proxy.ask({"prompt": "A"}) == (503, {"choices": []})
            assert decode.bodies == []


def test_a_bootstrap_server_that_is_gone_is_a_bad_gateway() -> None:
    with sglang([]) as (prefill, _), started(handoff_of) as decode:
        with running(prefill, decode, "--bootstrap", "127.0.0.1:1") as proxy:
            status, answer = proxy.ask({"prompt": "A"})
        assert (status, decode.bodies) == (502, [])
        assert "127.0.0.1:1: expected an answer, got connection refused" in answer["error"]["message"]
        prefill.read.set()  # type: ignore[attr-defined]


def test_prompts_that_wait_share_a_question() -> None:
    """Each held a connection of its own to the bootstrap server, which has 1,024 for everybody."""
    with (
        sglang([]) as (prefill, server),
        started(handoff_of) as decode,
        running(prefill, decode, "--bootstrap", server.address) as proxy,
        ExitStack() as stack,
    ):
        for _ in range(50):
            stack.enter_context(closing(proxy.request({"prompt": "A"})))
        wait_until(lambda: len(prefill.bodies) == 50)
        wait_until(lambda: held(server) == (50, 1))


def test_a_client_that_goes_away_is_no_line_of_the_log() -> None:
    """Each was a traceback, when the bootstrap server had answered."""
    with (
        sglang([]) as (prefill, server),
        started(handoff_of) as decode,
        Between(prefill, decode, "--bootstrap", server.address) as proxy,
    ):
        rooms = list[int]()
        for _ in range(3):
            with closing(proxy.request({"prompt": "A"})):
                # prefill and its server are asked in any order
                wait_until(lambda: held(server) == (1, 1) and len(prefill.bodies) > len(rooms))
            wait_until(lambda: held(server) == (0, 0))
            rooms.append(prefill.bodies[-1]["bootstrap_room"])
            publish(server.address, rooms[-1], {"handoff": HANDOFF, "token": 5})
        assert proxy.end() == ""


def test_an_answer_stands_whatever_becomes_of_its_room() -> None:
    """A room that could not be withdrawn was an error after the answer; it has its time."""
    driver = Driver()
    server = BootstrapServer("127.0.0.1", 0, system=driver)

    class Computed(ToSglang):
        async def _asked(self, *_: Any) -> Body:
            return {"choices": [{"token_ids": [42]}], "kv_transfer_params": HANDOFF}

    async def answer(_: Body) -> str:
        await asyncio.to_thread(server.close)
        return "answered"

    proxy = Computed(Engines(()), Engines(()), system=driver, server=server)
    request: Any = None
    assert asyncio.run(proxy._answer(request, {"prompt": "A"}, answer)) == "answered"


def test_each_prefill_has_a_bootstrap_server() -> None:
    engines = ["--prefill", "http://a:1", "--prefill", "http://b:1", "--decode", "http://c:1"]
    result = CliRunner().invoke(main, [*engines, "--bootstrap", "a:8998"])
    assert result.exit_code == 2
    assert "expected one --bootstrap for each of 2 --prefill, got 1" in result.output


def test_a_weak_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLAN_KEY", "short")
    result = CliRunner().invoke(main, ["--prefill", "http://a:1", "--decode", "http://c:1"])
    assert result.exit_code == 1
    assert "RANGE" in result.output
