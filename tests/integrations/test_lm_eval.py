"""lm-eval scores and writes the same by the adapter and through the endpoint."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm_eval[api]'")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from specjax.errors import UserError
from specjax.integrations import lm_eval as adapter
from specjax.text.directories import built_in_pair
from tests.serving.conftest import KEY

LENGTH = 62
LONG = "Ann has 3 apples and buys 4 more. How many apples has she now? " * 4
PAIRS = [
    ("Ann has 3 apples and buys 4.", " She has 7"),
    ("", "Two dogs"),
    ("One and one is ", "two"),
    (LONG, " 7"),
]


@pytest.fixture(scope="module")
def own():
    parts = {name: f"built-in:gsm8k/{name}" for name in ("verifier", "drafter")}
    words = ",".join(f"{name}={value}" for name, value in parts.items())
    assert get_model("specjax") is adapter.SpecjaxLM
    return adapter.SpecjaxLM.create_from_arg_string(
        f"{words},max_draft=3,max_length={LENGTH},max_gen_toks=12", {"batch_size": "3"}
    )


@pytest.fixture(params=[1, 3])
def remote(request, client, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return LocalCompletionsAPI(
        model="tiny",
        base_url=f"http://127.0.0.1:{client.port}/v1/completions",
        tokenizer=str(built_in_pair("gsm8k") / "verifier"),
        tokenizer_backend="huggingface",
        add_bos_token=True,
        # It counts the token that the endpoint draws, and in windows one more.
        max_length=LENGTH + 2,
        max_gen_toks=12,
        num_concurrent=request.param,
        batch_size=2,
    )


def requests(kind, *args):
    return [Instance(kind, {}, each, i) for i, each in enumerate(args)]


def test_scores_are_the_same(own, remote):
    asked = requests("loglikelihood", *PAIRS)
    mine, theirs = (model.loglikelihood(asked, disable_tqdm=True) for model in (own, remote))
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
    np.testing.assert_allclose([x for x, _ in mine], [x for x, _ in theirs], rtol=1e-4)
    best = own.generate_until(requests("generate_until", (PAIRS[0][0], {"until": []})))[0]
    (greedy,) = own.loglikelihood(requests("loglikelihood", (PAIRS[0][0], best)))
    assert greedy[1] and not mine[0][1]


def test_windows_of_a_long_text_are_the_same(own, remote):
    remote.add_bos_token = False  # it is the prefix of the first window
    asked = requests("loglikelihood_rolling", ("Two dogs play.",), (LONG,))
    mine, theirs = (
        model.loglikelihood_rolling(asked, disable_tqdm=True) for model in (own, remote)
    )
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)
    assert len(own.tok_encode(LONG)) > LENGTH and mine[1] < mine[0] < 0


def test_outputs_are_the_same(own, remote):
    whole = own.generate_until(
        requests("generate_until", (LONG, {"until": []})), disable_tqdm=True
    )[0]
    stop = whole[3:5]
    options = ({"until": [stop]}, {"until": stop, "max_gen_toks": 4}, {"until": ["never"]})
    asked = requests("generate_until", *((LONG, each) for each in options))
    mine, theirs = (model.generate_until(asked, disable_tqdm=True) for model in (own, remote))
    assert mine == theirs
    assert mine[0] == whole[: whole.index(stop)] and mine[2] == whole
    assert len(own.tok_encode(mine[1])) < len(own.tok_encode(whole))


def test_chats_are_answered(client, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    url = f"http://127.0.0.1:{client.port}/v1/chat/completions"
    remote = LocalChatCompletion(model="tiny", base_url=url, max_gen_toks=12)
    chat = [{"role": "user", "content": LONG[:60]}]
    prompt = remote.apply_chat_template(chat)
    asked = requests("generate_until", (prompt, {"until": ["\n"], "do_sample": False}))
    body = {"messages": chat, "max_tokens": 12, "temperature": 0, "stop": "\n"}
    (choice,) = client.answer("chat/completions", **body)["choices"]
    assert remote.generate_until(asked, disable_tqdm=True) == [choice["message"]["content"]]


def test_a_chat_has_one_first_token(own, monkeypatch):
    words = own._decoder.tokenizer
    monkeypatch.setattr(words, "chat_template", "{{ bos_token }}{{ messages[0].content }}")
    text = own.apply_chat_template([{"role": "user", "content": "Two dogs"}])
    for each in (text, "Two dogs"):
        ids = own.tok_encode(each)
        assert ids[0] == own.prefix_token_id and ids.count(ids[0]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafer": "x"}, "did you mean drafter='x'"),
        ({"batch_size": "auto"}, "batch_size must be"),
        ({"max_length": 10**6}, "max_length must"),
        ({"rule": "Magic()"}, "Magic"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        adapter.SpecjaxLM(**options)


def test_an_unknown_option_of_a_task_is_named(own):
    asked = requests("generate_until", ("Two dogs", {"until": [], "num_beams": 3}))
    with pytest.raises(TypeError, match="num_beams"):
        own.generate_until(asked, disable_tqdm=True)


def test_the_command_runs_a_task(own, tmp_path):
    questions = ["What is 2 plus 2?", "How many legs have two dogs?"]
    lines = (json.dumps({"question": question}) + "\n" for question in questions)
    (tmp_path / "questions.jsonl").write_text("".join(lines))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "doc_to_text": "{{question}}",
        "doc_to_target": "four",
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    pair = "verifier=built-in:gsm8k/verifier,drafter=built-in:gsm8k/drafter,max_draft=3"
    words = ["--model=specjax", f"--model_args={pair}", "--tasks=sums", "--batch_size=3"]
    words += [f"--include_path={tmp_path}", f"--output_path={tmp_path}/out", "--log_samples"]
    command = [sys.executable, "-m", "specjax.integrations.lm_eval", "run", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (samples,) = tmp_path.glob("out/**/samples_sums_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    asked = requests("generate_until", *((x, {"until": ["\n"]}) for x in questions))
    outputs = own.generate_until(asked, disable_tqdm=True)
    assert [row["resps"] for row in rows] == [[[output]] for output in outputs]
