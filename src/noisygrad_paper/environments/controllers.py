"""A scripted controller for each of the three tasks: each can be solved, and an episode of it is worth watching.

A controller is made for one episode and then maps every observation to an action, as `env.step` takes it. None of them
learns: they know the equations of motion, and what balances is computed from the task's own step.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from noisygrad_paper.environments.base import GRAVITY, Array, Task
from noisygrad_paper.environments.cart_pole_swingup import POLE_LENGTH, CartPoleSwingup
from noisygrad_paper.environments.double_pendulum import LENGTH, DoublePendulum

Controller = Callable[[Array], Array]
_G = -GRAVITY


class PushWhereItMoves:
    """MountainCar: full force in the direction of motion, so that every swing ends higher than the last."""

    def __call__(self, observation: Array) -> Array:
        """The action."""
        return _action(1.0 if observation[1] >= 0 else -1.0)


class PumpAndBalance:
    """CartPoleSwingup: pump energy into the pole until it is upright, then balance by a linear-quadratic regulator."""

    mass, half = 0.1, POLE_LENGTH / 2
    inertia = mass * ((0.1**2 + POLE_LENGTH**2) / 12 + half**2)
    surplus = 0.14
    """Joules above the upright pole's: the engine takes some of what is pumped in."""
    catch = 115.0
    """The regulator takes over where its cost is below this."""

    def __init__(self) -> None:
        self._gain, self._cost = regulator(CartPoleSwingup(), (0.0, 0.0, 0.0, 0.0), self._off_upright)

    def __call__(self, observation: Array) -> Array:
        """The action."""
        off = self._off_upright(observation.tolist())
        if off @ self._cost @ off < self.catch:
            return _action(-float(self._gain @ off))
        x, speed, angle, rate = off.tolist()
        energy = 0.5 * self.inertia * rate**2 + self.mass * _G * self.half * (math.cos(angle) - 1.0)
        # The pole's energy grows by m l θ̇ cos(θ) times the cart's acceleration.
        pump = math.tanh(4.5 * (self.surplus - energy) * rate * math.cos(angle))
        return _action(2.6 * pump - 0.4 * x - 0.6 * speed)

    @staticmethod
    def _off_upright(observation: Sequence[float]) -> NDArray[np.float64]:
        x, speed, angle, rate = observation
        return np.array([x, speed, _wrapped(angle), rate])


class SwingAndCatch:
    """DoublePendulum: swing by bending the elbow, and catch the rods on their way past the top.

    The elbow follows a bend in the sense of the rods' angular momentum, which adds energy as a child does on a swing.
    When the upper rod is high, the controller plays in a simulation what would follow if it held one of a few torques
    for a moment and left the rest to a linear-quadratic regulator. The first that ends balanced is what it does.
    """

    mass, half = 0.5, LENGTH / 2
    inertia = mass * (0.1**2 + LENGTH**2) / 12
    upper, lower, coupling = inertia + mass * (half**2 + LENGTH**2), inertia + mass * half**2, mass * LENGTH * half
    upper_weight, lower_weight = mass * _G * (half + LENGTH), mass * _G * half

    surplus = 2.6
    """Joules above the upright rods': the engine takes some of what is pumped in."""
    lead = 0.23
    """Seconds by which the bend is ahead of the angular momentum, since the elbow takes time to follow."""
    moves = (
        (0.0, 0),
        *((sign * torque, steps) for steps in (5, 10) for torque in (0.05, 0.1, 0.2, 0.4) for sign in (1.0, -1.0)),
    )
    """What is tried before the regulator: an action, and for how many steps."""

    def __init__(self) -> None:
        self._imagined = DoublePendulum()
        self._gain, _ = regulator(self._imagined, (math.pi, 0.0, math.pi, 0.0), self._off_upright)
        self._step, self._caught = -1, False
        self._planned: list[float] = []

    def __call__(self, observation: Array) -> Array:
        """The action."""
        seen = observation.tolist()
        self._step += 1
        high = seen[1] < -0.3
        if self._caught and not self._planned and seen[1] > 0.0:
            self._caught = False
        if not self._caught and high and self._step % 2 == 0:
            move = next((move for move in self.moves if self._would_balance(seen, *move)), None)
            if move is not None:
                self._caught, self._planned = True, [move[0]] * move[1]
        if self._planned:
            return _action(self._planned.pop())
        return _action(self._balance(seen) if self._caught else self._swing(*_angles_and_rates(seen)))

    def _balance(self, observation: Sequence[float]) -> float:
        return -float(self._gain @ self._off_upright(observation))

    def _would_balance(self, observation: Sequence[float], action: float, steps: int) -> bool:
        """Whether the regulator ends in the goal, a second after such a move."""
        task, rewarded = self._imagined, 0.0
        seen: Sequence[float] = task.begin(_angles_and_rates(observation))
        for _ in range(steps):
            seen, _, _ = task.advance(action)
        for _ in range(50):
            if seen[1] > -0.54:  # the upper rod is more than a radian off: lost
                return False
            seen, rewarded, _ = task.advance(self._balance(seen))
        return rewarded > 0

    def _swing(self, first: float, first_rate: float, second: float, second_rate: float) -> float:
        between = first - second
        shared, twist = self.coupling * math.cos(between), self.coupling * math.sin(between)
        pulls = self.upper_weight * math.sin(first), self.lower_weight * math.sin(second)
        energy = 0.5 * (self.upper * first_rate**2 + self.lower * second_rate**2) + shared * first_rate * second_rate
        energy -= self.upper_weight * math.cos(first) + self.lower_weight * math.cos(second)
        missing = self.upper_weight + self.lower_weight + self.surplus - energy
        # Only gravity changes the angular momentum around the hinge: its value a moment ahead.
        momentum = self.upper * first_rate + self.lower * second_rate + shared * (first_rate + second_rate)
        ahead = momentum - self.lead * sum(pulls)
        bend = 2.6 * math.tanh(missing / 6.0) * math.tanh(ahead / 0.07)
        wanted = 32.0 * (bend - _wrapped(second - first)) - 6.4 * (second_rate - first_rate)
        # The torque that gives the elbow this angular acceleration, by the equations of motion.
        forces = -twist * second_rate**2 - pulls[0], twist * first_rate**2 - pulls[1]
        own = (self.upper + shared) * forces[1] - (self.lower + shared) * forces[0]
        determinant = self.upper * self.lower - shared**2
        torque = (wanted * determinant - own) / (self.upper + self.lower + 2.0 * shared)
        return torque / DoublePendulum.largest_force

    @staticmethod
    def _off_upright(observation: Sequence[float]) -> NDArray[np.float64]:
        first, first_rate, second, second_rate = _angles_and_rates(observation)
        return np.array([_wrapped(first - math.pi), first_rate, _wrapped(second - math.pi), second_rate])


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "CartPoleSwingup": PumpAndBalance,
    "MountainCar": PushWhereItMoves,
    "DoublePendulum": SwingAndCatch,
}
"""What makes a controller of each task; the names are those of `TASKS`."""


def regulator(
    task: Task, state: Sequence[float], deviation: Callable[[Sequence[float]], NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The linear-quadratic regulator around a state in which the task rests without a force.

    The task's own step is linearised, by central differences. `deviation` is an observation's from this state, in the
    order of its entries. Returns the gain, `[4]`: action = −gain · deviation; and the cost of a deviation, `[4, 4]`, in
    squared deviations (rates included) and actions.
    """
    step = 0.01

    def after(offset: NDArray[np.float64], action: float) -> NDArray[np.float64]:
        task.begin((np.asarray(state) + offset).tolist())
        return deviation(task.advance(action)[0])

    still, axes = np.zeros(len(state)), np.eye(len(state))
    a = np.stack([after(step * axis, 0.0) - after(-step * axis, 0.0) for axis in axes], axis=1) / (2 * step)
    b = (after(still, step) - after(still, -step))[:, None] / (2 * step)
    cost: NDArray[np.float64] = scipy.linalg.solve_discrete_are(a, b, axes, np.eye(1))
    gain = np.linalg.solve(1.0 + b.T @ cost @ b, b.T @ cost @ a)
    return gain[0], cost


def _action(value: float) -> Array:
    return np.array([max(-1.0, min(1.0, value))], dtype=np.float32)


def _wrapped(angle: float) -> float:
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _angles_and_rates(observation: Sequence[float]) -> tuple[float, float, float, float]:
    """Of the double pendulum: its state."""
    first_sine, first_cosine, first_rate, second_sine, second_cosine, second_rate = observation
    return math.atan2(first_sine, first_cosine), first_rate, math.atan2(second_sine, second_cosine), second_rate
