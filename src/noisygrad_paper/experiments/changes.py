"""Settings that are tried in place of a method's own: checked, and part of the name of what is made with them."""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


def check_changes(method: str, possible: Settings, changes: Settings) -> None:
    """Refuse a setting that a method has not, or of another kind than its own: text for a number, say."""
    unknown = [name for name in changes if name not in possible]
    if unknown:
        raise ValueError(f"{method} has no setting {', '.join(unknown)}; it has {', '.join(possible) or 'none'}")
    for name, value in changes.items():
        old = possible[name]
        if isinstance(old, tuple) and isinstance(value, list):
            continue
        number = isinstance(old, float) and isinstance(value, int | float) and not isinstance(value, bool)
        if old is not None and type(value) is not type(old) and not number:
            raise ValueError(f"{name} is {old!r}, so it cannot be {value!r}: give a {type(old).__name__}")


def named_after(method: str, changes: Settings) -> str:
    """The method's name, followed by what was changed."""
    return " ".join([method, *(f"{name}={value}" for name, value in changes.items())])
