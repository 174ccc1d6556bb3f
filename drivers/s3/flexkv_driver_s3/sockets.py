"""Connections whose every wait has an end: an attempt to connect, a silence, and a request as a whole.

So a server that sends one byte a second is as bounded as one that sends none.

A plain socket is blocking, with the kernel's own time-outs: a whole body is one system call, and its
thread asks for the interpreter lock once.  With Python's time-outs each piece that has come would
be two calls.  A TLS socket keeps those.

Threads: a connection belongs to one thread at a time.
"""

from __future__ import annotations

import http.client
import io
import math
import select
import socket
import ssl
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

IDLE_S = 30.0
"""Idle connections are not used again after this: balancers forget them silently after 60 s or more."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """How long to wait, in seconds, and how many idle connections to keep."""

    connect_s: float
    silence_s: float
    request_s: float
    max_idle: int


class _TimedReader(io.RawIOBase):
    """What ``http.client`` reads from: a socket whose every receive is timed."""

    def __init__(self, sock: TimedSocket) -> None:
        self._timed = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._timed.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._timed.reader_closed()


class TimedSocket:
    """The part of a socket that ``http.client`` uses, with a silence limit and a deadline."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        """Take over ``sock``."""
        self._sock = sock
        self._silence_s = silence_s
        self._num_readers = 0
        self._is_closing = False
        self.deadline = math.inf
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        if self._is_plain:
            sock.settimeout(None)

    def _arm(self, direction: int) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        limit = min(left, self._silence_s)
        if not self._is_plain:
            self._sock.settimeout(limit)
        elif limit != self._limits[direction]:
            seconds, micros = divmod(math.ceil(limit * 1e6), 1_000_000)
            self._sock.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", seconds, micros))
            self._limits[direction] = limit

    def recv_into(self, buffer: Any) -> int:
        """Receive at least one byte; 0 at the end.

        A buffer that is longer than a reader's own is one for a body, which fits it: then all of it,
        or what comes until the socket's silence or the request's time ends.
        """
        self._arm(socket.SO_RCVTIMEO)
        is_body = self._is_plain and len(buffer) > io.DEFAULT_BUFFER_SIZE
        try:
            return self._sock.recv_into(buffer, len(buffer), socket.MSG_WAITALL if is_body else 0)
        except BlockingIOError as exc:
            raise TimeoutError("timed out") from exc

    def sendall(self, data: Any) -> None:
        """Send all of ``data`` (anything with the buffer protocol) without copying it."""
        with memoryview(data) as whole, whole.cast("B") as view:
            sent = 0
            while sent < len(view):
                self._arm(socket.SO_SNDTIMEO)
                try:
                    sent += self._sock.send(view[sent:])
                except BlockingIOError as exc:
                    raise TimeoutError("timed out") from exc

    def makefile(self, *_mode: str) -> io.BufferedReader:
        """A buffered reader; large reads bypass its buffer."""
        self._num_readers += 1
        return io.BufferedReader(_TimedReader(self))

    def is_quiet(self) -> bool:
        """Whether nothing is waiting to be read; an idle connection with news is over or out of step."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():  # decrypted already
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        return not poll.poll(0)

    def reader_closed(self) -> None:
        """A reader made by ``makefile`` is done."""
        self._num_readers -= 1
        if self._is_closing:
            self.close()

    def close(self) -> None:
        """Close the socket when no reader is left, as sockets do (a last answer is read after this)."""
        self._is_closing = True
        if self._num_readers <= 0:
            self._sock.close()


class Connection(http.client.HTTPConnection):
    """One connection to the endpoint, timed."""

    sock: Any

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, limits: WireLimits) -> None:
        """Not connected yet."""
        super().__init__(host, port)
        self.default_port = 443 if tls is not None else 80
        self._tls = tls
        self._limits = limits
        self.idle_since = 0.0

    def connect(self) -> None:
        with ExitStack() as undo:
            address = (self.host, self.port)
            sock = undo.enter_context(socket.create_connection(address, timeout=self._limits.connect_s))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self.host)
            undo.pop_all()
        self.sock = TimedSocket(sock, self._limits.silence_s)

    def set_deadline(self) -> None:
        """Give the request, or what is left of it, its full time from now on."""
        if self.sock is not None:
            self.sock.deadline = time.monotonic() + self._limits.request_s

    def is_reusable(self) -> bool:
        """Whether another request may be sent."""
        return (
            self.sock is not None
            and time.monotonic() - self.idle_since < IDLE_S
            and bool(self.sock.is_quiet())
        )
