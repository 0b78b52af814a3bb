"""Which dimension is the batch, where sizes do not tell: tables of positions, squares, rows of two kinds, slices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.curvature import fisher
from noisygrad.optim import NoisyOptimizer
from support.compare import each_optimizer
from support.truth import Model, close, exact_fisher, measured_fisher, normal, random_weights


def gaussian() -> ng.Gaussian:
    likelihood = ng.Gaussian(noise_variance=0.7)
    likelihood.bind((), "cpu", torch.float64)
    return likelihood


class Positions(nn.Module):
    """Adds a position's vector, looked up once for all examples."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(length, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.table(torch.arange(x.shape[1]))).tanh())


class RelativeBias(nn.Module):
    """Attention with a learned bias by relative position, of shape [length, length, 1], as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.value, self.head = nn.Embedding(7, 1), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places[None, :]).clamp(-3, 3) + 3
        scores = x @ x.mT + self.bias(distance).squeeze(-1)
        return self.head(scores.softmax(-1) @ self.value(x))


@pytest.mark.parametrize("batch", [2, 3, 4, 5, 6, 12])
def test_a_relative_bias_is_not_taken_for_examples(batch: int) -> None:
    """The Fisher of a table that is shared is known from random signs: its mean is the truth."""
    model, x = random_weights(RelativeBias().double()), normal(batch, 12, 3)
    truth = exact_fisher(model, gaussian(), x).diagonal()
    trials = [measured_fisher(model, gaussian(), x, "diagonal", seed=seed).diagonal() for seed in range(60)]
    found = torch.stack(trials)
    error = 4 * found.std(0) / len(trials) ** 0.5 + 1e-9 * truth.max()
    assert bool(((found.mean(0) - truth).abs() <= error).all())


def test_positions_as_many_as_examples_are_no_examples() -> None:
    model, x = random_weights(Positions(4).double()), normal(4, 4, 3)
    with pytest.raises(TypeError, match="looked up once for all examples"):
        measured_fisher(model, gaussian(), x, "full")
    # Once known, it is known for other batches, too.
    with pytest.raises(TypeError, match="looked up once for all examples"):
        measured_fisher(model, gaussian(), x[:1], "full")


def looked_up_for_each(m: nn.Module, x: Tensor) -> Tensor:
    return m.h((x + m.e(torch.arange(x.shape[1]).expand(len(x), -1))).tanh())


def test_positions_looked_up_for_each_example_are_exact() -> None:
    model = random_weights(Model(looked_up_for_each, e=nn.Embedding(4, 3), h=nn.Linear(3, 2)).double())
    x = normal(4, 4, 3)
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))


def with_the_sequence_in_front(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.n(m.a(x.transpose(0, 1)).tanh()).mean(0)).tanh()


def tokens_with_the_sequence_in_front(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.e(x.T).tanh().mean(0))


@pytest.mark.parametrize("length", [2, 4])
def test_a_sequence_in_front_as_long_as_the_batch(length: int) -> None:
    parts = {"a": nn.Linear(3, 4), "n": nn.LayerNorm(4), "b": nn.Linear(4, 2)}
    model, x = random_weights(Model(with_the_sequence_in_front, **parts).double()), normal(4, length, 3)
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))
    parts = {"e": nn.Embedding(6, 3), "b": nn.Linear(3, 2)}
    model = random_weights(Model(tokens_with_the_sequence_in_front, **parts).double())
    x = torch.randint(6, (4, length), generator=torch.Generator().manual_seed(1))
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))


def folded(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2]).flatten(1)).tanh()


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_a_batch_folded_with_its_positions(frozen: str | None) -> None:
    model = random_weights(Model(folded, a=nn.Linear(3, 4), b=nn.Linear(8, 2)).double())
    if frozen is not None:
        getattr(model.a, frozen).requires_grad_(False)
    x = normal(5, 2, 3)
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))


def network(kind: type[NoisyOptimizer], images: bool) -> tuple[nn.Module, NoisyOptimizer, Tensor]:
    torch.manual_seed(0)
    if images:
        model: nn.Module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
        x = torch.randn(16, 2, 3, 3)
    else:
        model, x = ng.networks.MLP(3, (4,), 2), torch.randn(16, 3)
    return model, kind(model, ng.Gaussian(), num_data=50, stats_every=1), x


PARTS = {
    "first half": lambda out: out[:8],
    "second half": lambda out: out[8:],
    "one": lambda out: out[3:4],
    "every other": lambda out: out[::2],
    "a row of them": lambda out: next(iter(out))[None],
    "some": lambda out: out[torch.tensor([3, 1])],
    "chunk": lambda out: out.chunk(2)[0],
    "scaled": lambda out: out[:8] / 1.5,
    "one, scaled": lambda out: 2.0 * out[3:4],
    "a row of them, scaled": lambda out: out[3][None] * 1.0,
    "by a parameter": lambda out: out[8:] * nn.Parameter(torch.ones(2)),
    "squeezed": lambda out: out[:8].unsqueeze(-1).squeeze(-1),
    "clamped": lambda out: out[:8].clamp(-9, 9).relu() + 1,
    "a softmax": lambda out: out[:8].log_softmax(-1),
    "gathered": lambda out: out.gather(0, torch.arange(8)[:, None].expand(8, 2)),
    "gathered from the end": lambda out: out.gather(-2, torch.arange(8)[:, None].expand(8, 2)),
    "selected by a mask": lambda out: out.masked_select((torch.arange(16) < 8)[:, None]).view(8, 2),
    "selected by number": lambda out: out.index_select(0, torch.arange(8)).neg(),
    "a column of them": lambda out: out[:8][:, 0],
    "swapped": lambda out: out[:8].unsqueeze(1).transpose(1, 2).flatten(1),
    "far away": lambda out: out[:8].mul(2).div(2).add(1).sub(1).neg().neg().exp().log().relu().clamp(min=0),
}


@each_optimizer
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_an_output_is_refused(kind: type[NoisyOptimizer], images: bool, part: str) -> None:
    """In steps without statistics too, where two halves of a batch would count as two heads."""
    model, optimizer, x = network(kind, images)
    before = optimizer.posterior().precision()
    for steps in (0, 1):
        optimizer.steps = steps
        with optimizer.sampled() as draw:
            output = PARTS[part](model(x))
            with pytest.raises(ValueError, match=r"rows that the model has computed.*whole"):
                draw.nll(output, torch.zeros_like(output))
        optimizer.zero_grad()
    assert optimizer.accumulated.draws == 0
    torch.testing.assert_close(optimizer.posterior().precision(), before)
    optimizer.steps = 0
    optimizer.step(lambda: (model(x), torch.zeros(16, 2)))
    assert optimizer.steps == 1


def with_a_row_set(output: Tensor) -> Tensor:
    output = output.clone()
    output[3] = 0.0
    output[torch.arange(16) < 2] = 1.0
    return output


WHOLE = [
    lambda o: o[:],
    lambda o: o[torch.arange(16).flip(0)],
    lambda o: o[:, :1],
    lambda o: o[..., None],
    lambda o: 2.0 * o[:, :1].softmax(-1),
    lambda o: o.flip(0)[:].clamp(-1, 1),
    lambda o: o.gather(1, torch.zeros(16, 1, dtype=torch.long)).relu(),
    lambda o: o[torch.arange(16), torch.zeros(16, dtype=torch.long)][:, None] / 2,
    lambda o: (o.chunk(2, 1)[0] * 2).squeeze(-1),
    lambda o: o.t().t() + 1,
    lambda o: o.view(4, 4, 2).view(16, 2) * 2,
    lambda o: o[:8].repeat(2, 1) + o[8:].repeat(2, 1),
    with_a_row_set,
]


@pytest.mark.parametrize("whole", WHOLE)
def test_the_whole_of_an_output_is_taken_in_any_form(whole) -> None:
    model, optimizer, x = network(ng.NoisyKFAC, False)
    optimizer.step(lambda: (whole(model(x)), torch.zeros_like(whole(model(x)))))
    assert optimizer.steps == 1


def test_a_loss_of_rows_that_layers_have_seen_among_others() -> None:
    """Where nothing of the graph tells that they were taken out, their gradients do."""
    model = ng.networks.MLP(3, (4,), 2)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1)
    taken = torch.eye(16)[:8]
    with pytest.raises(ValueError, match="not several of each"):
        optimizer.step(lambda: (taken @ model(torch.randn(16, 3)), torch.zeros(8, 2)))


MIXED_UP = {
    "the first of two halves": lambda out: out.view(2, 8, 2)[0],
    "the mean of two halves": lambda out: out.view(2, 8, 2).mean(0),
    "their difference": lambda out: out[:8] - out[8:],
    "by a product": lambda out: torch.eye(16)[:8] @ out,
}


@each_optimizer
@pytest.mark.parametrize("part", MIXED_UP)
@pytest.mark.parametrize("training", [False, True])
def test_rows_that_are_not_side_by_side_are_refused_under_batch_norm(
    kind: type[NoisyOptimizer], part: str, training: bool
) -> None:
    """It mixes examples, but their gradients show where they are once it is passed over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).train(training)
    optimizer = kind(model, ng.Gaussian(), num_data=50, stats_every=1)
    x = torch.randn(16, 3)
    running = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="not several of each"):
        optimizer.step(lambda: (MIXED_UP[part](model(x)), torch.zeros(8, 2)))
    assert torch.equal(model[1].running_mean, running)


SIDE_BY_SIDE = {
    "the mean of pairs": lambda m, x: m(x.flatten(0, 1)).unflatten(0, (8, 2)).mean(1),
    "the last of a sequence": lambda m, x: m(x.flatten(0, 1)).unflatten(0, (8, 2))[:, -1].tanh(),
    "two heads of positions": lambda m, x: m(x.flatten(0, 1)).unflatten(0, (8, 2)).unbind(1)[0] / 2,
    "the last valid position": lambda m, x: (
        m(x.flatten(0, 1)).unflatten(0, (8, 2)).gather(1, torch.ones(8, 1, 2, dtype=torch.long)).squeeze(1) * 2
    ),
}


@each_optimizer
@pytest.mark.parametrize("form", SIDE_BY_SIDE)
@pytest.mark.parametrize("training", [False, True])
def test_positions_folded_into_the_batch_under_batch_norm(
    kind: type[NoisyOptimizer], form: str, training: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).train(training)
    optimizer = kind(model, ng.Gaussian(), num_data=50, stats_every=1)
    for _ in range(2):
        x = torch.randn(8, 2, 3)
        optimizer.step(lambda x=x: (SIDE_BY_SIDE[form](model, x), torch.zeros(8, 2)))
    assert optimizer.steps == 2


class Contrast(nn.Module):
    """Two views of each example in one pass, the second of which is compared with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(torch.stack([x, x + 0.1], 1)).unbind(1)
        return self.b(first * second).sigmoid()


@pytest.mark.parametrize("model", [Contrast(), nn.LSTM(3, 2, batch_first=True)], ids=["contrast", "LSTM"])
def test_models_that_take_parts_of_what_is_inside_them(model: nn.Module) -> None:
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=2)

    def output(x: Tensor) -> Tensor:
        return model(x) if isinstance(model, Contrast) else 2 * model(x[:, None].expand(-1, 5, -1))[1][0][-1]

    for _ in range(3):
        optimizer.step(lambda: (output(torch.randn(16, 3)), torch.zeros(16, 2)))
    assert optimizer.steps == 3


@pytest.mark.parametrize("length", [5, 16])
def test_the_last_of_a_sequence_in_front(length: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=2)
    for _ in range(3):
        optimizer.step(lambda: (model(torch.randn(length, 16, 3))[-1].sigmoid() * 2, torch.zeros(16, 2)))
    assert optimizer.steps == 3


def windows(m: nn.Module, x: Tensor) -> Tensor:
    """Two windows of each example side by side with the batch, of as many positions as there are examples."""
    hidden = m.a(x.flatten(0, 1)).tanh()
    return m.b(hidden.unflatten(0, x.shape[:2]).flatten(1)).tanh()


@pytest.mark.parametrize("positions", [3, 4])
def test_windows_as_long_as_the_batch(positions: int) -> None:
    model = random_weights(Model(windows, a=nn.Linear(3, 2), b=nn.Linear(4 * positions, 2)).double())
    x = normal(4, 2, positions, 3)
    close(measured_fisher(model, gaussian(), x, "full"), exact_fisher(model, gaussian(), x))


def test_bad_numbers_are_not_taken_for_another_order() -> None:
    model = Model(folded, a=nn.Linear(3, 4), b=nn.Linear(8, 2)).double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1)
    x = normal(5, 2, 3)
    x[1, 1] = torch.nan
    with pytest.raises(ng.NonFiniteError):
        optimizer.step(lambda: (model(x), torch.zeros(5, 2).double()))


def test_normalisation_over_the_batch_is_passed_over() -> None:
    """In training mode it mixes examples."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2)).double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1)
    for _ in range(2):
        optimizer.step(lambda: (model(normal(6, 2, 3)), torch.zeros(6, 2).double()))
    assert optimizer.steps == 2


def test_statistics_of_part_of_a_batch_ask_the_whole() -> None:
    """Of tables, squares and folded rows alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(0, 1), nn.Linear(3, 2), nn.Tanh(), nn.Unflatten(0, (6, 2)))
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, stats_every=1, stats_batch=4)
    optimizer.step(lambda: (model(torch.randint(6, (6, 2))), torch.zeros(6, 2, 2)))
    assert optimizer.steps == 1


# Rows in another order than the loss's

ORDER = torch.tensor([3, 1, 5, 0, 2, 4])


def sorted_inside(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x[ORDER]).tanh()[ORDER.argsort()])


def turned_inside(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.a(x.flip(0))
    return m.b(torch.stack(hidden.tanh().unbind(0)[::-1]))


def moved_and_kept(m: nn.Module, x: Tensor) -> Tensor:
    """Operations that could change the order, and do not."""
    hidden = torch.cat([m.a(x)[:2], m.a(x)[2:]]).tanh()
    return m.b(hidden[torch.arange(len(x))])


def pulled_apart(m: nn.Module, x: Tensor) -> Tensor:
    """A loss of each example and its neighbour: rows of several examples say nothing of an order."""
    hidden = m.a(x).tanh()
    return m.b(hidden - hidden.roll(1, 0))


def step_of(
    kind: type[NoisyOptimizer], run: Callable[[nn.Module, Tensor], Tensor], weight: Tensor | None, **options: object
) -> NoisyOptimizer:
    torch.manual_seed(0)
    model = Model(run, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    x, y = normal(6, 3), normal(6, 2, seed=2)
    optimizer = kind(model, ng.Gaussian(0.5), num_data=50, noise=False, fisher="exact", seed=1, **options)
    optimizer.step(lambda: (model(x), y, weight))
    return optimizer


WEIGHT = torch.tensor([1.0, 0.0, 0.0, 5.0, 1.0, 2.0], dtype=torch.float64)
PAIRED: list[tuple[type[NoisyOptimizer], dict[str, object]]] = [
    (ng.NoisyFull, {}),
    (ng.NoisyBlockTridiagonal, {}),
    (ng.NoisyKFAC, {"weight": WEIGHT}),
    (ng.NoisyEKFAC, {"weight": WEIGHT}),
    (ng.NoisyKFAC, {"stats_batch": 3}),
    (ng.NoisyAdam, {"stats_batch": 3}),
]


@pytest.mark.parametrize(("kind", "options"), PAIRED)
@pytest.mark.parametrize("run", [sorted_inside, turned_inside])
def test_another_order_of_examples_is_refused_where_it_matters(kind, options, run) -> None:
    """Else A, S and what the layers have in common would be of wrong pairs, by up to 80 %."""
    with pytest.raises(ValueError, match="layer 'a' saw the examples in another order than the loss has them"):
        step_of(kind, run, **{"weight": None} | options)


@pytest.mark.parametrize(("kind", "options"), PAIRED)
@pytest.mark.parametrize("run", [moved_and_kept, pulled_apart])
def test_rows_that_are_moved_without_another_order_are_taken(kind, options, run) -> None:
    assert step_of(kind, run, **{"weight": None} | options).steps == 1


@pytest.mark.parametrize(("kind", "weight"), [(ng.NoisyAdam, None), (ng.NoisyAdam, WEIGHT), (ng.NoisyKFAC, None)])
def test_another_order_is_nothing_to_layers_by_themselves(kind, weight) -> None:
    def plain(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.a(x).tanh())

    first, second = (step_of(kind, run, weight).covariance.statistics for run in (plain, sorted_inside))
    for name, statistics in first.items():
        for key, tensor in statistics.tensors().items():
            close(second[name].tensors()[key], tensor)


def test_the_order_is_measured_once_and_only_where_rows_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    real = fisher._reached
    monkeypatch.setattr(fisher, "_reached", lambda *given: passes.append(1) or real(*given))
    for run, expected in ((lambda m, x: m.b(m.a(x).tanh()), 0), (moved_and_kept, 6)):  # three bits of six examples
        model, x, y = Model(run, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double(), normal(6, 3), normal(6, 2)
        optimizer = ng.NoisyFull(model, ng.Gaussian(0.5), num_data=50, stats_every=1, seed=1)
        for _ in range(3):
            optimizer.step(lambda model=model, x=x, y=y: (model(x), y))
        assert len(passes) == expected
