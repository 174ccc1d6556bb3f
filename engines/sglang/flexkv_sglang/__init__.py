"""flexkv for SGLang."""
