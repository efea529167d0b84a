"""The walk of a traced step: which workers have the same of each array, and where they would hang."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_order, normal, workers_on
from jax import lax
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.training.differ import PICKS, Differences, is_increment, last_operation

AXES = ("pod", "data")
ALL = (*AXES,)


@functools.cache
def workers():
    return workers_on("pod=2 data=3", axis=AXES)


def traced(fn, *args):
    """A function of one worker as a jaxpr, in which the workers' axes are bound."""
    found = []

    def worker(*args):
        found.append(jax.jit(fn).trace(*args).jaxpr)
        return []

    run = jax.shard_map(worker, mesh=workers().mesh, in_specs=P(), out_specs=[], check_vma=False)
    jax.eval_shape(run, *args)
    return found[0]


def classes(fn):
    """Of a result of ``own``, an array of each worker's own, and ``same``, one of all."""
    closed = traced(fn, jnp.ones(6), jnp.ones(6))
    differences = Differences(workers())
    [found] = differences.results(closed.jaxpr, [differences.each, differences.constant])
    return found


def told(fn):
    """The same as axes over which it differs."""
    return Differences(workers()).axes_of(classes(fn))


COLUMNS, ROWS = [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]


def gathered_in_two(own, same):
    column = lax.all_gather(own, AXES, axis_index_groups=COLUMNS)
    return lax.all_gather(column, AXES, axis_index_groups=ROWS)


def around(x):
    return lax.ppermute(x, AXES, [(i, (i + 1) % 6) for i in range(6)])


def ring(own, same):
    """An all-reduce by hand: each sends what it has to the next one, five times."""
    total, sent = own, own
    for _ in range(5):
        sent = around(sent)
        total = total + sent
    return total


def in_a_loop(own, same):
    return lax.fori_loop(0, 3, lambda _, x: lax.psum(x, AXES), own)


def later(own, same):
    """What a loop carries differs from its second turn on."""
    return lax.scan(lambda c, _: ((own, c[0]), c[1]), (same, same), None, length=3)[1]


DIFFERS = {
    "what differs": (lambda own, same: own + same, ALL),
    "what does not": (lambda own, same: same * 2, ()),
    "a sum": (lambda own, same: lax.psum(own, AXES), ()),
    "a sum over one axis": (lambda own, same: lax.psum(own, "data"), ("pod",)),
    "sums over one axis, then the other": (
        lambda own, same: lax.pmax(lax.pmin(own, "pod"), "data"), (),
    ),
    "a gather of parts of a sum": (
        lambda own, same: lax.all_gather(lax.psum(own, "pod"), "data"), (),
    ),
    "the index of a worker": (lambda own, same: lax.axis_index("pod") + same, ("pod",)),
    "one worker's array on all": (
        lambda own, same: lax.psum(jnp.where(lax.axis_index(AXES) == 2, own, 0), AXES), (),
    ),
    "a part of a sum": (lambda own, same: lax.psum_scatter(own, AXES, tiled=True), ALL),
    "a part of what all have": (lambda own, same: lax.all_to_all(same, AXES, 0, 0, tiled=True), ALL),
    "gathered in two": (gathered_in_two, ()),
    "gathered in columns": (
        lambda own, same: lax.all_gather(own, AXES, axis_index_groups=COLUMNS), ("data",),
    ),
    "sent around": (lambda own, same: around(own), ALL),
    "sent from one place to all of a pod": (
        lambda own, same: lax.psum(jnp.where(lax.axis_index("data") == 0, own, 0), "data"), ("pod",),
    ),
    "a ring": (ring, ALL),  # the order of the terms differs, so it is not the same to the bit
    "a cond by what differs": (
        lambda own, same: lax.cond(own[0] > 0, lambda: same, lambda: -same), ALL,
    ),
    "a cond by a pod's mean": (
        lambda own, same: lax.cond(lax.pmean(own[0], "data") > 0, lambda: same, lambda: -same), ("pod",),
    ),
    "a while by what differs": (
        lambda own, same: lax.while_loop(lambda x: x[0] < own[0], lambda x: x + 1, same), ALL,
    ),
    "a sum in a loop": (in_a_loop, ()),
    "what a loop carries later": (later, ALL),
    "in jit, remat and custom_jvp": (
        jax.jit(jax.checkpoint(lambda own, same: jax.nn.relu(lax.psum(own, AXES)))), (),
    ),
    "of a host": (lambda own, same: jax.experimental.io_callback(np.sin, same, same), ALL),
    "a function of a host": (lambda own, same: jax.pure_callback(np.sin, same, same), ()),
    "what is written in place": (lambda own, same: written(own, same), ALL),
}  # fmt: skip


def written(own, same):
    ref = jax.new_ref(same)
    ref[...] = own
    return ref[...]


@pytest.mark.parametrize("name", DIFFERS)
def test_the_axes_over_which_an_array_differs(name):
    """Each operation asked of the JAX that is installed."""
    fn, axes = DIFFERS[name]
    assert set(told(fn)) == set(axes)


def test_workers_of_a_class_have_the_same_when_the_program_runs():
    """All that is called the same is: to the bit, on each device."""
    mesh, own = workers().mesh, normal(36)
    for name, (fn, _) in DIFFERS.items():
        if "host" in name:
            continue
        run = jax.shard_map(
            lambda own, fn=fn: fn(own, jnp.arange(6.0))[None], mesh=mesh,
            in_specs=P(AXES), out_specs=P(AXES), check_vma=False,
        )  # fmt: skip
        each, alike = np.asarray(jax.jit(run)(own)), classes(fn)
        for i, j in itertools.combinations(range(6), 2):
            assert alike[i] != alike[j] or (each[i] == each[j]).all(), (name, i, j)


HANGS = {
    "in a cond": (lambda own, talk: lax.cond(own[0] > 0, talk, lambda x: x, own), "data", True),
    "in a switch": (
        lambda own, talk: lax.switch(own[0].astype(int), [talk, lambda x: x], own), "data", True,
    ),
    "in a while": (lambda own, talk: lax.while_loop(lambda x: x[0] > 9, talk, own), "data", True),
    "in the test of a while": (
        lambda own, talk: lax.while_loop(lambda x: talk(x)[0] + own[0] > 9, lambda x: x + 1, own),
        "data", True,
    ),
    "in a scan in a cond": (
        lambda own, talk: lax.cond(
            own[0] > 0, lambda x: lax.fori_loop(0, 2, lambda _, x: talk(x), x), lambda x: x, own
        ), "data", True,
    ),
    "by what a pod has": (
        lambda own, talk: lax.cond(lax.pmean(own[0], "data") > 0, talk, lambda x: x, own), "data", False,
    ),
    "by what a pod has, over pods": (
        lambda own, talk: lax.cond(lax.pmean(own[0], "data") > 0, talk, lambda x: x, own), "pod", True,
    ),
    "by what all have": (
        lambda own, talk: lax.cond(lax.pmean(own[0], AXES) > 0, talk, lambda x: x, own), "pod", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_workers_who_would_wait_for_ever_are_an_error(name):
    fn, axis, hangs = HANGS[name]
    given = functools.partial(classes, lambda own, same: fn(own, lambda x: lax.psum(x, axis)))
    if not hangs:
        given()
        return
    with pytest.raises(
        ValueError, match=in_order("cond or a loop whose predicate differs ... wait for ever")
    ):
        given()


MADE = {
    "reduce_max": jnp.max, "argmax": jnp.argmax, "reduce_or": jnp.any,
    "reduce_min": jnp.min, "argmin": jnp.argmin, "reduce_and": jnp.all,
    "reduce_sum": jnp.sum,
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_the_operation_that_makes_a_number_is_found_behind_casts_and_in_calls(name):
    for around in (lambda x: x, lambda x: x.reshape(1).astype(jnp.float16)[0], jax.jit):
        made = MADE[name]
        fn = jax.jit(made) if around is jax.jit else lambda x, made=made, by=around: by(made(x))
        jaxpr = jax.make_jaxpr(fn)(jnp.ones(6)).jaxpr
        assert last_operation(jaxpr, jaxpr.outvars[0]) == name
    assert (name in PICKS) == (name != "reduce_sum")


GAINS = {
    "plus": (lambda x, y: x + y * 2, True),
    "plus, in a jit": (lambda x, y: jax.jit(lambda x: jnp.sin(y) + x)(x), True),
    "plus, in a cond": (lambda x, y: lax.cond(y[0] > 0, lambda: x + y, lambda: x), True),
    "plus, in a loop": (lambda x, y: lax.fori_loop(0, 3, lambda i, x: x + i * y, x), True),
    "less": (lambda x, y: x - y, True),
    "of which it is taken": (lambda x, y: y - x, False),
    "twice": (lambda x, y: x + x + y, False),
    "a moving mean": (lambda x, y: x + (y - x) / 10, False),
    "a cond by itself": (lambda x, y: lax.cond(x[0] > 0, lambda: x + y, lambda: x), False),
    "something else": (lambda x, y: y, False),
}


@pytest.mark.parametrize("name", GAINS)
def test_what_a_result_gains_is_told_from_what_depends_on_it(name):
    fn, gains = GAINS[name]
    assert is_increment(traced(fn, jnp.ones(6), jnp.ones(6)).jaxpr, 0, 0) == gains


# --- Random small steps: refused, or they end with the same parameters on all workers


def random_step(rng, tx, workers):
    """A step that does what a careless user could do, by chance; most do one or two such things."""
    axes = workers.axes

    def chance(p=0.12):
        return rng.random() < p

    picks = {
        "averaged": chance(), "clipped": chance(0.4), "cond": chance(), "by_all": chance(0.5),
        "scaled": chance(), "scan": chance(0.3), "masked": chance(), "returned": chance(),
        "own": chance(), "partly": chance(), "index": chance(), "summed": chance(0.3),
    }  # fmt: skip

    def step(state, batch):
        params, opt_state, more = state

        def loss_fn(params):
            x = batch @ params["w"] + params["b"]
            if picks["scan"]:
                x = lax.scan(lambda c, row: (0.5 * c + row, c), x[0], x)[1]
            return jnp.mean(jnp.tanh(x) ** 2) + jnp.mean(params["s"] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        if picks["averaged"]:
            grads = lax.pmean(grads, axes)
        if picks["partly"]:
            grads = grads | {"w": lax.pmean(grads["w"], axes[0])}
        norm = optax.tree.norm(grads)
        if picks["clipped"]:
            grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
        decides = (lax.pmean(norm, axes) if picks["by_all"] else norm) > 0.1
        if picks["cond"]:
            none = jax.tree.map(jnp.zeros_like, grads)
            updates, opt_state = lax.cond(
                decides, lambda: tx.update(grads, opt_state, params), lambda: (none, opt_state)
            )
        else:
            updates, opt_state = tx.update(grads, opt_state, params)
        if picks["scaled"]:
            rate = lax.psum(norm, axes) if picks["summed"] else norm
            updates = jax.tree.map(lambda u: u * jnp.minimum(rate, 1), updates)
        if picks["masked"]:
            updates = updates | {"b": -0.1 * grads["b"]}
        if picks["index"]:
            updates = updates | {"s": updates["s"] + lax.axis_index(axes[-1])}
        params = optax.apply_updates(params, updates)
        more = more + (norm if picks["own"] else 1.0)
        out = {"loss": loss} | ({"g": grads} if picks["returned"] else {})
        return (params, opt_state, more), out

    return step, {name for name, is_so in picks.items() if is_so}


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_are_refused_or_keep_the_parameters_of_all_workers_equal(seed):
    rng, ran, refused = np.random.default_rng(seed), 0, 0
    batch = normal(24, 4, seed=seed)
    for i in range(14):
        tx = [lc.lion_cub, lc.owner_adamw][i % 2](0.1, workers=workers())
        step, picks = random_step(rng, tx, workers())
        params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3), "s": jnp.ones(())}
        state = params, tx.init(params), jnp.float32(0)
        try:
            found, _ = lc.map_step(step, workers())(state, batch)
        except ValueError:
            refused += 1
            continue
        ran += 1
        for x in jax.tree.leaves(found[0]):
            copies = [np.asarray(s.data) for s in x.addressable_shards]
            assert all((copy == copies[0]).all() for copy in copies), picks
    assert ran > 2 and refused > 2
