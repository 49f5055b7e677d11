"""What the endpoint answers is what a Decoder gives for the same options."""

import json

import numpy as np
import openai
import pytest

from specjax import processors
from specjax.text import Decoder, Setting
from specjax.types import Sampling
from tests.serving.conftest import KEY

PROMPT = "The sea is"
CHAT = [{"role": "user", "content": "Hello"}]


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_a_decoder(client, decoder, temperature):
    sampling = Sampling(temperature=temperature)
    prompts = [PROMPT, "Two dogs"]
    answer = client.answer(
        "completions", prompt=prompts, temperature=temperature, seed=5, n=2, max_tokens=20
    )
    expected = decoder(prompts, sampling=sampling, seed=5, num_samples=2, max_new_tokens=20)
    assert texts(answer) == expected.texts
    assert answer["usage"]["completion_tokens"] == expected.info.emitted
    assert answer["usage"]["prompt_tokens"] == sum(len(decoder.encode(x)) for x in prompts)
    assert answer["specjax"] == {"promise": "exact"}
    ids = client.answer(
        "completions",
        prompt=[decoder.encode(x).tolist() for x in prompts],
        temperature=temperature,
        seed=5,
        n=2,
        max_tokens=20,
    )
    assert texts(ids) == expected.texts


OPTIONS = {
    "top_k": ({"top_k": 3}, {"top_k": 3}, ()),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}, ()),
    "both": ({"top_k": 9, "top_p": 0.5}, {"top_k": 9, "top_p": 0.5}, ()),
    "min_p": ({"min_p": 0.3}, {}, (processors.MinP(0.3),)),
    "penalties": (
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
        {},
        (
            processors.PresencePenalty(1.5),
            processors.FrequencyPenalty(-0.5),
            processors.RepetitionPenalty(1.2),
        ),
    ),
    "logit_bias": (
        {"logit_bias": {"100": 30, "5": -9}}, {}, (processors.LogitBias({5: -9.0, 100: 30.0}),)
    ),
    "ignore_eos": ({"ignore_eos": True}, {}, (processors.MinNewTokens(20),)),
    "json": (
        {"response_format": {
            "type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}},
        {},
        (processors.JsonSchema({"type": "boolean"}),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_a_decoder(client, decoder, name):
    body, drawn, applied = OPTIONS[name]
    answer = client.answer("completions", prompt=PROMPT, seed=3, max_tokens=20, **body)
    plain = client.answer("completions", prompt=PROMPT, seed=3, max_tokens=20)
    own = Decoder(
        decoder.models,
        drafting="Lookup(min_match=2)",
        max_draft=3,
        max_new_tokens=24,
        sampling=Sampling(**drawn),
        processors=applied or None,
    )
    expected = own([PROMPT], seed=3, max_new_tokens=20)
    assert texts(answer) == expected.texts
    # The control: the option changes this text.
    assert texts(answer) != texts(plain)


def test_a_rule_and_a_draft_limit_are_of_one_request(client, decoder):
    rule = {"rule": "Lossy(0.5)"}
    answer = client.answer("completions", prompt=PROMPT, seed=3, max_tokens=20, specjax=rule)
    setting = Setting(rule="Lossy(0.5)", drafting="Lookup(min_match=2)", max_draft=3)
    own = Decoder(decoder.models, setting, max_new_tokens=24)
    expected = own([PROMPT], seed=3, max_new_tokens=20)
    assert texts(answer) == expected.texts
    info = expected.info.per_row
    gap = (info.log_prob_target - info.log_prob_processed).sum() / expected.info.emitted
    told = answer["specjax"]
    assert (told["promise"], told["rule"]) == ("approximate", "Lossy(0.5)")
    assert told["nats_per_token"] == pytest.approx(gap, abs=1e-6)
    short = {"draft_limit": 0}
    answer = client.answer("completions", prompt=PROMPT, seed=3, max_tokens=20, specjax=short)
    assert answer["metrics"] == {"speculative_decoding": None}


def test_rules_that_are_compiled_apart_are_not_mixed(client, decoder):
    for rule in ("TokenV2(0.9, top_k=1)", "TokenV2(0.9)", "TokenV2(0.5)"):
        body = {"prompt": PROMPT, "seed": 3, "max_tokens": 20, "specjax": {"rule": rule}}
        answer = client.answer("completions", **body)
        setting = Setting(rule=rule, drafting="Lookup(min_match=2)", max_draft=3)
        own = Decoder(decoder.models, setting, max_new_tokens=24)
        assert texts(answer) == own([PROMPT], seed=3, max_new_tokens=20).texts
        assert answer["specjax"]["rule"] == rule


def test_the_parts_of_a_content_are_a_text(client):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"temperature": 0, "max_tokens": 9}
    answers = [
        client.answer("chat/completions", messages=[{"role": "user", "content": each}], **body)
        for each in ("Hello", parts)
    ]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    assert answers[0]["choices"] == answers[1]["choices"]


def test_counts_of_drafts_are_those_of_the_rows(client, decoder):
    answer = client.answer("completions", prompt=PROMPT, temperature=0, max_tokens=24)
    info = decoder([PROMPT], sampling=Sampling(temperature=0.0)).info
    counts = answer["metrics"]["speculative_decoding"]
    assert counts["num_draft_tokens"] == info.drafted
    assert counts["num_accepted_draft_tokens"] == info.accepted
    steps = counts["num_spec_steps"]
    histogram = counts["acceptance_histogram"]
    assert sum(histogram) == steps and len(histogram) == counts["num_spec_tokens"] + 1
    assert counts["mean_acceptance_length"] == pytest.approx(1 + info.accepted / steps)


@pytest.mark.parametrize("chat", [False, True])
def test_streamed_parts_are_the_text(client, chat):
    path, body = ("chat/completions", {"messages": CHAT}) if chat else (
        "completions", {"prompt": [PROMPT, "a"]})  # fmt: skip
    body |= {"seed": 1, "max_tokens": 20, "n": 2}
    whole = client.answer(path, **body)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.stream(path, **body, stream_options=usage)
    end = chunks.pop()
    assert not end["choices"] and end["usage"] == whole["usage"]
    joined, reasons, counted = {}, {}, []
    for chunk in chunks:
        counted.append(chunk["usage"]["completion_tokens"] if chunk["usage"] else 0)
        for choice in chunk["choices"]:
            text = choice["delta"]["content"] if chat else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + text
            reasons[choice["index"]] = choice["finish_reason"]
    choices = whole["choices"]
    assert [joined[i] for i in range(len(choices))] == [
        choice["message"]["content"] if chat else choice["text"] for choice in choices
    ]
    assert [reasons[i] for i in range(len(choices))] == [x["finish_reason"] for x in choices]
    assert counted == sorted(counted) and counted[-1] == whole["usage"]["completion_tokens"]
    assert len(chunks) > 2 * len(choices)  # not all at once


def test_a_stop_string_is_not_shown(client, decoder):
    text = decoder([PROMPT], sampling=Sampling(temperature=0.0)).texts[0]
    stop = text[6:8]
    cut = text[: text.index(stop)]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stop": [stop, "never"]}
    answer = client.answer("completions", **body)
    assert texts(answer) == [cut] and answer["choices"][0]["finish_reason"] == "stop"
    parts = [chunk["choices"][0]["text"] for chunk in client.stream("completions", **body)]
    assert "".join(parts) == cut


def test_log_probabilities_are_the_verifiers(client, decoder):
    row = decoder([PROMPT], seed=2, max_new_tokens=12, log_probs=True, top_log_probs=3).rows[0]
    body = {"prompt": PROMPT, "seed": 2, "max_tokens": 12, "logprobs": 3}
    found = client.answer("completions", **body)["choices"][0]["logprobs"]
    np.testing.assert_allclose(found["token_logprobs"], row.log_probs, atol=1e-5)
    assert "".join(found["tokens"]) == row.text
    best = [max(each.values()) for each in found["top_logprobs"]]
    np.testing.assert_allclose(best, row.top.log_probs[:, 0], atol=1e-5)
    chat = client.answer(
        "chat/completions", messages=CHAT, seed=2, max_tokens=12, logprobs=True, top_logprobs=2
    )
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == chat["choices"][0]["message"]["content"]
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    (only,) = client.stream("completions", **body)  # with these a text comes at once
    assert only["choices"][0]["logprobs"] == found and only["choices"][0]["text"] == row.text


@pytest.mark.parametrize("most", [0, 1])
def test_prompts_are_scored_as_lm_eval_asks(client, decoder, most):
    ids = decoder.encode("The sea is blue").tolist()
    body = {"prompt": [ids, ids[:5]], "echo": True, "max_tokens": most, "logprobs": 1}
    answer = client.answer("completions", **body, temperature=0)
    for choice, tokens in zip(answer["choices"], body["prompt"], strict=True):
        found = choice["logprobs"]
        scores = decoder.score([tokens[:1]], [tokens[1:]], top_log_probs=1)
        end = len(tokens)
        assert found["token_logprobs"][0] is None and len(found["token_logprobs"]) == end + most
        np.testing.assert_allclose(found["token_logprobs"][1:end], scores.log_probs[0], atol=1e-5)
        greedy = [own == max(top.values()) for own, top in zip(
            found["token_logprobs"][1:end], found["top_logprobs"][1:end], strict=True)]  # fmt: skip
        assert greedy == [a == b[0] for a, b in zip(tokens[1:], scores.top[0].tokens, strict=True)]


def test_a_prediction_is_copied(client, decoder):
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 24}
    plain = client.answer("chat/completions", **body)
    text = plain["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": text}
    answer = client.answer("chat/completions", **body, prediction=prediction)
    assert answer["choices"][0]["message"]["content"] == text
    details = answer["usage"]["completion_tokens_details"]
    emitted = answer["usage"]["completion_tokens"]
    assert details["accepted_prediction_tokens"] > emitted / 2
    accepted = [x["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
                for x in (plain, answer)]  # fmt: skip
    assert accepted[1] > accepted[0]
    wrong = {"type": "content", "content": [{"type": "text", "text": "something else"}]}
    answer = client.answer("chat/completions", **body, prediction=wrong)
    assert answer["choices"][0]["message"]["content"] == text


def test_openai_python_reads_all_of_it(client):
    asking = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key=KEY)
    with asking:
        assert [model.id for model in asking.models.list()] == ["tiny"]
        assert asking.models.retrieve("tiny").owned_by == "specjax"
        chat = asking.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=12, seed=1, logprobs=True,
            top_logprobs=1,
        )  # fmt: skip
        assert chat.choices[0].finish_reason in ("length", "stop") and chat.usage.total_tokens > 12
        assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
        stream = asking.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=12, seed=1, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(parts) == chat.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens
        text = asking.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=5, temperature=0,
            extra_body={"specjax": {"draft_limit": 1}},
        )  # fmt: skip
        assert text.usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="max_tokens must be"):
            asking.completions.create(model="tiny", prompt=PROMPT, max_tokens=500)
        with pytest.raises(openai.NotFoundError, match="model must be 'tiny'"):
            asking.completions.create(model="gpt", prompt=PROMPT)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=asking.base_url, api_key="wrong").models.list()


def test_what_is_counted(client, decoder):
    before = client.counters()
    answer = client.answer("completions", prompt=PROMPT, temperature=0, max_tokens=24)
    after = client.counters()
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    counts = answer["metrics"]["speculative_decoding"]
    stem = "specjax:spec_decode_num"
    assert gained[f"{stem}_drafts_total"] == counts["num_spec_steps"]
    assert gained[f"{stem}_draft_tokens_total"] == counts["num_draft_tokens"]
    assert gained[f"{stem}_accepted_tokens_total"] == counts["num_accepted_draft_tokens"]
    histogram = counts["acceptance_histogram"]
    for place in range(3):
        name = f'{stem}_accepted_tokens_per_pos_total{{position="{place}"}}'
        assert gained[name] == sum(histogram[place + 1 :])
    assert gained["specjax:generation_tokens_total"] == answer["usage"]["completion_tokens"]
    assert gained['specjax:requests_total{route="/v1/completions",status="200"}'] == 1
    assert json.dumps(answer).count("NaN") == 0


def test_what_a_former_request_read_is_not_read_again(client, decoder):
    chat = [{"role": "user", "content": "Tell me of the sea and the ships"}]
    first = client.answer("chat/completions", messages=chat, temperature=0, max_tokens=8)
    text = first["choices"][0]["message"]["content"]
    chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
    second = client.answer("chat/completions", messages=chat, temperature=0, max_tokens=8)
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 32 < cached < usage["prompt_tokens"]
    tokens = decoder.encode(chat)
    sampling = Sampling(temperature=0.0)
    alone = decoder([tokens], sampling=sampling, max_new_tokens=8).texts
    assert [second["choices"][0]["message"]["content"]] == alone
