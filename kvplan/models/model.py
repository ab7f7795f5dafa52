"""Models: from a Hugging Face config.json to the workers of an engine.

A :class:`Model` is data: the logical tensors that each layer caches, with global sizes and the axis that tensor
parallelism divides. :meth:`Model.engine` gives each rank its part of them, in a layout. Addresses are made up but
deterministic: two regions of an engine never overlap, and two engines do only if their ids hash to the same one of
65535 values.

Which rank holds what, as in vLLM 0.33:

- Tensor parallelism. Of ``K`` heads, rank ``r`` of ``tp`` holds ``[r*K//tp, ceil((r+1)*K/tp))``, the heads that its
  query heads read. If tp divides K, these are equal shares; if K divides tp, each rank has a replica of one head;
  otherwise neighbouring intervals may overlap by a head. Latents (MLA) have no heads, so every rank holds all of them.
  Channels and heads of recurrent states are divided in the same way (:mod:`kvplan.models.tensors`).
- Pipeline parallelism. Layers form contiguous stages (:func:`kvplan.models.parallel.stages_of`).
- World ranks and context parallelism: :mod:`kvplan.models.parallel`.
- Groups. Each kind of attention layer and the states have a block table of their own: ``attn``, ``swa``, ``state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import attrs

from kvplan._checks import instance, integer, is_one_of, members, name, settle
from kvplan._text import meant, shown
from kvplan.describe.views import Group
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError
from kvplan.models.config import read, shipped_configs
from kvplan.models.families import REGISTRY
from kvplan.models.layouts import Layout, Page
from kvplan.models.parallel import MAX_RANKS, Parallel, RankPart, flag, stages_of
from kvplan.models.pools import Addresses, place_pools, size_of
from kvplan.models.tensors import Layer, Layers, Tensor, converted, grouped, quantized

BlockTokens = int | Mapping[str, int]
"""Tokens per block: of each token group, or of the one with the largest page."""


@attrs.frozen
class Model:
    """What a model caches: the logical tensors of each layer, ``layers.{i}.{kind}``, and the dtype of the cache.

    ``query_heads`` is how many query heads an attention layer has, if that is known. They are not cached, but engines
    divide them among ranks.

    >>> model = Model.shipped("llama-3.1-8b")
    >>> print(model)
    llama-3.1-8b: 32 layers, bfloat16, groups attn
    >>> worker = model.engine("prefill", tp=4, layout="BLNHC", tokens_per_block=16, num_blocks=100)[1]
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

    def __attrs_post_init__(self) -> None:
        settle(self, "a model", name, "name", "dtype")
        settle(self, "a model", _layers, "layers", "drafts")

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        model_name: str | None = None,
        *,
        with_draft_layers: bool = False,
        like: str | None = None,
    ) -> Model:
        """The model of a parsed config.json. Its name is its ``model_type`` unless one is given.

        ``with_draft_layers`` adds the layers of multi-token prediction, which most engines don't run. ``like`` is the
        known type as which a file of an unknown type is read. It must cache the same: kvplan cannot check that, but
        refuses keys that change the cache of another type.

        Raises ``TYPE`` if ``config`` is not a mapping, ``CONFIG`` for an unknown model type, a missing key or an
        unusable value.

        >>> Model.from_config({"model_type": "llama", "num_hidden_layers": 32, "num_key_value_heads": 8})
        Traceback (most recent call last):
        ...
        kvplan.errors.KVPlanError: CONFIG: cannot read a model configuration of type 'llama': \
expected a value for key 'hidden_size', got no such key
        """
        contents = read(config, REGISTRY, with_draft_layers, like)
        return cls(
            contents.model_type if model_name is None else model_name,
            contents.layers,
            contents.dtype,
            contents.drafts,
            contents.query_heads,
        )

    @classmethod
    def shipped(cls, model_name: str) -> Model:
        """A model whose configuration comes with this package, by its name in lower case. Raises ``NAME``."""
        shipped = shipped_configs()
        if not is_one_of(model_name, shipped):
            what, got, hint = (
                "load a shipped model",
                shown(model_name),
                meant(str(model_name), shipped),
            )
            raise KVPlanError(
                "NAME", what, expected="one of Model.names()", got=got, hint=hint, name=model_name
            )
        return cls.from_config(shipped[model_name], model_name)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the shipped models.

        >>> "qwen3-0.6b" in Model.names()
        True
        """
        return tuple(shipped_configs())

    def with_draft(self, drafting: Model) -> Model:
        """This model with the layers of another one that drafts tokens: ``draft.{i}.{kind}``.

        Draft layers have their own heads and sizes, are on the last pipeline stage, and use the block tables of their
        groups. To plan from an engine without a draft to one with it, list the draft's tensors in ``not_transferred``.

        >>> target, drafting = Model.shipped("deepseek-v3"), Model.shipped("qwen3-0.6b")
        >>> print(target.with_draft(drafting))
        deepseek-v3: 61 layers, 28 draft layers, bfloat16, groups attn
        """
        return attrs.evolve(self, drafts=instance(Model, drafting, "drafting").layers)

    def with_dtypes(self, dtype: str | None = None, ssm_dtype: str | None = None) -> Model:
        """This model with an attention cache of ``dtype`` and SSM states of ``ssm_dtype``; None changes nothing.

        The sparse latents of DeepSeek-V3.2 are 656 bytes of fp8 values and scales, unless a dtype is given:

        >>> model = Model.shipped("deepseek-v3.2")
        >>> [m.tensor_bytes(tokens_per_block=1)[0]["attn"] for m in (model, model.with_dtypes("bfloat16"))]
        [656, 1152]

        Raises ``DTYPE``.
        """
        made = self._with(lambda layer: converted(layer, dtype, ssm_dtype))
        return made if dtype is None else attrs.evolve(made, dtype=dtype)

    def quantized(
        self, bits: int = 8, scale_dtype: str = "float32", scale_elements: int | None = None
    ) -> Model:
        """This model with K and V of ``bits`` bits each, and scales that are divided among ranks with their heads.

        Each ``scale_elements`` elements of a token's head have one scale; None: the whole head has one. Values of less
        than a byte are packed. NVFP4 is ``quantized(4, "float8_e4m3fn", 16)`` with ``scales="page"``.

        Raises ``SIZE`` if a head is not a whole number of bytes or of scales.
        """
        return self._with(lambda layer: quantized(layer, bits, scale_dtype, scale_elements))

    def grouped(self) -> Model:
        """This model with groups of about the same number of layers: ``swa``, ``swa.1`` and so on, each a block table.

        This is how engines divide the layers of hybrid models whose groups share memory, so that a block of any group
        takes the same memory (:func:`kvplan.models.tensors.grouped`).

        >>> Model.shipped("qwen3-next-80b").grouped().groups
        ('state', 'state.1', 'state.2', 'attn')
        """
        layers, drafts = grouped(self.layers, self.drafts)
        return attrs.evolve(self, layers=layers, drafts=drafts)

    def _with(self, change: Callable[[Layer], Layer]) -> Model:
        changed = {layer: change(layer) for layer in (*self.layers, *self.drafts)}
        layers, drafts = (
            tuple(changed[layer] for layer in part) for part in (self.layers, self.drafts)
        )
        return attrs.evolve(self, layers=layers, drafts=drafts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The distinct logical tensors of all layers, drafts included, in order of appearance."""
        return tuple(
            dict.fromkeys(tensor for layer in (*self.layers, *self.drafts) for tensor in layer)
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """The block tables that the model's tensors need, in order of appearance."""
        return tuple(dict.fromkeys(tensor.group for tensor in self.tensors))

    @property
    def windows(self) -> dict[str, int | None]:
        """How many tokens back the layers of each token group attend, at most; ``None`` for all tokens.

        >>> Model.shipped("gpt-oss-20b").windows
        {'swa': 128, 'attn': None}
        """
        return _farthest((tensor.group, tensor.window) for tensor in self.tensors if tensor.paged)

    def tokens(self, start: int, stop: int, worker: Worker) -> dict[str, tuple[int, int]]:
        """Which of the positions ``[start, stop)`` a request moves, by token group of ``worker``, which binds it.

        A token at ``p`` attends to positions above ``p - w`` in a layer with a sliding window of ``w`` tokens
        (``SlidingWindowManager.get_num_skipped_tokens`` of vllm/v1/core/single_type_kv_cache_manager.py, 0.33). So a
        group of such layers moves at most the last ``w`` positions, for the largest ``w``: all that the token at
        ``stop - 1`` attends to. That suits engines that compute the prompt's last token again on decode, as vLLM does.

        >>> model = Model.shipped("gpt-oss-20b")
        >>> model.tokens(0, 1000, model.engine("decode")[0])
        {'swa': (872, 1000), 'attn': (0, 1000)}

        Raises ``TYPE`` or ``RANGE`` for a bad range, ``NAME`` for a tensor with tokens that the model lacks.
        """
        start = integer(start, "start of a token range")
        stop = integer(stop, "stop of a token range", low=start)
        groups = instance(Worker, worker, "worker").groups
        paged = {group.name for group in groups if group.tokens_per_block is not None}
        windows = _farthest(
            (view.group, self._window(view.name)) for view in worker.views if view.group in paged
        )
        return {
            g: (start if window is None else max(start, stop - window), stop)
            for g, window in windows.items()
        }

    def _window(self, tensor: str) -> int | None:
        if tensor not in self._windows:
            raise KVPlanError(
                "NAME",
                f"find the window of {tensor!r}",
                expected=f"a tensor of {self.name}",
                got="none",
            )
        return self._windows[tensor]

    @cached_property
    def _windows(self) -> Mapping[str, int | None]:
        """The window of each tensor with tokens, by its name on workers."""
        layers = [("layers", self.layers), ("draft", self.drafts)]
        numbered = (
            (f"{owner}.{i}", layer) for owner, part in layers for i, layer in enumerate(part)
        )
        return {
            f"{name}.{tensor.kind}": tensor.window
            for name, layer in numbered
            for tensor in layer
            if tensor.paged
        }

    def __str__(self) -> str:
        drafts = f", {len(self.drafts)} draft layers" if self.drafts else ""
        return f"{self.name}: {len(self.layers)} layers{drafts}, {self.dtype}, groups {', '.join(self.groups)}"

    def tensor_bytes(
        self, tp: int = 1, tokens_per_block: BlockTokens = 16, *, rank: int = 0
    ) -> tuple[dict[str, int], ...]:
        """Bytes of one block in each layer, by kind of tensor, on tensor-parallel rank ``rank``.

        >>> Model.shipped("granite-4.0-h-tiny").tensor_bytes(2)[0]
        {'conv.x': 9216, 'conv.B': 768, 'conv.C': 768, 'ssm': 786432}
        """
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        part = RankPart(
            integer(rank, "rank", high=tp), tp, self.blocks(tp, tokens_per_block), self.dtype
        )
        return tuple(
            {tensor.kind: part.tensor(tensor).block_bytes for tensor in layer}
            for layer in self.layers
        )

    def block_bytes(
        self, tp: int = 1, tokens_per_block: BlockTokens = 16, *, rank: int = 0
    ) -> tuple[int, ...]:
        """Bytes of one block in each layer, all its tensors together, on tensor-parallel rank ``rank``.

        >>> layers = Model.shipped("qwen3-8b").block_bytes()
        >>> layers[0], sum(layers)
        (65536, 2359296)
        """
        return tuple(
            sum(layer.values()) for layer in self.tensor_bytes(tp, tokens_per_block, rank=rank)
        )

    def blocks(self, tp: int = 1, tokens_per_block: BlockTokens = 16) -> dict[str, int]:
        """Tokens in a block of each token group, where groups with smaller pages have longer blocks.

        A number is that of the group with the largest page. If the page of another group divides it, blocks of that
        group have as many times more tokens, so that all pages are equal; else they have the same number of tokens
        (``unify_kv_cache_spec_page_size`` of vllm/v1/core/kv_cache_planning.py, 0.33, pads such a page). A mapping
        gives the number of each group. Raises ``NAME`` if it lacks a token group or has another.

        >>> model = Model.shipped("gemma-4-31b")
        >>> model.blocks(4), model.blocks(8)
        ({'swa': 16, 'attn': 32}, {'swa': 16, 'attn': 16})
        """
        groups = tuple(self.windows)
        if isinstance(tokens_per_block, Mapping):
            if {*tokens_per_block} != {*groups}:
                expected = f"tokens_per_block of {', '.join(groups) or 'no group'}"
                got = ", ".join(map(str, tokens_per_block)) or "none"
                raise KVPlanError(
                    "NAME", f"page {self.name}", expected=expected, got=got, groups=groups
                )
            return {group: _tokens(tokens_per_block[group]) for group in groups}
        tokens = _tokens(tokens_per_block)
        pages = dict.fromkeys(groups, 0)
        for layer, part in product(
            dict.fromkeys(self.layers), self._parts(tp, dict.fromkeys(groups, tokens))
        ):
            for group in {tensor.group for tensor in layer if tensor.paged}:
                size = sum(
                    part.tensor(tensor).block_bytes for tensor in layer if tensor.group == group
                )
                pages[group] = max(pages[group], size)
        largest = max(pages.values(), default=0)
        return {
            g: tokens * largest // page if page and largest % page == 0 else tokens
            for g, page in pages.items()
        }

    def kernel_blocks(self, tp: int = 1, kernel_tokens: int = 16, kv: str = "content") -> int:
        """How many kernel blocks of ``kernel_tokens`` make a block of attention as large as a state, or larger.

        If K and V are ``split``, the state shares the memory of K alone: 261 for Nemotron-3-Nano-30B at TP 1 and 131 at
        TP 4, as ``compute_physical_blocks_per_logical`` of vLLM's NIXL connector counts. 1 if the model lacks either.

        >>> model = Model.shipped("nemotron-3-nano-30b-a3b")
        >>> model.kernel_blocks(1, kv="split"), model.kernel_blocks(4, kv="split"), model.kernel_blocks(1)
        (261, 131, 131)
        """
        layout, tokens = Layout(kv=kv), _tokens(kernel_tokens)
        needed = 1
        for part in self._parts(tp, dict.fromkeys(self.groups, tokens)):
            largest = {True: 0, False: 0}  # the largest page with tokens, and the largest without
            for layer, paged in product(dict.fromkeys(self.layers), largest):
                for _, page in part.pages(
                    tuple(tensor for tensor in layer if tensor.paged == paged)
                ):
                    largest[paged] = max(largest[paged], size_of(layout, page))
            if largest[True]:
                needed = max(needed, -(-largest[False] // largest[True]))
        return needed

    def _parts(self, tp: int, blocks: Mapping[str, int]) -> Iterator[RankPart]:
        """The part of each tensor-parallel rank."""
        tp = integer(tp, "tp", low=1, high=MAX_RANKS)
        return (RankPart(rank, tp, blocks, self.dtype) for rank in range(tp))

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

        ``tp``, ``pp``, ``dcp`` and ``pcp`` are the sizes of tensor, pipeline, decode context and prefill context
        parallelism. :class:`kvplan.models.parallel.Parallel` describes them, ``interleave`` and ``pcp_spreads``.
        ``layers_per_stage`` is how many layers each pipeline stage has; ``pp`` can be left out then.
        :class:`kvplan.models.layouts.Layout` describes ``layout``, ``kv``, ``pad`` (bytes), ``kernel_tokens`` and
        ``conv_order``. ``scales`` of a quantized cache are ``inline``, in the ``page`` behind the values of all heads,
        or in a ``region`` of their own. ``shared`` places the groups in the same memory
        (:mod:`kvplan.models.pools`).

        ``tokens_per_block`` is as in :meth:`blocks`; ``None`` is 16, or as many kernel blocks as a state is large
        (:meth:`kernel_blocks`). Every worker has a pool of ``num_blocks`` for each group. The device is 0, or the rank
        if ``memory`` is VRAM.

        Raises ``LAYOUT`` for an unknown layout and for parallel sizes that the model cannot have, ``TYPE`` or
        ``RANGE`` for a bad number, ``NAME`` for unknown groups.
        """
        if layers_per_stage is not None:
            layers_per_stage = members(int, layers_per_stage, "layers_per_stage")
            pp = len(layers_per_stage) if pp == 1 else pp
        sizes = Parallel(tp, pp, dcp, pcp, interleave, pcp_spreads)
        order = Layout(layout, kv, pad, kernel_tokens, conv_order)
        if tokens_per_block is None:
            order = attrs.evolve(order, kernel_tokens=kernel_tokens or 16)
            tokens_per_block = (kernel_tokens or 16) * self.kernel_blocks(
                sizes.tp, kernel_tokens or 16, kv
            )
        blocks = self.blocks(sizes.tp, tokens_per_block)
        parts = stages_of(len(self.layers), sizes.pp, layers_per_stage)
        sizes.check(self.name, (tensor for tensor in self.tensors if tensor.paged))
        together = flag(shared, "shared") and len(self.groups) > 1
        addresses = Addresses(name(engine_id, "engine_id"), name(memory, "memory"))
        workers, names = [], self.groups
        for rank, (stage, pcp_rank, tp_rank) in enumerate(
            product(parts, range(sizes.pcp), range(sizes.tp))
        ):
            context = sizes.context(pcp_rank, tp_rank)
            pools = self._pools(stage, RankPart(tp_rank, sizes.tp, blocks, self.dtype, scales))
            views, spans = place_pools(order, pools, num_blocks, shared=together)
            regions = [addresses.region(key, size, rank) for key, size in spans.items()]
            groups = [
                Group(key, blocks[key], context) if key in blocks else Group(key) for key in names
            ]
            workers.append(Worker(engine_id, rank, regions, groups, views, self.name))
        return tuple(workers)

    def _pools(self, stage: range, part: RankPart) -> dict[str, list[Page]]:
        """The pages of a stage by pool. Draft layers are on the last stage, in pools of their own."""
        pools: dict[str, list[Page]] = {}
        layers = [("", f"layers.{i}.", self.layers[i]) for i in stage]
        if stage.stop == len(self.layers):
            layers += [("draft.", f"draft.{i}.", layer) for i, layer in enumerate(self.drafts)]
        for owner, prefix, layer in layers:
            for pool, page in part.pages(layer, prefix):
                pools.setdefault(owner + pool, []).append(page)
        return pools


def _farthest(windows: Iterable[tuple[str, int | None]]) -> dict[str, int | None]:
    """The largest window of each group, from pairs of a group and a window; None, for all tokens, is the largest."""
    found: dict[str, int | None] = {}
    for group, window in windows:
        known = found.get(group, window)
        found[group] = None if known is None or window is None else max(known, window)
    return found


def _layers(value: Any, what: str) -> Layers:
    return tuple(
        members(Tensor, layer, f"a layer of {what}") for layer in members(tuple, value, what)
    )


def _tokens(value: Any) -> int:
    return integer(value, "tokens_per_block", low=1, high=1 << 31)
