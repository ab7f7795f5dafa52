"""Two engines of transformers' continuous batching, with pages of 16 and of 40 tokens, generate the same tokens."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from kvplan import KVPlanError
from kvplan.protocol import Handoff
from tests.blocking import wait_until
from tests.nixl.continuous_batching import RING, TIMEOUT_S, Engine, serve

NEW = 16
LENGTHS = (7, 56, 100, 130)
"""Prompts: shorter than a page, as long as the window, and rings that have wrapped once and twice."""

Ask = Callable[..., Any]


@pytest.fixture(params=["llama", "gemma-3"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[str, Ask, Engine]]:
    """A model, a prefill engine of it in a process of its own, by its commands, and a decode engine."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, request.param, 16), daemon=True)
    process.start()

    def ask(*command: Any) -> Any:
        here.send(command)
        assert here.poll(TIMEOUT_S), f"no answer to {command[0]}"
        return here.recv()

    decode = Engine("decode", request.param, 40)
    with decode.executor, closing(decode.listener), closing(decode.claims):
        yield request.param, ask, decode
        process.kill()
        process.join(TIMEOUT_S)


def test_pages_of_16_into_pages_of_40(engines: tuple[str, Ask, Engine]) -> None:
    """The tokens are those of either engine alone, and others where what was read of a kind of layers is taken away."""
    model, prefill, decode = engines
    kinds = ["full_attention", RING] if model == "gemma-3" else ["full_attention"]
    for length in LENGTHS:
        prompt = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        alone = prefill("generate", prompt, NEW)
        assert decode.generate(prompt, NEW) == alone
        prefilled = prefill("prefill", f"request {length}", prompt)
        handoff = Handoff.of_params(prefilled[1], decode.key)
        decode.claims.claim(handoff.source, handoff.lease, "all readers")
        for left_out in kinds:
            assert decode.decode(f"without {left_out}", prompt, prefilled, NEW, left_out) != alone
        assert decode.decode(f"request {length}", prompt, prefilled, NEW) == alone
        with pytest.raises(KVPlanError, match="PROMPT"):
            decode.decode("another prompt", prompt[::-1], prefilled, NEW)
        assert prefill("free") == ()
        decode.claims.release(handoff.source, handoff.lease, "all readers")
        assert wait_until(lambda: prefill("free"), TIMEOUT_S) == (f"request {length}",)
        with pytest.raises(KVPlanError, match="LEASE"):
            decode.decode("too late", prompt, prefilled, NEW)
