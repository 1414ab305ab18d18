"""PyTorch's side of the suite `training`: a worker.

  .venv-torch/bin/python -m launch.benchmarks.training_torch NUM_THREADS

Plain eager PyTorch as people write it, with the networks of `jasgd.tasks`. A
delay is made as in the paper: gradients wait in a queue before the optimizer
gets them. Images are floats in memory already, which favours PyTorch: our side
starts from bytes. The suite starts it, in an environment that has torch.

References:
  Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous SGD
  <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
"""

import collections
import sys
from typing import Any

from launch.benchmarks import processes
from launch.benchmarks import training


def make_lenet() -> Any:
  """LeNet-5 with relu and max pooling: 61,706 weights."""
  from torch import nn  # pyrefly: ignore

  return nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(6, 16, 5),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(400, 120),
    nn.ReLU(),
    nn.Linear(120, 84),
    nn.ReLU(),
    nn.Linear(84, training.NUM_CLASSES),
  )


def make_a1() -> Any:
  """Three pooled convolutions and a dense layer: 89,578 weights."""
  from torch import nn  # pyrefly: ignore

  layers: list[Any] = []
  for channels, features in ((3, 32), (32, 32), (32, 64)):
    layers += [
      nn.Conv2d(channels, features, 5, padding=2),
      nn.ReLU(),
      nn.MaxPool2d(2),
    ]
  return nn.Sequential(
    *layers, nn.Flatten(), nn.Linear(64 * 4 * 4, training.NUM_CLASSES)
  )


def make_resnet20() -> Any:
  """ResNet-20 with shortcuts without weights (option A): 269,722 weights."""
  from torch import nn  # pyrefly: ignore
  from torch.nn import functional  # pyrefly: ignore

  def make_conv(channels: int, features: int, stride: int = 1) -> Any:
    return nn.Conv2d(channels, features, 3, stride, padding=1, bias=False)

  class Block(nn.Module):
    """relu(x + BN(conv(relu(BN(conv(x))))))."""

    def __init__(self, channels: int, features: int, stride: int) -> None:
      super().__init__()
      self.conv1 = make_conv(channels, features, stride)
      self.norm1 = nn.BatchNorm2d(features)
      self.conv2 = make_conv(features, features)
      self.norm2 = nn.BatchNorm2d(features)
      self.stride = stride
      self.missing = features - channels

    def forward(self, values: Any) -> Any:
      inner = functional.relu(self.norm1(self.conv1(values)))
      inner = self.norm2(self.conv2(inner))
      if self.missing:
        values = values[:, :, :: self.stride, :: self.stride]
        before = self.missing // 2
        after = self.missing - before
        values = functional.pad(values, (0, 0, 0, 0, before, after))
      return functional.relu(values + inner)

  layers = [make_conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
  channels = 16
  for features in (16, 32, 64):
    for _ in range(3):
      layers.append(Block(channels, features, features // channels))
      channels = features
  return nn.Sequential(
    *layers,
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, training.NUM_CLASSES),
  )


MODELS = {'lenet': make_lenet, 'a1': make_a1, 'resnet20': make_resnet20}


class DelayedOptimizer:
  """Steps with the gradients of `delay` steps ago."""

  def __init__(self, optimizer: Any, params: list[Any], delay: int) -> None:
    """Begins with a full queue of zeros, as after many steps."""
    import torch  # pyrefly: ignore

    self._optimizer = optimizer
    self._params = params
    self._queue = collections.deque(
      [torch.zeros_like(param) for param in params] for _ in range(delay)
    )

  def step(self) -> None:
    """Puts the gradients in the queue, and steps with the oldest."""
    self._queue.append([param.grad for param in self._params])
    # `zero_grad` drops gradients and leaves them as they are: no copy needed.
    for param, grad in zip(self._params, self._queue.popleft(), strict=True):
      param.grad = grad
    self._optimizer.step()


class TorchProgram:
  """Trains a network."""

  def __init__(self, case: training.Case) -> None:
    """Makes the network, its optimizer and its examples."""
    import torch  # pyrefly: ignore

    torch.manual_seed(0)
    self._case = case
    self._model = MODELS[case.model]()
    params = list(self._model.parameters())
    self._optimizer = torch.optim.SGD(
      params, lr=training.RATE, momentum=training.MOMENTUM
    )
    self._delayed = DelayedOptimizer(self._optimizer, params, int(case.way))
    examples = training.make_examples(case.model)
    images = torch.from_numpy(examples['image']).permute(0, 3, 1, 2)
    self._images = images.float().div(255).contiguous()
    self._labels = torch.from_numpy(examples['label']).long()
    self._order = torch.empty(0, dtype=torch.long)
    self.num_params = sum(param.numel() for param in params)

  def advance(self) -> float:
    """Trains for one turn."""
    from torch.nn import functional  # pyrefly: ignore

    for _ in range(self._case.num_steps):
      index = self._draw()
      self._optimizer.zero_grad()
      logits = self._model(self._images[index])
      loss = functional.cross_entropy(logits, self._labels[index])
      loss.backward()
      self._delayed.step()
    return loss.item()

  def _draw(self) -> Any:
    """The next batch of an epoch's shuffle."""
    import torch  # pyrefly: ignore

    batch = self._case.batch
    if len(self._order) < batch:
      self._order = torch.randperm(training.NUM_EXAMPLES)
    index, self._order = self._order[:batch], self._order[batch:]
    return index


def main(num_threads: int) -> None:
  """Serves stdin."""
  # Before torch is imported, because it counts the cores then.
  processes.pin(num_threads)
  import torch  # pyrefly: ignore

  torch.set_num_threads(num_threads)
  torch.set_num_interop_threads(num_threads)
  training.serve(num_threads, TorchProgram)


if __name__ == '__main__':
  main(int(sys.argv[1]))
