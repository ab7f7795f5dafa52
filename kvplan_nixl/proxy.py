"""The proxy between clients and engines: prefill computes a prompt, and decode answers it.

It asks a prefill engine for one token, and hands ``kv_transfer_params`` from its reply to a decode
engine, whose answer goes to the client. Engines of a kind take turns. It keeps four rules:

- proxy.X1: A handoff is for one prompt. A list of prompts becomes a request each, whose answers are
  merged.
- proxy.X2: Prefill gets nothing that shapes the answer: no ``n``, no stream, one token.
- proxy.X3: What decode would compute in any case goes to decode alone, and so does a list that is
  to be streamed.
- proxy.X4: Only prefill says where a cache is: ``kv_transfer_params`` of clients are left out.

It is meant for a few engines and as an example. What a client may hold of it is bounded: bytes and
prompts of a request, prompts and bodies of all, and the time of a body, of an idle connection and
of an answer that is not read. It does not know clients apart, so one that sends many requests
delays others: routers and gateways do that.

The programs are :mod:`kvplan_nixl.vllm.proxy`, and :mod:`kvplan_nixl.sglang.proxy` between engines
of two kinds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from itertools import chain, count
from typing import Any, Final

import attrs
import click
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    TCPConnector,
    web,
)
from aiohttp.http import HttpProcessingError
from yarl import URL

__all__ = ["prefill_body"]

LOGGER: Final = logging.getLogger("kvplan_nixl.proxy")

Body = dict[str, Any]
"""A request or an answer, as JSON."""

COMPLETIONS: Final = ("/v1/completions", "/v1/chat/completions")

TRANSFER: Final = "kv_transfer_params"
"""The key of handoffs, in requests and answers."""

OF_ANSWER: Final = frozenset(
    {
        "best_of",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "stream",
        "stream_options",
        "top_logprobs",
    }
)
"""Keys that shape the answer, which prefill does not get."""

FOR_DECODE_ALONE: Final = ("use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
"""Keys of requests whose prompt decode computes in any case."""

USAGE: Final = ("prompt_tokens", "completion_tokens", "total_tokens")

CONNECT_S: Final = 10.0
"""How long an engine may take to accept a connection. Answers may take any time."""

MAX_BODY_BYTES: Final = 1 << 25
"""The largest request, also with all its prompts divided: images are in prompts."""

MAX_HELD_BYTES: Final = 1 << 27
"""The bodies of all requests that are read or answered."""

MAX_PARTS: Final = 1 << 20
"""The brackets and commas of a request, each of which may take some bytes as an object."""

MAX_PROMPTS: Final = 256

MAX_ASKED: Final = 1 << 10
"""Prompts that are answered at a time. Each has a connection to an engine, or two."""

MAX_IDLE: Final = 1 << 10
"""Connections on which no request is answered. The oldest above that are closed."""

BODY_S: Final = 30.0
IDLE_S: Final = 60.0
STALL_S: Final = 60.0
"""Seconds for a request's body, of a connection without a request, and for a piece of an answer."""

LOOK_S: Final = 1.0
"""Seconds between two looks at idle connections."""

BACKLOG: Final = 2048
"""Clients that may come at the same time."""

UNREACHABLE: Final = (ClientConnectorError, ConnectionTimeoutError)
"""What aiohttp raises where an engine accepts no connection."""

Answering = Callable[[Body], Awaitable[Any]]
"""Lets decode answer a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineError(Exception):
    """An engine has answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def prefill_body(body: Body) -> Body:
    """Return the request for prefill: the prompt, one token, and that its cache is to be kept.

    >>> prefill_body({"prompt": "A KV cache is", "max_tokens": 30, "n": 2, "stream": True})
    {'prompt': 'A KV cache is', 'max_tokens': 1, 'kv_transfer_params': {'do_remote_decode': True,
     'do_remote_prefill': False}}
    """
    prompt = {key: value for key, value in body.items() if key not in OF_ANSWER}
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**prompt, "max_tokens": 1, TRANSFER: keep}


def bodies_of(body: Body) -> list[Body]:
    """Return a request for each prompt, the request itself where there is one prompt.

    >>> [each["prompt"] for each in bodies_of({"prompt": [[5, 6], [7]]})]
    [[5, 6], [7]]
    >>> bodies_of({"prompt": [5, 6, 7]})
    [{'prompt': [5, 6, 7]}]
    """
    prompts = body.get("prompt")
    # a list of integers is one prompt
    if not isinstance(prompts, list) or len(prompts) < 2 or isinstance(prompts[0], int):
        return [body]
    return [{**body, "prompt": prompt} for prompt in prompts]


def merged(answers: Sequence[Body]) -> Body:
    """Return the answer to a list of prompts, from the answer to each prompt.

    >>> first, second = {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": None}
    >>> merged([first, second])["choices"]
    [{'text': 'a', 'index': 0}, {'text': 'b', 'index': 1}]
    """
    choices = list(chain.from_iterable(answer["choices"] for answer in answers))
    for index, choice in enumerate(choices):
        choice["index"] = index
    usage = Counter[str]()
    for answer in answers:
        for key in USAGE:
            usage[key] += (answer.get("usage") or {}).get(key, 0)
    return {**answers[0], "choices": choices, "usage": usage}


@attrs.define(eq=False)
class Engines:
    """Engines of one kind, which take turns."""

    urls: tuple[URL, ...]
    _turns: count[int] = attrs.field(factory=count, init=False)

    @asynccontextmanager
    async def ask(
        self, session: ClientSession, method: str, path: str, **options: Any
    ) -> AsyncIterator[ClientResponse]:
        """Ask the engine whose turn it is, or the next one that accepts a connection.

        Raises EngineError for an answer that is an error, ClientError where there is none.
        """
        async with await self._response(session, method, path, **options) as response:
            if response.status != HTTPStatus.OK:
                raise EngineError(response.status, await response.text())
            yield response

    def take_turn(self) -> int:
        """Return the index of the engine whose turn it is."""
        return next(self._turns) % len(self.urls)

    async def _response(
        self, session: ClientSession, method: str, path: str, **options: Any
    ) -> ClientResponse:
        first = self.take_turn()
        urls = [*self.urls[first:], *self.urls[:first]]
        # nothing was sent where a connection was refused
        for url in urls[:-1]:
            try:
                return await session.request(method, url.with_path(path), **options)
            except UNREACHABLE as error:
                LOGGER.warning("%s", error)
        return await session.request(method, urls[-1].with_path(path), **options)


@attrs.define(eq=False)
class Proxy:
    """The proxy, which aiohttp serves as an :meth:`application`."""

    prefill: Engines
    decode: Engines
    _held_bytes: int = attrs.field(init=False, default=0)
    _num_asked: int = attrs.field(init=False, default=0)
    _session: ClientSession = attrs.field(init=False)

    def application(self) -> web.Application:
        """Return what aiohttp serves."""
        app = web.Application(middlewares=[refusing])
        app[BUSY] = set()
        app[IDLE_SINCE] = {}
        app.cleanup_ctx.append(self._connected)
        app.add_routes([web.post(path, self.complete) for path in COMPLETIONS])
        app.add_routes([web.get("/v1/models", self.models), web.get("/health", self.health)])
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        """Hold the connections to engines while the application runs."""
        # no request waits for a connection, nor gets one that an engine has closed meanwhile
        connector = TCPConnector(limit=0, force_close=True)
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    @property
    def alone(self) -> Engines:
        """The engines that compute what decode would not read, from beginning to end."""
        return self.decode

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Say what decode serves."""
        return await self._forward(request, self.decode)

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Say that an engine of each kind is well."""
        for engines in (self.prefill, self.decode):
            async with engines.ask(self._session, "GET", "/health"):
                pass
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for completions or of a chat, unless there are too many."""
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return _too_large()
        data = bytearray()
        try:
            try:
                # what has come counts: a body that is only announced keeps no other out
                async with asyncio.timeout(BODY_S):
                    async for chunk in request.content.iter_any():
                        data += chunk
                        self._held_bytes += len(chunk)
                        if len(data) > MAX_BODY_BYTES:
                            return _too_large()
                        if self._held_bytes > MAX_HELD_BYTES:
                            too_many = "too many bytes of requests at a time"
                            return _error(HTTPStatus.SERVICE_UNAVAILABLE, too_many)
                body = _read_body(data)
                body.pop(TRANSFER, None)
                bodies = bodies_of(body)
                _check_number(body, len(bodies))
            except TimeoutError:
                return _error(HTTPStatus.REQUEST_TIMEOUT, f"expected a body within {BODY_S:g} s")
            except ValueError as error:
                return _error(HTTPStatus.BAD_REQUEST, str(error))
            if self._num_asked + len(bodies) > MAX_ASKED:
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, "too many prompts at a time")
            self._num_asked += len(bodies)
            try:
                return await self._complete_all(request, body, bodies)
            finally:
                self._num_asked -= len(bodies)
        finally:
            self._held_bytes -= len(data)

    async def _complete_all(
        self, request: web.Request, body: Body, bodies: list[Body]
    ) -> web.StreamResponse:
        """Answer a request, given a body for each of its prompts."""
        is_streamed_list = len(bodies) > 1 and body.get("stream")
        if is_streamed_list or any(body.get(key) for key in FOR_DECODE_ALONE):
            return await self._forward(request, self.alone, json=body)
        answer_one = partial(self._answer, request)
        if len(bodies) == 1:
            response: web.StreamResponse = await answer_one(
                body, partial(self._forward_body, request)
            )
            return response
        complete = partial(self._asked, request, engines=self.decode)
        answering = [asyncio.ensure_future(answer_one(each, complete)) for each in bodies]
        try:
            answers = await asyncio.gather(*answering)
        finally:
            # where a prompt has failed, the answers to the others go nowhere
            for each in answering:
                each.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
        return web.json_response(merged(answers))

    async def _answer(self, request: web.Request, body: Body, answer: Answering) -> Any:
        """Let prefill compute a prompt, and then decode ``answer`` with its handoff."""
        handoff = await self._compute(request, prefill_body(body), self.prefill)
        return await answer({**body, TRANSFER: handoff})

    async def _compute(
        self, request: web.Request, body: Body, engines: Engines, headers: Mapping[str, str] = {}
    ) -> Any:
        """Let prefill compute a prompt, and return its handoff, None if it keeps no cache."""
        headers = {**headers, **credentials_of(request)}
        async with engines.ask(
            self._session, "POST", request.path, json=body, headers=headers
        ) as response:
            answer = await response.json()
        handoff = answer.get(TRANSFER)
        if handoff is None:
            LOGGER.warning("%s keeps no cache: decode computes the prompt", response.url.origin())
        return handoff

    async def _asked(self, request: web.Request, body: Body, engines: Engines) -> Body:
        """Return an engine's whole answer."""
        async with engines.ask(
            self._session, "POST", request.path, json=body, headers=credentials_of(request)
        ) as response:
            answer: Body = await response.json()
        return answer

    async def _forward_body(self, request: web.Request, body: Body) -> web.StreamResponse:
        return await self._forward(request, self.decode, json=body)

    async def _forward(
        self, request: web.Request, engines: Engines, **options: Any
    ) -> web.StreamResponse:
        """Send an engine's answer to the client as it comes, in one piece or as a stream."""
        async with engines.ask(
            self._session, request.method, request.path, headers=credentials_of(request), **options
        ) as answer:
            # nothing is sent before something has come: until then another engine may answer
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            pieces = answer.content.iter_any()
            first = await anext(pieces, b"")
            await response.prepare(request)
            try:
                await _write(response, first)
                async for piece in pieces:
                    await _write(response, piece)
            except (ClientError, TimeoutError, asyncio.CancelledError) as error:
                # the client must not take what it has for the whole, or an error for the rest
                if request.transport is not None:
                    request.transport.abort()
                if isinstance(error, asyncio.CancelledError):
                    raise
                LOGGER.warning("%s ended in an answer: %r", answer.url.origin(), error)
        return response


def _read_body(data: bytearray) -> Body:
    """Return a request. Raises ValueError for another, or one of many parts."""
    if sum(map(data.count, (b"[", b"{", b","))) > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS} brackets and commas")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ValueError("expected a JSON object")
    return body


def _check_number(body: Body, number: int) -> None:
    """Refuse a list of prompts that grows too much when it is divided. Raises ValueError."""
    if number > MAX_PROMPTS:
        raise ValueError(f"expected at most {MAX_PROMPTS} prompts")
    if number > 1 and number * len(json.dumps({**body, "prompt": ""})) > MAX_BODY_BYTES:
        raise ValueError(f"expected at most {MAX_BODY_BYTES} bytes beside all prompts")


async def _write(response: web.StreamResponse, piece: bytes) -> None:
    """Write a piece of an answer. Raises TimeoutError if the client takes nothing for too long."""
    async with asyncio.timeout(STALL_S):
        await response.write(piece)


BUSY: Final = web.AppKey("busy", set[Any])
"""The connections on which a request is read or answered."""

IDLE_SINCE: Final = web.AppKey("idle since", dict[Any, float])
"""When each of the others was first seen without a request since its last one."""


@web.middleware
async def refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Respond with an engine's error as it is, with 502 if no engine answers."""
    if request.transport is None:
        # closed, as one of too many, after the request had come
        return web.Response()
    request.app[BUSY].add(request.protocol)
    try:
        return await handler(request)
    except EngineError as error:
        return web.Response(status=error.status, text=error.text, content_type="application/json")
    # an engine that answers with something else than JSON is no better than one that does not
    except (ClientError, json.JSONDecodeError) as error:
        return _error(HTTPStatus.BAD_GATEWAY, _reason_of(error))
    finally:
        request.app[BUSY].discard(request.protocol)
        request.app[IDLE_SINCE].pop(request.protocol, None)


async def serve(app: web.Application, host: str, port: int, asks: str) -> None:
    """Serve until the process is told to end, and print the address and which engines it asks."""
    # what is left open by clients must not keep others from being let in
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.getLogger("aiohttp.server").addFilter(is_own_fault)
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    # a client that goes away cancels its request, on the engines too
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    # the system chooses the port where 0 is asked for
    _, bound, *_ = runner.addresses[0]
    click.echo(f"http://{host}:{bound} asks {asks}")
    assert runner.server is not None
    closing = asyncio.create_task(close_idle(runner.server, app[BUSY], app[IDLE_SINCE]))
    await ending.wait()
    closing.cancel()
    await runner.cleanup()


def is_own_fault(record: logging.LogRecord) -> bool:
    """Return whether a log record is about something other than a client's malformed request."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


async def close_idle(server: web.Server, busy: set[Any], idle_since: dict[Any, float]) -> None:
    """Close connections on which no request has come for a while, or of which there are many."""
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        # the oldest first
        idle = {each: idle_since.get(each, now) for each in server.connections if each not in busy}
        idle_since.clear()
        idle_since.update(idle)
        for number, (connection, since) in enumerate(idle.items()):
            if now - since > IDLE_S or len(idle) - number > MAX_IDLE:
                connection.force_close()


def bad_gateway(text: str) -> EngineError:
    """Return the error for an engine that has not answered as it should."""
    return EngineError(
        HTTPStatus.BAD_GATEWAY, json.dumps(_error_body(HTTPStatus.BAD_GATEWAY, text))
    )


def _error(status: HTTPStatus, text: str) -> web.Response:
    return web.json_response(_error_body(status, text), status=status)


def _error_body(status: HTTPStatus, text: str) -> Body:
    """Return an error as OpenAI's and vLLM's servers write one: clients read ``error.message``."""
    error = {"message": text, "type": _type_of(status), "param": None, "code": status.value}
    return {"error": error}


def _reason_of(error: Exception) -> str:
    """Return why an engine does not answer, for the client; aiohttp's text begins with ssl."""
    if not isinstance(error, ClientConnectorError) or not error.os_error.errno:
        return str(error)
    # the errors of names and of TLS have numbers of their own, and texts that are enough
    is_system = type(error) is ClientConnectorError
    reason = os.strerror(error.os_error.errno).lower() if is_system else error.os_error.strerror
    return f"cannot reach {error.host}:{error.port}: {reason}"


def _type_of(status: HTTPStatus) -> str:
    """Return the name that vLLM gives a status.

    >>> _type_of(HTTPStatus.BAD_REQUEST), _type_of(HTTPStatus.BAD_GATEWAY)
    ('BadRequestError', 'BadGatewayError')
    """
    return f"{status.phrase.replace(' ', '')}Error"


def _too_large() -> web.Response:
    return _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {MAX_BODY_BYTES} bytes")


def credentials_of(request: web.Request) -> dict[str, str]:
    """Return the client's key, which engines want if they were started with one."""
    key = request.headers.get("Authorization")
    return {} if key is None else {"Authorization": key}


def _addresses(
    form: str, schemes: Collection[str], prefix: str = ""
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], tuple[URL, ...]]:
    """Return the callback of an option that is given servers, each written in the ``form``.

    It raises BadParameter for another scheme, for no host or port, and for a path.
    """

    def address(text: str) -> URL:
        try:
            url = URL(prefix + text)
            is_right = url.scheme in schemes and url.host and url.port
            if is_right and url == url.origin():
                return url
        except ValueError:
            pass
        raise click.BadParameter(f"expected {form}, got {text!r}")

    return lambda _, __, texts: tuple(map(address, texts))


SERVERS: Final = _addresses("http://HOST:PORT", ("http", "https"))
LISTENERS: Final = _addresses("HOST:PORT", ("tcp",), "tcp://")

SHARED: Final = (
    click.Option(
        ["--prefill"],
        metavar="URL",
        multiple=True,
        required=True,
        callback=SERVERS,
        help="A prefill engine, http://HOST:PORT; once for each.",
    ),
    click.Option(
        ["--decode"],
        metavar="URL",
        multiple=True,
        required=True,
        callback=SERVERS,
        help="A decode engine; once for each.",
    ),
    click.Option(
        ["--host"], default="127.0.0.1", show_default=True, help="Where clients reach it."
    ),
    click.Option(
        ["--port"],
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="0 for a free one, which is printed.",
    ),
)
"""The options of all programs."""
