"""That every split gives each example to one worker, and what each kind of split promises."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study import splits

few = settings(max_examples=50, deadline=None, derandomize=True)
LABELS = np.repeat(np.arange(10), 100)


@st.composite
def some_labels(draw):
    """Labels and no more workers than classes occur."""
    labels = draw(st.lists(st.integers(-3, 9), min_size=1, max_size=60))
    return labels, draw(st.integers(1, len(set(labels))))


@st.composite
def some_documents(draw):
    """Documents with gaps between them, in any order, and no more workers than documents."""
    edges = draw(st.lists(st.integers(0, 300), min_size=2, max_size=30, unique=True))
    edges = sorted(edges)[: len(edges) // 2 * 2]
    documents = draw(st.permutations(list(zip(edges[::2], edges[1::2], strict=True))))
    return documents, draw(st.integers(1, len(documents)))


def shares_all(parts, examples, workers):
    """Each example is in one part, and parts are as they are said to be."""
    assert len(parts) == workers
    assert all(part.dtype == np.int64 and part.ndim == 1 and part.size for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), examples)


def same(these, those):
    return all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))


# --- Each example to one worker


@few
@given(st.integers(1, 200), st.data())
@pytest.mark.parametrize("split", [splits.iid, splits.contiguous])
def test_even_splits_share_all_evenly(split, count, data):
    workers = data.draw(st.integers(1, count))
    parts = split(count, workers)
    shares_all(parts, range(count), workers)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@few
@given(some_labels(), st.floats(0.3, 1e3), st.integers(0, 2**32))
def test_dirichlet_shares_all(drawn, alpha, seed):
    labels, workers = np.repeat(drawn[0], 50), drawn[1]
    shares_all(splits.dirichlet(labels, workers, alpha, seed), range(len(labels)), workers)


@few
@given(some_labels())
def test_by_class_shares_all_and_no_two_workers_have_a_class(drawn):
    labels, workers = drawn
    parts = splits.by_class(labels, workers)
    shares_all(parts, range(len(labels)), workers)
    classes = [set(np.asarray(labels)[part].tolist()) for part in parts]
    assert sum(map(len, classes)) == len(set(labels))
    assert max(map(len, classes)) - min(map(len, classes)) <= 1


@few
@given(some_documents())
def test_by_document_shares_all_documents_whole_and_in_balance(drawn):
    documents, workers = drawn
    parts = splits.by_document(documents, workers)
    everything = sorted(itertools.chain(*(range(*document) for document in documents)))
    shares_all(parts, everything, workers)
    for start, end in documents:
        assert sum(bool(np.isin(np.arange(start, end), part).any()) for part in parts) == 1
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= max(end - start for start, end in documents)


# --- What each promises


@pytest.mark.parametrize(
    "split",
    [
        lambda seed: splits.iid(1000, 7, seed),
        lambda seed: splits.dirichlet(LABELS, 7, 0.5, seed),
    ],
    ids=["iid", "dirichlet"],
)
def test_the_seed_decides(split):
    assert same(split(3), split(3))
    assert not same(split(3), split(4))


def test_iid_gives_every_worker_some_of_every_class():
    counts = [np.bincount(LABELS[part]) for part in splits.iid(1000, 4)]
    assert np.abs(np.array(counts) - 25).max() < 18  # four standard deviations of about 4.3


def test_contiguous_pieces_follow_each_other():
    parts = splits.contiguous(10, 3)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def largest_shares(alpha, seed=0):
    """Of each class of 10, what the worker has that has most of it, of 8."""
    parts = splits.dirichlet(LABELS, 8, alpha, seed)
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    return counts.max(axis=0) / 100


def test_a_small_alpha_gives_a_class_to_few_and_a_large_one_to_all():
    assert np.median(largest_shares(0.05)) > 0.7
    assert largest_shares(1e5).max() <= 0.15
    assert largest_shares(1e5).min() >= 0.12


def test_dirichlet_proportions_have_the_mean_and_spread_of_the_formula():
    """A share of Dirichlet(1, 1, 1, 1) has mean 1/4 and variance 3/80."""
    labels = np.repeat(np.arange(200), 400)
    parts = splits.dirichlet(labels, 4, 1.0, seed=1)
    shares = np.array([np.bincount(labels[part], minlength=200) for part in parts]) / 400
    np.testing.assert_allclose(shares.sum(axis=0), 1)
    # 200 classes: the mean of a worker's shares has a standard deviation of 0.0137.
    np.testing.assert_allclose(shares.mean(axis=1), 0.25, atol=0.05)
    np.testing.assert_allclose(shares.var(), 3 / 80, rtol=0.2)


def test_examples_of_a_class_are_drawn_at_random():
    """Else the first examples of each class would all go to the first worker."""
    part = splits.dirichlet(np.zeros(1000, int), 2, 1e6)[0]
    assert 200 < (part < 500).sum() < 300


def test_every_worker_has_an_example_after_draws_that_left_one_without():
    """Of the single draws with these settings most leave a worker without any."""
    labels = np.repeat([0, 1], 20)
    for seed in range(20):
        assert min(map(len, splits.dirichlet(labels, 4, 0.2, seed))) >= 1
    rng = np.random.default_rng(0)
    draws = [splits._owners(labels, 4, 0.2, rng) for _ in range(200)]
    assert sum(len(set(owner.tolist())) < 4 for owner in draws) > 100


@pytest.mark.parametrize("alpha", [1e-3, 1e-9])
def test_dirichlet_gives_up_and_says_what_to_do(alpha):
    with pytest.raises(ValueError, match=r"8 workers .* 20 examples .* 100 draws: give a larger"):
        splits.dirichlet([0] * 10 + [1] * 10, 8, alpha)


@pytest.mark.parametrize("alpha", [1e9, 1, np.float32(0.5)])
def test_dirichlet_takes_other_kinds_of_numbers(alpha):
    shares_all(splits.dirichlet(LABELS, 3, alpha), range(1000), 3)


def test_classes_are_dealt_by_their_numbers():
    labels = [7, 3, 5, 3, 7, 9, 200]
    parts = [part.tolist() for part in splits.by_class(labels, 2)]
    assert parts == [[0, 1, 3, 4, 6], [2, 5]]


def test_the_largest_document_is_dealt_first():
    sizes = [1, 9, 2, 8, 3, 7]
    ends = np.cumsum(sizes).tolist()
    documents = list(zip([0, *ends[:-1]], ends, strict=True))
    parts = splits.by_document(documents, 3)
    assert [len(part) for part in parts] == [10, 10, 10]
    assert same(splits.by_document(documents[::-1], 3), parts)


# --- As two arrays


@few
@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=5)
)
def test_a_table_repeats_what_each_worker_has(parts):
    rows, lengths = splits.table(parts)
    assert rows.dtype == lengths.dtype == np.int32
    assert rows.shape == (len(parts), max(map(len, parts)))
    for part, row, length in zip(parts, rows.tolist(), lengths.tolist(), strict=True):
        assert length == len(part)
        assert row == list(itertools.islice(itertools.cycle(part), len(row)))


def test_a_jitted_program_draws_from_a_table():
    parts = splits.dirichlet(LABELS, 6, 0.3)
    rows, lengths = map(jnp.asarray, splits.table(parts))

    @jax.jit
    def draw(key):
        at = jax.random.randint(key, (5000, 6), 0, lengths)
        return rows[jnp.arange(6), at]

    drawn = np.asarray(draw(jax.random.key(0)))
    for worker, part in enumerate(parts):
        assert set(drawn[:, worker].tolist()) == set(part.tolist())


# --- What is refused

REFUSED = [
    (lambda: splits.iid(3, 4), r"workers=4 is more than the 3 examples.*at most 3 workers"),
    (lambda: splits.contiguous(3, 4), "workers=4 is more than the 3 examples"),
    (lambda: splits.dirichlet([0, 1], 3, 1.0), "workers=3 is more than the 2 examples"),
    (lambda: splits.by_class([0, 1, 1, 1], 3), "workers=3 is more than the 2 classes"),
    (lambda: splits.by_document([(0, 9)], 2), "workers=2 is more than the 1 documents"),
    (lambda: splits.iid(0, 1), "0 examples: give a whole number of at least 1"),
    (lambda: splits.iid(8, 0), "workers=0: give a whole number of at least 1"),
    (lambda: splits.contiguous(8, -1), "workers=-1: give a whole number"),
    (lambda: splits.dirichlet([0, 1], 1.5, 1.0), r"workers=1\.5: give a whole number"),
    (lambda: splits.by_class([0, 1], True), "workers=True: give a whole number"),
    (lambda: splits.by_document([(0, 9)], 0), "workers=0: give a whole number"),
    (lambda: splits.dirichlet([0, 1], 2, 0), "alpha=0: give a number above zero, from 1e-09 to 1e"),
    (lambda: splits.dirichlet([0, 1], 2, -0.5), r"alpha=-0\.5: give a number above zero, from 1e-09 to 1e"),
    (lambda: splits.dirichlet([0, 1], 2, 1e-10), "alpha=1e-10: give a number"),
    (lambda: splits.dirichlet([0, 1], 2, 1e10), r"alpha=10000000000\.0: give a number"),
    (lambda: splits.dirichlet([0, 1], 2, np.nan), "alpha=nan: give a number above zero, from 1e-09 to 1e"),
    (lambda: splits.dirichlet([0, 1], 2, np.inf), "alpha=inf: give a number above zero, from 1e-09 to 1e"),
    (lambda: splits.dirichlet([0, 1], 2, "1"), "alpha='1': give a number above zero"),
    (lambda: splits.dirichlet([[0], [1]], 2, 1.0), r"labels have shape \(2, 1\) and dtype int64"),
    (lambda: splits.dirichlet([0.0, 1.0], 2, 1.0), "dtype float64: give a 1-D array of integers"),
    (lambda: splits.by_class(["a", "b"], 2), "dtype <U1: give a 1-D array of integers"),
    (lambda: splits.by_class([True, False], 2), "dtype bool: give a 1-D array of integers"),
    (lambda: splits.by_class(3, 1), r"labels have shape \(\)"),
    (lambda: splits.by_document([(0, 5), (4, 9)], 1), r"document \(4, 9\) after 5"),
    (lambda: splits.by_document([(3, 3), (4, 9)], 1), r"document \(3, 3\) after 0"),
    (lambda: splits.by_document([(-1, 3)], 1), r"document \(-1, 3\) after 0"),
    (lambda: splits.table([]), "parts is empty"),
    (lambda: splits.table([[1], []]), "the part of worker 1 has shape"),
    (lambda: splits.table([[1.5]]), "the part of worker 0 has shape .* dtype float64"),
    (lambda: splits.table([[0], [2**31]]), "the part of worker 1 goes from 2147483648"),
    (lambda: splits.table([[-1]]), "the part of worker 0 goes from -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_split_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
