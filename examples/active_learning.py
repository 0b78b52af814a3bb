"""Active learning: which points of a pool to label next, against a choice by chance.

Most of the pool lies crowded in one place, as unlabelled data often does; the test points lie everywhere.
"""

import numpy as np

from noisygrad import NoisyRegressor
from noisygrad.active import suggest

TRIALS, ROUNDS, LABELS = 3, 3, 10


def surface(X):
    return np.sin(3 * X[:, 0]) + X[:, 1] ** 2


def errors(trial, choose):
    """The RMSE with 20 labels, and after each round of more of them."""
    rng = np.random.default_rng(trial)
    pool = rng.permutation(np.vstack([rng.normal(-1, 0.2, (450, 2)), rng.uniform(-2, 2, (50, 2))]))
    targets = surface(pool) + 0.05 * rng.normal(size=500)
    X_test = rng.uniform(-2, 2, (300, 2))
    labelled, found = np.arange(20), []
    for _ in range(ROUNDS + 1):
        model = NoisyRegressor(hidden=(20,), epochs=120, random_state=trial).fit(pool[labelled], targets[labelled])
        found.append(np.sqrt(np.mean((model.predict(X_test) - surface(X_test)) ** 2)))
        unlabelled = np.setdiff1d(np.arange(500), labelled)
        labelled = np.append(labelled, unlabelled[choose(model, pool[unlabelled], rng)])
    return found


choices = {
    "random": lambda model, X, rng: rng.choice(len(X), LABELS, replace=False),
    "suggest": lambda model, X, rng: suggest(model, X, LABELS).numpy(),
}
print(f"mean RMSE of {TRIALS} trials\nlabels  " + "".join(f"{20 + LABELS * k:7d}" for k in range(ROUNDS + 1)))
for name, choose in choices.items():
    means = np.mean([errors(trial, choose) for trial in range(TRIALS)], axis=0)
    print(f"{name:8s}" + "".join(f"{value:7.2f}" for value in means))
