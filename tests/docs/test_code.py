"""Every fenced block of the documents: Python runs, YAML loads, commands run or are at least commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv_core.cli import build_parser, main
from flexkv_core.config import load_config
from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks

FOLLOWED = DOCS / "write-a-driver.md"
"""Has a test of its own, which follows all of it."""

HOST = "  - {name: host, driver: cpu, options: {capacity: 1GiB}}\n"
RUN = {"check", "drivers"}
"""Verbs that need nothing but the page's files; ``doctor`` is run too, and the others are parsed."""


def blocks_in(language: str) -> list[Block]:
    pages = [page for page in PAGES if page != FOLLOWED]
    return [block for page in pages for block in blocks(page) if block.language == language]


@pytest.mark.parametrize("block", blocks_in("python"), ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    exec(code, {"__name__": "page"})  # noqa: S102 - the documents are ours


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_yaml_loads(block: Block, tmp_path: Path) -> None:
    text = block.text
    if text.startswith("- "):  # one tier: put it into a chain
        tier = "".join(f"  {line}\n" for line in text.splitlines())
        text = f"version: 1\ntiers:\n{'' if 'driver: cpu' in text else HOST}{tier}"
    file = tmp_path / "chain.yaml"
    file.write_text(text)
    names = re.findall(r"\$\{(\w+)\}", text)
    secrets = {name: "5e" * 32 if "KV_KEY" in name else "secret" for name in names}
    assert load_config(file, environ=secrets).chain.tiers


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each line of a block of commands, without comments."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


@pytest.mark.parametrize("block", blocks_in("bash"), ids=str)
def test_commands(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLEXKV_CONFIG_PATH", raising=False)
    (tmp_path / "chain.yaml").write_text(chain_of(block.page))
    for words in commands(block):
        if words[0] == "flexkv":
            run_verb(words[1:])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        else:
            assert words[0] in {"pip", "python"}, f"{block}: a command that nobody checks: {words}"
    capsys.readouterr()


def run_verb(words: list[str]) -> None:
    build_parser(words[0]).parse_args(words)
    if words[0] in RUN:
        assert main(words) == 0, words
    elif words[0] == "doctor":  # what it finds is this machine's affair, not the page's
        assert main([*words, "--no-gpu"]) in (0, 1)


def chain_of(page: Path) -> str:
    """What ``chain.yaml`` is on a page: its first block of YAML."""
    found = [block.text for block in blocks(page) if block.language == "yaml" and "tiers:" in block.text]
    return found[0] if found else f"version: 1\ntiers:\n{HOST}"


def test_no_block_escapes() -> None:
    looked_after = {"python", "yaml", "bash", "text"}
    for page in PAGES:
        for block in blocks(page):
            is_picture = not block.language and page.parent != DOCS
            assert is_picture or page == FOLLOWED or block.language in looked_after, block
