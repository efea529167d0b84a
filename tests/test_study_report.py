"""What the study says of its rows: statistics against numpy, tables, figures, and the document itself."""

import math
import re
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import study.analysis
import study.figures
import study.plan
import study.store
import study.tables
from study.candidates import CANDIDATES
from study.methods import METHODS
from study.peers import PEERS

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "convergence.jsonl"
AGAIN = ROWS.with_name("convergence_rows128.jsonl")
DOCS = ROOT / "docs"
LION = {0: 0.80, 1: 0.84, 2: 0.82, 3: 0.90}


def row(method, seed, value, task="images", part="main", **given):
    """A row of the study in which as little is said as its report needs."""
    metric = {"images": "accuracy", "text": "bits_per_byte"}[task]
    middle = None if value is None else value / 2
    return {
        "part": part, "task": task, "method": method, "workers": 8, "split": "iid", "batch": 8,
        "steps": 800, "rate": 0.001, "seed": seed, "dataset": "none", "parameters": 1000,
        "size": "small", "sent_bytes": 8e5, "bits_per_parameter": 8.0, "syncs": 0,
        "validation": {metric: value} if task == "text" else {"accuracy": 0.5, "loss": value},
        "test": {metric: value},
        "curve": {metric: [0.1 if task == "images" else 5.0, middle, value]},
        "compiling": 1.0, "seconds": 7.4,
    } | given  # fmt: skip


def runs(method, values, **given):
    return [row(method, seed, value, **given) for seed, value in values.items()]


def signs_row(method, drift=None, **given):
    """Kept and drift of two layers, the second half other than the first."""
    kept = {"blocks.0.mlp.up.kernel": [0.5, 0.7], "norm.scale": [0.9, 0.8]}
    said = {"kept_overall": [0.6, 0.75], "kept": kept, "drift": drift}
    return row(method, 0, None, part="signs", **given) | said


def close(found, wanted):
    """Up to the rounding of a few additions in another order."""
    assert math.isclose(found, wanted, rel_tol=1e-12, abs_tol=1e-15), (found, wanted)


# --- Statistics


def test_mean_and_standard_deviation_are_numpys():
    values = [0.81, 0.79, 0.86, 0.80]
    found = study.analysis.mean(values)
    close(found.mean, np.mean(values))
    close(found.std, np.std(values, ddof=1))
    assert (found.n, found.diverged) == (4, 0)


def test_runs_without_a_number_are_counted_and_in_no_mean():
    assert study.analysis.mean([0.5, None, 0.75, None]) == (0.625, math.sqrt(2) / 8, 2, 2)
    assert study.analysis.mean([0.5]) == (0.5, None, 1, 0)
    assert study.analysis.mean([None]) == (None, None, 0, 1)


def test_differences_are_of_pairs_with_equal_seeds():
    ours = {2: 0.81, 0: 0.83, 7: 0.99, 1: 0.80}
    found = study.analysis.difference(runs("vote", ours), runs("lion", LION))
    pairs = np.array([ours[s] - LION[s] for s in (0, 1, 2)])  # 7 and 3 have no partner
    close(found.mean, pairs.mean())
    close(found.std, pairs.std(ddof=1))
    assert (found.n, found.diverged) == (3, 0)


def test_a_pair_with_a_diverged_run_is_shown_and_not_averaged():
    found = study.analysis.difference(runs("vote", {0: 0.81, 1: None}), runs("lion", LION))
    close(found.mean, 0.01)
    assert (found.n, found.diverged) == (1, 1)


STD = float(np.std([LION[s] for s in (0, 1, 2)], ddof=1))  # 0.02


@pytest.mark.parametrize(
    ("task", "away", "within"),
    [
        ("images", -0.99 * STD, True),
        ("images", -1.01 * STD, False),
        ("images", 5 * STD, True),
        ("text", 0.99 * STD, True),
        ("text", 1.01 * STD, False),
        ("text", -5 * STD, True),
    ],
)
def test_within_one_std_asks_for_the_bad_side_of_lions_std_at_the_same_seeds(task, away, within):
    mean = np.mean([LION[s] for s in (0, 1, 2)])
    ours = {0: mean + away - 0.05, 1: mean + away + 0.05, 2: mean + away}
    rows, lion = runs("vote", ours, task=task), runs("lion", LION, task=task)
    assert study.analysis.within_one_std(rows, lion) is within


def test_within_one_std_needs_two_seeds_and_no_divergence():
    lion = runs("lion", LION)
    assert study.analysis.within_one_std(runs("vote", {0: 0.8}), lion) is None
    assert study.analysis.within_one_std(runs("vote", {0: 0.9, 1: None, 2: 0.9}), lion) is False


@pytest.mark.parametrize(
    ("task", "lion", "vote", "sync", "lost", "share"),
    [
        ("images", 0.8, 0.4, 0.7, 0.4, 0.75),
        ("images", 0.8, 0.4, 0.3, 0.4, -0.25),
        ("text", 3.0, 3.5, 3.1, 0.5, 0.8),
        ("text", 3.0, 2.9, 2.9, -0.1, None),
    ],
)
def test_recovered_is_the_part_of_the_loss_that_comes_back(task, lion, vote, sync, lost, share):
    def of(method, value, seeds, **given):
        return runs(method, {s: value + s / 64 for s in seeds}, task=task, **given)

    found = study.analysis.recovered(
        of("owner-3", sync, (0, 1), bits_per_parameter=6.0),
        of("vote", vote, (0, 1, 2), bits_per_parameter=1.5),
        of("lion", lion, (0, 1, 5)),
    )
    close(found.lost, lost)
    assert found.bits == 4.0
    if share is None:
        assert found.share is None
    else:
        close(found.share, share)


def test_recovered_says_nothing_about_diverged_runs():
    rows, vote = runs("owner-3", {0: None}), runs("vote", {0: 0.5})
    assert study.analysis.recovered(rows, vote, runs("lion", LION)) == (None, None, 1.0)


@pytest.mark.parametrize(
    "field", [{"size": "paper"}, {"dataset": "other"}, {"steps": 400}, {"parameters": 2}]
)
def test_rows_that_cannot_be_compared_are_refused(field):
    mixed = runs("lion", LION) + runs("vote", {0: 0.8}, **field)
    with pytest.raises(ValueError, match=f"more than one {next(iter(field))}"):
        study.analysis.checked(mixed)
    apart = runs("lion", LION) + runs("vote", {0: 0.8}, task="text", **field)
    assert study.analysis.checked(apart) == apart


def test_two_rows_of_one_run_are_refused_but_not_two_rates_of_tuning():
    tried = [row("vote", 0, 0.8, rate=rate) for rate in (0.001, 0.002)]
    with pytest.raises(ValueError, match="two rows of one run"):
        study.analysis.checked(tried)
    tuning = [one | {"part": part} for part in ("tuning", "betas") for one in tried]
    assert study.analysis.checked(tuning) == tuning
    with pytest.raises(ValueError, match="two rows of one run"):
        study.analysis.checked([tuning[0], tuning[0]])


@pytest.mark.parametrize(
    ("method", "at_8", "at_32"),
    [("lion", 6, 10), ("int8", 6, 10), ("vote", 4, 6), ("owner-3", 4, 6), ("dgc", 3, 5),
     ("terngrad", 10, 16)],
)  # fmt: skip
def test_hops_are_those_of_trees(method, at_8, at_32):
    assert [study.analysis.hops(method, workers) for workers in (8, 32)] == [at_8, at_32]


def test_seconds_of_a_run_are_compute_latency_and_bits():
    rows = runs("lion", {0: 0.8, 1: 0.8, 2: 0.8})
    rows[0]["seconds"] = 100.0  # once something else ran
    compute = study.analysis.compute_seconds(rows, "images", 8, 8)
    close(compute, 6.4 / 800 / 8)
    found = study.analysis.run_seconds(rows[1] | {"syncs": 10}, compute, 1e8)
    close(found, 800 * (compute + 6 * 50e-6) + 10 * 6 * 50e-6 + 8 * 8e5 / 1e8)
    assert study.analysis.compute_seconds(rows, "images", 16, 8) is None


@pytest.mark.parametrize(
    ("method", "bits"), [("lion", 2 * 32), ("vote", 2 + 2 / 128), ("owner-3", 3 + 1 + 17 / 128)]
)
def test_bits_of_a_large_model_hold_no_padding(method, bits):
    found = study.analysis.large_bits(row(method, 0, 0.5))
    assert 0 <= found - bits * 7 / 8 < 2e-3  # long messages are padded, to 512 bytes


def test_layers_are_kinds_of_leaves_and_late_is_the_second_half():
    leaves = {"blocks.0.mlp.up.kernel": [1, 3], "blocks.11.mlp.up.kernel": [0, 5],
              "blocks.0.norm1.scale": [9, 9, 6], "norm.scale": [2], "read.embedding": [4]}  # fmt: skip
    found = {"mlp.up": [3, 5], "norms": [7.5, 2], "read": [4]}
    assert study.analysis.by_layer(leaves) == found


def test_synthetic_signs_are_what_gaussians_give():
    found = study.analysis.synthetic(("vote", "vote-4"), (32,), size=2**14)
    # Both means are about Gaussian, so they agree in 1 - acos(correlation) / pi of all signs. What workers
    # share has a standard deviation of 0.1, and of 0.0798 in the signs; what is their own, of 1.
    of_values, of_signs, both = 1 / 32 + 0.01, 1 / 32 + 0.0798**2, 0.798 / 32 + 0.1 * 0.0798
    wanted = 1 - math.acos(both / math.sqrt(of_values * of_signs)) / math.pi
    assert abs(found["vote", 32] - wanted) < 0.015
    assert found["vote-4", 32] > 0.95


def test_synthetic_rows_can_be_read_back(tmp_path):
    rows = study.analysis.synthetic_rows(("vote",), size=2**12)
    study.store.append(tmp_path / "rows.jsonl", rows)
    assert study.store.read(tmp_path / "rows.jsonl") == rows
    assert [(r["part"], r["method"], r["workers"]) for r in rows] == [
        ("synthetic", "vote", 8), ("synthetic", "vote", 32),
    ]  # fmt: skip


# --- Rows that were repeated


def test_repeats_are_held_against_the_row_of_the_same_seed():
    before = runs("vote", {0: 0.80, 1: 0.84, 2: None, 3: 0.82}) + runs("lion", {0: 0.8})
    after = runs("vote", {1: 0.81, 2: 0.8}) + runs("lion", {0: 0.9})
    one, diverged, lion = study.analysis.repeats(after, before)
    assert (one.before, one.after) == (0.84, 0.81)
    close(one.std, 0.02)
    close(one.away, -1.5)
    assert (diverged.before, diverged.away) == (None, None)
    assert (lion.std, lion.away) == (None, None)  # of one seed


def test_a_row_that_repeats_nothing_is_left_out():
    before = runs("vote", {0: 0.8})
    for other in ({"rate": 0.002}, {"workers": 4}, {"part": "ablation"}):
        assert study.analysis.repeats(runs("vote", {0: 0.8}, **other), before) == []


def test_the_table_of_repeats_pairs_both_with_the_lion_of_before():
    before = runs("lion", LION) + runs("vote", {0: 0.70, 1: 0.74, 2: 0.72})
    after = runs("lion", {0: 0.80}) + runs("vote", {0: 0.71, 1: 0.72})
    found = study.tables.repeated(
        after + runs("vote-2", {0: 0.7}), before + runs("vote-2", {0: 0.7})
    )
    assert cells(found, "MaVo: 1-bit vote") == [
        ["MaVo: 1-bit vote", "images, iid", "8", "72.00 ± 2.83 (2)", "71.50 ± 0.71 (2)", "-10.00", "-10.50",
         "4.32", "1.0"]
    ]  # fmt: skip
    assert not cells(found, "vote, 2 bits, block of 128")  # one seed says little


# --- Tables


def all_rows():
    """Something of every part, for both tasks; of some methods only, and one run diverged."""
    noise = [
        {"part": "synthetic", "task": "gaussian", "method": "vote", "workers": w, "kept": 0.8}
        for w in (8, 32)
    ]
    rows = noise
    for task in ("images", "text"):
        for workers in (8, 32):
            at = {"task": task, "workers": workers}
            rows = rows + runs("lion", LION, **at) + runs("vote", {0: 0.7, 1: 0.7, 2: None}, **at)
            rows += runs("vote-2", {0: 0.75, 1: 0.8}, part="ablation", **at)
            rows += runs("lion", LION, part="local", batch=4, **at)
        for split in ("class", "dirichlet"):
            for method, value in (("lion", 0.8), ("vote", 0.4), ("owner-3", 0.7)):
                rows += runs(method, {0: value, 1: value}, part="noniid", task=task, split=split)
        for rate, loss in (
            (0.001, 0.6),
            (0.002, 0.3),
            (0.004, None),
            (0.008, 0.1 + len(task) / 10),
        ):
            rows.append(row("vote", 1000, loss, task, "tuning", rate=rate))
            rows.append(row("vote-short", 1000, loss, task, "betas", rate=rate))
        for workers, split in ((8, "iid"), (32, "iid"), (8, "class")):
            drift = {"blocks.0.mlp.up.kernel": [0.1, 0.5], "blocks.1.mlp.up.kernel": [0.1, 0.25]}
            rows.append(signs_row("vote", drift, task=task, workers=workers, split=split))
            rows.append(signs_row("owner-3", task=task, workers=workers, split=split))
    return rows


def cells(text, first):
    """The cells of the lines that begin with this one."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def marked(names):
    return "before\n" + "".join(f"<!-- table: {n} -->\nold\n<!-- end -->\nbetween\n" for n in names)


def test_tables_hold_the_numbers_and_say_what_diverged():
    found = {name: table(all_rows()) for name, table in study.tables.TABLES.items()}
    vote = ["MaVo: 1-bit vote", "2404.00438", "8", "8.00", "1.76", "0.001",
            "70.00 ± 0.00 (2), **1 diverged**", "-12.00 ± 2.83 (2), **1 diverged**", "no"]  # fmt: skip
    assert cells(found["main-images"], "MaVo: 1-bit vote")[0] == vote
    assert cells(found["main-text"], "Lion, float32")[0][6:] == ["0.8400 ± 0.0432 (4)", "", ""]
    assert cells(found["class-images"], "owner, 3 bits")[0][-2:] == ["no", "75 %"]
    assert cells(found["ablation-images"], "vote, 2 bits, block of 128")[1][1:4] == [
        "32", "8.00", "77.50 ± 3.54 (2)",
    ]  # fmt: skip
    assert cells(found["local-images"], "Lion, float32")[1][1:3] == ["32", "128"]
    kept = cells(found["signs-images"], "MaVo: 1-bit vote")[0]
    layers = "70.0 % (`blocks.0.mlp.up`) to 80.0 % (`norm`)"
    assert kept[1:] == ["75.0 %", "75.0 %", "75.0 %", layers, "80.0 %", "80.0 %"]
    (drift,) = cells(found["drift-text"], "`mlp.up`")
    assert drift[1:] == ["0.375", "0.375", "–", "–", "0.875"]


def test_peers_are_held_to_lion_and_to_what_they_compress():
    rows = runs("lion", LION) + runs("adamw", {0: 0.70, 1: 0.74}) + runs("sgd", {0: 0.5})
    peers = runs("one-bit-adam", {0: 0.68, 1: 0.74}, part="peers")
    peers += runs("powersgd", {0: 0.55, 1: None}, part="peers")
    table = study.tables.TABLES["peers-images"](rows + peers)
    (adam,) = cells(table, "1-bit Adam")
    assert adam[6:] == ["71.00 ± 4.24 (2)", "-11.00 ± 1.41 (2)", "no", "-1.00 ± 1.41 (2)"]
    (power,) = cells(table, "PowerSGD, rank 4, SGD-momentum")
    assert power[4] == "0.05" and power[-1] == "+5.00 (1)"  # of a matrix; a vector is sent as it is
    assert cells(table, "AdamW, float32")[0][-1] == ""
    assert "No rows yet" in study.tables.TABLES["peers-text"](rows + peers)


def test_candidates_are_sorted_by_how_close_they_come_to_lion():
    at = {"task": "text", "part": "candidates", "workers": 32}
    rows = runs("owner-1", {0: 2.9, 1: 2.8}, **at) + runs("owner-1-faded", {0: 2.7, 1: 2.7}, **at)
    rows += runs("lion", {0: 2.6, 1: 2.7}, **at)
    rows += runs("lion", {0: 2.8, 1: 2.8}, **at | {"workers": 22})
    table = study.tables.TABLES["candidates"](rows)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [line[:2] for line in lines] == [
        ["Lion, float32", "32"], [study.tables.label("owner-1-faded"), "32"], ["Lion, float32", "22"],
        ["owner, 1 bit", "32"],
    ]  # fmt: skip
    assert lines[1][2:] == ["8.00", "2.07", "2.7000 ± 0.0000 (2)", "+0.0500 ± 0.0707 (2)", "yes"]


def test_tuning_marks_a_choice_at_an_edge():
    inside = cells(study.tables.TABLES["tuning"](all_rows()), "MaVo: 1-bit vote")
    wanted = ["images", "iid", "0.001: 0.6000, 0.002: 0.3000, 0.004: –, 0.008: 0.7000", "0.002"]
    assert [line[1:] for line in inside] == [
        wanted,
        ["text", "iid", wanted[2].replace("0.7", "0.5"), "0.002"],
    ]
    rows = [row for row in all_rows() if row.get("rate") != 0.002]
    at_edge = cells(study.tables.TABLES["tuning"](rows), "MaVo: 1-bit vote")
    assert [line[-1] for line in at_edge] == ["0.001 (edge)", "0.008 (edge)"]


def test_rates_that_are_no_longer_in_the_grid_are_left_out():
    rows = all_rows()
    more = [row("vote", 1000, 0.01, task, "tuning", rate=0.3) for task in ("images", "text")]
    assert study.tables.TABLES["tuning"](rows + more) == study.tables.TABLES["tuning"](rows)


def test_betas_have_a_line_for_each_horizon():
    found = study.tables.TABLES["betas"](all_rows())
    assert [line[-1] for line in cells(found, study.tables.label("vote-short"))] == ["0.3000"] * 2


def test_parts_without_rows_name_the_command():
    for name, table in study.tables.TABLES.items():
        part = {"class": "noniid", "dirichlet": "noniid", "seconds": "main", "drift": "signs"}
        part = part.get(name.split("-")[0], name.split("-")[0])
        assert table([]) == f"No rows yet: `python benchmarks/convergence.py --part {part}`.\n"


def test_markers_are_filled_and_filled_again():
    text = marked(study.tables.TABLES)
    once = study.tables.rewritten(text, all_rows(), {})
    assert "old" not in once and once.count("between") == len(study.tables.TABLES)
    assert study.tables.rewritten(once, all_rows(), {}) == once
    assert study.tables.rewritten(once, all_rows()[:-1], {}) != once


def test_a_table_of_another_file_has_that_files_rows(tmp_path):
    text = marked([*study.tables.TABLES, "main-images of cifar"])
    assert study.tables.named_rows(text, tmp_path) == {"cifar": []}
    study.store.append(tmp_path / "cifar.jsonl", runs("lion", {0: 0.25, 1: 0.25}))
    others = study.tables.named_rows(text, tmp_path)
    lines = cells(study.tables.rewritten(text, all_rows(), others), "Lion, float32")
    assert ["25.00 ± 0.00 (2)"] in [line[6:7] for line in lines]
    others["cifar"] += runs("lion", {0: 0.25})
    with pytest.raises(ValueError, match="two rows of one run"):
        study.tables.rewritten(text, all_rows(), others)


@pytest.mark.parametrize("spoil", ["unknown", "unknown of a file", "missing", "twice", "no end"])
def test_wrong_markers_are_refused(spoil):
    names = list(study.tables.TABLES)
    text = {
        "unknown": marked([*names, "other"]),
        "unknown of a file": marked([*names, "other of cifar"]),
        "missing": marked(names[1:]),
        "twice": marked([*names, names[0]]),
        "no end": marked(names)[: -len("<!-- end -->\nbetween\n")],
    }[spoil]
    with pytest.raises(ValueError, match=r"it must have each of .* once"):
        study.tables.rewritten(text, all_rows(), {"cifar": []})


# --- Figures, and the whole


def test_a_report_of_few_rows_has_all_tables_and_figures(tmp_path):
    document = tmp_path / "convergence_tables.md"
    document.write_text((DOCS / "convergence_tables.md").read_text())
    study.tables.report(all_rows(), tmp_path, ROWS.parent)
    assert "| MaVo: 1-bit vote |" in document.read_text()
    assert differences(all_rows(), tmp_path) == []
    document.write_text(document.read_text().replace("-12.00 ± 2.83", "-11.00 ± 2.83"))
    (tmp_path / "convergence_signs.png").unlink()
    assert differences(all_rows(), tmp_path) == ["tables", "convergence_signs.png"]


def test_figures_of_one_part_only_leave_the_rest_empty():
    for part in ("main", "noniid", "signs", "tuning"):
        rows = [r for r in all_rows() if r["part"] == part and r["task"] == "text"]
        assert rows
        for make in study.figures.FIGURES.values():
            assert make(rows).axes


def test_figures_name_methods_that_are_there():
    figures = study.figures
    named = {*figures.CURVES, *figures.BY_WORKERS, *figures.OVER_TRAINING, *figures.STYLES}
    assert named.union(*figures.JOINED) <= METHODS.keys()


def test_without_rows_there_is_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match=r"run python benchmarks/convergence\.py first"):
        study.figures.draw([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_front_is_what_nothing_with_as_few_bits_beats():
    points = {"a": (2.0, 0.5), "b": (2.0, 0.6), "c": (4.0, 0.55), "d": (8.0, 0.9), "e": (9.0, 0.9)}
    assert study.figures.on_front(points, 1) == ["b", "d"]
    assert study.figures.on_front(points, -1) == ["a"]


def differences(rows, folder):
    """What of a document and its pictures is not what the rows give, or not there."""
    text = (folder / "convergence_tables.md").read_text()
    others = study.tables.named_rows(text, ROWS.parent)
    found = [] if study.tables.rewritten(text, rows, others) == text else ["tables"]
    pictures = [f"convergence_{name}.png" for name in study.figures.FIGURES]
    assert all(f"]({name})" in text for name in pictures), "a figure is not shown"
    return found + [name for name in pictures if not (folder / name).is_file()]


def test_the_document_says_what_the_committed_rows_say():
    assert ROWS.is_file(), f"{ROWS.name} is missing: run python benchmarks/convergence.py --report"
    rows = study.store.read(ROWS)
    assert "No rows yet" not in (DOCS / "convergence_tables.md").read_text(), "a part was not run"
    assert differences(rows, DOCS) == [], "run python benchmarks/convergence.py --report"


# --- What the page says


def page():
    return (DOCS / "convergence.md").read_text()


def cost(method, task, workers):
    """What a method of today's layout ends behind Lion, as the page has it."""
    crowd = {"part": "candidates", "task": task, "workers": workers, "method": method}
    rows = study.store.read(AGAIN)
    rows = study.plan.rows_of(rows, **crowd | {"part": "main"})
    if not rows:
        rows = study.plan.rows_of(study.store.read(ROWS), **crowd)
    if not rows:
        return ""
    lion = {**crowd, "part": rows[0]["part"], "method": "lion"}
    lion = study.plan.rows_of(study.store.read(ROWS), **lion)
    behind = -study.analysis.goodness(task) * study.analysis.difference(rows, lion).mean
    return f"{100 * behind:.1f}".replace("-0.0", "0.0") if task == "images" else f"{behind:.3f}"


@pytest.mark.parametrize(
    ("said", "method"),
    [("`owner_lion(...)`", "owner-3"), ("`lion_cub(...)`", "vote"),
     ("`owner_lion(quantizer=quantize.rotated_sign())`", "owner-1-faded")],
)  # fmt: skip
def test_the_page_says_what_each_method_costs(said, method):
    (line,) = cells(page(), said)
    places = product(("text", "images"), (8, 32))
    assert [cell.split(" ")[0] for cell in line[2:]] == [cost(method, *at) for at in places]


def test_bits_per_byte_on_the_page_are_in_the_tables():
    numbers = re.findall(r"\d\.\d{4}", (DOCS / "convergence_tables.md").read_text())
    known = {f"{float(x):.3f}" for x in numbers}
    said = re.findall(r"\b\d\.\d{3}\b", page())
    assert len(said) > 10 and set(said) <= known


def test_the_page_fits_on_a_page_and_its_links_lead_somewhere():
    assert len(page().splitlines()) <= 90
    for name in ("convergence.md", "convergence_tables.md"):
        for file, title in re.findall(r"\]\(([\w.]*\.md)?(?:#([\w-]+))?\)", text_of(name)):
            titles = re.findall(r"(?m)^#+ (.*)$", text_of(file or name))
            anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in titles}
            assert not title or title in anchors, (name, file, title)


def text_of(name):
    return (DOCS / name).read_text()


# --- What the tables' page says of the change to rows of 128


def section(title):
    """The text under a title of the document, in one line."""
    text = (DOCS / "convergence_tables.md").read_text().split(f"\n## {title}\n")[1]
    return " ".join(text.split("\n## ")[0].split())


def owner_to_lion(task, workers, seeds=6):
    """Lion's standard deviation, and the owner minus Lion before and after, over the seeds repeated."""
    at = {"part": "main", "task": task, "workers": workers}
    before, after = study.store.read(ROWS), study.store.read(AGAIN)
    lion = study.plan.rows_of(before, method="lion", **at)
    new = study.plan.rows_of(after, method="owner-3", **at)
    new = [row for row in new if row["seed"] < seeds]
    old = [study.analysis.run_of(row) for row in new]
    old = [row for row in before if "test" in row and study.analysis.run_of(row) in old]
    std = study.analysis.mean(map(study.analysis.value_of, lion)).std
    return std, *(study.analysis.difference(some, lion).mean for some in (old, new))


def by_place():
    """The repeated runs of each method and place, by all of a run but its seed and rate."""
    places = defaultdict(list)
    for one in study.analysis.repeats(study.store.read(AGAIN), study.store.read(ROWS)):
        places[one.run._replace(seed=0, rate=0.0)].append(one)
    return places


def points(some):
    """How far the mean of these repeats moved, in points of accuracy."""
    return 100 * np.mean([one.after - one.before for one in some])


def ran_once(split):
    """Of methods that the change may touch, the runs without another seed in their place."""
    alone = [some[0] for some in by_place().values() if len(some) == 1]
    return [one for one in alone if one.run.method not in EXACT and one.run.split == split]


def change():
    """What the section must say, from the rows: a phrase for each number."""
    before, after = study.store.read(ROWS), study.store.read(AGAIN)
    # Peers and candidates came after the change.
    before = [row for row in before if row["part"] != "candidates" and row["method"] not in PEERS]
    methods = [name for name in METHODS if name not in PEERS and name not in CANDIDATES]
    found = study.analysis.repeats(after, before)
    assert len(found) == len(after), "a row repeats none of before"
    claims = [one for one in found if (one.run.part, one.run.method) in CLAIMS]
    exact = [one for one in found if one.run.method in EXACT]
    yield f"{len(after)} of its {len(before):,} rows"
    yield f"their {len(exact)} runs came out the same to the last digit"
    yield f"by at most {max(abs(one.away) for one in claims):.1f} standard deviations"
    places = [some for some in by_place().values() if some[0] in claims]
    means = [abs(np.mean([one.away for one in some])) for some in places]
    yield f"the means of their seeds by at most {max(means):.1f}"
    missing = set(methods) - {row["method"] for row in after}
    yield f"{len(methods) - len(missing)} of {len(methods)} methods"
    for name in sorted(missing, key=methods.index):
        yield f"`{name}`"
    for name, (task, workers) in product(("owner-3", "vote"), (("images", 8), ("text", 32))):
        at = {"part": "main", "task": task, "workers": workers, "method": name}
        old, new = (
            study.plan.rows_of(rows, **at)[0]["bits_per_parameter"] for rows in (before, after)
        )
        yield f"from {old:.2f} to {new:.2f}"
    yield from change_of_the_owner(claims)
    yield from change_with_classes_apart()
    yield from change_of_what_ran_once()


def change_of_the_owner(claims):
    std, old, new = owner_to_lion("text", 32)
    yield f"from {old:+.4f} to {new:+.4f} bits per byte, where Lion's standard deviation is {std:.4f}"
    yield f"over the first three seeds alone it is {owner_to_lion('text', 32, seeds=3)[2]:+.4f}"
    moves = defaultdict(list)
    for one in claims:
        if one.run.method == "owner-3":
            moves[one.run.task, one.run.workers].append(one.after - one.before)
    assert {len(some) for some in moves.values()} == {6}, "six seeds each"
    lost = moves["text", 32]
    yield f"{sum(x > 0 for x in lost)} of {len(lost)} seeds lost"
    yield f"{np.mean(lost):.4f} ± {np.std(lost, ddof=1):.4f} on average"
    yield f"{abs(100 * np.mean(moves['images', 8])):+.2f} points (images, 8 workers)"  # no -0.00
    yield f"{100 * np.mean(moves['images', 32]):+.2f} points (images, 32)"
    yield f"{np.mean(moves['text', 8]):+.4f} bits per byte (text, 8)"


def change_with_classes_apart():
    apart = {run.method: some for run, some in by_place().items() if run.split == "class"}
    means = {
        name: [100 * np.mean([getattr(one, when) for one in some]) for when in ("before", "after")]
        for name, some in apart.items()
    }
    for name in ("vote", "vote-coded-3"):
        yield f"from {means[name][0]:.2f} to {means[name][1]:.2f} %"
    yield f"one seed by {max(-points([one]) for one in apart['vote']):.1f} points"
    coded = [one for name, some in apart.items() if "coded" in name for one in some]
    yield f"{sum(one.after < one.before for one in coded)} of {len(coded)} runs fell"
    once = [-points([one]) for one in ran_once("class") if "coded" in one.run.method]
    assert len(once) == 4
    yield f"the four that ran once by {min(once):.2f} to {max(once):.2f} points"
    lion = study.plan.rows_of(study.store.read(ROWS), part="noniid", task="images", method="lion")
    seeds = [one.run.seed for one in apart["vote"]]
    lion = study.plan.rows_of(lion, split="class")
    top = 100 * np.mean([study.analysis.value_of(row) for row in lion if row["seed"] in seeds])
    shares = [
        (coded - vote) / (top - vote)
        for coded, vote in zip(means["vote-coded-3"], means["vote"], strict=True)
    ]
    yield f"regain {shares[1]:.0%} (before, over the same three seeds: {shares[0]:.0%}".replace(
        "%", " %"
    )


def change_of_what_ran_once():
    alike, apart = ran_once("iid"), ran_once("class")
    known = [one for one in alike + apart if one.std]
    far = [one for one in known if abs(one.away) > 1]
    farthest = max(far, key=lambda one: abs(one.away))
    yield f"{len(far)} of {len(known)} by more than one standard deviation"
    yield f"{abs(farthest.away):.1f} ({study.tables.label(farthest.run.method)})"
    lion, _, _ = owner_to_lion("images", 8)
    most = max(abs(points([one])) for one in alike)
    yield f"{most:.1f} points of accuracy ({most / 100 / lion:.1f} of Lion's standard deviations)"
    yield f"the mean of the {len(alike)} changes is {points(alike):+.2f} points"
    for one in alike:
        if one.std is None:
            yield f"`{one.run.method}` {points([one]):+.2f}"


def outside():
    """What moved by more than a standard deviation of its own seeds: by place, as the page lists it."""
    for run, some in by_place().items():
        std = some[0].std
        away = np.mean([one.after - one.before for one in some]) / std if std else 0.0
        if abs(away) > 1:
            assert run.task == "images"
            yield run.split, f"`{run.method}` ({points(some):+.2f}; {abs(away):.1f}"


CLAIMS = {("main", name) for name in ("vote", "owner-3")}
EXACT = {"lion", "lion-long", "lion-middle", "lion-short", "adamw", "sgd", "dgc"}  # need no layout


def test_what_the_page_says_of_the_change_are_the_rows():
    text = section("After the change to rows of 128")
    missing = [phrase for phrase in change() if phrase not in text]
    assert not missing, "the section must say these, from the rows"


def test_the_page_lists_all_that_is_outside_what_was_claimed_and_nothing_else():
    text = section("After the change to rows of 128").split("**Outside what was claimed before**")[
        1
    ]
    for split, part in zip(("iid", "class"), text.split("Classes apart"), strict=True):
        said = re.findall(r"`[a-z0-9-]+` \([+-][0-9.]+; [0-9.]+", part)
        assert sorted(said) == sorted(one for at, one in outside() if at == split)


def test_votes_without_coins_came_out_the_same():
    for name in ("ternary", "ties-up"):
        (some,) = [some for run, some in by_place().items() if run.method == name]
        assert [one.before for one in some] == [one.after for one in some]


def test_full_precision_came_out_the_same_so_data_and_machine_did_too():
    found = study.analysis.repeats(study.store.read(AGAIN), study.store.read(ROWS))
    same = [one for one in found if one.run.method in EXACT]
    assert len(same) > 6 and all(one.before == one.after for one in same)


def test_the_owner_is_within_one_standard_deviation_after_the_change_with_classes_apart():
    lion = {"part": "noniid", "task": "images", "split": "class", "method": "lion"}
    lion = study.plan.rows_of(study.store.read(ROWS), **lion)
    for name in ("owner-3", "owner-4"):
        rows = study.plan.rows_of(study.store.read(AGAIN), part="noniid", method=name)
        assert len(rows) == 3 and study.analysis.within_one_std(rows, lion)


def test_the_owner_is_within_one_standard_deviation_after_the_change():
    for task, workers in (("images", 8), ("images", 32), ("text", 8), ("text", 32)):
        std, _, new = owner_to_lion(task, workers)
        assert new * study.analysis.goodness(task) >= -std, (task, workers)
