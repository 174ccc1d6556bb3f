"""Probes: questions to shared tiers which blocks they have.

A shared tier is written by others too, so it must be asked; a worker does.  Its answers are kept in
``Link.known`` for a while, where lookups find them.

Threads: the chain's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..keys import BlockKey
from ..tier import Status
from .calls import Call, Completed, Verb
from .links import Link
from .parts import ChainParts


@dataclass(eq=False)
class Probe:
    """What a lookup call's end is looked up by."""

    link: Link


class Probes:
    """All questions of a chain.

    Attributes:
        num_open: Calls that are not answered yet.
    """

    def __init__(self, parts: ChainParts) -> None:
        """None asked yet."""
        self._links = parts.links
        self._metrics = parts.metrics
        self.num_open = 0

    def ask(self, keys: Sequence[BlockKey], now: float) -> int:
        """Ask every shared tier for those of ``keys`` that nothing recent is known of.

        Returns:
            How many calls were queued.
        """
        calls = 0
        for link in self._links:
            if link.is_indexed or not link.takes_loads:
                continue
            unknown = [key for key in keys if link.known.get(key, now) is None]
            size = max(1, link.capabilities.max_batch, link.capabilities.max_lookup)
            for start in range(0, len(unknown), size):
                calls += 1
                deadline = now + link.config.lookup_deadline_s
                part = unknown[start : start + size]
                link.workers.submit(Call(Verb.LOOKUP, part, deadline=deadline, owner=Probe(link)))
        self.num_open += calls
        return calls

    def answered(self, end: Completed, probe: Probe, now: float) -> None:
        """A lookup call has ended."""
        self.num_open -= 1
        link = probe.link
        # One that only waited in the queue says nothing: whatever it waited behind has been counted.
        if end.is_adrift or end.is_refused:
            link.wrapped.breaker.report(end.outcomes[0].status, end.outcomes[0].reason, call=end.call)
        for key, outcome in zip(end.call.keys, end.outcomes, strict=True):
            # What could not be asked is taken as missing for a moment: it is asked again soon.
            link.known.note(key, now, is_there=outcome.is_ok)
            if outcome.status not in (Status.OK, Status.MISS):
                self._metrics.count("lookup_failures", tier=link.name, cause=outcome.status.value)
