"""Counters of layers: one eventfd a layer, so that whoever copies may be a thread or another process.

There are a few counters, taken in turn, one for each batch of loads.  Each load of the batch adds one
unit to each layer's descriptor; a waiter takes as many units as there are loads.  A counter is taken
again only when all its loads have ended, and is emptied then: a model that skips layers leaves units
behind.  A signal of an earlier use that comes late carries its generation, and adds nothing.

Threads: ``LayerCounters`` and ``Counter.wait`` belong to the engine's thread.  Signals come from any;
``Counter._lock`` covers generation and writing, so that no signal slips between "is this still my
generation" and the unit.  Nothing else is locked while it is held.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence

NUM_COUNTERS = 3
"""A batch being filled, one that the device works on, and one whose last copies end."""


class Counter:
    """The descriptors of one batch.

    Attributes:
        index: Its number among the counters.
        generation: How often it was taken.
    """

    def __init__(self, index: int, num_layers: int) -> None:
        """Descriptors for ``num_layers`` layers, empty.  Raises OSError when there are no more."""
        self.index = index
        self.generation = 0
        self._fds: list[int] = []
        self._lock = threading.Lock()
        self._num_loads = 0
        self._num_open = 0
        self._waited = 0
        self._units = [0] * num_layers
        try:
            for _ in range(num_layers):
                self._fds.append(os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> Sequence[int]:
        """One eventfd a layer, in order; owned by the counter."""
        return self._fds

    @property
    def is_idle(self) -> bool:
        """Whether all loads that were added have ended."""
        return not self._num_open

    def take(self) -> None:
        """Begin a new generation; what the last one left is thrown away."""
        with self._lock:
            self.generation += 1
            for fd in self._fds:
                while _take_unit(fd):
                    pass
        self._num_loads = self._waited = 0
        self._units = [0] * len(self._units)

    def add(self) -> Signal:
        """One more load; give its signal to whoever copies, and ``release`` when it has ended."""
        self._num_loads += 1
        self._num_open += 1
        self._waited = 0
        return Signal(self, self.generation)

    def release(self) -> None:
        """One load has ended: no byte of it moves any more."""
        self._num_open -= 1

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Block until every load has signalled ``layer`` and all before it, at most ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while self._waited <= layer:
            while self._units[self._waited] < self._num_loads:
                fd = self._fds[self._waited]
                if _take_unit(fd):
                    self._units[self._waited] += 1
                elif not _is_readable(fd, end - time.monotonic()):
                    return False
            self._waited += 1
        return True

    def signal(self, generation: int, first: int, last: int) -> None:
        """Add a unit to the layers from ``first`` to before ``last``, unless the counter was taken since."""
        with self._lock:
            if generation == self.generation:
                for fd in self._fds[first:last]:
                    os.eventfd_write(fd, 1)

    def close(self) -> None:
        """Close the descriptors; late signals do nothing.  May be called twice."""
        with self._lock:
            self.generation += 1
            fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


class Signal:
    """Where one load tells of its layers.  One thread at a time."""

    def __init__(self, counter: Counter, generation: int) -> None:
        """For ``counter`` as it is taken now."""
        self.counter = counter
        self.generation = generation
        self._told = 0

    def __call__(self, num_layers: int) -> None:
        """So many layers are in place, or will never be; those not told yet are."""
        if num_layers > self._told:
            self.counter.signal(self.generation, self._told, num_layers)
            self._told = num_layers


class LayerCounters:
    """The counters of one engine rank."""

    def __init__(self, num_layers: int, num_counters: int = NUM_COUNTERS) -> None:
        """Open all descriptors.

        Raises:
            OSError: the process may not have so many.
        """
        self.num_layers = num_layers
        self._next = 0
        self.counters: list[Counter] = []
        try:
            for index in range(num_counters):
                self.counters.append(Counter(index, num_layers))
        except OSError:
            self.close()
            raise

    @property
    def has_idle(self) -> bool:
        """Whether one can be taken."""
        return any(counter.is_idle for counter in self.counters)

    def take(self) -> Counter | None:
        """The next counter in turn whose loads have all ended, emptied; None while there is none."""
        for step in range(len(self.counters)):
            counter = self.counters[(self._next + step) % len(self.counters)]
            if counter.is_idle:
                self._next = counter.index + 1
                counter.take()
                return counter
        return None

    def close(self) -> None:
        """Close all descriptors.  May be called twice."""
        for counter in self.counters:
            counter.close()


def _take_unit(fd: int) -> bool:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return False
    return True


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Whether there is a unit, waiting for one.  ``poll``: ``select`` ends at descriptor 1,023."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return timeout_s > 0 and bool(poller.poll(timeout_s * 1000))
