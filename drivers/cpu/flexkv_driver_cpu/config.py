"""Options of the ``cpu`` driver."""

from pydantic import Field

from flexkv_core import ByteSize, Model, Needs


class CpuConfig(Model):
    """How much host memory, and of which kind."""

    capacity: ByteSize = Field(description="Size of the host pool, per engine process.")
    huge_pages: bool = Field(
        False, description="Take reserved 2 MiB pages; refused with the numbers if they are not there."
    )

    def needs(self) -> Needs:
        """The pool's memory."""
        return Needs(host_bytes=self.capacity, huge_pages=self.huge_pages)
