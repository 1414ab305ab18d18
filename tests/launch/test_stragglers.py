"""Slow nodes slow an all-reduce, and not those who gossip."""

import pytest

from launch.benchmarks import stragglers


@pytest.mark.slow
def test_fast_nodes_that_gossip_stay_fast(processes, tmp_path):
  del processes
  rates = stragglers.run_all(tmp_path, 100)
  slowed = (rates['pull-disturbed'] / rates['pull'])[:2]
  assert slowed.min() > 0.9, rates
  # All wait for the slowest, whose step takes 150 ms.
  assert rates['allreduce-disturbed'].max() < 1 / 0.15, rates
