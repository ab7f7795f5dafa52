"""Workers describe what they keep, and where: regions, groups, views, axes, block tables."""

from kvplan.describe.axes import Axis
from kvplan.describe.blocks import Blocks, Request
from kvplan.describe.tensors import region_of, view_of
from kvplan.describe.views import ITEMSIZE, Context, Group, Region, View
from kvplan.describe.worker import Worker

__all__ = [
    "ITEMSIZE",
    "Axis",
    "Blocks",
    "Context",
    "Group",
    "Region",
    "Request",
    "View",
    "Worker",
    "region_of",
    "view_of",
]
