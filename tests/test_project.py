"""What others join by: workflows, the citation, the changelog, and pages whose words the sources have."""

import ast
import re
import tomllib
import warnings
from pathlib import Path

import pages
import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def jobs():
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.name}: {name}", job


def test_targets_that_are_named_are_there():
    makefile, page = ((ROOT / name).read_text() for name in ("Makefile", "CONTRIBUTING.md"))
    named = re.findall(r"[`$] ?make ([a-z-]+)", page)
    assert len(named) > 6
    assert [x for x in named if not re.search(rf"^{x}:", makefile, re.M)] == []


def test_workflows_make_targets_that_are_there():
    """A job may only read, ends in time, and tries the Pythons of pyproject.toml."""
    makefile = (ROOT / "Makefile").read_text()
    pythons = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    for where, job in jobs():
        assert job["timeout-minutes"] <= 240, where
        matrix = job.get("strategy", {}).get("matrix", {})
        assert matrix.get("python", pythons) == pythons, where
        ran = "\n".join(step.get("run", "") for step in job["steps"])
        targets = [
            *re.findall(r"make ([a-z-]+)", ran),
            *(x["target"] for x in matrix.get("include", ())),
        ]
        missing = [x for x in targets if not re.search(rf"^{x}:", makefile, re.M)]
        assert not missing, f"{where}: {missing}"
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path


def test_issue_forms_have_what_github_asks_for():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert form["name"] and form["description"]
            assert all(part["type"] in ("textarea", "input") for part in form["body"])
            assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_is_of_this_version_and_its_bibtex_says_the_same():
    text = (ROOT / "CITATION.cff").read_text()
    citation = yaml.safe_load(text)
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]
    assert f"version = {{{PROJECT['version']}}}" in text
    for paper in citation["references"]:
        assert f"journal = {{arXiv:{paper['url'].rsplit('/')[-1]}}}" in text
        names = " and ".join(f"{x['given-names']} {x['family-names']}" for x in paper["authors"])
        bibtex = re.sub(r"[{}]|\n#", "", text[text.index("# The same for BibTeX") :])
        assert names in re.sub(r"\s+", " ", bibtex)


def test_a_renamed_argument_warns_as_the_page_shows_and_no_old_name_is_overdue():
    names = {"warnings": warnings}
    exec(pages.block("../CONTRIBUTING.md", "run: renamed"), names)
    with pytest.warns(DeprecationWarning, match="workers=, axis= goes in 0.5") as caught:
        assert names["vote"](1, axis="data") == names["vote"](1, workers="data")
    assert caught[0].filename == __file__
    now = [int(x) for x in PROJECT["version"].split(".")[:2]]
    sources = "\n".join(path.read_text() for path in (ROOT / "lioncub_jax").rglob("*.py"))
    ends = re.findall(r"\bgoes in (\d+)\.(\d+)", sources)
    assert all(now < [int(x) for x in end] for end in ends)


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
