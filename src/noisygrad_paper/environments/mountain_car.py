"""MountainCar: get out of a valley with a motor that is too weak to drive straight up."""

import math
from collections.abc import Sequence
from typing import ClassVar

from Box2D import b2World

from noisygrad import palette
from noisygrad_paper.environments.base import Task
from noisygrad_paper.environments.canvas import Canvas

GOAL = 0.6
EDGE = 2.0
_POINTS = 201
# The car begins a little inside the ground, as the paper's does; the engine lifts it out in its first step.
START_HEIGHT = 0.05


def height(x: float) -> float:
    """Of the track, in metres."""
    return 1.0 - math.cos(math.pi * x / 2.0)


_TRACK = [(x, height(x)) for x in (-EDGE + 2 * EDGE * point / (_POINTS - 1) for point in range(_POINTS))]


class MountainCar(Task):
    """Observations x, ẋ (metres; x = 0 is the bottom).

    The action pushes the car, of 0.4 kg, along itself with up to 1 N. The track is y = 1 − cos(πx/2). The task is over,
    with a reward of 1, when the car has left the valley: x ≥ 0.6, or beyond either end of the track.
    """

    largest_force: ClassVar[float] = 1.0
    view: ClassVar[tuple[float, float, float, float]] = (-2.1, 2.1, -0.3, 2.4)
    largest_observation: ClassVar[tuple[float, ...]] = (4.0, 40.0)
    state_names: ClassVar[tuple[str, ...]] = ("x", "ẋ")

    def _random_state(self) -> Sequence[float]:
        return 0.0, self.np_random.uniform(-1.0, 1.0)

    def _build(self, world: b2World, state: Sequence[float]) -> None:
        x, speed = state
        # Friction of the two is √(0.2 · 0.0005) = 0.01.
        world.CreateStaticBody().CreateChainFixture(vertices_chain=_TRACK, friction=0.2)
        slope = math.pi / 2 * math.sin(math.pi * x / 2.0)
        place = (x, height(x) + START_HEIGHT)
        self.car = world.CreateDynamicBody(
            position=place, angle=math.atan(slope), linearVelocity=(speed, speed * slope)
        )
        self.car.CreatePolygonFixture(box=(0.2, 0.1), density=5.0, friction=5e-4)

    def _push(self, force: float) -> None:
        self.car.ApplyForceToCenter(self.car.GetWorldVector((force, 0.0)), True)

    def _observation(self) -> tuple[float, ...]:
        return self.car.position.x, self.car.linearVelocity.x

    def _outcome(self, observation: tuple[float, ...]) -> tuple[float, bool]:
        out = observation[0] >= GOAL or abs(observation[0]) >= EDGE
        return float(out), out

    def _decorate(self, canvas: Canvas) -> None:
        foot = height(GOAL)
        canvas.line([(GOAL, foot), (GOAL, foot + 0.5)], palette.MUTED)
        canvas.line([(GOAL, foot + 0.45), (GOAL + 0.2, foot + 0.45)], palette.GREEN, 0.1)
