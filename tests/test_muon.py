"""Muon at the owner: whole matrices, of any layout, dealt evenly; what comes of it is the oracle's.

Where matrices only have to be whole, a cheap transform that depends on every element and its place stands
in for Muon.
"""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    AXIS,
    absent,
    assert_same,
    in_order,
    normal,
    run_on_mesh,
    run_workers,
    scanned,
    update_of,
    workers_on,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Numbers
from oracle import muon as reference

import lioncub_jax as lc
from lioncub_jax.exchange import matrices

# A matrix, several by a leading axis and by one in the middle, heads, and leaves that are none.
SHAPES = {
    "matrix": (40, 34), "scanned": (2, 24, 50), "between": (16, 3, 24), "heads": (24, 2, 20),
    "embedding": (70, 20), "norm": (17,), "number": (),
}  # fmt: skip
NUMBERS = {
    "matrix": Numbers(), "scanned": Numbers(1, 2), "between": Numbers(0, 2), "heads": Numbers(0, (1, 2)),
    "embedding": None, "norm": None, "number": None,
}  # fmt: skip
EXACT = {"quantizer": lc.quantize.dense(), "reply": lc.decide.values()}


def hidden(params):
    return {
        name: x if isinstance(x, optax.MaskedNode) else NUMBERS[name] for name, x in params.items()
    }


def zeros(shapes=SHAPES):
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def gradients(steps, workers, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(steps, workers, *s)).astype(np.float32) for k, s in shapes.items()}


def muon(make, **how):
    """As ours and as optax's, with the learning rate -1: updates are the directions."""
    of = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": hidden, **how}
    return make(-1.0, **of)


# --- What comes of it


@pytest.fixture(scope="module")
def coded():
    """Ours and the oracle's of three steps in codes, of 5 workers: some own a matrix more than others."""
    grads = gradients(3, 5)
    simulator = reference.muon_at_owner(hidden)
    first = simulator.init(zeros(), 5)
    want = jax.jit(lambda g: scanned({0: simulator}, {0: first}, zeros(), g))(grads)
    return run_workers({0: muon(lc.owner_muon, workers=AXIS)}, zeros(), grads)[0], want[0]


def test_updates_and_state_are_those_of_the_oracle(coded):
    (updates, _), (want, _) = coded
    # Codes of 2 bits are the same, or they are a step apart.
    assert_same(updates, want, rtol=1e-6, atol=1e-6)


def test_a_run_goes_on_in_the_same_dtypes_and_holds_one_share_of_the_moments(coded):
    (_, state), _ = coded
    inner = state[0].owner[0].value.inner
    held = sum(x[-1, 0].size for x in (inner["matrices"].mu, inner["rest"].mu))
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    assert held < 1.5 * elements / 5


HOW = [
    {},
    {"nesterov": False, "preconditioning": "aol", "consistent_rms": None, "ns_steps": 2},
    {
        "ns_coeffs": ((4.0, -6.0, 3.0), (3.0, -4.0, 2.0)), "ns_steps": 2, "adam_b1": 0.5,
        "adam_eps_root": 1e-3,
    },
    {
        "weight_decay": 0.1, "adam_weight_decay": 0.3, "adam_learning_rate": 2.0, "ns_steps": 1,
        "weight_decay_mask": {name: name != "matrix" for name in SHAPES},
    },
]  # fmt: skip


def test_one_worker_is_optax_muon_by_all_arguments():
    params = {name: normal(*shape, seed=1) for name, shape in SHAPES.items()}
    grads = jax.tree.map(lambda g: g[:, 0], gradients(2, 1))
    pairs = {
        n: (muon(lc.owner_muon, workers=None, **how), muon(optax.contrib.muon, **how))
        for n, how in enumerate(HOW)
    }
    txs = {(n, k): tx for n, pair in pairs.items() for k, tx in enumerate(pair)}

    @jax.jit
    def run(params, grads):
        return scanned(txs, {name: tx.init(params) for name, tx in txs.items()}, params, grads)

    done = run(params, grads)
    for n in pairs:  # XLA multiplies matrices in other programs
        assert_same(done[n, 0][0], done[n, 1][0], rtol=1e-4, atol=1e-5, of=n)


# --- Layouts: a cheap transform that sees its whole matrix


def mixing():
    """Depends on each element, on its row and its column, and on those before."""

    def update(updates, state, params=None):
        state = {"count": state["count"] + 1, "sum": state["sum"] + updates}
        m, n = updates.shape
        weights = jnp.arange(m)[:, None] * 0.01 + jnp.arange(n) * 0.1
        return updates * jnp.sum(weights * updates) + state["sum"] / state["count"], state

    return optax.GradientTransformation(
        lambda x: {"count": jnp.int32(0), "sum": jnp.zeros_like(x)}, update
    )


def by_matrix(tx, means):
    """Updates ``[steps, ...]`` of all matrices, in plain arrays, and the rest as it is."""
    numbers = functools.partial(pick, CUT_NUMBERS)
    units = reference.Units({k: x[0] for k, x in means.items()}, numbers)
    states, steps = {}, []
    for t in range(len(next(iter(means.values())))):
        done = []
        each = zip(units.of({k: x[t] for k, x in means.items()}), units.are_matrices(), strict=True)
        for n, (x, is_matrix) in enumerate(each):
            if is_matrix:
                x, states[n] = tx.update(x, states[n] if t else tx.init(x))
            done.append(x)
        steps.append(units.joined(done))
    return jax.tree.map(lambda *x: np.stack(x), *steps)


def pick(numbers, tree):
    return {name: numbers[name] for name in tree}


CUT = {
    "matrix": (48, 32), "scanned": (4, 24, 48), "between": (16, 4, 24), "heads": (24, 4, 20),
    "embedding": (72, 20), "norm": (16,), "few": (40, 8), "experts": (4, 16, 12),
    "turned": (20, 4, 12),
}  # fmt: skip
CUT_NUMBERS = NUMBERS | {"few": Numbers(), "experts": Numbers(1, 2), "turned": Numbers(2, 0)}
BOTH = {
    "matrix": P("fsdp"), "scanned": P(None, "fsdp", "tensor"), "between": P(None, "tensor", "fsdp"),
    "heads": P(None, "tensor"), "embedding": P("fsdp"), "norm": P(), "few": P(),
    "experts": P("tensor", "fsdp"), "turned": P("fsdp"),
}  # fmt: skip
ROWS = {name: P(*[x if x == "fsdp" else None for x in spec]) for name, spec in BOTH.items()}
NONE = dict.fromkeys(CUT, P())
LAYOUTS = {
    "rows and columns": ("data=2 fsdp=2 tensor=2", None, AxisType.Auto, BOTH),
    "explicit axes": ("data=2 fsdp=2 tensor=2", None, AxisType.Explicit, BOTH),
    "rows, more devices than matrices": ("data=2 fsdp=4", None, AxisType.Auto, ROWS),
    "a group": ("data=2 device=3", "device", AxisType.Auto, NONE),
    "a group and rows": ("data=2 device=2 fsdp=2", "device", AxisType.Auto, ROWS),
    "a group of owners": ("data=2 device=2", "device", AxisType.Auto, NONE),
    "rows, owners on each device": ("data=2 fsdp=2", None, AxisType.Auto, ROWS),
    "more workers than matrices": ("data=8", None, AxisType.Auto, {"matrix": P(), "norm": P()}),
}  # fmt: skip


def cheap(workers, **how):
    numbers = functools.partial(pick, CUT_NUMBERS)
    rest = {"rest": optax.identity(), "dimension_numbers": numbers}
    return lc.owner(mixing(), workers=workers, **rest, **how)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_matrix_is_whole_at_one_owner_however_it_is_cut(layout):
    sizes, group, kind, specs = LAYOUTS[layout]
    shapes = {name: CUT[name] for name in specs}
    workers = workers_on(sizes, group, kind)
    grads = gradients(2, workers.num_gradients, shapes)
    updates, _ = run_on_mesh({0: cheap(workers, **EXACT)}, workers, specs, grads)[0]
    means = jax.tree.map(lambda g: g.mean(1), grads)
    assert_same(updates, by_matrix(mixing(), means), rtol=1e-4, atol=1e-4)


def test_a_mean_that_overflows_is_nothing_to_the_rest_of_its_matrix():
    """The element stays, and the transform is given 0 for it."""
    workers, specs = workers_on("data=2", None, AxisType.Auto), {"matrix": P()}
    grads = {"matrix": np.ones((2, 2, 4, 6), np.float32)}
    grads["matrix"][..., 1, 2] = 3e38
    updates, _ = run_on_mesh({0: cheap(workers, **EXACT)}, workers, specs, grads)[0]
    grads["matrix"][..., 1, 2] = 0
    want = by_matrix(mixing(), jax.tree.map(lambda g: g.mean(1), grads))
    want["matrix"][:, 1, 2] = 0
    assert_same(updates, want, rtol=1e-5)


@pytest.mark.parametrize("layout", ["rows and columns", "a group and rows"])
def test_the_bytes_of_the_program_are_those_that_are_predicted(layout):
    sizes, group, kind, specs = LAYOUTS[layout]
    workers, shapes = workers_on(sizes, group, kind), zeros(CUT)
    tx = cheap(workers)
    grads = jax.tree.map(lambda x: jnp.zeros((workers.num_gradients, *x.shape)), shapes)
    params = jax.device_put(shapes, workers.shardings(specs))
    compiled = update_of(tx, workers).lower(grads, tx.init(params), params).compile()
    asked, between, inside = lc.audit.of(tx, shapes, workers, specs=specs), Counter(), Counter()
    for x in lc.audit.collectives(compiled, workers.mesh):
        (between if "data" in x.axes else inside)[x.op] += x.sent_bytes
    assert between.total() == pytest.approx(asked.sent_bytes, rel=1e-12)
    moved = inside.total() - asked.group_bytes
    assert 0 <= moved <= 64 and asked.group_bytes > 1000  # flags


# --- The deal


MODELS = {  # matrices, and elements that are in none
    "GPT-2 124M": (
        [(12, 768, 2304), (12, 768, 768), (12, 768, 3072), (12, 3072, 768)],
        (50257 + 1024) * 768 + 12 * 9984,
    ),
    "Llama 7B": (
        [(128, 4096, 4096), (64, 4096, 11008), (32, 11008, 4096)], 2 * 32000 * 4096 + 65 * 4096
    ),
    "ViT-S": (
        [(12, 384, 1152), (12, 384, 384), (12, 384, 1536), (12, 1536, 384)],
        768 * 384 + 197 * 384 + 445000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workers", [8, 16, 64])
def test_owners_are_full_and_their_work_is_even_where_there_are_more_matrices(model, workers):
    shapes, rest = MODELS[model]
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (*shapes, (rest,))]
    numbers = [*[Numbers(1, 2)] * len(shapes), None]
    found = matrices.matrices_of(numbers, [jnp.zeros((1,) * x.ndim) for x in leaves])
    [deal] = matrices.deals(leaves, [()] * len(leaves), found, workers, (), 1)
    elements = sum(math.prod(s) for s in shapes) + rest
    filling = workers * deal.rows * 128 / elements - 1
    loads = [
        sum(hand.work * n for hand, n in zip(deal.hands, own, strict=True))
        for own in zip(*(hand.numbers for hand in deal.hands), strict=True)
    ]
    kinds = {*zip(*(hand.numbers for hand in deal.hands), strict=True)}
    if sum(s[0] for s in shapes) >= workers:
        assert filling < 0.08 and max(loads) < 1.11 * np.mean(loads) and len(kinds) <= 4
    else:
        assert filling < 0.75


@pytest.mark.parametrize(("count", "own"), [(8, True), (5, False), (1, False)])
def test_devices_of_a_group_own_whole_matrices_where_that_sends_no_more(count, own):
    """Of 2 workers of 4 devices: 5 matrices would send the rows of 8, where 3 a worker send those of 6."""
    leaf = jnp.zeros((count, 128, 128))
    found = matrices.matrices_of([Numbers(1, 2)], [leaf])
    [deal] = matrices.deals([leaf], [()], found, 2, ("gpu",), 4)
    assert deal.devices_own == own
    assert deal.rows_per_chunk == 2 * -(-count // 2) * 128 // 4


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.booleans()),
        min_size=1, max_size=6,
    ),
    st.integers(1, 9), st.integers(1, 3),
)  # fmt: skip
def test_every_element_has_one_place_and_a_matrix_lies_with_one_owner(leaves, workers, group):
    shapes = [(b, m, n) for b, m, n, _ in leaves]
    arrays, first = [], 1
    for shape in shapes:
        arrays.append(np.arange(first, first + math.prod(shape), dtype=np.float32).reshape(shape))
        first += math.prod(shape)
    numbers = [Numbers(1, 2) if whole else None for *_, whole in leaves]
    found = matrices.matrices_of(numbers, [jnp.asarray(x) for x in arrays])
    [deal] = matrices.deals(arrays, [()] * len(arrays), found, workers, (), group)
    rows = np.asarray(deal.join(list(map(jnp.asarray, arrays))))
    back = deal.split(jnp.asarray(rows))
    assert all(np.array_equal(back[k], x) for k, x in enumerate(arrays))
    real = rows > 0
    assert len({*rows[real]}) == real.sum() == first - 1
    sizes = [deal.part_sizes(jnp.int32(device)) for device in range(group)]
    assert np.array_equal(np.concatenate(sizes), real.sum(1))
    owners = np.arange(len(rows))[:, None] % deal.rows_per_chunk // deal.rows * np.ones(128)
    owner = dict(zip(rows[real].tolist(), owners[real].tolist(), strict=True))
    for x, (*_, whole) in zip(arrays, leaves, strict=True):
        for matrix in x if whole else ():
            assert len({owner[element] for element in matrix.reshape(-1).tolist()}) == 1


# --- Refusals


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ns_steps": 0}, "ns_steps=0 ... a whole number"),
        ({"ns_steps": jnp.int32(5)}, "ns_steps ... name the argument in its static_args"),
        ({"beta": 1.0}, "beta=1.0 ... [0, 1)"),
        ({"eps": 0.0}, "eps=0.0 ... above 0"),
        ({"mu_dtype": "bfloat16", "beta": 0.999}, "bfloat16 would stay as it is"),
        ({"wire": lc.wires.gathered()}, "gathered ... one owner ... two_phase"),
        (
            {"muon_weight_dimension_numbers": {"w": Numbers(0, 0), "b": None}},
            "['w'] ... is no matrix by",
        ),
        ({"muon_weight_dimension_numbers": {"v": Numbers()}}, "do not fit the parameters"),
        ({"muon_weight_dimension_numbers": Numbers()}, "['b'] ... is no matrix by"),
    ],
)
def test_what_does_not_work_is_refused(how, says):
    params = {"w": jnp.zeros((4, 6)), "b": jnp.zeros(6)}
    with pytest.raises(ValueError, match=in_order(says)):
        lc.audit.of(lc.owner_muon(1.0, workers=AXIS, **how), params, absent(2))


def factored():
    return optax.GradientTransformation(
        lambda x: jnp.zeros((*x.shape[:1], 1)), lambda u, s, p=None: (u, s)
    )


@pytest.mark.parametrize(
    ("tx", "says"),
    [
        (factored(), "neither a number nor shaped like the updates"),
        (optax.add_decayed_weights(0.1), "tx uses the parameters"),
    ],
)
def test_a_transform_of_matrices_keeps_what_is_shaped_like_one(tx, says):
    made = lc.owner(tx, workers=AXIS, rest=optax.identity())
    with pytest.raises(ValueError, match=says):
        lc.audit.of(made, {"w": jnp.zeros((4, 6))}, absent(2))


def test_leaves_of_more_dimensions_are_named_where_they_go_to_adam():
    with pytest.warns(UserWarning, match=r"\['w'\] have more than two dimensions"):
        lc.owner_muon(1.0, workers=None).init({"w": jnp.zeros((2, 3, 4))})


# --- Checkpoints

PLACES = LAYOUTS | {str(n): (f"data={n}", None, AxisType.Auto, NONE) for n in (4, 6, 8)}


def loss(params, batch, rng=None):
    """Whose gradients are whole numbers, the same for each worker."""
    return jnp.mean(batch) * sum(jnp.sum(x * constants(name)) for name, x in params.items())


def constants(name):
    """In a pattern that no permutation keeps."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.integers(1, 64, CUT[name]).astype(np.float32)


def trained(place, make, steps=2):
    """The state after some steps, and the workers."""
    sizes, group, kind, specs = PLACES[place]
    workers = workers_on(sizes, group, kind)
    tx = make(workers)
    state = lc.init_state(tx, zeros({name: CUT[name] for name in specs}), workers, specs=specs)
    step = lc.make_train_step(loss, tx, workers)
    for n in range(steps):
        state, _ = step(state, np.full(workers.num_gradients, n + 1, np.float32))
    return state, workers


def coded_muon(workers):
    numbers = functools.partial(pick, CUT_NUMBERS)
    return lc.owner_muon(0.1, workers=workers, muon_weight_dimension_numbers=numbers)


@pytest.mark.parametrize("place", [*LAYOUTS, "6"])
def test_what_owners_hold_is_saved_in_the_shapes_of_the_parameters(place):
    def sums(workers):
        numbers = functools.partial(pick, CUT_NUMBERS)
        how = {"rest": optax.trace(1.0), "dimension_numbers": numbers, **EXACT}
        return optax.chain(lc.owner(mixing(), workers=workers, **how), optax.scale(0.0))

    state, workers = trained(place, sums)
    held = lc.checkpoint.portable(state, workers)["opt_state"]["0"]["owner"]["inner"]
    found = held["matrices"]["sum"] | held.get("rest", {}).get("trace", {})
    assert held["matrices"]["count"] == 2 and {*found} == {*PLACES[place][3]}
    for name, x in found.items():  # a first dimension may end in padding
        np.testing.assert_array_equal(x[: CUT[name][0]], 3 * constants(name), err_msg=name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("8", "4"), ("8", "6"), ("rows and columns", "explicit axes"), ("a group and rows", "a group"),
        ("rows and columns", "rows, more devices than matrices"),
    ],
)  # fmt: skip
def test_matrices_are_dealt_again_for_other_workers(old, new, tmp_path):
    """There and back again: nothing is lost, where workers have the same errors."""
    (state, here), (like, there) = trained(old, coded_muon, 1), trained(new, coded_muon, 0)
    moved = carried(tmp_path / "there", state, here, like, there)
    held = lc.checkpoint.portable(moved, there)["opt_state"]["0"]["owner"]["inner"]
    assert min(np.abs(x).max() for x in held["matrices"]["mu"].values()) > 1
    assert_same(
        carried(tmp_path / "back", moved, there, trained(old, coded_muon, 0)[0], here), state
    )


@pytest.mark.parametrize("shape", [(16, 8), (16,)], ids=["matrices alone", "none"])
def test_a_state_has_no_empty_array_which_orbax_would_refuse(shape):
    workers = workers_on("data=2")
    tx = lc.owner_muon(0.1, workers=workers)
    step = lc.make_train_step(lambda params, batch, rng: batch.mean() * params.sum(), tx, workers)
    state = lc.init_state(tx, jnp.zeros(shape), workers)
    for _ in range(2):
        assert all(x.size for x in jax.tree.leaves(state))
        state, _ = step(state, np.ones(2, np.float32))
    assert np.all(state.params < 0)


def carried(folder, state, here, like, there):
    with lc.Checkpoints(folder, workers=here) as checkpoints:
        checkpoints.save(state, wait=True)
    with lc.Checkpoints(folder, workers=there) as checkpoints:
        return checkpoints.restore(like).state
