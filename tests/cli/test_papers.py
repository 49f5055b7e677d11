"""The shipped files of a paper's runs: parsed, and built by shape alone."""

import collections
import functools
import json
import re

import gin
import pytest

from specjax import study
from specjax.checkpoints import loading
from specjax.cli import compare, gin_config, infer, train
from specjax.cli.main import main
from specjax.data.few_shot import FewShot
from specjax.data.seqio_tasks import TASK_PREFIX, TFDS_DATA
from specjax.evaluation import METRICS
from specjax.models import PRESETS, model_from_config, preset
from specjax.text import text_models
from specjax.tokenizers import ByteTokenizer
from tests import tiny_pair
from tests.cli.infer_command import CONFIGS
from tests.variants import variants

FOLDER = CONFIGS / "papers/faster_cascades"
PAIRS = {
    "pair_t5_small_large": ("t5_v1_1_small", "t5_v1_1_large"),
    "pair_t5_small_xl": ("t5_v1_1_small", "t5_v1_1_xl"),
    "pair_gemma2_2b_9b": ("gemma2_2b", "gemma2_9b"),
    "pair_gemma2_2b_27b": ("gemma2_2b", "gemma2_27b"),
}
# Section E.1: the longest output, and for T5 the longest input.
LENGTHS = {
    "t5_wmt": (80, 80), "t5_xsum": (64, 1024), "t5_cnn_dm": (128, 2048), "gemma_wmt": (80, None),
    "gemma_cnn_dm": (128, None), "gemma_gsm8k": (320, None), "gemma_mbpp": (320, None),
    "gemma_squad2": (5, None), "gemma_web_questions": (5, None),
    "gemma_natural_questions": (5, None), "gemma_trivia_qa": (5, None),
}  # fmt: skip
RUNS = [
    (pair, task)
    for pair in PAIRS
    for task in LENGTHS
    if pair.split("_")[1].startswith(task.split("_")[0])
]


@functools.cache
def shaped(size):
    model = model_from_config(preset(size))
    made = text_models.TextModel(model, model.abstract_params(), ByteTokenizer())
    made.__dict__["prepared"] = made.params  # which would transpose arrays
    return made


@pytest.fixture
def by_shape(monkeypatch):
    """Directories are named by sizes, and models have shapes in the place of arrays."""
    monkeypatch.setattr(loading, "read_config", lambda path: preset(path.rsplit("/", 1)[-1]))

    def load_pair(*, verifier, drafter, **_):
        small, large = (shaped(path.rsplit("/", 1)[-1]) for path in (drafter, verifier))
        return text_models.Pair(small, large)

    monkeypatch.setattr("specjax.text.load_pair", load_pair)


def configure(*files, **values):
    infer.register()
    named = [f"{name}={value}" for name, value in values.items()]
    gin_config.configure([str(CONFIGS / file) for file in files], named)


def run_of(pair, task, small, large):
    folder = "papers/faster_cascades"
    files = ("runs/infer.gin", f"{folder}/{pair}.gin")
    named = {"DRAFTER": f"/m/{small}", "VERIFIER": f"/m/{large}", "OUTPUT_DIR": "out"}
    configure(*files, f"{folder}/task_{task}.gin", **named)
    return gin_config.call_part(infer.make_decoder)


def test_every_file_is_tested():
    found = {path.stem for path in FOLDER.glob("*.gin")}
    assert found == {"compare", "task_gemma", *PAIRS, *(f"task_{task}" for task in LENGTHS)}
    assert {path.parent for path in CONFIGS.glob("papers/*/*.gin")} == {FOLDER}


@pytest.mark.usefixtures("by_shape")
@pytest.mark.parametrize("run", variants(RUNS, RUNS[0]))
def test_a_run_is_built_by_shape_alone(run):
    pair, task = run
    decoder = run_of(pair, task, *PAIRS[pair])
    output, longest = LENGTHS[task]
    assert decoder.max_new_tokens == output and decoder.method.max_draft == 5
    assert longest is None or decoder.buckets == (longest,)
    assert longest is not None or decoder.stop
    task_of = gin.get_configurable(FewShot)()
    source = gin.query_parameter("INPUT/macro.value").removeprefix("seqio:")
    data = TFDS_DATA[source.removeprefix(TASK_PREFIX)]
    assert gin.query_parameter("SPLIT/macro.value") in data.splits
    # Every field of the templates is a field of the data.
    fields = {field.partition(".")[0] for field in data.fields}
    assert {name for t in task_of._templates for name in t.fields} <= fields
    assert re.split(r"[.|]", task_of.references)[0] in fields
    if task_of.shots:
        assert task_of.examples == f"seqio:{source}" and task_of.examples_split in data.splits


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("models/*.gin")))
def test_networks_of_published_sizes_are_these(name):
    from specjax import models, training
    from specjax.data.batching import Batching
    from specjax.data.examples import read_examples
    from specjax.training.recipe import Evaluation

    gin_config.register(
        read_examples, models.T5Config, models.LlamaConfig, models.Gemma2Config,
        *(getattr(training, n) for n in ("AdamW", "Objective", "Recipe", "Teacher")),
        training.TrainerConfig, Evaluation, Batching, train=training.train_model,
    )  # fmt: skip
    files = (train.DEFAULT_FILE, f"models/{name}.gin", "tasks/fields.gin")
    named = [f"{key}=x" for key in ("TRAIN", "VALIDATION", "OUTPUT_DIR")]
    gin_config.configure([str(CONFIGS / file) for file in files], named)
    config = gin.get_configurable(gin.query_parameter("MODEL/macro.value").selector)()
    if name not in PRESETS:
        assert model_from_config(config).num_params() > 1e6
        return
    rest = {"dropout_rate": config.dropout_rate} if name.startswith("t5") else {}
    assert config == PRESETS[name].replace(**rest)


# A way to run -> the command, its options, and the names that eight records need.
WAYS = {
    "infer": ("infer", (), {}),
    "full": ("compare", ("--full",), {"LATENCY_LIMIT": 2}),
    "estimate": ("compare", ("--estimate",), {"ESTIMATE_LIMIT": 2, "LATENCY_LIMIT": 2}),
    "limits": (
        "compare",
        (),
        {"ESTIMATE_LIMIT": 2, "LATENCY_LIMIT": 2, "MAX_LATENCY": 9},
    ),
}


def words_of(way, pair, task, tmp_path, **values):
    """The words of a command with a paper's pair and task, on 8 records."""
    record = {"en": "ba", "de": "ki", "question": "?", "answer": "#### 3"}
    lines = [json.dumps({**record, "id": i}) + "\n" for i in range(8)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    folder = "papers/faster_cascades"
    command, options, few = WAYS[way]
    files = [f"runs/{command}.gin", f"{folder}/{pair}.gin", f"{folder}/task_{task}.gin"]
    files[1:1] = [f"{folder}/compare.gin"] if way == "full" else []
    named = {**few, "INPUT": tmp_path / "in.jsonl", "OUTPUT_DIR": tmp_path / "out", **values}
    arguments = [*options, *(f"--gin_file={file}" for file in files)]
    return [command, *arguments, *(f"--gin.{k}={v}" for k, v in named.items())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pair", "task"), [("pair_t5_small_xl", "t5_wmt"), ("pair_gemma2_2b_27b", "gemma_gsm8k")]
)
def test_every_command_takes_a_pair_and_a_task(tmp_path, capsys, way, pair, task):
    """As far as it can get without the checkpoints."""
    values = {"VERIFIER": tmp_path / "large", "DRAFTER": tmp_path / "small"}
    if task == "gemma_gsm8k":
        values |= {"EXAMPLES": tmp_path / "in.jsonl", "SHOTS": 1, "LIMIT": None}
    if task == "gemma_gsm8k" and way in ("full", "limits"):
        values["METRICS"] = "('numeric_accuracy',)"
    assert main(words_of(way, pair, task, tmp_path, **values)) == 2
    error = capsys.readouterr().err
    assert re.search(f"{tmp_path}/(small|large): no such directory; check the path", error), error
    assert error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_the_paper_compares_its_methods_and_strengths(tmp_path):
    names = {"VERIFIER": "x", "DRAFTER": "y"}
    words = words_of("full", "pair_t5_small_large", "t5_wmt", tmp_path, **names)
    compare.register()
    files = [word.partition("=")[2] for word in words if word.startswith("--gin_file")]
    named = [word.removeprefix("--gin.") for word in words if word.startswith("--gin.")]
    gin_config.configure(files, named)
    settings = gin_config.call_part(study.Grid).settings()
    counts = collections.Counter(one.rule.partition("(")[0] for one in settings if not one.method)
    assert counts["OPT"] == counts["TokenV3"] == 10 and counts["Lossless"] == 1
    assert max(one.strength for one in settings if one.rule.startswith("BiLD")) == 10.0
    assert {(one.temperature, one.longest) for one in settings} == {(1.0, 5), (1.0, None)}
    assert {one.verification for one in settings} == {"Token", None}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (
            "pair_t5_small_large",
            r"is not t5_v1_1_(small|large): it has embed_dim (16|24) \(not",
        ),
        ("pair_gemma2_2b_9b", "is not gemma2_(2b|9b): it has a T5Config: give another directory"),
    ],
)
def test_a_checkpoint_of_another_size_is_refused(tmp_path, capsys, way, pair, words):
    paths = tiny_pair.write_pair(tmp_path / "pair")
    named = {name.upper(): path for name, path in paths.items()}
    assert main(words_of(way, pair, "t5_wmt", tmp_path, **named)) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_the_metrics_that_the_files_name_are_known():
    for path in FOLDER.glob("task_*_*.gin"):
        (named,) = re.findall(r'METRICS="(\(.*?\))"', path.read_text())
        assert set(re.findall(r"\w+", named)) <= set(METRICS)
