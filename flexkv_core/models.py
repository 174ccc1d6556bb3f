"""The configuration's models: what a chain file may say, with every field's type, default and reason.

They are frozen and forbid unknown fields.  Reading files, the environment and flags into them is
``config``'s work; code further right receives them, or parts of them, never dictionaries.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .units import ByteSize, KvDtype, Seconds


def _plain_kinds(annotation: Any) -> set[Any]:
    """What stands in a union, or the annotation itself, without ``Annotated`` round it."""
    if get_origin(annotation) is Annotated:
        return _plain_kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _plain_kinds(part)}
    return {annotation}


TIER_NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,31}$"
TierName = Annotated[str, Field(pattern=TIER_NAME_PATTERN)]


class Model(BaseModel):
    """Frozen, strict about names, and silent about values in its errors (they may be secrets)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1, so that ``retries: yes`` would mean one retry.
        if isinstance(value, bool):
            kinds = _plain_kinds(cls.model_fields[str(info.field_name)].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("must be a number, not true or false")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a tier will take of this machine, as its options say: for ``flexkv doctor``.

    A driver's options model may have a method ``needs() -> Needs``; without one nothing is checked.

    Attributes:
        host_bytes: Host memory of each engine process.
        huge_pages: Whether that memory is of reserved huge pages.
        directories: Directories that it writes to, each with an equal share of ``disk_bytes``.
        disk_bytes: Disk space in all.
        min_free_bytes: What must stay free besides, once on each of their file systems.
    """

    host_bytes: int = 0
    huge_pages: bool = False
    directories: tuple[str, ...] = ()
    disk_bytes: int = 0
    min_free_bytes: int = 0


class WritePolicy(str, Enum):
    """When a tier is given a block that was stored in the tier above."""

    THROUGH = "through"
    BACK = "back"
    AROUND = "around"
    NEVER = "never"


class EvictionPolicy(str, Enum):
    """Which block leaves a full tier first; always a leaf that nobody pins."""

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    FIFO = "fifo"
    MRU = "mru"
    FILO = "filo"


class EvictionConfig(Model):
    """How room is made in a tier of bounded size."""

    policy: EvictionPolicy = Field(EvictionPolicy.LRU, description="Order of leaving.")
    ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="At least this share of the capacity is freed at once; 0 frees what is needed.",
    )
    start_threshold: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Eviction begins at this utilisation. Default: 1.0, when the tier is full; 0.75 in a "
        "first tier above one with `write: back`, whose slots come free only when they are written there.",
    )
    hit_reward_s: Seconds = Field(
        0.0, description="LRU: each hit makes a block this much younger, in seconds."
    )
    slru_protected_threshold: int = Field(
        2, ge=1, description="SLRU: a block with this many hits is protected."
    )


KeyId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,16}$")]
KEY_BYTES = 32


def read_key(secret: SecretStr) -> bytes:
    """The 32 bytes of a key that is written as 64 hexadecimal digits or in base64.

    Raises:
        ValueError: it is neither; the text is not quoted.
    """
    text = secret.get_secret_value().strip()
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError("must be 32 random bytes, as 64 hexadecimal digits or in base64")
    return key


class EncryptConfig(Model):
    """Values leave this process encrypted with AES-256-GCM."""

    key: SecretStr = Field(
        description="32 random bytes, as 64 hexadecimal digits or in base64 (`openssl rand -hex 32`); "
        "from `${NAME}` or `${file:PATH}`."
    )
    key_id: KeyId = Field(
        "1", description="Name of the key; it stands in each value. A new key takes a new name."
    )
    old_keys: dict[KeyId, SecretStr] = Field(
        default_factory=dict,
        description="Former keys by their names: values that were written with them are still read.",
    )

    @field_validator("key")
    @classmethod
    def _is_a_key(cls, value: SecretStr) -> SecretStr:
        read_key(value)
        return value

    @field_validator("old_keys")
    @classmethod
    def _are_keys(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for key in value.values():
            read_key(key)
        return value

    @model_validator(mode="after")
    def _names_are_distinct(self) -> EncryptConfig:
        if self.key_id in self.old_keys:
            raise ValueError("old_keys names the key_id of the key in use: give the new key a new name")
        return self


class CodecConfig(Model):
    """What is done to values on their way into a tier, and undone on their way out."""

    compress: Literal["none", "zstd"] = Field(
        "none", description="zstd needs the extra `zstd`. A value that does not shrink is left as it is."
    )
    level: int = Field(
        1, ge=1, le=19, description="zstd's level: higher ones are slower and win next to nothing on KV."
    )
    encrypt: EncryptConfig | None = Field(
        None, description="AES-256-GCM; needs the extra `crypto`. Default: values are not encrypted."
    )

    @property
    def is_on(self) -> bool:
        """Whether values are changed at all."""
        return self.compress != "none" or self.encrypt is not None

    def missing_extras(self) -> dict[str, str]:
        """Fields whose package is not installed, each with what to do about it."""
        missing = {}
        if self.compress == "zstd" and find_spec("zstandard") is None:
            missing["compress"] = "zstd needs the package zstandard: pip install 'flexkv-core[zstd]'"
        if self.encrypt is not None and find_spec("cryptography") is None:
            missing["encrypt"] = "needs the package cryptography: pip install 'flexkv-core[crypto]'"
        return missing


class LimitConfig(Model):
    """How much may pass in one direction; 0 is no limit."""

    bytes_per_s: ByteSize = Field(0, description="Bytes in a second, as they pass the wire; 0: no limit.")
    operations_per_s: float = Field(0, ge=0, description="Values in a second; 0: no limit.")
    burst_s: Seconds = Field(
        1.0, gt=0, description="What was not used is saved up for so long, and may then pass at once."
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is limited."""
        return bool(self.bytes_per_s or self.operations_per_s)


class LimitsConfig(Model):
    """Rate limits of a tier: what would wait beyond its deadline is a miss, or is not stored."""

    load: LimitConfig = Field(default_factory=LimitConfig, description="Of what is read.")
    store: LimitConfig = Field(default_factory=LimitConfig, description="Of what is written.")

    @property
    def is_on(self) -> bool:
        """Whether anything is limited."""
        return self.load.is_on or self.store.is_on


class TierConfig(Model):
    """One tier of the chain."""

    name: TierName = Field(description="The tier's name in messages, metrics and receipts.")
    driver: str = Field(description="An installed driver: see `flexkv drivers`.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,  # may hold secrets
        description="The driver's own options, checked by the driver's model.",
    )
    write: WritePolicy = Field(
        WritePolicy.THROUGH,
        description="through: with each store; back: when the tier above evicts; "
        "around: only by promotion; never.",
    )
    promote: Literal["always", "never"] | Annotated[int, Field(ge=1)] = Field(
        "always",
        description="Whether a block loaded from here stays in the tiers above: always, never, "
        "or after n hits (not in shared tiers).",
    )
    read_only: bool = Field(False, description="Nothing is ever written or removed here.")
    store_tails: bool | None = Field(
        None,
        description="Keep partly filled last blocks. Default: yes in this process's own tiers, "
        "no in shared ones.",
    )
    ttl_s: Seconds | None = Field(
        None,
        description="Blocks that were stored longer ago are misses; after a restart it counts from the last "
        "use that the tier lists. Not in shared tiers, whose store must expire them. Default: no limit.",
    )
    load_deadline_s: Seconds = Field(
        10.0,
        gt=0,
        description="A load that takes longer is a miss, retries included; its buffers are quarantined.",
    )
    lookup_deadline_s: Seconds = Field(
        1.0, gt=0, description="A question to a shared tier that takes longer is taken as a miss."
    )
    store_deadline_s: Seconds = Field(30.0, gt=0, description="A store that takes longer is given up.")
    breaker_failures: int = Field(
        5,
        ge=0,
        description="After so many failed calls of one kind in a row, or one load that passed its deadline, "
        "the tier is down and answers at once; 0 never.",
    )
    breaker_reset_s: Seconds = Field(5.0, gt=0, description="After so long a tier that is down is probed.")
    retries: int = Field(1, ge=0, le=10, description="Further tries of a call whose error is retryable.")
    load_threads: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Load threads; default: half of the calls that the driver takes at once.",
    )
    store_threads: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Store threads; default, and at most: what load threads leave of the driver's calls.",
    )
    load_or_recompute: Literal["auto", "load", "recompute"] = Field(
        "load",
        description="load always fetches; recompute never does; auto fetches what is sooner there than "
        "the engine computes it, by the measured speed of both.",
    )
    codec: CodecConfig = Field(
        default_factory=CodecConfig, description="Compression and encryption of values in this tier."
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Rate limits of this tier.")
    eviction: EvictionConfig = Field(default_factory=EvictionConfig, description="How room is made.")


class NamespaceConfig(Model):
    """What the user adds to the identity of stored bytes; the engine adds the rest."""

    model: str | None = Field(None, description="Model identity; default: what the engine says.")
    revision: str | None = Field(
        None, description="Model revision; default: a digest of the model's configuration."
    )
    weights_version: str = Field("0", description="Raise it when weights change under the same name.")
    require_salt: bool = Field(
        False, description="Requests without a cache salt are neither stored nor served."
    )


class EngineConfig(Model):
    """How the engine's side behaves."""

    layerwise: Literal["auto"] | bool = Field(
        "auto",
        description="Loads are awaited layer by layer (IP mode) instead of before the forward pass; auto "
        "decides for each load, by its bytes and the measured speed of copies, and never does so on a CPU.",
    )
    load_wait_s: Seconds = Field(
        0.005,
        description="How long the scheduler may be held up by one load before it goes on to other work.",
    )
    lookup_wait_s: Seconds = Field(
        0.01,
        description="How long the scheduler may be held up by asking shared tiers for a new prompt, once.",
    )
    load_deadline_s: Seconds = Field(
        30.0, gt=0, description="A load that is not over by then is given up and the prompt is recomputed."
    )
    max_store_tokens: int = Field(
        262_144,
        ge=0,
        description="Most tokens in stores that are under way; beyond it new stores are skipped.",
    )
    store_running: bool = Field(
        True, description="Also store prompts chunk by chunk while they are prefilled, and retracted ones."
    )
    prefetch: bool = Field(
        True, description="Blocks of lower tiers are brought into host slots while their request waits."
    )
    prefetch_host_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="At most this share of the host slots holds what was prefetched and not used yet.",
    )
    prefill_tokens_per_s: float = Field(
        0,
        ge=0,
        description="Speed of the engine's prefill, for load_or_recompute: auto; 0: it is measured.",
    )
    min_hit_tokens: int = Field(1, ge=1, description="A shorter hit is not worth a load.")
    shutdown_deadline_s: Seconds = Field(
        30.0, gt=0, description="Longest wait for copies at reset and shutdown."
    )
    log_counters_s: Seconds = Field(
        60.0, description="So often one line of counters is logged, if any has changed; 0 never."
    )
    log_transfers: bool = Field(True, description="One line for each finished transfer.")
    debug_poison: bool = Field(
        False,
        description="For tests: device slots are poisoned when they are handed out, and a store that has "
        "read poison fails. Slow.",
    )


class ChainConfig(Model):
    """A whole chain file."""

    version: Literal[1] = Field(1, description="Version of this format.")
    namespace: NamespaceConfig = Field(
        default_factory=NamespaceConfig, description="Identity of stored bytes."
    )
    block_tokens: int = Field(
        64,
        ge=1,
        le=8192,
        description="Tokens in a block, the unit of storage; a multiple of the engine's page.",
    )
    staging: ByteSize = Field(
        256 << 20,
        description="Host memory for blocks on their way, used only where no tier lends its own memory.",
    )
    kv_cache_dtype: KvDtype = Field(
        None, description="KV element type; must agree with the engine's tensors. Default: theirs."
    )
    tiers: tuple[TierConfig, ...] = Field(min_length=1, description="Fast to slow.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The engine's side.")

    @model_validator(mode="after")
    def _names_are_distinct(self) -> ChainConfig:
        names = [tier.name for tier in self.tiers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tier names must be distinct, twice: {', '.join(twice)}")
        return self
