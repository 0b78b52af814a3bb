"""The reproduction of *Noisy Natural Gradient as Variational Inference*: data, baselines, experiments and the report.

Its commands are `noisygrad reproduce`, `noisygrad report` and `noisygrad data`. The library does not know of it.
"""
