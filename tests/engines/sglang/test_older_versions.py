"""FlexKVRadixCache over the older seams: the scheduler model's tests, in a process for each version.

What is promised, loaded, stored, evicted and aborted must be the same whatever SGLang calls it by.
"""

from __future__ import annotations

import re

import pytest

from tests.engines.sglang.versions import TREES, run_script

OLDER = list(TREES)[1:]
PARTS = {
    "whole": (("test_radix_cache.py", "test_radix_cache_border.py", "test_weights.py"), "", 40),
    "admission": (("test_admission.py",), "", 20),
    "faults": (
        ("test_radix_cache_faults.py", "test_radix_cache_order.py"),
        "computed or only_counted or limited or refused or beginning or twice or chunks or abort or flush or "
        "reset or weights or sleep or end_is_bounded or factory or evict or retract or two_requests",
        40,
    ),
    "layers": (("test_radix_cache_layerwise.py",), "only_the_batch", 6),
    "queue": (("test_queue_ranking.py", "test_load_left_behind.py"), "", 12),
    "tree": (("test_loaded_nodes.py", "test_store_pressure.py"), "", 12),
}
"""Files that run in one process, which of their tests, and how many these are at least."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("imported"),
    pytest.mark.skipif(not OLDER, reason="no other sglang is installed (make setup)"),
]


@pytest.mark.parametrize("version", OLDER)
@pytest.mark.parametrize("part", PARTS)
def test_the_scheduler_model_over(version: str, part: str) -> None:
    files, chosen, at_least = PARTS[part]
    args = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", chosen]
    args += ["-W", "ignore:Module already imported"]  # SGLang is, and with it a plug-in of pytest's
    done = run_script(version, [*args, *(f"tests/engines/sglang/{file}" for file in files)])
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= at_least, done.stdout[-500:]
