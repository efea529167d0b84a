"""Trainers that people run, by `make trainers`: the lines that they need."""

import ast

import pages
import pytest
import trainers


@pytest.mark.parametrize("trainer", trainers.TRAINERS, ids=lambda x: x.file)
def test_a_trainer_needs_ten_lines_at_most_and_none_without_the_library(trainer):
    source = trainer.source()
    lines = trainers.lines_of(source)
    assert 0 < len(lines) <= 10 and any("lc." in line for line in lines)
    plain = ast.parse(trainers.written(source, "plain", 3))
    names = {x.id for x in ast.walk(plain) if isinstance(x, ast.Name)}
    assert not names & {"lc", "workers"}
    other = trainers.written(source, "lion_cub", 3)
    assert "lc.lion_cub(" in other and "owner_adamw(" not in other and "\nSTEPS, " in other
    mark = {"flax_nnx": "recipe: flax_nnx"}[trainer.file]
    assert pages.block("how_to/large_trainers.md", mark) == trainers.recipe(trainer)
    assert (pages.ROOT / f"requirements/trainers/{trainer.requirements}.txt").exists()
