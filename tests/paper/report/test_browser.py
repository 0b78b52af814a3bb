"""The report as a browser shows it: headless Chromium opens the page and says what it made of it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.experiments.configurations import CONFIGURATIONS
from noisygrad_paper.report import paper, site
from noisygrad_paper.report.regression import METRICS
from noisygrad_paper.report.study import Study
from support import made_results

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install Debian's chromium to run this")

# Runs in a copy of the page, in a frame of the width asked for: a window may not be as narrow as a phone.
PROBE = """<script>
addEventListener("load", () => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  all("details").forEach((folded) => { folded.open = true; });
  const wide = (element) => !element.closest(".scroll")
    && element.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5;
  parent.postMessage(JSON.stringify({
    width: document.documentElement.clientWidth,
    scrollWidth: document.documentElement.scrollWidth,
    tooWide: all("main *").filter(wide).map((element) => element.outerHTML.slice(0, 80)),
    images: all("img").map((image) => [image.complete, image.naturalWidth, image.naturalHeight, image.clientWidth]),
    comparisons: all("table.comparison").map((table) => ({
      caption: table.caption.textContent,
      rows: table.tBodies[0].rows.length,
      columns: [...table.tHead.rows[0].cells].map((cell) => cell.textContent),
      verdicts: [...table.tBodies[0].querySelectorAll("td")].map((cell) => cell.className),
    })),
    backgrounds: Object.fromEntries(["better", "within", "worse"].map(
      (name) => [name, getComputedStyle(document.querySelector("td." + name)).backgroundColor])),
    tiles: all(".tiles dd").map((tile) => tile.textContent),
    headings: all("h2").map((heading) => heading.textContent),
  }), "*");
});
</script>"""
FRAME = """<!DOCTYPE html><title>frame</title><body style="margin:0">
<iframe src="probed.html" style="border:0;width:{width}px;height:800px"></iframe>
<pre id="found"></pre>
<script>
addEventListener("message", (event) => {{ document.getElementById("found").textContent = event.data; }});
</script>
</body>"""


def browse(folder: Path, address: Path, *options: str) -> str:
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", *options, address.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    made_results.write_all(folder)
    return folder


@pytest.fixture(scope="module")
def page(results) -> Path:
    return site.build_report(results).write(results / "report.html")


def look(folder: Path, page: Path, width: int) -> dict:
    probed = page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>")
    (folder / "probed.html").write_text(probed, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    shown = browse(folder, frame, f"--window-size={max(width, 800)},900", "--dump-dom")
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert found, shown[-2000:]
    return json.loads(html.unescape(found.group(1)))


@pytest.fixture(scope="module")
def desktop(tmp_path_factory, page) -> dict:
    return look(tmp_path_factory.mktemp("desktop"), page, 1100)


@pytest.fixture(scope="module")
def phone(tmp_path_factory, page) -> dict:
    return look(tmp_path_factory.mktemp("phone"), page, 390)


def test_tables_are_whole_and_judged(desktop, results):
    study = Study(Results(results, "regression").load())
    tables = desktop["comparisons"]
    first, second, *rest = tables
    for table, metric in zip((first, second), METRICS, strict=True):
        assert metric.title.split()[-1].lower() in table["caption"].lower()
        assert table["columns"] == ["data", *paper.TABLE_1_METHODS]
        assert table["rows"] == len(paper.DATA) == 11
        for verdict in ("better", "within", "worse"):
            expected = sum(standing.verdict == verdict for standing in study.standings(paper.TABLE_1_METHODS, [metric]))
            assert sum(verdict in classes.split() for classes in table["verdicts"]) == expected > 0
    assert [table["columns"] for table in rest[:2]] == [["data", *paper.SUPPLEMENT_METHODS]] * 2
    assert [table["rows"] for table in rest[:2]] == [10, 10]
    assert [len(table["verdicts"]) for table in tables] == [
        table["rows"] * (len(table["columns"]) - 1) for table in tables
    ]


def test_accuracies_are_methods_by_configurations(desktop):
    (table,) = (table for table in desktop["comparisons"] if table["columns"][0] == "method")
    assert table["columns"] == ["method", *CONFIGURATIONS]
    assert table["rows"] == len(paper.TABLE_2_METHODS) + 1
    judged = [classes for classes in table["verdicts"] if {"better", "within", "worse"} & set(classes.split())]
    assert len(judged) == 16


def test_colours_differ(desktop):
    colours = desktop["backgrounds"]
    assert len(set(colours.values())) == 3
    assert "rgba(0, 0, 0, 0)" not in colours.values()


def test_figures_are_drawn(desktop):
    assert len(desktop["images"]) == 16
    for complete, *sizes in desktop["images"]:
        assert complete
        assert min(sizes) > 100


def test_summary_adds_up(desktop):
    better, within, near, far, mean, both = desktop["tiles"]
    assert sum(int(tile.split()[0]) for tile in (better, within, near, far)) == 18
    assert re.fullmatch(r"[+−]\d+\.\d\d", mean)
    assert both.endswith(" of 9")
    assert "Where it falls short" in desktop["headings"]


@pytest.mark.parametrize("name", ["desktop", "phone"])
def test_nothing_sticks_out_sideways(name, request):
    seen = request.getfixturevalue(name)
    assert seen["width"] == {"desktop": 1100, "phone": 390}[name]
    assert seen["scrollWidth"] <= seen["width"]
    assert seen["tooWide"] == []
    assert all(complete and natural > 0 for complete, natural, *_ in seen["images"])


def test_screenshot_is_not_blank(tmp_path, page):
    picture = tmp_path / "page.png"
    browse(tmp_path, page, "--window-size=1100,1400", f"--screenshot={picture}")
    image = pytest.importorskip("PIL.Image").open(picture)
    assert image.size == (1100, 1400)
    assert len(image.convert("RGB").getcolors(maxcolors=image.width * image.height)) > 50
