"""What a process holds: threads, descriptors, children; to be compared before and after."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01
"""How often a condition is looked at again until its deadline."""


def _threads() -> frozenset[tuple[int, str]]:
    return frozenset((thread.ident or 0, thread.name) for thread in threading.enumerate())


def _descriptors() -> frozenset[tuple[str, str]]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add((entry.name, os.readlink(entry)))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return frozenset(found)


def _children() -> frozenset[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except FileNotFoundError:  # the thread ended, or this kernel does not tell
            continue
    return frozenset(found)


@dataclass(frozen=True)
class Snapshot:
    """What the process held at one moment."""

    threads: frozenset[tuple[int, str]]
    descriptors: frozenset[tuple[str, str]]
    children: frozenset[int]

    @classmethod
    def take(cls) -> Snapshot:
        """Look now."""
        return cls(_threads(), _descriptors(), _children())

    def left_since(self) -> list[str]:
        """What is held now and was not then, one line each."""
        now = Snapshot.take()
        lines = [f"thread {name}" for _, name in sorted(now.threads - self.threads)]
        lines += [f"descriptor {number} -> {to}" for number, to in sorted(now.descriptors - self.descriptors)]
        lines += [f"child process {pid}" for pid in sorted(now.children - self.children)]
        return lines

    def wait_until_back(self, deadline_s: float = 30.0) -> list[str]:
        """Wait until nothing is left; returns what still is at the deadline."""
        until = time.monotonic() + deadline_s
        while left := self.left_since():
            if time.monotonic() >= until:
                return left
            gc.collect()  # what nobody holds any more is no leak; costly, so only when something is left
            time.sleep(_POLL_S)
        return []
