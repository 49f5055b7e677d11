"""Draft heads from disk in pairs: decoding, what is refused, and what `inspect` tells."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import drafting, rules
from specjax.checkpoints import save_draft_head, save_model
from specjax.checkpoints.heads import is_draft_head, load_draft_head, open_draft_head
from specjax.cli.main import main
from specjax.models import LlamaConfig
from specjax.models.heads import BlockConfig, EagleConfig, draft_head
from specjax.models.qwen import Qwen3Config
from specjax.partitioning import make_mesh
from specjax.text.directories import inspect
from specjax.tokenizers import ByteTokenizer
from tests.heads.tiny_heads import encoded_head, llama, tiny_head
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
    tiny = encoded_head("dspark", vocab=VOCAB)
    save_model(directory / "t5", tiny.verifier, tiny.verifier_params, format="hf")
    verifier = {"verifier_params": tiny.verifier_params, "verifier_name": "some/t5"}
    save_draft_head(directory / "encoded", tiny.head, tiny.params, **verifier)
    return directory


def load(place, kind, **options):
    paths = {"verifier": place / "verifier", "drafter": place / kind}
    return specjax.load_pair(**paths, tokenizer="bytes", **options)


@pytest.fixture(scope="module")
def alone(place):
    verifier = specjax.load_text_model(place / "verifier", tokenizer="bytes")
    return specjax.Decoder(verifier, sampling=GREEDY, **SHAPE)(PROMPTS)


BLOCKS = ("zlab", "dspark", "domino", "dflash2")


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
    assert (calls["drafter"] <= calls["verifier"]) == (kind in BLOCKS)


def test_a_head_of_an_encoder_decoder_drafts_for_it(place, capsys):
    paths = {"verifier": place / "t5", "drafter": place / "encoded"}
    pair = specjax.load_pair(**paths, tokenizer="bytes")
    found = specjax.Decoder(pair, sampling=GREEDY, max_draft=3, **SHAPE)(PROMPTS)
    alone = specjax.Decoder(pair.verifier, sampling=GREEDY, **SHAPE)(PROMPTS)
    assert [x.tolist() for x in found.tokens] == [x.tolist() for x in alone.tokens]
    assert main(["inspect", *map(str, paths.values())]) == 0
    out = capsys.readouterr().out
    assert "states 0, 2; its encoder's output, as layer 1 reads it" in out
    assert "drafts for       some/t5 of width 8 and 3 layers" in out


OPTIONS = {
    "rule": ("eagle3", {"rule": rules.OPT(0.2)}),
    "block rule": ("zlab", {"rule": rules.TokenV3(0.5)}),
    "stopping": ("dspark", {"stopping": drafting.Survival(drafting.OwnEstimate(), 0.9)}),
    "tree": ("speculators", {"drafting": specjax.drafting.Tree(depth=2, width=2)}),
    "greedy": ("zlab", {"drafting": drafting.Chain(greedy=True)}),
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


def converted(place, kind, destination, *options):
    paths = (place / kind, destination, "--to", "speculators")
    return main(["convert", *map(str, paths), "--verifier", str(place / "verifier"), *options])


def test_a_head_is_converted_for_servers(place, tmp_path, capsys):
    assert converted(place, "eagle3", tmp_path / "head") == 0
    assert "(EAGLE) -> " in capsys.readouterr().out
    model, params = llama(VOCAB, layers=4)
    head, read = load_draft_head(tmp_path / "head", model, verifier_params=params)
    assert head.config.own_embedding and head.config.own_output
    _, original = load_draft_head(place / "eagle3", model)
    copied = read["network"].pop("token_embedder")["embedding"]
    np.testing.assert_array_equal(copied, params["token_embedder"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, read, original)
    opened = open_draft_head(tmp_path / "head")
    assert (opened.verifier, opened.num_layers) == (str(place / "verifier"), 4)
    assert converted(place, "eagle3", tmp_path / "half", "--dtype", "bfloat16") == 0
    assert open_draft_head(tmp_path / "half").dtype == "bfloat16"


CONVERSIONS = {
    "no format": ("eagle1", (), "an EAGLE-1 head cannot be written: speculators has no such"),
    "layers": ("zlab", (), "this DFlash head has other layers than Qwen 3's: speculators cannot"),
    "no head": ("verifier", (), "verifier is no draft head: leave out --to speculators"),
    "model options": ("eagle3", ("--drafter", "x"), "leave out --drafter and --config"),
    "as a model": ("eagle3", ("--to", "hf"), "give --to speculators and --verifier, its verifier"),
    "an encoder": (
        "encoded",
        ("--verifier", "T5"),
        "reads an encoder's output, has a mask that is learnt, is a Domino, or is a DFlash 2",
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_that_are_refused(place, name, tmp_path, capsys):
    kind, options, message = CONVERSIONS[name]
    options = [str(place / "t5") if x == "T5" else x for x in options]
    assert converted(place, kind, tmp_path / "head", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


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
    "no layers": ("mtp", {"transformer_layer_config": None}, "layers of model_type None are not s"),
    "scalar map": ("eagle3", {"arrays": {"d2t": np.array(3)}}, "d2t must have 1 axes, but its sha"),
    "ids": ("zlab", {"dflash_config": {"target_layer_ids": [0, "1"]}}, "=[0, '1'] must be a list"),
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
    "encoder": ("mtp", {"specjax": {"cross_layer": 1}}, "which has an encoder, not a decoder alo"),
    "two layers": (
        "eagle3",
        {"arrays": {"layers.0.mlp.x": ARRAY, "layers.1.mlp.x": ARRAY}},
        "a head of kind EAGLE-3 has one layer, but these arrays are of 2: give the direc",
    ),
    "two layers of another kind": (
        "eagle1",
        {"num_hidden_layers": 2, "arrays": {"layers.1.mlp.x": ARRAY}},
        "a head of kind EAGLE-1 has one layer, but these arrays are of 2: give the direc",
    ),
    "two names": (
        "eagle3",
        {"arrays": {"model.norm.weight": ARRAY}},
        "has the array norm.weight twice, and nothing says which one counts",
    ),
    "floats in a map": (
        "eagle3",
        {"arrays": {"d2t": np.zeros(5, np.float32)}},
        "d2t has dtype F32, but must have whole numbers",
    ),
    "type": ("eagle3", {"model_type": []}, "layers of model_type [] are not supported in a head"),
    "crossed layer": ("mtp", {"specjax": {"cross_layer": 4}}, "a layer 4, not 4 layers: give its"),
    "own object": ("mtp", {"specjax": 1}, "config.json: specjax=1 must be an object"),
    "parameters": (
        "dspark",
        {"specjax": {"verifier_fingerprint": "0" * 16}},
        "(some/verifier), whose parameters differ from these: give its own verifier",
    ),
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
    "layers of the verifier": (
        "eagle3",
        {"num_hidden_layers": 40, "layer_types": 40 * ["full_attention"]},
        {"windows": (None,)},
    ),
    "one slot": ("dspark", {"block_size": 1}, {"block_size": 1, "most_drafts": 1}),
    "other layers": ("eagle1", {"num_hidden_layers": None}, {"windows": (None,)}),
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


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint16", "uint64"])
def test_maps_of_every_whole_dtype_are_read(place, dtype, tmp_path):
    drafted = np.arange(5) + np.array([0, 0, 7, 50, 120])
    maps = {
        "d2t": (drafted - np.arange(5)).astype(dtype),
        "t2d": np.isin(np.arange(VOCAB), drafted).astype(np.uint8),
    }
    changed(place, "eagle3", tmp_path / "head", maps)
    head, params = load_draft_head(tmp_path / "head", llama(VOCAB, layers=4)[0])
    assert np.argsort(params["places"], kind="stable")[: head.config.rows].tolist() == list(drafted)


@pytest.mark.parametrize("kind", FORMATS)
def test_arrays_named_as_those_of_a_model_are_read(place, kind, tmp_path):
    head = shutil.copytree(place / kind, tmp_path / "head")
    file = head / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    kept = ("lm_head", "d2t", "t2d")
    named = {x if x.startswith(kept) else f"model.{x}": array for x, array in arrays.items()}
    safetensors.numpy.save_file(named, file)
    assert is_draft_head(head)
    verifier = llama(VOCAB, layers=4)[0]
    (ours, read), (theirs, wanted) = (
        load_draft_head(path, verifier) for path in (head, place / kind)
    )
    assert ours == theirs
    jax.tree.map(np.testing.assert_array_equal, read, wanted)


@pytest.mark.parametrize(
    "changes", [{"norm_output": False}, {"boundaries": (2,)}, {"windows": (2,)}], ids=str
)
def test_a_head_that_could_not_be_read_is_not_written(tmp_path, changes):
    tiny = tiny_head("mtp")
    config = dataclasses.replace(tiny.head.config, norm_output=True)
    head = draft_head(config, tiny.verifier)
    save_draft_head(tmp_path / "head", head, tiny.params)
    assert load_draft_head(tmp_path / "head", tiny.verifier)[0] == head
    head = draft_head(dataclasses.replace(config, **changes), tiny.verifier)
    message = "MTP head with {}=.* cannot be written".format(*changes)
    with pytest.raises(ValueError, match=message):
        save_draft_head(tmp_path / "other", head, tiny.params)
    assert not (tmp_path / "other").exists()


def test_a_map_needs_an_output_of_its_own():
    with pytest.raises(ValueError, match="draft_vocab=2 must be None without own_output"):
        dataclasses.replace(tiny_head("mtp").head.config, draft_vocab=2)


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
    other = specjax.models.model_from_config(LlamaConfig.of(VOCAB + 5, 16, 2, 1, 8, 8, 4))
    write_head(tmp_path / "head", other, "speculators")
    message = "a head for another verifier (some/verifier), which has width 16, not 8, tokens in"
    with pytest.raises(ValueError) as caught:
        load(place, tmp_path / "head")
    assert message in str(caught.value)


def test_what_a_head_cannot_do(place):
    pair = load(place, "dspark")
    with pytest.raises(ValueError, match="max_draft must be at most 5 for this DSpark"):
        specjax.Decoder(pair, max_draft=6, **SHAPE)
    with pytest.raises(ValueError, match="trees need a drafter that reads them, not BlockHead"):
        specjax.Decoder(pair, drafting=specjax.drafting.Tree(depth=2, width=2), **SHAPE)
    others = [{"method": "TokenCascade()", "rule": "Chow(0.2)"}, {"drafting": "Cascade(((2,),))"}]
    for models, parts in ((pair.drafter, {}), *((pair, parts) for parts in others)):
        with pytest.raises(ValueError, match="this DSpark head drafts only for its verifier"):
            specjax.Decoder(models, **parts, **SHAPE)
    with pytest.raises(ValueError, match="is a draft head: give the model it is for"):
        specjax.load_pair(verifier=place / "mtp", drafter=place / "mtp", tokenizer="bytes")
    own = drafting.Survival(drafting.OwnEstimate(), 0.5)
    for kind in ("zlab", "eagle3"):
        with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
            specjax.Decoder(load(place, kind), stopping=own, **SHAPE)
    with pytest.raises(ValueError, match="is a draft head, which drafts only for its verifier"):
        specjax.load_text_model(place / "mtp")
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


def test_a_head_may_be_larger_than_its_verifier(tmp_path, capsys):
    model, params = llama(VOCAB, layers=2)
    verifier, head = tmp_path / "verifier", tmp_path / "head"
    save_model(verifier, model, params, format="hf")
    write_head(head, model, "speculators")
    assert inspect(head).params > inspect(verifier).params
    assert main(["inspect", str(verifier), str(head)]) == 0
    assert f"a pair: {head} drafts for {verifier}" in capsys.readouterr().out
    specjax.load_pair(drafter=head, verifier=verifier, tokenizer="bytes")  # without a warning


ROW = re.compile(
    r"\| `([\w.]+)` \| (EAGLE|block|MTP)(?:, ([\d,]+) tokens| of (\d) layers|) "
    r"\| ([\d.]+) M \| (\d+) MB \| ([\d.]+) \|"
)


def test_the_sizes_of_heads_in_the_docs():
    page = (Path(__file__).parents[2] / "docs/pairs.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert len(rows) == 15
    for name, kind, drafted, layers, *figures in rows:
        verifier = inspect(name, dtype="float32")
        config, depth = verifier.model.config, len(verifier.model.config.style.layers)
        count, vocab = int(layers or 1), int(drafted.replace(",", "")) if drafted else None
        sizes = (LlamaConfig if kind == "EAGLE" else Qwen3Config)(
            vocab_size=config.vocab_size, embed_dim=config.embed_dim, num_heads=config.num_heads,
            num_kv_heads=config.kv_heads, head_dim=config.head_dim, mlp_dim=config.mlp_dim,
            num_layers=count,
        )  # fmt: skip
        common = {
            "layers": sizes,
            "boundaries": (2, depth // 2, depth - 3),
            "windows": (None,) * count,
            "draft_vocab": vocab,
            "own_output": drafted != "",
            "cross_layer": None if config.encoder_style is None else depth - 1,
        }
        if kind == "EAGLE":
            head = EagleConfig(**common, fc_norm=True)
        else:
            head = BlockConfig(**common, block_size=8, mask_token=0)
        if kind == "MTP":
            last = config.replace(num_layers=1, layer_types=("full_attention",))
            own_states = {"boundaries": (depth + 1,), "own_output": False}
            head = EagleConfig(**common | own_states | {"layers": last}, projects=True)
        shapes = draft_head(head, verifier.model).abstract_params()
        own = sum(x.size for x in jax.tree.leaves(shapes))
        spared = 0
        for routing in filter(None, (spec.routing for spec in head.layers.style.layers)):
            stacks = [x for x in jax.tree.leaves(shapes) if len(x.shape) == 3]
            spared = sum(x.size for x in stacks) * (1 - routing.per_token / routing.experts)
        read = own - spared + (0 if drafted else config.vocab_size * config.embed_dim)
        found = f"{own / 1e6:.1f}", f"{2 * read / 1e6:.0f}", f"{read / verifier.read_params():.3f}"
        assert list(found) == figures
