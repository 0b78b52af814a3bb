import io
import math

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import noisygrad as ng
from noisygrad.kernels.threads import one_thread
from noisygrad.networks import MLP, ReplicatedMLP
from noisygrad.training import Annealed, CheckpointError, CosineDecay, EpochRecord, History, StepDecay, train
from noisygrad.training.batches import TensorBatches
from noisygrad.training.progress import Bar, Lines, Reporter, reporter
from support.toy_training import assert_same, fresh, snapshot, toy


@pytest.fixture(autouse=True)
def _on_one_thread():
    with one_thread():
        yield


def test_trains_and_records():
    optimizer = fresh(lr=0.1)
    records = []
    history = train(
        optimizer,
        toy(),
        epochs=30,
        batch_size=8,
        seed=0,
        on_epoch=lambda record: records.append(record) or {"twice": 2 * record.epoch},
    )
    assert history.epochs == len(history.loss) == len(history.seconds) == 30
    assert history.loss[-1] < history.loss[0]
    assert [record.epoch for record in records] == list(range(1, 31))
    assert history.metrics[4] == {"twice": 10.0}
    assert optimizer.steps == 90


def test_equals_the_loop_it_replaces():
    x, y = toy()
    optimizer, by_hand = fresh(), fresh()
    train(optimizer, (x, y), epochs=3, batch_size=10, shuffle=False)
    for _ in range(3):
        for start in range(0, 24, 10):
            bx, by = x[start : start + 10], y[start : start + 10]
            by_hand.step(lambda bx=bx, by=by: (by_hand.model(bx), by))
    assert_same(snapshot(optimizer), snapshot(by_hand))


def test_loss_is_the_mean_over_examples_even_with_a_short_last_batch():
    x = torch.arange(5.0).unsqueeze(-1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = train(optimizer, (x, x), epochs=1, batch_size=2, model=model, step=lambda x, y: y.mean())
    assert history.loss == [2.0]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [10, 10, 4]), (True, [10, 10])])
def test_batches_cover_the_data_once(drop_last, sizes):
    x = torch.arange(24.0).unsqueeze(-1)
    batches = TensorBatches(x, x, batch_size=10, drop_last=drop_last)
    seen = list(batches.epoch([0], 1))
    assert [count for _, count in seen] == [len(x) for (x, _), _ in seen] == sizes
    rows = torch.cat([x for (x, _), _ in seen]).flatten().long().tolist()
    assert len(set(rows)) == len(rows) == sum(sizes) == len(batches) * 10 - (0 if drop_last else 6)


def test_order_depends_on_seed_and_epoch_alone():
    x = torch.arange(50.0).unsqueeze(-1)
    batches = TensorBatches(x, x, batch_size=50)

    def order(seed, epoch):
        (((found, _), _),) = batches.epoch([seed], epoch)
        return found.flatten().tolist()

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 2) != order(1, 1)


def test_large_data_are_gathered_in_parts(monkeypatch):
    monkeypatch.setattr("noisygrad.training.batches._GATHERED_BYTES", 100)
    x, y = toy()
    parts = list(TensorBatches(x, y, batch_size=5).epoch([3], 2))
    monkeypatch.undo()
    whole = list(TensorBatches(x, y, batch_size=5).epoch([3], 2))
    for ((a, b), count), ((c, d), other) in zip(parts, whole, strict=True):
        assert count == other
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_equal_lone_trainings(shared):
    count = 3
    pairs = [toy(seed=0 if shared else i, dtype=torch.float64) for i in range(count)]
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    model = ReplicatedMLP((count,), 3, (5,), 1, generators=generators).double()
    options = {"num_data": 24, "stats_every": 1, "factor_every": 3}
    together = ng.NoisyKFAC(model, ng.Gaussian(), seed=10, **options)
    data = pairs[0] if shared else tuple(torch.stack(parts) for parts in zip(*pairs, strict=True))
    history = train(together, data, epochs=4, batch_size=7, seed=5)
    losses = []
    for index, pair in enumerate(pairs):
        lone = MLP(3, (5,), 1, generator=torch.Generator().manual_seed(index)).double()
        optimizer = ng.NoisyKFAC(lone, ng.Gaussian(), seed=10 + index, **options)
        losses.append(train(optimizer, pair, epochs=4, batch_size=7, seed=5 + index).loss)
        for name, tensor in optimizer.posterior().mean.items():
            torch.testing.assert_close(together.posterior().mean[name][index], tensor, rtol=1e-9, atol=1e-9)
    for epoch in range(4):
        assert history.loss[epoch] == pytest.approx(sum(loss[epoch] for loss in losses) / count)


def test_replicas_with_shared_inputs_and_own_targets():
    model = ReplicatedMLP((2,), 3, (), 1)
    optimizer = ng.NoisyAdam(model, ng.Gaussian(), num_data=24)
    x, y = toy()
    batches = TensorBatches(x, torch.stack([y, -y]), batch_size=6, replicas=(2,))
    for (bx, by), _ in batches.epoch([0, 1], 1):
        assert bx.shape == (2, 6, 3)
        torch.testing.assert_close(by, bx.sum(-1, keepdim=True).sin() * torch.tensor([1.0, -1.0]).view(2, 1, 1))
    train(optimizer, (x, torch.stack([y, -y])), epochs=1, batch_size=6)


def test_loader_and_scheduler_by_step():
    x, y = toy()
    optimizer = fresh(lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, CosineDecay(1.0, 12))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
    train(optimizer, loader, epochs=2, scheduler=scheduler, schedule_every="step")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_epoch_is_told_to_the_sampler():
    told = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    data = TensorDataset(*toy())
    train(fresh(), DataLoader(data, batch_size=8, sampler=Sampler(data)), epochs=2)
    assert told[-2:] == [1, 2]


def test_batches_of_a_loader_may_end_in_weights_and_a_mask():
    """Which count as in `draw.nll`."""
    x, y = toy()
    weight = torch.linspace(0.5, 2.0, len(x)).to(y)
    mask = torch.arange(len(x)) % 3 > 0
    for counted in ((weight,), (weight, mask), (None, mask)):
        trained, by_hand = fresh(), fresh()
        parts = [(None,) * 99 if part is None else part.split(8) for part in counted]
        batches = list(zip(x.split(8), y.split(8), *parts, strict=False))
        history = train(trained, batches, epochs=2)
        losses = []
        for x_, *rest in batches * 2:
            loss = by_hand.step(lambda model=by_hand.model, x_=x_, rest=rest: (model(x_), *rest))
            losses.append(float(loss) * len(x_))
        assert_same(snapshot(trained), snapshot(by_hand))
        assert history.loss[-1] == pytest.approx(sum(losses[len(batches) :]) / len(x))


def test_leaves_the_global_generator_alone():
    optimizer = fresh()
    before = torch.get_rng_state()
    train(optimizer, toy(), epochs=2, batch_size=8, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"schedule_every": "hour"}, 'schedule_every must be "epoch" or "step"'),
        ({"seed": [1, 2]}, "seed must be"),
        ({"seed": -1}, "seed must be"),
        ({"progress": "yes"}, "progress must be"),
        ({"data": (torch.ones(3, 3), torch.ones(4, 1))}, "x has 3 examples, y has not"),
        ({"data": (torch.ones(0, 3), torch.ones(0, 1))}, "the data are empty"),
        ({"data": iter([toy()]), "batch_size": None}, "gone through only once"),
        ({"data": [toy()]}, "a loader has its own"),
        ({"data": 3, "batch_size": None}, "data must be a pair of tensors"),
        ({"data": [], "batch_size": None}, "yielded no batch"),
        ({"data": [torch.ones(3)], "batch_size": None}, "must yield pairs of tensors"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    arguments = {"data": toy(), "epochs": 1, "batch_size": 8} | arguments
    with pytest.raises(ValueError, match=message):
        train(fresh(), arguments.pop("data"), **arguments)


def test_replicas_mistakes_are_explained():
    with pytest.raises(ValueError, match=r"x must be \[N, features\] or \[2, N, \.\.\.\]"):
        TensorBatches(torch.ones(3, 8, 2), torch.ones(3, 8), batch_size=2, replicas=(2,))
    with pytest.raises(ValueError, match="8 examples per replica"):
        TensorBatches(torch.ones(2, 8, 2), torch.ones(2, 7, 1), batch_size=2, replicas=(2,))


def test_other_optimisers_need_a_step():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="does not know its model"):
        train(optimizer, toy(), epochs=1)
    with pytest.raises(ValueError, match="does not know its loss"):
        train(optimizer, toy(), epochs=1, model=model)


# ------------------------------------------------------------------------------------------------ resuming


class KilledError(Exception):
    pass


def killer(epoch):
    def on_epoch(record):
        if record.epoch == epoch:
            raise KilledError

    return on_epoch


def dropout_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 1))


def runs(kind):
    """Two ways to set up a run from nothing: the optimiser, its data and its options."""
    x, y = toy()
    if kind == "tensors":
        optimizer = fresh()
        data, options = (x, y), {"batch_size": 7, "seed": 3}
    else:
        optimizer = ng.NoisyBlockTridiagonal(
            dropout_model(), ng.Gaussian(), num_data=24, seed=0, stats_every=1, factor_every=3, fisher_decay=0.9
        )
        generator = torch.Generator().manual_seed(1) if kind == "loader with a generator" else None
        data, options = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True, generator=generator), {}
        torch.manual_seed(2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return optimizer, data, options | {"scheduler": scheduler, "epochs": 6}


@pytest.mark.parametrize("kind", ["tensors", "loader", "loader with a generator"])
@pytest.mark.parametrize("killed_in", [1, 4])
def test_resumed_equals_uninterrupted(kind, killed_in, tmp_path):
    optimizer, data, options = runs(kind)
    history = train(optimizer, data, **options)
    path = tmp_path / "deep" / "run.safetensors"

    victim, data, options = runs(kind)
    with pytest.raises(KilledError):
        train(victim, data, **options, checkpoint=path, on_epoch=killer(killed_in))
    resumed, data, options = runs(kind)
    again = train(resumed, data, **options, checkpoint=path)

    assert_same(snapshot(resumed), snapshot(optimizer))
    assert again.loss == history.loss
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_finished_run_is_not_repeated_but_can_be_extended(tmp_path):
    path = tmp_path / "run.safetensors"
    first = fresh()
    train(first, toy(), epochs=2, batch_size=8, checkpoint=path)
    second = fresh(seed=7)
    calls = []
    history = train(second, toy(), epochs=2, batch_size=8, checkpoint=path, on_epoch=calls.append)
    assert not calls
    assert history.epochs == 2
    assert_same(snapshot(first), snapshot(second))
    assert train(second, toy(), epochs=3, batch_size=8, checkpoint=path).epochs == 3


def test_checkpoint_every_and_no_resume(tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KilledError):
        train(fresh(), toy(), epochs=9, batch_size=8, checkpoint=path, checkpoint_every=3, on_epoch=killer(5))
    seen = []
    train(fresh(), toy(), epochs=9, batch_size=8, checkpoint=path, on_epoch=lambda r: seen.append(r.epoch))
    assert seen == [4, 5, 6, 7, 8, 9]
    train(fresh(), toy(), epochs=1, batch_size=8, checkpoint=path, resume=False, on_epoch=lambda r: seen.append(0))
    assert seen[-1] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch_size": 6}, "batch_size = 8, this one has 6"), ({"seed": 1}, r"seed = \[0\], this one has \[1\]")],
)
def test_checkpoint_of_another_run_is_refused(tmp_path, change, message):
    path = tmp_path / "run.safetensors"
    options = {"epochs": 2, "batch_size": 8, "seed": 0, "checkpoint": path}
    train(fresh(), toy(), **options)
    with pytest.raises(CheckpointError, match=message):
        train(fresh(), toy(), **options | change)


def test_truncated_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    train(fresh(), toy(), epochs=1, batch_size=8, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"run\.safetensors is truncated .* delete it \(or give resume=False\)"):
        train(fresh(), toy(), epochs=2, batch_size=8, checkpoint=path)


# ------------------------------------------------------------------------------------------------ progress


def test_silent_without_a_terminal_unless_asked(capsys):
    train(fresh(), toy(), epochs=2, batch_size=8)
    assert capsys.readouterr() == ("", "")
    train(fresh(), toy(), epochs=2, batch_size=8, progress=True)
    assert "epoch 2/2" in capsys.readouterr().err
    train(fresh(), toy(), epochs=2, batch_size=8, progress=False)
    assert capsys.readouterr().err == ""


def test_progress_function():
    records = []
    train(fresh(), toy(), epochs=2, batch_size=8, progress=records.append)
    assert [(record.epoch, record.epochs) for record in records] == [(1, 2), (2, 2)]


def test_bar_shows_epoch_and_loss():
    file = io.StringIO()
    with Bar(3, 1, Console(file=file, force_terminal=True, width=100)) as bar:
        bar.within(1.5)
        bar.finished(EpochRecord(3, 3, 0.125, 1.0))
    assert "epoch 3/3" in file.getvalue()
    assert "loss 0.125" in file.getvalue()


def test_reporter_is_chosen_by_the_terminal(monkeypatch):
    assert type(reporter(None, 3)) is Reporter
    assert type(reporter(True, 3)) is Lines
    monkeypatch.setattr("rich.console.Console", lambda **options: Console(file=io.StringIO(), force_terminal=True))
    assert type(reporter(None, 3)) is Bar
    assert type(reporter(False, 3)) is Reporter


# ------------------------------------------------------------------------------------------------ schedules


def test_schedules():
    halved = StepDecay(0.01, (500,))
    assert halved(1) == halved(500) == 0.01
    assert halved(501) == pytest.approx(1e-3)
    decay = Annealed(halved)
    assert decay(1) == 0.99
    assert decay(501) == pytest.approx(0.999)
    cosine = CosineDecay(2.0, 10, final=0.1)
    assert cosine(0) == 2.0
    assert cosine(5) == pytest.approx(1.1)
    assert cosine(10) == cosine(99) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepDecay(0.0, (1,)),
        lambda: StepDecay(1.0, (1,), factor=0.0),
        lambda: StepDecay(1.0, (-1,)),
        lambda: CosineDecay(1.0, 0),
        lambda: CosineDecay(1.0, 5, final=2.0),
    ],
)
def test_schedule_mistakes(make):
    with pytest.raises(ValueError, match=r"must|at least"):
        make()


def test_history_round_trip():
    history = History()
    history.append(EpochRecord(1, 2, 0.5, 0.1), {"a": math.inf})
    assert History.from_dict(history.to_dict()) == history
