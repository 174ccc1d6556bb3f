"""A thread that waits for events in the order given and then says so.

Blocking in the driver costs neither the interpreter's lock nor a processor, which polling would.

Threads: ``put`` from the transfer's worker; callbacks run on the waiter's own thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from .gpu import Event, Gpu

_log = logging.getLogger(__name__)

Then = Callable[[Exception | None], None]
"""What to do when the event has passed; gets the error if waiting failed."""


class EventWaiter:
    """One thread, one order."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        """Make the thread; ``start`` starts it."""
        self._gpu = gpu
        self._work: SimpleQueue[tuple[Event, Then] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether anybody waits: without, no copy is ever told to have ended."""
        return self._thread.is_alive()

    def put(self, event: Event, then: Then) -> None:
        """Call ``then`` once ``event`` has passed."""
        self._work.put((event, then))

    def close(self) -> None:
        """Wait for all events that were put, then join."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._gpu.bind()
        while self._run_once():
            pass

    def _run_once(self) -> bool:
        item = self._work.get()
        if item is None:
            return False
        event, then = item
        fault: Exception | None = None
        try:
            event.synchronize()
        except Exception as error:  # noqa: BLE001 - handed on: the copy fails with it
            fault = error
        try:
            then(fault)
        except Exception:  # noqa: BLE001 - the thread's top: a bug in one callback must not
            # leave the other tickets open.
            _log.exception("[FlexKV] a completion callback failed")
        return True
