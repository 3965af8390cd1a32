"""vLLM offloads with kvoffload: name this module as ``spec_module_path``, or as
``kv_connector_module_path``.

* ``KVOffloadSpec``: a spec for vLLM's own ``OffloadingConnector``. A failed load ends the engine,
  because vLLM asserts that there is none.
* ``KVOffloadConnector``: vLLM's connector made fault-tolerant. A failed load is computed instead.

The adapter for the installed version is imported when one of them is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvoffload.integrations.vllm.versions import contract_of

__all__ = ["KVOffloadConnector", "KVOffloadSpec"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    version = importlib.import_module("vllm").__version__
    return getattr(importlib.import_module(contract_of(version)), name)


def __dir__() -> list[str]:
    return sorted(__all__)
