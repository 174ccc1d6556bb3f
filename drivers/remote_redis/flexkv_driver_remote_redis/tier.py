"""Blocks as values of a Redis server: one self-describing value a block, shared by all instances.

What exceptions and replies mean stands in ``faults``; bytes move in ``wire``; ``servers`` knows
where a key lives.  A call that fails for every key raises; where some keys were answered, each
has its own outcome.  Nothing is retried here.

Threads: any, up to ``connections`` at once; each call has a connection of its own.  ``_guard``
covers the count of running calls and ``_is_closed``.  After a fork the child forgets what it
inherited, without touching the parent's sockets, and connects anew.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from flexkv_core import (
    BlockKey,
    Outcome,
    Status,
    Tier,
    TierCapabilities,
    TierClosedError,
    TierContext,
    TierError,
    UnsupportedOperationError,
    failed,
)

from .call import Call, Talk
from .config import RedisConfig
from .faults import CAUGHT, ERRORS
from .meaning import as_length, as_load, as_removal, as_store
from .servers import Servers, open_servers
from .survey import Survey, advice, take_survey
from .wire import Wire

logger = logging.getLogger(__name__)

MAX_BATCH = 128
"""Long enough to hide round trips, short enough that a failed call loses little work."""

MAX_LOOKUP = 4096
"""A key costs about 110 bytes to ask for: one round trip for a prompt of 256k tokens."""


class RedisTier(Tier):
    """Values under ``prefix`` and the key's 64 hex digits."""

    def __init__(self, config: RedisConfig, context: TierContext) -> None:
        """Look at the server, if it is there.

        Raises:
            UnsupportedOperationError: a block is longer than a value may be.
            TierUnavailableError, TierTimeoutError, TierAccessError: the server cannot be used, and
                ``required`` is set.
        """
        if context.value_bytes > config.max_value:
            raise UnsupportedOperationError(
                f"tier {context.name}: a block has {context.value_bytes} bytes, a value at most "
                f"{config.max_value} (max_value): lower block_tokens",
                tier=context.name,
                operation="open",
            )
        self._config = config
        self._context = context
        self._prefix = config.prefix.encode()
        self._ttl_ms = int((config.ttl_s or 0) * 1000)
        self._survey: Survey | None = None
        self._is_closed = False
        self._start_afresh()
        _TIERS.add(self)
        self._look()
        self.capabilities = TierCapabilities(
            persistent=True,
            shared=True,
            expires=bool(self._ttl_ms) or self._survey is None or self._survey.may_evict,
            max_batch=MAX_BATCH,
            max_lookup=MAX_LOOKUP,
            max_concurrency=config.connections,
            max_value_bytes=config.max_value,
        )

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._run("lookup", keys, _counting(b"STRLEN", as_length))

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        renew_ms = self._ttl_ms if self._config.ttl_refresh else 0

        def talk(wire: Wire, names: Sequence[bytes], places: Sequence[int]) -> Iterable[Outcome]:
            views = [into[place] for place in places]
            replies = wire.read_values(names, views, renew_ms)
            return map(as_load, replies, map(len, views))

        return self._run("load", keys, talk)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        def talk(wire: Wire, names: Sequence[bytes], places: Sequence[int]) -> Iterable[Outcome]:
            return map(as_store, wire.write_values(names, [values[i] for i in places], self._ttl_ms))

        if any(len(value) > self._config.max_value for value in values):
            return self._store_what_fits(keys, values)
        return self._run("store", keys, talk)

    def _store_what_fits(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        limit = self._config.max_value
        fits = [i for i, value in enumerate(values) if len(value) <= limit]
        outcomes = [failed(Status.INVALID, f"value longer than {limit} B (max_value)")] * len(keys)
        stored = self.store([keys[i] for i in fits], [values[i] for i in fits])
        for place, outcome in zip(fits, stored, strict=True):
            outcomes[place] = outcome
        return outcomes

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._run("evict", keys, _counting(b"UNLINK", as_removal))

    def check_health(self) -> None:
        (outcome,) = self.lookup([bytes(32)])
        if outcome.status is Status.INVALID:
            raise self._error(outcome, "lookup", 1)
        if self._survey is None:
            self._take_survey()

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            self._guard.wait_for(lambda: not self._num_running)
        _TIERS.discard(self)
        self._servers.close()

    def _run(self, operation: str, keys: Sequence[BlockKey], talk: Talk) -> list[Outcome]:
        if not keys:
            return []
        call = Call(self._names(keys), talk)
        with self._running(operation) as servers:
            call.run(servers)
        failure = call.same_failure()
        if failure is not None and failure.status in ERRORS:
            raise self._error(failure, operation, len(keys)) from call.cause
        return call.outcomes

    def _error(self, failure: Outcome, operation: str, num_keys: int) -> TierError:
        where = f"tier {self._context.name}: {self._config.address}"
        kind = ERRORS.get(failure.status, TierError)
        return kind(
            f"{where}: {failure.reason}", tier=self._context.name, operation=operation, num_keys=num_keys
        )

    def _names(self, keys: Sequence[BlockKey]) -> list[bytes]:
        # Hex, so that people, ACL patterns and cluster slots meet no odd byte.
        return [self._prefix + digits for digits in map(hexlify, keys)]

    @contextmanager
    def _running(self, operation: str) -> Iterator[Servers]:
        with self._guard:
            if self._is_closed:
                name = self._context.name
                raise TierClosedError(f"tier {name} is closed", tier=name, operation=operation)
            self._num_running += 1
            servers = self._servers
        try:
            yield servers
        finally:
            with self._guard:
                self._num_running -= 1
                if not self._num_running:
                    self._guard.notify_all()

    def _start_afresh(self) -> None:
        """No connection, no running call: at the start, and in a child after a fork."""
        self._guard = threading.Condition()
        self._num_running = 0
        self._servers = open_servers(self._config)

    def _look(self) -> None:
        try:
            self.check_health()
        except TierError as exc:
            if self._config.required:
                raise
            logger.warning("[FlexKV] %s; the tier starts down and comes back by itself", exc)

    def _take_survey(self) -> None:
        name, address = self._context.name, self._config.address
        try:
            with self._running("open") as servers:
                survey = self._survey = take_survey(servers.one_client())
        except CAUGHT as exc:
            logger.info("[FlexKV] tier %s: %s does not tell its settings (%s)", name, address, exc)
            return
        logger.info(
            "[FlexKV] tier %s: Redis %s (%s) at %s, %d connections",
            name,
            survey.version,
            survey.role,
            address,
            self._config.connections,
        )
        for line in advice(survey, self._config, self._context.value_bytes):
            logger.warning("[FlexKV] tier %s: Redis at %s: %s", name, address, line)


def open_tier(config: RedisConfig, context: TierContext) -> RedisTier:
    """Open a tier; by default also while its server is away."""
    return RedisTier(config, context)


def _counting(verb: bytes, meaning: Callable[[bytes], Outcome]) -> Talk:
    """A conversation of one command and one reply line per name, all in one round trip."""

    def talk(wire: Wire, names: Sequence[bytes], _places: Sequence[int]) -> Iterable[Outcome]:
        lines = wire.ask(verb, names)
        # Few different lines, many keys: each is interpreted once.
        known = {line: meaning(line) for line in set(lines)}
        return list(map(known.__getitem__, lines))

    return talk


_TIERS: weakref.WeakSet[RedisTier] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for tier in list(_TIERS):
        tier._start_afresh()  # noqa: SLF001 - this module's own class


os.register_at_fork(after_in_child=_forget_after_fork)
