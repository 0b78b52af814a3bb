"""Attention written out by hand from linear layers, so that hooks see what goes into each projection."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

PARTS = ("query", "key", "value")


class PlainAttention(nn.Module):
    """What an `nn.MultiheadAttention` without dropout computes; its projections have the names of the library's units.

    Like torch's, it is called by `nn.TransformerEncoderLayer`, which looks at `batch_first`.
    """

    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        assert like.in_proj_weight is not None
        assert like.dropout == 0.0
        self.heads, self.batch_first = like.num_heads, like.batch_first
        for index, part in enumerate(PARTS):
            bias = None if like.in_proj_bias is None else like.in_proj_bias.chunk(3)[index]
            self.add_module(part, linear(like.in_proj_weight.chunk(3)[index], bias))
        self.out_proj = linear(like.out_proj.weight, like.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        given = (query, key, value) if self.batch_first else (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (
            getattr(self, part)(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, t in zip(PARTS, given, strict=True)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
            if mask is not None:
                scores = scores.masked_fill(mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        mixed = self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (mixed if self.batch_first else mixed.transpose(0, 1)), None


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer of these, frozen where they are."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


def with_plain_attention(model: nn.Module) -> nn.Module:
    """A copy in which every attention is written out."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, PlainAttention(child))
    return model
