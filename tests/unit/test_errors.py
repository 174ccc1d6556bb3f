"""The error tree: facts in attributes, and one answer to whether trying again makes sense."""

from __future__ import annotations

import pytest

from flexkv_core import errors
from flexkv_core.errors import (
    ConfigError,
    DriverNotFoundError,
    FlexKVError,
    HostMemoryError,
    SyncError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    TransferError,
)


def tree(cls=FlexKVError):
    return [cls, *(found for sub in cls.__subclasses__() for found in tree(sub))]


def test_every_error_of_the_module_is_in_the_tree_and_explained():
    named = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
    assert set(named) <= set(tree())
    for cls in named:
        assert cls.__name__.endswith("Error")
        assert cls.__doc__


def test_only_outages_are_worth_another_try():
    retryable = {cls for cls in tree() if cls.__module__ == errors.__name__ and cls.retryable}
    assert retryable == {TierUnavailableError, TierTimeoutError}


@pytest.mark.parametrize("cls", [c for c in tree(TierError) if c.__module__ == errors.__name__])
def test_tier_errors_carry_their_facts(cls):
    error = cls("no", tier="disk", operation="load", num_keys=3)
    assert (str(error), error.tier, error.operation, error.num_keys) == ("no", "disk", "load", 3)
    plain = cls("no")
    assert (plain.tier, plain.operation, plain.num_keys) == ("", "", 0)


def test_config_error_tells_every_finding_with_its_file():
    error = ConfigError("chain.yaml", ["a: one", "b: two"])
    assert error.findings == ("a: one", "b: two")
    assert str(error) == "chain.yaml: a: one\nchain.yaml: b: two"


def test_the_others_carry_their_facts():
    assert DriverNotFoundError("no", driver="acme").provider == ""
    memory = HostMemoryError("no", needed_bytes=2, available_bytes=1, limit="cgroup")
    assert (memory.needed_bytes, memory.available_bytes, memory.limit) == (2, 1, "cgroup")
    assert TransferError("no", job=7, retryable=True).retryable
    assert not TransferError("no").retryable
    assert SyncError("no", ranks=[1, 2]).ranks == (1, 2)
