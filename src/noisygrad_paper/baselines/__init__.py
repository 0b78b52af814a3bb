"""What the paper compares noisy natural gradient with."""
