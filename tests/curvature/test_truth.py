"""Levels 1 and 2: measured statistics equal the exact Fisher wherever theory says so. Nothing random unless said."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.posterior.structure import build_structure
from noisygrad.posterior.weights import parameter_order
from support.truth import (
    FAMILIES,
    OPTIMIZERS,
    Model,
    close,
    dense_fisher,
    exact_fisher,
    measure,
    measured_fisher,
    normal,
    per_example_gradients,
    random_weights,
)

SMALL_NOISE = 0.7


def gaussian() -> ng.Gaussian:
    likelihood = ng.Gaussian(noise_variance=SMALL_NOISE)
    likelihood.bind((), "cpu", torch.float64)
    return likelihood


def tokens(*shape: int) -> Tensor:
    return torch.randint(6, shape, generator=torch.Generator().manual_seed(3))


def attention(run: Callable[[nn.Module, Tensor], Tensor], **options: object) -> Model:
    return Model(run, a=nn.MultiheadAttention(4, 2, **options))


def itself(m: nn.Module, x: Tensor, **masks: Tensor) -> Tensor:
    return m.a(x, x, x, **masks)[0]


def sequence_first(m: nn.Module, x: Tensor) -> Tensor:
    return itself(m, x.transpose(0, 1)).transpose(0, 1)


def other_lengths(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x[:, :2], x[:, 1:], x[:, 1:])[0]


def other_widths(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x[:, :2], x[..., :3], x[..., 1:3])[0]


def padded(m: nn.Module, x: Tensor) -> Tensor:
    last = torch.zeros(x.shape[:2], dtype=torch.bool)
    last[:, -1] = True
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return itself(m, x, key_padding_mask=last, attn_mask=later, need_weights=False)


def evaluated(norm: nn.Module, channels: int) -> nn.Module:
    norm.running_mean.copy_(normal(channels, seed=5))
    norm.running_var.copy_(normal(channels, seed=6).exp())
    return norm.eval()


IMAGE = (3, 2, 3, 3)
# name -> (model, input); every kind of layer in the registry.
LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "relu": lambda: (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), normal(5, 3)),
    "tanh": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)), normal(5, 3)),
    "one": lambda: (nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), normal(5, 1)),
    "sequence": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), normal(4, 3, 3)),
    "two shared dims": lambda: (nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)), normal(3, 2, 2, 3)),
    "sequence as long as the batch": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh()), normal(4, 4, 3)),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        normal(*IMAGE),
    ),
    "embedding": lambda: (
        Model(lambda m, x: m.h(m.e(x).mean(1).tanh()), e=nn.Embedding(6, 3), h=nn.Linear(3, 2)),
        tokens(5, 4),
    ),
    "padded embedding": lambda: (
        nn.Sequential(nn.Embedding(6, 3, padding_idx=2), nn.Flatten(), nn.Linear(12, 2)),
        tokens(5, 4),
    ),
    "layer norm": lambda: (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), normal(5, 3)),
    "layer norm of images": lambda: (nn.Sequential(nn.LayerNorm((2, 3, 3)), nn.Tanh()), normal(*IMAGE)),
    "layer norm, no bias": lambda: (nn.Sequential(nn.LayerNorm(4, bias=False), nn.Tanh()), normal(3, 3, 4)),
    "rms norm": lambda: (nn.Sequential(nn.RMSNorm(4), nn.Tanh(), nn.Linear(4, 2)), normal(3, 2, 4)),
    "group norm": lambda: (nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh()), normal(*IMAGE)),
    "instance norm": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh()),
        normal(*IMAGE),
    ),
    "batch norm": lambda: (
        nn.Sequential(nn.Linear(3, 4), evaluated(nn.BatchNorm1d(4), 4), nn.Tanh(), nn.Linear(4, 2)),
        normal(5, 3),
    ),
    "batch norm of images": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 2), evaluated(nn.BatchNorm2d(3), 3), nn.ReLU(inplace=True)),
        normal(*IMAGE),
    ),
    "attention": lambda: (attention(itself, batch_first=True), normal(3, 4, 4)),
    "attention, sequence first": lambda: (attention(sequence_first), normal(3, 2, 4)),
    "attention, as long as the batch": lambda: (attention(sequence_first), normal(3, 3, 4)),
    "cross attention": lambda: (attention(other_lengths, batch_first=True), normal(2, 4, 4)),
    "attention, other widths": lambda: (
        attention(other_widths, batch_first=True, kdim=3, vdim=2),
        normal(2, 3, 4),
    ),
    "attention, masks": lambda: (attention(padded, batch_first=True), normal(2, 3, 4)),
    "attention, no bias": lambda: (attention(itself, batch_first=True, bias=False), normal(2, 3, 4)),
    "attention, bias_k": lambda: (
        attention(itself, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        normal(2, 3, 4),
    ),
    "transformer": lambda: (nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True), normal(2, 3, 4)),
}


def doubled(make: Callable[[], tuple[nn.Module, Tensor]]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = make()
    return random_weights(model.double()), x


def has_structure(model: nn.Module) -> Tensor:
    """Which entries lie in a layer that the registry knows."""
    structure = build_structure(model, "diagonal")
    flat = torch.cat([torch.full((unit.size,), unit.kind != "other") for unit in structure.units])
    return flat[parameter_order(structure)]


@pytest.mark.parametrize("name", LAYERS)
def test_full_is_the_fisher_and_diagonal_its_diagonal(name: str) -> None:
    model, x = doubled(LAYERS[name])
    truth = exact_fisher(model, gaussian(), x)
    known = has_structure(model)
    assert truth.diagonal().abs().max() > 1e-3
    assert known.any()
    full = measured_fisher(model, gaussian(), x, "full")
    close(full[known][:, known], truth[known][:, known])
    close(measured_fisher(model, gaussian(), x, "diagonal").diagonal()[known], truth.diagonal()[known])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_optimiser_takes_the_same_statistics(family: str) -> None:
    """The first measurement is all there is of F̄. Gradients and hooks of the user do not matter."""
    model, x = doubled(LAYERS["tanh"])
    twin = copy.deepcopy(model)
    options = {"num_data": 100, "noise": False, "fisher": "exact", "stats_every": 1, "factor_every": 1}
    optimizer = OPTIMIZERS[family](model, gaussian(), **options)
    optimizer.step(lambda: (model(x), normal(5, 2, seed=8)))
    _, expected = measure(twin, gaussian(), x, family)
    for block in optimizer.structure.blocks:
        for key, tensor in optimizer.covariance.statistics[block.name].tensors().items():
            close(tensor, expected[block.name].tensors()[key])


LIKELIHOODS = {
    "gaussian": (gaussian, 3),
    "categorical": (ng.Categorical, 3),
    "bernoulli": (ng.Bernoulli, 2),
    "poisson": (ng.Poisson, 2),
    "heteroscedastic": (ng.HeteroscedasticGaussian, 4),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_sampled_averages_to_exact(name: str) -> None:
    make, outputs = LIKELIHOODS[name]
    model, _ = doubled(lambda: (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, outputs)), None))
    x = normal(3, 2)
    truth = exact_fisher(model, make(), x)
    close(measured_fisher(model, make(), x, "full"), truth)
    # The same three examples many times in one batch: many draws of their targets.
    many = measured_fisher(model, make(), x.repeat(60_000, 1), "full", kind="sampled")
    assert (many - truth).norm() / truth.norm() < 0.02
    assert (many - truth).norm() > 0


def test_empirical_is_the_mean_of_outer_products() -> None:
    model, x = doubled(LAYERS["relu"])
    target = normal(5, 2, seed=4)
    rows = per_example_gradients(model, gaussian(), x, target)
    expected = rows.mT @ rows / len(rows)
    close(measured_fisher(model, gaussian(), x, "full", kind="empirical", target=target), expected)
    diagonal = measured_fisher(model, gaussian(), x, "diagonal", kind="empirical", target=target)
    close(diagonal.diagonal(), expected.diagonal())


def blocks_of(matrix: Tensor, model: nn.Module) -> Tensor:
    """`matrix` with everything between different layers set to zero."""
    owner = torch.cat(
        [torch.full((p.numel(),), i // 2) for i, p in enumerate(model.parameters())]  # weight and bias of each layer
    )
    return torch.where(owner[:, None] == owner[None, :], matrix, 0.0)


def test_kronecker_is_exact_for_deep_linear_networks() -> None:
    model, x = doubled(lambda: (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)), normal(7, 3)))
    truth = blocks_of(exact_fisher(model, gaussian(), x), model)
    close(measured_fisher(model, gaussian(), x, "kronecker"), truth)


@pytest.mark.parametrize("name", ["gaussian", "categorical"])
def test_kronecker_is_exact_for_a_single_datum(name: str) -> None:
    make, outputs = LIKELIHOODS[name]
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, outputs)]
    model, x = doubled(lambda: (nn.Sequential(*layers), normal(1, 3)))
    close(measured_fisher(model, make(), x, "kronecker"), blocks_of(exact_fisher(model, make(), x), model))


def test_kronecker_is_not_exact_elsewhere() -> None:
    """The two tests above can fail: with ReLU and several data the approximation shows."""
    model, x = doubled(LAYERS["relu"])
    truth = blocks_of(exact_fisher(model, gaussian(), x), model)
    assert (measured_fisher(model, gaussian(), x, "kronecker") - truth).norm() > 0.01 * truth.norm()


CONVOLUTIONS = [
    (dims, stride, padding, dilation, groups, mode)
    for dims, stride, padding, dilation, groups, mode in itertools.product(
        (1, 2, 3), (1, 2), (0, 1, "same"), (1, 2), (1, 2), ("zeros", "reflect", "circular", "replicate")
    )
    if not (padding == "same" and stride == 2)
    and not (padding == 0 and mode != "zeros")
    # In three dimensions each option once with the others at their most awkward.
    and (dims < 3 or (dilation == 2 and groups == 2))
]


@pytest.mark.parametrize(("dims", "stride", "padding", "dilation", "groups", "mode"), CONVOLUTIONS)
def test_convolutions(dims: int, stride: int, padding: int | str, dilation: int, groups: int, mode: str) -> None:
    kernel = (2, 3, 1)[:dims] if dims > 1 else (2,)
    size = (6, 5, 2)[:dims]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    torch.manual_seed(0)
    pad = padding if isinstance(padding, str) else tuple(padding * (k > 1) for k in kernel)
    conv = kind(2, 4, kernel, stride=stride, padding=pad, dilation=dilation, groups=groups, padding_mode=mode)
    x = normal(2, 2, *size)
    model = random_weights(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), Weighted()).double())
    truth = exact_fisher(model, gaussian(), x)
    close(measured_fisher(model, gaussian(), x, "full"), truth)
    close(measured_fisher(model, gaussian(), x, "diagonal").diagonal(), truth.diagonal())
    structure, found = measure(model, gaussian(), x, "kronecker")
    inputs, outputs = convolution_factors(conv, model, x)
    found_inputs, found_outputs = (found["0"].tensors()[key] for key in ("inputs", "outputs"))
    close(found_inputs.reshape(inputs.shape), inputs)
    close(found_outputs.reshape(outputs.shape), outputs)
    assert structure.blocks[0].num_groups == groups


class Weighted(nn.Module):
    """Two fixed weighted sums of the features, so that positions have different output gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ normal(x.shape[1], 2, seed=9)


def convolution_factors(conv: nn.Module, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A and S of each group, by definition; the convolution itself, with unit weights, says what its patches are."""
    groups, rows = conv.groups, conv.out_channels // conv.groups
    size = conv.weight[0].numel()
    units = torch.eye(size, dtype=x.dtype).reshape(size, *conv.weight.shape[1:]).repeat(groups, *[1] * (x.dim() - 1))
    inputs, outputs = [], []
    for example in x:
        s = conv(example.unsqueeze(0)).detach().requires_grad_()
        patches = conv._conv_forward(example.unsqueeze(0), units, None)[0].flatten(1).unflatten(0, (groups, size)).mT
        patches = torch.cat([patches, torch.ones_like(patches[..., :1])], dim=-1)
        inputs.append(patches.mT @ patches / patches.shape[1])
        after = model[1:](s)[0]
        gradients = torch.stack([torch.autograd.grad(o, s, retain_graph=True)[0][0].flatten(1) for o in after])
        by_group = gradients.unflatten(1, (groups, rows)) / math.sqrt(SMALL_NOISE)
        outputs.append(torch.einsum("kgip,kgjp->gij", by_group, by_group))
    return torch.stack(inputs).mean(0), torch.stack(outputs).mean(0)


@pytest.mark.parametrize("shape", [(6, 3), (6, 5, 3)], ids=["vectors", "sequences"])
def test_tridiagonal_has_the_damped_blocks_it_claims(shape: tuple[int, ...]) -> None:
    """Diagonal blocks damped by equation (11), couplings E[a aᵀ] ⊗ E[g gᵀ] undamped, by hand.

    Of sequences, a aᵀ is a mean over positions and g gᵀ a sum.
    """
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)]
    model, x = doubled(lambda: (nn.Sequential(*layers), normal(*shape)))
    structure, found = measure(model, gaussian(), x, "tridiagonal")
    (block,) = structure.blocks
    assert block.family.name == "tridiagonal"
    gamma = 0.05
    prior = block.prior(lambda name: gamma, x)
    precision = found[block.name].factorise(prior).to_dense()

    a, hidden = [], x
    for layer in model:
        if isinstance(layer, nn.Linear):
            a.append(torch.cat([hidden, torch.ones_like(hidden[..., :1])], dim=-1).detach().flatten(0, -2))
        hidden = layer(hidden)
    linear = [model[0], model[2], model[4]]
    weights = [torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in linear]
    g = output_gradients(model, linear, x)
    starts = [0]
    for w in weights:
        starts.append(starts[-1] + w.numel())
    for i in range(3):
        A, S = a[i].mT @ a[i] / len(a[i]), torch.einsum("k...p,k...q->pq", g[i], g[i]) / 6
        pi = ((A.trace() / len(A)) / (S.trace() / len(S))).sqrt()
        A = A + pi * math.sqrt(gamma) * torch.eye(len(A), dtype=A.dtype)
        S = S + math.sqrt(gamma) / pi * torch.eye(len(S), dtype=S.dtype)
        here = slice(starts[i], starts[i + 1])
        close(precision[here, here], torch.kron(S, A))
        if i < 2:
            after = slice(starts[i + 1], starts[i + 2])
            coupling = torch.einsum("k...p,k...q->pq", g[i], g[i + 1]) / 6
            cross = torch.kron(coupling, a[i].mT @ a[i + 1] / len(a[i]))
            assert cross.norm() > 1e-3
            close(precision[here, after], cross)
    covariance = torch.linalg.inv(precision)
    assert covariance[: starts[1], starts[2] :].abs().max() < 1e-9 * covariance.abs().max()


def output_gradients(model: nn.Module, layers: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Gradients of each output (over the noise) by each layer's, `[outputs, batch, (positions,) features]`."""
    kept: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda m, i, o: kept.append(o)) for layer in layers]
    output = model(x).flatten(1)
    for handle in handles:
        handle.remove()
    root = SMALL_NOISE**-0.5
    columns = [torch.autograd.grad(root * output[:, k].sum(), kept, retain_graph=True) for k in range(output.shape[1])]
    return [torch.stack([column[i] for column in columns]) for i in range(len(kept))]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["tanh", "conv", "grouped", "attention"])
def test_frozen_parts(name: str, frozen: str) -> None:
    if name == "grouped":
        model, x = doubled(lambda: (nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh()), normal(*IMAGE)))
    else:
        model, x = doubled(LAYERS[name])
    for key, parameter in model.named_parameters():
        if key.endswith(frozen) and not (name == "tanh" and key.startswith("2.")):
            parameter.requires_grad_(False)
    truth = exact_fisher(model, gaussian(), x)
    assert len(truth) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    close(measured_fisher(model, gaussian(), x, "full"), truth)
    close(measured_fisher(model, gaussian(), x, "diagonal").diagonal(), truth.diagonal())
    for family in ("kronecker", "tridiagonal"):
        structure, found = measure(model, gaussian(), x, family)
        assert structure.size == len(truth)
        assert all(torch.isfinite(t).all() for s in found.values() for t in s.tensors().values())


def test_statistics_of_blocks_in_one_dense_matrix() -> None:
    """The helper itself: a diagonal family has nothing off the diagonal, a full one has."""
    model, x = doubled(LAYERS["tanh"])
    structure, found = measure(model, gaussian(), x, "diagonal")
    assert torch.equal(dense_fisher(structure, found), torch.diag(dense_fisher(structure, found).diagonal()))
