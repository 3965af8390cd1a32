"""Finding, loading and choosing backends.

Names are read from the installed distributions' metadata; nothing is imported for that. A chosen
backend is loaded alone. Only automatic choice and listing load all of them, each guarded, so that a
broken plugin is reported and never hides the others.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pluggy

from kvoffload.core.backend import INTERFACE_VERSION, Backend, Probe
from kvoffload.core.errors import (
    AmbiguousBackendError,
    BackendError,
    BackendNotFoundError,
    BackendUnavailableError,
    BrokenBackendError,
    ConfigurationError,
    DuplicateBackendError,
    HookError,
    InterfaceVersionError,
)
from kvoffload.plugins import hookspecs

logger = logging.getLogger(__name__)

ENVIRONMENT = "KVOFFLOAD_BACKEND"
"""The variable that names a backend where no argument does."""
DEFAULT = "cpu"
"""The backend of a machine without an accelerator."""


@dataclass(frozen=True)
class BackendReport:
    """What is known of one discovered backend.

    Attributes:
        name: of the entry point.
        distribution: name and version of every distribution that provides it.
        available: it can run here.
        reason: what it found, or what is missing; None if it is broken.
        capabilities: by name; None if it is broken.
        error: why it could not be loaded; None if it could.
    """

    name: str
    distribution: str
    available: bool
    reason: str | None
    capabilities: Mapping[str, Any] | None
    error: str | None


class BackendRegistry:
    """The backends that the installed distributions provide, as found when it was created."""

    def __init__(self) -> None:
        self._entries: defaultdict[str, list[importlib.metadata.EntryPoint]] = defaultdict(list)
        for entry in importlib.metadata.entry_points(group=hookspecs.GROUP):
            self._entries[entry.name].append(entry)
        self._manager = pluggy.PluginManager("kvoffload")
        self._manager.add_hookspecs(hookspecs)

    def names(self) -> list[str]:
        """Names of all discovered backends, sorted; nothing is imported."""
        return sorted(self._entries)

    def create(self, name: str, device: str | None = None) -> Backend:
        """Load one backend and construct it, whether or not it can run here.

        Raises:
            BackendNotFoundError: nothing provides the name.
            DuplicateBackendError: two distributions claim it.
            BrokenBackendError: its package cannot be imported, or its hook failed.
            InterfaceVersionError: it was written for another version of the interface.
            HookError: a hook is misspelt, missing, or takes an unknown argument.
            ConfigurationError: it cannot serve ``device``.
        """
        entries = self._entries.get(name)
        if not entries:
            raise BackendNotFoundError(
                f"no backend named {name!r} is installed; installed: {', '.join(self.names())}"
            )
        source = _source(entries)
        if len(entries) > 1:
            raise DuplicateBackendError(
                f"the backend name {name!r} is claimed by several distributions: {source}; "
                f"uninstall all but one"
            )
        plugin = self._load(entries[0], source)
        others = [p for p in self._manager.get_plugins() if p is not plugin]
        hook = self._manager.subset_hook_caller("kvoffload_backend", remove_plugins=others)
        try:
            backend = hook(device=device)
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:
            raise BrokenBackendError(
                f"backend {name!r} of {source} failed in its hook: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(backend, Backend):
            raise BrokenBackendError(
                f"backend {name!r} of {source}: its hook returned {backend!r}, not a Backend"
            )
        return backend

    def _load(self, entry: importlib.metadata.EntryPoint, source: str) -> object:
        known = self._manager.get_plugin(entry.name)
        if known is not None:
            return known
        what = f"backend {entry.name!r} of {source}"
        try:
            plugin: object = entry.load()
        except (Exception, SystemExit) as error:
            raise BrokenBackendError(
                f"{what} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        version = getattr(plugin, "kvoffload_interface", None)
        if version != INTERFACE_VERSION:
            raise InterfaceVersionError(
                f"{what} was written for interface version {version}, this kvoffload speaks "
                f"version {INTERFACE_VERSION}"
                + ("; declare 'kvoffload_interface' beside its hook" if version is None else "")
            )
        try:
            self._manager.register(plugin, entry.name)
            self._manager.check_pending()
            if not self._manager.get_hookcallers(plugin):
                raise HookError(f"{what} implements no hook; it needs 'kvoffload_backend'")
        except (pluggy.PluginValidationError, ValueError, HookError) as error:
            if self._manager.has_plugin(entry.name):
                self._manager.unregister(name=entry.name)
            if isinstance(error, HookError):
                raise
            raise HookError(f"{what}: {error}") from error
        return plugin

    def select(self, name: str | None = None, device: str | None = None) -> Backend:
        """The backend of :meth:`choose`, without its name."""
        return self.choose(name, device)[1]

    def choose(self, name: str | None = None, device: str | None = None) -> tuple[str, Backend]:
        """Choose a backend that can run here; its name, and the backend.

        The argument decides; then ``KVOFFLOAD_BACKEND``; then the only available accelerator;
        then ``cpu``. A name never falls back to anything else.

        Raises:
            BackendUnavailableError: the named backend cannot run here; with its reason.
            AmbiguousBackendError: several accelerators are available and none was named.
            BackendError: as in :meth:`create`.
        """
        wanted = name or os.environ.get(ENVIRONMENT)
        if wanted:
            backend = self.create(wanted, device)
            probe = _probe(backend)
            if not probe.available:
                raise BackendUnavailableError(
                    f"backend {wanted!r} is not available: {probe.reason}"
                )
            return wanted, backend
        accelerators = {}
        for candidate in self.names():
            try:
                backend = self.create(candidate, device)
            except ConfigurationError:
                continue
            except BackendError as error:
                logger.warning("skipped while choosing a backend: %s", error)
                continue
            if _probe(backend).available and (
                backend.device is None or backend.device.type != "cpu"
            ):
                accelerators[candidate] = backend
        if len(accelerators) > 1:
            raise AmbiguousBackendError(
                f"several accelerators are available: {', '.join(accelerators)}; "
                f"name one, or set {ENVIRONMENT}"
            )
        if accelerators:
            return next(iter(accelerators.items()))
        return self.choose(DEFAULT, device)

    def reports(self) -> list[BackendReport]:
        """Load every backend, each guarded, and tell what is known of it, sorted by name."""
        reports = []
        for name in self.names():
            source = _source(self._entries[name])
            try:
                backend = self.create(name)
            except (BackendError, ConfigurationError) as error:
                reports.append(BackendReport(name, source, False, None, None, str(error)))
                continue
            probe = _probe(backend)
            capabilities = {
                key: getattr(value, "value", value)
                for key, value in asdict(backend.capabilities).items()
            }
            reports.append(
                BackendReport(name, source, probe.available, probe.reason, capabilities, None)
            )
        return reports


def select_backend(name: str | None = None, device: str | None = None) -> Backend:
    """Choose a backend that can run here; see :meth:`BackendRegistry.choose`."""
    return BackendRegistry().select(name, device)


def _probe(backend: Backend) -> Probe:
    # A probe must not raise; one that does is a reason, not a crash.
    try:
        return backend.probe()
    except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
        return Probe(False, f"its probe failed: {type(error).__name__}: {error}")


def _source(entries: list[importlib.metadata.EntryPoint]) -> str:
    names = [f"{e.dist.name} {e.dist.version}" if e.dist else "unknown" for e in entries]
    return ", ".join(names)
