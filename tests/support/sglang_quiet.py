"""Imports of SGLang that the scheduler model needs, without what they say on a machine without a GPU."""

import warnings

from transformers.models.auto import configuration_auto

# Versions before 0.5.19 register a model type that newer transformers bring themselves.
_register = configuration_auto.CONFIG_MAPPING.register
configuration_auto.CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _register(
    key, value, exist_ok=True
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.schedule_policy  # noqa: F401 - it brings all others
