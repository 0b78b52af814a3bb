"""An output and a target that do not belong together: the error names both shapes and says what to do."""

from __future__ import annotations

import re

import pytest
import torch

import noisygrad as ng

CASES = {
    "one number for classes": (ng.Categorical, [6], [6], torch.int64, "one unit for each class.*Bernoulli"),
    "one logit for two classes": (ng.Categorical, [6, 1], [6], torch.int64, "one unit for each class.*Bernoulli"),
    "labels as floats, with a dimension": (ng.Categorical, [6, 3], [6, 1], torch.float32, r"target\.squeeze\(-1\)"),
    "one-hot labels": (ng.Categorical, [6, 3], [6, 3], torch.int64, r"not one-hot.*target\.argmax\(-1\)"),
    "probabilities of classes": (ng.Categorical, [6, 3], [6, 3], torch.float32, r"target\.argmax\(-1\)"),
    "classes before positions": (ng.Categorical, [6, 3, 5], [6, 5], torch.int64, "permute the output"),
    "only the output is flattened": (ng.Categorical, [30, 3], [6, 5], torch.int64, r"\[batch, positions, \.\.\.\]"),
    "only the target is flattened": (ng.Categorical, [6, 5, 3], [30], torch.int64, r"\[batch, positions, \.\.\.\]"),
    "fewer labels": (ng.Categorical, [6, 3], [5], torch.int64, "its own target"),
    "a column for three": (ng.Gaussian, [64, 3], [64], torch.float32, "last layer one unit for each target"),
    "one of three columns": (ng.Gaussian, [64, 3], [64, 1], torch.float32, "last layer one unit for each target"),
    "half the columns": (ng.Gaussian, [64, 2], [64, 1], torch.float32, "HeteroscedasticGaussian"),
    "no column": (ng.Gaussian, [64, 1], [64], torch.float32, r"target\.unsqueeze\(-1\)"),
    "no example": (ng.Gaussian, [], [], torch.float32, "batch"),
    "two logits": (ng.Bernoulli, [6, 2], [6], torch.float32, "Categorical"),
    "two logits for a column": (ng.Bernoulli, [6, 2], [6, 1], torch.float32, "Categorical"),
    "two logits for labels": (ng.Bernoulli, [6, 2], [6], torch.int64, "Categorical"),
    "three logits": (ng.Bernoulli, [6, 3], [6], torch.float32, "last layer one unit for each target"),
    "a rate for two": (ng.Poisson, [6, 1], [6, 2], torch.int64, "last layer one unit for each target"),
    "a vector of counts": (ng.Poisson, [6, 1], [6], torch.int64, r"target\.unsqueeze\(-1\)"),
    "no variances": (ng.HeteroscedasticGaussian, [6, 1], [6, 1], torch.float32, "twice as many units"),
    "as many as there are targets": (ng.HeteroscedasticGaussian, [6, 4], [6, 4], torch.float32, "two units"),
    "an output without columns": (ng.HeteroscedasticGaussian, [6], [6], torch.float32, "twice as many units"),
}


@pytest.mark.parametrize("case", CASES)
def test_both_shapes_are_named(case: str) -> None:
    kind, output, target, dtype, advice = CASES[case]
    with pytest.raises(ValueError, match=advice) as caught:
        kind().check(torch.zeros(output), torch.ones(target, dtype=dtype))
    found = re.findall(r"\[[\d, ]*\]", str(caught.value))
    assert str(output) in found
    assert str(target) in found
    assert str(caught.value).startswith(kind.__name__)
