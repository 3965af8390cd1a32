"""Block expansion as any device takes it: index arrays of any length, nothing padded.

A device that compiles for every shape wants a backend of its own; see ``bucket`` there.
"""

from kvoffload.backends.index_copy import IndexCopy

__all__ = ["IndexCopy"]
