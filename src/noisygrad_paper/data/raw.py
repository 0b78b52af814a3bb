"""From the text that is downloaded to arrays."""

import warnings
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.data.catalogue import DataSet
from noisygrad_paper.data.files import DamagedDataError, check_arrays

YEAR_MEMBER = "YearPredictionMSD.txt"
"""The one file in the archive of the year set."""


def parse_table(entry: DataSet, lines: Iterable[bytes]) -> dict[str, NDArray[np.float64]]:
    """The checked arrays of a table, from the lines of its official text.

    The nine sets with standard splits are numbers between blanks: the features, then the target, then for naval the
    turbine's decay. Year has commas, and its target comes first.

    Raises `DamagedDataError` where the text is not that of the data set.
    """
    year = entry.name == "year"
    try:
        with warnings.catch_warnings():
            # An empty text is an error below; numpy only warns.
            warnings.simplefilter("ignore", UserWarning)
            numbers = np.loadtxt(lines, delimiter="," if year else None, comments=None, ndmin=2, encoding="utf-8")
    except ValueError as error:
        raise DamagedDataError(f"it is not a table of numbers ({error})") from error
    extra = 1 + (entry.name == "naval")
    if numbers.shape[1] != entry.features + extra:
        raise DamagedDataError(f"it has {numbers.shape[1]} columns, expected {entry.features + extra}")
    if year:
        arrays = {"x": numbers[:, 1:], "y": numbers[:, 0]}
    else:
        arrays = {"x": numbers[:, : entry.features], "y": numbers[:, entry.features]}
    if entry.name == "naval":
        arrays["turbine_decay"] = numbers[:, entry.features + 1]
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    check_arrays(entry, arrays)
    return arrays
