"""Why a figure falls short of the paper's, as far as we know: shown beside it in the report."""

from __future__ import annotations

REASONS: dict[tuple[str, str, str], str] = {}
"""By (method, data, metric), such as ("NNG-MVG", "boston", "rmse"): one sentence, with what was tried."""
