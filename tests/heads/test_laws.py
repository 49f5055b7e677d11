"""What rounds of a head's drafter emit is the target, whatever the head says."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, verification
from tests import laws
from tests.drafting.binding import tree
from tests.heads.process import Process
from tests.heads.tiny_heads import (
    CONFIGS,
    ENCODED,
    ENCODERS,
    V,
    drafter_of,
    encoded_head,
    tiny_assistant,
    tiny_head,
)
from tests.laws import Law
from tests.models.tiny import quick_jit
from tests.tables import RULES
from tests.variants import variants

N, G = 4, 2
PROMPT = (0, 1)
EXACT = 1e-6
TEMPERATURES = (1.0, 0.6, 0.0)
VERIFICATIONS = {"token": verification.Token(), "block": verification.Block()}
ALL_RULES = ("Lossless", "OPT", "TokenV3", "KLBall")
STOPS = {
    "fixed": None,
    "confidence": drafting.Confidence(0.7),
    "own": drafting.Survival(drafting.OwnEstimate(), 0.8),
}


ASSISTANTS = {"assistant": None, "ordered assistant": V}


def head_of(name, mapped=None):
    if name in ASSISTANTS:
        return tiny_assistant(ASSISTANTS[name])
    return tiny_head(name, mapped=mapped)


@functools.cache
def verifiers_law(temperature, prompt=PROMPT, num_tokens=N, assisted=False):
    tiny = head_of("assistant" if assisted else "eagle3")  # all others have one verifier
    given = tiny.verifier, tiny.verifier_params, prompt, num_tokens
    logits = testing.prefix_distributions(*given, lambda logits: logits)
    return testing.target_law(laws.probabilities(logits, temperature), num_tokens)


def distances(name, verify, stop, rule_names, mapped=None, prompt=PROMPT, longest=G, **options):
    """Rounds in the loop from what they must be; how far drafts and targets differ."""
    tiny, assisted = head_of(name, mapped), name in ASSISTANTS
    drafter, own = drafter_of(tiny, longest, STOPS[stop], **options)
    method = decoding.Speculative(tiny.verifier, drafter, VERIFICATIONS[verify])
    process = Process(tiny, drafter, VERIFICATIONS[verify])
    both = list(itertools.product(rule_names, TEMPERATURES))
    # And a text of one token, which has no states.
    names = [*(rule for rule, _ in both), "Lossless"]
    rule = RULES["Lossless"] if len(rule_names) == 1 else laws.OneOf.by_row(names)
    params = decoding.MethodParams(tiny.verifier_params, own, rule)
    rows = [laws.Row(prompt, N, temperature=temperature) for _, temperature in both]
    *texts, short = laws.Texts(method)(params, [*rows, laws.Row((1,), N)])
    alone = verifiers_law(1.0, (1,), assisted=assisted)
    found = {"one token": testing.total_variation(laws.array_of(short, V, N), alone)}
    lengths = set()
    for (rule, temperature), law in zip(both, texts, strict=True):
        emitted = laws.array_of(law, V, N)
        wanted, of_rounds, drafted = process(own, RULES[rule], prompt, N, temperature)
        lengths |= drafted
        apart = [testing.total_variation(emitted, wanted), of_rounds]
        if rule == "Lossless":
            law = verifiers_law(temperature, prompt, assisted=assisted)
            apart.append(testing.total_variation(emitted, law))
        found[rule, temperature] = max(apart)
    return found, lengths


# One rule beside Lossless meets each head here, and all meet all in `make test-all`.
QUICK = {
    ("eagle3", "block", "fixed"): ("Lossless", "OPT"),
    ("dflash", "token", "fixed"): ("Lossless", "KLBall"),
    ("dspark", "block", "own"): ("Lossless",),
    ("domino", "block", "fixed"): ("Lossless", "OPT"),
    ("peagle", "token", "fixed"): ("Lossless", "KLBall"),
    ("dflash2", "block", "fixed"): ("Lossless", "OPT"),
    ("ordered assistant", "block", "fixed"): ("Lossless", "OPT"),
}
ALL = [
    pytest.param(*case, ALL_RULES, marks=pytest.mark.exhaustive)
    for case in itertools.product((*CONFIGS, *ASSISTANTS), VERIFICATIONS, STOPS)
    if case[2] != "own" or case[0] == "dspark"
    if case[::2] != ("ordered assistant", "confidence")  # which never is sure
]


@pytest.mark.parametrize(
    ("name", "verify", "stop", "rule_names"), [*((*k, v) for k, v in QUICK.items()), *ALL]
)
def test_the_law_of_rounds(name, verify, stop, rule_names):
    found, lengths = distances(name, verify, stop, rule_names)
    assert max(found.values()) < EXACT, found
    assert stop == "fixed" or len(lengths) > 1, "what was drawn decided nothing"


PAIRS = variants(itertools.product(CONFIGS, VERIFICATIONS), ("dspark", "token"), several=True)


@pytest.mark.parametrize(("name", "verify"), PAIRS)
def test_the_law_with_a_draft_vocabulary(name, verify):
    found, _ = distances(name, verify, "fixed", ("Lossless", "OPT"), mapped=(2, 0))
    assert max(found.values()) < EXACT, found


# A prompt that repeats itself, and a head that drafts fewer tokens than are copied.
REPEATED = ("Lossless", "KLBall"), {"prompt": (0, 1, 0), "longest": 1}
HEADS = itertools.product((*CONFIGS, *ASSISTANTS), VERIFICATIONS)
COPIED = variants(HEADS, ("eagle3", "block"), ("dspark", "token"), several=True)


@pytest.mark.parametrize(("name", "verify"), COPIED)
def test_the_law_with_copies_before_a_head(name, verify):
    found, _ = distances(name, verify, "fixed", REPEATED[0], **REPEATED[1], copies=3)
    assert max(found.values()) < EXACT, found


def test_control_a_head_that_reads_no_more_than_its_own_length(monkeypatch):
    monkeypatch.setattr(
        drafting.heads.EagleDrafter, "path", property(lambda drafter: drafter.max_draft)
    )
    found, _ = distances("eagle3", "block", "fixed", REPEATED[0], **REPEATED[1], copies=2)
    assert found["Lossless", 1.0] < EXACT and found["KLBall", 1.0] > 100 * EXACT, found


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
@pytest.mark.exhaustive
def test_the_law_of_greedy_drafts(name):
    found, _ = distances(name, "token", "fixed", ("Lossless", "OPT"), greedy=True)
    assert max(found.values()) < EXACT, found


def lossless(drafter, own, name, prompt=PROMPT, num_tokens=N, verify=None):
    """The total variation distance of what is emitted from the verifier's law."""
    tiny = tiny_head(name)
    one = decoding.Speculative(tiny.verifier, drafter, verify or verification.Block())
    found = Law(one)(decoding.MethodParams(tiny.verifier_params, own), prompt, num_tokens)
    return testing.total_variation(found, verifiers_law(1.0, prompt, num_tokens))


def verifiers_law_of_encoded(tiny, temperature):
    """The law of the first tokens that an encoder-decoder writes."""
    texts = [x for n in range(N) for x in itertools.product(range(V), repeat=n)]
    outputs = np.zeros((len(texts), N), np.int32)
    outputs[:, 0] = tiny.verifier.config.decoder_start_token
    for row, text in enumerate(texts):
        outputs[row, 1 : 1 + len(text)] = text
    inputs = np.tile(np.array([PROMPT], np.int32), (len(texts), 1))
    logits = np.asarray(quick_jit(tiny.verifier.apply)(tiny.verifier_params, inputs, outputs))
    after = np.stack([logits[row, len(text)] for row, text in enumerate(texts)])
    return testing.target_law(laws.probabilities(after, temperature), N)


ENCODER_CASES = variants(
    itertools.product(ENCODERS, ENCODED), ("t5gemma", "dspark"), ("umt5", "eagle3"), several=True
)


@pytest.mark.parametrize(("encoder", "name"), ENCODER_CASES)
def test_the_law_of_an_encoder_decoder(encoder, name):
    mapped = (2, 0) if name == "dflash" else None
    tiny = encoded_head(name, encoder, mapped=mapped)
    drafter, own = drafter_of(tiny, G)
    method = decoding.Speculative(tiny.verifier, drafter, verification.Block())
    params = decoding.MethodParams(tiny.verifier_params, own)
    rows = [laws.Row(PROMPT, N, temperature=temperature) for temperature in TEMPERATURES]
    found = laws.Texts(method)(params, rows)
    for temperature, law in zip(TEMPERATURES, found, strict=True):
        wanted = verifiers_law_of_encoded(tiny, temperature)
        emitted = laws.array_of(law, V, N)
        assert testing.total_variation(emitted, wanted) < EXACT, temperature


TREES = {"k_ary": drafting.trees.k_ary(2, 2), "beam": drafting.trees.Beam(2, 2, 1)}


GROWN = [("beam", "top+1"), ("k_ary", "without"), ("beam", "top"), ("k_ary", "independent")]


@pytest.mark.parametrize(("shape", "children"), variants(GROWN, GROWN[0], several=True))
def test_the_law_of_trees(shape, children):
    tiny = tiny_head("eagle3")
    drafter = tree(tiny.head, TREES[shape], children, kind=drafting.heads.EagleTree)
    own = drafting.chain.ChainParams(tiny.params)
    assert lossless(drafter, own, "eagle3", num_tokens=3, verify=verification.Traversal()) < EXACT


@dataclasses.dataclass(frozen=True)
class SharedNoise(drafting.heads.BlockDrafter):
    """Draws all tokens of a block with the same uniform (a control)."""

    def propose(self, params, state, inputs):
        each = inputs.uniforms.shape[1] // self.max_draft
        same = jnp.tile(inputs.uniforms[:, :each], (1, self.max_draft))
        inputs = inputs._replace(uniforms=same)
        return super().propose(params, state, inputs)


def test_control_noise_that_a_block_shares():
    """The chances of what the other uniforms would draw then add up to more, or less, than 1."""
    tiny = tiny_head("dflash")
    own = drafter_of(tiny, G)[1]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        lossless(SharedNoise(tiny.head, G), own, "dflash", verify=verification.Token())


def test_what_cannot_be_had_is_refused():
    for name in ("eagle3", "dflash"):
        drafter, _ = drafter_of(tiny_head(name), G)
        with pytest.raises(ValueError, match="distributions depend on more than the prefix"):
            decoding.Round(tiny_head(name).verifier, drafter, verification.GreedyBlock())
    tiny = tiny_head("dflash")
    with pytest.raises(ValueError, match="max_draft must be at most 3 for this DFlash, whose bloc"):
        drafter_of(tiny, 4)
    one = decoding.Round(tiny.verifier, drafter_of(tiny, 3)[0], verification.Block())
    one.check_rule(rules.Lossless())
    with pytest.raises(ValueError, match="OPT reads the drafter's distribution after a whole dra"):
        one.check_rule(rules.OPT(0.2))
    with pytest.raises(ValueError, match="TabularModel has no states for a drafter that reads"):
        testing.TabularModel(3).reading((1,))
