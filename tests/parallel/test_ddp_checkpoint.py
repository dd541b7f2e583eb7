"""A checkpoint that fewer ranks saved than load it.

A rank that has no residues in it begins with empty ones, and the log says so.
"""

import logging

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faces import hvd
from models import same_on_all_ranks
from test_ddp_optimizer import make, take

from scalecom_hvd.ddp import PerRank


def waits(method):
    return sum(float(tensor.residue.abs().sum()) for tensor in method.residues.tensors.values())


def assert_is_without_residues_and_goes_on(model, optimizer, is_new, caplog):
    """is_new: whether the checkpoint has no residues of this rank."""
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.name == "scalecom_hvd" and record.levelno >= logging.WARNING
    ]
    assert (waits(optimizer.compression) == 0) == is_new
    said = any("residue" in message for message in warnings)
    everyone = hvd.allgather_object((is_new, said))
    assert all(said for is_new, said in everyone if is_new), "no warning says that residues are new"
    take(model, optimizer, range(3, 6))
    assert same_on_all_ranks(model.parameters())
    assert optimizer.compression.stats()["step"] == 6


def test_residues_of_a_gpu_that_is_not_here():
    """A rank may resume where its GPU has another number, or where there is none."""

    class Loading:
        def load_state_dict(self, state):
            self.devices = {residue.device.type for residue in state["residues"].values()}

    model, optimizer = make()
    take(model, optimizer, range(3))
    loading = Loading()
    PerRank(loading).load_state_dict(PerRank(optimizer.compression).state_dict())
    assert loading.devices == {"cpu"}


def test_a_state_without_this_ranks_key(caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # every rank may have a machine of its own
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, optimizer = make()
    own = PerRank(optimizer.compression)
    untrained = own.state_dict()
    take(model, optimizer, range(3))
    own.load_state_dict(own.state_dict())
    assert waits(optimizer.compression)
    own.load_state_dict(untrained)
    assert not waits(optimizer.compression)
    assert not caplog.text
    take(model, optimizer, range(3))
    everyone = hvd.allgather_object(own.state_dict())
    saved = {name: own for each in everyone for name, own in each.items()}
    is_new = hvd.rank() == hvd.size() - 1
    if is_new:
        del saved[f"rank{hvd.rank()}"]

    again, optimizer = make()
    again.load_state_dict(model.state_dict())
    PerRank(optimizer.compression).load_state_dict(saved)
    assert_is_without_residues_and_goes_on(again, optimizer, is_new, caplog)


def test_a_checkpoint_that_fewer_ranks_saved(caplog, shared_folder):
    """dcp.load loads it as it is, or if told that something may be missing."""
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    model, optimizer = make()
    take(model, optimizer, range(3))
    saving = dist.new_group(list(range(hvd.size() - 1)))
    is_new = hvd.rank() == hvd.size() - 1
    if not is_new:
        whole = {"scalecom": PerRank(optimizer.compression)}
        dcp.save(whole, checkpoint_id=shared_folder, process_group=saving)
    dist.barrier()

    again, optimizer = make()
    again.load_state_dict(model.state_dict())
    whole = {"scalecom": PerRank(optimizer.compression)}
    try:
        dcp.load(whole, checkpoint_id=shared_folder)
    except dcp.api.CheckpointException:  # on all ranks
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(whole, checkpoint_id=shared_folder, planner=planner)
    assert_is_without_residues_and_goes_on(again, optimizer, is_new, caplog)
