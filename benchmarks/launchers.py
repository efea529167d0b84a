"""Two workers of `examples/train_gpt.py` by each launcher: started, killed, asked to stop, started again.

    make launchers                                    # what is installed; LAUNCHERS=1 as root installs all
    python benchmarks/launchers.py --only MPICH Ray

The launch files of `examples/launch` run as they are, with a smaller model. One worker is killed (SIGKILL)
after its first checkpoint, and all start again. Another run is asked to stop: by SIGTERM of the script, by
a job that preempts it (Slurm), or by the notice that a node will be taken (Ray). Losses are equal where
each run ends with those of an unbroken one, to the last digit. The table of docs/how_to/several_hosts.md
is written anew.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from launch import slurm
from launch.run import EVERY, FILES, MARK, OPTIONS, ROOT, Run, marked

ROWS = Path(__file__).parent / "results" / "launchers.jsonl"
DOCUMENT = ROOT / "docs" / "how_to" / "several_hosts.md"
VENV = ROOT / ".venv-launchers/bin"  # of what comes from the registry of Python packages


def free_port() -> str:
    with socket.create_server(("", 0)) as server:
        return str(server.getsockname()[1])


class Shells:
    """Plain shells: a script for each host. Other launchers are subclasses.

    Attributes:
      name: for people.
      file: of `examples/launch`.
      starts_again: by itself, when it was asked to stop and has saved.
    """

    name, file, starts_again = "plain shells", "shell.sh", False

    def missing(self) -> str:
        """What this machine lacks, in words, or nothing."""
        return ""

    def version(self) -> str:
        words = subprocess.run(["bash", "--version"], capture_output=True, text=True).stdout
        return re.findall(r"version (\S+?)\(", words)[0]

    @contextlib.contextmanager
    def ready(self, folder: Path) -> Iterator[dict[str, str]]:
        """Whatever has to be there before a start; the environment of starts."""
        yield {}

    def start(self, folder: Path, environment: dict[str, str]) -> Run:
        at = f"127.0.0.1:{free_port()}"
        hosts = [["bash", str(FILES / self.file), at, "2", str(i), *OPTIONS] for i in range(2)]
        return Run(hosts, folder, environment)

    def ask(self, run: Run, environment: dict[str, str]) -> None:
        """Asks a run to stop."""
        for process in run.processes:
            process.terminate()


class Mpi(Shells):
    """An mpirun."""

    file = "mpirun.sh"

    def __init__(self, name: str, program: str):
        self.name, self._program = name, program

    def missing(self) -> str:
        return "" if shutil.which(self._program) else f"there is no {self._program}"

    def version(self) -> str:
        told = subprocess.run([self._program, "--version"], capture_output=True, text=True).stdout
        return re.findall(r"\d+\.\d+\.\d+", told)[0]

    def start(self, folder: Path, environment: dict[str, str]) -> Run:
        allowed = [f"{x}_ALLOW_RUN_AS_ROOT{y}" for x in ("OMPI", "PRTE") for y in ("", "_CONFIRM")]
        own = {"HOSTS": "localhost,localhost", "PORT": free_port(), "MPIRUN": self._program}
        command = ["bash", str(FILES / self.file), *OPTIONS]
        return Run([command], folder, environment | own | dict.fromkeys(allowed, "1"))


class Slurm(Shells):
    """Slurm, with two nodes on this machine; a run is a job, asked to stop by one that preempts it."""

    name, file, starts_again = "Slurm", "slurm.sbatch", True

    def missing(self) -> str:
        return slurm.missing()

    def version(self) -> str:
        return slurm.asked("slurmctld", "-V", environment=slurm.PATH).split()[1]

    @contextlib.contextmanager
    def ready(self, folder: Path) -> Iterator[dict[str, str]]:
        with slurm.cluster(folder) as environment:
            yield environment

    def start(self, folder: Path, environment: dict[str, str]) -> Run:
        return Job(folder, environment)

    def ask(self, run: Run, environment: dict[str, str]) -> None:
        words = "--partition=urgent", "--wrap=true", "--output=/dev/null"
        Job.submitted(*words, environment=environment)


class Job(Run):
    """A job of Slurm."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        super().__init__([["true"]], folder, environment)
        output = f"--output={self.output}"
        words = output, str(FILES / Slurm.file), *OPTIONS
        self._slurm = environment
        self._id = self.submitted(*words, environment=self.environment)

    @staticmethod
    def submitted(*words: str, environment: dict[str, str]) -> str:
        """The number of a job that takes both nodes."""
        size = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=0 --parsable"
        return slurm.asked("sbatch", *size.split(), *words, environment=environment).strip()

    def ended(self) -> bool:
        about = slurm.asked("scontrol", "-o", "show", "job", self._id, environment=self._slurm)
        if "Reason=BeginTime" in about:  # two minutes until a job starts that was queued again
            now = f"JobId={self._id}", "StartTime=now"
            slurm.asked("scontrol", "update", *now, environment=self._slurm)
        # Others come and go, such as SIGNALING and REQUEUED, and a controller that is busy says nothing.
        return bool(re.search("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", about))

    def __exit__(self, *error: object) -> None:
        slurm.asked("scancel", self._id, environment=self._slurm)
        super().__exit__(*error)


NODES = """
import signal
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1).node_id for _ in range(3)]
print("cluster", cluster.address, *nodes, flush=True)
signal.pause()
"""


class Ray(Shells):
    """Ray Train, with three nodes on this machine, one to spare; one of them is to be taken."""

    name, file, starts_again = "Ray", "ray_train.py", True

    def missing(self) -> str:
        return "" if (VENV / "ray").exists() else "there is no .venv-launchers/bin/ray"

    def version(self) -> str:
        told = subprocess.run([VENV / "ray", "--version"], capture_output=True, text=True).stdout
        return told.split()[-1]

    @contextlib.contextmanager
    def ready(self, folder: Path) -> Iterator[dict[str, str]]:
        environment = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # by default 15: behind all else that this machine does
            MARK: str(folder),
        }
        with subprocess.Popen(
            [VENV / "python", "-c", NODES], env=os.environ | environment, text=True,
            stdout=subprocess.PIPE, start_new_session=True,
        ) as nodes:  # fmt: skip
            try:
                assert nodes.stdout
                said = next(line for line in nodes.stdout if line.startswith("cluster")).split()
                yield environment | {"RAY_ADDRESS": said[1], "NODES": "2", "GPUS": "0"}
            finally:
                nodes.terminate()

    def start(self, folder: Path, environment: dict[str, str]) -> Run:
        return OfRay(folder, environment)

    def ask(self, run: Run, environment: dict[str, str]) -> None:
        raylet = next(of["RAY_RAYLET_PID"] for of in OfRay.training(environment).values())
        node = re.search(r"--node_id=(\w+)", Path(f"/proc/{raylet}/cmdline").read_text())
        assert node
        words = ["--node-id", node[1], "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "spot", "--deadline-remaining-seconds", "60"]
        drain = [VENV / "ray", "drain-node", "--address", environment["RAY_ADDRESS"], *words]
        subprocess.run(drain, env=os.environ | environment, check=True)


class OfRay(Run):
    """A driver of Ray; workers are processes of its nodes, which it did not start."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        own = environment.copy()
        self._nodes = own.pop(MARK)
        command = [str(VENV / "python"), str(FILES / Ray.file), *OPTIONS]
        super().__init__([command], folder, own)

    def workers(self) -> dict[int, int]:
        return dict(enumerate(self.training({MARK: self._nodes})))

    @staticmethod
    def training(environment: dict[str, str]) -> dict[int, dict[str, str]]:
        """The environments of processes that train, by their numbers."""
        each = marked(environment[MARK])
        return {
            pid: of for pid, command, of in each if command[0].startswith("ray::RayTrainWorker")
        }


LAUNCHERS = [
    Shells(), Slurm(), Mpi("Open MPI 4", "mpirun.openmpi"), Mpi("MPICH", "mpirun.mpich"),
    Mpi("Open MPI 5", str(VENV / "mpirun")), Ray(),
]  # fmt: skip
NOT_RUN = [("Kubernetes, an indexed Job", "`kubernetes.yaml`"), ("TPU pods", "`tpu_pod.sh`")]


def main() -> None:
    parser = report.parser(__doc__, ROWS)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[x.name for x in LAUNCHERS])
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clusters end too
    chosen = [x for x in LAUNCHERS if not args.only or x.name in args.only]
    with tempfile.TemporaryDirectory() as folder:
        wanted = unbroken(Path(folder) / "unbroken")
        for launcher in chosen:
            if why := launcher.missing():
                print(f"{launcher.name}: not run here, because {why}", file=sys.stderr)
                continue
            row = tried(launcher, Path(folder) / launcher.name, wanted) | report.provenance()
            report.append(args.save, [row])
            print(json.dumps(row), flush=True)
    rows = report.read(args.save)
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))
    print(table(rows))
    names = {launcher.name for launcher in chosen if not launcher.missing()}
    failed = [
        row["launcher"] for row in newest(rows) if row["launcher"] in names and not whole(row)
    ]
    if failed:
        raise SystemExit(f"error: {', '.join(failed)}: see the table")


def unbroken(folder: Path) -> list[tuple[int, float]]:
    """The losses of a run that nobody harms."""
    with Shells().start(folder, {}) as run:
        run.wait(run.ended)
        return run.losses()


def tried(launcher: Shells, folder: Path, wanted: list[tuple[int, float]]) -> dict[str, Any]:
    """The row of a launcher."""
    version = launcher.version()
    (folder / "cluster").mkdir(parents=True)
    with launcher.ready(folder / "cluster") as environment:
        seconds, killed = harmed(launcher, folder / "killed", environment)
        saved, again, stopped = asked(launcher, folder / "stopped", environment)
    return {
        "launcher": launcher.name, "version": version, "file": launcher.file,
        "ends_within": round(seconds, 1), "equal": killed == stopped == wanted, "saved": saved,
        "again": again,
    }  # fmt: skip


def harmed(
    launcher: Shells, folder: Path, environment: dict[str, str]
) -> tuple[float, list[tuple[int, float]]]:
    """Seconds from the death of one worker to the end of the other, and the losses of the whole run."""
    with launcher.start(folder, environment) as run:
        run.wait(lambda: run.saved(EVERY))
        workers = run.workers()
        assert len(workers) == 2 and "2 processes on cpu" in run.said(), workers
        last, other = workers[1], workers[0]
        os.kill(last, signal.SIGKILL)
        seconds = run.wait(lambda: not run.lives(other))
        run.wait(run.ended)
        return seconds, run.losses()


def asked(
    launcher: Shells, folder: Path, environment: dict[str, str]
) -> tuple[bool, bool, list[tuple[int, float]]]:
    """Whether a run that is asked to stop saves, and is started again by itself; its losses in the end."""
    with launcher.start(folder, environment) as run:
        run.wait(lambda: run.saved(EVERY))
        launcher.ask(run, environment)
        run.wait(run.ended)
        step = run.stopped()
        saved = step is not None and (launcher.starts_again or run.saved(step))
    if not launcher.starts_again:
        with launcher.start(folder, environment) as run:
            run.wait(run.ended)
    return saved, launcher.starts_again, run.losses()


def newest(rows: report.Rows) -> report.Rows:
    """The newest row of each launcher."""
    last = {row["launcher"]: row for row in rows}
    return [last[x.name] for x in LAUNCHERS if x.name in last]


def whole(row: dict[str, Any]) -> bool:
    return row["equal"] and row["saved"]


HEAD = [
    "launcher", "file", "starts", "after `kill -9` of one the other ends within", "equal losses",
    "saves when asked to stop", "starts again after that", "date",
]  # fmt: skip


def table(rows: report.Rows) -> str:
    lines = [
        [
            f"{row['launcher']} ({row['version']})", f"`{row['file']}`", "yes", f"{row['ends_within']} s",
            *("yes" if row[x] else "no" for x in ("equal", "saved", "again")), row["date"],
        ]
        for row in newest(rows)
    ]  # fmt: skip
    tried = {row["launcher"] for row in rows}
    absent = [(x.name, f"`{x.file}`") for x in LAUNCHERS if x.name not in tried] + NOT_RUN
    lines += [[name, file, "not run", *[""] * 5] for name, file in absent]
    return report.markdown(HEAD, lines, columns="---")


def documented(document: str, rows: report.Rows) -> str:
    """The document with the table of these rows."""
    return report.written(document, {"launchers": table(rows)})


if __name__ == "__main__":
    main()
