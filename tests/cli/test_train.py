import json
from pathlib import Path

import pytest

from specjax.checkpoints import load_model
from specjax.cli.main import main
from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.load import keep_sentinels
from specjax.training.vocabulary import write_vocabulary

ROOT = Path(__file__).parents[2]
FILES = [
    f"--gin_file={ROOT / 'gin_configs/runs/train.gin'}",
    f"--gin_file={Path(__file__).parent / 'tiny_train.gin'}",
]


def run(data, output, *bindings):
    return main(
        ["train", *FILES, f"--gin.DATA_DIR={data}", f"--gin.OUTPUT_DIR={output}"]
        + [f"--gin.{binding}" for binding in bindings]
    )


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert run(data, output, "EXPORT_DTYPE=float16") == 0
    return output


def test_it_leaves_a_hugging_face_directory_and_its_scores(trained):
    results = json.loads((trained / "results.json").read_text())
    assert set(results) == {
        "step", "validation_loss", "num_params",
        "validation_bleu", "validation_cut", "test_bleu", "test_cut",
    }  # fmt: skip
    assert results["validation_bleu"] == results["test_bleu"]
    loaded = load_model(trained / "model")
    assert loaded.format == "hf"
    assert loaded.model.num_params() == results["num_params"]
    assert loaded.special_ids.eos == (1,)
    tokenizer = load_tokenizer(trained / "model")
    assert tokenizer.decode(tokenizer.encode("ba ki")) == "ba ki"
    assert (trained / "model" / "model.safetensors").stat().st_size < 2.3 * results["num_params"]


def test_the_same_command_gives_the_same_result_again(data, trained, capsys):
    before = (trained / "results.json").read_text()
    assert run(data, trained, "EXPORT_DTYPE=float16") == 0
    assert (trained / "results.json").read_text() == before
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == json.loads(before)
    assert f"--gin.VERIFIER={trained}/model" in captured.err.splitlines()[-1]


def test_fine_tuning_starts_from_a_models_directory(data, trained, tmp_path):
    model = trained / "model"
    assert run(data, tmp_path, f"INIT_FROM={model}", "NUM_STEPS=2", "SEED=5") == 0
    before = json.loads((trained / "results.json").read_text())["validation_loss"]
    after = json.loads((tmp_path / "results.json").read_text())["validation_loss"]
    assert after == pytest.approx(before, abs=0.1)
    assert load_tokenizer(tmp_path / "model").fingerprint == load_tokenizer(model).fingerprint


def test_a_drafter_learns_on_policy_and_is_chosen_by_what_is_accepted(
    data, trained, tmp_path, capsys
):
    bindings = [
        f"TEACHER={trained / 'model'}", "DISTILLATION_WEIGHT=1.0", "DIVERGENCE=total_variation",
        "ON_POLICY_SHARE=0.5", "CHOOSE_BY=accepted_sampled", "TrainerConfig.progress=True",
        "ACCEPTED=('greedy',)", "ACCEPTED_DRAFT=3", "METRICS=()",
    ]  # fmt: skip
    assert run(data, tmp_path, *bindings) == 0
    # The default would never draw in so short a run.
    shown = capsys.readouterr().err
    assert "reduced refresh_every from 200 to 10, half of num_steps=20" in shown
    # The teacher is the verifier of what was distilled from it.
    assert shown.splitlines()[-1] == (
        f"specjax: next: specjax infer --gin.VERIFIER={trained}/model "
        f"--gin.DRAFTER={tmp_path}/model --gin.INPUT=FILE --gin.OUTPUT_DIR=RUN"
    )
    names = sorted(p.name.rpartition("-")[0] for p in (tmp_path / "samples").iterdir())
    assert names == ["student-10", "validation-greedy", "validation-sampled"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row for row in rows if "validation_loss" in row}
    figures = {step: row["validation_accepted_sampled"] for step, row in measured.items()}
    assert all(0.0 < figure < 3.0 for figure in figures.values())
    assert all(0.0 <= row["validation_accepted_greedy"] <= 3.0 for row in measured.values())
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["validation_accepted_sampled"] == max(figures.values())
    assert figures[results["step"]] == max(figures.values())


def test_another_configuration_and_another_vocabulary_are_refused(data, trained, tmp_path, capsys):
    model, distil = trained / "model", "DISTILLATION_WEIGHT=1.0"
    for output, bindings, message in (
        (trained, ["SEED=3"], "seed: 0 there, 3 here"),
        (trained, ["T5Config.vocab_size=64"], "task.model.vocab_size: 40 there, 64 here"),
        (trained, ["VOCABULARY=bytes"], "vocabulary=bytes differs from the vocabulary"),
        (
            tmp_path,
            [f"TEACHER={model}", distil, "VOCABULARY=bytes"],
            "another vocabulary than this",
        ),
    ):
        assert run(data, output, *bindings) == 2
        error = capsys.readouterr().err
        assert message.lower() in error.lower() and error.count("\n") == 1
    # That start left no trace which would bind the next one.
    assert run(data, tmp_path, f"TEACHER={model}", distil, "NUM_STEPS=1") == 0


@pytest.mark.exhaustive
def test_an_embedding_with_rows_to_spare_keeps_the_vocabulary(data, tmp_path):
    """T5's sentinels are implied by the embedding's rows; the run's own files must not."""
    bindings = ["T5Config.vocab_size=200", "NUM_STEPS=1"]
    assert run(data, tmp_path / "verifier", *bindings) == 0
    model = tmp_path / "verifier" / "model"
    kept = load_tokenizer(tmp_path / "verifier" / "tokenizer")
    assert load_tokenizer(model).fingerprint == kept.fingerprint
    assert kept.vocab_size < 100
    assert run(data, tmp_path / "drafter", *bindings, f"TEACHER={model}", "TEACHER_SAMPLES=1") == 0
    drafter = load_tokenizer(tmp_path / "drafter" / "model")
    assert drafter.fingerprint == kept.fingerprint
    assert run(data, tmp_path / "tuned", f"INIT_FROM={model}", "MODEL=None", bindings[1]) == 0
    assert load_model(tmp_path / "tuned" / "model").config == load_model(model).config


def test_a_vocabulary_may_be_one_file_of_any_name(trained, tmp_path):
    expected, source = load_tokenizer(trained / "model"), tmp_path / "mine.model"
    source.write_bytes((trained / "model" / "spiece.model").read_bytes())
    write_vocabulary(tmp_path / "a", source, [], vocab_size=40, model_type="bpe")
    keep_sentinels(tmp_path / "a", 160)  # as an export does, whose rows to spare are no sentinels
    found = load_tokenizer(tmp_path / "a")
    assert found.fingerprint == expected.fingerprint
    assert (found.eos_ids, found.pad_id) == (expected.eos_ids, expected.pad_id)


def test_sentinels_that_only_the_embedding_tells_are_kept(trained, tmp_path):
    source, options = tmp_path / "source", {"vocab_size": 160, "model_type": "bpe"}
    source.mkdir()
    (source / "spiece.model").write_bytes((trained / "model" / "spiece.model").read_bytes())
    (source / "config.json").write_text('{"model_type": "t5", "vocab_size": 160}')
    expected = load_tokenizer(source)
    assert expected.encode("<extra_id_0>")[0] > 100
    for name, place in (("a", source), ("b", source / "spiece.model")):
        write_vocabulary(tmp_path / name, place, [], **options)
        assert load_tokenizer(tmp_path / name).fingerprint == expected.fingerprint
    (source / "added_tokens.json").write_text('{"<mark>": 160}')
    with pytest.raises(ValueError, match="depends on files beside it; give the directory instead"):
        write_vocabulary(tmp_path / "c", source / "spiece.model", [], **options)
    assert not (tmp_path / "c").exists()


def test_a_damaged_line_costs_only_itself(data, tmp_path, capsys):
    source = data / "damaged.tsv"
    source.write_text((data / "validation.tsv").read_text() + "ba " * 33_333 + "\tba\n")
    bindings = [
        "training/read_examples.source='damaged.tsv'",
        "validation/read_examples.source='damaged.tsv'",
        "TrainerConfig.progress=True", "NUM_STEPS=1",
    ]  # fmt: skip
    assert run(data, tmp_path, *bindings) == 0
    told = capsys.readouterr().err
    assert "1 of 13 training pairs, which are longer than the last bucket (24 tokens)" in told
    assert "1 of 13 validation pairs, which are longer than the last bucket (24 tokens)" in told
    assert "skipped 1 of 13 validation inputs, which are empty or longer than 512 tokens" in told


@pytest.mark.parametrize(
    ("model", "task"),
    [("t5_mini", "aligned_text"), ("t5_v1_1_small", "fields"), ("llama_mini", "question_answer")],
)
def test_shipped_files_make_a_run(tmp_path, capsys, task, model):
    """All but the training: the network is made, and the text is read and found too long."""
    configs = ROOT / "gin_configs"
    files = [configs / "runs/train.gin", configs / f"models/{model}.gin"]
    (tmp_path / "a.txt").write_text("ba ki\nki\n")
    (tmp_path / "a.tsv").write_text("ba ki\tki\n")
    (tmp_path / "a.jsonl").write_text('{"question": "ba ki", "answer": "ki"}\n')
    named = dict.fromkeys(("TRAIN", "VALIDATION"), "a.tsv" if task == "fields" else "a.jsonl")
    if task == "aligned_text":
        named = {f"{k}_{side}": "a.txt" for k in named for side in ("INPUTS", "TARGETS")}
    bindings = {name: tmp_path / file for name, file in named.items()}
    bindings |= {"OUTPUT_DIR": tmp_path / "run", "VOCABULARY": "bytes"}
    bindings["Batching.bucket_lengths"] = "(1,)"
    arguments = [f"--gin_file={file}" for file in [*files, configs / f"tasks/{task}.gin"]]
    assert main(["train", *arguments, *(f"--gin.{n}={v}" for n, v in bindings.items())]) == 2
    count = 2 if task == "aligned_text" else 1
    assert f"all {count} pairs are longer than 1 tokens" in capsys.readouterr().err
