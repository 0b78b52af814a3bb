"""Hamiltonian Monte Carlo by numpyro for many data sets and many chains at once.

One compiled program steps all chains of all data sets; what differs between data sets is arrays, so that another set of
the same shape does not compile again. Each data set has random numbers and a step size of its own, so its chains do not
depend on which others run beside them (but for rounding).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from numpyro.infer.hmc import hmc

from noisygrad_paper.baselines.hmc_posterior import HMCSettings

Array = Any
Data = tuple[Array, Array, Array]
"""Inputs `[N, ...]`, targets and the weight of each example (1, or 0 for padding)."""
Potential = Callable[[Data], Callable[[Array], Array]]
"""From the data to a function of the flat weights: minus the log of the joint density, up to a constant."""

_JITTER = 0.2
"""The step size of an iteration is that of the warm-up within so much: a fixed one can run in circles."""


class ChainSampler:
    """Chains for R data sets, `[R, C]` of them; `start`, then `warm_up`, then `draw` as often as needed."""

    def __init__(self, potential: Potential, settings: HMCSettings) -> None:
        self._settings = settings
        self._init, self._move = hmc(potential_fn_gen=lambda *data: potential(data), algo="HMC")
        self._first = jax.jit(jax.vmap(jax.vmap(self._begin, in_axes=(0, 0, None))))
        self._warm, self._sample = (jax.jit(work, static_argnums=0) for work in (self._warmed, self._sampled))
        self._data: Data | None = None
        self._states: Any = None
        self._step_size: Array | None = None
        self._keys: Array | None = None

    def start(self, data: Data, weights: Array, seeds: Sequence[int]) -> None:
        """New chains, of data `[R, N, ...]`, from weights `[R, C, P]`; each set's seed is of all that is drawn."""
        own = jnp.stack([jax.random.PRNGKey(seed) for seed in seeds])
        first, self._keys = jnp.unstack(_split(own), axis=1)
        self._data = data
        self._states = self._first(weights, _split(first, weights.shape[1]), data)

    def _begin(self, start: Array, key: Array, data: Data) -> Any:
        return self._init(
            start,
            self._settings.warmup,
            step_size=0.05,
            adapt_mass_matrix=False,
            target_accept_prob=self._settings.target_accept,
            num_steps=self._settings.leapfrog_steps,
            trajectory_length=None,
            model_args=data,
            rng_key=key,
        )

    def warm_up(self, report: Callable[[float], None]) -> None:
        """Find a step size for each data set: the median of its chains'."""
        for done, count in _parts(self._settings.warmup):
            self._states = self._warm(count, self._states, self._data)
            jax.block_until_ready(self._states.z)
            report((done + count) / self._settings.warmup)
        self._step_size = jnp.median(self._states.adapt_state.step_size, axis=1)

    def draw(self, report: Callable[[float], None], only: Sequence[int] | None = None) -> NDArray[np.float64]:
        """The next `samples` of each chain of these data sets (None: of all), `[R, C, samples, P]`."""
        count = len(self._keys)  # type: ignore[arg-type]
        places = jnp.asarray(range(count) if only is None else _filled(only, count))
        data, states, step_size, keys = jax.tree.map(
            lambda part: jnp.asarray(part)[places], (self._data, self._states, self._step_size, self._keys)
        )
        found = []
        for done, size in _parts(self._settings.samples):
            now, keys = jnp.unstack(_split(keys), axis=1)
            states, kept = self._sample(size, states, data, step_size, now)
            found.append(np.asarray(kept))
            report((done + size) / self._settings.samples)
        asked = count if only is None else len(only)  # what follows is repetition
        self._states, self._keys = jax.tree.map(
            lambda old, new: old.at[places[:asked]].set(new[:asked]), (self._states, self._keys), (states, keys)
        )
        return np.moveaxis(np.concatenate(found), 0, 2)[:asked]

    @property
    def acceptance(self) -> list[float]:
        """The mean probability of acceptance, of the chains of each data set."""
        found: list[float] = jnp.mean(self._states.mean_accept_prob, axis=1).tolist()
        return found

    def _everywhere(self, states: Any, data: Data) -> Any:
        over_chains = jax.vmap(lambda state, data: self._move(state, data, {}), in_axes=(0, None))
        return jax.vmap(over_chains)(states, data)

    def _warmed(self, count: int, states: Any, data: Data) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, states: self._everywhere(states, data), states)

    def _sampled(self, count: int, states: Any, data: Data, step_size: Array, keys: Array) -> tuple[Any, Array]:
        def one(states: Any, keys: Array) -> tuple[Any, None]:
            adapted = states.adapt_state
            uniform = partial(jax.random.uniform, shape=adapted.step_size.shape[1:], minval=-1.0, maxval=1.0)
            factor = 1.0 + _JITTER * jax.vmap(uniform)(keys)
            jittered = adapted._replace(step_size=step_size[:, None] * factor)
            return self._everywhere(states._replace(adapt_state=jittered), data), None

        def kept(states: Any, keys: Array) -> tuple[Any, Array]:
            states, _ = jax.lax.scan(one, states, jnp.swapaxes(_split(keys, self._settings.thin), 0, 1))
            return states, states.z

        states, draws = jax.lax.scan(kept, states, jnp.swapaxes(_split(keys, count), 0, 1))
        return states, draws


def _split(keys: Array, count: int = 2) -> Array:
    """So many keys of each, `[R, count, 2]`."""
    return jax.vmap(lambda key: jax.random.split(key, count))(keys)


def _filled(places: Sequence[int], count: int) -> list[int]:
    """The places, the last repeated until there are a power of two of them or all: few programs are compiled."""
    size = 1 << (len(places) - 1).bit_length()
    return [*places, *[places[-1]] * (min(size, max(count, len(places))) - len(places))]


def _parts(total: int, most: int = 100) -> list[tuple[int, int]]:
    """(done before, count) of pieces of at most this size."""
    return [(start, min(most, total - start)) for start in range(0, total, most)]
