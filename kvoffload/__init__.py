"""Move the KV cache of large language models off the accelerator and back, on any accelerator.

Importing this package is cheap: it loads neither torch nor numpy nor any backend. The names below
are imported when they are first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.core.backend import (
        Backend as Backend,
        Capabilities as Capabilities,
        HostOrder as HostOrder,
        Probe as Probe,
    )
    from kvoffload.core.canonicalize import (
        CacheRegistration as CacheRegistration,
        LayerCache as LayerCache,
        canonicalize as canonicalize,
    )
    from kvoffload.core.engine import (
        CURRENT_STREAM as CURRENT_STREAM,
        TransferEngine as TransferEngine,
        TransferResult as TransferResult,
    )
    from kvoffload.core.errors import KVOffloadError as KVOffloadError
    from kvoffload.core.handler import OffloadingHandler as OffloadingHandler
    from kvoffload.core.kv_caches import (
        CanonicalKVCacheRef as CanonicalKVCacheRef,
        CanonicalKVCaches as CanonicalKVCaches,
        CanonicalKVCacheTensor as CanonicalKVCacheTensor,
    )
    from kvoffload.core.specs import (
        BlockIDsLoadStoreSpec as BlockIDsLoadStoreSpec,
        DeviceLoadStoreSpec as DeviceLoadStoreSpec,
        HostLoadStoreSpec as HostLoadStoreSpec,
        LoadStoreSpec as LoadStoreSpec,
        TransferSpec as TransferSpec,
    )
    from kvoffload.core.worker import OffloadingWorker as OffloadingWorker
    from kvoffload.plugins.registry import (
        BackendRegistry as BackendRegistry,
        select_backend as select_backend,
    )
    from kvoffload.scheduler.host_manager import HostOffloadingManager as HostOffloadingManager
    from kvoffload.scheduler.keys import OffloadKey as OffloadKey
    from kvoffload.scheduler.manager import (
        OffloadingManager as OffloadingManager,
        RequestContext as RequestContext,
    )

__version__ = "0.1.0"

# Quiet until whoever uses the package says where its messages go.
if not logging.getLogger(__name__).handlers:
    logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "kvoffload.core.backend": ("Backend", "Capabilities", "HostOrder", "Probe"),
    "kvoffload.core.canonicalize": ("CacheRegistration", "LayerCache", "canonicalize"),
    "kvoffload.core.engine": ("CURRENT_STREAM", "TransferEngine", "TransferResult"),
    "kvoffload.core.errors": ("KVOffloadError",),
    "kvoffload.core.handler": ("OffloadingHandler",),
    "kvoffload.core.kv_caches": (
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
    ),
    "kvoffload.core.specs": (
        "BlockIDsLoadStoreSpec",
        "DeviceLoadStoreSpec",
        "HostLoadStoreSpec",
        "LoadStoreSpec",
        "TransferSpec",
    ),
    "kvoffload.core.worker": ("OffloadingWorker",),
    "kvoffload.plugins.registry": ("BackendRegistry", "select_backend"),
    "kvoffload.scheduler.keys": ("OffloadKey",),
    "kvoffload.scheduler.host_manager": ("HostOffloadingManager",),
    "kvoffload.scheduler.manager": ("OffloadingManager", "RequestContext"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
