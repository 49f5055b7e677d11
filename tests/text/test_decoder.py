import dataclasses
import functools
import json
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import specjax
from specjax import partitioning, rules, verification
from specjax.checkpoints import load_model, save_model
from specjax.compilation import count_compilations
from specjax.text import decoder as decoder_lib
from specjax.text import directories, results
from specjax.tokenizers import ByteTokenizer, load_tokenizer
from specjax.types import Sampling
from tests import tiny_pair
from tests.decoding.helpers import Sharper

# One shape for nearly all tests: each more is a program to compile.
SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (16, 32)}
PROMPTS = tiny_pair.sentences(6, seed=3)


@pytest.fixture(scope="module")
def decoder(pair):
    return specjax.Decoder(pair, rule=rules.OPT(0.2), max_draft=3, **SHAPE)


def same(one, other):
    """Whether two results agree in everything that is a row's own."""
    assert one.texts == other.texts
    for a, b in zip(one.tokens, other.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    ours, theirs = one.info.per_row, other.info.per_row
    names = ("emitted", "rounds", "verifier_calls", "drafter_calls", "drafted_lengths")
    for name in (*names, "accepted_lengths"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for name in ("token_sum", "block_sum", "log_prob", "log_prob_target"):
        # Sums of logarithms, each program's own in the last bit.
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-5)


def pick(result, order):
    return specjax.Result(tuple(result[i] for i in order))


def test_a_result_is_a_sequence_of_rows(pair, decoder):
    result, eos = decoder(PROMPTS, seed=0, log_probs=True), pair.verifier.tokenizer.eos_ids[0]
    assert len(result) == len(PROMPTS) and [row.text for row in result] == result.texts
    for row, emitted in zip(result, result.info.per_row.emitted, strict=True):
        assert row.text == pair.verifier.tokenizer.decode(row.tokens.tolist())
        assert eos not in row.tokens and (row.ended or len(row.tokens) == 12)
        assert emitted == len(row.tokens) + row.ended == len(row.log_probs)
        assert row.ended_by == ("eos" if row.ended else "length")
        for each in ("log_prob", "log_prob_target"):
            by_token = getattr(row, each.replace("prob", "probs"))
            np.testing.assert_allclose(by_token.sum(), getattr(row.info, each), rtol=1e-4)
        assert 0.0 < row.seconds <= result.seconds
    assert result.ended.any() and not result.ended.all()
    part = result[2:4]
    assert isinstance(part, specjax.Result) and part.texts == result.texts[2:4]
    assert part.info.emitted == result.info.per_row.emitted[2:4].sum()
    dicts = json.loads(json.dumps(result.to_dicts(), allow_nan=False))
    assert [d["text"] for d in dicts] == result.texts
    assert set(dicts[0]) >= {"tokens", "log_prob", "log_probs", "ended_by", "seconds", "info"}
    assert all(repr(text) in repr(result) for text in result.texts[:3])
    plain = decoder(PROMPTS, seed=0)
    assert plain.texts == result.texts and "log_probs" not in plain[0].to_dict()
    assert np.all(np.isfinite(plain.info.per_row.log_prob_processed))
    assert np.all(np.isnan(plain.info.per_row.log_prob))  # not requested


def test_numbers_have_one_name_each(decoder):
    result = decoder(["ba de", "ki"], seed=0)
    info = result.info
    shown = dict(part.split("=") for part in repr(info)[len("RunInfo(") : -1].split(", "))
    assert shown == {name: str(getattr(info, name)) for name in shown}
    assert info.summary() == {name: getattr(info, name) for name in shown}
    assert info.tokens_per_verifier_call == info.emitted / info.verifier_calls
    for row, told in zip(result, result.to_dicts(), strict=True):
        assert told["info"].keys() >= set(results.COUNTS)
        for name in told["info"].keys() - {"calls"}:
            assert getattr(row.info, name).tolist() == told["info"][name]
    for name in results.COUNTS:
        assert getattr(info, name) == sum(getattr(row.info, name) for row in result)


def test_a_draft_limit_is_each_rows_own(pair):
    decoder = specjax.Decoder(pair, max_draft=3, sampling=Sampling(0.0), **SHAPE)
    result = decoder(PROMPTS[:4], draft_limit=[0, 1, 3, 0])
    assert result.texts == decoder(PROMPTS[:4]).texts
    rows = result.info.per_row
    np.testing.assert_array_equal(rows.rounds[[0, 3]], rows.emitted[[0, 3]])
    assert [int(np.flatnonzero(counts).max()) for counts in rows.drafted_lengths] == [0, 1, 3, 0]
    # Nobody drafts: the drafter makes no pass.
    assert not decoder(PROMPTS[:4], draft_limit=0).info.per_row.drafter_calls.any()


def test_compilation_is_told_apart(pair):
    decoder = specjax.Decoder(pair.verifier, max_new_tokens=7, batch_size=3, buckets=(11,))
    first, second = decoder(["ba de"]), decoder(["ba de"])
    assert first.compile_seconds >= first[0].compile_seconds > second[0].seconds > 0.0
    assert second.compile_seconds == second[0].compile_seconds == 0.0
    assert 0.0 < first[0].seconds <= first.seconds


def test_a_decoder_says_what_it_is(pair, decoder):
    shown = repr(decoder)
    assert shown.startswith(f"Decoder({pair!r}, Speculative, rule=OPT(strength=0.2), ")
    assert shown.endswith("verification=Block(), max_draft=3, sampling=Sampling(temperature=1.0))")
    alone = specjax.Decoder(pair.verifier, sampling=Sampling(0.7, top_p=0.9))
    assert repr(alone) == (
        f"Decoder(TextModel({pair.verifier.name}), Autoregressive, rule=Lossless(), "
        "sampling=Sampling(temperature=0.7, top_p=0.9))"
    )


def test_a_drafter_that_is_larger_than_its_verifier_is_told():
    small, large = tiny_pair.tabular(1), tiny_pair.tabular(2)
    larger = dataclasses.replace(large, params=(large.params, large.params))
    with pytest.warns(UserWarning, match="the drafter has .* parameters, the verifier .*swapped?"):
        specjax.Pair(drafter=larger, verifier=small)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        pair = specjax.Pair(drafter=larger, verifier=small)
        specjax.Pair(**pair.named)  # as a setting does
    assert len(shown) == 1


def test_a_mixture_that_emits_excluded_tokens_is_told(pair):
    mixture, cold = rules.Mixture(0.5), Sampling(0.0)
    message = "emits tokens that the verifier does not with temperature=0 and top_k, .*KLPrice"
    with pytest.warns(UserWarning, match=message):
        specjax.Decoder(pair, rule=mixture, sampling=Sampling(0.0, top_k=5), **SHAPE)
    # These exclude nothing.
    whole = Sampling(top_p=1.0, top_k=pair.verifier.model.vocab_size)
    specjax.Decoder(pair, rule=mixture, sampling=whole, **SHAPE)
    for rule in (rules.Mixture(1.0), rules.KLBall(0.1)):
        specjax.Decoder(pair, rule=rule, sampling=cold, **SHAPE)


def test_the_same_seed_gives_the_same_and_rows_and_seeds_differ(decoder):
    prompts = [PROMPTS[0]] * 4
    first = decoder(prompts, seed=7)
    same(first, decoder(prompts, seed=7))
    assert len(set(first.texts)) > 1
    assert first.texts != decoder(prompts, seed=8).texts


def test_ids_and_seeds_per_row_fix_the_random_streams(decoder):
    first = decoder(PROMPTS[:4], seed=7)
    same(
        pick(first, [2, 0, 3, 1]),
        decoder([PROMPTS[i] for i in (2, 0, 3, 1)], seed=7, ids=[2, 0, 3, 1]),
    )
    mixed = decoder(PROMPTS[:4], seed=[7, 8, 7, 8])
    other = decoder(PROMPTS[:4], seed=8)
    assert mixed.texts == [first.texts[0], other.texts[1], first.texts[2], other.texts[3]]


def test_options_per_row_are_each_rows_own(decoder):
    temperatures, limits = [0.0, 0.5, 1.0, 1.0], [12, 3, 12, 1]
    options = {"sampling": Sampling(temperatures), "max_new_tokens": limits}
    per_row = decoder(PROMPTS[:4], **options, seed=1)
    for row, (temperature, limit) in enumerate(zip(temperatures, limits, strict=True)):
        alike = decoder(PROMPTS[:4], sampling=Sampling(temperature), max_new_tokens=limit, seed=1)
        np.testing.assert_array_equal(alike.tokens[row], per_row.tokens[row])
    # Numbers may be numpy's or jax's, and prompts come from anything in order.
    whole = decoder(PROMPTS, seed=3, max_new_tokens=5)
    same(whole, decoder((p for p in PROMPTS), seed=np.uint32(3), max_new_tokens=np.int64(5)))
    same(whole, decoder(np.array(PROMPTS), seed=jax.numpy.int32(3), max_new_tokens=5))


def test_a_rules_strengths_may_be_the_calls_or_each_rows_own(pair, decoder):
    strengths = [-0.9, 0.2, 1.0, 0.2]
    per_row = decoder(PROMPTS[:4], rule=rules.OPT(strengths), seed=2)
    alike = {
        strength: decoder(PROMPTS[:4], rule=rules.OPT(strength), seed=2) for strength in strengths
    }
    for i, strength in enumerate(strengths):
        same(pick(per_row, [i]), pick(alike[strength], [i]))
    assert len({alike[strength].texts[0] for strength in strengths}) > 1
    same(decoder(PROMPTS[:4], seed=2), alike[0.2])
    own = specjax.Decoder(pair, rule=rules.OPT(strengths), max_draft=3, **SHAPE)
    same(own(PROMPTS[:4], seed=2), per_row)
    with pytest.raises(ValueError, match=r"OPT\.strength has shape \[4\], but there are 3 prompts"):
        own(PROMPTS[:3])


def test_lossless_greedy_is_the_verifiers_own_and_a_model_may_decode_alone(pair):
    lossless = specjax.Decoder(
        pair, rule=rules.Lossless(), max_draft=1, sampling=Sampling(0.0), **SHAPE
    )
    alone = specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)(PROMPTS)
    assert lossless(PROMPTS).texts == alone.texts
    assert alone.info.tokens_per_verifier_call == 1.0
    assert np.isnan(alone.info.acceptance_rate)
    assert json.loads(json.dumps(alone.info.summary(), allow_nan=False))["acceptance_rate"] is None


def test_top_k_and_top_p_of_nearly_nothing_are_greedy(pair):
    decoder = specjax.Decoder(pair.verifier, sampling=Sampling(top_k=1, top_p=1.0), **SHAPE)
    greedy = specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)(PROMPTS)
    assert decoder(PROMPTS, seed=3).texts == greedy.texts
    mixed = decoder(
        PROMPTS, seed=3, sampling=Sampling(top_k=[1] + [24] * 5, top_p=[1.0, 1e-6] + [1.0] * 4)
    )
    assert mixed.texts[:2] == greedy.texts[:2]
    assert mixed.texts[2:] != greedy.texts[2:]


def test_rows_come_when_they_are_finished(pair, decoder):
    whole = decoder(PROMPTS, seed=5)
    assert sorted(decoder.stream(PROMPTS, seed=5)) == list(enumerate(whole.texts))
    rest = {row.index: row.text for row in decoder.rows(PROMPTS, seed=5, done={0, 2, 3})}
    assert rest == {i: whole.texts[i] for i in (1, 4, 5)}
    alone = specjax.Decoder(pair.verifier, **SHAPE)
    rows = alone.rows(PROMPTS[:4], sampling=Sampling(0.0), max_new_tokens=[12, 1, 12, 12])
    assert next(rows).index == 1 and len(list(rows)) == 3


def test_nothing_is_compiled_again(pair, decoder):
    decoder(PROMPTS, seed=0)
    list(decoder.stream(PROMPTS))
    own = {"rule": rules.OPT([0.1, 0.2, 0.3] * 2), "draft_limit": [0, 1, 2, 3, 3, 3]}
    with count_compilations() as counts:
        decoder(PROMPTS, seed=1, sampling=Sampling(0.3), max_new_tokens=5)
        decoder(PROMPTS[:5], sampling=Sampling([0.1, 0.2, 0.3, 0.4, 0.5]), ids=range(5))
        decoder(PROMPTS, rule=rules.OPT(0.4))
        other = specjax.Decoder(
            pair, rule=rules.OPT(0.7), max_draft=3, sampling=Sampling(0.1), **SHAPE
        )
        other(PROMPTS)
        list(other.stream(PROMPTS))
        decoder(PROMPTS, seed=3, **own)
    assert counts.compiled == counts.read == 0
    with count_compilations() as counts:
        jax.jit(lambda x: x * 3)(2)
    assert counts.compiled + counts.read == 1, "the count counts nothing"


@functools.cache
def tabular_decoder(*, buckets=(16, 32), mesh=False):
    mesh = partitioning.make_mesh(data=8) if mesh else None
    models = specjax.Pair(tiny_pair.tabular(1, mesh=mesh), tiny_pair.tabular(2, mesh=mesh))
    return specjax.Decoder(
        models,
        rule=rules.OPT(0.1),
        verification=verification.Block(),
        max_draft=3,
        max_new_tokens=12,
        batch_size=8,
        buckets=buckets,
    )


TABULAR_PROMPTS = [f"prompt {'x' * i}" for i in range(8)]


def test_alone_batched_padded_and_on_eight_devices_bit_for_bit():
    decoder = tabular_decoder()
    whole = decoder(TABULAR_PROMPTS, seed=4)
    assert len({len(tokens) for tokens in whole.tokens}) > 2
    for i in (0, 5):
        same(pick(whole, [i]), decoder([TABULAR_PROMPTS[i]], seed=4, ids=[i]))
    order = [3, 1, 7, 0, 6, 2, 5, 4]
    same(pick(whole, order), decoder([TABULAR_PROMPTS[i] for i in order], seed=4, ids=order))
    same(whole, tabular_decoder(buckets=(64,))(TABULAR_PROMPTS, seed=4))
    same(whole, tabular_decoder(mesh=True)(TABULAR_PROMPTS, seed=4))


@pytest.mark.parametrize("default", ["rbg", "unsafe_rbg"])
def test_rows_are_independent_whatever_jaxs_default_generator_is(default):
    with jax.default_prng_impl(default):
        whole = tabular_decoder()(TABULAR_PROMPTS, seed=3)
    same(whole, tabular_decoder()(TABULAR_PROMPTS, seed=3))


def test_rows_that_refill_slots_are_as_in_a_batch_of_their_own():
    prompts = [f"p {'y' * (i % 7)}{i}" for i in range(37)]
    strengths = np.where(np.arange(37) % 3, -0.9, 1.0)
    options = {"rule": rules.OPT(strengths), "seed": 4}
    refilled = tabular_decoder()(prompts, **options)
    assert sorted(tabular_decoder().stream(prompts, **options)) == list(enumerate(refilled.texts))
    for start in range(0, 37, 8):
        ids = list(range(start, min(start + 8, 37)))
        options["rule"] = rules.OPT(strengths[ids])
        own = tabular_decoder()([prompts[i] for i in ids], ids=ids, **options)
        same(pick(refilled, ids), own)
    options["rule"] = rules.OPT(strengths)
    same(refilled, tabular_decoder(mesh=True)(prompts, **options))
    assert tabular_decoder()(prompts, seed=4).texts != refilled.texts


def test_token_ids_and_chats_are_prompts(decoder):
    tokenizer = decoder.tokenizer
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    same(decoder(PROMPTS[:4]), decoder(ids))
    with pytest.raises(ValueError, match="prompt 0: this tokenizer has no chat template"):
        decoder([[{"role": "user", "content": "ba"}]])
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    talking = ByteTokenizer()
    talking.chat_template = template
    chat = specjax.Decoder(tiny_pair.tabular(1, talking), **SHAPE)
    spelt = talking.encode("[user]hi>", add_special_tokens=False)
    same(chat([[{"role": "user", "content": "hi"}]]), chat([spelt]))


def test_a_long_prompt_is_cut_only_at_a_known_end(decoder):
    long = np.arange(40) % 7 + 3
    assert decoder.encode(long, truncate="end").tolist() == long[:32].tolist()
    assert decoder.encode(long, truncate="beginning").tolist() == long[8:].tolist()
    for prompt in (long, long[:5]):
        with pytest.raises(ValueError, match="truncate must be None, 'end' or 'beginning', got 's"):
            decoder.encode(prompt, truncate="start")


def test_a_rule_that_reads_the_verifier_alone_needs_no_drafter(pair):
    decoder = specjax.Decoder(pair.verifier, rule=Sharper(np.float32(1000.0)), **SHAPE)
    sharp = decoder(PROMPTS, seed=1)
    greedy = specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)(PROMPTS)
    assert sharp.texts == greedy.texts
    assert (sharp.info.per_row.log_prob_processed < 0.0).all()
    np.testing.assert_allclose(sharp.info.per_row.log_prob_target, 0.0, atol=1e-3)
    plain = specjax.Decoder(pair.verifier, **SHAPE)(PROMPTS, seed=1)
    same(plain, specjax.Decoder(pair.verifier, rule=rules.Lossless(), **SHAPE)(PROMPTS, seed=1))
    # A rule of one's own need not convert its strength.
    assert decoder(PROMPTS, seed=1, rule=Sharper(1.0)).texts != sharp.texts


def test_different_vocabularies_are_refused_before_arrays_are_read(paths, tmp_path):
    other = tiny_pair.write_model(tmp_path / "other", "drafter")
    tiny_pair.write_vocabulary(other, ["sa", "te", "wi", "xo"])
    (other / "model.safetensors").write_bytes((paths["drafter"] / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="drafter and verifier have different tokenizers") as error:
        specjax.load_pair(drafter=other, verifier=paths["verifier"])
    first = load_tokenizer(other), load_tokenizer(paths["verifier"])
    i = next(i for i in range(24) if first[0].token(i) != first[1].token(i))
    assert f"token {i} is {first[0].token(i)!r} and {first[1].token(i)!r}" in str(error.value)


def test_other_special_ids_give_a_warning(tmp_path):
    paths = tiny_pair.write_pair(tmp_path)
    specjax.load_pair(**paths)  # the same: no warning
    for file in ("config.json", "generation_config.json"):
        if (path := paths["drafter"] / file).exists():
            values = json.loads(path.read_text()) | {"eos_token_id": [1, 5]}
            path.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="the drafter ends texts with .*5.*, the verifier with"):
        pair = specjax.load_pair(**paths)
    assert pair.verifier.tokenizer.eos_ids != pair.drafter.tokenizer.eos_ids


@pytest.mark.parametrize("mesh", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_embeddings_padded_to_different_sizes_are_one_vocabulary(paths, tmp_path, mesh):
    """Rows in the embeddings that are no tokens: random ones would be drawn."""
    found = {}
    for name, size in {"drafter": 32, "verifier": 27}.items():
        loaded = load_model(paths[name])
        params = jax.tree.map(np.asarray, loaded.params)

        def padded(array, axis, size=size):
            width = [(0, size - 24 if axis == i else 0) for i in (0, 1)]
            return np.pad(array, width, constant_values=3.0)

        embedding = padded(params["token_embedder"]["embedding"], 0)
        head = padded(params["decoder"]["logits_dense"]["kernel"], 1)
        params["token_embedder"]["embedding"] = embedding
        params["decoder"]["logits_dense"]["kernel"] = head
        config = loaded.config.replace(vocab_size=size)
        found[name] = save_model(tmp_path / name, config, params, tokenizer_from=paths[name])
    pair = specjax.load_pair(**found, mesh=partitioning.make_mesh(4, 2) if mesh else None)
    usual = specjax.load_pair(**paths)
    assert pair.verifier.model.vocab_size == pair.drafter.model.vocab_size == 24
    assert pair.fingerprint != usual.fingerprint
    mixed = Sampling(0.0 if mesh else np.array([0.0, 1.0] * 3, np.float32))
    options = {"rule": rules.OPT(0.3), "max_draft": 3, "max_new_tokens": 12, "batch_size": 8}
    texts = [
        specjax.Decoder(models, **options)(PROMPTS, seed=4, sampling=mixed).texts
        for models in (pair, usual)
    ]
    assert texts[0] == texts[1]


def test_without_paths_it_is_the_built_in_pair(paths, monkeypatch):
    home = paths["verifier"].parent
    monkeypatch.setattr(directories, "PAIRS", home.parent)
    assert specjax.load_pair(home.name).verifier.name == str(paths["verifier"])
    path = f"built-in:{home.name}/drafter"
    assert specjax.load_text_model(path).name == str(paths["drafter"])


def test_fingerprints_tell_every_number_apart(pair, paths):
    again = specjax.load_text_model(paths["verifier"])
    assert again.fingerprint == pair.verifier.fingerprint
    leaves, tree = jax.tree.flatten(again.params)
    for place, leaf in enumerate(leaves):
        index = tuple(n // 2 for n in leaf.shape)
        nudged = leaf.at[index].set(np.nextafter(leaf[index], np.float32(9.0)))
        changed = jax.tree.unflatten(tree, [*leaves[:place], nudged, *leaves[place + 1 :]])
        other = specjax.TextModel(again.model, changed, again.tokenizer)
        assert other.fingerprint != again.fingerprint, place


def test_fingerprints_tell_tokenizers_apart():
    words = ByteTokenizer()
    words.add_eos = False
    assert tiny_pair.tabular(1, words).fingerprint != tiny_pair.tabular(1).fingerprint


def test_descriptions_tell_settings_apart(pair):
    def described(**options):
        options = {"rule": rules.OPT(0.2), **options}
        return json.dumps(specjax.Decoder(pair, **options).describe(), sort_keys=True)

    many = np.linspace(0.0, 1.0, 2000, dtype=np.float32)  # its text leaves most of them out
    other = many.copy()
    other[1000] += 1e-3
    settings = [
        {},
        {"rule": rules.OPT(0.2000001)},
        {"rule": rules.Diff(0.2)},
        {"rule": rules.OPT(many)},
        {"rule": rules.OPT(other)},
        {"verification": verification.Token()},
        {"max_draft": 4},
        {"sampling": Sampling(0.5)},
        {"sampling": Sampling(top_k=3)},
        {"sampling": Sampling(top_p=0.5)},
        {"max_new_tokens": 9},
        {"batch_size": 3},
        {"buckets": (16,)},
    ]
    assert len({described(**each) for each in settings}) == len(settings)
    before = described()
    named = {"drafter": pair.drafter.fingerprint, "verifier": pair.verifier.fingerprint}
    assert json.loads(before)["models"] == named
    with jax.default_matmul_precision("highest"):
        assert described() != before
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert described() != before


CHILD = """
import specjax, jax
from tests import tiny_pair
before = dict(jax.config.values)
decoder = specjax.Decoder(tiny_pair.tabular(1), max_new_tokens=4, batch_size=2)
decoder(["a"]); decoder(["b"])
assert dict(jax.config.values) == before
"""


def test_decoding_changes_no_setting_of_jax():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert not done.stdout and not done.stderr


def test_progress_counts_every_row_once(decoder, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, *, total, initial, disable, **_):
            self.total, self.disable, self.seen = total, disable, initial
            bars.append(self)

        def update(self, rows=1):
            self.seen += rows

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.closed = True

    monkeypatch.setattr(decoder_lib.tqdm, "tqdm", Bar)
    decoder(PROMPTS, progress=True)
    decoder(PROMPTS, progress=False)
    decoder(PROMPTS)
    list(decoder.rows(PROMPTS, done={1, 2}))
    assert [bar.disable for bar in bars] == [False, True, None, None]  # None: on a terminal
    assert all(bar.seen == bar.total == len(PROMPTS) and bar.closed for bar in bars)
    abandoned = decoder.stream(PROMPTS)
    next(abandoned)
    abandoned.close()
    assert bars[-1].closed and bars[-1].seen < len(PROMPTS)


def test_a_pair_lies_on_one_mesh():
    mesh = partitioning.make_mesh(data=8)
    with pytest.raises(ValueError, match="different meshes"):
        specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2, mesh=mesh))
