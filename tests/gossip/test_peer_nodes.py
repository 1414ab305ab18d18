"""The state machines of peer strategies: events in, actions out."""

import json

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
import pytest

from jasgd import gossip
from jasgd.gossip import topologies

Outcome = gossip.Outcome
NUM_NODES = 5
SEED = 3
# Every strategy; a new one is tested by being listed.
STRATEGIES = {
  'allreduce': gossip.AllReduce(period=2),
  'elastic': gossip.Elastic(rate=0.25, order='easgd'),
  'pairs': gossip.Pairs(peers='matching'),
  'pull': gossip.Pull(beta=0.3),
  'pull, ring': gossip.Pull(peers=topologies.ring(NUM_NODES), period=2),
  'push': gossip.Push(peers='permutation'),
  'push-sum': gossip.PushSum(),
}
every_strategy = pytest.mark.parametrize('name', STRATEGIES)


def _make(strategy, node=1):
  return strategy.make_node(node, NUM_NODES, SEED)


def _answer(actions, outcome=Outcome.TAKEN):
  """Replies to all questions."""
  return [
    gossip.Reply(action.peer, outcome, version=9, step=4, handle=7)
    for action in actions
    if isinstance(action, gossip.Ask)
  ]


def _drive(machine, num_steps, first=1):
  """All actions of some steps in which every peer answers."""
  found = []
  for step in range(first, first + num_steps):
    actions = machine.on_step(step)
    while actions:
      found.extend(actions)
      replies = _answer(actions)
      sends = [each for each in actions if isinstance(each, gossip.Send)]
      for send in sends:
        machine.on_outcome(send, Outcome.TAKEN)
      if gossip.MixWaiting() in actions:
        found.append(machine.mix_waiting())
      if any(isinstance(each, gossip.JoinMean) for each in actions):
        replies = [gossip.Reply(machine.node, Outcome.TAKEN, 9, step)]
      actions = machine.on_replies(replies) if replies else ()
  return found


@every_strategy
def test_equal_machines_act_alike(name):
  first, second = (_make(STRATEGIES[name]) for _ in range(2))
  assert _drive(first, 12) == _drive(second, 12)
  assert first.save() == second.save()


@every_strategy
def test_a_restored_machine_goes_on_as_the_saved_one(name):
  """The state goes through JSON, between two exchanges."""
  machine = _make(STRATEGIES[name])
  _drive(machine, 6)
  saved = json.loads(json.dumps(machine.save()))
  again = _make(STRATEGIES[name]).restore(saved)
  assert again.save() == machine.save()
  assert _drive(again, 6, first=7) == _drive(machine, 6, first=7)


@every_strategy
def test_exchanges_come_every_period(name):
  strategy = STRATEGIES[name]
  machine = _make(strategy)
  for step in range(1, 12):
    actions = machine.on_step(step)
    if step % strategy.period:
      assert not actions
    for reply in _answer(actions):
      machine.on_replies([reply] * len(_answer(actions)))


# --- Choice of peers.


@pytest.mark.parametrize('peers', gossip.PEERS)
@pytest.mark.parametrize('members', [range(5), [0, 1, 3, 4], [1, 4], [1]])
def test_random_peers_are_drawn_among_members(peers, members):
  """As `draw_peers` draws for that number of members; the step is the round."""
  period = 2
  machine = _make(gossip.Pull(peers=peers, period=period))
  machine.on_alive(members)
  place = list(members).index(1)
  for index in (0, 1, 7, 1000, 3):
    drawn = gossip.draw_peers(
      peers, len(members), seed=SEED, first_round=index
    )[0, place]
    chosen = machine.choose_peers((index + 1) * period, 0.3)
    peer = members[drawn]
    assert chosen == ([] if peer == 1 else [(peer, 0.3)])


def test_a_topology_keeps_its_edges_to_members():
  topology = topologies.one_peer_exponential(NUM_NODES)
  machine = _make(gossip.Pull(peers=topology))
  edges = {step: machine.choose_peers(step) for step in range(1, 1 + NUM_NODES)}
  assert {len(each) for each in edges.values()} == {1}
  machine.on_alive([0, 1, 4])
  for step, (edge,) in edges.items():
    kept = [edge] if edge[0] in (0, 4) else []
    assert machine.choose_peers(step) == kept


# --- Pull and pairs.


@pytest.mark.parametrize(
  ('answered', 'own_weight'), [((1, 1), 1 / 3), ((1, 0), 2 / 3), ((0, 0), None)]
)
def test_the_weight_of_a_peer_without_answer_goes_to_the_node(
  answered, own_weight
):
  machine = _make(gossip.Pull(peers=topologies.ring(NUM_NODES)))
  asks = machine.on_step(1)
  assert [ask.peer for ask in asks] == [0, 2]
  replies = [
    gossip.Reply(ask.peer, Outcome.TAKEN if is_there else Outcome.UNREACHABLE)
    for ask, is_there in zip(asks, answered, strict=True)
  ]
  actions = machine.on_replies(replies)
  if own_weight is None:
    assert not actions
    return
  (mix,) = actions
  assert mix.own_weight == pytest.approx(own_weight)
  sources = [reply for reply in replies if reply.outcome == Outcome.TAKEN]
  assert [source for source, _ in mix.sources] == sources
  assert [weight for _, weight in mix.sources] == [1 / 3] * len(sources)


def test_beta_is_the_weight_of_the_peer():
  machine = _make(gossip.Pull(beta=0.3, peers='permutation'))
  for step in range(1, 9):
    replies = _answer(machine.on_step(step))
    for mix in machine.on_replies(replies):
      assert mix.own_weight == 0.7
      assert mix.sources == ((replies[0], 0.3),)


def test_pairs_average_with_a_peer_that_answers():
  machine = _make(gossip.Pairs(peers='matching'))
  step = next(step for step in range(1, 9) if machine.on_step(step))
  replies = _answer(machine.on_step(step))
  assert machine.on_replies(replies) == [gossip.Average(replies[0], 0.5)]
  lost = [reply._replace(outcome=Outcome.UNREACHABLE) for reply in replies]
  assert machine.on_replies(lost) == []
  with pytest.raises(ValueError, match='takes no weights'):
    machine.on_message(gossip.Message(0, 1, 1, 0.5))


# --- Push and push-sum.


def _message(sender=0, step=1, share=0.5, version=3):
  return gossip.Message(sender, version, step, share, handle=sender)


@pytest.mark.parametrize(
  ('outcome', 'kept'),
  [
    (Outcome.TAKEN, 0.5),
    (Outcome.UNKNOWN, 0.5),
    (Outcome.FULL, 1.0),
    (Outcome.DONE, 1.0),
    (Outcome.UNREACHABLE, 1.0),
  ],
)
def test_push_keeps_the_share_that_was_not_taken(outcome, kept):
  machine = _make(gossip.Push(peers='permutation'))
  step = next(step for step in range(1, 9) if len(machine.on_step(step)) > 1)
  send, last = machine.on_step(step)
  assert (send.share, send.step, last) == (0.5, step, gossip.MixWaiting())
  assert machine.mix_waiting() is None
  message = _message()
  assert machine.on_message(message) == Outcome.TAKEN
  machine.on_outcome(send, outcome)
  total = kept + 0.5
  assert machine.mix_waiting() == gossip.Mix(
    kept / total, ((message, 0.5 / total),)
  )


def test_an_outcome_that_comes_late_changes_no_later_mix():
  machine = _make(gossip.Push(peers='permutation'))
  steps = [step for step in range(1, 20) if len(machine.on_step(step)) > 1]
  early, _ = machine.on_step(steps[0])
  machine.on_step(steps[1])
  machine.on_outcome(early, Outcome.FULL)
  message = _message()
  machine.on_message(message)
  assert machine.mix_waiting() == gossip.Mix(0.5, ((message, 0.5),))


@pytest.mark.parametrize('strategy', [gossip.Push(), gossip.PushSum()])
def test_a_node_accepts_four_messages_per_node_and_none_at_its_end(strategy):
  machine = _make(strategy)
  outcomes = [machine.on_message(_message()) for _ in range(4 * NUM_NODES + 2)]
  assert outcomes[:-2] == [Outcome.TAKEN] * 4 * NUM_NODES
  assert outcomes[-2:] == [Outcome.FULL] * 2
  assert len(machine.mix_waiting().sources) == 4 * NUM_NODES
  assert machine.on_message(_message()) == Outcome.TAKEN
  assert machine.on_end() == (gossip.MixWaiting(),)
  assert len(machine.mix_waiting().sources) == 1
  assert machine.on_message(_message()) == Outcome.DONE


def test_a_node_that_is_done_refuses_mass_of_slower_nodes():
  push, push_sum = _make(gossip.Push()), _make(gossip.PushSum())
  for machine in (push, push_sum):
    machine.on_step(8)
    assert machine.on_done() == (gossip.MixWaiting(),)
    machine.mix_waiting()
  slower, equal = _message(step=7), _message(step=8)
  assert push.on_message(slower) == Outcome.TAKEN
  assert push.mix_waiting() == gossip.Mix(1 / 1.5, ((slower, 0.5 / 1.5),))
  assert push_sum.on_message(slower) == Outcome.DONE
  assert push_sum.on_message(equal) == Outcome.TAKEN


def test_a_mix_without_any_mass_changes_nothing():
  machine = _make(gossip.PushSum())
  machine.mass = 0.0
  message = _message(share=0.0)
  machine.on_message(message)
  assert machine.mix_waiting() == gossip.Mix(1.0, ((message, 0.0),))


# --- Elastic averaging and all-reduce.


@pytest.mark.parametrize('order', ['a3', 'easgd'])
def test_elastic_asks_the_centre_and_moves(order):
  machine = _make(gossip.Elastic(rate=0.25, order=order))
  (ask,) = machine.on_step(1)
  assert ask == gossip.Ask(gossip.CENTRE)
  reply = gossip.Reply(gossip.CENTRE, Outcome.TAKEN, 9, 9)
  expected = (gossip.Attract(reply, 0.25, order == 'easgd'),)
  assert machine.on_replies([reply]) == expected
  lost = gossip.Reply(gossip.CENTRE, Outcome.UNREACHABLE)
  assert machine.on_replies([lost]) == ()


def test_means_are_numbered():
  machine = _make(gossip.AllReduce(period=3))
  numbers = [
    action.number
    for action in _drive(machine, 9)
    if isinstance(action, gossip.JoinMean)
  ]
  assert numbers == [0, 1, 2]
  assert gossip.AllReduce().averages_gradients
  assert not gossip.AllReduce(period=3).averages_gradients


def test_nodes_that_begin_together_continue_with_a_new_number():
  """Means after the checkpoint may have been recorded: their numbers are void.

  Others than an all-reduce have no such numbers.
  """
  machine = _make(gossip.AllReduce())
  _drive(machine, 2)
  again = _make(gossip.AllReduce()).restore(machine.save())
  again.on_restart(2, 0.0)
  again.on_regroup(5)
  assert again.on_step(3) == (gossip.JoinMean(5),)
  pull = _make(gossip.Pull())
  before = pull.save()
  pull.on_regroup(5)
  assert pull.save() == before


def test_the_centre_of_elastic_averaging_moves_by_each_force():
  protocol = gossip.Elastic().make_centre()
  protocol.start(NUM_NODES)
  protocol.on_join(3)
  for clock in range(1, 5):  # Also by a force of an old version.
    assert protocol.on_push(3, step=clock, read_clock=0).updates
    assert protocol.clock == clock
  with pytest.raises(NotImplementedError, match='must define make_centre'):
    gossip.Pull().make_centre()


# --- Joining and restarting.


@every_strategy
def test_a_joiner_takes_over_weights_and_step_and_no_mass(name):
  """Its schedule continues that of its peer, and no mass is created."""
  machine = _make(STRATEGIES[name])
  (ask,) = machine.on_join()
  reply = gossip.Reply(ask.peer, Outcome.TAKEN, version=30, step=20)
  assert machine.on_join_reply(reply)[0].own_weight == 0
  assert machine.mass == 0
  if name == 'elastic':  # Twenty moves of the centre are four of each node.
    assert ask.peer == gossip.CENTRE
    assert machine.step == 4
  else:
    assert ask.peer == 2  # The next one.
    assert machine.step == 20


def test_a_joiner_asks_one_after_another():
  machine = _make(gossip.PushSum())
  machine.on_alive([0, 1, 4])
  asked, actions = [], machine.on_join()
  while actions:
    (ask,) = actions
    asked.append(ask.peer)
    reply = gossip.Reply(ask.peer, Outcome.UNREACHABLE)
    actions = machine.on_join_reply(reply)
  assert asked == [4, 0]
  assert (machine.mass, machine.step) == (1.0, 0)


@every_strategy
def test_a_peer_without_a_step_cannot_help_a_joiner(name):
  """It is passed over; if there is no other, the node keeps its weights."""
  machine = _make(STRATEGIES[name])
  asked, actions = [], machine.on_join()
  while actions:
    (ask,) = actions
    asked.append(ask.peer)
    reply = gossip.Reply(ask.peer, Outcome.TAKEN, version=0, step=0)
    actions = machine.on_join_reply(reply)
  assert asked == ([gossip.CENTRE] if name == 'elastic' else [2, 3, 4, 0])
  assert machine.save() == _make(STRATEGIES[name]).save()


class Masses(stateful.RuleBasedStateMachine):
  """Push-sum: mass is never created, and all lost mass is accounted for.

  Machines are driven by hand. A node's last record is what a real one would
  have written; a restart goes on from that.
  """

  def __init__(self):
    super().__init__()
    strategy = gossip.PushSum()
    self.nodes = [
      strategy.make_node(node, NUM_NODES, SEED) for node in range(NUM_NODES)
    ]
    self.recorded = [1.0] * NUM_NODES
    self.under_way = []
    self.lost = 0.0

  nodes_st = st.integers(0, NUM_NODES - 1)

  @stateful.rule(node=nodes_st)
  def step(self, node):
    machine = self.nodes[node]
    actions = machine.on_step(machine.step + 1)
    self.recorded[node] = machine.mass
    self.under_way += [
      (machine, action) for action in actions if isinstance(action, gossip.Send)
    ]

  @stateful.rule(node=nodes_st)
  def mix(self, node):
    if self.nodes[node].mix_waiting() is not None:
      self.recorded[node] = self.nodes[node].mass

  @stateful.rule(
    index=st.integers(0, 100),
    fails=st.sampled_from([None, Outcome.UNREACHABLE, Outcome.UNKNOWN]),
  )
  def deliver(self, index, fails):
    if not self.under_way:
      return
    sender, send = self.under_way.pop(index % len(self.under_way))
    outcome = fails
    if fails is None:
      message = gossip.Message(sender.node, 0, send.step, send.share)
      outcome = self.nodes[send.peer].on_message(message)
    if outcome == Outcome.UNKNOWN:
      self.lost += send.share
    if sender is self.nodes[sender.node]:
      sender.on_outcome(send, outcome)
    elif outcome not in (Outcome.TAKEN, Outcome.UNKNOWN):
      self.lost += send.share  # Its sender is dead.

  @stateful.rule(node=nodes_st)
  def finish(self, node):
    self.nodes[node].on_done()

  @stateful.rule(node=nodes_st, joins=st.booleans())
  def die(self, node, joins):
    dead = self.nodes[node]
    machine = gossip.PushSum().make_node(node, NUM_NODES, SEED)
    if joins:
      reply = gossip.Reply(0, Outcome.TAKEN, 1, 1)
      machine.on_join_reply(reply)
    else:
      machine.restore(dead.save())
      machine.on_restart(dead.step, self.recorded[node])
    self.nodes[node] = machine
    self.recorded[node] = machine.mass
    assert machine.mass <= dead.held_mass + 1e-12
    self.lost += dead.held_mass - machine.mass

  @stateful.invariant()
  def all_mass_is_somewhere(self):
    held = sum(machine.held_mass for machine in self.nodes)
    sent = sum(send.share for _, send in self.under_way)
    assert held + sent + self.lost == pytest.approx(NUM_NODES)
    assert min(machine.mass for machine in self.nodes) >= 0


Masses.TestCase.settings = hypothesis.settings(
  max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
test_mass_is_never_made = Masses.TestCase
