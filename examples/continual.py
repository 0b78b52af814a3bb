"""Continual learning: the posterior of one task is the prior of the next."""

import torch
from sklearn.datasets import load_digits

import noisygrad as ng

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, test = torch.arange(1400), torch.arange(1400, len(x))
tasks = [y < 5, y >= 5]


def accuracy(posterior, task):
    chosen = test[task[test]]
    return ng.metrics.accuracy(posterior.predict(x[chosen], num_samples=30), y[chosen])


for remember in (False, True):
    model = torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))
    prior = None
    for task in tasks:
        chosen = train[task[train]]
        optimizer = ng.NoisyKFAC(
            model, ng.Categorical(), num_data=len(chosen), lr=0.1, kl_clip=1e-3, factor_every=20, prior=prior, seed=0
        )
        ng.train(optimizer, (x[chosen], y[chosen]), epochs=20, batch_size=50, seed=0, progress=False)
        posterior = optimizer.posterior()
        prior = posterior.as_prior() if remember else None
    first, second = (accuracy(posterior, task) for task in tasks)
    name = "with the posterior as prior" if remember else "with a fresh prior"
    print(f"{name}: accuracy on the digits 0-4 {first:.2f}, on the digits 5-9 {second:.2f}")
