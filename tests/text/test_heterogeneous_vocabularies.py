"""A drafter with another tokenizer: exact, and restricted to the shared tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import testing
from specjax.checkpoints import load_model, save_model
from specjax.decoding.blocks import shape_of
from specjax.models import LlamaConfig, model_from_config
from specjax.partitioning import make_mesh
from specjax.text.text_models import shared_probability, tables, translate
from specjax.tokenizers import ByteTokenizer, load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.tokenizers.tokenizer import Pieces
from specjax.training.vocabulary import write_vocabulary
from specjax.types import Prompts, Sampling
from tests import tiny_pair
from tests.laws import distance
from tests.models.tiny import random_params
from tests.training.toy import Numbers
from tests.variants import variants

EOS, ROWS = 1, 16_384


class Letters(Numbers):
    """Tokens that are letters, at any ids."""

    def __init__(self, letters):
        self.letters, self.vocab_size = letters, len(letters)

    def token(self, token_id):
        return self.letters[token_id]

    def pieces(self):
        texts = [b"" if len(x) > 1 else x.encode() for x in self.letters]
        return Pieces(texts, texts)

    def _encode(self, text):
        return [self.letters.index(x) for x in text if x in self.letters]


class Chains(testing.TabularModel):
    reads_trees = False


OURS = Letters(["<pad>", "</s>", "c", "x", "a", "b"])  # the drafter's
THEIRS = Letters(["<pad>", "</s>", "a", "b", "c"])
PROMPT = np.array([2, 3], np.int32)


def tabular(seed, tokenizer, order=1):
    size = tokenizer.vocab_size
    table = testing.random_table(seed, size, order, scale=1.0)
    return specjax.TextModel(testing.TabularModel(size, order), jnp.asarray(table), tokenizer)


def probs(model, before):
    table = np.asarray(model.params, np.float64)
    table = table[before] if len(table) > 1 else table[0]  # of order 0
    return np.exp(table) / np.exp(table).sum()


def test_the_distribution_is_renormalised_over_the_shared_tokens():
    drafter, verifier = tabular(1, OURS), tabular(2, THEIRS)
    other = translate(drafter, verifier)
    filled = other.model.prefill(other.params, Prompts(PROMPT[None], np.array([2], np.int32)), 4)
    assert filled.tokens.tolist() == [3]
    logits, *_ = other.model.score(other.params, filled.cache, PROMPT[None, 1:], filled.positions)
    # a, b and c are 4, 5 and 2 there; "x" is not shared, and no padding is drawn.
    own = probs(drafter, 5)[[1, 4, 5, 2]]
    expected = np.array([0.0, *own / own.sum()])
    np.testing.assert_allclose(jax.nn.softmax(logits[0, 0]), expected, rtol=1e-5)


def test_trees_are_read_if_the_model_reads_them():
    drafter = tabular(1, OURS)
    other = translate(drafter, tabular(2, THEIRS))
    assert other.model.reads_trees and drafter.model.predicts_all and not other.model.predicts_all
    filled = other.model.prefill(other.params, Prompts(PROMPT[None], np.array([2], np.int32)), 5)
    given = other.params, filled.cache, np.array([[3, 2, 4]], np.int32), filled.positions
    logits, _, updates = other.model.score_tree(*given, shape_of(jnp.array([[0, 0]])))
    chains = [other.model.score(*given[:2], np.array([[3, i]], np.int32), given[3]) for i in (2, 4)]
    for node, (chain, *_) in enumerate(chains, 1):
        np.testing.assert_array_equal(logits[0, [0, node]], chain[0])
    written = other.model.write(filled.cache, updates, filled.positions)
    kept = other.model.keep(written, filled.positions, np.array([[2]]))
    want = other.model.write(filled.cache, chains[1][2], filled.positions)
    np.testing.assert_array_equal(kept[0, :3], want[0, :3])
    chains_only = dataclasses.replace(drafter, model=Chains(*dataclasses.astuple(drafter.model)))
    assert not translate(chains_only, tabular(2, THEIRS)).model.reads_trees


@pytest.mark.parametrize("verification", variants(["Token", "Block"], "Block"))
def test_the_law_is_the_verifiers(verification):
    drafter, verifier = tabular(1, OURS, order=0), tabular(2, THEIRS)  # the drafter is smaller
    decoder = specjax.Decoder(
        specjax.Pair(translate(drafter, verifier), verifier),
        verification=getattr(specjax.verification, verification)(),
        max_draft=2, max_new_tokens=2, batch_size=1024, buckets=(4,),
    )  # fmt: skip
    result = decoder([PROMPT] * ROWS, seed=3, progress=False)
    found = {}
    for tokens, end in zip(result.tokens, result.ended, strict=True):
        row = (*tokens.tolist(), EOS) if end else tuple(tokens.tolist())
        found[row] = found.get(row, 0) + 1 / ROWS

    def law(model, ids):
        first = probs(model, ids[3])
        out = {(EOS,): first[EOS]}
        for i in (0, 2, 3, 4):
            second = probs(model, ids[i])
            out |= {(i, j): first[ids[i]] * second[ids[j]] for j in range(5)}
        return out

    assert distance(found, law(verifier, range(5))) < 0.025
    assert distance(found, law(drafter, [0, 1, 4, 5, 2])) > 0.1
    accepted = result.info.accepted
    assert 0 < accepted < result.info.drafted


def test_texts_decide_which_tokens_are_shared():
    ids, shared = tables(OURS, THEIRS, 7)  # an embedding of more rows than tokens
    assert ids.tolist() == [0, 1, 4, 5, 2, 0, 0]
    assert shared.tolist() == [False, True, True, True, True, False, False]
    words = load_tokenizer(tiny_pair.shared_pair()["verifier"])
    ids, shared = tables(ByteTokenizer(), words, words.vocab_size)
    # Of pieces of several letters the first byte stands for the token.
    for i in range(words.vocab_size):
        piece = words.pieces().later[i]
        if len(piece) > 1:
            assert not shared[i] and ids[i] == 3 + piece[0]


@pytest.mark.parametrize("pair", ["multi30k_ende", "gsm8k"])
def test_a_tokenizer_translated_to_itself_is_the_identity(pair):
    """Also where a text is a token and a single byte, as in Llama's vocabularies."""
    words = specjax.load_pair(pair).verifier.tokenizer
    ids, shared = tables(words, words, words.vocab_size)
    named = range(words.vocab_size)
    known = [i for i in named if words.token(i) is not None and i != words.pad_id]
    assert ids[known].tolist() == known and shared[known].all()


class Chat(Letters):
    def __init__(self, letters, eos_ids):
        super().__init__(letters)
        self.eos_ids = eos_ids


def test_special_tokens_are_matched_by_name_and_ends_by_what_they_end():
    ours = Chat(["<pad>", "<|im_end|>", "<|endoftext|>", "<tool>", "a"], (1, 2))
    theirs = Chat(["<pad>", "<eos>", "<tool>", "<end_of_turn>", "a", "<other>"], (1, 3))
    ids, shared = tables(ours, theirs, 6)
    assert ids.tolist() == [0, 2, 3, 1, 4, 0]
    assert shared.tolist() == [False, True, True, True, True, False]


def test_greedy_texts_of_a_real_pair_are_those_of_the_verifier(tmp_path):
    paths = tiny_pair.write_pair(tmp_path)
    tiny_pair.write_vocabulary(paths["drafter"], ["ba", "de", "ki", "lo", "sa", "te"])
    pair = specjax.load_pair(**paths, translate_drafter=True)
    prompts = tiny_pair.sentences(6, seed=5)
    options = {"sampling": Sampling(0.0), "max_new_tokens": 12}
    together = specjax.Decoder(pair, max_draft=3, **options)(prompts)
    assert together.texts == specjax.Decoder(pair.verifier, **options)(prompts).texts
    assert together.info.drafted > 0
    same = tiny_pair.shared_pair()  # needs no translation
    config = specjax.load_pair(**same, translate_drafter=True).drafter.model.config
    assert config == load_model(same["drafter"]).config


@pytest.mark.exhaustive
def test_a_mesh_gives_the_same_texts(tmp_path, capsys):
    """Of decoder-only models, whose share of shared tokens is measured on the mesh."""
    write_vocabulary(tmp_path / "bytes", "bytes", (), vocab_size=264, model_type=None)
    words = {"drafter": tmp_path / "bytes", "verifier": tiny_pair.shared_pair()["verifier"]}
    paths = {}
    for name, vocab, layers in (("drafter", 264, 1), ("verifier", 24, 4)):
        config = LlamaConfig.of(vocab, 16, 4, 2, 8, 32, layers)
        paths[name] = save_model(
            tmp_path / name, config, random_params(model_from_config(config)),
            tokenizer_from=words[name], special_ids=SpecialIds(eos=(1,), pad=0),
        )  # fmt: skip
    options = {"sampling": Sampling(1.0), "max_draft": 3, "max_new_tokens": 8, "batch_size": 4}
    results = []
    for mesh in (None, make_mesh(2, 4)):
        pair = specjax.load_pair(**paths, mesh=mesh, translate_drafter=True)
        decoder = specjax.Decoder(pair, **options)
        results.append(decoder(tiny_pair.sentences(6, seed=5), seed=3, progress=False))
    assert results[0].texts == results[1].texts
    assert results[0].info.accepted == results[1].info.accepted
    assert capsys.readouterr().err.count("of the drafter's probability") == 2


def test_the_share_is_that_of_the_drafters_probability(capsys):
    model = tabular(1, OURS)
    # After </s> (the end that `encode` adds), a and b.
    tokens = OURS.encode("ab")
    expected = np.mean([probs(model, t)[[4, 5]].sum() for t in tokens])
    assert shared_probability(model, np.array([4, 5]), ["ab"]) == pytest.approx(expected, rel=1e-5)
    assert shared_probability(model, np.arange(6), ["ab"]) == pytest.approx(1.0)
    # "x" and the padding are not shared.
    translate(model, tabular(2, THEIRS), ["ab"])
    assert "expect at most that share of the acceptance" in capsys.readouterr().err
    translate(model, tabular(2, THEIRS), ["ab"], least=0.1)
    assert not capsys.readouterr().err


def test_tokens_that_are_not_shared_or_have_no_texts_are_refused(monkeypatch):
    def pieces(self):
        raise ValueError("joined by spaces")

    joined = Letters(["<pad>", "</s>", "a", "b", "c"])
    monkeypatch.setattr(joined, "pieces", pieces.__get__(joined), raising=False)
    for words, message in (
        (Letters(["<pad>", "</s>", "x", "y"]), "share no tokens: choose another drafter"),
        (joined, "the drafter's tokens cannot be translated.*joined by sp"),
    ):
        with pytest.raises(ValueError, match=message):
            translate(tabular(1, words), tabular(2, THEIRS))
