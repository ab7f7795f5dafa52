"""From a model's Hugging Face config.json to the workers of an engine."""

from kvplan.models.families import FAMILIES, REFUSED
from kvplan.models.model import Model
from kvplan.models.tensors import FP8_DTYPES, Layer

__all__ = ["FAMILIES", "FP8_DTYPES", "REFUSED", "Layer", "Model"]
