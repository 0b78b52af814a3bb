"""Packages that only the reproduction needs, and what to say where one is missing."""

import importlib.util

INSTALL = "pip install 'noisygrad[{}]'"

_WHEELS = {"Box2D": "Box2D has wheels for Python 3.11 to 3.13, on Linux for x86-64 alone"}


def require(what: str, *packages: str, extra: str = "paper") -> None:
    """Nothing, if all these packages are installed.

    Raises:
        ModuleNotFoundError: Some are not; the message names them and the command that installs the `extra` with them.
    """
    missing = [name for name in packages if not _installed(name)]
    if missing:
        notes = "".join(f" ({_WHEELS[name]})" for name in missing if name in _WHEELS)
        raise ModuleNotFoundError(f"{what} needs {', '.join(missing)}: {INSTALL.format(extra)}{notes}", name=missing[0])


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
