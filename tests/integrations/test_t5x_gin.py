"""The gin files for T5X make the models that they name, beside T5X's own run files."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import gin
import jax
import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = pytest.mark.filterwarnings("ignore")

from t5x import gin_utils
from t5x import infer as infer_program

from specjax.integrations.t5x import DecoderOnlyModel, EncoderDecoderModel
from specjax.rules import Lossless
from specjax.text.parts import make_part
from tests.integrations.t5x_networks import BATCH, params_of

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "gin_configs"
SEARCH = [str(CONFIGS), str(Path(infer_program.__file__).parents[1]), str(Path(__file__).parent)]
GIVEN = {
    "MIXTURE_OR_TASK_NAME": "task",
    "TASK_FEATURE_LENGTHS": {"inputs": 8, "targets": 8},
    "CHECKPOINT_PATH": "/verifier",
    "INFER_OUTPUT_DIR": "/out",
}


@pytest.fixture(autouse=True)
def program(monkeypatch):
    """T5X's run files bind what they find in the program."""
    monkeypatch.setitem(sys.modules, "__main__", infer_program)
    gin.clear_config()
    yield
    with gin.unlock_config():
        gin.clear_config()


def configure(pair, **names):
    files = [f"t5x/pairs/{pair}.gin", "t5x/runs/infer.gin"]
    bindings = [f"{name} = {value!r}" for name, value in {**GIVEN, **names}.items()]
    gin_utils.parse_gin_flags(SEARCH, files, bindings)


def model(kind=EncoderDecoderModel):
    return gin.get_configurable(kind)()


def names(folder):
    return sorted(path.stem for path in (CONFIGS / "t5x" / folder).glob("*.gin"))


WAYS = {
    "lossless": {},
    "opt": {"RULE": "OPT(0.2)"},
    "adaptive": {"RULE": "TokenV3(0.5)", "STOPPING": "Confidence(0.3)", "MAX_DRAFT": 12},
    "lookup": {"DRAFTING": "Lookup(max_ngram=3)", "DRAFTER_NETWORK": None, "MAX_DRAFT": 10},
    "alone": {"DRAFTER_NETWORK": None},
}


@pytest.mark.parametrize("name", WAYS)
def test_each_way_to_decode_is_named_by_texts(name):
    asked = WAYS[name]
    configure("t5_1_1_small_xl", TEMPERATURE=0.5, **asked)
    made = model()
    assert (made.drafter_module is None) == ("DRAFTER_NETWORK" in asked)
    assert made.setting.temperature == 0.5
    assert made.setting.longest == asked.get("MAX_DRAFT", 5)
    for field in ("rule", "stopping", "drafting"):
        expected = make_part(field, asked.get(field.upper()))
        expected = Lossless() if field == "rule" and expected is None else expected
        assert repr(made.setting.part(field)) == repr(expected)


@pytest.mark.parametrize("pair", names("pairs"))
def test_each_pair_is_made(pair):
    configure(pair, DRAFTER_CHECKPOINT_PATH="/drafter")
    made = model(DecoderOnlyModel if pair.startswith("decoder") else EncoderDecoderModel)
    large, small = (module.config for module in (made.module, made.drafter_module))
    assert large.emb_dim > small.emb_dim and large.vocab_size == small.vocab_size == 32128
    assert large.dtype == "bfloat16" and made.setting.longest == 5
    found = gin.query_parameter("PairCheckpointManager.drafter_path")
    assert str(found) == "%DRAFTER_CHECKPOINT_PATH"


def _blocks():
    """The gin files in docs/t5x.md: a pair with scanned layers, another vocabulary."""
    text = (ROOT / "docs" / "t5x.md").read_text()
    blocks = re.findall(r"(?:    from __gin__.*\n)(?:(?:    .*)?\n)+", text)
    return [textwrap.dedent(block).strip() for block in blocks]


# A process of its own: gin would find network.T5Config in two modules, for all later tests.
_SCANNED = """
import sys
from t5x import infer
sys.modules["__main__"] = infer
import gin, jax
from t5x import gin_utils
from t5x.examples.scalable_t5 import network
from specjax.integrations.t5x import EncoderDecoderModel
from tests.integrations.t5x_networks import BATCH, params_of
search, files, bindings = {given}
gin_utils.parse_gin_flags(search, files, bindings)
made = gin.get_configurable(EncoderDecoderModel)()
for module, width in ((made.module, 2048), (made.drafter_module, 384)):
    assert isinstance(module, network.Transformer), module
    assert module.config.scan_layers and module.config.emb_dim == width
params = jax.eval_shape(lambda: params_of(made, BATCH))
assert params["verifier"]["decoder"]["decoder"]["mlp"]["wo"]["kernel"].shape == (5120, 24, 2048)
"""


def test_the_documented_pair_has_scanned_layers(tmp_path):
    (tmp_path / "scanned.gin").write_text(_blocks()[0])
    files = [str(tmp_path / "scanned.gin"), "t5x/runs/infer.gin"]
    bindings = [f"{name} = {value!r}" for name, value in GIVEN.items()]
    bindings.append("drafter/network.T5Config.emb_dim = 384")
    code = _SCANNED.format(given=(SEARCH, files, bindings))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-4000:]


def test_the_documented_vocabulary_is_bound(tmp_path):
    (tmp_path / "bytes.gin").write_text(_blocks()[1])
    files = ["t5x/pairs/t5_1_1_small_xl.gin", str(tmp_path / "bytes.gin"), "t5x/runs/infer.gin"]
    gin_utils.parse_gin_flags(SEARCH, files, [f"{n} = {value!r}" for n, value in GIVEN.items()])
    made = model()
    assert type(made.output_vocabulary).__name__ == "ByteVocabulary"
    assert made.module.config.vocab_size == made.drafter_module.config.vocab_size == 384


def test_what_the_page_sets_on_the_command_line_is_read():
    text = (ROOT / "docs" / "t5x.md").read_text().partition("## Checkpoints")[0]
    given = re.findall(r"--gin\.([\w./]+)=(\"'.*?'\"|\"\{.*?\}\"|[\w.]+)", text)
    assert len(given) > 15
    refused = {"MAXDRAFT", "BATCH_SIZE"}
    for name, value in given:
        gin.clear_config()
        files = ["t5x/pairs/t5_1_1_small_xl.gin", "t5x/runs/infer.gin"]
        bindings = [*(f"{each} = {known!r}" for each, known in GIVEN.items())]
        bindings.append(f"{name} = {value.strip(chr(34))}")
        if name not in refused:
            gin_utils.parse_gin_flags(SEARCH, files, bindings)
            continue
        with pytest.raises(ValueError, match=f"{name} is set, but nothing reads it"):
            gin_utils.parse_gin_flags(SEARCH, files, bindings)


@pytest.mark.parametrize(
    "binding",
    [
        "NUM_DECODES = 4",
        "specjax_t5x.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4",
    ],
    ids=["macro", "binding"],
)
def test_the_number_of_decodes_is_bound(binding):
    files = ("t5x_tiny.gin", "t5x/decoding.gin")
    gin_utils.parse_gin_flags(SEARCH, files, ["DRAFTER_NETWORK = None", binding])
    made = gin.query_parameter("MODEL/macro.value").scoped_configurable_fn()
    rows = len(BATCH["encoder_input_tokens"])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = jax.eval_shape(lambda: params_of(made, BATCH))
        out, aux = jax.eval_shape(
            lambda params: made.predict_batch_with_aux(params, BATCH, return_all_decodes=True),
            params,
        )
    assert out.shape[:2] == aux["scores"].shape == (rows, 4)


_ALONE = "DRAFTER_NETWORK = None"
_COPIES = "DRAFTING = 'Lookup()'"
_NO_DRAFTER = "must be left out, because there is no drafter; give DRAFTER_NETWORK, or DRAFTING"


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        # What nobody reads.
        (["MAXDRAFT = 7"], "MAXDRAFT is set, but nothing reads it: did you mean MAX_DRAFT?"),
        (["GAMMA = 7"], "GAMMA is set, but nothing reads it: leave it out, or set one of DRAFT"),
        (["MINE = %MAX_DRAFT"], "MINE is set, but nothing reads it"),
        (["drafter/MAX_DRAFT = 7"], "drafter/MAX_DRAFT is set, but nothing reads it: did you mean"),
        (
            ["drafer/network.T5Config.emb_dim = 9"],
            "the scope drafer/ is set, but nothing reads it: did you mean drafter?",
        ),
        # In the names of the gin files.
        (["RULE = 'OPT(0.2)'", _ALONE], f"RULE {_NO_DRAFTER}"),
        (["MAX_DRAFT = 7", _ALONE], f"MAX_DRAFT {_NO_DRAFTER}"),
        (["STOPPING = 'Confidence(0.4)'", _ALONE], f"STOPPING {_NO_DRAFTER}"),
        ([_COPIES], "DRAFTER_NETWORK must be None, because DRAFTING is set"),
        (
            ["DRAFTING = 'Tree(2, 2)'", _ALONE],
            "DRAFTING must be Lookup() or WithParams(drafter, params) in T5X",
        ),
        (
            [_COPIES, _ALONE, "MIN_DRAFT = 2"],
            "MIN_DRAFT must be left out: DRAFTING=Lookup(",
        ),
        ([_COPIES, _ALONE, "RULE = 'OPT(0.2)'"], "the drafter's confidence, but Lookup has none"),
        (["RULE = 'OPT'"], "RULE='OPT': OPT: missing a required argument: 'strength'"),
        (["RULE = 'TokenV2(0.3, top_k=0)'"], "RULE='TokenV2(0.3, top_k=0)': top_k must be a whole"),
        (["MIN_DRAFT = 9"], "MIN_DRAFT must be at most MAX_DRAFT = 5, got 9: give a smaller MIN_"),
        (["TEMPERATURE = -1.0"], "TEMPERATURE must be finite and at least 0, got -1.0"),
        (
            ["VERIFICATION = 'GreedyBlock'", "STOPPING = 'Confidence(0.4)'"],
            "GreedyBlock needs drafts of a fixed length, but STOPPING ends them earlier",
        ),
    ],
    ids=lambda value: value[0].partition(" = ")[0] if isinstance(value, list) else "",
)
def test_what_is_not_read_or_does_not_fit_is_refused_in_the_words_of_gin_files(bindings, message):
    def make():
        gin_utils.parse_gin_flags(SEARCH, ("t5x_tiny.gin", "t5x/decoding.gin"), bindings)
        return model()

    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("run", "binding"),
    [
        ("infer", "infer.output_dir = '/elsewhere'"),
        ("infer", "utils.DatasetConfig.module = 'seqio'"),
        ("infer", "specjax_t5x.setting.rule = 'OPT(0.2)'"),
        ("infer", "specjax_t5x.PairCheckpointManager.drafter_path = '/small'"),
        ("interactive", "interactive_model.InteractiveModel.batch_size = 4"),
    ],
)
def test_a_binding_may_replace_a_name_of_the_files(run, binding):
    required = GIVEN if run == "infer" else {"CHECKPOINT_PATH": "/pair", "OUTPUT_DIR": "/out"}
    bindings = [*(f"{name} = {value!r}" for name, value in required.items()), binding]
    gin_utils.parse_gin_flags(SEARCH, ("t5x_tiny.gin", f"t5x/runs/{run}.gin"), bindings)


@pytest.mark.parametrize(
    ("run", "name"), [("infer", "BATCH_SIZE"), ("interactive", "DRAFTER_CHECKPOINT_PATH")]
)
def test_a_name_of_another_program_is_not_read(run, name):
    required = GIVEN if run == "infer" else {"CHECKPOINT_PATH": "/pair", "OUTPUT_DIR": "/out"}
    bindings = [f"{each} = {value!r}" for each, value in {**required, name: 3}.items()]
    with pytest.raises(ValueError, match=f"{name} is set, but nothing reads it"):
        gin_utils.parse_gin_flags(SEARCH, ("t5x_tiny.gin", f"t5x/runs/{run}.gin"), bindings)


def test_without_a_pair_names_are_not_checked():
    gin_utils.parse_gin_flags(SEARCH, (), ["MAXDRAFT = 7"])
