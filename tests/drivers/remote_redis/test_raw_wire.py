"""The wire on a pair of sockets: whatever way a stream is cut into pieces, it is read the same."""

from __future__ import annotations

import fcntl
import random
import socket
import struct
import termios
import threading
import time
from contextlib import contextmanager

import pytest

from flexkv_driver_remote_redis.raw_wire import RawWire
from flexkv_driver_remote_redis.wire import ProtocolError, Refusal
from tests.support.waiting import DEADLINE_S

SEED = 20240817
NAMES = [b"flexkv:%064x" % number for number in range(8)]


@contextmanager
def wire_that_reads(reply: bytes, pieces: list[int], *, closes: bool = True):
    """A wire whose peer sends ``reply`` in pieces, each only when the one before has been taken."""
    near, far = socket.socketpair()
    stop = threading.Event()

    def unread() -> int:
        return struct.unpack("i", fcntl.ioctl(near, termios.FIONREAD, bytes(4)))[0]

    def send() -> None:
        rest, sizes = reply, list(pieces)
        while rest and not stop.is_set():
            size = sizes.pop(0) if sizes else len(rest)
            far.sendall(rest[:size])
            rest = rest[size:]
            while unread() and not stop.is_set():
                time.sleep(0)
        if closes:
            far.shutdown(socket.SHUT_WR)

    with near, far:
        wire = RawWire(near, DEADLINE_S)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield wire
        finally:
            stop.set()
            sender.join()


def pieces_of(total: int) -> list[list[int]]:
    chance = random.Random(SEED)
    cuts = [[1] * total, [2] * total, [3] * total, [total]]
    cuts += [[chance.choice((1, 2, 5, 11, 63, 64, 65, 500)) for _ in range(total)] for _ in range(20)]
    return cuts


def bulk(*values: bytes | None) -> bytes:
    return b"".join(b"$-1\r\n" if v is None else b"$%d\r\n%b\r\n" % (len(v), v) for v in values)


def test_values_in_pieces():
    chance = random.Random(SEED)
    values = [chance.randbytes(size) for size in (0, 1, 57, 58, 59, 200)]
    tricky = b"\r\n$3\r\n"
    stream = bulk(*values[:3], None, tricky, *values[3:])
    wanted = [len(v) for v in values[:3]] + [None, len(tricky)] + [len(v) for v in values[3:]]
    names = [NAMES[0]] * len(wanted)
    for pieces in pieces_of(len(stream)):
        into = [memoryview(bytearray(200)) for _ in wanted]
        with wire_that_reads(stream, pieces) as wire:
            assert list(wire.read_values(names, into)) == wanted, f"seed {SEED}: {pieces[:20]}"
            assert wire.num_pending == 0
        got = [bytes(view[:size]) for view, size in zip(into, wanted, strict=True) if size is not None]
        assert got == [*values[:3], tricky, *values[3:]]


def test_values_too_long_are_read_off_in_pieces():
    long = bytes(300) + b"\r\n" * 20
    stream = bulk(long, b"good", long, b"fine")
    for pieces in pieces_of(len(stream)):
        into = [memoryview(bytearray(size)) for size in (10, 4, 0, 100)]
        with wire_that_reads(stream, pieces) as wire:
            assert list(wire.read_values(NAMES[:4], into)) == [len(long), 4, len(long), 4]
        assert (bytes(into[1]), bytes(into[3][:4])) == (b"good", b"fine")


def test_short_replies_in_pieces():
    lines = [b":%d" % (10 ** (number % 7)) for number in range(400)] + [b"-ERR no", b":0"]
    stream = b"".join(line + b"\r\n" for line in lines)
    names = [NAMES[0]] * len(lines)
    for pieces in pieces_of(len(stream))[2:8]:
        with wire_that_reads(stream, pieces) as wire:
            assert wire.ask(b"STRLEN", names) == lines


def test_statuses_in_pieces():
    stream = b"+OK\r\n+OK\r\n-OOM no room\r\n+OK\r\n"
    long = 3 << 20  # two of them are more than what is sent together
    values = [memoryview(b"x" * size) for size in (long, 5, long, 7, long, 11)]
    for pieces in pieces_of(len(stream))[:4]:
        with wire_that_reads(stream, pieces) as wire, swallowing(wire):
            replies = list(wire.write_values(NAMES[:6], values))
            assert replies[:2] == [long, 5]
            assert replies[2] == Refusal("OOM no room")
            assert replies[3] == 7, "was under way when the refusal came"
            assert replies[4:] == [Refusal("OOM no room")] * 2, "were not sent"


@contextmanager
def swallowing(wire: RawWire):
    """Nobody reads what the wire sends here: let its socket say that all was sent."""
    wire._send_some = lambda parts: sum(map(len, parts))
    yield


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 400\r\n",
        b"+OK\r\n",
        b":5\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$3\r\nabcde",
        b"*1\r\n",
        b"$" * 20_000,
    ],
)
def test_what_is_no_value_is_not_believed(stream):
    with wire_that_reads(stream, []) as wire:
        with pytest.raises((ProtocolError, ConnectionResetError)):
            list(wire.read_values(NAMES[:1], [memoryview(bytearray(10))]))
        assert wire.num_pending == 1, "so that the connection is dropped"


def test_too_many_replies_are_noticed():
    with wire_that_reads(b":1\r\n:1\r\n:1\r\n", []) as wire, pytest.raises(ProtocolError):
        wire.ask(b"STRLEN", NAMES[:2])


def test_the_socket_is_left_as_it_was():
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(3.5)
        RawWire(near, 0.25).end()
        assert near.gettimeout() == 3.5
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            assert near.getsockopt(socket.SOL_SOCKET, option, 16) == bytes(16)


def test_time_outs_however_short():
    near, far = socket.socketpair()
    with near, far:
        wire = RawWire(near, 1e-9)
        with pytest.raises(TimeoutError):
            wire.ask(b"STRLEN", NAMES)
        wire = RawWire(near, 0.01)
        wire.num_pending = 0
        with pytest.raises(TimeoutError, match="0.01 s"):
            list(wire.write_values(NAMES[:1], [memoryview(bytes(8 << 20))]))
