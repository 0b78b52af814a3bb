"""Records of the inputs and outputs of layers during a forward pass.

What is recorded is the layer's input and the *gradient edge* of its output, the place in autograd's graph where the
output was made. An activation that then overwrites the output in place moves the tensor to another place of the graph
but leaves this one, so in-place activations are harmless. So are a user's own hooks, whatever they change: a layer's
`forward` is replaced, which sees its input after all hooks and its output before any.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from noisygrad.curvature.registry import Layer, find_layer
from noisygrad.curvature.verification import LayerCall, verify
from noisygrad.families.units import Unit
from noisygrad.kernels.switches import Switch

FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
"""Layers whose inputs may have the batch in the first or in the second dimension."""
WITH_POSITIONS = (*FEATURES_LAST, nn.MultiheadAttention)
"""Layers whose inputs may be the positions of a single example."""

not_compiled = _disable_dynamo
"""`torch.compiler.disable`, but torch's compiler is imported when the function is first called, not when it is made."""


def folds(tensor: Tensor, batch: int) -> bool:
    """Whether the first dimension may be the batch and positions in one."""
    return tensor.dim() > 1 and tensor.shape[0] > batch and tensor.shape[0] % batch == 0


@dataclass
class Record:
    """One call of one unit: its input, the place of its output in the graph, and its gradient once it is known."""

    unit: Unit
    module: nn.Module
    layer: Layer
    inputs: Tensor
    version: int
    edge: GradientEdge
    kept: list[Tensor]
    """The gradient of the user's own backward pass, if one was watched."""
    used: bool = False
    """Whether a loss was found to depend on it."""

    @property
    def is_table(self) -> bool:
        """Whether it looks up rows, which it may do once for all examples."""
        return isinstance(self.module, nn.Embedding)

    def is_doubtful(self, batch: int) -> bool:
        """Whether sizes do not tell which dimension is the batch, or whether it is folded with others."""
        sizes = self.inputs.shape
        square = len(sizes) > 2 and sizes[0] == sizes[1] == batch and isinstance(self.module, FEATURES_LAST)
        known = len(sizes) > 2 and sizes[1] == batch and not self.may_be_second(batch)  # by the layer itself
        return self.is_table or square or self.may_be_positions(batch) or (folds(self.inputs, batch) and not known)

    def may_be_positions(self, batch: int) -> bool:
        """Whether the examples of the loss may be the positions of a single one, `[1, batch, features]`."""
        sizes = self.inputs.shape
        return len(sizes) > 2 and 1 == sizes[0] < sizes[1] == batch and isinstance(self.module, WITH_POSITIONS)

    def may_be_second(self, batch: int) -> bool:
        """Whether the batch may be the second dimension."""
        sizes = self.inputs.shape
        return len(sizes) > 2 and sizes[1] == batch and isinstance(self.module, FEATURES_LAST)

    def checked_inputs(self) -> Tensor:
        """The input; raises RuntimeError if it was overwritten since."""
        if self.inputs._version != self.version:
            raise RuntimeError(
                f"the input of layer {self.unit.name!r} was changed in place after the layer had used it, so its "
                "statistics would be wrong; make that operation out of place"
            )
        return self.inputs


class Capture:
    """A context in which calls of the given layers are recorded; `take` returns the records and forgets them.

    With `watch_backward` the gradients of the user's own backward pass are kept too: the empirical Fisher of a closure
    that has called `backward` itself.
    """

    def __init__(self, layers: dict[nn.Module, list[Unit]]) -> None:
        known = ((module, units, find_layer(module)) for module, units in layers.items())
        self._layers = [(module, units, layer) for module, units, layer in known if units and layer is not None]
        self._node_handles: list[RemovableHandle] = []
        self._patched: list[tuple[nn.Module, Any]] = []
        self._records: list[Record] = []
        self._used: list[Record] = []
        """Those that statistics were taken of, for other losses of the same forward pass."""
        self._stack = ExitStack()
        self.watch_backward = False

    def __enter__(self) -> Self:
        # Compiled code would not call the recording layers; statistics are rare, so that pass runs eagerly.
        self._stack.enter_context(_EAGER.on())
        for module, units, layer in self._layers:
            own = vars(module).get("forward")
            vars(module)["forward"] = MethodType(self._recorded(module, units, layer, own), module)
            self._patched.append((module, own))
        return self

    def __exit__(self, *exception: object) -> None:
        for module, own in self._patched:
            _put_back(module, own)
        self.watch_backward = False
        self._patched.clear()
        self._records.clear()
        self.release()
        self._forget_nodes()
        self._stack.close()

    def take(self, *, again: bool = False) -> list[Record]:
        """The records since the last call; with `again` those that statistics were taken of, too."""
        records, self._records = [*(self._used if again else ()), *self._records], []
        self._used = [] if again else self._used
        self._forget_nodes()
        return records

    def consume(self, records: Sequence[Record]) -> None:
        """Note that statistics were taken of these records; those that no loss has used yet are kept for later."""
        self._records = [record for record in records if not record.used] + self._records
        self._used += [record for record in records if record.used]

    def release(self) -> None:
        """Forget what statistics were taken of: the graph is about to be differentiated."""
        self._used = []

    def _forget_nodes(self) -> None:
        for handle in self._node_handles:
            handle.remove()
        self._node_handles.clear()

    def _recorded(self, module: nn.Module, units: Sequence[Unit], layer: Layer, own: Any) -> Callable[..., Any]:
        """A method to replace the module's `forward`, or the replacement that somebody else had set."""
        usual = module.forward
        by_part = {unit.name.rpartition(".")[-1]: unit for unit in units}

        def record(part: str, inputs: Tensor, output: Tensor) -> Tensor:
            return self._record(by_part[part], module, layer, inputs, output) if part in by_part else output

        if layer.forward is not None:
            recorded = layer.forward(module, record)
        else:

            def recorded(*args: Any, **kwargs: Any) -> Any:
                output = usual(*args, **kwargs)
                inputs = args[0] if args else next(iter(kwargs.values()))
                if not layer.builtin and torch.is_grad_enabled():
                    verify(LayerCall(module, layer, units, usual, args, kwargs))
                for unit in units:
                    output = self._record(unit, module, layer, inputs, output)
                return output

        def forward(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if called is module:
                return recorded(*args, **kwargs)
            # A copy of the module made in the meantime is a network of its own: it gets its forward back.
            is_bound = isinstance(own, MethodType) and own.__self__ is module
            _put_back(called, MethodType(own.__func__, called) if is_bound else own)
            return called.forward(*args, **kwargs)

        return forward

    def _record(self, unit: Unit, module: nn.Module, layer: Layer, inputs: Tensor, output: Tensor) -> Tensor:
        """Record one call; returns the output with which the network continues."""
        if not output.requires_grad or (torch._C._current_graph_task_id() != -1 and not self.watch_backward):
            return output  # a checkpoint calls layers again in the backward pass; they were recorded before
        if output._is_view():
            # Linear layers on sequences return a view, whose edge an in-place activation would remove from the graph.
            output = output.clone()
        edge, kept = get_gradient_edge(output), list[Tensor]()
        self._records.append(Record(unit, module, layer, inputs.detach(), inputs._version, edge, kept))
        if self.watch_backward:
            self._node_handles.append(edge.node.register_prehook(partial(self._keep, edge.output_nr, kept)))
        return output

    def _keep(self, output_nr: int, kept: list[Tensor], gradients: tuple[Tensor | None, ...]) -> None:
        """A hook that has no reference to the edge: node → hook → edge → node would never free the activations."""
        gradient = gradients[output_nr]
        if self.watch_backward and gradient is not None:
            kept.append(gradient.detach())


def _put_back(module: nn.Module, own: Any) -> None:
    """Restore the module's own `forward`, or the replacement that somebody else had set."""
    vars(module).pop("forward", None)
    if own is not None:
        vars(module)["forward"] = own


# A step may itself run inside compiled code, where the stance may not be set.
@not_compiled
def _force_eager() -> Callable[[], None]:
    """Run compiled functions eagerly; returns a function that ends this."""
    stance: Any = torch.compiler.set_stance("force_eager")
    return partial(_allow_compiled, stance)


@not_compiled
def _allow_compiled(stance: Any) -> None:
    stance.__exit__(None, None, None)


_EAGER = Switch(_force_eager)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel and `torch.compile`."""
    compiled = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())  # () where nothing was compiled yet
    while True:
        if isinstance(model, compiled):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model
