"""Engines that kvoffload plugs into, each in a package of its own that alone imports it."""
