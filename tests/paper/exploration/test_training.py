"""Rollouts, the linear baseline, the pool, bonuses, and TRPO on all of it."""

import gc

import numpy as np
import pytest

pytest.importorskip("Box2D")
gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("sb3_contrib")

import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from noisygrad_paper.curiosity import Bonus, IntrinsicReward, ReplayPool, Transitions
from noisygrad_paper.environments import TASKS, CartPoleSwingup, DoublePendulum, MountainCar
from noisygrad_paper.environments.vector import TaskVector
from noisygrad_paper.exploration import (
    LinearBaselineTRPO,
    LinearFeatureBaseline,
    NoBonus,
    Recorder,
    SquaredNorm,
    paper_trpo,
)
from noisygrad_paper.exploration.baseline import discounted


def rollout(steps=40, copies=3, horizon=15, task=CartPoleSwingup, seed=0):
    env = Recorder(TaskVector(task, copies, horizon=horizon, seed=seed))
    env.reset()
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        env.step(rng.uniform(-1, 1, (copies, 1)).astype(np.float32))
    return env.take()


# ---------------------------------------------------------------- vector environment and recorder


@pytest.mark.parametrize("task", TASKS.values())
def test_vector_equals_single_environments(task):
    vector = TaskVector(task, 3, horizon=12, seed=5)
    together = vector.reset()
    singles = [task() for _ in range(3)]
    apart = np.stack([env.reset(seed=5 + copy)[0] for copy, env in enumerate(singles)])
    np.testing.assert_array_equal(together, apart)
    rng = np.random.default_rng(0)
    for step in range(1, 30):
        actions = rng.uniform(-2, 2, (3, 1)).astype(np.float32)
        together, rewards, dones, infos = vector.step(actions)
        for copy, env in enumerate(singles):
            expected, reward, over, _, _ = env.step(actions[copy])
            assert rewards[copy] == reward
            if step % 12 == 0 and not over:
                assert dones[copy]
            if dones[copy]:
                np.testing.assert_array_equal(infos[copy]["terminal_observation"], expected)
                # Both draw the next start from the generator that belongs to the copy.
                expected, _ = env.reset()
            np.testing.assert_array_equal(together[copy], expected)


def test_recorder_keeps_the_true_next_observation():
    seen = rollout(steps=40, horizon=15)
    assert seen.dones.any()
    going = ~seen.dones[:-1]
    np.testing.assert_array_equal(seen.next_observations[:-1][going], seen.observations[1:][going])
    # A cart does not jump in one step; the start of the next episode does.
    jump = np.abs(seen.next_observations - seen.observations)[..., 0]
    assert jump.max() < 0.3
    restarts = np.abs(seen.observations[1:] - seen.observations[:-1])[..., 0][seen.dones[:-1]]
    assert restarts.max() > 0.3
    assert (seen.times[0] == 0).all()
    np.testing.assert_array_equal(seen.times[1:], np.where(seen.dones[:-1], 0, seen.times[:-1] + 1))
    assert seen.times.max() < 15
    assert len(seen.returns) == seen.dones.sum()
    assert len(seen) == 120


def test_episodes_go_on_from_one_rollout_to_the_next():
    env = Recorder(TaskVector(DoublePendulum, 2, horizon=25, seed=0))
    env.reset()
    first, second = (step_and_take(env, 10) for _ in range(2))
    np.testing.assert_array_equal(first.last_observations, second.observations[0])
    assert (second.times[0] == 10).all()
    assert not first.dones.any()
    third = step_and_take(env, 10)
    assert third.dones[4].all()
    assert len(third.returns) == 2


def step_and_take(env, steps):
    for _ in range(steps):
        env.step(np.full((env.num_envs, 1), 0.5, dtype=np.float32))
    return env.take()


def test_recorder_works_around_any_vector_environment():
    made = DummyVecEnv([lambda: gymnasium.make("noisygrad/MountainCar-v0", max_episode_steps=7)] * 2)
    env = Recorder(made)
    env.seed(3)
    env.reset()
    slow = step_and_take(env, 20)
    fast = Recorder(TaskVector(MountainCar, 2, horizon=7, seed=3))
    fast.reset()
    for a, b in zip(slow.flat(), step_and_take(fast, 20).flat(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_worlds_are_released():
    env = CartPoleSwingup()
    for _ in range(50):
        env.begin()
    gc.collect()
    assert sum(type(found).__name__ == "b2World" for found in gc.get_objects()) < 50


# ---------------------------------------------------------------- baseline


def test_baseline_is_the_ridge_solution():
    seen = rollout(steps=60, copies=4, horizon=20, task=DoublePendulum)
    seen = replace_rewards(seen, np.random.default_rng(0).normal(size=seen.rewards.shape))
    baseline = LinearFeatureBaseline(ridge=1e-2)
    assert (baseline(seen.observations, seen.times) == 0).all()
    baseline.fit(seen, 0.9)
    rows = baseline.features(seen.observations, seen.times).reshape(len(seen), -1)
    assert rows.shape[1] == 2 * 6 + 4
    # The same as least squares with √ridge · I below the rows and 0 below the targets.
    targets = discounted(seen, np.zeros(4), 0.9).reshape(-1)
    longer = np.vstack([rows, 0.1 * np.eye(rows.shape[1])])
    expected = np.linalg.lstsq(longer, np.concatenate([targets, np.zeros(rows.shape[1])]), rcond=None)[0]
    np.testing.assert_allclose(baseline.weights, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(baseline(seen.observations, seen.times).reshape(-1), rows @ expected, atol=1e-6)


def replace_rewards(seen, rewards):
    return Transitions(**{**vars(seen), "rewards": rewards.astype(np.float32)})


def test_baseline_clips_observations():
    far, near = np.array([[25.0, -40.0]]), np.array([[10.0, -10.0]])
    time = np.array([250])
    features = LinearFeatureBaseline.features(far, time)
    np.testing.assert_array_equal(features, LinearFeatureBaseline.features(near, time))
    np.testing.assert_allclose(features, [[10, -10, 100, 100, 2.5, 2.5**2, 2.5**3, 1]])


def test_discounted_sums_stop_at_episodes_and_go_on_after_the_rollout():
    seen = rollout(steps=5, copies=1, horizon=3, task=MountainCar)
    seen = replace_rewards(seen, np.array([[1.0], [2.0], [4.0], [8.0], [16.0]]))
    sums = discounted(seen, np.array([32.0]), 0.5)[:, 0]
    np.testing.assert_allclose(sums, [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4, 8 + 0.5 * (16 + 16), 16 + 16])


# ---------------------------------------------------------------- pool


def test_pool_keeps_the_newest_and_no_pair_across_episodes():
    pool = ReplayPool(capacity=50, minimum=10, seed=0)
    first, second = rollout(steps=10, copies=3, seed=0), rollout(steps=10, copies=3, seed=1)
    pool.add(first)
    pool.add(second)
    assert len(pool) == 50
    known = np.concatenate([np.concatenate(seen.flat(), axis=1) for seen in (first, second)])[-50:]
    held = np.concatenate(pool.rows(), axis=1)
    np.testing.assert_array_equal(np.sort(held, axis=0), np.sort(known, axis=0))
    observations, actions, following = pool.sample(7, 10)
    assert (observations.shape, actions.shape, following.shape) == ((7, 10, 4), (7, 10, 1), (7, 10, 4))
    rows = {row.tobytes() for row in np.concatenate([observations, actions, following], axis=2).reshape(70, -1)}
    assert rows <= {row.tobytes() for row in held}


def test_pool_takes_a_rollout_larger_than_itself():
    pool = ReplayPool(capacity=8, minimum=8)
    seen = rollout(steps=10, copies=2)
    pool.add(seen)
    assert {row.tobytes() for row in pool.rows()[0]} == {row.tobytes() for row in seen.flat()[0][-8:]}


def test_standardised_columns():
    pool = ReplayPool(minimum=10)
    pool.add(rollout())
    for scale, rows in zip(pool.scales(), pool.rows(), strict=True):
        standard = scale.standardise(rows)
        np.testing.assert_allclose(standard.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(standard.std(0), 1, atol=1e-4)


# ---------------------------------------------------------------- bonuses


def test_squared_norm_waits_for_the_pool_and_uses_what_came_before():
    bonus = SquaredNorm(ReplayPool(minimum=100))
    first, second = rollout(seed=0), rollout(seed=1)
    assert bonus.measure(first) is None
    bonus.learn(first)
    measured = bonus.measure(second)
    rows, actions, _ = first.flat()
    scaled = (second.observations - rows.mean(0)) / rows.std(0)
    scaled_actions = (second.actions - actions.mean(0)) / actions.std(0)
    np.testing.assert_allclose(measured, (scaled**2).sum(-1) + (scaled_actions**2).sum(-1), rtol=1e-4)


class Given(Bonus):
    """Bonuses written down in advance."""

    def __init__(self, values):
        self.values, self.learned = list(values), 0

    def measure(self, transitions):
        value = self.values.pop(0)
        return None if value is None else np.broadcast_to(value, transitions.rewards.shape)

    def learn(self, transitions):
        self.learned += 1


def test_intrinsic_reward_is_relative_to_the_last_medians():
    seen = rollout(steps=2, copies=2)
    bonus = Given([None, 4.0, 8.0, 2.0, 1e9])
    intrinsic = IntrinsicReward(bonus, weight=0.1, window=2)
    found = [intrinsic(seen)[0, 0] for _ in range(5)]
    np.testing.assert_allclose(found, [0, 0.1, 0.1 * 8 / 6, 0.1 * 2 / 5, 0.1 * 1000 / 501])
    assert bonus.learned == 5


def test_constant_factors_of_a_bonus_do_not_matter():
    seen = rollout()
    shape = np.random.default_rng(0).uniform(size=seen.rewards.shape)
    small, large = (IntrinsicReward(Given([factor * shape]))(seen) for factor in (1.0, 77.0))
    np.testing.assert_allclose(small, large)


def test_no_bonus_is_zero():
    seen = rollout()
    assert (IntrinsicReward(NoBonus())(seen) == 0).all()


# ---------------------------------------------------------------- TRPO


def test_trpo_has_the_papers_settings():
    trpo = paper_trpo("MountainCar", seed=0)
    assert trpo.n_steps * trpo.n_envs == 5000
    assert (trpo.gamma, trpo.gae_lambda, trpo.target_kl, trpo.n_critic_updates) == (0.99, 1.0, 0.01, 0)
    assert (trpo.cg_max_steps, trpo.cg_damping, trpo.line_search_max_iter) == (10, 1e-5, 15)
    hidden = trpo.policy.mlp_extractor.policy_net
    assert [type(layer).__name__ for layer in hidden] == ["Linear", "Tanh"]
    assert hidden[0].out_features == 32
    assert trpo.policy.log_std.exp().item() == 1.0
    assert trpo.env.venv.horizon == 500


def learned(task="DoublePendulum", seed=0, iterations=2, **settings):
    trpo = paper_trpo(task, seed=seed, batch=600, copies=3, horizon=100, **settings)
    return trpo.learn(iterations * 600)


def parameters(trpo):
    return torch.cat([p.detach().flatten() for p in trpo.policy.parameters()])


def test_trpo_alone_does_not_move_without_a_reward():
    trpo = paper_trpo("MountainCar", seed=0, batch=600, copies=3)
    before = parameters(trpo).clone()
    trpo.learn(1200)
    assert torch.equal(parameters(trpo), before)
    assert (trpo.baseline.weights == 0).all()
    assert np.isnan(trpo.returns[0])  # no episode of 500 actions ends within 200


def test_trpo_learns_from_a_reward_and_repeats_itself():
    first, again, other = learned(seed=0), learned(seed=0), learned(seed=1)
    assert len(first.returns) == 2
    assert first.returns == again.returns
    assert torch.equal(parameters(first), parameters(again))
    assert not torch.equal(parameters(first), parameters(other))


def test_bonus_moves_the_policy_where_there_is_no_reward():
    alone = learned("MountainCar")
    driven = learned("MountainCar", intrinsic=IntrinsicReward(SquaredNorm()))
    assert set(alone.returns + driven.returns) == {0.0}
    # Both begin alike; the first rollout has no bonus, the second has.
    assert not torch.equal(parameters(alone), parameters(driven))


def test_advantages_are_sums_of_rewards_and_bonus_less_the_previous_baseline():
    bonus = Given([3.0, 3.0])
    previous = []

    class Watched(LinearFeatureBaseline):
        def fit(self, transitions, discount):
            previous[:] = [self(transitions.observations, transitions.times), transitions]
            super().fit(transitions, discount)

    baseline = Watched()
    trpo = learned("CartPoleSwingup", baseline=baseline, intrinsic=IntrinsicReward(bonus, weight=2.0))
    values, seen = previous
    buffer = trpo.rollout_buffer
    # After `train` the buffer holds its rows copy by copy.
    rewards = replace_rewards(seen, seen.rewards + 2.0)
    sums = discounted(rewards, np.zeros(3), 0.99)
    unfinished = np.cumsum(seen.dones[::-1], axis=0)[::-1] == 0
    expected = (sums - values).swapaxes(0, 1).reshape(-1)
    ended = ~unfinished.swapaxes(0, 1).reshape(-1)
    assert ended.mean() > 0.5
    np.testing.assert_allclose(buffer.advantages.reshape(-1)[ended], expected[ended], rtol=1e-4, atol=1e-3)


def test_time_limit_adds_no_value_to_rewards():
    made = gymnasium.make("noisygrad/DoublePendulum-v0", max_episode_steps=20)
    trpo = LinearBaselineTRPO("MlpPolicy", made, n_steps=64, batch_size=64, seed=0, device="cpu")
    trpo.learn(64)
    assert set(np.unique(trpo.rollout_buffer.rewards)) <= {0.0, 1.0}
    assert trpo.rollout_buffer.episode_starts.sum() >= 3


def test_saved_and_loaded(tmp_path):
    trpo = learned("DoublePendulum", intrinsic=IntrinsicReward(SquaredNorm()))
    trpo.save(tmp_path / "agent.zip")
    env = TaskVector(DoublePendulum, 3, horizon=100, seed=0)
    again = LinearBaselineTRPO.load(tmp_path / "agent.zip", env=env, device="cpu")
    assert torch.equal(parameters(again), parameters(trpo))
    np.testing.assert_array_equal(again.baseline.weights, trpo.baseline.weights)
    assert len(again.intrinsic.bonus.pool) == 1200
    again.learn(600, reset_num_timesteps=False)
    assert len(again.returns) == 3
