"""Finding, loading and choosing backends.

Names are read from the installed distributions' metadata; nothing is imported for that. A chosen
backend is loaded alone. Only automatic choice and listing load all of them, each guarded, so that a
broken plugin is reported and never hides the others.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import logging
import math
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import pluggy
import torch

from kvoffload.core.backend import INTERFACE_VERSION, Backend, Capabilities, Probe
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
from kvoffload.core.sizes import shortened, shown
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
        capabilities: by name, each as JSON has it; None unless it can run here.
        error: why it could not be loaded; None if it could.
    """

    name: str
    distribution: str
    available: bool
    reason: str | None
    capabilities: Mapping[str, Any] | None
    error: str | None


@dataclass(frozen=True)
class _Entry:
    """One line of a distribution's entry points."""

    point: importlib.metadata.EntryPoint
    source: str  # name and version of the distribution


class BackendRegistry:
    """The backends that the installed distributions provide, as found when it was created."""

    def __init__(self) -> None:
        self._entries: defaultdict[str, list[_Entry]] = defaultdict(list)
        for entry in _entries():
            self._entries[entry.point.name].append(entry)
        # One for each backend, so that two names can stand for one module.
        self._loaded: dict[str, pluggy.PluginManager] = {}

    def names(self) -> list[str]:
        """Names of all discovered backends, sorted; nothing is imported."""
        return sorted(self._entries)

    def distribution(self, name: str) -> str:
        """Name and version of what provides the backend.

        Raises:
            BackendNotFoundError: nothing does.
        """
        entries = self._entries.get(name)
        if not entries:
            raise BackendNotFoundError(
                f"no backend named {shown(name)} is installed; installed: {', '.join(self.names())}"
            )
        return _sources(entries)

    def create(self, name: str, device: str | None = None) -> Backend:
        """Load one backend and construct it, whether or not it can run here.

        Raises:
            BackendNotFoundError: nothing provides the name.
            DuplicateBackendError: two distributions claim it, or one does twice.
            BrokenBackendError: its package cannot be imported, its hook failed, or what that made
                is not a backend with a device and capabilities.
            InterfaceVersionError: it was written for another version of the interface.
            HookError: a hook is misspelt, missing, or takes an unknown argument.
            ConfigurationError: it cannot serve ``device``.
        """
        source = self.distribution(name)
        entries = self._entries[name]
        if len(entries) > 1:
            raise DuplicateBackendError(_claimed(name, entries))
        what = f"backend {name!r} of {source}"
        if name not in self._loaded:
            self._loaded[name] = _load(entries[0].point, what)
        with _guard(f"{what} failed in its hook", ConfigurationError):
            backend = self._loaded[name].hook.kvoffload_backend(device=device)
        with _guard(f"{what} is broken"):
            fault = _fault(backend)
        if fault is not None:
            raise BrokenBackendError(f"{what}: {fault}")
        checked: Backend = backend
        return checked

    def select(self, name: str | None = None, device: str | None = None) -> Backend:
        """The backend of :meth:`choose`, without its name."""
        return self.choose(name, device)[1]

    def choose(self, name: str | None = None, device: str | None = None) -> tuple[str, Backend]:
        """Choose a backend that can run here; its name, and the backend.

        The argument decides; then ``KVOFFLOAD_BACKEND``; then the only available accelerator (one
        that declares itself a fallback only if there is no other); then ``cpu``. A name never
        falls back to anything else; an empty argument is a name, an empty variable is none.

        Raises:
            BackendUnavailableError: the named backend cannot run here; with its reason.
            AmbiguousBackendError: several accelerators are available and none was named.
            BackendError: as in :meth:`create`.
        """
        if name is not None:
            return name, self._create_available(name, device)
        wanted = os.environ.get(ENVIRONMENT)
        if wanted:
            try:
                return wanted, self._create_available(wanted, device)
            except (BackendError, ConfigurationError) as error:
                named = f"{ENVIRONMENT}={shlex.quote(shortened(wanted))}"
                error.args = (f"{named}: {_text(error)}",)
                raise
        accelerators: dict[str, Backend] = {}
        fallbacks: dict[str, Backend] = {}
        for candidate in self.names():
            try:
                backend = self.create(candidate, device)
            except ConfigurationError:
                continue
            except BackendError as error:
                logger.warning("skipped while choosing a backend: %s", error)
                continue
            # One that names no device claims none, and is never taken in place of cpu.
            accelerates = backend.device is not None and backend.device.type != "cpu"
            if accelerates and probe_of(backend).available:
                (fallbacks if backend.fallback else accelerators)[candidate] = backend
        accelerators = accelerators or fallbacks
        if len(accelerators) > 1:
            raise AmbiguousBackendError(
                f"several accelerators are available: {', '.join(accelerators)}; "
                f"name one, or set {ENVIRONMENT}"
            )
        if accelerators:
            return next(iter(accelerators.items()))
        return DEFAULT, self._create_available(DEFAULT, device)

    def _create_available(self, name: str, device: str | None) -> Backend:
        backend = self.create(name, device)
        probe = probe_of(backend)
        if not probe.available:
            raise BackendUnavailableError(f"backend {name!r} is not available: {probe.reason}")
        return backend

    def reports(self) -> list[BackendReport]:
        """Load every backend, each guarded, and tell what is known of it, sorted by name."""
        reports = []
        for name in self.names():
            source = _sources(self._entries[name])
            try:
                backend = self.create(name)
            except (BackendError, ConfigurationError) as error:
                reports.append(BackendReport(name, source, False, None, None, _text(error)))
                continue
            probe = probe_of(backend)
            capabilities = _plain(backend.capabilities) if probe.available else None
            reports.append(
                BackendReport(name, source, probe.available, probe.reason, capabilities, None)
            )
        return reports


def select_backend(name: str | None = None, device: str | None = None) -> Backend:
    """Choose a backend that can run here; see :meth:`BackendRegistry.choose`."""
    return BackendRegistry().select(name, device)


# ----------------------------------------------------------------------------------- discovery
def _entries() -> Iterator[_Entry]:
    """The entry points of every distribution; of several of one name, the first on the path.

    As ``importlib.metadata.entry_points``, but a distribution that cannot be read is told and left
    out, instead of taking all the others down.
    """
    seen = set()
    for distribution in _distributions():
        name = _normalized(distribution)
        if name is not None and name in seen:
            continue
        seen.add(name)
        try:
            points = distribution.entry_points.select(group=hookspecs.GROUP)
        except Exception as error:  # noqa: BLE001 - whatever the parser makes of that file
            logger.warning(
                "the entry points of %s cannot be read, so it provides no backend: %s",
                _source(distribution),
                _told(error),
            )
            continue
        for point in points:
            yield _Entry(point, _source(distribution))


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    found = None
    while True:
        try:
            found = found or iter(importlib.metadata.distributions())
            distribution = next(found)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - a finder of somebody else's
            logger.warning("not all distributions can be found: %s", _told(error))
            return
        yield distribution


def _normalized(distribution: importlib.metadata.Distribution) -> str | None:
    """The name by which importlib tells distributions apart; None if it has none."""
    try:
        name = getattr(distribution, "_normalized_name", None) or distribution.metadata["Name"]
    except Exception:  # noqa: BLE001 - without metadata it fails in ways that differ by version
        return None
    return name if isinstance(name, str) else None


def _source(distribution: importlib.metadata.Distribution) -> str:
    """Name and version, or what stands for them."""
    try:
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except Exception:  # noqa: BLE001 - as above
        name = version = ""
    if not name:
        folder = getattr(getattr(distribution, "_path", None), "name", None)
        return f"a distribution without metadata ({folder or 'of unknown place'})"
    return f"{name} {version}" if version else f"{name}"


def _sources(entries: Sequence[_Entry]) -> str:
    return ", ".join(dict.fromkeys(entry.source for entry in entries))


def _claimed(name: str, entries: Sequence[_Entry]) -> str:
    sources = _sources(entries)
    if len({entry.source for entry in entries}) > 1:
        return (
            f"the backend name {name!r} is claimed by several distributions: {sources}; "
            f"uninstall all but one"
        )
    values = ", ".join(entry.point.value for entry in entries)
    return (
        f"the backend name {name!r} is claimed {len(entries)} times by {sources}, for {values}; "
        f"it must stand for one of them"
    )


# ----------------------------------------------------------------------------------- guarding
@contextlib.contextmanager
def _guard(what: str, passes: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Within, whatever a plugin raises is a BrokenBackendError; only Ctrl-C stays Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except passes:
        raise
    except BaseException as error:
        raise BrokenBackendError(f"{what}: {_told(error)}") from error


def _load(point: importlib.metadata.EntryPoint, what: str) -> pluggy.PluginManager:
    """Import a plugin and check it against the hook specifications."""
    with _guard(f"{what} cannot be imported"):
        plugin: object = point.load()
    if inspect.isclass(plugin) or inspect.isroutine(plugin):
        raise HookError(f"{what}: {shown(plugin)} cannot hold a hook; name a module or an instance")
    with _guard(f"{what} cannot be asked for its interface version"):
        version = getattr(plugin, "kvoffload_interface", None)
    # True and 1.0 equal 1, but nobody who wrote them meant a version.
    if type(version) is not int or version != INTERFACE_VERSION:
        raise InterfaceVersionError(
            f"{what} was written for interface version {shown(version)}, this kvoffload speaks "
            f"version {INTERFACE_VERSION}"
            + ("; declare 'kvoffload_interface' beside its hook" if version is None else "")
        )
    manager = pluggy.PluginManager("kvoffload")
    manager.add_hookspecs(hookspecs)
    try:
        with _guard(f"{what} cannot be searched for hooks", pluggy.PluginValidationError):
            manager.register(plugin, point.name)
            manager.check_pending()
            hooks = manager.get_hookcallers(plugin)
    except pluggy.PluginValidationError as error:
        raise HookError(f"{what}: {error}") from error
    if not hooks:
        raise HookError(f"{what} implements no hook; it needs 'kvoffload_backend'")
    return manager


def _fault(backend: Any) -> str | None:
    """Why this is not a backend that the core can work with; None if it is."""
    if not isinstance(backend, Backend):
        return f"its hook returned {shown(backend)}, not a Backend"
    device: Any = backend.device
    if device is not None and not isinstance(device, torch.device):
        return f"its device is {shown(device)}, neither a torch.device nor None"
    capabilities: Any = backend.capabilities
    if not isinstance(capabilities, Capabilities):
        return f"its capabilities are {shown(capabilities)}, not Capabilities"
    return None


def probe_of(backend: Backend) -> Probe:
    # A probe must not raise; one that does, or that answers anything else, is a reason.
    try:
        probe: Any = backend.probe()
        if not isinstance(probe, Probe):
            return Probe(False, f"its probe returned {shown(probe)}, not a Probe")
        available: Any = probe.available
        reason: Any = probe.reason
        if type(available) is not bool or not isinstance(reason, str):
            return Probe(
                False,
                f"its probe returned {shown(probe)}; 'available' must be True or False, and "
                f"'reason' a string",
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a vendor's code may raise anything
        return Probe(False, f"its probe failed: {_told(error)}")
    return Probe(available, reason)


def _plain(capabilities: Capabilities) -> dict[str, Any]:
    """By name, as JSON has them: what it does not have becomes text."""
    plain = {}
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if isinstance(value, Enum):
            value = value.value
        if type(value) is float:
            known = math.isfinite(value)
        else:
            known = value is None or type(value) in (bool, str)
            known |= type(value) is int and value.bit_length() <= 64
        plain[field.name] = value if known else _text(value)
    return plain


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}"


def _text(value: object) -> str:
    """``str(value)``, whatever that raises."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - somebody's object
        return shown(value)
