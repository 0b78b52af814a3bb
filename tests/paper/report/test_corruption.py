"""What corrupted images do, in a table."""

from noisygrad_paper.report.calibration import corruption_table
from support.made_results import classified, study_of


def test_corruption_is_compared_at_its_greatest_strength():
    def spoilt(method, ece):
        figures = {"noise_accuracy": [80.0, 60.0, 30.0], "noise_ece": [0.0, 0.1, ece], "accuracy": 90.0}
        return classified(method, 0, figures)

    table = corruption_table(study_of(spoilt("K-FAC/D", 0.5), spoilt("noisy-K-FAC/D", 0.2)), "cifar10")
    (row,) = table.rows
    assert dict(row) == {
        "configuration": "D",
        "corruption": "Gaussian noise",
        "K-FAC accuracy": 30.0,
        "K-FAC ece": 0.5,
        "noisy-K-FAC accuracy": 30.0,
        "noisy-K-FAC ece": 0.2,
    }
    assert corruption_table(study_of(spoilt("K-FAC/D", 0.5)), "cifar10") is None
