"""From a model's Hugging Face config.json to the workers of an engine."""

from kvplan.models.families import FAMILIES, REFUSED
from kvplan.models.model import Model

__all__ = ["FAMILIES", "REFUSED", "Model"]
