"""Block expansion as any device takes it: index arrays of any length, nothing padded."""

from __future__ import annotations

BUCKET = None
"""Devices that compile for every shape need a backend of their own."""
