"""Texts and other sequences: padded classification, language models, recurrent networks."""

from __future__ import annotations

import torch

from ..networks.sequences import CharacterTransformer, RowReader, TextTransformer
from ..networks.widths import scaled
from ..sources.texts import CHARACTERS, DOCSTRING_PACKAGES, WORDS
from ..store import Store
from ..task import Data, Part, Task, parts, split
from .images import digits

WINDOW = 64


def docstrings(store: Store) -> Data:
    """Docstrings of up to 48 words; the package that each is from."""
    arrays = store.arrays("docstrings")
    rows = split(len(arrays["y"]), 500)
    return Data(*parts((arrays["x"],), arrays["y"], rows))


def windows(store: Store, source: str, train: int) -> Data:
    """Pieces of one text, and of each character the next; the test is the text's last part."""
    text = torch.from_numpy(store.arrays(source)["x"].astype("int64"))
    count = (len(text) - 1) // WINDOW
    x = text[: count * WINDOW].view(count, WINDOW)
    y = text[1 : count * WINDOW + 1].view(count, WINDOW)
    test = min(400, count // 8)
    inner, held, _ = split(count - test, 0, train)
    whole = Part((x,), y)
    return Data(
        whole.rows(torch.from_numpy(inner)), whole.rows(torch.from_numpy(held)), whole.rows(slice(count - test, None))
    )


TASKS = (
    Task(
        name="docstring-transformer",
        half="tune",
        kind="Transformer, padding",
        about="which package a docstring is from; src_key_padding_mask",
        sources=("docstrings",),
        data=docstrings,
        network=lambda _, width: TextTransformer(WORDS, 48, scaled(48, width), 2, len(DOCSTRING_PACKAGES)),
        likelihood="categorical",
        batch=32,
        steps=500,
    ),
    Task(
        name="topics-language-model",
        half="tune",
        kind="language model",
        about="a causal Transformer on the characters of Python's manual",
        sources=("topics",),
        data=lambda store: windows(store, "topics", 5000),
        network=lambda _, width: CharacterTransformer(CHARACTERS, WINDOW, scaled(64, width), 2),
        likelihood="categorical",
        batch=32,
        steps=500,
    ),
    Task(
        name="digits-gru",
        half="tune",
        kind="recurrent",
        about="a GRU reads the rows of digits",
        sources=("digits",),
        data=digits,
        network=lambda _, width: RowReader(8, scaled(64, width), 10),
        likelihood="categorical",
        batch=32,
        steps=1500,
    ),
)
