"""Networks for sequences: Transformers with padding, causal ones, recurrent ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0


class TextTransformer(nn.Module):
    """torch's own encoder, told by `src_key_padding_mask` which tokens are padding; the mean over the others."""

    def __init__(self, tokens: int, length: int, width: int, layers: int, outputs: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=PADDING)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == PADDING
        hidden = self.encoder(self.embedding(tokens) + self.position, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(hidden.dtype)
        return self.head(self.norm((hidden * kept).sum(1) / kept.sum(1).clamp(min=1)))


class AttentionBlock(nn.Module):
    """Attention by a mask of one's own and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.combine = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.reduce = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        parts = self.projections(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=allowed is None)
        x = x + self.combine(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.reduce(F.gelu(self.expand(self.perceptron_norm(x))))


class MaskedTransformer(nn.Module):
    """A classifier by a first token's state; the mask of what is a token is its second argument."""

    def __init__(self, tokens: int, length: int, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length + 1, width)
        self.first = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(AttentionBlock(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = torch.cat([self.first.expand(batch, 1, -1), self.embedding(tokens)], 1)
        x = x + self.position(torch.arange(length + 1, device=tokens.device))
        allowed = F.pad(is_token.bool(), (1, 0), value=True)[:, None, None, :]
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x[:, 0]))


class CharacterTransformer(nn.Module):
    """A causal language model: logits `[batch, positions, characters]`."""

    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position(torch.arange(characters.shape[1], device=characters.device))
        for block in self.blocks:
            x = block(x, None)
        return self.head(self.norm(x))


class RecurrentModel(nn.Module):
    """A language model by an LSTM or a GRU: logits `[batch, positions, characters]`."""

    def __init__(self, characters: int, width: int, cell: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width // 2)
        self.recurrent = cell(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(characters))[0])


class RecurrentReader(nn.Module):
    """A classifier of padded texts by the state at the last token of each; lengths are its second argument."""

    def __init__(self, tokens: int, width: int, outputs: int, cell: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=PADDING)
        self.recurrent = cell(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states = self.recurrent(self.embedding(tokens))[0]
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, states.shape[-1])
        return self.head(states.gather(1, last).squeeze(1))


class RowReader(nn.Module):
    """A classifier of images that reads their rows one after the other."""

    def __init__(self, columns: int, width: int, outputs: int, cell: type[nn.LSTM] | type[nn.GRU] = nn.GRU) -> None:
        super().__init__()
        self.recurrent = cell(columns, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.recurrent(images.squeeze(1))[0][:, -1])
