"""The probe: exact with a stand-in for the clock, real on devices of the CPU, and over shaped links."""

import dataclasses
import json
import sys

import jax
import lab
import numpy as np
import pytest
from conftest import mesh_on

import lioncub_jax as lc
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools import probe
from lioncub_jax.tools.cli import examples, output

DELAY = 0.025


@pytest.fixture
def two():
    mesh = mesh_on("data=2")
    return lc.Workers(mesh, "data")


class Clock:
    """Seconds that pass only where a collective runs: so many on each of two devices."""

    now = 0.0

    def __call__(self):
        return self.now

    def delayed(self, collective):
        def wait(x):
            self.now += DELAY / 2
            return np.asarray(x)

        def run(x, axis):
            return collective(jax.pure_callback(wait, jax.typeof(x), x), axis)

        return run


def test_a_delay_of_25_ms_is_measured_at_every_size_and_local_steps_are_advised(two, monkeypatch):
    """The kernels of containers often have no netem, so a stand-in for the clock."""
    clock = Clock()
    delayed = {op: (clock.delayed(run), *rest) for op, (run, *rest) in probe.COLLECTIVES.items()}
    monkeypatch.setattr(probe, "COLLECTIVES", delayed)
    monkeypatch.setattr(probe, "SIZES", (2**10, 2**14))
    seconds = probe._points  # the packing takes no time by this clock
    points = {op: list(seconds(op, two, clock)) for op in delayed}
    for op, (small, large) in points.items():
        assert (small[1], large[1]) == pytest.approx((DELAY, DELAY)), op
        assert large[0] == 16 * small[0]
    measured = planner.Measured(2, points, 8e9, compute=0.005)
    at = planner.Cluster(2, planner.Link(1e15, kind="exact"), measured=measured)
    words = planner.advice(planner.plan(1000, at, measured.compute, tokens=256))
    assert words.startswith("Take local steps: on the machines that were measured the exchange of")


def test_a_step_is_timed_with_its_exchange_and_without(two, monkeypatch):
    monkeypatch.setattr(probe, "SIZES", (2**12, 2**16, 2**20))
    measured = probe.probe(two, examples.training, nominal=1e12)
    assert measured.num_workers == 2 and measured.seconds.keys() == probe.COLLECTIVES.keys()
    for op, points in measured.seconds.items():
        sizes = [size for size, _ in points]
        sent = {"all-gather": 1.0, "all-to-all": 0.5}.get(op, 1.0)
        assert sizes == [sent * size for size in probe.SIZES], op
        assert min(seconds for _, seconds in points) > 0
    assert min(measured.compute, measured.step) > 0
    assert 0 <= measured.overlap <= 1 <= measured.slowdown
    text = probe.table(measured)
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "2 workers", *probe.COLLECTIVES, "packing", "a step",
    ]  # fmt: skip
    assert text.count("% of 1 Tbit/s") == 4
    again = planner.Measured(**json.loads(output.as_text(measured)))
    at = planner.Cluster(2, planner.Link(1e15, kind="exact"), measured=again)
    exchange = planner.step_time(planner.scheme_named("adamw"), 229_376, at)
    predicted = exchange.step(measured.compute, overlap=measured.overlap)
    assert predicted > 0.99 * measured.step  # or less, where a step took less than computing does


@pytest.mark.parametrize(
    ("step", "overlap", "slowdown"),
    [(0.3, 0.0, 1.0), (0.25, 0.5, 1.0), (0.2, 1.0, 1.0), (0.5, 0.0, 2.0)],
)
def test_the_planners_mean_takes_as_long_as_the_step_that_was_measured(step, overlap, slowdown):
    """A tenth of a second of computing, and 0.2 s of an exchange by itself, of arrays or as one."""
    points = {op: [[1e3, 0.001], [1e6, 0.2]] for op in probe.COLLECTIVES}
    measured = probe._compared(planner.Measured(2, points, 8e9), 0.1, 0.2, step)
    assert (measured.overlap, measured.slowdown) == pytest.approx((overlap, slowdown))
    at = planner.Cluster(2, planner.Link(1e9), measured=measured)
    mean, vote = (
        planner.step_time(planner.scheme_named(x), 250_000, at) for x in ("adamw", "vote")
    )
    assert mean.step(0.1, overlap=measured.overlap) == pytest.approx(step)
    alone = dataclasses.replace(at, measured=measured._replace(slowdown=1.0))
    assert planner.step_time(planner.scheme_named("vote"), 250_000, alone) == vote


def test_the_first_worker_of_a_process_is_a_mesh_of_its_own():
    workers = lc.Workers(mesh_on("data=4 fsdp=2"), "data")
    single = probe._alone(workers)
    assert dict(single.mesh.shape) == {"data": 1, "fsdp": 2}
    assert [*single.mesh.devices.flat] == [*workers.mesh.devices[0]]


@pytest.mark.parametrize(
    ("workers", "error", "words"),
    [
        (lambda: "data", TypeError, "Workers"),
        (lambda: lc.Workers(mesh_on("data=1"), "data"), ValueError, "1 workers"),
        (lambda: lc.Workers(mesh_on("data=2 gpu=2"), "data", "gpu"), ValueError, "without a group"),
    ],
)
def test_what_cannot_be_probed_is_refused(workers, error, words):
    with pytest.raises(error, match=words):
        probe.probe(workers())


@pytest.mark.parametrize("rate", ["100mbit", pytest.param("1gbit", marks=pytest.mark.long)])
def test_two_processes_measure_a_shaped_link_and_the_plan_takes_it(machine, tmp_path, rate):
    """Rates are below the link's, whatever else the machine does; what they are is in the docs."""
    out, lines = tmp_path / "probe.json", []
    command = [
        sys.executable, "-m", "lioncub_jax", "probe", "--distributed", "--bandwidth", rate,
        "--step", "lioncub_jax.tools.cli.examples:training", "--out", str(out),
    ]  # fmt: skip
    bits = {"100mbit": 1e8, "1gbit": 1e9}[rate]
    report = lab.run(lab.Network(2, rate=bits), command, write=lines.append)
    assert report.exit_code == 0, "\n".join(lines)
    assert sum(line.startswith("0 | all-") for line in lines) == 4
    assert not any(line.startswith("1 | all-") for line in lines)
    measured = planner.Measured(**json.loads(out.read_text()))
    assert measured.num_workers == 2 and measured.nominal == bits
    for op, points in measured.seconds.items():
        assert 8 * points[-1][0] / points[-1][1] < 1.1 * bits, op
    at = planner.Cluster(2, planner.Link(bits), measured=measured)
    plan = planner.plan(124_000_000, at, 0.5, tokens=256)
    begins = {"100mbit": "Take local steps", "1gbit": "Use owner_"}[rate]
    words = planner.advice(plan)
    assert words.startswith(begins) and " on the machines that were measured" in words
    with pytest.raises(ValueError, match="num_workers=4, and 2 were measured"):
        dataclasses.replace(at, num_workers=4)
