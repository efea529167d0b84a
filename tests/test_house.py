"""What holds the code base together: who imports whom, where workers talk, and what is said of it."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import lioncub_jax as lc

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lioncub_jax"
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}
MOST_LINES = 470

# A module may import those to the left of it.
ORDER = [
    "bits", "layout", "specs", "ballots", "quantize", "decide", "messages", "wires", "checks",
    "placement", "momentum", "agreement", "exchange", "sync", "optimizer", "gradients", "training",
    "relayout", "resume", "checkpoint",
]  # fmt: skip
MAY_IMPORT = {name: set(ORDER[:i]) for i, name in enumerate(ORDER)} | {
    "replica_groups": set(),
    "compiled": {"replica_groups", "units"},
    "accounting": {"compiled", "momentum", *ORDER[: ORDER.index("checks") + 1]},
    "shared_scale": {"checks", "placement", "wires"},
    "baselines": {"accounting", "shared_scale", *ORDER[: ORDER.index("optimizer") + 1]},
    "dgc": {"accounting", *ORDER[: ORDER.index("placement") + 1]},
    "reference": set(),
    "reference_baselines": {"reference"},
    "reference_dgc": {"reference"},
    "reference_sync": {"reference"},
    # Around the library: what a step will take, a network to try it on, and the command.
    "units": set(),
    "planner": {"accounting", *ORDER[: ORDER.index("checks") + 1]},
    "planner_report": {"planner", "units"},
    "namespaces": set(),
    "supervise": set(),
    "lab": {"supervise", "units"},
    "targets": set(),
    "splits": {"checks"},
    "simulate": {"checks", "reference"},
    "__init__": {
        "accounting",
        "baselines",
        "compiled",
        "dgc",
        "lab",
        "planner",
        "simulate",
        "splits",
        *ORDER,
    },
    "cli": {"accounting", "compiled", "lab", "planner", "planner_report", "targets", "units"},
}
TOPS = {"__init__", "cli"}
# Oracles are for tests and simulations; the inside of the lab's namespaces is a program that it starts.
NOT_IMPORTED = {"reference_baselines", "reference_dgc", "reference_sync", "namespaces"}
PUBLIC_MODULES = {
    "accounting", "baselines", "compiled", "dgc", "lab", "planner", "simulate", "splits",
}  # fmt: skip
COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all",
    "psum_scatter", "ppermute", "pshuffle", "ragged_all_to_all", "axis_index", "axis_size",
    "pcast", "pvary",
}  # fmt: skip


def tree_of(module):
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


def imported(tree):
    """Every module or name that is imported, with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_imports(module):
    names = [name.split(".") for name in imported(tree_of(module))]
    return {parts[1] if len(parts) > 1 else "" for parts in names if parts[0] == PACKAGE.name}


def used(tree):
    """Every attribute and imported name, with dots where they are written: ``jax.lax.psum``."""
    yield from imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def collectives_in(tree):
    return {
        name
        for name in used(tree)
        if re.search(r"(^|\.)lax\.", name) and name.rsplit(".", 1)[1] in COLLECTIVES
    }


def test_every_module_has_its_place_in_the_import_table():
    assert set(MODULES) == set(MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward_only(module):
    assert our_imports(module) <= MAY_IMPORT[module]


def test_every_module_but_a_few_is_reached_from_the_tops():
    reached, waiting = set(), TOPS
    while waiting:
        reached |= waiting
        waiting = {found for module in waiting for found in our_imports(module)} - reached
    assert reached == set(MODULES) - NOT_IMPORTED


@pytest.mark.parametrize("module", MODULES)
def test_collectives_are_in_wires_only(module):
    found = collectives_in(tree_of(module))
    assert bool(found) == (module == "wires"), found


def test_the_test_for_collectives_sees_them():
    for source in ("jax.lax.psum(x, a)", "lax.pcast(x)", "from jax.lax import all_gather"):
        assert collectives_in(ast.parse(source)), source


def test_one_function_casts_to_varying():
    functions = [
        node.name
        for module in MODULES
        for node in tree_of(module).body
        if any(re.search(r"\.(pcast|pvary)$", name) for name in used(node))
    ]
    assert functions == ["varying"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_private_of_other_packages_is_used(module):
    for name in used(tree_of(module)):
        if name.split(".")[0] in {"jax", "jaxlib", "lax", "jnp", "optax", "flax", "nnx"}:
            assert not any(part.startswith("_") for part in name.split(".")), name


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_too_long_to_read(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MOST_LINES


def test_what_is_public_is_listed():
    brought = {name for name, value in vars(lc).items() if not name.startswith("_")}
    modules = set(MODULES) - PUBLIC_MODULES
    assert sorted(brought - modules) == list(lc.__all__)


@pytest.mark.parametrize("name", lc.__all__)
def test_what_is_public_says_what_it_is_with_an_example_or_a_source(name):
    value = getattr(lc, name)
    said = inspect.getdoc(value) or ""
    sections = re.findall(r"^(\w+):", said, re.MULTILINE)
    assert said
    assert inspect.ismodule(value) or {"Example", "Source"} & set(sections)


def test_the_readme_shows_the_quickstart_that_runs():
    fenced = r"<!-- quickstart -->\n```python\n(.*?)```"
    marked = r"^# \[quickstart\]\n(.*?)^# \[/quickstart\]"
    (shown,) = re.findall(fenced, (ROOT / "README.md").read_text(), re.DOTALL)
    program = (ROOT / "examples" / "quickstart.py").read_text()
    (runs,) = re.findall(marked, program, re.DOTALL | re.MULTILINE)
    assert shown.strip() and shown == runs
