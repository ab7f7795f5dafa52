"""A proxy between clients and vLLM: ``python -m kvplan_nixl.vllm.proxy --help``.

It is :class:`kvplan_nixl.proxy.Proxy`. With ``--listener`` it asks both engines at once, with a
transfer id of its own for each prompt, by which decode reads what prefill has computed while it
computes the rest (:class:`AtOnce`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from typing import Any, Final

import attrs
import click
from aiohttp import web
from yarl import URL

from kvplan_nixl.proxy import (
    LISTENERS,
    SHARED,
    TRANSFER,
    Answering,
    Body,
    Engines,
    Proxy,
    prefill_body,
    serve,
)

RANK: Final = "X-data-parallel-rank"
"""The header by which a request chooses a rank of data parallelism."""


@attrs.define(eq=False)
class AtOnce(Proxy):
    """Both engines get a request at once: decode reads a prompt while prefill computes the rest.

    ``listeners`` are the host and the port of each prefill engine's connector. An engine has
    ``prefill_ranks`` of data parallelism, each of which listens at the port after that of the one
    before; they take turns.
    """

    listeners: tuple[URL, ...] = attrs.field(kw_only=True)
    prefill_ranks: int = attrs.field(kw_only=True, default=1)
    _rank_turns: Counter[int] = attrs.field(init=False, factory=Counter)

    async def _answer(self, request: web.Request, body: Body, answer: Answering) -> Any:
        """Let prefill compute a prompt, while decode reads it and is about to ``answer``.

        If prefill fails first, so does the request. If it keeps no cache, decode is asked again.
        """
        index = self.prefill.take_turn()
        prefill = Engines((self.prefill.urls[index],))
        room = {"transfer_id": f"transfer-{uuid.uuid4()}"}
        first_token = prefill_body(body)
        first_token[TRANSFER] |= room
        # prefill gets the rank by a header, and decode by the port at which that rank listens
        rank = self._rank_turns[index] % self.prefill_ranks
        self._rank_turns[index] += 1
        listener = self.listeners[index]
        decode_params = {"do_remote_decode": False, "do_remote_prefill": True} | room
        decode_params["remote_bootstrap_addr"] = (
            f"http://{listener.host_subcomponent}:{(listener.port or 0) + rank}"
        )
        headers = {RANK: f"{rank}"} if self.prefill_ranks > 1 else {}
        computing = asyncio.create_task(self._compute(request, first_token, prefill, headers))
        answering = asyncio.ensure_future(answer({**body, TRANSFER: decode_params}))
        try:
            await asyncio.wait((computing, answering), return_when=asyncio.FIRST_COMPLETED)
            if answering.done() or await computing is not None:
                return await answering
        finally:
            # a request that is not needed any more is cancelled on its engine too
            computing.cancel()
            answering.cancel()
            await asyncio.gather(computing, answering, return_exceptions=True)
        return await answer(body)


@click.command(params=[*SHARED])
@click.option(
    "--listener",
    metavar="HOST:PORT",
    multiple=True,
    callback=LISTENERS,
    help="Where each prefill engine's connector listens, in their order: both engines get a "
    "request at once, and decode reads a prompt while it is computed.",
)
@click.option(
    "--prefill-ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The --data-parallel-size of each prefill engine with a listener.",
)
def main(
    prefill: tuple[URL, ...],
    decode: tuple[URL, ...],
    listener: tuple[URL, ...],
    prefill_ranks: int,
    host: str,
    port: int,
) -> None:
    """Let prefill engines compute prompts, and decode engines answer.

    Serves completions and chats. GET /health says whether an engine of each kind is well.
    """
    if listener and len(listener) != len(prefill):
        expected = f"one --listener for each of {len(prefill)} --prefill"
        raise click.UsageError(f"expected {expected}, got {len(listener)}")
    logging.basicConfig(format="%(levelname)s %(message)s")
    asks = f"{len(prefill)} prefill and {len(decode)} decode engines"
    sides = Engines(prefill), Engines(decode)
    proxy = Proxy(*sides)
    if listener:
        proxy = AtOnce(*sides, listeners=listener, prefill_ranks=prefill_ranks)
    asyncio.run(serve(proxy.application(), host, port, asks))


if __name__ == "__main__":
    main()
