"""Other projects' stores on the same blocks, each from a folder of its own: none is a dependency."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._redis_contenders import DEADLINE_S, Contender, Work, name


class LmCache(Contender):
    """One batch for all workers, as its own adapter submits it; so it is called by one thread only."""

    name = "LMCache C++"

    def __init__(self, extension: Any, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.client = extension.LMCacheRedisClient("127.0.0.1", work.port, work.connections)

    def set(self, blocks: Sequence[int]) -> None:
        self._batch(self.client.submit_batch_set, blocks)

    def get(self, blocks: Sequence[int]) -> None:
        self._batch(self.client.submit_batch_get, blocks)

    def _batch(self, submit: Callable[..., int], blocks: Sequence[int]) -> None:
        if blocks[0]:
            return  # the first caller submits everybody's
        every = range(self.work.num_blocks)
        keys = [name(block).decode() for block in every]
        submit(keys, [self.views[block] for block in every])
        done: list[Any] = []
        while not done:
            ready, _, _ = select.select([self.client.event_fd()], [], [], DEADLINE_S)
            assert ready, "no completion"
            done = self.client.drain_completions()
        assert all(is_ok for _, is_ok, *_ in done), done

    def close(self) -> None:
        self.client.close()


def load_lmcache(folder: Path) -> Any:
    """LMCache's extension by itself; its package would import what this project does not need."""
    found = sorted(folder.glob("lmcache/lmcache_redis*.so"))
    if not found:
        raise FileNotFoundError(f"no lmcache/lmcache_redis*.so in {folder}")
    import torch  # noqa: F401 - brings the libraries that the extension is linked with

    spec = importlib.util.spec_from_file_location("lmcache.lmcache_redis", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Mooncake(Contender):
    """A Mooncake Store over TCP: its client here, the blocks in the memory of another process.

    A batch a connection from a thread each; how many sockets carry them is its own affair.
    """

    name = "Mooncake TCP"

    def __init__(self, store: Any, work: Work, views: Sequence[memoryview]) -> None:
        super().__init__(work, views)
        self.store = store
        self.places = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]
        assert store.register_buffer(self.places[0], work.num_bytes) == 0

    def prepare(self) -> None:
        self.store.remove_all(True)  # it would keep the values that it has

    def set(self, blocks: Sequence[int]) -> None:
        told = self.store.batch_put_from(*self._batch(blocks))
        assert not any(told), told

    def get(self, blocks: Sequence[int]) -> None:
        told = self.store.batch_get_into(*self._batch(blocks))
        assert told == [self.work.block_bytes] * len(blocks), told

    def _batch(self, blocks: Sequence[int]) -> tuple[list[str], list[int], list[int]]:
        keys = [name(block).decode() for block in blocks]
        return keys, [self.places[block] for block in blocks], [self.work.block_bytes] * len(blocks)

    def close(self) -> None:
        self.prepare()
        self.store.unregister_buffer(self.places[0])


_HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
status = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[3]), 16 << 20, "tcp", "", sys.argv[2])
print(status, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def mooncake_store(folder: Path, num_bytes: int) -> Iterator[Any]:
    """Mooncake's master, a process that holds ``num_bytes`` of blocks, and a client that holds none."""
    sys.path.insert(0, str(folder))
    os.environ["MC_LOG_LEVEL"] = "ERROR"
    kind: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore
    with contextlib.ExitStack() as ends, tempfile.TemporaryFile() as log:
        place = f"127.0.0.1:{_free_port()}"
        master = [
            str(folder / "mooncake" / "mooncake_master"),
            f"--rpc_port={place.partition(':')[2]}",
            f"--metrics_port={_free_port()}",
        ]
        server = subprocess.Popen(master, stdout=log, stderr=log)
        ends.callback(_end, server)
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(folder), place, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        ends.callback(_end, holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"0\n", "Mooncake's holder does not start"
        with _stderr_into(log.fileno()):  # it tells of what it has not been told
            store = kind()
            assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", place) == 0
        ends.callback(store.close)
        yield store


@contextlib.contextmanager
def _stderr_into(log: int) -> Iterator[None]:
    kept = os.dup(2)
    try:
        os.dup2(log, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
