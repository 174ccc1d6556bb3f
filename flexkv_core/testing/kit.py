"""What all kit classes share: marked overrides, skips that are printed, results of work in threads."""

from __future__ import annotations

import difflib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

DEADLINE_S = 120.0
"""Longest wait for anything in the kit: far beyond what a healthy part needs on a loaded machine."""

_MARK = "_overrides_kit"
_KIT = "flexkv_core.testing"

Function = TypeVar("Function", bound=Callable[..., object])


def overrides_kit(function: Function) -> Function:
    """Mark a method as a deliberate override of a kit test.

    Without the mark an override is refused, and with it a name that the kit does not have: a kit
    test that was renamed cannot be lost in silence.
    """
    setattr(function, _MARK, True)
    return function


class Kit:
    """Base of the kit's classes.

    ``deadline_s`` bounds every wait.
    """

    deadline_s: float = DEADLINE_S
    _skipped: dict[str, list[str]]
    _is_telling = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._skipped = {}
        if not cls.__module__.startswith(_KIT):
            _check_overrides(cls)

    @pytest.fixture(autouse=True)
    def _tell_skipped(self, request: pytest.FixtureRequest) -> None:
        node = request.node.getparent(pytest.Class)
        if node is not None and not self._is_telling:
            type(self)._is_telling = True
            node.addfinalizer(lambda: self._tell(request.config))

    @classmethod
    def _tell(cls, config: pytest.Config) -> None:
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        skipped, cls._skipped, cls._is_telling = cls._skipped, {}, False
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        if reporter is None or capture is None or not skipped:
            return
        with capture.global_and_fixture_disabled():
            reporter.write_line("")
            for reason, tests in skipped.items():
                names = list(dict.fromkeys(tests))
                more = f" and {len(names) - 2} more" if len(names) > 2 else ""
                reporter.write_line(f"{cls.__name__}: {reason}: skipped {', '.join(names[:2])}{more}")

    def skip(self, reason: str) -> None:
        """Skip the running test, and have it printed when the class is through."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1]
        type(self)._skipped.setdefault(reason, []).append(test.split("[")[0].split(" ")[0])
        pytest.skip(reason)


def _check_overrides(cls: type) -> None:
    kit_tests = {
        name
        for base in cls.__mro__
        if base.__module__.startswith(_KIT)
        for name in vars(base)
        if name.startswith("test")
    }
    for name, member in vars(cls).items():
        is_marked = getattr(member, _MARK, False)
        if name in kit_tests and not is_marked:
            raise TypeError(
                f"{cls.__qualname__}.{name} overrides the kit's test: mark it @overrides_kit if that is "
                "meant, or rename it"
            )
        if is_marked and name not in kit_tests:
            close = difflib.get_close_matches(name, kit_tests, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise TypeError(
                f"{cls.__qualname__}.{name} is marked @overrides_kit; the kit has no such test{hint}"
            )


def spin(seconds: float) -> None:
    """Pass so much time awake: to kill or close at another moment each time, not to wait for anything."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Crew:
    """Threads that work until they are through or told to stop, and whose errors are not lost."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        """No threads yet."""
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self._deadline_s = deadline_s
        self._threads: list[threading.Thread] = []

    def start(self, count: int, work: Callable[[int], None]) -> None:
        """Start ``count`` threads, each of which calls ``work`` with its number, all at once."""
        gate = threading.Barrier(count)
        for number in range(count):
            thread = threading.Thread(target=self._run, args=(gate, work, number), name=f"kit-crew-{number}")
            self._threads.append(thread)
            thread.start()

    def _run(self, gate: threading.Barrier, work: Callable[[int], None], number: int) -> None:
        try:
            gate.wait(self._deadline_s)
            work(number)
        except BaseException as exc:  # noqa: BLE001 - the top of a thread: told to the test in join
            self.errors.append(exc)

    def join(self) -> None:
        """Wait for all.  Raises the first error, or AssertionError for threads that hang."""
        for thread in self._threads:
            thread.join(self._deadline_s)
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        assert not hanging, f"still running after {self._deadline_s} s: {hanging}"
        if self.errors:
            raise self.errors[0]
