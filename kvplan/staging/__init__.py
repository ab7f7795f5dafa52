"""Reads in two steps, through a staging buffer, where layouts leave only short runs."""

from kvplan.staging.choice import CUDA_IPC, SHARED_MEMORY, Choice, Option, Rates, choose
from kvplan.staging.copies import Copy
from kvplan.staging.cost import StagedCost
from kvplan.staging.pipeline import Copier, Pipeline, StagedTransfer
from kvplan.staging.plan import Chunk, StagedPlan, stage

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
]
