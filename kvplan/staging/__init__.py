"""Reads in two steps, through a staging buffer, and copies within memory that a process reaches."""

from kvplan.staging.choice import CUDA_IPC, SHARED_MEMORY, Choice, Option, Rates, choose
from kvplan.staging.copies import Copy, CopySide
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
    "CopySide",
    "Option",
    "Pipeline",
    "Rates",
    "StagedCost",
    "StagedPlan",
    "StagedTransfer",
    "choose",
    "stage",
]
