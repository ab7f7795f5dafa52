"""A reader that is killed ends its source over TCP: ``python -m benchmarks.killed_reader``.

A reproduction for UCX, with NIXL alone: a source does not poll for a moment, a reader posts reads and is
killed, and the source, which answers them when it polls again, is ended by SIGABRT. ``ucp_request_send`` of UCX
takes any error of a reply but a lack of resources for fatal (``ucp_request.inl``: ``unexpected error: Endpoint
timeout``), and the handler of requests to read (``ucp_get_req_handler``) answers also where the endpoint has
failed. ``docs/how-to/nixl.md`` has what became of the source with which settings.

Options are those of NIXL's backend, ``ucx_error_handling_mode=none``, and of the environment of the source,
``UCX_KEEPALIVE_INTERVAL=inf``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

TCP: Final = {"engine_config": "TLS=tcp,self,TCP_CONN_NB=y,TCP_SYN_CNT=3"}
PIECE_BYTES: Final = 1 << 16
NUM_PIECES: Final = 1000
END_S: Final = 15
"""Seconds within which UCX ends a source."""


def agent_of(name: str, cache: np.ndarray, options: Mapping[str, str]) -> Any:
    """Return a NIXL agent that has registered a cache."""
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("UCX", dict(options))
    agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")
    return agent


def lend(pipe: Connection, options: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Be the source, until the pipe ends."""
    os.environ.update(environment)
    cache = np.ones(PIECE_BYTES * NUM_PIECES, np.uint8)
    agent = agent_of("source", cache, options)
    pipe.send((agent.get_agent_metadata(), cache.ctypes.data))
    pipe.recv()


def read(pipe: Connection, options: Mapping[str, str], metadata: bytes, address: int) -> None:
    """Connect to the source by one small read, then post large ones and wait to be killed."""
    cache = np.zeros(PIECE_BYTES * NUM_PIECES, np.uint8)
    agent = agent_of("reader", cache, options)
    peer = agent.add_remote_agent(metadata)
    starts = range(0, cache.nbytes, PIECE_BYTES)
    for size, offsets in ((8, [0]), (PIECE_BYTES, starts)):
        sides = [[(base + offset, size, 0) for offset in offsets] for base in (cache.ctypes.data, address)]
        local, remote = (agent.get_xfer_descs(side, "DRAM") for side in sides)
        handle = agent.initialize_xfer("READ", local, remote, peer)
        agent.transfer(handle)
        while size == 8 and agent.check_xfer_state(handle) == "PROC":
            time.sleep(0.001)
        pipe.send("posted")
        pipe.recv()


SPAWNED: Final = multiprocessing.get_context("spawn")


def connected_reader(options: Mapping[str, str], place: tuple[bytes, int]) -> tuple[Any, Connection]:
    """Return a process that connects to the source, and its pipe."""
    pipe, reader_pipe = SPAWNED.Pipe()
    reader = SPAWNED.Process(target=read, args=(reader_pipe, options, *place), daemon=True)
    reader.start()
    return reader, pipe


def main() -> None:
    """Print what becomes of the source."""
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    environment = {key: given.pop(key) for key in [*given] if key.startswith("UCX_")}
    options = {**TCP, **given}
    pipe, source_pipe = SPAWNED.Pipe()
    source = SPAWNED.Process(target=lend, args=(source_pipe, options, environment), daemon=True)
    source.start()
    place = pipe.recv()
    reader, reader_side = connected_reader(options, place)
    assert reader_side.recv() == "posted"
    assert source.pid is not None
    os.kill(source.pid, signal.SIGSTOP)
    reader_side.send("go on")
    assert reader_side.recv() == "posted"
    time.sleep(0.3)  # for what the reader's kernel has to send
    reader.kill()
    reader.join()
    os.kill(source.pid, signal.SIGCONT)
    source.join(END_S)
    if source.exitcode is not None:
        print(f"the source was ended: {source.exitcode}")
        return
    other, other_side = connected_reader(options, place)
    print(f"the source lives, and {'serves' if other_side.poll(END_S) else 'does not serve'} another reader")
    other.kill()
    source.kill()


if __name__ == "__main__":
    main()
