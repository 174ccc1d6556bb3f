"""FlexKVRadixCache over the older seams: the scheduler model's tests, in a process for each version.

What is promised, loaded, stored, evicted and aborted must be the same whatever SGLang calls it by.
"""

from __future__ import annotations

import re

import pytest

from tests.engines.sglang.versions import TREES, run_raw

OLDER = list(TREES)[1:]
FILES = {
    "test_radix_cache.py": "",
    "test_radix_cache_faults.py": (
        "computed or only_counted or limited or refused or beginning or twice or chunks or aborted or flush "
        "or reset or weights or sleep or end_is_bounded or factory"
    ),
    "test_radix_cache_order.py": "abort or evict or retract or pressure or deadline or ask",
    "test_weights.py": "",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OLDER, reason="no other sglang is installed (make setup)"),
]


@pytest.mark.parametrize("version", OLDER)
@pytest.mark.parametrize("file", FILES)
def test_the_scheduler_model_over(version: str, file: str) -> None:
    pytest_args = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = run_raw(version, [*pytest_args, f"tests/engines/sglang/{file}", "-k", FILES[file]], 600)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 8, done.stdout[-500:]
