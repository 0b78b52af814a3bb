"""Texts and other sequences: padded classification, language models, recurrent networks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ..networks.sequences import (
    CharacterTransformer,
    MaskedTransformer,
    RecurrentModel,
    RecurrentReader,
    RowReader,
    TextTransformer,
)
from ..networks.widths import scaled
from ..sources.texts import CHARACTERS, DOCSTRING_PACKAGES, LINE_PACKAGES, WORDS
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


def docstrings_with_lengths(store: Store) -> Data:
    """The same, with the number of words of each as a second input."""
    arrays = store.arrays("docstrings")
    lengths = (arrays["x"] > 0).sum(1)
    return Data(*parts((arrays["x"], lengths), arrays["y"], split(len(lengths), 500)))


def source_lines(store: Store) -> Data:
    """Lines of source and which of their positions are characters; the package that each is from."""
    arrays = store.arrays("source-lines")
    rows = split(len(arrays["y"]), 1000, 5000)
    return Data(*parts((arrays["x"], (arrays["x"] > 0).astype(np.int64)), arrays["y"], rows))


def padded_texts(store: Store, source: str, *, test: int, train: int) -> Data:
    """Texts of different lengths, of each character the next; what is behind their end does not count."""
    texts = torch.from_numpy(store.arrays(source)["x"].astype("int64"))
    before = torch.cat([torch.zeros_like(texts[:, :1]), texts[:, :-1]], 1)
    whole = Part((before,), texts, texts > 0)
    train_part, validation, test_part = (whole.rows(torch.from_numpy(r)) for r in split(len(texts), test, train))
    return Data(train_part, validation, test_part)


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
    Task(
        name="lines-transformer",
        half="report",
        kind="Transformer, padding",
        about="which package a line of source is from; an attention mask of one's own",
        sources=("source-lines",),
        data=source_lines,
        network=lambda _, width: MaskedTransformer(CHARACTERS, 64, scaled(48, width), 2, len(LINE_PACKAGES)),
        likelihood="categorical",
        batch=32,
        steps=500,
    ),
    Task(
        name="library-language-model",
        half="report",
        kind="language model",
        about="an LSTM on the characters of source code",
        sources=("library",),
        data=lambda store: windows(store, "library", 5000),
        network=lambda _, width: RecurrentModel(CHARACTERS, scaled(128, width)),
        likelihood="categorical",
        batch=32,
        steps=400,
    ),
    Task(
        name="names-language-model",
        half="tune",
        kind="language model, padding",
        about="a GRU on names of functions of different lengths; a mask of what counts",
        sources=("names",),
        data=lambda store: padded_texts(store, "names", test=1000, train=6000),
        network=lambda _, width: RecurrentModel(CHARACTERS, scaled(96, width), nn.GRU),
        likelihood="categorical",
        batch=64,
        steps=600,
    ),
    Task(
        name="lines-language-model",
        half="report",
        kind="language model, padding",
        about="a causal Transformer on lines of source of different lengths; a mask of what counts",
        sources=("source-lines",),
        data=lambda store: padded_texts(store, "source-lines", test=400, train=5000),
        network=lambda _, width: CharacterTransformer(CHARACTERS, 64, scaled(48, width), 2),
        likelihood="categorical",
        batch=32,
        steps=500,
    ),
    Task(
        name="docstring-lstm",
        half="report",
        kind="recurrent",
        about="which package a docstring is from, by the state at its last word",
        sources=("docstrings",),
        data=docstrings_with_lengths,
        network=lambda _, width: RecurrentReader(WORDS, scaled(48, width), len(DOCSTRING_PACKAGES)),
        likelihood="categorical",
        batch=32,
        steps=1000,
    ),
)
