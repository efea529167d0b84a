"""What holds the code base together: who imports whom, where workers talk, and what is said of it.

One test a rule; a test collects all that break its rule and shows them together.
"""

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lioncub_jax as lc

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lioncub_jax"

# The house. A part is a file at the root of the package or a whole wing (a folder).
# A part of the core may import those to the left of it.
CORE = [
    "units", "kernels", "bits", "means", "rotation", "layout", "quantize", "decide", "wires", "mesh",
    "checks", "momentum", "exchange", "sync", "optimizer",
]  # fmt: skip
# The wings do not import each other, but for those named here.
WINGS = {
    "training": {*CORE},
    "checkpoint": {*CORE},
    "traffic": {*CORE},
    "baselines": {*CORE, "traffic"},
    "planner": {*CORE, "traffic", "baselines"},
    "lab": {"units"},
    "faults": {*CORE},
    "elastic": {"units", "lab"},
    "reference": set(),
}
FACES = {
    "watch": {*CORE, "traffic"},
    "__init__": {*CORE, *WINGS, "watch"},
    "cli": {"__init__", *CORE, *WINGS} - {"reference"},
    "__main__": {"cli"},
}
MAY_IMPORT = {part: set(CORE[:i]) for i, part in enumerate(CORE)} | WINGS | FACES

# Arrows that break the rule and wait to be turned; none is to come, and one that goes leaves this list.
NOT_YET = {("reference", "checks")}

# Oracles for tests and studies, programs that are started, and models that are named to the command.
NOT_IMPORTED = {
    "reference.baselines", "reference.dgc", "reference.one_bit_adam", "reference.powersgd",
    "reference.simulate",
    "reference.sync",
    "__main__", "cli.__main__", "lab.namespaces", "cli.examples",
}  # fmt: skip
MAY_USE_THE_REFERENCE = ("tests/", "benchmarks/study/", "lioncub_jax/reference/")

COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all",
    "psum_scatter", "ppermute", "pshuffle", "ragged_all_to_all", "axis_index", "axis_size",
}  # fmt: skip
CASTS = {"pcast", "pvary"}  # of what a type says about an axis; nothing is sent
HEAVY = {"orbax", "flax", "rich", "matplotlib", "sklearn"}
LINES_OF_A_SCREEN = 60
MOST_NAMES = 25


# --- Reading the sources


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(), str(path))


def module_name(path):
    """``traffic.compiled`` of its file, ``traffic`` of the wing's own, ``__init__`` of the package's."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module):
    return module.split(".")[0]


def imported(tree):
    """Every module or name that is imported, with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_module(name):
    """The module of ours that ``lioncub_jax.traffic.compiled.collectives`` is in, or None."""
    first, *rest = name.split(".")
    if first != PACKAGE.name:
        return None
    while rest and ".".join(rest) not in MODULES:
        rest.pop()
    return ".".join(rest) or "__init__"


def our_imports(tree):
    return {our_module(name) for name in imported(tree)} - {None}


def names_used(tree):
    """Every attribute and imported name, with dots where they are written: ``jax.lax.psum``."""
    yield from imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def of_lax(tree, names):
    used = {name for name in names_used(tree) if re.search(r"(^|\.)lax\.", name)}
    return {name for name in used if name.rsplit(".", 1)[1] in names}


def functions_in(tree):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def lines_of_body(function):
    """How many lines it has behind its signature and its docstring."""
    documented = ast.get_docstring(function) is not None
    rest = function.body[1:] if documented else function.body
    return function.end_lineno - rest[0].lineno + 1 if rest else 0


# --- Who imports whom


def test_every_part_has_its_place_in_the_import_table():
    assert {part_of(module) for module in MODULES} == set(MAY_IMPORT)


def test_imports_point_downward_only():
    arrows = {
        (part_of(module), part_of(target))
        for module, path in MODULES.items()
        for target in our_imports(tree_of(path))
    }
    upward = {(a, b) for a, b in arrows if a != b and b not in MAY_IMPORT[a]}
    assert upward == NOT_YET


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        module: our_imports(tree_of(path)) - {module, "__init__"}
        for module, path in MODULES.items()
        if module != "__init__"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_every_module_but_a_few_is_reached_from_the_faces():
    # The package's own file loads its wings by name on first use, which no import shows.
    reached, waiting = set(), {"__init__", "cli"} | {w for w in WINGS if hasattr(lc, w)}
    while waiting:
        reached |= waiting
        waiting = {t for m in waiting for t in our_imports(tree_of(MODULES[m]))} - reached
    assert reached == set(MODULES) - NOT_IMPORTED


def test_the_reference_is_for_tests_simulations_and_studies_only():
    folders = (PACKAGE, ROOT / "benchmarks", ROOT / "examples")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    users = {
        str(path.relative_to(ROOT))
        for path in paths
        if any(part_of(m) == "reference" for m in our_imports(tree_of(path)))
        or any(re.match(r"(lc|lioncub_jax)\.reference\b", n) for n in names_used(tree_of(path)))
    } - {"lioncub_jax/__init__.py"}
    assert {user for user in users if not user.startswith(MAY_USE_THE_REFERENCE)} == set()


def test_nothing_heavy_is_loaded_by_importing_the_package():
    program = "import sys, lioncub_jax; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert {"lioncub_jax", "jax", "optax"} <= loaded
    heavy = sorted(loaded & HEAVY)
    assert not heavy


def test_nothing_private_of_other_packages_is_used():
    others = {"jax", "jaxlib", "lax", "jnp", "optax", "flax", "nnx", "orbax", "ocp"}
    private = {
        (module, name)
        for module, path in MODULES.items()
        for name in names_used(tree_of(path))
        if name.split(".")[0] in others and re.search(r"\._", name)
    }
    assert not private


# --- Where workers talk


def test_collectives_are_in_wires_only():
    found = {module: of_lax(tree_of(path), COLLECTIVES) for module, path in MODULES.items()}
    assert {module for module, names in found.items() if names} == {"wires"}, found


def test_one_function_casts_to_varying():
    functions = [
        node.name for path in MODULES.values() for node in tree_of(path).body if of_lax(node, CASTS)
    ]
    assert functions == ["varying"]


def test_the_tests_of_collectives_and_casts_see_them():
    for source in ("jax.lax.psum(x, a)", "lax.psum(x)", "from jax.lax import psum"):
        assert of_lax(ast.parse(source), COLLECTIVES), source
    assert of_lax(ast.parse("jax.lax.pcast(x)"), CASTS)


# --- What is read


def test_functions_fit_a_screen():
    long = {
        f"{module}.{function.name}": lines_of_body(function)
        for module, path in MODULES.items()
        for function in functions_in(tree_of(path))
        if lines_of_body(function) > LINES_OF_A_SCREEN
    }
    assert not long


def test_what_is_public_is_listed():
    ours = {
        n for n, x in vars(lc).items() if (getattr(x, "__module__", None) or "").startswith("lion")
    }
    assert {name for name in ours if not name.startswith("_")} <= set(lc.__all__)
    assert sorted(set(lc.__all__)) == list(lc.__all__)
    assert all(hasattr(lc, name) for name in lc.__all__)


def test_the_top_has_few_names_beside_the_namespaces():
    names = [name for name in lc.__all__ if not inspect.ismodule(getattr(lc, name))]
    assert len(names) <= MOST_NAMES


def test_what_is_public_says_what_it_is_with_an_example_or_a_source():
    """Functions and classes; a class whose fields tell all of it lists them instead."""
    silent = []
    for name in lc.__all__:
        value = getattr(lc, name)
        said = inspect.getdoc(value) or ""
        sections = set(re.findall(r"^(\w+):", said, re.MULTILINE))
        wanted = {"Example", "Source"} | ({"Attributes"} if inspect.isclass(value) else set())
        if not said or not (inspect.ismodule(value) or wanted & sections):
            silent.append(name)
    assert not silent


def arguments_of(function):
    """Their names, without self and those that stand for any number."""
    given = function.args
    names = {x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return names - {"self", "cls"}


def told_arguments(said):
    """Those that the Args section of a docstring names; None without one."""
    section = re.search(r"^Args:\n(( +).*\n(?: .*\n|\n)*)", said + "\n", re.MULTILINE)
    return section and set(re.findall(rf"^{section[2]}(\w+):", section[1], re.MULTILINE))


def lender_of(said):
    """The function whose arguments these are, if the docstring says so."""
    named = re.search(r"[Aa]rguments[^.]* those of `(\w+)`", " ".join(said.split()))
    return named and named[1]


def untold(function, others):
    """Arguments that neither its docstring tells nor that of the function that it names."""
    said = ast.get_docstring(function) or ""
    told, lender = told_arguments(said), lender_of(said)
    if told is None and lender is None:
        return set()
    lent = arguments_of(others[lender]) - untold(others[lender], others) if lender else set()
    return arguments_of(function) - (told or set()) - lent


def test_an_args_section_names_all_or_says_whose_the_others_are():
    found = {}
    for module, path in MODULES.items():
        functions = functions_in(tree_of(path))
        others = {function.name: function for function in functions}
        found |= {f"{module}.{f.name}": names for f in functions if (names := untold(f, others))}
    assert not found


def test_the_test_of_arguments_sees_one_that_is_missing():
    source = '''
def lends(a, b):
    """Lends.

    Args:
      a: one.
    """

def borrows(a, b, *, c):
    """The arguments are, but for c,
    those of `lends`.
    """
'''
    functions = {f.name: f for f in functions_in(ast.parse(source))}
    assert untold(functions["lends"], functions) == {"b"}
    assert untold(functions["borrows"], functions) == {"b", "c"}


def test_the_readme_shows_the_quickstart_that_runs():
    fenced = r"<!-- quickstart -->\n```python\n(.*?)```"
    marked = r"^# \[quickstart\]\n(.*?)^# \[/quickstart\]"
    (shown,) = re.findall(fenced, (ROOT / "README.md").read_text(), re.DOTALL)
    program = (ROOT / "examples" / "quickstart.py").read_text()
    (runs,) = re.findall(marked, program, re.DOTALL | re.MULTILINE)
    assert shown.strip() and shown == runs
