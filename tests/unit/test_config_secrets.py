"""A secret is in no output, error, notice or representation, wherever it came from."""

import copy

import pytest

from flexkv_core import ConfigError
from flexkv_core.cli.check import as_json, as_table
from flexkv_core.config import load_config
from tests.support.configs import findings, write
from tests.support.distributions import GOOD_DRIVER, add_driver

SECRET = "pa55-w0rd-of-mine"
TALKATIVE = GOOD_DRIVER.replace(
    "@hookimpl",
    """
    from pydantic import field_validator

    @field_validator("names", mode="before")
    @classmethod
    def _tell(cls, value):
        raise ValueError(f"cannot use {value}")

@hookimpl""",
)


def chain(**options):
    return {"version": 1, "tiers": [{"name": "far", "driver": "stranger", "options": options}]}


def everything_shown(config):
    return "\n".join(
        [
            repr(config),
            str(config),
            repr(config.chain),
            repr(config.tiers),
            repr(config.values),
            *config.describe(),
            as_table(config),
            as_json(config),
            repr(config.chain.tiers[0].options),
            str(config.chain.tiers[0].options.get("password")),
        ]
    )


@pytest.mark.parametrize(
    ("password", "environ", "shown"),
    [
        (SECRET, {}, "****"),
        ("${FAR_PASSWORD}", {"FAR_PASSWORD": SECRET}, "${FAR_PASSWORD}"),
        ("${FLEXKV_FAR_PASSWORD}", {"FLEXKV_FAR_PASSWORD": SECRET}, "${FLEXKV_FAR_PASSWORD}"),
        ("x${FAR_PASSWORD}", {"FAR_PASSWORD": SECRET}, "****"),
        (None, {"FLEXKV_TIER_FAR_OPTIONS_PASSWORD": SECRET}, "****"),
    ],
)
def test_secrets_are_used_and_not_shown(monkeypatch, tmp_path, password, environ, shown):
    add_driver(monkeypatch, tmp_path, "stranger")
    config = load_config(write(tmp_path, chain(password=password)), environ=environ)
    assert SECRET in config.tiers[0].options.password.get_secret_value()
    assert SECRET not in everything_shown(config)
    text = next(value.text for value in config.values if value.path.endswith("password"))
    assert text == shown


def test_what_was_filled_into_plain_options_is_not_shown(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    options = {"url": "far://${U}@host", "names": ["a", "${U}"], "inner": {"depth": "${N}"}}
    config = load_config(write(tmp_path, chain(**options)), environ={"U": SECRET, "N": "4"})
    assert config.tiers[0].options.url == f"far://{SECRET}@host"
    assert config.tiers[0].options.names == ["a", SECRET]
    assert config.tiers[0].options.inner.depth == 4
    shown = [as_table(config), as_json(config), repr(config), *config.describe()]
    assert not any(SECRET in text for text in shown)


def test_user_and_password_in_a_url_are_masked(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    config = load_config(write(tmp_path, chain(url=f"far://me:{SECRET}@host/3")), environ={})
    assert SECRET not in as_table(config)
    assert "far://****@host/3" in as_table(config)


def test_a_secret_may_come_from_a_file(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    file = write(tmp_path, chain(password=f"${{file:{secret}}}"))
    config = load_config(file, environ={})
    assert config.tiers[0].options.password.get_secret_value() == SECRET
    secret.unlink()
    (line,) = findings(file)
    assert "tiers[0].options.password: ${file:" in line
    assert "No such file" in line


def test_a_missing_variable_is_a_finding_and_a_doubled_sign_is_none(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    (line,) = findings(write(tmp_path, chain(url="far://${NOT_THERE}")))
    assert "tiers[0].options.url: ${NOT_THERE}: the environment has no NOT_THERE" in line
    (line,) = findings(write(tmp_path, chain(url="far://${not a name}")))
    assert "must hold a variable's name or file:PATH" in line
    config = load_config(write(tmp_path, chain(url="far://$${HOME}")), environ={})
    assert config.tiers[0].options.url == "far://${HOME}"


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({"password": [SECRET]}, {}),
        ({"size": SECRET}, {}),
        ({"size": "${S}"}, {"S": SECRET}),
        ({"inner": {"depth": SECRET}}, {}),
        ({"names": ["${S}"]}, {"S": SECRET}),
        ({"names": [f"far://u:{SECRET}@h"]}, {}),
        ({}, {"FLEXKV_TIER_FAR_OPTIONS_SIZE": SECRET}),
        ({}, {"FLEXKV_BLOCK_TOKENS": SECRET}),
        ({}, {"FLEXKV_CPU_CACHE_GB": SECRET}),
        ({}, {"FLEXKV_KV_CACHE_DTYPE": SECRET}),
    ],
)
def test_no_error_quotes_a_value(monkeypatch, tmp_path, options, environ):
    add_driver(monkeypatch, tmp_path, "stranger", TALKATIVE)
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, chain(**options)), environ=environ)
    error = caught.value
    assert SECRET not in str(error)
    assert SECRET not in repr(error)
    chained = error.__cause__ or error.__context__
    assert chained is None or SECRET not in repr(chained)


@pytest.mark.parametrize(
    "text",
    [
        f"a: {SECRET}: [",
        f"a: '{SECRET}\n",
        f"a: !{SECRET} x",
        f"a: *{SECRET}",
        f'a: !{SECRET}"x',
        f"a: !a'b%22{SECRET} x",
        f"a: !<%3C{SECRET}> x",
        *(f"a: !!{tag} {SECRET}" for tag in ("timestamp", "bool", "int", "float", "binary", "map", "seq")),
        f"\t{SECRET}",
    ],
)
def test_no_error_of_the_parser_quotes_a_line(tmp_path, text):
    assert all(SECRET not in line for line in findings(write(tmp_path, text)))


def test_flexkvs_own_password_is_not_shown(tmp_path):
    config = load_config(write(tmp_path, {"redis_password": SECRET}), environ={})
    assert SECRET not in "\n".join([repr(config), as_table(config), as_json(config), *config.notices])
    config = load_config(environ={"FLEXKV_REDIS_PASSWORD": SECRET})
    assert SECRET not in "\n".join([repr(config), as_table(config), as_json(config), *config.notices])


def test_texts_above_the_options_are_filled_in_too(tmp_path):
    tree = {"namespace": {"revision": "${REV}"}, "ssd_cache_gb": 20, "ssd_cache_dir": "${DISK}/kv"}
    config = load_config(write(tmp_path, tree), environ={"REV": "r7", "DISK": "/nvme"})
    assert config.chain.namespace.revision == "r7"
    assert str(config.tiers[1].options.path[0]) == "/nvme/kv"
    (line,) = findings(write(tmp_path, {"namespace": {"revision": "${REV}"}}))
    assert "namespace.revision: ${REV}: the environment has no REV" in line


def test_flags_are_not_changed_by_filling_in(monkeypatch, tmp_path):
    add_driver(monkeypatch, tmp_path, "stranger")
    flags = {"tiers": chain(password="${P}")["tiers"]}
    before = copy.deepcopy(flags)
    load_config(flags=flags, environ={"P": SECRET})
    assert flags == before
