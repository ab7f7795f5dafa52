"""`python -m tests.second_opinion.vllm_views`: `from_vllm` on caches that vLLM's `create_kv_cache_views` makes.

In each of vLLM's layouts: heads on one rank and on two, kernel blocks, latents, sliding layers, and states in the pages
of attention. Values of a request are written by vLLM's indices, moved, and compared. Exit status 1: one is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np

from benchmarks.peers import environment
from benchmarks.peers.loading import RefusedError
from kvplan import KVPlanError
from kvplan.bridges import RankInfo, from_vllm
from tests.engine_memory import (
    DIM,
    GQA,
    HEADS,
    MAMBA2,
    MLA,
    SLIDING,
    TABLES,
    check,
    fill_vllm,
    heads,
    latent_of,
    names_of,
    slots,
    states_of,
)

NUM_BLOCKS: Final = 8
TOKENS: Final = 8
ALL: Final = range(HEADS)


def main() -> int:
    """Run here, or with the interpreter of the environment."""
    if not environment.is_there():
        print("no vLLM here: `python -m benchmarks.peers.environment` makes the environment that it needs")
        return 0
    if not environment.PYTHON.parent.parent.samefile(sys.prefix):
        command = [str(environment.PYTHON), "-m", "tests.second_opinion.vllm_views"]
        return subprocess.run(command, cwd=environment.ROOT).returncode
    from benchmarks.peers import loading

    vllm, wrong = Vllm(loading.load()["vllm.v1.kv_cache_interface"]), 0
    for layout in vllm.interface.KVCacheLayout:
        for case in (attention, two_ranks, kernel_blocks, latents, sliding, states):
            try:
                case(vllm, layout)
                found = "every value is where it belongs"
            except RefusedError as error:
                found = f"not made by vLLM: {error}"
            except (AssertionError, KVPlanError) as error:
                found, wrong = f"WRONG: {error}", wrong + 1
            print(f"{layout.name} {case.__name__}: {found}")
    return 1 if wrong else 0


@attrs.frozen
class Vllm:
    """vLLM's module of cache specs, and the memory that was made for them."""

    interface: Any
    kept: list[Any] = attrs.field(factory=list)

    def spec(self, kind: str = "FullAttentionSpec", **given: Any) -> Any:
        """A spec, of attention layers with values of int32 where nothing else is said."""
        import torch

        heads = {"num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.int32}
        return getattr(self.interface, kind)(
            **{"block_size": TOKENS, **(given if "shapes" in given else heads | given)}
        )

    def make(
        self, layout: Any, groups: Mapping[tuple[str, ...], Any], kernel: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The config and caches of groups, a spec by the names of its layers, over each other in one allocation."""
        import torch

        interface, tensors = self.interface, []
        caches: dict[str, Any] = {}
        block = max(spec.page_size_bytes * len(names) for names, spec in groups.items())
        raw = torch.zeros(block * NUM_BLOCKS, dtype=torch.int8)
        self.kept.append(raw)
        fixed = (None, block if layout.is_block_outermost else None, None, None, None)
        try:
            for names, spec in groups.items():
                strides = interface.compute_layout_strides(spec, NUM_BLOCKS, len(names), layout, fixed_strides=fixed)
                tensors.append(interface.KVCacheTensor(raw.numel(), list(names), strides[0], strides[1]))
                views = interface.create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensors[-1], kernel)
                caches.update(zip(names, views, strict=True))
        except (AssertionError, ValueError) as error:
            raise RefusedError(error) from error
        specs = [interface.KVCacheGroupSpec(list(names), spec) for names, spec in groups.items()]
        return interface.KVCacheConfig(NUM_BLOCKS, tensors, specs), caches


def attention(vllm: Vllm, layout: Any, ranks: int = 1, kernel: int | None = None) -> None:
    """Heads on one rank or more, in blocks or kernel blocks."""
    workers = []
    for rank in range(ranks):
        held, names = heads(rank, ranks), names_of(range(3))
        config, caches = vllm.make(layout, {tuple(names): vllm.spec(num_kv_heads=len(held))}, kernel)
        ratio = TOKENS // (kernel or TOKENS)
        table = [block * ratio + part for block in TABLES["attn"] for part in range(ratio)]
        for layer, name in enumerate(names):
            fill_vllm(caches[name].numpy(), layer, held, TOKENS // ratio, table)
        workers.append(from_vllm(GQA, RankInfo("prefill", rank, rank, ranks), config, caches, kv_layout="content"))
    check(GQA, workers, tp=3)


def two_ranks(vllm: Vllm, layout: Any) -> None:
    """Half of the heads on each of two ranks."""
    attention(vllm, layout, ranks=2)


def kernel_blocks(vllm: Vllm, layout: Any) -> None:
    """Each block is two kernel blocks."""
    attention(vllm, layout, kernel=TOKENS // 2)


def latents(vllm: Vllm, layout: Any) -> None:
    """A latent for each token."""
    names = names_of(range(3))
    config, caches = vllm.make(layout, {tuple(names): vllm.spec("MLAAttentionSpec", num_kv_heads=1)})
    for layer, name in enumerate(names):
        for position, block, slot in slots(TOKENS, TABLES["attn"]):
            caches[name].numpy()[block, 0, slot] = latent_of(layer, position)
    check(MLA, [from_vllm(MLA, RankInfo("prefill"), config, caches)])


def sliding(vllm: Vllm, layout: Any) -> None:
    """Full and sliding layers, over each other in blocks of their own."""
    full, window = tuple(names_of([0, 2])), tuple(names_of([1, 3]))
    specs = {full: vllm.spec(), window: vllm.spec("SlidingWindowSpec", sliding_window=8)}
    config, caches = vllm.make(layout, specs)
    tables = {"attn": [7, 2, 5, 0], "swa": [1, 6, 3, 4]}
    for names, table, layers in ((full, tables["attn"], (0, 2)), (window, tables["swa"], (1, 3))):
        for layer, name in zip(layers, names, strict=True):
            fill_vllm(caches[name].numpy(), layer, ALL, TOKENS, table)
    worker = from_vllm(SLIDING, RankInfo("prefill"), config, caches, kv_layout="content")
    check(SLIDING, [worker], tables)


def states(vllm: Vllm, layout: Any) -> None:
    """Mamba2 states over attention, whose page they are padded to."""
    import torch

    if not layout.is_block_compact:
        raise RefusedError("groups of such pages lie over each other only where each page is one run of bytes")
    both, full = states_of(MAMBA2, "DS"), vllm.spec()
    dtypes = tuple(getattr(torch, str(state.dtype)) for state in both)
    shapes = tuple(state.shape for state in both)
    spec = vllm.spec("MambaSpec", shapes=shapes, dtypes=dtypes, page_size_padded=full.page_size_bytes)
    names = ("backbone.layers.0.mixer", "backbone.layers.1.mixer")
    config, caches = vllm.make(layout, {names[:1]: spec, names[1:]: full})
    fill_vllm(caches[names[1]].numpy(), 1, ALL, TOKENS, TABLES["attn"])
    caches[names[0]].numpy()[1, 0, 0] = np.concatenate([state.reshape(-1).view(np.int8) for state in both])
    worker = from_vllm(MAMBA2, RankInfo("prefill"), config, caches, kv_layout="content")
    check(MAMBA2, [worker], {"state": [1], "attn": TABLES["attn"]})


if __name__ == "__main__":
    sys.exit(main())
