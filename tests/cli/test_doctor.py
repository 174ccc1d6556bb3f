import json
import os
import re
import resource

import pytest

from flexkv_core import Needs
from flexkv_core.cli import _machine, _places, main
from flexkv_core.cli._findings import State
from tests.support.configs import write
from tests.support.distributions import add_distribution, add_driver

GIB = 1 << 30


def chain(folder, capacity="1MiB"):
    return {
        "version": 1,
        "tiers": [
            {"name": "host", "driver": "cpu", "options": {"capacity": capacity}},
            {"name": "disk", "driver": "ssd", "options": {"path": str(folder), "capacity": "2MiB"}},
        ],
    }


def doctor(capsys, *words):
    """Exit status, and the lines by name."""
    status = main(["doctor", "--no-gpu", "--json", *words])
    lines = json.loads(capsys.readouterr().out)
    return status, {line["name"]: line for line in lines}, lines


def test_a_good_machine_passes(capsys, tmp_path):
    status, lines, every = doctor(capsys, write(tmp_path, chain(tmp_path / "kv")))
    assert status == 0, [line for line in every if line["state"] == "FAIL"]
    for name in ("python", "flexkv-core", "torch", "pydantic", "memory (memory)", "memlock", "driver ssd"):
        assert lines[name]["state"] == "PASS"
    assert {"shared memory", "huge pages", f"directory {tmp_path / 'kv'}"} <= set(lines)
    assert not (tmp_path / "kv").exists(), "doctor changes nothing"


def test_lines_are_readable(capsys, tmp_path):
    assert main(["doctor", "--no-gpu", write(tmp_path, chain(tmp_path))]) == 0
    out = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(PASS|WARN|FAIL)  \S+.*: .|      mend: .", line) for line in out[:-1])
    assert re.fullmatch(r"\d+ PASS, \d+ WARN, 0 FAIL", out[-1])


def test_a_bad_configuration_is_a_failure_and_the_rest_is_still_looked_at(capsys, tmp_path):
    status, lines, every = doctor(capsys, write(tmp_path, {"blok_tokens": 1, "cpu_cache_gb": -1}))
    assert status == 1
    faults = [line["found"] for line in every if line["name"] == "configuration"]
    assert len(faults) == 2
    assert {line["mend"] for line in every if line["name"] == "configuration"} == {
        "correct it; flexkv reference tells every field"  # not `check`, which shows no values of such a file
    }
    assert "driver cpu" in lines


def test_a_pool_that_cannot_fit_fails_with_numbers(capsys, tmp_path):
    status, lines, _ = doctor(capsys, write(tmp_path, chain(tmp_path, "900TiB")))
    assert status == 1
    assert "the pools take 900.0 TiB" in lines["memory (memory)"]["found"]
    assert "lower the host tiers' capacity" in lines["memory (memory)"]["mend"]


@pytest.mark.parametrize(
    ("limits", "ranks", "states"),
    [
        ({"memory": 100 * GIB}, 1, ["PASS"]),
        ({"memory": 100 * GIB}, 8, ["FAIL"]),
        ({"memory": 200 * GIB, "cgroup": 64 * GIB}, 8, ["PASS", "FAIL"]),
        ({"memory": 200 * GIB, "cgroup": 64 * GIB}, 4, ["PASS", "PASS"]),
    ],
)
def test_all_ranks_count_together_and_the_cgroup_too(monkeypatch, limits, ranks, states):
    monkeypatch.setattr(_machine, "memory_limits", lambda: limits)
    lines = list(_machine.memory_lines([Needs(host_bytes=15 * GIB)], 0, ranks))
    assert [line.state.value for line in lines[:-1]] == states
    failed = [line for line in lines if line.state is State.FAIL]
    assert all(f"{ranks} x 15.0 GiB" in line.found for line in failed)


def test_huge_pages_are_counted():
    assert _machine.huge_page_line(0, 0).state is State.PASS
    line = _machine.huge_page_line(10 << 20, 2 << 20)
    assert line.state is State.FAIL
    assert "vm.nr_hugepages=5" in line.mend


@pytest.mark.parametrize(
    ("limit", "num_gpus", "state"),
    [(None, 1, State.PASS), (64 << 10, 0, State.PASS), (64 << 10, 1, State.WARN), (2 * GIB, 1, State.PASS)],
)
def test_memlock(limit, num_gpus, state):
    line = _machine.memlock_line(GIB, limit, num_gpus)
    assert line.state is state
    assert bool(line.mend) == (state is not State.PASS)


def test_the_real_memlock_limit_is_read(capsys):
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _, lines, _ = doctor(capsys)
    assert ("unlimited" in lines["memlock"]["found"]) == (soft == resource.RLIM_INFINITY)


def test_packages_missing_or_old():
    assert _machine.package_line("pydantic", "2.0").state is State.PASS
    assert "older than 99" in _machine.package_line("pydantic", "99").found
    assert "is not installed" in _machine.package_line("no-such-package-at-all", "1").found


def test_a_small_or_absent_shared_memory_is_a_warning(tmp_path):
    assert _machine.shared_memory_line(str(tmp_path / "absent")).state is State.WARN
    assert _machine.shared_memory_line("/proc").state is State.WARN  # of size 0


def test_gpus_are_asked_for_in_another_process():
    found = _machine.gpus()
    assert isinstance(found, (list, str))
    assert _machine.gpu_line(["H", "H"]).found == "2: H"
    assert _machine.gpu_line([]).state is State.WARN
    assert _machine.gpu_line("no torch").state is State.FAIL


def test_directories(tmp_path):
    (tmp_path / "file").write_text("x")
    (line,) = _places.directory_lines(str(tmp_path / "file"), 1)
    assert (line.state, line.found) == (State.FAIL, "is not a directory")
    space, direct = _places.directory_lines(str(tmp_path / "a" / "b"), 1)
    assert space.state is State.PASS
    assert f"will be made in {tmp_path}" in space.found
    assert direct.state in (State.PASS, State.WARN)
    space, _ = _places.directory_lines(str(tmp_path), 1 << 60)
    assert space.state is State.FAIL
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_cannot_be_made_or_looked_at(tmp_path):
    (tmp_path / "file").write_text("x")
    (line,) = _places.directory_lines(str(tmp_path / "file" / "kv"), 1)
    assert (line.state, line.found) == (State.FAIL, f"{tmp_path / 'file'} is not a directory")
    (line,) = _places.directory_lines(str(tmp_path / ("x" * 300)), 1)
    assert (line.state, line.found) == (State.FAIL, "cannot be looked at: File name too long")


def test_directories_that_do_not_fit_together(tmp_path, monkeypatch):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    monkeypatch.setattr(_places.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    assert not list(_places.shared_lines([(a, 100, 0)])), "its own line tells that"
    assert not list(_places.shared_lines([(a, 40, 20), (b, 40, 10)]))
    (line,) = _places.shared_lines([(a, 40, 20), (b, 41, 10)])
    assert line.state is State.FAIL
    assert "on one file system: 100 B free, 101 B wanted together" in line.found


@pytest.mark.parametrize(("free", "status"), [(17, 0), (16, 1)])
def test_what_must_stay_free_counts_once_for_a_file_system(capsys, tmp_path, monkeypatch, free, status):
    """However many ranks, tiers and directories have a share of it."""
    tree = chain(tmp_path / "a")
    tree["tiers"][1]["options"] = {
        "path": [str(tmp_path / "a"), str(tmp_path / "b")],
        "capacity": "2GiB",
        "min_free": "1GiB",
    }
    monkeypatch.setattr(_places.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free * GIB}))
    told, _, every = doctor(capsys, "--ranks", "8", write(tmp_path, tree))
    assert told == status, [line for line in every if line["state"] == "FAIL"]


@pytest.mark.parametrize(("free", "state"), [(9 * GIB, State.PASS), (9 * GIB - 1, State.FAIL)])
def test_a_directory_must_leave_free_what_it_says(tmp_path, monkeypatch, free, state):
    monkeypatch.setattr(_places.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    space, _ = _places.directory_lines(str(tmp_path), 8 * GIB, GIB)
    assert space.state is state


def test_one_directory_for_two_tiers_fails(capsys, tmp_path):
    tiers = chain(tmp_path / "kv")
    tiers["tiers"].append(tiers["tiers"][1] | {"name": "again"})
    status, lines, _ = doctor(capsys, write(tmp_path, tiers))
    assert status == 1
    assert lines[f"directory {tmp_path / 'kv'}"]["found"] == "is named 2 times"


def test_what_a_warm_tier_has_stored_is_its_room(tmp_path, monkeypatch):
    (tmp_path / "slab").write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(_places.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    space, _ = _places.directory_lines(str(tmp_path), 1 << 19)
    assert space.state is State.PASS


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_to_fails(tmp_path):
    tmp_path.chmod(0o500)
    (line,) = _places.directory_lines(str(tmp_path), 1)
    assert "cannot be written to" in line.found


def test_a_broken_driver_fails_only_where_it_is_used(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "sour", "import no_such_module_at_all")
    states = {line.name: line.state for line in _places.driver_lines(["sour", "absent"])}
    assert states["driver sour"] is State.FAIL
    assert states["driver absent"] is State.FAIL
    lines = {line.name: line for line in _places.driver_lines(["cpu"])}
    assert lines["driver sour"].mend.endswith("; no tier uses it")
    unknown = {line.name: line for line in _places.driver_lines(None)}
    assert unknown["driver sour"].mend.endswith("dist-sour 1.0")
    states = {name: line.state for name, line in lines.items()}
    assert states["driver sour"] is State.WARN
    assert states["driver cpu"] is State.PASS


SERVICE = """
import logging
from flexkv_core import DONE, MISS, Model, DriverSpec, Tier, TierCapabilities, TierUnavailableError, hookimpl

class Options(Model):
    state: str = "up"

class Service(Tier):
    capabilities = TierCapabilities(shared=True, persistent=True, max_batch=7)
    def __init__(self, state):
        self.state = state
        logging.getLogger("service").warning("[FlexKV] tier far: me:secret://u:pw@host is small")
    def lookup(self, keys):
        if self.state == "down": raise TierUnavailableError("no answer from far://me:secret@host")
        if self.state == "odd": raise TypeError("bug")
        if self.state == "sour": raise ValueError("secret")
        return [MISS for key in keys]
    def load(self, keys, into): raise AssertionError
    store = evict = load
    def close(self): print("closed")

def open_tier(config, context):
    return Service(config.state)

@hookimpl
def flexkv_driver():
    return DriverSpec(name="{name}", api=(1, 0), config=Options, open="module_of_{name}:open_tier")
"""


@pytest.mark.parametrize(
    ("state", "expected", "words"),
    [
        ("up", "PASS", "answers; persistent, shared, max_batch 7"),
        ("down", "FAIL", "tier far: no answer from far://****@host"),
        ("odd", "FAIL", "TypeError in driver service: bug"),
        ("sour", "FAIL", "ValueError in driver service"),
    ],
)
def test_services_are_asked(monkeypatch, capsys, tmp_path, state, expected, words):
    add_driver(monkeypatch, tmp_path, "service", SERVICE)
    tree = {"version": 1, "tiers": [{"name": "far", "driver": "service", "options": {"state": state}}]}
    file = write(tmp_path, tree)
    main(["doctor", "--no-gpu", file])
    out = capsys.readouterr().out
    assert out.count("closed\n") == 1
    line = next(line for line in out.splitlines() if "tier far" in line)
    assert line.startswith(expected)
    assert words in line
    assert "secret" not in line
    warned = [line for line in out.splitlines() if line.startswith("WARN  tier far")]
    assert warned == (["WARN  tier far: me:secret://****@host is small"] if state == "up" else [])
    main(["doctor", "--no-gpu", "--offline", file])
    assert "tier far" not in capsys.readouterr().out


ENGINES = """
def good(): return []
def differs(): return ["RadixCache.insert: has no parameter params"]
def raises(): raise RuntimeError("half installed")
"""


@pytest.mark.parametrize(
    ("function", "state", "words"),
    [
        ("good", State.PASS, "has the interface"),
        ("differs", State.FAIL, "RadixCache.insert"),
        ("raises", State.FAIL, "RuntimeError: half installed"),
        ("absent", State.FAIL, "cannot be checked: AttributeError"),
    ],
)
def test_engines_are_asked_through_their_adapters(monkeypatch, tmp_path, function, state, words):
    entry = {"flexkv.doctor.test": {"engine_checks": f"engine_checks:{function}"}}
    add_distribution(
        monkeypatch, tmp_path, "dist-engine", entry_points=entry, modules={"engine_checks": ENGINES}
    )
    (line,) = _places.engine_lines("flexkv.doctor.test")
    assert line.state is state
    assert words in line.found


def test_an_engine_that_is_not_installed_is_a_warning(monkeypatch, tmp_path):
    entry = {"flexkv.doctor.test": {"no_such_engine": "nowhere:probe"}}
    add_distribution(monkeypatch, tmp_path, "dist-engine", entry_points=entry, modules={})
    (line,) = _places.engine_lines("flexkv.doctor.test")
    assert (line.state, line.found) == (State.WARN, "is not installed")


def test_staging_counts_where_no_tier_lends_memory(capsys, tmp_path):
    tree = {"version": 1, "staging": "900TiB", "tiers": chain(tmp_path)["tiers"][1:]}
    status, lines, _ = doctor(capsys, write(tmp_path, tree))
    assert status == 1
    assert lines["memory (memory)"]["state"] == "FAIL"


def test_ranks_must_be_a_number(capsys):
    for text in ("0", "many"):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", "--ranks", text])
        assert caught.value.code == 2
