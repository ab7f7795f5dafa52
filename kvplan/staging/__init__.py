"""Transfers in two steps, through a staging buffer, for layouts that leave only short runs between them."""

from kvplan.staging.choice import Choice, Option, choose
from kvplan.staging.outlay import Outlay
from kvplan.staging.pipeline import Copier, FakeCopier, Pipeline, StagedTransfer
from kvplan.staging.plan import Chunk, StagedPlan, stage, stage_writes
from kvplan.staging.rates import SHARED_MEMORY, Rates
from kvplan.staging.rearrange import Copy, Side, run

__all__ = [
    "SHARED_MEMORY",
    "Choice",
    "Chunk",
    "Copier",
    "Copy",
    "FakeCopier",
    "Option",
    "Outlay",
    "Pipeline",
    "Rates",
    "Side",
    "StagedPlan",
    "StagedTransfer",
    "choose",
    "run",
    "stage",
    "stage_writes",
]
