"""Coverage is total: every entry of every trainable parameter lies in one block, with its own prior, and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import noisygrad as ng
from noisygrad.families import dense
from noisygrad.networks import ReplicatedMLP
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import Structure, build_structure
from noisygrad.posterior.weights import FlatWeights, parameter_order
from noisygrad_paper.networks import VGG16
from support.truth import FAMILIES, OPTIMIZERS, Model, close, normal


def residual() -> nn.Module:
    return Model(
        lambda m, x: m.head(torch.relu(m.b1(m.c1(x)) + m.skip(x)).mean((-2, -1))),
        c1=nn.Conv2d(3, 4, 3, padding=1, bias=False),
        b1=nn.BatchNorm2d(4),
        skip=nn.Conv2d(3, 4, 1),
        head=nn.Linear(4, 2),
    )


def loose() -> nn.Module:
    model = Model(lambda m, x: m.a(x) * m.scale + m.table[0], a=nn.Linear(3, 2))
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.table = nn.Parameter(torch.ones(2, 2, 1))
    return model


def tied() -> nn.Module:
    model = Model(lambda m, x: m.head(m.body(m.e(x))), e=nn.Embedding(5, 3), body=nn.Linear(3, 3), head=nn.Linear(3, 5))
    model.head.weight = model.e.weight
    return model


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 2)),
    "vgg": lambda: VGG16(width=0.05, batch_norm=True),
    "residual": residual,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False),
    "lstm": lambda: nn.Sequential(nn.LSTM(3, 2, num_layers=2, bidirectional=True), nn.Linear(4, 1)),
    "loose": loose,
    "tied": tied,
    "grouped": lambda: nn.Sequential(
        nn.Conv2d(4, 6, (3, 2), groups=2), nn.Conv2d(6, 6, 3, groups=6), nn.Conv1d(3, 2, 1)
    ),
    "attention": lambda: nn.ModuleList(
        [nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True), nn.Linear(4, 1)]
    ),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm((2, 3)), nn.RMSNorm(3), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2, affine=True)
    ),
    "frozen": partly_frozen,
    "one weight": lambda: nn.Linear(1, 1),
}


def flat_of(structure: Structure) -> FlatWeights:
    return FlatWeights.zeros(structure, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODELS)
def test_every_entry_lies_in_exactly_one_block(name: str, family: str) -> None:
    model = MODELS[name]().double()
    structure = build_structure(model, family)
    wanted = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in wanted)
    order = parameter_order(structure)
    assert structure.size == count
    assert sorted(order.tolist()) == list(range(count))
    covered = sorted(i for b in structure.blocks for i in b.vector(torch.arange(count)).flatten().tolist())
    assert covered == list(range(count))

    # The parameters numbered in torch's own order, and through the flat vector.
    vector_to_parameters(torch.arange(count, dtype=torch.float64), wanted)
    flat = flat_of(structure)
    flat.read_parameters_()
    close(flat.flat[order], torch.arange(count, dtype=torch.float64), rtol=0, atol=0)
    assert sorted(flat.flat.tolist()) == list(range(count))
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    flat.flat.add_(1.0)
    with torch.no_grad():
        flat.write_parameters_()
    close(parameters_to_vector(wanted).detach(), torch.arange(1.0, count + 1, dtype=torch.float64), rtol=0, atol=0)
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())
    assert all(torch.equal(flat.as_dict()[n], p) for n, p in structure.parameters.items())
    again = flat_of(structure)
    again.load_dict_(flat.as_dict())
    assert torch.equal(again.flat, flat.flat)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["mlp", "grouped", "attention", "loose", "norms", "frozen"])
def test_block_vectors_are_read_and_written_alike(name: str, family: str) -> None:
    structure = build_structure(MODELS[name](), family)
    flat = torch.randn(structure.size)
    back = torch.zeros_like(flat)
    for block in structure.blocks:
        block.write_(back, block.vector(flat))
    assert torch.equal(back, flat)


def test_a_matrix_block_is_weight_and_bias_side_by_side() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Linear(3, 2)).double()
    structure = build_structure(model, "kronecker")
    flat = flat_of(structure)
    flat.read_parameters_()
    conv, linear = (block.vector(flat.flat) for block in structure.blocks)
    run_in_threads = torch.cat([model[0].weight.flatten(1), model[0].bias[:, None]], dim=1)
    close(conv, run_in_threads.reshape(2, -1).detach())
    close(linear, torch.cat([model[1].weight, model[1].bias[:, None]], dim=1).flatten().detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODELS)
def test_coverage_lists_every_parameter(name: str, family: str) -> None:
    model = MODELS[name]()
    rows = build_structure(model, family).coverage().rows
    found = {row[0].partition("[")[0] for row in rows}
    assert found == {n for n, _ in model.named_parameters()}
    assert {row[0] for row in rows if row[2] == "frozen"} == {
        n for n, p in model.named_parameters() if not p.requires_grad
    }
    assert all(row[1] and row[2] and row[3] for row in rows)


def test_coverage_says_why() -> None:
    def why(name: str, family: str) -> dict[str, str]:
        return {row[0]: f"{row[2]} {row[3]}" for row in build_structure(MODELS[name](), family).coverage().rows}

    assert "shared by e.weight, head.weight" in why("tied", "kronecker")["e.weight"]
    assert why("tied", "kronecker")["body.weight"].startswith("kronecker")
    assert "no structure known for LSTM" in why("lstm", "kronecker")["0.weight_ih_l0"]
    assert "diagonal" in why("residual", "kronecker")["b1.weight"]
    assert "coupling zero" in why("residual", "tridiagonal")["head.weight"]
    assert "coupled with 0" in why("mlp", "tridiagonal")["2.weight"]
    assert "no structure known for this parameter" in why("attention", "kronecker")["0.bias_k"]
    assert "requires_grad is False" in why("frozen", "full")["0.weight"]
    assert "no noise" in str(
        OPTIMIZERS["kronecker"](MODELS["mlp"](), ng.Gaussian(), num_data=1, groups={"4.*": {"noise": False}}).coverage()
    )


class Pooled(nn.Module):
    """Linear layers before and after a mean over positions, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))).mean(1))


def test_coverage_says_which_couplings_are_zero_once_that_is_known(tmp_path: Path) -> None:
    def notes(fit: ng.NoisyOptimizer | ng.Posterior) -> dict[str, str]:
        return {row[0].removesuffix(".weight"): row[3] for row in fit.coverage().rows if row[0].endswith("weight")}

    model = Pooled().double()
    optimizer = ng.NoisyBlockTridiagonal(model, ng.Gaussian(), num_data=9)
    assert notes(optimizer) == {
        "a": "Linear",
        "b": "Linear, coupled with a",
        "c": "Linear, coupled with b",
        "d": "Linear, coupled with c",
    }
    optimizer.step(lambda: (model(normal(6, 5, 3)), normal(6, 2)))
    known = {
        "a": "Linear",
        "b": "Linear, coupled with a",
        "c": "Linear, not coupled with b: never seen at the same positions",
        "d": "Linear, not coupled with c: never seen at the same positions",
    }
    assert notes(optimizer) == known
    optimizer.posterior().save(tmp_path / "p")
    assert notes(ng.load_posterior(tmp_path / "p", Pooled().double())) == known


def test_only_consecutive_linear_layers_are_chained() -> None:
    def chains(model: nn.Module) -> list[list[str]]:
        blocks = build_structure(model, "tridiagonal").blocks
        return [[u.name for u in b.units] for b in blocks if b.family.name == "tridiagonal"]

    linear = nn.Linear
    assert chains(MODELS["mlp"]()) == [["0", "2", "4"]]
    assert chains(nn.Sequential(linear(2, 2), linear(2, 2), nn.Conv1d(2, 2, 1), linear(2, 2), linear(2, 2))) == [
        ["0", "1"],
        ["3", "4"],
    ]
    assert chains(nn.Sequential(linear(2, 2), nn.Embedding(3, 2), linear(2, 2))) == []
    assert chains(nn.Sequential(linear(2, 2), nn.LayerNorm(2), linear(2, 2))) == [["0", "2"]]


def prior_in_parameter_order(optimizer: ng.NoisyOptimizer) -> Tensor:
    """The dense prior precision, from each block's product with unit vectors."""
    structure: Structure = optimizer.structure
    dense = torch.zeros(structure.size, structure.size, dtype=torch.float64)
    for index in range(structure.size):
        unit = torch.zeros(structure.size, dtype=torch.float64)
        unit[index] = 1.0
        for block in structure.blocks:
            out = torch.zeros_like(unit)
            block.write_(out, optimizer.priors.blocks[block.name].times(block.vector(unit)))
            dense[:, index] += out
    order = parameter_order(structure)
    return dense[order][:, order]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["mlp", "residual", "transformer", "loose", "tied", "grouped", "attention", "frozen"])
def test_each_parameter_has_its_own_prior(name: str, family: str) -> None:
    model = MODELS[name]().double()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    variances = {n: 0.5 + i for i, n in enumerate(names)}
    optimizer = OPTIMIZERS[family](model, ng.Gaussian(), num_data=10, prior_variance=variances)
    shares = [p.new_full((p.numel(),), 1 / variances[n]) for n, p in model.named_parameters() if p.requires_grad]
    expected = torch.cat(shares)
    close(prior_in_parameter_order(optimizer), torch.diag(expected))
    # And in units of the Fisher, λ/N times it, in what the optimiser adds to the gradient.
    added = optimizer.covariance.add_prior_gradient_(
        torch.zeros(optimizer.structure.size, dtype=torch.float64),
        torch.ones(optimizer.structure.size, dtype=torch.float64),
        None,
    )
    close(added[parameter_order(optimizer.structure)], expected / 10)


def test_the_first_pattern_counts_and_all_must_match() -> None:
    options = {"num_data": 10, "prior_variance": {"0.bias": 3.0, "*.bias": 2.0, "*": 1.0}}
    optimizer = ng.NoisyKFAC(MODELS["mlp"]().double(), ng.Gaussian(), **options)
    by_parameter = prior_in_parameter_order(optimizer).diagonal().reciprocal()
    close(by_parameter, torch.tensor([1.0] * 12 + [3.0] * 4 + [1.0] * 4 + [2.0] + [1.0] * 2 + [2.0] * 2).double())
    with pytest.raises(ValueError, match=r"no pattern for parameter '0\.weight'"):
        ng.NoisyKFAC(MODELS["mlp"](), ng.Gaussian(), num_data=10, prior_variance={"*.bias": 2.0})
    with pytest.raises(ValueError, match="must be positive"):
        ng.NoisyKFAC(MODELS["mlp"](), ng.Gaussian(), num_data=10, prior_variance={"*": -1.0})


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_of_norms_are_centred_on_one(family: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3),
        nn.SyncBatchNorm(3), nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 2),
    )  # fmt: skip
    structure = build_structure(model, family)
    means = BlockPriors.build(structure, 1.0, None, torch.float64, torch.device("cpu")).mean
    centres = FlatWeights(structure, means).as_dict()
    for name, centre in centres.items():
        norm = name.endswith("weight") and name.split(".")[0] not in {"0", "7"}
        assert torch.equal(centre, torch.full_like(centre, float(norm))), name


def test_groups() -> None:
    model = MODELS["mlp"]()
    optimizer = ng.NoisyKFAC(
        model, ng.Gaussian(), num_data=10, lr=0.1, groups={"2.*": {"lr": 0.5}, "4.*": {"noise": False, "damping": 1.0}}
    )
    assert [(g["lr"], g["noise"], g["damping"]) for g in optimizer.param_groups] == [
        (0.1, True, 0.0),
        (0.5, True, 0.0),
        (0.1, False, 1.0),
    ]
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [
        [id(p) for p in model[i].parameters()] for i in (0, 2, 4)
    ]
    parts = [optimizer.structure.group_part(i) for i in range(3)]
    assert [(p.start, p.stop) for p in parts] == [(0, 16), (16, 21), (21, 25)]
    # Only the group's own parameters move with its learning rate.
    before = copy.deepcopy(model)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[2]["lr"] = 0.0
    optimizer.step(lambda: (model(torch.randn(6, 3)), torch.randn(6, 2)))
    moved = [not torch.equal(model[i].bias, before[i].bias) for i in (0, 2, 4)]
    assert moved == [False, True, False]


def test_group_mistakes() -> None:
    def make(groups: dict) -> ng.NoisyOptimizer:
        return ng.NoisyKFAC(MODELS["mlp"](), ng.Gaussian(), num_data=10, groups=groups)

    with pytest.raises(ValueError, match=r"'head\.\*' in groups matches no"):
        make({"head.*": {"lr": 1.0}})
    with pytest.raises(ValueError, match=r"layer '0' share one block but fall into different groups"):
        make({"0.bias": {"lr": 1.0}})
    with pytest.raises(ValueError, match="unknown options"):
        make({"0.*": {"rate": 1.0}})


def test_structure_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        build_structure(nn.ReLU(), "diagonal")
    monkeypatch.setattr(dense, "LARGEST", 10)
    with pytest.raises(ValueError, match="NoisyKFAC"):
        build_structure(MODELS["mlp"](), "full")
    build_structure(MODELS["mlp"](), "kronecker")
    with pytest.raises(ValueError, match="same replicas"):
        build_structure(nn.Sequential(ReplicatedMLP((2,), 2, (3,), 1), nn.Linear(1, 1)), "diagonal")
