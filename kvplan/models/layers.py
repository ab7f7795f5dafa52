"""Layers: what each kind of layer caches, from the keys of a family's config.json.

Defaults and rules are those of transformers 5.23 (``modeling_*.py`` of each family for sizes that no key states):
``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null`` means ``hidden_size //
num_attention_heads``.

SSM states are fp32 unless ``mamba_ssm_cache_dtype`` (Nemotron-H) or ``mamba_ssm_dtype`` (Qwen3.5) says otherwise;
convolutions have the dtype of the weights. :mod:`kvplan.models.states` says which engines keep them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvplan.models import states
from kvplan.models.keys import Config, count, dtype, first_of, unusable
from kvplan.models.kinds import BOTH, NONE, linear_config
from kvplan.models.tensors import FULL, SLIDING, STATE, Layer, attention, latent, sparse_latent

Caches = Callable[[Config, str], Mapping[str, Layer]]
"""What a layer of each kind caches, given the dtype of the weights."""


def _heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """K and V of each head."""
    given = config.get("num_key_value_heads")
    heads = count(config, "num_key_value_heads" if given is not None else "num_attention_heads")
    query_heads = count(config, "num_attention_heads", heads)
    if query_heads % heads:
        raise unusable("num_key_value_heads", f"a divisor of num_attention_heads {query_heads}", heads)
    if config.get("head_dim") is not None:
        return attention(heads, count(config, "head_dim"), group, window)
    dim, rest = divmod(count(config, "hidden_size"), count(config, "num_attention_heads"))
    if rest or not dim:
        raise unusable("hidden_size", f"a multiple of num_attention_heads {query_heads}", config["hidden_size"])
    return attention(heads, dim, group, window)


def _window(config: Config) -> int | None:
    return count(config, "sliding_window") if config.get("sliding_window") is not None else None


def attends(config: Config, weights: str) -> dict[str, Layer]:
    """K and V by head, of full layers and of those that slide."""
    return {FULL: _heads(config), SLIDING: _heads(config, SLIDING, _window(config))}


def gemma4(config: Config, weights: str) -> dict[str, Layer]:
    """Full layers have a head size of their own, and KV heads of their own only where K equals V."""
    of_full = {**config, "head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
    stated = config.get("per_layer_config")
    if stated is not None:  # newer files spell out, for each full layer, what it has of its own
        values = list(stated.values()) if isinstance(stated, Mapping) else []
        if not values or not isinstance(values[0], Mapping) or any(value != values[0] for value in values):
            raise unusable("per_layer_config", "a mapping of equal mappings, one for each full layer", stated)
        of_full = {**config, **values[0]}
    return {FULL: _heads(of_full), SLIDING: _heads(config, SLIDING, _window(config))}


def latents(config: Config, weights: str) -> dict[str, Layer]:
    """One latent for all heads (MLA)."""
    return {FULL: latent(count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim"))}


def sparse(config: Config, weights: str) -> dict[str, Layer]:
    """A latent with an indexer beside it."""
    rank, rope = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim")
    return {FULL: sparse_latent(rank, rope, count(config, "index_head_dim"))}


def _ssm_dtype(config: Config) -> str:
    return dtype(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


def _steps(config: Config, *keys: str) -> int:
    """A convolution of width ``w`` keeps its last ``w - 1`` inputs."""
    return count(config, first_of(config, keys), low=2) - 1


def _channels(config: Config, *keys: str) -> int:
    """The width of a Mamba layer, stated under the first of ``keys``, or ``expand`` times that of the model."""
    if len(keys) > 1 and config.get(keys[0]) is not None:
        return count(config, keys[0])
    return count(config, keys[-1]) * count(config, "hidden_size")


def mamba(config: Config, weights: str) -> dict[str, Layer]:
    """Mamba1 alone."""
    channels = _channels(config, "intermediate_size", "expand")
    steps = _steps(config, "conv_kernel")
    return {STATE: states.mamba1(channels, count(config, "state_size"), steps, weights, _ssm_dtype(config))}


def jamba(config: Config, weights: str) -> dict[str, Layer]:
    """Attention, and Mamba1 in most layers."""
    channels, steps = _channels(config, "mamba_expand"), _steps(config, "mamba_d_conv")
    state = states.mamba1(channels, count(config, "mamba_d_state"), steps, weights, _ssm_dtype(config))
    return {FULL: _heads(config), STATE: state}


def _by_head(config: Config, weights: str, heads: int, dim: int, groups_key: str, state_key: str, steps: int) -> Layer:
    groups = count(config, groups_key)
    if heads % groups:
        raise unusable(groups_key, f"a divisor of {heads} heads", groups)
    return states.mamba2(heads, dim, groups, count(config, state_key), steps, weights, _ssm_dtype(config))


def mamba2(config: Config, weights: str) -> dict[str, Layer]:
    """Mamba2 alone."""
    heads, dim, steps = count(config, "num_heads"), count(config, "head_dim"), _steps(config, "conv_kernel")
    return {STATE: _by_head(config, weights, heads, dim, "n_groups", "state_size", steps)}


def nemotron(config: Config, weights: str) -> dict[str, Layer]:
    """Attention, Mamba2, or neither."""
    heads, dim = count(config, "mamba_num_heads"), count(config, "mamba_head_dim")
    groups, steps = first_of(config, ("mamba_n_groups", "n_groups")), _steps(config, "mamba_d_conv", "conv_kernel")
    state = _by_head(config, weights, heads, dim, groups, "ssm_state_size", steps)
    head_dim = config[first_of(config, ("attention_head_dim", "head_dim"))]  # the name in older files, and the newer
    return {FULL: _heads({**config, "head_dim": head_dim}), STATE: state, NONE: ()}


def granite(config: Config, weights: str) -> dict[str, Layer]:
    """Attention, Mamba2, or both in one layer."""
    channels, heads = _channels(config, "mamba_d_ssm", "mamba_expand"), count(config, "mamba_n_heads")
    stated = config.get("mamba_d_head") not in (None, "auto")
    dim = count(config, "mamba_d_head") if stated else channels // heads
    if dim * heads != channels:
        raise unusable("mamba_n_heads", f"heads that make up the {channels} channels", heads)
    state = _by_head(config, weights, heads, dim, "mamba_n_groups", "mamba_d_state", _steps(config, "mamba_d_conv"))
    full = _heads(config)
    return {FULL: full, STATE: state, BOTH: (*full, *state)}


def gated_delta(config: Config, weights: str) -> dict[str, Layer]:
    """Attention, and gated delta layers."""
    heads = [count(config, f"linear_num_{side}_heads") for side in ("key", "value")]
    dims = [count(config, f"linear_{side}_head_dim") for side in ("key", "value")]
    if heads[1] % heads[0]:
        raise unusable("linear_num_key_heads", f"a divisor of linear_num_value_heads {heads[1]}", heads[0])
    steps = _steps(config, "linear_conv_kernel_dim")
    state = states.delta(heads[0], dims[0], heads[1], dims[1], steps, weights, _ssm_dtype(config))
    return {FULL: _heads(config), STATE: state}


def kimi(config: Config, weights: str) -> dict[str, Layer]:
    """Latents, and Kimi delta attention."""
    given = linear_config(config)
    linear = {
        "heads": given.get("num_heads", config["linear_num_heads"]),
        "dim": given.get("head_dim", config["linear_head_dim"]),
        "conv": given.get("short_conv_kernel_size", config["linear_conv_kernel_dim"]),
    }
    heads, dim = count(linear, "heads"), count(linear, "dim")
    state = states.delta(heads, dim, heads, dim, _steps(linear, "conv"), weights, _ssm_dtype(config))
    return {**latents(config, weights), STATE: state}
