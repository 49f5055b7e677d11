"""Clients that others wrote, by their own code: each gets the texts of the built-in pair.

guidellm and aiperf are commands: their libraries need environments of their own.
"""

import http.client
import json
import shutil
import subprocess
from contextlib import closing

import pytest

from specjax.text.directories import built_in_pair

PROMPTS = (
    "Ann has 3 apples and buys 4 more. How many apples has she now?",
    "Two dogs eat 5 bones each. How many bones is that?",
    "A train goes 60 miles in one hour.",
)
LENGTH = 12
KEY = "a key"


@pytest.fixture(params=["completions", "chat/completions"])
def route(request):
    return request.param


def body_of(route, prompt):
    if route == "completions":
        return {"prompt": prompt, "max_tokens": LENGTH}
    return {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": LENGTH}


def openai_python(port, route, directory):
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    found = {}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY) as asking:
        chats = route == "chat/completions"
        create = asking.chat.completions.create if chats else asking.completions.create
        for prompt in PROMPTS:
            *parts, end = create(
                model="tiny",
                **body_of(route, prompt),
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            assert end.usage.completion_tokens == LENGTH and not end.choices
            choices = [part.choices[0] for part in parts]
            found[prompt] = "".join(x.delta.content if chats else x.text for x in choices)
    return found


def vllm_bench_serve(port, route, directory):
    """What its endpoint_request_func.py sends and reads; vLLM itself needs a GPU."""
    found = {}
    for prompt in PROMPTS:
        body = body_of(route, prompt)
        if route == "completions":
            body |= {"repetition_penalty": 1.0, "logprobs": None}
        else:
            body["messages"][0]["content"] = [{"type": "text", "text": prompt}]
        body |= {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True, "temperature": 0.0}
        headers = {"Authorization": f"Bearer {KEY}", "x-request-id": "bench-0"}
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            connection.request("POST", f"/v1/{route}", json.dumps(body), headers)
            response = connection.getresponse()
            *messages, done, rest = response.read().decode().split("\n\n")
        assert (response.status, done, rest) == (200, "data: [DONE]", "")
        text, tokens = "", None
        for message in messages:
            chunk = json.loads(message.removeprefix("data: "))
            if choices := chunk.get("choices"):
                text += (
                    choices[0]["text"] if "text" in choices[0] else choices[0]["delta"]["content"]
                )
            elif usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
        assert tokens == LENGTH
        found[prompt] = text
    return found


def run(name, *words):
    command = shutil.which(name)
    if command is None:
        pytest.skip(f"{name} is not on PATH: pip install {name}, in an environment of its own")
    ran = subprocess.run([command, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def guidellm(port, route, directory):
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": x, "output_tokens_count": LENGTH}) + "\n" for x in PROMPTS)
    )
    backend = {
        "kind": "openai_http",
        "target": f"http://127.0.0.1:{port}",
        "request_format": f"/v1/{route}",
        "api_key": KEY,
        "extras": {"body": {"temperature": 0}},
    }
    run(
        "guidellm",
        "run",
        "--disable-console",
        f"--backend={json.dumps(backend)}",
        f"--data=kind=json_file,path={directory}/prompts.jsonl",
        f"--tokenizer=kind=huggingface_auto,model={built_in_pair('gsm8k')}/verifier",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={len(PROMPTS)}",
        f"--output=kind=json,path={directory}/report.json",
    )
    (report,) = json.loads((directory / "report.json").read_text())["benchmarks"]
    found = {}
    for row in report["requests"]["successful"]:
        assert row["output_metrics"]["text_tokens"] == LENGTH
        assert row["response_metrics"]["speculative_decoding"]["num_spec_steps"]
        body = json.loads(row["request_args"])["body"]
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"][0]["text"]
        found[prompt] = row["output"]
    return found


def aiperf(port, route, directory):
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS)
    )
    more = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    run(
        "aiperf",
        "profile",
        "--model=tiny",
        f"--url=http://127.0.0.1:{port}",
        f"--api-key={KEY}",
        f"--endpoint-type={'chat' if route == 'chat/completions' else 'completions'}",
        "--streaming",
        "--use-server-token-count",
        f"--tokenizer={built_in_pair('gsm8k')}/verifier",
        f"--input-file={directory}/prompts.jsonl",
        "--custom-dataset-type=single_turn",
        "--dataset-sampling-strategy=sequential",
        f"--request-count={len(PROMPTS)}",
        f"--extra-inputs={json.dumps(more)}",
        "--export-outputs-json",
        "--no-gpu-telemetry",
        "--ui=none",
        f"--output-artifact-dir={directory}/aiperf",
    )
    (outputs,) = directory.glob("aiperf/**/outputs.json")
    (summary,) = directory.glob("aiperf/**/profile_export_aiperf.json")
    told = json.loads(summary.read_text())
    assert told["request_count"]["avg"] == len(PROMPTS)
    assert told["spec_decode_acceptance_length"]["avg"] > 1
    rows = json.loads(outputs.read_text())["data"]
    return {prompt: row["response_text"] for prompt, row in zip(PROMPTS, rows, strict=True)}


@pytest.mark.parametrize("ask", [openai_python, vllm_bench_serve, guidellm, aiperf])
def test_a_client_gets_the_texts(ask, route, client, tmp_path):
    expected = {}
    for prompt in PROMPTS:
        answer = client.answer(route, **body_of(route, prompt), temperature=0, ignore_eos=True)
        (choice,) = answer["choices"]
        expected[prompt] = choice["text"] if "text" in choice else choice["message"]["content"]
    assert ask(client.port, route, tmp_path) == expected
    assert len(set(expected.values())) == len(PROMPTS)
