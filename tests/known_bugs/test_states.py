"""States: recurrent layers and indexers have several tensors, each divided among ranks by its own rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvplan import Axis, Blocks, Group, Model, View, Worker, plan_mesh, plan_reads, verify
from kvplan.models.config import shipped_configs
from tests.known_bugs.faults import asking, moving
from tests.known_bugs.known_bug import Outcome, known_bug
from tests.known_bugs.mistakes import taken_for

LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8}

GDN = {
    "model_type": "qwen3_next",
    **LAYERS,
    "head_dim": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}

MAMBA2 = {
    "model_type": "nemotron_h",
    **LAYERS,
    "hybrid_override_pattern": "M*",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 4,
}

STATE = asking({"state": Blocks([8])}, {"state": Blocks([3])})
SPARSE = asking({"attn": Blocks([8, 1])}, {"attn": Blocks([3, 9])}, (0, 20))


def recurrent(config: Mapping[str, Any], tp: int, name: str) -> tuple[Worker, ...]:
    """An engine that keeps the states of a model's first layer, and nothing else."""
    model = Model.from_config(config)
    states = tuple(tensor for tensor in model.layers[0] if not tensor.paged)
    return attrs.evolve(model, layers=(states,)).engine(name, tp=tp, num_blocks=10)


def in_one_piece(workers: Sequence[Worker]) -> list[Worker]:
    """Workers that have their whole convolution as one tensor, of which each rank holds an equal part."""
    made = []
    for worker in workers:
        parts = [view for view in worker.views if ".conv." in view.name]
        channels, step = parts[0].axes
        width = sum(view.axes[0].extent for view in parts)
        start, size = worker.rank * width, len(workers) * width
        axes = (Axis("channel", start, start + width, size, channels.stride_bytes), step)
        conv = attrs.evolve(parts[0], name="conv", axes=axes)
        made.append(attrs.evolve(worker, views=[conv, *(view for view in worker.views if view not in parts)]))
    return made


def _in_one_piece(config: Mapping[str, Any], *sizes: tuple[int, int]) -> tuple[Outcome, Outcome]:
    """From so many source ranks to so many destination ranks."""
    right, wrong = [], []
    for source_tp, destination_tp in sizes:
        destinations, sources = recurrent(config, destination_tp, "decode"), recurrent(config, source_tp, "prefill")
        mesh = plan_mesh(destinations, sources)
        right.append(mesh)
        wrong.append(taken_for(mesh, plan_mesh(in_one_piece(destinations), in_one_piece(sources)), **STATE))
    return (
        lambda: tuple(verify(plans, **STATE) for plans in wrong),
        lambda: tuple(verify(mesh, **STATE) for mesh in right),
    )


@known_bug("E1", "sgl-project/sglang#23746, sgl-project/sglang#22060, sgl-project/sglang#30997", "verify: VALUE")
def test_queries_keys_and_values_in_one_piece() -> tuple[Outcome, Outcome]:
    """A convolution over q, k and v was split across ranks as one tensor, but each rank has a share of all three."""
    return _in_one_piece(GDN, (1, 4), (8, 1))


@known_bug("E2", "vllm-project/vllm#37638, vllm-project/vllm#37635", "verify: VALUE")
def test_x_b_and_c_in_one_piece() -> tuple[Outcome, Outcome]:
    """A Mamba-2 convolution was halved for 2 ranks, each of which needs half of x, of B and of C."""
    return _in_one_piece(MAMBA2, (1, 2))


@known_bug("E3", "vllm-project/vllm#55208, vllm-project/vllm#55306", "verify: VALUE")
def test_b_and_c_that_are_not_divided() -> tuple[Outcome, Outcome]:
    """B and C of a single group, which each rank holds whole, were read as if divided like x."""
    destinations, sources = (recurrent({**MAMBA2, "n_groups": 1}, tp, name) for tp, name in ((2, "d"), (1, "p")))
    tables = [{**STATE[side], "ssm": Blocks([0])} for side in ("local", "remote")]
    sides = [_divided(*each) for each in zip((destinations, sources), tables, strict=True)]
    right, wrong = plan_mesh(destinations, sources), plan_mesh(sides[0], sides[1])
    moved = taken_for(right, wrong, **asking(*tables))
    return lambda: verify(moved, **STATE), lambda: verify(right, **STATE)


def _divided(workers: Sequence[Worker], table: Mapping[str, Blocks]) -> list[Worker]:
    """Workers, 1 or 2, that have their parts of a B and a C that are twice as large as they are.

    C would lie over the SSM state, which gets a group of its own: its only block is in the state's block of ``table``.
    """
    block = int(table["state"].ids[0])
    made = []
    for worker in workers:
        x, b, c, ssm = worker.views
        channels, step = b.axes
        size = 2 * channels.extent
        width = size // len(workers)
        start = worker.rank * width
        axes = (Axis("channel", start, start + width, size, channels.stride_bytes), step)
        behind = b.offset_bytes + width * channels.stride_bytes
        views = [
            x,
            attrs.evolve(b, axes=axes),
            attrs.evolve(c, axes=axes, offset_bytes=behind),
            attrs.evolve(
                ssm, group="ssm", num_blocks=1, offset_bytes=ssm.offset_bytes + block * ssm.block_stride_bytes
            ),
        ]
        made.append(attrs.evolve(worker, groups=[*worker.groups, Group("ssm")], views=views))
    return made


@known_bug("E4", "vllm-project/vllm#48263, vllm-project/vllm#46407", "verify: COVER")
def test_layers_at_one_address() -> tuple[Outcome, Outcome]:
    """Of 5 groups that share a tensor, only the first was known, and 3 in 4 states did not move."""
    config = {**MAMBA2, "hybrid_override_pattern": "MMMM*" * 2, "num_hidden_layers": 10}
    model = Model.from_config(config).grouped()
    sources, (destination,) = (
        model.engine(name, pp=pp, shared=True, num_blocks=10) for name, pp in (("prefill", 2), ("decode", 1))
    )
    plan = plan_reads(destination, sources)
    local, remote = ({group: Blocks([step * i]) for i, group in enumerate(model.groups)} for step in (1, 2))
    request = asking(local, remote, {"attn": (0, 10)})
    layers = {_layer(view): view.region for view in destination.views}
    known = {region: layer for layer, region in reversed(layers.items())}.values()
    unknown = [view.name for view in destination.views if _layer(view) not in known]
    wrong = moving(plan, plan_reads(destination, sources, not_transferred=unknown), **request)
    return lambda: verify(wrong, **request), lambda: verify(plan, **request)


def _layer(view: View) -> str:
    return ".".join(view.name.split(".")[:2])


@known_bug("E5", "sgl-project/sglang#18939", "refused: TENSOR")
def test_a_kind_of_state_that_one_side_does_not_know() -> tuple[Outcome, Outcome]:
    """A backend moved Mamba states only, so decode waited for an indexer's states until a timeout."""
    (source,), (destination,) = (sparse(name) for name in ("prefill", "decode"))
    known = attrs.evolve(source, views=[view for view in source.views if ".index" not in view.name])
    return (
        lambda: verify(plan_reads(destination, [known]), **SPARSE),
        lambda: verify(plan_reads(destination, [source]), **SPARSE),
    )


@known_bug("E6", "sgl-project/sglang#23539", "verify: COVER")
def test_the_state_of_a_draft() -> tuple[Outcome, Outcome]:
    """Index keys of the target's layers were registered, those of the draft layer were not."""
    (source,), (destination,) = (sparse(name) for name in ("prefill", "decode"))
    forgotten = ["draft.0.index", "draft.0.index.scale"]
    plan = plan_reads(destination, [source])
    wrong = moving(plan, plan_reads(destination, [source], not_transferred=forgotten), **SPARSE)
    return lambda: verify(wrong, **SPARSE), lambda: verify(plan, **SPARSE)


def sparse(name: str) -> tuple[Worker, ...]:
    """An engine with two layers of DeepSeek-V3.2 and its draft layer."""
    model = Model.from_config(shipped_configs()["deepseek-v3.2"], with_draft_layers=True)
    return attrs.evolve(model, layers=model.layers[:2]).engine(name, num_blocks=10)
