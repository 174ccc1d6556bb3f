"""One call of the tier: talk with each server that has some of its keys, and say what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from flexkv_core import BufferState, Outcome, Status, failed

from .faults import CAUGHT, fault_of
from .meaning import REDIRECTED
from .servers import Servers
from .wire import Wire

Talk = Callable[[Wire, Sequence[bytes], Sequence[int]], Iterable[Outcome]]
"""Says over a wire what is to be said about names, which stand at the given places of the call's
keys; yields their outcomes, in order."""

UNTRIED = failed(Status.UNAVAILABLE, "not tried")


@dataclass
class Call:
    """The names of one batch, and their outcomes as they come.

    Attributes:
        names: What the keys are called at the server.
        talk: What is said about them.
        outcomes: One per name.
        cause: The last exception that cost some of them, if any.
    """

    names: Sequence[bytes]
    talk: Talk
    outcomes: list[Outcome] = field(init=False)
    cause: Exception | None = None

    def __post_init__(self) -> None:
        self.outcomes = [UNTRIED] * len(self.names)

    def run(self, servers: Servers) -> None:
        """Ask every server concerned, then ask again for what a cluster has moved meanwhile."""
        try:
            for pool, places in servers.routes(self.names):
                self._converse(servers, servers.wire(pool), places)
            moved = []
            if servers.has_redirects:
                moved = [place for place, outcome in enumerate(self.outcomes) if outcome is REDIRECTED]
            wire = servers.client_wire() if moved else None
        except CAUGHT as exc:  # no client can be made, or the cluster's map cannot be had
            servers.note_trouble()
            self._fail([i for i, outcome in enumerate(self.outcomes) if outcome is UNTRIED], exc)
            return
        if wire is not None:
            servers.note_trouble()
            self._converse(servers, nullcontext(wire), moved)

    def same_failure(self) -> Outcome | None:
        """The failure that all names share, if no buffer was touched."""
        first = self.outcomes[0]
        if first.status in (Status.OK, Status.MISS):
            return None
        for outcome in self.outcomes:
            if outcome.status is not first.status or outcome.buffer is not BufferState.UNTOUCHED:
                return None
        return first

    def _converse(
        self, servers: Servers, opened: AbstractContextManager[Wire], places: Sequence[int]
    ) -> None:
        wire: Wire | None = None
        done = 0
        try:
            with opened as wire:
                is_all = len(places) == len(self.names)
                names = self.names if is_all else [self.names[place] for place in places]
                answers = self.talk(wire, names, places)
                if isinstance(answers, list):
                    self._take_all(wire, places, answers)
                    return
                for place, outcome in zip(places, answers, strict=True):
                    self.outcomes[place] = outcome
                    done += 1
                    wire.is_spent |= _is_wrong_server(outcome)
        except CAUGHT as exc:
            servers.note_trouble()
            is_touched = wire is not None and wire.is_filling
            self._fail(places[done:], exc, is_touched=is_touched)

    def _take_all(self, wire: Wire, places: Sequence[int], answers: list[Outcome]) -> None:
        """A thousand answers in one step: few of them differ, and each is looked at once."""
        if len(answers) == len(self.outcomes):
            self.outcomes = answers
        else:
            for place, outcome in zip(places, answers, strict=True):
                self.outcomes[place] = outcome
        different = {id(outcome): outcome for outcome in answers}.values()
        wire.is_spent |= any(map(_is_wrong_server, different))

    def _fail(self, places: Sequence[int], exc: Exception, *, is_touched: bool = False) -> None:
        fault = fault_of(exc)
        self.cause = exc
        for i, place in enumerate(places):
            state = BufferState.UNCERTAIN if is_touched and i == 0 else BufferState.UNTOUCHED
            self.outcomes[place] = failed(fault.status, fault.reason, state)


def _is_wrong_server(outcome: Outcome) -> bool:
    """Whether the server, a replica now or loading, may not be the right one next time."""
    return outcome.status is Status.UNAVAILABLE and outcome is not REDIRECTED
