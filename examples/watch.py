"""Watch a scripted controller solve a sparse task, as a moving picture.

python examples/watch.py --task DoublePendulum --steps 360 --output double-pendulum.gif
It needs the extra: pip install 'noisygrad[paper]'
"""

import argparse

import gymnasium
from PIL import Image

from noisygrad_paper.environments.controllers import CONTROLLERS

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=CONTROLLERS, default="MountainCar")
parser.add_argument("--seed", type=int, default=0, help="of the start")
parser.add_argument("--steps", type=int, default=500, help="at most; an episode has no more than 500")
parser.add_argument("--output", help="where the GIF goes; without it nothing is drawn")
arguments = parser.parse_args()

env = gymnasium.make(f"noisygrad_paper.environments:noisygrad/{arguments.task}-v0", render_mode="rgb_array")
controller = CONTROLLERS[arguments.task]()
observation, _ = env.reset(seed=arguments.seed)
frames, total, steps, over = [], 0.0, 0, False
every = max(1, env.metadata["render_fps"] // 20)  # of the steps, for about 20 pictures a second
while not over and steps < arguments.steps:
    if arguments.output and steps % every == 0:
        frames.append(env.render())
    observation, reward, terminated, truncated, _ = env.step(controller(observation))
    total, steps, over = total + reward, steps + 1, terminated or truncated
print(f"{arguments.task}: reward {total:g} after {steps} steps")

if arguments.output:
    frames.append(env.render())
    # A few colours, the same in every frame, keep the file small.
    colours = Image.fromarray(frames[-1]).quantize(24)
    first, *others = (Image.fromarray(frame).quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames)
    pause = 1000 * every // env.metadata["render_fps"]
    durations = [pause] * len(others) + [1500]  # the end stays for a moment
    first.save(arguments.output, save_all=True, append_images=others, duration=durations, loop=0, disposal=1)
