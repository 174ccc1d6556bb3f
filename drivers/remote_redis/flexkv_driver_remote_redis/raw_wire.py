"""RESP on a connected socket: bulk bytes go straight between the socket and the caller's buffers.

redis-py connects, authenticates and pools; its parser would copy each value two or three times.
Here a value is one ``sendmsg`` from the caller's memory, or one receiving call into it.

Every reply is counted.  A wire whose ``num_pending`` is not 0 at the end has lost its place in
the stream: its connection is dropped, never reused, so no answer is taken for another's.

Threads: one at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from .stream import CRLF, INBOX_BYTES, PEEK_BYTES, SocketStream
from .wire import ProtocolError, Refusal, RefusedError, Reply

_WINDOW_BYTES = 256 << 10
"""Values asked for ahead.  Small ones hide the round trip; large ones would pile up in the server's
memory and fall out of its caches, which costs it up to twice the time (see the benchmark)."""

_MAX_AHEAD = 16
_SEND_BYTES = 4 << 20
"""Values sent by one system call and answered together: the fewer calls, the fewer waits for the
interpreter lock, which under several threads cost more than the copying; longer ones gain nothing."""

_OK = b"+OK\r\n"
_SHORTEST_REPLY = len(":0\r\n")
_FEW_BYTES = 1024


class RawWire(SocketStream):
    """A conversation on the connection's own socket."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take a connected socket on which nothing is under way."""
        super().__init__(sock, timeout_s)
        self.num_pending = 0
        self.is_filling = False
        self.is_spent = False

    def ask(self, verb: bytes, names: Sequence[bytes]) -> list[bytes]:
        if not names:
            return []
        self.num_pending = len(names)
        self._send(_commands(verb, names))
        self._begin()
        replies = bytearray()
        while (missing := len(names) - replies.count(CRLF)) > 0:
            replies += self._some_replies(missing, len(replies.rpartition(CRLF)[2]))
            self._check_deadline()
        lines = bytes(replies).split(CRLF)
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
        self._send_shallow()
        done = 0
        refusal: Refusal | None = None
        while done < len(names) and refusal is None:
            stop = done + _count_together(values[done:])
            together = range(done, stop)
            self.num_pending += len(together)
            self._send(*_set_commands([(names[i], values[i]) for i in together], ttl_ms))
            self._await_statuses(len(together))
            for i in together:
                reply = self._status(len(values[i]))
                if isinstance(reply, Refusal) and not reply.is_redirect:
                    refusal = refusal or reply
                yield reply
            done = stop
        for _ in range(done, len(names)):
            yield refusal

    def _await_statuses(self, count: int) -> None:
        """Sleep until so many are there, none of which is shorter than ``+OK``, and wake up once."""
        if self._wait_all and count > 1 and self._start == self._stop:
            self._start = self._stop = 0
            self._stop = self._receive(self._room[: count * len(_OK)], self._wait_all)

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
        if self._is_plain and self._start == self._stop:
            size = self._value_at_once(view)
            if size >= 0:
                return size
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
            self._fill(view[:size])
        self._end_value()
        return size

    def _value_at_once(self, view: memoryview) -> int:
        """A value in two system calls: a look at its header, then each of its parts into its place.

        Nothing is copied twice, and the bytes land aligned as the buffer is, which the kernel's
        copy loop likes.

        Returns:
            The value's length, or -1 where this is no value that fits; nothing was taken then.
        """
        head = self._look()
        end = head.find(CRLF)
        if end < 0 or head[:1] != b"$" or not head[1:end].isdigit() or (size := int(head[1:end])) > len(view):
            return -1
        self.is_filling = True
        room, after = self._room, end + len(CRLF)
        count = self._receive_into([room[PEEK_BYTES : PEEK_BYTES + after], view[:size], room[:2]])
        if count == after + size + 2 and self._inbox.startswith(CRLF):
            self.is_filling = False
            return size
        # A signal or a time-out cut it short; the header was there, and was taken.
        self._start, self._stop = 0, max(0, count - after - size)
        self._check_deadline()
        self._fill(view[count - after : size])
        self._end_value()
        return size

    def _end_value(self) -> None:
        self._fill_inbox(len(CRLF))
        if self._take(len(CRLF)) != CRLF:
            raise ProtocolError("a value that does not end where it said")
        self.is_filling = False

    def _status(self, num_bytes: int) -> int | Refusal:
        self._begin()
        line = self._line()
        self.num_pending -= 1
        if line == b"+OK":
            return num_bytes
        if line[:1] == b"-":
            return Refusal(line[1:].decode("utf-8", "replace"))
        raise ProtocolError(f"an answer that is no status: {line[:40]!r}")

    def _explain(self, cause: ConnectionError) -> None:
        """A server that closes for a reason says it first; it may be lost, and often is not."""
        words = bytearray(self._room[self._start : self._stop])
        try:
            while data := self._sock.recv(INBOX_BYTES):
                words += data
                self._check_deadline()
        except OSError:
            pass  # what came before the end counts
        for line in reversed(words.split(CRLF)):
            if line.startswith(b"-"):
                raise RefusedError(Refusal(line[1:].decode("utf-8", "replace"))) from cause


def _commands(verb: bytes, names: Sequence[bytes], tail: Sequence[bytes] = ()) -> bytes:
    """One command per name; all names are of one length, so joining them is all the work."""
    before = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n" % (2 + len(tail), len(verb), verb, len(names[0]))
    after = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in tail)
    return before + (after + before).join(names) + after


def _set_commands(pairs: Sequence[tuple[bytes, memoryview]], ttl_ms: int) -> list[bytes | memoryview]:
    """Commands as pieces for one system call, values in place."""
    ttl = b"%d" % ttl_ms
    after = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl) if ttl_ms else CRLF
    num_words = 5 if ttl_ms else 3
    pieces: list[bytes | memoryview] = []
    tail = b""
    for name, value in pairs:
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (num_words, len(name), name, len(value))
        pieces += (tail + head, value)
        tail = after
    return [*pieces, tail]


def _count_together(values: Sequence[memoryview]) -> int:
    """How many of the first values one system call sends."""
    total = 0
    for count, value in enumerate(values):
        total += len(value)
        if total > _SEND_BYTES and count:
            return count
    return len(values)


def _ahead(views: Sequence[memoryview]) -> int:
    """How many values may be under way at once."""
    longest = max((len(view) for view in views), default=1)
    return max(1, min(_MAX_AHEAD, _WINDOW_BYTES // max(longest, 1)))
