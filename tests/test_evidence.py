"""How many times Lion's steps a method takes, by curves whose answers are known; and the packaged file."""

import json

import convergence
import pytest
from goal import evidence as goal_evidence
from goal import rows as goal_rows
from study import evidence, store

from lioncub_jax.planner import evidence as packaged


def row(method, losses, seed=0, part="main", task="images", split="iid", workers=8, **more):
    """A run of as many points as losses."""
    return {
        "part": part, "task": task, "split": split, "workers": workers, "method": method, "seed": seed,
        "dataset": "d", "parameters": 10, "steps": 100, "curve": {evidence.LOSS[task]: losses}, **more,
    }  # fmt: skip


LION = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]  # 60 % of it is 0.5, 80 % is 0.3


def seeds(method, losses, **more):
    return [row(method, losses, seed, **more) for seed in (0, 1)]


def factors_of(rows, method, **wanted):
    (found,) = [
        one
        for one in evidence.evidence(rows)["factors"]
        if one["method"] == method and all(one[k] == v for k, v in wanted.items())
    ]
    return found


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        (LION, [1.0, 1.0, 1.0]),
        ([x + 0.1 for x in LION], [7 / 6, 9 / 8, None]),
        ([x + 0.05 for x in LION], [6.5 / 6, 8.5 / 8, None]),  # between points
        ([x + 0.5 for x in LION], [None, None, None]),
        ([0.4] * 10, [1 / 6, None, None]),  # before the first point nothing is known
        # The least so far is a line from 0.5 to 0.05 between the last two points.
        ([1.0, 0.5, *[0.9] * 7, 0.05], [2 / 6, (9 + 0.2 / 0.45) / 8, (9 + 0.4 / 0.45) / 10]),
        ([None] * 10, [None, None, None]),
        ([*LION[:5], *[None] * 5], [None, None, None]),
    ],
)
def test_a_factor_is_where_the_curve_first_is_below_the_target(losses, factor):
    rows = [*seeds("lion", LION), *seeds("vote", losses)]
    found = factors_of(rows, "vote")["factor"]
    assert found == [x and pytest.approx(x, abs=1e-3) for x in factor]


def test_curves_are_averaged_over_seeds_that_both_have_and_spread_is_of_single_ones():
    own = [
        row("vote", [x + 0.1 for x in LION], 0),
        row("vote", LION, 1),
        row("vote", [9.0] * 10, 7),
    ]
    found = factors_of([*seeds("lion", LION), row("lion", LION, 2), *own], "vote")
    assert found["seeds"] == 2 and found["reached"] == [2, 2, 1]
    assert found["factor"][:2] == pytest.approx([6.5 / 6, 8.5 / 8], abs=1e-3)
    singles = 7 / 6 - 1, 9 / 8 - 1
    assert found["std"][:2] == pytest.approx([x / 2**0.5 for x in singles], abs=1e-3)
    assert found["std"][2] is None


def test_lion_is_one_at_every_target_even_where_its_loss_rises():
    rising = [*LION[:7], 0.45, 0.5, 0.6]
    rows = [*seeds("lion", rising), *seeds("vote", LION)]
    assert factors_of(rows, "lion")["factor"] == [1.0, 1.0, 1.0]
    assert factors_of(rows, "vote")["factor"] == [1.0, 1.0, 1.0]


def test_runs_of_the_first_part_count_and_those_of_other_batches_do_not():
    rows = [
        *seeds("lion", [9.0] * 10, part="candidates"),
        *seeds("lion", LION),
        *seeds("owner-1-rotated", LION, part="candidates"),
        *seeds("vote", LION, part="local"),
        *seeds("vote", LION, part="noniid", split="dirichlet"),
        *seeds("diloco", LION, part="peers", workers=4),  # without Lion there
        row("adamw", LION),  # one seed has no spread
    ]
    found = evidence.evidence(rows)
    assert [one["method"] for one in found["factors"]] == ["lion", "owner-1-rotated"]
    assert found["factors"][1]["factor"] == [1.0, 1.0, 1.0]
    assert found["tasks"] == {"images": {"dataset": "d", "parameters": 10, "steps": 100}}


def test_data_that_differ_are_apart_and_text_is_in_bits():
    rows = [
        *seeds("lion", LION, task="text"),
        *seeds("lion", LION, task="text", part="noniid", split="class"),
        *seeds("vote", [x + 0.1 for x in LION], task="text", part="noniid", split="class"),
    ]
    assert factors_of(rows, "vote", data="different")["factor"][1] == 1.125


def test_rows_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match=r"no rows of 'lion' in the parts main, .*run them first"):
        evidence.evidence(seeds("vote", LION))
    with pytest.raises(ValueError, match=r"images: rows of more than one study cannot be compared"):
        evidence.evidence([*seeds("lion", LION), *seeds("vote", LION, dataset="other")])


def test_the_packaged_file_is_what_the_committed_rows_say():
    """If not: python benchmarks/convergence.py --evidence."""
    rows = store.read(convergence.ROWS)
    more = goal_evidence.told(goal_rows.read(convergence.GOAL_ROWS))
    assert convergence.EVIDENCE.read_text() == evidence.text_of(evidence.evidence(rows, more))


def test_every_method_that_the_planner_asks_about_is_one_of_the_studies():
    from study.methods import METHODS

    from lioncub_jax import planner

    schemes = (*planner.SCHEMES, *planner.OTHERS, *planner.PEERS)
    asked = {one.learns for one in schemes if one.learns}
    on_gpt = {planner.scheme_named(name).learns for name, _ in goal_evidence.SCHEMES.values()}
    assert asked <= METHODS.keys() | on_gpt and on_gpt <= asked
    assert planner.learned("lion", 1000, 10**5).factor == 1.0
    assert {task.name for task in packaged.tasks()} == {*evidence.LOSS, goal_evidence.TASK}


def test_time_to_loss_tells_of_runs_with_the_option_that_the_planner_plans():
    """Of 4 bits and not 3; factors are of float32 Lion's steps on the same task."""

    def run(name, option, losses, seed):
        about = {"part": "curve", "contender": name, "option": option, "workers": 4, "steps": 384}
        return about | {"seed": seed, "taken": [96, 192, 288, 384], "loss": losses}

    rows = [run("Lion, float32", 0, LION[:4], seed) for seed in range(2)]
    coded = [run("AdamW, in codes", 3, LION[:4], seed) for seed in range(2)]
    assert [one["method"] for one in goal_evidence.told([*rows, *coded]).factors] == ["lion"]
    coded = [row | {"option": 4} for row in coded]
    told = goal_evidence.told([*rows, *coded])
    assert [(one["method"], one["factor"][1]) for one in told.factors] == [
        ("lion", 1.0), ("adamw-4", 1.0),
    ]  # fmt: skip
    assert told.tasks["gpt"]["steps"] == 384
    with pytest.raises(ValueError, match=r"rows of \[4, 8\] workers cannot be compared"):
        goal_evidence.told([*rows, coded[0] | {"workers": 8}])


def test_the_program_writes_the_file(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    store.append(rows, [one | {"batch": 1, "rate": 1.0} for one in seeds("lion", LION)])
    monkeypatch.setattr(convergence, "EVIDENCE", tmp_path / "evidence.json")
    monkeypatch.setattr(convergence, "GOAL_ROWS", tmp_path / "none.jsonl")
    convergence.main(["--evidence", "--save", str(rows)])
    found = packaged.read((tmp_path / "evidence.json").read_text())
    assert [one["factor"] for one in found["factors"]] == [[1.0, 1.0, 1.0]]
    with pytest.raises(SystemExit):
        convergence.main(["--evidence", "--report"])
    assert "--evidence runs nothing and draws nothing: give it alone" in capsys.readouterr().err


def test_a_file_of_another_format_is_refused():
    with pytest.raises(
        ValueError, match=r"evidence.json is of format 2, and this version reads 1: inst"
    ):
        packaged.read(json.dumps({"format": 2}))
    with pytest.raises(ValueError, match=r"targets \[0.5\], and not \[0.6, 0.8, 1.0\]: install"):
        packaged.read(json.dumps({"format": 1, "targets": [0.5]}))
