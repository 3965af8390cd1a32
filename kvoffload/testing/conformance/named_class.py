"""A backend's class that is named on the command line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.sizes import shortened, shown


def named_class(name: str) -> Callable[..., Any]:
    """The class ``module:Class``.

    Raises:
        ConfigurationError: there is none of that name, or it is not a backend's; says which.
        Exception: whatever its module raises while it is imported.
    """
    option = f"--backend-class {shortened(name)}"
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(f"{option}: write it as MODULE:CLASS, such as mine.backend:Mine")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and what it imports is not
        raise ConfigurationError(
            f"{option}: there is no module {error.name!r}; install it, or let PYTHONPATH name the "
            f"folder that it is in"
        ) from error
    if found is None:
        raise ConfigurationError(f"{option}: the module has no {attribute!r}")
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigurationError(f"{option}: not a class of backends, but {shown(found)}")
    made: Callable[..., Any] = found
    return made
