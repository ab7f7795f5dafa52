"""Models: from a Hugging Face config.json to the workers of an engine.

A :class:`Model` is data: the logical tensors that each layer caches, with global sizes and the axis
that tensor parallelism divides. :meth:`Model.engine` gives each rank its shard, in a layout.
Addresses are made up but deterministic: two regions of an engine never overlap, and two engines do
only if their ids hash to the same one of 65535 values.

Which rank holds what, as in vLLM 0.33:

- Tensor parallelism. Of ``K`` heads, rank ``r`` of ``tp`` holds ``[r*K//tp, ceil((r+1)*K/tp))``,
  the heads that its query heads read. If tp divides K, these are equal shares; if K divides tp,
  each rank has a replica of one head; otherwise neighbouring intervals may overlap by a head.
  Latents (MLA) have no heads, so every rank holds all of them. Channels and heads of recurrent
  states are divided in the same way (:mod:`kvplan.models.tensors`).
- Pipeline parallelism. Layers form contiguous stages (:func:`kvplan.models.parallel.stages_of`).
- World ranks and context parallelism: :mod:`kvplan.models.parallel`.
- Groups. Each kind of attention layer and the states have a block table of their own: ``attn``,
  ``swa``, ``state``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, product
from typing import Any, NamedTuple

import attrs

from kvplan._checks import check_fields, instance, integer, is_one_of, members, name
from kvplan._text import brief_repr, meant, plain, shown
from kvplan.describe.views import TOKEN, Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.config import read_config, shipped_configs
from kvplan.models.layouts import Layout, Page
from kvplan.models.parallel import MAX_RANKS, Parallel, RankShard, stages_of
from kvplan.models.pools import Addresses, page_stride, place_pools
from kvplan.models.tensors import Layer, Layers, Tensor, convert, group_evenly, quantize

BlockTokens = int | Mapping[str, int]
"""Tokens per block: of each token group, or of the one with the largest page."""


class NamedLayer(NamedTuple):
    """What a layer caches, and the prefix of its tensors' names, such as ``layers.3.``."""

    prefix: str
    tensors: Layer


@attrs.frozen
class Model:
    """The tensors that each layer of a model caches, ``layers.{i}.{kind}``, and their dtype.

    ``query_heads`` is how many query heads an attention layer has, if that is known. They are not
    cached, but engines divide them among ranks. ``model_type`` is the type as which a config.json
    was read, if the model is from one.

    >>> model = Model.shipped("llama-3.1-8b")
    >>> print(model)
    llama-3.1-8b: 32 layers, bfloat16, groups attn
    >>> worker = model.engine("prefill", tp=4, layout="BLNHC", num_blocks=100)[1]
    >>> print(worker)
    prefill/1: 32 views of 32 tensors in 1 region, 1 group
    >>> print(*worker.views[31].axes, sep="; ")
    token [0, 16) of 16 stride 1024; head [2, 4) of 8 stride 512; kv [0, 2) of 2 stride 256;
    dim [0, 128) of 128 stride 2
    """

    name: str
    layers: Layers = attrs.field(repr=False)
    dtype: str = "bfloat16"
    drafts: Layers = attrs.field(default=(), repr=False)
    query_heads: int | None = attrs.field(default=None, repr=False)
    model_type: str | None = attrs.field(default=None, repr=False)

    __repr__ = brief_repr

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a model", name, "name", "dtype")
        check_fields(self, "a model", _layers, "layers", "drafts")

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        model_name: str | None = None,
        *,
        with_draft_layers: bool = False,
        like: str | None = None,
        quantization: Mapping[str, Any] | None = None,
    ) -> Model:
        """Return the model of a parsed config.json, named ``model_name`` or after its type.

        ``with_draft_layers`` adds the layers of multi-token prediction, which most engines don't
        run. ``like`` is the known type as which a file of an unknown type is read. It must cache
        the same: kvplan cannot check that, but refuses keys that change the cache of another type.
        ``quantization`` is the parsed hf_quant_config.json of the same folder, which may say that
        engines store the cache in fp8.

        Raises ``TYPE`` if ``config`` is not a mapping, ``CONFIG`` for an unknown model type, a
        missing key or an unusable value.

        >>> keys = {"num_hidden_layers": 32, "num_key_value_heads": 8}
        >>> Model.from_config({"model_type": "llama", **keys})
        Traceback (most recent call last):
        ...
        kvplan.errors.KVPlanError: CONFIG: cannot read a model configuration of type 'llama': \
expected a value for key 'hidden_size', got no such key
        """
        instance(bool, with_draft_layers, "with_draft_layers")
        if quantization is not None:
            instance(Mapping, quantization, "quantization of a model")
        contents = read_config(config, with_draft_layers, like, quantization)
        return cls(contents.model_type if model_name is None else model_name, *contents)

    @classmethod
    def shipped(cls, model_name: str) -> Model:
        """Return a model whose configuration comes with this package, by its name in lower case.

        Raises ``NAME``.
        """
        configs = shipped_configs()
        if not is_one_of(model_name, configs):
            raise KVPlanError(
                "NAME",
                "load a shipped model",
                expected="one that 'kvplan models' lists",
                got=shown(model_name),
                hint=meant(plain(model_name), configs),
                name=plain(model_name),
            )
        return cls.from_config(configs[model_name], model_name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the shipped models.

        >>> "qwen3-0.6b" in Model.names()
        True
        """
        return tuple(shipped_configs())

    def with_draft(self, drafting: Model) -> Model:
        """Return this model with the layers of another that drafts tokens: ``draft.{i}.{kind}``.

        Draft layers have their own heads and sizes, are on the last pipeline stage, and use the
        block tables of their groups. To plan from an engine without a draft to one with it, list
        the draft's tensors in ``not_transferred``.

        >>> target, drafting = Model.shipped("deepseek-v3"), Model.shipped("qwen3-0.6b")
        >>> print(target.with_draft(drafting))
        deepseek-v3: 61 layers, 28 draft layers, bfloat16, groups attn
        """
        return attrs.evolve(self, drafts=instance(Model, drafting, "drafting").layers)

    def with_dtypes(self, dtype: str | None = None, ssm_dtype: str | None = None) -> Model:
        """Return this model with an attention cache of ``dtype`` and SSM states of ``ssm_dtype``.

        None changes nothing. The sparse latents of DeepSeek-V3.2 are 656 bytes of fp8 values and
        scales, unless a dtype is given:

        >>> model = Model.shipped("deepseek-v3.2")
        >>> models = model, model.with_dtypes("bfloat16")
        >>> [model.tensor_bytes(tokens_per_block=1)[0]["attn"] for model in models]
        [656, 1152]

        Raises ``DTYPE``.
        """
        model = self._with(lambda layer: convert(layer, dtype, ssm_dtype))
        return model if dtype is None else attrs.evolve(model, dtype=dtype)

    def quantized(
        self, bits: int = 8, scale_dtype: str = "float32", scale_elements: int | None = None
    ) -> Model:
        """Return this model with K and V of ``bits`` bits, and scales divided among ranks as heads.

        Each ``scale_elements`` elements of a token's head have one scale; None: the whole head has
        one. Values of less than a byte are packed. NVFP4 is ``quantized(4, "float8_e4m3fn", 16)``
        with ``scales="page"``.

        Raises ``SIZE`` if a head is not a whole number of bytes or of scales, or quantized already.
        """
        return self._with(lambda layer: quantize(layer, bits, scale_dtype, scale_elements))

    def grouped(self) -> Model:
        """Return this model with groups of about the same number of layers, each a block table.

        They are ``swa``, ``swa.1`` and so on. This is how engines divide the layers of hybrid
        models whose groups share memory, so that a block of any group takes the same memory
        (:func:`kvplan.models.tensors.group_evenly`).

        >>> Model.shipped("qwen3-next-80b").grouped().groups
        ('state', 'state.1', 'state.2', 'attn')
        """
        return self._with_layers(group_evenly((*self.layers, *self.drafts)))

    def _with(self, change: Callable[[Layer], Layer]) -> Model:
        """Return this model with each layer changed. Equal layers are changed once."""
        layers = (*self.layers, *self.drafts)
        changed = {layer: change(layer) for layer in dict.fromkeys(layers)}
        return self._with_layers(tuple(changed[layer] for layer in layers))

    def _with_layers(self, layers: Layers) -> Model:
        """Return this model with other layers, the drafts last."""
        num_layers = len(self.layers)
        return attrs.evolve(self, layers=layers[:num_layers], drafts=layers[num_layers:])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The distinct logical tensors of all layers, drafts included, in order of appearance."""
        return tuple(dict.fromkeys(chain(*self.layers, *self.drafts)))

    @property
    def groups(self) -> tuple[str, ...]:
        """The block tables that the model's tensors need, in order of appearance."""
        return tuple(dict.fromkeys(tensor.group for tensor in self.tensors))

    @property
    def windows(self) -> dict[str, int | None]:
        """The most tokens back that layers of each token group attend; ``None`` for all tokens.

        >>> Model.shipped("gpt-oss-20b").windows
        {'swa': 128, 'attn': None}
        """
        windows: dict[str, int | None] = {}
        for tensor in self.tensors:
            if tensor.paged:
                # A layer without a window makes that of its group unlimited.
                widest, own = windows.get(tensor.group, tensor.window), tensor.window
                windows[tensor.group] = None if widest is None or own is None else max(widest, own)
        return windows

    def tokens(self, start: int, stop: int, worker: Worker) -> dict[str, tuple[int, int]]:
        """Return the range of the positions ``[start, stop)`` that a request moves, by token group.

        The groups are those of ``worker``, which binds the request. A token at ``p`` attends to
        positions above ``p - w`` in a layer with a sliding window of ``w`` tokens
        (``SlidingWindowManager.get_num_skipped_tokens`` of
        vllm/v1/core/single_type_kv_cache_manager.py, 0.33). So a group of such layers moves at most
        the last ``w`` positions, for the largest ``w``: all that the token at ``stop - 1`` attends
        to. In a layer that attends inside of chunks, as Llama 4 has, it attends to its own chunk.
        That suits engines that compute the prompt's last token again on decode, as vLLM does.

        >>> model = Model.shipped("gpt-oss-20b")
        >>> model.tokens(0, 1000, model.engine("decode")[0])
        {'swa': (872, 1000), 'attn': (0, 1000)}

        Raises ``TYPE`` or ``RANGE`` for a bad range, ``NAME`` for a tensor with tokens that the
        model lacks.
        """
        start = integer(start, "start of a token range")
        stop = integer(stop, "stop of a token range", low=start)
        groups = instance(Worker, worker, "worker").groups
        token_groups = {group.name for group in groups if not group.is_state}
        ranges: dict[str, tuple[int, int]] = {}
        for view in worker.views:
            if view.group in token_groups:
                # What one of the group's tensors needs, all move.
                first = max(start, self._tensor_named(view.name).first_attended(stop - 1))
                before, _ = ranges.get(view.group, (first, stop))
                ranges[view.group] = min(before, first), stop
        return ranges

    def _tensor_named(self, tensor_name: str) -> Tensor:
        if tensor_name not in self._paged_tensors:
            action = f"find the window of {tensor_name!r}"
            raise KVPlanError("NAME", action, expected=f"a tensor of {self.name}", got="none")
        return self._paged_tensors[tensor_name]

    @cached_property
    def _paged_tensors(self) -> Mapping[str, Tensor]:
        """Each tensor with tokens, by its name on workers."""
        tensors = {}
        for prefix, layer in self._named_layers:
            for tensor in layer:
                if tensor.paged:
                    tensors[prefix + tensor.kind] = tensor
        return tensors

    @cached_property
    def _named_layers(self) -> tuple[NamedLayer, ...]:
        layers = (NamedLayer(f"layers.{i}.", layer) for i, layer in enumerate(self.layers))
        drafts = (NamedLayer(f"draft.{i}.", layer) for i, layer in enumerate(self.drafts))
        return (*layers, *drafts)

    def named_layer(self, number: Hashable) -> NamedLayer:
        """Return a layer by its number; draft layers are numbered after the last one.

        Raises ``NAME``.
        """
        if not isinstance(number, int) or not 0 <= number < len(self._named_layers):
            numbers = f"one of {len(self.layers)} layers and {len(self.drafts)} draft layers"
            raise KVPlanError(
                "NAME",
                "place a layer",
                expected=f"{numbers} of {self.name}",
                got=f"layer {shown(number)}",
            )
        return self._named_layers[number]

    def __str__(self) -> str:
        drafts = f", {len(self.drafts)} draft layers" if self.drafts else ""
        groups = ", ".join(self.groups)
        return f"{self.name}: {len(self.layers)} layers{drafts}, {self.dtype}, groups {groups}"

    def tensor_bytes(
        self, tp: int = 1, tokens_per_block: BlockTokens = 16, *, rank: int = 0
    ) -> tuple[dict[str, int], ...]:
        """Return the bytes of one block in each layer, by kind of tensor, on rank ``rank`` of tp.

        >>> Model.shipped("granite-4.0-h-tiny").tensor_bytes(2)[0]
        {'conv.x': 9216, 'conv.B': 768, 'conv.C': 768, 'ssm': 786432}
        """
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        rank = integer(rank, "rank", high=tp)
        shard = RankShard(rank, tp, self.blocks(tp, tokens_per_block), self.dtype)
        return tuple(map(shard.tensor_bytes, self.layers))

    def blocks(self, tp: int = 1, tokens_per_block: BlockTokens = 16) -> dict[str, int]:
        """Return the tokens in a block of each token group: with smaller pages, blocks are longer.

        A number is that of the group with the largest page. If the page of another group divides
        it, blocks of that group have as many times more tokens, so that all pages are equal; else
        they have the same number of tokens (``unify_kv_cache_spec_page_size`` of
        vllm/v1/core/kv_cache_planning.py, 0.33, pads such a page). A mapping gives the number of
        each group. Raises ``NAME`` if it lacks a token group or has another.

        >>> model = Model.shipped("gemma-4-31b")
        >>> model.blocks(4), model.blocks(8)
        ({'swa': 16, 'attn': 32}, {'swa': 16, 'attn': 16})
        """
        groups = tuple(self.windows)
        if isinstance(tokens_per_block, Mapping):
            if {*tokens_per_block} != {*groups}:
                action = f"page {self.name}"
                expected = f"tokens_per_block of {', '.join(groups) or 'no group'}"
                got = ", ".join(map(str, tokens_per_block)) or "none"
                raise KVPlanError("NAME", action, expected=expected, got=got, groups=groups)
            return {group: _tokens(tokens_per_block[group]) for group in groups}
        tokens = _tokens(tokens_per_block)
        # The bytes of the largest page of each group, on any rank.
        page_bytes = Counter[str]()
        for shard in self._shards(tp, dict.fromkeys(groups, tokens)):
            for layer in dict.fromkeys(self.layers):
                page_bytes |= shard.page_bytes(layer)
        largest = max(page_bytes.values(), default=0)
        # Pages that divide the largest one are lengthened to its size.
        blocks = dict.fromkeys(groups, tokens)
        for group, num_bytes in page_bytes.items():
            if largest % num_bytes == 0:
                blocks[group] = tokens * largest // num_bytes
        return blocks

    def kernel_blocks(self, tp: int = 1, kernel_tokens: int = 16, kv: str = "content") -> int:
        """Return how many kernel blocks of ``kernel_tokens`` make a block as large as a state.

        The block of attention may be larger. If K and V are ``split``, the state shares the memory
        of K alone: 261 for Nemotron-3-Nano-30B at TP 1 and 131 at TP 4, as
        ``compute_physical_blocks_per_logical`` of vLLM's NIXL connector counts. 1 if the model
        lacks either.

        >>> model = Model.shipped("nemotron-3-nano-30b-a3b")
        >>> model.kernel_blocks(1, kv="split"), model.kernel_blocks(4, kv="split")
        (261, 131)
        >>> model.kernel_blocks(1)
        131
        """
        layout = Layout(kv=kv)
        tokens = _tokens(kernel_tokens)
        num_kernel_blocks = 1
        for shard in self._shards(tp, dict.fromkeys(self.groups, tokens)):
            # The largest page with tokens and the largest with a state, on one rank.
            token_bytes = 0
            state_bytes = 0
            for layer in dict.fromkeys(self.layers):
                for _, page in shard.pages(layer):
                    num_bytes = page_stride(layout, page)
                    if page.has(TOKEN):
                        token_bytes = max(token_bytes, num_bytes)
                    else:
                        state_bytes = max(state_bytes, num_bytes)
            if token_bytes:
                num_kernel_blocks = max(num_kernel_blocks, -(-state_bytes // token_bytes))
        return num_kernel_blocks

    def _shards(self, tp: int, blocks: Mapping[str, int]) -> Iterator[RankShard]:
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        return (RankShard(rank, tp, blocks, self.dtype) for rank in range(tp))

    def engine(
        self,
        engine_id: str,
        tp: int = 1,
        pp: int = 1,
        dcp: int = 1,
        layout: str = "LBHNC",
        tokens_per_block: BlockTokens | None = 16,
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
        memory: str = "DRAM",
    ) -> tuple[Worker, ...]:
        """Return the workers of an engine that runs the model, in order of rank.

        The module's docstring has the rules. ``tp``, ``pp``, ``dcp`` and ``pcp`` are the sizes of
        tensor, pipeline, decode context and prefill context parallelism.
        :class:`kvplan.models.parallel.Parallel` describes them and ``interleave``.
        ``layers_per_stage`` is how many layers each pipeline stage has; ``pp`` can be left out
        then. :class:`kvplan.models.layouts.Layout` describes ``layout``, ``kv``, ``pad`` (bytes),
        ``kernel_tokens`` and ``conv_order``. ``scales`` of a quantized cache are ``inline``, in the
        ``page`` behind the values of all heads, or in a ``region`` of their own. ``shared`` places
        the groups in the same memory (:mod:`kvplan.models.pools`).

        ``tokens_per_block`` is as in :meth:`blocks`; ``None`` is 16, or as many kernel blocks as a
        state is large (:meth:`kernel_blocks`). Every worker has a pool of ``num_blocks`` for each
        group. The device is 0, or the rank if ``memory`` is VRAM.

        Raises ``LAYOUT`` for an unknown layout and for parallel sizes that the model cannot have,
        ``TYPE`` or ``RANGE`` for a bad number, ``NAME`` for unknown groups.
        """
        if layers_per_stage is not None:
            layers_per_stage = members(int, layers_per_stage, "layers_per_stage")
            pp = len(layers_per_stage) if pp == 1 else pp
        sizes = Parallel(tp, pp, dcp, pcp, interleave)
        pool_layout = Layout(layout, kv, pad, kernel_tokens, conv_order)
        if tokens_per_block is None:
            # Blocks of attention are as large as a state. They consist of kernel blocks, unless
            # other layers lie between those of one layer: then kernels read whole blocks (vLLM).
            kernel = kernel_tokens or 16
            if layout.startswith("L"):
                pool_layout = attrs.evolve(pool_layout, kernel_tokens=kernel)
            tokens_per_block = kernel * self.kernel_blocks(sizes.tp, kernel, kv)
        blocks = self.blocks(sizes.tp, tokens_per_block)
        stages = stages_of(len(self.layers), sizes.pp, layers_per_stage)
        sizes.check(self.name, (tensor for tensor in self.tensors if tensor.paged))
        share_memory = instance(bool, shared, "shared") and len(self.groups) > 1
        addresses = Addresses(name(engine_id, "engine_id"), name(memory, "memory"))
        group_names = self.groups
        # One worker for each rank: TP ranks are consecutive, then PCP ranks, then stages.
        workers = []
        ranks = product(stages, range(sizes.pcp), range(sizes.tp))
        for rank, (stage, pcp_rank, tp_rank) in enumerate(ranks):
            shard = RankShard(tp_rank, sizes.tp, blocks, self.dtype, scales)
            pools = self._pools(stage, shard)
            views, region_bytes = place_pools(pool_layout, pools, num_blocks, shared=share_memory)
            regions = [addresses.region(key, size, rank) for key, size in region_bytes.items()]
            # Every rank has all groups, also those of which its stage has no layer.
            context = sizes.context(pcp_rank, tp_rank)
            token_groups = {key: Group(key, tokens, context) for key, tokens in blocks.items()}
            groups = [token_groups.get(key, Group(key)) for key in group_names]
            workers.append(Worker(engine_id, rank, regions, groups, views, self.name))
        return tuple(workers)

    def _pools(self, stage: range, shard: RankShard) -> dict[str, list[Page]]:
        """Return the pages of a stage by pool. The last stage has pools of draft layers too."""
        pools: dict[str, list[Page]] = {}
        # Draft layers follow the last layer, so they are on the last stage.
        num_layers = len(self.layers)
        stop = len(self._named_layers) if stage.stop == num_layers else stage.stop
        for layer_index in range(stage.start, stop):
            pool_prefix = "draft." if layer_index >= num_layers else ""
            prefix, layer = self._named_layers[layer_index]
            for pool, page in shard.pages(layer, prefix):
                pools.setdefault(pool_prefix + pool, []).append(page)
        return pools


def _layers(value: Any, subject: str) -> Layers:
    layers = members(tuple, value, subject)
    return tuple(members(Tensor, layer, f"a layer of {subject}") for layer in layers)


def _tokens(value: Any) -> int:
    return integer(value, "tokens_per_block", low=1, high=1 << 31)
