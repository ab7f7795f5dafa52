"""Offers: workers describe themselves to their peers, and read what a peer sends, untrusted."""

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
