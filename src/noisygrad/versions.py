"""What a result was made with: it belongs to every row."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("noisygrad", "torch", "numpy", "scipy", "scikit-learn")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run straight from a source tree
        return "source"
