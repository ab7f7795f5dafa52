"""Offers: what a worker tells its peers of itself, and what becomes of a peer's message, which is untrusted data."""

from kvplan.handshake.comparison import Comparison, Difference, compare
from kvplan.handshake.decoding import decode, problems
from kvplan.handshake.encoding import encode, fingerprint
from kvplan.handshake.errors import PeerError, Problem

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
