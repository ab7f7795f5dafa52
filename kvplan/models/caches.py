"""What a layer caches, by the sizes that a config.json states: K and V, latents, states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvplan.models.tensors import (
    FULL,
    SLIDING,
    Layer,
    attention,
    convolution,
    delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    sparse_latent,
    with_index_keys,
)
from kvplan.models.values import (
    HEAD_DIMS,
    HIDDEN,
    KV_HEADS,
    NUM_HEADS,
    Config,
    Keys,
    dtype_of,
    flag_of,
    integer_of,
    optional_integer_of,
    stated_key,
    unusable,
)

AttentionReader = Callable[[Config, str, int | None], Layer]
"""Reads the tensors of a layer that attends, for a group and a window."""

StateReader = Callable[[Config], Layer]
"""Reads the tensors of a recurrent state. ``dtype`` of the configuration is that of the weights."""


def kv_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head. V has ``v_head_dim`` elements, if the family has that key."""
    # A file without a number of KV heads has one for each query head.
    num_heads = optional_integer_of(config, KV_HEADS) or integer_of(config, NUM_HEADS)
    num_query_heads = integer_of(config, NUM_HEADS, num_heads)
    if num_query_heads % num_heads:
        expected = f"a divisor of {stated_key(config, NUM_HEADS)} {num_query_heads}"
        raise unusable(stated_key(config, KV_HEADS), expected, num_heads)
    # A file without a size of heads divides the width of the model among them.
    dim = optional_integer_of(config, HEAD_DIMS)
    if dim is None:
        dim, remainder = divmod(integer_of(config, HIDDEN), integer_of(config, NUM_HEADS))
        if remainder or not dim:
            width_key = stated_key(config, HIDDEN)
            expected = f"a multiple of {stated_key(config, NUM_HEADS)} {num_query_heads}"
            raise unusable(width_key, expected, config[width_key])
    value_dim = optional_integer_of(config, "v_head_dim") or dim
    return attention(num_heads, dim, group, window, value_dim)


def mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return one latent for all heads, or K and V of each head if ``kv_lora_rank`` is null."""
    # A family whose files may state no rank has both kinds of models.
    if "kv_lora_rank" in config and config["kv_lora_rank"] is None:
        return kv_heads(config, group, window)
    rank = integer_of(config, "kv_lora_rank")
    rope_dim = integer_of(config, "qk_rope_head_dim")
    return latent(rank, rope_dim, group, window)


def sparse_mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return a latent and the keys of an indexer.

    A layer that slides has no indexer, and some layers use that of another layer.
    """
    if group == SLIDING or not flag_of(config, "use_dsa", True):
        return mla(config, group, window)
    rank = integer_of(config, "kv_lora_rank")
    rope_dim = integer_of(config, "qk_rope_head_dim")
    tensors = sparse_latent(rank, rope_dim, integer_of(config, "index_head_dim"))
    # The first tensor is the latent, the others are those of the indexer.
    return tensors[:1] if flag_of(config, "shares_index") else tensors


def block_indexed(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head, and the keys of an indexer in layers that have one."""
    tensors = kv_heads(config, group, window)
    if not flag_of(config, "has_indexer"):
        return tensors
    return with_index_keys(tensors, integer_of(config, "index_head_dim"))


def chunked_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head; a layer with a window attends inside of chunks of that size."""
    (heads,) = kv_heads(config, group, window)
    return (attrs.evolve(heads, chunked=window is not None),)


def stated_window(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head, in a window if the file states one (nemotron_h.py of vLLM)."""
    return kv_heads(config, group, optional_integer_of(config, "sliding_window"))


def mamba1_state(config: Config, width_key: str | None = None) -> Layer:
    """Return the state of a Mamba layer.

    The number of its channels is under ``width_key``, or a multiple of the model's width.
    """
    state_size = integer_of(config, ("state_size", "mamba_d_state"))
    steps = _steps(config, ("conv_kernel", "mamba_d_conv"))
    return mamba1(_channels(config, width_key), state_size, steps, *_dtypes(config))


def wide_mamba1_state(config: Config) -> Layer:
    """Return the state of a Mamba layer whose file may state how many channels it has."""
    return mamba1_state(config, "intermediate_size")


_HEADS: Final = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
_GROUPS: Final = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def mamba2_state(config: Config) -> Layer:
    """Return the state of a Mamba-2 layer whose file states its heads and their size."""
    num_heads = integer_of(config, _HEADS)
    dim = integer_of(config, ("mamba_d_head", "mamba_head_dim", "head_dim"))
    num_groups = integer_of(config, _GROUPS)
    state_size = integer_of(config, ("mamba_d_state", "ssm_state_size", "state_size"))
    if num_heads % num_groups:
        raise unusable(stated_key(config, _GROUPS), f"a divisor of {num_heads} heads", num_groups)
    steps = _steps(config, ("mamba_d_conv", "conv_kernel"))
    return mamba2(num_heads, dim, num_groups, state_size, steps, *_dtypes(config))


def granite_state(config: Config) -> Layer:
    """Return the state of a Mamba-2 layer whose file states how wide all heads are together.

    It may state how wide each head is, too.
    """
    channels = _channels(config, "mamba_d_ssm")
    num_heads = integer_of(config, _HEADS)
    states_dim = config.get("mamba_d_head") not in (None, "auto")
    dim = integer_of(config, "mamba_d_head") if states_dim else channels // num_heads
    if dim * num_heads != channels:
        expected = f"heads that make up the {channels} channels"
        raise unusable(stated_key(config, _HEADS), expected, num_heads)
    return mamba2_state({**config, "mamba_d_head": dim})


def delta_state(config: Config) -> Layer:
    """Return the state of a gated delta layer."""
    key_heads = integer_of(config, "linear_num_key_heads")
    value_heads = integer_of(config, "linear_num_value_heads")
    key_dim = integer_of(config, "linear_key_head_dim")
    value_dim = integer_of(config, "linear_value_head_dim")
    if value_heads % key_heads:
        expected = f"a divisor of linear_num_value_heads {value_heads}"
        raise unusable("linear_num_key_heads", expected, key_heads)
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(key_heads, key_dim, value_heads, value_dim, steps, *_dtypes(config))


def kimi_state(config: Config) -> Layer:
    """Return the state of Kimi delta attention."""
    num_heads = integer_of(config, "linear_num_heads")
    dim = integer_of(config, "linear_head_dim")
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(num_heads, dim, num_heads, dim, steps, *_dtypes(config))


def bailing_state(config: Config) -> Layer:
    """Return the state of lightning attention in files of Ling 2.5, else that of Kimi.

    (bailing_moe_linear.py of vLLM 0.33)
    """
    if "BailingMoeV2_5ForCausalLM" in str(config.get("architectures")):
        return lightning_state(config)
    return kimi_state(config)


def lightning_state(config: Config) -> Layer:
    """Return the state of a lightning attention layer: a matrix for each query head."""
    # Without a number of KV heads, they are as many as the query heads.
    (query_heads,) = kv_heads({**config, "num_key_value_heads": None, "v_head_dim": None})
    sizes = dict(query_heads.axes)
    _, ssm_dtype = _dtypes(config)
    return lightning(sizes["head"], sizes["dim"], ssm_dtype)


def short_conv(config: Config) -> Layer:
    """Return the last inputs of a short convolution over the model's width."""
    channels = integer_of(config, HIDDEN)
    steps = _steps(config, "conv_L_cache")
    conv_dtype, _ = _dtypes(config)
    return convolution(channels, steps, conv_dtype)


def _channels(config: Config, width_key: str | None) -> int:
    width = None if width_key is None else optional_integer_of(config, width_key)
    return width or integer_of(config, ("expand", "mamba_expand")) * integer_of(config, HIDDEN)


def _steps(config: Config, keys: Keys) -> int:
    """Return how many inputs a convolution stores: of width ``w``, the last ``w - 1``."""
    return integer_of(config, keys, low=2) - 1


def _dtypes(config: Config) -> tuple[str, str]:
    """Return the dtypes of the convolution and of the SSM state.

    Files of Nemotron-H and Qwen3.5 may state the second.
    """
    conv_dtype = dtype_of(config, "bfloat16")
    return conv_dtype, dtype_of(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


_ATTENTION: Final = (kv_heads, mla, sparse_mla, block_indexed, chunked_heads, stated_window)
_STATES: Final = (
    *(mamba1_state, wide_mamba1_state, mamba2_state, granite_state, delta_state, kimi_state),
    *(bailing_state, lightning_state, short_conv),
)

ATTENTION: Final[Mapping[str, AttentionReader]] = MappingProxyType(
    {reader.__name__: reader for reader in _ATTENTION}
)
"""What families.json may name as ``attention``."""

STATES: Final[Mapping[str, StateReader]] = MappingProxyType(
    {reader.__name__: reader for reader in _STATES}
)
"""What families.json may name as ``state``."""
