"""What a cell was computed on."""

import platform


def device_name(device: str) -> str:
    """The machine's processor or GPU in words, without anything that tells one machine from another of its kind."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}"
