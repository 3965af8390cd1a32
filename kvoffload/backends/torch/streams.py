"""Streams of the torch backend: torch's own, from the base."""

from kvoffload.backends.torch_base import TorchBackend

__all__ = ["TorchBackend"]
