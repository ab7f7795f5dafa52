"""Workers describe what they keep, and where: regions, groups, views, axes, block tables."""

from kvplan.describe.axes import Axis
from kvplan.describe.blocks import POSITION_END, Blocks, Range, Request, Tokens
from kvplan.describe.model import model_text, model_values
from kvplan.describe.tensors import check_memory, region_of, view_of
from kvplan.describe.views import ITEMSIZE, TOKEN, Context, Group, Region, View
from kvplan.describe.worker import Key, Worker

__all__ = [
    "ITEMSIZE",
    "POSITION_END",
    "TOKEN",
    "Axis",
    "Blocks",
    "Context",
    "Group",
    "Key",
    "Range",
    "Region",
    "Request",
    "Tokens",
    "View",
    "Worker",
    "check_memory",
    "model_text",
    "model_values",
    "region_of",
    "view_of",
]
