"""A small torch network as a JAX function of its weights, for samplers that are written in JAX.

The network is traced (`torch.fx`), so that any module is understood whose layers and functions are among those below.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import fx, nn

Array = Any  # jax.Array or a tracer of one
Network = Callable[[Mapping[str, Array], Array], Array]
"""From weights by name and inputs `[N, ...]` to outputs."""


class UnsupportedLayerError(ValueError):
    """A network that cannot be translated; the message names the layer and lists what can be."""


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    last = end_dim % x.ndim
    return x.reshape(*x.shape[: start_dim % x.ndim], -1, *x.shape[last + 1 :])


def _gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


_POINTWISE: dict[type[nn.Module], Callable[[Any, Array], Array]] = {
    nn.ReLU: lambda _, x: jax.nn.relu(x),
    nn.Tanh: lambda _, x: jnp.tanh(x),
    nn.Sigmoid: lambda _, x: jax.nn.sigmoid(x),
    nn.SiLU: lambda _, x: jax.nn.silu(x),
    nn.Identity: lambda _, x: x,
    nn.Dropout: lambda _, x: x,  # as in evaluation
    nn.ELU: lambda layer, x: jax.nn.elu(x, layer.alpha),
    nn.GELU: lambda layer, x: _gelu(x, str(layer.approximate)),
    nn.LeakyReLU: lambda layer, x: jax.nn.leaky_relu(x, layer.negative_slope),
    nn.Softplus: lambda layer, x: jax.nn.softplus(layer.beta * x) / layer.beta,
    nn.Flatten: lambda layer, x: _flatten(x, int(layer.start_dim), int(layer.end_dim)),
}
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Array]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.neg: operator.neg,
    torch.add: operator.add,
    torch.relu: jax.nn.relu,
    torch.tanh: jnp.tanh,
    torch.sigmoid: jax.nn.sigmoid,
    torch.flatten: _flatten,
    torch.cat: lambda tensors, dim=0: jnp.concatenate(tensors, dim),
    F.linear: lambda x, weight, bias=None: x @ weight.T if bias is None else x @ weight.T + bias,
    F.relu: lambda x, inplace=False: jax.nn.relu(x),
    F.tanh: jnp.tanh,
    F.silu: lambda x, inplace=False: jax.nn.silu(x),
    F.gelu: _gelu,
    F.softplus: lambda x, beta=1.0, threshold=20.0: jax.nn.softplus(beta * x) / beta,
}
_METHODS = {kind.__name__: _FUNCTIONS[kind] for kind in (torch.relu, torch.tanh, torch.sigmoid, torch.flatten)}


def as_jax(model: nn.Module) -> Network:
    """The network in evaluation mode as a function of its trainable parameters, by torch's names for them."""
    try:
        traced = fx.Tracer().trace(model)
    except Exception as error:
        raise UnsupportedLayerError(
            f"{type(model).__name__} cannot be traced, because what it does depends on its inputs: {error}"
        ) from error
    layers = dict(model.named_modules())
    nodes = list(traced.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise UnsupportedLayerError(f"{type(model).__name__} takes {len(inputs)} inputs; it must take one")
    for node in nodes:
        _check(node, layers)

    def network(weights: Mapping[str, Array], x: Array) -> Array:
        values: dict[fx.Node, Array] = {inputs[0]: x}

        def value_of(argument: Any) -> Any:
            return fx.node.map_arg(argument, lambda node: values[node])

        for node in nodes:
            arguments, options = value_of(node.args), value_of(node.kwargs)
            if node.op == "call_module":
                name, layer = str(node.target), layers[str(node.target)]
                if isinstance(layer, nn.Linear):
                    arguments = *arguments, weights[f"{name}.weight"], weights.get(f"{name}.bias")
                    values[node] = _FUNCTIONS[F.linear](*arguments)
                else:
                    values[node] = _POINTWISE[type(layer)](layer, *arguments)
            elif node.op == "call_function":
                values[node] = _FUNCTIONS[node.target](*arguments, **options)
            elif node.op == "call_method":
                values[node] = _METHODS[str(node.target)](*arguments, **options)
            elif node.op == "get_attr":
                values[node] = weights[str(node.target)]
            elif node.op == "output":
                return arguments[0]
        raise AssertionError("a traced graph ends with its output")

    return network


def _check(node: fx.Node, layers: Mapping[str, nn.Module]) -> None:
    if node.op == "call_module":
        layer = layers[str(node.target)]
        if not isinstance(layer, nn.Linear) and type(layer) not in _POINTWISE:
            names = ", ".join(sorted(["Linear", *(kind.__name__ for kind in _POINTWISE)]))
            raise UnsupportedLayerError(
                f"the layer {node.target!r} is a {type(layer).__name__}, which is not supported; supported are {names}"
            )
    known = node.op not in {"call_function", "call_method"} or node.target in _FUNCTIONS or node.target in _METHODS
    if not known:
        name = getattr(node.target, "__name__", str(node.target))
        names = ", ".join(sorted({function.__name__ for function in _FUNCTIONS} | _METHODS.keys()))
        raise UnsupportedLayerError(f"the model calls {name}, which is not supported here; supported are {names}")
