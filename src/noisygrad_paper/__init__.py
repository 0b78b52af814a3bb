"""The reproduction of *Noisy Natural Gradient as Variational Inference*: data, baselines, experiments, report and demo.

Its commands are `noisygrad reproduce`, `report`, `data` and `demo`. The library does not know of it.
"""
