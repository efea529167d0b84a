"""Time to loss: that goals, steps and seconds are summed up rightly, and what its command refuses."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lioncub_jax as lc

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LION, VOTE, ADAM, WARMED = "Lion, float32", "1-bit vote", "AdamW, float32", "1-bit Adam"


@pytest.fixture
def goal(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import goal
    from goal import contenders, curves, lab, rows, summary

    del contenders, curves, lab, rows, summary
    return goal


def curve(goal, name, loss, *, steps=384, seed=0, part="curve", choice=None):
    """A row of a run whose loss falls like this over its sixteenths."""
    made = goal.contenders.CONTENDERS[name]
    choice = choice or (made.choices or goal.contenders.CONTENDERS[made.like].choices)[0]
    run = goal.curves.Run(part, name, *choice, 4, steps, seed)
    taken = [steps * (n + 1) // 16 for n in range(16)]
    return {
        **run._asdict(),
        "taken": taken,
        "loss": [loss(n / steps) for n in taken],
        "seconds": 1.0,
    }


def tuned(goal, name, best=0):
    """Rows that tune a contender, the best choice at this place."""
    choices = goal.contenders.CONTENDERS[name].choices
    return [
        curve(goal, name, lambda x, n=n: 9.0 + (n != best), part="tuning", choice=choice, seed=1000)
        for n, choice in enumerate(choices)
    ]


def time(goal, name, seconds, *, network="100mbit", stage="", option=0):
    return {"part": "time", "contender": name, "stage": stage, "option": option, "network": network,
            "workers": 4, "seconds": seconds}  # fmt: skip


def falling(x):
    return 5.0 - 2.0 * x


def sooner(x):
    return 5.0 - 4.0 * x


def story(goal):
    """Lion falls from 5 to 3 bits, the vote as fast, AdamW twice as fast, each in steps of its own time."""
    found = [row for name in (LION, VOTE, ADAM) for row in tuned(goal, name)]
    for seed in range(3):
        found += [curve(goal, LION, falling, seed=seed), curve(goal, VOTE, falling, seed=seed)]
        found += [curve(goal, ADAM, sooner, seed=seed)]
    return [*found, time(goal, LION, 4.0), time(goal, VOTE, 0.25), time(goal, ADAM, 4.0)]


def test_a_goal_is_where_lion_stands(goal):
    found = goal.summary.goals(story(goal))
    assert found == pytest.approx({0.6: 3.8, 0.8: 3.4, 1.0: 3.0})


def test_seconds_are_steps_times_seconds_of_a_step(goal):
    sums = goal.summary.summed(story(goal))
    assert sums.reaches[VOTE, 1.0].steps == pytest.approx(384)
    assert sums.reaches[ADAM, 1.0].steps == pytest.approx(192)
    assert sums.seconds["100mbit", VOTE, 1.0] == pytest.approx(384 * 0.25)
    assert sums.seconds["100mbit", ADAM, 0.6] == pytest.approx(192 * 0.6 * 4.0)
    assert sums.keys["speedup_over_best_peer_100mbit"] == pytest.approx(192 * 4.0 / (384 * 0.25))
    assert sums.keys["speedups"]["100mbit 100%"][:2] == [VOTE, ADAM]


def test_steps_of_several_kinds_each_take_their_own_time(goal):
    """58 steps in full precision, the others in one bit."""
    contenders = goal.contenders
    found = story(goal) + tuned(goal, WARMED)
    found += [curve(goal, WARMED, falling, seed=seed) for seed in range(3)]
    found.append(time(goal, WARMED, 4.0, stage=contenders.FULL, option=58))
    assert ("100mbit", WARMED, 1.0) not in goal.summary.summed(found).seconds  # not timed yet
    found.append(time(goal, WARMED, 0.25, stage=contenders.CODED, option=58))
    sums = goal.summary.summed(found)
    assert sums.seconds["100mbit", WARMED, 1.0] == pytest.approx(58 * 4.0 + (384 - 58) * 0.25)


def test_who_never_gets_there_is_said_so_and_runs_longer(goal):
    stuck = [curve(goal, VOTE, lambda x: 5.0 - 1.9 * x, seed=seed) for seed in range(3)]
    found = [
        row for row in story(goal) if row["contender"] != VOTE or row["part"] != "curve"
    ] + stuck
    assert not goal.summary.reached(found, VOTE)
    sums = goal.summary.summed(found)
    assert sums.reaches[VOTE, 1.0] is None and sums.reaches[VOTE, 0.8] is not None
    assert "speedup_over_best_peer_100mbit" not in sums.keys
    longer = [curve(goal, VOTE, lambda x: 5.0 - 2.5 * x, steps=576, seed=seed) for seed in range(3)]
    way = goal.summary.reach(found + longer, VOTE, 3.0)
    assert (way.steps, way.length) == (pytest.approx(576 * 0.8), 576)


def test_a_clock_is_compared_with_the_product_of_as_many_steps(goal):
    ran = {"part": "confirm", "contender": VOTE, "network": "100mbit", "steps": 384, "taken": 360}
    found = [*story(goal), ran | {"seconds": 99.0, "reached": True}]
    assert goal.summary.summed(found).keys["clock_over_product"] == {
        f"100mbit {VOTE}": [99.0, 90.0, 1.1]
    }
    found[-1]["reached"] = False
    assert goal.summary.summed(found).keys["clock_over_product"] == {}


def test_a_rank_that_is_given_is_the_best_of_that_rank(goal):
    contenders, found = goal.contenders, tuned(goal, "PowerSGD, AdamW")
    chosen = goal.summary.best_choice(found, "PowerSGD, rank 4")
    assert chosen.option == 4 and chosen in contenders.CONTENDERS["PowerSGD, AdamW"].choices
    whole = goal.summary.best_choice(found, "PowerSGD, AdamW")
    assert goal.summary.best_choice(found, "PowerSGD, in 6 bits") == whole


@pytest.mark.parametrize(("name", "option"), [("0/1 Adam", 0), (WARMED, 58)])
def test_stages_are_those_of_the_transform(goal, name, option):
    """By what it sends, step for step."""
    made = goal.contenders.CONTENDERS[name]
    tx, stages = made.make(lambda t: 1e-3, 384, option).tx, dict(made.stages(384, option))
    params, stage = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)}, None
    sent = {goal.contenders.FULL: set(), goal.contenders.CODED: set()}
    for t in range(384):
        stage = stages.get(t, stage)
        sent[stage].add(lc.traffic.of(tx, params, 4, step=t).sent_bytes)
    assert all(len(each) == 1 for each in sent.values())
    assert min(sent[goal.contenders.FULL]) > 10 * max(sent[goal.contenders.CODED])


def test_every_contender_is_tuned_over_as_many_choices(goal):
    contenders = goal.contenders.CONTENDERS
    assert {len(one.choices) for one in contenders.values() if not one.like} == {4}
    assert all(one.like in contenders for one in contenders.values() if one.like)
    makers = [(one.make, c.option) for one in contenders.values() for c in one.choices]
    alone = {make(lambda t: 1e-3, 384, option).local_steps for make, option in makers}
    assert {1, 2, 4, 8, 32} <= alone
    assert all(length % steps == 0 for length in goal.summary.LENGTHS for steps in alone)


@pytest.mark.parametrize("name", [VOTE, "DiLoCo, float32", "PowerSGD, AdamW", "AdamW, in codes"])
def test_a_contender_trains_by_the_real_step(goal, name, monkeypatch):
    """Of a small model; all see the same windows, and losses are looked at as often as there are points."""
    small = {"layers": 1, "width": 32, "heads": 2, "context": 64, "tied": False}
    monkeypatch.setattr(goal.curves, "MODEL", small)
    mesh = goal.curves.mesh_of(jax.devices()[:4])
    made = goal.contenders.CONTENDERS[name]
    run = goal.curves.Run("curve", name, 1e-3, made.choices[0].option, 4, 32, 0)
    row = goal.curves.train(mesh, made, run)
    assert row["taken"][-1] == 32 and len(row["taken"]) == len(row["loss"]) <= 16
    assert row["loss"][-1] < row["loss"][0] < 8.5


def test_pytorch_begins_with_the_same_parameters(goal):
    """Every one, once; a matrix turned, with the heads of queries, keys and values in their order."""
    model = goal.curves.model_of(0)
    arrays = goal.lab.as_in_torch(model, goal.lab.MODEL["layers"])
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sorted(x.size for x in arrays.values()) == sorted(sizes)
    kernel = model.blocks[1].attention.qkv.kernel[...]
    assert arrays["blocks.1.qkv.weight"][384 + 64 * 2 + 5, 7] == kernel[7, 1, 2, 5]
    with pytest.raises(TypeError, match=r"goal/ddp_worker\.py runs it"):
        goal.contenders.CONTENDERS["PyTorch DDP, float32"].timed("", 0)


def test_the_planner_names_who_was_first_in_every_measured_network(goal):
    """Or one that was there within 5 % of the first's time: by the committed rows."""
    from goal import planned

    found = goal.rows.read(BENCHMARKS / "results" / "time_to_loss.jsonl")
    told = planned.beside_measured(found)
    assert {"100mbit", "300mbit", "1gbit"} <= told.keys()
    for network, one in told.items():
        assert one["of"] >= 5 and one["ratio"] <= 1.05, (network, one)


def test_who_is_timed_nowhere_without_a_limit_is_not_compared(goal):
    from goal import planned

    assert planned.beside_measured(story(goal)) == {}


# --- Bad input


def refused(argv, capsys):
    import time_to_loss

    with pytest.raises(SystemExit):
        time_to_loss.parsed(argv)
    return capsys.readouterr().err


def test_rows_of_another_study_are_refused(goal, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"part": "main", "method": "vote"}) + "\n")
    said = refused(["--save", str(path), "--again"], capsys)
    assert "line 1: no row of this benchmark" in said and "--save" in said
    path.write_text(json.dumps({"part": "curve", "contender": "Sophia"}) + "\n")
    assert "'Sophia' does not run any more; delete the line" in refused(
        ["--save", str(path)], capsys
    )


def test_a_goal_below_every_curve_is_refused(goal, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in story(goal)))
    said = refused(["--save", str(path), "--goal", "0.5"], capsys)
    assert "--goal 0.5: no curve gets there; the least is 1.000, of AdamW, float32" in said


def test_nothing_can_be_summed_up_before_lion_has_run(goal, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in tuned(goal, LION)))
    said = refused(["--save", str(path), "--again"], capsys)
    assert "Lion, float32 has not run, so there is no goal: run --part curves first" in said


def test_an_unknown_contender_is_refused_with_the_known_ones(goal, tmp_path, capsys):
    said = refused(["--save", str(tmp_path / "none"), "--contender", "Adam"], capsys)
    assert "'Adam' does not run; those who do: Lion, float32" in said


def test_what_is_not_tuned_or_has_not_run_says_what_to_run(goal):
    with pytest.raises(ValueError, match="1-bit vote is not tuned yet: run --part tuning"):
        goal.summary.best_choice([], VOTE)
    with pytest.raises(
        ValueError, match="Lion, float32 has not run, so there is no goal: run --part curves"
    ):
        goal.summary.goals([])


@pytest.mark.parametrize("warmup", [0, 384, 500])
def test_a_warmup_that_a_run_does_not_outlast_is_refused(goal, warmup):
    with pytest.raises(
        ValueError, match=rf"warm-up of {warmup} steps in a run of 384.*give 1 to 383"
    ):
        goal.contenders.one_bit_adam(None)(lambda t: 1e-3, 384, warmup)
