"""A place of a comparison table: our figure over the paper's, what is missing of it, and how the two stand."""

from noisygrad_paper.report.comparison import Metric, signed
from noisygrad_paper.report.comparison_table import Entry
from noisygrad_paper.report.study import Standing, Study


def entry(
    study: Study,
    method: str,
    data: str,
    metric: Metric,
    expected: int | None,
    replicates: str = "splits",
    digits: int | None = None,
) -> Entry:
    """Ours and the paper's of one method on one data set; `expected` replicates, or None for as many as there are."""
    ours, standing = study.estimate(method, data, metric), study.standing(method, data, metric)
    theirs = "" if standing is None else f"paper {standing.theirs.text()}"
    failed = sum(cell.error is not None for cell in study.of(method, data))
    if ours is None:
        return Entry(theirs=theirs, note=f"{failed} failed" if failed else "")
    count = len(study.values(method, data, metric))
    wanted = count + failed if expected is None else expected
    notes = [f"{count} of {wanted} {replicates}"] * (count < wanted) + [f"{failed} failed"] * bool(failed)
    return Entry(
        ours=ours.text(digits),
        theirs=theirs,
        verdict=None if standing is None else standing.verdict,
        tooltip="" if standing is None else _tooltip(standing),
        note=", ".join(notes),
    )


def _tooltip(standing: Standing) -> str:
    if standing.difference is not None and standing.metric.tolerance is not None:
        return f"ours minus the paper's: {signed(standing.difference)} {standing.metric.unit}"
    if standing.difference is None:
        return "without two standard errors the difference cannot be judged"
    side = "better" if standing.difference > 0 else "worse"
    return (
        f"z = {signed(standing.difference)}: ours is {side} by {abs(standing.difference):.2f} standard errors of the "
        "difference"
    )
