"""The error tree: one class for each situation that a caller can be in.

Facts stand in attributes; no caller parses a message.  ``retryable`` answers the
one question that retrying code has.  A miss is a value (see ``tier.Status``), not
an error.
"""

from __future__ import annotations

from collections.abc import Sequence


class FlexKVError(Exception):
    """Anything that this project raises on purpose."""

    retryable: bool = False


class ConfigError(FlexKVError):
    """A configuration that cannot be used; carries every finding at once.

    Attributes:
        file: Where the configuration came from (a path, ``environment``, ``arguments``).
        findings: One line for each fault, each naming its path in the file.
        sources: For each finding where it came from; all from ``file`` unless said otherwise.
    """

    def __init__(self, file: str, findings: Sequence[str], sources: Sequence[str] = ()) -> None:
        self.file = file
        self.findings = tuple(findings)
        self.sources = tuple(sources) or (file,) * len(self.findings)
        lines = zip(self.sources, self.findings, strict=True)
        super().__init__("\n".join(f"{source}: {line}" for source, line in lines))


class DriverError(FlexKVError):
    """A driver cannot be used.

    Attributes:
        driver: The driver's name as a chain writes it.
        provider: Distribution and version that offers it, or an empty string.
    """

    def __init__(self, message: str, *, driver: str, provider: str = "") -> None:
        self.driver = driver
        self.provider = provider
        super().__init__(message)


class DriverNotFoundError(DriverError):
    """No installed distribution offers a driver of this name."""


class DriverLoadError(DriverError):
    """The driver is installed, but importing or registering it failed."""


class DriverConflictError(DriverError):
    """Two distributions offer the same name with different targets."""


class DriverApiError(DriverError):
    """The driver was written for a driver interface that is not supported."""


class TierError(FlexKVError):
    """A tier could not do what it was asked.

    Attributes:
        tier: The tier's name in the chain, or the driver's name where it has none.
        operation: ``open``, ``lookup``, ``load``, ``store``, ``evict``, ``list`` or ``close``.
        num_keys: How many keys the failed call was about; 0 where it was about none.
    """

    def __init__(self, message: str, *, tier: str = "", operation: str = "", num_keys: int = 0) -> None:
        self.tier = tier
        self.operation = operation
        self.num_keys = num_keys
        super().__init__(message)


class TierUnavailableError(TierError):
    """The medium or service cannot be reached now; another try may succeed."""

    retryable = True


class TierTimeoutError(TierError):
    """No answer within the deadline; another try may succeed."""

    retryable = True


class TierFullError(TierError):
    """No room, and making room is not the driver's to decide."""


class TierClosedError(TierError):
    """Used before ``open`` or after ``close``."""


class TierAccessError(TierError):
    """Credentials, permissions or ownership forbid it."""


class UnsupportedOperationError(TierError):
    """The tier's capabilities say that it cannot do this."""


class CorruptBlockError(TierError):
    """Bytes that are not the block that was asked for."""


class HostMemoryError(FlexKVError):
    """Host memory cannot be had as asked; found out before it was allocated.

    Attributes:
        needed_bytes: What was asked for.
        available_bytes: What the tightest limit leaves.
        limit: The limit's name (``cgroup``, ``memory``, ``memlock``, ``huge pages``).
    """

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int, limit: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit
        super().__init__(message)


class TransferError(FlexKVError):
    """A copy between device and host failed.

    Attributes:
        job: The copy's number.
    """

    def __init__(self, message: str, *, job: int = -1, retryable: bool = False) -> None:
        self.job = job
        self.retryable = retryable
        super().__init__(message)


class SyncError(FlexKVError):
    """Ranks could not agree.

    Attributes:
        ranks: The ranks that are missing or differ.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class LayoutError(FlexKVError):
    """Device memory does not have the shape that a layout needs."""


class EngineError(FlexKVError):
    """An engine, its version or its options cannot be served."""
