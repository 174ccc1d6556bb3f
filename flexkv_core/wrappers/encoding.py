"""Encoded values: what a tier with a codec stores instead of a value.

    fixed head | first part | second part

The fixed head says which codec was used, the key's name, and all lengths.  The first part is the value's
front (its own header, so that a listing can be read without the rest), the second part is what follows.
Each is compressed, if that makes it shorter, and then encrypted: AES-256-GCM with a random 96-bit nonce of
its own; the fixed head (with both nonces), the block's key and the part's number are authenticated with it,
so that neither parts nor values can be exchanged.

Little-endian: ``magic 8s | version H | flags H | raw_front I | stored_front I | raw_bytes Q |
stored_rest Q | key_id 16s | nonce 12s | nonce 12s``.  No length is used before it was checked.

Threads: any; compressors are each thread's own.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..keys import BlockKey
from ..layout import PAGE_BYTES, BlockLayout
from ..models import CodecConfig, EncryptConfig, read_key

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

MAGIC = b"FLEXKVC\x01"
VERSION = 1
_HEAD = struct.Struct("<8sHHIIQQ16s12s12s")
_TAG_BYTES = 16
_NONCE_BYTES = 12
_PIECE_BYTES = 256 << 10
"""So much is encrypted at once: a tenth of a millisecond, in which no other thread runs Python."""
_SLACK_BYTES = 15
"""``update_into`` wants room for a block more, less one byte, and does not use it here."""
_FRONT_SHRUNK, _REST_SHRUNK, _ENCRYPTED = 1, 2, 4
_KNOWN_FLAGS = _FRONT_SHRUNK | _REST_SHRUNK | _ENCRYPTED
_FRONT, _REST = b"\x00", b"\x01"
ROOM_BYTES = PAGE_BYTES
"""How much longer than the value it may become: the head and two tags, in whole pages."""

if _HEAD.size + 2 * _TAG_BYTES > ROOM_BYTES:  # pragma: no cover - a programming error, found at import
    raise AssertionError("the fixed head outgrew its room")


class UndecodableError(ValueError):
    """These bytes cannot be turned back into the value.

    Attributes:
        cause: ``damaged`` (or tampered with, or under another key of this name), ``unknown_key``,
            ``not_encoded``, ``not_encrypted`` or ``schema``.
    """

    def __init__(self, cause: str, text: str) -> None:
        self.cause = cause
        super().__init__(text)

    @property
    def is_damaged(self) -> bool:
        """Whether the bytes are worth nothing to anybody; else they may be another instance's."""
        return self.cause == "damaged"


class _Head(NamedTuple):
    """The fixed head's fields, in order."""

    magic: bytes
    version: int
    flags: int
    raw_front: int
    stored_front: int
    raw_bytes: int
    stored_rest: int
    key_id: bytes
    front_nonce: bytes
    rest_nonce: bytes


@dataclass(frozen=True)
class Part:
    """One part on its way: its bytes, and whether they were compressed."""

    data: bytes | memoryview
    is_shrunk: bool


def is_encoded(value: memoryview) -> bool:
    """Whether these bytes were written through a codec."""
    return value[: len(MAGIC)] == MAGIC


def stored_bytes(config: CodecConfig, layout: BlockLayout) -> int:
    """The longest value that a tier is given: a full block, and the codec's room if there is one."""
    return layout.slot_bytes + (ROOM_BYTES if config.is_on else 0)


def head_bytes(config: CodecConfig, layout: BlockLayout) -> int:
    """How much of a stored value's front holds the value's own header."""
    return layout.header_bytes + (ROOM_BYTES if config.is_on else 0)


class Encoding:
    """Turns values into what is stored, and back."""

    def __init__(self, config: CodecConfig, layout: BlockLayout, *, where: str = "codec") -> None:
        """Prepare what ``config`` names.

        Raises:
            ConfigError: a package is missing; with its name and the extra that brings it.
        """
        missing = config.missing_extras()
        if missing:
            raise ConfigError("chain", [f"{where}.{field}: {line}" for field, line in missing.items()])
        self._front_bytes = layout.header_bytes
        self._zstd = _Zstd(config.level) if config.compress == "zstd" else None
        self._ciphers = _Ciphers(config.encrypt) if config.encrypt is not None else None

    def encode(self, key: BlockKey, value: memoryview, into: memoryview) -> int:
        """Write the encoded form of ``value`` at the front of ``into``; returns its length."""
        raw_front = min(len(value), self._front_bytes)
        front, rest = self._shrink(value[:raw_front]), self._shrink(value[raw_front:])
        flags = (_FRONT_SHRUNK if front.is_shrunk else 0) | (_REST_SHRUNK if rest.is_shrunk else 0)
        tag, key_id = 0, b""
        if self._ciphers is not None:
            flags |= _ENCRYPTED
            tag, key_id = _TAG_BYTES, self._ciphers.key_id
        nonces = os.urandom(2 * _NONCE_BYTES)
        stored_front, stored_rest = len(front.data) + tag, len(rest.data) + tag
        fixed = _HEAD.pack(
            MAGIC,
            VERSION,
            flags,
            raw_front,
            stored_front,
            len(value),
            stored_rest,
            key_id,
            nonces[:_NONCE_BYTES],
            nonces[_NONCE_BYTES:],
        )
        middle = _HEAD.size + stored_front
        stop = middle + stored_rest
        into[: _HEAD.size] = fixed
        self._seal(nonces[:_NONCE_BYTES], front, fixed + key + _FRONT, into[_HEAD.size : middle])
        self._seal(nonces[_NONCE_BYTES:], rest, fixed + key + _REST, into[middle:stop])
        return stop

    def decode(self, key: BlockKey, stored: memoryview, into: memoryview) -> int:
        """Write the value back into ``into``; returns its length.  What is behind it is left alone.

        Raises:
            UndecodableError: with the cause; ``into`` has undefined content then.
        """
        head = self._read_head(stored)
        if head.raw_bytes > len(into):
            raise UndecodableError("damaged", f"a value of {head.raw_bytes} B for a buffer of {len(into)} B")
        self._open_front(key, head, stored, into)
        middle = _HEAD.size + head.stored_front
        rest = stored[middle : middle + head.stored_rest]
        if len(rest) < head.stored_rest:
            raise UndecodableError("damaged", "truncated")
        self._open(key, head, _REST, rest, into[head.raw_front : head.raw_bytes])
        return head.raw_bytes

    def decode_front(self, key: BlockKey, stored: memoryview) -> tuple[bytes, int]:
        """The value's front, out of the first ``head_bytes`` bytes of what is stored; and its whole length.

        Raises:
            UndecodableError: with the cause.
        """
        head = self._read_head(stored)
        front = bytearray(min(head.raw_front, self._front_bytes))
        self._open_front(key, head, stored, memoryview(front))
        return bytes(front), head.raw_bytes

    def _open_front(self, key: BlockKey, head: _Head, stored: memoryview, into: memoryview) -> None:
        if head.raw_front != min(head.raw_bytes, self._front_bytes):
            raise UndecodableError("damaged", "impossible length")
        front = stored[_HEAD.size : _HEAD.size + head.stored_front]
        if len(front) < head.stored_front:
            raise UndecodableError("damaged", "truncated")
        self._open(key, head, _FRONT, front, into[: head.raw_front])

    def _read_head(self, stored: memoryview) -> _Head:
        if len(stored) and not is_encoded(stored):
            raise UndecodableError("not_encoded", "was not written through a codec")
        if len(stored) < _HEAD.size:
            raise UndecodableError("damaged", "truncated")
        head = _Head(*_HEAD.unpack_from(stored))
        if head.version != VERSION or head.flags & ~_KNOWN_FLAGS:
            raise UndecodableError("schema", f"codec schema {head.version}, flags {head.flags}")
        if self._ciphers is not None and not head.flags & _ENCRYPTED:
            raise UndecodableError("not_encrypted", "is not encrypted, and the tier's values must be")
        return head

    # ---- one part ------------------------------------------------------------------------------

    def _shrink(self, data: memoryview) -> Part:
        if self._zstd is not None and len(data):
            shrunk = self._zstd.compress(data)
            if len(shrunk) < len(data):
                return Part(shrunk, is_shrunk=True)
        return Part(data, is_shrunk=False)

    def _seal(self, nonce: bytes, part: Part, bound: bytes, into: memoryview) -> None:
        if self._ciphers is None:
            into[:] = part.data
        else:
            self._ciphers.encrypt(nonce, memoryview(part.data), bound, into)

    def _open(self, key: BlockKey, head: _Head, part: bytes, stored: memoryview, into: memoryview) -> None:
        is_encrypted = bool(head.flags & _ENCRYPTED)
        is_shrunk = bool(head.flags & (_FRONT_SHRUNK if part is _FRONT else _REST_SHRUNK))
        length = len(stored) - (_TAG_BYTES if is_encrypted else 0)
        if length < 0 or (not is_shrunk and length != len(into)):
            raise UndecodableError("damaged", "impossible length")
        if is_shrunk and self._zstd is None:
            raise UndecodableError("schema", "is compressed, and the tier has no compress: zstd")
        data = stored
        if is_encrypted:
            if self._ciphers is None:
                raise UndecodableError("unknown_key", "is encrypted, and the tier has no key")
            nonce = head.front_nonce if part is _FRONT else head.rest_nonce
            data = memoryview(bytearray(length)) if is_shrunk else into
            self._ciphers.decrypt(head.key_id, nonce, stored, _HEAD.pack(*head) + key + part, data)
        if is_shrunk and self._zstd is not None:
            self._zstd.expand(data, into)
        elif not is_encrypted:
            into[:] = data


class _Zstd:
    """Compression.  zstandard's objects belong to one thread each."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._own = threading.local()

    def compress(self, data: memoryview) -> bytes:
        import zstandard

        tool: ZstdCompressor | None = getattr(self._own, "compressor", None)
        if tool is None:
            tool = self._own.compressor = zstandard.ZstdCompressor(level=self._level)
        return tool.compress(data)

    def expand(self, data: bytes | memoryview, into: memoryview) -> None:
        """Fill ``into`` exactly; never more than that is written, whatever the data say."""
        import zstandard

        tool: ZstdDecompressor | None = getattr(self._own, "decompressor", None)
        if tool is None:
            tool = self._own.decompressor = zstandard.ZstdDecompressor()
        try:
            with tool.stream_reader(data) as reader:
                done = 0
                while done < len(into) and (count := reader.readinto(into[done:])):
                    done += count
                is_whole = done == len(into) and not reader.read(1)
        except zstandard.ZstdError as exc:
            raise UndecodableError("damaged", f"zstd: {exc}") from None
        if not is_whole:
            raise UndecodableError("damaged", "zstd: another length")


class _Ciphers:
    """AES-256-GCM with each key that is known, piece by piece: the interpreter is never held for long."""

    def __init__(self, config: EncryptConfig) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._invalid_tag = InvalidTag
        self._cipher, self._gcm = Cipher, modes.GCM
        self.key_id = _padded(config.key_id)
        keys = {config.key_id: config.key, **config.old_keys}
        self._keys = {_padded(name): algorithms.AES(read_key(secret)) for name, secret in keys.items()}

    def encrypt(self, nonce: bytes, data: memoryview, bound: bytes, into: memoryview) -> None:
        """Fill ``into`` with the encrypted ``data`` and its tag."""
        context = self._cipher(self._keys[self.key_id], self._gcm(nonce)).encryptor()
        context.authenticate_additional_data(bound)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            context.update_into(piece, into[start : start + len(piece) + _SLACK_BYTES])
        context.finalize()
        into[len(data) :] = context.tag

    def decrypt(
        self, key_id: bytes, nonce: bytes, stored: memoryview, bound: bytes, into: memoryview
    ) -> None:
        """Fill ``into`` with what was encrypted; it counts only if nothing is raised.

        Raises:
            UndecodableError: there is no such key, or it is not what was encrypted with it.
        """
        if key_id not in self._keys:
            name = key_id.rstrip(b"\0").decode("ascii", "replace")
            raise UndecodableError("unknown_key", f"is encrypted with key {name!r}, which is not configured")
        data, tag = stored[:-_TAG_BYTES], bytes(stored[-_TAG_BYTES:])
        context = self._cipher(self._keys[key_id], self._gcm(nonce, tag)).decryptor()
        context.authenticate_additional_data(bound)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            if start + len(piece) + _SLACK_BYTES <= len(into):
                context.update_into(piece, into[start : start + len(piece) + _SLACK_BYTES])
            else:
                into[start : start + len(piece)] = context.update(piece)
        try:
            context.finalize()
        except self._invalid_tag:
            raise UndecodableError("damaged", "tampered with, or encrypted with another key") from None


def _padded(key_id: str) -> bytes:
    return key_id.encode().ljust(16, b"\0")
