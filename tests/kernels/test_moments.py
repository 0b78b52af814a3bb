"""Second moments are what their formulas say, in whatever order the products are made."""

from __future__ import annotations

import pytest
import torch

from noisygrad.kernels.products import LARGE_SIDE, gram, rows_times
from support.truth import close


@pytest.mark.parametrize("size", [5, LARGE_SIDE + 3])
def test_gram_is_the_product_with_itself(size):
    rows = torch.randn(2, 11, size, dtype=torch.float64)
    close(gram(rows), rows.mT @ rows)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_rows_times_a_matrix_of_their_own(lead):
    rows, right = torch.randn(*lead, 4, 5, 6, dtype=torch.float64), torch.randn(*lead, 6, 7, dtype=torch.float64)
    close(rows_times(rows, right), torch.einsum("...btn,...nm->...btm", rows, right))
