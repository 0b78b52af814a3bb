"""The page of `noisygrad report`: every experiment found among the results, beside the paper's figures."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from noisygrad.versions import versions
from noisygrad_paper.experiments.cells import NAME, Results, ResultsError
from noisygrad_paper.report import classification, convergence, exploration, few_labels, precision, regression
from noisygrad_paper.report.page import ReportPage

Sections: TypeAlias = Callable[[Path, ReportPage], None]

SECTIONS: dict[str, Sections] = {
    "regression": regression.sections,
    "classification": classification.sections,
    "few labels": few_labels.sections,
    "exploration": exploration.sections,
    "convergence": convergence.sections,
    "precision matrices": precision.sections,
}
"""Each adds what it finds in the folder of results; where its files are missing, it says what makes them."""


def build_report(results: Path) -> ReportPage:
    """One page from a folder of results; the same results give the same page.

    Raises ValueError, or OSError, that says which results cannot be shown and why.
    """
    if not results.is_dir():
        raise FileNotFoundError(
            f"there is no folder of results at {results}: make one with `noisygrad reproduce regression`, "
            "or name the folder that holds your results"
        )
    page = ReportPage(
        "Noisy natural gradient, reproduced",
        lead="Our figures beside those of the paper “Noisy Natural Gradient as Variational Inference”: each with its "
        "spread, and whether ours is better, as good within the margin that the table names, or worse.",
        footer=f"Made by noisygrad {versions()['noisygrad']}: noisygrad report",
    )
    for name, add in SECTIONS.items():
        try:
            add(results, page)
        except ResultsError:
            raise  # which says where it is
        except ValueError as reason:
            raise ValueError(f"the results of {name} in {results} cannot be shown: {reason}") from reason
    _add_bad_lines(results, page)
    return page


def _add_bad_lines(results: Path, page: ReportPage) -> None:
    """Lines of results that are cut off or damaged, where there are any: nothing above counts them."""
    names = sorted(path.stem for path in results.glob("*.jsonl") if path.is_file() and NAME.fullmatch(path.stem))
    stored = (Results(results, name) for name in names)
    if complaints := [complaint for each in stored if (complaint := each.complaint())]:
        page.section("Lines that cannot be read").items(complaints)
