"""What the three tasks share: a Box2D world, stepping, rewards, and pictures of it all.

A task has one action in [-1, 1], a multiple of its largest force; what lies outside is clipped, as in the paper's code.
Its world is built anew for every episode, so that nothing of the last one (the engine's cached impulses) is left.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from Box2D import b2Body, b2World
from numpy.typing import NDArray

from noisygrad_paper.environments.canvas import Canvas

Array = NDArray[np.float32]

GRAVITY = -10.0
HORIZON = 500
"""Steps of an episode, at most: `gymnasium.make` and `TaskVector` end it then."""


class Task(gymnasium.Env[Array, Array], ABC):
    """A Box2D world with one force on it and a reward that is 0 nearly everywhere."""

    # As gymnasium declares it.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    time_step: ClassVar[float] = 0.05
    """Seconds of one step of the engine."""
    frame_skip: ClassVar[int] = 1
    """Steps of the engine for one action."""
    iterations: ClassVar[tuple[int, int]] = (8, 3)
    """Of the engine's solver, for velocities and positions."""
    largest_force: ClassVar[float]
    """Newtons (newton metres where it is a torque) of the action 1."""
    view: ClassVar[tuple[float, float, float, float]]
    """Left, right, bottom and top of the picture, in metres."""
    largest_observation: ClassVar[tuple[float, ...]]
    """Bounds of the absolute value of each observation; the engine itself limits speeds to 2 m and π/2 rad a step."""
    state_names: ClassVar[tuple[str, ...]]
    """What `reset(options={"state": ...})` sets."""

    def __init__(self, render_mode: str | None = None) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        self.render_mode = render_mode
        bounds = np.array(self.largest_observation, dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(-bounds, bounds, dtype=np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.world: b2World | None = None

    # ---------------------------------------------------------------- gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode in a random state, or in `options["state"]`, whose entries `state_names` lists."""
        super().reset(seed=seed)
        state = (options or {}).get("state")
        if state is not None and (len(state) != len(self.state_names) or not np.isfinite(state).all()):
            raise ValueError(f"the state must be finite numbers for {', '.join(self.state_names)}; got {state!r}")
        return np.array(self.begin(state), dtype=np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """One action: observation, reward, whether the task is over, False (no time limit of its own), nothing more."""
        if self.world is None:
            raise RuntimeError("call reset() before step()")
        given = np.asarray(action, dtype=np.float64)
        if given.shape != (1,) or not np.isfinite(given[0]):
            raise ValueError(f"an action is an array of one finite number, got {action!r}")
        observation, reward, over = self.advance(float(given[0]))
        return np.array(observation, dtype=np.float32), reward, over, False, {}

    def render(self) -> NDArray[np.uint8] | None:
        """A picture of the world, `[height, width, 3]`, with render_mode="rgb_array"; otherwise None."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() has nothing to do: make the environment with render_mode='rgb_array'")
            return None
        if self.world is None:
            raise RuntimeError("call reset() before render()")
        canvas = Canvas(*self.view)
        self._decorate(canvas)
        canvas.world(self.world)
        return canvas.pixels()

    # ---------------------------------------------------------------- plain numbers, for many copies at once

    def begin(self, state: Sequence[float] | None = None) -> tuple[float, ...]:
        """A new world, in this or a random state; returns the first observation."""
        self.world = b2World(gravity=(0.0, GRAVITY), doSleep=False)
        self._build(self.world, [float(s) for s in (self._random_state() if state is None else state)])
        return self._observation()

    def advance(self, action: float) -> tuple[tuple[float, ...], float, bool]:
        """One action: observation, reward, and whether the task is over."""
        force = self.largest_force * max(-1.0, min(1.0, action))
        assert self.world is not None
        for _ in range(self.frame_skip):
            self._push(force)
            self.world.Step(self.time_step, *self.iterations)
            self.world.ClearForces()
        observation = self._observation()
        return observation, *self._outcome(observation)

    # ---------------------------------------------------------------- what a task says of itself

    @abstractmethod
    def _random_state(self) -> Sequence[float]:
        """A state to begin in, drawn from `self.np_random`."""

    @abstractmethod
    def _build(self, world: b2World, state: Sequence[float]) -> None:
        """Put the bodies into an empty world."""

    @abstractmethod
    def _push(self, force: float) -> None:
        """Let the force act during the engine's next step."""

    @abstractmethod
    def _observation(self) -> tuple[float, ...]:
        """What is seen of the world."""

    @abstractmethod
    def _outcome(self, observation: tuple[float, ...]) -> tuple[float, bool]:
        """Reward, and whether the task is over."""

    @abstractmethod
    def _decorate(self, canvas: Canvas) -> None:
        """Draw what is no body: a goal, a rail."""


def rod(world: b2World, hinge: tuple[float, float], angle: float, length: float, density: float) -> b2Body:
    """A rod, 0.1 m wide, that begins at `hinge` and points along `angle` (0 = up for length > 0, down for < 0)."""
    body = world.CreateDynamicBody(position=hinge, angle=angle)
    body.CreatePolygonFixture(box=(0.05, abs(length) / 2, (0.0, length / 2), 0.0), density=density)
    return body


def swing(body: b2Body, hinge_velocity: tuple[float, float], rate: float) -> None:
    """Turn a rod at `rate` rad/s around its hinge, which moves itself."""
    body.angularVelocity = rate
    reach = body.worldCenter - body.position
    body.linearVelocity = (hinge_velocity[0] - rate * reach.y, hinge_velocity[1] + rate * reach.x)


def end_of_rod(hinge: tuple[float, float], angle: float, length: float) -> tuple[float, float]:
    """Where a rod ends that begins at `hinge`."""
    return hinge[0] - length * math.sin(angle), hinge[1] + length * math.cos(angle)
