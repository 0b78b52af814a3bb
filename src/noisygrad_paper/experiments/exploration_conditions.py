"""What the exploration experiment compares, in names and numbers: the report needs them without the extra rl."""

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
SEEDS = 10
"""Of a condition that is not."""
COMPARED_SEEDS = {"CartPoleSwingup": 60, "MountainCar": 20, "DoublePendulum": 60}
"""By task: where seeds differ by more than conditions, it takes more of them to tell."""
PARTS = ("rollout", "bonus", "policy", "model")
"""What an iteration's time goes into."""


def usual_seeds(task: str, method: str) -> int:
    """How many seeds of a condition the figure has."""
    return COMPARED_SEEDS[task] if method in COMPARED else SEEDS
