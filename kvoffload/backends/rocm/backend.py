"""The rocm backend: so far only its probe."""

from __future__ import annotations

import torch

from kvoffload.backends._planned import PlannedBackend, torch_build


class RocmBackend(PlannedBackend):
    """AMD GPUs through the HIP runtime."""

    name = "rocm"

    def missing(self) -> str | None:
        if torch.version.hip is None:
            return f"{torch_build()} was built without ROCm"
        if not torch.cuda.is_available():
            return f"{torch_build()} supports HIP {torch.version.hip}, but finds no usable GPU"
        return None
