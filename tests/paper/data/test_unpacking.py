"""Archives of arrays whose parts are not what they say, though the archive's own checksums are right."""

import io
import zipfile

import numpy as np
import pytest

from noisygrad_paper.data import DamagedDataError, files
from support.made_site import zipped


def array_file(head: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


PARTS = {
    "a head that does not end": array_file(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3,"),
    "a head of another thing": array_file(b"{'descr': 1}"),
    "a head that is too deep": array_file(b"[" * 900),
    "more numbers than there is memory": saved(np.zeros(3)).replace(b"(3,), }" + b" " * 15, b"(3000000000000000,), }"),
    "fewer numbers than it says": saved(np.zeros(3))[:-8],
    "objects": saved(np.array([{"a": 1}], dtype=object)),
    "text": b"1 2 3",
    "nothing": b"",
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_arrays_that_are_none_are_refused(part):
    assert sorted(files.unpack_arrays(zipped({"x.npy": saved(np.zeros(3))}))) == ["x"]
    with pytest.raises(DamagedDataError, match="it cannot be read as an npz file"):
        files.unpack_arrays(zipped({"x.npy": part}))


def test_arrays_that_are_too_large_are_not_unpacked(monkeypatch, tmp_path):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros(1000), y=np.zeros(1000))
    content = (tmp_path / "zeros.npz").read_bytes()
    assert sorted(files.unpack_arrays(content)) == ["x", "y"]
    monkeypatch.setattr(files, "LARGEST", 10_000)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was read"))
    with pytest.raises(DamagedDataError, match="what is packed in it has 16256 bytes"):
        files.unpack_arrays(content)
