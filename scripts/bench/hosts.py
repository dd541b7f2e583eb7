"""2 to 8 hosts on one machine, with a network of a chosen speed between them.

This does across hosts what `launch.py` does on one host. A host h1..h8 is a network, mount and UTS
namespace with its own interface e0, host name, /etc/hosts, /dev/shm, sshd and key. So `horovodrun
--gloo -H h1:1,h2:1` and `mpirun -H h1:1,h2:1` reach it over ssh as they would reach any other
machine; torchrun is started on each host. Files and processors are those of this machine. Tests and
benchmarks use the class, and people use the command line:

    python scripts/bench/hosts.py --hosts 4 --mbit 1000 --launcher mpirun -- \\
        scripts/examples/train_image.py --steps 20
    python scripts/bench/hosts.py --launcher torchrun --ranks-per-host 2 -- \\
        scripts/examples/train_fsdp.py
    python scripts/bench/hosts.py --hosts 2 --mbit 100 --shell
    python scripts/bench/hosts.py --install

The hosts are in one PID and mount namespace. Its first process waits for the end of a pipe that
this process holds. When this process closes the pipe, or ends in whatever way, the kernel ends that
first process, every other process inside and, with the last one, all interfaces and mounts. So
nothing of a cluster has a name or a file outside, nothing of it can be left over, and clusters do
not see each other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where launch.py is

import launch

# {program: the Debian package it is in}
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "unshare": "util-linux",
}
UNSHARE = ("unshare", "--pid", "--mount", "--net", "--fork", "--kill-child")
POLICY = Path("/usr/sbin/policy-rc.d")
WAIT_FOR_ALL = 'for pid in "${pids[@]}"; do wait "$pid" || code=$?; done'

# The first process of a cluster; $1: the number of hosts. Prints "<host> <PID outside>" for each
# host that is up, then waits to be ended.
CLUSTER = r"""
set -eu
mount -t tmpfs tmpfs /run
mkdir /run/netns /run/sshd
mount -t tmpfs tmpfs /etc/ssh
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/id
cat > /etc/ssh/ssh_config <<END
IdentityFile /etc/ssh/id
IdentitiesOnly yes
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
END
cat > /etc/ssh/sshd_config <<END
AuthorizedKeysFile /etc/ssh/id.pub
PermitRootLogin yes
UsePAM no
StrictModes no
MaxStartups 100
LogLevel FATAL
END
# The user's own settings for ssh would come before these.
[ ! -d ~root/.ssh ] || mount -t tmpfs tmpfs ~root/.ssh
# Without PAM, sshd lets nobody in whose password is locked, as root's often is.
echo 'root:*:20000:0:99999:7:::' > /run/shadow
mount --bind /run/shadow /etc/shadow
{ echo 127.0.0.1 localhost; for i in $(seq $1); do echo 10.0.0.$i h$i; done; } > /run/hosts
mount --bind /run/hosts /etc/hosts

host() {
    ip netns exec $1 unshare --uts bash -euc '
        # before the next line, which shows PIDs as they are inside
        read -r pid rest < /proc/self/stat
        mount -t proc proc /proc
        mount -t tmpfs tmpfs /dev/shm
        hostname $1
        ssh-keygen -q -t ed25519 -N "" -f /run/$1.key
        /usr/sbin/sshd -D -e -h /run/$1.key -o PidFile=/run/$1.pid &
        timeout 10 sh -c "until [ -s /run/$1.pid ]; do sleep 0.01; done"
        echo $1 $pid
        wait' bash $1 || echo "$1 failed"
}

ip link add bridge type bridge
ip link set bridge up
for i in $(seq $1); do
    ip netns add h$i
    ip link add to-h$i master bridge type veth peer name e0 netns h$i
    ip link set to-h$i up
    ip -n h$i address add 10.0.0.$i/24 dev e0
    ip -n h$i link set e0 up
    ip -n h$i link set lo up
    host h$i &
done
read -r end || true
"""


class Hosts:
    """A cluster of `n` hosts h1..hn on this machine; a context manager.

    n: 2 to 8.
    mbit: how fast each host sends, in Mbit/s; None: as fast as this machine can. Receiving is not
        limited.
    """

    def __init__(self, n: int, mbit: float | None = None) -> None:
        if not 2 <= n <= 8:
            raise ValueError(f"a cluster has 2 to 8 hosts, not {n}")
        if os.geteuid() != 0:
            raise PermissionError("hosts need root: they are namespaces with their own network")
        if absent := missing():
            apt = f"apt-get install {' '.join(sorted(set(absent.values())))}"
            ours = "python scripts/bench/hosts.py --install"
            raise FileNotFoundError(f"hosts need {', '.join(absent)}: {apt}, or {ours}")
        self.names: list[str] = [f"h{i + 1}" for i in range(n)]
        # The cluster has a session of its own, so that a Ctrl-C at the terminal ends it only when
        # this process says so.
        self._cluster = subprocess.Popen(
            [*UNSHARE, "bash", "-c", CLUSTER, "bash", str(n)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self._pids = self._come_up()
            self.shape(mbit)
        except BaseException:
            self.close()
            raise

    def _come_up(self) -> dict[str, int]:
        """{host: a process in it}, once all of them can be reached."""
        pids, said = {}, ""
        for line in self._cluster.stdout:
            said += line
            name, _, pid = line.strip().partition(" ")
            if pid == "failed":
                break
            if name in self.names:
                pids[name] = int(pid)
            if len(pids) == len(self.names):
                return pids
        raise RuntimeError(f"the hosts did not come up:\n{said}")

    def shape(self, mbit: float | None) -> None:
        """Let every host send at most `mbit` Mbit/s from now on; None: without limit."""
        for change in shaping(mbit):
            for name in self.names:
                subprocess.run(self.enter(name, change), env=_environment(), check=True)

    def enter(self, host: str, command: list[str]) -> list[str]:
        """The command line that runs `command` inside `host`, in the current directory."""
        spaces = ["--pid", "--mount", "--net", "--uts", "--target", str(self._pids[host])]
        return ["nsenter", *spaces, "--", "env", "--chdir", os.getcwd(), *command]

    def command(
        self,
        launcher: str,
        program: list[str],
        environment: dict[str, str],
        ranks_per_host: int = 1,
    ) -> list[str]:
        """The command line that runs `python program...` with these variables.

        Run it in that same environment.

        launcher: "mpirun", "horovodrun --gloo" or "torchrun".
        """
        on = ",".join(f"{name}:{ranks_per_host}" for name in self.names)
        ranks = str(len(self.names) * ranks_per_host)
        python = [sys.executable, *program]
        if launcher == "torchrun":
            return ["bash", "-c", self._torchrun_everywhere(program, ranks_per_host)]
        if launcher == "horovodrun --gloo":
            # horovodrun's cache, a file in the home directory, would say for an hour that hosts of
            # these names can be reached.
            options = ["--gloo", "--disable-cache", "--network-interfaces", "e0"]
            horovodrun = [launch.find("horovodrun"), *options, "-np", ranks, "-H", on]
            return self.enter("h1", [*horovodrun, *python])
        if launcher == "mpirun":
            mca = {
                "btl": "tcp,self",
                "btl_tcp_if_include": "e0",
                "oob_tcp_if_include": "e0",
                # files there are named after PIDs, which are other processes in other clusters
                "orte_tmpdir_base": "/run",
                # without this, ranks that wait keep ranks of other hosts from working, because
                # they share the processors
                "mpi_yield_when_idle": "1",
            }
            settings = [part for name, value in mca.items() for part in ("--mca", name, value)]
            # By itself, mpirun passes on only its own variables to other hosts.
            variables = [
                part for name in environment if name.isidentifier() for part in ("-x", name)
            ]
            mpirun = [launch.find("mpirun"), *settings, *variables, "--bind-to", "none"]
            return self.enter("h1", [*mpirun, "-np", ranks, "-H", on, *python])
        known = "across hosts it is 'mpirun', 'horovodrun --gloo' or 'torchrun'"
        raise ValueError(f"unknown launcher {launcher!r}: {known}")

    def _torchrun_everywhere(self, program: list[str], ranks_per_host: int) -> str:
        """A script that starts torchrun on every host, as people do, and waits for all."""
        lines = []
        for number, name in enumerate(self.names):
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            torchrun += ["--nnodes", str(len(self.names)), "--node-rank", str(number)]
            torchrun += ["--nproc-per-node", str(ranks_per_host)]
            torchrun += ["--master-addr", "10.0.0.1", "--master-port", "29500", *program]
            lines.append(shlex.join(self.enter(name, torchrun)) + " & pids+=($!)")
        # Wait by PID: `wait -n` does not find a process that ended while it waited for another.
        return "\n".join([*lines, "code=0", WAIT_FOR_ALL, "exit $code"])

    def run(
        self,
        launcher: str,
        program: list[str],
        *,
        timeout: float | None,
        environment: dict[str, str] | None = None,
        stdout: int | IO | None = None,
        ranks_per_host: int = 1,
    ) -> subprocess.CompletedProcess:
        """Run `python program...` on all hosts, and leave none of its processes.

        timeout: seconds after which all ranks are killed and subprocess.TimeoutExpired is raised.
        environment: variables besides those of this process.
        stdout: where its output and its errors go, as for subprocess.run; the result holds what
            went to subprocess.PIPE.
        """
        environment = _environment(**environment or {})
        words = [str(part) for part in program]
        command = self.command(launcher, words, environment, ranks_per_host)
        before = self._processes()
        try:
            return subprocess.run(
                command,
                env=environment,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=None if stdout is None else subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        finally:
            while started := self._processes() - before:
                for pid in started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)

    def bytes_sent(self) -> dict[str, int]:
        """{host: the bytes that its e0 has sent since it came up}."""
        sent = {}
        for name, pid in self._pids.items():
            (counters,) = (
                line.split()
                for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()
                if "e0:" in line
            )
            sent[name] = int(counters[9])
        return sent

    def _processes(self) -> set[int]:
        """All processes of the cluster."""
        space, found = os.readlink(f"/proc/{self._pids['h1']}/ns/pid"), set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has just ended, or nobody may look at it
                if os.readlink(f"/proc/{pid}/ns/pid") == space:
                    found.add(int(pid))
        return found

    def close(self) -> None:
        """End the cluster with all that runs on it; wait until it is gone."""
        with self._cluster:  # closes the pipe and waits
            pass

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bytes_sent_here() -> int:
    """The bytes that the host in which this process runs has sent."""
    return int(Path("/sys/class/net/e0/statistics/tx_bytes").read_text())


def shaping(mbit: float | None) -> list[list[str]]:
    """The commands that let the host in which they run send at most `mbit` Mbit/s.

    None: without limit.
    """
    if mbit is not None and not mbit > 0:
        raise ValueError(f"a rate is a positive number of Mbit/s, or None for no limit, not {mbit}")
    # How much a host may send at once after a pause: a quarter of a millisecond's worth, but never
    # less than two packets. The more it is, the less the rate limits a short message. Packets that
    # the kernel has yet to cut up must fit in, or it cuts them on the processor.
    burst = max(4096, int((mbit or 10_000) * 1e6 / 8 / 4000))
    limited = ["tbf", "rate", f"{mbit}mbit", "burst", f"{burst}", "limit", "64mb"]
    queue = limited if mbit else ["noqueue"]
    return [
        ["ip", "link", "set", "e0", "gso_max_size", f"{min(65536, int(0.9 * burst))}"],
        ["tc", "qdisc", "replace", "dev", "e0", "root", *queue],
    ]


def missing() -> dict[str, str]:
    """{program that hosts need and this machine lacks: the Debian package it is in}."""
    path = _environment()["PATH"]
    return {name: deb for name, deb in PROGRAMS.items() if not shutil.which(name, path=path)}


def install() -> None:
    """Install what is missing with apt-get, as root.

    sshd does not begin to serve this machine, now or at the next boot.
    """
    if not (absent := missing()):
        return
    apt = ["apt-get", "install", "--yes", "--no-install-recommends", *sorted(set(absent.values()))]
    environment = _environment(DEBIAN_FRONTEND="noninteractive")
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")  # "starting services is forbidden"
        POLICY.chmod(0o755)
    try:
        if subprocess.run(apt, env=environment).returncode != 0:
            subprocess.run(["apt-get", "update"], env=environment, check=True)
            subprocess.run(apt, env=environment, check=True)
    finally:
        if ours:
            POLICY.unlink()
    if "sshd" in absent and shutil.which("systemctl"):
        subprocess.run(["systemctl", "disable", "ssh"], check=True)


def _environment(**more: str) -> dict[str, str]:
    """What launch.environment() gives, with the folders of root's programs in the PATH.

    su and sudo may leave these folders out.
    """
    environment = launch.environment(**more)
    return {**environment, "PATH": f"{environment['PATH']}:/usr/sbin:/sbin"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, launcher = parser.add_argument, "horovodrun --gloo"
    add("--hosts", type=int, default=2, help="2 to 8; default: 2")
    add("--mbit", type=float, help="what each host can send, in Mbit/s; default: no limit")
    add("--launcher", default=launcher, help=f"'mpirun', 'torchrun' or '{launcher}' (the default)")
    add("--ranks-per-host", type=int, default=1, help="default: 1")
    add("--timeout", type=float, help="seconds after which the job is killed; default: none")
    add("--shell", action="store_true", help="open a shell in h1 instead of running a program")
    add("--install", action="store_true", help="install with apt-get what hosts need")
    add("program", nargs="*", help="after --: a Python program; its ranks run on all hosts")
    arguments = parser.parse_args()
    if arguments.install:
        install()
        return 0
    if arguments.shell == bool(arguments.program):
        parser.error("either --shell or a program, please")
    try:
        with Hosts(arguments.hosts, arguments.mbit) as hosts:
            if arguments.shell:
                shell = hosts.enter("h1", [os.environ.get("SHELL", "bash")])
                return subprocess.call(shell, env=_environment())
            return hosts.run(
                arguments.launcher,
                arguments.program,
                timeout=arguments.timeout,
                ranks_per_host=arguments.ranks_per_host,
            ).returncode
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
