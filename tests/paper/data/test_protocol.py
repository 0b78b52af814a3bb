"""The standard splits, standardisation, and loading: on made-up files, and on the real ones where they are."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from noisygrad_paper.data import (
    DATA_SETS,
    DamagedDataError,
    DataTable,
    MissingDataError,
    UnknownDataSetError,
    data_directory,
    load_table,
    splits_of,
    standard_splits,
    standardised,
)
from noisygrad_paper.data.fetch import parse_table
from noisygrad_paper.data.files import checksum_of

# name: rows, features, target's standard deviation, splits, training rows, test rows
PUBLISHED = {
    "boston": (506, 13, "9.18801", 20, 455, 51),
    "concrete": (1030, 8, "16.69763", 20, 927, 103),
    "energy": (768, 8, "10.08362", 20, 691, 77),
    "kin8nm": (8192, 8, "0.26359", 20, 7373, 819),
    "naval": (11934, 16, "0.01472", 20, 10741, 1193),
    "naval-turbine": (11934, 17, "0.00750", 20, 10741, 1193),
    "power": (9568, 4, "17.06610", 20, 8611, 957),
    "protein": (45730, 9, "6.11824", 5, 41157, 4573),
    "wine": (1599, 11, "0.80732", 20, 1439, 160),
    "yacht": (308, 6, "15.13586", 20, 277, 31),
}


def numbers(rows, features, seed=0):
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(rows, features)), "y": generator.normal(size=rows)}


def table(rows=50, features=3, seed=0):
    return DataTable(name="made", label="made", **numbers(rows, features, seed))


def put(monkeypatch, folder, name, arrays, **changes):
    """Make the catalogue's set the given numbers, and lay them into a cache."""
    (path,) = DATA_SETS[name].files
    entry = replace(DATA_SETS[name], rows=len(arrays["y"]), files={path: checksum_of(arrays)}, **changes)
    monkeypatch.setitem(DATA_SETS, name, entry)
    file = folder / path
    file.parent.mkdir(exist_ok=True)
    np.savez(file, **arrays)
    return file


# Splits


def test_splits_are_the_published_recipe():
    generator = np.random.RandomState(1)
    splits = standard_splits(101, 3)
    assert len(splits) == 3
    for train, test in splits:
        order = generator.choice(range(101), 101, replace=False)
        np.testing.assert_array_equal(train, order[:91])
        np.testing.assert_array_equal(test, order[91:])


def test_first_splits_do_not_depend_on_the_count():
    for few, many in zip(standard_splits(40, 2), standard_splits(40, 5)[:2], strict=True):
        np.testing.assert_array_equal(few[0], many[0])


def test_rounding_is_half_up():
    # 0.9 · 25 = 22.5, of which Python's round() would make 22.
    (train, test), *_ = standard_splits(25, 1)
    assert (len(train), len(test)) == (23, 2)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (10, 0)])
def test_impossible_splits_are_refused(rows, count):
    with pytest.raises(ValueError, match="at least"):
        standard_splits(rows, count)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_the_splits(name):
    rows, _, _, count, train_rows, test_rows = PUBLISHED[name]
    splits = splits_of(name)
    assert len(splits) == count
    for train, test in splits:
        assert (len(train), len(test)) == (train_rows, test_rows)
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(rows))


def test_year_has_one_split_in_the_given_order():
    ((train, test),) = splits_of("year")
    np.testing.assert_array_equal(train, np.arange(463715))
    np.testing.assert_array_equal(test, np.arange(463715, 515345))


def test_naval_tasks_share_their_splits():
    for one, other in zip(splits_of("naval"), splits_of("naval-turbine"), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_images_have_no_table_splits():
    with pytest.raises(ValueError, match="images"):
        splits_of("mnist")


# Standardisation


def test_each_split_is_standardised_by_its_own_training_rows():
    made = table()
    splits = standard_splits(50, 4)
    found = standardised(made, splits)
    assert found.x_train.shape == (4, 45, 3)
    assert found.y_train.shape == (4, 45, 1)
    assert found.x_test.shape == (4, 5, 3)
    assert found.y_test.shape == (4, 5, 1)
    for r, (train, test) in enumerate(splits):
        for column in range(3):
            values = [float(made.x[i, column]) for i in train]
            mean = sum(values) / len(values)
            deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
            np.testing.assert_allclose(found.x_test[r, :, column], (made.x[test, column] - mean) / deviation)
        np.testing.assert_allclose(found.x_train[r].mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(found.y_train[r].std(0), 1)
        np.testing.assert_allclose(found.y_test[r, :, 0] * found.y_std[r] + found.y_mean[r], made.y[test])


def test_constant_columns_become_zero():
    made = table(features=2)
    # The mean of many copies of 0.998 is not 0.998 in floating point, so their deviation is not 0.
    made.x[:, 1] = 0.998
    assert made.x[standard_splits(50, 1)[0][0], 1].std() > 0
    found = standardised(made, standard_splits(50, 2))
    np.testing.assert_array_equal(found.x_train[:, :, 1], 0)
    np.testing.assert_array_equal(found.x_test[:, :, 1], 0)


def test_a_constant_column_becomes_one_where_asked():
    made = DataTable(name="t", label="t", x=np.column_stack([np.arange(20.0), np.full(20, 0.998)]), y=np.arange(20.0))
    data = standardised(made, standard_splits(20, 2), ones=[1])
    plain = standardised(made, standard_splits(20, 2))
    assert (data.x_train[..., 1] == 1.0).all()
    assert (data.x_test[..., 1] == 1.0).all()
    assert (data.x_train[..., 0] == plain.x_train[..., 0]).all()
    with pytest.raises(ValueError, match="vary"):
        standardised(made, standard_splits(20, 2), ones=[0])


def test_column_constant_in_training_only_stays_finite():
    made = table(rows=4, features=1)
    made.x[:, 0] = [5, 5, 5, 8]
    found = standardised(made, [(np.array([0, 1, 2]), np.array([3]))])
    assert found.x_test[0, 0, 0] == 3


def test_splits_of_different_sizes_are_refused():
    rows = np.arange(50)
    with pytest.raises(ValueError, match="same sizes"):
        standardised(table(), [(rows[:40], rows[40:]), (rows[:30], rows[30:])])
    with pytest.raises(ValueError, match="there must be one"):
        standardised(table(), [])


def test_a_table_is_checked_when_made():
    with pytest.raises(ValueError, match=r"x must be \[n, d\]"):
        DataTable(name="made", label="made", x=np.zeros((3, 2)), y=np.zeros(4))
    with pytest.raises(ValueError, match="not finite"):
        DataTable(name="made", label="made", x=np.full((3, 2), np.nan), y=np.zeros(3))


# The cache


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("NOISYGRAD_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_directory(tmp_path / "argument") == tmp_path / "argument"
    assert data_directory() == tmp_path / "variable"
    monkeypatch.delenv("NOISYGRAD_DATA")
    assert data_directory() == tmp_path / "cache" / "noisygrad"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_directory() == Path.home() / ".cache" / "noisygrad"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_directory() == Path.home() / ".cache" / "noisygrad"


def test_unknown_name_lists_the_known_ones():
    for call in (load_table, splits_of):
        with pytest.raises(UnknownDataSetError, match="there is no data set 'bostn'; the known ones are boston, conc"):
            call("bostn")


def test_images_are_no_table(tmp_path):
    with pytest.raises(ValueError, match=r"cifar10 holds images, not a table; the tables are boston, .*diabetes"):
        load_table("cifar10", tmp_path)


def test_missing_file_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("NOISYGRAD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"To fetch it: noisygrad data fetch boston$"):
        load_table("boston")
    with pytest.raises(MissingDataError, match=r"noisygrad data fetch naval$"):
        load_table("naval-turbine")
    with pytest.raises(MissingDataError, match=f"noisygrad data fetch yacht --data-dir {tmp_path / 'other'}$"):
        load_table("yacht", tmp_path / "other")


def test_good_file_is_loaded(monkeypatch, tmp_path):
    arrays = numbers(30, 13)
    put(monkeypatch, tmp_path, "boston", arrays)
    found = load_table("boston", tmp_path)
    np.testing.assert_array_equal(found.x, arrays["x"])
    np.testing.assert_array_equal(found.y, arrays["y"])
    assert (found.name, found.label, found.rows, found.features) == ("boston", "boston", 30, 13)


def test_naval_has_two_labelled_tasks(monkeypatch, tmp_path):
    arrays = numbers(30, 16) | {"turbine_decay": np.linspace(0.975, 1, 30)}
    put(monkeypatch, tmp_path, "naval", arrays)
    shared = DATA_SETS["naval"]
    turbine = replace(DATA_SETS["naval-turbine"], rows=30, files=shared.files)
    monkeypatch.setitem(DATA_SETS, "naval-turbine", turbine)
    first, second = load_table("naval", tmp_path), load_table("naval-turbine", tmp_path)
    assert first.label == "naval (PBP's task: compressor decay from 16 features)"
    assert second.label == "naval (the paper's: turbine decay from 17 features)"
    np.testing.assert_array_equal(first.x, arrays["x"])
    np.testing.assert_array_equal(first.y, arrays["y"])
    np.testing.assert_array_equal(second.x[:, :16], arrays["x"])
    np.testing.assert_array_equal(second.x[:, 16], arrays["y"])
    np.testing.assert_array_equal(second.y, arrays["turbine_decay"])


def test_wrong_checksum_is_refused_and_kept_aside(monkeypatch, tmp_path):
    arrays = numbers(30, 6)
    file = put(monkeypatch, tmp_path, "yacht", arrays)
    arrays["y"][7] += 1e-12
    np.savez(file, **arrays)
    with pytest.raises(DamagedDataError, match=r"its checksum is .*renamed to yacht.npz.rejected .*data fetch yacht"):
        load_table("yacht", tmp_path)
    assert sorted(path.name for path in file.parent.iterdir()) == ["yacht.npz.rejected"]
    np.savez(file, **arrays)
    with pytest.raises(DamagedDataError, match="rejected-2"):
        load_table("yacht", tmp_path)
    with pytest.raises(MissingDataError):
        load_table("yacht", tmp_path)


def spoil_cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def spoil_text(file):
    file.write_text("<html>not found</html>")


def spoil_lone_array(file):
    with file.open("wb") as handle:
        np.save(handle, np.zeros(3))


def spoil_objects(file):
    np.savez(file, x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))


def spoil_names(file):
    np.savez(file, inputs=np.zeros((30, 6)))


def spoil_shape(file):
    np.savez(file, x=np.zeros((29, 6)), y=np.zeros(29))


def spoil_type(file):
    np.savez(file, x=np.zeros((30, 6), dtype=np.float32), y=np.zeros(30))


@pytest.mark.parametrize(
    "spoil", [spoil_cut, spoil_text, spoil_lone_array, spoil_objects, spoil_names, spoil_shape, spoil_type]
)
def test_unusable_files_are_kept_aside(monkeypatch, tmp_path, spoil):
    file = put(monkeypatch, tmp_path, "yacht", numbers(30, 6))
    spoil(file)
    with pytest.raises(DamagedDataError, match=r"is not the yacht data.*renamed to yacht\.npz\.rejected"):
        load_table("yacht", tmp_path)
    assert not file.exists()


def test_file_that_cannot_be_renamed_is_still_refused(monkeypatch, tmp_path):
    file = put(monkeypatch, tmp_path, "yacht", numbers(30, 6))
    spoil_text(file)

    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(DamagedDataError, match=r"not used, and could not be renamed .*Permission denied"):
        load_table("yacht", tmp_path)


# Year: on a small file of its form


def small_year(monkeypatch, tmp_path, years):
    arrays = numbers(len(years), 90) | {"y": np.array(years, dtype=np.float64)}
    file = put(monkeypatch, tmp_path, "year", arrays, first_rows_train=len(years) - 2)
    monkeypatch.setitem(DATA_SETS, "year", replace(DATA_SETS["year"], files={"uci/year.npz": None}))
    return file, arrays


def test_small_year_is_loaded_and_split(monkeypatch, tmp_path):
    _, arrays = small_year(monkeypatch, tmp_path, [1922, 2011, 1999, 2001, 1987, 2005])
    found = load_table("year", tmp_path)
    np.testing.assert_array_equal(found.y, arrays["y"])
    ((train, test),) = splits_of("year")
    assert (train.tolist(), test.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert standardised(found, splits_of("year")).x_train.shape == (1, 4, 90)


@pytest.mark.parametrize("wrong", [1921, 2012, np.nan])
def test_year_out_of_range_is_refused(monkeypatch, tmp_path, wrong):
    file, _ = small_year(monkeypatch, tmp_path, [1922, 2011, 1999, wrong])
    with pytest.raises(DamagedDataError, match="not finite" if np.isnan(wrong) else "expected within 1922..2011"):
        load_table("year", tmp_path)
    assert not file.exists()


def test_diabetes_needs_no_file(tmp_path):
    found = load_table("diabetes", tmp_path)
    assert found.x.shape == (442, 10)
    assert (found.y.min(), found.y.max()) == (25, 346)
    assert len(splits_of("diabetes")) == 20


# The real data


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_data_is_the_published(name, real):
    rows, features, deviation, *_ = PUBLISHED[name]
    found = load_table(name, real("uci"))
    assert found.x.shape == (rows, features)
    assert found.x.dtype == found.y.dtype == np.float64
    assert f"{found.y.std():.5f}" == deviation


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "naval-turbine"])
def test_real_checksum_is_of_the_bytes(name, real):
    with np.load(real("uci") / "uci" / f"{name}.npz", allow_pickle=False) as file:
        content = file["x"].tobytes() + file["y"].tobytes()
        if name == "naval":
            content += file["turbine_decay"].tobytes()
    assert DATA_SETS[name].files == {f"uci/{name}.npz": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "naval-turbine"])
def test_real_data_survives_its_text(name, real):
    with np.load(real("uci") / "uci" / f"{name}.npz", allow_pickle=False) as file:
        columns = [file["x"], file["y"][:, None]] + ([file["turbine_decay"][:, None]] if name == "naval" else [])
    lines = [" ".join(map(repr, row)).encode() + b"\n" for row in np.hstack(columns).tolist()]
    assert checksum_of(parse_table(DATA_SETS[name], lines)) in DATA_SETS[name].files.values()


@pytest.mark.parametrize("name", ["naval", "naval-turbine"])
def test_real_constant_columns_stay_finite(name, real):
    found = standardised(load_table(name, real("uci")), splits_of(name)[:2])
    for values in (found.x_train, found.x_test, found.y_train, found.y_test):
        assert np.isfinite(values).all()
    for column in (8, 11):
        np.testing.assert_array_equal(found.x_train[:, :, column], 0)
    np.testing.assert_allclose(np.delete(found.x_train.std(axis=1), [8, 11], axis=1), 1)
