"""Watch an episode: a car that always pushes where it moves gets out of its valley, as a moving picture.

python examples/watch.py mountain_car.gif
"""

import sys

import gymnasium
import numpy as np
from PIL import Image

env = gymnasium.make("noisygrad.exploration:noisygrad/MountainCar-v0", render_mode="rgb_array")
observation, _ = env.reset(seed=0)
frames, total, over = [env.render()], 0.0, False
while not over:
    push = 1.0 if observation[1] >= 0 else -1.0
    observation, reward, terminated, truncated, _ = env.step(np.array([push], dtype=np.float32))
    frames.append(env.render())
    total, over = total + reward, terminated or truncated
print(f"reward {total:g} after {len(frames) - 1} steps")

if len(sys.argv) > 1:
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(sys.argv[1], save_all=True, append_images=others, duration=1000 // env.metadata["render_fps"])
