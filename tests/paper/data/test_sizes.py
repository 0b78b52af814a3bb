"""Downloads, files and members of archives that are too large are refused before they are read."""

import gzip
import tarfile
import zipfile

import pytest

from noisygrad_paper.data import DamagedDataError, files, load_table
from noisygrad_paper.data.fetch import YEAR_MEMBER, FetchError, fetch
from support.made_site import everything, small_cifar, small_year, yacht, zipped


def test_a_download_that_is_too_large_is_not_read(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    site.claimed["/yacht.txt"] = 3 * 2**30
    seen = []
    with pytest.raises(FetchError, match="what is there has 3221225472 bytes, and no official file has more than"):
        fetch("yacht", tmp_path, report=lambda *step: seen.append(step))
    assert (seen, everything(tmp_path)) == ([], [])


def test_a_download_of_unknown_length_is_read_up_to_the_limit(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    site.pages["/yacht.txt"] *= 2000
    site.claimed["/yacht.txt"] = "unknown"
    monkeypatch.setattr(files, "LARGEST", 1_000_000)
    seen = []
    with pytest.raises(FetchError, match=r"what comes has .* bytes, and no official file has more than 1000000"):
        fetch("yacht", tmp_path, report=lambda name, done, total: seen.append(done))
    assert max(seen) <= 1_000_000 < len(site.pages["/yacht.txt"])
    assert everything(tmp_path) == []


def test_a_file_put_there_by_hand_that_is_too_large_is_not_read(monkeypatch, site, tmp_path):
    yacht(monkeypatch, site)
    for relative in ("downloads/yacht.txt", "uci/yacht.npz"):
        (tmp_path / relative).parent.mkdir()
        with (tmp_path / relative).open("wb") as file:
            file.truncate(3 * 2**30)  # a hole: no disk is needed for it
    with pytest.raises(DamagedDataError, match="it has 3221225472 bytes, and no official file has more"):
        load_table("yacht", tmp_path)
    with pytest.raises(DamagedDataError, match="it has 3221225472 bytes, and no official file has more"):
        fetch("yacht", tmp_path)


def test_a_member_of_a_zip_that_is_too_large_is_not_read(monkeypatch, site, tmp_path):
    small_year(monkeypatch, site)
    monkeypatch.setattr(files, "LARGEST", 5000)
    site.pages["/year.zip"] = zipped({YEAR_MEMBER: bytes(100_000)})
    assert len(site.pages["/year.zip"]) < 5000
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was read"))
    with pytest.raises(DamagedDataError, match=f"{YEAR_MEMBER} in it has 100000 bytes"):
        fetch("year", tmp_path)


@pytest.mark.parametrize("name", ["cifar-10-batches-bin/test_batch.bin", "cifar-10-batches-bin/other.bin"])
def test_a_member_of_a_tar_that_is_too_large_is_not_unpacked(monkeypatch, site, tmp_path, name):
    small_cifar(monkeypatch, site)
    member = tarfile.TarInfo(name)
    member.size = 3 * 2**30
    # The head of the member alone: whoever tried to get behind it would find the archive cut off.
    site.pages["/cifar.tar.gz"] = gzip.compress(member.tobuf() + bytes(10_000))
    with pytest.raises(DamagedDataError, match=f"what it holds up to '{name}' has 3221225472 bytes"):
        fetch("cifar10", tmp_path)


def test_members_of_a_tar_are_counted_together(monkeypatch, site, tmp_path):
    small_cifar(monkeypatch, site, extra={f"more/{number}": bytes(400) for number in range(20)})
    monkeypatch.setattr(files, "LARGEST", 15_000)
    with pytest.raises(DamagedDataError, match="what it holds up to 'more/"):
        fetch("cifar10", tmp_path)
