"""The pages and the API reference: links, names, docstrings, and the tutorial as a newcomer runs it."""

import inspect
import json
import re
import xml.etree.ElementTree as ET

import pytest
from conftest import run_python
from pages import ROOT, cells

import lioncub_jax as lc
from lioncub_jax.tools import plan, probe

PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("*.md")])
API = "".join(page.read_text() for page in ROOT.glob("docs/reference/api/*.md"))
FENCES = re.compile(r"^(```+).*?^\1$", re.S | re.M)


def anchors(page):
    """Those of its headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", FENCES.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_pictures_say_what_they_show(page):
    text = FENCES.sub("", page.read_text())
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead
    assert all(len(alt) > 30 for alt in re.findall(r"!\[(.*?)\]", text, re.S))


def test_the_map_of_the_house_names_files_that_are_there():
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs/develop.md").read_text())
    assert len(named) > 30
    assert [
        x for x in named if not any((ROOT / at / x).exists() for at in ("", "lioncub_jax"))
    ] == []


def test_the_readme_is_short_but_for_its_tables():
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^<!-- plan -->\n```.*?^```\n|^\|[^\n]*\n", "", text, flags=re.S | re.M)
    lines = text.splitlines()
    assert len(lines) <= 90 and max(map(len, lines)) <= 120


def test_drawings_have_titles():
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        title = ET.parse(picture).getroot().find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text


# --- The API reference


def public():
    """Each public thing by its shortest name; a module's are those that its ``__all__`` lists."""
    spaces = {name: x for name in lc.__all__ if inspect.ismodule(x := getattr(lc, name))}
    names = [name for name in lc.__all__ if name not in spaces]
    spaces |= {f"tools.{tool.__name__.split('.')[-1]}": tool for tool in (plan, probe)}
    names += [f"{space}.{name}" for space, module in spaces.items() for name in module.__all__]
    found = {}
    for name in sorted(names, key=lambda name: (name.count("."), name)):
        space, _, last = name.rpartition(".")
        thing = getattr(spaces[space] if space else lc, last)
        if thing not in [x for x in found.values() if inspect.isroutine(x) or inspect.isclass(x)]:
            found[name] = thing
    return found


PUBLIC = public()


def test_every_public_name_is_in_the_reference_once():
    shown = re.findall(r"^\.\. [\w:]+:: lioncub_jax\.([\w.]+)$", API, re.M)
    assert sorted(shown) == sorted(PUBLIC)


def test_the_reference_shows_methods_that_exist_and_every_one_of_checkpoints():
    shown = re.findall(r"lioncub_jax\.([\w.]+)\n   :members: (.+)", API)
    shown = {name: set(members.split(", ")) for name, members in shown}
    for name, members in shown.items():
        assert members <= set(dir(PUBLIC[name])), name
    assert shown["Checkpoints"] == {name for name in vars(lc.Checkpoints) if name[0] != "_"}


def test_the_page_on_checkpoints_gives_the_rate_of_the_runs():
    runs = json.loads((ROOT / "lioncub_jax/tools/plan/evidence.json").read_text())
    long = [run["methods"].get("owner-adamw") for run in runs if run["steps"] > 256]
    rates = {f"{found['rate_over_adamw']:.2f}" for found in long if found}
    page = (ROOT / "docs/how_to/checkpoints.md").read_text().replace("\n", " ")
    assert [f"Of `owner_adamw` begin with {rate} times the rate" in page for rate in rates] == [
        True
    ]


def lacking(name, thing):
    """Sections that the docstring of a function or class should have and has not."""
    said = inspect.getdoc(thing) or ""
    arguments = inspect.isfunction(thing) and inspect.signature(thing).parameters
    fields = getattr(thing, "_fields", ())
    shown = "Attributes:" in said or (inspect.isclass(thing) and issubclass(thing, Exception))
    raises = inspect.isfunction(thing) and re.search(r"^    raise ", inspect.getsource(thing), re.M)
    sections = {
        "Example:": not shown,
        "Args:": bool(arguments) and len(arguments) > 1,
        "Attributes:": bool(fields),
        "Raises:": bool(raises),
        "References:": name.startswith("baselines."),
    }
    whose = re.search(r"rguments[^.]* those of `", said)
    return [
        section for section, due in sections.items()
        if due and not re.search(rf"^{section}", said, re.M) and not (whose and section == "Args:")
    ] + [
        x for x in arguments or ()
        if "Args:" in said and not (whose or re.search(rf"^ +\**{x}:", said, re.M))
    ]  # fmt: skip


def test_public_docstrings_tell_of_arguments_errors_an_example_and_a_source():
    described = {n: x for n, x in PUBLIC.items() if inspect.isfunction(x) or inspect.isclass(x)}
    missing = {name: lacking(name, x) for name, x in described.items()}
    assert {name: sections for name, sections in missing.items() if sections} == {}


# --- What the pages run


@pytest.mark.parametrize(("steps", "nats"), [(60, 3), pytest.param(300, 2, marks=pytest.mark.long)])
def test_the_tutorial_runs_counts_bytes_and_comes_close_to_float32(steps, nats):
    code = cells("start/tutorial.md")
    assert code.count("STEPS, BATCH = 300, 512") == 1
    code = code.replace("STEPS, BATCH = 300, 512", f"STEPS, BATCH = {steps}, 512")
    done = run_python("-c", code, MPLBACKEND="agg", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+).*loss ([\d.]+)  sent +(\d+) kB.* ([\d.]+) times", done.stdout, re.M)
    found = {name: (float(loss), float(times)) for name, loss, _, times in rows}
    assert found["owner_adamw"][0] < 1.1 * found["AdamW"][0] < nats
    assert found["owner_adamw"][1] > 11 and found["lion_cub"][1] > 29
    assert "votes/agreement" in done.stdout and "Do not use this" in done.stdout
