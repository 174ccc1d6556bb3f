"""The documents as tests see them: pages, fenced blocks, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md"), *ROOT.glob("drivers/*/README.md")]
)

_FENCE = re.compile(r"^```(\w*)$")
_NAME = re.compile(r"^`([^`]+)`(?:\s.*)?:$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The page it stands on.
        line: Number of its first line.
        language: What stands behind the fence; empty for none.
        text: What stands in it.
        file: The file that it is: the line before it is "`NAME`:"; empty for none.
    """

    page: Path
    line: int
    language: str
    text: str
    file: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found, inside, language, start = [], False, "", 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and not inside:
            inside, language, start = True, fence[1], number + 1
        elif line == "```" and inside:
            inside = False
            name = next((text for text in reversed(lines[: start - 1]) if text.strip()), "")
            file = _NAME.match(name)
            text = "\n".join(lines[start:number]) + "\n"
            found.append(Block(page, start + 1, language, text, file[1] if file else ""))
    assert not inside, f"{page}: a fenced block is not closed"
    return found


def prose(page: Path) -> Iterator[str]:
    """The lines of a page outside of its fenced blocks."""
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return [target for line in prose(page) for target in _LINK.findall(line)]


def anchors(page: Path) -> set[str]:
    """The names that headings of a page can be linked by, as GitHub makes them."""
    titles = [line.lstrip("#").strip() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
