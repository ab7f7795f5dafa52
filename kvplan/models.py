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
- Recurrent states. Channels and heads are divided like KV heads, and a group of B and C is where its heads are
  (:mod:`kvplan.states`). A state is not divided over context ranks: each of them keeps the state of its heads.
- Groups. Each kind of layer has a block table of its own: ``attn``, ``swa``, ``state``. Token groups of unequal pages
  have blocks of unequal length (:meth:`Model.blocks`).

Addresses are virtual and deterministic: distinct per worker and region, and per engine id but for one chance in 65535.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import product
from typing import Any, Final

import attrs

from kvplan.axes import Axis
from kvplan.caches import Layer, Layers, Tensor, quantized
from kvplan.configs import draft, read
from kvplan.engines import Addresses, place_apart, place_shared, stages_of
from kvplan.errors import KVPlanError
from kvplan.layouts import Held, Layout, Page
from kvplan.pools import page_bytes
from kvplan.reading import integer, name
from kvplan.views import TOKEN, Context, Group
from kvplan.workers import Worker

MAX_RANKS: Final = 1 << 16

SCALES: Final = ("inline", "page", "region")
"""Where the scales of a quantized cache stand."""


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
    drafts: Layers = attrs.field(default=(), repr=False)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], model_name: str | None = None, *, with_draft_layers: bool = False
    ) -> Model:
        """The model that a parsed config.json describes; its name is its ``model_type`` unless one is given.

        ``with_draft_layers`` adds the layers of multi-token prediction, which most engines don't run.

        Raises ``CONFIG`` for an unknown model type, a missing key or an unusable value.

        >>> Model.from_config({"model_type": "llama", "num_hidden_layers": 32, "num_key_value_heads": 8})
        Traceback (most recent call last):
        ...
        kvplan.errors.KVPlanError: CONFIG: cannot read a model configuration of type 'llama': \
expected a value for key 'hidden_size', got no such key
        """
        model_type, layers, dtype = read(config)
        drafts = draft(config) if with_draft_layers else ()
        return cls(model_type if model_name is None else model_name, layers, dtype, drafts)

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

    def with_draft(self, drafting: Model) -> Model:
        """This model with the layers of another behind it, which drafts tokens: ``draft.{i}.{kind}``.

        They have their own heads and sizes, stand on the last pipeline stage, and use the block tables of the groups
        that they name. An engine with a draft takes ``not_transferred`` from one without.

        >>> target, drafting = Model.shipped("deepseek-v3"), Model.shipped("qwen3-0.6b")
        >>> print(target.with_draft(drafting))
        deepseek-v3: 61 layers, 28 draft layers, bfloat16, groups attn
        """
        return attrs.evolve(self, drafts=drafting.layers)

    def quantized(self, bits: int = 8, scale_dtype: str = "float32", scale_elements: int | None = None) -> Model:
        """This model with K and V of ``bits`` bits each, and scales, re-sharded with their heads.

        There is one scale for each ``scale_elements`` elements of a token's head, or one for all. Sub-byte values are
        packed bytes; raises ``SIZE`` where a head is no whole number of them. NVFP4 is ``quantized(4, "float8_e4m3fn",
        16)`` with ``scales="page"``.
        """
        made = {layer: quantized(layer, bits, scale_dtype, scale_elements) for layer in (*self.layers, *self.drafts)}
        layers, drafts = (tuple(made[layer] for layer in part) for part in (self.layers, self.drafts))
        return attrs.evolve(self, layers=layers, drafts=drafts)

    @property
    def _tensors(self) -> Iterator[Tensor]:
        """Every tensor of every layer, once each, in order of appearance."""
        return iter(dict.fromkeys(tensor for layer in (*self.layers, *self.drafts) for tensor in layer))

    @property
    def groups(self) -> tuple[str, ...]:
        """The block tables that the model's tensors need, in order of appearance."""
        return tuple(dict.fromkeys(tensor.group for tensor in self._tensors))

    @property
    def windows(self) -> dict[str, int | None]:
        """How many tokens back each token group's layers attend, ``None`` for all.

        >>> Model.shipped("gpt-oss-20b").windows
        {'swa': 128, 'attn': None}
        """
        return {tensor.group: tensor.window for tensor in self._tensors if tensor.paged}

    def __str__(self) -> str:
        drafts = f", {len(self.drafts)} draft layers" if self.drafts else ""
        return f"{self.name}: {len(self.layers)} layers{drafts}, {self.dtype}, groups {', '.join(self.groups)}"

    def tensor_bytes(
        self, tp: int = 1, tokens_per_block: int | Mapping[str, int] = 16, *, rank: int = 0, dtype: str | None = None
    ) -> tuple[dict[str, int], ...]:
        """Bytes that one block takes in each layer, by kind of tensor, on tensor-parallel rank ``rank``.

        >>> Model.shipped("granite-4.0-h-tiny").tensor_bytes(2)[0]
        {'conv.x': 9216, 'conv.B': 768, 'conv.C': 768, 'ssm': 786432}
        """
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        rank = integer(rank, "rank", high=tp)
        blocks = self.blocks(tp, tokens_per_block)
        return tuple(
            {tensor.kind: self._held(tensor, "", rank, tp, blocks, dtype).block_bytes for tensor in layer}
            for layer in self.layers
        )

    def block_bytes(
        self, tp: int = 1, tokens_per_block: int | Mapping[str, int] = 16, *, rank: int = 0, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Bytes of data that one block takes in each layer, K and V together, on tensor-parallel rank ``rank``.

        >>> layers = Model.shipped("qwen3-8b").block_bytes()
        >>> layers[0], sum(layers)
        (65536, 2359296)
        """
        layers = self.tensor_bytes(tp, tokens_per_block, rank=rank, dtype=dtype)
        return tuple(sum(layer.values()) for layer in layers)

    def blocks(self, tp: int = 1, tokens_per_block: int | Mapping[str, int] = 16) -> dict[str, int]:
        """Tokens in a block of each token group, where groups of smaller pages get longer blocks.

        A number is that of the group with the largest page; in another, whose page divides it, a block has as many
        times more tokens, so that all pages are equal (``unify_kv_cache_spec_page_size`` of
        vllm/v1/core/kv_cache_utils.py). A mapping says it for each group, and is taken as it is. Raises ``NAME`` where
        it leaves out a token group or has another.

        >>> model = Model.shipped("gemma-4-31b")
        >>> model.blocks(4), model.blocks(8)
        ({'swa': 16, 'attn': 32}, {'swa': 16, 'attn': 16})
        """
        groups = list(dict.fromkeys(tensor.group for tensor in self._tensors if tensor.paged))
        if isinstance(tokens_per_block, Mapping):
            if set(tokens_per_block) != set(groups):
                raise KVPlanError(
                    "NAME",
                    f"page {self.name}",
                    expected=f"tokens_per_block of {', '.join(groups) or 'no group'}",
                    got=", ".join(map(str, tokens_per_block)) or "none",
                    groups=tuple(groups),
                )
            return {group: _tokens(tokens_per_block[group]) for group in groups}
        given = dict.fromkeys(groups, _tokens(tokens_per_block))
        pages = self._pages_by_group(tp, given)
        largest = max(pages.values(), default=0)
        return {g: n if g not in pages or largest % pages[g] else n * largest // pages[g] for g, n in given.items()}

    def _pages_by_group(self, tp: int, blocks: Mapping[str, int]) -> dict[str, int]:
        """The bytes of the largest page of each group of the model itself, on any rank."""
        pages: dict[str, int] = {}
        for layer in dict.fromkeys(self.layers):
            for group in dict.fromkeys(tensor.group for tensor in layer if tensor.paged):
                for rank in range(tp):
                    held = [self._held(t, "", rank, tp, blocks, None) for t in layer if t.group == group]
                    pages[group] = max(pages.get(group, 0), sum(tensor.block_bytes for tensor in held))
        return pages

    def kernel_blocks(self, tp: int = 1, kernel_tokens: int = 16, kv: str = "content") -> int:
        """How many kernel blocks of ``kernel_tokens`` a block of attention needs to be as large as a state.

        With K and V ``split`` the state lies over K alone: 261 of Nemotron-3-Nano-30B at TP 1 and 131 at TP 4, as
        ``compute_physical_blocks_per_logical`` of vLLM's NIXL connector counts them. 1 where a model lacks either.

        >>> model = Model.shipped("nemotron-3-nano-30b-a3b")
        >>> model.kernel_blocks(1, kv="split"), model.kernel_blocks(4, kv="split"), model.kernel_blocks(1)
        (261, 131, 131)
        """
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        layout = Layout(kv=kv)
        blocks = dict.fromkeys(self.groups, _tokens(kernel_tokens))
        needed = 1
        for rank in range(tp):
            pages: dict[bool, int] = {}
            for layer in dict.fromkeys(self.layers):
                for pool, page in self._layer_pages("", layer, rank, tp, blocks, None, "inline"):
                    paged = any(tensor.paged for tensor in layer if f"{tensor.group}.{tensor.pool}" == pool)
                    pages[paged] = max(pages.get(paged, 0), page_bytes(layout, page))
            if len(pages) == 2:
                needed = max(needed, -(-pages[False] // pages[True]))
        return needed

    def engine(
        self,
        engine_id: str,
        tp: int = 1,
        pp: int = 1,
        dcp: int = 1,
        layout: str = "LBHNC",
        tokens_per_block: int | Mapping[str, int] | None = 16,
        num_blocks: int = 4096,
        *,
        pcp: int = 1,
        interleave: int = 1,
        kv: str = "content",
        pad: int = 0,
        kernel_tokens: int | None = None,
        conv_order: str = "DS",
        scales: str = "inline",
        shared: bool = False,
        layers_per_stage: Sequence[int] | None = None,
        dtype: str | None = None,
        memory: str = "DRAM",
    ) -> tuple[Worker, ...]:
        """The workers of an engine that runs the model, in order of rank; the module's docstring has the rules.

        ``tp``, ``pp``, ``dcp``, ``pcp`` are the sizes of tensor, pipeline, decode context and prefill context
        parallelism, ``interleave`` tokens go to a context rank at a time. ``layers_per_stage`` says how many layers
        each pipeline stage has; ``pp`` may be left out then. ``layout``, ``kv``, ``pad`` (bytes), ``kernel_tokens``
        and ``conv_order`` are those of :class:`kvplan.layouts.Layout`. ``scales`` of a quantized cache stand
        ``inline``, in the ``page`` behind all heads' data, or in a ``region`` of their own. ``dtype`` replaces that of
        the attention cache. ``shared`` lays all pools over each other, as :mod:`kvplan.engines` says.

        ``tokens_per_block`` is read by :meth:`blocks`; ``None`` is 16, or as many kernel blocks as a state is large
        (:meth:`kernel_blocks`). Every worker has a pool of ``num_blocks`` for each group, and device 0 unless memory
        is VRAM, where its device is its rank.

        Raises ``LAYOUT`` for an unknown layout and for parallel sizes that the model cannot have, ``TYPE`` or
        ``RANGE`` for a bad number, ``DTYPE`` for an unknown dtype, ``NAME`` for unknown groups.
        """
        pp = len(layers_per_stage) if layers_per_stage is not None and pp == 1 else pp
        tp, pp, dcp, pcp = (
            integer(value, what, low=1, high=MAX_RANKS)
            for what, value in (("tp", tp), ("pp", pp), ("dcp", dcp), ("pcp", pcp))
        )
        order = Layout(layout, kv, pad, kernel_tokens, conv_order)
        if scales not in SCALES:
            raise KVPlanError("LAYOUT", "read scales", expected=f"one of {', '.join(SCALES)}", got=repr(scales))
        if tokens_per_block is None:
            kernel_tokens = kernel_tokens or 16
            order = attrs.evolve(order, kernel_tokens=kernel_tokens)
            tokens_per_block = kernel_tokens * self.kernel_blocks(tp, kernel_tokens, kv)
        blocks = self.blocks(tp, tokens_per_block)
        parts = stages_of(len(self.layers), pp, layers_per_stage)
        self._check_parallel(tp, pp, dcp, pcp)
        addresses = Addresses(name(engine_id, "engine_id"), memory)
        workers = []
        ranks = product(parts, range(pcp), range(tp))
        for rank, (stage, pcp_rank, tp_rank) in enumerate(ranks):
            context = Context(pcp_rank * dcp + tp_rank % dcp, pcp * dcp, interleave)
            pools = self._pools(stage, tp_rank, tp, blocks, dtype, scales)
            views, sizes = (place_shared if shared and pools else place_apart)(order, pools, num_blocks)
            regions = [addresses.region(key, size, rank) for key, size in sizes.items()]
            workers.append(Worker(engine_id, rank, regions, self._groups(blocks, context), views))
        return tuple(workers)

    def _held(
        self, tensor: Tensor, prefix: str, rank: int, tp: int, blocks: Mapping[str, int], dtype: str | None
    ) -> Held:
        axes = tensor.parts(rank, tp)
        if tensor.paged:
            tokens = blocks[tensor.group]
            axes += (Axis(TOKEN, 0, tokens, tokens, 0),)
        return Held(prefix + tensor.kind, tensor.group, tensor.dtype or dtype or self.dtype, axes)

    def _layer_pages(
        self, prefix: str, layer: Layer, rank: int, tp: int, blocks: Mapping[str, int], dtype: str | None, scales: str
    ) -> Iterator[tuple[str, Page]]:
        """The pages of a layer on a rank, each with the name of its pool."""
        pages: dict[tuple[str, str], dict[str, list[Held]]] = {}
        for tensor in layer:
            apart = tensor.scale_of is not None and scales == "region"
            pool = tensor.kind if apart else tensor.pool
            strip = tensor.scale_of if tensor.scale_of is not None and scales == "inline" else tensor.strip
            held = self._held(tensor, prefix, rank, tp, blocks, dtype)
            pages.setdefault((tensor.group, pool), {}).setdefault(strip, []).append(held)
        for (group, pool), strips in pages.items():
            yield f"{group}.{pool}", Page(prefix + pool, tuple(map(tuple, strips.values())))

    def _pools(
        self, stage: range, tp_rank: int, tp: int, blocks: Mapping[str, int], dtype: str | None, scales: str
    ) -> dict[str, list[Page]]:
        """The pages of a stage, those that share rows of a pool together. Draft layers stand on the last stage."""
        pools: dict[str, list[Page]] = {}
        layers = [("", f"layers.{i}.", self.layers[i]) for i in stage]
        if stage.stop == len(self.layers):
            layers += [("draft.", f"draft.{i}.", layer) for i, layer in enumerate(self.drafts)]
        for owner, prefix, layer in layers:
            for pool, page in self._layer_pages(prefix, layer, tp_rank, tp, blocks, dtype, scales):
                pools.setdefault(owner + pool, []).append(page)
        return pools

    def _groups(self, blocks: Mapping[str, int], context: Context) -> list[Group]:
        return [Group(key, blocks[key], context) if key in blocks else Group(key) for key in self.groups]

    def _check_parallel(self, tp: int, pp: int, dcp: int, pcp: int) -> None:
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
        for tensor in (tensor for tensor in self._tensors if tensor.paged):
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


def _tokens(value: Any) -> int:
    return integer(value, "tokens_per_block", low=1, high=1 << 31)


def _shipped() -> dict[str, Any]:
    configs: dict[str, Any] = json.loads(resources.files("kvplan").joinpath("data", "models.json").read_bytes())
    return configs
