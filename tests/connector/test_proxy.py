"""The proxy of docs/how-to/vllm.md between two stand-ins for vLLM's servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.pages import ROOT, fences

Serve = Callable[[type[BaseHTTPRequestHandler]], int]
PARAMS = {"do_remote_prefill": True, "remote_port": 5600}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a handler on a free port, which it returns."""
    servers = []

    def start(handler: type[BaseHTTPRequestHandler]) -> int:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def engine(asked: list[dict[str, Any]], status: int, answer: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
    """A server that lists what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append({"path": self.path, **json.loads(self.rfile.read(int(self.headers["Content-Length"])))})
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    return Handler


def page(prefill: int, decode: int) -> type[BaseHTTPRequestHandler]:
    """The page's proxy between two ports."""
    names: dict[str, Any] = {}
    ((_, source),) = [block for block in fences((ROOT / "docs/how-to/vllm.md").read_text()) if block[0] == "python"]
    exec(compile(source, "vllm.md", "exec"), names)
    names.update(PREFILL=f"http://127.0.0.1:{prefill}", DECODE=f"http://127.0.0.1:{decode}")
    made: type[BaseHTTPRequestHandler] = names["Proxy"]
    return type("Quiet", (made,), {"log_message": lambda *_: None})


def ask(port: int, body: dict[str, Any]) -> tuple[int, Any]:
    """The status of an answer, and what it says."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    return response.status, json.load(response)


def test_prefill_is_asked_for_one_token_and_decode_for_the_answer(serve: Serve) -> None:
    """Prefill's kv_transfer_params reach decode as they are, and decode's answer goes back."""
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    prefill = serve(engine(first, 200, {"kv_transfer_params": PARAMS}))
    decode = serve(engine(second, 200, {"text": "an answer"}))
    asked = {"path": "/v1/completions", "prompt": "A KV cache is", "stream": False}
    reply = ask(serve(page(prefill, decode)), {"prompt": "A KV cache is", "max_tokens": 30, "stream": True})
    assert reply == (200, {"text": "an answer"})
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    assert first == [{**asked, "max_tokens": 1, "kv_transfer_params": remote}]
    assert second == [{**asked, "max_tokens": 30, "kv_transfer_params": PARAMS}]


def test_an_engine_that_fails_is_heard(serve: Serve) -> None:
    """The status and text of an engine's error go back; where nobody answers, the status is 502."""
    prefill = serve(engine([], 200, {"kv_transfer_params": PARAMS}))
    decode = serve(engine([], 500, {"error": "KV load failed"}))
    assert ask(serve(page(prefill, decode)), {"prompt": "A"}) == (500, {"error": "KV load failed"})
    assert ask(serve(page(1, decode)), {"prompt": "A"})[0] == 502
