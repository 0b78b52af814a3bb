"""The registry: how each kind of layer is a matrix, and how its input and output gradient become per-example gradients.

A `Unit` is the smallest piece of structure: a matrix (rows × columns) that holds one layer's trainable weights, or a
part of them (the three projections of attention are three units). `Slot` says where each parameter is in it.
`register_layer` adds a layer type; the parameters of all other modules become diagonal blocks of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from noisygrad.curvature.passes import Batch, Pass
from noisygrad.families.units import Unit

Recorder = Callable[[str, Tensor, Tensor], Tensor]
"""Called with a part's name, its input and its output; returns the output, with which the forward pass goes on."""


@dataclass(frozen=True)
class Layer:
    """What is known of a layer type: the matrices that hold its weights, and their per-example gradients."""

    units: Callable[[str, Any, frozenset[str]], list[Unit]]
    """`units(name, module, trainable)`: the units of a module called `name`; `trainable` are the names of its own
    parameters that are trained, such as "weight". A parameter that no slot names gets a diagonal block."""
    observe: Callable[[Unit, Any, Tensor, Tensor, Batch], Pass]
    """`observe(unit, module, inputs, gradient, batch)`: the pass of one call, from the module's first argument and the
    gradient of its output. It is given all examples, since a norm is of all of them; the pass has those that the batch
    keeps."""
    forward: Callable[[Any, Recorder], Callable[..., Any]] | None = None
    """`forward(module, record)`: replaces the module's own forward while statistics are taken, where the inputs and
    outputs of its units are not those of the module. It calls `record` for each part, named like the unit."""
    builtin: bool = False
    """Part of the library and tested there; any other layer is checked against autograd when it is first used."""


REGISTRY: dict[type[nn.Module], Layer] = {}

_CONTRACT = {"units": ("name", "module", "trainable"), "observe": ("unit", "module", "inputs", "gradient", "batch")}


def register_layer(
    kind: type[nn.Module], layer: Layer | None = None, *, like: type[nn.Module] | None = None
) -> type[nn.Module]:
    """Give modules of a type a structured posterior: either a `Layer`, or the type of a layer that they are `like`.

    `register_layer(MyLinear, like=nn.Linear)` is for a module that computes what `like` computes, from a `weight` and
    a `bias` of the same shapes, with a forward of its own. When the first statistics are taken, the gradients that
    the registered layer gives are compared with autograd's, once for each module.

    Args:
        kind: The module's class. Its subclasses are included as long as they do not replace `forward`.
        layer: The units of such a module and its per-example gradients.
        like: A registered class, in place of `layer`.

    Returns:
        `kind`.

    Raises:
        TypeError: `kind` is no module class, or a part of `layer` is missing or has the wrong signature.
        ValueError: `kind` is registered already, `like` is not registered, or its forward cannot be another one.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_layer: expected a subclass of torch.nn.Module; got {kind!r}. Give the class.")
    name = kind.__name__
    if (layer is None) == (like is None):
        raise TypeError(f"register_layer({name}): give either a Layer(units, observe) or like=, the class it resembles")
    if kind in REGISTRY:
        raise ValueError(
            f"register_layer: {name} is registered already. Register each class once, where it is defined; to treat "
            "some of its modules otherwise, make a subclass with a forward of its own"
        )
    REGISTRY[kind] = _checked(name, layer) if like is None else _alike(name, like)
    return kind


def find_layer(module: nn.Module) -> Layer | None:
    """The entry for this module's type, or for a base class whose `forward` it has not replaced by its own."""
    kind = next((kind for kind in type(module).__mro__ if kind in REGISTRY), None)
    return REGISTRY[kind] if kind is not None and type(module).forward is kind.forward else None


def _checked(name: str, layer: Any) -> Layer:
    """The layer, if it has all parts of its contract."""
    for part, arguments in _CONTRACT.items():
        function = getattr(layer, part, None)
        if not callable(function):
            raise TypeError(
                f"register_layer({name}): the layer has no function `{part}`; got {function!r}. "
                f"Give a Layer(units, observe), with {part}({', '.join(arguments)})"
            )
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise TypeError(
                f"register_layer({name}): `{part}` is called as {part}({', '.join(arguments)}), with positional "
                f"arguments, but its signature is {part}{inspect.signature(function)}: {error}"
            ) from None
        except ValueError:  # something compiled, which does not tell its signature
            continue
    if not isinstance(layer, Layer):
        raise TypeError(f"register_layer({name}): expected a Layer(units, observe); got a {type(layer).__name__}")
    return layer


def _alike(name: str, like: Any) -> Layer:
    """The entry of another type, for modules that may lack some of its attributes."""
    other = getattr(like, "__name__", repr(like))
    if like not in REGISTRY:
        known = ", ".join(kind.__name__ for kind in REGISTRY)
        raise ValueError(f"register_layer({name}): like={other} is not a registered layer; there are {known}")
    layer = REGISTRY[like]
    if layer.forward is not None:
        raise ValueError(
            f"register_layer({name}): a module cannot be like {other}, whose forward is replaced while statistics are "
            f"taken. Build {name} from layers that are registered, such as Linear"
        )

    def units(module_name: str, module: Any, trainable: frozenset[str]) -> list[Unit]:
        try:
            return layer.units(module_name, module, trainable)
        except AttributeError as error:
            raise ValueError(
                f"layer {module_name!r} ({name}) was registered like {other}, but lacks what a {other} has: {error}. "
                f"Set that attribute, or register {name} with a Layer(units, observe) of its own"
            ) from error

    return replace(layer, units=units, builtin=False)
