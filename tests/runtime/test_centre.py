"""The centre of elastic averaging, with nodes in threads."""

from jasgd import traces
from tests.runtime import peer_cases as peers


def test_who_is_done_stays_while_others_step(tmp_path):
  """A node sees only the centre, and asks it whether anybody makes steps."""
  with peers.start_group(
    tmp_path, 'elastic', num_steps=12, min_seconds=(0.0, 0.0, 0.1)
  ) as group:
    group.wait()
  trace = group.load_trace()
  last_step = trace.steps['end_time'].max()
  ends = trace.records[trace.records['kind'] == traces.NodeKind.END]
  assert sorted(ends['node']) == [traces.CENTRE, 0, 1, 2]
  assert ends['end_time'].min() > last_step
