"""Connections whose every wait has an end: an attempt to connect, a silence, and a request as a whole.

So a server that sends one byte a second is as bounded as one that sends none.

Threads: a connection belongs to one thread at a time.
"""

from __future__ import annotations

import http.client
import io
import math
import select
import socket
import ssl
import time
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

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._sock.settimeout(min(left, self._silence_s))

    def recv_into(self, buffer: Any) -> int:
        """Receive what is there, at least one byte; 0 at the end."""
        self._arm()
        return self._sock.recv_into(buffer)

    def sendall(self, data: Any) -> None:
        """Send all of ``data`` (anything with the buffer protocol) without copying it."""
        with memoryview(data) as whole, whole.cast("B") as view:
            sent = 0
            while sent < len(view):
                self._arm()
                sent += self._sock.send(view[sent:])

    def makefile(self, *_mode: str) -> io.BufferedReader:
        """A buffered reader; large reads bypass its buffer."""
        self._num_readers += 1
        return io.BufferedReader(_TimedReader(self))

    def is_quiet(self) -> bool:
        """Whether nothing is waiting to be read; an idle connection with news is over or out of step."""
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
        sock = socket.create_connection((self.host, self.port), timeout=self._limits.connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise
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
