"""What others join by: workflows, the citation, the changelog, and pages whose words the sources have."""

import ast
import re
import subprocess
import sys
import tomllib
import warnings

import pytest
import yaml
from conftest import run_python
from pages import ROOT, block

import lioncub_jax as lc

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_targets_that_are_named_are_there():
    """By the page and the workflows."""
    named = re.findall(r"[`$] ?make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())
    for path in WORKFLOWS:
        named += re.findall(r"(?:run: make|target:) ([a-z-]+)", path.read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert len(named) > 12
    assert [x for x in named if not re.search(rf"^{x}:", makefile, re.M)] == []


def test_workflows_may_only_read_end_in_time_and_try_our_pythons():
    pythons = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        for name, job in workflow["jobs"].items():
            assert job["timeout-minutes"] <= 240, name
            matrix = job.get("strategy", {}).get("matrix", {})
            assert matrix.get("python", pythons) == pythons, name


def test_an_older_jax_is_refused_at_the_import():
    """Which would end in an ``AttributeError`` somewhere."""
    [floor] = [x.partition(">=")[2] for x in PROJECT["dependencies"] if x.startswith("jax>")]
    *major, patch = map(int, floor.split("."))
    older = f"import jax; jax.__version_info__ = {(*major, patch - 1)}; import lioncub_jax"
    done = run_python("-c", older)
    assert f"ImportError: lioncub_jax needs jax {floor} or newer" in done.stderr, done.stderr


def test_the_citation_is_of_this_version_and_says_what_the_readme_says():
    text = (ROOT / "CITATION.cff").read_text()
    citation = yaml.safe_load(text)
    readme = (ROOT / "README.md").read_text()
    assert f"\nVersion {PROJECT['version'].rpartition('.')[0]} is" in readme
    first = readme.splitlines()[2].partition(".")[0]
    assert PROJECT["description"].partition(":")[0] == first
    assert citation["title"] == f"lioncub_jax: {first[0].lower()}{first[1:]}"
    assert citation["version"] == PROJECT["version"] == lc.__version__
    assert citation["license"] == PROJECT["license"]
    assert f"version = {{{PROJECT['version']}}}" in text  # of its BibTeX


def test_a_renamed_argument_warns_as_the_page_shows_and_no_old_name_is_overdue():
    names = {"warnings": warnings}
    exec(block("../CONTRIBUTING.md", "run: renamed"), names)
    with pytest.warns(DeprecationWarning, match="workers=, axis= goes in 0.6") as caught:
        assert names["vote"](1, axis="data") == names["vote"](1, workers="data")
    assert caught[0].filename == __file__
    now = [int(x) for x in PROJECT["version"].split(".")[:2]]
    sources = "\n".join(path.read_text() for path in (ROOT / "lioncub_jax").rglob("*.py"))
    ends = re.findall(r"\bgoes in (\d+)\.(\d+)", sources)
    assert all(now < [int(x) for x in end] for end in ends)


def test_a_name_that_went_says_what_to_write():
    for module in (lc, lc.training):
        for name, cure in lc.training.GONE.items():
            with pytest.raises(AttributeError, match=re.escape(f"has no {name}: {cure}")):
                getattr(module, name)
    named = {name for cure in lc.training.GONE.values() for name in re.findall(r"\w+(?=\()", cure)}
    known = {*lc.__all__, *lc.training.__all__, *lc.mesh.__all__, "Workers"}
    assert named - known == {"update", "shardings", "device_put", "compiled"}


# --- Errors, by their text


def said_by_the_sources():
    """Every text in the package, with a NUL for each part that is the caller's."""
    for path in (ROOT / "lioncub_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    getattr(part, "value", "\0") if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_errors_on_their_page_are_those_of_the_sources():
    page = (ROOT / "docs/reference/errors.md").read_text()
    named = re.findall(r"^### `(.+)`$", page, re.M)
    assert len(named) >= 20 and page.count("\nCause: ") == page.count("\nCure: ") == len(named)
    sources = "\n\n".join(said_by_the_sources())
    for name in named:
        words = "[^\n]*".join(map(re.escape, filter(None, name.split("..."))))
        assert re.search(words, sources), name


def test_the_newest_version_of_the_changelog_is_that_of_the_project():
    found = re.findall(
        r"^## \[(.+)\] - 20\d\d-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert found[0] == PROJECT["version"] and found == sorted(found, reverse=True)


def test_two_makes_on_a_fresh_clone_make_one_environment(tmp_path):
    """The second waits for the first; what a make that was stopped has left is made again."""
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/lib/half").mkdir(parents=True)
    # In place of pip, which takes half a minute: each call says so, and takes a second.
    pip = "-c 'import time; print(\"pip\", flush=True); time.sleep(1)'"
    command = ["make", "venv", f"PYTHON={sys.executable}", f"PIP_INSTALL={pip}"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    both = [subprocess.Popen(command, **pipe) for _ in range(2)]
    said = [one.communicate(timeout=100)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert sorted(text.count("\npip") for text in said)[0] == 0 and "\npip" in "".join(said), said
    assert not (tmp_path / ".venv/lib/half").exists()
