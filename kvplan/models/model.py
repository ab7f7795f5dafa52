"""Models: from a Hugging Face config.json to the workers of an engine.

A :class:`Model` is data: for each layer, the logical tensors that its cache consists of, with global sizes and
the axis that tensor parallelism divides. :meth:`Model.engine` gives each rank its part of them in a layout.

Which rank holds what, as vLLM 0.33 has it:

- Tensor parallelism. Of ``K`` heads, rank ``r`` of ``tp`` holds ``[r*K//tp, ceil((r+1)*K/tp))``: those that its
  query heads read. That is an equal share where tp divides K, one replicated head where K divides tp, and
  intervals that overlap by a head otherwise. Latents (MLA) have no heads: every rank holds all of them. Channels and
  heads of recurrent states are divided in the same way (:mod:`kvplan.models.states`).
- Pipeline parallelism. Layers form contiguous stages (:func:`kvplan.models.placement.stages`).
- World ranks and context parallelism are those of :mod:`kvplan.models.parallel`, groups those of
  :mod:`kvplan.models.groups`.

Addresses are virtual and deterministic: distinct per worker and region, and per engine id but for one chance in 65535.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import attrs

from kvplan._checks import integer, name
from kvplan.describe.views import Group
from kvplan.describe.worker import Worker
from kvplan.models.config import draft, read
from kvplan.models.groups import grouped, tensors_of, visible, windows
from kvplan.models.layouts import Layout, Page
from kvplan.models.parallel import MAX_RANKS, Parallel, flag
from kvplan.models.placement import Addresses, place_apart, place_shared, stages_of
from kvplan.models.shares import Share, equal_blocks, kernel_blocks, stated_blocks, tokens_of_block
from kvplan.models.shipped import configs, unknown
from kvplan.models.tensors import Layer, Layers, kept_in, quantized

Tokens = int | Mapping[str, int]
"""Tokens in a block, of each token group or of the one with the largest page."""


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
        shipped = configs()
        if model_name not in shipped:
            raise unknown(model_name)
        return cls.from_config(shipped[model_name], model_name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that :meth:`shipped` knows.

        >>> "qwen3-0.6b" in Model.names()
        True
        """
        return tuple(configs())

    def with_draft(self, drafting: Model) -> Model:
        """This model with the layers of another behind it, which drafts tokens: ``draft.{i}.{kind}``.

        They have their own heads and sizes, stand on the last pipeline stage, and use the block tables of the groups
        that they name. An engine with a draft takes ``not_transferred`` from one without.

        >>> target, drafting = Model.shipped("deepseek-v3"), Model.shipped("qwen3-0.6b")
        >>> print(target.with_draft(drafting))
        deepseek-v3: 61 layers, 28 draft layers, bfloat16, groups attn
        """
        return attrs.evolve(self, drafts=drafting.layers)

    def with_dtypes(self, dtype: str | None = None, ssm_dtype: str | None = None) -> Model:
        """This model with an attention cache of ``dtype`` and SSM states of ``ssm_dtype``, None: as they are.

        The sparse latents of DeepSeek-V3.2 are rows of fp8 with scales, 656 bytes, unless a dtype is given:

        >>> model = Model.shipped("deepseek-v3.2")
        >>> [m.tensor_bytes(tokens_per_block=1)[0]["attn"] for m in (model, model.with_dtypes("bfloat16"))]
        [656, 1152]

        Raises ``DTYPE``.
        """
        made = self._with(lambda layer: kept_in(layer, dtype, ssm_dtype))
        return made if dtype is None else attrs.evolve(made, dtype=dtype)

    def quantized(self, bits: int = 8, scale_dtype: str = "float32", scale_elements: int | None = None) -> Model:
        """This model with K and V of ``bits`` bits each, and scales, re-sharded with their heads.

        There is one scale for each ``scale_elements`` elements of a token's head, or one for all. Sub-byte values are
        packed bytes; raises ``SIZE`` where a head is no whole number of them. NVFP4 is ``quantized(4, "float8_e4m3fn",
        16)`` with ``scales="page"``.
        """
        return self._with(lambda layer: quantized(layer, bits, scale_dtype, scale_elements))

    def grouped(self) -> Model:
        """This model with groups of about as many layers each: ``swa``, ``swa.1`` and so on, each with a block table.

        So engines divide the layers of hybrid models that share their memory (:func:`kvplan.models.groups.grouped`).

        >>> Model.shipped("qwen3-next-80b").grouped().groups
        ('state', 'state.1', 'state.2', 'attn')
        """
        layers, drafts = grouped(self.layers, self.drafts)
        return attrs.evolve(self, layers=layers, drafts=drafts)

    def _with(self, change: Callable[[Layer], Layer]) -> Model:
        made = {layer: change(layer) for layer in (*self.layers, *self.drafts)}
        layers, drafts = (tuple(made[layer] for layer in part) for part in (self.layers, self.drafts))
        return attrs.evolve(self, layers=layers, drafts=drafts)

    @property
    def groups(self) -> tuple[str, ...]:
        """The block tables that the model's tensors need, in order of appearance."""
        return tuple(dict.fromkeys(tensor.group for tensor in tensors_of((*self.layers, *self.drafts))))

    @property
    def windows(self) -> dict[str, int | None]:
        """How many tokens back each token group's layers attend, ``None`` for all.

        >>> Model.shipped("gpt-oss-20b").windows
        {'swa': 128, 'attn': None}
        """
        return windows((*self.layers, *self.drafts))

    def tokens(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        """What a request moves of the positions ``[start, stop)``, by token group, as ``plan.bind`` takes it.

        That is all of them, but in sliding-window groups only those which the token at ``stop`` still attends to
        (:func:`kvplan.models.groups.visible`).

        >>> Model.shipped("gpt-oss-20b").tokens(0, 1000)
        {'swa': (873, 1000), 'attn': (0, 1000)}
        """
        return visible(self.windows, start, stop)

    def __str__(self) -> str:
        drafts = f", {len(self.drafts)} draft layers" if self.drafts else ""
        return f"{self.name}: {len(self.layers)} layers{drafts}, {self.dtype}, groups {', '.join(self.groups)}"

    def tensor_bytes(self, tp: int = 1, tokens_per_block: Tokens = 16, *, rank: int = 0) -> tuple[dict[str, int], ...]:
        """Bytes that one block takes in each layer, by kind of tensor, on tensor-parallel rank ``rank``.

        >>> Model.shipped("granite-4.0-h-tiny").tensor_bytes(2)[0]
        {'conv.x': 9216, 'conv.B': 768, 'conv.C': 768, 'ssm': 786432}
        """
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        share = Share(integer(rank, "rank", high=tp), tp, self.blocks(tp, tokens_per_block), self.dtype)
        return tuple({tensor.kind: share.held(tensor).block_bytes for tensor in layer} for layer in self.layers)

    def block_bytes(self, tp: int = 1, tokens_per_block: Tokens = 16, *, rank: int = 0) -> tuple[int, ...]:
        """Bytes of data that one block takes in each layer, K and V together, on tensor-parallel rank ``rank``.

        >>> layers = Model.shipped("qwen3-8b").block_bytes()
        >>> layers[0], sum(layers)
        (65536, 2359296)
        """
        return tuple(sum(layer.values()) for layer in self.tensor_bytes(tp, tokens_per_block, rank=rank))

    def blocks(self, tp: int = 1, tokens_per_block: Tokens = 16) -> dict[str, int]:
        """Tokens in a block of each token group, where groups of smaller pages get longer blocks.

        A number is that of the group with the largest page; in another, whose page divides it, a block has as many
        times more tokens, so that all pages are equal (:func:`kvplan.models.shares.equal_blocks`). A mapping says it
        for each group, and is taken as it is. Raises ``NAME`` where it leaves out a token group or has another.

        >>> model = Model.shipped("gemma-4-31b")
        >>> model.blocks(4), model.blocks(8)
        ({'swa': 16, 'attn': 32}, {'swa': 16, 'attn': 16})
        """
        if isinstance(tokens_per_block, Mapping):
            return stated_blocks(self.name, tuple(self.windows), tokens_per_block)
        given = dict.fromkeys(self.windows, tokens_of_block(tokens_per_block))
        return equal_blocks(self.layers, tp, given, self.dtype)

    def kernel_blocks(self, tp: int = 1, kernel_tokens: int = 16, kv: str = "content") -> int:
        """How many kernel blocks of ``kernel_tokens`` a block of attention needs to be as large as a state.

        With K and V ``split`` the state lies over K alone: 261 of Nemotron-3-Nano-30B at TP 1 and 131 at TP 4, as
        ``compute_physical_blocks_per_logical`` of vLLM's NIXL connector counts them. 1 where a model lacks either.

        >>> model = Model.shipped("nemotron-3-nano-30b-a3b")
        >>> model.kernel_blocks(1, kv="split"), model.kernel_blocks(4, kv="split"), model.kernel_blocks(1)
        (261, 131, 131)
        """
        return kernel_blocks(self.layers, integer(tp, "tp", low=1, high=MAX_RANKS), kernel_tokens, kv, self.dtype)

    def engine(
        self,
        engine_id: str,
        tp: int = 1,
        pp: int = 1,
        dcp: int = 1,
        layout: str = "LBHNC",
        tokens_per_block: Tokens | None = 16,
        num_blocks: int = 4096,
        *,
        pcp: int = 1,
        interleave: int = 1,
        pcp_spreads: bool = False,
        kv: str = "content",
        pad: int = 0,
        kernel_tokens: int | None = None,
        conv_order: str = "DS",
        scales: str = "inline",
        shared: bool = False,
        layers_per_stage: Sequence[int] | None = None,
        memory: str = "DRAM",
    ) -> tuple[Worker, ...]:
        """The workers of an engine that runs the model, in order of rank; the module's docstring has the rules.

        ``tp``, ``pp``, ``dcp``, ``pcp`` are the sizes of tensor, pipeline, decode context and prefill context
        parallelism; they, ``interleave`` and ``pcp_spreads`` are those of :class:`kvplan.models.parallel.Parallel`.
        ``layers_per_stage`` says how many layers each pipeline stage has; ``pp`` may be left out then. ``layout``,
        ``kv``, ``pad`` (bytes), ``kernel_tokens`` and ``conv_order`` are those of
        :class:`kvplan.models.layouts.Layout`. ``scales`` of a quantized cache stand ``inline``, in the ``page`` behind
        all heads' data, or in a ``region`` of their own. ``shared`` lays the groups over each other, as
        :mod:`kvplan.models.placement` says.

        ``tokens_per_block`` is read by :meth:`blocks`; ``None`` is 16, or as many kernel blocks as a state is large
        (:meth:`kernel_blocks`). Every worker has a pool of ``num_blocks`` for each group, and device 0 unless memory
        is VRAM, where its device is its rank.

        Raises ``LAYOUT`` for an unknown layout and for parallel sizes that the model cannot have, ``TYPE`` or
        ``RANGE`` for a bad number, ``NAME`` for unknown groups.
        """
        pp = len(layers_per_stage) if layers_per_stage is not None and pp == 1 else pp
        sizes = Parallel(tp, pp, dcp, pcp, interleave, pcp_spreads)
        order = Layout(layout, kv, pad, kernel_tokens, conv_order)
        if tokens_per_block is None:
            order = attrs.evolve(order, kernel_tokens=kernel_tokens or 16)
            tokens_per_block = (kernel_tokens or 16) * self.kernel_blocks(sizes.tp, kernel_tokens or 16, kv)
        blocks = self.blocks(sizes.tp, tokens_per_block)
        parts = stages_of(len(self.layers), sizes.pp, layers_per_stage)
        sizes.check(self.name, (tensor for tensor in tensors_of((*self.layers, *self.drafts)) if tensor.paged))
        place = place_shared if flag(shared, "shared") and len(self.groups) > 1 else place_apart
        addresses = Addresses(name(engine_id, "engine_id"), memory)
        workers = []
        for rank, (stage, pcp_rank, tp_rank) in enumerate(product(parts, range(sizes.pcp), range(sizes.tp))):
            context = sizes.context(pcp_rank, tp_rank)
            pools = self._pools(stage, Share(tp_rank, sizes.tp, blocks, self.dtype, scales))
            views, spans = place(order, pools, num_blocks) if pools else ([], {})
            regions = [addresses.region(key, size, rank) for key, size in spans.items()]
            groups = [Group(key, blocks[key], context) if key in blocks else Group(key) for key in self.groups]
            workers.append(Worker(engine_id, rank, regions, groups, views))
        return tuple(workers)

    def _pools(self, stage: range, share: Share) -> dict[str, list[Page]]:
        """The pages of a stage, those that share rows of a pool together. Draft layers stand on the last stage."""
        pools: dict[str, list[Page]] = {}
        layers = [("", f"layers.{i}.", self.layers[i]) for i in stage]
        if stage.stop == len(self.layers):
            layers += [("draft.", f"draft.{i}.", layer) for i, layer in enumerate(self.drafts)]
        for owner, prefix, layer in layers:
            for pool, page in share.pages(layer, prefix):
                pools.setdefault(owner + pool, []).append(page)
        return pools
