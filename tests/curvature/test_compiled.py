"""Statistics of models whose user compiles something around them: a function of the model, or a whole step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import noisygrad as ng
from support.compare import take_step
from support.truth import close, normal


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_function_of_the_model_is_run_as_it_is(whole: bool) -> None:
    """It is the user's, so nothing about the model tells of it."""
    runs = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        return lambda *args: runs.append(0) or graph.forward(*args)

    found = []
    for compiled in (False, True):
        model = network()
        call = torch.compile(lambda x, m=model: m(x), backend=backend, fullgraph=whole) if compiled else model
        optimizer = ng.NoisyAdam(model, ng.Gaussian(), num_data=50, seed=0, stats_every=2, factor_every=2)
        x, y = normal(6, 3), normal(6, 2)
        for _ in range(6):
            optimizer.step(lambda call=call, x=x, y=y: (call(x), y))
        found.append(next(iter(optimizer.covariance.statistics.values())).tensors()["fisher"])
    assert len(runs) == 2  # of the six steps, four take statistics
    close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_step_inside_something_compiled(form: str) -> None:
    found, graphs = [], []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        model = network()
        optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, seed=0, stats_every=2, factor_every=2)
        batch = normal(6, 3), normal(6, 2)
        step = torch.compile(take_step, backend=backend) if compiled else take_step
        for _ in range(4):
            step(optimizer, model, batch, form)
        found.append(optimizer.weights.mean.flat.clone())
    close(found[1], found[0])
    assert form == "explicit" or not graphs  # the step is run as it is, and the closure in it
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_loss_inside_something_compiled_is_no_part_of_its_graphs() -> None:
    """What is before it is compiled, and what is after it; plain steps and steps with statistics."""
    found, graphs = [], []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def scaled(draw: ng.optim.draw.Draw, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return draw.nll(model(x), y) * 2

    for compiled in (False, True):
        model = network()
        optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=50, seed=0, stats_every=3, factor_every=3)
        loss_of = torch.compile(scaled, backend=backend) if compiled else scaled
        x, y = normal(6, 3), normal(6, 2)
        for _ in range(6):
            with optimizer.sampled() as draw:
                loss_of(draw, model, x, y).backward()
            optimizer.step()
        found.append(optimizer.weights.mean.flat.clone())
    close(found[1], found[0])
    assert sorted(map(len, graphs)) == [1, 3]  # the product, and the model
