"""A cluster of Slurm on this machine: two nodes, each with a daemon of its own, and two partitions.

It lives in namespaces of mounts and processes, and ends with them. Only root may make these.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PATH = {"PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin"])}  # of daemons
# Jobs of "urgent" preempt those of "spot", which have 60 seconds to save.
CONFIGURATION = """\
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port=16818 CPUs=2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port=16819 CPUs=2
PartitionName=spot Nodes=node[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=node[1-2] PriorityTier=10 PreemptMode=OFF
"""
DAEMONS = """\
set -e
cat /etc/hosts > {folder}/hosts
echo 127.0.0.1 node1 node2 >> {folder}/hosts
mount --bind {folder}/hosts /etc/hosts
munged --force --key-file={folder}/munge.key --socket={folder}/munge.socket --num-threads=2 \\
  --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munge.seed
slurmctld
slurmd -N node1
slurmd -N node2
exec sleep infinity
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster in an empty folder; the environment of those who use it."""
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    configuration = folder / "slurm.conf"
    names = {"folder": folder, "host": socket.gethostname()}
    configuration.write_text(CONFIGURATION.format(**names))
    environment = {"SLURM_CONF": str(configuration)} | PATH
    inside = ["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with (folder / "daemons.log").open("w") as log:
        daemons = subprocess.Popen(
            ["unshare", *inside, "bash", "-c", DAEMONS.format(**names)],
            env=os.environ | environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        while {*asked("sinfo", "-hNo", "%T", environment=environment).split()} != {"idle"}:
            if daemons.poll() is not None:
                raise RuntimeError((folder / "daemons.log").read_text())
            time.sleep(0.5)
        yield environment
    finally:
        os.killpg(daemons.pid, signal.SIGKILL)
        daemons.wait()


def asked(*words: str, environment: dict[str, str]) -> str:
    """The answer of a command of Slurm."""
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    return done.stdout


def missing() -> str:
    """What this machine lacks, in words, or nothing."""
    if os.geteuid():
        return "only root can make its daemons"
    programs = "slurmctld", "slurmd", "munged", "sbatch"
    absent = [x for x in programs if not shutil.which(x, path=PATH["PATH"])]
    return f"there is no {', '.join(absent)}" if absent else ""
