"""Promise of the shell: what does not count changes nothing, and a weight of 2 equals an example given twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.optim import NoisyOptimizer
from support.compare import each_optimizer

PASSES = ("same", "fresh")
each_kind = pytest.mark.parametrize("fisher", ["exact", "empirical"])
each_pass = pytest.mark.parametrize("fisher_pass", PASSES)


class Convolved(nn.Module):
    """Sequences of vectors, padded behind; the layers see the padding, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(3, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        hidden = self.first(x).tanh() * keep.unsqueeze(-1)
        hidden = self.middle(hidden.mT).mT.tanh() * keep.unsqueeze(-1)
        return self.last(self.norm(hidden))


def made(kind: type[NoisyOptimizer], likelihood: ng.Likelihood, **more: Any) -> tuple[nn.Module, NoisyOptimizer]:
    model = Convolved()
    settings = {"num_data": 50, "lr": 0.05, "stats_every": 1, "factor_every": 1, "seed": 2, "damping": 1e-3}
    return model, kind(model, likelihood, **(settings | more))


def same(one: NoisyOptimizer, other: NoisyOptimizer) -> None:
    """Mean, covariance and the noise of the likelihood."""
    # Of eigenvalues that are nearly equal, rounding decides the basis.
    loose = 1e4 if isinstance(one, ng.NoisyEKFAC) else 1.0
    first, second = one.posterior().precision(), other.posterior().precision()
    torch.testing.assert_close(one.weights.mean.flat, other.weights.mean.flat, rtol=1e-9 * loose, atol=1e-11 * loose)
    torch.testing.assert_close(first, second, rtol=1e-9 * loose, atol=1e-9 * loose)
    for mine, theirs in zip(one.likelihood.buffers(), other.likelihood.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9 * loose, atol=1e-11 * loose)


LENGTHS = torch.tensor([4, 2, 3, 1])


def padded(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same sequences whatever their padding is, inputs and targets of which are nonsense."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(LENGTHS), 4, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(len(LENGTHS), 4, 2, generator=generator, dtype=torch.float64)
    keep = torch.arange(length) < LENGTHS.unsqueeze(-1)
    x, y = (F.pad(t, (0, 0, 0, length - 4)) for t in (x, y))
    return x.masked_fill(~keep.unsqueeze(-1), 50.0), y.masked_fill(~keep.unsqueeze(-1), torch.nan), keep


@each_optimizer
@each_kind
@each_pass
def test_more_padding_changes_nothing(kind: type[NoisyOptimizer], fisher: str, fisher_pass: str) -> None:
    optimizers = []
    for length in (4, 9):
        model, optimizer = made(kind, ng.Gaussian(), fisher=fisher, fisher_pass=fisher_pass)
        for step in range(3):
            x, y, keep = padded(length, step)
            optimizer.step(lambda model=model, x=x, y=y, keep=keep: (model(x, keep), y, None, keep))
        optimizers.append(optimizer)
    same(*optimizers)


@each_optimizer
@pytest.mark.parametrize("kinds", [("exact", "same"), ("empirical", "same"), ("exact", "fresh")])
def test_a_weight_of_two_is_an_example_given_twice(kind: type[NoisyOptimizer], kinds: tuple[str, str]) -> None:
    optimizers = []
    for twice in (False, True):
        model, optimizer = made(kind, ng.Gaussian(), fisher=kinds[0], fisher_pass=kinds[1])
        for step in range(3):
            x, y, keep = padded(5, step)
            weight = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64)
            if twice:
                x, y, keep = (t[torch.tensor([0, 1, 1, 3])] for t in (x, y, keep))
                weight = None
            optimizer.step(lambda model=model, batch=(x, y, keep, weight): run(model, *batch))
        optimizers.append(optimizer)
    same(*optimizers)


def run(model: nn.Module, x: Tensor, y: Tensor, keep: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
    return model(x, keep), y, weight, keep


@each_optimizer
def test_both_forms_of_the_loop_and_parts_of_a_batch(kind: type[NoisyOptimizer]) -> None:
    """`stats_batch` takes the first examples; the weights are then theirs."""
    optimizers = []
    for form in ("closure", "context"):
        model, optimizer = made(kind, ng.Categorical(ignore_index=-1), fisher="empirical", stats_batch=3)
        for step in range(3):
            x, _, keep = padded(6, step)
            label = torch.zeros(4, 6, dtype=torch.int64).masked_fill(~keep, -1)
            weight = torch.tensor([1.0, 2.0, 0.5, 3.0])
            if form == "closure":
                optimizer.step(lambda model=model, b=(x, keep, label, weight): (model(b[0], b[1]), b[2], b[3]))
            else:
                with optimizer.sampled() as draw:
                    draw.nll(model(x, keep), label, weight=weight).backward()
                optimizer.step()
        optimizers.append(optimizer)
    same(*optimizers)


@each_optimizer
def test_drawn_targets_of_padding_change_nothing(kind: type[NoisyOptimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are drawn for all positions; whatever those of the padding are, they have no part."""
    drawn: Callable[..., Tensor] = ng.Gaussian.sample
    optimizers = []
    for nonsense in (0.0, 1e6):
        with monkeypatch.context() as patch:

            def sample(self: ng.Gaussian, output: Tensor, generators: Any = None, nonsense: float = nonsense) -> Tensor:
                counts = torch.arange(6) < LENGTHS.unsqueeze(-1)
                return torch.where(counts.unsqueeze(-1), drawn(self, output, generators), nonsense)

            patch.setattr(ng.Gaussian, "sample", sample)
            model, optimizer = made(kind, ng.Gaussian())
            for step in range(3):
                x, y, keep = padded(6, step)
                optimizer.step(lambda model=model, x=x, y=y, keep=keep: (model(x, keep), y, None, keep))
        optimizers.append(optimizer)
    same(*optimizers)


@each_optimizer
def test_replicas_share_a_mask_or_have_their_own(kind: type[NoisyOptimizer]) -> None:
    x, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
    weight = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    optimizers = []
    for shared in (True, False):
        torch.manual_seed(1)
        model = ng.networks.ReplicatedMLP((2,), 3, [4], 1).double()
        optimizer = kind(model, ng.Gaussian(), num_data=50, stats_every=1, factor_every=1, seed=[4, 5], fisher="exact")
        given = weight if shared else weight.expand(2, 5)
        for _ in range(2):
            optimizer.step(lambda model=model, given=given: (model(x), y, given))
        optimizers.append(optimizer)
    first, second = (o.weights.mean.flat for o in optimizers)
    torch.testing.assert_close(first, second)
    for mine, theirs in zip(optimizers[0].likelihood.buffers(), optimizers[1].likelihood.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_causal_language_model_with_prompts_and_padding_trains() -> None:
    """Next letters of a text: the first three of each line are a prompt, the ends are padding."""
    torch.manual_seed(0)
    text = " ".join(str(o.__doc__) for o in (ng.NoisyAdam, ng.NoisyKFAC, ng.optim.NoisyOptimizer))[:1500]
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    rows = [codes[start : start + 8 + start % 5] for start in range(0, len(codes) - 13, 6)]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    keep = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True) > 0
    label = torch.where(keep, x, -100)[:, 1:].clone()
    label[:, :2] = -100
    x, keep = x[:, :-1], keep[:, :-1]
    model = Causal(len(letters))
    optimizer = ng.NoisyKFAC(
        model, ng.Categorical(ignore_index=-100), num_data=len(x), lr=0.2, kl_clip=0.05, kl_weight=0.05, seed=0
    )
    losses = [float(optimizer.step(lambda: (model(x, ~keep), label))) for _ in range(40)]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.85 * first, (first, last)


class Causal(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, letters)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.layer(self.table(x), src_mask=later, src_key_padding_mask=padding))


def test_what_a_closure_may_return() -> None:
    model, optimizer = made(ng.NoisyAdam, ng.Gaussian())
    x, y, keep = padded(4, 0)
    for result in ((model(x, keep),), (model(x, keep), y, None, keep, 1)):
        with pytest.raises(TypeError, match=r"must return \(output, target\), perhaps followed"):
            optimizer.step(lambda result=result: result)
    assert optimizer.steps == 0


def test_statistics_are_of_examples_that_count() -> None:
    """Of the first three none does: as many more are taken as it needs."""
    model, optimizer = made(ng.NoisyKFAC, ng.Gaussian(), stats_batch=1)
    x, y, keep = padded(4, 0)
    optimizer.step(lambda: (model(x, keep), y, torch.tensor([0.0, 0.0, 0.0, 1.0]), keep))
    assert optimizer.steps == 1


@pytest.mark.parametrize("length", [6, 8])
def test_layers_with_other_positions_than_the_mask(length: int) -> None:
    """A token in front of the sequence, whose output alone is asked of: whatever the padding, A is the same."""
    torch.manual_seed(0)
    found = []
    for longest in (6, length):
        torch.manual_seed(1)
        layer, head = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 3)
        model = nn.ModuleDict({"layer": layer, "head": head}).double()
        x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        x, keep = F.pad(x, (0, 0, 0, longest - 6)), torch.arange(longest).expand(3, -1) < 6
        optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=9, fisher="empirical", noise=False, stats_every=1)
        front = torch.cat([torch.ones(3, 1, 4).double(), x], 1)
        padding = torch.cat([torch.zeros(3, 1).bool(), ~keep], 1)

        def closure(m=model, front=front, padding=padding, keep=keep):
            return m["head"](m["layer"](front, src_key_padding_mask=padding)[:, 0]), torch.tensor([0, 1, 2]), None, keep

        optimizer.step(closure)
        found.append(optimizer.covariance.statistics)
    for name, statistics in found[0].items():
        for key, tensor in statistics.tensors().items():
            torch.testing.assert_close(
                found[1][name].tensors()[key], tensor, msg=lambda m, n=f"{name} {key}": f"{n}: {m}"
            )


class BehindAToken(nn.Module):
    """Its layers see a token in front, and so have other positions than the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.threshold = 0.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(F.pad(x, (0, 0, 1, 0), value=0.5)) - self.threshold)
        return self.last(F.relu(self.middle(hidden)))[:, 1:]


@each_optimizer
@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("way", ["dead", "zero"])
def test_where_no_gradient_arrives_padding_has_no_part(kind: type[NoisyOptimizer], fisher: str, way: str) -> None:
    """All units of a layer dead in one batch, or an output layer that starts at 0: its inputs are as they were."""
    optimizers = []
    for value in (0.0, 1000.0):
        model = BehindAToken()
        if way == "zero":
            nn.init.zeros_(model.last.weight)
        optimizer = kind(model, ng.Gaussian(), num_data=50, fisher=fisher, stats_every=1, seed=2, noise=False)
        before = {name: s.unpacked().clone() for name, s in optimizer.covariance.statistics.items()}
        for step in range(3):
            x, y, keep = padded(6, step)
            x = x.masked_fill(~keep.unsqueeze(-1), value)
            model.threshold = 1e4 if (way, step) == ("dead", 1) else 0.0
            optimizer.step(lambda model=model, x=x, y=y, keep=keep: (model(x), y, None, keep))
            now = {name: s.unpacked().clone() for name, s in optimizer.covariance.statistics.items()}
            if "first" in now and (way, step) in {("dead", 1), ("zero", 0)}:
                assert torch.equal(now["first"].tensors()["inputs"], before["first"].tensors()["inputs"])
                assert not torch.equal(now["first"].tensors()["outputs"], before["first"].tensors()["outputs"])
            before = now
        optimizers.append(optimizer)
    one, other = optimizers
    torch.testing.assert_close(one.weights.mean.flat, other.weights.mean.flat)
    for name, statistics in one.covariance.statistics.items():
        for key, tensor in statistics.averages().items():
            torch.testing.assert_close(other.covariance.statistics[name].averages()[key], tensor)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_inputs_of_attention_whatever_the_padding(fisher: str) -> None:
    """A causal language model in which prompts have no labels: A of key and value, too."""
    found = []
    for longest in (4, 9):
        torch.manual_seed(0)
        table, attention, head = nn.Embedding(8, 4), nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 8)
        model = nn.ModuleDict({"table": table, "attention": attention, "head": head}).double()
        x, lengths = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]), torch.tensor([[4], [3]])
        x, keep = F.pad(x, (0, longest - 4)), torch.arange(longest) < lengths
        label = x.masked_fill(~keep, -100)
        label[:, 0] = -100
        later = torch.ones(longest, longest, dtype=torch.bool).triu(1)

        def closure(m=model, x=x, keep=keep, later=later, label=label):
            q = m["table"](x)
            mixed = m["attention"](q, q, q, key_padding_mask=~keep, attn_mask=later, need_weights=False)[0]
            return m["head"](q + mixed), label

        optimizer = ng.NoisyKFAC(
            model, ng.Categorical(ignore_index=-100), num_data=9, fisher=fisher, noise=False, stats_every=1
        )
        optimizer.step(closure)
        found.append(optimizer.covariance.statistics)
    for name, statistics in found[0].items():
        for key, tensor in statistics.tensors().items():
            torch.testing.assert_close(found[1][name].tensors()[key], tensor)


class Mean(nn.Module):
    """Three numbers for each padded sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        weight = keep.unsqueeze(-1).double()
        return self.head((self.inner(x).tanh() * weight).sum(1) / weight.sum(1))


def sequences(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(2, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    keep = torch.arange(length) < torch.tensor([[3], [1]])
    return F.pad(x, (0, 0, 0, length - 3), value=9.0), y[:, 0], keep


@each_optimizer
def test_a_mask_of_inputs_is_never_taken_for_one_of_outputs(kind: type[NoisyOptimizer]) -> None:
    """Three outputs, and sequences that are three long by chance: as the same data padded to four."""
    optimizers, losses = [], []
    for length in (3, 4):
        model, (x, y, keep) = Mean(), sequences(length)
        optimizer = kind(model, ng.Gaussian(), num_data=9, fisher="exact", seed=0)
        losses.append(
            [float(optimizer.step(lambda m=model, x=x, y=y, k=keep: (m(x, k), y, None, k.unsqueeze(-1)))) for _ in "ab"]
        )
        optimizers.append(optimizer)
    torch.testing.assert_close(losses[0], losses[1])
    same(*optimizers)


@each_optimizer
def test_a_mask_that_may_be_either_is_refused_and_says_how_to_give_it(kind: type[NoisyOptimizer]) -> None:
    model, (x, y, keep) = Mean(), sequences(3)
    optimizer = kind(model, ng.Gaussian(), num_data=9, seed=0)
    with pytest.raises(ValueError, match=r"mask of shape \[2, 3\] .* 3 outputs.*layer 'inner'.*mask.unsqueeze\(-2\)"):
        optimizer.step(lambda: (model(x, keep), y, None, keep))
    assert optimizer.steps == 0
    losses = [float(optimizer.step(lambda m=m: (model(x, keep), y, None, m))) for m in (keep.unsqueeze(-2),)]
    outputs = nn.Linear(3, 3).double()
    of_vectors = kind(outputs, ng.Gaussian(), num_data=9, seed=0)
    losses.append(float(of_vectors.step(lambda: (outputs(x[:, 0]), y, None, keep))))  # no positions: no doubt
    assert all(map(math.isfinite, losses))
