"""Sentinels, asked for the master's address, and what is said where they do not tell it.

redis-py answers with one text that repeats every client it asked through, some versions with its password.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.sentinel import MasterNotFoundError, Sentinel


class Sentinels(Sentinel):
    """The library's, but for its answer where no master is found."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The address of the master of that name.

        Raises:
            MasterNotFoundError: none is known; where a Sentinel did not answer, its cause tells why.
        """
        clients: list[Any] = self.sentinels  # redis-py does not annotate them
        is_well: Any = self.check_master_state
        silence: Exception | None = None
        for client in clients:
            try:
                state = client.sentinel_masters().get(service_name)
            except (redis.ConnectionError, redis.TimeoutError) as exc:
                silence = silence or exc
                continue
            if state and is_well(state, service_name):
                # Who knew it is asked first next time; one assignment, since threads share the list.
                self.sentinels = [client, *(other for other in clients if other is not client)]
                return state["ip"], state["port"]
        raise MasterNotFoundError(f"the Sentinels name no master {service_name!r} that is up") from silence
