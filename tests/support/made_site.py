"""A server in a thread, and small sets of data on it in place of the official ones."""

import contextlib
import hashlib
import io
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from noisygrad_paper.data import DATA_SETS
from noisygrad_paper.data.fetch import YEAR_MEMBER


class Site:
    """What a local server gives: path -> content; `claimed` lengths may be untrue, and `asked` lists the requests."""

    def __init__(self):
        self.pages, self.claimed, self.asked = {}, {}, []
        self.stall = threading.Event()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.asked.append(self.path)
                content = site.pages.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(site.claimed.get(self.path, len(content))))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(content)
                    self.wfile.flush()
                    if self.path.startswith("/stall"):
                        site.stall.wait(60)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.stall.set()
        self.server.shutdown()
        self.server.server_close()


def digest(*arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def yacht(monkeypatch, site, path="/yacht.txt"):
    """A small table in place of the yacht data, and its text on the site."""
    values = np.random.default_rng(0).normal(size=(25, 7))
    entry = replace(
        DATA_SETS["yacht"],
        address=site.address + path,
        rows=25,
        files={"uci/yacht.npz": digest(values[:, :6], values[:, 6])},
    )
    monkeypatch.setitem(DATA_SETS, "yacht", entry)
    # Blanks of several kinds and an empty last line, as in the official copy.
    rows = ["  ".join(map(repr, row[:3])) + "\t" + " ".join(map(repr, row[3:])) + " \n" for row in values.tolist()]
    site.pages[path] = ("".join(rows) + "\n").encode()
    return values


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def small_year(monkeypatch, site, extra=None):
    values = np.random.default_rng(0).normal(size=(12, 90)).round(5)
    years = np.arange(1990, 2002)
    text = "".join(
        f"{year}," + ",".join(map(str, row)) + "\n" for year, row in zip(years, values.tolist(), strict=True)
    )
    site.pages["/year.zip"] = zipped({**(extra or {}), YEAR_MEMBER: text})
    entry = replace(
        DATA_SETS["year"],
        address=site.address + "/year.zip",
        rows=12,
        first_rows_train=10,
        address_checksum=hashlib.sha256(text.encode()).hexdigest(),
    )
    monkeypatch.setitem(DATA_SETS, "year", entry)
    return values, years


def pack(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def small_cifar(monkeypatch, site, extra=None, spoil=None):
    contents = {name: name.encode() * 50 for name in DATA_SETS["cifar10"].files}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    address = f"{site.address}/cifar.tar.gz"
    monkeypatch.setitem(DATA_SETS, "cifar10", replace(DATA_SETS["cifar10"], address=address, files=files))
    members = {"cifar-10-batches-bin/readme.html": b"read me", **contents, **(extra or {})}
    if spoil:
        members[spoil] = b"spoilt"
    site.pages["/cifar.tar.gz"] = pack(members)
    return contents
