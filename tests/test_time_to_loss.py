"""Time to loss: that goals, steps, seconds and factors are summed up rightly."""

import jax
import pytest
import time_to_loss
from goal import contenders, curves, planned, summary
from report import read
from study import evidence

LION, VOTE, ADAM, WARMED = "Lion, float32", "1-bit vote", "AdamW, float32", "1-bit Adam"
CONTENDERS = contenders.CONTENDERS


def curve(name, loss, steps=384, seed=0, part="curve", choice=None):
    """A row of a run whose loss falls like this over its sixteenths."""
    run = curves.Run(part, name, *(choice or CONTENDERS[name].choices[0]), 4, steps, seed)
    taken = [steps * (n + 1) // 16 for n in range(16)]
    return run._asdict() | {"taken": taken, "loss": [loss(n / steps) for n in taken]}


def ran(name, end, **given):
    """Three seeds whose loss falls from 5 to this."""
    return [curve(name, lambda x: 5.0 + (end - 5.0) * x, seed=seed, **given) for seed in range(3)]


def tuned(name):
    """Rows that tune a contender, the first choice the best."""
    choices = CONTENDERS[name].choices
    return [
        curve(name, lambda x, n=n: 9.0 + n, part="tuning", choice=c) for n, c in enumerate(choices)
    ]


def time(name, seconds, stage=""):
    option = CONTENDERS[name].choices[0].option
    return {"part": "time", "contender": name, "stage": stage, "option": option, "network": "100mbit",
            "workers": 4, "seconds": seconds}  # fmt: skip


def story(vote=3.0):
    """Lion falls from 5 to 3 bits, the vote as fast, AdamW twice as fast, each in steps of its own time."""
    found = [row for name in (LION, VOTE, ADAM) for row in tuned(name)]
    found += ran(LION, 3.0) + ran(VOTE, vote) + ran(ADAM, 1.0)
    return [*found, time(LION, 4.0), time(VOTE, 0.25), time(ADAM, 4.0)]


def test_seconds_to_where_lion_stands_are_steps_times_seconds_of_a_step():
    found = story()
    assert summary.goals(found) == pytest.approx({0.6: 3.8, 0.8: 3.4, 1.0: 3.0})
    clock = {"part": "confirm", "contender": VOTE, "network": "100mbit", "steps": 384, "taken": 360}
    found += [clock | {"seconds": 99.0, "reached": True}]
    sums = summary.summed(found)
    assert sums.seconds["100mbit", VOTE, 1.0] == pytest.approx(384 * 0.25)
    assert sums.seconds["100mbit", ADAM, 0.6] == pytest.approx(192 * 0.6 * 4.0)
    assert sums.keys["speedup_over_best_peer_100mbit"] == pytest.approx(192 * 4.0 / (384 * 0.25))
    assert sums.keys["clock_over_product"] == {f"100mbit {VOTE}": [99.0, 90.0, 1.1]}
    assert planned.beside_measured(found) == {}, "nobody was timed where nothing limits"


def test_steps_of_several_kinds_each_take_their_own_time():
    """58 steps in full precision, the others in one bit."""
    warmup = CONTENDERS[WARMED].choices[0].option
    found = story() + tuned(WARMED) + ran(WARMED, 3.0) + [time(WARMED, 4.0, contenders.FULL)]
    assert ("100mbit", WARMED, 1.0) not in summary.summed(found).seconds  # not timed yet
    found.append(time(WARMED, 0.25, contenders.CODED))
    seconds = summary.summed(found).seconds["100mbit", WARMED, 1.0]
    assert seconds == pytest.approx(warmup * 4.0 + (384 - warmup) * 0.25)


def test_who_never_gets_there_is_said_so_and_runs_longer():
    found = story(vote=3.1)
    sums = summary.summed(found)
    assert sums.reaches[VOTE, 1.0] is None and "speedup_over_best_peer_100mbit" not in sums.keys
    way = summary.reach(found + ran(VOTE, 2.5, steps=576), VOTE, 3.0)
    assert (way.steps, way.length) == (pytest.approx(576 * 0.8), 576)


def test_every_contender_is_tuned_over_as_many_choices():
    for made in CONTENDERS.values():
        assert made.like in CONTENDERS if made.like else len(made.choices) == 4
    chosen = summary.best_choice(tuned("PowerSGD, AdamW"), "PowerSGD, rank 4")
    assert chosen.option == 4 and chosen in CONTENDERS["PowerSGD, AdamW"].choices


def test_a_contender_trains_by_the_real_step(monkeypatch):
    small = {"layers": 1, "width": 32, "heads": 2, "context": 64, "tied": False}
    monkeypatch.setattr(curves, "MODEL", small)
    name = "DiLoCo, float32"  # takes some steps alone
    run = curves.Run("curve", name, 1e-3, 8, 4, 32, 0)
    row = curves.train(curves.mesh_of(jax.devices()[:4]), CONTENDERS[name], run)
    assert row["taken"] == [8, 16, 24, 32]
    assert row["loss"][-1] < row["loss"][0] < 8.5


def test_the_planner_names_who_was_first_in_every_measured_network():
    """Or one that was there within 5 % of the first's time: by the committed rows."""
    told = planned.beside_measured(read(time_to_loss.ROWS, curves.key_of))
    assert {"100mbit", "300mbit", "1gbit"} <= told.keys()
    assert all(one["of"] >= 5 and one["ratio"] <= 1.05 for one in told.values()), told


# --- How many times Lion's steps, by curves whose answers are known

FALLS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]  # 60 % of it is 0.5, 80 % is 0.3


def seeds(method, *losses, **more):
    """Runs of as many points as losses, one for each seed."""
    return [{"part": "main", "task": "images", "split": "iid", "workers": 8, "method": method, "seed": n,
             "dataset": "d", "parameters": 10, "steps": 100, "curve": {"loss": x}} | more
            for n, x in enumerate(losses)]  # fmt: skip


def factors_of(*losses):
    lion, vote = evidence.evidence(seeds("lion", FALLS, FALLS) + seeds("vote", *losses))["factors"]
    assert lion["factor"] == [1.0, 1.0, 1.0]
    return vote


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        ([x + 0.05 for x in FALLS], [6.5 / 6, 8.5 / 8, None]),  # between points
        ([0.4] * 10, [1 / 6, None, None]),  # before the first point nothing is known
        # The least so far is a line from 0.5 to 0.05 between the last two points.
        ([1.0, 0.5, *[0.9] * 7, 0.05], [2 / 6, (9 + 0.2 / 0.45) / 8, (9 + 0.4 / 0.45) / 10]),
        ([*FALLS[:5], *[None] * 5], [None, None, None]),
    ],
)
def test_a_factor_is_where_the_curve_first_is_below_the_target(losses, factor):
    assert factors_of(losses, losses)["factor"] == [
        x and pytest.approx(x, abs=1e-3) for x in factor
    ]
