"""HTTP for bulk bytes: connections, and the requests that are sent over them.

botocore's own body path reads into new ``bytes`` objects and takes no memoryview for uploads; on
the same machine and server that costs a third of the speed (``benchmarks/s3_throughput.py``).  So
botocore finds the keys, and requests go out from here, over ``http.client``.

Threads: any; the list of idle connections is under ``_lock``, held for list operations only.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from .exchange import NO_HEADERS, Exchange
from .sockets import Connection, WireLimits


class Wire:
    """Connections to one endpoint and bucket."""

    def __init__(
        self,
        base_url: str,
        sign: Callable[[str, str, str], str],
        tls: ssl.SSLContext | None,
        limits: WireLimits,
    ) -> None:
        """No connection yet.

        Args:
            base_url: ``scheme://host[:port][/bucket]``, without a slash at its end.
            sign: ``(method, path, query) -> path and query with a signature``.
            tls: Context for ``https``, None for ``http``.
            limits: Waits and the number of idle connections.
        """
        parts = urlsplit(base_url)
        self._path = parts.path
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if tls is not None else 80)
        self._sign = sign
        self._tls = tls
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False

    def send(
        self,
        method: str,
        name: str,
        body: memoryview | None = None,
        query: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Exchange:
        """Begin a request for the object ``name``; the answer is collected from the result.

        Raises:
            OSError: no connection, or the request could not be sent.
        """
        return Exchange(self, method, self._sign(method, f"{self._path}/{name}", query), body, headers)

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

    def drop_idle(self) -> None:
        """Close the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close idle connections; those under way are closed when they come back."""
        with self._lock:
            self._is_closed = True
        self.drop_idle()
