"""The information gain against the KL between dense Gaussians, before and after a small step."""

import functools

import pytest

for _module in ("Box2D", "gymnasium", "sb3_contrib"):
    pytest.importorskip(_module)

import torch
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import functional_call, jacrev

import noisygrad as ng
from noisygrad.exploration import information_gain
from noisygrad_paper.baselines.bbb_network import BayesByBackprop

EXAMPLES, INPUTS, HIDDEN, OUTPUTS = 5, 3, 4, 2
NOISE = 0.5


def fitted(method, **settings):
    """The posterior of a small network in float64 after a few steps, with its examples."""
    torch.manual_seed(0)
    model = ng.networks.MLP(INPUTS, (HIDDEN,), OUTPUTS, "tanh").double()
    x, y = torch.randn(EXAMPLES, INPUTS).double(), torch.randn(EXAMPLES, OUTPUTS).double()
    optimizer = method(model, ng.Gaussian(noise_variance=NOISE), num_data=20, **settings)
    for _ in range(5):
        optimizer.step(lambda: (model(x), y))
    return optimizer.posterior(), x, y


METHODS = {
    "kronecker": functools.partial(fitted, ng.NoisyKFAC, lr=0.01),
    "kronecker, exact damping": functools.partial(fitted, ng.NoisyKFAC, lr=0.01, damping_mode="exact"),
    "diagonal": functools.partial(fitted, ng.NoisyAdam, lr=0.01),
    "Bayes by Backprop": functools.partial(fitted, BayesByBackprop, initial_std=0.3),
}


def per_example(posterior, x, y, draws):
    """For each example: gradient of the log-likelihood and Fisher over all weights, means over the draws."""
    names = list(posterior.mean)

    def outputs(flat, example):
        pieces = flat.split([posterior.mean[name].numel() for name in names])
        weights = {n: piece.view_as(posterior.mean[n]) for n, piece in zip(names, pieces, strict=True)}
        return functional_call(posterior.model, weights, (example,))

    for example, target in zip(x, y, strict=True):
        gradient, fisher = 0.0, 0.0
        for draw in draws:
            flat = torch.cat([draw[name].flatten() for name in names])
            jacobian = jacrev(outputs)(flat, example)
            residual = target - outputs(flat, example)
            gradient = gradient + jacobian.T @ residual / NOISE / len(draws)
            fisher = fisher + jacobian.T @ jacobian / NOISE / len(draws)
        yield gradient, fisher


def layers(posterior):
    """Where the weights of each layer (matrix, then bias) lie in the vector of all parameters."""
    sizes = [tensor.numel() for tensor in posterior.mean.values()]
    places = torch.arange(sum(sizes)).split(sizes)
    return [torch.cat(places[i : i + 2]) for i in range(0, len(places), 2)]


def dense_kl(posterior, x, y, draws, step):
    """KL(q' ‖ q) per example: mean by αΣg, precision by αF, within the family's blocks."""
    covariance = posterior.covariance().double()
    diagonal = posterior.family == "diagonal"
    found = []
    for gradient, fisher in per_example(posterior, x, y, draws):
        total = 0.0
        for layer in layers(posterior):
            sigma, f, g = covariance[layer][:, layer], fisher[layer][:, layer], gradient[layer]
            if diagonal:
                f = torch.diag(f.diagonal())
            new = torch.linalg.inv(torch.linalg.inv(sigma) + step * f)
            moved = MultivariateNormal(step * sigma @ g, (new + new.T) / 2)
            total = total + kl_divergence(moved, MultivariateNormal(torch.zeros_like(g), sigma))
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("num_samples", [0, 1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_exact_gain_is_the_dense_kl_of_small_steps(method, num_samples):
    posterior, x, y = METHODS[method]()
    source = torch.Generator().manual_seed(1)
    draws = [posterior.sample(source) for _ in range(num_samples)] or [posterior.mean]
    errors = []
    for step in (1e-2, 1e-3):
        source = torch.Generator().manual_seed(1)
        gain = information_gain(posterior, x, y, num_samples=num_samples, step_size=step, generator=source)
        truth = dense_kl(posterior, x, y, [{n: t.double() for n, t in draw.items()} for draw in draws], step)
        errors.append((gain / truth - 1).abs().max().item())
    assert errors[1] < 5e-3
    assert errors[1] < 0.2 * errors[0]  # second order: what is left shrinks with the step


def test_one_example_one_output_is_the_formula_of_rank_one():
    """½ α² pq + ¼ α² (pq)² with q = 1: a residual of 1 under a noise of 1."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=10)
    x = torch.randn(1, 3).double()
    posterior = optimizer.posterior()
    p = torch.cat([x[0], torch.ones(1)]) @ posterior.covariance() @ torch.cat([x[0], torch.ones(1)])
    gain = information_gain(posterior, x, model(x).detach() + 1.0, num_samples=0, step_size=0.1)
    torch.testing.assert_close(gain[0], 0.01 * (0.5 * p + 0.25 * p**2).double(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("num_samples", [0, 3])
def test_blockwise_gain_moves_each_factor_by_itself(num_samples):
    posterior, x, y = METHODS["kronecker"]()
    source = torch.Generator().manual_seed(1)
    draws = [posterior.sample(source) for _ in range(num_samples)] or [posterior.mean]
    step, source = 1e-3, torch.Generator().manual_seed(1)
    gain = information_gain(
        posterior, x, y, num_samples=num_samples, step_size=step, covariance="blockwise", generator=source
    )
    truth = []
    for gradient, fisher in per_example(posterior, x, y, draws):
        total = 0.0
        for (_, precision), layer, outputs in zip(
            posterior.noisy_blocks(), layers(posterior), (HIDDEN, OUTPUTS), strict=True
        ):
            total = total + factor_kl(posterior, precision, layer, outputs, gradient, fisher, step)
        truth.append(total)
    torch.testing.assert_close(gain, torch.stack(truth), rtol=5e-3, atol=0.0)


def factor_kl(posterior, precision, layer, outputs, gradient, fisher, step):
    """½ α² gᵀΣg, then the KL of a step of Σ₁ alone and of a step of Σ₂ alone, of one example."""
    columns = len(layer) // outputs
    # From (matrix, bias) to the rows of [W | b].
    rows = torch.cat([layer[: outputs * (columns - 1)].view(outputs, -1), layer[outputs * (columns - 1) :, None]], 1)
    order = rows.flatten()
    g, f = gradient[order], fisher[order][:, order].view(outputs, columns, outputs, columns)
    scale = posterior.kl_weight / posterior.num_data
    second, first = scale * precision.left @ precision.left.T, precision.right @ precision.right.T
    sigma = torch.kron(second, first)
    of_first = -0.5 * torch.einsum("oipj,op->ij", f, second)
    of_second = -0.5 * torch.einsum("oipj,ij->op", f, first)
    new_first = first + step * (2 / outputs) * first @ of_first @ first
    new_second = second + step * (2 / columns) * second @ of_second @ second
    old = MultivariateNormal(torch.zeros_like(g), sigma)
    moved = [
        MultivariateNormal(torch.zeros_like(g), s)
        for s in (torch.kron(second, new_first), torch.kron(new_second, first))
    ]
    return 0.5 * step**2 * g @ sigma @ g + sum(kl_divergence(new, old) for new in moved)


def test_blockwise_is_a_fixed_share_of_exact_for_rank_one():
    """With one output the Fisher of an example is of rank one, and the covariance's term differs by 1/out + 1/in."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    posterior = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=0.1), num_data=5).posterior()
    x = torch.randn(6, 4).double()
    y = model(x).detach()  # no residual: the mean does not move
    exact, blockwise = (
        information_gain(posterior, x, y, num_samples=0, covariance=covariance) for covariance in ("exact", "blockwise")
    )
    torch.testing.assert_close(blockwise, exact * (1 + 1 / 5))


def test_examples_do_not_see_each_other():
    posterior, x, y = METHODS["kronecker"]()
    many = information_gain(posterior, x.repeat(500, 1), y.repeat(500, 1), num_samples=0)
    torch.testing.assert_close(many, information_gain(posterior, x, y, num_samples=0).repeat(500))


def test_a_surprise_teaches_more():
    posterior, x, _ = METHODS["kronecker"]()
    expected = posterior.model(x).detach()
    gains = [information_gain(posterior, x, expected + shift, num_samples=0) for shift in (0.0, 1.0, 3.0)]
    assert (gains[0] > 0).all()
    assert (gains[1] > gains[0]).all()
    assert (gains[2] > gains[1]).all()


def test_model_is_left_as_it_was():
    posterior, x, y = METHODS["kronecker"]()
    before = {name: tensor.clone() for name, tensor in posterior.model.state_dict().items()}
    information_gain(posterior, x, y)
    assert all(torch.equal(before[name], tensor) for name, tensor in posterior.model.state_dict().items())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in posterior.model.parameters())
    assert not any(module._forward_hooks for module in posterior.model.modules())


def test_bad_input():
    posterior, x, y = METHODS["kronecker"]()
    with pytest.raises(ValueError, match="num_samples must be at least 0"):
        information_gain(posterior, x, y, num_samples=-1)
    with pytest.raises(ValueError, match="covariance must be"):
        information_gain(posterior, x, y, covariance="full")
    with pytest.raises(ValueError, match="inputs must be rows"):
        information_gain(posterior, x[0], y)
    exact, x, y = METHODS["kronecker, exact damping"]()
    with pytest.raises(ValueError, match="use covariance='exact'"):
        information_gain(exact, x, y, covariance="blockwise")
    diagonal, x, y = METHODS["diagonal"]()
    with pytest.raises(ValueError, match="use covariance='exact'"):
        information_gain(diagonal, x, y, covariance="blockwise")
    full, x, y = fitted(ng.NoisyFull, lr=0.01)
    with pytest.raises(ValueError, match="must be diagonal or a Kronecker"):
        information_gain(full, x, y)
    point, x, y = fitted(ng.NoisyKFAC, lr=0.01, noise=False)
    with pytest.raises(ValueError, match="point estimate"):
        information_gain(point, x, y)


def test_other_layers_are_refused_by_name():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    posterior = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=10).posterior()
    with pytest.raises(ValueError, match=r"Linear layers are supported here; this one has 1 \(LayerNorm\)"):
        information_gain(posterior, torch.randn(5, 3), torch.randn(5, 2))
