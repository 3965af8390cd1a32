"""The copy of the cpu backend: ``memmove`` per coalesced run."""

from __future__ import annotations

import ctypes

from kvoffload.core.plan import Descriptors

LONG_COPY = 256 * 1024
"""Bytes from which a copy lets other Python threads run meanwhile. Below, taking the interpreter
lock back costs more than the copy: a busy engine thread keeps it for up to 5 ms at a time
(``sys.getswitchinterval``)."""


def _memmove(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


_short = _memmove(ctypes.PyDLL(None))  # keeps the interpreter lock
_long = _memmove(ctypes.CDLL(None))  # releases it


def run_copies(copies: Descriptors) -> None:
    """Copy every range, in order."""
    for src, dst, size in zip(
        copies.src.tolist(), copies.dst.tolist(), copies.size.tolist(), strict=True
    ):
        (_long if size >= LONG_COPY else _short)(dst, src, size)
