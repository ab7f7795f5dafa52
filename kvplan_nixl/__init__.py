"""kvplan_nixl: moves the bytes of kvplan's plans in real memory, through NIXL."""

from kvplan_nixl.agent import Agent
from kvplan_nixl.envelope import Envelope
from kvplan_nixl.events import TransferEvent
from kvplan_nixl.executor import UCX, NixlExecutor, NixlTransfer, settle

__all__ = ["UCX", "Agent", "Envelope", "NixlExecutor", "NixlTransfer", "TransferEvent", "settle"]
