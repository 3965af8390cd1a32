"""The cpu backend, tied together."""

from __future__ import annotations

from typing import Any

import torch

from kvoffload.backends.cpu.blocks import lower
from kvoffload.backends.cpu.copy import run_copies
from kvoffload.backends.cpu.streams import ThreadBackend, ThreadStream
from kvoffload.core.backend import Keep, Probe, Stream
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.plan import CopyPlan


class CpuBackend(ThreadBackend):
    """Copies between two places in host memory, on worker threads. Runs on any Linux machine.

    Args:
        device: None or ``"cpu"``.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        refused = f"the cpu backend serves device 'cpu', not {device!r}"
        try:
            self.device = torch.device(device or "cpu")
        except RuntimeError as error:
            raise ConfigurationError(refused) from error
        if self.device.type != "cpu":
            raise ConfigurationError(refused)

    def probe(self) -> Probe:
        return Probe(True, "host memory; needs no accelerator")

    def swap_blocks(self, plan: CopyPlan, stream: Stream, keep: Keep[Any]) -> None:  # noqa: ARG002 - the job keeps its plan
        if not isinstance(stream, ThreadStream):
            raise TypeError(f"not a stream of this backend: {stream!r}")
        # Lowered by the stream's thread as well: the plan stays as it is until the job has ended.
        stream.submit(lambda: run_copies(lower(plan)))
