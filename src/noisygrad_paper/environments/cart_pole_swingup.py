"""CartPoleSwingup: swing a hanging pole up by moving the cart it is hinged on."""

import math
from collections.abc import Sequence
from typing import ClassVar

from Box2D import b2World

from noisygrad import palette
from noisygrad_paper.environments.base import Task, end_of_rod, rod, swing
from noisygrad_paper.environments.canvas import Canvas

CART_WIDTH, CART_HEIGHT = 4.0 / math.sqrt(12.0), 3.0 / math.sqrt(12.0)
POLE_LENGTH = 1.0


class CartPoleSwingup(Task):
    """Observations x, ẋ, θ, θ̇ (metres, radians; θ = 0 is upright, counter-clockwise, not wrapped).

    The action pushes the cart, of 1 kg, with up to 10 N; the pole, of 0.1 kg and 1 m, turns freely around the middle of
    the cart's top. The reward is 1 where cos θ > 0.8. The task is over, without a reward, when the cart is more than
    3 m from the middle.
    """

    largest_force: ClassVar[float] = 10.0
    view: ClassVar[tuple[float, float, float, float]] = (-3.8, 3.8, -1.5, 2.2)
    # A pole can turn without end, so its angle has no bound.
    largest_observation: ClassVar[tuple[float, ...]] = (5.0, 40.0, math.inf, 10.0 * math.pi)
    state_names: ClassVar[tuple[str, ...]] = ("x", "ẋ", "θ", "θ̇")

    def _random_state(self) -> Sequence[float]:
        draw = self.np_random.uniform
        return draw(-1.0, 1.0), draw(-2.0, 2.0), draw(math.pi - 1.0, math.pi + 1.0), draw(-3.0, 3.0)

    def _build(self, world: b2World, state: Sequence[float]) -> None:
        x, speed, angle, rate = state
        ground = world.CreateStaticBody()
        self.cart = world.CreateDynamicBody(position=(x, 0.0), linearVelocity=(speed, 0.0))
        self.cart.CreatePolygonFixture(box=(CART_WIDTH / 2, CART_HEIGHT / 2), density=1.0)
        hinge = (x, CART_HEIGHT / 2)
        self.pole = rod(world, hinge, angle, POLE_LENGTH, density=1.0)
        swing(self.pole, (speed, 0.0), rate)
        world.CreatePrismaticJoint(bodyA=ground, bodyB=self.cart, anchor=self.cart.position, axis=(1.0, 0.0))
        world.CreateRevoluteJoint(bodyA=self.cart, bodyB=self.pole, anchor=hinge)

    def _push(self, force: float) -> None:
        self.cart.ApplyForceToCenter((force, 0.0), True)

    def _observation(self) -> tuple[float, ...]:
        return self.cart.position.x, self.cart.linearVelocity.x, self.pole.angle, self.pole.angularVelocity

    def _outcome(self, observation: tuple[float, ...]) -> tuple[float, bool]:
        over = abs(observation[0]) > 3.0
        return float(not over and math.cos(observation[2]) > 0.8), over

    def _decorate(self, canvas: Canvas) -> None:
        canvas.line([(-3.0, 0.0), (3.0, 0.0)])
        for end in (-3.0, 3.0):
            canvas.line([(end, -0.2), (end, 0.2)], palette.VERMILION, 0.05)
        x, hinge = self.cart.position.x, CART_HEIGHT / 2
        goal = [end_of_rod((x, hinge), math.acos(0.8) * step / 10, POLE_LENGTH) for step in range(-10, 11)]
        canvas.line(goal, palette.GREEN, 0.05)
