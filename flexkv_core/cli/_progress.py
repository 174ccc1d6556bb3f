"""Says what is waited for, and for how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TextIO, TypeVar

T = TypeVar("T")
EVERY_S = 0.5
PLAIN_EVERY_S = 10.0


class Progress:
    """One line a step: rewritten on a terminal, a dot every ten seconds elsewhere.

    Threads: one; ``call`` does its work in a thread of its own and waits for it.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._label = ""
        self._began = self._said = 0.0

    def say(self, text: str = "") -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Announce a step, and say at its end how long it took."""
        self._label = label
        self._began = self._said = time.monotonic()
        self._write(f"  {label} ...")
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            again = f"\r  {label} ..." if self._is_terminal else ""
            self._write(f"{again} {outcome}, {time.monotonic() - self._began:.1f} s\n")

    def tick(self) -> None:
        """Show that it still goes on; call it as often as is convenient."""
        now = time.monotonic()
        if self._is_terminal and now - self._said > EVERY_S:
            self._write(f"\r  {self._label} ... {now - self._began:.0f} s")
            self._said = now
        elif not self._is_terminal and now - self._said > PLAIN_EVERY_S:
            self._write(".")
            self._said = now

    def call(self, label: str, work: Callable[[], T]) -> T:
        """Do something that blocks, and keep the line alive."""
        with self.step(label), ThreadPoolExecutor(1, "flexkv-demo") as pool:
            future = pool.submit(work)
            while not wait([future], EVERY_S).done:
                self.tick()
            return future.result()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
