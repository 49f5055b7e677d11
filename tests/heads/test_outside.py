"""A kind of head from outside: its own file, and a line in the table."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax import decoding, drafting, rules, testing, verification
from specjax.checkpoints import save_draft_head, save_model
from specjax.checkpoints.heads import is_draft_head, load_draft_head
from specjax.models import LlamaConfig
from specjax.models.heads import KINDS, HeadConfig, HeadFiles, draft_head
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.head import HeadNetwork, Published
from specjax.text.directories import inspect
from specjax.tokenizers import ByteTokenizer
from tests import laws
from tests.heads.test_laws import PROMPT, N, verifiers_law
from tests.heads.tiny_heads import V, llama


class MixConfig(HeadConfig):
    kind = "Mix"


class MixNetwork(HeadNetwork):
    """Mixes a token with the state before it."""

    def setup(self):
        self.fc = self._dense(self.config.layers.embed_dim, "fc")

    def __call__(self, token, state):
        return jnp.tanh(self.fc(jnp.concatenate([token, state], axis=-1)))


@dataclasses.dataclass(frozen=True)
class MixHead(EagleHead):
    reads_trees = False

    @property
    def network(self):
        return MixNetwork(self.config)

    def _init_variables(self, key):
        return self.network.init(key, *2 * [jnp.zeros((1, 1, self.config.layers.embed_dim))])

    def _with(self, params, cache, known):
        return cache._replace(ring=self._put(cache, known.states, known.places, known.kept))

    def score(self, params, cache, tokens, positions, tree=None):
        before = self._at(cache.ring, positions[:, None] - 1)
        state = self._apply(params, self._embed(params, tokens), before, method="__call__")
        return self._spread(params, self._logits(params, state)), state, state

    def write(self, cache, updates, positions):
        places = positions[:, None]
        return cache._replace(ring=self._put(cache, updates, places, places >= 0))


class MixFiles(HeadFiles):
    config, head = MixConfig, MixHead
    speculators = (Published("Mix", "mix", "MixDraftModel"),)

    def read_config(self, boundaries, draft_vocab):
        return MixConfig(**self.common(boundaries, draft_vocab))

    @classmethod
    def to_hf(cls, head, layers):
        ids = {"aux_hidden_state_layer_ids": list(head.config.boundaries)}
        return super().to_hf(head, layers) | ids


@pytest.fixture
def files(tmp_path):
    """Makes a verifier and a head of the new kind in a directory."""

    def make(vocab):
        verifier, params = llama(vocab)
        save_model(tmp_path / "verifier", verifier, params, format="hf")
        sizes = dataclasses.replace(verifier.config, num_layers=1)
        assert isinstance(sizes, LlamaConfig)
        head = draft_head(MixConfig(layers=sizes, boundaries=(3,), windows=(None,)), verifier)
        own = head.init(jax.random.key(1))
        save_draft_head(tmp_path / "head", head, own, verifier_params=params)
        return tmp_path, head, verifier, params

    KINDS.append(MixFiles)
    yield make
    KINDS.remove(MixFiles)


def test_it_is_loaded_and_drafts(files):
    place, *_ = files(ByteTokenizer().vocab_size)
    assert is_draft_head(place / "head")
    assert inspect(place / "head").summary()["family"] == "Mix head"
    paths = {"verifier": place / "verifier", "drafter": place / "head"}
    pair = specjax.load_pair(**paths, tokenizer="bytes")
    options = {"sampling": specjax.Sampling(temperature=0.0), "max_new_tokens": 12}
    drafted, alone = (specjax.Decoder(x, **options)(["What?"]) for x in (pair, pair.verifier))
    assert drafted.texts == alone.texts
    assert drafted[0].info.calls["drafter"] > 0


def test_its_rounds_are_exact(files):
    place, head, verifier, params = files(V)
    read, own = load_draft_head(place / "head", verifier, verifier_params=params)
    assert read == head
    drafter = drafting.heads.EagleDrafter(read, 2)
    method = decoding.Speculative(verifier, drafter, verification.Block())
    joined = drafting.chain.ChainParams(read.joined(own, params))
    given = decoding.MethodParams(params, joined, rules.Lossless())
    (law,) = laws.Texts(method)(given, [laws.Row(PROMPT, N, temperature=1.0)])
    assert testing.total_variation(laws.array_of(law, V, N), verifiers_law(1.0)) < 1e-6
