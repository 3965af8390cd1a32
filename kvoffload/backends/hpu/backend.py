"""The hpu backend: so far only its probe."""

from __future__ import annotations

import importlib.util

import torch

from kvoffload.backends._planned import PlannedBackend


class HpuBackend(PlannedBackend):
    """Intel Gaudi accelerators through the vendor's torch bridge."""

    name = "hpu"

    def missing(self) -> str | None:
        if importlib.util.find_spec("habana_frameworks") is None:
            return (
                "habana_frameworks.torch is not installed (it comes with the Intel Gaudi software "
                "suite, not from PyPI)"
            )
        importlib.import_module("habana_frameworks.torch")
        hpu = getattr(torch, "hpu", None)
        if hpu is None or not hpu.is_available():
            return "habana_frameworks.torch is installed, but finds no Gaudi device"
        return None
