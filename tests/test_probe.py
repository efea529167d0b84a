"""The probe: exact with a stand-in for the clock, real on devices of the CPU, and over shaped links."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import lab
import numpy as np
import pytest
from conftest import mesh_on
from pages import ROOT

import lioncub_jax as lc
from examples import targets
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools import probe

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
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=clock))
    points = {op: list(probe._points(op, two)) for op in delayed}
    for op, (small, large) in points.items():
        assert (small[1], large[1]) == pytest.approx((DELAY, DELAY)), op
        assert large[0] == 16 * small[0]
    measured = planner.Measured(2, points, 8e9)
    at = planner.Cluster(2, planner.Link(1e15), measured=measured)
    assert planner.plan(1000, at, 0.005, tokens=256).answer() == ("local steps", None)


def test_a_step_is_timed_with_its_exchange_and_without(two, monkeypatch):
    monkeypatch.setattr(probe, "SIZES", (2**12, 2**16, 2**20))
    measured = probe.probe(two, targets.training)
    assert measured.num_workers == 2 and measured.seconds.keys() == probe.COLLECTIVES.keys()
    for op, points in measured.seconds.items():
        sizes = [size for size, _ in points]
        sent = {"all-gather": 1.0, "all-to-all": 0.5}.get(op, 1.0)
        assert sizes == [sent * size for size in probe.SIZES], op
        assert min(seconds for _, seconds in points) > 0
    assert measured.compute > 0 and measured.overlap <= 1
    text = probe.table(measured)
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "2 workers", *probe.COLLECTIVES, "packing", "a step",
    ]  # fmt: skip
    assert (
        planner.Measured(**json.loads(json.dumps(measured._asdict()))).compute == measured.compute
    )


@pytest.mark.parametrize(("step", "overlap"), [(0.3, 0.0), (0.25, 0.5), (0.2, 1.0), (0.5, -2.0)])
def test_the_planners_mean_takes_as_long_as_the_step_that_was_measured(
    two, monkeypatch, step, overlap
):
    """A tenth of a second of computing, and 0.2 s of an exchange by itself; its many arrays take longer."""
    points = {op: [[1e3, 0.001], [1e6, 0.2]] for op in probe.COLLECTIVES}
    times = iter([step, 0.1])
    monkeypatch.setattr(probe, "_seconds", lambda run: next(times))
    model = SimpleNamespace(params=np.ones(250_000))
    measured = probe._with_step(
        planner.Measured(2, points, 8e9), two, lambda _: (None, model, None)
    )
    assert (measured.compute, measured.overlap) == pytest.approx((0.1, overlap))
    at = planner.Cluster(2, planner.Link(1e9), measured=measured)
    mean = planner.step_time(planner.SCHEMES["adamw"], 250_000, at)
    assert mean.step(0.1, overlap=measured.overlap) == pytest.approx(step)


@pytest.mark.parametrize(
    ("workers", "error", "words"),
    [
        (lambda: "data", TypeError, "Workers"),
        (lambda: lc.Workers(mesh_on("data=1"), "data"), ValueError, "give two workers or more"),
        (
            lambda: lc.Workers(mesh_on("data=2 gpu=2"), "data", "gpu"),
            ValueError,
            "of one device each",
        ),
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
        sys.executable, "-m", "lioncub_jax", "probe", "--distributed", "--out", str(out),
        "--step", "targets:training",
    ]  # fmt: skip
    bits = {"100mbit": 1e8, "1gbit": 1e9}[rate]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/examples"}
    report = lab.run(lab.Network(2, rate=bits), command, write=lines.append, environment=path)
    assert report.exit_code == 0, "\n".join(lines)
    assert sum(line.startswith("0 | all-") for line in lines) == 4
    assert not any(line.startswith("1 | all-") for line in lines)
    measured = planner.Measured(**json.loads(out.read_text()))
    assert measured.num_workers == 2
    for op, points in measured.seconds.items():
        assert 8 * points[-1][0] / points[-1][1] < 1.1 * bits, op
    at = planner.Cluster(2, planner.Link(bits), measured=measured)
    wanted = {"100mbit": "local steps", "1gbit": "use"}[rate]
    assert planner.plan(124_000_000, at, 0.5, tokens=256).answer()[0] == wanted
    with pytest.raises(ValueError, match="num_workers=4, and 2 were measured"):
        dataclasses.replace(at, num_workers=4)
