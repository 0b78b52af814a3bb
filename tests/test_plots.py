import io

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from noisygrad import metrics, plots
from noisygrad.palette import colour_of
from noisygrad.predictions import CategoricalPrediction, RegressionPrediction


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def regression(examples: int = 30, spread: float = 0.3) -> tuple[RegressionPrediction, torch.Tensor]:
    centre = torch.linspace(-2, 2, examples)
    location = centre + spread * torch.randn(20, examples, generator=seeded())
    prediction = RegressionPrediction(location, torch.tensor(0.5), torch.tensor(12.0), event_dims=0)
    return prediction, centre + 0.5 * torch.randn(examples, generator=seeded(1))


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def render(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    return buffer.getvalue()


def test_intervals_say_the_observed_coverage():
    prediction, target = regression()
    figure = plots.predictive_intervals({"diagonal": prediction, "full": prediction}, target)
    share = 100 * metrics.interval_coverage(prediction, target, 0.9)
    assert titles(figure) == [f"{name}: {share:.0f} % of values in the 90 % interval" for name in ("diagonal", "full")]
    assert render(figure)


def test_intervals_mark_exactly_the_points_outside():
    prediction, target = regression()
    (axes,) = plots.predictive_intervals(prediction, target).axes
    low, high = prediction.interval(0.9)
    outside = int(((target < low) | (target > high)).sum())
    rings = next(c for c in axes.collections if c.get_label() == "outside 90 %")
    assert len(rings.get_offsets()) == outside


def test_function_bands_draw_bands_truth_and_data():
    prediction, _ = regression()
    x = np.linspace(0, 1, 30)
    figure = plots.function_bands(
        {"kronecker": prediction, "full": prediction}, x, observed=([0.1, 0.2], [0.0, 1.0]), truth=x
    )
    assert titles(figure) == ["kronecker", "full"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "90 % band",
        "50 % band",
        "truth",
        "mean",
        "data",
    ]
    assert render(figure)


def test_reliability_diagram_writes_the_metric():
    logits = 2 * torch.randn(1, 500, 4, generator=seeded())
    labels = torch.randint(4, (500,), generator=seeded(2))
    probs = CategoricalPrediction(logits).probs
    error = metrics.ece(probs, labels, bins=10)
    (title,) = titles(plots.reliability_diagram(probs, labels, bins=10))
    assert title == f"ECE {error:.3f}, too sure"


def test_reliability_diagram_of_several_shares_axes():
    probs = torch.softmax(torch.randn(50, 3, generator=seeded()), -1)
    figure = plots.reliability_diagram({"point": probs, "kronecker": probs}, torch.zeros(50, dtype=torch.long))
    assert len(figure.axes) == 4
    assert render(figure)


def test_reliability_of_bins_is_the_same_picture():
    probs = torch.softmax(torch.randn(80, 3, generator=seeded()), -1)
    labels = torch.randint(3, (80,), generator=seeded(2))
    bins = plots.reliability_bins(probs, labels)
    assert render(plots.reliability_of_bins({"point": bins})) == render(
        plots.reliability_diagram({"point": probs}, labels)
    )
    assert bins.share.sum() == pytest.approx(1.0)


def test_reliability_panels_go_in_rows_with_colours_of_choice():
    bins = plots.reliability_bins(torch.eye(3), torch.arange(3), bins=5)
    figure = plots.reliability_of_bins(dict.fromkeys("abc", bins), colours={"a": "#123456"}, columns=2)
    tops = figure.axes[:2] + figure.axes[4:6]
    assert [axes.get_visible() for axes in tops] == [True, True, True, False]
    assert {axes.get_title(loc="left")[0] for axes in tops[:3]} == set("abc")
    assert matplotlib.colors.to_hex(tops[0].patches[0].get_facecolor()) == "#123456"


def test_certain_and_right_is_calibrated():
    labels = torch.arange(4)
    (title,) = titles(plots.reliability_diagram(torch.eye(4), labels))
    assert title == "ECE 0.000, calibrated"


def test_coverage_plot_equals_the_intervals_coverage():
    prediction, target = regression(200)
    levels = (0.2, 0.5, 0.9)
    (axes,) = plots.coverage_plot({"full": prediction}, target, levels=levels).axes
    line = next(line for line in axes.lines if line.get_label() == "full")
    expected = [metrics.interval_coverage(prediction, target, level) for level in levels]
    np.testing.assert_allclose(line.get_ydata(), expected)


def test_precision_matrices_are_normalised_on_one_scale():
    root = torch.randn(6, 6, generator=seeded()).double()
    matrix = root @ root.T + torch.eye(6)
    figure = plots.precision_matrices({"full": matrix, "twice": 2 * matrix}, layers={"layer 1": 4, "layer 2": 2})
    first, second = (axes.images[0] for axes in figure.axes[:2])
    np.testing.assert_allclose(first.get_array(), second.get_array())
    np.testing.assert_allclose(np.diagonal(first.get_array()), 1.0)
    scale = matrix[0, 0].sqrt() * matrix[1, 1].sqrt()
    assert first.get_array()[0, 1] == pytest.approx(float(matrix[0, 1].abs() / scale))
    assert first.get_clim() == second.get_clim() == (0.0, 1.0)
    assert render(figure)


def test_learning_curve_names_its_lines():
    (axes,) = plots.learning_curve({"point": [3.0, 2.0, 1.0], "full": [2.0, 1.0, 0.5]}, label="loss").axes
    assert [line.get_label() for line in axes.lines] == ["point", "full"]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.precision_matrices({"a": torch.ones(2, 3)}), "square"),
        (lambda: plots.precision_matrices({"a": torch.zeros(2, 2)}), "not positive"),
        (lambda: plots.precision_matrices({"a": torch.eye(3)}, layers={"one": 2}), "2 weights"),
        (lambda: plots.precision_matrices({}), "nothing to draw"),
        (lambda: plots.predictive_intervals(regression()[0], torch.zeros(3)), "expected 30"),
        (lambda: plots.reliability_diagram(torch.ones(3), torch.zeros(3)), r"\[examples, classes\]"),
        (lambda: plots.reliability_diagram(torch.eye(3), torch.zeros(3), bins=0), "at least 1"),
        (lambda: plots.reliability_of_bins({}), "nothing to draw"),
        (
            lambda: plots.ReliabilityBins(share=np.ones(2), confidence=np.ones(2), accuracy=np.ones(3)),
            "one share, confidence and accuracy",
        ),
    ],
)
def test_mistakes_are_explained(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_style_of_the_caller_is_left_alone_and_not_used():
    before = dict(matplotlib.rcParams)
    expected = render(plots.learning_curve({"full": [1.0, 2.0]}))
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        figure = plots.learning_curve({"full": [1.0, 2.0]})
    assert render(figure) == expected


def test_no_figure_is_kept():
    import matplotlib.pyplot as plt

    plots.learning_curve({"full": [1.0, 2.0]})
    assert plt.get_fignums() == []


def test_each_posterior_has_its_own_colour():
    names = ("point", "diagonal", "kronecker", "tridiagonal", "full")
    assert len({colour_of(name) for name in names}) == len(names)
