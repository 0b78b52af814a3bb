"""Processes of tests that may be killed: they start from a clean one, never from this one with its threads."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext


def clean_processes() -> BaseContext:
    """A context whose processes start without the threads of this one, such as JAX's, which do not outlive a fork.

    Where there can be a server it has imported what takes long, so that a process starts in an instant.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["noisygrad_paper.experiments.runner"])
    return context
