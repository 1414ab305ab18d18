"""Digits: how much delay does an optimizer stand?

The smallest experiment there is, on data that comes with scikit-learn. As in
Jain et al. (2018), an optimizer is wrapped so that it sees every gradient d
updates late, and d is swept. Momentum SGD at rate 0.03 and Adam at 0.003, batch
32, 20 epochs, a network with one hidden layer of 64.

  python -m launch.train --config=configs/digits_delay.py

About 20 seconds on two cores. Test accuracy at a delay of 0, 8 and 64: SGD
0.983, 0.089, 0.114; divided by the staleness 0.983, 0.956, 0.772; Adam 0.986,
0.969, 0.206; divided by the staleness 0.986, 0.950, 0.644.
"""

from launch import digits


def get_config() -> digits.Config:
  """The defaults."""
  return digits.Config()
