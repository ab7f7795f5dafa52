"""States: what recurrent layers keep, one whole state in a block of a state group.

A state is a convolution's last inputs, ``steps`` of them for each channel, and a matrix for each head (or vector for
each channel). The convolution's channels are several tensors, since tensor parallelism divides them apart: each
follows its own heads or groups, whatever else stands in the same rows::

    Mamba1    conv [x]            ssm [channel, state]
    Mamba2    conv [x | B | C]    ssm [head, dim, state]        B and C by group
    GDN, KDA  conv [q | k | v]    ssm [head, value, key]        q and k by key head, v and ssm by value head

The states are in fp32 and the convolution in the dtype of the weights unless a file or ``Model.with_dtypes`` says
otherwise. So SGLang keeps them by default (``mamba2_state_dtype`` of sglang/srt/configs/mamba_utils.py, 0.5.23), and
vLLM those of Nemotron-H and of KDA; of the others vLLM keeps the state in the dtype of the weights as well, where
``--mamba-ssm-cache-dtype`` says nothing (``MambaStateDtypeCalculator``).

The shapes are those of ``MambaStateShapeCalculator`` (vllm/model_executor/layers/mamba/mamba_utils.py, 0.33). Where
ranks and groups don't divide, a rank holds the groups that its heads use, so some groups stand on several ranks.
"""

from __future__ import annotations

from kvplan.models.layouts import HEAD, STEP
from kvplan.models.tensors import SSM, STATE, Layer, Tensor


def _conv(part: str, units: int, width: int, steps: int, dtype: str) -> Tensor:
    """The channels of a convolution that belong to ``units`` heads, groups or channels, ``width`` channels each."""
    return Tensor(
        kind=f"conv.{part}",
        group=STATE,
        axes=(("channel", units * width), (STEP, steps)),
        paged=False,
        sharded="channel",
        shards=units,
        dtype=dtype,
        pool=STATE,
        strip="conv",
    )


def _ssm(axes: tuple[tuple[str, int], ...], dtype: str) -> Tensor:
    """A matrix for each unit of the first axis."""
    sharded, shards = axes[0]
    return Tensor(SSM, STATE, axes, paged=False, sharded=sharded, shards=shards, dtype=dtype, pool=STATE)


def mamba1(channels: int, state: int, steps: int, dtype: str, ssm_dtype: str) -> Layer:
    """A Mamba layer: every channel has a convolution and a state vector of its own.

    >>> [tensor.kind for tensor in mamba1(8192, 16, 3, "bfloat16", "float32")]
    ['conv.x', 'ssm']
    """
    return (_conv("x", channels, 1, steps, dtype), _ssm((("channel", channels), ("state", state)), ssm_dtype))


def mamba2(heads: int, dim: int, groups: int, state: int, steps: int, dtype: str, ssm_dtype: str) -> Layer:
    """A Mamba-2 layer: ``groups`` of heads share B and C, which pass the convolution too.

    Of one group and two ranks, each rank holds the group:

    >>> x, b, c, ssm = mamba2(48, 64, 1, 128, 3, "bfloat16", "float32")
    >>> [(part.start, part.stop) for rank in range(2) for part in b.parts(rank, 2) if part.name == "channel"]
    [(0, 128), (0, 128)]
    """
    return (
        _conv("x", heads, dim, steps, dtype),
        _conv("B", groups, state, steps, dtype),
        _conv("C", groups, state, steps, dtype),
        _ssm(((HEAD, heads), ("dim", dim), ("state", state)), ssm_dtype),
    )


def delta(
    key_heads: int, key_dim: int, value_heads: int, value_dim: int, steps: int, dtype: str, ssm_dtype: str
) -> Layer:
    """A gated delta layer (GDN), or one of Kimi delta attention (KDA), which has as many key heads as value heads.

    >>> [(tensor.kind, tensor.shards) for tensor in delta(16, 128, 32, 128, 3, "bfloat16", "float32")]
    [('conv.q', 16), ('conv.k', 16), ('conv.v', 32), ('ssm', 32)]
    """
    return (
        _conv("q", key_heads, key_dim, steps, dtype),
        _conv("k", key_heads, key_dim, steps, dtype),
        _conv("v", value_heads, value_dim, steps, dtype),
        _ssm(((HEAD, value_heads), ("value", value_dim), ("key", key_dim)), ssm_dtype),
    )
