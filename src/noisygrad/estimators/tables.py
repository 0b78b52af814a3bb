"""Tables that come into an estimator: what is wrong with them is said by column."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import validate_data

Floats = NDArray[np.float64]


def checked_inputs(estimator: Any, X: ArrayLike, y: Any = "no_validation", **options: Any) -> Any:
    """What scikit-learn checks, and which column holds a value that is not finite."""
    if options.get("multi_output"):
        targets = np.asarray(y)
        if targets.ndim == 2 and targets.dtype.kind == "f":
            _refuse_bad(estimator, "y", targets, getattr(y, "columns", None))
    found = validate_data(estimator, X, y, dtype=np.float64, ensure_all_finite=False, **options)
    checked = found if isinstance(y, str) else found[0]
    _refuse_bad(estimator, "X", checked, getattr(estimator, "feature_names_in_", None))
    return found


def _refuse_bad(estimator: Any, what: str, values: NDArray[Any], names: Any) -> None:
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    column = int(bad.any(axis=0).argmax())
    kind = "NaN" if np.isnan(values[:, column]).any() else "infinity"
    name = column if names is None else repr(names[column])
    remedy = "impute or drop them, for instance with sklearn.impute.SimpleImputer in a Pipeline"
    if what == "y":
        remedy = "drop these rows"
    raise ValueError(
        f"Input {what} contains {kind} in column {name} ({int(bad[:, column].sum())} of {len(values)} rows); "
        f"{type(estimator).__name__} needs finite numbers: {remedy}."
    )


def moments(values: Floats, what: str) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each column; a column that is constant up to rounding gets 1.

    `what` the columns are is said where one is too large.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = values.mean(axis=0), values.std(axis=0)
    if not np.isfinite(std).all():
        column = int(np.flatnonzero(~np.isfinite(np.atleast_1d(std)))[0])
        raise ValueError(f"{what} column {column} holds values too large to standardise: rescale it")
    constant = std <= 10 * np.finfo(np.float64).eps * np.abs(mean)
    return mean, np.where(constant, 1.0, std)
