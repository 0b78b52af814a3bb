"""PBP_MV: rotations are orthogonal, their derivatives are autograd's, and without them it is PBP."""

import itertools
import math

import pytest
import torch

from noisygrad_paper.baselines.pbp import PBP
from noisygrad_paper.baselines.pbp_mv import PBPMV, Rotation, reflect

DOUBLE = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def learner(kind=PBPMV, replicas=1, sizes=(3, (4,), 1), first_seed=0, **options):
    generators = [seeded(first_seed + index) for index in range(replicas)]
    return kind(*sizes, replicas=replicas, generators=generators, **options)


def regression(count, inputs=3, outputs=1, replicas=1, seed=1):
    x = torch.randn(replicas, count, inputs, dtype=DOUBLE, generator=seeded(seed))
    y = torch.sin(2.0 * x[..., :outputs]) + 0.3 * x[..., -1:]
    return x, (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)


def train(model, x, y, epochs=1, step=None):
    for _ in range(epochs):
        for index in range(x.shape[1]):
            (step or model.step_)(x[:, index : index + 1], y[:, index : index + 1], {})
        model.end_epoch_()


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=DOUBLE, generator=seeded(seed)), dim=-1)


def units(replicas, count, size):
    return [unit(replicas, size, seed=10 + index) for index in range(count)]


def dense_rotation(normals):
    """H₁ H₂ … as matrices, `[R, k, k]`."""
    matrix = torch.eye(normals[0].shape[-1], dtype=DOUBLE)
    for normal in normals:
        matrix = matrix @ (
            torch.eye(normal.shape[-1], dtype=DOUBLE) - 2.0 * normal[..., :, None] * normal[..., None, :]
        )
    return matrix


def test_reflect_is_a_householder_matrix():
    normal, vectors = unit(2, 5), torch.randn(2, 3, 5, dtype=DOUBLE, generator=seeded(1))
    torch.testing.assert_close(reflect(vectors, normal), vectors @ dense_rotation([normal]).mT, rtol=0, atol=1e-14)
    torch.testing.assert_close(reflect(reflect(vectors, normal), normal), vectors, rtol=0, atol=1e-14)


@pytest.mark.parametrize("reflections", [1, 2, 3])
def test_rotation_moves_means_and_keeps_the_diagonal_of_the_covariance(reflections):
    normals = units(2, reflections, 5)
    matrix = dense_rotation(normals)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(5, dtype=DOUBLE).expand(2, 5, 5), rtol=0, atol=1e-14)
    mean = torch.randn(2, 3, 5, dtype=DOUBLE, generator=seeded(1))
    variance = torch.rand(2, 3, 5, dtype=DOUBLE, generator=seeded(2))
    rotated = Rotation(normals).forward(mean, variance)
    for replica, example in itertools.product(range(2), range(3)):
        at = (replica, example)
        covariance = matrix[replica] @ torch.diag(variance[at]) @ matrix[replica].mT
        torch.testing.assert_close(rotated[0][at], matrix[replica] @ mean[at], rtol=0, atol=1e-13)
        torch.testing.assert_close(rotated[1][at], covariance.diagonal(), rtol=0, atol=1e-13)
    assert Rotation(normals).forward(mean, None)[1] is None


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("reflections", [1, 2, 4])
def test_rotation_gradients_are_autograds(reflections, certain):
    normals = [normal.requires_grad_() for normal in units(2, reflections, 5)]
    mean = torch.randn(2, 1, 5, dtype=DOUBLE, generator=seeded(1), requires_grad=True)
    variance = torch.rand(2, 1, 5, dtype=DOUBLE, generator=seeded(2), requires_grad=True)
    by_mean, by_variance = (torch.randn(2, 1, 5, dtype=DOUBLE, generator=seeded(seed)) for seed in (3, 4))
    matrix = dense_rotation(normals)
    value = (by_mean * (mean @ matrix.mT)).sum()
    if not certain:
        value = value + (by_variance * (variance @ matrix.square().mT)).sum()
    expected = torch.autograd.grad(value, (mean, variance, *normals), allow_unused=True)

    rotation = Rotation([normal.detach() for normal in normals])
    rotation.forward(mean.detach(), None if certain else variance.detach())
    upstream = (by_mean, None if certain else by_variance)
    for found, gradient, normal in zip(rotation.parameter_gradients(*upstream), expected[2:], normals, strict=True):
        tangent = gradient - (gradient * normal).sum(-1, keepdim=True) * normal
        torch.testing.assert_close(found, tangent, rtol=0.0, atol=1e-10)
    inputs = rotation.input_gradients(*upstream)
    torch.testing.assert_close(inputs[0], expected[0], rtol=0.0, atol=1e-10)
    assert (inputs[1] is None) == certain
    if not certain:
        torch.testing.assert_close(inputs[1], expected[1], rtol=0.0, atol=1e-10)


def test_a_network_is_its_rotated_weights():
    """With C certain, W = P C Qᵀ is an ordinary network."""
    model = learner(sizes=(3, (4, 5), 2), replicas=2)
    for variance in model.variances:
        variance.fill_(1e-24)
    x, _ = regression(6, replicas=2)
    value = x
    rotations = iter([dense_rotation(normals) for normals in model.normals])
    for index, mean in enumerate(model.means):
        inner, outer = next(rotations), next(rotations)
        value = torch.nn.functional.pad(value, (0, 1), value=1.0)
        value = value @ (outer @ mean @ inner).mT / math.sqrt(value.shape[-1])
        value = value.clamp(min=0.0) if index < 2 else value
    torch.testing.assert_close(model.moments(x).mean, value, rtol=0.0, atol=1e-9)


def test_log_evidence_gradients_reach_every_normal():
    """Adam's first step has the sign of the gradient of log Z, and is as long as its rate."""
    model = learner(sizes=(3, (4, 5), 1), reflections=3, rotation_lr=1e-6)
    x, y = (part[:, :1] for part in regression(5))
    flat = list(itertools.chain(*model.normals))
    start = [normal.clone() for normal in flat]
    for normal in flat:
        normal.requires_grad_()
    mean, variance = model.moments(x)
    total = variance + 6.0 / 5.0
    log_z = (-0.5 * total.log() - (y - mean).square() / (2.0 * total)).sum()
    gradients = torch.autograd.grad(log_z, flat)
    for normal in flat:
        normal.requires_grad_(False)
    model.step_(x, y, {})
    assert len(start) == 5 * 3
    for before, after, average, gradient in zip(start, flat, model.averages, gradients, strict=True):
        tangent = gradient - (gradient * before).sum(-1, keepdim=True) * before
        torch.testing.assert_close(average, 0.1 * tangent, rtol=0.0, atol=1e-10)
        step = 1e-6 * tangent / (tangent.abs() + 1e-8 / math.sqrt(1e-3))
        torch.testing.assert_close(after, torch.nn.functional.normalize(before + step, dim=-1), rtol=0.0, atol=1e-11)


def test_with_no_rotation_it_is_pbp():
    """Two equal reflections are the identity, and with no rate they stay so."""
    x, y = regression(10, replicas=2)
    plain, rotated = learner(PBP, replicas=2), learner(replicas=2, reflections=2)
    rotated.anneal.zero_()
    for first, second in rotated.normals:
        second.copy_(first)
    train(plain, x, y, epochs=2)
    train(rotated, x, y, epochs=2)
    theirs = rotated.tensors()
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-10, atol=1e-10)


def test_replicas_are_lone_runs():
    x, y = regression(12, replicas=3)
    together = learner(replicas=3)
    train(together, x, y, epochs=2)
    for index in range(3):
        alone = learner(first_seed=index)
        train(alone, x[index : index + 1], y[index : index + 1], epochs=2)
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(together.tensors()[name][index], tensor[0], rtol=1e-11, atol=1e-11)


def test_a_regression_improves_and_normals_stay_units():
    x, y = regression(80, inputs=2)
    model = learner(sizes=(2, (20,), 1))
    before = model.predict(x, 1, []).log_prob(y).mean().item()
    start = [normal.clone() for normal in itertools.chain(*model.normals)]
    train(model, x, y, epochs=10)
    prediction = model.predict(x, 1, [])
    assert (prediction.mean - y).square().mean().sqrt().item() < 0.4
    assert prediction.log_prob(y).mean().item() > before + 0.5
    for first, normal in zip(start, itertools.chain(*model.normals), strict=True):
        assert normal.norm().item() == pytest.approx(1.0, abs=1e-12)
        assert (normal - first).norm() > 1e-3


def test_constant_and_duplicate_columns_leave_the_state_finite():
    x, y = regression(30, inputs=4)
    x[..., 1] = 0.0
    x[..., 2] = x[..., 0]
    model = learner(sizes=(4, (6,), 1))
    train(model, x, y.round() * 1e-3, epochs=5)
    assert all(tensor.isfinite().all() for tensor in model.tensors().values())


def test_traced_equals_eager_and_the_state_stays_where_it_is():
    torch._dynamo.reset()
    x, y = regression(6, replicas=2)
    eager, traced = learner(replicas=2), learner(replicas=2)
    places = {name: tensor.data_ptr() for name, tensor in traced.tensors().items()}
    train(eager, x, y)
    train(traced, x, y, step=torch.compile(traced.step_, fullgraph=True, dynamic=False, backend="aot_eager"))
    assert {name: tensor.data_ptr() for name, tensor in traced.tensors().items()} == places
    for name, tensor in eager.tensors().items():
        torch.testing.assert_close(traced.tensors()[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [PBP, PBPMV])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_equals_eager(kind):
    x, y = (tensor.cuda() for tensor in regression(6, replicas=2))
    eager, captured = (learner(kind, replicas=2, device="cuda") for _ in range(2))
    train(eager, x, y, epochs=2)
    batch = (x[:, :1].clone(), y[:, :1].clone())
    start = {name: tensor.clone() for name, tensor in captured.tensors().items()}
    captured.step_(*batch, {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step_(*batch, {})
    for name, tensor in captured.tensors().items():
        tensor.copy_(start[name])

    def replay(a, b, noise):
        batch[0].copy_(a)
        batch[1].copy_(b)
        graph.replay()

    train(captured, x, y, epochs=2, step=replay)
    for name, tensor in eager.tensors().items():
        torch.testing.assert_close(captured.tensors()[name], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{"reflections": 0}, {"rotation_lr": 0.0}, {"rotation_lr": math.nan}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match="use PBP"):
        learner(**options)
