"""How near the Fisher is to what `NoisyEKFAC` keeps, beside the Kronecker product of the same moments.

After 50 steps of training, with moving averages and bases of some steps ago, the distance in Frobenius norm of every
layer's block to its exact Fisher at the mean, over all examples: of R in the eigenbasis, and of S ⊗ A. That R is nearer
is a theorem only for the examples that basis and R are both of.

    python benchmarks/eigen_fisher.py --networks 50 --output results/eigen-fisher.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import noisygrad as ng
from noisygrad.families.factors import kronecker_product
from noisygrad.versions import versions

EXAMPLES, CLASSES, BATCH, STEPS = 64, 3, 16, 50
NUM_DATA = 50_000
"""So many that draws are near the mean, where the exact Fisher is taken."""
MEASURE_EVERY, REFRESH_EVERY = 1, 10


def perceptron(seed: int) -> tuple[nn.Module, Tensor]:
    """Linear layers on rows: no weight is shared."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    return model.double(), torch.randn(EXAMPLES, 5).double()


def convolutions(seed: int) -> tuple[nn.Module, Tensor]:
    """Convolutions: every weight is used at each position."""
    torch.manual_seed(seed)
    body = [nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(3, CLASSES)).double(), torch.randn(EXAMPLES, 2, 9).double()


NETWORKS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "without weight sharing": perceptron,
    "with weight sharing": convolutions,
}


def exact_fisher(model: nn.Module, x: Tensor, layer: str) -> Tensor:
    """The Fisher of one layer's [W | b], row by row, averaged over the examples."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def log_probs(own: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, {**parameters, **own}, (example[None],)).log_softmax(-1)[0]

    own = {name: parameters[name] for name in (f"{layer}.weight", f"{layer}.bias")}
    rows = vmap(jacrev(log_probs), (None, 0))(own, x)
    weight, bias = rows[f"{layer}.weight"].flatten(3), rows[f"{layer}.bias"]
    gradients = torch.cat([weight, bias[..., None]], dim=-1).flatten(2)
    probs = functional_call(model, parameters, (x,)).softmax(-1)
    return torch.einsum("bk,bki,bkj->ij", probs, gradients, gradients) / len(x)


def distances(make: Callable[[int], tuple[nn.Module, Tensor]], seed: int) -> Tensor:
    """For each layer, `[layers, 3]`: squared distances of R in its basis and of S ⊗ A; the Fisher's squared size."""
    model, x = make(seed)
    y = torch.randint(CLASSES, (EXAMPLES,))
    optimizer = ng.NoisyEKFAC(
        model,
        ng.Categorical(),
        num_data=NUM_DATA,
        lr=0.05,
        stats_every=MEASURE_EVERY,
        factor_every=REFRESH_EVERY,
        fisher_decay=0.95,
        seed=seed,
    )
    for _ in range(STEPS):
        rows = torch.randint(EXAMPLES, (BATCH,))
        optimizer.step(lambda rows=rows: (model(x[rows]), y[rows]))
    posterior, found = optimizer.posterior(), []
    units = posterior.kl_weight / posterior.num_data
    for block in posterior.structure.blocks:
        statistics = posterior.statistics[block.name]
        prior = posterior.priors.blocks[block.name].scaled(units)
        # Of (L ⊗ V) with prior precision Γ: P = F̄ + Γ, and P comes as a dense matrix.
        fisher = statistics.factorise(prior).to_dense() - kronecker_product(*prior.matrices())
        product = kronecker_product(statistics.outputs, statistics.inputs)
        truth = exact_fisher(model, x, block.name)
        found.append([float(one.square().sum()) for one in (fisher - truth, product - truth, truth)])
    return torch.tensor(found)


def main() -> None:
    """Measure, print and perhaps keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=50, help="of each kind")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    chosen = parser.parse_args()
    report: dict[str, object] = {}
    for kind, make in NETWORKS.items():
        found = torch.stack([distances(make, seed) for seed in range(chosen.networks)])  # [networks, layers, 3]
        networks = found.sum(1)
        relative = (networks[:, :2] / networks[:, 2:]).sqrt().mean(0)
        report[kind] = {
            "networks": chosen.networks,
            "share of networks nearer": float((networks[:, 0] < networks[:, 1]).double().mean()),
            "share of layers nearer": float((found[..., 0] < found[..., 1]).double().mean()),
            "mean relative distance": float(relative[0]),
            "mean relative distance of the Kronecker product": float(relative[1]),
        }
        print(kind, json.dumps(report[kind]))
    if chosen.output is not None:
        settings = {"steps": STEPS, "batch": BATCH, "stats_every": MEASURE_EVERY, "factor_every": REFRESH_EVERY}
        command = f"python benchmarks/eigen_fisher.py --networks {chosen.networks}"
        kept = {"command": command, "settings": settings, "versions": versions(), "found": report}
        chosen.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
