"""Models: from a Hugging Face config.json to the workers of an engine.

A :class:`Model` is data: for each layer, the logical tensors that its cache consists of, with global sizes and
the axis that tensor parallelism divides. :meth:`Model.engine` gives each rank its part of them in a layout.

Which rank holds what, as vLLM has it (0.33, and where that differs, said so):

- Tensor parallelism. Of ``K`` heads, rank ``r`` of ``tp`` holds ``[r*K//tp, ceil((r+1)*K/tp))``: those that its
  query heads read. That is an equal share where tp divides K, one replicated head where K divides tp, and
  intervals that overlap by a head otherwise. Latents (MLA) have no heads: every rank holds all of them.
- Pipeline parallelism. Layers form contiguous stages; where they don't divide evenly, stages before the last get
  one more, the latest of those first (``get_pp_indices`` of vllm/distributed/utils.py).
- World rank ``(pp_rank*pcp + pcp_rank)*tp + tp_rank`` (``initialize_model_parallel`` of
  vllm/distributed/parallel_state.py: PP, then PCP, then TP the fastest).
- Context parallelism. Runs of ``interleave`` positions go to ``pcp*dcp`` ranks in turn; a worker's is
  ``pcp_rank*dcp + tp_rank % dcp`` (vllm/v1/worker/block_table.py up to 0.20). DCP reuses tensor-parallel ranks,
  so it needs heads that are replicated. From vLLM 0.33 on, PCP alone replicates the cache instead of dividing it:
  there the workers of one PCP rank, ``pcp=1``, describe the engine.

Addresses are virtual and deterministic: distinct per worker and region, and per engine id but for one chance in 65535.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import product
from typing import Any, Final

import attrs

from kvplan.axes import Axis, integer, name
from kvplan.configs import Layers, Tensor, read
from kvplan.errors import KVPlanError
from kvplan.layouts import Held, Layout, place
from kvplan.views import ITEMSIZE, TOKEN, Context, Group, Region
from kvplan.workers import Worker

ALIGNMENT_BYTES: Final = 1 << 21
"""Every region starts at a multiple of this, and at least this far behind the one before: 2 MiB, a huge page."""

ENGINE_BYTES: Final = 1 << 46
"""The address space of one engine. There are 65535 of them, from this address up to 2**62."""

MAX_RANKS: Final = 1 << 16


def _model_name(value: Any) -> str:
    return name(value, "the name of a model")


@attrs.frozen
class Model:
    """What a model caches: the logical tensors of each layer, ``layers.{i}.{kind}``, and the dtype of the cache.

    >>> model = Model.shipped("llama-3.1-8b")
    >>> print(model)
    llama-3.1-8b: 32 layers, bfloat16, groups attn
    >>> worker = model.engine("prefill", tp=4, layout="BLNHC", tokens_per_block=16, num_blocks=100)[1]
    >>> print(worker)
    prefill/1: 32 views of 32 tensors in 1 region, 1 group
    >>> print(*worker.views[31].axes, sep="; ")
    token [0, 16) of 16 step 1024; head [2, 4) of 8 step 512; kv [0, 2) of 2 step 256; dim [0, 128) of 128 step 2
    """

    name: str = attrs.field(converter=_model_name)
    layers: Layers = attrs.field(repr=False)
    dtype: str = "bfloat16"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model_name: str | None = None) -> Model:
        """The model that a parsed config.json describes; its name is its ``model_type`` unless one is given.

        Raises ``CONFIG`` for an unknown model type, a missing key or an unusable value.

        >>> Model.from_config({"model_type": "llama", "num_hidden_layers": 32, "num_key_value_heads": 8})
        Traceback (most recent call last):
        ...
        kvplan.errors.KVPlanError: CONFIG: cannot read a model configuration of type 'llama': \
expected a value for key 'hidden_size', got no such key
        """
        model_type, layers, dtype = read(config)
        return cls(model_type if model_name is None else model_name, layers, dtype)

    @classmethod
    def shipped(cls, model_name: str) -> Model:
        """A model whose configuration comes with this package, by its name in lower case. Raises ``NAME``."""
        configs = _shipped()
        if model_name not in configs:
            expected = f"a name of {', '.join(configs)}"
            raise KVPlanError("NAME", "load a shipped model", expected=expected, got=repr(model_name), name=model_name)
        return cls.from_config(configs[model_name], model_name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that :meth:`shipped` knows.

        >>> "qwen3-0.6b" in Model.names()
        True
        """
        return tuple(_shipped())

    @property
    def groups(self) -> tuple[str, ...]:
        """The block tables that the model's tensors need, in order of appearance."""
        return tuple(dict.fromkeys(tensor.group for layer in self.layers for tensor in layer))

    def __str__(self) -> str:
        return f"{self.name}: {len(self.layers)} layers, {self.dtype}, groups {', '.join(self.groups)}"

    def block_bytes(
        self, tp: int = 1, tokens_per_block: int = 16, *, rank: int = 0, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Bytes of data that one block takes in each layer, K and V together, on tensor-parallel rank ``rank``.

        >>> layers = Model.shipped("qwen3-8b").block_bytes()
        >>> layers[0], sum(layers)
        (65536, 2359296)
        """
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        rank = integer(rank, "rank", high=tp)
        tokens_per_block = integer(tokens_per_block, "tokens_per_block", low=1, high=1 << 31)
        return tuple(
            sum(_bytes(self._held(tensor, "", rank, tp, tokens_per_block, dtype)) for tensor in layer)
            for layer in self.layers
        )

    def engine(
        self,
        engine_id: str,
        tp: int = 1,
        pp: int = 1,
        dcp: int = 1,
        layout: str = "LBHNC",
        tokens_per_block: int = 16,
        num_blocks: int = 4096,
        *,
        pcp: int = 1,
        interleave: int = 1,
        kv: str = "content",
        pad: int = 0,
        kernel_tokens: int | None = None,
        dtype: str | None = None,
        memory: str = "DRAM",
    ) -> tuple[Worker, ...]:
        """The workers of an engine that runs the model, in order of rank; the module's docstring has the rules.

        ``tp``, ``pp``, ``dcp``, ``pcp`` are the sizes of tensor, pipeline, decode context and prefill context
        parallelism, ``interleave`` tokens go to a context rank at a time. ``layout``, ``kv``, ``pad`` (bytes) and
        ``kernel_tokens`` are those of :class:`kvplan.layouts.Layout`. ``dtype`` replaces that of the cache.
        Every worker has a pool of ``num_blocks`` for each group, and device 0 unless memory is VRAM, where its
        device is its rank.

        Raises ``LAYOUT`` for an unknown layout and for parallel sizes that the model cannot have, ``TYPE`` or
        ``RANGE`` for a bad number, ``DTYPE`` for an unknown dtype.
        """
        tp, pp, dcp, pcp = (
            integer(value, what, low=1, high=MAX_RANKS)
            for what, value in (("tp", tp), ("pp", pp), ("dcp", dcp), ("pcp", pcp))
        )
        tokens_per_block = integer(tokens_per_block, "tokens_per_block", low=1, high=1 << 31)
        order = Layout(layout, kv, pad, kernel_tokens)
        self._check_parallel(tp, pp, dcp, pcp)
        addresses = _Addresses(name(engine_id, "engine_id"), memory)
        workers = []
        ranks = product(stages(len(self.layers), pp), range(pcp), range(tp))
        for rank, (stage, pcp_rank, tp_rank) in enumerate(ranks):
            context = Context(pcp_rank * dcp + tp_rank % dcp, pcp * dcp, interleave)
            pools = self._pools(stage, tp_rank, tp, tokens_per_block, dtype)
            placed = [place(order, pool, tensors, num_blocks) for pool, tensors in pools.items()]
            regions = [addresses.region(key, size, rank) for _, sizes in placed for key, size in sizes.items()]
            views = [view for views, _ in placed for view in views]
            workers.append(Worker(engine_id, rank, regions, self._groups(tokens_per_block, context), views))
        return tuple(workers)

    def _held(self, tensor: Tensor, prefix: str, rank: int, tp: int, tokens_per_block: int, dtype: str | None) -> Held:
        axes = tensor.parts(rank, tp)
        if tensor.paged:
            axes += (Axis(TOKEN, 0, tokens_per_block, tokens_per_block, 0),)
        return Held(prefix + tensor.kind, tensor.group, tensor.dtype or dtype or self.dtype, axes)

    def _pools(
        self, stage: range, tp_rank: int, tp: int, tokens_per_block: int, dtype: str | None
    ) -> dict[str, list[Held]]:
        """The tensors of a stage, those that share rows of a pool together."""
        pools: dict[str, list[Held]] = {}
        for layer in stage:
            for tensor in self.layers[layer]:
                held = self._held(tensor, f"layers.{layer}.", tp_rank, tp, tokens_per_block, dtype)
                pools.setdefault(f"{tensor.group}.{tensor.kind}", []).append(held)
        return pools

    def _groups(self, tokens_per_block: int, context: Context) -> list[Group]:
        paged = {tensor.group: tensor.paged for layer in self.layers for tensor in layer}
        return [Group(key, tokens_per_block, context) if paged[key] else Group(key) for key in self.groups]

    def _check_parallel(self, tp: int, pp: int, dcp: int, pcp: int) -> None:
        if pp > len(self.layers):
            raise KVPlanError(
                "LAYOUT",
                f"divide {self.name} into stages",
                expected=f"pp <= {len(self.layers)}, the number of layers",
                got=f"{pp}",
                pp=pp,
                layers=len(self.layers),
            )
        integer(tp * pp * pcp, "tp * pp * pcp", high=MAX_RANKS)
        if tp % dcp:
            raise KVPlanError(
                "LAYOUT",
                f"spread positions of {self.name}",
                expected=f"dcp that divides tp {tp}, whose ranks it reuses",
                got=f"{dcp}",
                tp=tp,
                dcp=dcp,
            )
        for tensor in dict.fromkeys(tensor for layer in self.layers for tensor in layer if tensor.paged):
            held = {(unit, rank % dcp) for rank in range(tp) for unit in tensor.units(rank, tp)}
            if len(held) < tensor.shards * dcp:
                raise KVPlanError(
                    "LAYOUT",
                    f"spread positions of {self.name}",
                    expected=f"dcp <= {max(tp // tensor.shards, 1)}, "
                    f"how many of {tp} ranks hold each of {tensor.shards} heads",
                    got=f"{dcp}",
                    tp=tp,
                    dcp=dcp,
                    heads=tensor.shards,
                )


def stages(num_layers: int, pp: int) -> Iterator[range]:
    """The layers of each pipeline stage: equal, and what is left one each to the stages before the last.

    >>> [len(stage) for stage in stages(94, 4)], [len(stage) for stage in stages(5, 2)]
    ([23, 24, 24, 23], [3, 2])
    """
    share, rest = divmod(num_layers, pp)
    start = 0
    for stage in range(pp):
        stop = start + share + (pp - 1 - rest <= stage < pp - 1)
        yield range(start, stop)
        start = stop


@attrs.define
class _Addresses:
    """Hands out the address space of one engine, region after region, with a gap between them."""

    engine_id: str
    memory: str
    used_bytes: int = 0

    def region(self, region: str, size_bytes: int, rank: int) -> Region:
        base = (1 + zlib.crc32(self.engine_id.encode()) % 65535) * ENGINE_BYTES
        address = base + self.used_bytes
        self.used_bytes += (size_bytes // ALIGNMENT_BYTES + 2) * ALIGNMENT_BYTES
        if self.used_bytes > ENGINE_BYTES:
            raise KVPlanError(
                "RANGE",
                f"place engine {self.engine_id!r}",
                expected=f"at most {ENGINE_BYTES} bytes of regions",
                got=f"{self.used_bytes}",
                size_bytes=self.used_bytes,
            )
        return Region(region, address, size_bytes, self.memory, rank if self.memory == "VRAM" else 0)


def _bytes(held: Held) -> int:
    count = ITEMSIZE[held.dtype]
    for axis in held.axes:
        count *= axis.extent
    return count


def _shipped() -> dict[str, Any]:
    configs: dict[str, Any] = json.loads(resources.files("kvplan").joinpath("data", "models.json").read_bytes())
    return configs
