"""Small real trainings: is a network at least as good after AdamW has been swapped for noisygrad? See `dropin.py`."""
