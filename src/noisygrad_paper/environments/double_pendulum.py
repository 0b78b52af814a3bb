"""DoublePendulum: bring the tip of two hinged rods straight up by a torque in their elbow."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from Box2D import b2World

from noisygrad import palette
from noisygrad.optim.options import positive
from noisygrad_paper.environments.base import Task, end_of_rod, rod, swing
from noisygrad_paper.environments.canvas import Canvas

LENGTH = 1.0
TARGET = (0.0, 2.0 * LENGTH)


class DoublePendulum(Task):
    """Observations sin θ₁, cos θ₁, θ̇₁, sin θ₂, cos θ₂, θ̇₂: both angles are absolute, 0 = hanging, counter-clockwise.

    The rods have 0.5 kg and 1 m each, and hang still but for a little noise at the start. The action is a torque of up
    to 50 N m between them and lasts 0.02 s. The reward is 1 where the tip is closer than `threshold` to the point
    straight above the hinge. The task is never over.

    Args:
        render_mode: None or "rgb_array".
        threshold: In metres; 0.1 is the paper's. (At 1, which its code had, nearly every random episode is rewarded.)
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012
    time_step: ClassVar[float] = 0.01
    frame_skip: ClassVar[int] = 2
    iterations: ClassVar[tuple[int, int]] = (20, 20)
    largest_force: ClassVar[float] = 50.0
    view: ClassVar[tuple[float, float, float, float]] = (-2.3, 2.3, -2.3, 2.3)
    largest_observation: ClassVar[tuple[float, ...]] = (1.0, 1.0, 50.0 * math.pi, 1.0, 1.0, 50.0 * math.pi)
    state_names: ClassVar[tuple[str, ...]] = ("θ₁", "θ̇₁", "θ₂", "θ̇₂")

    def __init__(self, render_mode: str | None = None, threshold: float = 0.1) -> None:
        super().__init__(render_mode)
        self.threshold = positive("threshold", threshold)

    def _random_state(self) -> Sequence[float]:
        angles, rates = self.np_random.normal(0.0, 0.1, 2), self.np_random.normal(0.0, 0.01, 2)
        return angles[0], rates[0], angles[1], rates[1]

    def _build(self, world: b2World, state: Sequence[float]) -> None:
        angle, rate, lower_angle, lower_rate = state
        ground = world.CreateStaticBody()
        self.upper = rod(world, (0.0, 0.0), angle, -LENGTH, density=5.0)
        elbow = end_of_rod((0.0, 0.0), angle, -LENGTH)
        self.lower = rod(world, elbow, lower_angle, -LENGTH, density=5.0)
        swing(self.upper, (0.0, 0.0), rate)
        swing(self.lower, (-rate * elbow[1], rate * elbow[0]), lower_rate)
        world.CreateRevoluteJoint(bodyA=ground, bodyB=self.upper, anchor=(0.0, 0.0))
        world.CreateRevoluteJoint(bodyA=self.upper, bodyB=self.lower, anchor=elbow)

    def _push(self, force: float) -> None:
        self.upper.ApplyTorque(-force, True)
        self.lower.ApplyTorque(force, True)

    def _observation(self) -> tuple[float, ...]:
        first, second = self.upper.angle, self.lower.angle
        return (
            *(math.sin(first), math.cos(first), self.upper.angularVelocity),
            *(math.sin(second), math.cos(second), self.lower.angularVelocity),
        )

    def tip(self) -> tuple[float, float]:
        """Where the lower rod ends, in metres from the hinge of the upper one."""
        elbow = self.lower.position
        return end_of_rod((elbow.x, elbow.y), self.lower.angle, -LENGTH)

    def _outcome(self, observation: tuple[float, ...]) -> tuple[float, bool]:
        return float(math.dist(self.tip(), TARGET) < self.threshold), False

    def _decorate(self, canvas: Canvas) -> None:
        canvas.disc(TARGET, self.threshold, palette.GREEN)
