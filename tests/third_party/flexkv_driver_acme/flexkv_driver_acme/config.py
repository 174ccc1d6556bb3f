"""Options of the ``acme`` driver."""

from pathlib import Path

from pydantic import Field

from flexkv_core import Model


class AcmeConfig(Model):
    """Where the store is."""

    path: Path = Field(description="Directory of the store; made if it is not there.")
