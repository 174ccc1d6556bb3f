"""The worker's end of the handshake: takes the counters of all its ranks, or of none.

Threads: the one that made it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import SyncError
from .handshake import ACCEPTED, HEADER, NUMBER, REJECTED, check_private, has_ended, is_own

logger = logging.getLogger(__name__)

_MOST_FDS = 253
"""In one message.  Source: linux, include/net/scm.h, SCM_MAX_FD."""

_SPEAK_S = 5.0
"""A rank has all that it is to say at hand when it connects; one that is silent keeps the others waiting."""


@dataclass(eq=False)
class RankCounters:
    """The counters of one rank, as the worker has them.

    Attributes:
        rank: Index of the rank.
        counters: By counter, one descriptor a layer; owned here.
    """

    rank: int
    counters: list[list[int]]
    _connection: socket.socket = field(repr=False)

    def signal(self, counter: int, layer: int) -> None:
        """Layer ``layer`` of one load of this counter's batch is in place."""
        os.eventfd_write(self.counters[counter][layer], 1)

    def is_alive(self) -> bool:
        """Whether the rank still lives."""
        return not has_ended(self._connection)

    def close(self) -> None:
        """Close descriptors and connection.  May be called twice."""
        _close_all([fd for fds in self.counters for fd in fds])
        self.counters = []
        self._connection.close()


class CounterListener:
    """The worker's end: takes the counters of all its ranks, or none."""

    def __init__(self, path: Path, num_ranks: int, num_layers: int, num_counters: int) -> None:
        """Listen at ``path``.

        Raises:
            SyncError: another worker listens there, or the directory is not private.
        """
        check_private(path.parent)
        self.path = path
        self._num_ranks = num_ranks
        self._shape = (num_layers, num_counters)
        with ExitStack() as undo:
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._bind()
            undo.pop_all()
        logger.info(
            "[FlexKV] Eventfd server created: socket=%s, waiting for %d connection(s)", path, num_ranks
        )

    def _bind(self) -> None:
        if self.path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(self.path))
                except ConnectionRefusedError:
                    self.path.unlink()  # its owner is dead
                else:
                    raise SyncError(f"{self.path}: another transfer worker listens there")
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(3 * self._num_ranks)

    def accept(self, deadline_s: float) -> list[RankCounters]:
        """The counters of every rank, by its index.  Blocks, at most ``deadline_s`` for all of them together.

        Raises:
            SyncError: names the ranks that have not come; nothing is kept of those that have.
        """
        end = time.monotonic() + deadline_s
        found: dict[int, RankCounters] = {}
        try:
            while len(found) < self._num_ranks:
                connection = self._next(end)
                if connection is None:
                    break
                taken = self._take(connection, found, end)
                if taken is not None:
                    if taken.rank in found:
                        found[taken.rank].close()
                    found[taken.rank] = taken
        finally:
            self.close()
        missing = [rank for rank in range(self._num_ranks) if rank not in found]
        if missing:
            for taken in found.values():
                taken.close()
            what = "Deadline exceeded" if found else "No connections received"
            logger.error("[FlexKV] %s: socket=%s, missing ranks %s", what, self.path, missing)
            raise SyncError(f"{self.path}: ranks {missing} have not come in {deadline_s:g} s", ranks=missing)
        logger.info("[FlexKV] Eventfd setup complete: socket=%s, %d rank(s)", self.path, len(found))
        return [found[rank] for rank in range(self._num_ranks)]

    def _next(self, end: float) -> socket.socket | None:
        self._socket.settimeout(max(0.001, end - time.monotonic()))
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            logger.warning("[FlexKV] Timeout waiting for connection: socket=%s", self.path)
            return None
        return connection

    def _take(
        self, connection: socket.socket, found: dict[int, RankCounters], end: float
    ) -> RankCounters | None:
        """One rank's counters, acknowledged; None if it was rejected."""
        end = min(end, time.monotonic() + _SPEAK_S)
        connection.settimeout(max(0.001, end - time.monotonic()))
        fds: list[list[int]] = []
        try:
            if not is_own(connection):
                raise _Reject("another user's process")
            logger.info("[FlexKV] Accepted connection: socket=%s", self.path)
            rank = self._read_header(connection, found)
            for number in range(self._shape[1]):
                fds.append(_read_counter(connection, number, self._shape[0], end))  # noqa: PERF401 - if the next one fails, those so far are closed
            connection.sendall(ACCEPTED)
        except (_Reject, OSError) as reason:
            logger.warning("[FlexKV] a rank is rejected: socket=%s: %s", self.path, reason)
            _close_all([fd for one in fds for fd in one])
            _reject(connection)
            return None
        logger.info("[FlexKV] Received all eventfds from rank %d", rank)
        connection.settimeout(None)
        return RankCounters(rank, fds, connection)

    def _read_header(self, connection: socket.socket, found: dict[int, RankCounters]) -> int:
        header = b""
        while len(header) < HEADER.size:
            part = connection.recv(HEADER.size - len(header))
            if not part:
                raise _Reject(f"Incomplete metadata: {len(header)} of {HEADER.size} bytes")
            header += part
        rank, count, *shape = HEADER.unpack(header)
        if count != self._num_ranks or not 0 <= rank < count:
            raise _Reject(f"it is rank {rank} of {count}, and {self._num_ranks} are expected")
        if tuple(shape) != self._shape:
            raise _Reject(f"it has (layers, counters) {tuple(shape)}, and {self._shape} are expected")
        if rank in found and found[rank].is_alive():
            raise _Reject(f"rank {rank} has come already")
        return int(rank)

    def close(self) -> None:
        """Take no more ranks and remove the socket's file.  May be called twice."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            self.path.unlink(missing_ok=True)


class _Reject(Exception):  # noqa: N818 - a verdict on a rank, logged where it is caught
    """Why a rank is not taken."""


def _read_counter(connection: socket.socket, number: int, num_layers: int, end: float) -> list[int]:
    if num_layers > _MOST_FDS:
        raise _Reject(f"{num_layers} layers: one message carries {_MOST_FDS} descriptors")
    connection.settimeout(max(0.001, end - time.monotonic()))
    data, fds, flags, _ = socket.recv_fds(connection, NUMBER.size, num_layers + 1)
    is_whole = len(fds) == num_layers and not flags & socket.MSG_CTRUNC
    if is_whole and data == NUMBER.pack(number):
        return list(fds)
    _close_all(list(fds))
    raise _Reject(f"Incomplete metadata: counter {number} came with {len(fds)} descriptors of {num_layers}")


def _reject(connection: socket.socket) -> None:
    with suppress(OSError):  # it may be gone: then it needs no answer
        connection.sendall(REJECTED)
    connection.close()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
