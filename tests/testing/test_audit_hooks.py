"""The hooked mode of the audit: right and wrong verifiers that draw by NumPy, PyTorch and JAX."""

import functools

import jax
import numpy as np
import pytest

from specjax.testing import Verdict, audit

EXACT, BIASED, INVALID = Verdict.EXACT, Verdict.BIASED, Verdict.INVALID
LIMIT = Verdict.NOT_FINISHED


JOINT = {"cases": ["joint residual"]}


def token(tests, draw, tokens, draft_probs, target_probs, generator, lengths, *, whole=False):
    """Token on one row: `tests(generator, i, ratio)` accepts, `draw(generator, weights)` draws."""
    given = tokens, draft_probs, target_probs
    x, q, p = (np.asarray(a)[0] if isinstance(a, jax.Array) else a[0] for a in given)
    n, length = 0, int(lengths[0])
    while n < length and bool(tests(generator, n, p[n, x[n]] / q[n, x[n]])):
        n += 1
    weights = p[n] if whole or n == length else (p[n] - q[n]).clip(0)  # whole: a known bug
    return np.array([n]), np.array([int(draw(generator, weights))])


def below(g, i, ratio):
    return g.random() < ratio


def chosen(g, w):
    return g.choice(len(w), p=w / w.sum())


def sometimes_other(g, w):
    """A uniform is drawn only where the least probable token was."""
    y = chosen(g, w)
    return 1 if y == 2 and g.random() > 0.5 else y


def sometimes_greedy(g, w):
    """What becomes of the drawn token depends on a uniform."""
    y, u = chosen(g, w), g.random()
    return w.argmax() if u > 0.7 else y


def seeded(g, i, ratio):
    return np.random.default_rng(0).random() < ratio


def seeded_for_all(g, i, ratio):
    np.random.seed(0)  # noqa: NPY002
    return g.random() < ratio


NUMPY = {
    "choice": (below, chosen, JOINT, EXACT, ""),
    "choice, residual p": (below, chosen, {"whole": True}, BIASED, "wrong from token"),
    "choice, not normalised": (below, lambda g, w: g.choice(3, p=w), {}, INVALID, "sum to 1"),
    "multinomial": (below, lambda g, w: g.multinomial(1, w / w.sum()).argmax(), {}, EXACT, ""),
    "multinomial, not normalised": (
        *(below, lambda g, w: g.multinomial(1, w).argmax()),
        *({}, BIASED, "TV 0.1"),
    ),
    "exponential": (below, lambda g, w: (g.exponential(size=3) / w).argmin(), {}, EXACT, ""),
    "exponential by scale": (below, lambda g, w: g.exponential(1 / w).argmin(), {}, EXACT, ""),
    "exponential, upside down": (
        *(below, lambda g, w: (g.exponential(size=3) * w).argmax()),
        *({}, BIASED, ""),
    ),
    "exponential, one by one": (
        *(below, lambda g, w: np.argmin([g.exponential() / x for x in w])),
        *({}, LIMIT, "audit it as a black box"),
    ),
    "gumbel": (below, lambda g, w: (g.gumbel(size=3) + np.log(w)).argmax(), {}, EXACT, ""),
    "gumbel by loc": (below, lambda g, w: g.gumbel(np.log(w)).argmax(), {}, EXACT, ""),
    "gumbel, residual p": (
        *(below, lambda g, w: (g.gumbel(size=3) + np.log(w)).argmax()),
        *({"whole": True}, BIASED, "wrong from token"),
    ),
    "default_rng()": (lambda g, i, r: np.random.default_rng().random() < r, chosen, {}, EXACT, ""),
    "default_rng(generator)": (
        *(lambda g, i, r: np.random.default_rng(g).random() < r, chosen),
        *({}, EXACT, ""),
    ),
    "default_rng(0)": (seeded, chosen, {}, INVALID, "seeds its generator with a constant"),
    "np.random.seed(0)": (seeded_for_all, chosen, {}, INVALID, "seeds its generator"),
    "integers": (
        *(lambda g, i, r: g.integers(100) < 100 * r, chosen),
        *({}, LIMIT, "hooks do not know integers: audit it as a black box"),
    ),
    "np.random.randint": (
        *(lambda g, i, r: np.random.randint(100) < 100 * r, chosen),  # noqa: NPY002
        *({}, LIMIT, "hooks do not know randint"),
    ),
    "a uniform after some draws": (below, sometimes_other, JOINT, LIMIT, "hooks do not see"),
    "a uniform after all draws": (below, sometimes_greedy, JOINT, LIMIT, "hooks do not see"),
    "float32": (
        *(lambda g, i, r: g.random(dtype=np.float32) < r, chosen),
        *({"dtype": "float32", "cases": ["q = p"]}, EXACT, ""),
    ),
}


def torch_table():
    torch = pytest.importorskip("torch")

    def below(g, i, ratio):
        return torch.rand((), generator=g) < ratio

    def drawn(g, w):
        return torch.multinomial(w, 1, generator=g)

    def seeded(g, i, ratio):
        return torch.rand((), generator=torch.Generator().manual_seed(0)) < ratio

    def seeded_for_all(g, i, ratio):
        torch.manual_seed(0)
        return torch.rand(()) < ratio

    narrow = {"dtype": "float32", "cases": ["q = p"]}
    return {
        "multinomial": (below, drawn, {}, EXACT, ""),
        "multinomial, residual p": (below, drawn, {"whole": True}, BIASED, "wrong from token"),
        "float32": (below, drawn, narrow, EXACT, ""),
        "bernoulli": (
            *(lambda g, i, r: torch.bernoulli(r.clip(max=1), generator=g), drawn),
            *({}, EXACT, ""),
        ),
        "bernoulli_": (
            *(lambda g, i, r: torch.empty(()).bernoulli_(float(r.clip(max=1))), drawn),
            *({}, EXACT, ""),
        ),
        "bernoulli of the square": (
            *(lambda g, i, r: torch.bernoulli(r.clip(max=1) ** 2), drawn),
            *({}, BIASED, "wrong from token 1"),
        ),
        "exponential_": (
            *(below, lambda g, w: (w / torch.empty_like(w).exponential_(generator=g)).argmax()),
            *({}, EXACT, ""),
        ),
        "a generator with a constant seed": (seeded, drawn, {}, INVALID, "with a constant"),
        "manual_seed(0)": (seeded_for_all, drawn, {}, INVALID, "with a constant"),
        "randint": (
            *(lambda g, i, r: torch.randint(100, ()) < 100 * r, drawn),
            *({}, LIMIT, "audit it as a black box"),
        ),
    }


def jax_table():
    def keyed(key, i):
        return jax.random.split(key, 4)[i]

    def below(key, i, ratio):
        return np.asarray(jax.random.uniform(keyed(key, i))) < ratio

    def drawn(key, w):
        return jax.random.categorical(keyed(key, 3), np.log(w))

    def other_too(key, w):
        jax.random.categorical(keyed(key, 3), np.zeros(len(w)))
        return drawn(key, w)

    def zeros_too(key, w):
        """As `jnp.where` does, it draws from a residual without weight, and does not use it."""
        jax.random.categorical(keyed(key, 2), np.full(len(w), -np.inf))
        return drawn(key, w)

    def raced(key, w):
        return (jax.random.gumbel(keyed(key, 3), w.shape) + np.log(w)).argmax()

    return {
        "categorical": (below, drawn, {}, EXACT, ""),
        "categorical, residual p": (below, drawn, {"whole": True}, BIASED, "wrong from token"),
        "bernoulli": (lambda k, i, r: jax.random.bernoulli(keyed(k, i), r), drawn, {}, EXACT, ""),
        "choice": (
            *(below, lambda k, w: jax.random.choice(keyed(k, 3), len(w), p=w / w.sum())),
            *({"cases": ["T=0 equal"]}, EXACT, ""),  # rejects if a uniform is 1
        ),
        "gumbel": (below, raced, {"cases": ["L=0"]}, EXACT, ""),
        "a key for uniforms and for the token": (
            lambda k, i, r: jax.random.uniform(k, (4,))[i] < r,
            lambda k, w: jax.random.categorical(k, np.log(w)),
            *({}, INVALID, "a key is used twice: split it"),
        ),
        "a key for uniforms of two shapes": (
            *(lambda k, i, r: jax.random.uniform(k, (i + 1,))[0] < r, drawn),
            *({"cases": ["toy"]}, INVALID, "a key is used twice: split it"),
        ),
        "a key for two draws by weights": (below, other_too, {}, LIMIT, "audit it as a black box"),
        "a draw without weights that is not used": (
            below,
            zeros_too,
            {"cases": ["L=0"]},
            EXACT,
            "",
        ),
        "key(0)": (
            *(lambda k, i, r: jax.random.uniform(keyed(jax.random.key(0), i)) < r, drawn),
            *({}, INVALID, "seeds its generator with a constant"),
        ),
        "randint": (
            *(lambda k, i, r: int(jax.random.randint(keyed(k, i), (), 0, 100)) < 100 * r, drawn),
            *({}, LIMIT, "hooks do not know randint"),
        ),
        "vmap": (
            *(lambda k, i, r: jax.vmap(jax.random.uniform)(keyed(k, i)[None])[0] < r, drawn),
            *({}, LIMIT, "audit it as a black box"),
        ),
    }


TABLES = {"numpy": lambda: NUMPY, "torch": torch_table, "jax": jax_table}


WIDTHS = {"numpy": "float64", "torch": "float64", "jax": "float32"}


@pytest.mark.parametrize("arrays", TABLES)
def test_what_hooks_say(arrays):
    for name, (tests, draw, options, verdict, words) in TABLES[arrays]().items():
        options = {"dtype": WIDTHS[arrays], "cases": ["L=1"], **options}
        verifier = functools.partial(token, tests, draw, whole=options.pop("whole", False))
        found = audit(verifier, mode="hooked", arrays=arrays, **options)
        assert found.verdict is verdict and words in found.reason, (name, found)
