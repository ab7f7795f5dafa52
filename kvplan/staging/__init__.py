"""Transfers in two steps, through a staging buffer, where layouts leave only short runs."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from kvplan.staging.choice import CUDA_IPC, SHARED_MEMORY, Choice, Option, Rates, choose
from kvplan.staging.copies import Copy
from kvplan.staging.cost import StagedCost
from kvplan.staging.pipeline import Copier, Pipeline, StagedTransfer
from kvplan.staging.plan import Chunk, StagedPlan, stage, stage_writes

__all__ = [
    "CUDA_IPC",
    "SHARED_MEMORY",
    "Choice",
    "Chunk",
    "Copier",
    "Copy",
    "Option",
    "Pipeline",
    "Rates",
    "StagedCost",
    "StagedPlan",
    "StagedTransfer",
    "choose",
    "stage",
    "stage_writes",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return the fake from its home, so that a process which serves loads no oracle."""
        if name == "FakeCopier":
            return importlib.import_module("kvplan.testing").FakeCopier
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
