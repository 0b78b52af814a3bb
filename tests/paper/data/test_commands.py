"""`noisygrad data list | fetch | verify`, as a person types them."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from noisygrad_paper.data import DATA_SETS, MissingDataError
from noisygrad_paper.data.commands import app
from noisygrad_paper.data.files import checksum_of

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def run(*arguments):
    return CliRunner(env=WIDE).invoke(app, [str(argument) for argument in arguments])


def words(text):
    """The outputs' words, without the boxes that the terminal's width may cut."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def small_yacht(monkeypatch, tmp_path):
    generator = np.random.default_rng(0)
    arrays = {"x": generator.normal(size=(30, 6)), "y": np.repeat([1.0, 3.0], 15)}
    entry = replace(DATA_SETS["yacht"], rows=30, files={"uci/yacht.npz": checksum_of(arrays)})
    monkeypatch.setitem(DATA_SETS, "yacht", entry)
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", **arrays)
    return tmp_path


def row(output, name):
    return next(line for line in output.splitlines() if line.split()[:1] == [name]).split()


def test_list_shows_addresses_licences_and_the_cache(small_yacht):
    done = run("list", "--data-dir", small_yacht)
    assert done.exit_code == 0
    for entry in DATA_SETS.values():
        assert entry.about in done.output
        assert entry.licence in done.output
        assert entry.address in done.output
    assert row(done.output, "yacht")[1:] == ["there"]
    assert row(done.output, "boston")[1:] == ["not", "fetched"]
    assert "naval (PBP's task: compressor decay from 16 features)" in done.output
    assert "naval (the paper's: turbine decay from 17 features)" in done.output
    assert "no checksum of the cached numbers is known" in done.output
    assert f"The data lies in {small_yacht}" in done.output


def test_the_cache_is_found_by_the_variable(monkeypatch, small_yacht):
    monkeypatch.setenv("NOISYGRAD_DATA", str(small_yacht))
    assert row(run("list").output, "yacht")[1:] == ["there"]


def test_verify_says_what_is_there_and_right(small_yacht):
    done = run("verify", "--data-dir", small_yacht)
    assert done.exit_code == 0
    assert row(done.output, "yacht") == ["yacht", "yes", "30", "×", "6", "1.00000", "20", "ok"]
    assert row(done.output, "boston") == ["boston", "no", "506", "×", "13", "20", "absent"]
    assert row(done.output, "diabetes")[1:] == ["yes", "442", "×", "10", "77.00575", "20", "with", "scikit-learn"]


def test_verify_refuses_a_wrong_file(small_yacht):
    file = small_yacht / "uci" / "yacht.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = run("verify", "--data-dir", small_yacht)
    assert done.exit_code == 1
    assert row(done.stdout, "yacht")[-1] == "wrong"
    assert "renamed to yacht.npz.rejected" in done.stderr
    assert not file.exists()


def test_verify_blames_both_tasks_for_one_wrong_file(tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "naval.npz").write_bytes(b"half a file")
    done = run("verify", "--data-dir", tmp_path)
    assert done.exit_code == 1
    assert row(done.stdout, "naval")[-1] == "wrong"
    assert row(done.stdout, "naval-turbine")[-1] == "wrong"


def test_verify_finds_wrong_and_missing_images(tmp_path):
    (tmp_path / "mnist").mkdir()
    # Not the first of the four: one that is missing must not hide one that is wrong.
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(b"other")
    done = run("verify", "--data-dir", tmp_path)
    assert done.exit_code == 1
    assert row(done.stdout, "mnist")[-1] == "wrong"
    assert "mnist/t10k-images-idx3-ubyte.gz is not the mnist data" in done.stderr
    again = run("verify", "--data-dir", tmp_path)
    assert again.exit_code == 0
    assert row(again.stdout, "mnist")[-1] == "absent"


def test_fetch_does_nothing_where_nothing_is_to_do(small_yacht):
    done = run("fetch", "yacht", "diabetes", "--data-dir", small_yacht)
    assert done.exit_code == 0
    assert "yacht: already there, checksum ok" in done.output
    assert "diabetes: comes with scikit-learn" in done.output


def test_fetch_takes_a_file_put_there_by_hand(monkeypatch, small_yacht):
    with np.load(small_yacht / "uci" / "yacht.npz") as file:
        rows = np.column_stack([file["x"], file["y"]]).tolist()
    (small_yacht / "uci" / "yacht.npz").unlink()
    (small_yacht / "downloads").mkdir()
    (small_yacht / "downloads" / "yacht.txt").write_text("\n".join(" ".join(map(repr, row)) for row in rows))
    done = run("fetch", "yacht", "--data-dir", small_yacht)
    assert done.exit_code == 0
    assert f"yacht: wrote {small_yacht / 'uci' / 'yacht.npz'}" in done.output.replace("\n", "")
    assert row(run("verify", "--data-dir", small_yacht).output, "yacht")[-1] == "ok"


def test_fetch_goes_on_after_a_failure(monkeypatch, small_yacht):
    monkeypatch.setitem(DATA_SETS, "wine", replace(DATA_SETS["wine"], address="http://127.0.0.1:9/wine.txt"))
    done = run("fetch", "wine", "yacht", "--data-dir", small_yacht)
    assert done.exit_code == 1
    assert "wine: could not download http://127.0.0.1:9/wine.txt" in done.stderr
    assert "yacht: already there" in done.stdout


def test_fetch_all_asks_for_every_file_once(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("noisygrad_paper.data.fetch.fetch", lambda name, *_, **__: asked.append(name) or [])
    assert run("fetch", "all", "--data-dir", tmp_path).exit_code == 0
    assert asked == [name for name in DATA_SETS if name not in {"naval-turbine", "diabetes", "digits"}]


def test_unknown_name_lists_the_known_ones(tmp_path):
    done = run("fetch", "yacht", "bostn", "--data-dir", tmp_path)
    assert done.exit_code == 2
    assert "there is no data set 'bostn'; the known ones are boston, concrete" in words(done.stderr)
    assert not list(tmp_path.iterdir())


def test_every_missing_set_names_a_command_that_exists(tmp_path):
    from noisygrad_paper.data import load_table

    for entry in DATA_SETS.values():
        if entry.kind == "table" and entry.files:
            with pytest.raises(MissingDataError) as caught:
                load_table(entry.name, tmp_path)
            name = str(caught.value).split("noisygrad data fetch ")[1].split()[0]
            assert DATA_SETS[name].files == entry.files
