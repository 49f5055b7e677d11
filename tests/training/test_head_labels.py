import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Pair, TextModel, testing
from specjax.models import CausalLM, LlamaConfig, Seq2SeqLM, T5Config
from specjax.text.teacher_forcing import KnownTexts
from specjax.training.head_data import label
from tests.models.tiny import random_params
from tests.training.toy import Numbers

V = Numbers.vocab_size
# The verifier of these pairs has fewer parameters than the drafter.
pytestmark = pytest.mark.filterwarnings("ignore:the drafter has")


def tabular(seed, order):
    table = testing.random_table(seed, V, order, scale=2.0)
    return TextModel(testing.TabularModel(V, order), jnp.asarray(table), Numbers())


# The drafter's hidden states are rows of its table: they tell the last two tokens that it has read.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    PAIR = Pair(drafter=tabular(0, 2), verifier=tabular(1, 1))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(V, size=n).astype(np.int32) for n in (1, 7, 12, 3, 3)]
TEXTS = [RNG.integers(V, size=n).astype(np.int32) for n in (5, 1, 19, 20, 2)]


def make(pair=PAIR, prompts=PROMPTS, texts=TEXTS, ids=None, **options):
    settings = {"temperature": 0.7, "mixing": 0.4, "seed": 3, "batch_size": 2, **options}
    return label(pair, KnownTexts(prompts, texts), ids or range(len(prompts)), **settings)


def softmax(logits, temperature=1.0):
    x = np.asarray(logits, np.float64) / temperature
    x = np.exp(x - x.max())
    return x / x.sum()


# A row of the drafter's table -> (the token before, the token).
CONTEXTS = {
    row.tobytes(): divmod(i, V + 1) for i, row in enumerate(np.asarray(PAIR.drafter.params))
}


@pytest.mark.parametrize("mixing", [0.4, None])
def test_labels_and_hidden_states_are_those_of_a_loop_over_positions(mixing):
    found = make(mixing=mixing)
    drafter, verifier = (np.asarray(model.params) for model in PAIR.named.values())
    before_drawn = []
    for row, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        part = slice(*found.offsets[row : row + 2])
        read = [CONTEXTS[hidden.tobytes()] for hidden in found.hidden[part]]
        assert mixing is not None or len(read) == len(text)
        known = [V, *prompt, *text]
        place = len(prompt) + 1
        at = iter(range(part.start, part.stop))
        for i in range(len(text)):
            index = next(at, None)
            if index is None:
                break
            # Which position an entry belongs to, its entropy tells.
            logits = drafter[known[place + i - 2] * (V + 1) + known[place + i - 1]]
            confidence = softmax(logits)
            entropy = -(confidence * np.log(confidence)).sum()
            if not np.isclose(found.entropy[index], entropy, rtol=1e-5):
                assert mixing is not None
                at = iter(range(index, part.stop))
                continue
            before, drawn = CONTEXTS[found.hidden[index].tobytes()]
            q, p = softmax(logits, 0.7), softmax(verifier[known[place + i - 1]], 0.7)
            assert found.labels[index] == pytest.approx(min(1.0, p[drawn] / q[drawn]), rel=1e-4)
            assert found.top[index] == pytest.approx(confidence.max(), rel=1e-5)
            assert found.drawn[index] == pytest.approx(confidence[drawn], rel=1e-4)
            if i == 0 or mixing is None:
                assert before == known[place + i - 1]
            else:
                before_drawn.append(before != known[place + i - 1])
        assert next(at, None) is None
    if mixing is not None:
        # Six of ten tokens before a drafted one were drafted, and few of these are the text's own.
        assert 0.3 < np.mean(before_drawn) < 0.75


def test_a_row_depends_on_its_seed_and_id_alone():
    whole = make()
    alone = make(prompts=PROMPTS[2:3], texts=TEXTS[2:3], ids=[2], batch_size=1)
    part = slice(*whole.offsets[2:4])
    np.testing.assert_array_equal(whole.labels[part], alone.labels)
    np.testing.assert_array_equal(whole.hidden[part], alone.hidden)
    for changes in ({"seed": 4}, {"ids": [3]}):
        other = make(prompts=PROMPTS[2:3], texts=TEXTS[2:3], **{"ids": [2], **changes})
        assert not np.array_equal(other.hidden, alone.hidden)


def test_drafted_tokens_follow_the_drafter_and_the_share_is_as_asked():
    count = 2000
    prompts, texts = [np.asarray([5], np.int32)] * count, [np.asarray([9], np.int32)] * count
    found = make(prompts=prompts, texts=texts, mixing=0.25, temperature=1.0, batch_size=1000)
    assert set(make(temperature=0.0, mixing=None).labels.tolist()) <= {0.0, 1.0}  # greedily
    assert len(found.labels) / count == pytest.approx(0.75, abs=0.03)
    tokens = [CONTEXTS[hidden.tobytes()][1] for hidden in found.hidden]
    q = softmax(np.asarray(PAIR.drafter.params)[V * (V + 1) + 5])
    p = softmax(np.asarray(PAIR.verifier.params)[5])
    frequency = np.bincount(tokens, minlength=V) / len(tokens)
    assert 0.5 * np.abs(frequency - q).sum() < 0.05
    # The mean label is the acceptance probability of one token, 1 - D_TV(p, q).
    assert found.labels.mean() == pytest.approx(np.minimum(p, q).sum(), abs=0.03)


LLAMA = {"num_kv_heads": 1, "num_layers": 1}
T5S = {"num_encoder_layers": 1, "num_decoder_layers": 1}


def network(family, config, sizes, width):
    common = {"vocab_size": V, "num_heads": 2, "head_dim": 4, "mlp_dim": 8, "embed_dim": width}
    model = family(config(**common, **sizes))
    return TextModel(model, random_params(model, width), Numbers())


@pytest.mark.parametrize(
    ("family", "config", "sizes"), [(Seq2SeqLM, T5Config, T5S), (CausalLM, LlamaConfig, LLAMA)]
)
def test_networks_read_what_decoding_reads(family, config, sizes):
    """In chunks, with padding; against whole passes over each prefix and every next token."""
    pair = Pair(*(network(family, config, sizes, width) for width in (8, 16)))
    found = make(pair, mixing=None, temperature=1.0, batch_size=5)

    prompt, text = np.tile(PROMPTS[3], (V, 1)), np.tile(TEXTS[3], (V, 1))

    @functools.partial(jax.jit, static_argnums=0)
    def around(model, params, texts, place):
        """Logits `[2, V, V]` of the token at a place of the text, and of the one after it."""
        if family is Seq2SeqLM:
            start = jnp.zeros((V, 1), jnp.int32)
            logits = model.apply(params, prompt, jnp.concatenate([start, texts], 1))
        else:
            logits = model.apply(params, jnp.concatenate([prompt, texts], 1))[
                :, -text.shape[1] - 1 :
            ]
        return jnp.moveaxis(jax.lax.dynamic_slice_in_dim(logits, place, 2, axis=1), 1, 0)

    kernel = pair.drafter.params["decoder"]["logits_dense"]["kernel"]
    for place in (0, 17, text.shape[1] - 1):  # the second one is in another chunk
        texts = text.copy()
        texts[:, place] = np.arange(V)
        before, after = zip(
            *(around(m.model, m.params, texts, place) for m in pair.named.values()), strict=True
        )
        q, p = (np.asarray(jax.nn.softmax(x[0])) for x in before)
        index = found.offsets[3] + place
        drawn = np.abs(np.asarray(found.hidden[index] @ kernel) - np.asarray(after[0])).max(axis=1)
        token = int(np.argmin(drawn))
        assert drawn[token] < 1e-3 < np.sort(drawn)[1]
        assert found.labels[index] == pytest.approx(min(1.0, p[token] / q[token]), rel=1e-3)
        assert found.drawn[index] == pytest.approx(q[token], rel=1e-3)
        assert found.top[index] == pytest.approx(q.max(), rel=1e-3)


def test_a_model_that_gives_nan_is_told():
    broken = jax.tree.map(lambda x: x * jnp.nan, PAIR.verifier.params)
    verifier = TextModel(PAIR.verifier.model, broken, Numbers())
    with pytest.raises(ValueError, match="the labels have NaN: check the checkpoints"):
        make(Pair(PAIR.drafter, verifier))
