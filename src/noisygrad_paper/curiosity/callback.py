"""Curiosity: information gain as a bonus, and a callback that gives it to any on-policy algorithm.

PPO("MlpPolicy", env).learn(100_000, callback=InformationGain())
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from noisygrad.exploration.gain import CovarianceTerm
from noisygrad_paper.curiosity.bonus import Bonus, IntrinsicReward
from noisygrad_paper.curiosity.dynamics import MODELS, Dynamics, DynamicsSettings, Errors
from noisygrad_paper.curiosity.recording import Tape, Transitions
from noisygrad_paper.curiosity.replay import ReplayPool
from noisygrad_paper.curiosity.supported import require_box, require_on_policy

Array = NDArray[np.float64]


class GainBonus(Bonus):
    """What each action taught a model of the dynamics.

    The only model of its `Dynamics` is trained here, once enough is new. Where there are several, each bonus only fills
    its pool, and the caller trains all of them at once with `dynamics.train`.

    Args:
        dynamics: The models, of which number `replica` is meant.
        pool: What it learns from; one of the paper's sizes by default.
        train_every: So many new transitions make a training worth while; None where the caller trains.
        num_samples: Draws of the weights; with `covariance`, as of `Dynamics.gain`.
    """

    def __init__(
        self,
        dynamics: Dynamics,
        *,
        replica: int = 0,
        pool: ReplayPool | None = None,
        train_every: int | None = 1000,
        num_samples: int = 10,
        covariance: CovarianceTerm = "exact",
    ) -> None:
        if not 0 <= replica < dynamics.replicas:
            raise ValueError(f"there are {dynamics.replicas} models, numbered from 0; got replica {replica!r}")
        if train_every is not None and (train_every < 1 or dynamics.replicas > 1):
            raise ValueError(
                f"train_every must be at least 1, and None where models learn together; got {train_every!r} for "
                f"{dynamics.replicas} models"
            )
        self.dynamics, self.replica = dynamics, replica
        self.pool = ReplayPool() if pool is None else pool
        self.errors: list[Errors] = []
        """How well each measured rollout had been predicted, before the model learned from it."""
        self._train_every, self._num_samples, self._covariance = train_every, num_samples, covariance
        self._new = 0

    def measure(self, transitions: Transitions) -> Array | None:
        """The information gain in nats, once the model has been trained."""
        if not self.dynamics.trained:
            return None
        gain, errors = self.dynamics.gain(
            self.replica, transitions, num_samples=self._num_samples, covariance=self._covariance
        )
        self.errors.append(errors)
        return gain

    def learn(self, transitions: Transitions) -> None:
        """Add the rollout to the pool, and train a model that is alone."""
        self.pool.add(transitions)
        self._new += len(transitions)
        if self._train_every is not None and self.pool.ready and self._new >= self._train_every:
            self.dynamics.train([self.pool])
            self._new = 0


class InformationGain(BaseCallback):
    """Gives an on-policy algorithm of stable-baselines3 a reward for what its actions teach about the world.

    After each rollout the bonus is added to the rewards in the buffer, and returns and advantages are computed anew.
    It works with PPO, A2C, sb3-contrib's TRPO and other on-policy algorithms, on any environment whose observations
    and actions are in a Box. `algorithm.learn` may be called again with the same object: it goes on with what it knows.

    Args:
        model: The settings of the model: a name in `MODELS` ("NNG-MVG", "NNG-FFG") or your own.
        weight: Of a typical bonus beside the task's rewards: small against the rewards you want to find.
        capacity: Transitions that the model may learn from; the oldest are forgotten.
        minimum: Transitions that there must be before it learns at all.
        train_every: New transitions after which it learns again.
        num_samples: Draws of the weights for the gain; with `covariance`, as of `Dynamics.gain`.
        seed: Of the model; by default that of the algorithm.

    Raises:
        ValueError: A setting is out of range. When learning begins, TypeError: the algorithm is off-policy, or a space
            is no Box. While it learns, ValueError: the environment gives NaN.
    """

    def __init__(
        self,
        model: str | DynamicsSettings = "NNG-MVG",
        *,
        weight: float = 1e-4,
        capacity: int = 100_000,
        minimum: int = 500,
        train_every: int = 1000,
        num_samples: int = 10,
        covariance: CovarianceTerm = "exact",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, str) and model not in MODELS:
            raise ValueError(f"there is no model {model!r}; there are {', '.join(MODELS)}, or DynamicsSettings")
        self.settings = MODELS[model] if isinstance(model, str) else model
        self.intrinsic: IntrinsicReward | None = None
        """The bonus as a reward; None before learning begins."""
        self._options: dict[str, Any] = {"train_every": train_every, "num_samples": num_samples}
        self._options["covariance"] = covariance
        self._sizes, self._weight, self._seed = (capacity, minimum), weight, seed
        self._made_for: tuple[int, int] | None = None
        self._tape = Tape(0)  # of no environment yet
        # Mistakes in the settings should show now, and not when learning begins.
        IntrinsicReward(self._bonus(1, 1, 0), weight=weight)

    @property
    def bonus(self) -> GainBonus:
        """The model's pool, and how well it has predicted; RuntimeError before learning has begun."""
        if self.intrinsic is None or not isinstance(self.intrinsic.bonus, GainBonus):
            raise RuntimeError("there is no model yet: it is made when learning begins")
        return self.intrinsic.bonus

    def _bonus(self, observations: int, actions: int, seed: int) -> GainBonus:
        dynamics = Dynamics(observations, actions, self.settings, [seed])
        return GainBonus(dynamics, pool=ReplayPool(*self._sizes, seed=seed), **self._options)

    def _init_callback(self) -> None:
        algorithm = require_on_policy(self.model)
        if isinstance(getattr(algorithm, "intrinsic", None), IntrinsicReward):
            name = type(algorithm).__name__
            raise TypeError(f"{name} takes its bonus itself: give it intrinsic=IntrinsicReward(...)")
        boxes = require_box(algorithm.observation_space, algorithm.action_space)
        sizes = (boxes[0].shape[0], boxes[1].shape[0])
        if self._made_for not in (None, sizes):
            raise ValueError(
                f"this model is of {self._made_for} observations and actions, the environment has {sizes}: make "
                "another InformationGain"
            )
        if self.intrinsic is None:
            seed = self._seed if self._seed is not None else algorithm.seed
            drawn = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
            self.intrinsic = IntrinsicReward(self._bonus(*sizes, drawn), weight=self._weight)
            self._made_for = sizes

    def _on_training_start(self) -> None:
        observations = cast(NDArray[np.float32], self.model._last_obs)
        # Where learning goes on, episodes go on, and the tape has seen where they are.
        if self._tape.observations is not observations:
            self._tape = Tape(self.training_env.num_envs)
            self._tape.begin(observations)

    def _on_rollout_start(self) -> None:
        self._tape.discard()

    def _on_step(self) -> bool:
        step = self.locals
        self._tape.add(step["clipped_actions"], step["new_obs"], step["rewards"], step["dones"], step["infos"])
        return True

    def _on_rollout_end(self) -> None:
        assert self.intrinsic is not None
        bonus = self.intrinsic(self._tape.take())
        buffer = require_on_policy(self.model).rollout_buffer
        buffer.rewards += bonus.astype(np.float32)
        buffer.compute_returns_and_advantage(self.locals["values"], self.locals["dones"])
        self.logger.record("curiosity/bonus", float(bonus.mean()))
        if self.bonus.errors:
            self.logger.record("curiosity/model_error", self.bonus.errors[-1].model)
            self.logger.record("curiosity/persistence_error", self.bonus.errors[-1].persistence)
