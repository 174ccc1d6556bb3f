"""The seam: facts per version, the probe, and one behaviour over every version that is here.

Facts are read from syntax trees, so versions that cannot be imported here are checked as well;
behaviour is checked in a process of its own for each version.
"""

from __future__ import annotations

import ast
import copy
import re
import shutil
from pathlib import Path

import pytest

from flexkv_core import EngineError
from flexkv_sglang import seam, touched
from flexkv_sglang.seam import Generation
from flexkv_sglang.surface import Surface
from flexkv_sglang.touched import MEDIA, TOUCHED, Touched
from tests.engines.sglang.versions import TREES, run, run_raw

pytestmark = pytest.mark.skipif(not TREES, reason="sglang is not installed (make setup)")

GENERATIONS = {
    "0.5.16": Generation.FINISHED,
    "0.5.17": Generation.FINISHED,
    "0.5.18": Generation.FINISHED,
    "0.5.19": Generation.FINISHED,
    "0.5.20": Generation.FINISHED,
    "0.5.21": Generation.INSERT,
    "0.5.22": Generation.CHECKPOINT,
    "0.5.23": Generation.CHECKPOINT,
}
SINCE = {
    "releases_host": 17,
    "has_salt": 18,
    "kv_record": 19,
    "load_may_defer": 20,
    "load_is_all_or_none": 20,
    "has_request_handle": 20,
    "reports_aborts": 20,
    "tick_is_own_method": 20,
    "has_release_call": 21,
    "has_batch_end": 21,
    "has_memory_budget": 21,
    "flush_ignores_waiting": 21,
    "match_gives_length": 22,
    "load_gives_count": 22,
}


@pytest.mark.parametrize("version", TREES)
def test_facts_of_each_version(version: str) -> None:
    facts = seam.read_seam(TREES[version] / "sglang")
    assert facts.version == version
    assert facts.generation is GENERATIONS[version]
    patch = int(version.split(".")[2])
    assert {name: getattr(facts, name) for name in SINCE} == {
        name: patch >= first for name, first in SINCE.items()
    }


@pytest.mark.parametrize("version", TREES)
def test_the_probe_finds_nothing_wrong(version: str) -> None:
    assert seam.probe(TREES[version] / "sglang") == []
    assert seam.require_supported(TREES[version] / "sglang").version == version


def test_the_probe_imports_nothing_and_is_quick() -> None:
    version = next(iter(TREES))
    code = (
        "import sys, time; from flexkv_sglang import seam; s = time.process_time(); f = seam.probe(); "
        "print(len(f), time.process_time() - s < 30, 'sglang' in sys.modules, 'torch' in sys.modules)"
    )
    assert run_raw(version, ["-c", code]).stdout.split() == ["0", "True", "False", "False"]


@pytest.fixture
def doctored(tmp_path: Path):
    """A copy of the files that the probe reads, with one text changed."""

    def doctor(file: str, old: str, new: str, version: str | None = None) -> Path:
        source = TREES[version or next(iter(TREES))] / "sglang"
        root = tmp_path / "sglang"
        names = {one.file for one in TOUCHED} | {one.elsewhere[0] for one in TOUCHED if one.elsewhere}
        for name in ["../_version.py", *sorted(names)]:
            if not (source / "srt" / name).is_file():
                continue
            target = root / "srt" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / "srt" / name, target)
        path = root / "srt" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return root

    return doctor


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (
            touched.RADIX,
            "def insert(self, params",
            "def insert_all(self, params",
            "RadixCache.insert: is missing",
        ),
        (
            touched.RADIX,
            "def evict(self, params",
            "def evict(self, how",
            "RadixCache.evict: takes (how), needs params",
        ),
        (
            touched.RADIX,
            "def checkpoint(self, req: Req, *, up_to",
            "def checkpoint(self, req: Req, *, to",
            "RadixCache.checkpoint: takes (req, to), needs up_to",
        ),
        (
            touched.BASE,
            "    host_hit_length: int",
            "    hit_length: int",
            "MatchResult.host_hit_length: is missing",
        ),
        (touched.SCHEDULER, "def flush_cache(", "def flush(", "Scheduler.flush_cache: is missing"),
        (
            touched.SCHEDULER,
            "def _process_hicache_events(",
            "def _events(",
            "Scheduler: has no method that calls",
        ),
        (
            touched.REGISTRY,
            "def register_radix_cache_backend(name",
            "def register_radix_cache_backend(label",
            "register_radix_cache_backend: takes (label, factory), needs name",
        ),
        (
            touched.WEIGHTS,
            "def update_weights_from_ipc",
            "def update_from_ipc",
            "SchedulerWeightUpdaterManager.update_weights_from_ipc: is missing",
        ),
        ("../_version.py", "0.5.2", "0.6.2", "version: 0.6.2"),
    ],
)
def test_the_probe_names_what_differs(doctored, file: str, old: str, new: str, named: str) -> None:
    if next(iter(TREES)) not in ("0.5.22", "0.5.23"):
        pytest.skip("written against the newest seam")
    root = doctored(file, old, new)
    if "has no method" in named:  # both names of that method must be gone
        path = root / "srt" / file
        path.write_text(path.read_text().replace("def _get_new_batch_prefill_raw(", "def _raw("))
    surface = Surface(root)  # parsed once
    findings = [str(finding) for finding in seam.probe(surface)]
    assert any(named in line for line in findings), findings
    with pytest.raises(
        EngineError, match=r"needs SGLang 0\.5\.16 to 0\.5\.23 and found .* differs in: "
    ) as error:
        seam.require_supported(surface)
    assert named in str(error.value)


def test_a_tree_with_no_known_way_to_hand_over_kv(doctored) -> None:
    if next(iter(TREES)) not in ("0.5.22", "0.5.23"):
        pytest.skip("written against the newest seam")
    root = doctored(touched.RADIX, "def checkpoint(", "def keep(")
    assert any("checkpoint, insert_req or cache_finished_req" in str(f) for f in seam.probe(root))


# ---- every name that is touched, in every version that is here -----------------------------------


@pytest.fixture(scope="module")
def surfaces() -> dict[str, Surface]:
    """Each version, parsed once."""
    return {version: Surface(folder / "sglang") for version, folder in TREES.items()}


class Without(Surface):
    """A version that lacks one name, or one parameter of it."""

    def __init__(self, surface: Surface, gone: Touched, param: str = "") -> None:
        super().__init__(surface.root)
        self._surface, self._gone, self._param = surface, gone, param

    def of(self, file: str, name: str):
        found = self._surface.of(file, name)
        if (file, name) not in ((self._gone.file, self._gone.owner), self._gone.elsewhere):
            return found
        found = copy.deepcopy(found)
        if self._param:
            found.methods[self._gone.name].remove(self._param)
            return found
        found.methods.pop(self._gone.name, None)
        found.returns.pop(self._gone.name, None)
        found.attributes.discard(self._gone.name)
        found.fields = [one for one in found.fields if one != self._gone.name]
        return found


@pytest.mark.parametrize("version", TREES)
def test_each_name_that_is_gone_is_named(surfaces: dict[str, Surface], version: str) -> None:
    facts = seam.read_seam(surfaces[version])
    needed = [one for one in TOUCHED if one.when(facts)]
    assert len(needed) > 100
    for one in needed:
        found = [str(finding) for finding in seam.probe(Without(surfaces[version], one))]
        if one.without:
            assert found == [], one
        else:
            assert any(one.name in line for line in found), f"{one.label} was not missed: {found}"


@pytest.mark.parametrize("version", TREES)
def test_each_parameter_that_is_gone_is_named(surfaces: dict[str, Surface], version: str) -> None:
    facts = seam.read_seam(surfaces[version])
    for one in TOUCHED:
        for param in one.params or () if one.when(facts) else ():
            found = [str(finding) for finding in seam.probe(Without(surfaces[version], one, param))]
            assert any(one.label in line and param in line for line in found), (one, param, found)


@pytest.mark.parametrize("version", TREES)
def test_a_salt_is_never_ignored(surfaces: dict[str, Surface], version: str) -> None:
    """Were it gone from the key alone, requests of two tenants would look the same."""
    if not seam.read_seam(surfaces[version]).has_salt:
        pytest.skip("this version has no salt")
    key = next(one for one in TOUCHED if one.label == "RadixKey.__init__")
    found = [str(finding) for finding in seam.probe(Without(surfaces[version], key, "cache_salt"))]
    assert any("a salt would be ignored" in line for line in found)


def test_media_is_refused_where_it_cannot_be_looked_at() -> None:
    labels = {one.label for one in TOUCHED if not one.without}
    assert {f"Req.{name}" for name in MEDIA} <= labels


ADAPTER = Path(seam.__file__).parent
NOT_SGLANGS = ("self", "cls", "_watched", "_state", "result", "config")
"""Whose private names may be used: our own, a named tuple's, a transformers configuration's."""

OWNERS = {
    "req": ("Req", "_flexkv_handle", "_flexkv_apart"),
    "ctx": ("TreeCacheBuildContext",),
    "tree": ("RadixCache", "_record_remove_event"),
    "node": ("TreeNode",),
    "allocator": ("BaseTokenToKVPoolAllocator",),
    "pool": ("KVCache", "get_kv_size_bytes", "kv_cache_layout"),
    "scheduler": ("Scheduler",),
    "adder": ("PrefillAdder",),
}
"""What the adapter calls SGLang's objects, and of which class they are."""


def _attributes(module: Path):
    """``(variable, attribute)`` of every access, ``getattr`` with a name included."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Attribute):
            base = node.value
            last = (
                base.id
                if isinstance(base, ast.Name)
                else base.attr
                if isinstance(base, ast.Attribute)
                else ""
            )
            yield last, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            of, name = node.args[0], node.args[1]
            if isinstance(of, ast.Name) and isinstance(name, ast.Constant):
                yield of.id, name.value


def test_whatever_the_adapter_touches_is_in_the_table() -> None:
    names = {one.name for one in TOUCHED}
    of_class = {
        variable: {one.name for one in TOUCHED if one.owner == owner} | set(more)
        for variable, (owner, *more) in OWNERS.items()
    }
    unknown = []
    for module in sorted(ADAPTER.glob("*.py")):
        if module.name in ("seam.py", "surface.py", "touched.py"):  # they speak of syntax trees
            continue
        for variable, name in _attributes(module):
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private and variable not in NOT_SGLANGS and name not in names:
                unknown.append(f"{module.name}: {variable}.{name}")
            if variable in of_class and not name.startswith("__") and name not in of_class[variable]:
                unknown.append(f"{module.name}: {variable}.{name}")
    assert unknown == []


def test_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "installed_root", lambda: None)
    assert "SGLang is not installed" in str(seam.probe()[0])
    with pytest.raises(EngineError, match="not installed"):
        seam.require_supported()


def _tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(("version", "page"), [(v, p) for v in TREES for p in (1, 16)])
def test_one_behaviour_over_all_versions(version: str, page: int) -> None:
    out = run(version, "seam_scenario.py", str(page))
    patch = int(version.split(".")[2])
    n = 4 * page if page > 1 else 20
    kept = n if page > 1 else n + 1  # whole pages of n + 1 tokens

    assert out["version"] == version
    assert out["chunk then end"] == [
        ["match", "a", 0, n, 0, "adapter", "team", ""],
        ["checkpoint", "a", _tokens(0, kept), False],
        ["checkpoint", "a", _tokens(0, kept), True],
        ["end", "a", 0],
    ]
    assert out["same id, other handle"]
    assert out["doubles"] == [
        call
        for i in range(2)
        for call in (["checkpoint", f"twin{i}", _tokens(1000, n), True], ["end", f"twin{i}", 0])
    ]
    assert out["books"] == [0] * len(out["books"]), "slots are lost or counted twice"
    assert out["load calls"] == [["match", "b", 0, n, 0, "", "", ""], *[["load", "b", 0, n]] * 3]
    assert out["ask again"] == (True if patch >= 20 else "raised")
    assert out["recompute"] == [0, True]
    assert out["loaded"] == [n, n, n, 3]
    assert out["insert doubles"] == [True, True]
    assert out["insert hole"]
    abort = [["abort", "d", 0]] if patch >= 20 else []
    assert out["rest"] == [
        ["match", "c", 0, n, 0, "", "", ""],
        ["end", "c", 0],
        ["match", "d", 0, n, 0, "", "", ""],
        *abort,
        ["tick"],
        ["evict", page],
        ["reset"],
        ["shutdown"],
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("version", TREES)
def test_hooks_on_the_real_scheduler(version: str) -> None:
    out = run(version, "hooks_scenario.py")
    calls = ["disk", "distributed", "tensor", "ipc"]
    assert out["flush while busy"] == [False, ["idle?", "idle?"]], (
        "a flush that SGLang refuses waited for copies"
    )
    assert out["flush refused"] == [False, ["idle?", "may flush"]]
    assert out["flush"][1][:3] == ["idle?", "may flush", "idle?"]
    assert out["another plug-in's hook"] == ["flush", "flush"], "only the refused flush does not come so far"
    assert out["checks"] == ["check_weights"], "a checksum changes nothing"
    assert out["weights"][:4] == [f"update_weights_from_{name}" for name in calls]
    assert out["weights settled"]
    names = [name for name, _ in out["told to end"]]
    assert names[:4] == [f"update_weights_from_{name}" for name in calls]
    assert not any(is_ok for _, is_ok in out["told to end"]), "every one of them has failed here"
    assert out["adapters"] == ["load_lora_adapter", "load_lora_adapter_from_tensors"]
    assert out["sleep"] == ["sleep", "release_memory_occupation", "sleep", "release_memory_occupation"]
    assert out["tick"] == [["tick"]]
    assert out["admission"] == ["CONTINUE", [0, 0, 0], "CONTINUE", [1, 0, 10]]
    assert out["reported"] == [10, 3]
    assert len(set(out["targets"])) == len(out["targets"])
    assert out["passes"] == ["pass of 7", "pass of 0"]
    assert {".".join(target.split(".")[-2:]) for target in out["targets"]} == _hooked(version)


def _hooked(version: str) -> set[str]:
    """What the page on SGLang says is hooked in the scheduler's process, as far as this version has it."""
    page = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text(encoding="utf-8")
    section = page.partition("\n## Hooks\n")[2].partition("\n## ")[0]
    files = {
        "Scheduler": touched.SCHEDULER,
        "PrefillAdder": touched.POLICY,
        "ScheduleBatch": touched.BATCH,
        "SchedulerWeightUpdaterManager": touched.WEIGHTS,
    }
    surface = Surface(TREES[version] / "sglang")
    tick = seam.read_seam(surface).tick.rpartition(".")[2]
    other_ticks = {"_process_hicache_events", "_get_new_batch_prefill_raw"} - {tick}
    named = re.findall(rf"`({'|'.join(files)})\.(\w+)`", section)
    return {
        f"{owner}.{name}"
        for owner, name in named
        if name not in other_ticks and surface.of(files[owner], owner).has(name)
    }
