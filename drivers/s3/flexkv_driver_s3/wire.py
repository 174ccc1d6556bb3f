"""HTTP for bulk bytes: object bodies go straight between a socket and the caller's memory.

botocore's own body path reads into new ``bytes`` objects and takes no memoryview for uploads; on
the same machine and server that costs a third of the speed (``benchmarks/s3_throughput.py``).  So
botocore signs, lists and deletes, and this module moves bodies, over ``http.client``.

Threads: ``Wire`` may be used from any thread; its list of idle connections is under ``_lock``,
held for list operations only.  An ``Exchange`` and its connection belong to one thread.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from .sockets import Connection, WireLimits

LOST = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How a connection says that the other side has ended it."""
_ERROR_BODY_BYTES = 64 << 10
_SIGNED_AT = re.compile(r"[?&]X-Amz-Date=(\d{8}T\d{6}Z)")
_TAG = re.compile(rb"<(Code|Message|Region)>([^<]{0,500})</")


class RefusedError(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        code: S3's error code, or an empty string.
        message: S3's message.
        region: The bucket's region where the server named it.
        skew_s: By how much the server's clock differs from the one that the request was signed by.
    """

    def __init__(self, status: int, code: str, message: str, region: str = "", skew_s: float = 0.0) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.region = region
        self.skew_s = skew_s
        super().__init__(f"{status} {code} {message}".strip())


class NotS3Error(Exception):
    """An answer that no S3 service gives."""


class TooLongError(Exception):
    """The object is longer than the buffer."""


class ShortBodyError(Exception):
    """The connection ended before the body did."""


class Exchange:
    """One request under way: sent when made, answered when asked.  Ends its connection on any failure."""

    def __init__(self, wire: Wire, method: str, url: str, body: memoryview | None) -> None:
        """Send the request; see ``Wire.send``."""
        self._wire = wire
        self._method = method
        parts = urlsplit(url)
        self._target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._body = body
        self.is_touched = False
        self._reply: http.client.HTTPResponse | None = None
        self._connection, self._is_reused = wire.take()
        self._guarded(self._send)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BaseException:
            self.abandon()
            raise

    def _send(self) -> None:
        connection = self._connection
        if connection.sock is None:
            connection.connect()
        connection.set_deadline()
        try:
            connection.request(self._method, self._target, self._body)
        except LOST:
            # The server may have answered before it had read the body: the answer says why.
            return

    def _response(self) -> http.client.HTTPResponse:
        self._connection.set_deadline()
        try:
            return self._connection.getresponse()
        except LOST:
            if not self._is_reused:
                raise
        # The server had closed the idle connection while the request was on its way, so it was not
        # begun: once more, on a connection of its own.  All requests here may be repeated.
        self._connection.close()
        self._connection, self._is_reused = self._wire.connection(), False
        self._send()
        return self._connection.getresponse()

    def _accepted(self) -> http.client.HTTPResponse:
        response = self._reply = self._response()
        if 200 <= response.status < 300:
            return response
        raw = response.read(_ERROR_BODY_BYTES)
        found = {name.decode(): text.decode(errors="replace") for name, text in _TAG.findall(raw)}
        region = found.get("Region") or str(response.headers.get("x-amz-bucket-region", ""))
        self._release(response)
        skew_s = _skew_s(self._target, str(response.headers.get("Date", "")))
        raise RefusedError(response.status, found.get("Code", ""), found.get("Message", ""), region, skew_s)

    def read_into(self, view: memoryview) -> int:
        """Receive the body into the front of ``view`` (writable uint8); returns its length.

        Raises:
            RefusedError: the server answered with an error; nothing was written.
            TooLongError: the body is longer than ``view``; nothing was written if the server said so.
            ShortBodyError, OSError, http.client.HTTPException: if ``is_touched``, bytes were written.
        """
        return int(self._guarded(lambda: self._read_into(view)))

    def _read_into(self, view: memoryview) -> int:
        response = self._accepted()
        expected = response.length
        if expected is not None and expected > len(view):
            raise TooLongError(f"object of {expected} B, buffer of {len(view)} B")
        self.is_touched = True
        num_read = 0
        while num_read < len(view):
            got = response.readinto(view[num_read:])
            if not got:
                break
            num_read += got
        if expected is not None and num_read < expected:
            raise ShortBodyError(f"the connection ended after {num_read} of {expected} B")
        if expected is None and response.read(1):
            raise TooLongError(f"object longer than the buffer of {len(view)} B")
        self._release(response)
        return num_read

    def finish(self) -> http.client.HTTPMessage:
        """Wait for the answer to a request whose body does not matter; returns its headers.

        Raises:
            RefusedError, OSError, http.client.HTTPException.
        """
        headers: http.client.HTTPMessage = self._guarded(self._finish)
        return headers

    def _finish(self) -> http.client.HTTPMessage:
        response = self._accepted()
        response.read(_ERROR_BODY_BYTES)
        self._release(response)
        return response.headers

    def _release(self, response: http.client.HTTPResponse) -> None:
        if response.isclosed() and not response.will_close:
            self._wire.give(self._connection)
        else:
            response.close()
            self._connection.close()

    def abandon(self) -> None:
        """End the connection: nothing writes into the caller's buffer afterwards."""
        if self._reply is not None:
            self._reply.close()
        self._connection.close()


def _skew_s(target: str, date: str) -> float:
    """Seconds between a signature's time and an answer's; 0 where one of them is not told."""
    signed = _SIGNED_AT.search(target)
    try:
        answered = parsedate_to_datetime(date)
    except ValueError:
        return 0.0
    if signed is None or answered.tzinfo is None:
        return 0.0
    at = datetime.strptime(f"{signed[1]}+0000", "%Y%m%dT%H%M%SZ%z")
    return abs((answered - at).total_seconds())


class Wire:
    """Connections to one endpoint and bucket."""

    def __init__(
        self,
        base_url: str,
        sign: Callable[[str, str], str],
        tls: ssl.SSLContext | None,
        limits: WireLimits,
    ) -> None:
        """No connection yet.

        Args:
            base_url: ``scheme://host[:port][/bucket]``, without a slash at its end.
            sign: ``(method, url) -> url with a signature``.
            tls: Context for ``https``, None for ``http``.
            limits: Waits and the number of idle connections.
        """
        parts = urlsplit(base_url)
        self._base_url = base_url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if tls is not None else 80)
        self._sign = sign
        self._tls = tls
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False

    def send(self, method: str, name: str, body: memoryview | None = None, query: str = "") -> Exchange:
        """Begin a request for the object ``name``; the answer is collected from the result.

        Raises:
            OSError: no connection, or the request could not be sent.
        """
        url = f"{self._base_url}/{name}" + (f"?{query}" if query else "")
        return Exchange(self, method, self._sign(method, url), body)

    def connection(self) -> Connection:
        """A new connection, not connected yet."""
        return Connection(self._host, self._port, self._tls, self._limits)

    def take(self) -> tuple[Connection, bool]:
        """An idle connection that is still good (and True), or a new one."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.is_reusable():
                return connection, True
            connection.close()
        return self.connection(), False

    def give(self, connection: Connection) -> None:
        """Take a connection back whose answer was read to its end."""
        connection.idle_since = time.monotonic()
        with self._lock:
            is_kept = not self._is_closed and len(self._idle) < self._limits.max_idle
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def forget(self) -> None:
        """In a child after a fork: close its copies of the parent's idle connections."""
        self._lock = threading.Lock()
        self.close()

    def close(self) -> None:
        """Close idle connections; those under way are closed when they come back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
