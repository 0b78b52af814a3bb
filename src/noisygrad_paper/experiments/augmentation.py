"""Random crops and mirror images of a batch, on the device where it lies and without a look at the host."""

import torch
import torch.nn.functional as F
from torch import Tensor


def random_crop(images: Tensor, padding: int, *, flip: bool, generator: torch.Generator | None = None) -> Tensor:
    """Each image `[B, C, H, W]` moved by up to `padding` pixels each way, zeros coming in, and mirrored at random.

    The same as padding on all sides and cutting the original size out at a random place. Draws come from `generator`,
    or from torch's own for the device.
    """
    count, _, height, width = images.shape
    device = images.device

    def draw(high: int) -> Tensor:
        return torch.randint(high, (count, 1), device=device, generator=generator)

    padded = F.pad(images, (padding,) * 4)
    rows = draw(2 * padding + 1) + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, -1)
    if flip:
        columns = torch.where(draw(2) > 0, width - 1 - columns, columns)
    columns = columns + draw(2 * padding + 1)
    example = torch.arange(count, device=device)[:, None, None]
    return padded.movedim(1, -1)[example, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
