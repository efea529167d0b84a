"""Time to loss: methods are the same simulated and on devices, all are tuned alike, sums are right.

And pictures, which share what the planner has traced here.
"""

import json
import math
import re
from functools import partial
from pathlib import Path

import convergence
import jax
import numpy as np
import pictures
import pytest
import report
import time_to_loss
from conftest import AXIS, run_workers, scanned
from goal import contenders, curves, evidence, lengths, pages, runner, study, trainer, tuning
from goal.contenders import CONTENDERS, Hyper
from goal.lab import NOTHING
from goal.model import MODEL, STEPS, TOKENS

WORKERS = 8


# One of each kind: means, votes, what owners answer, and who goes alone.
KINDS = "lion", "vote", "owner-adamw", "local-8-coded"
ALL = CONTENDERS | contenders.LONG | contenders.REASONS
OTHERS = [name for name in ALL if name not in KINDS and ALL[name].made]


@pytest.mark.parametrize("names", [KINDS, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_a_method_is_the_same_simulated_and_as_a_transform(names):
    """Codes at the edge of a step may fall to its other side by rounding: of a few elements, no more.

    A mean in bfloat16 is also rounded behind the sum, which is not simulated: to 8 bits.
    """
    rng, steps = np.random.default_rng(0), 12
    shapes = {"attention": (40, 33), "write": (130,), "norm": ()}
    params = {k: np.asarray(rng.normal(size=s), np.float32) for k, s in shapes.items()}
    grads = {  # a common part and noise
        k: (0.5 + rng.normal(size=(steps, WORKERS, *s))).astype(np.float32)
        for k, s in shapes.items()
    }
    given = Hyper(0.01, 0.8, 0.9, 0.1), lambda t: 0.01 * (1 + t % 3)

    def simulated(name):
        simulator = ALL[name].simulated(*given)
        first = simulator.init(params, WORKERS)
        return scanned({0: simulator}, {0: first}, params, grads)[0][0]

    txs = {name: ALL[name].made(*given, AXIS) for name in names}
    found = run_workers(txs, params, grads)
    for name in names:
        near = 2**-8 if name.startswith("adamw-micro") else 1e-5
        for leaf, want in jax.jit(simulated, static_argnums=0)(name).items():
            largest = np.abs(want).max()
            differ = np.abs(found[name][0][leaf] - want) > near * largest
            assert largest > 0 and differ.mean() < 0.005, (name, leaf, differ.mean())


# --- Tuning


@pytest.mark.parametrize("runs", [8, 6, 3])
@pytest.mark.parametrize("best", [Hyper(1e-3, 0.8, 0.9, 1.0), Hyper(2.5e-4, 0.9, 0.99, 0.1)])
def test_every_search_has_as_many_runs_and_none_twice(runs, best):
    seen = []

    def measure(hyper):
        seen.append(hyper)
        if hyper.rate > 2 * best.rate:
            return math.inf  # it diverged
        away = abs(math.log2(hyper.rate / best.rate))
        return away + (hyper.b1 != best.b1) + 0.3 * (hyper.decay != best.decay)

    family = contenders.LION
    found = tuning.search(measure, tuning.first(family), family, runs)
    assert len(seen) == len(set(seen)) == runs
    assert measure(found) == min(map(measure, list(seen)))
    if runs == 8:
        assert found[1:] == best[1:] and 0.5 <= found.rate / best.rate <= 2


# --- A run


@pytest.mark.parametrize("name", ["vote", pytest.param("local-8-coded", marks=pytest.mark.long)])
def test_a_run_learns_says_how_noisy_it_is_and_goes_on_after_a_stop(monkeypatch, tmp_path, name):
    for known, few in {"POINTS": 4, "WINDOWS": 8, "MODEL": MODEL | {"layers": 1}}.items():
        monkeypatch.setattr(curves, known, few)
    one = ALL[name]
    of = "curve", name, TOKENS[0], 4, "alike", 2e-3, *one.family.betas, 0.1, 0
    run = curves.Run(*of, steps=16 if name == "vote" else 32, width=32)
    times = {"compiling", "cpu_seconds"}
    runs, write = curves.runner(tmp_path), runner.Stopped.write

    def stopping(self, state, points, *taken):
        write(self, state, points, *taken)
        if len(points) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.Stopped, "write", stopping)
        runs.run(run)
    after, whole = runs.run(run), runs.run(run)
    assert all(after[x] == whole[x] for x in whole if x not in times) and not list(
        tmp_path.iterdir()
    )
    assert after["loss"][-1] < after["loss"][0] < 8.5 and np.mean(after["variance"]) > 0
    if name == "vote":
        assert 0.5 < np.mean(after["agreement"]) < 0.7 < np.mean(after["agree"]) < 0.95


def test_long_runs_are_tuned_by_four_runs_from_what_was_best_in_short_ones(tmp_path):
    ran = []

    class Runner:
        def run(self, run):
            ran.append(run)
            return run._asdict() | {"loss": [abs(math.log2(run.rate / 0.004))]}

    once = report.Once(tmp_path / "rows.jsonl", curves.key_of, Runner())
    run = partial(lengths.run, once=once, short=report.read(time_to_loss.ROWS))
    job = lengths.Job("adamw", 1024)
    run(job)
    run(job)  # nothing twice
    assert [one.rate for one in ran] == [0.00566, 0.00283, *[0.00283] * 2, *[0.00283] * 3]
    assert [one.seed for one in ran] == [tuning.SEED] * 4 + [0, 1, 2]
    run(lengths.Job("adamw", 4096, factors=(0.5, 0.25), seeds=2))
    assert [one.rate for one in ran[7:]] == [0.00142, 0.000708, 0.00142]
    run(lengths.PARTS["reason"][-1]._replace(like="adamw", seeds=1))  # the mean of signs
    assert [one[5:9] for one in ran[10:]] == [
        (0.00566, 0.8, 0.98, 0.05), (0.0113, 0.8, 0.98, 0.025)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"powersgd-16 has not run .*: run --part 1024 first"):
        run(lengths.Job("powersgd-16", 4096, factors=(0.5,)))


def test_agreement_is_that_of_pairs():
    votes = {"a": np.array([[1.0, -1, 0], [2, 1, 0], [3, 1, 0], [4, -1, 0]])}
    # 6 of 6 pairs are alike, then 2 of 6; a zero is no vote.
    assert curves.agreement(votes) == pytest.approx((6 + 2) / 12)


def test_the_real_step_of_a_contender_trains():
    made = contenders.timed("one-bit-adam", contenders.CODED)
    racing = trainer.Trainer(trainer.mesh_of(jax.devices()[:2]), made, TOKENS[0])
    before = jax.tree.leaves(racing.state.params)[0].copy()
    racing.step()
    racing.step()
    assert not np.array_equal(before, jax.tree.leaves(racing.state.params)[0])


# --- Sums


def ran(name, end, tokens=TOKENS[0], workers=4, seeds=3, **more):
    """Seeds whose loss falls along a line from 5 to this."""
    hyper = tuning.first(CONTENDERS[name].family)
    losses = [5.0 + (end - 5.0) * (n + 1) / curves.POINTS for n in range(curves.POINTS)]
    return [
        curves.Run("curve", name, tokens, workers, "alike", *hyper, seed)._asdict()
        | {"loss": losses} | more
        for seed in range(seeds)
    ]  # fmt: skip


def time(name, seconds, stage=""):
    return {
        "part": "time", "contender": name, "stage": stage, "tokens": TOKENS[0],
        "network": "100mbit", "workers": 4, "seconds": seconds, "fastest": seconds,
        "slowest": seconds, "interface_bytes": 1.0,
    }  # fmt: skip


def story(vote=3.0, **more):
    """Lion falls from 5 to 3 bits, AdamW to 2.5, the vote as fast as Lion, in steps of its own time."""
    rows = ran("lion", 3.0) + ran("adamw", 2.5) + ran("vote", vote, **more)
    rows += ran("owner-adamw", 3.5) + ran("powersgd-16", 3.5)
    return [*rows, time("lion", 4.0), time("adamw", 4.0), time("vote", 0.25), time(NOTHING, 0.125)]


def timed(rows):
    """The one cell of the lab that `story` has times of."""
    (cell,) = pages.cells(evidence.evidence(rows))
    assert (cell.tokens, cell.network) == (TOKENS[0], "100mbit")
    return cell


def test_seconds_to_where_the_better_stands_are_steps_times_seconds_of_a_step():
    found = evidence.evidence(story())
    (cell,) = found["cells"]
    assert cell["better"] == "adamw"
    assert list(cell["loss"].values()) == pytest.approx([3.5, 3.0, 2.5])
    assert cell["methods"]["vote"]["steps"] == pytest.approx([0.75 * STEPS, STEPS, None])
    lab = timed(story())
    took = lab.times()
    assert took == pytest.approx(
        {"vote": STEPS / 4, "adamw": 0.8 * STEPS * 4, "lion": STEPS * 4}, rel=1e-3
    )
    assert pages.speedup(took) == ("vote", "adamw", 12.8)
    assert lab.limit() == pytest.approx(0.8 * STEPS / 8, rel=1e-3)


def test_steps_of_several_kinds_each_take_their_own_time_and_torch_those_of_its_method():
    rows = [*story(), *ran("one-bit-adam", 2.5), time("one-bit-adam", 4.0, contenders.FULL)]
    assert "one-bit-adam" not in timed(rows).times()  # not timed yet
    rows += [time("one-bit-adam", 0.25, contenders.CODED), time("torch-adamw-bfloat16", 0.5)]
    took, warm = timed(rows).times(), contenders.WARMUP
    want = warm * 4.0 + (0.8 * STEPS - warm) * 0.25
    assert took["one-bit-adam"] == pytest.approx(want, 1e-3)
    assert took["torch-adamw-bfloat16"] == pytest.approx(0.8 * STEPS * 0.5, 1e-3)


@pytest.mark.parametrize("how", [{"vote": 3.5}, {"loss": [None] * curves.POINTS}])
def test_who_never_gets_there_or_diverges_is_said_so(how):
    found = evidence.evidence(story(**how))
    learned = found["cells"][0]["methods"]["vote"]
    assert learned["steps"][1:] == [None, None] and (learned["loss"] is None) == ("loss" in how)
    took = timed(story(**how)).times()
    assert "vote" not in took
    assert pages.speedup(took) == ("nobody", "adamw", None)


def test_what_only_one_of_several_runs_reaches_is_not_measured():
    """The mean of two is at 3 bits in the last step, and one of them ends above."""
    rows = story() + ran("owner-lion", 2.9, seeds=1) + ran("owner-lion", 3.1, seeds=1, seed=1)
    found = evidence.evidence(rows)["cells"][0]["methods"]
    assert found["owner-lion"]["steps"] == [pytest.approx(0.75 * STEPS, 0.01), None, None]
    assert found["owner-lion"]["runs"] == [2, 0, 2] and found["owner-lion"]["seeds"] == 2
    assert found["vote"]["runs"] == [3, 3, 3] == found["adamw"]["runs"]
    ratio = tuning.first(contenders.LION).rate / tuning.first(contenders.ADAM).rate
    assert found["vote"]["rate_over_adamw"] == pytest.approx(ratio, 1e-3)


def test_packaged_evidence_and_numbers_of_pages_are_those_of_the_committed_rows():
    """If not: python benchmarks/convergence.py --report."""
    stale = [path.name for path, text in convergence.made().items() if path.read_text() != text]
    assert stale == []
    rows = report.read(time_to_loss.ROWS, curves.key_of)
    rates = {f"{row['rate']:g}" for row in rows if row["part"] == "curve"}  # of a small model alone
    for page in ("README.md", "docs/how_to/choose.md", "docs/how_to/planner.md"):
        text = (pages.ROOT / page).read_text()
        # The losses on the first page are differences, of which one may look like a rate.
        before, _, losses = text.partition("<!-- losses -->")
        shown = re.findall(r"\d+\.\d+", before + losses.partition("<!-- end -->")[2])
        assert len(rates) > 5 and rates.isdisjoint(shown), page


# --- The study of lengths: losses whose differences and lines are known


def studied(losses, steps=1024, width=128, rates=(1e-3,)):
    """Seeds of methods that end at a loss, each with a part of its own; AdamW has the same rates."""
    return [
        curves.Run(
            "curve", name, 256, 8, "alike", rate, 0.8, 0.98, 0.1, seed, steps, width
        )._asdict() | {"loss": [5.0] * 15 + [loss + 0.1 * seed + (rate != rates[0])]}
        for name, each in losses.items()
        for seed, loss in enumerate(each)
        for rate in (rates if seed == 0 else rates[:1])
    ]  # fmt: skip


def test_differences_are_paired_over_seeds_and_small_ones_are_alike():
    rows = studied({"adamw": [2.0, 2.0, 2.0], "lion": [2.1, 2.11, 2.09], "vote": [2.1, 2.1, 2.1]})
    cell = study.Study(rows).cell(study.NOISY)
    far, near = cell.behind("lion"), cell.behind("vote", "lion")
    # What is left of lion's seeds, a third of it in each of the other two methods' parts.
    std = math.sqrt((2 * 0.01**2) * (2 / 3) / 4)
    assert cell.pooled.std == pytest.approx(std) and cell.pooled.freedom == 4
    assert far.value == pytest.approx(0.1) and far.error == pytest.approx(
        2.776 * std * (2 / 3) ** 0.5, 1e-3
    )
    assert re.fullmatch(r"\+0\.000 ± 0\.0\d\d \(alike\)", near.text()) and "alike" not in far.text()
    # A method of one seed, in variances of a run: 1, of AdamW's mean 1/3, and of its seed's part 2/9.
    alone = study.Study([*rows, *studied({"owner-adamw": [2.0]})]).cell(study.NOISY)
    wider = (alone.behind("owner-adamw").error / alone.behind("vote").error) ** 2
    assert alone.pooled.freedom == 4 and wider == pytest.approx((1 + 1 / 3 + 2 / 9) / (2 / 3))


def test_tokens_to_a_loss_are_on_a_line_through_the_last_losses_of_lengths():
    rows = studied({"adamw": [2.0] * 2, "vote": [2.1] * 2, "lion": [2.9] * 2})
    rows += studied({"adamw": [1.8] * 2, "vote": [1.9] * 2}, 4096)
    rows += studied({"adamw": [2.5] * 2, "lion": [3.0] * 2}, 256)
    table = study.Study(rows).tokens_to_a_loss()
    # AdamW falls by 0.5 in a factor of four, and then by 0.2: 0.1 is a fifth and a half of that.
    assert re.findall(r"`lion_cub\(...\)` \| (.*) \|", table) == ["1.32 ± 0.00 | 2.00 ± 0.00"]
    assert "optax.lion" not in table  # it never comes there


def test_the_planner_has_ratios_of_lines_where_lengths_ran_and_else_of_steps():
    rows = studied(
        {"adamw": [2.0] * 2, "vote": [2.1] * 2, "owner-adamw": [1.95] * 2, "lion": [2.7] * 2}
    )
    rows += studied({"adamw": [2.4] * 2}, 256)
    long = evidence.evidence([*story(), *rows])["cells"][-1]
    assert (long["steps"], long["workers"]) == (1024, 8)
    # AdamW falls by 0.4 in a factor of four, and its line goes on by two below its runs.
    ratios = {name: how["to_loss"]["ratio"] for name, how in long["methods"].items()}
    want = {"adamw": 1.0, "vote": 2**0.5, "owner-adamw": 0.5**0.25, "lion": None}
    assert ratios == {name: x and pytest.approx(x, 1e-3) for name, x in want.items()}
    short = evidence.evidence(story())["cells"][0]["methods"]
    assert short["vote"]["to_loss"] == {"ratio": 1.25, "error": 0.0, "runs": 3}
    assert short["owner-adamw"]["to_loss"]["ratio"] is None


def test_sizes_are_lines_and_what_did_not_run_is_said():
    rows = []
    for n, width in enumerate((64, 128, 256)):
        losses = {"adamw": [2.0] * 2, "vote": [2.1 + 0.05 * n, 2.11 + 0.05 * n]}
        rows += studied(losses, width=width, rates=(1e-3, 2e-3, 5e-4))
    tables = study.Study(rows).tables()
    assert "The best rate over AdamW's changes by a factor of 1.00" in tables["sizes"]
    assert re.search(r"moves the distance to AdamW by \+0\.0[45]\d ± 0\.0", tables["learnt"])
    assert "vote: 2 of 3" in tables["not run"] and "local-8-coded: 0 of 2" in tables["not run"]
    assert "1. Not measured yet: the vote beside float32 Lion.\n" in tables["learnt"]


def test_the_last_line_of_the_benchmark_is_its_figures(capsys):
    time_to_loss.main(["--again"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    # In every cell of the lab the planner names a method within 5 % of the best of its own.
    assert figures["advice_agrees"] == 1.0 and len(figures["advice"]) >= 7


# --- Pictures


def test_pages_show_each_picture_that_the_command_draws():
    written = [*pages.ROOT.glob("docs/**/*.md"), *pages.ROOT.glob("*.md")]
    links = [x for page in written for x in re.findall(r"\]\((\S+\.png)\)", page.read_text())]
    drawn = {path.name for path in pictures.FOLDER.glob("*.png")}
    assert {Path(link).name for link in links} == drawn == {pictures.NAME}


def test_pictures_are_drawn_from_committed_rows_and_are_no_older(tmp_path):
    """If not: python benchmarks/pictures.py."""
    pictures.save(tmp_path / pictures.NAME)
    committed = pictures.numbers_in(pictures.FOLDER / pictures.NAME)
    assert committed == pictures.numbers_in(tmp_path / pictures.NAME)


# --- Curves whose answers are known

FALLS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("losses", "target", "steps"),
    [
        (FALLS, 0.45, 6.5),  # between points
        ([0.4] * 10, 0.5, 1),  # before the first point nothing is known
        ([1.0, 0.5, *[0.9] * 7, 0.05], 0.3, 9 + 0.2 / 0.45),  # a line between the least so far
        ([*FALLS[:5], *[math.inf] * 5], 0.5, None),
    ],
)
def test_steps_are_where_the_curve_first_is_below_the_target(losses, target, steps):
    curve = evidence.falling([[(n + 1, x) for n, x in enumerate(losses)]])
    found = evidence.reaches(curve, target)
    assert found == (steps and pytest.approx(steps))
