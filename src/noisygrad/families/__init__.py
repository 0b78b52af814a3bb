"""The four covariance families: pure tensor algebra, batched over leading dimensions.

No modules, no autograd, no randomness. Each family is one file with the same skeleton in the same order:
`Statistics` (the moving average of the Fisher), `Prior`, `Precision` (what sampling, stepping and the KL need).
"""
