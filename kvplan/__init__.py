"""kvplan: plans that move a request's cache between engines of any layout, verified byte for byte."""

from kvplan.axes import Axis
from kvplan.errors import CODES, KVPlanError
from kvplan.tensors import view_of
from kvplan.views import Context, Group, Region, View
from kvplan.workers import Worker

__all__ = ["CODES", "Axis", "Context", "Group", "KVPlanError", "Region", "View", "Worker", "view_of"]
