"""Conversations with a server: what the tier says, whoever carries it.

``RawWire`` (in ``raw_wire``) carries it on the connection's own socket; ``ClientWire`` goes through
the client library, one command a round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class ProtocolError(Exception):
    """What answers does not speak RESP."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply of the server.

    Attributes:
        text: The reply as it came, without its leading dash.
    """

    text: str

    @property
    def code(self) -> str:
        """The first word, which names the kind: ``OOM``, ``MOVED``, ``ERR``, ..."""
        return self.text.partition(" ")[0]

    @property
    def is_redirect(self) -> bool:
        """Whether another node of the cluster has the key."""
        return self.code in ("MOVED", "ASK", "TRYAGAIN")


class RefusedError(Exception):
    """The server said why, and closed the connection."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


Reply = int | Refusal | None
"""Of one key: the value's length, a refusal, or None for no value."""


class Wire(Protocol):
    """One conversation.

    Attributes:
        num_pending: Replies that were asked for and not yet read.
        is_filling: Whether bytes of an unfinished reply already lie in the caller's buffer.
        is_spent: Whether the connection is to be closed though nothing is wrong with the stream.
        is_quiet: Whether the next call may use the wire as it is: it is connected and nothing came.
    """

    num_pending: int
    is_filling: bool
    is_spent: bool

    @property
    def is_quiet(self) -> bool: ...

    def ask(self, verb: bytes, names: Sequence[bytes]) -> list[bytes]:
        """One command per name, in one round trip; the reply lines, in order."""

    def read_values(
        self, names: Sequence[bytes], into: Sequence[memoryview], renew_ms: int = 0
    ) -> Iterator[Reply]:
        """Values into buffers, in order.  A value longer than its buffer is read off and dropped.

        With ``renew_ms`` the value's life starts anew.
        """

    def write_values(
        self, names: Sequence[bytes], values: Sequence[memoryview], ttl_ms: int = 0
    ) -> Iterator[Reply]:
        """Buffers as values, in order; each reply is the number of bytes kept, or a refusal.

        After a refusal no more is sent, and what was not sent has the same reply.
        """

    def end(self) -> None:
        """Leave the socket as it was."""


class ClientWire:
    """The same conversation through the client library, one command a round trip.

    For keys that a cluster has moved, and where the library's connection shows no socket.
    """

    num_pending = 0
    is_filling = False
    is_spent = False
    is_quiet = False

    def __init__(self, execute: Callable[..., Any], refusal: Callable[[Exception], Refusal | None]) -> None:
        """Take the call that runs a command, and the one that tells a refusal from other exceptions."""
        self._execute = execute
        self._refusal = refusal

    def end(self) -> None:
        pass

    def ask(self, verb: bytes, names: Sequence[bytes]) -> list[bytes]:
        replies = [self._run(verb.decode(), name) for name in names]
        return [b"-" + r.text.encode() if isinstance(r, Refusal) else b":%d" % r for r in replies]

    def read_values(
        self, names: Sequence[bytes], into: Sequence[memoryview], renew_ms: int = 0
    ) -> Iterator[Reply]:
        for name, view in zip(names, into, strict=True):
            value = self._run("GETEX", name, "PX", renew_ms) if renew_ms else self._run("GET", name)
            if isinstance(value, bytes) and len(value) <= len(view):
                view[: len(value)] = value
            yield len(value) if isinstance(value, bytes) else value

    def write_values(
        self, names: Sequence[bytes], values: Sequence[memoryview], ttl_ms: int = 0
    ) -> Iterator[Reply]:
        tail = ("PX", ttl_ms) if ttl_ms else ()
        for name, value in zip(names, values, strict=True):
            reply = self._run("SET", name, value, *tail)
            yield reply if isinstance(reply, Refusal) else len(value)

    def _run(self, *command: object) -> Any:  # whatever the library makes of the reply
        try:
            return self._execute(*command)
        except Exception as exc:  # of which are refusals, the library's table tells; the rest goes on
            refusal = self._refusal(exc)
            if refusal is None:
                raise
            return refusal
