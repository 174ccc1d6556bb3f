"""Several requests of one call under way at once, in one thread.

Requests are sent ahead on connections of their own and answered in order: while one body is
received, the kernel receives the next ones.  That hides the wait for the first byte without a thread.

A failure that would befall every key (no connection, no answer in time, wrong keys, an overloaded
server) ends the call: the keys left are not tried, so a dead endpoint costs one time-out and not one a key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from flexkv_core import MISS, BufferState, Outcome, failed

from .errors import EXPECTED, Fault, fault_of, is_missing
from .exchange import Exchange

_MOST_LOST = 3
"""After so many broken connections in a row the server is taken for down."""


class CallFailure(Exception):
    """No key could be tried.

    Attributes:
        fault: Why.
        cause: The library's exception.
    """

    def __init__(self, fault: Fault, cause: BaseException) -> None:
        self.fault = fault
        self.cause = cause
        super().__init__(fault.line)


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class Batch:
    """One call's requests."""

    def __init__(
        self,
        count: int,
        depth: int,
        send: Callable[[int], Exchange],
        receive: Callable[[int, Exchange], Outcome],
    ) -> None:
        """Prepare ``count`` requests.

        Args:
            count: Number of keys.
            depth: Most requests under way.
            send: Begins the request of key number ``i``.
            receive: Collects its answer.
        """
        self._count = count
        self._depth = depth
        self._send = send
        self._receive = receive
        self._under_way: deque[Exchange | _Failure] = deque()
        self._outcomes: list[Outcome] = []
        self._num_sent = 0
        self._num_lost = 0
        self._is_touched = False
        self._end: tuple[Fault, BaseException] | None = None

    def run(self) -> list[Outcome]:
        """One outcome per key, in order.

        Raises:
            CallFailure: nothing succeeded or was touched before a failure that concerns all keys.
        """
        try:
            while len(self._outcomes) < self._count and self._end is None:
                self._fill()
                self._outcomes.append(self._collect())
        finally:
            for flight in self._under_way:
                if isinstance(flight, Exchange):
                    flight.abandon()
        if self._end is None:
            return self._outcomes
        fault, cause = self._end
        if not self._is_touched and all(row.status is fault.status for row in self._outcomes):
            raise CallFailure(fault, cause)
        rest = self._count - len(self._outcomes)
        return self._outcomes + [failed(fault.status, f"not tried: {fault.line}")] * rest

    def _fill(self) -> None:
        while self._num_sent < self._count and len(self._under_way) < self._depth:
            number = self._num_sent
            self._num_sent += 1
            try:
                self._under_way.append(self._send(number))
            except EXPECTED as exc:
                self._under_way.append(_Failure(exc))
                return

    def _collect(self) -> Outcome:
        number = len(self._outcomes)
        flight = self._under_way.popleft()
        if isinstance(flight, _Failure):
            return self._failed(flight.error)
        try:
            outcome = self._receive(number, flight)
        except EXPECTED as exc:
            self._is_touched = self._is_touched or flight.is_touched
            return self._failed(exc, BufferState.UNCERTAIN if flight.is_touched else BufferState.UNTOUCHED)
        self._is_touched = True
        self._num_lost = 0
        return outcome

    def _failed(self, exc: BaseException, buffer: BufferState = BufferState.UNTOUCHED) -> Outcome:
        if is_missing(exc):
            self._num_lost = 0
            self._is_touched = True
            return MISS
        fault = fault_of(exc)
        self._num_lost += 1
        if fault.is_general or self._num_lost >= _MOST_LOST:
            self._end = (fault, exc)
        return failed(fault.status, fault.line, buffer)
