"""The acme driver passes the conformance kit."""

from flexkv_driver_acme.config import AcmeConfig
from flexkv_driver_acme.tier import open_tier

from flexkv_core.testing import TierTests


class TestAcme(TierTests):
    def open_tier(self, context, medium):
        return open_tier(AcmeConfig(path=medium / "store"), context)

    def read_medium(self, medium, key):
        return (medium / "store" / key.hex()).read_bytes()

    def write_medium(self, medium, key, data):
        path = medium / "store" / key.hex()
        path.unlink()
        if data is not None:
            path.write_bytes(data)
