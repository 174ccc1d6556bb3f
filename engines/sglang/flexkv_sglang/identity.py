"""Which model's bytes these are: the namespace that SGLang's side of a chain gives its blocks.

A path or a hub name does not say which weights it holds, so the revision is a digest over the
model's configuration and, for a local folder, over samples of its weight files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from flexkv_core import BlockLayout, Namespace
from flexkv_core.models import NamespaceConfig

from .pools import is_replicated

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 256 * 1024
"""Read from each end of a weight file."""

NUM_SAMPLES = 256
STEP_SAMPLE_BYTES = 4096
"""... and so many pieces of this size at equal distances between: a fine-tune that leaves the ends of a file
as they are changes whole tensors in its middle.  100 files take about a second."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_VOLATILE = ("_name_or_path", "transformers_version")


def model_namespace(
    ctx: Any,
    pool: Any,
    layout: BlockLayout,
    *,
    rank_slice: str = "",
    configured: NamespaceConfig | None = None,
) -> Namespace:
    """The namespace of this rank's blocks, before requests add theirs.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``.
        pool: The KV pool.
        layout: What its blocks look like.
        rank_slice: Which part of heads and layers this rank holds; default: read off the context.
        configured: What the user says: it wins over what SGLang says.
    """
    said = configured or NamespaceConfig()
    model = ctx.model_config
    args = ctx.server_args
    path = str(getattr(model, "model_path", None) or args.model_path)
    return Namespace(
        model=said.model or path,
        revision=said.revision or revision_digest(path, args, model),
        weights_version=said.weights_version,
        kv_dtype=layout.parts[0].dtype,
        layout=layout.fingerprint.hex(),
        block_tokens=layout.block_tokens,
        rank_slice=rank_slice or rank_slice_of(ctx, pool),
    )


def rank_slice_of(ctx: Any, pool: Any) -> str:
    """``replicated``, or which of how many tensor and pipeline ranks these bytes belong to."""
    pp_size = int(getattr(ctx.server_args, "pp_size", 1) or 1)
    if pp_size > 1:
        return f"tp{ctx.tp_rank}/{ctx.tp_size} pp?/{pp_size}"
    return "replicated" if ctx.tp_size == 1 or is_replicated(pool) else f"tp{ctx.tp_rank}/{ctx.tp_size}"


def revision_digest(path: str, args: Any, model: Any) -> str:
    """The stated revision, then a digest of configuration and weights; ``dummy`` weights are marked.

    Dummy weights are made at start from a fixed seed: they must never be taken for the model's own.
    """
    h = sha256()
    for line in (*_settings(args, model), *weight_samples(Path(path))):
        h.update(len(line).to_bytes(8, "little") + line)
    stated = str(getattr(args, "revision", None) or "")
    dummy = "dummy." if str(getattr(args, "load_format", "")).lower().endswith("dummy") else ""
    return f"{stated}{'.' if stated else ''}{dummy}{h.hexdigest()[:32]}"


def _settings(args: Any, model: Any) -> Iterator[bytes]:
    """What changes KV bytes without changing their shape."""
    config = getattr(model, "hf_config", None)
    values = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    commit = getattr(config, "_commit_hash", None)
    values = {name: value for name, value in values.items() if name not in _VOLATILE}
    yield json.dumps(values, sort_keys=True, default=str).encode()
    yield str(commit).encode()
    yield str(getattr(model, "dtype", "")).encode()
    for name in ("quantization", "quantization_param_path"):
        yield str(getattr(model, name, None) or getattr(args, name, None)).encode()


def weight_samples(folder: Path) -> Iterator[bytes]:
    """Name, size and both ends of each weight file of a local folder; nothing for a hub's name."""
    files = [folder] if folder.is_file() else []
    if folder.is_dir():
        files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as f:
            pieces = [f"{file.name}\0{size}\0".encode(), f.read(SAMPLE_BYTES)]
            for at in range(SAMPLE_BYTES, size - SAMPLE_BYTES, max(1, size // NUM_SAMPLES)):
                f.seek(at)
                pieces.append(f.read(STEP_SAMPLE_BYTES))
            f.seek(max(0, size - SAMPLE_BYTES))
            yield b"".join([*pieces, f.read(SAMPLE_BYTES)])


class AdapterDigests:
    """Digests of the LoRA adapters that requests name, read when an adapter is loaded.

    Not when it is first used: its files may have been written over by then.

    Threads: the scheduler's.
    """

    def __init__(self, tp_worker: Any) -> None:
        """Adapters as SGLang's worker knows them; those that it has already are read now."""
        self._worker = tp_worker
        self._known: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._nonce = token_hex(8)
        self._loads = 0
        for lora_id in self._refs():
            self._read(lora_id)

    def of(self, lora_id: str) -> str:
        """The adapter's digest; empty for no adapter.

        Where its files are out of reach (a hub's name, tensors), its id with a number of this process and
        this load: an id alone may stay while the weights change, so such an adapter's blocks are not found
        again after a restart.
        """
        if not lora_id:
            return ""
        if lora_id not in self._known:
            self._read(lora_id)
        return self._known[lora_id]

    def name(self, lora_id: str) -> str:
        """The adapter's name; its id, which is another at each load, only where it has none."""
        if lora_id and lora_id not in self._known:
            self._read(lora_id)
        return self._names.get(lora_id, lora_id)

    def loaded(self, lora_id: str) -> bool:
        """An adapter was loaded: read it again.

        SGLang keeps the id of an adapter that it puts out to make room and loads again when it is asked for.
        Source: sglang 0.5.23, managers/tokenizer_control_mixin.py, lora_ref_cache.

        Returns:
            Whether its id was known with another content.
        """
        before = self._known.get(lora_id)
        self._read(lora_id)
        return before not in (None, self._known[lora_id])

    def _refs(self) -> Mapping[str, Any]:
        runner = self._worker.model_runner if self._worker is not None else None
        manager = getattr(runner, "lora_manager", None)  # before 0.5.20 it is not there without adapters
        return manager.lora_refs if manager is not None else {}

    def _read(self, lora_id: str) -> None:
        self._loads += 1
        ref = self._refs().get(lora_id)
        self._names[lora_id] = getattr(ref, "lora_name", None) or lora_id
        digest = ""
        if ref is not None and ref.lora_path:
            try:
                digest = adapter_digest(Path(ref.lora_path))
            except OSError as exc:  # its files went since SGLang has read them
                logger.warning("[FlexKV] LoRA adapter %s cannot be told by its files: %s", lora_id, exc)
        self._known[lora_id] = digest or f"{lora_id}.{self._nonce}.{self._loads}"


def adapter_digest(folder: Path) -> str:
    """A digest of a LoRA adapter's files; empty if the folder cannot be read.

    An adapter that is named on the command line keeps its id from one start to the next, whatever its
    files hold, so the id alone must not name blocks of a persistent tier.
    Source: sglang 0.5.16 to 0.5.23, lora/lora_registry.py, LoRARef.deterministic_id.
    """
    h = sha256()
    samples = 0
    for line in weight_samples(folder):
        samples += 1
        h.update(len(line).to_bytes(8, "little") + line)
    config = folder / "adapter_config.json"
    if config.is_file():
        h.update(config.read_bytes())
    return h.hexdigest()[:32] if samples else ""
