"""Whatever stands in a file or a variable: a configuration, or ``ConfigError``, and nothing else."""

import json
import tempfile
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexkv_core import ConfigError
from flexkv_core.config import EffectiveConfig, load_config
from flexkv_core.config.names import chain_leaves, variable_of
from flexkv_core.config.seed import SEED_KEYS
from tests.support.configs import CHAIN

NAMES = sorted(
    {*SEED_KEYS, *CHAIN, "engine", "staging", "tiers", "version", "driver", "options", "name", "write"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["8GiB", "cpu", "ssd", "host", "through", "${HOME}", "${", "$${X}", "1e400", "auto"]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=8)), inner, max_size=6),
    ),
    max_leaves=20,
)
TIERS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.one_of(st.sampled_from(["host", "disk"]), SCALARS),
            "driver": st.sampled_from(["cpu", "ssd"]),
        },
        optional={
            "options": TREES,
            "write": SCALARS,
            "promote": SCALARS,
            "eviction": TREES,
            "ttl_s": SCALARS,
        },
    ),
    max_size=3,
)
VARIABLES = sorted(
    {variable_of(leaf.path) for leaf in chain_leaves()}
    | {key.variable for key in SEED_KEYS.values()}
    | {
        "FLEXKV_TIERS",
        "FLEXKV_TIER_HOST_WRITE",
        "FLEXKV_TIER_HOST_OPTIONS_CAPACITY",
        "FLEXKV_TIER_",
        "FLEXKV_",
    }
)


def is_good_or_refused(file=None, **sources):
    try:
        config = load_config(file, **sources)
    except ConfigError as exc:
        return len(exc.findings) > 0
    return isinstance(config, EffectiveConfig)


def load(content, name, environ=None):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        assert is_good_or_refused(path, environ=environ or {})


@given(st.binary(max_size=200), st.sampled_from(["a.yaml", "a.json", "a.yml"]))
def test_junk_bytes(content, name):
    load(content, name)


@given(st.text(st.sampled_from("abtiers:-[]{}&*!|>'\"#%@, \n0123.~?<"), max_size=60))
def test_junk_that_looks_like_yaml(text):
    load(text.encode(), "a.yaml")


@given(TREES)
def test_junk_trees(tree):
    load(yaml.safe_dump(tree).encode(), "a.yaml")
    load(json.dumps(tree).encode(), "a.json")


@given(TIERS, st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=3))
def test_junk_tiers(tiers, rest):
    load(yaml.safe_dump({**rest, "tiers": tiers}).encode(), "a.yaml")


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=12), max_size=4))
def test_junk_variables(environ):
    load(b"cpu_cache_gb: 1\n", "a.yaml", environ)


@given(st.dictionaries(st.sampled_from([*NAMES, "tiers.host.write", "tiers.", ".", ""]), TREES, max_size=3))
def test_junk_flags(flags):
    assert is_good_or_refused(flags=flags, environ={})
