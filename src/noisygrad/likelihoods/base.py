"""The base class of likelihoods: what each has to define, and the checks and helpers that they share.

Outputs are `[*replicas, batch, *event]`; the dimensions after the batch are the event (outputs, classes, positions).
A loss is the mean over the batch of the negative log-likelihood, summed over the event and over replicas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from noisygrad.likelihoods.counted import Counted, count_parts
from noisygrad.predictions import Prediction


def widened(tensor: Tensor) -> Tensor:
    """`tensor` itself, or as float32 when its type is narrower: log-likelihoods need the digits."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def diagonal_columns(root: Tensor, event_dims: int) -> Tensor:
    """One column per element of the event, `root` on it and 0 elsewhere: `[elements, *root.shape]`."""
    flat = root.unsqueeze(-1) if event_dims == 0 else root.flatten(-event_dims)
    return torch.diag_embed(flat).movedim(-2, 0).reshape(flat.shape[-1], *root.shape)


def _batch_advice(output: Tensor, target: Tensor, batch_dim: int) -> str:
    rows = [math.prod(one.shape[batch_dim : batch_dim + 2]) for one in (output, target)]
    if rows[0] == target.shape[batch_dim] or rows[1] == output.shape[batch_dim]:
        return "Batch and positions are flattened in one of them: leave both as [batch, positions, ...]."
    return "Each row of the output needs its own target."


class Likelihood(nn.Module, ABC):
    """The distribution of a target given the network's output."""

    integer_targets: ClassVar[bool] = False
    """Whether targets may be integers, too; else they must be floating point."""
    _units: ClassVar[str] = "one unit"

    def __init_subclass__(cls, **arguments: Any) -> None:
        """A subclass that replaces `log_prob` but not `score` gets the general `score`, not one of another formula."""
        super().__init_subclass__(**arguments)
        if "log_prob" in vars(cls) and "score" not in vars(cls):
            cls.score = Likelihood.score  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()
        self.replicas = torch.Size()
        self._device = torch.device("cpu")
        self._dtype = torch.float32

    def bind(self, replicas: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> None:
        """Set how many trainings run at once, on which device and in which type; noise is kept in float32 at least."""
        self.replicas = torch.Size(replicas)
        self._device = torch.device(device)
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32

    @abstractmethod
    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Log-likelihood of each example, `[*replicas, batch]`, summed over the event."""

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss: the mean over the batch of minus `log_prob`, summed over replicas. Does not call `check`."""
        log_prob = self.log_prob(output, target)
        if log_prob.shape != (expected := output.shape[: len(self.replicas) + 1]):
            raise ValueError(
                f"{type(self).__name__}: log_prob must give one number for each example, {list(expected)}, summed over "
                f"the event (self.sum_event); it gave {list(log_prob.shape)}"
            )
        return -log_prob.sum() / expected[-1]

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """Log-likelihood of each part of the targets that is independent of the others, `[*replicas, batch, *parts]`.

        Where it is not defined an example is one part, so that `mask` can leave out whole examples only.
        """
        return self.log_prob(output, target)

    def part_weights(self, target: Tensor) -> Tensor | None:
        """The weight that the likelihood itself gives each part of the targets; None where all count alike."""
        return None

    def counted(
        self, output: Tensor, target: Tensor, weight: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Counted | None, Tensor]:
        """What counts of a batch, None where all does, and its targets with 0 in place of those that do not."""
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            return None, target  # for `check` to refuse
        own = self.part_weights(target)
        if weight is None and mask is None and own is None:
            return None, target
        arguments = {"weight": weight, "mask": mask, "own": own}
        return count_parts(type(self).__name__, len(self.replicas), output, target, **arguments)

    def counted_nll(self, output: Tensor, target: Tensor, counted: Counted) -> Tensor:
        """The loss of what counts: Σ v · nll over the sum of the weights of examples, summed over replicas."""
        terms = self.terms(output, target)
        if counted.weight.shape != terms.shape[: counted.weight.dim()]:
            raise ValueError(
                f"{type(self).__name__}: what counts is of shape {list(counted.weight.shape)}, but the log-likelihood "
                f"is known for parts {list(terms.shape)}; define `terms`, or leave out whole examples only."
            )
        return -(counted.summed(terms) / counted.total).sum()

    def check_counted(self, counted: Counted) -> None:
        """Raise ValueError for a batch of which nothing counts, as far as that is known without waiting."""
        if not counted.total.is_cuda and not bool((counted.total > 0).all()):
            raise ValueError(
                f"{type(self).__name__}: nothing in this batch counts (all of it is masked, ignored or of weight 0), "
                "so its loss has no mean: skip it."
            )

    def weights_of_outputs(self, weight: Tensor, output: Tensor) -> Tensor:
        """Weights of parts, `[*replicas, batch, *parts]`, in a shape that broadcasts to the output."""
        return weight.reshape(*weight.shape, *[1] * (output.dim() - weight.dim()))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """∂ log p / ∂ output, of the output's shape: what a backward pass of `log_prob` starts from."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.log_prob(leaf, target).sum(), leaf)
        return score

    @abstractmethod
    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """Targets drawn from the model given `output`, for the true Fisher; never waits for the device.

        `generators` has one generator per replica, in flattened order (a single one without replicas); None means
        torch's own.
        """

    def sampled_score(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """`score` at targets that are drawn from the model: its second moment is the exact Fisher of the output."""
        return self.score(output, self.sample(output, generators))

    @abstractmethod
    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """Columns f_k, `[columns, *output.shape]`, with Σ_k f_k f_kᵀ the exact Fisher of each example's output."""

    @abstractmethod
    def predictive(self, outputs: Tensor) -> Prediction:
        """The mixture over weight samples, from outputs `[samples, *replicas, batch, *event]`."""

    def observe(self, output: Tensor, target: Tensor, counted: Counted | None = None) -> Tensor | None:
        """What `update_noise_` learns the noise from, a mean over examples; None where no noise is learned."""
        return None

    def update_noise_(self, statistic: Tensor, num_data: float | Tensor, kl_weight: float | Tensor) -> None:
        """One update of the noise in place, from the (averaged) statistics of `observe`."""
        raise ValueError(f"{type(self).__name__} learns no noise: skip update_noise_ where observe returns None.")

    def kl(self) -> Tensor:
        """KL in nats from the noise's posterior to its prior, `[*replicas]`; 0 where the noise has no posterior."""
        return torch.zeros(self.replicas, device=self._device, dtype=self._dtype)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as values that JSON can hold."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A new likelihood from what `config()` returned."""
        return cls(**config)

    # Validation: shapes on any device, values only where the host can read them without waiting for the device.

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise ValueError where `target` cannot belong to `output`; on a CPU its values are checked, too.

        Raises TypeError where either is not a tensor.
        """
        name, replicas, batch_dim = type(self).__name__, list(self.replicas), len(self.replicas)
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            raise TypeError(
                f"{name}: output and target must be tensors, one each; got {type(output).__name__} and "
                f"{type(target).__name__}. Pass the one output that the target belongs to, and torch.as_tensor(target)."
            )
        if not output.dtype.is_floating_point:
            raise ValueError(f"{name}: the output must be floating point; got {output.dtype}.")
        if output.ndim <= batch_dim or output.shape[:batch_dim] != self.replicas:
            raise ValueError(
                f"{name}: the output must be of shape {[*replicas, 'batch', '...']} (replicas first); "
                f"got {list(output.shape)}, for a target of shape {list(target.shape)}."
            )
        if output.numel() == 0 or target.numel() == 0:
            raise ValueError(
                f"{name}: the batch is empty (output {list(output.shape)}, target {list(target.shape)}); "
                "skip it, or use drop_last=True in the loader."
            )
        if output.device != target.device:
            raise ValueError(f"{name}: output on {output.device}, target on {target.device}; move the target.")
        if target.shape[: batch_dim + 1] != output.shape[: batch_dim + 1]:
            raise ValueError(
                f"{name}: the batches disagree: output {list(output.shape)}, target {list(target.shape)}; "
                f"the first {batch_dim + 1} dimension(s) must be equal. {_batch_advice(output, target, batch_dim)}"
            )
        try:
            expected = self.target_shape(output)
        except ValueError as error:
            raise ValueError(f"{error} The target is of shape {list(target.shape)}.") from None
        if target.shape != expected:
            raise ValueError(
                f"{name}: for an output of shape {list(output.shape)} the target must be of shape {list(expected)}; "
                f"got {list(target.shape)}. {self._shape_advice(target.shape, expected)}"
            )
        self._check_dtype(target)
        if not output.is_cuda and not self._known_valid(target) and bool(self.invalid(output, target)):
            raise ValueError(f"{name}: {self._value_advice(output, target)}")

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        """Whether any value of `target` is impossible: a 0-dimensional bool on the device, computed without waiting."""
        return ~target.isfinite().all()

    def _known_valid(self, target: Tensor) -> bool:
        """A cheap test that most valid batches pass, where `invalid` only looks for targets that are not finite."""
        return type(self).invalid is Likelihood.invalid and math.isfinite(target.sum().item())

    def clamp_invalid_targets(self, output: Tensor, target: Tensor) -> Tensor:
        """`target` without impossible values that would end the process on a GPU; `invalid` reports them."""
        return target

    def _check_dtype(self, target: Tensor) -> None:
        counts = self.integer_targets and target.dtype != torch.bool and not target.dtype.is_complex
        if not (target.dtype.is_floating_point or counts):
            kind = "numbers" if self.integer_targets else "floating point"
            raise ValueError(f"{type(self).__name__}: targets must be {kind}; got {target.dtype}: use target.float().")

    def target_shape(self, output: Tensor) -> torch.Size:
        """The shape that targets of this output must have."""
        return output.shape

    def _shape_advice(self, given: torch.Size, expected: torch.Size) -> str:
        if torch.Size([*given, 1]) == expected:
            return "They would broadcast every target against every output: use target.unsqueeze(-1)."
        if torch.Size([*expected, 1]) == given:
            return "They would broadcast every target against every output: use target.squeeze(-1)."
        return f"Give the network's last layer {self._units} for each target of an example, or reshape the target."

    def _value_advice(self, output: Tensor, target: Tensor) -> str:
        if bad := int((~target.isfinite()).sum()):
            return f"{bad} of {target.numel()} targets are NaN or infinite; drop or impute them."
        return f"some targets are impossible; they go from {float(target.min())} to {float(target.max())}."

    # Helpers for subclasses.

    def event_dims(self, output: Tensor) -> int:
        """How many dimensions one output `[*replicas, batch, *event]` has after the batch."""
        return output.ndim - len(self.replicas) - 1

    def sum_event(self, values: Tensor) -> Tensor:
        """The sum over the event of values `[*replicas, batch, *event]`: `[*replicas, batch]`."""
        return values if self.event_dims(values) == 0 else values.flatten(len(self.replicas) + 1).sum(-1)

    def per_replica(
        self,
        values: Tensor,
        draw: Callable[[Tensor, torch.Generator | None], Tensor],
        generators: Sequence[torch.Generator] | None,
    ) -> Tensor:
        """`draw(values, generator)`, of the shape of `values`, for each replica with its own generator.

        So each replica draws what a training of its own would draw. `generators` as in `sample`.
        """
        if generators is None:
            return draw(values, None)
        count = math.prod(self.replicas)
        if len(generators) != count:
            raise ValueError(f"expected {count} generator(s), one per replica; got {len(generators)}.")
        if not self.replicas:
            return draw(values, generators[0])
        parts = values.reshape(count, *values.shape[len(self.replicas) :])
        drawn = torch.stack([draw(part, generator) for part, generator in zip(parts, generators, strict=True)])
        return drawn.reshape(values.shape)

    def _noise_like(
        self, values: Tensor, fill_: Callable[..., Tensor], generators: Sequence[torch.Generator] | None
    ) -> Tensor:
        """Random numbers of the shape of `values`, by `Tensor.normal_` or the like, as `per_replica` draws them."""
        return self.per_replica(values, lambda part, g: fill_(part.new_empty(part.shape), generator=g), generators)
