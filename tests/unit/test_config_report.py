"""Everything that is wrong, in one report, with path, expected type and the nearest name."""

import copy

import pytest

from flexkv_core import ConfigError
from flexkv_core.config import load_config
from tests.support.configs import CHAIN, findings, write
from tests.support.distributions import GOOD_DRIVER, add_distribution, add_driver


def changed(path, value):
    """``CHAIN`` with one value replaced or added."""
    tree = copy.deepcopy(CHAIN)
    place = tree
    for part in path[:-1]:
        place = place.setdefault(part, {}) if isinstance(place, dict) else place[part]
    place[path[-1]] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("blok_tokens",), 1, "blok_tokens: unknown field, did you mean block_tokens?"),
        (("block_tokens",), "many", "block_tokens: expected whole number, got text"),
        (("block_tokens",), True, "block_tokens: must be a number, not true or false"),
        (("block_tokens",), 0, "block_tokens: must be at least 1"),
        (("block_tokens",), 9000, "block_tokens: must be at most 8192"),
        (("block_tokens",), None, "block_tokens: expected whole number, got nothing"),
        (("block_tokens",), 1.5, "block_tokens: expected whole number, got a number"),
        (("version",), 2, "version: expected 1"),
        (("staging",), "lots", "staging: must be a size such as 8GiB"),
        (("staging",), -1, "staging: must be at least 0"),
        (("namespace",), "x", "namespace: expected mapping, got text"),
        (("namespace", "modle"), "x", "namespace.modle: unknown field, did you mean model?"),
        (("namespace", "model"), [], "namespace.model: expected text, got a list"),
        (("engine", "layerwise"), "perhaps", "engine.layerwise: expected auto or true or false"),
        (("engine", "load_wait_s"), float("inf"), "engine.load_wait_s: "),
        (("engine", "load_wiat_s"), 1, "engine.load_wiat_s: unknown field, did you mean load_wait_s?"),
        (("tiers",), [], "tiers: must have at least 1 entry"),
        (("tiers",), "host", "tiers: expected list of mappings, got text"),
        (("tiers", 0), 7, "tiers[0]: expected mapping, got a number"),
        (("tiers", 0, "name"), "Host!", "tiers[0].name: must be of a-z, 0-9, - and _, begin with"),
        (("tiers", 0, "name"), 7, "tiers[0].name: expected text, got a number"),
        (("tiers", 1, "name"), "host", "tier names must be distinct, twice: host"),
        (("tiers", 1, "wirte"), "back", "tiers[1].wirte: unknown field, did you mean write?"),
        (("tiers", 1, "write"), "sideways", "tiers[1].write: expected one of through, back, around, never"),
        (
            ("tiers", 1, "promote"),
            0,
            "tiers[1].promote: expected one of always, never or whole number of at least 1, got a number",
        ),
        (("tiers", 1, "promote"), "alway", "or whole number of at least 1, did you mean always?"),
        (("tiers", 1, "eviction"), {"policy": "LRU"}, "expected one of lru, lfu, slru, fifo, mru, filo, did"),
        (("tiers", 1, "wrap"), ["retry"], "tiers[1].wrap: unknown field: every tier is wrapped already"),
        (("tiers", 1, "options", "wrap"), 1, "tiers[1].options.wrap: unknown field"),
        (("tiers", 1, "ttl_s"), "soon", "tiers[1].ttl_s: must be a duration"),
        (("tiers", 1, "load_deadline_s"), 0, "tiers[1].load_deadline_s: must be more than 0"),
        (
            ("tiers", 1, "eviction", "polcy"),
            "lru",
            "tiers[1].eviction.polcy: unknown field, did you mean policy?",
        ),
        (("tiers", 1, "eviction", "ratio"), "half", "tiers[1].eviction.ratio: expected number, got text"),
        (
            ("tiers", 0, "options", "capacty"),
            1,
            "tiers[0].options.capacty: unknown field, did you mean capacity?",
        ),
        (("tiers", 0, "options", "capacity"), "big", "tiers[0].options.capacity: must be a size"),
        (("tiers", 0, "options", "huge_pages"), [1], "tiers[0].options.huge_pages: expected true or false"),
        (("tiers", 0, "options"), [1], "tiers[0].options: expected mapping, got a list"),
        (
            ("tiers", 0, "driver"),
            "cpus",
            "tiers[0].driver: no driver named 'cpus' is installed, did you mean cpu?",
        ),
        (("cpu_cache_gb",), 1, "cpu_cache_gb: belongs to the flat format"),
    ],
)
def test_one_fault_has_one_line(tmp_path, path, value, words):
    file = write(tmp_path, changed(path, value))
    (line,) = findings(file)
    assert line.startswith(f"{file}: ")
    assert words in line


def test_a_required_option_is_named_with_its_type(tmp_path):
    (line,) = findings(write(tmp_path, changed(("tiers", 0, "options"), {})))
    assert "tiers[0].options.capacity: required: expected size such as 8GiB" in line


def test_all_faults_of_all_sources_stand_in_one_report(tmp_path):
    tree = changed(("tiers", 0, "options", "capacty"), 1)
    tree["tiers"][1] |= {"promot": 1, "driver": "tape"}
    tree["blok_tokens"] = 3
    file = write(tmp_path, tree)
    environ = {"FLEXKV_BLOCK_TOKEN": "1", "FLEXKV_STAGING": "lots", "FLEXKV_ENABLE_GDS": "1"}
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ=environ, flags={"engine.layerwize": 1, "block_tokens": "x"})
    error = caught.value
    text = "\n".join(error.findings)
    for words in (
        "FLEXKV_BLOCK_TOKEN: unknown variable, did you mean FLEXKV_BLOCK_TOKENS?",
        "FLEXKV_STAGING (staging): must be a size",
        "FLEXKV_ENABLE_GDS: refused: GPU direct storage is not built yet",
        "engine.layerwize: unknown field, did you mean engine.layerwise?",
        "block_tokens: expected whole number, got text",
        "tiers[0].options.capacty",
        "tiers[1].promot: unknown field",
        "no driver named 'tape'",
        "blok_tokens",
    ):
        assert words in text
    assert error.file == file
    assert set(error.sources) == {file, "environment", "flag"}
    assert len(str(error).splitlines()) == len(error.findings) == 9


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FLEXKV_NONSENSE", "1", "FLEXKV_NONSENSE: unknown variable"),
        ("FLEXKV_ENABLE_SSD", "1", "did you mean FLEXKV_SSD_CACHE_GB?"),
        ("FLEXKV_CPU_CACHE_BG", "1", "did you mean FLEXKV_CPU_CACHE_GB?"),
        ("FLEXKV_CPU_CACHE_GB", "much", "FLEXKV_CPU_CACHE_GB: expected number, got text"),
        ("FLEXKV_TIER_DISC_WRITE", "back", "names no tier; the chain has host, disk"),
        ("FLEXKV_TIER_DISK_WIRTE", "back", "tier disk has no such field, did you mean WRITE?"),
        ("FLEXKV_TIER_DISK_OPTIONS_PAHT", "/x", "tier disk has no such field, did you mean OPTIONS_PATH?"),
        ("FLEXKV_TIER_DISK_PROMOTE", "0", "FLEXKV_TIER_DISK_PROMOTE (tiers[1].promote): expected one of"),
        ("FLEXKV_TIER_HOST_OPTIONS_CAPACITY", "big", "FLEXKV_TIER_HOST_OPTIONS_CAPACITY (tiers[0].options"),
        ("FLEXKV_TIERS", "[{", "FLEXKV_TIERS: line 1"),
        ("FLEXKV_TIERS", "5", "FLEXKV_TIERS (tiers): expected list of mappings, got a number"),
        ("FLEXKV_SSD_CACHE_GB", "0", "0 does not take a tier out of a chain"),
    ],
)
def test_bad_variables(tmp_path, name, value, words):
    (line,) = findings(write(tmp_path, CHAIN), environ={name: value})
    assert line.startswith("environment: ")
    assert words in line


def test_what_all_variables_begin_with_makes_no_two_alike(tmp_path):
    (line,) = findings(write(tmp_path, CHAIN), environ={"FLEXKV_FOO": "1"})
    assert line == "environment: FLEXKV_FOO: unknown variable"


def test_a_size_for_a_driver_that_the_chain_has_not_is_told(tmp_path):
    tree = {**CHAIN, "tiers": CHAIN["tiers"][:1]}
    (line,) = findings(write(tmp_path, tree), environ={"FLEXKV_SSD_CACHE_GB": "5"})
    assert "the chain has no tier of driver ssd" in line


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.yaml", "", "the file is empty"),
        ("c.yaml", "# only a comment\n", "the file is empty"),
        ("c.json", " ", "the file is empty"),
        ("c.yaml", "- a\n- b\n", "expected a mapping at the top, got a list"),
        ("c.yaml", "plain\n", "expected a mapping at the top, got text"),
        ("c.json", "[1]", "expected a mapping at the top, got a list"),
        ("c.yaml", "cpu_cache_gb: [1\n", "not YAML: expected ',' or ']', but got '<stream end>'"),
        ("c.yaml", "tiers:\n\t- name: x\n", "line 2, column 1: not YAML: a tab: indent with spaces"),
        ("c.json", '{"a": 1,}', "not JSON"),
        ("c.yaml", "a: 1\n---\nb: 2\n", "not YAML"),
        ("c.yaml", "cpu_cache_gb: 1\ncpu_cache_gb: 2\n", "line 2: cpu_cache_gb: given twice in one mapping"),
        ("c.json", '{"cpu_cache_gb": 1, "cpu_cache_gb": 2}', "cpu_cache_gb: given twice in one mapping"),
        ("c.yaml", "1: 2\n", "a key must be text, found a number"),
        ("c.yaml", "when: 2001-01-01\n", "found a date"),
        ("c.yaml", "when: 2001-99-99\n", "a value that cannot be what its tag or form says"),
        ("c.yaml", "when: !!timestamp x\n", "a value that cannot be"),
        ("c.yaml", "layerwise: !!bool x\n", "a value that cannot be"),
        ("c.yaml", "a: !!int ''\n", "a value that cannot be"),
        ("c.yaml", "a: !!python/object:os.system {}\n", "not YAML"),
        ("c.yaml", "a: &a [*a]\n", "nested too deep"),
        ("c.yaml", "\x00", "not YAML"),
        ("c.toml", "a = 1", "ends in .toml; expected .yaml, .yml, .json"),
        ("chain", "a: 1", "ends in nothing; expected"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, name, content, words):
    file = write(tmp_path, content, name)
    (line,) = findings(file)
    assert line.startswith(f"{file}: ")
    assert words in line


def test_a_bomb_of_aliases_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (line,) = findings(write(tmp_path, "\n".join(lines)))
    assert "more than a configuration holds" in line


def test_merge_keys_are_no_duplicates(tmp_path):
    text = """
version: 1
tiers:
  - &base {name: a, driver: cpu, retries: 3, options: {capacity: 1MiB}}
  - {<<: *base, name: b, retries: 4}
"""
    config = load_config(write(tmp_path, text), environ={})
    assert [tier.config.retries for tier in config.tiers] == [3, 4]


def test_unreadable_files(tmp_path):
    (line,) = findings(str(tmp_path / "absent.yaml"))
    assert "cannot be read: No such file" in line
    (tmp_path / "folder.yaml").mkdir()
    (line,) = findings(str(tmp_path / "folder.yaml"))
    assert "is a directory" in line
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe")
    (line,) = findings(str(tmp_path / "b.yaml"))
    assert "byte 3 is not UTF-8 text" in line
    (tmp_path / "long.yaml").write_bytes(b"#" * (1 << 21))
    (line,) = findings(str(tmp_path / "long.yaml"))
    assert "no configuration" in line
    assert len(findings("a\0b.yaml")) == 1


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfcpu_cache_gb: 1\n")
    assert load_config(str(path), environ={}).tiers[0].options.capacity == 1 << 30


# --- drivers by strangers ----------------------------------------------------------------------


def far(**options):
    return {"version": 1, "tiers": [{"name": "far", "driver": "stranger", "options": options}]}


def test_a_strangers_model_does_not_drop_unknown_names(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    assert len(load_config(write(tmp_path, far(size=2)), environ={}).tiers) == 1
    lines = findings(write(tmp_path, far(sise=2, inner={"dept": 1})))
    assert sorted(line.split(": ", 1)[1] for line in lines) == [
        "tiers[0].options.inner.dept: unknown field, did you mean depth?",
        "tiers[0].options.sise: unknown field, did you mean size?",
    ]


def test_a_strangers_nested_option_has_a_variable(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    file = write(tmp_path, far(inner=None) | {})
    environ = {"FLEXKV_TIER_FAR_OPTIONS_INNER_DEPTH": "5", "FLEXKV_TIER_FAR_OPTIONS_NAMES": "a;b"}
    options = load_config(file, environ=environ).tiers[0].options
    assert options.inner.depth == 5
    assert options.names == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_at_all", "cannot be imported: ModuleNotFoundError"),
        ("x = 1", "must return a DriverSpec, it returned nothing"),
        (GOOD_DRIVER.replace("(1, 0)", "(9, 0)"), "was written for driver interface 9.0"),
        (GOOD_DRIVER.replace("config=Options", "config=dict"), "must be a pydantic model"),
        (
            GOOD_DRIVER.replace(
                "    inner: Inner", "    def __init__(self, **k): raise RuntimeError('x')\n    inner: Inner"
            ),
            "the driver's model of its options failed: RuntimeError",
        ),
    ],
)
def test_broken_drivers_are_findings_beside_the_others(monkeypatch, tmp_path, source, words):
    add_driver(monkeypatch, tmp_path, "stranger", source)
    lines = findings(write(tmp_path, far() | {"blok_tokens": 1}))
    assert len(lines) == 2
    assert words in lines[1]
    assert load_config(environ={}).tiers[0].spec.name == "cpu"  # it disturbs nobody who does not name it


def test_two_offers_of_one_name_are_a_finding(monkeypatch, tmp_path):
    for number in "12":
        add_distribution(
            monkeypatch,
            tmp_path / number,
            f"dist-{number}",
            entry_points={"flexkv.drivers": {"stranger": f"module_{number}"}},
            modules={},
        )
    (line,) = findings(write(tmp_path, far()))
    assert "is offered by" in line
    assert "dist-1 1.0" in line
    assert "dist-2 1.0" in line
