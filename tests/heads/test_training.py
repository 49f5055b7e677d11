"""Losses and gradients against the projects' trainers; what counts; expected tokens per call."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import TextModel
from specjax.checkpoints import save_draft_head
from specjax.checkpoints.heads import load_draft_head
from specjax.data.batching import JoinedBatch, PairBatch
from specjax.models import T5Config, model_from_config
from specjax.models.heads import ReadText
from specjax.theory import expected_calls
from specjax.tokenizers import ByteTokenizer
from specjax.training import DrafterRecipe, Objective
from specjax.training.drafter_task import (
    DraftTask,
    Frozen,
    KnownText,
    TokensPerCall,
    _acceptances,
    per_draft,
    reachable,
)
from specjax.training.losses import total_variation
from tests.heads.test_fixtures import CASES, TOLERANCE, fixture, golden_of, verifier
from tests.heads.tiny_heads import encoded_head, tiny_head
from tests.models.tiny import quick_jit, random_params

KL = Objective(label_smoothing=0.0, distillation_weight=1.0)
CE = Objective(label_smoothing=0.0)
DSPARK = Objective(label_smoothing=0.0, distillation_weight=0.9, divergence="total_variation")
# Project -> the loss of a draft without its weight, the anchor's row in their masks, and what
# divides the sum.
EAGLE = ("eagle3_official", "speculators_eagle3")
OF_SPECFORGE = ("dflash_zlab", "domino_specforge")
GRADIENTS = {
    "grad_fc": ("fc", "kernel"),
    "grad_input_proj": ("fc", "kernel"),
    "grad_lm_head": ("logits_dense", "kernel"),
    "grad_hidden_norm": ("state_norm", "scale"),
    "grad_final_norm": ("norm", "scale"),
    "grad_k_proj_0": ("layers_0", "self_attention", "key", "kernel"),
    "grad_markov_w1": ("markov_in", "embedding"),
    "grad_confidence": ("confidence", "kernel"),
    "grad_mask_hidden": ("mask_state",),
    "grad_markov_w2": ("markov_out", "kernel"),
    "grad_base_kernel": ("layers_0", "attention_conv", "base_kernel"),
    "grad_kernel_projection": ("layers_1", "mlp_conv", "kernel_projection", "kernel"),
    "grad_gru_in": ("gru_in", "kernel"),
    "grad_gru_memory": ("gru_memory", "kernel"),
    "grad_markov_gate": ("markov_gate", "kernel"),
}


class Case:
    """A project's training step: what it trained on, and how its loss is weighted."""

    def __init__(self, name):
        self.project = name.partition("/")[0]
        self.golden = golden_of(name, "train")
        of = verifier(CASES[name])
        self.head, own = load_draft_head(fixture(name, "head"), of.model)
        self.params = self.head.joined(own, of.params)
        places = own.get("places", jnp.arange(160))
        self.drafted = np.argsort(np.asarray(places))[: self.head.config.rows]
        self.tokens = jnp.asarray(self.golden["tokens"][None])
        if self.project == "speculators_mtp":  # it trains on the state before the last norm
            states = self.golden["verifier_last_hidden_raw"]
        else:
            states = self.golden["features"]
        self.text = ReadText(self.tokens, jnp.asarray(states[None]))
        self.eagle = self.head.most_drafts is None
        last = 8 if self.project == "speculators_mtp" else 11
        anchors = np.arange(1, last + 1) if self.eagle else self.golden["anchors"]
        self.anchors = jnp.asarray(anchors[None].astype(np.int32))
        self.count = 3 if self.eagle else self.head.most_drafts
        self.count = 1 if self.project == "speculators_mtp" else self.count
        self.weights = self._weights(anchors)

    def _weights(self, anchors):
        """The weight of draft i after each anchor, divided as the project does."""
        golden, mask = self.golden, self.golden["loss_mask"]
        at = anchors[None] + np.arange(self.count)[:, None]  # the row of the target
        inside = at + 1 < 12
        if self.project == "eagle3_official":
            rows = golden["verifier_logits"].argmax(-1)
            counts = mask * np.isin(np.append(rows[1:], -1), self.drafted)
            steps = 0.8 ** np.arange(3)[:, None] / 12
            # The mask of the token before the target's row.
            return np.where(at < 12, counts[np.minimum(at - 1, 11)], 0) * steps
        if self.project == "speculators_eagle3":
            counts = np.where(at < 12, mask[np.minimum(at, 11)], 0)
            return counts / (counts.sum(axis=1, keepdims=True) + 1e-5)
        if self.project == "speculators_peagle":
            counts = np.where(at < 12, mask[np.minimum(at, 11)], 0)
            return counts / (counts.sum() + 1e-5)
        counts = np.where(inside, mask[np.minimum(at + 1, 11)], 0)
        if self.project == "speculators_mtp":
            return counts * golden["step_weights"][0] / counts.sum()
        decayed = np.exp(-np.arange(self.count) / 4)[:, None]
        if self.project in OF_SPECFORGE:
            return counts * decayed / (counts * decayed).sum()
        theirs = golden["block_mask"].T[-self.count :]
        if self.project == "dspark_deepspec":
            return theirs * decayed / ((theirs * decayed).sum() + 1e-6)
        return theirs * decayed / (theirs.sum() + 1e-5)

    def loss(self, network):
        logits = jnp.asarray(self.golden["verifier_logits"][:, self.drafted])
        weights = jnp.asarray(self.weights, jnp.float32)
        places = jnp.zeros(160, jnp.int32).at[self.drafted].set(jnp.arange(self.drafted.size))

        def judge(i, said):
            at = jnp.minimum(self.anchors + i, 11)
            reference = jax.nn.log_softmax(logits[at])
            tokens = places[self.tokens[0][jnp.minimum(at + 1, 11)]]
            objective = KL
            if self.project in (*OF_SPECFORGE, "speculators_mtp"):
                objective = CE
            if "dspark" in self.project:
                objective = DSPARK
            if self.project in ("speculators_dspark", "speculators_dflash2"):
                tokens = jnp.argmax(reference, axis=-1).astype(jnp.int32)
            each, _ = per_draft(objective, said, tokens, reference)
            if self.project == "eagle3_official":
                p = jax.nn.softmax(reference)
                each -= jnp.sum(p * jnp.log(p), axis=-1)
            if self.project == "dspark_deepspec":
                each += 0.9 * total_variation(said.logits, reference)
            return said, jnp.sum(each[0] * weights[i])

        params = {**self.params, "network": network}
        given = params, self.text, self.anchors, self.count, judge
        said, losses = self.head.drafts_along(*given)
        return jnp.sum(losses), (said, losses)


QUICK = (
    *("eagle3_official", "speculators_eagle3/cli_defaults", "dspark_deepspec/rnn"),
    *("domino_specforge/plain", "speculators_peagle", "speculators_dflash2"),
)
OTHERS = [pytest.param(x, marks=pytest.mark.exhaustive) for x in CASES if x not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_a_step_of_the_projects_trainers(name):
    case = Case(name)
    golden = case.golden
    step = quick_jit(jax.value_and_grad(case.loss, has_aux=True))
    (loss, (said, losses)), gradient = step(case.params["network"])
    inside = np.asarray(case.anchors[0])[None] + np.arange(case.count)[:, None] < 12
    first = 0 if case.eagle or case.head.config.from_anchor else 1
    for i in range(case.count):
        wanted = golden["step_logits"][i] if case.eagle else golden["block_logits"][:, first + i]
        found = said.logits[i, 0][inside[i]][: len(wanted)]
        np.testing.assert_allclose(found, wanted[: len(found)], atol=TOLERANCE)
        if said.odds is not None:
            wanted = golden["confidence_logits"][:, i][inside[i]]
            np.testing.assert_allclose(said.odds[i, 0][inside[i]], wanted, atol=TOLERANCE)
    if case.project == "speculators_mtp":
        # Its later steps see only their own step's entries, which no server's do.
        np.testing.assert_allclose(losses[0], golden["step_losses"][0], atol=TOLERANCE)
        return
    wanted = golden["total_loss" if case.eagle else "loss"]
    np.testing.assert_allclose(loss, wanted, atol=TOLERANCE)
    compared = [key for key in golden if key.startswith("grad_")]
    assert len(compared) >= 3
    for key in compared:
        found = gradient
        for part in GRADIENTS[key]:
            found = found[part]
        found = found.T if "kernel" in GRADIENTS[key] else found
        np.testing.assert_allclose(found, golden[key], atol=TOLERANCE, err_msg=key)


def test_a_draft_counts_if_all_before_it_do():
    """As in DeepSpec: a contiguous supervised beginning."""
    golden = np.load(fixture("dspark_deepspec/vanilla", "train.npz"))
    learnt = jnp.asarray(golden["loss_mask"][None] > 0)
    text = KnownText(None, learnt, learnt, None)
    counts = reachable(text, jnp.asarray(golden["anchors"][None].astype(np.int32)), 4)
    np.testing.assert_array_equal(np.asarray(counts)[:, 0].T, golden["block_mask"] > 0)


def task_of(tiny, max_draft=3, **changes):
    settings = {
        "objective": KL,
        "max_draft": max_draft,
        "decay": 0.8,
        "anchors": 99,
        "tokens": tiny.verifier.vocab_size,
        **changes,
    }
    return DraftTask(head=tiny.head.config, verifier=tiny.verifier.config, **settings)


def parts_of(tiny):
    """What is learnt and what is frozen, of a tiny head with an output of its own."""
    network = dict(tiny.params["network"])
    output = network.pop("logits_dense", None)
    if "places" not in tiny.params:
        vocab = tiny.verifier.vocab_size
        drafted = places = None if output is None else jnp.arange(vocab, dtype=jnp.int32)
    else:
        places = jnp.asarray(tiny.params["places"])
        drafted = jnp.argsort(places)[: tiny.head.config.rows].astype(jnp.int32)
    return network, Frozen(tiny.verifier_params, drafted, places, output)


RNG = np.random.default_rng(0)
PROMPT, TEXT = RNG.integers(3, size=4), RNG.integers(3, size=6)


def joined(prompt=PROMPT, text=TEXT, length=10, rows=1):
    tokens, is_target = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    end = len(prompt) + len(text)
    tokens[0, :end] = np.concatenate([prompt, text])
    is_target[0, len(prompt) : end] = True
    return JoinedBatch(jnp.asarray(tokens), jnp.asarray(is_target))


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_padding_changes_nothing(name):
    tiny = tiny_head(name)
    task, (params, frozen) = task_of(tiny), parts_of(tiny)
    key = jax.random.key(0)

    def mean(params, batch):
        total = task.loss(params, frozen, batch, key)
        return total.sum / total.items.astype(jnp.float32), total.items

    step = quick_jit(jax.value_and_grad(mean, has_aux=True))
    plain, padded = step(params, joined()), step(params, joined(length=17, rows=3))
    # Six anchors, of which the last two reach the end early.
    assert int(plain[0][1]) == 6 + 5 + 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, padded)


def test_the_first_token_of_a_text_is_learnt_and_the_prompt_is_not():
    """The draft after the prompt's last token counts; a change of it changes the gradient."""
    tiny = tiny_head("mtp")
    task, (params, frozen) = task_of(tiny, max_draft=1), parts_of(tiny)
    text = task.read(frozen, joined())
    every = jnp.arange(10, dtype=jnp.int32)[None]
    counts = np.asarray(reachable(text, every, 1))[0, 0]
    assert counts.tolist() == [False] * 3 + [True] * 6 + [False]
    objective = dataclasses.replace(KL, distillation_weight=0.0)
    task = dataclasses.replace(task, objective=objective)
    gradient = quick_jit(jax.grad(lambda p, b: task.loss(p, frozen, b, jax.random.key(0)).sum))
    one = gradient(params, joined(text=TEXT[:1]))
    other = gradient(params, joined(text=(TEXT[:1] + 1) % 3))
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one)) > 1e-3
    differ = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), one, other)
    assert max(jax.tree.leaves(differ)) > 1e-3


def test_random_anchors_are_of_the_text():
    tiny = tiny_head("dflash")
    task, (_, frozen) = task_of(tiny, anchors=4), parts_of(tiny)
    text = task.read(frozen, joined(length=16))
    drawn = [np.asarray(task._anchors(text, jax.random.key(i)))[0] for i in range(8)]
    assert all(len(set(x.tolist())) == 4 and set(x.tolist()) <= set(range(3, 9)) for x in drawn)
    assert len({tuple(x.tolist()) for x in drawn}) > 1


class Rounds:
    """Rounds of decoding, enumerated: the chances of all drafts, accepts and next tokens."""

    def __init__(self, tiny, prompt, longest, temperature):
        self.tiny, self.prompt, self.longest = tiny, prompt, longest
        self.temperature, self.draft = temperature, 2
        self.vocab = tiny.verifier.vocab_size
        self.read = quick_jit(self._read)
        self.laws, self._after = map(functools.cache, (self._laws, self._calls_after))

    def _read(self, tokens, anchor):
        tiny = self.tiny
        if self.prompt is None:
            inputs = jnp.array([[1, 2, 2]])
            given = tiny.verifier_params, tokens, inputs, inputs > 0
        else:
            given = tiny.verifier_params, tokens
        text, logits = tiny.head.read_text(*given)
        given = tiny.params, text, anchor, self.draft, lambda i, said: said.logits
        q = tiny.head.drafts_along(*given)[:, 0, 0]
        return q, logits[0]

    def _laws(self, text, begun):
        """q of each draft of a round after `begun` tokens, and p before each token of the text."""
        start = [0] if self.prompt is None else self.prompt
        tokens = np.zeros((1, len(start) + self.longest + self.draft), np.int32)
        tokens[0, : len(start) + len(text)] = [*start, *text]
        anchor = jnp.array([[len(start) - 1 + begun]], jnp.int32)
        both = self.read(jnp.asarray(tokens), anchor)
        q, p = (np.asarray(jax.nn.softmax(x / self.temperature)) for x in both)
        if "places" in self.tiny.params:
            places = np.asarray(self.tiny.params["places"])
            q = np.concatenate([q, np.zeros_like(q[:, :1])], axis=1)[:, places]
        return q, p[len(start) - 1 :]

    def calls(self):
        """The expected number of rounds for texts of `longest` tokens, by what is emitted."""
        return self._after(())

    def _calls_after(self, text):
        if len(text) >= self.longest:
            return 0.0
        expected = 1.0
        # The round's outcomes: drafts are drawn one by one; a rejected one is replaced.
        live = {(): 1.0}
        for i in range(self.draft + 1):
            following = {}
            for more, chance in live.items():
                if len(text) + i >= self.longest:
                    continue
                q, p = self.laws((*text, *more), len(text))
                p = p[len(text) + i]
                if i == self.draft:
                    outcomes = [(x, p[x], False) for x in range(self.vocab)]
                else:
                    both = np.minimum(p, q[i])
                    outcomes = [(x, both[x], True) for x in range(self.vocab)]
                    outcomes += [(x, p[x] - both[x], False) for x in range(self.vocab)]
                for x, part, accepted in outcomes:
                    if part <= 0:
                        continue
                    new = (*more, x)
                    if accepted:
                        following[new] = following.get(new, 0.0) + chance * part
                    else:
                        expected += chance * part * self._after((*text, *new))
            live = following
        return expected


HEADS = {
    "eagle3": lambda: tiny_head("eagle3", mapped=(0, 2)),
    "dspark": lambda: tiny_head("dspark"),
    "t5": lambda: encoded_head("eagle3"),
}


@pytest.mark.parametrize("name", HEADS)
def test_tokens_per_call_is_the_mean_over_all_that_rounds_may_emit(name):
    """Along all texts, each by its probability, the expected calls are those of the rounds."""
    tiny, longest, temperature = HEADS[name](), 3, 0.8
    prompt = None if name == "t5" else [1, 0]
    rounds = Rounds(tiny, prompt, longest, temperature)
    texts = list(itertools.product(range(3), repeat=longest))
    network, frozen = parts_of(tiny)
    task = task_of(tiny, max_draft=rounds.draft, pad_id=0 if prompt else -1)
    if prompt is None:
        inputs = np.tile([[1, 2, 2]], (len(texts), 1))
        batch = PairBatch(jnp.asarray(inputs), jnp.asarray(texts))
    else:
        tokens = np.array([[*prompt, *text] for text in texts])
        written = np.tile([False] * len(prompt) + [True] * longest, (len(texts), 1))
        batch = JoinedBatch(jnp.asarray(tokens), jnp.asarray(written))
    chances = _acceptances(task, 16, network, frozen, batch, jnp.float32(temperature))
    expected = 0.0
    for text, row in zip(texts, np.asarray(chances), strict=True):
        _, p = rounds.laws(text, 0)
        chance = np.prod([p[i, x] for i, x in enumerate(text)])
        expected += chance * expected_calls(row[:longest])
    assert abs(expected - rounds.calls()) < 1e-5


def test_tokens_per_call_at_temperature_0_counts_rounds():
    """Greedy rounds along the verifier's greedy text."""
    tiny = tiny_head("eagle3")
    network, frozen = parts_of(tiny)
    prompt, text = [1, 0], []
    read = quick_jit(lambda t: tiny.head.read_text(tiny.verifier_params, t)[1])
    for _ in range(8):
        tokens = np.zeros((1, 10), np.int32)
        tokens[0, : 2 + len(text)] = [*prompt, *text]
        text.append(int(np.argmax(read(jnp.asarray(tokens))[0, 1 + len(text)])))
    task = task_of(tiny, max_draft=2)
    rounds = Rounds(tiny, prompt, 8, 1.0)
    place = calls = 0
    while place < len(text):
        q, _ = rounds.laws(tuple(text), place)
        drafts = q.argmax(axis=-1)
        wanted = text[place : place + 2]
        accepted = int(np.cumprod([a == b for a, b in zip(drafts, wanted, strict=False)]).sum())
        place, calls = place + accepted + 1, calls + 1

    class Texts:
        batches_per_epoch = 1

        def batch(self, step):
            return joined(prompt, text)

    figure = TokensPerCall(task, lambda: frozen, {"greedy": (0.0, Texts())})
    assert figure(network) == {"validation_tokens_per_call_greedy": 8 / calls}


def test_a_head_of_a_narrow_verifier_in_bfloat16_can_be_written_and_learnt(tmp_path):
    """T5 small has 6 heads for a width of 512, which files of heads cannot have."""
    config = T5Config(
        vocab_size=259, embed_dim=16, num_heads=3, head_dim=4, mlp_dim=8, num_encoder_layers=1,
        num_decoder_layers=3, dtype="bfloat16", param_dtype="bfloat16",
    )  # fmt: skip
    model = model_from_config(config)
    verifier = TextModel(model, random_params(model), ByteTokenizer())
    own = DrafterRecipe(max_draft=2).head_for(verifier)
    assert (own.layers.num_heads, own.layers.num_kv_heads) == (2, 1)
    task = DraftTask(
        head=own, verifier=config, tokens=259, objective=KL, max_draft=2, decay=1.0, anchors=4
    )
    network = task.init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(network)} == {np.dtype("float32")}
    params = task.whole(network, Frozen(verifier.params))
    save_draft_head(tmp_path / "head", task.model, params, verifier_params=verifier.params)
    read, _ = load_draft_head(tmp_path / "head", model, verifier_params=verifier.params)
    assert read.config.layers.num_heads == 2
