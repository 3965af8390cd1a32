"""The backends that come with kvoffload, and the bases that third parties build on.

Every backend is found through its entry point, the built-in ones too; nothing imports this package
to get at one.
"""
