"""The step-time model against sums by hand, the advice against the model, and the table against both."""

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import AXIS, absent
from goal import answer

import lioncub_jax as lc
from lioncub_jax.audit import units
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.cli import output
from lioncub_jax.tools.plan import (
    Cluster,
    Link,
    evidence,
    pays,
    report,
    scheme_named,
)

SIZE = 2**20
LINE = [jax.ShapeDtypeStruct((SIZE,), jnp.float32)]
NAMES = [scheme.name for scheme in planner.SCHEMES]
SHAPES = {
    "a": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((65,), jnp.float32),
}
SLOW = Cluster(8, Link(1e9, 50e-6))
FREE = dataclasses.replace(SLOW, memory_bandwidth=math.inf)  # packing takes no time


def step_of(name, cluster=SLOW, params=LINE, compute=0.1):
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
    return eval(code, names | {"jnp": jnp, "width": 256})  # of SHAPES


@pytest.mark.parametrize("name", NAMES)
def test_a_method_takes_the_time_of_what_the_code_of_its_legend_sends(name):
    scheme = scheme_named(name)
    cluster, tree = dataclasses.replace(FREE, workers=7), 3
    traffic = lc.audit.of(transform_of(scheme.code), SHAPES, absent(7))
    waits = {"all-to-all": 1, "all-gather": tree, "all-reduce": 2 * tree}
    hops = sum(waits[one.op] for one in traffic.collectives)
    took = hops * 50e-6 + 8e-9 * traffic.sent_bytes
    share = scheme.in_float32  # of its steps, in a warm-up
    dense, found = (step_of(n, cluster, SHAPES) for n in ("lion", name))
    sent = (1 - share) * traffic.sent_bytes / scheme.every + share * dense.sent_bytes
    took = (1 - share) * took / scheme.every + share * dense.communication
    assert found.sent_bytes == pytest.approx(sent, rel=1e-12)
    assert found.communication == pytest.approx(took)
    assert found.step == pytest.approx(0.1 + found.communication)


def test_one_worker_only_computes():
    assert {step_of(name, Cluster(1, SLOW.link), SHAPES).step for name in NAMES} == {0.1}


def test_bfloat16_is_widened_on_cpu_only():
    cpu = dataclasses.replace(SLOW, on_cpu=True)
    narrow, wide = (step_of("lion-bfloat16", at) for at in (SLOW, cpu))
    assert wide == step_of("lion")
    assert 2 * narrow.sent_bytes == wide.sent_bytes


def test_two_levels_share_the_link_of_a_worker_and_cut_what_is_packed():
    cluster = dataclasses.replace(FREE, group_size=4, inside=Link(900e9, 5e-6))
    found = step_of("vote", cluster)
    workers = lc.Workers(jax.sharding.AbstractMesh((8, 4), ("node", "gpu")), "node", "gpu")
    tx = lc.lion_cub(1.0, workers=workers)
    traffic = lc.audit.of(tx, LINE, workers)
    sent, inside = 4 * traffic.sent_bytes, traffic.group_bytes
    assert (found.sent_bytes, found.inside_bytes) == (sent, inside)
    across = 4 * 50e-6 + 8 * sent / 1e9
    assert found.communication == pytest.approx(across + 2 * 2 * 5e-6 + 8 * inside / 900e9)
    slices = step_of("lion", cluster)
    assert slices.sent_bytes == step_of("lion").sent_bytes
    assert slices.inside_bytes == 2 * 3 / 4 * 4 * SIZE


def test_packing_is_estimated_by_what_passes_through_memory():
    """Of what is sent, a float32 for each parameter and error feedback, of the steps that pack."""
    slow = dataclasses.replace(SLOW, memory_bandwidth=8e9)
    for name, each, share in [
        ("vote", 4, 1), ("owner-lion", 4 + 2, 1),
        ("one-bit-adam", 8, 1 - 0.15 / 0.8), ("local-2-coded", 8, 1 / 2),
    ]:  # fmt: skip
        sent = lc.audit.of(transform_of(scheme_named(name).code), SHAPES, absent(8)).sent_bytes
        packed = share * 2 * (sent + each * planner.parameters_in(SHAPES)) / 1e9
        assert step_of(name, slow, SHAPES).local == pytest.approx(packed), name
    for name in ("lion", "local-2"):
        assert step_of(name, slow).local == 0
    grouped = dataclasses.replace(slow, group_size=4, inside=Link(math.inf))
    device = step_of("vote", grouped)
    answers = device.inside_bytes - 3 / 4 * 4 * SIZE  # less the float32s that are averaged inside
    assert device.local == pytest.approx(2 * (device.sent_bytes / 4 + answers + SIZE) / 1e9)


# --- Where it pays


def test_a_method_may_pay_always_or_never():
    vote, dense = (step_of(name, FREE) for name in ("vote", "lion"))
    vote = vote._replace(unlimited=dense.unlimited)
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
    sent = lc.audit.of(lc.lion_cub(1.0, workers=AXIS), LINE, absent(bad.workers)).collectives
    up, down = (8e-8 * one.sent_bytes for one in sent)
    assert step_of("vote", bad).communication == pytest.approx(longer * up + down)
    good = Cluster(bad.workers, bad.link)
    assert step_of("lion", bad) == step_of("lion", good)


# --- Plans


def test_every_method_is_there_or_refused():
    fits = planner.plan(SIZE, Cluster(16_384, SLOW.link), 0.1, tokens=32)
    assert (list(fits.rows), fits.refused) == (NAMES, {})
    two_levels = planner.plan(SHAPES, Cluster(8, SLOW.link, 4, Link(900e9)), 0.1, tokens=32)
    alone = {name for name in NAMES if planner.scheme_named(name).every > 1}
    assert set(two_levels.refused) == {"powersgd-4", "powersgd-16", *alone}


def test_a_number_stands_for_a_matrix_of_which_powersgd_sends_what_it_does_of_a_gpt():
    width, number = 4096, 32 * 12 * 4096**2
    layer = [(width, 4 * width), (width, 4 * width), (4 * width, width)]
    gpt = [jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(32) for shape in layer]
    assert planner.parameters_in(gpt) == planner.parameters_in(number) == number
    of_number, of_gpt = (step_of("powersgd-4", FREE, x).sent_bytes for x in (number, gpt))
    assert 0.5 < of_number / of_gpt < 1.5
    assert [planner.parameters_in(n) for n in (383, 1537)] == [383, 1537]


def test_json_holds_the_plan_and_no_infinity():
    plan = planner.plan(10**8, Cluster(32, SLOW.link), 0.1, tokens=32)
    found = json.loads(output.as_text(report.as_json(plan)))
    steps = {row["scheme"]: row["estimate"]["step"] for row in found["schemes"]}
    assert steps == {name: row.estimate.step for name, row in plan.rows.items()}
    assert (found["worthwhile"], found["use"]) == (plan.worthwhile(), plan.use())
    assert found["refused"] == plan.refused and found["advice"] == report.advice(plan)
    assert (found["tokens"], found["agreement"], found["data"]) == (32, None, "alike")
    measured = found["measured"]
    assert (measured["tokens"], measured["workers"], measured["away"]) == (32, 32, "here")
    never = {row["scheme"] for row in found["schemes"] if row["time_to_loss"] is None}
    assert never == {"vote", "diloco"}
    for rate, told in (math.inf, None), (1e-300, 1e-300):  # at which steps never end
        plan = planner.plan(10**8, SLOW.at(rate), 0.1, agreement=0.53)
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
        (lambda: Cluster(2, SLOW.link, all_to_all_share=0), "share=0: give a number above 0, at most 1"),
        (lambda: Cluster(2, SLOW.link, memory_bandwidth=0), "memory_bandwidth=0"),
        (lambda: scheme_named("two bits"), "give one of vote, average"),
        (lambda: step_of("vote", compute=-1), "compute=-1"),
        (lambda: planner.plan(0, SLOW, 0.1, tokens=32), "params=0"),
        (lambda: planner.plan(SIZE, SLOW, 0.0, tokens=32), "compute=0.0: give seconds, above zero"),
        (
            lambda: planner.cell_for(8, 32, data="new"),
            "data 'new': give one of alike, different",
        ),
        (lambda: planner.cell_for(0, 32), "workers=0"),
        (lambda: planner.cell_for(8, 0), "tokens=0: "),
        (lambda: planner.cell_for(8, agreement=math.nan), "agreement=nan: give votes/agreement"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- To the loss

ROOT = Path(__file__).parents[1]
# Steps and rates: a method that is not here is not measured, and None does not get there.
METHODS = {
    "lion": 215, "adamw": 205, "vote": None, "average": 240, "owner-lion": 220, "owner-lion-rotated": 235,
    "owner-adamw": 210, "powersgd-4": 230, "powersgd-16": 225, "local-2": 207, "local-2-coded": 208,
    "one-bit-adam": 212, "diloco": None,
}  # fmt: skip
STUDY = {"model": "GPT", "dataset": "some text"}


def cell(tokens, workers, agreement=None, data="alike", **methods):
    """As in the file, with other steps."""
    steps = METHODS | {name.replace("_", "-"): n for name, n in methods.items()}
    learned = {
        name: {"steps": [1, n, 256], "error": [None, n and 3.0, None], "runs": [3, 3, 2], "loss": 3.2,
               "rate_over_adamw": 0.5, "b1": 0.8, "b2": 0.9, "decay_over_adamw": 1.0, "more": "in the file"}
        for name, n in steps.items() if n != "not run"
    }  # fmt: skip
    return {"tokens": tokens, "workers": workers, "agreement": agreement, "data": data,
            "steps": 256, "parameters": 1000, "noise_scale": 2e3, "loss": {"0.8": 3.2},
            "methods": learned}  # fmt: skip


CELLS = [
    cell(32, 8, 0.5257), cell(256, 8, 0.55), cell(32, 32), cell(2048, 4, 0.66),
    cell(256, 8, 0.6, "different"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def known(monkeypatch, tmp_path, request):
    """Sets what is measured."""

    def measured(*cells):
        file = tmp_path / "evidence.json"
        file.write_text(
            json.dumps({"version": evidence.VERSION, "study": STUDY, "cells": cells, "times": []})
        )
        found = evidence.read(file)
        monkeypatch.setattr(evidence, "packaged", lambda: found)

    measured(*CELLS)
    return measured


def to_loss(rate=1e7, size=10**5, compute=1e-3, at=FREE, **how):
    plan = planner.plan(size, at.at(rate), compute, **{"tokens": 32} | how)
    return plan, report.advice(plan)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((8, 90), (32, 8, "near")), ((8, 91), (256, 8, "near")),
        ((16, 32), (32, 8, "near")), ((17, 32), (32, 32, "near")), ((65, 32), (32, 32, "far")),
        ((4, 8192), (2048, 4, "near")), ((4, 8193), (2048, 4, "far")),
        ((8, None, 0.55), (256, 8, "here")), ((8, None, 0.53), (32, 8, "near")),
        ((8, None, 0.506), (32, 8, "far")), ((8, None, 0.5), (32, 8, "far")),
        ((8, 256, None, "different"), (256, 8, "here")), ((8, 32, None, "different"), (256, 8, "far")),
    ],
)  # fmt: skip
def test_the_nearest_cell_is_by_noise_and_workers_and_it_is_said_how_far(asked, found):
    cell, away = planner.cell_for(*asked)
    assert (cell.tokens, cell.workers, away) == found


def test_data_that_nobody_measured_are_told_by_others(known):
    known(*CELLS[:2])
    cell, away = planner.cell_for(8, 32, data="different")
    assert (cell.tokens, cell.data, away) == (32, "alike", "far")
    known({**CELLS[0], "agreement": None})
    assert planner.cell_for(8, 32).away == "here"
    with pytest.raises(ValueError, match="no cell of the evidence has one; give tokens instead"):
        planner.cell_for(8, agreement=0.6)


def test_evidence_of_another_version_is_refused(tmp_path):
    (tmp_path / "it.json").write_text(json.dumps({"version": 1, "tasks": {}}))
    said = "it.json: evidence of version 1, and this library reads 3; install it again"
    with pytest.raises(ValueError, match=said):
        evidence.read(tmp_path / "it.json")


def test_the_time_to_the_loss_is_that_of_a_step_times_its_steps(known):
    known(cell(32, 8, vote=300, one_bit_adam="not run"))
    plan, said = to_loss()
    times = plan.times()
    assert times["vote"] == 300 * plan.rows["vote"].estimate.step
    assert times["adamw-bfloat16"] == 205 * plan.rows["adamw-bfloat16"].estimate.step
    assert list(times) == sorted(times, key=times.get)
    assert not {"one-bit-adam", "diloco"} & times.keys()
    assert plan.use() == "owner-lion-rotated" == plan.first()
    mean, peer = (
        f"{times[name] / times['owner-lion-rotated']:.3g}"
        for name in ("adamw-bfloat16", "powersgd-4")
    )
    ours, theirs = (plan.rows[name] for name in ("owner-lion-rotated", "adamw-bfloat16"))
    hidden = theirs.steps() * max(plan.compute, theirs.estimate.communication) / ours.time()
    assert said == (
        "At 10 Mbit/s use owner_lion(..., quantizer=quantize.rotated_sign()). Begin with 0.5 times the "
        "learning rate and the weight decay of your AdamW, and tune: that was best in runs of 256 steps of "
        f"a model of 1,000 parameters, with betas of 0.8 and 0.9. This method reaches the loss {mean} "
        "times faster than the best mean of gradients, global_gradients(optax.adamw(...), "
        f"dtype=jnp.bfloat16), and {peer} times faster than the best other method, "
        f"baselines.powersgd(optax.adamw(...), width // 32). It is {hidden:.3g} times as fast as a mean "
        "that overlaps fully with computing. Measured with 32 tokens a worker and step, 8 workers and "
        "data alike, a GPT (your model has 100,000 parameters) on some text, 3 seeds, not on a GPU."
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"tokens": 64}, "Measured near 64 tokens, 8 workers and data alike: with 32 tokens"),
        ({"tokens": 10**3}, "; with more tokens votes and codes took more steps, so expect less."),
        ({"size": 10**9, "rate": 1e6}, "; the rank is the same share of the width,"),
    ],
)  # fmt: skip
def test_how_far_it_was_measured_from_what_was_asked_is_said(how, words):
    assert words in to_loss(**how)[1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"agreement": 0.5, "tokens": None},
            "nobody ran an agreement of 0.5 (coin flips: noise only), 8 workers and data alike. The "
            "nearest runs had 32 tokens a worker and step (an agreement of 0.5257), 8 workers and data ",
        ),
        (
            {"tokens": 2048, "data": "different"},
            "nobody ran 2,048 tokens, 8 workers and data different. The nearest runs had 256 tokens",
        ),
    ],
)  # fmt: skip
def test_far_from_all_runs_no_method_is_named(how, words):
    plan, said = to_loss(**how)
    assert said.startswith(f"Not measured: {words}") and report.details(plan) == ""
    assert not any(scheme.code in said for scheme in planner.SCHEMES)
    found = report.as_json(plan)
    assert (found["use"], found["worthwhile"]) == ("not measured", 0)
    assert report.table(plan).count("not measured") == len(plan.rows)


def test_steps_of_votes_are_not_measured_with_two_workers_and_by_a_single_run(known):
    (two, said), (four, _) = (to_loss(at=Cluster(n, SLOW.link), tokens=2048) for n in (2, 4))
    assert "; votes of two workers, where each disagreement is a tie, were not measured." in said
    assert {name for name in two.rows if two.rows[name].learned is None} == {"vote", "average"}
    assert four.rows["average"].steps() == 240
    single = cell(32, 8)
    single["methods"]["powersgd-4"] |= {"steps": [1, None, None], "runs": [2, 0, 2]}
    known(single)
    plan = to_loss()[0]
    (line,) = (x for x in report.table(plan).splitlines() if x.startswith("powersgd-4"))
    assert "powersgd-4" not in plan.times() and line.endswith("not measured         ")


def test_no_rate_of_the_small_model_leaves_the_library(monkeypatch):
    """A rate of 0.4 million parameters and 256 steps is harmful elsewhere; the ratio to AdamW's is said."""
    monkeypatch.undo()
    for cell in evidence.packaged().cells:
        for rate in (1e7, 1e9, 1e12):
            plan = planner.plan(10**9, SLOW.at(rate), 0.1, tokens=cell.tokens, data=cell.data)
            told = report.as_json(plan)
            assert re.search(
                r"Begin with ([\d.]+ times )?the learning rate and (10 times )?the weight decay of your "
                "AdamW, and tune: that was best in runs of 256 steps of a model of 430,720 parameters",
                told["advice"],
            )
    assert {"rate", "decay"}.isdisjoint(evidence.Learned._fields)


def test_a_method_whose_steps_are_too_many_is_not_advised_where_its_step_is_fast():
    even = to_loss(1e10, compute=0.1)[0].worthwhile()
    assert 0 < even < math.inf
    (_, below), (plan, above) = (to_loss(even * more, compute=0.1) for more in (1 / 1.001, 1.001))
    assert (
        below.startswith("Measure first: at ")
        and " times the time of the best other method. If " in below
    )
    assert above.startswith(
        f"Do not use this: at {units.rate_text(even * 1.001)} nothing reaches the loss 1.05 times faster "
        "than a mean of gradients, global_gradients(optax.adamw(...), dtype=jnp.bfloat16). Begin with"
    )
    assert above.count("times as long") == 2 and "assumed to learn like float32." in above
    said = report.details(plan)
    assert f"than every mean of gradients below {units.rate_text(even)}." in said
    assert said.startswith("Within 5 % of it, or faster: ") and plan.use() in said


def test_where_means_alone_get_there_that_is_said(known):
    known(cell(32, 8, **dict.fromkeys(set(METHODS) - {"lion", "adamw"}, "not run")))
    plan, said = to_loss()
    assert "This method alone was seen to reach the loss." in said
    assert report.table(plan).count("not measured") + len(plan.refused) == len(NAMES) - 4


def test_a_peer_that_is_first_is_named_beside_the_best_of_ours(known):
    known(cell(32, 8, one_bit_adam=10))
    said = to_loss()[1]
    assert said.startswith("At 10 Mbit/s use baselines.one_bit_adam(..., warmup=...). Begin")
    assert "times faster than the best of this library, owner_lion(" in said


# --- What to use


def test_the_networks_of_the_table_have_neither_latency_nor_packing():
    at, size = planner.cluster_at(10, 8), planner.choice.SIZE
    dense, vote = (step_of(name, at, size, 1.0) for name in ("lion", "vote"))
    assert dense.communication == pytest.approx(10)  # times the second of computing
    assert vote.communication == pytest.approx(10 * vote.link_bits / dense.link_bits)
    assert dense.step == pytest.approx(11) and vote.local == 0


def test_the_table_is_small_and_gives_the_answer_of_a_plan(monkeypatch):
    monkeypatch.undo()
    rows = planner.what_to_use()
    asked = [(row.data, row.tokens, n) for row in rows for n in row.plans]
    assert asked == [
        (data, tokens, n)
        for data, noise in (("alike", (32, 256, 2048)), ("different", (256,)))
        for tokens in noise
        for n in (0.1, 1, 10, 100)
    ]
    lines = answer.what_to_use_text().split("\n\n")[0].splitlines()
    assert len(rows) == len(lines) - 2 <= 14
    for row, line in zip(rows, lines[2:], strict=True):
        code = scheme_named(row.method()).code if row.plans else "not measured"
        cells = [text.strip("` ") for text in line.strip("|").split("|")]
        assert cells[1:4] == [f"{row.tokens:,}", row.data, code]
        for network, plan in row.plans.items():
            at = planner.cluster_at(network, plan.cluster.workers)
            again = planner.plan(10**7, at, 1.0, tokens=row.tokens, data=row.data)
            assert again.use() == row.method()
            assert code in report.advice(again)
