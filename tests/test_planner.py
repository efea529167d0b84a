"""The step-time model against sums by hand, and the advice against the model."""

import ast
import dataclasses
import io
import itertools
import json
import math
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import lioncub_jax as lc
from lioncub_jax import planner, units
from lioncub_jax.planner import evidence
from lioncub_jax.planner import report as planner_report
from lioncub_jax.planner.model import Cluster, Host, Link, Pays, pays, scheme_named, step_time
from lioncub_jax.traffic import predicted as accounting

SIZE = 2**20
ROWS = SIZE // 128
NAMES = [scheme.name for scheme in planner.SCHEMES]
PEERS = [scheme.name for scheme in planner.PEERS]
OTHERS = [scheme.name for scheme in planner.OTHERS]
SHAPES = {
    "a": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((65,), jnp.float32),
}
VOTES = [scheme.name for scheme in planner.SCHEMES if scheme.packs]
SLOW = Cluster(8, Link(1e9, 50e-6))
FREE = Host(memory_bandwidth=math.inf)


def step_of(name, cluster=SLOW, params=SIZE, compute=0.1, host=None):
    return step_time(scheme_named(name), params, cluster, compute, host)


# For 8 workers and 2**20 parameters: 1024 rows at each owner, 4 words of each plane for a row, and 32 row
# words. Each worker sends 7 messages: [words up] and [words down], with a word for presence up, two down.
MINE = ROWS // 8
PLANE, OF_ROWS, STEPS = 4 * MINE, MINE // 32, MINE // 2
BY_HAND = {
    "1-bit vote": (PLANE + OF_ROWS + 1, PLANE + OF_ROWS + 2),
    "2-bit vote": (2 * PLANE + OF_ROWS + 1, PLANE + OF_ROWS + 2),
    "4-bit vote": (4 * PLANE + OF_ROWS + 1, PLANE + OF_ROWS + 2),
    "average": (PLANE + OF_ROWS + 1, 4 * (PLANE + OF_ROWS) + 2),
    "ternary": (2 * PLANE + 1, 2 * PLANE + 2),
    "owner, 1 bit": (PLANE + STEPS + 1, PLANE + OF_ROWS + 2),
    "owner, 1 bit rotated": (PLANE + STEPS + 1, PLANE + OF_ROWS + 2),
    "owner, 2 bits": (2 * PLANE + STEPS + 1, PLANE + OF_ROWS + 2),
    "owner, 3 bits": (3 * PLANE + STEPS + 1, PLANE + OF_ROWS + 2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_two_phases_cost_one_hop_and_a_tree(name):
    up, down = BY_HAND[name]
    up += -up % 32 if up >= 12_800 else 0
    padded = down + (-down % 128 if down >= 12_800 else 0)
    sent = 7 * 4 * (up + padded)
    found = step_of(name, host=FREE)
    assert found.sent_bytes == sent
    assert found.communication == pytest.approx((1 + 3) * 50e-6 + 8 * sent / 1e9)
    assert found.step == pytest.approx(0.1 + found.communication)


ALL_REDUCED = {
    "float32 Lion": 4 * SIZE,
    "bfloat16 Lion": 2 * SIZE,
    "int8 counts": SIZE + ROWS + 1,
    "integer(8) counts": SIZE + 1,  # its zeros say where there is no vote
    "lanes": 4 * math.ceil((SIZE + ROWS + 1) / 8),  # eight votes need fields of 4 bits
}


@pytest.mark.parametrize("name", ALL_REDUCED)
def test_an_all_reduce_costs_two_trees(name):
    sent = 2 * 7 / 8 * ALL_REDUCED[name]
    found = step_of(name, host=FREE)
    assert found.sent_bytes == sent
    assert found.communication == pytest.approx(2 * 3 * 50e-6 + 8 * sent / 1e9)


def test_gathered_votes_cost_a_tree_and_every_workers_message():
    found = step_of("gathered", host=FREE)
    words = 4 * ROWS + ROWS // 32 + 8  # a message about each chunk
    assert found.sent_bytes == 7 * 4 * (words + -words % 128)
    assert found.communication == pytest.approx(3 * 50e-6 + 8 * found.sent_bytes / 1e9)


def test_no_communication_takes_what_computing_takes():
    assert step_of("no communication") == ("no communication", 0, 0, 0, 0, 0, 0.1)


def test_a_ring_has_as_many_hops_as_others_and_a_tree_their_logarithm():
    assert [planner.ring(n) for n in (1, 2, 8, 9)] == [0, 1, 7, 8]
    assert [planner.tree(n) for n in (1, 2, 8, 9)] == [0, 1, 3, 4]
    slower = step_of("float32 Lion", Cluster(8, SLOW.link, hops=planner.ring))
    assert slower.step - step_of("float32 Lion").step == pytest.approx(2 * (7 - 3) * 50e-6)


@pytest.mark.parametrize("name", VOTES)
@pytest.mark.parametrize("workers", [2, 7, 64])
def test_bytes_are_those_of_the_accounting(name, workers):
    tree = {"a": jnp.ones((33, 130)), "b": jnp.ones(65)}
    scheme = scheme_named(name)
    found = step_time(scheme, tree, Cluster(workers, SLOW.link), 0.1)
    assert found.sent_bytes == accounting.predict(tree, workers, **scheme.parts).sent_bytes


def test_bfloat16_is_widened_on_cpu_only():
    narrow, wide = (
        step_of("bfloat16 Lion", host=Host(widens_bfloat16=widens)) for widens in (False, True)
    )
    dense = step_of("float32 Lion")
    assert wide[1:] == dense[1:]
    assert 2 * narrow.sent_bytes == dense.sent_bytes


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_only_computes(name):
    assert step_of(name, Cluster(1, SLOW.link)).step == 0.1


def test_two_levels_share_the_link_of_a_worker_and_cut_what_is_packed():
    inside = Link(900e9, 5e-6)
    found = step_of("1-bit vote", Cluster(8, SLOW.link, 4, inside), host=FREE)
    traffic = accounting.predict({"w": jnp.ones(SIZE)}, 8, group_size=4)
    assert found.sent_bytes == 4 * traffic.sent_bytes
    assert found.inside_bytes == traffic.group_bytes
    across = 4 * 50e-6 + 8 * 4 * traffic.sent_bytes / 1e9
    assert found.communication == pytest.approx(
        across + 2 * 2 * 5e-6 + 8 * traffic.group_bytes / 900e9
    )


def test_float32_in_two_levels_goes_through_slices():
    cluster = Cluster(8, SLOW.link, 4, Link(900e9, 5e-6))
    found = step_of("float32 Lion", cluster)
    assert found.sent_bytes == step_of("float32 Lion").sent_bytes
    assert found.inside_bytes == 2 * 3 / 4 * 4 * SIZE


def test_packing_is_estimated_by_what_passes_through_memory():
    host = Host(memory_bandwidth=8e9)
    vote, owner = (step_of(name, host=host) for name in ("1-bit vote", "owner, 3 bits"))
    assert vote.local == pytest.approx(2 * (vote.sent_bytes + 4 * SIZE) / 1e9)
    assert owner.local == pytest.approx(2 * (owner.sent_bytes + (4 + 2) * SIZE) / 1e9)
    assert step_of("float32 Lion", host=host).local == 0
    inside = Link(math.inf)
    device = step_of("1-bit vote", Cluster(8, SLOW.link, 4, inside), host=host)
    answers = device.inside_bytes - 3 / 4 * 4 * SIZE  # less the float32s that are averaged inside
    unpacked = device.sent_bytes / 4 + answers + 4 * SIZE / 4
    assert device.local == pytest.approx(2 * unpacked / 1e9)


def test_software_costs_by_collective_and_measured_local_work_take_their_places():
    parts = scheme_named("1-bit vote").sends({}, {"w": jnp.ones(SIZE)}, SLOW, FREE)
    assert [one.op for one in parts] == ["all-to-all", "all-gather"]
    plain = step_of("1-bit vote", host=FREE)
    host = Host(
        local_seconds={"1-bit vote": -0.01},
        seconds_per_byte={"all-to-all": 1e-9, "all-gather": 3e-9, "all-reduce": 1.0},
    )
    found = step_of("1-bit vote", host=host)
    software = parts[0].sent_bytes * 1e-9 + parts[1].sent_bytes * 3e-9
    assert found.local == -0.01
    assert found.step == pytest.approx(plain.step - 0.01 + software)


def test_a_calibrated_host_gives_the_steps_that_were_measured():
    here = Cluster(4, Link(20e9, 1e-5), hops=planner.ring)
    host = Host(seconds_per_byte={"all-reduce": 2e-9})
    measured = {"1-bit vote": 0.13, "float32 Lion": 0.12}
    host = planner.calibrated(measured, SIZE, here, 0.1, host)
    for name, seconds in measured.items():
        assert step_of(name, here, host=host).step == pytest.approx(seconds)
        slow = step_of(name, here.at(1e8), host=host)
        assert slow.step - seconds == pytest.approx(8 * slow.sent_bytes * (1 / 1e8 - 1 / 20e9))
    assert host.local_seconds["float32 Lion"] != 0
    more = planner.calibrated({"gathered": 0.2}, SIZE, here, 0.1, host)
    assert dict(more.local_seconds, gathered=None) == dict(host.local_seconds, gathered=None)


@pytest.mark.parametrize("name", VOTES)
@pytest.mark.parametrize("speedup", [1.0, 1.05, 2.0])
def test_break_even_is_where_the_curves_cross(name, speedup):
    found = pays(scheme_named(name), 10**8, SLOW, speedup=speedup, compute=0.001)
    assert found.above == 0 < found.below < math.inf

    def gain(rate):
        ours, theirs = (
            step_of(n, SLOW.at(rate), 10**8, 0.001).step for n in (name, "float32 Lion")
        )
        return theirs / ours

    assert gain(found.below / 1.01) > speedup > gain(found.below * 1.01)
    assert gain(found.below) == pytest.approx(speedup)


def test_break_even_does_not_depend_on_computing():
    vote = scheme_named("1-bit vote")
    fast, slow = (pays(vote, 10**8, SLOW, compute=c) for c in (0.01, 10.0))
    assert fast.below == pytest.approx(slow.below)


def test_a_method_may_pay_always_never_or_above_a_rate():
    free = {"1-bit vote": 0.0}
    assert pays(scheme_named("1-bit vote"), SIZE, SLOW, Host(local_seconds=free)) == (0, math.inf)
    many = Cluster(100, SLOW.link)
    assert pays(scheme_named("gathered"), 10**8, many) == (0, 0)
    assert pays(planner.FLOAT32, SIZE, SLOW) == (0, 0)
    # Gathering sends more bytes from 65 workers on, in half of the hops: it is good on fast networks only.
    above, below = pays(scheme_named("gathered"), 64_000, many, FREE)
    assert 0 < above < below == math.inf
    ours, theirs = (
        step_of(n, many.at(above), 64_000, 0.0, FREE).step for n in ("gathered", "float32 Lion")
    )
    assert ours == pytest.approx(theirs)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    size=st.integers(1, 10**9),
    workers=st.integers(1, 127),
    rates=st.tuples(st.floats(1e5, 1e12), st.floats(1e5, 1e12)),
    group=st.integers(1, 4),
)
def test_steps_are_never_longer_on_a_faster_or_nearer_network(name, size, workers, rates, group):
    if group > 1 and name == "integer(8) counts":
        return
    slow, fast = sorted(rates)
    inside = Link(100e9) if group > 1 else None
    at = Cluster(workers, Link(slow, 1e-3), group, inside)
    far = step_of(name, at, size)
    assert step_of(name, at.at(fast), size).step <= far.step
    near = Cluster(workers, Link(slow, 1e-5), group, inside)
    assert step_of(name, near, size).step <= far.step
    assert far.step >= 0.1
    assert step_of(name, at, 2 * size).sent_bytes >= far.sent_bytes


def test_thousands_of_workers_are_planned_at_once():
    planner_report.plan(SIZE, SLOW, 0.1)
    start = time.perf_counter()
    found = planner_report.plan(7 * 10**9, Cluster(16_384, Link(100e9)), 1.0)
    assert time.perf_counter() - start < 1
    of_matrices = {name for name in [*OTHERS, *PEERS] if "PowerSGD" in name}
    assert set(found.refused) == {"int8 counts", "integer(8) counts"} | of_matrices
    assert found.speedup("1-bit vote") > 1


def test_what_cannot_count_so_many_is_refused_with_its_reason():
    fits = planner_report.plan(SHAPES, Cluster(127, SLOW.link), 0.1)
    assert fits.refused == {}
    found = planner_report.plan(SHAPES, Cluster(128, SLOW.link), 0.1)
    assert set(found.refused) == {"int8 counts", "integer(8) counts"}
    assert "counts to 127" in found.refused["int8 counts"]
    assert "at most 127 workers" in found.refused["integer(8) counts"]
    assert set(found.estimates) | set(found.refused) == {*NAMES, *OTHERS, *PEERS}
    grouped = planner_report.plan(SHAPES, Cluster(8, SLOW.link, 2, Link(1e12)), 0.1)
    assert "one scale for a whole leaf" in grouped.refused["integer(8) counts"]
    assert "there are no two levels with PowerSGD" in grouped.refused["PowerSGD, rank 4"]
    assert "there are no two levels with local steps" in grouped.refused["DiLoCo 8, 1 bit"]
    flat = planner_report.plan(SIZE, SLOW, 0.1)
    assert "give a model's shapes (--model FILE.py:NAME)" in flat.refused["PowerSGD, rank 4"]


@pytest.mark.parametrize("compute", [1e-4, 0.01, 1.0])
@pytest.mark.parametrize("memory", [1e11, 8e11, 2e13])
def test_the_advice_flips_where_voting_stops_to_be_worth_it(compute, memory):
    host = Host(memory_bandwidth=memory)
    found = planner_report.plan(10**8, SLOW, compute, host, goal="step").worthwhile
    assert 0 < found.below < math.inf
    for rate, used in ((found.below / 1.001, True), (found.below * 1.001, False)):
        plan = planner_report.plan(10**8, SLOW.at(rate), compute, host, goal="step")
        assert planner_report.advice(plan).startswith("Do not use this") != used
        assert planner_report.pays_text(found) in planner_report.advice(plan)


def by_step(params, cluster, compute):
    return planner_report.advice(planner_report.plan(params, cluster, compute, goal="step"))


def test_advice_names_the_closest_of_those_that_are_about_as_fast():
    slow = by_step(10**8, SLOW.at(1e8), 0.144)
    assert slow.startswith("At 100 Mbit/s use lion_cub(...): ")
    hidden = by_step(10**8, SLOW.at(1e9), 10.0)
    assert hidden.startswith("At 1 Gbit/s use owner_lion(...): ")
    assert "hides behind the backward pass nothing is gained" in hidden
    assert "hides" not in slow
    alone = by_step(10**8, Cluster(1, SLOW.link), 0.144)
    assert (
        alone == "Do not use this: one worker has no others to exchange votes with; use optax.lion."
    )
    fast = by_step(10**8, SLOW.at(1e13), 1.0)
    assert "the float32 all-reduce takes 0.1% of a step" in fast
    half = by_step(10**8, SLOW.at(4e11), 0.001)
    assert "all-reduce bfloat16 instead of float32" in half


def test_json_holds_the_plan_and_no_infinity():
    plan = planner_report.plan(10**8, Cluster(128, SLOW.link), 0.1)
    assert plan.pays["1-bit vote"].below < math.inf
    found = json.loads(json.dumps(planner_report.as_json(plan), allow_nan=False))
    assert {row["scheme"]: row["step"] for row in found["schemes"]} == {
        name: one.step for name, one in plan.estimates.items()
    }
    by_name = {row["scheme"]: row for row in found["schemes"]}
    assert by_name["1-bit vote"]["pays"] == {"above": None, "below": plan.pays["1-bit vote"].below}
    assert by_name["no communication"]["pays"] == {"above": None, "below": None}
    assert by_name["float32 Lion"]["pays"] is None
    assert found["refused"] == plan.refused
    for rate in (math.inf, 1e-300):  # a link without limit, and steps that never end
        endless = planner_report.plan(10**8, SLOW.at(rate), 0.1)
        plain = json.loads(json.dumps(planner_report.as_json(endless), allow_nan=False))
        assert plain["bandwidth"] == (None if rate == math.inf else rate)
    many = planner_report.as_json(planner_report.plan(64_000, Cluster(100, SLOW.link), 0.1, FREE))
    (gathered,) = (row["pays"] for row in many["schemes"] if row["scheme"] == "gathered")
    assert gathered["above"] > 0 and gathered["below"] is None


TABLES = {
    "a usual one": (10**8, Cluster(8, Link(1e9))),
    "two levels, some schemes refused": (SIZE, Cluster(128, SLOW.link, 2, Link(1e12))),
    "large numbers": (7 * 10**10, Cluster(16_384, Link(123e6), 8, Link(900e9))),
    "small numbers": (64_000, Cluster(100, Link(987e9))),
    "one worker": (SIZE, Cluster(1, SLOW.link)),
}


def in_steps(plan, name):
    """What the table says of how a method learns."""
    if name not in plan.learned:
        return []
    factor = plan.learned[name].factor
    return ["not reached"] if factor is None else [f" {factor:.2f}", f"{plan.times()[name]:.3g}"]


@pytest.mark.parametrize("goal", planner.GOALS)
@pytest.mark.parametrize("case", TABLES)
def test_the_table_shows_every_scheme_and_number_at_any_width(case, goal):
    size, cluster = TABLES[case]
    host = FREE if case == "small numbers" else None
    plan = planner_report.plan(size, cluster, 0.1, host, goal=goal)
    names = [*NAMES, *OTHERS, *PEERS] if goal == "loss" else NAMES
    for width in (80, 100, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(planner_report.table(plan))
        text = console.export_text()
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert max(map(len, text.splitlines())) <= width
        rows = {name: re.search(rf"^ *{re.escape(name)} .*$", text, re.M)[0] for name in names}
        for name, found in plan.estimates.items():
            times = (found.communication, found.local, found.step)
            for shown in (
                units.bytes_text(found.sent_bytes),
                *map(units.seconds_text, times),
                *([f" {plan.speedup(name):.2f}"] if goal == "step" else in_steps(plan, name)),
            ):
                assert shown in rows[name], (width, name)
        assert all("refused" in rows[name] for name in plan.refused)
        for reason in plan.refused.values():
            assert reason in " ".join(text.split())
        assert ("inside" in text) == (cluster.group_size > 1)
        assert f"at {units.rate_text(cluster.link.bandwidth)}" in text


def test_the_legend_names_what_is_there_for_every_scheme():
    lines = dict(re.split("  +", line, maxsplit=1) for line in planner.legend().splitlines())
    everyone = (*planner.SCHEMES, *planner.OTHERS, *planner.PEERS)
    assert lines == {scheme.name: scheme.code for scheme in everyone}
    assert list(lines)[: len(NAMES)] == NAMES
    assert planner.legend("step").splitlines() == planner.legend().splitlines()[: len(NAMES)]
    for code in lines.values():
        if code.startswith("("):
            continue  # of a bound, not a method
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute | ast.Name):
                name = ast.unparse(node)
                where = {"optax": optax, "jnp": jnp}
                eval(name, where | {top: getattr(lc, top) for top in lc.__all__})


def test_ranges_in_words():
    say = planner_report.pays_text
    assert say(Pays(2e9, math.inf)) == "above 2 Gbit/s"
    assert say(Pays(1e6, 2e9)) == "from 1 Mbit/s to 2 Gbit/s"


def test_the_figure_shows_curves_and_measured_points(tmp_path):
    path = tmp_path / "plan.png"
    points = {"1-bit vote": [(1e8, 0.3), (1e9, 0.2)], "2-bit vote": [(1e8, 0.4)]}
    planner_report.plot(path, SIZE, SLOW, 0.1, rates=[1e8, 1e9, 1e10], measured=points)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000
    vector = tmp_path / "plan.svg"
    planner_report.plot(vector, SIZE, Cluster(500, SLOW.link), 0.1, rates=[1e8, 1e9])
    assert "int8 counts" not in vector.read_text()  # 500 workers are too many for it


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(0), "bandwidth=0"),
        (lambda: Link(math.nan), "bandwidth=nan"),
        (lambda: Link(1e9, -1e-6), "latency="),
        (lambda: Cluster(0, SLOW.link), "workers=0"),
        (lambda: Cluster(2.0, SLOW.link), "workers=2.0"),
        (lambda: Cluster(2, SLOW.link, 0), "group_size=0"),
        (lambda: Cluster(2, SLOW.link, 4), "without inside"),
        (
            lambda: Cluster(2, SLOW.link, all_to_all_share=0),
            "share=0: give a number above 0, at most 1",
        ),
        (lambda: Cluster(2, SLOW.link, all_to_all_share=1.5), "all_to_all_share=1.5: give"),
        (
            lambda: planner.cluster_named("h100"),
            "cluster 'h100': give one of v5e-8, .*, 8x4090-1g$",
        ),
        (lambda: planner.Late(1.5, 1.0), "share=1.5: give the part of steps, 0 to 1"),
        (lambda: planner.Late(-0.1, 1.0), "share=-0.1: give the part"),
        (lambda: planner.Late(math.nan, 1.0), "share=nan: give the part"),
        (lambda: planner.Late(0.1, -1.0), "seconds=-1.0: give seconds, zero or more"),
        (lambda: planner.Late(0.1, math.inf), "seconds=inf: give seconds"),
        (lambda: planner.Late(0.1, 1.0).waiting(0), "workers=0"),
        (lambda: planner.Late(0.1, 1.0).waiting(8, 0), "every=0"),
        (lambda: Host(memory_bandwidth=0), "memory_bandwidth=0"),
        (lambda: Host(seconds_per_byte={"psum": 1}), "psum"),
        (lambda: scheme_named("two bits"), "give one of 1-bit vote"),
        (lambda: step_of("1-bit vote", compute=-1), "compute=-1"),
        (lambda: step_of("1-bit vote", params=0), "params=0"),
        (lambda: planner_report.plan(0, SLOW, 0.1), "params=0"),
        (lambda: planner_report.plan(SIZE, SLOW, 0.0), "above zero"),
        (
            lambda: planner_report.plan(SIZE, SLOW, 0.1, goal="fun"),
            "goal='fun': give one of loss, step",
        ),
        (
            lambda: planner_report.plan(SIZE, SLOW, 0.1, data="new"),
            "data='new': give one of alike, different",
        ),
        (lambda: planner_report.plot("no/where.png", SIZE, SLOW, 0.1), "there is no folder"),
        (lambda: planner_report.plot("plan.xyz", SIZE, SLOW, 0.1), "ends in one of"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- Workers that are late


@pytest.mark.parametrize(("workers", "every"), [(1, 1), (2, 1), (3, 2), (2, 3)])
def test_the_wait_is_the_mean_of_the_slowest_over_all_that_can_happen(workers, every):
    late, expected = planner.Late(0.3, 5.0), 0.0
    for happened in itertools.product([0, 1], repeat=workers * every):
        chance = math.prod(0.3 if one else 0.7 for one in happened)
        each = [sum(happened[w * every : (w + 1) * every]) for w in range(workers)]
        expected += chance * max(each) * 5.0 / every
    assert late.waiting(workers, every) == pytest.approx(expected)


@given(share=st.floats(0, 1), workers=st.integers(1, 10**6), every=st.integers(1, 16))
def test_who_waits_for_more_waits_longer_and_rarer_is_shorter(share, workers, every):
    late = planner.Late(share, 2.0)
    own, one, more = (late.waiting(n, every) for n in (1, workers, 2 * workers))
    assert own == pytest.approx(2 * share) and own <= one + 1e-9 and one <= more + 1e-9 <= 2 + 2e-9
    assert late.waiting(workers, 2 * every) <= one + 1e-9


def test_a_step_is_longer_by_the_wait_and_nothing_else_changes():
    some = dataclasses.replace(SLOW, late=planner.Late(0.01, 2.0))
    wait = 2 * (1 - 0.99**8)
    for name, waits in {
        "1-bit vote": wait,
        "float32 Lion": wait,
        "1-bit Adam": wait,
        "2 alone, float32": (2 - 0.99**16 - 0.9999**8),
        "no communication": 0.02,  # its own, for it waits for nobody
    }.items():
        before, after = step_of(name), step_of(name, some)
        assert after.waiting == pytest.approx(waits) and before.waiting == 0, name
        assert after.step == pytest.approx(before.step + waits)
        assert after[:-2] == before[:-2]


def test_break_even_does_not_depend_on_a_wait_but_being_worth_it_does():
    some = dataclasses.replace(SLOW, late=planner.Late(0.1, 0.5))
    vote = scheme_named("1-bit vote")
    assert pays(vote, 10**8, some).below == pytest.approx(pays(vote, 10**8, SLOW).below)
    calm, waiting = (planner.plan(10**8, at, 0.1, goal="step") for at in (SLOW, some))
    assert waiting.worthwhile.below < calm.worthwhile.below
    assert planner_report.as_json(waiting)["late"] == {"share": 0.1, "seconds": 0.5}


# --- One-way pairs


def test_where_one_of_two_sends_at_a_time_an_all_to_all_takes_longer():
    """Two workers take turns; of three each has one to send to, twice; of four one is left over."""
    vote, dense = planner.scheme_named("1-bit vote"), planner.FLOAT32
    for workers, factor in ((2, 2.0), (3, 1.0), (4, 4 / 3), (5, 1.0), (8, 8 / 7)):
        free = planner.Cluster(workers, planner.Link(1e8, 0.0))
        pairs = planner.Cluster(workers, planner.Link(1e8, 0.0), one_way_pairs=True)
        sent = vote.sends(
            vote.parts, {"w": jax.ShapeDtypeStruct((10**6,), jnp.float32)}, free, planner.Host()
        )
        up, down = (8 * one.sent_bytes / 1e8 for one in sent)
        took = planner.step_time(vote, 10**6, pairs, 0.1).communication
        assert took == pytest.approx(factor * up + down)
        same = [planner.step_time(dense, 10**6, at, 0.1).step for at in (free, pairs)]
        assert same[0] == same[1]
        even = planner.pays(vote, 10**6, pairs).below
        steps = [planner.step_time(x, 10**6, pairs.at(even), 0.1).step for x in (vote, dense)]
        assert steps[0] == pytest.approx(steps[1])


# --- Narrow middles, and machines by name


def test_where_the_middle_is_narrow_an_all_to_all_takes_longer():
    """A fifth of the rate, in the first half of a vote only."""
    wide, narrow = (Cluster(8, Link(1e8, 0.0), all_to_all_share=share) for share in (1.0, 0.2))
    vote = scheme_named("1-bit vote")
    up, down = vote.sends(vote.parts, {"w": jax.ShapeDtypeStruct((SIZE,), jnp.float32)}, wide, FREE)
    took = step_of("1-bit vote", narrow, host=FREE).communication
    assert took == pytest.approx(8 * (5 * up.sent_bytes + down.sent_bytes) / 1e8)
    assert step_of("float32 Lion", narrow) == step_of("float32 Lion", wide)
    even = pays(vote, SIZE, narrow).below
    steps = [step_of(name, narrow.at(even)).step for name in ("1-bit vote", "float32 Lion")]
    assert steps[0] == pytest.approx(steps[1])


def test_named_machines_are_what_their_vendors_say():
    pod = planner.cluster_named("v5e-256")
    assert pod.devices * pod.cluster.link.bandwidth == 51.2e12 * 8  # "all-reduce bandwidth per Pod"
    each = pod.cluster.link.bandwidth * pod.cluster.all_to_all_share
    assert 128 * each * 128 / 255 == pytest.approx(1.6e12 * 8)  # "bisection bandwidth per Pod"
    assert pod.memory_bandwidth == 819e9 * 8 and pod.platform == "tpu"
    assert planner.cluster_named("v5p-8").cluster.link.bandwidth == 4800e9 / 2  # 3 of 6 ports
    node = planner.cluster_named("p4d-64")
    assert node.cluster == Cluster(8, Link(400e9, 20e-6), 8, Link(300e9 * 8, 5e-6))
    assert node.devices == 64 and node.memory_bandwidth == 1555e9 * 8


@pytest.mark.parametrize("name", planner.CLUSTERS)
def test_every_named_machine_is_planned_and_has_a_source(name):
    found = planner.cluster_named(name)
    host = Host(found.memory_bandwidth)
    plan = planner_report.plan(124_000_000, found.cluster, 0.1, host)
    assert planner_report.advice(plan)
    assert set(plan.refused) & set(NAMES) <= {"int8 counts", "integer(8) counts"}
    assert re.search(r"https://|whitepaper|product brief", found.source)
    assert found.platform in ("gpu", "tpu") and found.source.endswith(".")


def test_the_documentation_has_every_named_machine():
    text = (pathlib.Path(__file__).parents[1] / "docs" / "planner.md").read_text()
    assert re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) == list(planner.CLUSTERS)


# --- Peers


OF_PEERS = {
    "float32 AdamW": lambda axis: lc.baselines.adamw(1e-3, axis_name=axis),
    "bfloat16 AdamW": lambda axis: lc.baselines.adamw(1e-3, axis_name=axis, dtype=jnp.bfloat16),
    "PowerSGD, rank 4": lambda axis: lc.baselines.powersgd(optax.adamw(1e-3), 4, axis_name=axis),
    "PowerSGD, rank 16": lambda axis: lc.baselines.powersgd(optax.adamw(1e-3), 16, axis_name=axis),
    "1-bit Adam": lambda axis: lc.baselines.one_bit_adam(1e-3, warmup=1, axis_name=axis),
    "0/1 Adam": lambda axis: lc.baselines.zero_one_adam(1e-3, axis_name=axis),
    "2 alone, float32": lambda axis: lc.global_gradients(optax.sgd(1.0), axis),
    "DiLoCo 8, float32": lambda axis: lc.baselines.diloco(axis_name=axis),
    "DiLoCo 8, 4 bits": lambda axis: lc.baselines.diloco(bits=4, axis_name=axis),
    "DiLoCo 8, 1 bit": lambda axis: lc.baselines.diloco(bits=1, axis_name=axis),
}
OF_OTHERS = {
    "AdamW, 4 bits": lambda axis: lc.coded_gradients(optax.adamw(1e-3), axis),
    "2 alone, 4 bits": lambda axis: lc.coded_gradients(optax.sgd(1.0), axis),
    "PowerSGD 4, 6 bits": lambda axis: lc.baselines.powersgd(
        optax.adamw(1e-3), 4, 6, axis_name=axis
    ),
    "PowerSGD 16, 6 bits": lambda axis: lc.baselines.powersgd(
        optax.adamw(1e-3), 16, 6, axis_name=axis
    ),
    "2 alone, PowerSGD": lambda axis: lc.baselines.powersgd(optax.sgd(1.0), 16, 6, axis_name=axis),
}


@pytest.mark.parametrize("name", [*OTHERS, *PEERS])
@pytest.mark.parametrize("workers", [2, 7])
def test_peers_and_others_send_what_their_transforms_say(name, workers):
    scheme, cluster = scheme_named(name), Cluster(workers, SLOW.link)
    found = step_time(scheme, SHAPES, cluster, 0.1, FREE)
    each = lc.traffic.of((OF_PEERS | OF_OTHERS)[name]("workers"), SHAPES, workers)
    sent, hops = each.sent_bytes, sum(map(hops_of(workers), each.collectives))
    if scheme.in_float32:  # its warm-up
        dense = step_time(planner.FLOAT32, SHAPES, cluster, 0.1)
        share = scheme.in_float32
        assert found.sent_bytes == pytest.approx((1 - share) * sent + share * dense.sent_bytes)
        wait = (1 - share) * (hops * 50e-6 + 8e-9 * sent) + share * dense.communication
        assert found.communication == pytest.approx(wait)
        return
    assert found.sent_bytes == pytest.approx(sent / scheme.every, rel=1e-3)
    assert found.communication == pytest.approx(
        (hops * 50e-6 + 8e-9 * sent) / scheme.every, rel=1e-3
    )


def hops_of(workers):
    tree = planner.tree(workers)
    of = {"all-to-all": 1, "all-gather": tree, "all-reduce": 2 * tree}
    return lambda one: of[one.op]


def test_what_peers_pack_is_shared_out_among_their_steps():
    host = Host(memory_bandwidth=8e9)
    once, often = (step_of(name, host=host) for name in ("DiLoCo 8, 1 bit", "0/1 Adam"))
    assert once.local == pytest.approx(often.local / 8)
    assert step_of("1-bit Adam", host=host).local == pytest.approx(0.85 * often.local)
    assert step_of("DiLoCo 8, float32", host=host).local == 0
    found = step_of("PowerSGD, rank 4", host=host, params=SHAPES)
    assert found.local == pytest.approx(2 * (found.sent_bytes + 8 * (256 * 512 + 65)) / 1e9)


# --- To the loss


def known(monkeypatch, *rows):
    """What is measured: (task, data, workers, method, factor)."""
    about = {"dataset": "some", "parameters": 50_000, "steps": 800}
    large = about | {"parameters": 10_000_000}
    factors = [
        {"task": task, "data": data, "workers": workers, "method": method,
         "factor": [None, factor, None], "std": [None, 0.01, None], "seeds": 3, "reached": [0, 3, 0]}
        for task, data, workers, method, factor in rows
    ]  # fmt: skip
    found = {
        "format": 1,
        "targets": [0.6, 0.8, 1.0],
        "tasks": {"images": about, "text": about, "gpt": large},
    }
    monkeypatch.setattr(evidence, "_packaged", lambda: found | {"factors": factors})
    monkeypatch.setattr(evidence, "_rows", evidence._rows.__wrapped__)


ROWS_OF_LION = [(task, "alike", 8, "lion", 1.0) for task in ("images", "text")]


def learns(method, *factors, data="alike", workers=8):
    return [
        (task, data, workers, method, one)
        for task, one in zip(("images", "text"), factors, strict=False)
    ]


def to_loss(rate, size=10**5, compute=1e-3, **how):
    plan = planner_report.plan(size, how.pop("at", SLOW).at(rate), compute, FREE, **how)
    return plan, planner_report.advice(plan)


def test_the_worse_of_two_tasks_counts_and_the_nearest_workers(monkeypatch):
    rows = [*learns("vote", 1.2, 1.1), *learns("vote", 1.3, None, workers=32)]
    known(monkeypatch, *rows)
    near = planner.learned("vote", 15, 10**5)
    assert (near.factor, near.std, near.seeds, near.task) == (1.2, 0.01, 3, "images")
    assert dict(near.workers) == {"images": 8, "text": 8}
    far = planner.learned("vote", 17, 10**5)
    assert (far.factor, far.task, dict(far.workers)) == (None, "text", {"images": 32, "text": 32})
    assert [planner.learned("vote", n, 10**5).far_from(n) for n in (3, 4, 16, 17, 64, 65)] == [
        True, False, False, False, False, True,
    ]  # fmt: skip
    assert planner.learned("vote", 8, 10**5, "different") is None
    with pytest.raises(ValueError, match="data='odd': give one of alike, different"):
        planner.learned("vote", 8, 10**5, "odd")


def test_the_time_to_the_loss_is_that_of_a_step_times_its_steps(monkeypatch):
    known(monkeypatch, *ROWS_OF_LION, *learns("vote", 1.5, 1.25), *learns("vote-2", 1.0, None))
    plan, said = to_loss(1e7)
    times = plan.times()
    assert times["1-bit vote"] == 1.5 / plan.speedup("1-bit vote")
    assert times["float32 Lion"] == 1.0 and times["bfloat16 Lion"] < 1
    assert list(times) == sorted(times, key=times.get) and "2-bit vote" not in times
    assert said.startswith(
        "At 10 Mbit/s use lion_cub(...) (1-bit vote): to float32 Lion's loss in 0.0"
    )
    assert "1.50 ± 0.01 times as many; sending less is worth it below" in said
    of = "images (some, 50,000 parameters, 8 workers) and text (some, 50,000 parameters, 8 workers)"
    assert f"Measured on {of}, data alike, 3 seeds; images is the worse of them and counts." in said
    assert "evidence ends" not in said


def test_a_method_whose_steps_are_too_many_is_not_advised_where_its_step_is_fast(monkeypatch):
    known(monkeypatch, *ROWS_OF_LION, *learns("vote", 1.9, 1.9), *learns("vote-4", 1.0, 1.0))
    plan, _ = to_loss(1e10, compute=0.1)
    even = plan.worthwhile.below
    assert 0 < even < math.inf
    for rate, used in ((even / 1.001, True), (even * 1.001, False)):
        _, said = to_loss(rate, compute=0.1)
        assert said.startswith("Do not use this: ") != used
        assert f"is worth it below {units.rate_text(even)}" in said
    above = to_loss(even * 1.001, compute=0.1)[1]
    assert "nothing is to the loss 1.05 times as soon as bfloat16 Lion" in above
    assert "A bfloat16 mean is taken to learn like a float32 one." in above


def test_a_peer_that_is_first_is_named_and_so_is_the_first_of_ours(monkeypatch):
    known(monkeypatch, *ROWS_OF_LION, *learns("vote", 1.0, 1.0), *learns("diloco-1", 1.1, 1.1))
    plan, said = to_loss(1e7)
    assert "use make_train_step(..., baselines.diloco(bits=1)" in said
    more = plan.times()["1-bit vote"] / plan.times()["DiLoCo 8, 1 bit"]
    assert (
        f"none of this library's own methods, of which 1-bit vote is the first, in {more:.2f}"
        in said
    )


def test_methods_that_are_as_soon_there_are_named_too(monkeypatch):
    known(monkeypatch, *ROWS_OF_LION, *learns("vote", 1.0, 1.0), *learns("owner-1", 1.0, 1.0))
    _, said = to_loss(1e7, compute=0.05)
    assert "Within 5 % of that: owner, 1 bit" in said


def test_where_evidence_ends_is_said_and_what_the_step_alone_says(monkeypatch):
    known(monkeypatch, *ROWS_OF_LION, *learns("owner-3", 1.0, 1.0))
    ends = "There evidence ends: "
    assert ends not in to_loss(1e7, 500_000)[1]
    large = to_loss(1e7, 500_001)[1]
    said = f"{ends}steps are those of smaller models, and this one has 500,001 parameters. "
    assert said in large
    assert f"{ends}steps are those of larger models, and this" in to_loss(1e7, 4_999)[1]
    assert large.endswith("By bits and step time alone: lion_cub(...).")
    many = to_loss(1e7, at=Cluster(17, SLOW.link))[1]
    assert f"{ends}these are 17 workers. By bits" in many
    fast = planner_report.plan(10**8, SLOW.at(1e13), 1.0)  # with memory that is not free
    assert planner_report.advice(fast).endswith("step time alone: the advice is not to use this.")


def test_what_was_never_measured_is_not_ranked_and_listed(monkeypatch):
    rows = [("text", "different", 8, "lion", 1.0), ("text", "different", 8, "owner-3", 1.0)]
    known(monkeypatch, *rows)
    plan, said = to_loss(1e7, data="different")
    assert set(plan.times()) == {"owner, 3 bits", "bfloat16 Lion", "float32 Lion"}
    assert "use owner_lion(...)" in said and "8 workers), data different, 3 seeds." in said
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(planner_report.table(plan))
    text = " ".join(console.export_text().split())
    with_them = "not measured with different data on text, the nearest in size, so not ranked"
    assert f"{with_them}: 1-bit vote; 2-bit vote; " in text
    found = planner_report.as_json(plan)
    assert (found["goal"], found["data"]) == ("loss", "different")
    by_name = {row["scheme"]: row for row in found["schemes"]}
    assert by_name["1-bit vote"]["steps"] is None is by_name["1-bit vote"]["time_to_loss"]
    assert by_name["owner, 3 bits"]["steps"] == {
        "factor": 1.0, "std": 0.01, "seeds": 3, "task": "text", "workers": {"text": 8},
    }  # fmt: skip


def test_all_methods_are_judged_by_the_tasks_nearest_in_size(monkeypatch):
    """What was seen on a small model alone is not ranked for a large one beside what was seen on one."""
    on_gpt = [("gpt", "alike", 4, "lion", 1.0), ("gpt", "alike", 4, "vote", 0.5)]
    known(monkeypatch, *ROWS_OF_LION, *learns("owner-3", 0.1, 0.1), *learns("vote", 2, 2), *on_gpt)
    names = lambda size: [task.name for task in planner.tasks_near(size)]  # noqa: E731
    assert (names(60_000), names(5_000_000)) == (["images", "text"], ["gpt"])
    large, said = to_loss(1e7, 20_000_000)
    assert set(large.times()) == {"1-bit vote", "gathered", "int8 counts", "lanes"} | DENSE_LIONS
    assert (
        "use lion_cub(...)" in said and "Measured on gpt (some, 10,000,000 parameters, 4 " in said
    )
    small, _ = to_loss(1e7, 60_000)
    assert next(iter(small.times())) == "owner, 3 bits" and small.learned["1-bit vote"].factor == 2


DENSE_LIONS = {"float32 Lion", "bfloat16 Lion"}


def test_by_the_step_alone_nothing_is_asked_of_evidence(monkeypatch):
    known(monkeypatch)
    plan = planner_report.plan(SHAPES, SLOW, 0.1, goal="step")
    assert (plan.learned, list(plan.estimates)) == ({}, NAMES)
    rows = planner_report.as_json(plan)["schemes"]
    assert not any({"steps", "time_to_loss"} & set(row) for row in rows)
