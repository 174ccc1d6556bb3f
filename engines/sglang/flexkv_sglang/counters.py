"""One line of counters in the log, now and then: the proof of hits, and of what went wrong.

Threads: the scheduler's.
"""

from __future__ import annotations

import logging
import time

from flexkv_core.metrics import Metrics

logger = logging.getLogger(__name__)


class CounterLog:
    """Logs the counters every so often, if any of them has changed."""

    def __init__(self, metrics: Metrics, every_s: float) -> None:
        """Log ``metrics`` every ``every_s`` seconds; 0 never."""
        self._metrics = metrics
        self._every_s = every_s
        self._next = time.monotonic() + every_s
        self._last = ""

    def tick(self) -> None:
        """Log if it is time.  Called thousands of times a second: costs a look at the clock."""
        if self._every_s and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self.log()

    def log(self) -> None:
        """Log now, if anything has changed since the last line."""
        line = self._metrics.summary()
        if line and line != self._last:
            self._last = line
            logger.info("[FlexKV] counters: %s", line)
