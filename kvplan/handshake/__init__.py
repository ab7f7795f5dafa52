"""Offers: how workers describe themselves to their peers, and how a peer's message, untrusted data, is read."""

from kvplan.handshake.comparison import Comparison, Difference, compare
from kvplan.handshake.decoding import decode, problems
from kvplan.handshake.encoding import encode, fingerprint
from kvplan.handshake.messages import PeerError, Problem

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
