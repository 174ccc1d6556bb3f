"""Options of the ``ssd`` driver."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from flexkv_core import ByteSize, Model, Needs


def _split_paths(value: object) -> object:
    """``/a;/b`` or a list -> distinct paths, each non-empty; other types pass unchanged."""
    if isinstance(value, Path):
        value = [value]
    elif isinstance(value, str):
        value = value.split(";")
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, (str, Path)) for part in value):
        return value
    paths = [Path(str(part).strip()).expanduser() for part in value if str(part).strip()]
    if not paths:
        raise ValueError("must name at least one directory")
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(f"directories must be distinct, twice: {', '.join(twice)}")
    return tuple(paths)


Paths = Annotated[tuple[Path, ...], BeforeValidator(_split_paths)]


class SsdConfig(Model):
    """Where the blocks lie and how much room they may take."""

    path: Paths = Field(
        description="One directory, several separated by `;`, or a list. Blocks are striped over them, "
        "so name one a disk. A directory that is not there is made."
    )
    capacity: ByteSize = Field(
        description="Room for blocks, over all directories, per engine process. The index takes 64 B a block "
        "besides."
    )
    min_free: ByteSize = Field(
        1 << 30,
        description="This much of each file system stays free: a full disk hurts more than this tier. "
        "Below it the tier stops growing and makes room by eviction.",
    )
    persistent: bool = Field(
        True,
        description="Keep blocks for the next start. Off: files are removed at the end, and what a killed "
        "process left at the start.",
    )
    direct_io: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Bypass the page cache, which would hold every block a second time. auto: where the "
        "file system takes it, with one warning where it does not; on: refuse to start otherwise; off.",
    )
    slab: ByteSize | None = Field(
        None,
        ge=1,
        description="Most bytes in one file; a file holds at least one block. Default: 1 GiB, or so "
        "much that a directory has at most 256 files, each of which costs two descriptors.",
    )

    def needs(self) -> Needs:
        """The directories, with room for the blocks and what must stay free."""
        paths = tuple(map(str, self.path))
        return Needs(directories=paths, disk_bytes=self.capacity, min_free_bytes=self.min_free)
