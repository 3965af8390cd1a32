"""The backend that a command works with: here, or on the fake device."""

from __future__ import annotations

import shlex

from kvoffload.core.backend import Backend
from kvoffload.core.errors import BackendError, BackendUnavailableError, ConfigurationError
from kvoffload.core.sizes import shortened
from kvoffload.plugins.registry import BackendRegistry, probe_of

ON_FAKE = "torch"
"""The backend that is taken on the fake device if none is named."""


def choose(name: str | None) -> tuple[str, Backend]:
    """The registry's choice; what is wrong with a name that was given names the option."""
    try:
        return BackendRegistry().choose(name)
    except (BackendError, ConfigurationError) as error:
        if name is None:
            raise
        raise ConfigurationError(f"--backend {shlex.quote(shortened(name))}: {error}") from error


def choose_on(name: str | None, on: str | None) -> tuple[str, str | None, Backend]:
    """As :func:`choose`, or on the fake device.

    Args:
        name: of ``--backend``.
        on: of ``--on``, such as ``"fake"``; the first variant is taken if none is named.

    Returns:
        The backend's name, the variant of the fake device if it is on that, and the backend.
    """
    if on is None:
        chosen, backend = choose(name)
        return chosen, None, backend
    wanted = ON_FAKE if name is None else name
    variant = variants(wanted, on)[0]
    from kvoffload.testing.fake_device.make import maker

    try:
        backend = maker(wanted, variant)()
    except (BackendError, ConfigurationError) as error:
        named = f"--on {on} --backend {shlex.quote(shortened(wanted))}"
        raise ConfigurationError(f"{named}: {error}") from error
    probe = probe_of(backend)
    if not probe.available:
        raise BackendUnavailableError(f"{wanted} cannot run on the fake device: {probe.reason}")
    return wanted, variant, backend


def variants(name: str, on: str) -> list[str]:
    """The variants of the fake device that ``--on`` names for this backend."""
    from kvoffload.testing.fake_device.variants import variants_of

    kind, _, variant = on.partition(":")
    known = variants_of(name)
    if kind == "fake" and variant in ("", *known):
        return [variant] if variant else known
    given, backend = shortened(on), shortened(name) or "this backend"
    raise ConfigurationError(
        f"--on {given}: there is only 'fake', and with a variant of {backend} "
        + ", ".join(f"'fake:{each}'" for each in known)
    )
