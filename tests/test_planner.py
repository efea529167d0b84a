"""The step-time model against sums by hand, and the advice against the model."""

import dataclasses
import inspect
import json
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import lioncub_jax as lc
from lioncub_jax import planner, units
from lioncub_jax.planner import (
    Cluster,
    Host,
    Late,
    Link,
    evidence,
    pays,
    report,
    scheme_named,
)

SIZE = 2**20
EVERY = (*planner.SCHEMES, *planner.OTHERS, *planner.PEERS)
NAMES, ALL = ([scheme.name for scheme in some] for some in (planner.SCHEMES, EVERY))
SHAPES = {
    "a": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((65,), jnp.float32),
}
SLOW = Cluster(8, Link(1e9, 50e-6))
FREE = Host(memory_bandwidth=math.inf)


def step_of(name, cluster=SLOW, params=SIZE, compute=0.1, host=None):
    return planner.step_time(scheme_named(name), params, cluster, compute, host)


# --- The model


def filled(function):
    """A function of the library to which ``...`` can be given, and no learning rate and no axis."""
    signature = inspect.signature(function)
    known = {"learning_rate": 1, "axis_name": "workers"}

    def call(*args, **rest):
        given = signature.bind_partial(*args, **rest).arguments
        given = {name: 1 if value is ... else value for name, value in given.items()}
        return function(**{n: x for n, x in (known | given).items() if n in signature.parameters})

    return call


def transform_of(code):
    """What a scheme's code makes, once all is filled in that it leaves out."""
    public = {name: getattr(lc, name) for name in lc.__all__}
    names = {name: filled(f) if inspect.isfunction(f) else f for name, f in public.items()}
    names["make_train_step"] = lambda loss, tx, **rest: tx
    names["optax"], names["baselines"] = (
        SimpleNamespace(**{n: filled(f) for n, f in vars(of).items() if inspect.isfunction(f)})
        for of in (optax, lc.baselines)
    )
    return eval(code, names | {"jnp": jnp})


@pytest.mark.parametrize("name", sorted({*ALL} - {"no communication"}))
def test_a_method_takes_the_time_of_what_the_code_of_its_legend_sends(name):
    scheme = scheme_named(name)
    for workers in (2, 7):
        cluster, tree = Cluster(workers, SLOW.link), (workers - 1).bit_length()
        traffic = lc.traffic.of(transform_of(scheme.code), SHAPES, workers)
        waits = {"all-to-all": 1, "all-gather": tree, "all-reduce": 2 * tree}
        hops = sum(waits[one.op] for one in traffic.collectives)
        took = hops * 50e-6 + 8e-9 * traffic.sent_bytes
        share = scheme.in_float32  # of its steps, in a warm-up
        dense = step_of("float32 Lion", cluster, SHAPES, host=FREE)
        found = step_of(name, cluster, SHAPES, host=FREE)
        sent = (1 - share) * traffic.sent_bytes / scheme.every + share * dense.sent_bytes
        took = (1 - share) * took / scheme.every + share * dense.communication
        assert found.sent_bytes == pytest.approx(sent, rel=1e-12)
        assert found.communication == pytest.approx(took)
        assert found.step == pytest.approx(0.1 + found.communication)


def test_the_legend_has_every_scheme():
    lines = [re.split("  +", line, maxsplit=1) for line in planner.legend().splitlines()]
    assert lines == [[scheme.name, scheme.code] for scheme in EVERY]
    assert planner.legend("step").splitlines() == planner.legend().splitlines()[: len(NAMES)]
    assert step_of("no communication") == ("no communication", 0, 0, 0, 0, 0, 0.1)


def test_one_worker_only_computes():
    assert {step_of(name, Cluster(1, SLOW.link)).step for name in NAMES} == {0.1}


def test_a_ring_has_as_many_hops_as_others():
    slower = step_of("float32 Lion", dataclasses.replace(SLOW, hops=planner.ring))
    assert slower.step - step_of("float32 Lion").step == pytest.approx(2 * (7 - 3) * 50e-6)


def test_bfloat16_is_widened_on_cpu_only():
    narrow, wide = (step_of("bfloat16 Lion", host=Host(widens_bfloat16=x)) for x in (False, True))
    assert wide[1:] == step_of("float32 Lion")[1:]
    assert 2 * narrow.sent_bytes == wide.sent_bytes


def test_two_levels_share_the_link_of_a_worker_and_cut_what_is_packed():
    cluster = Cluster(8, SLOW.link, 4, Link(900e9, 5e-6))
    found = step_of("1-bit vote", cluster, host=FREE)
    traffic = lc.traffic.predict([jax.ShapeDtypeStruct((SIZE,), "float32")], 8, group_size=4)
    sent, inside = 4 * traffic.sent_bytes, traffic.group_bytes
    assert (found.sent_bytes, found.inside_bytes) == (sent, inside)
    across = 4 * 50e-6 + 8 * sent / 1e9
    assert found.communication == pytest.approx(across + 2 * 2 * 5e-6 + 8 * inside / 900e9)
    slices = step_of("float32 Lion", cluster)
    assert slices.sent_bytes == step_of("float32 Lion").sent_bytes
    assert slices.inside_bytes == 2 * 3 / 4 * 4 * SIZE


def test_packing_is_estimated_by_what_passes_through_memory():
    """Of what is sent, a float32 for each parameter and error feedback, of the steps that pack."""
    host = Host(memory_bandwidth=8e9)
    for name, each, share in [
        ("1-bit vote", 4, 1), ("owner, 3 bits", 4 + 2, 1), ("PowerSGD, rank 4", 8, 1),
        ("0/1 Adam", 8, 1), ("1-bit Adam", 8, 0.85), ("DiLoCo 8, 1 bit", 8, 1 / 8),
    ]:  # fmt: skip
        sent = lc.traffic.of(transform_of(scheme_named(name).code), SHAPES, 8).sent_bytes
        packed = share * 2 * (sent + each * planner.parameters_in(SHAPES)) / 1e9
        assert step_of(name, host=host, params=SHAPES).local == pytest.approx(packed), name
    for name in ("float32 Lion", "DiLoCo 8, float32"):
        assert step_of(name, host=host).local == 0
    device = step_of("1-bit vote", Cluster(8, SLOW.link, 4, Link(math.inf)), host=host)
    answers = device.inside_bytes - 3 / 4 * 4 * SIZE  # less the float32s that are averaged inside
    assert device.local == pytest.approx(2 * (device.sent_bytes / 4 + answers + SIZE) / 1e9)


def test_software_costs_by_collective_and_measured_local_work_take_their_places():
    up, down = lc.traffic.predict([jax.ShapeDtypeStruct((SIZE,), "float32")], 8).collectives
    software = {"all-to-all": 1e-9, "all-gather": 3e-9, "all-reduce": 1.0}
    host = Host(local_seconds={"1-bit vote": -0.01}, seconds_per_byte=software)
    plain, found = step_of("1-bit vote", host=FREE), step_of("1-bit vote", host=host)
    more = 1e-9 * up.sent_bytes + 3e-9 * down.sent_bytes
    assert (found.local, found.step) == (-0.01, pytest.approx(plain.step - 0.01 + more))


def test_a_calibrated_host_gives_the_steps_that_were_measured():
    here = Cluster(4, Link(20e9, 1e-5), hops=planner.ring)
    measured = {"1-bit vote": 0.13, "float32 Lion": 0.12}
    host = planner.calibrated(
        measured, SIZE, here, 0.1, Host(seconds_per_byte={"all-reduce": 2e-9})
    )
    more = planner.calibrated({"gathered": 0.2}, SIZE, here, 0.1, host)
    for name, seconds in (measured | {"gathered": 0.2}).items():
        assert step_of(name, here, host=more).step == pytest.approx(seconds)


# --- Where it pays


PAIRS = dataclasses.replace(SLOW, one_way_pairs=True)


@pytest.mark.parametrize(
    ("name", "cluster", "speedup"),
    [
        ("1-bit vote", SLOW, 1.0), ("lanes", SLOW, 2.0),
        ("1-bit vote", PAIRS, 1.0), ("1-bit vote", dataclasses.replace(SLOW, late=Late(0.1, 0.5)), 1.0),
    ],
)  # fmt: skip
def test_break_even_is_where_the_curves_cross(name, cluster, speedup):
    found = pays(scheme_named(name), 10**8, cluster, speedup=speedup, compute=0.001)

    def gain(rate):
        at = cluster.at(rate)
        theirs, ours = (step_of(n, at, 10**8, 0.001).step for n in ("float32 Lion", name))
        return theirs / ours

    assert found.above == 0 < found.below < math.inf
    assert gain(found.below / 2) > speedup == pytest.approx(gain(found.below))


def test_a_method_may_pay_always_never_or_above_a_rate():
    vote, gathered, many = (
        scheme_named("1-bit vote"),
        scheme_named("gathered"),
        Cluster(100, SLOW.link),
    )
    assert pays(vote, SIZE, SLOW, Host(local_seconds={"1-bit vote": 0.0})) == (0, math.inf)
    assert pays(gathered, 10**8, many) == pays(planner.FLOAT32, SIZE, SLOW) == (0, 0)
    # Gathering sends more bytes from 65 workers on, in half of the hops: it is good on fast networks only.
    above, below = pays(gathered, 64_000, many, FREE)
    assert 0 < above < below == math.inf
    steps = [
        step_of(n, many.at(above), 64_000, 0.0, FREE).step for n in ("gathered", "float32 Lion")
    ]
    assert steps[0] == pytest.approx(steps[1])


@pytest.mark.parametrize(
    ("options", "longer"),
    [
        *(({"workers": n, "one_way_pairs": True}, x) for n, x in {2: 2, 3: 1, 4: 4 / 3, 8: 8 / 7}.items()),
        ({"workers": 8, "all_to_all_share": 0.2}, 5),
    ],
)  # fmt: skip
def test_an_all_to_all_takes_longer_where_pairs_take_turns_or_the_middle_is_narrow(options, longer):
    """Two workers take turns; of three each has one to send to, twice; of four one is left over."""
    bad = Cluster(link=Link(1e8, 0.0), **options)
    tree = [jax.ShapeDtypeStruct((SIZE,), "float32")]
    up, down = (8e-8 * one.sent_bytes for one in lc.traffic.predict(tree, bad.workers).collectives)
    assert step_of("1-bit vote", bad).communication == pytest.approx(longer * up + down)
    good = Cluster(bad.workers, bad.link)
    assert step_of("float32 Lion", bad) == step_of("float32 Lion", good)


# --- Workers that are late


def test_the_wait_is_the_mean_of_the_slowest():
    """Of three workers' late steps of two: 1 - P(nobody has any) and 1 - P(nobody has more than one)."""
    late = Late(0.3, 5.0)
    assert late.waiting(3, 2) == pytest.approx(5 / 2 * ((1 - 0.49**3) + (1 - 0.91**3)))
    assert late.waiting(1, 7) == pytest.approx(5 * 0.3)  # its own


def test_a_step_is_longer_by_the_wait():
    some = dataclasses.replace(SLOW, late=Late(0.01, 2.0))
    for name, waits in {
        "1-bit vote": 2 * (1 - 0.99**8),
        "2 alone, float32": (2 - 0.99**16 - 0.9999**8),
        "no communication": 0.02,  # its own, for it waits for nobody
    }.items():
        before, after = step_of(name), step_of(name, some)
        assert after.waiting == pytest.approx(waits) and before.waiting == 0, name
        assert after.step == pytest.approx(before.step + waits) and after[:-2] == before[:-2]
    calm, waiting = (planner.plan(10**8, at, 0.1, goal="step") for at in (SLOW, some))
    assert waiting.worthwhile.below < calm.worthwhile.below
    assert report.as_json(waiting)["late"] == {"share": 0.01, "seconds": 2.0}


# --- Plans


def test_every_method_is_there_or_refused():
    fits = planner.plan(SHAPES, Cluster(127, SLOW.link), 0.1)
    assert (list(fits.estimates), fits.refused) == (ALL, {})
    flat = planner.plan(SIZE, Cluster(16_384, SLOW.link), 0.1)
    counted = {"int8 counts", "integer(8) counts"}
    assert set(flat.refused) == counted | {name for name in ALL if "PowerSGD" in name}
    assert [*flat.estimates] == [name for name in ALL if name not in flat.refused]


def test_the_advice_flips_where_voting_stops_to_be_worth_it():
    compute, host = 1e-4, Host(memory_bandwidth=2e13)
    found = planner.plan(10**8, SLOW, compute, host, goal="step").worthwhile
    assert 0 < found.below < math.inf
    for rate, used in ((found.below / 1.001, True), (found.below * 1.001, False)):
        said = report.advice(planner.plan(10**8, SLOW.at(rate), compute, host, goal="step"))
        assert said.startswith("Do not use this") != used and report.pays_text(found) in said


def test_json_holds_the_plan_and_no_infinity():
    def json_of(size, cluster, host=None):
        plan = planner.plan(size, cluster, 0.1, host)
        found = json.loads(json.dumps(report.as_json(plan), allow_nan=False))
        return plan, found, {row["scheme"]: row for row in found["schemes"]}

    plan, found, rows = json_of(10**8, Cluster(128, SLOW.link))
    steps = {name: row["step"] for name, row in rows.items()}
    assert steps == {name: one.step for name, one in plan.estimates.items()}
    assert rows["1-bit vote"]["pays"] == {"above": None, "below": plan.pays["1-bit vote"].below}
    assert rows["no communication"]["pays"] == {"above": None, "below": None}
    assert rows["float32 Lion"]["pays"] is None and found["refused"] == plan.refused
    assert json_of(10**8, SLOW.at(math.inf))[1]["bandwidth"] is None
    json_of(10**8, SLOW.at(1e-300))  # steps that never end


def test_the_figure_shows_curves_and_measured_points(tmp_path):
    path, points = tmp_path / "plan.svg", {"2-bit vote": [(1e8, 0.4)]}
    planner.plot(path, SIZE, Cluster(500, SLOW.link), 0.1, rates=[1e8, 1e9], measured=points)
    text = path.read_text()
    assert "points: measured" in text and "<!-- 2-bit vote -->" in text
    assert "<!-- 1-bit vote -->" in text and "int8 counts" not in text  # 500 workers are too many


def test_named_machines_are_what_their_vendors_say():
    pod, node = planner.cluster_named("v5e-256"), planner.cluster_named("p4d-64")
    assert pod.devices * pod.cluster.link.bandwidth == 51.2e12 * 8  # "all-reduce bandwidth per Pod"
    each = pod.cluster.link.bandwidth * pod.cluster.all_to_all_share
    assert 128 * each * 128 / 255 == pytest.approx(1.6e12 * 8)  # "bisection bandwidth per Pod"
    # Two links in the middle, and two at a corner, of a mesh of 2x4.
    assert planner.cluster_named("v5e-8").cluster.all_to_all_share == 7 / 16
    assert planner.cluster_named("v5p-8").cluster.link.bandwidth == 4800e9 / 2  # 3 of 6 ports
    assert node.cluster == Cluster(8, Link(400e9, 20e-6), 8, Link(300e9 * 8, 5e-6))
    assert (node.devices, node.memory_bandwidth, node.platform) == (64, 1555e9 * 8, "gpu")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(0), "bandwidth=0"),
        (lambda: Link(1e9, -1e-6), "latency="),
        (lambda: Cluster(0, SLOW.link), "workers=0"),
        (lambda: Cluster(2, SLOW.link, 0), "group_size=0"),
        (lambda: Cluster(2, SLOW.link, 4), "without inside"),
        (lambda: Cluster(2, SLOW.link, all_to_all_share=0), "share=0: give a number above 0, at most 1"),
        (lambda: Late(1.5, 1.0), "share=1.5: give the part of steps, 0 to 1"),
        (lambda: Late(0.1, -1.0), "seconds=-1.0: give seconds, zero or more"),
        (lambda: Late(0.1, math.inf), "seconds=inf: give seconds"),
        (lambda: Late(0.1, 1.0).waiting(0), "workers=0"),
        (lambda: Late(0.1, 1.0).waiting(8, 0), "every=0"),
        (lambda: Host(memory_bandwidth=0), "memory_bandwidth=0"),
        (lambda: Host(seconds_per_byte={"psum": 1}), "psum"),
        (lambda: scheme_named("two bits"), "give one of 1-bit vote"),
        (lambda: step_of("1-bit vote", compute=-1), "compute=-1"),
        (lambda: planner.plan(0, SLOW, 0.1), "params=0"),
        (lambda: planner.plan(SIZE, SLOW, 0.0), "above zero"),
        (lambda: planner.plan(SIZE, SLOW, 0.1, goal="fun"), "goal='fun': give one of loss, step"),
        (lambda: planner.plan(SIZE, SLOW, 0.1, data="new"), "data='new': give one of alike, different"),
        (lambda: planner.plot("no/where.png", SIZE, SLOW, 0.1), "there is no folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- To the loss


@pytest.fixture
def known(monkeypatch):
    """Sets what is measured, by task: text and images are small, gpt is large; all with lion."""

    def measured(data="alike", **methods):
        factors = [
            {"task": task, "data": data, "workers": workers, "method": name.replace("_", "-"),
             "factor": [None, factor, None], "std": [None, 0.01, None], "seeds": 3, "reached": [0, 3, 0]}
            for name, rows in ({"lion": {("images", 8): 1.0, ("text", 8): 1.0}} | methods).items()
            for (task, workers), factor in rows.items()
        ]  # fmt: skip
        sizes = {"images": 50_000, "text": 60_000, "gpt": 10_000_000}
        tasks = {
            name: {"dataset": "some", "parameters": n, "steps": 800} for name, n in sizes.items()
        }
        found = {"tasks": tasks, "factors": factors}
        monkeypatch.setattr(evidence, "_packaged", lambda: found)
        monkeypatch.setattr(evidence, "_rows", evidence._rows.__wrapped__)

    return measured


def both(images, text=None, workers=8):
    return {("images", workers): images, ("text", workers): images if text is None else text}


def to_loss(rate=1e7, size=10**5, compute=1e-3, at=SLOW, **how):
    plan = planner.plan(size, at.at(rate), compute, FREE, **how)
    return plan, report.advice(plan)


def test_the_worse_of_two_tasks_counts_and_the_nearest_workers(known):
    known(vote={**both(1.2, 1.1), ("images", 32): 1.3, ("text", 32): None})
    near = planner.learned("vote", 15, 10**5)
    assert near[:4] == (1.2, 0.01, 3, "images") and near.workers == {"images": 8, "text": 8}
    far = planner.learned("vote", 17, 10**5)
    assert (far.factor, far.task, far.workers) == (None, "text", {"images": 32, "text": 32})
    assert [n for n in (3, 4, 16, 17, 64, 65) if planner.learned("vote", n, 10**5).far_from(n)] == [
        3,
        65,
    ]
    assert planner.learned("vote", 8, 10**5, "different") is None


def test_the_time_to_the_loss_is_that_of_a_step_times_its_steps(known):
    known(vote=both(1.5, 1.25), vote_2={("images", 8): 1.0, ("text", 8): None}, owner_1=both(1.45))
    plan, said = to_loss()
    times = plan.times()
    assert times["1-bit vote"] == 1.5 / plan.speedup("1-bit vote")
    assert times["float32 Lion"] == 1.0 and times["bfloat16 Lion"] < 1
    assert list(times) == sorted(times, key=times.get) and "2-bit vote" not in times
    assert said.startswith(
        "At 10 Mbit/s use lion_cub(...) (1-bit vote): to float32 Lion's loss in 0.0"
    )
    assert "1.50 ± 0.01 times as many; sending less is worth it below" in said
    assert "Within 5 % of that: owner, 1 bit" in said
    of = "images (some, 50,000 parameters, 8 workers) and text (some, 60,000 parameters, 8 workers)"
    assert f"Measured on {of}, data alike, 3 seeds; images is the worse of them and counts." in said
    assert "evidence ends" not in said


def test_a_method_whose_steps_are_too_many_is_not_advised_where_its_step_is_fast(known):
    known(vote=both(1.9), vote_4=both(1.0))
    even = to_loss(1e10, compute=0.1)[0].worthwhile.below
    assert 0 < even < math.inf
    below, above = (to_loss(even * more, compute=0.1)[1] for more in (1 / 1.001, 1.001))
    assert not below.startswith("Do not use this: ") and above.startswith("Do not use this: ")
    assert all(f"is worth it below {units.rate_text(even)}" in said for said in (below, above))
    assert "nothing is to the loss 1.05 times as soon as bfloat16 Lion" in above
    assert "A bfloat16 mean is taken to learn like a float32 one." in above


def test_a_peer_that_is_first_is_named_and_so_is_the_first_of_ours(known):
    known(vote=both(1.0), diloco_1=both(1.1))
    plan, said = to_loss()
    assert "use make_train_step(..., baselines.diloco(bits=1)" in said
    more = plan.times()["1-bit vote"] / plan.times()["DiLoCo 8, 1 bit"]
    assert (
        f"none of this library's own methods, of which 1-bit vote is the first, in {more:.2f}"
        in said
    )


def test_where_evidence_ends_is_said_and_what_the_step_alone_says(known):
    known(owner_3=both(1.0))
    ends = "There evidence ends: "
    assert ends not in to_loss(size=600_000)[1]
    large = to_loss(size=600_001)[1]
    assert (
        f"{ends}steps are those of smaller models, and this one has 600,001 parameters. " in large
    )
    assert large.endswith("By bits and step time alone: lion_cub(...).")
    assert f"{ends}steps are those of larger models, and this" in to_loss(size=4_999)[1]
    assert f"{ends}these are 17 workers. By bits" in to_loss(at=Cluster(17, SLOW.link))[1]
    fast = planner.plan(10**8, SLOW.at(1e13), 1.0)  # with memory that is not free
    assert report.advice(fast).endswith("step time alone: the advice is not to use this.")


def test_what_was_never_measured_is_listed_and_not_ranked(known):
    known("different", lion={("text", 8): 1.0}, owner_3={("text", 8): 1.0})
    plan, said = to_loss(data="different")
    assert set(plan.times()) == {"owner, 3 bits", "bfloat16 Lion", "float32 Lion"}
    assert "use owner_lion(...)" in said and "8 workers), data different, 3 seeds." in said
    found = report.as_json(plan)
    assert (found["goal"], found["data"]) == ("loss", "different")
    rows = {row["scheme"]: row for row in found["schemes"]}
    assert rows["1-bit vote"]["steps"] is None is rows["1-bit vote"]["time_to_loss"]
    steps = {"factor": 1.0, "std": 0.01, "seeds": 3, "task": "text", "workers": {"text": 8}}
    assert rows["owner, 3 bits"]["steps"] == steps


def test_all_methods_are_judged_by_the_tasks_nearest_in_size(known):
    """What was seen on a small model alone is not ranked for a large one beside what was seen on one."""
    lion = {**both(1.0), ("gpt", 4): 1.0}
    known(lion=lion, owner_3=both(0.1), vote={**both(2.0), ("gpt", 4): 0.5})
    near = [[task.name for task in planner.tasks_near(size)] for size in (60_000, 5_000_000)]
    assert near == [["images", "text"], ["gpt"]]
    large, said = to_loss(size=20_000_000)
    votes = {"1-bit vote", "gathered", "int8 counts", "lanes"}
    assert set(large.times()) == {*votes, "float32 Lion", "bfloat16 Lion"}
    assert (
        "use lion_cub(...)" in said and "Measured on gpt (some, 10,000,000 parameters, 4 " in said
    )
    small, _ = to_loss(size=60_000)
    assert next(iter(small.times())) == "owner, 3 bits" and small.learned["1-bit vote"].factor == 2
