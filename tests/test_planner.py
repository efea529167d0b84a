"""The step-time model against sums by hand, and the advice against the model."""

import dataclasses
import inspect
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import AXIS, absent

import lioncub_jax as lc
from lioncub_jax import planner, units
from lioncub_jax.cli import output
from lioncub_jax.planner import (
    Cluster,
    Link,
    evidence,
    pays,
    report,
    scheme_named,
)

SIZE = 2**20
NAMES = [scheme.name for scheme in planner.SCHEMES]
SHAPES = {
    "a": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((65,), jnp.float32),
}
SLOW = Cluster(8, Link(1e9, 50e-6))
FREE = dataclasses.replace(SLOW, memory_bandwidth=math.inf)  # packing takes no time


def step_of(name, cluster=SLOW, params=SIZE, compute=0.1):
    return planner.step_time(scheme_named(name), params, cluster, compute)


# --- The model


def filled(function):
    """A function of the library to which ``...`` can be given, and no learning rate and no axis."""
    signature = inspect.signature(function)
    known = {"learning_rate": 1, "workers": AXIS}

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


@pytest.mark.parametrize("name", NAMES)
def test_a_method_takes_the_time_of_what_the_code_of_its_legend_sends(name):
    scheme = scheme_named(name)
    for workers in (2, 7):
        cluster, tree = dataclasses.replace(FREE, workers=workers), (workers - 1).bit_length()
        traffic = lc.traffic.of(transform_of(scheme.code), SHAPES, absent(workers))
        waits = {"all-to-all": 1, "all-gather": tree, "all-reduce": 2 * tree}
        hops = sum(waits[one.op] for one in traffic.collectives)
        took = hops * 50e-6 + 8e-9 * traffic.sent_bytes
        share = scheme.in_float32  # of its steps, in a warm-up
        dense, found = (step_of(n, cluster, SHAPES) for n in ("float32 Lion", name))
        sent = (1 - share) * traffic.sent_bytes / scheme.every + share * dense.sent_bytes
        took = (1 - share) * took / scheme.every + share * dense.communication
        assert found.sent_bytes == pytest.approx(sent, rel=1e-12)
        assert found.communication == pytest.approx(took)
        assert found.step == pytest.approx(0.1 + found.communication)


def test_one_worker_only_computes():
    assert {step_of(name, Cluster(1, SLOW.link), SHAPES).step for name in NAMES} == {0.1}


def test_bfloat16_is_widened_on_cpu_only():
    cpu = dataclasses.replace(SLOW, on_cpu=True)
    narrow, wide = (step_of("bfloat16 Lion", at) for at in (SLOW, cpu))
    assert wide == step_of("float32 Lion")
    assert 2 * narrow.sent_bytes == wide.sent_bytes


def test_two_levels_share_the_link_of_a_worker_and_cut_what_is_packed():
    cluster = dataclasses.replace(FREE, group_size=4, inside=Link(900e9, 5e-6))
    found = step_of("1-bit vote", cluster)
    workers = lc.Workers(jax.sharding.AbstractMesh((8, 4), ("node", "gpu")), "node", "gpu")
    tx = lc.lion_cub(1.0, workers=workers)
    traffic = lc.traffic.of(tx, [jax.ShapeDtypeStruct((SIZE,), "float32")], workers)
    sent, inside = 4 * traffic.sent_bytes, traffic.group_bytes
    assert (found.sent_bytes, found.inside_bytes) == (sent, inside)
    across = 4 * 50e-6 + 8 * sent / 1e9
    assert found.communication == pytest.approx(across + 2 * 2 * 5e-6 + 8 * inside / 900e9)
    slices = step_of("float32 Lion", cluster)
    assert slices.sent_bytes == step_of("float32 Lion").sent_bytes
    assert slices.inside_bytes == 2 * 3 / 4 * 4 * SIZE


def test_packing_is_estimated_by_what_passes_through_memory():
    """Of what is sent, a float32 for each parameter and error feedback, of the steps that pack."""
    slow = dataclasses.replace(SLOW, memory_bandwidth=8e9)
    for name, each, share in [
        ("1-bit vote", 4, 1), ("owner, 3 bits", 4 + 2, 1), ("PowerSGD, rank 4", 8, 1),
        ("1-bit Adam", 8, 0.85), ("2 alone, 4 bits", 8, 1 / 2),
    ]:  # fmt: skip
        sent = lc.traffic.of(transform_of(scheme_named(name).code), SHAPES, absent(8)).sent_bytes
        packed = share * 2 * (sent + each * planner.parameters_in(SHAPES)) / 1e9
        assert step_of(name, slow, SHAPES).local == pytest.approx(packed), name
    for name in ("float32 Lion", "2 alone, float32"):
        assert step_of(name, slow).local == 0
    grouped = dataclasses.replace(slow, group_size=4, inside=Link(math.inf))
    device = step_of("1-bit vote", grouped)
    answers = device.inside_bytes - 3 / 4 * 4 * SIZE  # less the float32s that are averaged inside
    assert device.local == pytest.approx(2 * (device.sent_bytes / 4 + answers + SIZE) / 1e9)


# --- Where it pays


PAIRS = dataclasses.replace(SLOW, on_cpu=True)


@pytest.mark.parametrize(
    ("name", "cluster", "speedup"),
    [
        ("1-bit vote", SLOW, 1.0), ("owner, 3 bits", SLOW, 2.0),
        ("1-bit vote", PAIRS, 1.0),
    ],
)  # fmt: skip
def test_break_even_is_where_the_curves_cross(name, cluster, speedup):
    def both(rate):
        return [step_of(n, cluster.at(rate), 10**8, 0.001) for n in (name, "float32 Lion")]

    found = pays(*both(1e9), speedup)
    below, at = (theirs.step / ours.step for ours, theirs in map(both, (found / 2, found)))
    assert 0 < found < math.inf and below > speedup == pytest.approx(at)


def test_a_method_may_pay_always_or_never():
    at = dataclasses.replace(SLOW, local_seconds={"1-bit vote": 0.0})
    vote, dense = (step_of(name, at) for name in ("1-bit vote", "float32 Lion"))
    assert pays(vote, dense) == math.inf
    assert pays(dense, vote) == pays(dense, dense) == 0


@pytest.mark.parametrize(
    ("options", "longer"),
    [
        *(({"workers": n, "on_cpu": True}, x) for n, x in {2: 2, 3: 1, 4: 4 / 3, 8: 8 / 7}.items()),
        ({"workers": 8, "all_to_all_share": 0.2}, 5),
    ],
)  # fmt: skip
def test_an_all_to_all_takes_longer_where_pairs_take_turns_or_the_middle_is_narrow(options, longer):
    """Two workers take turns; of three each has one to send to, twice; of four one is left over."""
    bad = Cluster(link=Link(1e8, 0.0), **options)
    tree = [jax.ShapeDtypeStruct((SIZE,), "float32")]
    sent = lc.traffic.of(lc.lion_cub(1.0, workers=AXIS), tree, absent(bad.workers)).collectives
    up, down = (8e-8 * one.sent_bytes for one in sent)
    assert step_of("1-bit vote", bad).communication == pytest.approx(longer * up + down)
    good = Cluster(bad.workers, bad.link)
    assert step_of("float32 Lion", bad) == step_of("float32 Lion", good)


# --- Plans


def test_every_method_is_there_or_refused():
    fits = planner.plan(SHAPES, Cluster(127, SLOW.link), 0.1)
    assert (list(fits.rows), fits.refused) == (NAMES, {})
    unknown = planner.plan(SIZE, Cluster(16_384, SLOW.link), 0.1)
    assert set(unknown.refused) == {name for name in NAMES if "PowerSGD" in name}
    two_levels = planner.plan(SHAPES, Cluster(8, SLOW.link, 4, Link(900e9)), 0.1)
    assert set(two_levels.refused) == {n for n in NAMES if "PowerSGD" in n or "alone" in n}


def test_json_holds_the_plan_and_no_infinity():
    plan = planner.plan(10**8, Cluster(128, SLOW.link), 0.1)
    found = json.loads(output.as_text(report.as_json(plan)))
    steps = {row["scheme"]: row["estimate"]["step"] for row in found["schemes"]}
    assert steps == {name: row.estimate.step for name, row in plan.rows.items()}
    assert found["worthwhile"] == plan.worthwhile() and found["refused"] == plan.refused
    for rate, told in (math.inf, None), (1e-300, 1e-300):  # at which steps never end
        plan = planner.plan(10**8, SLOW.at(rate), 0.1)
        assert json.loads(output.as_text(report.as_json(plan)))["bandwidth"] == told


def test_named_machines_are_what_their_vendors_say():
    pod, node = planner.cluster_named("v5e-256"), planner.cluster_named("p4d-64")
    assert (
        pod.cluster.workers * pod.cluster.link.bandwidth == 51.2e12 * 8
    )  # "all-reduce bandwidth per Pod"
    each = pod.cluster.link.bandwidth * pod.cluster.all_to_all_share
    assert 128 * each * 128 / 255 == pytest.approx(1.6e12 * 8)  # "bisection bandwidth per Pod"
    # Two links in the middle, and two at a corner, of a mesh of 2x4.
    assert planner.cluster_named("v5e-8").cluster.all_to_all_share == 7 / 16
    assert planner.cluster_named("v5p-8").cluster.link.bandwidth == 4800e9 / 2  # 3 of 6 ports
    inside, memory = Link(300e9 * 8, 5e-6), 1555e9 * 8
    assert node.cluster == Cluster(8, Link(400e9, 20e-6), 8, inside, memory_bandwidth=memory)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(0), "bandwidth=0"),
        (lambda: Link(1e9, -1e-6), "latency="),
        (lambda: Cluster(0, SLOW.link), "workers=0"),
        (lambda: Cluster(2, SLOW.link, 0), "group_size=0"),
        (lambda: Cluster(2, SLOW.link, 4), "without inside"),
        (lambda: Cluster(2, SLOW.link, all_to_all_share=0), "share=0: give a number above 0, at most 1"),
        (lambda: Cluster(2, SLOW.link, memory_bandwidth=0), "memory_bandwidth=0"),
        (lambda: scheme_named("two bits"), "give one of 1-bit vote"),
        (lambda: step_of("1-bit vote", compute=-1), "compute=-1"),
        (lambda: planner.plan(0, SLOW, 0.1), "params=0"),
        (lambda: planner.plan(SIZE, SLOW, 0.0), "above zero"),
        (lambda: planner.plan(SIZE, SLOW, 0.1, data="new"), "data 'new': give one of alike, different"),
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
             "factor": [None, factor, None], "std": [None, 0.01, None], "seeds": 3}
            for name, rows in ({"lion": {("images", 8): 1.0, ("text", 8): 1.0}} | methods).items()
            for (task, workers), factor in rows.items()
        ]  # fmt: skip
        sizes = {"images": 50_000, "text": 60_000, "gpt": 10_000_000}
        tasks = {
            name: {"dataset": "some", "parameters": n, "steps": 800} for name, n in sizes.items()
        }
        found = {"tasks": tasks, "factors": factors}
        monkeypatch.setattr(evidence, "_packaged", lambda: found)

    return measured


def both(images, text=None, workers=8):
    return {("images", workers): images, ("text", workers): images if text is None else text}


def to_loss(rate=1e7, size=10**5, compute=1e-3, at=FREE, **how):
    plan = planner.plan(size, at.at(rate), compute, **how)
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
    known(
        vote=both(1.5, 1.25),
        owner_adamw={("images", 8): 1.0, ("text", 8): None},
        owner_3=both(0.77),
    )
    plan, said = to_loss()
    times = plan.times()
    vote, lion = (plan.rows[name].estimate.step for name in ("1-bit vote", "float32 Lion"))
    assert times["1-bit vote"] == 1.5 * vote / lion
    assert times["float32 Lion"] == 1.0 and times["bfloat16 Lion"] < 1
    assert list(times) == sorted(times, key=times.get) and "AdamW at the owner" not in times
    assert said.startswith(
        "At 10 Mbit/s use lion_cub(...) (1-bit vote): to float32 Lion's loss in 0.0"
    )
    assert "1.50 ± 0.01 times as many; sending less is worth it at any rate." in said
    assert "Within 5 % of that: owner, 3 bits." in said
    of = "images (some, 50,000 parameters, 8 workers) and text (some, 60,000 parameters, 8 workers)"
    assert f"Measured on {of}, data alike, 3 seeds; images is the worse of them and counts." in said
    assert "evidence ends" not in said


def test_a_method_whose_steps_are_too_many_is_not_advised_where_its_step_is_fast(known):
    known(vote=both(1.9), owner_3=both(1.0))
    even = to_loss(1e10, compute=0.1)[0].worthwhile()
    assert 0 < even < math.inf
    below, above = (to_loss(even * more, compute=0.1)[1] for more in (1 / 1.001, 1.001))
    assert not below.startswith("Do not use this: ") and above.startswith("Do not use this: ")
    assert all(f"is worth it below {units.rate_text(even)}" in said for said in (below, above))
    assert "nothing is to the loss 1.05 times as soon as bfloat16 Lion" in above
    assert "bfloat16 is taken to learn like float32." in above


def test_a_peer_that_is_first_is_named(known):
    known(vote=both(1.0), one_bit_adam=both(0.01))
    assert "use baselines.one_bit_adam(warmup=...) (1-bit Adam): to " in to_loss()[1]


def test_where_evidence_ends_is_said(known):
    known(owner_3=both(1.0))
    ends = "There evidence ends: "
    assert ends not in to_loss(size=600_000)[1]
    large = to_loss(size=600_001)[1]
    assert large.endswith(f"{ends}this model has 600,001 parameters.")
    assert f"{ends}this model has 4,999" in to_loss(size=4_999)[1]
    assert f"{ends}these are 17 workers." in to_loss(at=Cluster(17, SLOW.link))[1]


def test_what_was_never_measured_is_listed_and_not_ranked(known):
    known("different", lion={("text", 8): 1.0}, owner_3={("text", 8): 1.0})
    plan, said = to_loss(data="different")
    assert set(plan.times()) == {"owner, 3 bits", "bfloat16 Lion", "float32 Lion"}
    assert "use owner_lion(...)" in said and "8 workers), data different, 3 seeds." in said
    found = report.as_json(plan)
    assert found["data"] == "different"
    rows = {row["scheme"]: row for row in found["schemes"]}
    assert rows["1-bit vote"]["learned"] is None is rows["1-bit vote"]["time_to_loss"]
    assert rows["owner, 3 bits"]["learned"] == (1.0, 0.01, 3, "text", {"text": 8})


def test_all_methods_are_judged_by_the_tasks_nearest_in_size(known):
    """What was seen on a small model alone is not ranked for a large one beside what was seen on one."""
    lion = {**both(1.0), ("gpt", 4): 1.0}
    known(lion=lion, owner_3=both(0.1), vote={**both(2.0), ("gpt", 4): 0.5})
    near = [[task.name for task in planner.tasks_near(size)] for size in (60_000, 5_000_000)]
    assert near == [["images", "text"], ["gpt"]]
    large, said = to_loss(size=20_000_000)
    assert set(large.times()) == {"1-bit vote", "float32 Lion", "bfloat16 Lion"}
    assert (
        "use lion_cub(...)" in said and "Measured on gpt (some, 10,000,000 parameters, 4 " in said
    )
    small, _ = to_loss(size=60_000)
    assert (
        next(iter(small.times())) == "owner, 3 bits"
        and small.rows["1-bit vote"].learned.factor == 2
    )
