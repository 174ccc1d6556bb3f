"""Media of the kit's tests: what lies in them is read and written behind the tier's back."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv_core import TierCapabilities
from flexkv_core.testing import Medium, TierTests
from tests.support.redis_server import Proxy, RedisServer
from tests.support.ssd_disk import peek, remove, replace, spots

SERVERS: dict[str, RedisServer] = {}
"""Servers that run, by URL: a medium travels to writing processes, and so is plain data."""

PROXIES: dict[str, Proxy] = {}
"""Those that stand before one, by their own URL."""


class InMemory(TierTests):
    """A dictionary that outlives its tiers."""

    capabilities = TierCapabilities(can_list=True)

    @pytest.fixture
    def medium(self):
        return Medium()

    def read_medium(self, medium, key):
        return medium.values.get(key)

    def write_medium(self, medium, key, data):
        medium.values.pop(key, None)
        if data is not None:
            medium.values[key] = data


class OnDisk(TierTests):
    """Folders of ``ssd``."""

    def read_medium(self, medium, key):
        spot = spots(Path(medium)).get(key)
        return None if spot is None else peek(spot)

    def write_medium(self, medium, key, data):
        spot = spots(Path(medium))[key]
        remove(spot) if data is None else replace(spot, data)


class InRedis(TierTests):
    """A real server (``tests/conformance/conftest.py``), known by its URL."""

    @pytest.fixture
    def medium(self, server, request):
        server.ask("FLUSHALL")
        if "disturbed" not in request.node.name:
            yield server.unix_url
            return
        with Proxy(server.path) as proxy:
            SERVERS[proxy.url], PROXIES[proxy.url] = server, proxy
            yield proxy.url
            del SERVERS[proxy.url], PROXIES[proxy.url]

    def read_medium(self, medium, key):
        return SERVERS[medium].ask("GET", _name(key))

    def write_medium(self, medium, key, data):
        server = SERVERS[medium]
        server.ask("DEL", _name(key)) if data is None else server.ask("SET", _name(key), data)

    def break_medium(self, medium):
        return SERVERS[medium].unreachable()

    def disturb_medium(self, medium, how):
        disturbed = {"hung": SERVERS[medium].paused, "slow": PROXIES[medium].slow, "cut": PROXIES[medium].cut}
        return disturbed[how]()


def _name(key: bytes) -> bytes:
    return b"flexkv:" + key.hex().encode()
