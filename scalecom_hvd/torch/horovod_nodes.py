"""Which ranks share a node, and which are peers, as Horovod's process sets."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Sequence

import horovod.torch as horovod
import torch
from horovod.common import process_sets as _horovods_sets
from horovod.common.process_sets import ProcessSet

from scalecom_hvd.agreement import NUMBERS, is_elastic
from scalecom_hvd.exchange.node import Node
from scalecom_hvd.torch.horovod_collectives import HorovodCollectives


def peers_and_node(
    nodes: bool | int, local_steps: bool
) -> tuple[HorovodCollectives, Node, ProcessSet]:
    """This rank's peers, and the ranks of its node, also as a process set. All ranks call this.

    nodes: True: each host is a node. A number: that many nodes, of consecutive ranks.
    local_steps: whether nodes take steps at their own pace. Then this process ends when all do: the
        rank that ends first shuts Horovod down, and others may still average inside their node.

    Raises:
        ValueError: ranks do not fill two or more nodes of equal size, or Horovod was started
            without what process sets need.
    """
    if is_elastic():
        raise ValueError(
            "nodes= does not work with elastic training, in which ranks come and go: leave nodes= "
            "out, or launch without --host-discovery-script"
        )
    mine = _place(nodes), NUMBERS.claim()
    places = horovod.allgather_object(mine, name="scalecom.nodes")
    number = max(claimed for _, claimed in places)
    NUMBERS.use(number)
    members: dict[int, list[int]] = {}
    for rank, (place, _) in enumerate(places):
        members.setdefault(place, []).append(rank)
    sizes = sorted({len(ranks) for ranks in members.values()})
    if len(members) == 1:
        raise ValueError(
            f"all {len(places)} ranks are one node (nodes={nodes}), but compression works between "
            "nodes. Leave nodes= out, or to try it on one machine, give nodes=2"
        )
    if len(sizes) > 1:
        raise ValueError(
            f"nodes have {', '.join(map(str, sizes))} ranks, but all nodes must have the same "
            "number of ranks. Give each host the same number of slots, such as -H node1:4,node2:4"
        )
    everyone = [*members.values(), *(list(ranks) for ranks in zip(*members.values(), strict=True))]
    sets = [_process_set(ranks) for ranks in everyone]  # all ranks make all of them, in one order
    node, peers = (one for one in sets if horovod.rank() in one.ranks)
    if local_steps:
        atexit.unregister(_wait_for_others)  # registered last, it comes before Horovod's shutdown
        atexit.register(_wait_for_others)
    inside = HorovodCollectives(node, horovod.Sum)
    return HorovodCollectives(peers), Node(inside, HorovodCollectives(), number), node


def _place(nodes: bool | int) -> int:
    """The node of this rank."""
    if nodes is True:
        return horovod.cross_rank()
    if nodes < 1 or horovod.size() % nodes:
        raise ValueError(f"nodes={nodes} does not divide {horovod.size()} ranks")
    return horovod.rank() // (horovod.size() // nodes)


def process_sets() -> dict[tuple[int, ...], ProcessSet]:
    """{ranks: their process set}, for all sets that Horovod has now. No two have the same ranks."""
    found = {}
    for number, ranks in _horovods_sets._basics._get_process_set_ids_and_ranks().items():
        found[tuple(ranks)] = made = ProcessSet(list(ranks))
        made.process_set_id = number
    return found


def _process_set(ranks: Sequence[int]) -> ProcessSet:
    made = process_sets().get(tuple(ranks))
    if made is not None:
        return made
    try:
        return horovod.add_process_set(list(ranks))
    except ValueError as error:
        if "DYNAMIC" not in str(error):
            raise
        raise ValueError(
            "nodes= makes process sets after hvd.init(), which must allow new process sets: "
            'hvd.init(process_sets="dynamic")'
        ) from error


def _wait_for_others() -> None:
    # After an uncaught error, others must fail too, and not wait for this rank.
    if hasattr(sys, "last_value") or not horovod.is_initialized():
        return
    given_up = time.monotonic() + 300  # another rank may have called sys.exit() too soon
    with contextlib.suppress(Exception):  # another rank has failed
        work = HorovodCollectives().all_reduce(torch.zeros(1), "scalecom.end")
        while not work.done() and time.monotonic() < given_up:
            time.sleep(0.01)
