"""What happened in a rollout, with the observation that truly followed each action.

A vector environment begins a new episode by itself, and returns its first observation in place of the last one of the
old. `Tape` keeps the last one, and everything else a bonus or a baseline may ask for.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.curiosity.supported import require_finite

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transitions:
    """A rollout of `copies` environments, `steps` actions each: arrays `[steps, copies, ...]`."""

    observations: Array
    actions: Array
    """As the environment got them: clipped to its bounds."""
    next_observations: Array
    rewards: Array
    dones: NDArray[np.bool_]
    """Whether the action was an episode's last."""
    times: NDArray[np.int64]
    """How many actions of its episode came before."""
    last_observations: Array
    """Where the next rollout goes on, `[copies, d]`."""
    last_times: NDArray[np.int64]
    """And when, `[copies]`."""
    returns: tuple[float, ...]
    """The sum of rewards of each episode that ended in this rollout; it may have begun in an earlier one."""

    def __len__(self) -> int:
        """How many actions there are."""
        return self.rewards.size

    def flat(self) -> tuple[Array, ...]:
        """Observations, actions and next observations as rows."""
        return tuple(part.reshape(len(self), -1) for part in (self.observations, self.actions, self.next_observations))


class Tape:
    """Keeps what happens in `copies` environments, step by step, until `take` is called."""

    def __init__(self, copies: int) -> None:
        self.observations: Array | None = None
        """Where the copies are; None before `begin`."""
        self._times = np.zeros(copies, dtype=np.int64)
        self._sums = np.zeros(copies, dtype=np.float64)
        self.discard()

    def discard(self) -> None:
        """Forget what is recorded; the episodes go on."""
        self._kept: list[tuple[NDArray[Any], ...]] = []
        self._returns: list[float] = []

    def begin(self, observations: Array) -> None:
        """New episodes begin here; what is recorded is forgotten. ValueError where an observation is not finite."""
        require_finite("observations", observations)
        self.observations = observations
        self._times[:] = 0
        self._sums[:] = 0.0
        self.discard()

    def add(
        self,
        actions: Array,
        observations: Array,
        rewards: Array,
        dones: NDArray[np.bool_],
        infos: Sequence[Mapping[str, Any]],
    ) -> None:
        """One step of all copies, as a vector environment of stable-baselines3 tells it.

        Raises ValueError where an observation or a reward is not finite, and RuntimeError before `begin`.
        """
        if self.observations is None:
            raise RuntimeError("call reset() before step()")
        following = observations
        ended = np.flatnonzero(dones).tolist()
        if ended:
            following = observations.copy()
            for copy in ended:
                following[copy] = infos[copy]["terminal_observation"]
        require_finite("observations", following)
        require_finite("rewards", rewards)
        # stable-baselines3 adds values to the rewards it is given, in place.
        self._kept.append((self.observations, actions, following, rewards.copy(), dones, self._times.copy()))
        self._times += 1
        self._sums += rewards
        if ended:
            self._returns += self._sums[ended].tolist()
            self._times[ended] = 0
            self._sums[ended] = 0.0
        self.observations = observations

    def take(self) -> Transitions:
        """All since the last call, in order; RuntimeError where nothing has happened since."""
        if not self._kept or self.observations is None:
            raise RuntimeError("nothing was recorded: step the environment first")
        observations, actions, following, rewards, dones, times = map(np.stack, zip(*self._kept, strict=True))
        # An environment may give float64; all that is learned from it is float32.
        taken = Transitions(
            observations=observations.astype(np.float32, copy=False),
            actions=actions.astype(np.float32, copy=False),
            next_observations=following.astype(np.float32, copy=False),
            rewards=rewards.astype(np.float32),
            dones=dones,
            times=times,
            last_observations=self.observations,
            last_times=self._times.copy(),
            returns=tuple(self._returns),
        )
        self.discard()
        return taken
