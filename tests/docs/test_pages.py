"""The documents are whole: links lead somewhere, and what the code has is told."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv_core.chain.receipts import Receipt
from flexkv_core.cli import verbs
from flexkv_core.config.names import chain_leaves, tier_leaves
from flexkv_core.drivers import DriverHooks, ObserverHooks
from flexkv_core.metrics import IN_THE_LOG
from flexkv_core.tier import Status, TierCapabilities
from tests.docs import tables
from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, prose

COUNTING = {"count", "gauge", "observe_seconds"}
SOURCES = [ROOT / "flexkv_core", *ROOT.glob("drivers/*/flexkv_*"), *ROOT.glob("engines/*/flexkv_*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    listed = {(DOCS / target).resolve() for target in links(DOCS / "README.md")}
    for page in DOCS.glob("*.md"):
        assert page.name in {"README.md", "benchmarks.md"} or page in listed, page.name


def told(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("hooks", [DriverHooks, ObserverHooks])
def test_every_hook_is_told(hooks: type) -> None:
    for name in vars(hooks):
        if name.startswith("flexkv_"):
            assert f"`{name}`" in told("concepts.md"), name


def counted() -> Iterator[str]:
    """Names that are counted anywhere in the code, read off the syntax trees."""
    for path in (path for folder in SOURCES for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in COUNTING and ast.unparse(node.func.value).endswith("metrics"):
                assert isinstance(node.args[0], ast.Constant), (
                    f"{path}:{node.lineno}: a name that is computed"
                )
                yield str(node.args[0].value)


def first_cells(page: str, heading: str) -> set[str]:
    """First cells of the first table below a heading."""
    text = told(page).split(f"\n## {heading}\n")[1].split("\n|---|")[1].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_metrics_are_those_that_are_counted() -> None:
    code, page = set(counted()), first_cells("operating.md", "Metrics")
    assert code - page == set(), "counted, and not in docs/operating.md"
    assert page - code == set(), "in docs/operating.md, and counted nowhere"


def test_the_line_of_counters_is_told() -> None:
    _, names = told("operating.md").split("It has those of these counters that are not 0:")
    assert set(re.findall(r"`(\w+)`", names.split("\n\n")[0])) == IN_THE_LOG


def test_words_of_the_interfaces_are_told() -> None:
    operating, drivers = told("operating.md"), told("drivers.md")
    for status in Status:
        assert status is Status.OK or f"`{status.value}`" in operating, status
    for name in TierCapabilities.__dataclass_fields__:
        assert f"`{name}`" in drivers, name
    line = Receipt("load", "r", "ok", 1, 1, 1, {"host": 1}, copy_s=1.0, cause="c").line()
    for word in re.findall(r"(\w+)=", line.split(" from ")[0]):
        assert f"`{word}`" in operating, word


def test_every_verb_is_told() -> None:
    for verb in verbs():
        assert f"flexkv {verb}" in told("operating.md"), verb


CORE = ROOT / "flexkv_core"


def on_the_map() -> dict[str, int]:
    """Rooms of the core by the row that they stand in."""
    rows = told("code.md").split("## flexkv_core")[1].split("\n## ")[0].splitlines()
    return {room: at for at, row in enumerate(rows) for room in re.findall(r"`([a-z_]+)/?`", row)}


def test_every_room_of_the_core_is_on_the_map() -> None:
    """Modules at the top, packages, and the modules of those packages that all of a chain is made of."""
    rooms = {path.stem for path in CORE.glob("*.py")} | {path.parent.name for path in CORE.glob("*/*.py")}
    rooms |= {path.stem for name in ("index", "chain", "manager") for path in CORE.glob(f"{name}/*.py")}
    assert set(on_the_map()) == {room for room in rooms if not room.startswith("__")}


def test_the_map_stands_in_the_order_of_imports() -> None:
    rows = on_the_map()
    for path in CORE.rglob("*.py"):
        room, *inside = path.relative_to(CORE).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if room in rows and isinstance(node, ast.ImportFrom) and node.level == 1 + len(inside):
                names = [node.module] if node.module else [alias.name for alias in node.names]
                for name in names:
                    there = name.partition(".")[0]
                    assert rows.get(there, 0) <= rows[room], f"{room} imports {there}, which stands below it"


def test_every_field_of_the_chain_is_told() -> None:
    reference = told("chain-reference.md")
    for leaf in (*chain_leaves(), *tier_leaves()):
        assert f"`{'.'.join(leaf.path)}`" in reference, leaf.path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == tables.written(text), "run: python -m tests.docs.tables"


def test_every_table_has_a_place() -> None:
    names = {name for page in PAGES for name in tables.sections(page)}
    options = {f"options {driver}" for driver in tables.OPTIONS}
    assert names == {"capabilities", "refused options"} | options
    installed = {path.name.removeprefix("flexkv_driver_") for path in ROOT.glob("drivers/*/flexkv_driver_*")}
    assert set(tables.OPTIONS) == installed


def test_no_page_names_a_machine() -> None:
    for page in PAGES:
        for line in prose(page):
            assert str(ROOT) not in line, f"{page.name}: {line}"
            assert "/root/" not in line, f"{page.name}: {line}"
