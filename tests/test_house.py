"""What holds the code base together: who imports whom, where workers talk, what an import loads, and docs.

A test collects all that break its rule and shows them together.
"""

import ast
import functools
import graphlib
import inspect
import json
import re

import jax
import pytest
from conftest import AXIS, absent, run_python
from pages import ROOT

import lioncub_jax as lc

PACKAGE = ROOT / "lioncub_jax"

# A part is a file at the root of the package or a folder. It may import those named here.
CORE = {"mesh", "programs", "exchange", "optimizers"}
MAY_IMPORT = {
    "version": set(),
    "programs": set(),
    "mesh": {"version"},
    "exchange": {"mesh", "programs"},
    "optimizers": {"mesh", "exchange"},
    "training": CORE,
    "checkpoint": CORE,
    "baselines": CORE,
    "audit": {*CORE, "training"},
    "__init__": {*CORE, "training", "audit", "baselines", "checkpoint", "version"},
    "tools": {*CORE, "training", "audit", "baselines", "checkpoint", "__init__"},
    "__main__": {"tools"},
}

COLLECTIVES = (
    r"\blax\.(psum|pmean|pmax|pmin|all_gather|all_gather_invariant|all_to_all|psum_scatter|ppermute"
    r"|pshuffle|ragged_all_to_all|axis_index|axis_size)$"
)
LOADERS = (
    r"^(_?pickle|marshal|dill|cloudpickle|joblib|shelve|yaml|runpy|pkgutil)\b|^(eval|exec|compile|__import__)$"
    r"|\b(np|numpy|jnp|torch)\.load$|allow_pickle|import_module|serialize_executable|export\.deserialize"
)
CASTS = r"\blax\.(pcast|pvary)$"  # of what a type says about an axis; nothing is sent


def module_name(path):
    """``audit.compiled`` of its file, ``audit`` of the wing's own, ``__init__`` of the package's."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text())


def imported(tree):
    """Every module or name that is imported, with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_imports(module):
    """The modules of ours that names such as ``lioncub_jax.programs.compiled.collectives`` are in."""
    for name in imported(tree_of(module)):
        first, *rest = name.split(".")
        if first == PACKAGE.name:
            while rest and ".".join(rest) not in MODULES:
                rest.pop()
            yield ".".join(rest) or "__init__"


def written_in(tree):
    """What is imported, and names with dots."""
    dotted = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [*imported(tree), *dotted]


def uses(tree, names):
    """Whether a name is imported or used, as ``lax.psum`` or with more before it."""
    return any(re.search(names, name) for name in written_in(tree))


def test_imports_point_downward_only():
    parts = {module: module.split(".")[0] for module in MODULES}
    assert set(parts.values()) == set(MAY_IMPORT), "every part has its place in the table"
    arrows = {(a, b) for a in MODULES for b in our_imports(a)}
    arrows = {(parts[a], parts[b]) for a, b in arrows}
    assert {(a, b) for a, b in arrows if a != b and b not in MAY_IMPORT[a]} == set()


def test_the_oracle_imports_nothing_of_what_it_checks():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests/oracle").glob("*.py")]
    theirs = {name.split(".")[0] for tree in trees for name in imported(tree)}
    assert theirs and PACKAGE.name not in theirs


def test_no_modules_import_each_other_in_a_circle():
    graph = {m: {*our_imports(m)} - {m, "__init__"} for m in MODULES if m != "__init__"}
    graphlib.TopologicalSorter(graph).prepare()


def test_collectives_are_in_two_files_and_the_probe_and_one_function_casts():
    for source in ("jax.lax.psum(x, a)", "lax.psum(x)", "from jax.lax import psum"):
        assert uses(ast.parse(source), COLLECTIVES), source
    assert [module for module in MODULES if uses(tree_of(module), COLLECTIVES)] == [
        "exchange.wires",
        "mesh.axes",
        "tools.probe",
    ]
    functions = [node.name for m in MODULES for node in tree_of(m).body if uses(node, CASTS)]
    assert functions == ["varying"]


def loads_code(tree):
    """Names and arguments by which data is run."""
    return {
        name
        for node in ast.walk(tree)
        for name in (getattr(node, "id", ""), getattr(node, "arg", "") or "")
        if re.search(LOADERS, name)
    } | {name for name in written_in(tree) if re.search(LOADERS, name)}


def test_no_data_is_run():
    for source in (
        "import pickle", "from dill import loads", "numpy.load(x, allow_pickle=True)", "np.load(x)",
        "f = exec", "jax.export.deserialize(x)",
    ):  # fmt: skip
        assert loads_code(ast.parse(source)), source
    assert {module for module in MODULES if loads_code(tree_of(module))} == {
        "__init__",  # parts of its own, by names in a set
        "tools.cli",  # the function that a user names
    }


def test_nothing_asks_for_metadata_which_a_package_on_pythonpath_lacks():
    assert uses(ast.parse("from importlib.metadata import version"), r"^importlib\.metadata")
    assert [module for module in MODULES if uses(tree_of(module), r"^importlib\.metadata")] == []


# --- What is loaded, and what starts a device


STAGES = """
import json, sys
import lioncub_jax as lc

said = {}

def heavy():
    return sorted({"orbax", "flax", "rich", "matplotlib", "sklearn"} & set(sys.modules))

said["import"] = heavy()

import jax, jax.numpy as jnp, optax

tree = {"w": jax.ShapeDtypeStruct((1000, 30), jnp.float32)}
reduced = {"quantizer": lc.quantize.dense(jnp.bfloat16), "wire": lc.wires.all_reduce()}
reduced["decision"] = lc.decide.at_owner(optax.scale_by_lion(), lc.decide.sign())
counted = {"quantizer": lc.quantize.integer(8), "wire": lc.wires.counts()}
for platform in ("tpu", "cpu"):
    device = jax.sharding.AbstractDevice("", None, platform=platform)
    workers = lc.Workers(jax.sharding.AbstractMesh((8,), ("data",), abstract_device=device), "data")
    txs = [
        lc.communicate(workers=workers, momentum=lc.momentum.nothing(), **parts)
        for parts in ({}, counted, reduced)
    ]
    said[platform] = [lc.audit.of(tx, tree, workers).sent_bytes for tx in txs]
said["numbers"] = heavy()
lc.Checkpoints
said["checkpoints"] = heavy()

from lioncub_jax.tools import plan

at = plan.Cluster(8, plan.Link(1e9))
said["plan"] = plan.plan(10**6, at, 1.0, tokens=32).numbers()["verdict"]
try:
    jax.devices()
except RuntimeError as error:
    said["no device"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def stages():
    """What a process says that no platform answers."""
    done = run_python("-c", STAGES, JAX_PLATFORMS="tpu")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_heavy_is_loaded_before_it_is_used(stages):
    wanted = {"import": [], "numbers": [], "checkpoints": ["orbax"]}
    assert {stage: stages[stage] for stage in wanted} == wanted


def test_plans_and_predictions_ask_no_device(stages):
    """The bytes must not depend on the machine that plans: this one has none."""
    assert "tpu" in stages["no device"]
    votes, counted, reduced = stages["tpu"]
    assert stages["cpu"][:2] == [votes, counted] and stages["cpu"][2] > 1.9 * reduced
    tree = {"w": jax.ShapeDtypeStruct((1000, 30), "float32")}
    assert votes == lc.audit.of(lc.lion_cub(1.0, workers=AXIS), tree, absent(8)).sent_bytes
    assert stages["plan"] == "a mean hides"


LISTENERS = """
import jax

registered = []
for name in dir(jax.monitoring):
    if name.startswith("register_"):
        setattr(jax.monitoring, name, registered.append)

import lioncub_jax as lc

told = [len(registered)]
lion = {"learning_rate": 1e-3, "workers": "data"}
for make, how in ((lc.wires.two_phase, {}), (lc.lion_cub, lion), (lc.owner_lion, lion)):
    make(**how)
    told.append(len(registered))
print(told)
"""


def test_no_import_registers_a_listener_but_the_first_transform_that_communicates():
    done = run_python("-c", LISTENERS)
    assert done.stdout.strip() == "[0, 0, 2, 2]", done.stderr


# --- What is public


TYPES = """
quantize.Quantizer wires.Wire sync.Schedule decide.Decision decide.ReplyCodec momentum.MomentumRule
mesh.Workers training.StepState training.TrainStep checkpoint.Checkpoints checkpoint.Restored
Workers
"""


def test_names_at_the_top_are_few_and_listed():
    assert list(lc.__all__) == sorted(set(lc.__all__)) and set(lc.__all__) <= set(dir(lc))
    public = {name: getattr(lc, name) for name in lc.__all__}
    ours = {n for n, x in vars(lc).items() if str(getattr(x, "__module__", "")).startswith("lion")}
    assert {name for name in ours if not name.startswith("_")} <= set(public)
    named = {name: value for name, value in public.items() if not inspect.ismodule(value)}
    assert len(named) <= 20
    for name in TYPES.split():
        assert inspect.isclass(functools.reduce(getattr, name.split("."), lc)), name


def test_a_name_that_is_not_at_the_top_is_an_error_that_says_where_it_is():
    for name, said in {
        "adam": "has no attribute 'adam'",
        "jnp": "has no attribute 'jnp'",
        "midrise": r"no midrise: it is lioncub_jax\.quantize\.midrise",
        "StepState": r"no StepState: it is lioncub_jax\.training\.StepState",
        "check_votes": r"no check_votes: it is lioncub_jax\.audit\.check_votes",
    }.items():
        with pytest.raises(AttributeError, match=said):
            getattr(lc, name)


@pytest.mark.parametrize(("page", "least"), [("docs/develop.md", 30), ("SECURITY.md", 8)])
def test_every_promise_of_a_page_has_a_test_that_make_test_runs(page, least):
    named = re.findall(r"`(\w+)::(test_\w+)`", (ROOT / page).read_text())
    assert len(named) > least
    for file, test in named:
        text = (ROOT / f"tests/{file}.py").read_text()
        above, found, _ = text.partition(f"\ndef {test}(")
        assert found, f"{file}::{test}"
        assert not above.endswith("@pytest.mark.long"), f"{file}::{test} is long"
