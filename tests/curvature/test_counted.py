"""Statistics of batches in which not all counts: padded equals unpadded, and all of it equals the dense truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.curvature.fisher import FisherKind
from noisygrad.likelihoods import Likelihood
from support.plain_attention import with_plain_attention
from support.truth import (
    Model,
    close,
    dense_fisher,
    measure,
    normal,
    output_fisher,
    per_example_jacobians,
    random_weights,
    trainable,
)

PADDING = 99.0
LENGTHS = (5, 2, 1, 4)
LONGEST = 6


def kept(x: Tensor) -> Tensor:
    """Which positions are no padding: of vectors by their first feature, of tokens by their number."""
    return x[..., 0] != PADDING if x.is_floating_point() else x != int(PADDING)


def convolved(m: nn.Module, x: Tensor) -> Tensor:
    keep = kept(x).unsqueeze(1)
    x = x.mT.masked_fill(~keep, 0.0)
    return m.b(m.a(x).tanh().masked_fill(~keep, 0.0)).mT


def attended(m: nn.Module, x: Tensor) -> Tensor:
    keep = kept(x)
    return m.h(m.a(x.masked_fill(~keep.unsqueeze(-1), 7.0), src_key_padding_mask=~keep))


def pooled(m: nn.Module, x: Tensor) -> Tensor:
    keep = kept(x).unsqueeze(-1)
    hidden = m.a(x.masked_fill(~keep, 7.0)).tanh()
    return m.h(hidden.masked_fill(~keep, 0.0).sum(1) / keep.sum(1))


def looked_up(m: nn.Module, x: Tensor) -> Tensor:
    return m.h(m.n(m.e(x.masked_fill(~kept(x), 3))).tanh())


def causal(m: nn.Module, x: Tensor) -> Tensor:
    keep = kept(x)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    hidden = m.e(x.masked_fill(~keep, 3))
    hidden = hidden + m.a(hidden, hidden, hidden, key_padding_mask=~keep, attn_mask=later, need_weights=False)[0]
    return m.h(m.f(hidden).tanh())


def token_in_front(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences, without what is in the padding, behind a token that is none of them; which positions are none."""
    keep = F.pad(kept(x), (1, 0), value=True)
    return F.pad(x.masked_fill(~kept(x).unsqueeze(-1), 7.0), (0, 0, 1, 0), value=0.5), keep


def behind_a_token(m: nn.Module, x: Tensor) -> Tensor:
    return m.h(m.a(token_in_front(x)[0]).tanh())[:, 1:]


def attended_behind_a_token(m: nn.Module, x: Tensor) -> Tensor:
    front, keep = token_in_front(x)
    return m.h(m.a(front, src_key_padding_mask=~keep))[:, 1:]


def strided(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.a(x.masked_fill(~kept(x).unsqueeze(-1), 7.0).mT).mT.tanh()
    return m.h(hidden).repeat_interleave(2, 1)[:, : x.shape[1]]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)


NETWORKS: dict[str, Callable[[], Model]] = {
    "linear": lambda: Model(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 3), b=nn.Linear(3, 3)),
    "convolution": lambda: Model(
        convolved, a=nn.Conv1d(4, 3, 3, padding=1), b=nn.Conv1d(3, 3, 3, padding=1, bias=False)
    ),
    "grouped convolution": lambda: Model(convolved, a=nn.Conv1d(4, 4, 3, padding=1, groups=2), b=nn.Conv1d(4, 3, 1)),
    "attention": lambda: Model(attended, a=encoder(), h=nn.Linear(4, 3)),
    "behind a token": lambda: Model(behind_a_token, a=nn.Linear(4, 3), h=nn.Linear(3, 3)),
    "attention behind a token": lambda: Model(attended_behind_a_token, a=encoder(), h=nn.Linear(4, 3)),
    "strided": lambda: Model(strided, a=nn.Conv1d(4, 3, 1, stride=2), h=nn.Linear(3, 3)),
    "pooled": lambda: Model(pooled, a=nn.Linear(4, 5), h=nn.Linear(5, 3)),
    "embedding": lambda: Model(looked_up, e=nn.Embedding(8, 3), n=nn.LayerNorm(3), h=nn.Linear(3, 3)),
    "language model": lambda: Model(
        causal,
        e=nn.Embedding(8, 4),
        a=nn.MultiheadAttention(4, 2, batch_first=True),
        f=nn.Linear(4, 3),
        h=nn.Linear(3, 8),
    ),
}
TOKENS = {"embedding", "language model"}


def padded_batch(name: str) -> tuple[Model, Tensor, Tensor]:
    """Network, inputs with padding, and which positions are none."""
    model = random_weights(NETWORKS[name]().double())
    shape = (len(LENGTHS), LONGEST)
    keep = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(-1)
    if name in TOKENS:
        x = torch.randint(8, shape, generator=torch.Generator().manual_seed(3)).masked_fill(~keep, int(PADDING))
    else:
        x = normal(*shape, 4).masked_fill(~keep.unsqueeze(-1), PADDING)
    return model, x, keep


def targets(name: str, likelihood: Likelihood, keep: Tensor) -> Tensor:
    """Of positions that do not count they are what no likelihood would take."""
    if name == "pooled":
        return torch.zeros(len(keep), dtype=torch.int64) if categorical(likelihood) else torch.zeros(len(keep), 3)
    if categorical(likelihood):
        return torch.zeros(keep.shape, dtype=torch.int64).masked_fill(~keep, -100)
    return torch.zeros(*keep.shape, 3, dtype=torch.float64).masked_fill(~keep.unsqueeze(-1), torch.nan)


def categorical(likelihood: Likelihood) -> bool:
    return isinstance(likelihood, ng.Categorical)


Examples = list[tuple[Tensor, Tensor, Tensor]]
"""Of each alone and unpadded: its inputs, the weights of its parts, and what backward passes start from."""


def truth(model: Model, likelihood: Likelihood, kind: FisherKind, examples: Examples, weights: Tensor) -> Tensor:
    """Σ_b w_b Σ_t v_bt Jᵀ F_output J / Σ_b w_b, each example alone and unpadded, by `torch.func`.

    F_output is written down from the distribution, or the starts' own product where it is not the exact one.
    """
    total = torch.zeros(())
    for (x, v, starts), w in zip(examples, weights, strict=True):
        (jacobian,) = per_example_jacobians(model, x.unsqueeze(0))
        output = model(x.unsqueeze(0)).detach()[0]
        rows = output.unsqueeze(0) if output.dim() == 1 else output
        if kind == "exact":
            inner = torch.block_diag(*[output_fisher(likelihood, r) * scale for r, scale in zip(rows, v, strict=True)])
        else:
            (start,) = starts
            flat = (start.reshape(rows.shape) * v.sqrt().unsqueeze(-1)).flatten()
            inner = torch.outer(flat, flat)
        total = total + w * jacobian.mT @ inner @ jacobian
    return total / weights.sum()


def moments(model: Model, examples: Examples, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and S of every Linear and Conv1d, those inside attention too, from hooks and autograd, each example alone."""
    model = with_plain_attention(model)
    layers = {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv1d)}
    inputs = {name: [torch.zeros(()), torch.zeros(())] for name in layers}
    outputs = {name: torch.zeros(()) for name in layers}
    for (x, v, starts), w in zip(examples, weights, strict=True):
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        hooks = [m.register_forward_hook(keeper(seen, name)) for name, m in layers.items()]
        output = model(x.unsqueeze(0))
        for hook in hooks:
            hook.remove()
        rows = v.reshape(1, -1, 1) if output.dim() == 3 else v.reshape(1, 1)
        columns = starts * rows.sqrt()
        for name, (given, y) in seen.items():
            module = layers[name]
            a = positions_of(module, given)
            gradients = [torch.autograd.grad(output, y, column, retain_graph=True)[0] for column in columns]
            if isinstance(module, nn.Conv1d):
                gradients = [g.mT for g in gradients]
            # Without a target a position takes part where the loss looks at it through others.
            reached = torch.stack([g.reshape(-1, g.shape[-1]) for g in gradients]).abs().sum((0, 2)) > 0
            takes_part = reached | (v > 0) if len(v) == len(reached) else reached
            inputs[name][0] = inputs[name][0] + w * a[takes_part].mT @ a[takes_part]
            inputs[name][1] = inputs[name][1] + w * takes_part.sum()
            outputs[name] = outputs[name] + w * sum(
                g.reshape(-1, g.shape[-1]).mT @ g.reshape(-1, g.shape[-1]) for g in gradients
            )
    return {name: (a / count, outputs[name] / weights.sum()) for name, (a, count) in inputs.items()}


def keeper(seen: dict[str, tuple[Tensor, Tensor]], name: str) -> Callable[..., None]:
    return lambda _, inputs, output: seen.update({name: (inputs[0], output)})


def positions_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs of each position with the constant 1, `[positions, features]`."""
    if isinstance(module, nn.Conv1d):
        wide = module.kernel_size == (3,)
        inputs = F.unfold(inputs.unsqueeze(2), (1, 3), padding=(0, 1)) if wide else inputs
        inputs = inputs[..., :: module.stride[0]].mT
    rows = inputs.reshape(-1, inputs.shape[-1])
    return rows if module.bias is None else torch.cat([rows, torch.ones(len(rows), 1)], 1)


def case(name: str, likelihood: Likelihood, kind: FisherKind) -> tuple[Model, Tensor, Tensor, Examples, Tensor | None]:
    """Network, inputs, targets, and the truth's examples; the mask where the targets have no positions."""
    model, x, keep = padded_batch(name)
    target = targets(name, likelihood, keep)
    examples = [one[mine] for one, mine in zip(x, keep, strict=True)]
    pooled = name == "pooled"
    if name == "language model":  # the first token of each is a prompt: nothing is asked of it
        target[:, 0] = -100
        target[2, 0] = 1  # but of the example that has no other
        parts = [(mine[k] != -100).double() for mine, k in zip(target, keep, strict=True)]
    else:
        parts = [torch.ones(1 if pooled else len(one), dtype=torch.float64) for one in examples]
    drawn = likelihood.sampled_score(model(x).detach(), [torch.Generator().manual_seed(0)])  # as `measure` draws them
    starts = []
    for index, (one, mine) in enumerate(zip(examples, keep, strict=True)):
        output = model(one.unsqueeze(0)).detach()
        if kind == "exact":
            starts.append(likelihood.output_fisher_factor(output))
        elif kind == "sampled":
            starts.append((drawn[index] if pooled else drawn[index][mine])[None, None])
        else:
            own = target[index] if pooled else target[index][mine]
            starts.append(likelihood.score(output, (own.clamp_min(0) if categorical(likelihood) else own)[None])[None])
    ignored = categorical(likelihood) and not pooled
    mask = None if ignored else keep.unsqueeze(-1) if pooled else keep
    return model, x, target, list(zip(examples, parts, starts, strict=True)), mask


CASES = [(name, way) for name in NETWORKS for way in ("ignored", "masked")]
CASES.remove(("language model", "masked"))  # whose targets are tokens


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_statistics_of_a_padded_batch_are_those_of_its_examples(
    name: str, way: str, kind: FisherKind, weighted: bool
) -> None:
    likelihood = ng.Categorical(ignore_index=-100) if way == "ignored" else ng.Gaussian(noise_variance=0.7)
    likelihood.bind((), "cpu", torch.float64)
    model, x, target, examples, mask = case(name, likelihood, kind)
    weight = torch.tensor([2.0, 0.5, 1.5, 0.25], dtype=torch.float64) if weighted else None
    weights = torch.ones(len(x), dtype=torch.float64) if weight is None else weight
    given = {"target": target, "weight": weight, "mask": mask, "kind": kind}
    dense = truth(model, likelihood, kind, examples, weights)
    close(dense_fisher(*measure(model, likelihood, x, "full", **given)), dense, atol=1e-10)
    close(dense_fisher(*measure(model, likelihood, x, "diagonal", **given)).diagonal(), dense.diagonal(), atol=1e-10)
    if "grouped" in name:
        return
    structure, found = measure(model, likelihood, x, "kronecker", **given)
    expected = moments(model, examples, weights)
    compared = set()
    for block in structure.blocks:
        if "inputs" in found[block.name].tensors():
            a, s = expected[block.name]
            close(found[block.name].tensors()["inputs"], a, atol=1e-10)
            close(found[block.name].tensors()["outputs"], s, atol=1e-10)
            compared.add(block.name)
    assert compared == set(expected)
    assert set(trainable(model)) == {slot.parameter for unit in structure.units for slot in unit.slots}
