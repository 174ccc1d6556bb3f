"""The index, and what keeps it true with a bounded delay.

It is filled by one listing at start, by this process's own stores, by the journals of other writers
(see ``journal``), and by further listings in steps.  Listings go in the order of keys, so a listing
can stop anywhere and go on later; entries that a whole listing did not meet are gone.

A hit that is no longer there is found by the load (a miss, and removed).  A block that another process
stored is found after ``index_ttl_s`` through its journal, or, if its writer keeps none, by the next listing.

Threads: any.  ``_refreshing`` is held by the one thread that lists or reads journals; nobody waits for it:
others answer from what is known.  It covers all fields but ``_index`` and ``_journal``, which have locks
of their own, taken inside it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from flexkv_core import BlockKey

from .config import S3Config
from .errors import EXPECTED, fault_of
from .index import KeyIndex
from .journal import GONE, Journal
from .names import Names
from .service import Service

_PAUSE_S = 1.0
"""After a refresh failed, lookups answer from what is known for at least so long."""

logger = logging.getLogger(__name__)


class Catalog:
    """What is known of one prefix and layout."""

    def __init__(self, config: S3Config, names: Names, tier: str) -> None:
        """Nothing is known; the first ``refresh`` begins a listing."""
        self._config = config
        self._names = names
        self._tier = tier
        self._index = KeyIndex()
        self._journal = Journal(names)
        self._refreshing = threading.Lock()
        self._listing_after: str | None = ""
        self._listed_at = -math.inf
        self._fresh_at = -math.inf
        self._paused_until = -math.inf

    def fill(self, service: Service) -> None:
        """List what is there, for at most ``list_timeout_s``, before other threads come."""
        self._fresh_at = time.monotonic()
        self._list(service, self._fresh_at + self._config.list_timeout_s)
        if self._config.journal and self._config.probe == "write":
            self._journal.sweep(service)

    def lengths(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Per key its value's length, or None."""
        return self._index.lengths(keys)

    def totals(self) -> tuple[int, int]:
        """Number of values and their bytes."""
        return self._index.totals()

    def found(self, rows: Sequence[tuple[BlockKey, int]]) -> None:
        """Values that were met, with their lengths."""
        self._index.add(rows, time.time())

    def missed(self, keys: Sequence[BlockKey], asked_at: float) -> None:
        """Values that were not there at ``asked_at`` (seconds since the epoch), or soon after."""
        self._index.discard_older(keys, asked_at)

    def stored(self, service: Service, rows: Sequence[tuple[BlockKey, int]]) -> None:
        """Values of this process that became readable; others are told."""
        self._index.add(rows, time.time())
        self._tell(service, rows)

    def removed(self, service: Service, keys: Sequence[BlockKey]) -> None:
        """Values that this process removed; others are told."""
        self._index.discard(keys)
        self._tell(service, [(key, GONE) for key in keys])

    def _tell(self, service: Service, rows: Sequence[tuple[BlockKey, int]]) -> None:
        # Stores run in the background: a refresh here is one that no lookup has to wait for.
        try:
            if self._config.journal and rows:
                self._journal.write(service, rows)
            self.refresh(service)
        except EXPECTED as exc:
            # What was stored is stored; others find it by their next listing.
            logger.warning("[FlexKV] tier %s: journal or listing failed: %s", self._tier, fault_of(exc).line)

    def refresh(self, service: Service) -> None:
        """Bring the index up to date, for some ``list_step_s``, if it is due and nobody else is at it.

        Raises:
            What ``Service.page`` raises; once, then not again for a while.
        """
        now = time.monotonic()
        is_due = self._listing_after is not None or now - self._fresh_at >= self._config.index_ttl_s
        if not is_due or now < self._paused_until or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._refresh(service, now, now + self._config.list_step_s)
        except EXPECTED:
            # A store that is down is asked once in a while, not by each lookup.
            self._paused_until = time.monotonic() + max(self._config.index_ttl_s, _PAUSE_S)
            raise
        finally:
            self._refreshing.release()

    def _refresh(self, service: Service, now: float, deadline: float) -> None:
        if now - self._fresh_at >= self._config.index_ttl_s and (
            not self._config.journal or self._journal.read_news(service, self._index, deadline)
        ):
            self._fresh_at = now
        if self._listing_after is None and now - self._listed_at >= self._config.relist_every_s:
            self._listing_after = ""
        self._list(service, deadline)

    def _list(self, service: Service, deadline: float) -> None:
        """Advance a listing until its end or ``deadline``, by one page at least."""
        while self._listing_after is not None:
            if not self._listing_after:
                self._index.begin_pass()
            asked_at = time.time()
            page, is_more = service.page(self._names.blocks, self._listing_after)
            rows = [(self._names.key(name), num_bytes) for name, num_bytes in page]
            self._index.add(((key, num_bytes) for key, num_bytes in rows if key is not None), asked_at)
            self._listing_after = page[-1][0] if is_more and page else None
            if self._listing_after is None:
                self._index.end_pass()
                self._listed_at = time.monotonic()
            elif time.monotonic() >= deadline:
                return

    def after_fork(self) -> None:
        """In a child, before its other threads: new locks, and a journal of its own."""
        self._refreshing = threading.Lock()
        self._index.after_fork()
        self._journal.after_fork()
