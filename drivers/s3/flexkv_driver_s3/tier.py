"""Blocks as objects in a bucket.

What libraries raise is translated by one table, in ``errors``.

Threads: any thread may call.  ``_calls`` (a condition with its lock) covers ``_service``,
``_num_running`` and ``_is_closed``; ``_refreshing`` is held by the one thread that lists or reads
journals, and never waited for by a lookup.  Order: ``_refreshing`` before ``_calls``; the index's lock
is taken inside either.
After a fork the child makes locks, connections and a client of its own, before any other thread.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flexkv_core import (
    DONE,
    MISS,
    BlockKey,
    Outcome,
    Status,
    Tier,
    TierCapabilities,
    TierClosedError,
    TierContext,
    TierUsage,
    failed,
    loaded,
)

from .batch import Batch, CallFailure, raise_failure
from .config import S3Config
from .errors import EXPECTED, fault_of, is_missing
from .index import KeyIndex
from .journal import Journal
from .names import names_of
from .service import PAGE_KEYS, Service, after_fork
from .wire import Exchange

_MAX_BATCH = 64
_PAUSE_S = 1.0
"""After a refresh failed, lookups answer from what is known for at least so long."""

logger = logging.getLogger(__name__)


class S3Tier(Tier):
    """One bucket, one prefix, one layout."""

    def __init__(self, config: S3Config, context: TierContext) -> None:
        """Ask the store what ``config.probe`` says, and list what is there.

        Raises:
            TierUnavailableError, TierTimeoutError, TierAccessError, TierError: in one line, with the mend.
        """
        self._config = config
        self._context = context
        self._name = context.name
        self._names = names_of(config.prefix, context.fingerprint, config.shard_chars)
        self._calls = threading.Condition()
        self._refreshing = threading.Lock()
        self._service: Service | None = None
        self._num_running = 0
        self._is_closed = False
        self._index = KeyIndex()
        self._journal = Journal(self._names)
        self._listing_after: str | None = ""
        self._listed_at = -math.inf
        self._fresh_at = -math.inf
        self._paused_until = -math.inf
        self.capabilities = TierCapabilities(
            persistent=True,
            shared=True,
            max_batch=_MAX_BATCH,
            max_concurrency=config.max_concurrency,
        )
        _open_tiers.add(self)
        if config.probe != "none":
            try:
                with self._call("open") as service:
                    self._probe(service)
                    self._fresh_at = time.monotonic()
                    self._list(service, self._fresh_at + config.list_timeout_s)
            except BaseException:
                self.close()
                raise

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Answer from the index; now and then one call refreshes it first.

        A block that another process stored less than ``index_ttl_s`` ago, or that the listing has not come to
        yet, is a miss.
        """
        with self._call("lookup", len(keys)) as service:
            self._refresh(service, self._config.list_step_s)
        return [
            MISS if num_bytes is None else Outcome(Status.OK, num_bytes)
            for num_bytes in self._index.lengths(keys)
        ]

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        with self._call("load", len(keys)) as service:
            outcomes = Batch(
                len(keys),
                self._config.requests_per_call,
                lambda i: service.wire.send("GET", self._names.block(keys[i])),
                lambda i, exchange: loaded(_sent(exchange).read_into(into[i])),
            ).run()
        self._index.discard(key for key, row in zip(keys, outcomes, strict=True) if row.status is Status.MISS)
        return outcomes

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        with self._call("store", len(keys)) as service:
            outcomes = self._store(service, keys, values)
            self._tell(service, keys, outcomes)
        return outcomes

    def _store(
        self, service: Service, keys: Sequence[BlockKey], values: Sequence[memoryview]
    ) -> list[Outcome]:
        names = [self._names.block(key) for key in keys]

        def send(i: int) -> Exchange | None:
            if len(values[i]) > self._config.multipart_above:
                return None
            return service.wire.send("PUT", names[i], values[i])

        def receive(i: int, exchange: Exchange | None) -> Outcome:
            if exchange is None:
                service.put_in_parts(names[i], values[i])
            else:
                exchange.finish()
            return Outcome(Status.OK, len(values[i]))

        return Batch(len(keys), self._config.requests_per_call, send, receive).run()

    def _tell(self, service: Service, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        stored = [(key, row.num_bytes) for key, row in zip(keys, outcomes, strict=True) if row.is_ok]
        self._index.add(stored)
        try:
            if self._config.journal and stored:
                self._journal.write(service, stored)
            self._refresh(service, self._config.list_step_s)
        except EXPECTED as exc:
            # The values are stored; others find them by their next listing.
            logger.warning(
                "[FlexKV] tier %s: the journal was not written: %s", self._name, fault_of(exc).line
            )

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Remove objects; ``OK`` for those that the index knew (the store does not say)."""
        names = [self._names.block(key) for key in keys]
        known = self._index.lengths(keys)
        with self._call("evict", len(keys)) as service:
            failures = service.delete(names)
        self._index.discard(key for key, name in zip(keys, names, strict=True) if name not in failures)
        return [
            self._evicted(failures.get(name), num_bytes) for name, num_bytes in zip(names, known, strict=True)
        ]

    def _evicted(self, failure: BaseException | None, num_bytes: int | None) -> Outcome:
        if failure is not None and not is_missing(failure):
            fault = fault_of(failure)
            return failed(fault.status, fault.line)
        return MISS if num_bytes is None or failure is not None else DONE

    def usage(self) -> TierUsage:
        num_blocks, used_bytes = self._index.totals()
        return TierUsage(num_blocks, used_bytes, 0)

    def check_health(self) -> None:
        """Ask the store for one page of one name."""
        with self._call("lookup") as service:
            service.page(self._names.blocks, limit=1)

    def close(self) -> None:
        with self._calls:
            self._is_closed = True
            self._calls.wait_for(lambda: self._num_running == 0)
            service, self._service = self._service, None
        if service is not None:
            service.close()

    @contextmanager
    def _call(self, operation: str, num_keys: int = 0) -> Iterator[Service]:
        with self._calls:
            if self._is_closed:
                raise TierClosedError(f"tier {self._name} is closed", tier=self._name, operation=operation)
            self._num_running += 1
        try:
            yield self._get_service()
        except CallFailure as exc:
            raise raise_failure(exc, tier=self._name, operation=operation, num_keys=num_keys) from exc.cause
        except EXPECTED as exc:
            failure = CallFailure(fault_of(exc), exc)
            raise raise_failure(failure, tier=self._name, operation=operation, num_keys=num_keys) from exc
        finally:
            with self._calls:
                self._num_running -= 1
                self._calls.notify_all()

    def _get_service(self) -> Service:
        service = self._service
        if service is not None:
            return service
        with self._calls:
            if self._service is None:
                self._service = Service(self._config)
            return self._service

    def _refresh(self, service: Service, budget_s: float) -> None:
        """Bring the index up to date if it is due and nobody else is at it."""
        now = time.monotonic()
        is_due = self._listing_after is not None or now - self._fresh_at >= self._config.index_ttl_s
        if not is_due or now < self._paused_until or not self._refreshing.acquire(blocking=False):
            return
        try:
            if now - self._fresh_at >= self._config.index_ttl_s and (
                not self._config.journal or self._journal.read_news(service, self._index, now + budget_s)
            ):
                self._fresh_at = now
            if self._listing_after is None and now - self._listed_at >= self._config.relist_every_s:
                self._listing_after = ""
            if self._listing_after is not None:
                self._list(service, now + budget_s)
        except EXPECTED:
            # A store that is down is asked once in a while, not by each lookup.
            self._paused_until = time.monotonic() + max(self._config.index_ttl_s, _PAUSE_S)
            raise
        finally:
            self._refreshing.release()

    def _list(self, service: Service, deadline: float) -> None:
        """Advance the listing until its end or ``deadline``."""
        while self._listing_after is not None:
            if not self._listing_after:
                self._index.begin_pass()
            page, is_more = service.page(self._names.blocks, self._listing_after, PAGE_KEYS)
            rows = [(self._names.key(name), num_bytes) for name, num_bytes in page]
            self._index.add((key, num_bytes) for key, num_bytes in rows if key is not None)
            self._listing_after = page[-1][0] if is_more and page else None
            if self._listing_after is None:
                self._index.end_pass()
                self._listed_at = time.monotonic()
            elif time.monotonic() >= deadline:
                return

    def _probe(self, service: Service) -> None:
        """Find wrong settings now: the listing, and a small object there and back."""
        service.page(self._names.blocks, limit=1)
        digest = hashlib.sha256(self._context.identity.encode()).hexdigest()[:16]
        name = f"{self._names.root}/namespaces/{digest}.json"
        if self._config.probe == "read":
            self._read_probe(service, name)
            return
        service.put(name, self._context.identity.encode())
        service.get(name, len(self._context.identity.encode()))
        trial = f"{self._names.root}/probe/{os.urandom(8).hex()}"
        service.put(trial, b"flexkv")
        for failure in service.delete([trial]).values():
            raise failure
        if self._config.journal:
            self._journal.sweep(service)

    def _read_probe(self, service: Service, name: str) -> None:
        try:
            service.get(name, 1 << 20)
        except EXPECTED as exc:
            if not is_missing(exc):
                raise

    def after_fork(self) -> None:
        """In a child, before its other threads: new locks; the parent's connections are let go of."""
        self._calls = threading.Condition()
        self._refreshing = threading.Lock()
        self._num_running = 0
        service, self._service = self._service, None
        self._index.after_fork()
        self._journal.after_fork()
        if service is not None:
            service.forget()


def _sent(exchange: Exchange | None) -> Exchange:
    assert exchange is not None
    return exchange


_open_tiers: weakref.WeakSet[S3Tier] = weakref.WeakSet()


def _after_fork() -> None:
    after_fork()
    for tier in list(_open_tiers):
        tier.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def open_tier(config: S3Config, context: TierContext) -> S3Tier:
    """Open a bucket."""
    return S3Tier(config, context)
