"""Files that are whole or not there: checksums, writers that were killed, and damage at random."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch

from noisygrad import archive
from noisygrad.archive import clear_unfinished, lock, not_finite, read_archive, write_archive, write_atomically
from noisygrad.training import CheckpointError, load_checkpoint, save_checkpoint
from support.damage import GOOD, KINDS, damaged, killed_saves

posix = pytest.mark.skipif(sys.platform == "win32", reason="what a process at work has open cannot be removed there")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused(kind: str) -> None:
    outcomes = damaged(kind, 150)
    assert outcomes.total() == 150
    assert not outcomes.keys() - set(GOOD), outcomes


def test_killed_saves_leave_the_file_whole_and_no_litter_after_the_next() -> None:
    found = killed_saves(8)
    assert found["kills"] == 8
    assert found["parts after the next save"] == 0


def test_every_single_bit_of_a_checkpoint_counts(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, extra={"numbers": torch.tensor([-0.0043, 2.0])})
    content = path.read_bytes()
    for place in range(8 * len(content)):
        other = bytearray(content)
        other[place // 8] ^= 1 << place % 8
        path.write_bytes(other)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
    path.write_bytes(content)
    assert torch.equal(load_checkpoint(path)["numbers"], torch.tensor([-0.0043, 2.0]))


def test_an_archive_is_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), '"noisygrad_checksum":"': torch.ones(2), "noisygrad_checksum": torch.ones(())}
    header = {"format": 1, "text": '"noisygrad_checksum":"' + "0" * 64 + '"', "noisygrad_checksum": "1"}
    write_archive(tmp_path / "a", "thing", header, tensors)
    found, read = read_archive(tmp_path / "a", "thing", 1)
    assert found == header
    for other in (read, safetensors.torch.load_file(tmp_path / "a")):
        assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"", "truncated or not a safetensors file"),
        (lambda data: b"abc" * 50, "truncated or not a safetensors file"),
        (lambda data: data[:-1], "truncated or damaged: its bytes do not have the checksum"),
        (lambda data: data + b"\0", "truncated or damaged"),
        (lambda data: data.replace(b"noisygrad_checksum", b"noisygrad_checksun"), "has no checksum"),
        (lambda data: safetensors.torch.save({"a": torch.ones(1)}), "but not a noisygrad thing"),
    ],
)
def test_what_is_wrong_is_said(spoil, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_archive(path, "thing", {"format": 1}, {"a": torch.arange(3)})
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_archive(path, "thing", 1)
    with pytest.raises(FileNotFoundError, match="there is no thing at"):
        read_archive(tmp_path, "thing", 1)


def test_infinity_where_a_constant_has_it() -> None:
    mask, nan = torch.tensor([0.0, -torch.inf]), torch.tensor([torch.nan])
    assert not_finite({"a": torch.ones(2), "n": torch.arange(2), "mask": mask}, {"mask": mask}) is None
    assert not_finite({"a": torch.ones(2), "mask": mask}, {}) == "mask"
    assert not_finite({"mask": mask}, {"mask": -mask}) == "mask"
    assert not_finite({"a": nan}, {"a": nan}) == "a"


# Writers


def test_what_killed_writers_of_this_file_left_is_removed(tmp_path: Path) -> None:
    for name in (
        ".page[1].html.x1.part",
        ".page[1].html.a_b.part",
        ".other.html.x1.part",
        ".page1.html.x1.part",
        "y.part",
    ):
        (tmp_path / name).touch()
    write_atomically(tmp_path / "page[1].html", b"whole")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other.html.x1.part", ".page1.html.x1.part", "page[1].html", "y.part"]


WRITER = """
import sys, time
from noisygrad import archive
replace = archive.Path.replace
def slow(self, target):
    print(self.name, flush=True)
    sys.stdin.readline()
    return replace(self, target)
archive.Path.replace = slow
archive.write_atomically(sys.argv[1], b"theirs")
"""


@posix
@pytest.mark.parametrize("killed", [True, False])
def test_what_a_writer_at_work_has_written_stays(killed: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        part = tmp_path / process.stdout.readline().strip()
        write_atomically(path, b"ours")
        assert sorted(tmp_path.iterdir()) == sorted([part, path])
        if killed:
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait()
    assert path.read_bytes() == (b"ours" if killed else b"theirs")
    assert part.exists() == killed
    clear_unfinished(path)
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_a_part_that_is_cleared_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch) -> None:
    made, make = [], tempfile.mkstemp

    def cleared_at_once(**options):
        handle, name = make(**options)
        made.append(name)
        if len(made) == 1:
            clear_unfinished(tmp_path / "file")
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", cleared_at_once)
    write_atomically(tmp_path / "file", b"whole")
    assert len(made) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_locks_nothing_is_taken_for_abandoned(tmp_path: Path, monkeypatch) -> None:
    def fail(*_, **__):
        raise OSError("no locks here")

    monkeypatch.setattr(archive, "lock", fail)
    (tmp_path / ".file.x1.part").touch()
    write_atomically(tmp_path / "file", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.x1.part", "file"]


def test_windows_has_its_own_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    module = types.ModuleType("msvcrt")
    module.LK_LOCK, module.LK_NBLCK = 1, 2
    module.locking = lambda descriptor, mode, count: calls.append((mode, count))
    monkeypatch.setitem(sys.modules, "msvcrt", module)
    with monkeypatch.context() as other:
        other.setattr(sys, "platform", "win32")
        importlib.reload(archive)
    try:
        with tempfile.TemporaryFile() as file:
            archive.lock(file.fileno(), "shared")
            archive.lock(file.fileno(), "exclusive", wait=False)
        assert calls == [(1, 1), (2, 1)]
    finally:
        importlib.reload(archive)


@posix
def test_a_lock_that_is_held_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    one, two = (os.open(path, os.O_RDWR) for _ in range(2))
    lock(one, "exclusive")
    with pytest.raises(OSError, match="temporarily unavailable"):
        lock(two, "shared", wait=False)
    os.close(one)
    lock(two, "shared", wait=False)
    os.close(two)
