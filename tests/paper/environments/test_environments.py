"""The three tasks: their constants, their physics, and their rewards."""

import math

import numpy as np
import pytest

pytest.importorskip("Box2D")
pytest.importorskip("sb3_contrib")
gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from noisygrad_paper.environments import TASKS, CartPoleSwingup, DoublePendulum, MountainCar

GRAVITY = 10.0


def play(env, policy, *, seed=None, state=None):
    """The sum of rewards of one episode of at most 500 actions."""
    observation, _ = env.reset(seed=seed, options=None if state is None else {"state": state})
    total = 0.0
    for _ in range(500):
        observation, reward, over, _, _ = env.step(np.array([policy(observation)], dtype=np.float32))
        total += reward
        if over:
            break
    return total


# ---------------------------------------------------------------- gymnasium


@pytest.mark.filterwarnings("ignore:.*Box observation space.*:UserWarning")  # an angle that is not wrapped has no bound
@pytest.mark.parametrize("name", TASKS)
def test_passes_gymnasiums_own_check(name):
    made = gymnasium.make(f"noisygrad_paper.environments:noisygrad/{name}-v0", render_mode="rgb_array")
    assert made.spec.max_episode_steps == 500
    check_env(made.unwrapped)


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_episode(name):
    actions = np.random.default_rng(1).uniform(-1.5, 1.5, (60, 1)).astype(np.float32)
    env = TASKS[name]()

    def episode():
        rows = [env.reset(seed=7)[0]]
        rows += [env.step(action)[0] for action in actions]
        return np.stack(rows)

    first = episode()
    # An episode in between, so that a world that remembers would be found out.
    play(env, lambda _: 1.0, seed=3)
    np.testing.assert_array_equal(first, episode())
    assert not np.array_equal(first[0], env.reset(seed=8)[0])


@pytest.mark.parametrize("name", TASKS)
def test_pictures_show_the_motion(name):
    env = TASKS[name](render_mode="rgb_array")
    env.reset(seed=0)
    before = env.render()
    for _ in range(20):
        env.step(np.ones(1, dtype=np.float32))
    after = env.render()
    assert before.shape == after.shape
    assert before.shape[1:] == (480, 3)
    assert before.dtype == np.uint8
    assert (before != after).any()
    assert (before != before[0, 0]).any(-1).mean() > 0.005


# ---------------------------------------------------------------- constants


@pytest.mark.parametrize("name", TASKS)
def test_gravity_and_bounds(name):
    env = TASKS[name]()
    env.reset(seed=0)
    assert tuple(env.world.gravity) == (0.0, -GRAVITY)
    assert (env.action_space.low, env.action_space.high) == (-1.0, 1.0)


def test_cart_pole_constants():
    env = CartPoleSwingup()
    env.reset(seed=0)
    assert env.cart.mass == pytest.approx(1.0)
    assert env.pole.mass == pytest.approx(0.1)
    # Box2D gives the inertia around the body's origin, which is the hinge.
    assert env.pole.inertia - env.pole.mass * 0.5**2 == pytest.approx(0.1 * (0.1**2 + 1) / 12, rel=1e-5)
    assert tuple(env.pole.localCenter) == pytest.approx((0.0, 0.5))
    assert (env.time_step, env.frame_skip, env.iterations, env.largest_force) == (0.05, 1, (8, 3), 10.0)
    starts = np.stack([env.reset()[0] for _ in range(400)]) - [0, 0, math.pi, 0]
    bounds = np.array([1.0, 2.0, 1.0, 3.0])
    assert (np.abs(starts) <= bounds + 1e-6).all()
    assert (np.abs(starts).max(0) > 0.95 * bounds).all()


def test_mountain_car_constants():
    env = MountainCar()
    env.reset(seed=0)
    assert env.car.mass == pytest.approx(0.4)
    assert (env.time_step, env.frame_skip, env.iterations, env.largest_force) == (0.05, 1, (8, 3), 1.0)
    track = np.array(env.world.bodies[0].fixtures[0].shape.vertices)
    assert len(track) == 201
    np.testing.assert_allclose(track[:, 1], 1 - np.cos(math.pi * track[:, 0] / 2), atol=1e-6)
    assert tuple(track[[0, -1], 0]) == (-2.0, 2.0)
    starts = np.stack([env.reset()[0] for _ in range(200)])
    assert (starts[:, 0] == 0).all()
    assert 0.95 < np.abs(starts[:, 1]).max() <= 1.0
    friction = math.sqrt(env.car.fixtures[0].friction * env.world.bodies[0].fixtures[0].friction)
    assert friction == pytest.approx(0.01)


def test_double_pendulum_constants():
    env = DoublePendulum()
    env.reset(seed=0)
    for link in (env.upper, env.lower):
        assert link.mass == pytest.approx(0.5)
        assert link.inertia - link.mass * 0.5**2 == pytest.approx(0.5 * (0.1**2 + 1) / 12, rel=1e-5)
    assert (env.time_step, env.frame_skip, env.iterations, env.largest_force) == (0.01, 2, (20, 20), 50.0)
    assert env.threshold == 0.1
    starts = np.stack([env.reset()[0] for _ in range(400)])
    assert np.arctan2(starts[:, [0, 3]], starts[:, [1, 4]]).std(0) == pytest.approx([0.1, 0.1], rel=0.15)
    assert starts[:, [2, 5]].std(0) == pytest.approx([0.01, 0.01], rel=0.15)


# ---------------------------------------------------------------- one step against the equations of motion


def cart_pole_accelerations(state, force):
    big, small, length, inertia = 1.0, 0.1, 0.5, 0.1 * 1.01 / 12
    _, _, angle, rate = state
    coupling = -small * length * math.cos(angle)
    mass = np.array([[big + small, coupling], [coupling, inertia + small * length**2]])
    forces = [force - small * length * math.sin(angle) * rate**2, small * GRAVITY * length * math.sin(angle)]
    return np.linalg.solve(mass, forces)


def double_pendulum_accelerations(state, torque):
    m, length, c, inertia = 0.5, 1.0, 0.5, 0.5 * 1.01 / 12
    first, first_rate, second, second_rate = state
    between = first - second
    coupling = m * length * c
    mass = np.array(
        [
            [inertia + m * c**2 + m * length**2, coupling * math.cos(between)],
            [coupling * math.cos(between), inertia + m * c**2],
        ]
    )
    forces = [
        -torque - coupling * math.sin(between) * second_rate**2 - m * (c + length) * GRAVITY * math.sin(first),
        torque + coupling * math.sin(between) * first_rate**2 - m * GRAVITY * c * math.sin(second),
    ]
    return np.linalg.solve(mass, forces)


# From rest: the engine solves constraints on velocities and so sees what rotation adds to them only a step later.
@pytest.mark.parametrize("action", [-1.0, 0.3, 2.0])
@pytest.mark.parametrize("angle", [0.2, 1.8, 3.3])
def test_cart_pole_moves_by_its_equations(angle, action):
    env = CartPoleSwingup()
    env.reset(seed=0, options={"state": (0.4, 0.0, angle, 0.0)})
    observation = env.step(np.array([action], dtype=np.float32))[0]
    expected = cart_pole_accelerations((0.4, 0.0, angle, 0.0), 10.0 * min(action, 1.0))
    np.testing.assert_allclose(observation[[1, 3]] / 0.05, expected, rtol=1e-4)
    np.testing.assert_allclose(observation[[0, 2]], [0.4, angle] + 0.05 * observation[[1, 3]], atol=1e-3)


@pytest.mark.parametrize("action", [-0.2, 0.0, 0.1])
@pytest.mark.parametrize("angles", [(0.3, -0.4), (3.0, 2.5)])
def test_double_pendulum_moves_by_its_equations(angles, action):
    state = (angles[0], 0.0, angles[1], 0.0)
    env = DoublePendulum()
    env.begin(state)
    env._push(50.0 * action)
    env.world.Step(env.time_step, *env.iterations)
    rates = np.array(env._observation())[[2, 5]]
    np.testing.assert_allclose(rates / 0.01, double_pendulum_accelerations(state, 50.0 * action), rtol=1e-4, atol=1e-4)


def test_rates_and_positions_agree():
    env = DoublePendulum()
    env.begin((0.5, 0.8, -0.3, -0.6))
    before = np.array([env.upper.angle, env.lower.angle])
    env.world.Step(1e-4, 20, 20)
    after = np.array([env.upper.angle, env.lower.angle])
    np.testing.assert_allclose((after - before) / 1e-4, [0.8, -0.6], atol=0.01)


@pytest.mark.parametrize("x", [-1.0, 0.5, 0.8])
def test_mountain_car_moves_by_its_equation(x):
    env = MountainCar()
    env.reset(seed=0, options={"state": (x, 0.0)})
    speed = env.step(np.array([0.7], dtype=np.float32))[0][1]
    slope = math.pi / 2 * math.sin(math.pi * x / 2)
    expected = (0.7 / 0.4 * math.sqrt(1 + slope**2) - GRAVITY * slope) / (1 + slope**2)
    # A box of 0.4 m that rubs on the track, beside a point that does not.
    assert speed / 0.05 == pytest.approx(expected, rel=0.05)


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("state", "reward", "over"),
    [((0, 0, 0.6, 0), 1, False), ((0, 0, -0.6, 0), 1, False), ((0, 0, 0.7, 0), 0, False), ((3.5, 0, 0, 0), 0, True)],
)
def test_cart_pole_rewards(state, reward, over):
    env = CartPoleSwingup()
    env.reset(seed=0, options={"state": state})
    assert env.step(np.zeros(1, dtype=np.float32))[1:3] == (reward, over)


def test_mountain_car_rewards_leaving():
    env = MountainCar()
    env.reset(seed=0, options={"state": (0.5, 2.0)})
    steps = [env.step(np.ones(1, dtype=np.float32)) for _ in range(3)]
    assert [step[1:3] for step in steps if step[0][0] < 0.6] == [(0.0, False)] * sum(s[0][0] < 0.6 for s in steps)
    assert next(step for step in steps if step[0][0] >= 0.6)[1:3] == (1.0, True)


@pytest.mark.parametrize(("threshold", "rewarded"), [(0.1, False), (1.0, True)])
def test_double_pendulum_threshold(threshold, rewarded):
    env = DoublePendulum(threshold=threshold)
    env.reset(seed=0, options={"state": (math.pi, 0, math.pi - 0.4, 0)})
    # Straight up and a bend of 0.4 rad: the tip is 2 sin(0.2) = 0.4 m from the target, to the right of it.
    assert env.tip() == pytest.approx((math.sin(0.4), 1 + math.cos(0.4)), abs=1e-5)
    assert env.step(np.zeros(1, dtype=np.float32))[1] == rewarded


def test_random_policies_find_nothing():
    """A quick version of a count: 0 of 10000 episodes of CartPoleSwingup and 0 of 5000 of MountainCar had a reward."""
    rng = np.random.default_rng(0)
    for task, episodes in ((CartPoleSwingup, 1000), (MountainCar, 60)):
        env = task()
        env.reset(seed=0)
        rewarded = sum(play(env, lambda _: rng.standard_normal()) > 0 for _ in range(episodes))
        assert rewarded <= 1


def test_double_pendulum_is_sparse_at_the_papers_threshold_only():
    env, rng = DoublePendulum(threshold=1.0), np.random.default_rng(0)
    env.reset(seed=0)
    closest = []
    for _ in range(60):
        env.begin()
        distances = []
        for action in rng.standard_normal(500):
            env.advance(action)
            distances.append(math.dist(env.tip(), (0, 2)))
        closest.append(min(distances))
    assert 0.15 < np.mean(np.array(closest) < 0.1) < 0.55
    assert np.mean(np.array(closest) < 1.0) > 0.85


def test_mountain_car_cannot_drive_straight_up():
    assert play(MountainCar(), lambda _: 1.0, state=(0.0, 0.0)) == 0.0
