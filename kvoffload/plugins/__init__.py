"""How backends are found: hook specifications (pluggy) and the registry.

A plugin needs only :data:`hookimpl` from here.
"""

from kvoffload.plugins.hookspecs import GROUP, hookimpl

__all__ = ["GROUP", "hookimpl"]
