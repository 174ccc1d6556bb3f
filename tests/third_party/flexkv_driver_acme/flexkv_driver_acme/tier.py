"""One file a block: written under another name, then renamed.

Threads: nothing is shared but the directory; the file system orders renames.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from flexkv_core import (
    DONE,
    MISS,
    BlockKey,
    Outcome,
    Status,
    StoredBlock,
    Tier,
    TierCapabilities,
    TierClosedError,
    TierContext,
    failed,
    loaded,
)

from .config import AcmeConfig

T = TypeVar("T")


class AcmeTier(Tier):
    """Values as files named by their keys."""

    capabilities = TierCapabilities(persistent=True, shared=True, can_list=True)

    def __init__(self, path: Path, head_bytes: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._head_bytes = head_bytes
        self._is_closed = False

    def _each(self, call: Callable[..., Outcome], *columns: Sequence[T]) -> list[Outcome]:
        if self._is_closed:
            raise TierClosedError("the acme store is closed")
        return [_translated(call, *row) for row in zip(*columns, strict=True)]

    def lookup(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._each(lambda key: Outcome(Status.OK, (self._path / key.hex()).stat().st_size), keys)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Outcome]:
        return self._each(self._load_one, keys, into)

    def _load_one(self, key: BlockKey, view: memoryview) -> Outcome:
        with (self._path / key.hex()).open("rb", buffering=0) as file:
            got = file.readinto(view)
            return failed(Status.CORRUPT, "longer than a block") if file.read(1) else loaded(got)

    def store(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> list[Outcome]:
        return self._each(self._store_one, keys, values)

    def _store_one(self, key: BlockKey, value: memoryview) -> Outcome:
        draft = self._path / f"{key.hex()}.{os.getpid()}.{threading.get_ident()}.draft"
        draft.write_bytes(value)
        draft.replace(self._path / key.hex())
        return Outcome(Status.OK, len(value))

    def evict(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._each(self._evict_one, keys)

    def _evict_one(self, key: BlockKey) -> Outcome:
        (self._path / key.hex()).unlink()
        return DONE

    def list_blocks(self) -> Iterator[list[StoredBlock]]:
        for path in self._path.glob("?" * 64):
            with path.open("rb") as file:
                head = file.read(self._head_bytes)
            info = path.stat()
            yield [StoredBlock(bytes.fromhex(path.name), info.st_size, head, info.st_mtime)]

    def close(self) -> None:
        self._is_closed = True


def _translated(call: Callable[..., Outcome], *row: object) -> Outcome:
    try:
        return call(*row)
    except FileNotFoundError:
        return MISS
    except PermissionError as exc:
        return failed(Status.DENIED, str(exc))
    except OSError as exc:
        return failed(Status.UNAVAILABLE, str(exc))


def open_tier(config: AcmeConfig, context: TierContext) -> AcmeTier:
    """Open the store."""
    return AcmeTier(config.path, context.head_bytes)
