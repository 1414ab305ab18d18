"""Mixing as it is compiled for people: no optimisation may undo a rounding."""

import jax.numpy as jnp
import pytest

from tests.gossip import test_mix_messages as messages


@pytest.mark.parametrize(
  ('name', 'dtype'),
  [
    ('Pull, ring', jnp.bfloat16),
    ('Push, independent', jnp.float16),
    ('PushSum, complete', jnp.bfloat16),
  ],
)
def test_what_is_sent_is_rounded(name, dtype):
  messages.test_what_is_sent_is_rounded_and_nothing_else(name, dtype)


def test_a_narrow_mean_is_the_same_for_all():
  messages.test_a_narrow_mean_is_the_same_for_all(jnp.bfloat16)
