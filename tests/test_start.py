"""How a process finds its place: by environments of launchers, as they were printed there, and for real.

`make launchers` starts the launchers themselves.
"""

import re
import socket

import pytest
from conftest import run_python
from test_processes import spawn

import lioncub_jax as lc
from lioncub_jax.mesh import start
from lioncub_jax.mesh.start import Place, find_place


def words(text):
    return dict(word.split("=", 1) for word in text.split())


OMPI = """OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0
OMPI_COMM_WORLD_LOCAL_SIZE={}"""
URI = "OMPI_MCA_orte_hnp_uri=1820393472.0;tcp://192.0.2.2:49689"
# Daemons of Open MPI are tasks of srun, and so are the proxies of MPICH.
DAEMON = """SLURM_JOB_ID=3 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2"""
MPICH = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
HYDRA = f"{MPICH} {DAEMON.replace('SLURM_NTASKS=2', 'SLURM_NTASKS=4')}"
TORCHRUN = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4"
MASTER = "MASTER_ADDR=host0 MASTER_PORT=1234"
SLURM = """SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_STEP_ID={}
SLURM_STEP_NODELIST={} SLURM_STEP_NUM_TASKS={} SLURM_STEP_NUM_NODES=2"""
PMI2 = f"{SLURM.format(0, 'node[1-2]', 8)} PMI_RANK=5 PMI_SIZE=8"


@pytest.mark.parametrize(
    ("given", "environment", "wanted"),
    [
        # The program knows best; then a node of many GPUs is its own.
        (("h:1", 2, 1), f"{OMPI.format(2)} {MASTER}", ("h:1", 2, 1, [])),
        ((None, 2, 1), MASTER, ("host0:1234", 2, 1, [])),
        ((None, 4, None), f"{MASTER} JOB_COMPLETION_INDEX=3", ("host0:1234", 4, 3, [])),
        # Open MPI 4 and 5
        ((), f"{OMPI.format(2)} {URI}", (None, 4, 2, [0], "ompi")),
        ((), f"{OMPI.format(1)} {URI} {DAEMON}", (None, 4, 2, [], "ompi")),
        (("h:1",), f"{OMPI.format(2)} {URI}", ("h:1", 4, 2, [0])),
        ((), f"{OMPI.format(2)} {MASTER}", ("host0:1234", 4, 2, [0])),
        # MPICH, also inside of Slurm's jobs, and srun that numbers for it
        ((), f"{MPICH} {MASTER}", ("host0:1234", 4, 3, [1])),
        ((), HYDRA, ("node1:61488", 4, 3, [1])),
        ((), PMI2, ("node1:61552", 8, 5, [1])),
        # torchrun, which need not say how many share a node
        ((), f"{TORCHRUN} {MASTER}", ("host0:1234", 8, 5, [1])),
        ((), f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {MASTER}", ("host0:1234", 2, 1, [])),
        ((), f"RANK=1 WORLD_SIZE=2 {MASTER} JAX_COORDINATOR_ADDRESS=x:9", ("x:9", 2, 1, [])),
        # Slurm: lists of nodes, steps of one job side by side, one or many tasks on a node
        ((), SLURM.format(0, "node[001-012,20],other", 8), ("node001:61552", 8, 5, [1])),
        ((), SLURM.format(1, "a-1,b[2-3]", 2), ("a-1:61553", 8, 5, [])),
        ((), f"{SLURM.format(0, 'n', 8)} JAX_COORDINATOR_PORT=5000", ("n:5000", 8, 5, [1])),
        # Slurm, or whoever, shows each process its own GPU
        ((), f"{SLURM.format(0, 'n', 8)} CUDA_VISIBLE_DEVICES=1", ("n:61552", 8, 5, [])),
        ((), f"{MPICH} {MASTER} CUDA_VISIBLE_DEVICES=0,1", ("host0:1234", 4, 3, [1])),
        ((), f"{MPICH} {MASTER} JAX_LOCAL_DEVICE_IDS=3", ("host0:1234", 4, 3, None)),
        # JAX's own detection
        ((), "TPU_WORKER_ID=0", (None, None, None, None, None)),
    ],
)  # fmt: skip
def test_a_process_finds_its_place(given, environment, wanted):
    given = (*given, None, None, None)[:3]
    assert find_place(*given, words(environment)) == Place(
        *wanted, *["deactivate"][len(wanted) - 4 :]
    )


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ((None, 2, None), "", "num_processes=2, process_id=None: give both, or neither"),
        (("h:1", None, 1), "", "num_processes=None, process_id=1: give both"),
        (("h:1", 2, 2), "", "process_id=2: 2 processes count from 0 to 1"),
        ((None, 2, 1), "", "nobody says where process 0 is: give coordinator_address, num"),
        ((), OMPI.format(1), "Open MPI says that this is process 2 of 4, and not where process 0 is"),
        ((), MPICH, "MPICH says that this is process 3 of 4, and not where process 0 is: set"),
        ((), TORCHRUN, "torchrun says that this is process 5 of 8, and not where"),
        ((), f"{MPICH} MASTER_ADDR=host0", "MASTER_ADDR=host0, MASTER_PORT=None: set both, or neither"),
        ((), f"{MPICH} SLURM_NTASKS=8", "PMI_RANK=3, PMI_SIZE=4, SLURM_NTASKS=8 contradict each other"),
        ((), f"{MPICH} RANK=0 WORLD_SIZE=4", "PMI_RANK=3, PMI_SIZE=4, RANK=0, WORLD_SIZE=4 contradict"),
        ((), f"{OMPI.format(1)} {TORCHRUN}", "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=4, RANK=5"),
        ((), "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0", "job 7 of Slurm, and srun did not start it"),
        ((), "RAY_JOB_ID=01000000", "this worker of Ray has not joined the others: JaxTrainer"),
        ((), "RANK=x WORLD_SIZE=2", "RANK='x' is no whole number of at least 0"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_said(given, environment, said):
    given = (*given, None, None, None)[:3]
    with pytest.raises(ValueError, match=re.escape(said)):
        find_place(*given, words(environment))


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("process", "address", "said"),
    [
        (1, "no-such-name.invalid:1", "does not know the name 'no-such-name.invalid' of process 0 (N"),
        (0, "no-such-name.invalid:1", "does not know the name"),
        (1, "127.0.0.1:{free}", "127.0.0.1:{free} does not answer ([Errno 111] Connection refused): start"),
        (0, "127.0.0.1:{taken}", "port {taken} of this machine is not free ([Errno 98]"),
        (1, "localhost:{taken}", ""),
        (1, "[::1]:{free}", "[::1]:{free} does not answer"),
        (0, "localhost:{free}", ""),
        (None, "no-such-name.invalid:1", ""),
    ],
)  # fmt: skip
def test_an_unknown_name_a_closed_port_and_one_that_is_taken_are_three_sentences(
    process, address, said
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"free": free_port(), "taken": server.getsockname()[1]}
        found = start.obstacle(Place(address.format(**ports), 2, process))
    assert said.format(**ports) in found and bool(said) == bool(found)


def test_bad_addresses_and_waits_that_end():
    for address in ("host0", ":1", "host0:http"):
        with pytest.raises(ValueError, match="give host:port of process 0, such as node0:1234"):
            start.obstacle(Place(address, 2, 0))
    with pytest.raises(TimeoutError, match=r"process 1, after 0.2 s: .* does not answer"):
        lc.mesh.join(f"127.0.0.1:{free_port()}", 2, 1, wait=0.2)


JOINS = """
import sys
import lioncub_jax as lc, jax
lc.mesh.join(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), wait=float(sys.argv[4]))
lc.mesh.join()
gpus = jax.config.read("jax_cuda_visible_devices")
print("joined", jax.process_index(), jax.process_count(), gpus, flush=True)
try:
    lc.mesh.join(sys.argv[1], 2, 0)
except ValueError as error:
    print(error)
"""


def test_processes_meet_and_say_who_is_missing(tmp_path):
    program, address = tmp_path / "program.py", f"localhost:{free_port()}"
    program.write_text(JOINS)
    # The last comes first, and waits.
    both = [spawn(program, tmp_path / str(i), address, 2, i, 100) for i in (1, 0)]
    assert [process.wait(100) for process in both] == [0, 0]
    for process in "01":
        said = (tmp_path / process).read_text()
        assert f"joined {process} 2 all\n" in said and "this process has joined already" in said
    missing = spawn(program, tmp_path / "2", f"localhost:{free_port()}", 2, 0, 3)
    assert missing.wait(60) == 1
    assert re.search(
        r"^error: process 0, after 3 s: localhost:\d+ answers, but not all 2 processes came: start all",
        (tmp_path / "2").read_text(), re.M,
    )  # fmt: skip


def test_where_no_launcher_says_anything_it_says_what_to_give():
    done = run_python("-c", "import lioncub_jax as lc; lc.mesh.join()")
    said = r"ValueError: nobody says which processes there are: .* failed \(.+\): give coordinator_addr"
    assert re.search(said, done.stderr), done.stderr


def test_the_coordinator_listens_where_the_variable_says_and_nowhere_else():
    """What connects from outside could take a place: JAX listens on all interfaces by default."""
    port = free_port()
    text = f"""
import lioncub_jax as lc, socket
lc.mesh.join("127.0.0.1:{port}", 1, 0)
for at in ("127.0.0.1", "127.0.0.2"):
    print(at, socket.socket().connect_ex((at, {port})))
"""
    done = run_python("-c", text, JAX_COORDINATOR_BIND_ADDRESS=f"127.0.0.1:{port}")
    assert done.stdout == "127.0.0.1 0\n127.0.0.2 111\n", done.stderr
