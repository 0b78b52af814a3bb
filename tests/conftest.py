"""For the whole suite: one thread a process, and names of tests that every process agrees on."""

import torch

torch.set_num_threads(1)  # the suite runs in several processes and its networks are tiny


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No bytes in a test's name: those of an archive hold the second it was packed, which differs between processes."""
    return argname if isinstance(val, bytes) else None
