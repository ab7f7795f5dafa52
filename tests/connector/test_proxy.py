"""The proxy of docs/how-to/vllm.md between two stand-ins for vLLM's servers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiohttp.web import Application

from tests.pages import ROOT, fences

NUM_CLIENTS = 100
TIMEOUT_S = 30
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}

Body = dict[str, Any]
Answer = Callable[["Request", Body], None]


class Request(BaseHTTPRequestHandler):
    """A request to a stand-in."""

    server: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.credentials.append(self.headers["Authorization"])
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
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

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


@pytest.fixture
def engines() -> Iterator[Callable[[Answer], Engine]]:
    """Starts stand-ins."""
    started: list[Engine] = []

    def start(answer: Answer) -> Engine:
        started.append(Engine(answer))
        return started[-1]

    yield start
    for engine in started:
        engine.shutdown()
        engine.server_close()


def interrupt() -> None:
    """Ends an event loop."""
    raise KeyboardInterrupt


class Guide:
    """The page's proxy, as its ``serve`` runs it, with the stand-ins that it asks."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill = prefill
        self.decode = decode
        self.names: dict[str, Any] = {}
        text = (ROOT / "docs/how-to/vllm.md").read_text()
        ((_, source),) = [block for block in fences(text) if block[0] == "python"]
        exec(compile(source, "vllm.md", "exec"), self.names)
        self.names["PREFILL"] = f"http://127.0.0.1:{prefill.server_port}"
        self.names["DECODE"] = f"http://127.0.0.1:{decode.server_port}"
        app = self.names["application"]()
        app.on_startup.append(self._start)
        self.names["application"] = lambda: app
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port: int = server.getsockname()[1]
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self.names["serve"], args=(self.port,), daemon=True)
        self._thread.start()
        assert self._is_started.wait(TIMEOUT_S)
        while not self._listens():
            time.sleep(0.01)

    async def _start(self, _: Application) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_started.set()

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        """Ends the proxy, as Ctrl-C does."""
        self._loop.call_soon_threadsafe(interrupt)
        self._thread.join()

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


@pytest.fixture
def guide(engines: Callable[[Answer], Engine]) -> Iterator[Callable[..., Guide]]:
    """Starts the proxy between two stand-ins that answer as said."""
    started: list[Guide] = []

    def start(prefill: Answer = grant, decode: Answer = generate) -> Guide:
        started.append(Guide(engines(prefill), engines(decode)))
        return started[-1]

    yield start
    for proxy in started:
        proxy.close()


Start = Callable[..., Guide]


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
    prompts = [f"w{number}" for number in range(NUM_CLIENTS + 20)]
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
    with proxy.open(body) as response, pytest.raises(IncompleteRead) as cut:
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


def test_all_of_100_clients_are_served(guide: Start) -> None:
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


@pytest.mark.parametrize("side", ["PREFILL", "DECODE"])
@pytest.mark.parametrize("prompt", ["A", ["A", "B"]])
def test_an_engine_that_is_gone_is_a_bad_gateway(guide: Start, side: str, prompt: Any) -> None:
    """Where nobody answers, the status is 502."""
    proxy = guide()
    proxy.names[side] = "http://127.0.0.1:1"
    status, answer = proxy.ask({"prompt": prompt})
    assert status == 502
    assert "127.0.0.1:1" in answer["error"]


@pytest.mark.parametrize("text", ["{", "5", '"prompt"'])
def test_a_request_that_is_no_object_is_bad(guide: Start, text: str) -> None:
    """No engine is asked."""
    proxy = guide()
    assert proxy.ask(text) == (400, {"error": "expected a JSON object"})
    assert [*proxy.prefill.requests, *proxy.decode.requests] == []


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_large_request_passes(guide: Start) -> None:
    """A prompt may have megabytes, as images in a chat do."""
    prompt = "w" * 4_000_000
    status, _ = guide().ask({"prompt": prompt})
    assert status == 200


def test_credentials_reach_both_engines(guide: Start) -> None:
    """Engines that were started with --api-key see the client's key."""
    proxy = guide()
    proxy.ask({"prompt": "A"}, Authorization="Bearer k")
    assert proxy.prefill.credentials == proxy.decode.credentials == ["Bearer k"]
