"""Handing the counters of ranks to a transfer worker in another process, over a Unix socket.

The worker listens, ranks connect.  A rank sends 16 bytes (four native ``int32``: its index, the number of
ranks, layers, counters), then for each counter four bytes (its number) with the descriptors of its layers
as ``SCM_RIGHTS``; the worker answers one byte, 1 for accepted.  Both keep the connection: when the other
end dies it reads as ended, which is how a waiter learns of it.

Only processes of the same user are spoken to (``SO_PEERCRED``), in a directory that is theirs alone: who
may connect may take a rank's place, and who may listen gets descriptors that wake an engine.

Threads: each end belongs to the thread that made it.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import tempfile
import time
from array import array
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import SyncError
from .counters import LayerCounters

logger = logging.getLogger(__name__)

HEADER = struct.Struct("=4i")
NUMBER = struct.Struct("=i")
ACCEPTED, REJECTED = b"\x01", b"\x00"
_RETRY_S = 0.05


@dataclass(frozen=True)
class RankId:
    """Who a rank is among those that one worker serves."""

    index: int
    count: int


def socket_path(
    given: str | None,
    *,
    pp_rank: int = 0,
    pp_size: int = 1,
    dp_id: int = 0,
    dp_size: int = 1,
    instance: str = "",
) -> Path:
    """Where a worker listens: one place for each pipeline stage and each engine of a host.

    Args:
        given: ``FLEXKV_LAYERWISE_EVENTFD_SOCKET``; default: a directory of this user's own.
        pp_rank: Pipeline stage.
        pp_size: How many there are.
        dp_id: Engine of several that share the host.
        dp_size: How many there are.
        instance: What tells the default of this server from that of another.
    """
    own = Path(tempfile.gettempdir()) / f"flexkv-{os.getuid()}"
    path = Path(given) if given else own / f"layerwise{'-' if instance else ''}{instance}.sock"
    stage = f"_pp{pp_rank}" if pp_size > 1 else ""
    engine = f"_dp{dp_id}" if dp_size > 1 else ""
    return path.with_name(f"{path.stem}{stage}{engine}{path.suffix}")


def check_private(folder: Path) -> None:
    """Make a directory that nobody else may enter.

    Raises:
        SyncError: it is somebody else's, or open to others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise SyncError(
            f"{folder} must be a directory of this user alone (mode 0700): whoever can enter it could take "
            "a rank's place"
        )


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is this user's."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end is gone.  Does not block, takes nothing."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class WorkerLink:
    """A rank's connection to the worker that has its counters."""

    def __init__(self, connection: socket.socket) -> None:
        """Made by ``offer_counters``."""
        self._connection = connection

    def is_alive(self) -> bool:
        """Whether the worker still lives."""
        return not has_ended(self._connection)

    def close(self) -> None:
        """Let the worker go on without this rank.  May be called twice."""
        self._connection.close()


def offer_counters(path: Path, rank: RankId, counters: LayerCounters, *, deadline_s: float) -> WorkerLink:
    """Give the worker at ``path`` this rank's counters.  Blocks, at most ``deadline_s``.

    Raises:
        SyncError: nobody listens in time, another user does, or the worker rejects the rank.
    """
    check_private(path.parent)
    end = time.monotonic() + deadline_s
    with ExitStack() as undo:
        connection = undo.enter_context(_connect(path, rank, end))
        try:
            if not is_own(connection):
                raise SyncError(f"{path}: another user listens there", ranks=(rank.index,))
            connection.settimeout(max(0.001, end - time.monotonic()))
            with suppress(BrokenPipeError, ConnectionResetError):  # a worker need not hear a rank out
                _send(connection, rank, counters)
            answer = connection.recv(1)
        except OSError as exc:
            line = f"rank {rank.index}: no answer of the transfer worker at {path}: {exc}"
            raise SyncError(line, ranks=(rank.index,)) from exc
        if answer != ACCEPTED:
            line = f"rank {rank.index}: rejected by the transfer worker at {path}"
            raise SyncError(line, ranks=(rank.index,))
        undo.pop_all()
    connection.settimeout(None)
    logger.info(
        "[FlexKV] Eventfd handshake complete rank=%d socket=%s counters=%d layers=%d",
        rank.index,
        path,
        len(counters.counters),
        counters.num_layers,
    )
    return WorkerLink(connection)


def _connect(path: Path, rank: RankId, end: float) -> socket.socket:
    attempts = 0
    while True:
        attempts += 1
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as exc:
            connection.close()
            if time.monotonic() >= end:
                raise SyncError(
                    f"rank {rank.index}: no transfer worker listens at {path} ({attempts} attempts)",
                    ranks=(rank.index,),
                ) from exc
            time.sleep(_RETRY_S)
            continue
        except OSError as exc:
            connection.close()
            raise SyncError(f"rank {rank.index}: {path}: {exc}", ranks=(rank.index,)) from exc
        logger.info("[FlexKV] Eventfd connected rank=%d socket=%s attempts=%d", rank.index, path, attempts)
        return connection


def _send(connection: socket.socket, rank: RankId, counters: LayerCounters) -> None:
    connection.sendall(HEADER.pack(rank.index, rank.count, counters.num_layers, len(counters.counters)))
    for counter in counters.counters:
        rights = array("i", counter.descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights.tobytes())]
        connection.sendmsg([NUMBER.pack(counter.index)], ancillary)
