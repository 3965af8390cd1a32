"""A kernel that copies small pages out of pinned host memory: on some GPUs it beats DMA at that.

It needs triton, which nothing else here does. Not run on hardware yet.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from kvoffload.backends.cuda.blocks import WORD
from kvoffload.core.backend import Keep
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.plan import Descriptors

WORDS_AT_A_TIME = 512
"""Words that one program of the kernel moves in one step."""


def is_available() -> bool:
    """triton is installed; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def require() -> None:
    """Check that there is triton.

    Raises:
        ConfigurationError: there is none.
    """
    if not is_available():
        raise ConfigurationError(
            "copying with a kernel needs triton; pip install triton, or choose 'dma'"
        )


class CopyKernel:
    """Copies ranges of whole words, a program for each.

    Raises:
        ConfigurationError: there is no triton.
    """

    def __init__(self) -> None:
        require()
        self._kernel: Any = _compile()

    def enqueue(self, copies: Descriptors, stream: torch.Stream, keep: Keep[Any]) -> None:
        """Enqueue the copies on ``stream``.

        Args:
            copies: aligned to :data:`WORD` in addresses and sizes.
            stream: torch's.
            keep: holds what the device reads until the job has ended.
        """
        table = np.stack((copies.src, copies.dst, copies.size // np.uint64(WORD))).view(np.int64)
        with stream:
            host = keep(torch.from_numpy(table).pin_memory())
            there = keep(host.to(stream.device, non_blocking=True))
            self._kernel[(len(copies.size),)](there[0], there[1], there[2], WORDS=WORDS_AT_A_TIME)


def _compile() -> Any:
    import triton  # noqa: PLC0415 - only where it is chosen
    import triton.language as tl  # noqa: PLC0415

    @triton.jit  # type: ignore[untyped-decorator]
    def copy_words(src: Any, dst: Any, words: Any, WORDS: tl.constexpr) -> None:  # noqa: N803
        me = tl.program_id(0)
        source = tl.load(src + me).to(tl.pointer_type(tl.int64))
        target = tl.load(dst + me).to(tl.pointer_type(tl.int64))
        count = tl.load(words + me)
        for start in range(0, count, WORDS):
            at = start + tl.arange(0, WORDS)
            inside = at < count
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)

    return copy_words
