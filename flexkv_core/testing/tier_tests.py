"""The conformance kit for tiers.

A driver's whole test file::

    from flexkv_core.testing import TierTests

    class TestAcme(TierTests):
        def open_tier(self, context, medium):
            return AcmeTier(AcmeConfig(directory=medium), context)

Tests are chosen by the tier's own capabilities; what is skipped is printed with its reason.  Give
``read_medium`` and ``write_medium`` and the kit damages values behind the tier's back; give
``break_medium`` and ``disturb_medium`` and it looks at failures.
"""

from __future__ import annotations

from .tier_contract import ContractTests
from .tier_corruption import CorruptionTests
from .tier_direct import DirectTests
from .tier_limits import LimitTests
from .tier_outages import OutageTests
from .tier_persistence import PersistenceTests
from .tier_threads import ThreadTests


class TierTests(
    ContractTests, ThreadTests, LimitTests, PersistenceTests, CorruptionTests, OutageTests, DirectTests
):
    """Every test that a tier must pass.  Subclass it and give ``open_tier``; see ``TierKit``."""
