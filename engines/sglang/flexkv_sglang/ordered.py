"""Copies that the engine has gone on behind: their end is only taken in.

Threads: the scheduler's only.
"""

from __future__ import annotations

from flexkv_core import EngineError
from flexkv_core.manager import KVManager
from flexkv_core.transfer import Ticket

from .mode_choice import ModeChoice


class OrderedCopies:
    """Copies that were ordered before what the device did next, or that nobody wants any more.

    Attributes:
        entries: Task and running copy; no copy for one that nobody wants.
    """

    def __init__(self, manager: KVManager, choice: ModeChoice) -> None:
        """None yet; ``choice`` is told how fast loads are."""
        self.entries: list[tuple[int, Ticket | None]] = []
        self._manager = manager
        self._choice = choice

    @property
    def tasks(self) -> list[int]:
        """Tasks whose end was not taken in."""
        return [task for task, _ in self.entries]

    def add(self, task: int, ticket: Ticket | None = None) -> None:
        """The engine goes on."""
        self.entries.append((task, ticket))

    def deliver(self) -> None:
        """Take in what has ended.

        Raises:
            EngineError: a copy failed, and the engine has used its slots meanwhile: better no answer than a
                wrong one.
        """
        if self.entries:
            self.entries = [entry for entry in self.entries if not self._is_delivered(*entry)]

    def _is_delivered(self, task: int, ticket: Ticket | None) -> bool:
        answer = self._manager.try_wait([task]).get(task)
        if answer is None:
            return False
        if ticket is not None and ticket.error is not None:
            raise EngineError(f"a restore failed on the device after its slots were used: {ticket.error}")
        if ticket is not None:
            self._choice.observe(ticket)
        return True
