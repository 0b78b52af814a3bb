"""Hamiltonian Monte Carlo by numpyro for many data sets and many chains at once.

One compiled program steps all chains of all data sets; what differs between data sets is arrays, so that another set of
the same shape does not compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from numpyro.infer.hmc import hmc

Array = Any
Data = tuple[Array, Array, Array]
"""Inputs `[N, ...]`, targets and the weight of each example (1, or 0 for padding)."""
Potential = Callable[[Data], Callable[[Array], Array]]
"""From the data to a function of the flat weights: minus the log of the joint density, up to a constant."""

_JITTER = 0.2
"""The step size of an iteration is that of the warm-up within so much: a fixed one can run in circles."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long the chains are, and how they move."""

    warmup: int
    samples: int
    """Kept of each chain."""
    thin: int
    leapfrog_steps: int
    target_accept: float


class Sampler:
    """Chains for R data sets, `[R, C]` of them; `start`, then `warm_up`, then `draw` as often as needed.

    Args:
        potential: What is sampled.
        schedule: How.
    """

    def __init__(self, potential: Potential, schedule: Schedule) -> None:
        self._schedule = schedule
        self._init, self._move = hmc(potential_fn_gen=lambda *data: potential(data), algo="HMC")
        self._first = jax.jit(jax.vmap(jax.vmap(self._begin, in_axes=(0, 0, None))))
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
        self._data: Data | None = None
        self._states: Any = None
        self._step_size: Array | None = None

    def start(self, data: Data, weights: Array, seed: int) -> None:
        """New chains, of data `[R, N, ...]`, from weights `[R, C, P]`; `seed` is of everything that is drawn."""
        key, self._key = jax.random.split(jax.random.PRNGKey(seed))
        self._data = data
        self._states = self._first(weights, jax.random.split(key, weights.shape[:2]), data)

    def _begin(self, start: Array, key: Array, data: Data) -> Any:
        return self._init(
            start,
            self._schedule.warmup,
            step_size=0.05,
            adapt_mass_matrix=False,
            target_accept_prob=self._schedule.target_accept,
            num_steps=self._schedule.leapfrog_steps,
            trajectory_length=None,
            model_args=data,
            rng_key=key,
        )

    def warm_up(self, report: Callable[[float], None]) -> None:
        """Find a step size for each data set: the median of its chains'."""
        for done, count in _parts(self._schedule.warmup):
            self._states = self._program("warm up", count, self._warm)(self._states, self._data)
            jax.block_until_ready(self._states.z)
            report((done + count) / self._schedule.warmup)
        self._step_size = jnp.median(self._states.adapt_state.step_size, axis=1)

    def draw(self, report: Callable[[float], None]) -> NDArray[np.float64]:
        """The next `samples` of each chain, `[samples, R, C, P]`."""
        found = []
        for done, count in _parts(self._schedule.samples):
            self._key, key = jax.random.split(self._key)
            program = self._program("sample", count, self._sample)
            self._states, kept = program(self._states, self._data, self._step_size, jax.random.split(key, count))
            found.append(np.asarray(kept))
            report((done + count) / self._schedule.samples)
        return np.concatenate(found)

    @property
    def acceptance(self) -> float:
        """The mean probability of acceptance, of all chains."""
        return float(jnp.mean(self._states.mean_accept_prob))

    def _program(self, name: str, count: int, work: Callable[..., Any]) -> Callable[..., Any]:
        if (name, count) not in self._compiled:
            self._compiled[name, count] = jax.jit(partial(work, count))
        return self._compiled[name, count]

    def _everywhere(self, states: Any, data: Data) -> Any:
        over_chains = jax.vmap(lambda state, data: self._move(state, data, {}), in_axes=(0, None))
        return jax.vmap(over_chains)(states, data)

    def _warm(self, count: int, states: Any, data: Data) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, states: self._everywhere(states, data), states)

    def _sample(self, count: int, states: Any, data: Data, step_size: Array, keys: Array) -> tuple[Any, Array]:
        def one(states: Any, key: Array) -> Any:
            adapted = states.adapt_state
            factor = 1.0 + _JITTER * jax.random.uniform(key, adapted.step_size.shape, minval=-1.0, maxval=1.0)
            jittered = adapted._replace(step_size=step_size[:, None] * factor)
            return self._everywhere(states._replace(adapt_state=jittered), data)

        def kept(states: Any, key: Array) -> tuple[Any, Array]:
            keys = jax.random.split(key, self._schedule.thin)
            states, _ = jax.lax.scan(lambda states, key: (one(states, key), None), states, keys)
            return states, states.z

        states, draws = jax.lax.scan(kept, states, keys)
        return states, draws


def _parts(total: int, most: int = 100) -> list[tuple[int, int]]:
    """(done before, count) of pieces of at most so many."""
    return [(start, min(most, total - start)) for start in range(0, total, most)]
