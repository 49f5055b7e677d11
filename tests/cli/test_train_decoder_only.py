import json
import random
from pathlib import Path

import pytest

import specjax
from specjax.checkpoints import load_model, save_model
from specjax.cli.main import main
from specjax.models import FAMILIES, CausalLM, model_from_config
from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.training.vocabulary import write_vocabulary
from specjax.types import Sampling
from tests.models.tiny import CONFIGS as TINY
from tests.models.tiny import random_params
from tests.variants import variants

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "gin_configs"
LLAMA = {
    "MODEL": "@LlamaConfig()",
    "LlamaConfig.vocab_size": 320,
    "LlamaConfig.embed_dim": 32,
    "LlamaConfig.num_heads": 2,
    "LlamaConfig.num_kv_heads": 1,
    "LlamaConfig.head_dim": 16,
    "LlamaConfig.mlp_dim": 32,
    "LlamaConfig.num_layers": 1,
}
SMALL = {
    "NUM_STEPS": 40,
    "LEARNING_RATE": 0.1,
    "WARMUP_STEPS": 20,
    "TOKENS_PER_BATCH": 512,
    "AdamW.relative": True,
    "Batching.bucket_lengths": "(48,)",
    "MAX_NEW_TOKENS": 24,
    "METRICS": "('exact_match',)",
    "TrainerConfig.ema_decay": 0.9,
    "TrainerConfig.checkpoint_every": 40,
    "TrainerConfig.log_every": 5,
    "TrainerConfig.num_devices": 1,
    "TrainerConfig.progress": False,
}
ANSWERS = {"ba": "ki\nlo", "de": "mu", "na": "po ri 12"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for name, count in (("train", 200), ("validation", 8)):
        questions = [rng.choice(list(ANSWERS)) for _ in range(count)]
        rows = [{"question": f"Say {q}?", "answer": ANSWERS[q]} for q in questions]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)
    return directory


def run(data, output, **changes):
    names = {
        "TRAIN": data / "train.jsonl",
        "VALIDATION": data / "validation.jsonl",
        "OUTPUT_DIR": output,
        **SMALL,
        **changes,
    }
    files = [CONFIGS / "runs/train.gin", CONFIGS / "tasks/question_answer.gin"]
    arguments = [f"--gin_file={file}" for file in files]
    return main(["train", *arguments, *(f"--gin.{name}={value}" for name, value in names.items())])


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert run(data, output, **LLAMA) == 0
    return output


def test_it_learns_the_answers_and_their_ends(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.2 * losses[0]
    decoder = specjax.Decoder(
        specjax.load_text_model(trained / "model"), sampling=Sampling(0.0), max_new_tokens=24
    )
    decoded = decoder([f"Say {question}?" for question in ANSWERS], progress=False)
    assert decoded.texts == [f" {answer}" for answer in ANSWERS.values()]
    assert decoded.ended.all()
    results = json.loads((trained / "results.json").read_text())
    assert results["validation_cut"] == 0
    assert results["validation_exact_match"] == 100.0
    model = CausalLM(load_model(trained / "model").config)
    assert model.num_params() == results["num_params"]


def test_transformers_reads_the_model_and_its_tokenizer(trained):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = trained / "model"
    ours = specjax.load_text_model(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    decoder = specjax.Decoder(ours, sampling=Sampling(0.0), max_new_tokens=24)
    prompts = [f"Say {question}?" for question in ANSWERS]
    for prompt, text in zip(prompts, decoder(prompts, progress=False).texts, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        assert ids == ours.tokenizer.encode(prompt)
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
        )[0]
        assert tokenizer.decode(output, skip_special_tokens=True) == prompt + text


SIZES = {
    "vocab_size": 320, "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "mlp_dim": 24, "num_layers": 1,
}  # fmt: skip
OF_ENCODER = {
    "T5GemmaConfig.sliding_window": 8,
    "T5GemmaConfig.encoder": "@encoder/Gemma2Config()",
    **{f"encoder/Gemma2Config.{field}": value for field, value in SIZES.items()},
    "encoder/Gemma2Config.embed_dim": 24,
    "encoder/Gemma2Config.sliding_window": 4,
}


@pytest.mark.parametrize("name", variants(["qwen3", "gemma3_text", "smollm3", "t5gemma"], "qwen3"))
def test_a_model_of_another_family_is_distilled(data, tmp_path, name):
    family = FAMILIES[name]
    teacher = family.config(**SIZES) if name != "t5gemma" else TINY[name].replace(vocab_size=320)
    words, place = tmp_path / "words", tmp_path / "teacher"
    write_vocabulary(words, "bytes", (), vocab_size=320, model_type=None)
    params = random_params(model_from_config(teacher))
    save_model(
        place, teacher, params, format="hf", tokenizer_from=words, special_ids=SpecialIds((1,), 0)
    )
    kind = family.config.__name__
    changes = {
        "MODEL": f"@{kind}()",
        **{f"{kind}.{field}": value for field, value in SIZES.items()},
        **(OF_ENCODER if name == "t5gemma" else {}),
        "NUM_STEPS": 10,
        "TEACHER": place,  # with its vocabulary
        "TEACHER_SAMPLES": 1,
        "DISTILLATION_WEIGHT": 1.0,
        "METRICS": "()",
    }
    assert run(data, tmp_path / "run", **changes) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(results) == {"step", "validation_loss", "num_params"}
    pair = specjax.load_pair(drafter=tmp_path / "run/model", verifier=place)
    assert isinstance(pair.drafter.model.config, family.config)
    decoder = specjax.Decoder(pair, max_new_tokens=8)
    assert len(decoder(["Say ba?"], progress=False).texts) == 1


def test_fine_tuning_takes_the_network_of_its_directory(data, trained, tmp_path):
    model = trained / "model"
    assert run(data, tmp_path, INIT_FROM=model, NUM_STEPS=1, METRICS="()") == 0
    assert load_model(tmp_path / "model").config == load_model(model).config
    before = json.loads((trained / "results.json").read_text())["validation_loss"]
    after = json.loads((tmp_path / "results.json").read_text())["validation_loss"]
    assert after == pytest.approx(before, abs=0.2)


@pytest.mark.parametrize(
    ("family", "marks"),
    [("llama", ["<unk>", "<s>", "</s>"]), ("gemma2", ["<pad>", "<eos>", "<bos>", "<unk>"])],
)
def test_a_trained_vocabulary_keeps_a_text_as_it_is(tmp_path, family, marks):
    texts = ["two  spaces", "a line\nand 1234 more", " begins with a space"] * 20
    write_vocabulary(
        tmp_path / "words", None, texts,
        vocab_size=300, model_type=None, family=family,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "words")
    assert [tokenizer.token(i) for i in range(len(marks))] == marks
    for text in [*texts[:3], "größer ☂"]:
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_id
        assert tokenizer.decode(ids) == text
    digits = [tokenizer.token(i) for i in tokenizer.encode("1234")]
    assert digits[-4:] == ["1", "2", "3", "4"]
    assert marks[tokenizer.eos_ids[0]] in ("</s>", "<eos>")
    with pytest.raises(ValueError, match=f"`vocabulary_type` of a {family} must be bpe, got 'uni"):
        write_vocabulary(
            tmp_path / "other", None, texts,
            vocab_size=300, model_type="unigram", family=family,
        )  # fmt: skip
