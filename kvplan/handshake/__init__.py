"""Offers: how workers describe themselves to their peers, and how a peer's message, untrusted data, is read."""

from kvplan.handshake.comparison import Comparison, Difference, compare
from kvplan.handshake.messages import PeerError, Problem
from kvplan.handshake.offers import decode, encode, fingerprint, problems

__all__ = [
    "Comparison",
    "Difference",
    "PeerError",
    "Problem",
    "compare",
    "decode",
    "encode",
    "fingerprint",
    "problems",
]
