"""Nodes that train without a server: peers, the centre, all-reduce groups."""

from jasgd.runtime.nodes._centre import Centre
from jasgd.runtime.nodes._group import GROUP_LOST
from jasgd.runtime.nodes._group import GroupError
from jasgd.runtime.nodes._group import GroupNode
from jasgd.runtime.nodes._group import join_group
from jasgd.runtime.nodes._peer import Peer
from jasgd.runtime.nodes._registry import claim_number
from jasgd.runtime.nodes._registry import find_folder
from jasgd.runtime.nodes._registry import list_members
from jasgd.runtime.nodes._registry import name_member
from jasgd.runtime.nodes._registry import Registry
from jasgd.runtime.nodes._snapshot_server import make_hello
from jasgd.runtime.nodes._snapshot_server import SnapshotServer

__all__ = [
  'GROUP_LOST',
  'Centre',
  'GroupError',
  'GroupNode',
  'Peer',
  'Registry',
  'SnapshotServer',
  'claim_number',
  'find_folder',
  'join_group',
  'list_members',
  'make_hello',
  'name_member',
]
