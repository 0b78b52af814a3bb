"""What the exploration experiment compares, in names and numbers: the report needs them without the extra rl."""

from __future__ import annotations

EXPERIMENT = "exploration"
TUNING = "exploration-tuning"
"""The same on other seeds, to choose settings by."""
ITERATIONS = {"CartPoleSwingup": 150, "MountainCar": 40, "DoublePendulum": 150}
"""Of TRPO, by task, in the paper's order."""
ALONE, NORM = "TRPO", "TRPO+norm"
MVG, FFG, BBB = "TRPO+NNG-MVG", "TRPO+NNG-FFG", "TRPO+BBB"
RELEASED, BLOCKWISE = "/released", "/blockwise"
METHODS = (ALONE, NORM, BBB, FFG, MVG, BBB + RELEASED, MVG + RELEASED)
MORE_METHODS = (FFG + RELEASED, MVG + BLOCKWISE)
"""Run if asked for; blockwise is the paper's version of the information gain."""
COMPARED = (ALONE, BBB, MVG)
"""Conditions that are compared seed by seed."""
SEEDS, COMPARED_SEEDS = 10, 20
"""Of each condition, and of those."""
PARTS = ("rollout", "bonus", "policy", "model")
"""What an iteration's time goes into."""
