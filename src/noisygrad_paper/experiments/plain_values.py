"""What a cell may hold: names, figures and settings as JSON gives them back, of a size that a report can work with.

Results are read from files that anybody may have written, so what is refused is shown in short.
"""

import json
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Metric: TypeAlias = float | list[float]

LARGEST = 1e100
"""What is beyond counts as not finite: means and squares of figures must not overflow."""
_LONGEST = 200
"""Letters of a name."""
_DEEPEST = 20
"""Levels of a configuration."""


def check_text(value: Any, what: str) -> None:
    """Raise ValueError for what is no text, or cannot be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be text; got {reprlib.repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be text that UTF-8 can hold; got {reprlib.repr(value)}") from None


def check_name(value: Any, what: str) -> None:
    """Raise ValueError for what is no name: printable text that is neither empty nor long."""
    check_text(value, what)
    if not (0 < len(value) <= _LONGEST and value.isprintable()):
        raise ValueError(f"{what} must be printable text of 1 to {_LONGEST} letters; got {reprlib.repr(value)}")


def replicate_number(value: Any, label: str) -> int:
    """The number of a replicate as an int; raises ValueError for anything else."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not 0 <= int(value) < 2**63:
        raise ValueError(f"{label}: a replicate is a whole number from 0 to 2⁶³ − 1; got {reprlib.repr(value)}")
    return int(value)


def plain_config(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A configuration as JSON gives it back, so that a stored one can be compared with a new one."""
    try:
        text = json.dumps(dict(config), allow_nan=False, ensure_ascii=False)
        text.encode()
        plain: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as reason:
        raise ValueError(
            f"{label}: config must be numbers, text, true, false, null, lists and dictionaries, all finite; "
            f"write anything else as text ({reprlib.repr(str(reason))}): {reprlib.repr(config)}"
        ) from reason
    if not _is_shallow(plain):
        raise ValueError(f"{label}: config must have at most {_DEEPEST} levels; got {reprlib.repr(config)}")
    return plain


def _is_shallow(tree: object, levels: int = _DEEPEST) -> bool:
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return levels >= 0 and all(_is_shallow(each, levels - 1) for each in inside)


def plain_metrics(metrics: Mapping[str, Any], label: str) -> dict[str, Metric]:
    """Figures by name as plain Python numbers; raises ValueError for anything else."""
    found = {}
    for name, value in metrics.items():
        check_name(name, f"{label}: the name of a metric")
        found[name] = _plain_metric(value, f"{label}: the metric {name!r}")
    return found


def _plain_metric(value: Any, label: str) -> Metric:
    """A number, or a list of them, as plain Python numbers; whole ones stay whole."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_number(each, label) for each in value]
    return plain_number(value, label)


def plain_number(value: Any, label: str) -> float:
    """A plain Python number; whole ones stay whole."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(
            f"{label} must be a number or a list of numbers; got {reprlib.repr(value)}, a {type(value).__name__}"
        )
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def is_finite(value: Metric) -> bool:
    """Whether all of it is of a size that can be averaged; NaN is not."""
    return all(abs(each) <= LARGEST for each in (value if isinstance(value, list) else [value]))
