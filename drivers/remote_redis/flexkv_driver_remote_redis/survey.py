"""What a server says of itself, and what its owner should know before blocks are kept there.

Both questions may be forbidden to this user, or not be known to a server that only resembles
Redis; then the tier works all the same, without the advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import RedisConfig
from .faults import CAUGHT

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Survey:
    """A server's settings as far as they concern a cache.

    Attributes:
        version: The server's version, or an empty string.
        role: ``master`` or ``slave``.
        max_memory_bytes: Its limit, or 0 for none.
        policy: What it evicts at the limit, such as ``noeviction`` or ``allkeys-lru``.
        max_value_bytes: Longest value that it takes, or 0 where it does not say.
    """

    version: str
    role: str
    max_memory_bytes: int
    policy: str
    max_value_bytes: int

    @property
    def may_evict(self) -> bool:
        """Whether the server may drop a value on its own."""
        return self.max_memory_bytes > 0 and self.policy != "noeviction"


def take_survey(client: Any) -> Survey:
    """Ask one server.  Raises what the library raises where even ``INFO`` is refused."""
    info: Mapping[str, Any] = client.info()
    return Survey(
        version=str(info.get("redis_version", "")),
        role=str(info.get("role", "master")),
        max_memory_bytes=_number(info.get("maxmemory")),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        max_value_bytes=_longest_value(client),
    )


def advice(survey: Survey, config: RedisConfig, value_bytes: int) -> list[str]:
    """What is likely to go wrong with these settings: one line each, or nothing."""
    found = []
    if survey.role == "slave":
        found.append("it is a read-only replica: stores will be refused; use the master, or sentinel")
    if 0 < survey.max_value_bytes < value_bytes:
        found.append(
            f"it takes values up to {survey.max_value_bytes / _MIB:.1f} MiB (proto-max-bulk-len), a block "
            f"has {value_bytes / _MIB:.1f}: stores will fail"
        )
    if 0 < survey.max_memory_bytes < value_bytes:
        found.append("its maxmemory is smaller than one block: stores will be refused")
    found.extend(_memory_advice(survey, has_ttl=config.ttl_s is not None))
    return found


def _memory_advice(survey: Survey, *, has_ttl: bool) -> list[str]:
    if not survey.max_memory_bytes:
        if has_ttl:
            return []
        return ["it has no maxmemory and blocks have no ttl_s: it grows until the machine is full"]
    if survey.policy == "noeviction" and not has_ttl:
        return ["maxmemory-policy is noeviction and blocks have no ttl_s: once full it refuses every store"]
    if survey.policy.startswith("volatile-") and not has_ttl:
        return [f"maxmemory-policy {survey.policy} evicts only keys that expire, and blocks have no ttl_s"]
    return []


def _longest_value(client: Any) -> int:
    try:
        return _number(client.config_get("proto-max-bulk-len").get("proto-max-bulk-len"))
    except CAUGHT:
        return 0  # managed servers often forbid CONFIG


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
