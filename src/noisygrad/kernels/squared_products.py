"""Sums over a batch of squared per-example matrices, few of which are in memory at a time.

For output gradients g and inputs a of example b at its positions t, the matrix of an example is Σ_t g_bt a_btᵀ: the
gradient of a weight. On a GPU there may be a kernel that makes no such matrix at all (`kernels.squares`).
"""

import math

import torch
from torch import Tensor

from noisygrad.kernels import products
from noisygrad.kernels.factorisation import capturing
from noisygrad.kernels.products import between, rows_times
from noisygrad.kernels.scratch import CACHE, memory_bound, scratch_buffer

CHUNK = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Per-example matrices, and patches, are made of at most this many numbers at a time: what fits a cache, or what keeps
a GPU busy."""

MANY = 16
"""From this many small matrices on, they are summed by one operation."""

FEW_POSITIONS = 4
"""Up to this many positions, products over pairs of them are cheaper than per-example matrices."""

_PAIRS: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor, Tensor]] = {}


def chunk_size(device: torch.device, numbers: int) -> int:
    """How many examples are worked on at a time, where each takes this many numbers."""
    return max(1, CHUNK.get(device.type, CHUNK["cuda"]) // max(1, numbers))


def sum_of_squared_products(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Σ_b (Σ_t g aᵀ)² for outputs `[..., B, T, p]` and inputs `[..., B, T, q]`: `[..., p, q]`."""
    positions = outputs.shape[-2]
    if positions == 1:
        # (g aᵀ)² = g² (a²)ᵀ: no per-example matrix is needed.
        return products.matmul(outputs.squeeze(-2).square().mT, inputs.squeeze(-2).square())
    if positions <= FEW_POSITIONS:
        return _by_pairs(outputs, inputs)
    if outputs.dim() == 3 and memory_bound(outputs):
        return _in_cache(outputs, inputs)
    batch, features = inputs.shape[-3], inputs.shape[-1]
    size = chunk_size(outputs.device, math.prod(inputs.shape[:-3]) * features * outputs.shape[-1])
    multiply = torch.bmm if outputs.dim() == inputs.dim() == 3 else torch.matmul
    if size >= batch:
        return sum_of_squares(multiply(outputs.mT, inputs), -3)
    total = outputs.new_zeros(())
    for g, a in zip(outputs.split(size, dim=-3), inputs.split(size, dim=-3), strict=True):
        total = total + sum_of_squares(multiply(g.mT, a), -3)
    return total


def sum_of_squares_in_basis(outputs: Tensor, inputs: Tensor, left: Tensor, right: Tensor, constant: bool) -> Tensor:
    """Σ_b (Lᵀ (Σ_t g aᵀ) V)² for outputs `[..., B, T, p]`, inputs `[..., B, T, q]`: `[..., p, q + constant]`.

    With `constant` each input is followed by a 1, which `inputs` leave out, and V has a last row for it.
    """
    positions, p, q = outputs.shape[-2], outputs.shape[-1], inputs.shape[-1]
    # Lᵀ(Σ g aᵀ)V = Σ (Lᵀg)(Vᵀa)ᵀ: vectors are turned, or the matrices, which are fewer if positions are many.
    if positions * (p * p + q * q) <= p * q * (p + q):
        turned = rows_times(inputs, right[..., :q, :])
        if constant:
            turned += right[..., None, q:, :]
        return sum_of_squared_products(rows_times(outputs, left), turned)
    size = chunk_size(outputs.device, 2 * math.prod(outputs.shape[:-3]) * p * (q + constant))
    total = torch.zeros((), dtype=outputs.dtype, device=outputs.device)
    for g, a in zip(outputs.split(size, dim=-3), inputs.split(size, dim=-3), strict=True):
        matrices = torch.matmul(g.mT, a)
        if constant:
            matrices = torch.cat([matrices, g.sum(dim=-2).unsqueeze(-1)], dim=-1)
        total = total + sum_of_squares(between(left.mT, matrices.movedim(-3, 0), right), 0)
    return total


def _by_pairs(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Σ_b (Σ_t g a)² = Σ_{t ≤ t'} (1 or 2) (g_t g_t')(a_t a_t'): one product of matrices, for few positions."""
    first, second, twice = _pairs(outputs.shape[-2], outputs)
    g = outputs.index_select(-2, first) * outputs.index_select(-2, second) * twice
    a = inputs.index_select(-2, first) * inputs.index_select(-2, second)
    return products.matmul(g.flatten(start_dim=-3, end_dim=-2).mT, a.flatten(start_dim=-3, end_dim=-2))


def _pairs(positions: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The positions t ≤ t' of each pair, and how often it counts, `[pairs, 1]`."""
    key = (positions, like.dtype, like.device)
    if (known := _PAIRS.get(key)) is not None:
        return known
    # What is made while a graph is recorded has no numbers yet: it must not be kept for later calls.
    recorded = capturing()
    first, second = torch.triu_indices(positions, positions, device=like.device if recorded else "cpu")
    twice = (1.0 + (first != second)).to(like.dtype).unsqueeze(-1)
    pairs = first.to(like.device), second.to(like.device), twice.to(like.device)
    return pairs if recorded else _PAIRS.setdefault(key, pairs)


def _in_cache(outputs: Tensor, inputs: Tensor) -> Tensor:
    """On a CPU memory is the limit: a few per-example matrices at a time, always made in the same place, are squared.

    Fresh memory for each of them would cost more than the products.
    """
    total = outputs.new_zeros(outputs.shape[-1], inputs.shape[-1])
    rows = max(1, CACHE // max(1, inputs.shape[-1]))
    for panel, g in zip(total.split(rows), outputs.split(rows, dim=-1), strict=True):
        size = min(len(g), max(1, CACHE // max(1, panel.numel())))
        buffer = scratch_buffer(size * panel.numel(), panel.dtype).view(size, *panel.shape)
        for some, a in zip(g.split(size), inputs.split(size), strict=True):
            matrices = torch.bmm(some.mT, a, out=buffer[: len(some)])
            if size >= MANY:
                panel.add_(sum_of_squares(matrices, 0))
                continue
            for matrix in matrices:
                panel.addcmul_(matrix, matrix)
    return total


def add_squares_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total + Σ_b (L Rᵀ)² in place, `[m, n]`, by oneDNN, for factors `[B, m, T]` and `[B, n, T]` without gaps.

    It is fastest with the larger factor on the left, and a right one that is stored column by column.
    """
    multiply = products.onednn()
    assert multiply is not None
    for rows, columns in zip(left.unbind(), right.unbind(), strict=True):
        matrix = multiply(rows, columns)
        total.addcmul_(matrix, matrix)


def sum_of_squares(tensor: Tensor, dim: int) -> Tensor:
    """The sum of squares over one dimension; overwrites the tensor on a CPU.

    On a GPU a norm is one pass over the tensor; on a CPU norms over a leading dimension are slow.
    """
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim) if tensor.is_cuda else tensor.mul_(tensor).sum(dim=dim)
    return norm.square() if tensor.is_cuda else norm
