"""Draws `docs/assets/demo.png`: a function of one variable, learned by four posteriors from points with a gap.

Run it from anywhere: `python docs/make_picture.py`. It takes a minute, and the same picture comes out every time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import noisygrad as ng
from noisygrad import plots
from noisygrad.networks import MLP
from noisygrad.training import CosineDecay, train

OPTIMIZERS = {
    "diagonal": ng.NoisyAdam,
    "kronecker": ng.NoisyKFAC,
    "tridiagonal": ng.NoisyBlockTridiagonal,
    "full": ng.NoisyFull,
}
PICTURE = Path(__file__).parent / "assets" / "demo.png"
NOISE = 0.15
STEPS = 2000


def truth(x: np.ndarray) -> np.ndarray:
    """What is to be learned."""
    return np.sin(1.6 * x) + 0.25 * x


def column(values: np.ndarray) -> Tensor:
    """As the network takes it."""
    return torch.tensor(values, dtype=torch.float32)[:, None]


def predicted(optimizer_type: type[ng.NoisyOptimizer], x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> ng.Prediction:
    """What the posterior of one family says of the grid."""
    model = MLP(1, (30,), 1, "tanh", generator=torch.Generator().manual_seed(0))
    optimizer = optimizer_type(
        model,
        ng.Gaussian(noise_variance=NOISE**2),
        num_data=len(x),
        lr=0.1,
        prior_variance=2.0,
        kl_clip=1e-3,
        mc_samples=4,
        stats_every=1,
        factor_every=2,
        seed=0,
    )
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, CosineDecay(1.0, STEPS, final=0.01))
    train(optimizer, (column(x), column(y)), epochs=STEPS, scheduler=decay, seed=0, progress=False)
    return optimizer.posterior().predict(column(grid), 400, generator=torch.Generator().manual_seed(0))


def main() -> None:
    """Fit, draw, write."""
    torch.set_num_threads(1)
    random = np.random.default_rng(3)
    x = np.concatenate([random.uniform(-3.0, -0.9, 30), random.uniform(1.1, 3.0, 30)])
    y = truth(x) + random.normal(0.0, NOISE, x.size)
    grid = np.linspace(-3.5, 3.5, 240)
    predictions = {family: predicted(optimizer, x, y, grid) for family, optimizer in OPTIMIZERS.items()}
    figure = plots.function_bands(predictions, grid, observed=(x, y), truth=truth(grid))
    figure.axes[0].set_ylim(-2.2, 3.4)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
