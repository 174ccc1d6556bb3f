"""Counters and histograms.  Misses are counted by cause; nothing here can raise into serving.

Counts are kept as plain numbers under a name and labels; ``snapshot`` gives them all, and
``render`` writes them as OpenMetrics text for whoever exports them.

Threads: any; one lock, held for a dictionary update.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

Labels = tuple[tuple[str, str], ...]

SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metrics:
    """One chain's numbers."""

    def __init__(self) -> None:
        """No counts yet."""
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._seconds: dict[tuple[str, Labels], list[float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add ``amount`` to a counter."""
        with self._lock:
            self._counts[name, tuple(sorted(labels.items()))] += amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, tuple(sorted(labels.items()))] = value

    def observe_seconds(self, name: str, seconds: float, **labels: str) -> None:
        """Add one duration to a histogram."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            row = self._seconds.get(key)
            if row is None:
                row = self._seconds[key] = [0.0] * (len(SECONDS_BUCKETS) + 2)
            row[bisect_left(SECONDS_BUCKETS, seconds)] += 1
            row[-1] += seconds

    def value(self, name: str, **labels: str) -> float:
        """Sum of a counter (or a gauge's value) over all label sets that contain ``labels``."""
        wanted = set(labels.items())
        with self._lock:
            rows: Iterable[tuple[tuple[str, Labels], float]] = [
                *self._counts.items(),
                *self._gauges.items(),
            ]
        return sum(v for (n, have), v in rows if n == name and wanted <= set(have))

    def snapshot(self) -> dict[str, float]:
        """Every counter and gauge as ``name{label="value"}``."""
        with self._lock:
            rows = [*self._counts.items(), *self._gauges.items()]
        return {_series(name, labels): value for (name, labels), value in sorted(rows)}

    def summary(self) -> str:
        """One line for the log: what was moved, from where, and everything that went wrong, by cause."""
        rows = [row for row in self.snapshot().items() if row[0].partition("{")[0] in IN_THE_LOG and row[1]]
        return " ".join(f"{series}={value:.15g}" for series, value in rows)

    def render(self) -> str:
        """All numbers as OpenMetrics text, prefix ``flexkv_``."""
        lines = [f"flexkv_{series} {value:.15g}" for series, value in self.snapshot().items()]
        with self._lock:
            histograms = sorted((key, list(row)) for key, row in self._seconds.items())
        for (name, labels), row in histograms:
            running = 0.0
            for bound, amount in zip([*map(str, SECONDS_BUCKETS), "+Inf"], row[:-1], strict=True):
                running += amount
                lines.append(f"flexkv_{_series(name + '_bucket', (*labels, ('le', bound)))} {running:.15g}")
            lines.append(f"flexkv_{_series(name + '_count', labels)} {running:.15g}")
            lines.append(f"flexkv_{_series(name + '_sum', labels)} {row[-1]:.15g}")
        return "\n".join([*lines, "# EOF"]) + "\n"


IN_THE_LOG = frozenset(
    {
        "abandoned_tasks",
        "adapter_faults",
        "codec_failures",
        "core_faults",
        "driver_bugs",
        "evict_failures",
        "evicted_blocks",
        "foreign_blocks",
        "invalidations",
        "layerwise_aborts",
        "layerwise_failures",
        "limited_blocks",
        "load_deadlines",
        "load_failures",
        "load_shortened",
        "loaded_tokens",
        "lookup_failures",
        "poison_found",
        "promises_broken",
        "quarantined_slots",
        "store_dropped_blocks",
        "store_failures",
        "tier_state_changes",
        "tokens",
        "weights_suspect",
    }
)
"""What ``summary`` tells: what was moved, and everything that went wrong."""


def _series(name: str, labels: Labels) -> str:
    if not labels:
        return name
    inside = ",".join(f'{key}="{value.translate(_ESCAPE)}"' for key, value in labels)
    return f"{name}{{{inside}}}"


_ESCAPE = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
