"""A table of the user's own, from a CSV file; what is wrong with it is said by column and line."""

import csv
import math
from collections import Counter
from pathlib import Path

import numpy as np

from noisygrad_paper.data.tables import DataTable

FEWEST_ROWS = 20
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})


class CsvError(ValueError):
    """A CSV file that cannot be used; the message names the column or the line, and says what to do."""


def read_csv_table(path: str | Path, target: str | int) -> DataTable:
    """A table from a file with a header line and numbers between commas.

    The file is in UTF-8. `target` is the column to predict, by its name or by its number, counted from 0; all others
    are features. Raises CsvError for what cannot be used: the header, the target, a line, a cell, too few rows.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = _header(path, next((row for row in reader if any(cell.strip() for cell in row)), []))
            column = _column(path, header, target)
            lines = ((reader.line_num, row) for row in reader)
            rows = [_numbers(path, header, number, row) for number, row in lines if any(cell.strip() for cell in row)]
    except UnicodeDecodeError as error:
        raise CsvError(f"{path} is not text in UTF-8 ({error.reason}): save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise CsvError(f"{path} is not a CSV file: line {reader.line_num}: {error}") from error
    if len(rows) < FEWEST_ROWS:
        raise CsvError(f"{path} has {len(rows)} rows of data; at least {FEWEST_ROWS} are needed")
    numbers = np.array(rows, dtype=np.float64)
    y = numbers[:, column].copy()
    if y.min() == y.max():
        raise CsvError(f"{path}: the target column {header[column]!r} is {y[0]:g} in every row: nothing to predict")
    return DataTable(name=path.stem, label=path.name, x=np.delete(numbers, column, axis=1), y=y, target=header[column])


def _header(path: Path, row: list[str]) -> list[str]:
    header = [cell.strip() for cell in row]
    if not header:
        raise CsvError(f"{path} is empty: a first line with the names of the columns is expected")
    if len(header) == 1:
        other = next((mark for mark in (";", "\t", "|") if mark in header[0]), None)
        found = f"; it looks as if columns were separated by {other!r}, but a comma is expected" if other else ""
        raise CsvError(f"{path} has one column only, and a target and a feature are needed{found}")
    if all(_is_number(cell) for cell in header):
        raise CsvError(f"{path}: the first line must hold the names of the columns; it holds numbers: {','.join(row)}")
    if "" in header:
        raise CsvError(f"{path}: column {header.index('')} (counted from 0) has no name in the first line")
    if repeated := [name for name, count in Counter(header).items() if count > 1]:
        raise CsvError(f"{path}: two columns have the name {repeated[0]!r}; every name must occur once")
    return header


def _column(path: Path, header: list[str], target: str | int) -> int:
    if isinstance(target, str) and target.strip() in header:
        return header.index(target.strip())
    number = int(target) if isinstance(target, int) or target.strip().isdecimal() else -1
    if not 0 <= number < len(header):
        known = ", ".join(header)
        raise CsvError(f"{path} has no column {target!r}; the columns are {known} (or 0 to {len(header) - 1})")
    return number


def _numbers(path: Path, header: list[str], number: int, row: list[str]) -> list[float]:
    if len(row) != len(header):
        raise CsvError(f"{path}: line {number} has {len(row)} cells, but there are {len(header)} columns")
    return [_number(path, name, number, cell.strip()) for name, cell in zip(header, row, strict=True)]


def _number(path: Path, name: str, number: int, cell: str) -> float:
    if cell.lower() in _MISSING:
        raise CsvError(
            f"{path}: column {name!r} has no value in line {number} ({cell!r}); fill it in, or leave out the line or "
            "the column"
        )
    if not _is_number(cell):
        raise CsvError(
            f"{path}: column {name!r} holds {cell!r} in line {number}, which is not a number; encode the column as "
            "numbers or leave it out"
        )
    value = float(cell)
    if not math.isfinite(value):
        raise CsvError(f"{path}: column {name!r} holds {cell!r} in line {number}; only finite numbers can be used")
    return value


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    # float() also reads 1_000, which no CSV writer means as a number.
    return "_" not in cell
