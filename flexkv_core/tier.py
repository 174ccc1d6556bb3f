"""Tier: the interface of a place that keeps blocks.  What a driver's author implements.

A tier stores *values* (opaque bytes) under *keys* (32 opaque bytes).  It needs to know nothing
of tokens, models, tensors or torch: the core puts a header and a checksum into every value and
checks both on the way back.

What the core guarantees to a tier:

* Methods are called from several threads, at most ``capabilities.max_concurrency`` at once, and
  with at most ``capabilities.max_batch`` keys; never before ``open_tier`` returned, never after
  ``close``.
* Keys within one call are distinct.  Views are C-contiguous uint8, writable where they are to be
  filled, and stay valid and untouched by others until the call returns.  Their addresses and
  lengths are multiples of ``capabilities.alignment_bytes``.
* Time-outs, retries, breakers, checksums, metrics, queues and threads are the core's.

What the implementer must do:

* Block for the I/O, and return one ``Outcome`` per key, in order.  A missing block is
  ``MISS``, a value; an error that concerns every key may be raised (see ``errors``).
* A stored value appears whole or not at all, even when the process is killed meanwhile;
  storing a key again replaces its value or leaves the old one.
* Say honestly what became of a buffer: untouched, complete, or uncertain.
* Let ``close`` be called twice, and leave no thread, file or socket behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from .buffers import HostRegion, SlotPool
from .errors import UnsupportedOperationError
from .keys import BlockKey


class Status(Enum):
    """What became of one key.  ``MISS`` is not a failure; all but ``OK`` mean: recompute."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    NO_SPACE = "no_space"
    DENIED = "denied"
    CANCELLED = "cancelled"
    INVALID = "invalid"
    UNSUPPORTED = "unsupported"
    LIMITED = "limited"
    """The core's own: a rate limit left no turn before the deadline.  It says nothing of tier or block."""


class BufferState(Enum):
    """What a caller's buffer holds now.

    ``UNCERTAIN`` means undefined content: the call began to write, or, where the core gave a call up
    that has not returned, something may still write.  A driver whose call has returned writes no more.
    """

    UNTOUCHED = "untouched"
    COMPLETE = "complete"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One key's result.

    Attributes:
        status: See ``Status``.
        num_bytes: Length of the value, where known: found (lookup), read (load) or written (store).
        buffer: State of the key's buffer, after a load.
        reason: A few words for the log; empty for ``OK`` and ``MISS``.
    """

    status: Status
    num_bytes: int = 0
    buffer: BufferState = BufferState.UNTOUCHED
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the key was found, read, written or removed as asked."""
        return self.status is Status.OK


MISS = Outcome(Status.MISS)
DONE = Outcome(Status.OK)


def loaded(num_bytes: int) -> Outcome:
    """A value of ``num_bytes`` lies complete in its buffer."""
    return Outcome(Status.OK, num_bytes, BufferState.COMPLETE)


def failed(status: Status, reason: str, buffer: BufferState = BufferState.UNTOUCHED) -> Outcome:
    """One key failed, and why."""
    return Outcome(status, 0, buffer, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapabilities:
    """What a tier can do.  The chain is checked against it at start; tables are made from it.

    Attributes:
        persistent: Values outlive the process.
        shared: Other processes read and write the same values; what is there must be asked.
        direct_slots: The tier's memory is addressable: it is a ``DirectTier``.
        can_list: ``list_blocks`` tells all values.
        expires: Values may vanish by age, or by the store's own eviction, without being asked.
        capacity_bytes: Room for values, or 0 where the store itself decides.
        max_batch: Most keys in one call.
        max_lookup: Most keys in one ``lookup``, where that is more than ``max_batch``; else 0.
        max_concurrency: Most calls at once.
        max_value_bytes: Longest value, or 0 for no limit.
        alignment_bytes: Buffers' addresses and lengths must be multiples of this.
    """

    persistent: bool = False
    shared: bool = False
    direct_slots: bool = False
    can_list: bool = False
    expires: bool = False
    capacity_bytes: int = 0
    max_batch: int = 64
    max_lookup: int = 0
    max_concurrency: int = 4
    max_value_bytes: int = 0
    alignment_bytes: int = 1


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is.

    Attributes:
        num_blocks: Values kept, or -1 where the store cannot say.
        used_bytes: Bytes that they take, or -1.
        capacity_bytes: Room in all, or 0 for unknown.
    """

    num_blocks: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One value as ``list_blocks`` finds it.

    Attributes:
        key: The key that it lies under.
        num_bytes: Its length.
        head: Its first ``TierContext.head_bytes`` bytes, or fewer if it is shorter.
        last_used: Seconds since the epoch, where known; after a restart, eviction and ``ttl_s`` go by it.
    """

    key: BlockKey
    num_bytes: int
    head: bytes
    last_used: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """What a driver is told when its tier is opened.

    Attributes:
        name: The tier's name in the chain, for messages, files and threads.
        value_bytes: Length of the longest value: a full block with its header, padded.
        head_bytes: How much of a value's front ``list_blocks`` returns.
        fingerprint: The layout's 16 bytes; values of another layout are foreign.
        identity: Readable JSON of the namespace, to be kept beside the values for people.
    """

    name: str
    value_bytes: int
    head_bytes: int
    fingerprint: bytes = bytes(16)
    identity: str = "{}"


class Tier(ABC):
    """A place that keeps blocks.  See the module's text for the two sides' duties."""

    capabilities: TierCapabilities
    """Set before the constructor returns; never changed."""

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Say which values are there, without reading them.

        Args:
            keys: At most ``capabilities.max_batch`` (or ``max_lookup``, if larger) distinct keys.

        Returns:
            Per key, in order: ``OK`` (``num_bytes`` is the length, or 0 where asking costs
            extra), ``MISS``, or why it could not be asked.

        Raises:
            TierUnavailableError, TierTimeoutError, TierAccessError: no key could be asked.
            TierClosedError: after ``close``.
        Threads: any.
        """

    @abstractmethod
    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        """Read values into the caller's buffers.

        Args:
            keys: At most ``capabilities.max_batch`` distinct keys.
            into: Per key one writable view of ``TierContext.value_bytes`` bytes.

        Returns:
            Per key, in order: ``loaded(n)``, ``MISS``, or a failure.  A value longer than its
            buffer is ``CORRUPT``.  A buffer whose outcome is not ``OK`` has undefined content.

        Raises:
            TierUnavailableError, TierTimeoutError, TierAccessError: no key could be tried, and
                no buffer was touched.
            TierClosedError: after ``close``.
        Threads: any.  Blocks for the I/O.
        """

    @abstractmethod
    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        """Keep values.

        Args:
            keys: At most ``capabilities.max_batch`` distinct keys.
            values: Per key the bytes to keep, at most ``TierContext.value_bytes`` long.  Lengths
                are padded to ``capabilities.alignment_bytes``; the core strips padding on load.

        Returns:
            Per key, in order: ``OK`` once another call can load the value, ``NO_SPACE`` where the
            core must evict first, or a failure, which leaves the key's old value or none.

        Raises:
            TierUnavailableError, TierTimeoutError, TierAccessError: nothing was stored.
            TierClosedError: after ``close``.
        Threads: any.  Blocks for the I/O.
        """

    @abstractmethod
    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Remove values: ``OK`` if one was removed, ``MISS`` if none was there.

        Raises:
            As ``store``.
        Threads: any.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, files and sockets.  May be called twice.  Waits for running calls."""

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        """All values, in batches of any size; called once, at start, if ``can_list``.

        Values that are damaged or foreign may be left out or listed; the core checks them.

        Raises:
            UnsupportedOperationError: the default, for tiers that cannot list.
        Threads: one, before any other call.
        """
        raise UnsupportedOperationError("this tier cannot list its values", operation="list")

    def usage(self) -> TierUsage:
        """How full the tier is; the default knows nothing.  Threads: any; must not block."""
        return TierUsage(-1, -1, self.capabilities.capacity_bytes)

    def check_health(self) -> None:
        """Raise what a call would raise now; the default asks for one key that is not there.

        Called by ``flexkv doctor``, and to probe a tier that was down.
        """
        self.lookup([bytes(32)])

    def register(self, region: HostRegion) -> None:  # noqa: B027 - optional, with nothing to do by default
        """Host memory that buffers will lie in; for tiers that must register it first."""

    def __enter__(self) -> Tier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DirectTier(Tier):
    """A tier whose own memory is what the device copies to and from: nothing is copied twice.

    The core reserves slots, fills them in place, and publishes them under their keys; a published slot
    can be borrowed by key for as long as the core pins the block.  ``load``, ``store`` and ``lookup``
    see published values only.  Slots are numbers in ``slots``; everything is done in batches.
    """

    @property
    @abstractmethod
    def slots(self) -> SlotPool:
        """The memory, cut into slots of at least ``TierContext.value_bytes``."""

    @abstractmethod
    def reserve(self, count: int) -> list[int]:
        """Up to ``count`` free slots; fewer if fewer are free.

        A reserved slot belongs to the caller until ``publish`` or ``release``.
        """

    @abstractmethod
    def publish(self, keys: Sequence[BlockKey], slots: Sequence[int], sizes: Sequence[int]) -> None:
        """Make filled, reserved slots the values of ``keys``; frees the slot of an older value."""

    @abstractmethod
    def release(self, slots: Sequence[int]) -> None:
        """Give reserved slots back unpublished."""

    @abstractmethod
    def borrow(self, keys: Sequence[BlockKey]) -> list[int]:
        """The published slot of each key, or -1.  Valid until ``evict`` or ``withdraw`` of that key."""

    @abstractmethod
    def withdraw(self, keys: Sequence[BlockKey]) -> list[int]:
        """Unpublish keys and hand their slots to the caller as reserved ones; -1 where there is none.

        What ``evict`` does without freeing: the bytes stay readable, for a write-back, until ``release``.
        """
