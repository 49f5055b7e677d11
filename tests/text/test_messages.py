"""What decoders, calls, engines and parts refuse: what is given, and the line that it says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafting, errors, processors, rules, testing, types, verification
from specjax.decoding import TokenCascade
from specjax.drafting import Bigram, Branches, Cascade, Lookup, Tree
from specjax.text import passes, stops
from specjax.text.decoder import Decoder
from specjax.text.setting import Setting, check_single
from specjax.types import Sampling
from tests import tiny_pair

SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (16, 32)}


@functools.cache
def pair():
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


@functools.cache
def ready():
    return Decoder(pair(), rule=rules.OPT(0.2), max_draft=3, **SHAPE)


def decoder(**options):
    return lambda: Decoder(pair(), **{**SHAPE, **options})


def alone(**options):
    return lambda: Decoder(pair().verifier, **{**SHAPE, **options})


def call(prompts, **options):
    """Also of a stream, which must say the same."""

    def both():
        with pytest.raises(ValueError) as streamed:
            ready().stream(prompts, **options)
        with pytest.raises(ValueError) as called:
            ready()(prompts, **options)
        assert str(streamed.value) == str(called.value)
        raise called.value

    return both


def rank(**options):
    return lambda: ready()(["ba"], **options)


def score(outputs, prompts=("a", "b", "c"), **options):
    return lambda: ready().score(list(prompts)[: len(outputs) or 3], outputs, **options)


def engine(**options):
    return lambda: ready().engine(**{"prompt_length": 16, **options})


def request(prompt="a", engine=(), **options):
    def add():
        made = ready().engine(prompt_length=16, **dict(engine))
        try:
            made.add(specjax.Request(prompt, **options))
        finally:
            assert made.unfinished == 0

    return add


def setting(**fields):
    return lambda: Setting(**fields)


class Unsure(types.Stopping):
    """Reads its parameters, which only `WithParams` gives."""

    reads_confidence = True

    def step(self, params, state, drawn):
        return jnp.max(drawn.confidences, axis=-1) < params, state


class ByName(Unsure):
    def begin(self, params, memory, limits, longest):
        return jnp.minimum(limits, params["most"]), ()


@dataclasses.dataclass(frozen=True)
class Fields(Unsure):
    table: np.ndarray


def load(**options):
    return lambda: specjax.load_pair(**{**tiny_pair.shared_pair(), **options})


def cascade(**options):
    """Of the drafter and a model below it."""
    below = {"lengths": ((2, 2), (0, 2)), "models": ("drafter", tiny_pair.tabular(3))}
    return lambda: Decoder(pair(), drafting=Cascade(**{**below, **options}), **SHAPE)


def copying(**options):
    """With a cascade that ends in copies."""
    plan = Cascade(((2, 2), (0, 2)), last=Lookup())
    return decoder(drafting=plan, **options)


def processing(*given, **options):
    return decoder(processors=given, **options)


def larger():
    table = jnp.asarray(testing.random_table(3, 300, 1))
    words = pair().verifier.tokenizer
    return specjax.TextModel(testing.TabularModel(300, 1), table, words, name="bigger")


TOKENS = TokenCascade()
TREE = Tree(depth=2, width=2)
BRANCHES = Branches(("drafter", Lookup(copies=2)))
K = ((1, 3), (0, 1))
NO_CASCADE = "models must be a tuple of names, dire"
NO_PROMPTS = "prompts must be a list of "
NEEDED = "must be a text, a list of token ids or a list of chat messages, got"
NO_TEXT = "prompt 0 must be a text"
NO_SEED = "seed must be a number, or a number per prompt"
NO_TREE = "more than 512 nodes"
NO_BUCKETS = "buckets must be increasing lengths"
NO_FIT = "cannot be combined"
MIN_P, SUPPRESS = processors.MinP(0.1), processors.SuppressTokens((5,))
DECODERS = [
    *(
        (decoder(**{name: 0}), f"{name} must be a whole number of at least 1, got 0")
        for name in ("max_draft", "batch_size", "max_new_tokens")
    ),
    (decoder(buckets=64), f"{NO_BUCKETS} in tokens, such as (64, 128), got 64"),
    *((decoder(buckets=wrong), NO_BUCKETS) for wrong in ((1.5, 2), ())),
    (decoder(rule=0.2), "rule must be like rules.OPT(strength=0.2), got 0.2"),
    (decoder(rule=rules.OPT), "rule must be an instance, got the class OPT"),
    (decoder(verification=0), "verification must be like "),
    (decoder(stopping=3), "stopping must be like drafting.FixedLength(), got 3"),
    (decoder(method=3), "method must be like specjax.decoding.TokenCascade(), got 3"),
    (decoder(method=specjax.WithParams(3)), "method must be like decoding.Speculative(...), got 3"),
    (decoder(drafting=3), "drafting must be like specjax.drafting.Lookup(), got 3"),
    (
        decoder(drafting=specjax.WithParams(3)),
        "drafting must be like specjax.drafting.Lookup(), got 3",
    ),
    (decoder(widths=(1, 2)), "G + 1 = 6, got (1, 2)"),
    (decoder(stopping=drafting.Survival()), "no acceptance head: train one with `specjax train "),
    (alone(rule=rules.OPT(0.1)), "OPT reads the drafter, but there is none: give a draft"),
    (alone(max_draft=3), "max_draft must be left out: this option needs a drafter: load one"),
    (alone(drafting="Tree(depth=2, width=2)"), "needs a model named drafter, got verifier"),
    *(
        (decoder(method=method, **{name: value}), f"{name} must be left out: method={method} dec")
        for method in ("DrafterAlone", "VerifierAlone")
        for name, value in (
            ("max_draft", 3),
            ("rule", "OPT(0.1)"),
            ("drafting", "Lookup()"),
            ("stopping", "Confidence(0.4)"),
        )
    ),
    *(
        (decoder(stopping=policy), f"give the arrays that its methods read as `params`, {told}")
        for policy, told in (
            (Unsure(), "stopping=WithParams(Unsure(...), params)"),
            (ByName(), "stopping=WithParams(ByName(...), params)"),
        )
    ),
    (decoder(stopping=Fields(np.zeros(3))), "arrays are given beside it, as in WithParams(part, "),
    (lambda: Decoder("verifier"), "models must be a Pair, models by name or a TextModel"),
    *(
        (given(**{name: value}), f"unexpected keyword argument {name!r}{told}")
        for given, name, value, told in (
            (decoder, "max_drafts", 3, "; did you mean max_draft=3?"),
            (decoder, "temperature", 0.0, "; did you mean sampling=Sampling(temperature=0.0)?"),
            (decoder, "top_p", 0.9, "; did you mean sampling=Sampling(top_p=0.9)?"),
            (decoder, "max_tokens", 8, "; did you mean max_new_tokens=8?"),
            (decoder, "min_p", 0.1, "; did you mean processors=(processors.MinP(0.1),)?"),
            (decoder, "num_assistant_tokens", 4, "; did you mean max_draft=4?"),
            (decoder, "assistant_model", "x", "; write drafter='x' as an option of load_pair"),
            (decoder, "n", 2, "; write num_samples=2 as an option of Request or a call of the Dec"),
            (decoder, "seed", 2, "; write seed=2 as an option of Request or a call of the Decoder"),
            (decoder, "num_beams", 2, ": specjax has no beam search: leave it out"),
            (decoder, "nonsense", 2, "; its options are models, setting, rule, "),
            (rank, "temperature", 0.0, "; did you mean sampling=Sampling(temperature=0.0)?"),
            (rank, "max_length", 8, "; did you mean max_new_tokens=8?"),
            (engine, "max_num_seqs", 8, "; write batch_size=8 as an option of Decoder"),
            (request, "stop_strings", ["a"], "; did you mean stop=['a']?"),
            (load, "torch_dtype", "x", "; did you mean dtype='x'?"),
            (load, "model", "x", "; did you mean verifier='x'?"),
        )
    ),
    # Cascades of the models.
    (decoder(method=TOKENS), "rule must be given: TokenCascade needs it"),
    (decoder(method=TOKENS, rule=rules.OPT(0.1)), "rule must read only the drafter, got OPT"),
    (decoder(method=TOKENS, max_draft=3), "max_draft must be left out: `method` has its own"),
    (
        decoder(method=TOKENS, rule=rules.Chow(0.3), stopping=drafting.Confidence(0.1)),
        "stopping must be left out",
    ),
    (alone(method=TOKENS, rule=rules.Chow(0.3)), "needs a model named drafter"),
    (
        lambda: decoder(method=TOKENS, rule=rules.Chow(0.3))()(["a"], rule=rules.Diff(0.1)),
        "rule must read only the drafter, got Diff",
    ),
]
DRAFTS = [
    (lambda: Lookup(min_match=0), "min_match must be a whole number of at least 1, got 0"),
    (lambda: Lookup(bigram=7), "bigram=7 must be a path"),
    (lambda: Lookup(copies=0), "copies must be a whole number of at least 1, got 0"),
    (lambda: Lookup(copies=2, min_match=3), "min_match must be left out with copies=2"),
    (decoder(drafting=Lookup(bigram="/absent")), "/absent: no bigram table found"),
    (decoder(drafting=Lookup(bigram="built-in")), "has 2048 ids "),
    (
        decoder(drafting=Lookup(), stopping=drafting.Entropy(1.0)),
        "stopping must be left out: drafting=",
    ),
    (decoder(drafting=Lookup(), min_draft=1), "min_draft must be left out: "),
    (
        decoder(drafting=Lookup(), rule=rules.OPT(0.1)),
        "OPT reads the drafter's confidence, but Lookup",
    ),
    (
        alone(drafting=Lookup(copies=3), max_draft=200),
        "trees of up to 600 tokens, and at most 512 are allowed",
    ),
    (lambda: Tree(), "depth must be a whole number of at least 1, got None"),
    (lambda: Tree(depth=40, width=3), f"{NO_TREE}: give a smaller"),
    (lambda: Tree(depth=60, width=4, beam=4), NO_TREE),
    (lambda: Tree(parents=(0,) * 513), "or fewer parents"),
    (lambda: Tree(depth=2, parents=(0, 0)), "must be left out: parents gives"),
    (
        decoder(drafting=TREE, verification=verification.Block()),
        "Block cannot verify the trees of Tree: use Trav",
    ),
    (decoder(drafting=TREE, max_draft=3), "max_draft must be left out: drafting=Tree"),
    (
        decoder(drafting=BRANCHES, rule=rules.OPT(0.2)),
        "OPT reads the drafter's distribution after each token",
    ),
    (decoder(drafting=Branches(("drafter", "other"))), "needs a model named other, got drafter"),
    (cascade(lengths=[[2, 2], [0]]), "K must have rows of equal length, got "),
    (cascade(lengths=[[2, 0], [0, 0]]), "has no tokens for level_2 in any row"),
    (cascade(models=()), NO_CASCADE),
    (cascade(models=("drafter", 3)), NO_CASCADE),
    (cascade(models=("drafter", "nowhere")), "models[1]='nowhere' is neither a model of"),
    (cascade(models=("drafter", "verifier")), "models must be different drafters, got"),
    (
        lambda: cascade(models=("drafter", larger()))(),
        "level_2 and verifier have different vocabulary sizes",
    ),
    (cascade(lenience="much"), "lenience must be a number"),
    (cascade(rules=(None,)), "rules must have 2 entries, "),
    (cascade(rules=rules.OPT([0.1, 0.2])), "rules must have scalar stre"),
    (cascade(rules=rules.OPT(0.1), lenience=2.0), "lenience must be left out: each"),
    (cascade(last=3), "last must be Lookup(...) or None, got 3"),
    (cascade(last=Lookup(min_match=2)), "last must not set min_match, because K has"),
    (cascade(verification=verification.GreedyBlock()), "GreedyBlock"),
    (cascade(lengths=K, last=Lookup(copies=2)), "last must not set copies, because"),
    (cascade(lengths=K, last=Lookup(), width=1), "width must be a whole number of at"),
    (
        cascade(lengths=K, models=("drafter",), last=Lookup(), width=500),
        "at most 512 are allowed: draft fewer",
    ),
    (
        lambda: cascade(
            models=("drafter",),
            last=Lookup(bigram=Bigram(np.full(50, -1, np.int32), "of other words")),
        )(),
        "the bigram table has 50 ids",
    ),
    (copying(max_draft=3), "max_draft must be left out: K has"),
    (copying(stopping=drafting.CostAware()), "CostAware needs a single drafter"),
]
PROCESSORS = [
    (decoder(processors=MIN_P), "processors must be a tuple"),
    (processing(0.1), "processors[0] must be like"),
    (
        processing(processors.LogitBias({10**6: 1.0})),
        "bias has the token id 1000000, but the verifier has",
    ),
    (processing(processors.SuppressTokens((9999,))), "ids has the token id"),
    (processing(processors.ForcedTokens({0: 9999})), "tokens has the token id"),
    (processing(processors.MinNewTokens(3, eos_ids=(10**6,))), "eos_ids has the token id 1000000"),
    (processing(processors.SuppressTokens(range(259))), "ids has all 259 tokens of the verifier"),
    (
        processing(processors.Regex("a+"), processors.JsonSchema({"type": "null"})),
        "at most one Regex or JsonSchema, got Regex, JsonSchema: ",
    ),
    (processing(MIN_P, sampling=Sampling(processors=(MIN_P,))), "processors must be given once"),
    (
        processing(SUPPRESS, drafting=Lookup(), rule=rules.Lossy(0.4)),
        "SuppressTokens cannot be used with rule Lossy here, ",
    ),
    (
        processing(processors.NoRepeatNgram(3), process_drafts=False, rule=rules.OPT(0.2)),
        "process_drafts is False",
    ),
    (decoder(process_drafts=3), "process_drafts must be True or False"),
    (lambda: processors.LogitBias([(5, 1.0), (5, 2.0)]), "bias must have each key once, got 5"),
    (lambda: processors.MinNewTokens(3, eos_ids="ab"), "eos_ids must be a list of token ids"),
]
CALLS = [
    (call([]), "prompts is empty: give at least one prompt"),
    (call(["ba", " "]), "prompt 1 is empty"),
    (call(["ba", []]), "prompt 1 has no tokens"),
    (call(["ba", "ba " * 100]), "prompt 1 has 301 tokens, the longest bucket holds 32"),
    (call([[3, 259]]), "prompt 0 has token 259: tokens must be in 0 .. 258"),
    # Past int32 it would wrap around to token 3.
    (call([[2**32 + 3]]), "prompt 0 has token 4294967299"),
    (call([[2**63]]), "prompt 0 has token 9223372036854775808"),
    (call(["ba", "ba"], max_new_tokens=[1, 0]), "max_new_tokens of prompt 1 must be "),
    (call(["ba"], max_new_tokens=float("nan")), "max_new_tokens of prompt 0 must "),
    (call(["ba"], max_new_tokens="5"), "max_new_tokens must be a number, or "),
    (
        call(["ba"], sampling=Sampling([1.0, 1.0])),
        "sampling.temperature has shape [2], but there are 1",
    ),
    (call(["ba"], sampling=0.7), "sampling must be Sampling(temperature=...), got 0.7"),
    (call(["ba"], ids=[-1]), "id of prompt 0 must be a whole number"),
    (call(["ba", "ba"], ids=5), "ids must be 2 numbers, one per prompt, got 5"),
    (call(["ba"], seed=2**32), "seed of prompt 0 must be a whole number"),
    (call(["ba", "ba"], seed=[1, -2]), "seed of prompt 1 must be a whole number "),
    (call(["ba"], seed=np.full((40, 2), "a")), NO_SEED),
    (call(["ba"], seed=[[1], [2, 3]]), NO_SEED),
    (call(["ba"], seed=jax.random.key(0)), NO_SEED),
    (call(["ba"], rule=rules.OPT([0.1, 0.2])), "OPT.strength has shape [2], but there are 1"),
    (call(["ba"], rule="OPT"), "rule='OPT': OPT: missing a required argument: 'strength'"),
    (call(["ba"], draft_limit=4), "in 0 .. 3, got 4"),
    (
        lambda: decoder(verification=verification.GreedyBlock(), max_draft=2)()(
            ["ba"], draft_limit=1
        ),
        "draft_limit of prompt 0 must be None or 2, because this verification needs drafts of a",
    ),
    *(
        (call(given), f"got {type(given).__name__}")
        for given in ("ba", b"ba", 5, None, {"ba": "de"}, {"ba", "de"})
    ),
    (call("ba"), NO_PROMPTS),
    (call([3, 4]), "got 3 (give a single prompt as a list"),
    (call([{"role": "user", "content": "ba"}]), "give a single prompt as"),
    (call(["ba", None]), f"prompt 1 {NEEDED} None"),
    (lambda: ready().encode(5), f"the prompt {NEEDED} 5"),
    *(
        (call([given]), NO_TEXT)
        for given in (b"ba", [1.5], [1, [2]], [True], np.ones((2, 30)), {"role": "a\nb"})
    ),
    (call([np.ones((2, 2), int)]), "got array([[1, 1], [1, 1]])"),
    (call([np.array(["ba", "de"] * 30)]), NO_TEXT),
    (call(["ba"], log_probs="yes"), "log_probs must be True or False, got 'yes'"),
    (call(["ba"], log_probs=[True, False]), "log_probs must be True or False, got"),
    (call(["ba"], sources=1), "sources must be True or False, got 1"),
    (call(["ba"], share_prefix=3), "share_prefix must be True or False, got 3"),
    (call(["ba"], prefix="Ques"), "prefix must come from this Decoder's prefix"),
    (call(["ba"], num_samples=5), "num_samples must be at most batch_size=4, got 5"),
    *(
        (
            call(["ba"], num_samples=wrong),
            f"num_samples must be a whole number of at least 1, got {wrong}",
        )
        for wrong in (0, 2.5, -1)
    ),
    (call(["ba"], num_samples=[1, 2, 3]), "num_samples must be a single whole number"),
    (rank(num_samples=2, best_of=3), "best_of must be at most num_samples=2, got 3"),
    (rank(num_samples=2, best_of=0), "best_of must be "),
    (call(["ba"], num_samples=2, ids=[2**31]), "0 .. 2147483647 (num_samples=2)"),
    *((rank(top_log_probs=wrong), "top_log_probs must be ") for wrong in (0, 1.5, 10**6)),
    (lambda: ready().rows(["a"] * 4, done={0, 4}), "done must have places in 0 .. 3, got 4"),
    (
        lambda: ready().rows(["a"] * 5, num_samples=2, done={10}),
        "done must have places in 0 .. 9, got 10",
    ),
    *(
        (
            lambda rounds=rounds: ready().rows(["a"] * 3, done={2: rounds}),
            "done[2] must be a whole number of at least 1",
        )
        for rounds in (0, 1.5, None)
    ),
    *(
        (
            lambda every=every: ready().stream_tokens(["one"], every=every),
            "every must be a whole number of at least 1",
        )
        for every in (0, 1.5, True)
    ),
    (lambda: alone()()(["a"], rule=rules.Diff(0.1)), "Diff reads the drafter"),
    (score(["a", "b"], prompts="abc", top_log_probs=0), "top_log_probs must be "),
    (lambda: ready().score(["a", "b", "c"], "text"), "one for each prompt, got 'text'"),
    (score(["a", None, "b"]), "output 1 must be a text, "),
    (score([[]]), "output 0 has no tokens"),
    (score([[9999999]]), "output 0 has token 9999999: tokens must be in 0"),
    (score(["a\ud800"]), "output 0 has half a surrogate pair at character 2"),
    (score(["a"], sampling=Sampling(np.array([1.0]))), "a single value per field"),
    (score(["a"], sampling=Sampling(processors=(MIN_P,))), "sampling must have no processors"),
    *(
        (
            lambda name=name: getattr(ready(), name)(["ba"], warmth=1),
            "unexpected keyword argument 'warmth'",
        )
        for name in ("__call__", "stream", "rows", "stream_tokens")
    ),
]
NO_TOKENS = "prompt must be a text, a list of token ids or a"
NO_ROWS = "rows must be a whole number of at least 1, got"
NO_LIMIT = "draft_limit must be a whole number in 0 .. 3, got "
NO_NEW = "max_new_tokens must be a whole number in 1 .. 12, got "
ENGINES = [
    (engine(rows=0), f"{NO_ROWS} 0"),
    (engine(rows=[4]), NO_ROWS),
    (engine(refill=0.5), "refill must be a whole number of at least 1, got"),
    (engine(rows=2, refill=4), "refill must be at most rows=2, got 4"),
    (engine(rule=3), "rule must be like"),
    (engine(rule=rules.OPT([0.1, 0.2])), "sampling of an engine must have scalar values"),
    (engine(log_probs=1), "log_probs must be True or False, got 1"),
    (engine(num_samples=0), "num_samples must be a whole number of at least 1, got 0"),
    (lambda: engine()().stream_step(every=0), "every must be a whole number of at least 1"),
    (lambda: engine()().add("a"), "add takes a Request, got str: write Request"),
    (request(np.zeros(17, np.int32)), "prompt has 17 tokens, the longest bucket holds 16"),
    (request(np.zeros(0, np.int32)), "the prompt has no tokens"),
    (request(np.full(3, 259)), "prompt has token 259: tokens must be in 0 .. 258"),
    (request(np.zeros((1, 3), np.int32)), NO_TOKENS),
    (request(np.zeros(3)), NO_TOKENS),
    (request(max_new_tokens=13), f"{NO_NEW}13"),
    (request(max_new_tokens=5.0), f"{NO_NEW}5.0"),
    (request(sampling=Sampling(top_k=3)), "the Engine with sampling=Sampling(top_k=...)"),
    (request(sampling=Sampling([0.0, 1.0])), "temperature of a request must be a single number"),
    (request(sampling=0.1), "sampling must be Sampling(temperature=...), got 0.1"),
    (request(draft_limit=4), f"{NO_LIMIT}4"),
    (request(draft_limit=True), f"{NO_LIMIT}True"),
    (request(seed=None), "seed must be a whole number in 0 .. 4294967295, got None"),
    (request(id="a"), "id must be a whole number in 0 .. 4294967295, got 'a'"),
    (request(rule=rules.OPT([0.1, 0.2])), "rule of a request must have scalar"),
    (request(rule=0.1), "rule must be OPT(...) like the engine's, got 0.1"),
    (request(rule=rules.Chow(0.1)), "rule must be OPT(...) like the engine's, got Chow"),
    (request(log_probs=1), "log_probs must be True or False"),
    (request(log_probs=True), "log_probs must be left out: make the engine with"),
    (
        request(num_samples=3, engine={"num_samples": 2}),
        "num_samples must be a multiple of the engine's 2, got 3",
    ),
    (request(num_samples=2**20, id=2**20, engine={"num_samples": 2}), "in 0 .. 4095"),
]
HUB = {
    "Qwen/Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B --local-dir Qwen/Qwen2.5-0.5B",
    "https://huggingface.co/google/t5-v1_1-small/tree/main": "google/t5-v1_1-small --local-dir ",
    "some/Model-GGUF/q4.gguf": "some/Model-GGUF q4.gguf --local-dir some/Model-GGUF",
}
SETTINGS = [
    (setting(rule="OTP(0.2)"), "rule='OTP': there is no such name; did you mean OPT?"),
    (setting(rule="OPT(0.2"), "is not a class with arguments"),
    (setting(rule="OPT({[]: 1})"), "has a dict whose key is no number or text"),
    (setting(rule="OPT(0.2, 0.3)"), "too many positional arguments"),
    (setting(rule="OPT(__import__('os'))"), "there is no part __import__"),
    (setting(rule="no_such.module.Rule(1)"), "nothing is imported for a text"),
    (setting(rule="Halfway(0.3)"), "got 'Halfway'"),
    (
        lambda: check_single(Setting(top_k=[1, 2])),
        "top_k must have single numbers, got (1, 2): give one number",
    ),
    (setting(verification="OPT(0.2)"), "verification must be one of"),
    (setting(stopping="OnlineEstimate"), "stopping must be one of FixedLength"),
    (setting(drafting="OPT(0.2)"), "drafting must be one of Chain, Tree"),
    (setting(drafting="Tree(depth=0, width=2)"), "depth must be a whole number of at"),
    (
        setting(drafting="Tree(depth=3, width=2)", verification="Block"),
        "verification='Block', drafting='Tree(depth=3, width=2)' cannot be combined: Block cannot "
        "verify the trees of Tree: use Traversal",
    ),
    (setting(processors=("MinP(0.1, min_p=0.2)",)), "MinP: multiple values for argument 'min_p'"),
    (
        lambda: check_single(Setting(processors=("MinP((0.1, 0.2))",))),
        "processors must have single numbers, got ('MinP((0.1, 0.2))',)",
    ),
    (setting(stopping="Confidence(0.4)", min_draft=4, max_draft=3), NO_FIT),
    (setting(rule="SequenceChow(0.3)"), "rule must be like rules.OPT(strength=0.2), got Seq"),
]
MODELS = [
    (
        lambda: specjax.load_pair(drafter="built-in:gsm8k/drafter"),
        "load_pair: verifier is missing: give both directories, neither for a built-in pair, or",
    ),
    (load(drafter="nowhere"), "download models from a hub first"),
    # A wrong path is told first.
    (lambda: specjax.load_pair(drafter="nowhere"), "drafter='nowhere': no such file or dir"),
    (
        lambda: specjax.load_pair(others={"middle": "nowhere"}),
        "middle='nowhere': no such file or dir",
    ),
    (load(verifier="nowhere", weights={"small": "int8"}), "verifier='nowhere': no such file or d"),
    (load(verifier=__file__), "is a file: give the directory of a model, or a .gguf file"),
    *(
        (load_it, f"hf download {command}")
        for name, command in HUB.items()
        for load_it in (
            load(verifier=name),
            lambda name=name: specjax.load_text_model(name),
            lambda name=name: specjax.checkpoints.load_model(name),
            lambda name=name: specjax.text.directories.inspect(name),
            lambda name=name: specjax.tokenizers.load_tokenizer(name),
        )
    ),
    (load(drafter=5), "drafter=5 must be a path"),
    (load(mesh=4), "make_mesh, got 4"),
    (
        load(translate_drafter=False, weights={"small": "int8"}),
        "weights has 'small', but the models are verifier, dr",
    ),
    (load(weights={"drafter": "int2"}), "`weights['drafter']` must be one of int8"),
    (lambda: specjax.load_pair("nothing"), "no built-in pair 'nothing', only gsm8k, multi30k"),
    (lambda: specjax.Pair(drafter=pair().drafter), "the verifier is missing, got drafter"),
    (lambda: specjax.Pair(verifier="here"), "verifier must be a TextModel, got str"),
    (
        lambda: specjax.Pair(verifier=pair().verifier, middle=larger()),
        "middle and verifier have different vocabulary sizes",
    ),
    (
        lambda: passes.as_costs([passes.Fit(1.0, {1: 2.0, 2: 0.0}, 0.0, 0.9)], (4,), (1, 2), ""),
        "pass of 2 tokens and 4 rows is 0",
    ),
    (lambda: stops.check_stops(("a", "é" * 2048)), "stop has 4,097 bytes, more than 4,096: give"),
    *(
        (lambda text=text: stops.check_stops(text), "with a replacement character or half")
        for text in ("\N{REPLACEMENT CHARACTER}", "\ud800")
    ),
]


@pytest.mark.parametrize(
    ("given", "message"), [*DECODERS, *DRAFTS, *PROCESSORS, *CALLS, *ENGINES, *SETTINGS, *MODELS]
)
def test_what_is_wrong_is_told_in_one_line(given, message):
    with pytest.raises((ValueError, OSError, TypeError)) as told:
        given()
    assert message in str(told.value) and "\n" not in str(told.value)
    assert isinstance(told.value, errors.REFUSALS)


LONG = "x" * 90_000
MANY = [f"name_{i}" for i in range(9_000)]


@pytest.mark.parametrize(
    "given",
    [
        *(
            decoder(**{name: value})
            for value in (LONG, "x " * 45_000, MANY, {"a": LONG}, "(" * 5_000, f"OPT('{LONG}')")
            for name in ("rule", "drafting", "max_draft", "stop", "processors", "sampling", "costs")
            if name != "stop" or isinstance(value, dict)  # a text, or several, are valid
        ),
        decoder(**{LONG: 3}),
        decoder(nonsense=LONG),
        call(LONG),
        call([MANY]),
        rank(ids=MANY),
        load(verifier=LONG),
        load(verifier=f"{'/a' * 1_000}", drafter="b"),
        load(weights={LONG: "int8"}),
        load(weights=LONG),
        setting(processors=LONG),
        setting(rule=LONG),
        lambda: specjax.load_pair(LONG),
        lambda: drafting.read_costs(LONG),
        lambda: specjax.tokenizers.load_tokenizer(LONG),
        lambda: specjax.text.directories.inspect(LONG),
        lambda: specjax.text.directories.load_bigram(LONG),
        lambda: specjax.models.PRESETS["llama3_8b"].replace(**dict.fromkeys(MANY, 1)),
    ],
)
def test_a_message_repeats_little_of_what_is_given(given):
    with pytest.raises(errors.REFUSALS) as told:
        given()
    message = str(told.value)
    assert message.count("x") + 6 * message.count("name_") + message.count("(") < 300
