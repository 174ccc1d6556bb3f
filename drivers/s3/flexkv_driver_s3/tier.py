"""Blocks as objects in a bucket.

What libraries raise is translated by one table, in ``errors``.

Threads: any thread may call.  ``_calls`` (a condition with its lock) covers ``_service``,
``_num_running`` and ``_is_closed``; nothing that waits for the network is done under it.  ``_is_suspect`` is
set and cleared by any thread without a lock: its latest writer has the latest news.
After a fork the child makes locks, connections and a client of its own, before any other thread.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

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

from .batch import Batch, CallFailure
from .catalog import Catalog
from .config import S3Config
from .errors import EXPECTED, fault_of, is_missing
from .exchange import Exchange
from .names import names_of
from .probe import probe
from .service import Service, after_fork

_MAX_BATCH = 64
_MAX_LOOKUP = 4096
"""Lookups are answered from memory: one call for a long prompt."""
_DOWN = (Status.UNAVAILABLE, Status.TIMEOUT)
_FAILURES: tuple[type[Exception], ...] = (CallFailure, *EXPECTED)


class S3Tier(Tier):
    """One bucket, one prefix, one layout."""

    def __init__(self, config: S3Config, context: TierContext) -> None:
        """Ask the store what ``config.probe`` says, and list what is there.

        Raises:
            TierUnavailableError, TierTimeoutError, TierAccessError, TierError: in one line, with the mend.
        """
        self._config = config
        self._name = context.name
        self._names = names_of(config.prefix, context.fingerprint, config.shard_chars)
        self._catalog = Catalog(config, self._names, context.name)
        self._calls = threading.Condition()
        self._service: Service | None = None
        self._num_running = 0
        self._is_closed = False
        self._is_suspect = False
        self.capabilities = TierCapabilities(
            persistent=True,
            shared=True,
            max_batch=_MAX_BATCH,
            max_lookup=_MAX_LOOKUP,
            max_concurrency=config.max_concurrency,
        )
        _open_tiers.add(self)
        if config.probe != "none":
            with ExitStack() as undo:
                undo.callback(self.close)
                with self._call("open") as service:
                    probe(service, config, self._names, context.identity)
                    self._catalog.fill(service)
                undo.pop_all()

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Answer from the index; now and then one call brings it up to date first.

        A block that another process stored less than ``index_ttl_s`` ago, or that the listing has not
        come to yet, is a miss.  After a call that failed, lookups ask the store first, until it answers: a
        store that is down must not look healthy to a breaker for what is remembered of it.
        """
        with self._call("lookup", len(keys)) as service:
            if self._is_suspect:
                service.page(self._names.blocks, limit=1)
                self._is_suspect = False
            self._catalog.refresh(service)
        return [
            MISS if num_bytes is None else Outcome(Status.OK, num_bytes)
            for num_bytes in self._catalog.lengths(keys)
        ]

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        asked_at = time.time()
        with self._call("load", len(keys)) as service:
            outcomes = Batch(
                len(keys),
                self._config.requests_per_call,
                lambda i: service.wire.send("GET", self._names.block(keys[i])),
                lambda i, exchange: loaded(exchange.read_into(into[i])),
            ).run()
        self._note(outcomes)
        rows = list(zip(keys, outcomes, strict=True))
        self._catalog.found([(key, row.num_bytes) for key, row in rows if row.is_ok])
        self._catalog.missed([key for key, row in rows if row.status is Status.MISS], asked_at)
        return outcomes

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        with self._call("store", len(keys)) as service:
            outcomes = self._put(service, keys, values)
            self._note(outcomes)
            rows = zip(keys, outcomes, strict=True)
            self._catalog.stored(service, [(key, row.num_bytes) for key, row in rows if row.is_ok])
        return outcomes

    def _put(self, service: Service, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        names = [self._names.block(key) for key in keys]

        def send(i: int) -> Exchange:
            if len(values[i]) > self._config.multipart_above:
                return service.begin_parts(names[i])
            return service.wire.send("PUT", names[i], values[i])

        def receive(i: int, exchange: Exchange) -> Outcome:
            if len(values[i]) > self._config.multipart_above:
                service.put_parts(exchange, names[i], values[i])
            else:
                exchange.finish()
            return Outcome(Status.OK, len(values[i]))

        return Batch(len(keys), self._config.requests_per_call, send, receive).run()

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Remove objects; ``OK`` for those that the index knew (the store does not say)."""
        names = [self._names.block(key) for key in keys]
        known = self._catalog.lengths(keys)
        with self._call("evict", len(keys)) as service:
            failures = service.delete(names)
            kept = {name for name, failure in failures.items() if not is_missing(failure)}
            gone = [key for key, name in zip(keys, names, strict=True) if name not in kept]
            self._catalog.removed(service, gone)
        return [_evicted(failures.get(name), size) for name, size in zip(names, known, strict=True)]

    def usage(self) -> TierUsage:
        num_blocks, used_bytes = self._catalog.totals()
        return TierUsage(num_blocks, used_bytes, 0)

    def check_health(self) -> None:
        """Ask the store for a listing of one name."""
        with self._call("lookup") as service:
            service.page(self._names.blocks, limit=1)
            self._is_suspect = False

    def close(self) -> None:
        with self._calls:
            self._is_closed = True
            self._calls.wait_for(lambda: self._num_running == 0)
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._is_suspect = any(row.status in _DOWN for row in outcomes)

    @contextmanager
    def _call(self, operation: str, num_keys: int = 0) -> Iterator[Service]:
        """Count a call, give it the service, and translate what it raises."""
        with self._calls:
            if self._is_closed:
                raise TierClosedError(f"tier {self._name} is closed", tier=self._name, operation=operation)
            self._num_running += 1
        try:
            yield self._get_service()
        except _FAILURES as exc:
            fault, cause = (exc.fault, exc.cause) if isinstance(exc, CallFailure) else (fault_of(exc), exc)
            self._is_suspect = True
            line = f"tier {self._name}: {fault.line}"
            raise fault.error(line, tier=self._name, operation=operation, num_keys=num_keys) from cause
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

    def after_fork(self) -> None:
        """In a child, before its other threads: new locks; the parent's connections are let go of."""
        self._calls = threading.Condition()
        self._num_running = 0
        service, self._service = self._service, None
        self._catalog.after_fork()
        if service is not None:
            service.forget()


def _evicted(failure: BaseException | None, known_bytes: int | None) -> Outcome:
    if failure is not None and not is_missing(failure):
        fault = fault_of(failure)
        return failed(fault.status, fault.line)
    return MISS if known_bytes is None or failure is not None else DONE


_open_tiers: weakref.WeakSet[S3Tier] = weakref.WeakSet()


def _after_fork() -> None:
    after_fork()
    for tier in list(_open_tiers):
        tier.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def open_tier(config: S3Config, context: TierContext) -> S3Tier:
    """Open a bucket."""
    return S3Tier(config, context)
