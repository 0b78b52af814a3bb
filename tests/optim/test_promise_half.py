"""16-bit training by two processes under the usual frameworks, clipped or not.

It makes the steps of one process, or says what to do instead.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import noisygrad as ng
from support.compare import OPTIMIZERS, REMADE, differences, each_optimizer
from support.processes import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
from support.frameworks import OWN, accelerated, assert_as_one, begin, expected_half, lit, refused

SECONDS = 240
HALF: dict[str, Any] = {"dtype": torch.float32, "half": True}
EQUAL = ["accelerate", "accelerate clipped", "lightning", "lightning clipped"]


def work(rank: int, folder: str) -> dict[str, Any]:
    """Everything that one of the two processes does."""
    begin(rank)
    results: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        own = {
            "accelerate": accelerated(rank, kind, "before", 2, **HALF),
            "accelerate clipped": accelerated(rank, kind, "after", 2, **HALF, clip="torch"),
            "accelerate clips": refused(accelerated, rank, kind, "before", 2, **HALF, clip="accelerate"),
            "lightning": lit(rank, kind, "manual", 2, **HALF),
            "lightning clipped": lit(rank, kind, "manual", 2, **HALF, clip="torch"),
            "lightning clips": refused(lit, rank, kind, "manual", 2, **HALF, clip="lightning"),
            "automatic": refused(lit, rank, kind, "automatic", **HALF),
            "automatic clipped": refused(lit, rank, kind, "automatic", **HALF, gradient_clip_val=0.1),
        }
        results |= {f"{name} {kind.__name__}": found for name, found in own.items()}
    results["manual float32"] = lit(rank, ng.NoisyKFAC, "manual", 2, dtype=torch.float32)
    results["automatic float32"] = lit(rank, ng.NoisyKFAC, "automatic", dtype=torch.float32)
    results["bf16"] = lit(rank, ng.NoisyKFAC, "automatic", dtype=torch.float32, precision="bf16-mixed")
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("half"), SECONDS)


@each_optimizer
@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_make_the_steps_of_one_in_16_bit(name, kind, ranks):
    first, second = (rank[f"{name} {kind.__name__}"] for rank in ranks)
    assert not differences(first["last"], second["last"], but=OWN)
    one = expected_half(kind, 2, name.split()[0], clip=name.endswith("clipped"))
    assert_as_one(first["first"], second["first"], one, 1e-6, REMADE.get(kind, ()))


@pytest.mark.parametrize(("what", "form"), [("lightning NoisyKFAC", "manual float32"), ("bf16", "automatic float32")])
def test_16_bit_is_near_32(what, form, ranks):
    """Manual optimisation under Lightning's GradScaler and autocast, automatic optimisation in bfloat16."""
    found = [rank[what].get("last", rank[what]) for rank in ranks]
    assert not differences(*found, but=OWN)
    means = [path for path in ranks[0][form] if path.endswith("/mean")]
    gaps = [float((found[0][path] - ranks[0][form][path]).abs().max()) for path in means]
    assert 1e-6 < max(gaps) < 1e-2


@each_optimizer
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("accelerate clips", r"RuntimeError: a GradScaler has unscaled .* call optimizer.unscale_\(scaler\) in place"),
        (
            "lightning clips",
            "RuntimeError: The current optimizer, Lightning{kind}, does not allow for gradient",
        ),
        ("automatic", "RuntimeError: step.. has nothing to work with: .* Gradients that were made outside"),
        ("automatic clipped", "RuntimeError: The current optimizer, {kind}, does not allow for gradient clipping"),
    ],
)
def test_what_cannot_be_right_in_16_bit_is_refused_on_all_ranks(what, words, kind, ranks):
    for rank in ranks:
        error = rank[f"{what} {kind.__name__}"]["error"]
        assert re.match(words.format(kind=kind.__name__), error), error
