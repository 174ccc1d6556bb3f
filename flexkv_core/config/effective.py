"""What ``load_config`` returns: a chain that can be used, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from ..drivers import DriverSpec
from ..models import ChainConfig, TierConfig
from .draft import Origin, Rank


@dataclass(frozen=True)
class Value:
    """One value that holds.

    Attributes:
        path: Where it stands in the chain: ``tiers[0].options.capacity``.
        text: The value for people; secrets as ``****``, filled-in texts as ``${NAME}``.
        origin: Where it came from.
    """

    path: str
    text: str
    origin: Origin


@dataclass(frozen=True)
class ResolvedTier:
    """One tier of the chain with the driver that will open it.

    Attributes:
        config: Its policies.
        spec: The driver.
        provider: Distribution and version that offers the driver.
        options: The driver's validated options; may hold secrets.
    """

    config: TierConfig
    spec: DriverSpec
    provider: str
    options: BaseModel = field(repr=False)


@dataclass(frozen=True)
class EffectiveConfig:
    """A configuration that can be used, and how it came about.

    Attributes:
        chain: The chain; its tiers' ``options`` hold validated values.
        tiers: Per tier its driver and validated options.
        file: Path of the file, or None where none was given.
        sha256: Of the file's bytes, in hexadecimal; empty without a file.
        values: Every value with its origin, in the models' order.
        notices: What was given and lost, or has no effect; to be logged, once.
    """

    chain: ChainConfig
    tiers: tuple[ResolvedTier, ...]
    file: str | None
    sha256: str
    values: tuple[Value, ...] = field(repr=False)
    notices: tuple[str, ...] = ()

    def origin(self, path: str) -> Origin:
        """Where the value at a dotted path came from.  Raises KeyError for a path that is none."""
        for value in self.values:
            if value.path == path:
                return value.origin
        raise KeyError(path)

    def describe(self) -> list[str]:
        """Lines for the log: which file, its hash, how many values from where, and the notices."""
        file = f"{self.file} (sha256 {self.sha256[:12]})" if self.file else "no file"
        counts = {rank: sum(value.origin.rank is rank for value in self.values) for rank in Rank}
        rest = ", ".join(f"{counts[rank]} from {rank.name.lower()}" for rank in sorted(Rank, reverse=True))
        return [f"configuration: {file}; values: {rest}", *self.notices]
