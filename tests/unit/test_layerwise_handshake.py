"""Counters in the hands of a transfer worker that is another process, over a real socket."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv_core.errors import SyncError
from flexkv_core.layerwise import handshake
from flexkv_core.layerwise.counters import LayerCounters
from flexkv_core.layerwise.handshake import RankId, offer_counters, socket_path
from flexkv_core.layerwise.listener import CounterListener, RankCounters
from flexkv_core.layerwise.waits import LayerWaits
from flexkv_core.transfer import CopyJob, PassedFence, Ticket
from tests.support.waiting import DEADLINE_S

LAYERS = 3
ROW = 64
FOREVER_S = 10 * DEADLINE_S
"""A time-out that must not be what ends a wait."""
ONLY = RankId(0, 1)

WORKER = (
    f"DEADLINE_S = {DEADLINE_S}"
    + """
import mmap, os, sys
from pathlib import Path
from flexkv_core.layerwise.listener import CounterListener

path, host, device, layers, row = sys.argv[1:4] + [int(n) for n in sys.argv[4:]]
host, device = (mmap.mmap(os.open(name, os.O_RDWR), 0) for name in (host, device))
(rank,) = CounterListener(Path(path), 1, layers, 3).accept(DEADLINE_S)
print("ready", flush=True)
for line in sys.stdin:
    task, counter, first, count = map(int, line.split())
    for layer in range(count):
        at = (first * layers + layer) * row
        device[at : at + row] = host[at : at + row]
        rank.signal(counter, layer)
    print("done", task, flush=True)
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    return made


class Worker:
    """A process that copies rows of a shared file into another one, layer by layer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "w.sock"
        self.files = []
        for name, byte in (("host", None), ("device", 0)):
            file = folder / name
            file.write_bytes(bytes(8 * LAYERS * ROW) if byte == 0 else os.urandom(8 * LAYERS * ROW))
            with file.open("r+b") as opened:
                self.files.append(mmap.mmap(opened.fileno(), 0))
        self.host, self.device = self.files
        words = [self.path, folder / "host", folder / "device", LAYERS, ROW]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def copy(self, task: int, counter: int, slot: int, layers: int = LAYERS) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{task} {counter} {slot} {layers}\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def row(self, slot: int, layer: int) -> tuple[bytes, bytes]:
        at = (slot * LAYERS + layer) * ROW
        return self.device[at : at + ROW], self.host[at : at + ROW]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        for file in self.files:
            file.close()


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    made = Worker(folder)
    yield made
    made.close()


@pytest.fixture
def counters() -> Iterator[LayerCounters]:
    made = LayerCounters(LAYERS)
    yield made
    made.close()


def make_ticket(number: int) -> Ticket:
    return Ticket(CopyJob(number, [], [], PassedFence(), layerwise=True), 0, LAYERS)


# ---- a worker that copies -------------------------------------------------------------------------


def test_a_worker_in_another_process_copies_and_signals(worker: Worker, counters: LayerCounters) -> None:
    """R81, R82: two loads a batch, more batches than counters, and each byte is there when its layer is."""
    link = offer_counters(worker.path, ONLY, counters, deadline_s=DEADLINE_S)
    assert worker.says() == "ready"
    assert not worker.path.exists(), "the socket's file goes when all ranks have come"
    waits = LayerWaits(counters, timeout_s=DEADLINE_S, is_alive=link.is_alive)
    for batch in range(4):
        slots = (2 * batch, 2 * batch + 1)
        loads = [waits.open(make_ticket(slot), slot, by_worker=True) for slot in slots]
        for load in loads:
            worker.copy(load.task, load.counter.index, load.task)
        for layer in range(LAYERS):
            waits.wait_until(layer)
            for slot in slots:
                device, host = worker.row(slot, layer)
                assert device == host
        for load in loads:
            assert worker.says() == f"done {load.task}"
            load.ticket.finish(0.0)
        assert len(waits.collect()) == 2
        waits.begin_batch()
    assert not waits.take_failed()
    link.close()


def test_a_worker_that_is_killed_wakes_its_waiters(worker: Worker, counters: LayerCounters) -> None:
    """R85, HS-50: within a second, with what was waited for."""
    link = offer_counters(worker.path, ONLY, counters, deadline_s=DEADLINE_S)
    assert worker.says() == "ready"
    waits = LayerWaits(counters, timeout_s=FOREVER_S, is_alive=link.is_alive)
    load = waits.open(make_ticket(0), 11, by_worker=True)
    worker.copy(11, load.counter.index, 0, layers=1)
    waits.wait_until(0)
    assert load.ready_to == 0
    killer = threading.Timer(0.1, worker.process.kill)
    killer.start()
    began = time.monotonic()
    waits.wait_until(1)
    assert time.monotonic() - began < DEADLINE_S, "a part of a second on an idle machine"
    killer.join()
    assert not link.is_alive()
    (failed,) = waits.take_failed()
    assert failed.failure == "rank 0, task 11, counter 0 (generation 1), layer 1: whoever copies it has died"
    link.close()
    link.close()


# ---- who is taken ---------------------------------------------------------------------------------


def _listen(folder: Path, ranks: int = 1) -> tuple[CounterListener, list[object], threading.Thread]:
    listener = CounterListener(folder / "w.sock", ranks, LAYERS, 3)
    found: list[object] = []

    def accept() -> None:
        try:
            found.extend(listener.accept(DEADLINE_S))
        except SyncError as exc:
            found.append(exc)

    thread = threading.Thread(target=accept)
    thread.start()
    return listener, found, thread


def _close(found: list[object]) -> None:
    for one in found:
        if isinstance(one, RankCounters):
            one.close()
            one.close()


def test_every_rank_is_known_by_its_index(folder: Path, counters: LayerCounters) -> None:
    _, found, thread = _listen(folder, ranks=2)
    other = LayerCounters(LAYERS)
    links = [
        offer_counters(folder / "w.sock", RankId(rank, 2), given, deadline_s=DEADLINE_S)
        for rank, given in ((1, other), (0, counters))
    ]
    thread.join()
    first, second = found
    assert isinstance(first, RankCounters)
    assert isinstance(second, RankCounters)
    assert (first.rank, second.rank) == (0, 1)
    second.signal(2, 1)
    assert os.eventfd_read(other.counters[2].descriptors[1]) == 1
    assert all(link.is_alive() for link in links)
    assert first.is_alive()
    links[1].close()
    assert not first.is_alive()
    _close(found)
    assert not links[0].is_alive()
    links[0].close()
    other.close()


@pytest.mark.parametrize(
    ("rank", "layers"),
    [(RankId(1, 1), LAYERS), (RankId(-1, 1), LAYERS), (RankId(0, 2), LAYERS), (ONLY, LAYERS + 1)],
    ids=["index", "negative index", "count", "layers"],
)
def test_what_is_not_expected_is_rejected_and_the_right_one_still_taken(
    folder: Path, counters: LayerCounters, rank: RankId, layers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """R86."""
    _, found, thread = _listen(folder)
    wrong = LayerCounters(layers)
    with pytest.raises(SyncError, match="rejected") as caught:
        offer_counters(folder / "w.sock", rank, wrong, deadline_s=DEADLINE_S)
    assert caught.value.ranks == (rank.index,)
    link = offer_counters(folder / "w.sock", ONLY, counters, deadline_s=DEADLINE_S)
    thread.join()
    assert "a rank is rejected" in caplog.text
    link.close()
    wrong.close()
    _close(found)


def test_a_rank_that_comes_twice_is_rejected(folder: Path, counters: LayerCounters) -> None:
    _, found, thread = _listen(folder, ranks=2)
    first = offer_counters(folder / "w.sock", RankId(0, 2), counters, deadline_s=DEADLINE_S)
    with pytest.raises(SyncError, match="rejected"):
        offer_counters(folder / "w.sock", RankId(0, 2), counters, deadline_s=DEADLINE_S)
    second = offer_counters(folder / "w.sock", RankId(1, 2), counters, deadline_s=DEADLINE_S)
    thread.join()
    first.close()
    second.close()
    _close(found)


@pytest.mark.parametrize("sent", [b"", b"12345", handshake.HEADER.pack(0, 1, LAYERS, 3) + b"\0\0\0\0"])
def test_half_a_greeting_is_rejected(folder: Path, counters: LayerCounters, sent: bytes) -> None:
    """Descriptors that did not come are no descriptors: nothing is taken as -1 (HS-60)."""
    _, found, thread = _listen(folder)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(folder / "w.sock"))
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        raw.settimeout(DEADLINE_S)
        assert raw.recv(1) == handshake.REJECTED
    link = offer_counters(folder / "w.sock", ONLY, counters, deadline_s=DEADLINE_S)
    thread.join()
    link.close()
    _close(found)


def _spoken(folder: Path, rank: RankId, counters: LayerCounters) -> socket.socket:
    """A rank that has said all that it has to say, whenever it is heard."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(folder / "w.sock"))
    handshake._send(connection, rank, counters)
    connection.settimeout(DEADLINE_S)
    return connection


def test_missing_ranks_are_named_and_nothing_is_kept(
    folder: Path, counters: LayerCounters, caplog: pytest.LogCaptureFixture
) -> None:
    """HS-60, R87: one deadline for all; a rank that is missing ends the start."""
    listener = CounterListener(folder / "w.sock", 3, LAYERS, 3)
    before = len(os.listdir("/proc/self/fd"))
    with _spoken(folder, RankId(1, 3), counters) as rank:
        with pytest.raises(SyncError, match=r"ranks \[0, 2\] have not come") as caught:
            listener.accept(0.2)
        assert caught.value.ranks == (0, 2)
        assert "Deadline exceeded" in caplog.text
        assert not (folder / "w.sock").exists()
        assert rank.recv(1) == handshake.ACCEPTED
        assert handshake.has_ended(rank), "a rank that was taken learns that the worker gave up"
    assert len(os.listdir("/proc/self/fd")) < before


def test_one_that_says_nothing_does_not_keep_the_others_out(
    folder: Path, counters: LayerCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HS-60: the deadline is for ranks that have yet to come, not for one that is there and silent."""
    monkeypatch.setattr("flexkv_core.layerwise.listener._SPEAK_S", 0.2)
    listener = CounterListener(folder / "w.sock", 1, LAYERS, 3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(folder / "w.sock"))
        with _spoken(folder, ONLY, counters) as rank:
            found: list[object] = list(listener.accept(DEADLINE_S))
            assert rank.recv(1) == handshake.ACCEPTED
        silent.settimeout(DEADLINE_S)
        assert silent.recv(1) == handshake.REJECTED
    _close(found)


def test_a_rank_that_was_started_again_is_taken_in_place_of_the_dead_one(
    folder: Path, counters: LayerCounters
) -> None:
    """Its first life has closed its end; one that lives is not replaced."""
    made = CounterListener(folder / "w.sock", 2, LAYERS, 3)
    found: list[RankCounters] = []
    thread = threading.Thread(target=lambda: found.extend(made.accept(DEADLINE_S)))
    thread.start()
    offer_counters(folder / "w.sock", RankId(0, 2), counters, deadline_s=DEADLINE_S).close()
    again = offer_counters(folder / "w.sock", RankId(0, 2), counters, deadline_s=DEADLINE_S)
    with pytest.raises(SyncError, match="rejected"):
        offer_counters(folder / "w.sock", RankId(0, 2), counters, deadline_s=DEADLINE_S)
    other = offer_counters(folder / "w.sock", RankId(1, 2), counters, deadline_s=DEADLINE_S)
    thread.join()
    assert [taken.rank for taken in found] == [0, 1]
    assert all(taken.is_alive() for taken in found)
    found[0].signal(0, 0)
    assert os.eventfd_read(counters.counters[0].descriptors[0]) == 1
    for end in (again, other, *found):
        end.close()


def test_nobody_listens(folder: Path, counters: LayerCounters) -> None:
    with pytest.raises(SyncError, match="no transfer worker listens"):
        offer_counters(folder / "w.sock", ONLY, counters, deadline_s=0.2)


def test_a_worker_that_does_not_answer(folder: Path, counters: LayerCounters) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "w.sock"))
        silent.listen(1)
        with pytest.raises(SyncError, match="no answer"):
            offer_counters(folder / "w.sock", ONLY, counters, deadline_s=0.2)


# ---- who may come near ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_directory_that_others_may_enter_is_refused(
    tmp_path: Path, counters: LayerCounters, mode: int
) -> None:
    """HS-61: both ends look."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SyncError, match="0700"):
        CounterListener(folder / "w.sock", 1, LAYERS, 3)
    with pytest.raises(SyncError, match="0700"):
        offer_counters(folder / "w.sock", ONLY, counters, deadline_s=0.1)


def test_a_link_to_a_directory_is_refused(tmp_path: Path, folder: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(SyncError, match="0700"):
        CounterListener(link / "w.sock", 1, LAYERS, 3)


def test_the_socket_is_private(folder: Path) -> None:
    listener = CounterListener(folder / "deeper" / "w.sock", 1, LAYERS, 3)
    assert (folder / "deeper").stat().st_mode & 0o777 == 0o700
    assert (folder / "deeper" / "w.sock").stat().st_mode & 0o777 == 0o600
    listener.close()
    listener.close()


@pytest.mark.parametrize("end", ["rank", "worker"])
def test_another_user_is_not_spoken_to(
    folder: Path, counters: LayerCounters, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HS-61: the kernel says who is at the other end; here it is told that we are somebody else."""
    _, found, thread = _listen(folder)
    own = os.getuid()
    rank_thread = threading.current_thread()

    def somebody_else() -> int:
        is_rank = threading.current_thread() is rank_thread
        return own + 1 if is_rank is (end == "rank") else own

    monkeypatch.setattr(handshake, "check_private", lambda _folder: None)
    monkeypatch.setattr(os, "getuid", somebody_else)
    with pytest.raises(SyncError, match="another user" if end == "rank" else "rejected|no answer"):
        offer_counters(folder / "w.sock", ONLY, counters, deadline_s=DEADLINE_S)
    monkeypatch.undo()
    link = offer_counters(folder / "w.sock", ONLY, counters, deadline_s=DEADLINE_S)
    thread.join()
    link.close()
    _close(found)


def test_two_workers_do_not_share_a_place(folder: Path) -> None:
    """HS-62: the second one is told; the file of a dead one is taken over."""
    first = CounterListener(folder / "w.sock", 1, LAYERS, 3)
    with pytest.raises(SyncError, match="another transfer worker listens"):
        CounterListener(folder / "w.sock", 1, LAYERS, 3)
    first._socket.close()  # as if it had died
    second = CounterListener(folder / "w.sock", 1, LAYERS, 3)
    second.close()


@pytest.mark.parametrize(
    ("given", "more", "wanted"),
    [
        ("/run/x/l.sock", {}, "/run/x/l.sock"),
        ("/run/x/l.sock", {"pp_rank": 1, "pp_size": 2}, "/run/x/l_pp1.sock"),
        ("/run/x/l.sock", {"dp_id": 3, "dp_size": 4}, "/run/x/l_dp3.sock"),
        ("/run/x/l.sock", {"pp_rank": 0, "pp_size": 2, "dp_id": 1, "dp_size": 2}, "/run/x/l_pp0_dp1.sock"),
        ("/run/x/plain", {"pp_size": 2}, "/run/x/plain_pp0"),
    ],
)
def test_places_of_stages_and_engines(given: str, more: dict[str, int], wanted: str) -> None:
    """R88."""
    assert socket_path(given, **more) == Path(wanted)


def test_the_default_place_is_this_users_and_this_servers() -> None:
    one, two = socket_path(None, instance="a"), socket_path(None, instance="b")
    assert one != two
    assert one.parent.name == f"flexkv-{os.getuid()}"
