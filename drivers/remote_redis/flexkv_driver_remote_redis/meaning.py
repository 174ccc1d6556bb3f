"""What a reply means for its key."""

from __future__ import annotations

from functools import lru_cache, partial

from flexkv_core import DONE, MISS, BufferState, Outcome, Status, failed, loaded

from .faults import fault_of_reply
from .wire import Refusal, Reply

REDIRECTED = failed(Status.UNAVAILABLE, "the server is part of a cluster: set cluster: true")
"""Another node has the key.  In a cluster the key is asked for again; elsewhere this is the answer."""


def as_length(line: bytes) -> Outcome:
    """``STRLEN``: the value's length; a value is never empty, so 0 is a miss."""
    if line == b":0":
        return MISS
    return Outcome(Status.OK, int(line[1:])) if line[:1] == b":" else _refused(line)


def as_removal(line: bytes) -> Outcome:
    """``UNLINK``: how many were removed, 1 or 0."""
    if line == b":0":
        return MISS
    return DONE if line[:1] == b":" else _refused(line)


def as_load(reply: Reply, room: int) -> Outcome:
    """A value into a buffer of ``room`` bytes."""
    if reply is None:
        return MISS
    if isinstance(reply, Refusal):
        return _failed(reply)
    if reply > room:
        # Read off through the buffer, so that the connection can be used on.
        return failed(Status.CORRUPT, f"value of {reply} B, buffer of {room} B", BufferState.UNCERTAIN)
    return _loaded(reply)


def as_store(reply: Reply) -> Outcome:
    """A buffer as a value: how many bytes were kept."""
    if isinstance(reply, Refusal):
        return _failed(reply)
    return _stored(reply or 0)


# Values of one layout have one length or two: their outcomes are made once.
_loaded = lru_cache(maxsize=256)(loaded)
_stored = lru_cache(maxsize=256)(partial(Outcome, Status.OK))


def _refused(line: bytes) -> Outcome:
    return _failed(Refusal(line[1:].decode("utf-8", "replace")))


def _failed(refusal: Refusal) -> Outcome:
    if refusal.is_redirect:
        return REDIRECTED
    fault = fault_of_reply(refusal)
    return failed(fault.status, fault.reason)
