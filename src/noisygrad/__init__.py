"""noisygrad."""
