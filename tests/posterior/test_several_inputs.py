"""Models with several inputs, by place or by name: training, prediction, the ELBO, and batch statistics of a draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import noisygrad as ng
from noisygrad.posterior.inputs import Call

SETTINGS = {"num_data": 40, "stats_every": 1, "factor_every": 1, "lr": 0.05, "seed": 0}


class Two(nn.Module):
    """Adds what it makes of a number of features and of a word; a number without dimensions scales both."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.words = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor, word: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.features(x) + self.words(word)
        return self.out(hidden if scale is None else scale * hidden)


class One(Two):
    """The same network with both inputs in one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[:, :3], x[:, 3].long())


@pytest.fixture
def data() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, word = torch.randn(40, 3), torch.randint(5, (40,))
    return x, word, x.sum(dim=1, keepdim=True) + word.unsqueeze(1)


def fitted(model: nn.Module, batches: list[tuple[object, Tensor]]) -> ng.Posterior:
    torch.manual_seed(1)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), **SETTINGS)
    ng.train(optimizer, batches, epochs=5, progress=False)
    return optimizer.posterior()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("form", ["tuple", "list", "mapping"])
def test_several_inputs_are_as_one(form: str, data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, word, y = data

    def put(rows: slice) -> object:
        parts = {"x": x[rows], "word": word[rows]}
        return parts if form == "mapping" else tuple(parts.values()) if form == "tuple" else list(parts.values())

    rows = [slice(0, 20), slice(20, 40)]
    together = torch.cat([x, word.unsqueeze(1)], dim=1)
    several = fitted(Two(), [(put(part), y[part]) for part in rows])
    single = fitted(One(), [(together[part], y[part]) for part in rows])
    torch.testing.assert_close(several.mean, single.mean)
    every, options = put(slice(None)), {"num_samples": 4, "norm_data": together}
    expected = single.predict(together, generator=seeded(), **options).mean
    options["norm_data"] = every
    torch.testing.assert_close(several.predict(every, generator=seeded(), **options).mean, expected)
    torch.testing.assert_close(
        several.predict(every, 4, batch_size=7, generator=seeded()).mean,
        single.predict(together, 4, generator=seeded()).mean,
    )
    elbos = [
        posterior.elbo([(inputs, y)], 4, seeded(), norm_data=inputs)
        for posterior, inputs in ((several, every), (single, together))
    ]
    torch.testing.assert_close(*elbos)


def test_a_loader_that_does_not_join_the_inputs_is_told_what_to_do(data: tuple[Tensor, Tensor, Tensor]) -> None:
    """Of up to four tensors the later ones are targets, weights and a mask, so that the model lacks an input."""
    x, word, y = data
    optimizer = ng.NoisyKFAC(Two(), ng.Gaussian(), **SETTINGS)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'word'"):
        ng.train(optimizer, DataLoader(TensorDataset(x, word, y)), epochs=1, progress=False)
    with pytest.raises(
        ValueError, match=r"where x may be several in a tuple .* it yielded a list of Tensor(, Tensor){4}\."
    ):
        ng.train(optimizer, DataLoader(TensorDataset(x, word, word, word, y)), epochs=1, progress=False)
    with pytest.raises(ValueError, match="it yielded a tuple of tuple, Tensor"):
        ng.train(optimizer, [((x, word.tolist()), y)], epochs=1, progress=False)


def test_a_pair_of_several_inputs_and_targets_is_no_loader(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, word, y = data
    optimizer = ng.NoisyKFAC(Two(), ng.Gaussian(), **SETTINGS)
    for inputs in ((x, word), {"x": x, "word": word}):
        with pytest.raises(ValueError, match="several inputs give an iterable of such batches"):
            ng.train(optimizer, (inputs, y), epochs=1, progress=False)


def test_a_tensor_without_dimensions_is_for_all_examples(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, word, y = data
    posterior = fitted(Two(), [((x, word), y)])
    scale = torch.tensor(0.5)
    whole = posterior.outputs((x, word, scale), 2, generator=seeded())
    torch.testing.assert_close(posterior.outputs((x, word, scale), 2, batch_size=7, generator=seeded()), whole)
    assert not torch.allclose(posterior.outputs((x, word), 2, generator=seeded()), whole)


def test_inputs_that_do_not_fit_are_named(data: tuple[Tensor, Tensor, Tensor]) -> None:
    x, word, y = data
    posterior = fitted(Two(), [((x, word), y)])
    with pytest.raises(ValueError, match="the inputs have 30, 40 examples"):
        posterior.predict((x, word[:30]), 2, batch_size=8)
    with pytest.raises(TypeError, match="got ndarray under 'word'"):
        posterior.predict({"x": x, "word": word.numpy()}, 2)
    with pytest.raises(TypeError, match="got list in place 1"):
        posterior.predict((x, word.tolist()), 2)
    for nothing in ([], (), x.tolist(), None):
        with pytest.raises(TypeError, match="data must be tensors"):
            posterior.predict(nothing, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two examples"):
        posterior.predict((x, word), 2, norm_data=(x[:1], word[:1]))


def test_no_examples_are_no_trouble() -> None:
    call = Call.of((torch.zeros(0, 3),))
    assert [part.args[0].shape for part in call.batches(4, lambda tensor: 0)] == [(0, 3)]
