"""The paper's three sparse tasks on the Box2D engine, registered with gymnasium as `noisygrad/<name>-v0`.

Importing this package registers them; `gymnasium.make("noisygrad_paper.environments:noisygrad/MountainCar-v0")` does
both at once. Needs the extra `paper`.
"""

from noisygrad_paper.extras import require

require("noisygrad_paper.environments", "gymnasium", "Box2D", "PIL")

import gymnasium

from noisygrad_paper.environments.base import HORIZON, Task
from noisygrad_paper.environments.cart_pole_swingup import CartPoleSwingup
from noisygrad_paper.environments.double_pendulum import DoublePendulum
from noisygrad_paper.environments.mountain_car import MountainCar

TASKS: dict[str, type[Task]] = {task.__name__: task for task in (CartPoleSwingup, MountainCar, DoublePendulum)}
"""The tasks by their names in the paper."""

for _name, _task in TASKS.items():
    if f"noisygrad/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(
            f"noisygrad/{_name}-v0", entry_point=f"{_task.__module__}:{_name}", max_episode_steps=HORIZON
        )

__all__ = ["CartPoleSwingup", "DoublePendulum", "HORIZON", "MountainCar", "TASKS", "Task"]
