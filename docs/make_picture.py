"""Draws `docs/assets/demo.png`: a function of one variable, learned from forty points with a gap, by four posteriors.

Run it from anywhere: `python docs/make_picture.py`. The same picture comes out every time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from noisygrad import plots
from noisygrad.estimators import NoisyRegressor
from noisygrad.predictions import RegressionPrediction

FAMILIES = ("diagonal", "kronecker", "tridiagonal", "full")
PICTURE = Path(__file__).parent / "assets" / "demo.png"


def truth(x: np.ndarray) -> np.ndarray:
    """What is to be learned."""
    return np.sin(1.6 * x) + 0.25 * x


def main() -> None:
    """Fit, draw, write."""
    torch.set_num_threads(1)
    random = np.random.default_rng(3)
    x = np.concatenate([random.uniform(-3.0, -0.9, 20), random.uniform(1.1, 3.0, 20)])
    y = truth(x) + random.normal(0.0, 0.15, x.size)
    grid = np.linspace(-4.2, 4.2, 240)

    def predicted(family: str) -> RegressionPrediction:
        model = NoisyRegressor(
            posterior=family, hidden=(50,), epochs=1500, prior_variance=4.0, num_samples=300, random_state=0
        )
        return model.fit(x[:, None], y).predict_distribution(grid[:, None])

    figure = plots.function_bands(
        {family: predicted(family) for family in FAMILIES}, grid, observed=(x, y), truth=truth(grid)
    )
    for axes in figure.axes:
        axes.set_ylim(-4, 4)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
