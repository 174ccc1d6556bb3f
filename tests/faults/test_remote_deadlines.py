"""A remote store that fails: no request waits longer than its recompute and the configured deadline.

Through a real Redis that is killed, stopped, slowed, or cut in the middle of values while requests come
in, both for what was promised before and for what must be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from flexkv_core.testing import context_for
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from tests.support.redis_server import Proxy, RedisServer, free_port
from tests.support.remote_world import (
    DRIVER_S,
    LAYOUT,
    NAME,
    RemoteWorld,
    Served,
    check_waited,
    prompt,
    world_over,
)

PROMISED = range(6)
UNKNOWN = range(100, 104)
RESET_S = 1000.0
"""A breaker that opens stays open until the test says that so much time is over, however slow the machine."""
MOST_FAILED = 3
"""Loads that fail before the breaker is open."""


class Scene:
    """A server, a proxy before it, and a chain that goes through the proxy or around it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.redis = stack.enter_context(RedisServer(folder, port=free_port()))
        self.proxy = stack.enter_context(Proxy(self.redis.path))

    def world(self, url: str, **policy: object) -> RemoteWorld:
        """A chain over the server at this address; its driver waits longer than the core does."""
        config = RedisConfig(url=url, timeout_s=DRIVER_S, connect_timeout_s=DRIVER_S)
        tier = RedisTier(config, context_for(LAYOUT, NAME))
        return world_over(self._stack, tier, host_blocks=8, **policy)


@pytest.fixture
def scene(tmp_path: Path, stack: ExitStack) -> Scene:
    return Scene(tmp_path, stack)


@contextmanager
def killed(scene: Scene) -> Iterator[None]:
    scene.redis.kill()
    yield
    scene.redis.start()


@contextmanager
def slowed(scene: Scene) -> Iterator[None]:
    scene.proxy.pace_s = 0.05  # 20 kB/s: a block takes three seconds
    yield
    scene.proxy.pace_s = 0.0


@contextmanager
def cut(scene: Scene) -> Iterator[None]:
    scene.proxy.reply_limit = LAYOUT.slot_bytes // 2
    scene.proxy.cut_idle()
    yield
    scene.proxy.reply_limit = None


@contextmanager
def reset(scene: Scene) -> Iterator[None]:
    scene.proxy.resets = True
    with cut(scene):
        yield
    scene.proxy.resets = False


Failure = Callable[[Scene], AbstractContextManager[None]]
FAILURES: dict[str, tuple[Failure, bool]] = {
    "killed": (killed, False),
    "stopped": (lambda scene: scene.redis.paused(), False),
    "slowed": (slowed, True),
    "cut": (cut, True),
    "reset": (reset, True),
}


@pytest.mark.parametrize("mode", FAILURES)
def test_no_request_waits_longer_than_the_deadline_and_few_wait_at_all(scene: Scene, mode: str) -> None:
    world = _stored(scene, mode, PROMISED, breaker_reset_s=RESET_S)
    with FAILURES[mode][0](scene), world.clock.going():
        served = [_serve(world, seed) for seed in (*PROMISED, *UNKNOWN, *PROMISED)]
    assert 0 < sum(bool(one.cause) for one in served) <= MOST_FAILED, "then the breaker is open"
    assert _failures_counted(world) > 0
    link = world.chain.links[1]
    world.serve_until(lambda served: served.num_tokens == len(prompt(1)) and link.is_up, prompt(1))


@pytest.mark.parametrize("mode", FAILURES)
def test_nor_does_one_where_no_breaker_ever_opens(scene: Scene, mode: str) -> None:
    few = PROMISED[:4]
    world = _stored(scene, mode, few, breaker_failures=0)
    with FAILURES[mode][0](scene), world.clock.going():
        for seed in (*few, *UNKNOWN[:2]):
            _serve(world, seed)
    world.serve_until(lambda served: served.num_tokens == len(prompt(1)), prompt(1))


def _stored(scene: Scene, mode: str, seeds: Iterable[int], **policy: object) -> RemoteWorld:
    """A chain whose Redis has these prompts, and knows it; its host pool has the last two only."""
    world = scene.world(scene.proxy.url if FAILURES[mode][1] else scene.redis.url, **policy)
    for seed in seeds:
        world.store(prompt(seed))
    assert world.serve(prompt(0)).num_tokens == len(prompt(0))
    return world


def _serve(world: RemoteWorld, seed: int) -> Served:
    served = world.serve(prompt(seed))
    check_waited(world, served)
    return served


def _failures_counted(world: RemoteWorld) -> float:
    series = world.chain.metrics.snapshot()
    kinds = ("load_failures", "lookup_failures", "store_failures")
    return sum(count for name, count in series.items() if name.startswith(kinds) and f'tier="{NAME}"' in name)
