"""Draft heads from disk in pairs: decoding, what is refused, and what `inspect` tells."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import drafting, rules
from specjax.checkpoints import save_model
from specjax.checkpoints.heads import open_draft_head
from specjax.cli.main import main
from specjax.models import LlamaConfig
from specjax.partitioning import make_mesh
from specjax.text.drafts import ModelDrafts
from specjax.tokenizers import ByteTokenizer
from tests.heads.tiny_heads import llama
from tests.heads.written import FORMATS, write_head
from tests.variants import variants

VOCAB = ByteTokenizer().vocab_size
PROMPTS = ["A question: ", "What?", "A question: how many are there?", "x"]
SHAPE = {"max_new_tokens": 12, "batch_size": 2, "buckets": (48,)}
GREEDY = specjax.Sampling(temperature=0.0)
WARM = specjax.Sampling(temperature=2.0)
DRAFTED = (97, 3, 101, 120, 32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A verifier in `verifier`, and a head of each format beside it."""
    directory = tmp_path_factory.mktemp("heads")
    model, params = llama(VOCAB, layers=4)
    save_model(directory / "verifier", model, params, format="hf")
    for kind in FORMATS:
        mapped = kind in ("eagle3", "speculators", "dspark")
        write_head(directory / kind, model, kind, DRAFTED if mapped else None)
    return directory


def load(place, kind, **options):
    paths = {"verifier": place / "verifier", "drafter": place / kind}
    return specjax.load_pair(**paths, tokenizer="bytes", **options)


@pytest.fixture(scope="module")
def alone(place):
    verifier = specjax.load_text_model(place / "verifier", tokenizer="bytes")
    return specjax.Decoder(verifier, sampling=GREEDY, **SHAPE)(PROMPTS)


# The others decode in other tests here.
@pytest.mark.parametrize("kind", variants(FORMATS, "eagle3", "eagle1", "mtp", "dspark"))
def test_every_format_drafts_for_its_verifier(place, alone, kind):
    pair = load(place, kind)
    decoder = specjax.Decoder(pair, sampling=GREEDY, **SHAPE)
    result = decoder(PROMPTS)
    assert [x.tolist() for x in result.tokens] == [x.tolist() for x in alone.tokens]
    calls = result[0].info.calls
    assert set(calls) == {"verifier", "drafter"}
    # A block takes one pass.
    assert (calls["drafter"] <= calls["verifier"]) == (kind in ("zlab", "dspark"))


OPTIONS = {
    "rule": ("eagle3", {"rule": rules.OPT(0.2)}),
    "block rule": ("zlab", {"rule": rules.TokenV3(0.5)}),
    "stopping": ("dspark", {"stopping": drafting.Survival(drafting.OwnEstimate(), 0.9)}),
    "tree": ("speculators", {"drafting": specjax.Tree(depth=2, width=2)}),
    "greedy": ("zlab", {"drafting": ModelDrafts(greedy=True)}),
    "filters": ("mtp", {"sampling": specjax.Sampling(temperature=0.8, top_k=20, top_p=0.9)}),
    "processors": ("eagle3", {"processors": (specjax.processors.RepetitionPenalty(1.3),)}),
}


@pytest.mark.parametrize("name", variants(OPTIONS, "rule", "stopping", "tree"))
def test_options_of_a_decoder(place, name):
    """Rows do not depend on their company, whatever decodes them; a resumed run agrees."""
    kind, options = OPTIONS[name]
    decoder = specjax.Decoder(load(place, kind), **{"sampling": WARM, **SHAPE, **options})
    whole = decoder(PROMPTS, seed=4)
    assert whole.info.emitted > 0
    shared = decoder(PROMPTS, seed=4, share_prefix=True)
    assert [x.tolist() for x in shared.tokens] == [x.tolist() for x in whole.tokens]


@pytest.mark.parametrize("kind", variants(["eagle3", "dspark"], "dspark"))
def test_bfloat16(place, kind):
    pair = load(place, kind, dtype="bfloat16")
    assert specjax.Decoder(pair, sampling=WARM, **SHAPE)(PROMPTS[:2]).info.emitted > 0


def test_a_resumed_run_decodes_the_missing_rows(place):
    decoder = specjax.Decoder(load(place, "zlab"), sampling=WARM, **SHAPE)
    assert decoder.method.independent_rows
    whole = decoder(PROMPTS)
    done = {row.index: int(row.info.rounds) for row in whole[:3]}
    rest = list(decoder.rows(PROMPTS, done=done))
    assert {row.index: row.tokens.tolist() for row in rest} == {3: whole[3].tokens.tolist()}


def test_samples_and_mesh(place):
    one = specjax.Decoder(load(place, "dspark"), sampling=WARM, **SHAPE)
    mesh = make_mesh(data=2, model=2)
    spread = specjax.Decoder(load(place, "dspark", mesh=mesh), sampling=WARM, **SHAPE)
    found, wanted = (x(PROMPTS[:2], num_samples=2) for x in (spread, one))
    assert [x.tolist() for x in found.tokens] == [x.tolist() for x in wanted.tokens]


def changed(place, kind, directory, arrays=None, **values):
    """A copy of a head with other fields, and arrays replaced (None: left out)."""
    directory.mkdir()
    config = json.loads((place / kind / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    stored = safetensors.numpy.load_file(place / kind / "model.safetensors") | (arrays or {})
    stored = {name: array for name, array in stored.items() if array is not None}
    safetensors.numpy.save_file(stored, directory / "model.safetensors")


ARRAY = np.zeros((3,), np.float32)
REFUSED = {
    "missing": ("eagle3", {"arrays": {"norm.weight": None}}, "1 array missing: norm.weight"),
    "unknown": ("zlab", {"arrays": {"extra.weight": ARRAY}}, "1 array unknown: extra.weight"),
    "shape": ("mtp", {"arrays": {"mtp_layers.0.token_layernorm.weight": ARRAY}}, "wrong shape"),
    "layers": ("zlab", {"num_target_layers": 9}, "which has layers 9, not 4: give its own"),
    "boundary": ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 7]}, "states [1, 7] of"),
    "last layer": ("zlab", {"dflash_config": {"target_layer_ids": [0, 3]}}, "names the last lay"),
    "map": ("eagle3", {"arrays": {"d2t": np.full(5, 300)}}, "d2t names token 300"),
    "twice": ("eagle3", {"arrays": {"d2t": -np.arange(5)}}, "d2t names a token twice"),
    "no map": ("eagle3", {"arrays": {"d2t": None, "t2d": None}}, "needs the array d2t"),
    "kind": ("mtp", {"speculators_model_type": "medusa"}, "it must be 'eagle3' or 'mtp'"),
    "Markov": ("dspark", {"markov_head_type": "lstm"}, "markov_head_type='lstm' is not supp"),
    "no output": ("eagle3", {"arrays": {"lm_head.weight": None}}, "1 array missing: lm_head.weig"),
    "scalar map": ("eagle3", {"arrays": {"d2t": np.array(3)}}, "d2t must have 1 axes, but its sha"),
    "object": ("zlab", {"dflash_config": 3}, "config.json: dflash_config=3 must be an object"),
    "project": ("mtp", {"speculators_config": []}, "config.json: speculators_config=[] must be an"),
    "layer object": ("mtp", {"transformer_layer_config": "x"}, "transformer_layer_config='x' must"),
    "no layers": ("mtp", {"transformer_layer_config": None}, "layers of model_type None are not s"),
    "eagle object": ("eagle3", {"eagle_config": 1}, "config.json: eagle_config=1 must be an obje"),
    "ids": ("zlab", {"dflash_config": {"target_layer_ids": [0, "1"]}}, "=[0, '1'] must be a list"),
    "id": ("speculators", {"eagle_aux_hidden_state_layer_ids": 2}, "json: eagle_aux_hidden_state_"),
    "depth": ("zlab", {"num_target_layers": "x"}, "config.json: num_target_layers='x' must be a"),
    "mask": (
        "zlab",
        {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 259}},
        "config.json: mask_token_id=259 must be below 259",
    ),
    "width": (
        "zlab",
        {"hidden_size": 16, "target_hidden_size": 8},
        "config.json: hidden_size=16 must be that of the verifier, 8",
    ),
    "networks": (
        "mtp",
        {"speculators_config": {"verifier": {"architectures": [1]}}},
        "config.json: architectures=[1] must be a list of names",
    ),
    "no window": ("zlab", {"layer_types": ["sliding_attention"]}, "but no sliding_window"),
    "types": ("zlab", {"layer_types": ["chunked"]}, "json: layer_types=['chunked'] may only name"),
    "type count": ("zlab", {"layer_types": 2 * ["full_attention"]}, "layer_types has 2 names, but"),
    "window": (
        "zlab",
        {"layer_types": ["sliding_attention"], "sliding_window": 4},
        "sliding_window=4 must be at least block_size=5",
    ),
    "inner Markov": (
        "zlab",
        {"dflash_config": {"markov_rank": 4, "markov_head_type": "lstm", "mask_token_id": 3}},
        "markov_head_type='lstm' is not supp",
    ),
    "family": ("eagle1", {"model_type": "qwen3", "x": 1}, "2 arrays missing"),
    "network": (
        "mtp",
        {"speculators_config": {"verifier": {"architectures": ["GemmaForCausalLM"]}}},
        "the network GemmaForCausalLM, not LlamaForCausalLM",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_are_refused(place, name, tmp_path):
    kind, changes, message = REFUSED[name]
    changed(place, kind, tmp_path / "head", **changes)
    with pytest.raises(ValueError) as caught:
        specjax.load_pair(verifier=place / "verifier", drafter=tmp_path / "head", tokenizer="bytes")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "head" in str(caught.value)


READ = {
    "boundaries": ("speculators", {}, {"boundaries": (1, 2)}),
    "outputs": (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
        {"boundaries": (1, 3)},
    ),
    "MTP of a verifier with windows": (
        "mtp",
        {"sliding_window": 4, "layer_types": 4 * ["sliding_attention"]},
        {"windows": (None,)},
    ),
    "moving windows": (
        "zlab",
        {"sliding_window": 7, "layer_types": ["sliding_attention"]},
        {"windows": (7,), "windows_move": True, "from_anchor": False},
    ),
    "inner Markov": (
        "zlab",
        {
            "dflash_config": {
                "target_layer_ids": [0, 1],
                "mask_token_id": 3,
                "markov_rank": 4,
                "markov_head_type": "rnn",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            }
        },
        {
            "kind": "DSpark",
            "markov": "rnn",
            "confidence": True,
            "confidence_reads_markov": True,
            "from_anchor": True,
        },
    ),
    "inner slots": (
        "zlab",
        {
            "dflash_config": {
                "target_layer_ids": [0, 1],
                "mask_token_id": 3,
                "enable_confidence_head": True,
                "sample_from_anchor": False,
            }
        },
        {"kind": "DSpark", "markov": None, "confidence": True, "from_anchor": False},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_of_a_config(place, name, tmp_path):
    kind, changes, wanted = READ[name]
    if kind == "mtp":
        file = place / kind / "config.json"
        layer = json.loads(file.read_text())["transformer_layer_config"]
        changes = {"transformer_layer_config": {**layer, **changes}}
    arrays = {"fc.weight": np.zeros((8, 16), np.float32)}  # of two states
    changed(place, kind, tmp_path / "head", None if kind == "mtp" else arrays, **changes)
    config = open_draft_head(tmp_path / "head").config_for(llama(VOCAB, layers=4)[0])
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_another_verifier_is_refused(place, tmp_path):
    config = LlamaConfig(
        vocab_size=VOCAB + 5, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=8,
        num_layers=4,
    )  # fmt: skip
    other = specjax.models.model_from_config(config)
    write_head(tmp_path / "head", other, "speculators")
    message = "a head for another verifier (some/verifier), which has width 16, not 8, tokens in"
    with pytest.raises(ValueError) as caught:
        load(place, tmp_path / "head")
    assert message in str(caught.value)


def test_what_a_head_cannot_do(place):
    pair = load(place, "dspark")
    with pytest.raises(ValueError, match="max_draft must be at most 5 for this DSpark"):
        specjax.Decoder(pair, max_draft=6, **SHAPE)
    with pytest.raises(ValueError, match="model must read trees, and BlockHead cannot"):
        specjax.Decoder(pair, drafting=specjax.Tree(depth=2, width=2), **SHAPE)
    with pytest.raises(ValueError, match="this DSpark head drafts only for its verifier"):
        specjax.Decoder(pair.drafter, **SHAPE)(PROMPTS)
    with pytest.raises(ValueError, match="is a draft head: give the model it is for"):
        specjax.load_pair(verifier=place / "mtp", drafter=place / "mtp", tokenizer="bytes")
    own = drafting.Survival(drafting.OwnEstimate(), 0.5)
    for kind in ("zlab", "eagle3"):
        with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
            specjax.Decoder(load(place, kind), stopping=own, **SHAPE)
    with pytest.raises(ValueError, match="CostAware cannot weigh a draft head"):
        specjax.Decoder(pair, stopping=drafting.CostAware(), **SHAPE)
    with pytest.raises(ValueError, match="model must be EagleHead, got BlockHead"):
        drafting.EagleDrafter(pair.drafter.model, 2)
    with pytest.raises(ValueError, match="model must be BlockHead, got EagleHead"):
        drafting.BlockDrafter(load(place, "eagle3").drafter.model, 2)
    # What is left may have no token that the head drafts.
    forbid = {"processors": (specjax.processors.SuppressTokens((5,)),), "rule": rules.OPT(0.2)}
    with pytest.raises(ValueError, match="BlockDrafter may draft it"):
        specjax.Decoder(pair, **forbid, **SHAPE)
    specjax.Decoder(load(place, "mtp"), **forbid, **SHAPE)


def test_inspect_tells_what_a_head_is(place, tmp_path, capsys):
    assert main(["inspect", str(place / "dspark"), str(place / "verifier")]) == 0
    out = capsys.readouterr().out
    assert "DSpark head (speculators)" in out and "drafts for       some/verifier of width 8" in out
    assert "5 of 259 tokens" in out and "a pair: " in out
    changed(place, "zlab", tmp_path / "head", num_target_layers=9)
    assert main(["inspect", str(tmp_path / "head"), str(place / "verifier")]) == 2
    assert "not a pair: " in capsys.readouterr().out
    assert main(["inspect", str(place / "eagle3"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["models"][0]
    assert (values["family"], values["format"]) == ("EAGLE-3 head", "EAGLE")
    pair = load(place, "eagle3")
    own = pair.drafter.params["network"]
    assert values["parameters"] == sum(x.size for x in jax.tree.leaves(own))
