"""Who moves blocks to and from one redis-server: our tier, redis-py, and a raw socket loop."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from flexkv_core import TierContext
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Work:
    """What everyone does."""

    port: int
    block_bytes: int
    num_blocks: int
    connections: int
    batch: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def parts(self) -> list[range]:
        """Blocks of each connection."""
        return [range(start, self.num_blocks, self.connections) for start in range(self.connections)]


class Contender:
    """One way to move blocks; ``set`` and ``get`` move those of one connection."""

    name = ""

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        self.work = work
        self.views = views

    def prepare(self) -> None:
        """Before each round of ``set``, untimed."""

    def set(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError

    def get(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


class OurTier(Contender):
    """The tier, called as the core calls it."""

    name = "remote_redis"

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        config = RedisConfig(url=f"redis://127.0.0.1:{work.port}", connections=work.connections, ttl_s=3600)
        self.tier = RedisTier(
            config, TierContext(name="bench", value_bytes=work.block_bytes, head_bytes=4096)
        )

    def set(self, blocks: Sequence[int]) -> None:
        self._each(self.tier.store, blocks)

    def get(self, blocks: Sequence[int]) -> None:
        self._each(self.tier.load, blocks)

    def _each(self, call: Callable[..., list[Any]], blocks: Sequence[int]) -> None:
        for at in range(0, len(blocks), self.work.batch):
            part = blocks[at : at + self.work.batch]
            outcomes = call([key(block) for block in part], [self.views[block] for block in part])
            assert all(outcome.is_ok for outcome in outcomes), outcomes

    def close(self) -> None:
        self.tier.close()


class RedisPy(Contender):
    """redis-py's own get and set; the value is copied into the buffer, where it is wanted."""

    name = "redis-py"

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.client = redis.Redis(port=work.port, socket_timeout=DEADLINE_S)

    def set(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.client.set(name(block), self.views[block])

    def get(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.views[block][:] = self.client.get(name(block))

    def close(self) -> None:
        self.client.close()


class RawSocket(Contender):
    """The least that Python must do."""

    name = "raw socket"

    def __init__(self, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.ends = {part.start: socket.create_connection(("127.0.0.1", work.port)) for part in work.parts()}
        for end in self.ends.values():
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, blocks: Sequence[int]) -> None:
        end = self.ends[blocks[0]]
        for block in blocks:
            head = b"*3\r\n$3\r\nSET\r\n$71\r\n%b\r\n$%d\r\n" % (name(block), self.work.block_bytes)
            sent = end.sendmsg([head, self.views[block], b"\r\n"])
            assert sent == len(head) + self.work.block_bytes + 2
            assert end.recv(5, socket.MSG_WAITALL) == b"+OK\r\n"

    def get(self, blocks: Sequence[int]) -> None:
        end = self.ends[blocks[0]]
        head = b"$%d\r\n" % self.work.block_bytes
        for block in blocks:
            end.sendall(b"*2\r\n$3\r\nGET\r\n$71\r\n%b\r\n" % name(block))
            assert end.recv(len(head), socket.MSG_WAITALL) == head
            got = end.recv_into(self.views[block], self.work.block_bytes, socket.MSG_WAITALL)
            assert got == self.work.block_bytes
            assert end.recv(2, socket.MSG_WAITALL) == b"\r\n"

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


def key(block: int) -> bytes:
    return block.to_bytes(32, "big")


def name(block: int) -> bytes:
    return b"flexkv:%064x" % block
