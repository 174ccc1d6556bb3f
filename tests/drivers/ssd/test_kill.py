"""A writer killed at any moment leaves every confirmed value, no torn one, and no lost slot."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from flexkv_core import TierClosedError
from flexkv_core.testing import Value, context_for, make_values, small_layout
from flexkv_driver_ssd.tier import SsdTier
from tests.support.ssd_disk import disk_bytes, listed, load, served, tier_at
from tests.support.waiting import DEADLINE_S

SEED = 11
LAYOUT = small_layout(num_layers=8, row_bytes=(2048, 2048), block_tokens=16)
SLOTS = 24
CAPACITY = SLOTS * LAYOUT.slot_bytes


def _open(root: Path) -> SsdTier:
    return tier_at(root, capacity=CAPACITY, slab=4 * LAYOUT.slot_bytes, context=context_for(LAYOUT, "disk"))


def _values(edition: int) -> list[Value]:
    return make_values(LAYOUT, SLOTS, edition, alignment_bytes=4096)


def write_for_ever(root: str, seed: int) -> None:
    """In the child: store and evict without end, telling what is done."""
    chance = random.Random(seed)
    editions = [_values(0), _values(1)]
    with _open(Path(root)) as tier:
        while True:
            number, edition = chance.randrange(SLOTS), chance.randrange(2)
            value = editions[edition][number]
            if chance.random() < 0.25:
                print(f"evict {number}", flush=True)
                tier.evict([value.key])
                print(f"evicted {number}", flush=True)
            else:
                print(f"store {number}", flush=True)
                outcome = tier.store([value.key], [value.view])[0]
                print(f"{'stored' if outcome.is_ok else 'kept'} {number} {edition}", flush=True)


def _run_and_kill(root: Path, seed: int, num_lines: int) -> tuple[dict[int, int], int]:
    """What the child told: edition by number of what is surely there, and what it was at."""
    code = f"from tests.drivers.ssd.test_kill import write_for_ever as w; w({str(root)!r}, {seed})"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as lines:
        told = [next(lines).split() for _ in range(num_lines)]
        child.kill()
        told += [line.split() for line in lines if line.endswith("\n")]
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    sure: dict[int, int] = {}
    for word, number, *edition in told:
        if word == "stored":
            sure[int(number)] = int(edition[0])
        elif word == "evicted":
            sure.pop(int(number), None)
    last, number = told[-1][0], int(told[-1][1])
    return sure, number if last in ("store", "evict") else -1


def _check(root: Path, sure: dict[int, int], at_work: int) -> None:
    editions = [_values(0), _values(1)]
    with _open(root) as tier:
        rows = listed(tier)
        for number in range(SLOTS):
            if number == at_work:  # done or not, but never torn
                outcome, view = load(tier, editions[0][number])
                if outcome.is_ok:
                    assert any(e[number].equals(view) and e[number].accepts(view) for e in editions)
                continue
            assert (editions[0][number].key in rows) == (number in sure), f"number {number}, seed {SEED}"
            if number in sure:
                assert served(tier, editions[sure[number]][number]), f"number {number}, seed {SEED}"
        usage = tier.usage()
        assert usage.used_bytes == len(rows) * LAYOUT.slot_bytes
        # A slab has two header pages, an index page, and perhaps one that lists its extents.
        assert disk_bytes(root) <= CAPACITY + (SLOTS // 4 * 4 + 2) * 4096
        tier.evict([value.key for value in editions[0]])
        assert tier.usage().used_bytes == 0
        assert all(tier.store([v.key], [v.view])[0].is_ok for v in editions[0]), "a slot was lost"
        tier.evict([value.key for value in editions[0]])


def test_sigkill_in_mid_store(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    for kill in range(4):
        sure, at_work = _run_and_kill(tmp_path, SEED + kill, chance.randrange(5, 60))
        _check(tmp_path, sure, at_work)


def live_on_in_a_child(root: str) -> None:
    """In a process that will be killed: leave a child behind, which tries the tier first."""
    told, end = os.pipe(), os.pipe()
    tier = _open(Path(root))
    (value,) = _values(0)[:1]
    tier.store([value.key], [value.view])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads and fork
        if os.fork() == 0:
            os.close(end[1])
            try:
                tier.store([value.key], [value.view])
                os.write(told[1], b"stored\n")
            except TierClosedError:
                os.write(told[1], b"closed\n")
            tier.close()
            os.read(0, 1)  # until the test ends
            os._exit(0)
    os.close(told[1])
    with os.fdopen(told[0]) as lines:
        print(next(lines), end="", flush=True)
    os.read(end[0], 1)  # until it is killed


def test_a_child_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    code = f"from tests.drivers.ssd.test_kill import live_on_in_a_child as f; f({str(tmp_path)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "closed\n", (
            "two processes with one tier overwrite each other's slots"
        )
        process.kill()
        process.wait(DEADLINE_S)
        with _open(tmp_path) as tier:
            assert served(tier, _values(0)[0])
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdin.close()  # ends the child
        process.stdout.close()
