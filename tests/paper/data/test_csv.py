"""A CSV of the user's own: what is read, and what each mistake is told."""

import numpy as np
import pytest

from noisygrad_paper.data import CsvError, read_csv_table


def write(tmp_path, lines, name="own.csv"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def good_lines(rows=20):
    return ["width,price,height", *(f"{i},{i * i},{-i}e-1" for i in range(rows))]


def changed(number, line, rows=20):
    """A good file with its line `number` (from 1) replaced."""
    lines = good_lines(rows)
    lines[number - 1] = line
    return lines


@pytest.mark.parametrize("target", ["price", 1, "1", " price "])
def test_target_by_name_or_number(tmp_path, target):
    found = read_csv_table(write(tmp_path, good_lines()), target)
    counted = np.arange(20.0)
    np.testing.assert_allclose(found.x, np.stack([counted, -counted / 10], axis=1))
    np.testing.assert_allclose(found.y, counted**2)
    assert (found.name, found.label, found.target) == ("own", "own.csv", "price")
    assert found.x.dtype == found.y.dtype == np.float64


def test_a_name_comes_before_a_number(tmp_path):
    lines = ["1,price,x", *(f"{i},{2 * i},{3 * i}" for i in range(20))]
    assert read_csv_table(write(tmp_path, lines), "1").target == "1"
    assert read_csv_table(write(tmp_path, lines), 1).target == "price"


def test_byte_order_mark_quotes_and_blank_lines(tmp_path):
    path = tmp_path / "own.csv"
    rows = "\r\n".join(f'"{i}", {i + 1}\r\n' for i in range(20))
    path.write_bytes(b"\xef\xbb\xbf" + f'\r\n"a, b",y\r\n{rows}'.encode())
    found = read_csv_table(path, "y")
    np.testing.assert_array_equal(found.x[:, 0], np.arange(20))
    assert "a, b" not in found.target


MISTAKES = {
    "words": (changed(5, "1,2,red"), "column 'height' holds 'red' in line 5, which is not a number"),
    "underscore": (changed(5, "1,2,1_000"), "column 'height' holds '1_000' in line 5, which is not a number"),
    "missing": (changed(7, "1,,3"), r"column 'price' has no value in line 7 \(''\)"),
    "missing by name": (changed(7, "NA,2,3"), r"column 'width' has no value in line 7 \('NA'\)"),
    "nan": (changed(8, "1,2,nan"), "column 'height' has no value in line 8"),
    "infinite": (changed(8, "1,2,-inf"), "column 'height' holds '-inf' in line 8; only finite"),
    "overflow": (changed(8, "1,2,1e999"), "column 'height' holds '1e999' in line 8; only finite"),
    "short line": (changed(9, "1,2"), "line 9 has 2 cells, but there are 3 columns"),
    "long line": (changed(9, "1,2,3,4"), "line 9 has 4 cells, but there are 3 columns"),
    "few rows": (good_lines(19), "has 19 rows of data; at least 20"),
    "no rows": (good_lines(0), "has 0 rows of data"),
    "empty": ([""], "is empty: a first line with the names"),
    "no header": (good_lines()[1:], "first line must hold the names of the columns; it holds numbers: 0,0,0e-1"),
    "same names": (changed(1, "width,price,width"), "two columns have the name 'width'"),
    "nameless": (changed(1, "width,,price"), r"column 1 \(counted from 0\) has no name"),
    "one column": (["price", *map(str, range(20))], "has one column only"),
    "semicolons": (["a;price", *(f"{i};{i}" for i in range(20))], "separated by ';', but a comma is expected"),
    "constant": (["a,price", *(f"{i},3" for i in range(20))], "target column 'price' is 3 in every row"),
    "open quote": (changed(4, '1,"2,3'), "is not a CSV file: line"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(tmp_path, mistake):
    lines, message = MISTAKES[mistake]
    with pytest.raises(CsvError, match=message):
        read_csv_table(write(tmp_path, lines), "price")


@pytest.mark.parametrize("target", ["cost", 3, -1, "3"])
def test_unknown_target_lists_the_columns(tmp_path, target):
    with pytest.raises(CsvError, match=f"no column {target!r}; the columns are width, price, height \\(or 0 to 2\\)"):
        read_csv_table(write(tmp_path, good_lines()), target)


def test_binary_file(tmp_path):
    path = tmp_path / "own.csv"
    path.write_bytes(b"PK\x03\x04\xff\xfe" * 10)
    with pytest.raises(CsvError, match="not text in UTF-8"):
        read_csv_table(path, "price")


def test_no_file(tmp_path):
    for path in (tmp_path / "own.csv", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            read_csv_table(path, "price")
