"""Many perceptrons at once, trained by the same algorithm as the optimisers."""
