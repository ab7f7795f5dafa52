"""The proxy, as a program, between stand-ins for vLLM's servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, Self

import pytest
from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientConnectorSSLError,
    ClientSession,
    TCPConnector,
    web,
)
from aiohttp.test_utils import TestServer, make_mocked_request
from click.testing import CliRunner

from kvplan_nixl.proxy import (
    BUSY,
    IDLE_S,
    IDLE_SINCE,
    MAX_BODY_BYTES,
    MAX_PARTS,
    MAX_PROMPTS,
    close_idle,
    refusing,
)
from kvplan_nixl.vllm.proxy import main
from tests.blocking import wait_until
from tests.pages import ROOT
from tests.serving.test_access import received

NUM_CLIENTS = 300
TIMEOUT_S = 30
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}

Body = dict[str, Any]
Answer = Callable[["Request", Body], None]


class Request(BaseHTTPRequestHandler):
    """A request to a stand-in."""

    server: Engine

    def do_GET(self) -> None:
        self.server.requests.append((self.path, {}))
        self.send(200, {"at": self.path})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.credentials.append(self.headers["Authorization"])
        self.server.ranks.append(self.headers["X-data-parallel-rank"])
        self.server.answer(self, body)

    def send(self, status: int, answer: Any) -> None:
        """Sends a whole answer."""
        data = json.dumps(answer).encode()
        self.begin(status, "application/json", length=len(data))
        self.wfile.write(data)

    def begin(self, status: int, content_type: str, length: int | None = None) -> None:
        """Sends the head of an answer, which comes in chunks if it has no length."""
        self.protocol_version = "HTTP/1.1"
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        """Sends a chunk; an empty one is the last."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        return


class Engine(ThreadingHTTPServer):
    """A stand-in for an engine's server: it notes what it is asked, and answers by a function."""

    request_queue_size = 1024

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.answer = answer
        self.requests: list[tuple[str, Body]] = []
        self.credentials: list[str | None] = []
        self.ranks: list[str | None] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        return  # the proxy has hung up, as its client has

    @property
    def bodies(self) -> list[Body]:
        """The bodies of the requests."""
        return [body for _, body in self.requests]


def grant(request: Request, body: Body) -> None:
    """Prefill's answer: a handoff of the prompt, or of the first one of a list, as vLLM does."""
    prompt: Any = body.get("prompt")
    several = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    request.send(200, {"kv_transfer_params": {"of": prompt[0] if several else prompt}})


def generate(request: Request, body: Body) -> None:
    """Decode's answer: ``n`` choices, whose text says which handoff of which prompt was read."""
    prompt, handoff = body.get("prompt"), body.get("kv_transfer_params")
    texts = [f"{child}: {prompt} by {handoff}" for child in range(body.get("n", 1))]
    choices = [{"index": index, "text": text} for index, text in enumerate(texts)]
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "details": None}
    request.send(200, {"model": "stand-in", "choices": choices, "usage": usage})


def fail(status: int) -> Answer:
    """An answer with an error."""
    return lambda request, _: request.send(status, {"error": f"status {status}"})


class Running:
    """The proxy as a program, between servers at some ports."""

    def __init__(
        self,
        prefills: Sequence[int],
        decodes: Sequence[int],
        listeners: Sequence[str] = (),
        prefill_ranks: int = 1,
        limit: int | None = None,
        constants: Mapping[str, float] = {},
    ) -> None:
        options = [word for listener in listeners for word in ("--listener", listener)]
        options += ["--prefill-ranks", f"{prefill_ranks}"]
        asks = self._start("kvplan_nixl.vllm", prefills, decodes, options, limit, constants)
        assert asks == f"{len(prefills)} prefill and {len(decodes)} decode engines"

    def _start(
        self,
        module: str,
        prefills: Sequence[int],
        decodes: Sequence[int],
        options: Sequence[str],
        limit: int | None = None,
        constants: Mapping[str, float] = {},
    ) -> str:
        """Start the proxy of a package on a free port. Return which engines it says that it asks."""
        limits = f"from kvplan_nixl import proxy; vars(proxy).update({dict(constants)})"
        code = f"{limits}; from {module}.proxy import main; main()"
        command = [sys.executable, "-c", code, "--port", "0", *options]
        for side, ports in (("--prefill", prefills), ("--decode", decodes)):
            command += [word for port in ports for word in (side, f"http://127.0.0.1:{port}")]
        if limit is not None:
            command = ["sh", "-c", f'ulimit -S -n {limit}; exec "$@"', "sh", *command]
        self._process = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        told = re.fullmatch(r"http://127\.0\.0\.1:(\d+) asks (.*)\n", self._process.stdout.readline())
        if told is None:
            self._process.kill()
            raise AssertionError(self._process.communicate()[1])
        self.port = int(told[1])
        return told[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever has failed. A proxy that has ended is left alone."""
        self._process.kill()
        self._process.communicate()

    def end(self) -> str:
        """Ends the proxy, as a supervisor does. Returns its log."""
        self._process.terminate()
        _, log = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0
        return log

    def request(self, body: Any, path: str = COMPLETIONS, **headers: str) -> HTTPConnection:
        """A connection to the proxy on which a request was sent."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        text = body if isinstance(body, str) else json.dumps(body)
        connection.request("POST", path, text, headers)
        return connection

    @contextmanager
    def open(self, body: Any, path: str = COMPLETIONS, **headers: str) -> Iterator[HTTPResponse]:
        """The response to a request, of which the head is there."""
        with closing(self.request(body, path, **headers)) as connection:
            yield connection.getresponse()

    def ask(self, body: Any, path: str = COMPLETIONS, **headers: str) -> tuple[int, Any]:
        """The status of an answer, and what it says."""
        with self.open(body, path, **headers) as response:
            return response.status, json.load(response)

    def look(self, path: str) -> tuple[int, bytes]:
        """The status of the answer to GET, and what it says."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()


class Between(Running):
    """The proxy between one stand-in of each kind."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        super().__init__([prefill.server_port], [decode.server_port])
        self.prefill = prefill
        self.decode = decode


@pytest.fixture(scope="module")
def between() -> Iterator[Between]:
    """The proxy between two stand-ins."""
    with started() as prefill, started() as decode, Between(prefill, decode) as proxy:
        yield proxy
        proxy.end()


@contextmanager
def started(answer: Answer = generate) -> Iterator[Engine]:
    """A stand-in that answers as said."""
    engine = Engine(answer)
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.server_close()


@pytest.fixture
def guide(between: Between) -> Start:
    """The proxy, whose stand-ins answer as said, and have been asked nothing."""

    def start(prefill: Answer = grant, decode: Answer = generate) -> Between:
        for engine, answer in ((between.prefill, prefill), (between.decode, decode)):
            engine.answer = answer
            engine.requests = []
            engine.credentials = []
        return between

    return start


Start = Callable[..., Between]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (COMPLETIONS, {"prompt": "A KV cache is"}),
        (COMPLETIONS, {"prompt": [5, 6, 7]}),
        (COMPLETIONS, {"prompt": ["A KV cache is"]}),
        (CHAT, {"messages": [{"role": "user", "content": "What is a KV cache?"}]}),
    ],
)
def test_prefill_is_asked_for_one_token_only(guide: Start, path: str, prompt: Body) -> None:
    """Prefill's kv_transfer_params reach decode as they are, and decode's answer goes back."""
    proxy = guide(prefill=lambda request, _: request.send(200, {"kv_transfer_params": {"port": 5}}))
    body = {"model": "mine", **prompt, "max_tokens": 30, "temperature": 0}
    status, answer = proxy.ask(body, path)
    assert status == 200
    assert answer["choices"][0]["text"].endswith(" by {'port': 5}")
    assert proxy.prefill.requests == [(path, {**body, "max_tokens": 1, "kv_transfer_params": KEEP})]
    assert proxy.decode.requests == [(path, {**body, "kv_transfer_params": {"port": 5}})]


def test_each_prompt_of_a_list_has_its_own_handoff(guide: Start) -> None:
    """A list is answered as vLLM answers it: ``n`` choices for each prompt in turn, usage added."""
    proxy = guide()
    status, answer = proxy.ask({"prompt": ["A", "B", "C"], "n": 2})
    texts = [f"{child}: {prompt} by {{'of': '{prompt}'}}" for prompt in "ABC" for child in range(2)]
    assert status == 200
    assert answer["choices"] == [{"index": i, "text": text} for i, text in enumerate(texts)]
    assert answer["usage"] == {"prompt_tokens": 15, "completion_tokens": 6, "total_tokens": 21}
    assert answer["model"] == "stand-in"


def test_prompts_of_a_list_may_be_tokens(guide: Start) -> None:
    """A list of lists is a list of prompts."""
    _, answer = guide().ask({"prompt": [[5, 6], [7]]})
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["0: [5, 6] by {'of': [5, 6]}", "0: [7] by {'of': [7]}"]


def test_a_long_list_does_not_wait_for_itself(guide: Start) -> None:
    """Prefill has blocks for a few prompts, and computes the next one when decode has read one."""
    free = threading.Semaphore(4)

    def grant_when_free(request: Request, body: Body) -> None:
        answer = grant if free.acquire(timeout=TIMEOUT_S / 2) else fail(503)
        answer(request, body)

    def read(request: Request, body: Body) -> None:
        free.release()
        generate(request, body)

    proxy = guide(grant_when_free, read)
    prompts = [f"w{number}" for number in range(120)]
    status, answer = proxy.ask({"prompt": prompts})
    assert status == 200, answer
    assert len(answer["choices"]) == len(prompts)


def test_what_shapes_the_answer_stays_away_from_prefill(guide: Start) -> None:
    """Decode gets every key, and prefill those of the prompt: one child, one token, no stream."""
    shape = {
        "n": 3,
        "best_of": 3,
        "min_tokens": 8,
        "max_tokens": 30,
        "max_completion_tokens": 30,
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "logprob_token_ids": [5],
    }
    prompt = {"messages": [{"role": "user", "content": "A"}], "tools": [], "cache_salt": "s"}
    proxy = guide()
    status, answer = proxy.ask({**prompt, **shape}, CHAT)
    assert (status, len(answer["choices"])) == (200, 3)
    assert proxy.prefill.bodies == [{**prompt, "max_tokens": 1, "kv_transfer_params": KEEP}]
    assert proxy.decode.bodies == [{**prompt, **shape, "kv_transfer_params": {"of": None}}]


@pytest.mark.parametrize(
    "keys",
    [
        {"use_beam_search": True, "n": 2},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"prompt": None, "prompt_embeds": ["AAAA"]},
        {"prompt": ["A", "B"], "stream": True},
    ],
)
def test_decode_computes_what_vllm_reads_no_cache_for(guide: Start, keys: Body) -> None:
    """Prefill is not asked for a cache that nobody would read."""
    proxy = guide()
    status, _ = proxy.ask({"prompt": "A", **keys})
    assert status == 200
    assert proxy.prefill.bodies == []
    assert proxy.decode.bodies == [{"prompt": "A", **keys}]


def test_a_stream_passes_through_as_it_comes(guide: Start) -> None:
    """The client has read a chunk before decode sends the next one."""
    is_read = threading.Event()

    def stream(request: Request, _: Body) -> None:
        request.begin(200, "text/event-stream; charset=utf-8")
        request.send_chunk(b"data: 1\n\n")
        request.send_chunk(b"data: %s\n\n" % str(is_read.wait(TIMEOUT_S / 2)).encode())
        request.send_chunk(b"")

    body = {"prompt": "A", "stream": True, "stream_options": {"include_usage": True}}
    proxy = guide(decode=stream)
    with proxy.open(body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert [response.readline(), response.readline()] == [b"data: 1\n", b"\n"]
        is_read.set()
        assert response.read() == b"data: True\n\n"
    assert proxy.prefill.bodies == [{"prompt": "A", "max_tokens": 1, "kv_transfer_params": KEEP}]
    assert proxy.decode.bodies == [{**body, "kv_transfer_params": {"of": "A"}}]


@pytest.mark.parametrize("resets", [False, True])
def test_a_stream_that_breaks_does_not_end_well(guide: Start, resets: bool) -> None:
    """If decode dies in mid-answer, the client sees an answer without an end."""

    def die(request: Request, _: Body) -> None:
        request.begin(200, "text/event-stream")
        request.send_chunk(b"data: 1\n\n")
        if resets:
            linger = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.connection.close()

    proxy = guide(decode=die)
    body = {"prompt": "A", "stream": True}
    with proxy.open(body) as response:
        # a reset may take what came before it
        if resets and response.status == 502:
            return
        with pytest.raises(IncompleteRead) as cut:
            response.read()
    assert cut.value.partial in (b"data: 1\n\n", b"")


@pytest.mark.parametrize("asks", ["prefill", "decode"])
def test_a_client_that_goes_away_ends_its_request(guide: Start, asks: str) -> None:
    """The engine that works for it sees its connection close."""
    is_asked = threading.Event()
    is_closed = threading.Event()

    def wait(request: Request, _: Body) -> None:
        is_asked.set()
        request.connection.settimeout(TIMEOUT_S)
        if request.connection.recv(1) == b"":
            is_closed.set()

    proxy = guide(**{asks: wait})
    connection = proxy.request({"prompt": "A"})
    assert is_asked.wait(TIMEOUT_S)
    connection.close()
    assert is_closed.wait(TIMEOUT_S)


def test_hundreds_of_clients_are_served(guide: Start) -> None:
    """Clients that come at the same time get the answers to their own prompts."""
    together = threading.Barrier(NUM_CLIENTS)
    proxy = guide()

    def client(number: int) -> tuple[int, str]:
        together.wait(TIMEOUT_S)
        status, answer = proxy.ask({"prompt": f"w{number}"})
        return status, answer["choices"][0]["text"]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(client, range(NUM_CLIENTS)))
    numbers = range(NUM_CLIENTS)
    assert answers == [(200, f"0: w{number} by {{'of': 'w{number}'}}") for number in numbers]


@pytest.mark.parametrize("prompt", ["A", ["A", "B"]])
@pytest.mark.parametrize(("prefill", "decode"), [(fail(400), generate), (grant, fail(503))])
def test_an_engine_that_fails_is_heard(
    guide: Start,
    prompt: Any,
    prefill: Answer,
    decode: Answer,
) -> None:
    """The status and text of an engine's error go back."""
    status, answer = guide(prefill, decode).ask({"prompt": prompt})
    assert answer == {"error": f"status {status}"}
    assert status == (400 if decode is generate else 503)


def test_a_prompt_that_fails_ends_the_others_of_its_list(guide: Start) -> None:
    """Nobody would read their answers, and they were computed to the end, beside the limit of prompts."""
    is_asked, is_closed = threading.Event(), threading.Event()

    def answer(request: Request, body: Body) -> None:
        if body["prompt"] == "A":
            is_asked.wait(TIMEOUT_S)
            fail(503)(request, body)
            return
        is_asked.set()
        request.connection.settimeout(TIMEOUT_S)
        if request.connection.recv(1) == b"":
            is_closed.set()

    assert guide(decode=answer).ask({"prompt": ["A", "B"]}) == (503, {"error": "status 503"})
    assert is_closed.wait(TIMEOUT_S)


@pytest.mark.parametrize("gone", ["prefill", "decode"])
def test_an_engine_that_is_gone_is_a_bad_gateway(gone: str) -> None:
    """Where nobody answers, the status is 502, and the proxy is not well."""
    with ExitStack() as stack:
        engine = stack.enter_context(started(grant))
        ports = [1, engine.server_port] if gone == "prefill" else [engine.server_port, 1]
        proxy = stack.enter_context(Running(ports[:1], ports[1:]))
        for prompt in ("A", ["A", "B"]):
            status, answer = proxy.ask({"prompt": prompt})
            assert status == 502
            assert answer["error"]["message"] == "cannot reach 127.0.0.1:1: connection refused"
            assert (answer["error"]["type"], answer["error"]["code"]) == ("BadGatewayError", 502)
        assert proxy.look("/health")[0] == 502
        proxy.end()


@pytest.mark.parametrize(
    ("raised", "error", "reason"),
    [
        (
            ClientConnectorDNSError,
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known",
        ),
        (
            ClientConnectorSSLError,
            ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
            "[SSL: WRONG_VERSION_NUMBER] wrong version number",
        ),
    ],
)
def test_names_and_tls_that_fail_are_told_in_their_own_words(
    raised: type[ClientConnectorError], error: OSError, reason: str
) -> None:
    """Their errors have numbers too, which are none of the system's."""
    key: Any = SimpleNamespace(host="prefill.example", port=8100, ssl=True)

    async def fails(_: web.Request) -> web.Response:
        raise raised(key, error)

    async def ask() -> web.StreamResponse:
        app = web.Application()
        app[BUSY], app[IDLE_SINCE] = set(), {}
        return await refusing(make_mocked_request("GET", "/", app=app), fails)

    answer: Any = asyncio.run(ask())
    message = json.loads(answer.text)["error"]["message"]
    assert message == f"cannot reach prefill.example:8100: {reason}"


def test_engines_of_a_kind_take_turns() -> None:
    """All are asked as often. One that accepts no connection is left out, and the log says so."""
    with ExitStack() as stack:
        first, second, decode = (stack.enter_context(started(answer)) for answer in (grant, grant, generate))
        proxy = stack.enter_context(Running([first.server_port, 1, second.server_port], [decode.server_port]))
        answers = [proxy.ask({"prompt": f"w{number}"}) for number in range(6)]
        log = proxy.end()
    texts = [answer["choices"][0]["text"] for _, answer in answers]
    assert texts == [f"0: w{number} by {{'of': 'w{number}'}}" for number in range(6)]
    assert sorted([len(first.requests), len(second.requests)]) == [2, 4]
    assert log.count("127.0.0.1:1 ") == 2


def test_the_proxy_is_as_well_as_its_engines(guide: Start) -> None:
    """GET /health asks an engine of each kind, and the models are those of decode."""
    proxy = guide()
    assert proxy.look("/health") == (200, b"")
    assert proxy.look("/v1/models") == (200, b'{"at": "/v1/models"}')
    asked = [[path for path, _ in engine.requests] for engine in (proxy.prefill, proxy.decode)]
    assert asked == [["/health"], ["/health", "/v1/models"]]


@pytest.mark.parametrize("path", ["/metrics", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1"])
def test_clients_reach_nothing_else_of_an_engine(guide: Start, path: str) -> None:
    """Other paths are not passed on."""
    proxy = guide()
    assert proxy.look(path)[0] == 404
    assert [*proxy.prefill.requests, *proxy.decode.requests] == []


@pytest.mark.parametrize("keys", [{}, {"echo": True}])
def test_a_client_does_not_say_where_a_cache_is(guide: Start, keys: Body) -> None:
    """Decode connects to where kv_transfer_params say, so only prefill's reach it."""
    proxy = guide()
    status, _ = proxy.ask({"prompt": "A", **keys, "kv_transfer_params": {"remote_host": "evil"}})
    assert status == 200
    assert "evil" not in f"{proxy.prefill.bodies} {proxy.decode.bodies}"


def test_a_prefill_without_a_connector_is_logged() -> None:
    """Its reply has no handoff, so decode computes the prompt."""
    with started() as prefill, started() as decode, Running([prefill.server_port], [decode.server_port]) as proxy:
        status, answer = proxy.ask({"prompt": "A"})
        log = proxy.end()
    assert (status, answer["choices"][0]["text"]) == (200, "0: A by None")
    assert f"127.0.0.1:{prefill.server_port} keeps no cache: decode computes the prompt" in log


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8100", "http://a/v1", "http://u:p@a:1", "ftp://a", "http://a:99999", "", "http://"]
)
def test_an_address_is_checked(url: str) -> None:
    """The program does not start with one that is wrong."""
    run = CliRunner().invoke(main, ["--prefill", url, "--decode", "http://127.0.0.1:8200"])
    assert run.exit_code == 2
    assert f"Invalid value for '--prefill': expected http://HOST:PORT, got {url!r}" in run.output


@pytest.mark.parametrize("arguments", [[], ["--prefill", "http://a"], ["--decode", "http://a"]])
def test_both_kinds_of_engines_are_needed(arguments: list[str]) -> None:
    """The message names the option."""
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 2
    assert "Missing option '--" in run.output


@pytest.mark.parametrize("text", ["{", "5", '"prompt"'])
def test_a_request_that_is_no_object_is_bad(guide: Start, text: str) -> None:
    """No engine is asked."""
    proxy = guide()
    error = {"message": "expected a JSON object", "type": "BadRequestError", "param": None, "code": 400}
    assert proxy.ask(text) == (400, {"error": error})
    assert [*proxy.prefill.requests, *proxy.decode.requests] == []


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_large_request_passes(guide: Start) -> None:
    """A prompt may have megabytes, as images in a chat do."""
    prompt = "w" * 4_000_000
    status, _ = guide().ask({"prompt": prompt})
    assert status == 200


@pytest.mark.parametrize("prompts", ["A", ["A", "B"]])
def test_credentials_reach_both_engines(guide: Start, prompts: Any) -> None:
    """Engines that were started with --api-key see the client's key, with each of several prompts too."""
    proxy = guide()
    proxy.ask({"prompt": prompts}, Authorization="Bearer k")
    assert proxy.prefill.credentials == proxy.decode.credentials == ["Bearer k"] * len(prompts)


# Both engines at once


@contextmanager
def at_once(prefill: Answer, decode: Answer, prefill_ranks: int = 1) -> Iterator[Between]:
    """The proxy between two stand-ins, of which prefill's connector has a listener."""
    with started(prefill) as computing, started(decode) as answering:
        proxy = Between.__new__(Between)
        Running.__init__(proxy, [computing.server_port], [answering.server_port], ["prefill:5600"], prefill_ranks)
        proxy.prefill, proxy.decode = computing, answering
        with proxy:
            yield proxy
            proxy.end()


@pytest.mark.parametrize("prompt", ["A", ["A", "B"]])
def test_both_engines_are_asked_at_once(prompt: Any) -> None:
    """Neither answers before the other one is asked, and they know each prompt by an id of its own."""
    together = threading.Barrier(2 * len(prompt))

    def wait(answer: Answer) -> Answer:
        def answer_late(request: Request, body: Body) -> None:
            together.wait(TIMEOUT_S)
            answer(request, body)

        return answer_late

    with at_once(wait(grant), wait(generate)) as proxy:
        status, answer = proxy.ask({"prompt": prompt, "n": 2})
    assert (status, len(answer["choices"])) == (200, 2 * len(prompt))
    of_prefill = {body["kv_transfer_params"]["transfer_id"]: body for body in proxy.prefill.bodies}
    of_decode = {body["kv_transfer_params"]["transfer_id"]: body for body in proxy.decode.bodies}
    assert of_prefill.keys() == of_decode.keys()
    assert len(of_prefill) == len(prompt)
    for room, body in of_prefill.items():
        keep = {**KEEP, "transfer_id": room}
        assert body == {"prompt": body["prompt"], "max_tokens": 1, "kv_transfer_params": keep}
        read = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": room}
        read["remote_bootstrap_addr"] = "http://prefill:5600"
        assert of_decode[room] == {"prompt": body["prompt"], "n": 2, "kv_transfer_params": read}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prefill_that_fails_ends_the_request_on_decode(is_stream: bool) -> None:
    """Decode would wait for it. The client gets prefill's error, also for a stream."""
    is_asked = threading.Event()
    is_closed = threading.Event()

    def wait(request: Request, _: Body) -> None:
        if is_stream:
            request.begin(200, "text/event-stream")
        is_asked.set()
        request.connection.settimeout(TIMEOUT_S)
        if request.connection.recv(1) == b"":
            is_closed.set()

    def fail_late(request: Request, _: Body) -> None:
        is_asked.wait(TIMEOUT_S)
        request.send(400, {"error": "too long"})

    with at_once(fail_late, wait) as proxy:
        assert proxy.ask({"prompt": "A", "stream": is_stream}) == (400, {"error": "too long"})
        assert is_closed.wait(TIMEOUT_S)


def test_a_prefill_that_fails_late_adds_nothing_to_an_answer() -> None:
    """Its error followed what decode had streamed, as a second response on the same connection."""
    is_streamed = threading.Event()

    def stream(request: Request, _: Body) -> None:
        request.begin(200, "text/event-stream")
        request.send_chunk(b"data: 1\n\n")
        request.connection.settimeout(TIMEOUT_S)
        request.connection.recv(1)

    def fail_late(request: Request, _: Body) -> None:
        is_streamed.wait(TIMEOUT_S)
        request.send(400, {"error": "too long"})

    with at_once(fail_late, stream) as proxy, closing(proxy.request({"prompt": "A", "stream": True})) as client:
        got = b""
        while b"data: 1" not in got:
            got += received(client.sock)
        is_streamed.set()
        with suppress(ConnectionResetError):
            while more := client.sock.recv(1 << 16):
                got += more
        # neither another response nor an end of this one
        assert (got.count(b"HTTP/1.1"), b"too long" in got, got.endswith(b"0\r\n\r\n")) == (1, False, False)


def test_a_decode_that_fails_ends_the_request_on_prefill() -> None:
    """Nobody would read what it computes."""
    is_closed = threading.Event()

    def wait(request: Request, _: Body) -> None:
        request.connection.settimeout(TIMEOUT_S)
        if request.connection.recv(1) == b"":
            is_closed.set()

    with at_once(wait, fail(503)) as proxy:
        assert proxy.ask({"prompt": "A"}) == (503, {"error": "status 503"})
        assert is_closed.wait(TIMEOUT_S)


def test_decode_computes_what_prefill_keeps_no_cache_of() -> None:
    """It is asked again, without a transfer id."""

    def answer_alone(request: Request, body: Body) -> None:
        if "kv_transfer_params" in body:
            request.connection.settimeout(TIMEOUT_S)
            request.connection.recv(1)
        else:
            generate(request, body)

    with at_once(generate, answer_alone) as proxy:
        status, answer = proxy.ask({"prompt": "A"})
    assert (status, answer["choices"][0]["text"]) == (200, "0: A by None")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_of_prefill_take_turns(num_ranks: int) -> None:
    """Each listens at a port of its own, which decode gets, and prefill gets the rank."""
    with at_once(grant, generate, num_ranks) as proxy:
        for prompt in "ABC":
            assert proxy.ask({"prompt": prompt})[0] == 200
    assert proxy.prefill.ranks == (["0", "1", "0"] if num_ranks > 1 else [None] * 3)
    addresses = [body["kv_transfer_params"]["remote_bootstrap_addr"] for body in proxy.decode.bodies]
    assert addresses == [f"http://prefill:{5600 + turn % num_ranks}" for turn in range(3)]


@pytest.mark.parametrize("listener", ["prefill", "http://prefill:5600", "prefill:5600/a", ":5600", "prefill:x", ""])
def test_a_listener_has_a_host_and_a_port(listener: str) -> None:
    engines = ["--prefill", "http://a:1", "--decode", "http://c:1"]
    result = CliRunner().invoke(main, [*engines, "--listener", listener])
    assert result.exit_code == 2
    assert f"expected HOST:PORT, got {listener!r}" in result.output


def test_each_prefill_has_a_listener() -> None:
    engines = ["--prefill", "http://a:1", "--prefill", "http://b:1", "--decode", "http://c:1"]
    result = CliRunner().invoke(main, [*engines, "--listener", "a:5600"])
    assert result.exit_code == 2
    assert "expected one --listener for each of 2 --prefill, got 1" in result.output


@pytest.mark.parametrize(
    "body, said",
    [
        ({"prompt": ["w"] * (MAX_PROMPTS + 1)}, "at most 256 prompts"),
        ({"prompt": ["w"] * MAX_PROMPTS, "user": "x" * 200_000}, "bytes beside all prompts"),
        ({"prompt": "w", "stop": [[]] * MAX_PARTS}, "brackets and commas"),
        ("[" * 100_000, "a JSON object"),
    ],
    ids=["prompts", "growth", "parts", "depth"],
)
def test_a_request_does_not_grow(guide: Start, body: Any, said: str) -> None:
    """1,500 prompts took 850 connections, 300 prompts beside 100 KB 60 MB, and a body of 64 MiB 1.9 GB."""
    proxy = guide()
    status, answer = proxy.ask(body)
    assert (status, said in answer["error"]["message"]) == (400, True)
    assert proxy.decode.requests == []


def unfinished(stack: ExitStack, proxy: Running, num_bytes: int) -> None:
    """Sends some bytes of a body of the largest size, on a connection that stays open."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n"
    connection.sendall(head.encode() + bytes(num_bytes))


def test_a_body_that_is_too_long_is_refused(guide: Start) -> None:
    """By its head, or where it has none, by what has come."""
    proxy = guide()
    with closing(proxy.request("x" * (MAX_BODY_BYTES + 1))) as client:
        assert client.getresponse().status == 413
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)) as connection:
        connection.sendall(head.encode())
        with suppress(OSError):  # once it is refused
            for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
                connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_bodies_of_all_requests_are_bounded() -> None:
    """What has come of them counts, and one that goes makes place."""
    with quiet(MAX_HELD_BYTES=1000) as proxy:
        with ExitStack() as stack:
            for _ in range(3):
                unfinished(stack, proxy, 330)
            wait_until(lambda: proxy.ask({"prompt": "A"})[0] == 503)
        wait_until(lambda: proxy.ask({"prompt": "A"})[0] == 200)


def test_a_body_that_does_not_come_refuses_nobody(guide: Start) -> None:
    """Four connections that announced 32 MiB, and sent a byte, closed the proxy to all others for 30 s."""
    proxy = guide()
    with ExitStack() as stack:
        for _ in range(16):
            unfinished(stack, proxy, 1)
        for _ in range(20):
            assert proxy.ask({"prompt": "A"})[0] == 200
            time.sleep(0.02)


def test_idle_connections_stop_nobody() -> None:
    """1,100 of them stopped all other clients of a proxy with 1,024 files, and filled its log. Here both are fewer."""
    with quiet(limit=128, MAX_IDLE=128, LOOK_S=0.05) as proxy, ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)) for _ in range(228)
        ]
        assert proxy.ask({"prompt": "A"})[0] == 200
        assert {connection.recv(1) for connection in connections[:100]} == {b""}
        assert proxy.ask({"prompt": "A"})[0] == 200


@contextmanager
def limited(answer: Answer = generate, **constants: float) -> Iterator[Running]:
    """A proxy with other limits, between two stand-ins."""
    with (
        started(grant) as prefill,
        started(answer) as decode,
        Running([prefill.server_port], [decode.server_port], constants=constants) as proxy,
    ):
        yield proxy
        proxy.end()


@contextmanager
def quiet(limit: int | None = None, **constants: float) -> Iterator[Running]:
    """A proxy with other limits, also of open files, which logs nothing to its end."""
    with (
        started(grant) as prefill,
        started() as decode,
        Running([prefill.server_port], [decode.server_port], limit=limit, constants=constants) as proxy,
    ):
        yield proxy
        assert proxy.end() == ""


def test_a_body_has_its_time() -> None:
    """A client that stops in the middle of one is told so, and holds nothing any more."""
    with limited(BODY_S=0.3) as proxy, ExitStack() as stack:
        unfinished(stack, proxy, 1)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{"
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S))
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_idle_connections_are_closed() -> None:
    """After a while, and the oldest where there are too many."""
    with limited(IDLE_S=0.3, LOOK_S=0.05) as proxy:
        connection = socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)
        with closing(connection):
            assert connection.recv(1) == b""
    with limited(MAX_IDLE=3, LOOK_S=0.05) as proxy, ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)) for _ in range(6)
        ]
        assert [connection.recv(1) for connection in connections[:3]] == [b""] * 3
        for connection in connections[3:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_a_malformed_request_is_no_line_of_the_log() -> None:
    """Each was 500 bytes, with what the client had sent."""
    with quiet() as proxy:
        for sent in (b"xxx\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"GET / HTTP/1.1\r\nX\r\n\r\n"):
            with closing(socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)) as connection:
                connection.sendall(sent)
                assert connection.recv(12) == b"HTTP/1.0 400"


def test_a_connection_that_is_closed_for_others_is_no_line_of_the_log() -> None:
    """Each was a traceback where its request had come, and was not read yet."""
    with quiet(MAX_IDLE=3, LOOK_S=0.001) as proxy:
        for _ in range(3):
            # so that many requests come at the same time
            proxy._process.send_signal(signal.SIGSTOP)
            with ExitStack() as stack:
                for _ in range(100):
                    unfinished(stack, proxy, 1)
                proxy._process.send_signal(signal.SIGCONT)
                # it has met all of them when it has answered one that came later
                assert proxy.ask({"prompt": "A"})[0] == 200


def test_a_connection_in_use_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests fell between two looks, so a connection was closed a minute after it was made."""
    now = [0.0]
    looks = asyncio.Semaphore(0)
    num_looks = 0

    async def until_next_look(_: float) -> None:
        nonlocal num_looks
        num_looks += 1
        await looks.acquire()

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    async def look() -> None:
        """Let the proxy look once."""
        looks.release()
        expected = num_looks + 1
        while num_looks < expected:
            await asyncio.sleep(0)

    async def use() -> None:
        app = web.Application(middlewares=[refusing])
        app[BUSY], app[IDLE_SINCE] = set(), {}
        app.router.add_get("/", answer)
        one_connection = TCPConnector(limit=1, keepalive_timeout=2 * TIMEOUT_S)
        async with TestServer(app) as server, ClientSession(connector=one_connection) as client:
            assert server.runner is not None
            handling = server.runner.server
            assert handling is not None
            looking = asyncio.create_task(close_idle(handling, app[BUSY], app[IDLE_SINCE]))
            connections = set()
            # a look, half of the time and a request, a few times
            for _ in range(5):
                async with client.get(server.make_url("/")) as response:
                    assert response.status == 200
                connections.update(handling.connections)
                for _ in range(2):
                    await look()
                    now[0] += 0.4 * IDLE_S
            assert len(connections) == 1
            for _ in range(2):
                await look()
                now[0] += IDLE_S
            while handling.connections:
                await asyncio.sleep(0)
            looking.cancel()

    monkeypatch.setattr("kvplan_nixl.proxy.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("kvplan_nixl.proxy.asyncio", SimpleNamespace(sleep=until_next_look))
    asyncio.run(asyncio.wait_for(use(), TIMEOUT_S))


def test_a_client_that_reads_nothing_ends_its_request() -> None:
    """An answer that is not taken in time ends the request on the engine too."""
    is_closed = threading.Event()

    def flood(request: Request, _: Body) -> None:
        request.begin(200, "text/event-stream")
        with suppress(OSError):
            while True:
                request.send_chunk(bytes(1 << 16))
        is_closed.set()

    with limited(flood, STALL_S=0.3) as proxy, closing(proxy.request({"prompt": "A", "stream": True})):
        assert is_closed.wait(TIMEOUT_S)


def test_prompts_of_all_requests_are_bounded() -> None:
    """One more than are answered at a time is refused, and later it is not."""
    both_asked, let_go = threading.Barrier(3), threading.Event()

    def wait(request: Request, body: Body) -> None:
        if not let_go.is_set():
            both_asked.wait(TIMEOUT_S)
        let_go.wait(TIMEOUT_S)
        generate(request, body)

    with limited(wait, MAX_ASKED=2) as proxy, closing(proxy.request({"prompt": ["A", "B"]})) as first:
        both_asked.wait(TIMEOUT_S)
        status, answer = proxy.ask({"prompt": "C"})
        assert (status, "too many prompts" in answer["error"]["message"]) == (503, True)
        let_go.set()
        assert first.getresponse().status == 200
        wait_until(lambda: proxy.ask({"prompt": ["C", "D"]})[0] == 200)


def test_an_engine_that_accepts_nothing_in_time_is_a_bad_gateway() -> None:
    """The client was told that its own body was late."""
    with started() as decode, socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # a backlog that is full answers nothing to one more
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(full.getsockname())
        constants = {"CONNECT_S": 0.3}
        proxy = stack.enter_context(Running([full.getsockname()[1]], [decode.server_port], constants=constants))
        status, answer = proxy.ask({"prompt": "A"})
        proxy.end()
    assert (status, "timeout" in f"{answer}".lower()) == (502, True), answer


def test_an_engine_that_answers_nonsense_is_a_bad_gateway(guide: Start) -> None:
    """The client was told that its request was bad."""

    def babble(request: Request, _: Body) -> None:
        request.begin(200, "application/json", length=1)
        request.wfile.write(b"{")

    status, answer = guide(babble).ask({"prompt": "A"})
    assert status == 502, answer
