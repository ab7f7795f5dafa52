"""A model with few of its layers."""

from __future__ import annotations

from collections import Counter

from kvplan import Model
from kvplan.cli.trials import sampled


def shortened(model: Model) -> Model:
    """Two layers of each kind, or more where there are one or two kinds, enough for uneven stages."""
    num_layers = sum(min(number, 2) for number in Counter(model.layers).values())
    return sampled(model, min(max(num_layers, 4), len(model.layers)))
