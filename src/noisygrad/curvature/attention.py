"""Multi-head attention, whose projections are computed inside one function and not by layers.

While statistics are taken, the module's forward is replaced by one that computes the same in three parts: the
input projections (recorded), torch's own attention with identity projections, the output projection (recorded). Masks,
dropout, `add_zero_attn` and the attention weights are thus torch's own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisygrad.curvature.layers import matrix_units, observe_linear
from noisygrad.curvature.passes import Batch, Pass
from noisygrad.curvature.registry import Layer, Recorder, register_layer
from noisygrad.families.units import Slot, Unit

LAYER = "MultiheadAttention"
PARTS = ("query", "key", "value")
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _attention_units(name: str, module: nn.MultiheadAttention, trainable: frozenset[str]) -> list[Unit]:
    prefix = f"{name}." if name else ""
    width = module.embed_dim
    widths = (width, module.kdim, module.vdim)
    units = []
    for index, part in enumerate(PARTS):
        rows = (index * width, (index + 1) * width)
        slots = []
        inputs = 0
        if "in_proj_weight" in trainable:
            slots.append(Slot(f"{prefix}in_proj_weight", 0, width, rows))
            inputs = width
        elif SEPARATE[index] in trainable:
            slots.append(Slot(f"{prefix}{SEPARATE[index]}", 0, widths[index]))
            inputs = widths[index]
        constant = "in_proj_bias" in trainable
        if constant:
            slots.append(Slot(f"{prefix}in_proj_bias", inputs, inputs + 1, rows))
        if slots:
            columns = inputs + constant
            units.append(Unit(f"{prefix}{part}", "matrix", width, columns, tuple(slots), LAYER, constant=constant))
    held = frozenset(own.removeprefix("out_proj.") for own in trainable)
    projection = matrix_units(f"{prefix}out_proj", module.out_proj, held, width, width)
    return [*units, *(replace(unit, layer=LAYER) for unit in projection)]


def _observe_attention(
    unit: Unit, module: nn.MultiheadAttention, inputs: Tensor, gradient: Tensor, batch: Batch
) -> Pass:
    if not module.batch_first and inputs.dim() == 3:
        inputs, gradient = inputs.transpose(0, 1), gradient.transpose(0, 1)
    return observe_linear(unit, module, inputs, gradient, batch)


def recorded_forward(module: nn.MultiheadAttention, record: Recorder) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A forward with the signature and the result of `module.forward` that also records its four projections."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        projected = [_project(module, index, x, record) for index, x in enumerate((query, key, value))]
        batched = query.dim() == 3
        if module.batch_first and batched:
            projected = [x.transpose(0, 1) for x in projected]
        identity = torch.eye(module.embed_dim, dtype=projected[0].dtype, device=query.device)
        mixed, weights = F.multi_head_attention_forward(
            projected[0],
            projected[1],
            projected[2],
            module.embed_dim,
            module.num_heads,
            None,
            identity.new_zeros(3 * module.embed_dim),
            module.bias_k,
            module.bias_v,
            module.add_zero_attn,
            module.dropout,
            identity,
            identity.new_zeros(module.embed_dim),
            training=module.training,
            key_padding_mask=_as_float(key_padding_mask, query),
            need_weights=need_weights,
            attn_mask=_as_float(attn_mask, query),
            use_separate_proj_weight=True,
            q_proj_weight=identity,
            k_proj_weight=identity,
            v_proj_weight=identity,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        if module.batch_first and batched:
            mixed = mixed.transpose(0, 1)
        output = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
        return record("out_proj", mixed, output), weights

    return forward


def _project(module: nn.MultiheadAttention, index: int, x: Tensor, record: Recorder) -> Tensor:
    width = module.embed_dim
    rows = slice(index * width, (index + 1) * width)
    weight: Any = getattr(module, SEPARATE[index]) if module.in_proj_weight is None else module.in_proj_weight[rows]
    output = F.linear(x, weight, None if module.in_proj_bias is None else module.in_proj_bias[rows])
    return record(PARTS[index], x, output)


def _as_float(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Boolean masks as −inf, as in torch's own forward, so that both masks have one type."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


register_layer(nn.MultiheadAttention, Layer(_attention_units, _observe_attention, recorded_forward, builtin=True))
