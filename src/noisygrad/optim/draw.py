"""The draw of the weights: W = μ + √(λ/N) P^(−1/2) ε into the model, and the mean back again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from noisygrad.algorithm.step import NoisyNaturalGradient
from noisygrad.curvature.capture import Capture
from noisygrad.distributed import Ranks
from noisygrad.kernels.threads import run_in_threads
from noisygrad.optim.accumulated import LossCall
from noisygrad.optim.execution import Executor
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.weights import FlatWeights, ParameterViews

PARTS, LARGE = 32, 1_000_000
"""A row of this many numbers is drawn in this many parts."""
BETWEEN_RANKS = 1_000_003
"""Between the seeds of neighbouring ranks, so that they do not meet those of neighbouring replicas."""


class Draw:
    """One draw of the weights, valid inside `with optimizer.sampled() as draw`."""

    def __init__(self, measure: Callable[..., Tensor], pending: Callable[[], Sequence[LossCall]]) -> None:
        self._measure, self._pending = measure, pending
        self.is_open = True
        self.has_loss = False
        """Whether a loss was computed that is to be differentiated."""

    # It leaves much beside tensors, so it is not compiled along with what calls it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def nll(
        self, output: Tensor, target: Tensor, *, weight: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The loss to differentiate: the mean negative log-likelihood over the batch.

        `weight` are weights of examples, `[batch]`, or of parts of the targets: an example of weight 2 counts like one
        given twice. `mask` is True where a position counts, `[batch, positions]`: of the targets where it has their
        shape, and in any case of layers with as many positions. Padding has no part in the loss or the Fisher then.

        Where this step takes statistics, they are taken here. Call `backward()` on the result before leaving the
        context. It may be scaled first, by a GradScaler or divided by a number of micro-batches: the factor is seen.
        Several losses are averaged by `step()` with their factors as weights; those of one forward pass, such as two
        heads', add.
        """
        if not self.is_open:
            raise RuntimeError(
                "this draw is over: its weights are gone. Compute the loss inside `with optimizer.sampled()`"
            )
        loss = self._measure(output, target, weight, mask)
        self.has_loss |= loss.requires_grad
        return loss

    def check_differentiated(self) -> None:
        """Raise if a loss was never differentiated."""
        if any(call.waits for call in self._pending()):
            raise RuntimeError(
                "leaving sampled() with a loss that was not differentiated: its graph belongs to weights that are now "
                "replaced by the mean. Call backward() inside the context (torch.autograd.grad leaves no gradients for "
                "the step), or compute it under torch.no_grad()"
            )


class DrawnWeights:
    """The mean, the weights that are drawn around it, and the random numbers: what is in the model's parameters.

    Flat vectors may be of a wider type than the parameters. There is a generator for each replica.
    """

    def __init__(
        self,
        structure: Structure,
        parameters: ParameterViews,
        mean: FlatWeights,
        algorithm: NoisyNaturalGradient,
        *,
        generators: Sequence[torch.Generator],
        executor: Executor,
    ) -> None:
        self.mean = mean
        self.generators = list(generators)
        self.current: Draw | None = None
        """The draw whose weights are in the model now."""
        self._parameters, self._algorithm, self._executor = parameters, algorithm, executor
        self._covariance = algorithm.covariance
        self._narrow = any(parameter.dtype != mean.flat.dtype for parameter in structure.parameters.values())
        self._noise, self.sample = self._place(structure)

    def _place(self, structure: Structure) -> tuple[Tensor, FlatWeights | None]:
        """Noise and the weights drawn with it, in one place where they can be: each is done with before the other."""
        flat = self.mean.flat
        if not self._covariance.noisy:
            return flat[..., :0], None
        noise = flat.new_zeros(*structure.replicas, self._covariance.noise_size)
        shared = noise[..., : structure.size]
        place = shared if shared.is_contiguous() else torch.zeros_like(flat)
        return noise, FlatWeights(structure, place, self._parameters)

    @property
    def flat(self) -> Tensor:
        """The weights of the last draw: the mean, where there is no noise."""
        return self.mean.flat if self.sample is None else self.sample.flat

    def memory(self) -> tuple[int, int]:
        """Changes whenever factors or parameters have moved to another place of memory."""
        return (self._covariance.generation, self._parameters.generation)

    @contextmanager
    def in_model(
        self, draw: Draw, capture: Capture | None, before: Callable[[], None], restore: bool
    ) -> Iterator[None]:
        """Draw; inside, the weights are in the model, and `capture` records layers, if any; outside, the mean is.

        `before` is called when the numbers of the last draw are about to be overwritten. Without `restore` the mean
        comes back only after a failure, since a step is to write it anyway.
        """
        if self._covariance.noisy:
            before()
            fill_normal_(self._noise, self.generators)
        self._draw()  # where this fails, the user's weights are still there
        self.current, failed = draw, True
        try:
            with capture or nullcontext():
                yield
            failed = False
        finally:
            self.current = None
            draw.is_open = False
            if self._covariance.noisy and (restore or failed):
                self.mean.write_parameters_()
        draw.check_differentiated()

    def _draw(self) -> None:
        """M from the parameters, and W into them."""
        if not self._covariance.noisy:
            self.read_mean_()
            return
        self.mean.parameters.current()  # which may have been moved in memory: that counts in `memory`
        if self._executor.deferred:
            self._executor.run("draw", self.memory(), self._perturb)
        else:
            self._perturb()

    def _perturb(self) -> None:
        self.read_mean_()
        assert self.sample is not None
        self._algorithm.draw(self._noise, out=self.sample.flat)
        self.sample.write_parameters_()

    def read_mean_(self) -> None:
        """The parameters are the mean; the digits that narrow parameters cannot hold are kept as long as they agree."""
        if not self._narrow:
            self.mean.read_parameters_()
            return
        kept, shown = self.mean.flat.clone(), self.mean.rounded()
        self.mean.read_parameters_()
        self.mean.flat.copy_(torch.where(self.mean.flat == shown, kept, self.mean.flat))

    def generator_states(self) -> list[Tensor]:
        """What the next draws are made of; nothing while a CUDA graph is recorded."""
        recording = self.mean.flat.is_cuda and torch.cuda.is_current_stream_capturing()
        return [] if recording else [generator.get_state() for generator in self.generators]

    def set_generator_states(self, states: Sequence[Tensor]) -> None:
        """Back to `generator_states`."""
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(state)


def seeds_of(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One for each replica: those given, or the first of them and its successors; without any from torch's own."""
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if isinstance(seed, Integral):
        return [int(seed) + index for index in range(count)]
    if isinstance(seed, str) or not isinstance(seed, Sequence | np.ndarray) or len(seed) != count:
        raise ValueError(f"seed must be an integer, or {count} of them, one per replica; got {seed!r}")
    return [int(value) for value in seed]


def make_generators(
    seed: int | Sequence[int] | None, count: int, device: torch.device, ranks: Ranks, *, same_draw: bool
) -> list[torch.Generator]:
    """A generator for each replica, others on each rank unless they are to draw the same."""
    seeds = [ranks.same_for_all(value) for value in seeds_of(seed, count)]
    offset = 0 if same_draw else ranks.rank * BETWEEN_RANKS
    return [torch.Generator(device).manual_seed((value + offset) % 2**63) for value in seeds]


def part_generators_(generators: Sequence[torch.Generator], saved: int, ranks: Ranks, *, same_draw: bool) -> None:
    """After a load: give a rank numbers of its own where the state is that of another rank, `saved`."""
    if same_draw or saved == ranks.rank:
        return
    for generator in generators:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
        generator.manual_seed(seed + ranks.rank * BETWEEN_RANKS)


def fill_normal_(noise: Tensor, generators: Sequence[torch.Generator]) -> None:
    """Standard normal numbers into `[*replicas, n]`, each replica's from its own generator."""
    rows = noise.view(len(generators), -1).unbind() if len(generators) > 1 else (noise.view(-1),)
    for row, generator in zip(rows, generators, strict=True):
        if row.numel() >= LARGE and row.device.type == "cpu":
            _fill_in_parts_(row, generator)
        else:
            row.normal_(generator=generator)


def _fill_in_parts_(row: Tensor, generator: torch.Generator) -> None:
    """Fill a long row on a CPU, where a generator keeps one core busy: each part has a generator of its own.

    There are as many parts on every machine, so that a seed means the same numbers however many threads there are.
    """
    # A generator on a CPU knows 32 bits of its seed. In a long training a few of its parts are drawn twice: no harm.
    seeds = torch.randint(2**32, (PARTS,), generator=generator, device=row.device).tolist()

    def fill(part: Tensor, seed: int) -> None:
        part.normal_(generator=torch.Generator(row.device).manual_seed(seed))

    run_in_threads([partial(fill, part, seed) for part, seed in zip(row.chunk(PARTS), seeds, strict=True)])
