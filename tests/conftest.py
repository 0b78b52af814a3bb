"""For the whole suite: one thread a process, since the suite runs in several and its networks are tiny."""

import torch

torch.set_num_threads(1)
