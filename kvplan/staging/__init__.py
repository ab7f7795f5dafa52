"""Transfers in two steps, through a staging buffer, for layouts that leave only short runs between them."""

from kvplan.staging.choice import SHARED_MEMORY, Choice, Option, Rates, choose
from kvplan.staging.copies import Copy
from kvplan.staging.cost import StagedCost
from kvplan.staging.pipeline import Copier, FakeCopier, Pipeline, StagedTransfer
from kvplan.staging.plan import Chunk, StagedPlan, stage, stage_writes

__all__ = [
    "SHARED_MEMORY",
    "Choice",
    "Chunk",
    "Copier",
    "Copy",
    "FakeCopier",
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
