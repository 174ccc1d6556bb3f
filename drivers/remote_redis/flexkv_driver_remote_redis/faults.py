"""What went wrong, in this project's words: the driver's two tables of translations.

A reply of the server is known by its first word, an exception of the client library or the
socket by its class; both lead to one ``Fault``: a status, and a line that says what to do.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
)
from redis.sentinel import MasterNotFoundError

from flexkv_core import Status, TierAccessError, TierError, TierTimeoutError, TierUnavailableError

from .wire import ProtocolError, Refusal, RefusedError

# The first word of a server's reply -> status, and what the reader of the log should know or do.
REPLIES: dict[str, tuple[Status, str]] = {
    "LOADING": (Status.UNAVAILABLE, "the server is still loading its data set"),
    "READONLY": (Status.UNAVAILABLE, "this is a read-only replica: point url at the master, or use sentinel"),
    "MASTERDOWN": (Status.UNAVAILABLE, "this replica has lost its master"),
    "CLUSTERDOWN": (Status.UNAVAILABLE, "the cluster does not serve all of its slots"),
    "MOVED": (Status.UNAVAILABLE, "the server is part of a cluster: set cluster: true"),
    "ASK": (Status.UNAVAILABLE, "the slot is being moved"),
    "TRYAGAIN": (Status.UNAVAILABLE, "the slot is being moved"),
    "BUSY": (Status.UNAVAILABLE, "the server is busy with a script"),
    "NOREPLICAS": (Status.UNAVAILABLE, "the server wants more replicas before it takes writes"),
    "MISCONF": (Status.UNAVAILABLE, "the server takes no writes: its last snapshot failed (disk full?)"),
    "OOM": (
        Status.NO_SPACE,
        "the server is out of memory and evicts nothing: set its maxmemory-policy to allkeys-lru, or ttl_s",
    ),
    "NOAUTH": (Status.DENIED, "the server wants a password: set password (and username)"),
    "WRONGPASS": (Status.DENIED, "wrong username or password"),
    "NOPERM": (
        Status.DENIED,
        "the user lacks rights: +get +set +strlen +unlink on ~<prefix>*, "
        "in a cluster +cluster|slots +command",
    ),
    "WRONGTYPE": (Status.CORRUPT, "the key holds something that is no value"),
    "ERR": (Status.INVALID, "the server refuses the command"),
}

# Class of an exception -> the first word that it stands for; the first match counts.
EXCEPTIONS: tuple[tuple[type[Exception], str], ...] = (
    (BusyLoadingError, "LOADING"),
    (AuthenticationError, "WRONGPASS"),
    (NoPermissionError, "NOPERM"),
    (OutOfMemoryError, "OOM"),
    (ReadOnlyError, "READONLY"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (MovedError, "MOVED"),
    (AskError, "ASK"),
    (redis.ResponseError, "ERR"),
)

_NO_ACCESS_WORDS = ("NOAUTH", "Authentication required", "unauthenticated")
_TOO_MANY = "max number of clients"

ERRORS: dict[Status, type[TierError]] = {
    Status.UNAVAILABLE: TierUnavailableError,
    Status.TIMEOUT: TierTimeoutError,
    Status.DENIED: TierAccessError,
}
"""What is raised where every key failed for the one reason."""

CAUGHT = (redis.RedisError, RedisClusterException, OSError, ProtocolError, RefusedError)
"""All that the library, the socket and the wire raise on purpose."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure.

    Attributes:
        status: What it means for the keys concerned.
        reason: One line for the log.
    """

    status: Status
    reason: str


def fault_of_reply(refusal: Refusal) -> Fault:
    """What an error reply means."""
    # A server repeats what it was sent where it does not know the command: a password, if that was AUTH.
    said = refusal.text.partition(", with args beginning with")[0]
    if _TOO_MANY in refusal.text:
        return Fault(Status.UNAVAILABLE, f"the server has too many clients ({said})")
    is_unknown = any(word in refusal.text for word in _NO_ACCESS_WORDS)
    code = "NOAUTH" if is_unknown else refusal.code
    status, advice = REPLIES.get(code, (Status.UNAVAILABLE, "the server refuses"))
    return Fault(status, f"{advice} ({said})")


def refusal_of(exc: BaseException) -> Refusal | None:
    """The reply behind an exception of the library, or None where the exception is of another kind."""
    for kind, code in EXCEPTIONS:
        if isinstance(exc, kind):
            text = str(exc)
            is_whole = text.partition(" ")[0] in REPLIES  # the library cuts off only words that it knows
            return Refusal(text if is_whole else f"{code} {text}")
    return None


def fault_of(exc: Exception) -> Fault:
    """What an exception out of ``CAUGHT`` means."""
    if isinstance(exc, MasterNotFoundError) and isinstance(exc.__cause__, Exception):
        silence = fault_of(exc.__cause__)
        return Fault(silence.status, f"no Sentinel names the master: {silence.reason}")
    if isinstance(exc, ProtocolError | redis.InvalidResponse):
        return Fault(Status.UNAVAILABLE, f"what answers there is no Redis server ({exc})")
    for cause in _causes(exc):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Fault(Status.DENIED, f"the server's certificate is not accepted ({cause.verify_message})")
        if isinstance(cause, TimeoutError) and "handshake" in str(cause):
            return Fault(Status.TIMEOUT, "no answer to the TLS handshake: does this port speak TLS?")
    if isinstance(exc, redis.TimeoutError | TimeoutError):
        return Fault(Status.TIMEOUT, str(exc))
    refusal = exc.refusal if isinstance(exc, RefusedError) else refusal_of(exc)
    if refusal is not None:
        return fault_of_reply(refusal)
    if _TOO_MANY in str(exc):
        return fault_of_reply(Refusal(str(exc)))
    if isinstance(exc, RedisClusterException):
        # The library takes every refusal of its first question for a server that is no cluster.
        refusals = filter(None, map(refusal_of, _causes(exc)))
        said = next((one for one in refusals if one.code != "ERR"), None)
        if said is not None:
            return fault_of_reply(said)
        return Fault(Status.UNAVAILABLE, f"the cluster cannot be reached ({exc})")
    if isinstance(exc, ConnectionError):
        return Fault(Status.UNAVAILABLE, f"the connection broke: {exc}")
    return Fault(Status.UNAVAILABLE, str(exc) or type(exc).__name__)


def _causes(exc: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = exc
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
