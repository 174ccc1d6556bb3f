"""Variables that begin with ``FLEXKV_``, sorted into flat keys, twins of fields and strangers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .draft import Given, Origin, Rank
from .names import PATH_VARIABLE, PREFIX, TIERS_VARIABLE
from .report import Report
from .seed import SEED_KEYS

TEST_PREFIX = "FLEXKV_TEST_"
"""Variables of this project's tests; nobody else's business."""

_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP)(_\w+)?$")
_SERVICE_VALUE = re.compile(r"^(tcp|udp)://")
_FAULT_INJECTION = "FLEXKV_MOONCAKE_FAULT_"


@dataclass
class Seen:
    """What the environment gave.

    Attributes:
        keys: Flat keys.
        twins: Fields of the chain and of its tiers, by variable.
        tiers: ``FLEXKV_TIERS``, if given.
    """

    keys: list[Given] = field(default_factory=list)
    twins: list[Given] = field(default_factory=list)
    tiers: Given | None = None


def read_environment(environ: Mapping[str, str], referenced: set[str], report: Report) -> Seen:
    """Sort the variables.  An empty one counts as not given, which is said.

    Args:
        environ: All variables.
        referenced: Names that an option fills in as ``${NAME}``; they need no other meaning.
        report: Where ignored variables are told.
    """
    seen = Seen()
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        value = environ[name]
        if name == PATH_VARIABLE or name.startswith(TEST_PREFIX):
            continue
        key = SEED_KEYS.get(name.removeprefix(PREFIX).lower())
        given = Given(name, value, Origin(Rank.ENVIRONMENT, name))
        if name in referenced and key is None:
            continue
        if not value.strip():
            report.notice(f"environment {name} is empty and counts as not given")
        elif _is_of_a_cluster(name, value):
            report.notice(f"environment {name} looks like a service of a Kubernetes cluster and is ignored")
        elif name.startswith(_FAULT_INJECTION):
            report.notice(f"environment {name} has no effect: a tier in a Mooncake store is not built yet")
        elif key is not None:
            seen.keys.append(Given(key.name, value, given.origin))
        elif name == TIERS_VARIABLE:
            seen.tiers = given
        else:
            seen.twins.append(given)
    return seen


def _is_of_a_cluster(name: str, value: str) -> bool:
    """A service named ``flexkv-...`` puts such variables into every pod of its name space."""
    return bool(_SERVICE.search(name)) or (name.endswith("_PORT") and bool(_SERVICE_VALUE.match(value)))
