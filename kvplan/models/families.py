"""Model families: for each ``model_type`` of a config.json, which layers cache what.

Families are data, in families.json. Most need one line there: which keys their files have, with the
values of those that a file leaves out. One rule reads them: K and V of each head (or a latent for
all heads, if the family has ``kv_lora_rank``) of every layer, in a window if the family has
``sliding_window``; ``layer_types`` says which layers slide, have a state, or cache nothing.

``classes`` has the keys and defaults of the configuration classes in transformers 5.23. ``rules``
has what a class does not say, and the families that only engines have:

==============  ==================================================================================
``defaults``    more keys that files have, with their defaults
``layers``      the kinds of layers in a file without ``layer_types``: a period, such as
                ``["swa", "swa", "attn"]``, or a rule of :data:`kvplan.models.kinds.RULES`
                (from the model's ``configuration_*.py``)
``attention``   what layers that attend cache, as in :data:`kvplan.models.caches.ATTENTION`
``state``       what recurrent layers cache, as in :data:`kvplan.models.caches.STATES`
``keys``        keys that are computed from others, as in :data:`kvplan.models.keys.RULES`
                (from its ``modeling_*.py``)
``last``        the kind of the last layer, whatever its file lists
==============  ==================================================================================

``refused`` says why kvplan doesn't read other types.

``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null`` means
``hidden_size // num_attention_heads``. Sizes that every published file states
(``num_hidden_layers``) have no default: a guess would plan the cache of another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.errors import KVPlanError
from kvplan.models.caches import ATTENTION, STATES, AttentionReader, StateReader
from kvplan.models.keys import RULES, KeyRule
from kvplan.models.kinds import BOTH, LayerRule, layer_rule
from kvplan.models.tensors import FULL, SLIDING, STATE, Layer
from kvplan.models.values import Config, integer_of, unusable


@attrs.frozen
class Family:
    """The rules by which files of one ``model_type`` are read: what layers of which kind cache.

    ``defaults`` are the keys that the family reads, with the values of those that a file leaves
    out. ``keys`` computes more of them from the others. ``layers`` is the rule for files without a
    list of layer types. ``attention`` and ``state`` read what a layer caches that attends or has a
    state. ``last`` is the kind of the last layer, whatever the list or the rule says.
    """

    defaults: Config
    layers: LayerRule
    attention: AttentionReader
    state: StateReader | None = None
    keys: KeyRule | None = None
    last: str | None = None

    def cache(self, kind: str, config: Config) -> Layer:
        """Return what a layer of a kind caches.

        ``swa_head_dim`` is the ``head_dim`` of layers that slide, and so on.
        """
        prefix = "swa_" if kind == SLIDING else "full_"
        keys_of_kind = {}
        for stated_key, value in config.items():
            if stated_key.startswith(prefix) and value is not None:
                keys_of_kind[stated_key.removeprefix(prefix)] = value
        try:
            return self._tensors(kind, {**config, **keys_of_kind})
        except KVPlanError as error:
            # The readers know keys without their prefix; the file has them with it.
            key = error.details.get("key")
            if key not in keys_of_kind:
                raise
            raise unusable(f"{prefix}{key}", error.expected, keys_of_kind[key]) from None

    def _tensors(self, kind: str, config: Config) -> Layer:
        tensors: Layer = ()
        if kind == SLIDING:
            tensors = self.attention(config, SLIDING, integer_of(config, "sliding_window"))
        elif kind in (FULL, BOTH):
            tensors = self.attention(config, FULL, None)
        if self.state is not None and kind in (STATE, BOTH):
            tensors += self.state(config)
        return tensors


_TABLE: Final[Mapping[str, Any]] = json.loads(
    resources.files("kvplan.models").joinpath("families.json").read_bytes(),
    object_hook=MappingProxyType,
)


def _family(
    class_defaults: Config,
    *,
    defaults: Config = MappingProxyType({}),
    layers: Any = "all_slide",
    attention: str = "",
    state: str = "",
    keys: str = "",
    last: str | None = None,
) -> Family:
    """Return a family by its entries in families.json, those of its rules by name."""
    all_defaults = MappingProxyType({**class_defaults, **defaults})
    if not attention:
        attention = "mla" if "kv_lora_rank" in all_defaults else "kv_heads"
        attention = "sparse_mla" if "index_head_dim" in all_defaults else attention
    return Family(
        all_defaults,
        layer_rule(layers),
        ATTENTION[attention],
        STATES[state] if state else None,
        RULES[keys] if keys else None,
        last,
    )


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        name: _family(_TABLE["classes"].get(name, {}), **_TABLE["rules"].get(name, {}))
        for name in {**_TABLE["classes"], **_TABLE["rules"]}
    }
)
"""The family of each known ``model_type``."""

CACHE_KEYS: Final = frozenset(chain(*(family.defaults for family in FAMILIES.values()))) - {
    # files of any type may state these
    *("num_hidden_layers", "num_attention_heads", "num_heads", "hidden_size", "head_dim")
}
"""Keys that change the cache: a file that has one is refused if its family doesn't read it.

They are all keys of families.json, so one that many files state without effect has to be excepted.
"""

OUTER: Final[Mapping[str, str]] = _TABLE["outer"]
"""The family of a decoder without a ``model_type``, by the type of the file around it."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {name: reason for reason, model_types in _TABLE["refused"].items() for name in model_types}
)
"""The reasons why the files of a ``model_type`` cannot be read."""
