"""Which version of vLLM speaks which shape of its offloading contract."""

from __future__ import annotations

import re

from kvoffload.core.errors import UnsupportedVersionError

CONTRACTS = {
    (0, 32): "kvoffload.integrations.vllm.contract_0_32",
    (0, 33): "kvoffload.integrations.vllm.contract_0_33",
}
"""The module that adapts to each version, by its first two numbers."""


def contract_of(version: str) -> str:
    """The module for the installed version.

    Args:
        version: as ``vllm.__version__`` has it, a local label included.

    Raises:
        UnsupportedVersionError: no module was written for it.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    module = CONTRACTS.get((int(numbers[1]), int(numbers[2]))) if numbers else None
    if module is None:
        supported = ", ".join(f"{major}.{minor}" for major, minor in sorted(CONTRACTS))
        raise UnsupportedVersionError(
            f"vLLM {version} is installed, but this kvoffload was written for vLLM {supported}: "
            f"the offloading contract changes between versions"
        )
    return module
