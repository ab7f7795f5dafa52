"""Known faults that no planner can catch, and who has to prevent them."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen
class Outside:
    """A fault without an exhibit. ``keeper`` has to prevent it."""

    number: str
    bug: str
    reference: str
    keeper: str


OUTSIDE: Final = (
    Outside(
        "B20",
        "A kernel asserted that a layer's cache is contiguous, which it is not where all layers share each block.",
        "vllm-project/vllm#30207, vllm-project/vllm#33241, vllm-project/vllm#33339",
        "the engine: choose a layout that its kernels can read; plans move between any two",
    ),
    Outside(
        "H5",
        "A reader notified idle replicas of a cache that a request was done, by its own id and not by theirs.",
        "vllm-project/vllm#36958",
        "the executor: plans list whom to notify, but no ids of requests",
    ),
    Outside(
        "H6",
        "A deadline was sent to another machine as a time of the sender's clock, and blocks were freed too early.",
        "tests of vLLM 0.33.0, test_nixl_connector.py",
        "the executor: send durations, never times",
    ),
    Outside(
        "H7",
        "Expired leases were searched in the order of their arrival, and one after a longer one was never found.",
        "vllm-project/vllm#58222",
        "the engine that grants leases",
    ),
    Outside(
        "H8",
        "After an abort, blocks went to another request while the source still wrote to them.",
        "sgl-project/sglang#24527, sgl-project/sglang#24526",
        "the executor: a destination's blocks are in use until each of its completions, or failures, is in",
    ),
    Outside(
        "H9",
        "A source freed blocks when a timeout had passed, while reads of them were still under way.",
        "vllm-project/vllm#56465",
        "the executor: time alone ends no read",
    ),
    Outside(
        "H10",
        "Blocks were stored by a second connector before the first had received their content.",
        "vllm-project/vllm#34526, vllm-project/vllm#35092, vllm-project/vllm#46951",
        "the engine: blocks that await a completion are not to be read",
    ),
    Outside(
        "H11",
        "On a transport with several lanes a notification overtook its data.",
        "ai-dynamo/nixl#252, ai-dynamo/nixl#349",
        "the transfer library: a completion comes after the last byte",
    ),
    Outside(
        "H12",
        "A timeout and a completion both freed the same request.",
        "vllm-project/vllm#24268, llm-d/llm-d#187",
        "the engine: free each request once, atomically",
    ),
    Outside(
        "H13",
        "A destination moved its memory after it had published its addresses, while writes were under way.",
        "sgl-project/sglang#33362",
        "the engine: do not move the memory of a plan before its last completion",
    ),
    Outside(
        "H14",
        "The second turn of a conversation read blocks whose lease had expired.",
        "vllm-project/vllm#47021",
        "the executor: read only what a lease still covers, with a margin",
    ),
    Outside(
        "I5",
        "Requests of a storage backend were used after they had been freed, and matched without their metadata.",
        "ai-dynamo/nixl#2067",
        "the transfer library",
    ),
    Outside(
        "I6",
        "GPU memory was registered as host memory by a build without GPU support, and failed much later.",
        "ai-dynamo/nixl#1393",
        "the transfer library: refuse to register what it cannot reach",
    ),
)
