"""The gin files for T5X make the models that they name, beside T5X's own run files."""

import sys
from pathlib import Path

import gin
import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = pytest.mark.filterwarnings("ignore")

from t5x import gin_utils
from t5x import infer as infer_program

from specjax import drafting, rules
from specjax.integrations.t5x import DecoderOnlyModel, EncoderDecoderModel

CONFIGS = Path(__file__).parents[2] / "gin_configs"
SEARCH = [str(CONFIGS), str(Path(infer_program.__file__).parents[1])]
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


def configure(pair, *methods, **names):
    files = [
        f"t5x/pairs/{pair}.gin",
        *(f"t5x/methods/{method}.gin" for method in methods),
        "t5x/runs/infer.gin",
    ]
    bindings = [f"{name} = {value!r}" for name, value in {**GIVEN, **names}.items()]
    gin_utils.parse_gin_flags(SEARCH, files, bindings)


def model(kind=EncoderDecoderModel):
    return gin.get_configurable(kind)()


def names(folder):
    return sorted(path.stem for path in (CONFIGS / "t5x" / folder).glob("*.gin"))


@pytest.mark.parametrize("method", names("methods"))
def test_each_method_is_made(method):
    configure("t5_1_1_small_xl", method, TEMPERATURE=0.5)
    made = model()
    alone = method in ("max_gram", "verifier_alone")
    assert (made.drafter_module is None) == alone
    if method != "adaptive_confidence":  # which goes behind another one
        assert made.decoding.temperature == 0.5
    expected = {"opt": rules.OPT(0.2), "token_v3": rules.TokenV3(0.5)}.get(method)
    assert repr(made.decoding.rule) == repr(expected)
    assert isinstance(made.decoding.drafter, drafting.MaxGram) == (method == "max_gram")


def test_an_adaptive_draft_goes_behind_a_rule():
    configure("t5_1_1_small_large", "opt", "adaptive_confidence", THRESHOLD=0.3)
    made = model().decoding
    assert (made.max_draft, made.stopping) == (12, drafting.Confidence(0.3))
    assert isinstance(made.rule, rules.OPT)


@pytest.mark.parametrize("pair", names("pairs"))
def test_each_pair_is_made(pair):
    configure(pair, "lossless", DRAFTER_CHECKPOINT_PATH="/drafter")
    made = model(DecoderOnlyModel if pair.startswith("decoder") else EncoderDecoderModel)
    large, small = (module.config for module in (made.module, made.drafter_module))
    assert large.emb_dim > small.emb_dim and large.vocab_size == small.vocab_size == 32128
    assert large.dtype == "bfloat16" and made.decoding.max_draft == 5
    found = gin.query_parameter("PairCheckpointManager.drafter_path")
    assert str(found) == "%DRAFTER_CHECKPOINT_PATH"
