"""TRPO of sb3-contrib with the paper's linear baseline, and a bonus beside the reward."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sb3_contrib import TRPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv

from noisygrad_paper.curiosity.bonus import IntrinsicReward
from noisygrad_paper.environments import HORIZON, TASKS, Task
from noisygrad_paper.environments.vector import TaskVector
from noisygrad_paper.exploration.baseline import LinearFeatureBaseline
from noisygrad_paper.exploration.controls import NoBonus
from noisygrad_paper.exploration.recorder import Recorder


class LinearBaselineTRPO(TRPO):
    """TRPO whose advantages come from a linear baseline and may have a bonus in their rewards.

    Advantages use rewards with the bonus and the baseline of the previous rollout; the baseline is then fitted to the
    task's own rewards. The critic network of stable-baselines3 is neither used nor trained. Where an episode ends, no
    value is added, whether the task was over or its time.

    Observations and actions must be in a Box. Without `intrinsic` there is no bonus; `settings` is everything else that
    `sb3_contrib.TRPO` takes.
    """

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv,
        *,
        intrinsic: IntrinsicReward | None = None,
        baseline: LinearFeatureBaseline | None = None,
        **settings: Any,
    ) -> None:
        self.intrinsic = IntrinsicReward(NoBonus()) if intrinsic is None else intrinsic
        self.baseline = LinearFeatureBaseline() if baseline is None else baseline
        self.returns: list[float] = []
        """The mean sum of the task's rewards over the episodes that ended, for each iteration; NaN where none did."""
        super().__init__(policy, env, n_critic_updates=0, **settings)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        wrapped = BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        return wrapped if isinstance(wrapped, Recorder) else Recorder(wrapped)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Collect a rollout, then put bonus and baseline into the buffer."""
        assert isinstance(env, Recorder)
        env.discard()
        if not super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps):
            return False
        transitions = env.take()
        # From the recorded rewards: stable-baselines3 has added its critic's value where a time limit cut an episode.
        rollout_buffer.rewards = (transitions.rewards + self.intrinsic(transitions)).astype(np.float32)
        rollout_buffer.values = self.baseline(transitions.observations, transitions.times).astype(np.float32)
        last = self.baseline(transitions.last_observations, transitions.last_times)
        rollout_buffer.compute_returns_and_advantage(torch.as_tensor(last), transitions.dones[-1])
        self.baseline.fit(transitions, self.gamma)
        self.returns.append(float(np.mean(transitions.returns)) if transitions.returns else float("nan"))
        return True

    def train(self) -> None:
        """One step of the policy; none where all advantages are equal, since there is then no direction to go."""
        if np.ptp(self.rollout_buffer.advantages) == 0.0:
            self._n_updates += 1
            return
        with warnings.catch_warnings():
            # Of the critic's losses, which there are none of.
            warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
            warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
            super().train()


def paper_trpo(
    task: str | Callable[[], Task],
    *,
    intrinsic: IntrinsicReward | None = None,
    copies: int = 10,
    batch: int = 5000,
    horizon: int = HORIZON,
    seed: int | None = None,
    **settings: Any,
) -> LinearBaselineTRPO:
    """TRPO with the paper's settings on one of its tasks: `paper_trpo("MountainCar").learn(100 * 5000)`.

    `task` is a name in `TASKS`, or makes a task, of which `copies` are stepped together; `batch` is how many actions an
    iteration has, a multiple of the copies. `settings` are other arguments of `LinearBaselineTRPO`.
    """
    if isinstance(task, str):
        if task not in TASKS:
            raise ValueError(f"there is no task {task!r}; there are {', '.join(TASKS)}")
        task = TASKS[task]
    if batch < 2 * copies or batch % copies:
        raise ValueError(f"the batch must be a multiple of the {copies} copies and at least two of each, got {batch}")
    chosen: dict[str, Any] = {
        "n_steps": batch // copies,
        "batch_size": batch,
        "gamma": 0.99,
        "gae_lambda": 1.0,
        "target_kl": 0.01,
        "cg_max_steps": 10,
        "cg_damping": 1e-5,
        "line_search_shrinking_factor": 0.8,
        "line_search_max_iter": 15,
        "policy_kwargs": {"net_arch": {"pi": [32], "vf": []}, "activation_fn": torch.nn.Tanh, "log_std_init": 0.0},
        "device": "cpu",
    }
    env = TaskVector(task, copies, horizon=horizon, seed=seed)
    algorithm = LinearBaselineTRPO("MlpPolicy", env, intrinsic=intrinsic, seed=seed, **(chosen | settings))
    if not {"verbose", "tensorboard_log"} & settings.keys():
        # stable-baselines3's own logger leaves an empty folder in the temporary one at every call of learn().
        algorithm.set_logger(Logger(None, []))
    return algorithm
