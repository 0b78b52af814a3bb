"""What hooks and odd networks can spoil: shared and repeated layers, in-place activations, attention, exceptions."""

from __future__ import annotations

import copy
import io
from contextlib import suppress
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import noisygrad as ng
from noisygrad.curvature.capture import Capture
from noisygrad.curvature.fisher import fisher_passes
from noisygrad.curvature.network import find_units
from noisygrad.curvature.passes import Batch, MatrixPass
from noisygrad.curvature.registry import REGISTRY, Layer
from noisygrad.families.units import Slot, Unit
from noisygrad.posterior.structure import build_structure
from noisygrad.posterior.weights import parameter_order
from support.truth import (
    FAMILIES,
    Model,
    close,
    exact_fisher,
    measure,
    measured_fisher,
    normal,
    per_example_gradients,
    random_weights,
)


def gaussian() -> ng.Gaussian:
    likelihood = ng.Gaussian(noise_variance=0.7)
    likelihood.bind((), "cpu", torch.float64)
    return likelihood


def ready(model: nn.Module) -> nn.Module:
    return random_weights(model.double())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_layer_called_twice_adds_up_within_an_example() -> None:
    model = ready(
        Model(lambda m, x: m.out(m.layer(torch.tanh(m.layer(x)))), layer=nn.Linear(3, 3), out=nn.Linear(3, 2))
    )
    x = normal(4, 3)
    truth = exact_fisher(model, gaussian(), x)
    close(measured_fisher(model, gaussian(), x, "full"), truth)
    close(measured_fisher(model, gaussian(), x, "diagonal").diagonal(), truth.diagonal())
    # A and S of the two calls together: a mean and a sum over calls, as over positions.
    _, found = measure(model, gaussian(), x, "kronecker")
    first, second = x, torch.tanh(model.layer(x)).detach()
    both = torch.cat([torch.cat([a, torch.ones(4, 1, dtype=a.dtype)], 1) for a in (first, second)])
    close(found["layer"].tensors()["inputs"], both.mT @ both / 8)


def test_an_embedding_called_twice() -> None:
    model = ready(Model(lambda m, x: m.e(x[:, 0]) * m.e(x[:, 1]) + m.e(x).sum(1), e=nn.Embedding(4, 2)))
    x = torch.tensor([[0, 1], [2, 2], [3, 0]])
    truth = exact_fisher(model, gaussian(), x)
    close(measured_fisher(model, gaussian(), x, "diagonal").diagonal(), truth.diagonal())
    close(measured_fisher(model, gaussian(), x, "full"), truth)


def test_hooks_of_a_user_that_change_what_passes_are_part_of_the_network() -> None:
    model = ready(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    model[0].register_forward_hook(lambda module, args, output: 3.0 * output)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] - 1.0,))
    x = normal(5, 3)
    truth = exact_fisher(model, gaussian(), x)
    close(measured_fisher(model, gaussian(), x, "full"), truth)
    close(measured_fisher(model, gaussian(), x, "diagonal").diagonal(), truth.diagonal())


@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_made_meanwhile_is_a_network_of_its_own(patched: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.MultiheadAttention(4, 2))
    if patched:
        model[0].forward = MethodType(lambda self, x: 2.0 * nn.Linear.forward(self, x), model[0])
    _, layers = find_units(model)
    with Capture(layers) as capture:
        other = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model[2], buffer)
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.fill_(1.0)
        assert torch.equal(other[0](torch.ones(2, 3)), torch.full((2, 4), 2.0 if patched else 1.0))
        other[2](*[torch.ones(2, 1, 4)] * 3)
        assert capture.take() == []
    for module in (model, other):
        assert ["forward" in vars(layer) for layer in module] == [patched, False, False]


def test_a_forward_that_was_taken_away_meanwhile_does_no_harm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    _, layers = find_units(model)
    with Capture(layers):
        del model[0].forward
    assert not any("forward" in vars(layer) for layer in model)


def test_a_layer_without_its_input_fails_as_usual() -> None:
    model = nn.Linear(3, 4)
    with Capture(find_units(model)[1]), pytest.raises(TypeError, match="argument"):
        model()


class Twofold(nn.Module):
    """Two matrices for one input, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(2, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.left, self.right]).mT


def test_a_layer_of_two_units(monkeypatch: pytest.MonkeyPatch) -> None:
    def units(name: str, module: nn.Module, trainable: frozenset[str]) -> list[Unit]:
        return [Unit(f"{name}.{p}", "matrix", 2, 3, (Slot(f"{name}.{p}", 0, 3),), "Twofold") for p in ("left", "right")]

    def observe(unit: Unit, module: nn.Module, inputs: Tensor, gradient: Tensor, batch: Batch) -> MatrixPass:
        part = gradient[:, :2] if unit.name.endswith("left") else gradient[:, 2:]
        return MatrixPass(inputs.unsqueeze(-2), part.unsqueeze(-2), False)

    monkeypatch.setitem(REGISTRY, Twofold, Layer(units, observe))
    model, x = ready(nn.Sequential(Twofold(), nn.Tanh(), nn.Linear(4, 2))), normal(5, 3)
    truth = exact_fisher(model, gaussian(), x)
    close(measured_fisher(model, gaussian(), x, "full"), truth)


def test_a_layer_whose_forward_is_called_by_its_name_takes_part() -> None:
    model = ready(Model(lambda m, x: m.out.forward(torch.tanh(m.layer(x))), layer=nn.Linear(3, 4), out=nn.Linear(4, 2)))
    x = normal(5, 3)
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3)], ids=["vectors", "sequences"])
def test_in_place_activations_change_nothing(family: str, shape: tuple[int, ...]) -> None:
    """On a sequence a Linear returns a view, whose place in the graph an in-place ReLU takes over."""
    plain = ready(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.ELU(), nn.Linear(4, 2))
    )
    inplace = copy.deepcopy(plain)
    inplace[1], inplace[4] = nn.ReLU(inplace=True), nn.ELU(inplace=True)
    x = normal(*shape)
    _, expected = measure(plain, gaussian(), x, family)
    _, found = measure(inplace, gaussian(), x, family)
    assert list(found) == list(expected)
    for name in expected:
        for key, tensor in expected[name].tensors().items():
            assert tensor.norm() > 0
            close(found[name].tensors()[key], tensor, rtol=0, atol=1e-14)


def test_in_place_convolution_and_attention() -> None:
    plain = ready(
        Model(
            lambda m, x: torch.relu(m.a(*[torch.relu(m.c(x)).mT] * 3)[0]),
            c=nn.Conv1d(2, 4, 2),
            a=nn.MultiheadAttention(4, 2, batch_first=True),
        )
    )
    inplace = copy.deepcopy(plain)
    inplace._run = lambda m, x: torch.relu_(m.a(*[torch.relu_(m.c(x)).mT] * 3)[0])
    x = normal(3, 2, 4)
    close(measured_fisher(inplace, gaussian(), x, "full"), measured_fisher(plain, gaussian(), x, "full"))


def test_an_input_overwritten_after_use_is_refused() -> None:
    """With a frozen weight autograd itself would not notice."""
    model = ready(Model(lambda m, x: m.b(m.a(x).mul_(2.0)), a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
    model.a.weight.requires_grad_(False)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        hidden = m.a(x)
        x.mul_(2.0)
        return m.b(hidden)

    model._run = run
    with pytest.raises(RuntimeError, match=r"'a' was changed in place"):
        measure(model, gaussian(), normal(4, 3), "diagonal")


def scaled() -> nn.Module:
    model = Model(lambda m, x: m.layer(x) * m.scale * m.rows, layer=nn.Linear(3, 2))
    model.scale = nn.Parameter(torch.tensor(1.5))
    model.rows = nn.Parameter(torch.tensor([0.5, 2.0]))
    return model


def tied() -> nn.Module:
    model = Model(lambda m, x: m.head(m.e(x).tanh().mean(1)), e=nn.Embedding(4, 2), head=nn.Linear(2, 4))
    model.head.weight = model.e.weight
    return model


def biased_attention() -> nn.Module:
    return Model(
        lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(2, 1, batch_first=True, add_bias_kv=True, bias=False)
    )


def positions() -> nn.Module:
    return Model(
        lambda m, x: m.h((m.e(x) + m.p(torch.arange(3))).tanh()).sum(1),
        e=nn.Embedding(4, 2),
        p=nn.Embedding(3, 2),
        h=nn.Linear(2, 2),
    )


TOKENS = torch.tensor([[0, 1, 1], [2, 2, 3]])
LOOSE = {
    "parameters": (scaled, normal(4, 3), {"scale", "rows"}),
    "lstm": (
        lambda: Model(lambda m, x: m.l(x)[0][:, -1], l=nn.LSTM(2, 2, batch_first=True)),
        normal(3, 3, 2),
        {f"l.{p}_{s}_l0" for p in ("weight", "bias") for s in ("ih", "hh")},
    ),
    "weight norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.Tanh()),
        normal(4, 3),
        {f"0.parametrizations.weight.original{i}" for i in range(2)},
    ),
    "tied": (tied, TOKENS, {"e.weight"}),
    "bias_k": (biased_attention, normal(2, 2, 2), {"a.bias_k", "a.bias_v"}),
    "positions": (positions, TOKENS, {"p.weight"}),
}


def loose_truth(model: nn.Module, x: Tensor) -> Tensor:
    """diag of the Fisher by plain autograd (an LSTM has no batching rules)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for example in x:
        for output in model(example.unsqueeze(0)).flatten():
            found = torch.autograd.grad(output, parameters, retain_graph=True)
            total += torch.cat([g.flatten() for g in found]).square() / 0.7
    return total / len(x)


@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("name", LOOSE)
def test_parameters_without_a_layer_are_unbiased(name: str, kind: str) -> None:
    make, x, loose = LOOSE[name]
    model = ready(make())
    truth = loose_truth(model, x)
    # Targets above the outputs, so that the examples' gradients point the same way and cross terms would show.
    target = model(x).detach() + 1.0
    if kind == "empirical":
        truth = per_example_gradients(model, gaussian(), x, target).square().mean(0)
    draws = 300
    found = torch.stack(
        [
            measured_fisher(model, gaussian(), x, "diagonal", kind=kind, target=target, seed=s).diagonal()
            for s in range(draws)
        ]
    )
    error = found.std(0) / draws**0.5
    assert ((found.mean(0) - truth).abs() <= 5 * error + 1e-12).all(), (found.mean(0) - truth) / error
    # Only these are random under exact statistics; layers are exact beside them.
    mine = torch.cat([torch.full((p.numel(),), n in loose) for n, p in model.named_parameters()])
    if kind != "sampled":
        assert not mine.all() or name in {"lstm"}
        close(found[0][~mine], truth[~mine])
        assert (found[:, mine].std(0) > 0).any()


def test_a_table_of_positions_has_no_full_covariance() -> None:
    with pytest.raises(TypeError, match="for each example"):
        measure(ready(positions()), gaussian(), TOKENS, "full")


ATTENTION = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_k, zeros": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 3, "vdim": 5},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_captured_attention_computes_what_attention_computes(
    options: dict, need_weights: bool, batch_first: bool
) -> None:
    module = ready(nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)).train()
    batch, length, keys = 3, 2, 4
    query, key, value = normal(batch, length, 4), normal(batch, keys, module.kdim), normal(batch, keys, module.vdim)
    if not batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[1, 2:] = True
    causal = torch.ones(length, keys, dtype=torch.bool).triu(2)
    structure = build_structure(module, "kronecker")
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": causal},
        {"attn_mask": causal, "key_padding_mask": padding},
        {"attn_mask": normal(batch * 2, length, keys), "average_attn_weights": False},
    ):
        expected, weights = module(query, key, value, need_weights=need_weights, **masks)
        with Capture(structure.layers) as capture:
            output, captured_weights = module(query, key, value, need_weights=need_weights, **masks)
            names = [record.unit.name for record in capture.take()]
        assert names == ["query", "key", "value", "out_proj"]
        close(output, expected)
        assert (captured_weights is None) == (not need_weights)
        if need_weights:
            close(captured_weights, weights)
        close(torch.autograd.grad(output.sum(), module.out_proj.weight)[0], weight_gradient(module, expected))


def weight_gradient(module: nn.Module, output: Tensor) -> Tensor:
    return torch.autograd.grad(output.sum(), module.out_proj.weight)[0]


def is_clean(model: nn.Module) -> bool:
    return all("forward" not in vars(m) and not m._forward_hooks for m in model.modules())


def test_hooks_are_off_afterwards_and_after_an_exception() -> None:
    def fail(m: nn.Module, x: Tensor) -> Tensor:
        m.a(m.l(x), x, x)
        raise ZeroDivisionError

    model = ready(
        Model(lambda m, x: m.a(m.l(x), x, x)[0], l=nn.Linear(4, 4), a=nn.MultiheadAttention(4, 2, batch_first=True))
    )
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10, stats_every=1)
    x = normal(2, 3, 4)
    seen = []

    def closure() -> tuple[Tensor, Tensor]:
        seen.append(is_clean(model))
        return model(x), torch.zeros(2, 3, 4, dtype=torch.float64)

    optimizer.step(closure)
    assert seen == [False]
    assert is_clean(model)
    before = [p.detach().clone() for p in model.parameters()]
    model._run = fail
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert is_clean(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_no_graph_is_kept_after_the_context(fails: bool) -> None:
    """A node that is kept would hold the activations of a whole pass."""
    model = ready(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    with suppress(ZeroDivisionError), Capture(find_units(model)[1]) as capture:
        measured_with(capture, model(normal(5, 3)))
        records = capture.take(again=True)
        assert len(records) == 2
        capture.consume(records)
        if fails:
            raise ZeroDivisionError
    assert capture.take(again=True) == []


def measured_with(capture: Capture, output: Tensor) -> None:
    """Take statistics of a pass, as an optimiser does."""
    records, more = capture.take(), {"others": [], "generators": [], "dtype": torch.float64}
    assert len(list(fisher_passes("exact", gaussian(), output, output.detach(), records=records, **more))) == 2
    capture.consume(records)


def test_attention_as_the_whole_model() -> None:
    module = ready(nn.MultiheadAttention(4, 2))
    structure = build_structure(module, "kronecker")
    count = sum(p.numel() for p in module.parameters())
    assert sorted(parameter_order(structure).tolist()) == list(range(count)) == list(range(structure.size))


def test_layers_called_by_keyword() -> None:
    model = ready(Model(lambda m, x: m.r(x=m.l(input=x)), l=nn.Linear(3, 4), r=nn.RMSNorm(4)))
    x = normal(2, 3)
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))
