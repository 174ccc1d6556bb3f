"""One request and its answer: object bodies go straight between a socket and the caller's memory.

Threads: an ``Exchange`` and its connection belong to one thread.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .refusals import ERROR_BODY_BYTES, ShortBodyError, TooLongError, check_form, check_whole, refusal

if TYPE_CHECKING:
    from .wire import Wire

LOST = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How a connection says that the other side has ended it."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Exchange:
    """One request under way: sent when made, answered when asked.  Ends its connection on any failure."""

    def __init__(
        self, wire: Wire, method: str, target: str, body: memoryview | None, headers: Mapping[str, str]
    ) -> None:
        """Send the request; see ``Wire.send``."""
        self._wire = wire
        self._method = method
        self._target = target
        self._body = body
        self._headers = headers
        self.is_touched = False
        self._is_over = False
        self._reply: http.client.HTTPResponse | None = None
        self._connection, self._is_reused = wire.take()
        self._guarded(self._send)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BaseException as exc:
            # Whatever ended it, an interrupt too: the rest of the answer must not be the next request's.
            self.abandon()
            if self._is_reused and isinstance(exc, TimeoutError):
                # A balancer that has forgotten one connection has forgotten those beside it.
                self._wire.drop_idle()
            raise

    def _send(self) -> None:
        connection = self._connection
        if connection.sock is None:
            connection.connect()
        connection.set_deadline()
        try:
            connection.request(self._method, self._target, self._body, self._headers)
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
        check_form(response)
        if 200 <= response.status < 300:
            return response
        raw = response.read(ERROR_BODY_BYTES)
        if response.length and len(raw) < ERROR_BODY_BYTES:  # half a page may look like an answer of S3's
            raise ShortBodyError(f"the connection ended after {len(raw)} B of an error's page")
        self._release(response)
        raise refusal(response, raw, self._target)

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
        check_whole(response)
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
        response.read(ERROR_BODY_BYTES)
        self._release(response)
        return response.headers

    def _release(self, response: http.client.HTTPResponse) -> None:
        self._is_over = True
        if response.isclosed() and not response.will_close:
            self._wire.give(self._connection)
        else:
            response.close()
            self._connection.close()

    def abandon(self) -> None:
        """End the connection: nothing writes into the caller's buffer afterwards.

        One that was given back is another request's by now, perhaps another thread's.
        """
        if self._is_over:
            return
        if self._reply is not None:
            self._reply.close()
        self._connection.close()
