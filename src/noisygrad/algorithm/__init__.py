"""Noisy natural gradient, once: the update of Fisher, factors, mean and momentum (Algorithms 1 and 2 of the paper).

Everything is in place, can be masked, is batched over replicas, and reads nothing on the host where a GPU would have
to be waited for. The optimisers (`optim`) and the engine of replicas (`replicas`) both run on it.
"""
