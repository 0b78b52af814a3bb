"""Information gain: what an example would teach a posterior, for whoever chooses what to look at next.

Agents that are rewarded for it, with stable-baselines3, are in `noisygrad_paper.curiosity`.
"""

from noisygrad.exploration.gain import information_gain

__all__ = ["information_gain"]
