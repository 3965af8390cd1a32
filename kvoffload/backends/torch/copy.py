"""The copy of the torch backend: gather, one copy per run of chunks, scatter."""

from kvoffload.backends.index_copy import IndexCopy, IndexCopyBackend

__all__ = ["IndexCopy", "IndexCopyBackend"]
