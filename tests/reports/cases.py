"""Small workdirs, and a reader of pages."""

from html import parser

import numpy as np

import jasgd
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd import workdir

# Elements that are never closed.
_VOID = {'meta', 'img', 'wbr'}

PROTOCOLS = {
  'asynchronous': protocols.asynchronous(),
  'backup': protocols.backup(2),
  'constant_delay': protocols.constant_delay(3),
  'downpour': protocols.downpour(2, 4),
  'hardsync': protocols.hardsync(),
  'rennala': protocols.rennala(4),
  'ringmaster': protocols.ringmaster(3),
  'softsync': protocols.softsync(2),
  'ssp': protocols.ssp(2),
}


def simulate(name='softsync', num_gradients=120):
  protocol = PROTOCOLS[name]
  if name == 'constant_delay':  # It sets number and times of learners itself.
    return jasgd.simulate(protocol, num_gradients=num_gradients)
  return jasgd.simulate(
    protocol,
    num_workers=6,
    num_gradients=num_gradients,
    compute=simulation.normal(1.0, 0.2),
    network=simulation.Network(latency=0.05),
  )


def simulate_nodes(num_nodes=4):
  return jasgd.simulate(
    gossip.Pull(),
    num_workers=num_nodes,
    num_gradients=10 * num_nodes,
    compute=simulation.normal(1.0, 0.2),
    network=simulation.Network(latency=0.1),
  )


def make_config(rate=0.1, name='softsync'):
  return {
    'optimizer': {'name': 'sgd', 'rate': rate},
    'protocol': {'name': name, 'arguments': [1, 2]},
    'num_epochs': 3,
    'note': 'a <b> & "c"',
  }


def make_lines(num_lines=4, every=10):
  """A line for each chunk; every second one has no test metrics."""
  for line in range(1, num_lines + 1):
    row = {
      'epoch': line / 2,
      'time': 5.0 * line,
      'train/loss': 2.0 / line,
      'server/staleness_mean': 1.5,
      'server/staleness_max': 4,
      'server/factor_mean': 0.5,
      'server/gap_mean': 0.01 * line,
      'server/rate': 0.1,
    }
    if line % 2 == 0:
      row |= {'test/loss': 3.0 / line, 'test/accuracy': 0.9 - 0.1 / line}
    yield every * line, row


def write_run(root, config=None, trace=None, lines=()):
  """Makes a workdir with the given files, and no others."""
  root.mkdir(parents=True, exist_ok=True)
  paths = workdir.Workdir(root)
  if config is not None:
    workdir.write_json(paths.config, config)
  if trace is not None:
    trace.save(paths.trace)
  lines = list(lines)
  if lines:
    with workdir.MetricsWriter(root, use_tensorboard=False) as writer:
      for clock, metrics in lines:
        writer.write(clock, metrics)
  return root


class Page(parser.HTMLParser):
  """A page taken apart; its elements must be balanced."""

  def __init__(self, path):
    super().__init__()
    self.source = path.read_text(encoding='utf-8')
    self.tags = []  # (tag, attributes) of each element.
    self.paragraphs = []
    self.tables = {}  # The heading before it -> its rows, a list of cells.
    self._stack = []
    self._heading = ''
    self.feed(self.source)
    self.close()
    assert not self._stack

  def column(self, heading, index=1):
    """The cells of a column by the name of their row."""
    return {row[0]: row[index] for row in self.tables[heading][1:]}

  @property
  def images(self):
    return [attributes for tag, attributes in self.tags if tag == 'img']

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag in _VOID:
      return
    self._stack.append(tag)
    if tag in ('h2', 'summary'):
      self._heading = ''
    elif tag == 'table':
      self.tables[self._heading] = []
    elif tag == 'tr':
      self.tables[self._heading].append([])
    elif tag in ('th', 'td'):
      self.tables[self._heading][-1].append('')
    elif tag == 'p':
      self.paragraphs.append('')

  def handle_endtag(self, tag):
    assert self._stack.pop() == tag

  def handle_data(self, data):
    tag = self._stack[-1] if self._stack else ''
    if tag in ('h2', 'summary'):
      self._heading += data
    elif tag in ('th', 'td'):
      self.tables[self._heading][-1][-1] += data
    elif tag == 'p':
      self.paragraphs[-1] += data


def simulate_real(protocol=None, is_over=True, has_faults=True):
  """A trace as a real server writes it: joins, faults, a restart, the end."""
  trace = jasgd.simulate(
    protocols.softsync(2) if protocol is None else protocol,
    num_workers=4,
    num_gradients=200,
    compute=simulation.gamma(1.0, 20.0),
    network=simulation.Network(latency=0.05, server_time=0.01),
    failures=[(20.0, 1, 30.0), (40.0, 2)] if has_faults else [],
  )
  records = np.array(trace.records)
  parts = [
    _make_members(traces.Kind.JOIN, 4, time=-0.5),
    records,
    *(_make_faults(records) if has_faults else ()),
    *(_make_end(records) if is_over else ()),
  ]
  header = {
    **trace.header,
    'num_present': 0,
    'in_flight': [],
  }
  return traces.Trace(_renumber(np.concatenate(parts)), header)


def _make_members(kind, number, time, clock=0):
  return traces.make_records(
    kind=kind,
    worker=np.arange(number),
    clock=clock,
    end_time=time,
    release_time=time,
    start_time=time,
    read_version=-1,
  )


def _make_faults(records):
  """Five void gradients, a restart, and two gradients that cannot be used."""
  last = records[-1]
  time, clock = float(last['end_time']), int(last['version'] - last['updates'])
  void = records[-5:].copy()
  restart = traces.make_records(
    kind=traces.Kind.RESTART,
    incarnation=1,
    worker=-1,
    read_version=clock,
    version=clock,
    start_time=np.nan,
    end_time=time + 1,
    release_time=np.nan,
  )
  unused = traces.make_records(
    fate=[traces.Fate.LOST_HISTORY, traces.Fate.NOT_FINITE],
    incarnation=1,
    worker=[0, 3],
    step=1000,
    read_version=[clock + 3, clock],  # The first is of weights that are lost.
    clock=clock,
    start_time=np.nan,
    end_time=time + 2,
    release_time=np.nan,
  )
  return void, restart, unused


def _make_end(records):
  """The end, a gradient that arrives after it, and all learners' leaves."""
  last = records[-1]
  time, clock = float(last['end_time']) + 3, int(last['version'])
  incarnation = 1
  end = traces.make_records(
    kind=traces.Kind.END,
    incarnation=incarnation,
    worker=-1,
    read_version=clock,
    clock=clock,
    start_time=np.nan,
    end_time=time,
    release_time=np.nan,
  )
  late = traces.make_records(
    fate=traces.Fate.AFTER_END,
    incarnation=incarnation,
    worker=[0, 3],
    read_version=clock,
    clock=clock,
    start_time=time - 1,
    compute_time=1.0,
    end_time=time + 1,
    release_time=np.nan,
  )
  leaves = _make_members(traces.Kind.LEAVE, 4, time + 1, clock)
  leaves['incarnation'] = incarnation
  return end, late, leaves


def _renumber(records):
  """Restarts name the record before the five that they make void."""
  for index in np.flatnonzero(records['kind'] == traces.Kind.RESTART):
    records['stands'][index] = index - 6
  return records
