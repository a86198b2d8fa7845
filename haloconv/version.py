"""The version's only place; the package's metadata is built from it."""

__version__ = "0.1.0"
