"""Which Penstock this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Return the installed version; 0.0.0 in a working tree that nobody installed."""
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"
