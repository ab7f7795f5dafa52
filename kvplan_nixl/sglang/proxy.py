"""A proxy between vLLM and SGLang: ``python -m kvplan_nixl.sglang.proxy --help``.

It is :class:`kvplan_nixl.proxy.Proxy` with SGLang as one of the engines. SGLang knows a request
by a *room*: a number at a bootstrap server, where its prompt is published. Two SGLang engines need
no such proxy, since SGLang's own routers send a request to both.

- vLLM computes, SGLang answers (:class:`ToSglang`): the bootstrap server is the proxy's. It
  publishes vLLM's ``kv_transfer_params`` there with the first token, and sends SGLang the room.
- SGLang computes, vLLM answers (:class:`FromSglang`): SGLang publishes at its own bootstrap server.
  The proxy asks that for the room, and sends vLLM what it has as ``kv_transfer_params``.

vLLM alone, on either side, computes what a decode engine would compute in any case: an SGLang
engine of a disaggregated pair computes no request from beginning to end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import attrs
import click
from aiohttp import web
from yarl import URL

from kvplan import KVPlanError
from kvplan.protocol import Rooms
from kvplan.protocol.room_contents import is_partial
from kvplan.protocol.system import TOKEN_BYTES
from kvplan_nixl import proxy
from kvplan_nixl.proxy import LOGGER, SHARED, TRANSFER, Answering, Body, Engines, Proxy
from kvplan_nixl.serving import Driver
from kvplan_nixl.settings import Settings, secrets_of_environment
from kvplan_nixl.sglang.bootstrap import BootstrapServer, ask, publish, withdraw

ROOM_BITS: Final = 62
"""SGLang keeps a room in a signed integer of 64 bits."""

T = TypeVar("T")


def room_at(address: str, room: int) -> Body:
    """Return the parameters by which a request to SGLang names a room.

    >>> room_at("[::1]:8998", 7)
    {'bootstrap_host': '[::1]', 'bootstrap_port': 8998, 'bootstrap_room': 7}
    """
    host, _, port = address.rpartition(":")
    return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}


@attrs.define(eq=False)
class _WithRooms(Proxy):
    """A proxy that talks to bootstrap servers."""

    system: Driver = attrs.field(kw_only=True)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine of the protocol. Raises EngineError for what it raises."""
        try:
            return await asyncio.wrap_future(self.system.submit(coroutine))
        except KVPlanError as error:
            raise proxy.bad_gateway(str(error)) from None


@attrs.define(eq=False)
class ToSglang(_WithRooms):
    """vLLM computes prompts, and SGLang's decode reads and answers them."""

    server: BootstrapServer = attrs.field(kw_only=True)

    @property
    def alone(self) -> Engines:
        """vLLM, which computes what SGLang would not read."""
        return self.prefill

    async def _answer(self, request: web.Request, body: Body, answer: Answering) -> Any:
        first = proxy.prefill_body(body) | {"return_token_ids": True}
        # SGLang's decode begins with the first token, and computes no token of the prompt
        first[TRANSFER] |= {"whole_prompt": True}
        computed = await self._asked(request, first, self.prefill)
        if computed.get(TRANSFER) is None:
            raise proxy.bad_gateway("prefill keeps no cache: expected kv_transfer_params from it")
        choice = computed["choices"][0]
        entry = {"handoff": computed[TRANSFER], "token": choice["token_ids"][0]}
        room = random.getrandbits(ROOM_BITS)
        address = self.server.address
        owner = self.system.token_hex(TOKEN_BYTES)
        try:
            await self._on_loop(publish(address, room, entry, owner=owner, system=self.system))
            tokens = choice.get("prompt_token_ids")
            # both engines have the same tokens then, whatever their tokenizers add to a text
            same = {} if tokens is None or "messages" in body else {"prompt": tokens}
            return await answer({**body, **same, **room_at(address, room)})
        finally:
            withdrawal = withdraw(address, room, owner, system=self.system)
            try:
                await asyncio.wrap_future(self.system.submit(withdrawal))
            except KVPlanError as error:
                # the answer is whole without it, and the server keeps no room for long
                LOGGER.warning("%s", error)


@attrs.define(eq=False)
class FromSglang(_WithRooms):
    """SGLang computes prompts, and vLLM's decode reads and answers them.

    ``bootstraps`` are the addresses of the prefill engines' bootstrap servers, in their order.
    """

    bootstraps: tuple[str, ...] = attrs.field(kw_only=True)
    _rooms: Rooms = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # prompts that wait share a question to each server
        key = self.system.access.key
        self._rooms = Rooms(LOGGER, key, self.system, max_servers=len(self.bootstraps))

    async def _answer(self, request: web.Request, body: Body, answer: Answering) -> Any:
        index = self.prefill.take_turn()
        room = random.getrandbits(ROOM_BITS)
        first = proxy.prefill_body(body) | room_at(self.bootstraps[index], room)
        del first[TRANSFER]
        engine = Engines((self.prefill.urls[index],))
        # SGLang answers when its pages are free again, which is after decode has read them
        computing = asyncio.create_task(self._asked(request, first, engine))
        try:
            entry = await self._published(self.bootstraps[index], room, computing)
            handoff = {"do_remote_prefill": True, **entry["handoff"]}
            return await answer({**body, TRANSFER: handoff})
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    async def _published(
        self, address: str, room: int, computing: asyncio.Task[Body]
    ) -> Mapping[str, Any]:
        """Return what prefill publishes for a whole prompt. Raises EngineError where it fails."""
        # at once, since a server that cannot be reached is an error of this request
        await self._on_loop(ask(address, [room], key=self.system.access.key, system=self.system))
        published: Future[Mapping[str, Any]] = Future()

        def deliver(entry: Mapping[str, Any]) -> bool:
            is_whole = not is_partial(entry)
            if is_whole:
                published.set_result(entry)
            return is_whole

        name = f"{room}"
        self._rooms.subscribe(name, name, address, deliver)
        waiting = asyncio.wrap_future(published)
        try:
            await asyncio.wait((waiting, computing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await computing
                raise proxy.bad_gateway("SGLang's prefill has published no cache of the prompt")
            entry = waiting.result()
        finally:
            # nothing is delivered afterwards
            self._rooms.unsubscribe(name)
            waiting.cancel()
        if "handoff" not in entry:
            raise proxy.bad_gateway(f"room {room} has no handoff: {entry.get('error')}")
        return entry


@click.command(params=[*SHARED])
@click.option(
    "--bootstrap",
    metavar="HOST:PORT",
    multiple=True,
    callback=proxy.LISTENERS,
    help="The bootstrap server of each prefill engine, in their order, if SGLang is prefill. "
    "Without it vLLM is prefill, and SGLang decode.",
)
@click.option(
    "--rooms-host",
    default="127.0.0.1",
    show_default=True,
    help="Where SGLang's decode reaches the bootstrap server of the proxy.",
)
def main(
    prefill: tuple[URL, ...],
    decode: tuple[URL, ...],
    bootstrap: tuple[URL, ...],
    host: str,
    port: int,
    rooms_host: str,
) -> None:
    """Let vLLM compute prompts and SGLang answer them, or SGLang compute and vLLM answer.

    Serves completions and chats. The key of all engines is in KVPLAN_KEY or KVPLAN_KEY_FILE.
    """
    if bootstrap and len(bootstrap) != len(prefill):
        expected = f"one --bootstrap for each of {len(prefill)} --prefill"
        raise click.UsageError(f"expected {expected}, got {len(bootstrap)}")
    logging.basicConfig(format="%(levelname)s %(message)s")
    asks = "SGLang prefill and vLLM decode" if bootstrap else "vLLM prefill and SGLang decode"
    try:
        secrets = secrets_of_environment((), os.environ)
        access = Settings.read_texts(secrets, "the environment").access()
        addresses = tuple(f"{url.host_subcomponent}:{url.port}" for url in bootstrap)
        system = Driver(attrs.evolve(access, servers=addresses))
        ways: Proxy
        if bootstrap:
            ways = FromSglang(
                Engines(prefill), Engines(decode), system=system, bootstraps=addresses
            )
        else:
            server = BootstrapServer(rooms_host, 0, system=system)
            ways = ToSglang(Engines(prefill), Engines(decode), system=system, server=server)
    except KVPlanError as error:
        raise click.ClickException(str(error)) from None
    asyncio.run(proxy.serve(ways.application(), host, port, asks))


if __name__ == "__main__":
    main()
