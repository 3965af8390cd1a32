"""The cuda backend: so far only its probe."""

from __future__ import annotations

import torch

from kvoffload.backends._planned import PlannedBackend, torch_build


class CudaBackend(PlannedBackend):
    """NVIDIA GPUs through the CUDA driver."""

    name = "cuda"

    def missing(self) -> str | None:
        if torch.version.cuda is None:
            return f"{torch_build()} was built without CUDA"
        if not torch.cuda.is_available():
            return f"{torch_build()} supports CUDA {torch.version.cuda}, but finds no usable GPU"
        return None
