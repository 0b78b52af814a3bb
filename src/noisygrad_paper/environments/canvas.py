"""A picture of a Box2D world, drawn into an array: no window, no display."""

from collections.abc import Sequence

import numpy as np
from Box2D import b2PolygonShape, b2RevoluteJoint, b2World
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from noisygrad import palette

Point = tuple[float, float]
_BODIES = (palette.BLUE, palette.ORANGE)
_PIXELS_WIDE = 480
_FINER = 3
"""Drawn this many times larger and then averaged, for smooth edges."""


class Canvas:
    """An empty picture of the part of the world between these edges, in metres."""

    def __init__(self, left: float, right: float, bottom: float, top: float) -> None:
        self._left, self._top = left, top
        self._scale = _FINER * _PIXELS_WIDE / (right - left)
        height = round(_PIXELS_WIDE * (top - bottom) / (right - left))
        self._size = (_PIXELS_WIDE, height)
        self._image = Image.new("RGB", (_FINER * _PIXELS_WIDE, _FINER * height), palette.SURFACE)
        self._draw = ImageDraw.Draw(self._image)

    def _at(self, point: Sequence[float]) -> Point:
        return (point[0] - self._left) * self._scale, (self._top - point[1]) * self._scale

    def line(self, points: Sequence[Sequence[float]], colour: str = palette.MUTED, width: float = 0.02) -> None:
        """A line through points; its width is in metres."""
        self._draw.line([self._at(p) for p in points], fill=colour, width=max(1, round(width * self._scale)))

    def disc(self, centre: Sequence[float], radius: float, colour: str) -> None:
        """A filled circle."""
        (x, y), r = self._at(centre), radius * self._scale
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def world(self, world: b2World) -> None:
        """Every body: polygons filled, chains as lines, a dot in each hinge."""
        moving = 0
        for body in world.bodies:
            for fixture in body.fixtures:
                corners = [body.transform * vertex for vertex in fixture.shape.vertices]
                if isinstance(fixture.shape, b2PolygonShape):
                    self._draw.polygon([self._at(c) for c in corners], fill=_BODIES[moving % len(_BODIES)])
                else:
                    self.line(corners, palette.INK)
            moving += bool(body.fixtures) and body.mass > 0
        for joint in world.joints:
            if isinstance(joint, b2RevoluteJoint):
                self.disc(joint.anchorB, 0.04, palette.INK)

    def pixels(self) -> NDArray[np.uint8]:
        """The picture, `[height, width, 3]`."""
        return np.array(self._image.resize(self._size, Image.Resampling.BOX), dtype=np.uint8)
