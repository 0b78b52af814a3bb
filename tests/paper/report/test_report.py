import base64
import io
import os
import re
import stat
import xml.etree.ElementTree

import pytest
import rich.console

from noisygrad import plots
from noisygrad.palette import INK, ON_DARK
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report.comparison_table import ComparisonTable, Entry
from noisygrad_paper.report.markdown import markdown
from noisygrad_paper.report.page import ReportPage
from support.pages import Checker, check_stands_alone


def example_table() -> Table:
    columns = (
        Column(key="method", header="posterior"),
        Column(key="ll", header="log-lik.", unit="nats", digits=2, best="highest"),
        Column(key="rmse", header="RMSE", digits=1, best="lowest"),
        Column(key="coverage", header="inside", unit="%", digits=0, best=90.0),
    )
    rows = [
        {"method": "point", "ll": -3.0, "rmse": 2.04, "coverage": 70.0},
        {"method": "<full>", "ll": -1.5, "rmse": 1.96, "coverage": 92.0},
        {"method": "other", "ll": None, "rmse": 3.0, "coverage": 99.0},
    ]
    return Table(columns=columns, rows=rows, caption="Results & more")


def example_page() -> ReportPage:
    figure = plots.learning_curve({"full": [2.0, 1.0]})
    return (
        ReportPage("A <title>", lead="In short.", footer="The end.")
        .section("First")
        .text("x < y & z")
        .table(example_table())
        .figure(figure, caption="It falls.", alt="A curve that falls from two to one.")
        .section("Second")
        .pairs({"seed": 0}, caption="Settings")
    )


def test_page_stands_alone():
    page = check_stands_alone(example_page().html())
    assert len(page.all("section")) == 2
    assert len(page.all("img")) == 1
    assert page.all("html")[0]["lang"] == "en"
    assert "A <title>" in page.texts
    assert "x < y & z" in page.texts


def test_page_is_the_same_every_time():
    assert example_page().html() == example_page().html()


def test_images_are_valid_and_follow_the_colour_scheme():
    page = Checker(example_page().html())
    (image,), (source,) = page.all("img"), page.all("source")
    light, dark = (
        base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")).decode()
        for uri in (image["src"], source["srcset"])
    )
    for text in (light, dark):
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    assert INK in light
    assert INK not in dark
    assert ON_DARK[INK] in dark


def test_table_marks_the_best_of_what_is_shown():
    text = example_table().html()
    marked = re.findall(r"<strong[^>]*>(.*?)</strong>", text)
    assert marked == ["2.0", "\N{MINUS SIGN}1.50", "2.0", "92"]  # 2.04 and 1.96 read the same
    assert "&lt;full&gt;" in text
    assert '<td class="number">–</td>' in text
    assert '<span class="unit">nats</span>' in text


def test_table_on_a_terminal_has_the_same_numbers():
    console = rich.console.Console(width=80, record=True, file=io.StringIO())
    console.print(example_table().rich())
    text = console.export_text()
    for shown in ("<full>", "−1.50", "92", "log-lik. (nats)", "–"):
        assert shown in text


def test_table_for_the_documentation_has_the_same_numbers():
    assert markdown(example_table()) == (
        "| posterior | log-lik. (nats) | RMSE | inside (%) |\n"
        "| --- | --- | --- | --- |\n"
        "| point | −3.00 | **2.0** | 70 |\n"
        "| &lt;full&gt; | **−1.50** | **2.0** | **92** |\n"
        "| other | – | 3.0 | 99 |\n"
    )


def test_comparison_for_the_documentation_has_marks_and_a_legend():
    known = Entry(ours="2.9", theirs="paper 3.0", verdict="better", note="2 of 3 splits")
    rows = {"a|b": [known, Entry()]}
    text = ComparisonTable(columns=("A", "B"), rows=rows, caption="", meanings={"better": "ours is"}).markdown()
    assert text == (
        "| data | A | B |\n| --- | --- | --- |\n"
        "| a&#124;b | 2.9 ▲<br>*paper 3.0*<br>*2 of 3 splits* | – |\n\n▲ ours is\n"
    )
    unjudged = ComparisonTable(columns=("A",), rows={"a": [Entry(ours="1")]}, caption="").markdown()
    assert unjudged == "| data | A |\n| --- | --- |\n| a | 1 |\n"


def test_write_replaces_the_whole_file_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    page = example_page()

    def fail(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", fail)
        with pytest.raises(KeyboardInterrupt):
            page.write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    page.write(path)
    assert path.read_text(encoding="utf-8") == page.html()
    assert list(tmp_path.iterdir()) == [path]
    if os.name == "posix":
        mask = os.umask(0)
        os.umask(mask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="section"):
        ReportPage("Title").text("too early")
    with pytest.raises(ValueError, match="alt is empty"):
        ReportPage("Title").section("One").figure(plots.learning_curve({"full": [1.0]}), caption="", alt=" ")
    with pytest.raises(ValueError, match="no best value"):
        Column(key="a", header="A", best="lowest")
    with pytest.raises(ValueError, match="no rows"):
        Table(columns=(Column(key="a", header="A"),), rows=[], caption="Empty")
