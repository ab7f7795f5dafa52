"""Features of a fleet, of which each seed of a swarm switches on a few.

A fleet with everything at once hides what one of them shows: where all prompts share blocks, no
pool runs out; where all transfers break, no lease ends. So a swarm draws some for each seed, from a
random stream of its own: a fleet without features is the same as before there were any.
"""

from __future__ import annotations

import enum
import random
from functools import reduce
from operator import or_
from typing import Final


class Feature(enum.Flag):
    """What engines, clients and transfers of a fleet do beside the usual.

    >>> print(Feature.of(7))
    Feature.HELD_TRANSFERS|LOST_ENGINES|TURNS|SINKS|LONG_PREFILLS|LOST_ENTRIES
    """

    BURSTS = enum.auto()
    """Requests come to prefill a few steps after each other."""

    PREEMPTION = enum.auto()
    """Engines take blocks chunk by chunk, as vLLM does, and preempt one when none are left."""

    ASYNC_STEPS = enum.auto()
    """A step is scheduled while the one before is under way, as vLLM's asynchronous scheduler does.

    Blocks are found in the prefix cache from when they are scheduled. Where a stop token ends an
    answer, a step is under way that computes one more position."""

    NEAR_PROMPTS = enum.auto()
    """Prompts, also those that a proxy takes for each other, differ in one token."""

    HELD_TRANSFERS = enum.auto()
    """A transfer that has failed shows its error while its bytes may still land."""

    FACTS = enum.auto()
    """Requests have salts, adapters and images, also wrong ones, which decide their cache too."""

    SLICES = enum.auto()
    """Reads are cut into small transfers, of which a step of the engine posts two.

    For a while some cannot be posted."""

    GARBLED_MESSAGES = enum.auto()
    """Servers get malformed copies of what engines send, some answers come malformed, and some
    handoffs forged."""

    LOST_ENGINES = enum.auto()
    """There are at least two prefill and two decode engines, and one of each dies for good.

    Half of all transfers are slow, so that bytes of a dead engine land late."""

    RESTARTS = enum.auto()
    """Engines die while they are used, and start again at once, under their names."""

    TURNS = enum.auto()
    """Decode keeps its answers, and the next turns of conversations come with their handoffs.

    Prefill reads an answer, and decode reads the next turn. Kept answers give way to requests."""

    REPEATS = enum.auto()
    """Requests come again, as others under their names, when the blocks of the first are free."""

    HOST_COPIES = enum.auto()
    """Engines lend copies of their blocks in main memory, made when a step has computed them.

    Connectors that say so read into such copies too, and copy blocks themselves."""

    SINKS = enum.auto()
    """Windows keep their first block, as attention sinks do: block tables have gaps."""

    UPDATES = enum.auto()
    """Operators load other weights into all engines, one after the other, or reset caches."""

    BAD_FIELDS = enum.auto()
    """Servers get messages, and readers signed handoffs, of which one field breaks its format.

    They are refused. Messages at the limits of their format come too, and are answered."""

    SIBLINGS = enum.auto()
    """Engines have another connector, which stores each full block that was read."""

    CHILDREN = enum.auto()
    """Requests ask for several answers: their children come at once, with the same parameters."""

    RIVALS = enum.auto()
    """Nothing goes wrong but that each prefill engine is started twice, under one name."""

    LONG_PREFILLS = enum.auto()
    """Proxies leave ``max_tokens`` as it is, so that prefill generates more than one token."""

    HANGUPS = enum.auto()
    """Clients hang up, and proxies abort a request in all its engines at almost the same time."""

    STORE = enum.auto()
    """Engines save what they have computed in a store, and load prefixes from it.

    Prompts come again, to other engines, when caches have forgotten them, or go on after answers,
    and for a while the store is slow, fails, or damages files. It is of connectors that have a
    store: no swarm draws it."""

    LIVE_UPDATES = enum.auto()
    """Weights change in parts under requests that run, and the prefix cache keeps old blocks.

    Operators name the weights, some also by the name of the first ones, and try to reset the cache.
    It is of connectors that hear of each of these calls: no swarm draws it."""

    RESHAPES = enum.auto()
    """An engine that starts again has another tensor parallel size."""

    WRONG_BYTES = enum.auto()
    """For a while, transfers end as done and have brought wrong bytes, or not all of them.

    It is of connectors that compare digests: no swarm draws it."""

    ADAPTERS = enum.auto()
    """The folders of adapters are overwritten, and engines load adapters when a step needs them.

    Some are loaded again at once, under requests that run. It is of connectors that hear of loaded
    adapters: no swarm draws it."""

    CROWDS = enum.auto()
    """Leases have many readers, in all decode engines: some end early, and one engine is silent.

    Most transfers are slow, so that others read on for longer than a lease."""

    LOST_ENTRIES = enum.auto()
    """Prefill engines lose messages to themselves for moments: those to the server of their rooms.

    Clients hang up there alone, so that proxies may send a request again whose reader waits."""

    INTERLEAVED = enum.auto()
    """Messages come, and coroutines run, while a step of an engine gives blocks to requests.

    So they do in engines whose connector has threads: answers to claims come before a request gets
    its blocks, or before the connector's own step. No swarm draws it, so that the fleets of other
    seeds stay as they are."""

    SHORT_WAITS = enum.auto()
    """Readers wait in rooms for less time than prefill takes for a long prompt, chunk by chunk.

    It is of fleets with rooms: no swarm draws it."""

    NAMED_AGAIN = enum.auto()
    """Beside :attr:`LIVE_UPDATES` operators load other weights under a name that was there before.

    Beside :attr:`ADAPTERS` prompts come again with an adapter that is loaded again. It is of
    connectors that take no such weights for those that have had the name, as SGLang's, and vLLM's
    of such adapters: no swarm draws it."""

    LATE_MESSAGES = enum.auto()
    """Hosts are so busy that messages are late by seconds, and transfers are slow.

    So questions are under way when the last byte comes. No swarm draws it, so that the fleets of
    other seeds stay as they are."""

    SHARED_STORE = enum.auto()
    """Others use the store too: some files cannot be deleted, and models and ages have limits.

    Caches are reset again under the same weights, prompts are loaded from the store alone, and
    some parameters name no owner of a pin. It is of fleets with a store: no swarm draws it."""

    ROUGH_STORE = enum.auto()
    """Batches and lists of a store hold one or two, and some of its files have lost their bytes.

    So they have when a host loses power: names are on disk before bytes. It is of fleets with a
    store: no swarm draws it."""

    POPULAR_PROMPTS = enum.auto()
    """Most requests have one of a few prompts, or the beginning of one, in engines without caches.

    So what one engine saves in a store, others load. It is of fleets with a store: no swarm draws
    it."""

    @classmethod
    def of(cls, seed: int) -> Feature:
        """Draw the features of a seed, each with a chance of a third.

        It leaves out :attr:`STORE`, :attr:`SHARED_STORE`, :attr:`ROUGH_STORE`,
        :attr:`POPULAR_PROMPTS`, :attr:`WRONG_BYTES`, :attr:`ADAPTERS`, :attr:`LIVE_UPDATES`,
        :attr:`SHORT_WAITS` and :attr:`NAMED_AGAIN`, which not all connectors can have,
        :attr:`INTERLEAVED` and :attr:`LATE_MESSAGES`.
        """
        draw = random.Random(f"{seed} features")
        special = cls.STORE | cls.WRONG_BYTES | cls.ADAPTERS | cls.LIVE_UPDATES | cls.INTERLEAVED
        special |= cls.SHORT_WAITS | cls.NAMED_AGAIN | cls.LATE_MESSAGES | cls.SHARED_STORE
        special |= cls.ROUGH_STORE | cls.POPULAR_PROMPTS
        drawn = [feature for feature in cls if feature not in special and draw.random() < 1 / 3]
        return reduce(or_, drawn, cls(0))


NO_FEATURES: Final = Feature(0)
