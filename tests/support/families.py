"""Cases of every family, small enough to be compared with their dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from noisygrad.curvature.passes import MatrixPass
from noisygrad.families import dense, diagonal, kronecker, tridiagonal
from noisygrad.families.base import Precision, Prior
from noisygrad.families.units import Unit

BATCHES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2))
seeds = st.integers(0, 10_000)
few = settings(max_examples=4, deadline=None)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(seed: int, *shape: int) -> Tensor:
    return normal(seed, *shape).exp() * 0.1


def diagonal_case(seed: int, batch: tuple[int, ...], fitted: bool, damping: float) -> tuple[Prior, Precision]:
    prior = diagonal.Prior(positive(seed, *batch, 7))
    if fitted:
        prior = diagonal.Statistics(normal(seed + 9, *batch, 3, 7).square().mean(-2)).factorise(prior).as_prior()
    return prior, diagonal.Statistics(normal(seed + 1, *batch, 4, 7).square().mean(-2)).factorise(prior, damping)


def dense_case(seed: int, batch: tuple[int, ...], fitted: bool, damping: float) -> tuple[Prior, Precision]:
    prior = dense.Prior(positive(seed, *batch, 7), diagonal=True)
    if fitted:
        prior = dense.Statistics.measure(normal(seed + 9, *batch, 3, 7)).factorise(prior).as_prior()
    return prior, dense.Statistics.measure(normal(seed + 1, *batch, 4, 7)).factorise(prior, damping)


def layer_moments(activations: Tensor, gradients: Tensor, constant: bool) -> kronecker.Statistics:
    """A and S of one pass through a layer."""
    one = MatrixPass(activations, gradients, constant)
    return kronecker.Statistics(one.input_moment(), one.output_moment())


def chain_moments(
    activations: Sequence[Tensor], gradients: Sequence[Tensor], constants: Sequence[bool]
) -> tridiagonal.Statistics:
    """What the family measures of one pass through a chain of layers."""
    layers = enumerate(zip(activations, gradients, constants, strict=True))
    passes = {str(index): MatrixPass(*layer) for index, layer in layers}
    units = [
        Unit(name, "matrix", one.gradients.shape[-1], one.activations.shape[-1] + one.constant, (), "Linear")
        for name, one in passes.items()
    ]
    columns = [torch.ones(unit.inputs, dtype=torch.float64) for unit in units]
    prior = tridiagonal.Prior.from_columns(columns, [unit.outputs for unit in units])
    found = tridiagonal.TRIDIAGONAL.measure(units, passes, tridiagonal.TRIDIAGONAL.identity(prior))
    assert isinstance(found, tridiagonal.Statistics)
    return found


def kronecker_statistics(seed: int, batch: tuple[int, ...], outputs: int, inputs: int) -> kronecker.Statistics:
    """One example of three positions: fewer than the sizes, so that both factors are singular."""
    activations, gradients = normal(seed, *batch, 1, 3, inputs - 1), normal(seed + 1, *batch, 1, 3, outputs)
    return layer_moments(activations, gradients, constant=True)


def kronecker_case(mode: str, outputs: int = 4, inputs: int = 5) -> Callable[..., tuple[Prior, Precision]]:
    def make(seed: int, batch: tuple[int, ...], fitted: bool, damping: float) -> tuple[Prior, Precision]:
        prior = kronecker.Prior.from_columns(positive(seed, *batch, inputs), outputs)
        if fitted:
            prior = kronecker_statistics(seed + 5, batch, outputs, inputs).factorise(prior, mode=mode).as_prior()
        return prior, kronecker_statistics(seed + 7, batch, outputs, inputs).factorise(prior, damping, mode)

    return make


def chain_statistics(seed: int, batch: tuple[int, ...], shapes: list[tuple[int, int]]) -> tridiagonal.Statistics:
    """Layers without a constant wherever the layer has an odd index, so that borders of every kind occur."""
    constants = [i % 2 == 0 for i in range(len(shapes))]
    activations = [
        normal(seed + i, *batch, 2, 2, n - c) for i, ((_, n), c) in enumerate(zip(shapes, constants, strict=True))
    ]
    gradients = [normal(seed + 50 + i, *batch, 2, 2, m) for i, (m, _) in enumerate(shapes)]
    return chain_moments(activations, gradients, constants)


def chain_prior(seed: int, batch: tuple[int, ...], shapes: list[tuple[int, int]]) -> tridiagonal.Prior:
    columns = [positive(seed + 80 + i, *batch, n) for i, (_, n) in enumerate(shapes)]
    return tridiagonal.Prior.from_columns(columns, [m for m, _ in shapes])


def tridiagonal_case(*shapes: tuple[int, int]) -> Callable[..., tuple[Prior, Precision]]:
    def make(seed: int, batch: tuple[int, ...], fitted: bool, damping: float) -> tuple[Prior, Precision]:
        prior = chain_prior(seed, batch, list(shapes))
        if fitted:
            prior = chain_statistics(seed + 100, batch, list(shapes)).factorise(prior).as_prior()
        return prior, chain_statistics(seed, batch, list(shapes)).factorise(prior, damping)

    return make


CASES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "diagonal": diagonal_case,
    "dense": dense_case,
    "kronecker-factored": kronecker_case("factored"),
    "kronecker-exact": kronecker_case("exact"),
    "kronecker-scalar-output": kronecker_case("factored", outputs=1),
    "kronecker-scalar-input": kronecker_case("factored", inputs=1),
    "kronecker-scalar-both": kronecker_case("factored", outputs=1, inputs=1),
    "tridiagonal-1": tridiagonal_case((3, 4)),
    "tridiagonal-2": tridiagonal_case((3, 5), (2, 4)),
    "tridiagonal-3": tridiagonal_case((3, 4), (4, 3), (2, 5)),
    "tridiagonal-scalar-output": tridiagonal_case((3, 4), (3, 3), (1, 4)),
}
ONE_PRODUCT = [name for name in CASES if name != "kronecker-exact"]
"""Those whose precision has the structure of a prior, so that `as_prior` is no approximation."""


def for_every_case(test: Any) -> Any:
    return _parametrised(test, list(CASES))


def for_every_prior_like_case(test: Any) -> Any:
    return _parametrised(test, ONE_PRODUCT)


def _parametrised(test: Any, names: list[str]) -> Any:
    test = pytest.mark.parametrize("fitted", [False, True], ids=["fresh", "fitted"])(test)
    test = pytest.mark.parametrize("batch", BATCHES, ids=str)(test)
    return pytest.mark.parametrize("name", names)(test)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def units(size: int, batch: tuple[int, ...]) -> Tensor:
    """Unit vectors along the first dimension, so that results have their columns there."""
    return torch.eye(size, dtype=torch.float64).reshape(size, *(1,) * len(batch), size).expand(size, *batch, size)


def columns(function: Callable[[Tensor], Tensor], size: int, batch: tuple[int, ...]) -> Tensor:
    return function(units(size, batch)).movedim(0, -1)
