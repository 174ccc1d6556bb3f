"""Blocks on solid-state disks."""
