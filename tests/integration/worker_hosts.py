"""One rank on one host of test_hosts.py.

The first argument says what it does: all-reduce or hang.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def say(word, **what):
    # This is one write, because launchers mix the output of ranks that write at the same time.
    sys.stdout.write(f"{word} {json.dumps(what)}\n")
    sys.stdout.flush()


def sent() -> int:
    return int(Path("/sys/class/net/e0/statistics/tx_bytes").read_text())


def all_reduce(numel: int, times: int) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    tensor = torch.full((numel,), float(hvd.rank()))
    result = hvd.allreduce(tensor, name="tensor")  # connects
    hvd.barrier()
    before, begun = sent(), time.perf_counter()
    for _ in range(times):
        result = hvd.allreduce(tensor, name="tensor")
    seconds = (time.perf_counter() - begun) / times
    hvd.barrier()
    say(
        "RESULT",
        host=socket.gethostname(),
        variable=os.environ.get("SCALECOM_TEST"),
        directory=os.getcwd(),
        rank=hvd.rank(),
        size=hvd.size(),
        exact=bool((result == (hvd.size() - 1) / 2).all()),
        seconds=seconds,
        sent=(sent() - before) / times,
    )


if sys.argv[1] == "all-reduce":
    all_reduce(int(sys.argv[2]), int(sys.argv[3]))
elif sys.argv[1] == "hang":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)  # no launcher finds it
    say("WAITING", space=os.readlink("/proc/self/ns/pid"))
    time.sleep(1000)
