"""From a network to Fisher statistics: its layers, what passed through them, and what that says of the Fisher.

What a layer of one's own is registered with (`noisygrad.register_layer`) can be imported from here.
"""

from noisygrad.curvature import attention, layers  # the layers of torch register themselves
from noisygrad.curvature.layers import linear_units, matrix_units, observe_linear
from noisygrad.curvature.passes import Batch, ElementwisePass, MatrixPass, Pass, arrange
from noisygrad.curvature.registry import Layer, register_layer
from noisygrad.families.units import Slot, Unit

__all__ = [
    "Batch",
    "ElementwisePass",
    "Layer",
    "MatrixPass",
    "Pass",
    "Slot",
    "Unit",
    "arrange",
    "attention",
    "layers",
    "linear_units",
    "matrix_units",
    "observe_linear",
    "register_layer",
]
