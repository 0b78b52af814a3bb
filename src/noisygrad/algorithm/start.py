"""What steadies the first draws and steps: a share of the identity in what factors are made of.

It is never in F̄, nor in the posterior that is handed out, and fades as measurements come in. With few measurements F̄
has directions that no example has shown yet, and a draw would be the prior's there.
"""

from typing import Literal

from torch import Tensor

Safeguard = Literal["brief", "fading"]
"""How the share falls with the number of measurements k: as 1/(k + 1)², or as (1 − β̃)ᵏ, which is what is left of an
identity that a moving average starts from."""


def identity_share(safeguard: Safeguard, updates: Tensor, seen: Tensor) -> Tensor:
    """The share after `updates` measurements, whose weights in a moving average from nothing would sum to `seen`.

    It is 1 before the first one: draws are as wide as with a Fisher of one everywhere.
    """
    return (updates + 1.0).square().reciprocal() if safeguard == "brief" else 1.0 - seen
