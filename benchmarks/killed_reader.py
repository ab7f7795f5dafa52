"""A reader that is killed ends its source over TCP: ``python -m benchmarks.killed_reader``.

A reproduction for UCX, with NIXL alone: a source does not poll for a moment, a reader posts reads and is
killed, and the source, which answers them when it polls again, is ended by SIGABRT. ``ucp_request_send`` of UCX
takes any error of a reply but a lack of resources for fatal (``ucp_request.inl``: ``unexpected error: Endpoint
timeout``), and the handler of requests to read (``ucp_get_req_handler``) answers also where the endpoint has
failed. No setting of those that were tried helps: NIXL's error handling mode, UCX's keepalive, error handlers,
and TCP's put.

Options are those of NIXL's backend: ``ucx_error_handling_mode=none``.
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


def lend(pipe: Connection, options: Mapping[str, str]) -> None:
    """Be the source, until the pipe ends."""
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


def main() -> None:
    """Print what becomes of the source."""
    options = {**TCP, **dict(word.split("=", 1) for word in sys.argv[1:])}
    spawned = multiprocessing.get_context("spawn")
    pipe, source_pipe = spawned.Pipe()
    source = spawned.Process(target=lend, args=(source_pipe, options), daemon=True)
    source.start()
    place = pipe.recv()
    reader_side, reader_pipe = spawned.Pipe()
    reader = spawned.Process(target=read, args=(reader_pipe, options, *place), daemon=True)
    reader.start()
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
    print("the source lives" if source.exitcode is None else f"the source was ended: {source.exitcode}")
    source.kill()


if __name__ == "__main__":
    main()
