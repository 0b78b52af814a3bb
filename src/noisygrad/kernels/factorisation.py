"""Square roots of damped matrices, which succeed or raise an error with the reason; nothing here returns NaN.

Every matrix is a Fisher factor plus damping, so a lower bound of its eigenvalues (the *floor*) is known. Where that is
near the rounding of the matrix's type, the matrix is factorised in a wider one: float32 in float64, float64 by
`refinement`. Rounding can also push the computed spectrum below the floor, with duplicate or constant columns of the
data; eigenvalues are then raised to it, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from noisygrad.kernels.products import matmul
from noisygrad.kernels.refinement import refined_inverse_root
from noisygrad.kernels.threads import INHERITED

Value = TypeVar("Value")

NEAR_ROUNDING = {torch.float32: 256.0, torch.float64: 2.0**18}
"""A floor below this many times ε‖A‖ (of Frobenius) is near rounding, and so is one below `OF_LARGEST` times as many
times ε times the largest entry of the diagonal, to which damping is added with an error of its own. With 2 to 800 rows
the relative errors of inverses, times the floor, were at most 0.13 ε‖A‖ or, with few rows, 1.5 ε times that entry. So
above both bounds they are half of what two factors may have: a thousandth, in float64 a millionth."""

OF_LARGEST = 12.0

SMALL_TRIANGLE = {"cpu": 128, "cuda": 1024}
"""Up to this size a triangular matrix is inverted by one call."""

SMALL_TRIANGLES = 32
"""The same for many matrices on a CPU, where they are solved one by one but multiplied together."""


class FactorisationError(ArithmeticError):
    """A matrix could not be factorised.

    Attributes:
        condition: its condition number; NaN where the matrix itself is not finite.
        weights: indices, in the block's vector of weights, of some that cause it; empty where that is not known.
    """

    def __init__(self, message: str, condition: float = math.nan, weights: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.condition = condition
        self.weights = weights


def factorisation_error(size: int, condition: float, damping: float, weights: Sequence[int] = ()) -> FactorisationError:
    """The error for a matrix (or diagonal) of this size, with advice."""
    cause = "has NaN or infinite entries" if math.isnan(condition) else "is not positive definite"
    return FactorisationError(
        f"A {size}×{size} precision factor {cause} (condition number {condition:.1e}, damping {damping:.1e}). "
        "Raise the prior precision (a smaller prior_variance) or the damping, or look for NaN in the inputs.",
        condition,
        weights,
    )


def not_positive(diagonal: Tensor) -> list[int]:
    """The indices in `[..., n]` at which an entry of any of the diagonals is not finite or not above 0."""
    bad: Tensor = ~((diagonal > 0) & torch.isfinite(diagonal)).reshape(-1, diagonal.shape[-1])
    return [int(place) for place in bad.any(0).nonzero()]


class ThreadSetting(Generic[Value]):
    """A value that a thread sets for itself, and that those that work for it (`run_in_threads`) have too."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self) -> Value | None:
        """The value; None where none is set."""
        value: Value | None = getattr(INHERITED, self._name, None)
        return value

    @contextmanager
    def set_to(self, value: Value) -> Iterator[Value]:
        """The value is this inside, and afterwards what it was."""
        before = self.get()
        setattr(INHERITED, self._name, value)
        try:
            yield value
        finally:
            setattr(INHERITED, self._name, before)


_UNCHECKED = ThreadSetting[bool]("unchecked")
_FAILURES = ThreadSetting[list[Tensor]]("failures")
_REPAIRS = ThreadSetting[list[str]]("repairs")


def capturing() -> bool:
    """Whether the host may not read any value: inside `unchecked`, and while a CUDA graph is recorded."""
    return bool(_UNCHECKED.get()) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def unchecked(when: bool = True) -> AbstractContextManager[bool]:
    """Nothing is checked or repaired inside, by this thread; the caller masks what is not finite on the device."""
    return _UNCHECKED.set_to(when or bool(_UNCHECKED.get()))


def deferred() -> AbstractContextManager[list[Tensor]]:
    """Roots that this thread makes inside are not repaired; the checks are collected, to be read all at once.

    Each tensor is True where `inverse_root` would have had to repair a matrix or to raise.
    """
    return _FAILURES.set_to([])


def repairs() -> AbstractContextManager[list[str]]:
    """What would be warned of inside, by this thread, is collected in place of it."""
    return _REPAIRS.set_to([])


class Unrounded(NamedTuple):
    """A damped matrix as it is before rounding: scale · (factor + diag(ridge)), in float64.

    `[...]`, `[..., d, d]` and `[..., d]`.
    """

    scale: Tensor
    factor: Tensor
    ridge: Tensor


class Bound(NamedTuple):
    """A lower bound of a matrix's eigenvalues, `[...]`, and what the matrix is made of where rounding matters."""

    floor: Tensor
    unrounded: Callable[[], Unrounded] | None = None


def condition_number(matrix: Tensor) -> Tensor:
    """Largest over smallest absolute eigenvalue of symmetric `[..., d, d]` in float64; NaN where not finite."""
    finite = torch.isfinite(matrix).all(-1).all(-1)
    safe = torch.where(finite[..., None, None], matrix, 0.0).double()
    sizes: Tensor = torch.linalg.eigvalsh(safe).abs()
    ratio = sizes.amax(-1) / sizes.amin(-1)
    # 0/0: a zero matrix, which is singular.
    return torch.where(finite, torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf), math.nan)


def rounding_floor(matrix: Tensor) -> Tensor:
    """The size, `[...]`, below which eigenvalues of a PSD matrix stored in its dtype carry no information."""
    return torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def inverse_root(
    matrix: Tensor, floor: Tensor | float, unrounded: Callable[[], Unrounded] | None = None
) -> tuple[Tensor, Tensor]:
    """A root of the inverse of a damped SPD matrix, by Cholesky.

    `floor` is a known lower bound of its eigenvalues, `[...]` or a number; 0 where none is known. Returns `(root,
    logdet)` with root rootᵀ = matrix⁻¹, `[..., d, d]`, and log |matrix|, `[...]`. `unrounded` says what the matrix is
    made of; that is factorised where the floor is near rounding.

    Raises FactorisationError where entries are not finite, or the matrix is singular and no floor repairs it. Where
    nothing may be checked (`capturing`) the caller has to mask what is not finite.
    """
    if matrix.shape[-1] == 1 and capturing():
        return matrix.rsqrt(), matrix.log().flatten(-2).squeeze(-1)
    root, logdet, squares, info = _cholesky_root(matrix)
    if capturing():
        return root, logdet
    bound = torch.as_tensor(floor, dtype=matrix.dtype, device=matrix.device).expand(logdet.shape)
    squares = squares.amin(-1)
    failed = (info != 0) | _is_wrong(root, logdet, squares, bound)
    if unrounded is not None:
        rounding = _rounding(matrix)
        failed = failed | ((bound < rounding) & (squares < matrix.shape[-1] * rounding))
    failures = _FAILURES.get()
    if failures is not None:
        failures.append(failed.any())
    elif bool(failed.any()):
        # Only the failed ones are redone, so that one replica's failure does not change another's digits.
        root, logdet = root.contiguous(), logdet.clone()
        if unrounded is None:
            parts = _repaired(matrix[failed], bound[failed])
        else:
            parts = _in_wider_type(Unrounded(*(part[failed] for part in unrounded())), matrix.dtype)
        root[failed], logdet[failed] = (part.to(matrix.dtype) for part in parts)
    return root, logdet


def _rounding(matrix: Tensor) -> Tensor:
    """What a floor must not be below, for the inverse to be as near as `NEAR_ROUNDING` says."""
    size = torch.linalg.matrix_norm(matrix)
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
    return NEAR_ROUNDING[matrix.dtype] * torch.finfo(matrix.dtype).eps * torch.maximum(size, OF_LARGEST * largest)


def _cholesky_root(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(root, logdet, squared pivots, what Cholesky reports: 0 where it succeeded)."""
    cholesky: Tensor
    info: Tensor
    cholesky, info = torch.linalg.cholesky_ex(matrix)
    root = lower_inverse(cholesky).mT
    pivots = cholesky.diagonal(dim1=-2, dim2=-1)
    return root, 2.0 * pivots.log().sum(-1), pivots.square(), info


def _is_wrong(root: Tensor, logdet: Tensor, smallest: Tensor, floor: Tensor) -> Tensor:
    """Whether a root is wrong.

    A squared pivot is a Schur complement, never below the smallest eigenvalue: if it is, that is rounding, even where
    Cholesky reported no error.
    """
    return ~(root.sum((-2, -1)) + logdet).isfinite() | (smallest < 0.5 * floor)


def lower_inverse(lower: Tensor) -> Tensor:
    """L⁻¹ of lower triangular matrices `[..., d, d]`, by halves: [A 0; C B]⁻¹ = [A⁻¹ 0; −B⁻¹ C A⁻¹ B⁻¹].

    Nearly all the work is then products of full matrices, a third of the work of solving for the identity.
    """
    many = not lower.is_cuda and lower.dim() > 2 and lower.shape[:-2].numel() > 4
    small = SMALL_TRIANGLES if many else SMALL_TRIANGLE.get(lower.device.type, 64)
    if lower.shape[-1] <= small:
        return _solved_for_identity(lower)
    inverse = torch.zeros_like(lower)
    _invert(lower, inverse, small)
    return inverse


def _invert(lower: Tensor, inverse: Tensor, small: int) -> None:
    """Write the inverse into `inverse`, which is zero."""
    size = lower.shape[-1]
    if size <= small:
        inverse.copy_(_solved_for_identity(lower))
        return
    before, after = slice(size // 2), slice(size // 2, size)
    _invert(lower[..., before, before], inverse[..., before, before], small)
    _invert(lower[..., after, after], inverse[..., after, after], small)
    coupling = matmul(lower[..., after, before], inverse[..., before, before])
    inverse[..., after, before] = matmul(inverse[..., after, after], coupling).neg_()


def _solved_for_identity(triangle: Tensor, upper: bool = False) -> Tensor:
    eye = torch.eye(triangle.shape[-1], dtype=triangle.dtype, device=triangle.device)
    solved: Tensor = torch.linalg.solve_triangular(triangle, eye.expand_as(triangle), upper=upper)
    return solved


def _repaired(matrix: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """`inverse_root` of `[k, d, d]` in float64, with eigenvalues raised to at least the floor."""
    if not bool(torch.isfinite(matrix).all()):
        raise factorisation_error(matrix.shape[-1], math.nan, float(floor.min()))
    return _floored_inverse_root(matrix.double(), floor.double(), matrix.dtype)


def _in_wider_type(parts: Unrounded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`inverse_root` of `[k, d, d]` that was made in this type, with less rounding than that has."""
    scale, factor, ridge = parts
    size, floor = ridge.shape[-1], ridge.amin(-1)
    matrix = factor + torch.diag_embed(ridge)
    if not bool((torch.isfinite(matrix).all((-2, -1)) & torch.isfinite(scale)).all()):
        raise factorisation_error(size, math.nan, float(floor.min()))
    # What the factor was measured with has no information below its own rounding.
    least = torch.finfo(dtype).eps * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    lifted = (floor > 0) & (floor < least)
    ridge = ridge + torch.where(lifted, least - floor, 0.0)[..., None]
    matrix = factor + torch.diag_embed(ridge)
    precise = refined_inverse_root(factor, ridge) if dtype == torch.float64 else _cholesky_root(matrix)
    root, logdet, squares, info = precise
    squares = squares.amin(-1)
    # Where the factor alone is far from singular, it does not matter what is added.
    if bool((lifted & (squares < 8 * size * least)).any()):
        _report(
            f"The damping of a {size}×{size} precision factor is lost in the rounding of its {dtype} entries. It was "
            f"raised to that, by a factor of up to {float((least / floor)[lifted].max()):.0e}: the posterior is too "
            f"narrow. Scale the inputs of the layer{' or train in float64' * (dtype != torch.float64)}."
        )
    floor = torch.where(lifted, least, floor)
    failed = (info != 0) | _is_wrong(root, logdet, squares, floor)
    if bool(failed.any()):
        root, logdet = root.contiguous(), logdet.clone()
        root[failed], logdet[failed] = _floored_inverse_root(matrix[failed], floor[failed], dtype)
    return root * scale.rsqrt()[..., None, None], logdet + size * scale.log()


def _floored_inverse_root(matrix: Tensor, floor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By `eigh` of the matrix in float64, with eigenvalues raised to at least the floor."""
    size, smallest_floor = matrix.shape[-1], float(floor.min())
    eigenvalues, vectors = _eigh(matrix)
    rounding = torch.finfo(torch.float64).eps * size * eigenvalues.abs().amax(-1)
    if bool(((floor <= 0) & (eigenvalues[..., 0] <= rounding)).any()):
        raise factorisation_error(size, float(condition_number(matrix).max()), smallest_floor)
    _report(
        f"A {size}×{size} precision factor is not positive definite in {dtype}; it was factorised in float64 "
        f"with no eigenvalue below its damping, {smallest_floor:.0e}. More damping would be safer."
    )
    eigenvalues = torch.maximum(eigenvalues, floor[..., None])
    # Triangular like Cholesky's, and independent of the choice of eigenvectors: λ^½ Vᵀ = Q R makes the matrix RᵀR.
    upper: Tensor = torch.linalg.qr(eigenvalues.sqrt()[..., :, None] * vectors.mT, mode="r").R
    upper = upper * upper.diagonal(dim1=-2, dim2=-1).sign()[..., :, None]
    return _solved_for_identity(upper, upper=True), eigenvalues.log().sum(-1)


def _report(text: str) -> None:
    found = _REPAIRS.get()
    if found is None:
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    else:
        found.append(text)


def symmetric_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[..., d]`, none below 0, and eigenvectors `[..., d, d]` of a PSD matrix.

    Raises FactorisationError where entries are not finite, or `eigh` does not converge even in float64.
    """
    try:
        eigenvalues, vectors = _eigh(matrix)
        failed = not bool(torch.isfinite(eigenvalues).all() & torch.isfinite(vectors).all())
    except FactorisationError:
        failed = True
    if failed:
        if not bool(torch.isfinite(matrix).all()):
            raise factorisation_error(matrix.shape[-1], math.nan, 0.0)
        eigenvalues, vectors = (part.to(matrix.dtype) for part in _eigh(matrix.double()))
    return eigenvalues.clamp(min=0.0), vectors


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    # torch.linalg.LinAlgError is a RuntimeError, which cuSOLVER's failures are, too.
    try:
        eigenvalues, vectors = torch.linalg.eigh(matrix)
    except RuntimeError as error:
        raise factorisation_error(matrix.shape[-1], math.nan, 0.0) from error
    return eigenvalues, vectors
