"""RESP on a connected socket: bulk bytes go straight between the socket and the caller's buffers.

redis-py connects, authenticates and pools; its parser would copy each value two or three times.
Here a value is one ``sendmsg`` from the caller's memory, or one ``recv_into`` into it.

A plain socket is made blocking, with the kernel's own time-outs, while a wire holds it: then
``MSG_WAITALL`` takes a whole value in one call, and a thread that loads 8 MB asks for the
interpreter lock once and not hundreds of times.  A TLS socket keeps Python's time-outs and loops.

Every reply is counted.  A wire whose ``num_pending`` is not 0 at the end has lost its place in
the stream: its connection is dropped, never reused, so no answer is taken for another's.

Threads: one at a time.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from time import monotonic

from .wire import ProtocolError, Refusal, RefusedError, Reply

_INBOX_BYTES = 16 << 10
_PEEK_BYTES = 64
"""Asked for where a value's header is due: what comes with it of the value is copied once more."""

_WINDOW_BYTES = 256 << 10
"""Values asked for ahead.  Small ones hide the round trip; large ones would pile up in the server's
memory and fall out of its caches, which costs it up to twice the time (see the benchmark)."""

_MAX_AHEAD = 16
_CRLF = b"\r\n"
_SHORTEST_REPLY = len(":0\r\n")
_FEW_BYTES = 1024
_DRAIN_BYTES = 1 << 20


class RawWire:
    """A conversation on the connection's own socket."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take a connected socket on which nothing is under way."""
        self._sock = sock
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._inbox = bytearray(_INBOX_BYTES)
        self._room = memoryview(self._inbox)
        self._start = self._stop = 0
        self.num_pending = 0
        self.is_filling = False
        self.is_spent = False
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._wait_all = socket.MSG_WAITALL if self._is_plain else 0
        self._old_timeout = sock.gettimeout()
        if self._is_plain:
            sock.settimeout(None)
            self._limit_waits(timeout_s)
        else:
            sock.settimeout(timeout_s)

    def end(self) -> None:
        if self._is_plain:
            self._limit_waits(0)
        self._sock.settimeout(self._old_timeout)

    def ask(self, verb: bytes, names: Sequence[bytes]) -> list[bytes]:
        if not names:
            return []
        self.num_pending = len(names)
        self._send(_commands(verb, names))
        self._begin()
        replies = bytearray()
        while missing := len(names) - replies.count(_CRLF):
            replies += self._some_replies(missing, len(replies.rpartition(_CRLF)[2]))
            self._check_deadline()
        lines = bytes(replies).split(_CRLF)
        if len(lines) != len(names) + 1 or lines.pop():
            raise ProtocolError(f"more than {len(names)} replies")
        self.num_pending = 0
        return lines

    def read_values(
        self, names: Sequence[bytes], into: Sequence[memoryview], renew_ms: int = 0
    ) -> Iterator[Reply]:
        verb, tail = (b"GETEX", (b"PX", b"%d" % renew_ms)) if renew_ms else (b"GET", ())
        ahead = _ahead(into)
        asked = 0
        for i, view in enumerate(into):
            if asked - i <= ahead // 2 and asked < len(names):
                # Ask again before the last one asked for is read, so that the server never idles.
                upto = min(i + ahead, len(names))
                self.num_pending += upto - asked
                self._send(_commands(verb, names[asked:upto], tail))
                asked = upto
            reply = self._value(view)
            self.num_pending -= 1
            yield reply

    def write_values(
        self, names: Sequence[bytes], values: Sequence[memoryview], ttl_ms: int = 0
    ) -> Iterator[Reply]:
        ahead = max(2, _ahead(values))  # the server keeps only what it was asked to keep
        answered = 0
        refusal: Refusal | None = None
        for name, value in zip(names, values, strict=True):
            self.num_pending += 1
            self._send(*_set_command(name, value, ttl_ms))
            if self.num_pending >= ahead:
                reply = self._status(len(values[answered]))
                answered += 1
                yield reply
                if isinstance(reply, Refusal) and not reply.is_redirect:
                    refusal = reply
                    break
        while self.num_pending:
            yield self._status(len(values[answered]))
            answered += 1
        for _ in range(answered, len(values)):
            yield refusal

    def _some_replies(self, missing: int, begun: int) -> memoryview:
        """What has come of so many short replies, the first of which has begun with so many bytes."""
        surely = missing * _SHORTEST_REPLY - begun
        room = self._room
        if surely > _FEW_BYTES:  # then sleep until these are there, and wake up once
            room = room[:surely]
            return room[: self._receive(room, self._wait_all)]
        return room[: self._receive(room)]

    def _value(self, view: memoryview) -> int | Refusal | None:
        self._begin()
        line = self._line()
        kind = line[:1]
        if kind == b"-":
            return Refusal(line[1:].decode("utf-8", "replace"))
        if line in (b"$-1", b"_"):
            return None
        if kind != b"$" or not line[1:].isdigit():
            raise ProtocolError(f"an answer that is no value: {line[:40]!r}")
        size = int(line[1:])
        self.is_filling = True
        if size > len(view):
            self._drain(size, view)
        else:
            self._fill(view[:size], to_its_end=self._is_plain)
        self._fill_inbox(len(_CRLF))
        if self._take(len(_CRLF)) != _CRLF:
            raise ProtocolError("a value that does not end where it said")
        self.is_filling = False
        return size

    def _status(self, num_bytes: int) -> int | Refusal:
        self._begin()
        line = self._line()
        self.num_pending -= 1
        if line == b"+OK":
            return num_bytes
        if line[:1] == b"-":
            return Refusal(line[1:].decode("utf-8", "replace"))
        raise ProtocolError(f"an answer that is no status: {line[:40]!r}")

    def _fill(self, view: memoryview, *, to_its_end: bool = False) -> None:
        """Read so many bytes; with ``to_its_end`` also what ends a value, in the same system call."""
        have = min(len(view), self._stop - self._start)
        if have:
            view[:have] = self._take(have)
            view = view[have:]
        if view and to_its_end:
            # All that was in the inbox went into the view, so the inbox is free for the end.
            end = self._room[: len(_CRLF)]
            count = self._receive_into([view, end])
            self._start, self._stop = 0, max(0, count - len(view))
            view = view[count:]
        while view:
            self._check_deadline()
            view = view[self._receive(view, self._wait_all) :]

    def _drain(self, size: int, view: memoryview) -> None:
        rubbish = view if len(view) >= _DRAIN_BYTES else memoryview(bytearray(_DRAIN_BYTES))
        while size:
            step = min(size, len(rubbish))
            self._fill(rubbish[:step])
            size -= step

    def _line(self) -> bytes:
        while True:
            end = self._inbox.find(_CRLF, self._start, self._stop)
            if end >= 0:
                line = bytes(self._room[self._start : end])
                self._start = end + 2
                return line
            self._fill_inbox(self._stop - self._start + 1)

    def _fill_inbox(self, at_least: int) -> None:
        """Have at least so many unread bytes; never reads far into a value that may follow."""
        while self._stop - self._start < at_least:
            if self._start:
                left = self._take(self._stop - self._start)
                self._start, self._stop = 0, len(left)
                self._room[: len(left)] = left
            if self._stop + _PEEK_BYTES > len(self._inbox):
                raise ProtocolError("a line without an end")
            self._stop += self._receive(self._room[self._stop : self._stop + _PEEK_BYTES])
            if self._stop < at_least:
                self._check_deadline()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._room[self._start : self._start + count])
        self._start += count
        return taken

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        try:
            count = self._sock.recv_into(view, len(view), flags)
        except (BlockingIOError, TimeoutError) as exc:
            raise TimeoutError(f"no answer for {self._timeout_s:g} s") from exc
        return self._some(count)

    def _receive_into(self, views: list[memoryview]) -> int:
        try:
            count = self._sock.recvmsg_into(views, 0, self._wait_all)[0]
        except (BlockingIOError, TimeoutError) as exc:
            raise TimeoutError(f"no answer for {self._timeout_s:g} s") from exc
        return self._some(count)

    def _some(self, count: int) -> int:
        if not count:
            raise ConnectionResetError("the server closed the connection in the middle of an answer")
        return count

    def _send(self, *parts: bytes | memoryview) -> None:
        self._begin()
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            try:
                count = self._sock.sendmsg(left) if self._is_plain else self._sock.send(left[0])
            except (BlockingIOError, TimeoutError) as exc:
                raise TimeoutError(f"the server took nothing for {self._timeout_s:g} s") from exc
            except ConnectionError as exc:
                self._raise_last_words(exc)
                raise
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
                self._check_deadline()

    def _raise_last_words(self, cause: ConnectionError) -> None:
        """A server that closes for a reason says it first; it may be lost, and often is not."""
        words = bytearray(self._room[self._start : self._stop])
        try:
            while data := self._sock.recv(_INBOX_BYTES):
                words += data
                self._check_deadline()
        except OSError:
            pass  # what came before the end counts
        for line in reversed(words.split(_CRLF)):
            if line.startswith(b"-"):
                raise RefusedError(Refusal(line[1:].decode("utf-8", "replace"))) from cause

    def _begin(self) -> None:
        self._deadline = monotonic() + self._timeout_s

    def _check_deadline(self) -> None:
        if monotonic() > self._deadline:
            raise TimeoutError(f"not done after {self._timeout_s:g} s")

    def _limit_waits(self, seconds: float) -> None:
        """Kernel time-outs for each further call; 0 for none."""
        limit = struct.pack("@ll", *divmod(math.ceil(seconds * 1e6), 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _commands(verb: bytes, names: Sequence[bytes], tail: Sequence[bytes] = ()) -> bytes:
    """One command per name; all names are of one length, so joining them is all the work."""
    before = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n" % (2 + len(tail), len(verb), verb, len(names[0]))
    after = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in tail)
    return before + (after + before).join(names) + after


def _set_command(name: bytes, value: memoryview, ttl_ms: int) -> tuple[bytes, memoryview, bytes]:
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        5 if ttl_ms else 3,
        len(name),
        name,
        len(value),
    )
    if not ttl_ms:
        return head, value, _CRLF
    ttl = b"%d" % ttl_ms
    return head, value, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)


def _ahead(views: Sequence[memoryview]) -> int:
    """How many values may be under way at once."""
    longest = max((len(view) for view in views), default=1)
    return max(1, min(_MAX_AHEAD, _WINDOW_BYTES // max(longest, 1)))
