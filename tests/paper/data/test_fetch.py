"""Downloading from a server in a thread: what arrives whole and right is used, and nothing else."""

import hashlib
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from noisygrad.archive import lock
from noisygrad_paper.data import DATA_SETS, DamagedDataError, UnknownDataSetError, load_table
from noisygrad_paper.data.fetch import FetchError, fetch
from support.made_site import digest, everything, pack, small_cifar, small_year, yacht


def test_table_is_fetched_once(monkeypatch, site, tmp_path):
    values = yacht(monkeypatch, site)
    seen = []
    cache = tmp_path / "deep" / "cache"
    assert fetch("yacht", cache, report=lambda *step: seen.append(step)) == [cache / "uci" / "yacht.npz"]
    np.testing.assert_array_equal(load_table("yacht", cache).x, values[:, :6])
    np.testing.assert_array_equal(load_table("yacht", cache).y, values[:, 6])
    assert everything(cache) == ["uci/yacht.npz"]
    size = len(site.pages["/yacht.txt"])
    assert seen[0] == ("yacht.txt", 0, size)
    assert seen[-1] == ("yacht.txt", size, size)
    assert fetch("yacht", cache) == []
    assert site.asked == ["/yacht.txt"]
    assert len(fetch("yacht", cache, force=True)) == 1
    assert site.asked == ["/yacht.txt"] * 2


def test_naval_turbine_fetches_naval(monkeypatch, site, tmp_path):
    values = np.random.default_rng(0).normal(size=(30, 18))
    files = {"uci/naval.npz": digest(values[:, :16], values[:, 16], values[:, 17])}
    for name in ("naval", "naval-turbine"):
        entry = replace(DATA_SETS[name], rows=30, files=files, address=site.address + "/naval.txt")
        monkeypatch.setitem(DATA_SETS, name, entry)
    site.pages["/naval.txt"] = "\n".join(" ".join(map(repr, row)) for row in values.tolist()).encode()
    assert fetch("naval-turbine", tmp_path) == [tmp_path / "uci" / "naval.npz"]
    np.testing.assert_array_equal(load_table("naval-turbine", tmp_path).x, values[:, :17])
    np.testing.assert_array_equal(load_table("naval", tmp_path).y, values[:, 16])


def test_unknown_name_and_bundled_set(tmp_path):
    with pytest.raises(UnknownDataSetError, match="the known ones are boston"):
        fetch("imagenet", tmp_path)
    assert fetch("diabetes", tmp_path) == []


def test_wrong_numbers_are_kept_aside(monkeypatch, site, tmp_path):
    values = yacht(monkeypatch, site)
    right = site.pages["/yacht.txt"]
    site.pages["/yacht.txt"] = right.replace(repr(float(values[3, 3])).encode(), b"0.5")
    with pytest.raises(DamagedDataError, match=r"its checksum is .*renamed to yacht\.txt\.rejected and is not used"):
        fetch("yacht", tmp_path)
    assert everything(tmp_path) == ["downloads/yacht.txt.rejected"]
    site.pages["/yacht.txt"] = right
    fetch("yacht", tmp_path)
    assert everything(tmp_path) == ["downloads/yacht.txt.rejected", "uci/yacht.npz"]


@pytest.mark.parametrize(
    "content", [b"<html>moved</html>", b"", b"1 2 3\n4 5 6\n", b"\xff\xfe\x00", b"1 2 3 4 5 6 7\n"]
)
def test_another_text_is_kept_aside(monkeypatch, site, tmp_path, content):
    yacht(monkeypatch, site)
    site.pages["/yacht.txt"] = content
    with pytest.raises(DamagedDataError, match="is not the yacht data"):
        fetch("yacht", tmp_path)
    assert everything(tmp_path) == ["downloads/yacht.txt.rejected"]


def test_wrong_cached_file_is_kept_aside_and_replaced(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "yacht.npz").write_bytes(b"half a file")
    fetch("yacht", tmp_path)
    assert everything(tmp_path) == ["uci/yacht.npz", "uci/yacht.npz.rejected"]
    assert load_table("yacht", tmp_path).rows == 25


def test_truncated_download_leaves_nothing(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    size = len(site.pages["/yacht.txt"])
    site.claimed["/yacht.txt"] = size + 1000
    with pytest.raises(FetchError, match=f"yacht.txt: the connection closed after {size} of {size + 1000} bytes"):
        fetch("yacht", tmp_path)
    assert everything(tmp_path) == []


def test_failure_names_the_address_and_the_way_by_hand(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    content = site.pages.pop("/yacht.txt")
    by_hand = tmp_path / "downloads" / "yacht.txt"
    with pytest.raises(FetchError) as caught:
        fetch("yacht", tmp_path)
    message = str(caught.value)
    assert f"could not download {site.address}/yacht.txt: Not Found" in message
    assert f"put it at {by_hand} and run `noisygrad data fetch yacht --data-dir {tmp_path}` again" in message
    by_hand.write_bytes(content)
    assert fetch("yacht", tmp_path) == [tmp_path / "uci" / "yacht.npz"]
    assert len(site.asked) == 1
    assert everything(tmp_path) == ["uci/yacht.npz"]


def test_nobody_at_the_address(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    entry = replace(DATA_SETS["yacht"], address="http://127.0.0.1:9/yacht.txt")
    monkeypatch.setitem(DATA_SETS, "yacht", entry)
    with pytest.raises(FetchError, match=r"could not download http://127\.0\.0\.1:9/yacht\.txt: "):
        fetch("yacht", tmp_path)


def test_folder_that_cannot_be_made(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot write the yacht data to"):
        fetch("yacht", tmp_path / "file")


def test_interruption_leaves_nothing(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)

    def interrupt(name, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("yacht", tmp_path, report=interrupt)
    assert everything(tmp_path) == []


def test_killed_half_way(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site, "/stall/yacht.txt")
    site.claimed["/stall/yacht.txt"] = len(site.pages["/stall/yacht.txt"]) + 1
    program = f"""
import dataclasses
from noisygrad_paper.data.catalogue import DATA_SETS
from noisygrad_paper.data.fetch import fetch
DATA_SETS["yacht"] = dataclasses.replace(DATA_SETS["yacht"], address={DATA_SETS["yacht"].address!r})
fetch("yacht", {str(tmp_path)!r})
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not site.asked and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None
        # It now waits for the last byte.
        process.send_signal(signal.SIGKILL)
    assert everything(tmp_path) == []
    site.stall.set()
    del site.claimed["/stall/yacht.txt"]
    left = tmp_path / "downloads/.yacht.txt.1.part"
    with left.open("wb") as file:
        lock(file.fileno(), "exclusive")  # as a process that is at work has it
        fetch("yacht", tmp_path)
        assert everything(tmp_path) == ["downloads/.yacht.txt.1.part", "uci/yacht.npz"]
    fetch("yacht", tmp_path, force=True)
    assert everything(tmp_path) == ["uci/yacht.npz"]


# Year: a small archive of its form


def test_year_is_fetched(monkeypatch, site, tmp_path):
    values, years = small_year(monkeypatch, site)
    fetch("year", tmp_path)
    found = load_table("year", tmp_path)
    np.testing.assert_array_equal(found.x, values)
    np.testing.assert_array_equal(found.y, years)
    assert everything(tmp_path) == ["uci/year.npz"]


def test_year_with_another_text_is_kept_aside(monkeypatch, site, tmp_path):
    small_year(monkeypatch, site)
    monkeypatch.setitem(DATA_SETS, "year", replace(DATA_SETS["year"], address_checksum="0" * 64))
    with pytest.raises(DamagedDataError, match="checksum of the text in it is"):
        fetch("year", tmp_path)
    assert everything(tmp_path) == ["downloads/year.zip.rejected"]


@pytest.mark.parametrize("name", ["../outside.txt", "/outside.txt", "a/../../outside.txt", "..\\outside.txt"])
def test_zip_that_leads_outside_is_refused(monkeypatch, site, tmp_path, name):
    small_year(monkeypatch, site, {name: "x"})
    with pytest.raises(DamagedDataError, match="a path that leads out of its folder"):
        fetch("year", tmp_path / "cache")
    assert everything(tmp_path) == ["cache/downloads/year.zip.rejected"]


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_zip_cut_short_by_the_server_is_kept_aside(monkeypatch, site, tmp_path, keep):
    small_year(monkeypatch, site)
    content = site.pages["/year.zip"]
    site.pages["/year.zip"] = content[: int(len(content) * keep)]
    with pytest.raises(DamagedDataError, match="is not the year data"):
        fetch("year", tmp_path)
    assert everything(tmp_path) == ["downloads/year.zip.rejected"]


# Images


def test_cifar_is_unpacked(monkeypatch, site, tmp_path):
    contents = small_cifar(monkeypatch, site)
    written = fetch("cifar10", tmp_path)
    assert everything(tmp_path) == sorted(contents)
    assert {str(path.relative_to(tmp_path)): path.read_bytes() for path in written} == contents
    assert fetch("cifar10", tmp_path) == []


def test_one_wrong_batch_refuses_all(monkeypatch, site, tmp_path):
    small_cifar(monkeypatch, site, spoil="cifar-10-batches-bin/test_batch.bin")
    with pytest.raises(DamagedDataError, match=r"the checksum of cifar-10-batches-bin/test_batch\.bin in it is"):
        fetch("cifar10", tmp_path)
    assert everything(tmp_path) == ["downloads/cifar10.tar.gz.rejected"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("../outside.bin", b"x", "a path that leads out of its folder"),
        ("/outside.bin", b"x", "a path that leads out of its folder"),
        ("cifar-10-batches-bin/link", None, "neither a file nor a folder"),
    ],
)
def test_tar_that_leads_outside_is_refused(monkeypatch, site, tmp_path, name, content, message):
    small_cifar(monkeypatch, site, extra={name: content})
    with pytest.raises(DamagedDataError, match=message):
        fetch("cifar10", tmp_path / "cache")
    assert everything(tmp_path) == ["cache/downloads/cifar10.tar.gz.rejected"]


@pytest.mark.parametrize(
    "content", [b"<html></html>", b"", "cut", pack({"readme": b""})], ids=["page", "empty", "cut", "other"]
)
def test_another_archive_is_kept_aside(monkeypatch, site, tmp_path, content):
    small_cifar(monkeypatch, site)
    whole = site.pages["/cifar.tar.gz"]
    site.pages["/cifar.tar.gz"] = whole[:-40] if content == "cut" else content
    with pytest.raises(DamagedDataError, match="is not the cifar10 data"):
        fetch("cifar10", tmp_path)
    assert everything(tmp_path) == ["downloads/cifar10.tar.gz.rejected"]


def test_mnist_is_kept_as_it_comes(monkeypatch, site, tmp_path):
    contents = {name: name.encode() for name in DATA_SETS["mnist"].files}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    entry = replace(DATA_SETS["mnist"], address=f"{site.address}/folder", files=files)
    monkeypatch.setitem(DATA_SETS, "mnist", entry)
    site.pages = {f"/folder/{name.split('/')[1]}": content for name, content in contents.items()}
    last = "/folder/t10k-labels-idx1-ubyte.gz"
    site.pages[last] = b"spoilt"
    with pytest.raises(DamagedDataError, match=r"renamed to t10k-labels-idx1-ubyte\.gz\.rejected"):
        fetch("mnist", tmp_path)
    assert not list((tmp_path / "mnist").iterdir())
    site.pages[last] = contents["mnist/t10k-labels-idx1-ubyte.gz"]
    fetch("mnist", tmp_path)
    # The three good ones are not downloaded again.
    assert len(site.asked) == 5
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents
