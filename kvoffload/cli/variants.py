"""The option ``--on``: here, or on the fake device in some variants of its driver."""

from __future__ import annotations

from kvoffload.core.errors import ConfigurationError


def variants_on(name: str | None, on: str | None) -> list[str | None]:
    """Where to run: None is this machine.

    Raises:
        ConfigurationError: there is no such place, or no such variant of the backend.
    """
    if on is None:
        return [None]
    kind, _, variant = on.partition(":")
    if kind != "fake":
        raise ConfigurationError(f"--on {on}: there is only 'fake', or 'fake:VARIANT'")
    from kvoffload.testing.fake_device.variants import variants_of

    known = variants_of(name or "")
    if not variant:
        return list(known)
    if variant not in known:
        raise ConfigurationError(f"--on {on}: the variants of {name} are {', '.join(known)}")
    return [variant]
