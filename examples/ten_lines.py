"""The PyTorch loop: swap the optimiser, keep the model, get a posterior."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import noisygrad as ng

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train_set, test_set = random_split(data, [1437, 360])

model = torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))
optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=len(train_set), lr=0.1, kl_clip=1e-3, factor_every=20)
for _ in range(15):
    for x, y in DataLoader(train_set, batch_size=32, shuffle=True):
        loss = optimizer.step(lambda x=x, y=y: (model(x), y))

x, y = test_set[:]
prediction = optimizer.posterior().predict(x, num_samples=50)
print(f"accuracy {ng.metrics.accuracy(prediction, y):.3f}")
print(f"log-likelihood {ng.metrics.log_likelihood(prediction, y):.3f}")
unsure = prediction.mutual_information.argsort(descending=True)[:5]
print("the network is least sure of its weights for test images", unsure.tolist())
