"""When what the device holds may be of other weights than those that compute now.

While it may, nothing is stored and nothing is promised: KV of the old weights under a key of the new ones
would be served for ever.  SGLang flushes the device after a change that succeeded, unless it was told not
to; it flushes nothing after one that failed, or at the end of a session of changes (from 0.5.21), though
requests may have run in between.

Source: sglang 0.5.16 to 0.5.23, managers/scheduler_components/weight_updater.py.

Threads: the scheduler's.
"""

from __future__ import annotations

BEGIN = "begin_weight_update"
END = "end_weight_update"


class WeightChanges:
    """What the calls that change weights, and flushes between them, leave behind.

    Attributes:
        are_suspect: Whether the device may hold KV of other weights.
        want_flush: Whether nobody else will empty the device, so that it is for us to do.
    """

    def __init__(self) -> None:
        """Nothing has changed yet."""
        self.are_suspect = False
        self._is_owed = False
        self._session_is_open = False

    @property
    def want_flush(self) -> bool:
        """Whether the device is to be emptied by us, as soon as nothing runs."""
        return self.are_suspect and self._is_owed and not self._session_is_open

    def begins(self) -> None:
        """A call is about to change weights."""
        self.are_suspect = True

    def ended(self, call: str, *, is_ok: bool) -> None:
        """A call has ended: what it has changed, if it failed, nobody knows."""
        if not is_ok:
            self._is_owed = True
        elif call == BEGIN:
            self._session_is_open = True
        elif call == END:
            self._session_is_open = False

    def flushed(self) -> None:
        """The device was emptied.  Within a session it fills again, with KV of unfinished weights."""
        if self._session_is_open:
            self._is_owed = True
        else:
            self.are_suspect = self._is_owed = False
