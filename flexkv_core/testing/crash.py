"""Writers in processes of their own, to be killed in the middle of a write.

The child imports the author's test class by name, makes a bare instance, and calls its ``open_tier``
with the same medium; nothing is pickled.  It stores the same few keys round after round, each
round with other payloads, and prints a line when a store has been acknowledged.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tier_kit import TierKit

NUM_KEYS = 6
"""Few, so that most writes overwrite something."""


class Writer:
    """A child process that stores until it is killed."""

    def __init__(self, kit: TierKit, medium: Any, deadline_s: float) -> None:
        """Start the child; ``medium`` is sent as JSON, paths included."""
        cls = type(kit)
        recipe = {
            "module": cls.__module__,
            "file": getattr(sys.modules[cls.__module__], "__file__", None),
            "class": cls.__qualname__,
            "medium": _encode(medium),
        }
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        command = [sys.executable, "-m", "flexkv_core.testing.crash", json.dumps(recipe)]
        self._deadline_s = deadline_s
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=env
        )
        self._rest = b""

    def wait_for_stores(self, count: int) -> list[tuple[int, int]]:
        """Wait until ``count`` more stores were acknowledged: ``(number of key, round)`` each.

        Raises:
            AssertionError: the child ended, or was silent for ``deadline_s``.
        """
        return [self._next() for _ in range(count)]

    def kill(self) -> list[tuple[int, int]]:
        """SIGKILL; returns what it acknowledged and nobody had read yet."""
        self._child.kill()
        self._child.wait(self._deadline_s)
        self._rest += _pipe(self._child.stdout).read()
        whole, _, _ = self._rest.rpartition(b"\n")
        return [_told(line) for line in whole.splitlines()]

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.wait(self._deadline_s)
        _pipe(self._child.stdout).close()
        _pipe(self._child.stderr).close()

    def _next(self) -> tuple[int, int]:
        while b"\n" not in self._rest:
            self._rest += self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return _told(line)

    def _read(self) -> bytes:
        out = _pipe(self._child.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(self._deadline_s):
                raise AssertionError(f"the writing process said nothing for {self._deadline_s} s")
        data = os.read(out.fileno(), 1 << 16)
        if not data:
            said = _pipe(self._child.stderr).read().decode(errors="replace")[-4000:]
            raise AssertionError(f"the writing process ended by itself:\n{said}")
        return data


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _told(line: bytes) -> tuple[int, int]:
    number, edition = line.split()
    return int(number), int(edition)


def _encode(medium: Any) -> Any:
    if isinstance(medium, Path):
        return {"__path__": str(medium)}
    if isinstance(medium, dict):
        return {key: _encode(value) for key, value in medium.items()}
    if isinstance(medium, list | tuple):
        return [_encode(value) for value in medium]
    if medium is None or isinstance(medium, str | int | float):
        return medium
    raise TypeError(f"a medium of type {type(medium).__name__} cannot be sent to a writing process")


def _decode(medium: Any) -> Any:
    if isinstance(medium, dict):
        if set(medium) == {"__path__"}:
            return Path(medium["__path__"])
        return {key: _decode(value) for key, value in medium.items()}
    return [_decode(value) for value in medium] if isinstance(medium, list) else medium


def _module(name: str, file: str | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file) if file else None
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def main(argument: str) -> None:
    """Store for ever, acknowledging each store on standard output."""
    from .values import context_for

    recipe = json.loads(argument)
    found: Any = _module(recipe["module"], recipe["file"])
    for part in recipe["class"].split("."):
        found = getattr(found, part)
    kit: TierKit = found()
    tier = kit.open_tier(context_for(kit.layout, "kit"), _decode(recipe["medium"]))
    edition = 0
    while True:
        edition += 1
        for number, value in enumerate(kit.values(tier, NUM_KEYS, seed=edition)):
            (outcome,) = tier.store([value.key], [value.view])
            if not outcome.is_ok:
                raise SystemExit(f"store failed: {outcome}")
            os.write(1, b"%d %d\n" % (number, edition))


if __name__ == "__main__":
    main(sys.argv[1])
