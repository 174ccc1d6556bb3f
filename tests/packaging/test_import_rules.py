"""Who imports whom, read off the syntax trees: a module imports only what stands to its left."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "flexkv_core"
DRIVERS = sorted(ROOT.glob("drivers/*/flexkv_driver_*"))
ENGINES = sorted(ROOT.glob("engines/*/flexkv_*"))

ROWS = [
    (
        "errors",
        "units",
        "metrics",
    ),
    (
        "keys",
        "layout",
        "memory",
    ),
    (
        "envelope",
        "buffers",
    ),
    (
        "tier",
        "transfer",
        "sync",
    ),
    ("layerwise",),
    ("transfers",),
    ("models",),
    (
        "demands",
        "drivers",
    ),
    ("config",),
    (
        "index.policy",
        "index.stretch",
        "index.eviction",
        "index.places",
        "index.match",
        "index.index",
        "index",
    ),
    ("wrappers",),
    (
        "chain.plan",
        "chain.speed",
        "chain.choice",
        "chain.receipts",
    ),
    (
        "chain.calls",
        "chain.lane",
        "chain.executor",
    ),
    (
        "chain.key_sets",
        "chain.links",
        "chain.fitting",
        "chain.host",
    ),
    ("chain.capacity",),
    (
        "chain.parts",
        "chain.jobs",
    ),
    (
        "chain.prefetched",
        "chain.fill_batch",
        "chain.fills",
        "chain.loads",
        "chain.passing",
        "chain.cascade",
        "chain.stores",
        "chain.weighing",
        "chain.lookup",
        "chain.probes",
        "chain.warm_up",
    ),
    ("chain.chain",),
    ("chain",),
    ("manager.opening",),
    (
        "manager.sequences",
        "manager.masks",
        "manager.tasks",
    ),
    ("manager.manager",),
    ("manager",),
    ("__init__",),
    (
        "cli",
        "testing",
    ),
    ("__main__",),
]
"""From left to right.  A new module takes its place here when it is made."""

ORDER = [name for row in ROWS for name in row]

OUTSIDE = {
    "torch": {"transfers", "cli"},
    "numpy": {"transfers", "manager.masks"},
    "yaml": {"config", "cli"},
    "pytest": {"testing"},
    "hypothesis": {"testing"},
    "zstandard": {"wrappers"},
    "cryptography": {"wrappers"},
    "redis": set(),
    "boto3": set(),
    "botocore": set(),
    "sglang": set(),
}
"""Heavy or foreign packages, and the rooms of the core that may import them."""


ORDERED = {name.split(".")[0] for name in ORDER if "." in name}
"""Packages whose modules have their own order; what such a package itself gives stands behind them."""


def room(path: Path, base: Path) -> str:
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:2]).removesuffix(".__init__") if parts[0] in ORDERED else parts[0]


def imports(path: Path, package: str) -> Iterator[tuple[str, bool]]:
    """Absolute names that a file imports, each with whether that happens when it is imported."""
    tree = ast.parse(path.read_text(), str(path))
    top = {id(node) for node in run_at_import(tree)}
    inside = path.name == "__init__.py"
    parts = [package, *path.relative_to(folder_of(path, package)).with_suffix("").parts]
    if inside:
        parts = parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = parts[: len(parts) - node.level + inside]
                base = ".".join([*up, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", id(node) in top


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that run on import: not those in functions, nor for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from run_at_import(node)


def folder_of(path: Path, package: str) -> Path:
    return next(parent for parent in path.parents if parent.name == package)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def core_targets(path: Path, package: str) -> Iterator[str]:
    """Rooms of the core that a file imports (``__init__`` for the public names)."""
    for name, _ in imports(path, package):
        parts = name.split(".")
        if parts[0] == "flexkv_core":
            inside = [CORE / parts[1] / f"{parts[2]}.py"] if len(parts) > 2 and parts[1] in ORDERED else []
            if any(module.exists() for module in inside):
                yield f"{parts[1]}.{parts[2]}"
            else:
                is_room = len(parts) > 1 and (
                    (CORE / parts[1]).is_dir() or (CORE / f"{parts[1]}.py").exists()
                )
                yield parts[1] if is_room else "__init__"


def test_every_module_has_its_place():
    rooms = {room(path, CORE) for path in files(CORE)}
    assert rooms - set(ORDER) == set(), "new modules: give them a place in ORDER"
    assert set(ORDER) - rooms == set(), "modules that are gone"


@pytest.mark.parametrize("path", files(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_core_imports_only_to_its_left(path):
    here = room(path, CORE)
    wrong = {there for there in core_targets(path, "flexkv_core") if there != here}
    wrong = {there for there in wrong if ORDER.index(there) > ORDER.index(here)}
    assert wrong == set(), f"{here} stands to the left of {sorted(wrong)}"


def test_nothing_in_the_core_imports_testing():
    for path in files(CORE):
        if room(path, CORE) != "testing":
            assert "testing" not in set(core_targets(path, "flexkv_core")), path


@pytest.mark.parametrize("path", files(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_core_knows_no_driver_and_no_engine(path):
    own = {"flexkv_core"}
    names = {name.split(".")[0] for name, _ in imports(path, "flexkv_core")}
    assert {name for name in names if name.startswith("flexkv_")} <= own


@pytest.mark.parametrize("path", files(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_heavy_packages_stay_in_their_rooms(path):
    for name, _ in imports(path, "flexkv_core"):
        allowed = OUTSIDE.get(name.split(".")[0])
        assert allowed is None or room(path, CORE) in allowed, f"{path} imports {name}"


@pytest.mark.parametrize("folder", DRIVERS, ids=lambda folder: folder.name)
def test_drivers_know_the_public_names_and_their_own_library(folder):
    for path in files(folder):
        for name, _ in imports(path, folder.name):
            top = name.split(".")[0]
            where = f"{path} imports {name}"
            assert not top.startswith("flexkv_driver_") or top == folder.name, f"a sibling: {where}"
            assert top not in ("sglang", "flexkv_sglang", "pytest"), where
            assert top != "torch" or folder.name == "flexkv_driver_cpu", where
            assert not name.startswith("flexkv_core.testing"), where
        assert set(core_targets(path, folder.name)) <= {"__init__"}, f"{path}: public names only"


@pytest.mark.parametrize("folder", DRIVERS, ids=lambda folder: folder.name)
def test_hooks_are_light(folder):
    for name in ("__init__.py", "config.py"):
        tops = {target.split(".")[0] for target, is_now in imports(folder / name, folder.name) if is_now}
        assert tops & {"redis", "boto3", "botocore", "torch", "numpy"} == set()
        assert not any(t.startswith(f"{folder.name}.tier") for t, _ in imports(folder / name, folder.name))


@pytest.mark.parametrize("folder", ENGINES, ids=lambda folder: folder.name)
def test_engines_never_import_a_driver(folder):
    for path in files(folder):
        for name, _ in imports(path, folder.name):
            assert not name.startswith(("flexkv_driver_", "flexkv_core.testing")), f"{path} imports {name}"


@pytest.mark.parametrize("folder", ENGINES, ids=lambda folder: folder.name)
def test_compat_is_the_only_module_that_imports_the_engine(folder):
    engine = folder.name.removeprefix("flexkv_")
    for path in files(folder):
        tops = {name.split(".")[0] for name, _ in imports(path, folder.name)}
        assert engine not in tops or path.name == "compat.py", f"{path} imports {engine}"


@pytest.mark.parametrize("folder", [CORE, *DRIVERS, *ENGINES], ids=lambda folder: folder.name)
def test_every_package_is_typed(folder):
    assert (folder / "py.typed").exists()
