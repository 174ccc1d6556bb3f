"""Bytes in and out of a connected socket, each wait bounded.

A plain socket is made blocking, with the kernel's own time-outs, for as long as a stream holds it:
then ``MSG_WAITALL`` takes a whole value in one call, and a thread that loads 8 MB asks for the
interpreter lock once and not hundreds of times.  A TLS socket keeps Python's time-outs and loops.

The kernel bounds one call's waiting; a peer that sends a byte now and then is bounded by a deadline
for the whole of what ``_begin`` began, looked at between the calls.

Threads: one at a time.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
from collections.abc import Sequence
from time import monotonic

from .wire import ProtocolError

CRLF = b"\r\n"
INBOX_BYTES = 16 << 10
PEEK_BYTES = 64
"""Asked for where a line is due.  On TLS, what comes with it of a value is copied once more."""

_DRAIN_BYTES = 1 << 20

_UNSENT_BYTES = 128 << 10
"""So much may wait in this side's kernel.  Megabytes there would have left the processor's caches
before they are sent, which costs a fifth of the speed; what is under way on the network is not bounded."""


class SocketStream:
    """A socket, and a small inbox for lines."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take a connected socket on which nothing is under way."""
        self._sock = sock
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._inbox = bytearray(INBOX_BYTES)
        self._room = memoryview(self._inbox)
        self._start = self._stop = 0
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._wait_all = socket.MSG_WAITALL if self._is_plain else 0
        self._old_timeout = sock.gettimeout()
        if self._is_plain:
            sock.settimeout(None)
            self._limit_waits(timeout_s)
        else:
            sock.settimeout(timeout_s)

    def end(self) -> None:
        """Leave the socket as it was."""
        if self._is_plain:
            self._limit_waits(0)
        self._sock.settimeout(self._old_timeout)

    @property
    def is_quiet(self) -> bool:
        """Whether this is a plain socket, still connected, and nothing has come that nobody asked for."""
        if not self._is_plain or self._start != self._stop:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _begin(self) -> None:
        self._deadline = monotonic() + self._timeout_s

    def _check_deadline(self) -> None:
        if monotonic() > self._deadline:
            raise TimeoutError(f"not done after {self._timeout_s:g} s")

    def _line(self) -> bytes:
        while True:
            end = self._inbox.find(CRLF, self._start, self._stop)
            if end >= 0:
                line = bytes(self._room[self._start : end])
                self._start = end + 2
                return line
            self._fill_inbox(self._stop - self._start + 1)

    def _fill(self, view: memoryview) -> None:
        have = min(len(view), self._stop - self._start)
        if have:
            view[:have] = self._take(have)
            view = view[have:]
        while view:
            self._check_deadline()
            view = view[self._receive(view, self._wait_all) :]

    def _drain(self, size: int, view: memoryview) -> None:
        rubbish = view if len(view) >= _DRAIN_BYTES else memoryview(bytearray(_DRAIN_BYTES))
        while size:
            step = min(size, len(rubbish))
            self._fill(rubbish[:step])
            size -= step

    def _fill_inbox(self, at_least: int) -> None:
        """Have at least so many unread bytes; never reads far into a value that may follow."""
        while self._stop - self._start < at_least:
            if self._start:
                left = self._take(self._stop - self._start)
                self._start, self._stop = 0, len(left)
                self._room[: len(left)] = left
            if self._stop + PEEK_BYTES > len(self._inbox):
                raise ProtocolError("a line without an end")
            self._stop += self._receive(self._room[self._stop : self._stop + PEEK_BYTES])
            if self._stop < at_least:
                self._check_deadline()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._room[self._start : self._start + count])
        self._start += count
        return taken

    def _look(self) -> bytes:
        try:
            head = self._sock.recv(PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError as exc:
            raise self._silence() from exc
        self._some(len(head))
        return head

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        try:
            count = self._sock.recv_into(view, len(view), flags)
        except (BlockingIOError, TimeoutError) as exc:
            raise self._silence() from exc
        return self._some(count)

    def _receive_into(self, views: list[memoryview]) -> int:
        try:
            count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as exc:
            raise self._silence() from exc
        return self._some(count)

    def _some(self, count: int) -> int:
        if not count:
            raise ConnectionResetError("the server closed the connection in the middle of an answer")
        return count

    def _silence(self) -> TimeoutError:
        return TimeoutError(f"no answer for {self._timeout_s:g} s")

    def _send_shallow(self) -> None:
        """From now on keep little unsent in the kernel; for bulk.  Nothing that needs undoing."""
        if self._sock.family in (socket.AF_INET, socket.AF_INET6):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def _send(self, *parts: bytes | memoryview) -> None:
        self._begin()
        left = list(parts)
        while True:
            done = self._send_some(left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if not left:
                return
            left[0] = memoryview(left[0])[done:]
            self._check_deadline()

    def _send_some(self, parts: Sequence[bytes | memoryview]) -> int:
        try:
            return self._sock.sendmsg(parts) if self._is_plain else self._sock.send(parts[0])
        except (BlockingIOError, TimeoutError) as exc:
            raise TimeoutError(f"the server took nothing for {self._timeout_s:g} s") from exc
        except ConnectionError as exc:
            self._explain(exc)
            raise

    def _explain(self, cause: ConnectionError) -> None:
        """The peer closed while it was sent to: raise something better than ``cause``, or return."""

    def _limit_waits(self, seconds: float) -> None:
        """Kernel time-outs for each further call; 0 for none."""
        limit = struct.pack("@ll", *divmod(math.ceil(seconds * 1e6), 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
