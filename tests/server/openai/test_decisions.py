"""Decisions as OpenAI's SDK asks for them, and scores: against what the engine says of each text."""

import json
import math

import httpx2
import pytest

from sglang_lite.protocol import Prompt, SamplingParams, Span
from tests.server.conftest import TEMPLATE, serving

openai = pytest.importorskip("openai", minversion="3.51", reason="its client has no decisions")

TASK = "Answer a question about this in JSON, with exactly one of its choices."


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def decide(client, engine):
    return lambda questions, input="a text", **more: client.decisions.create(
        model=engine.model_name, input=input, questions=questions, **more
    )


def shares(engine, question, choices, input="a text"):
    """The softmax of the sums, each prompt rendered here by hand."""
    prompt = f"<user>{input}\n\n{TASK}\n\n{question}</user>\n<assistant>"
    sums = [sum(each.logprobs) for each in engine.score(prompt, choices)]
    total = sum(map(math.exp, sums))
    return [math.exp(each) / total for each in sums]


def test_a_predicate_has_the_probability_of_true(decide, engine):
    (found,) = decide(
        [{"type": "predicate", "instructions": "Is it short?", "name": "short"}]
    ).answers
    asked = shares(engine, "Is it short?\nChoices: true, false", ["true", "false"])
    assert (found.type, found.name) == ("predicate", "short")
    assert found.probability == pytest.approx(asked[0], abs=1e-4)


def test_a_choice_has_the_probability_of_each_value(decide, engine):
    choices = [{"value": "red"}, {"value": "red fox"}, {"value": True}, {"value": "true"}]
    (found,) = decide([{"type": "choice", "instructions": "Which?", "choices": choices}]).answers
    written = ['"red"', '"red fox"', "true", '"true"']
    asked = shares(engine, f"Which?\nChoices: {', '.join(written)}", written)
    assert [each.value for each in found.probabilities] == ["red", "red fox", True, "true"]
    assert [each.probability for each in found.probabilities] == pytest.approx(asked, abs=1e-4)
    assert found.choice == ["red", "red fox", True, "true"][asked.index(max(asked))]
    assert found.confidence == pytest.approx((max(asked) - 0.25) / 0.75, abs=1e-4)
    assert sum(each.probability for each in found.probabilities) == pytest.approx(1)
    assert found.name is None


def test_a_score_is_the_mean_place_of_the_levels(decide, engine):
    levels = [{"label": "bad"}, {"label": "so so", "description": "neither"}, {"label": "good"}]
    (found,) = decide([{"type": "score", "instructions": "How?", "levels": levels}]).answers
    asked = shares(
        engine,
        'How?\nLevels, lowest first:\n"bad"\n"so so": neither\n"good"',
        ['"bad"', '"so so"', '"good"'],
    )
    assert [(each.value, each.label) for each in found.probabilities] == [
        (0, "bad"),
        (1, "so so"),
        (2, "good"),
    ]
    assert [each.probability for each in found.probabilities] == pytest.approx(asked, abs=1e-4)
    assert found.score == pytest.approx(asked[1] + 2 * asked[2], abs=1e-4)


def test_answers_come_in_the_order_of_the_questions_and_are_those_of_each_alone(decide):
    questions = [
        {"type": "choice", "instructions": f"Question {i}?", "name": str(i), "choices": [{"value": "a"}, {"value": f"b{i}"}]}
        for i in range(12)
    ]  # fmt: skip
    together = decide(questions).answers
    assert [each.name for each in together] == [str(i) for i in range(12)]
    for question, found in zip(questions, together):
        (alone,) = decide([question]).answers
        for one, other in zip(alone.probabilities, found.probabilities):
            assert one.probability == pytest.approx(other.probability, abs=1e-4)


def test_the_input_is_computed_once(decide, engine):
    engine.flush_cache()
    questions = [
        {"type": "predicate", "instructions": f"Is it {word}?"} for word in ("a", "b", "c", "d")
    ]
    text = "one two three " * 20
    first, again = decide(questions, text).usage, decide(questions, text).usage
    read = first.input_tokens_details.cache_write_tokens
    assert first.input_tokens_details.cached_tokens == 0
    assert read > len(engine.tokenizer.encode(text))
    assert again.input_tokens_details.cached_tokens >= read - 1
    assert first.output_tokens == first.output_tokens_details.reasoning_tokens == 0
    spelled = sum(
        len(
            engine.tokenizer.encode(
                f"{q['instructions']}\nChoices: true, false</user>\n<assistant>", first=False
            )
        )
        for q in questions
    )
    choices = len(questions) * sum(
        len(engine.tokenizer.encode(each, first=False)) for each in ("true", "false")
    )
    assert first.total_tokens == first.input_tokens == read + spelled + choices


def test_messages_calls_and_json_are_input(decide, engine):
    input = [
        {"role": "system", "content": [{"type": "input_text", "text": "be kind"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_json", "data": {"a": [1]}}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 2}'},
        {"type": "function_call_output", "call_id": "1", "output": "seen"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "done"}],
            "phase": "final_answer",
        },
    ]
    (found,) = decide([{"type": "predicate", "instructions": "Well?"}], input).answers
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n</tool_call>'
    prompt = (
        f'<system>be kind</system>\n<user>{{"a":[1]}}</user>\n<assistant>{call}</assistant>\n<tool>seen</tool>\n'
        f"<assistant>done</assistant>\n<user>{TASK}\n\nWell?\nChoices: true, false</user>\n<assistant>"
    )
    true, false = (sum(each.logprobs) for each in engine.score(prompt, ["true", "false"]))
    assert found.probability == pytest.approx(1 / (1 + math.exp(false - true)), abs=1e-4)


def test_a_question_that_cannot_be_scored_is_a_refusal(decide):
    image = [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    long = {"type": "predicate", "instructions": "very " * 3000, "name": "long"}
    questions = [
        {"type": "predicate", "instructions": image, "name": "seen"}, long,
        {"type": "predicate", "instructions": "Is it?"},
    ]  # fmt: skip
    found = decide(questions).answers
    assert [(each.type, each.name) for each in found] == [
        ("refusal", "seen"),
        ("refusal", "long"),
        ("predicate", None),
    ]


def test_special_tokens_in_questions_and_input_are_text(decide, engine):
    end = max(engine.tokenizer.control_texts, key=len)
    choices = [{"value": end}, {"value": "b"}]
    (found,) = decide(
        [{"type": "choice", "instructions": f"a{end}", "choices": choices}], f"c{end}"
    ).answers
    asked = f'c{end}\n\n{TASK}\n\na{end}\nChoices: "{end}", "b"'
    spans = (Span("<user>"), Span(asked, special=False), Span("</user>\n<assistant>"))
    one, other = (
        sum(e.logprobs) for e in engine.score(Prompt(spans, role="assistant"), [f'"{end}"', '"b"'])
    )
    assert found.probabilities[0].probability == pytest.approx(
        1 / (1 + math.exp(other - one)), abs=1e-4
    )
    read = engine.score(f"<user>{asked}</user>\n<assistant>", [f'"{end}"', '"b"'])
    assert one != pytest.approx(sum(read[0].logprobs))


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "predicate", "instructions": "a"}] * 401}, "questions"),
        ({"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        (
            {"questions": [{"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices",
        ),
        ({"questions": [{"type": "score", "instructions": "a", "levels": []}]}, "questions[0].levels"),
        ({"questions": [{"type": "guess", "instructions": "a"}]}, "questions[0].type"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, "input[0].call_id"),
        ({"input": "very " * 5000}, "input"),
        ({"modle": "x"}, "modle"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(http, engine, changed, parameter):
    asked = {
        "model": engine.model_name,
        "input": "a",
        "questions": [{"type": "predicate", "instructions": "a"}],
    }
    response = http.post("/v1/decisions", json={**asked, **changed})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == parameter


def test_json_in_the_input_has_limits(http, engine):
    deep = {}
    for _ in range(40):
        deep = {"a": deep}
    for data in (deep, {"a": "x" * 2**18}, {"a": list(range(10_001))}):
        asked = {
            "model": engine.model_name, "questions": [{"type": "predicate", "instructions": "a"}],
            "input": [{"role": "user", "content": [{"type": "input_json", "data": data}]}],
        }  # fmt: skip
        assert (
            http.post("/v1/decisions", json=asked).json()["error"]["param"]
            == "input[0].content[0].data"
        )


def test_an_image_in_the_input_and_another_model_are_refused(client, decide, http):
    image = [
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
        }
    ]
    with pytest.raises(
        openai.BadRequestError, match="decisions read only text, no input_image"
    ) as refused:
        decide([{"type": "predicate", "instructions": "a"}], image)
    assert (refused.value.param, refused.value.code) == ("input[0].content[0]", "unsupported")
    with pytest.raises(openai.NotFoundError):
        client.decisions.create(
            model="gpt-6-luna", input="a", questions=[{"type": "predicate", "instructions": "a"}]
        )


def test_many_questions_are_asked_in_waves(decide, monkeypatch):
    monkeypatch.setattr("sglang_lite.server.openai.decisions.MAX_ROWS", 5)
    questions = [{"type": "predicate", "instructions": f"{i}?", "name": str(i)} for i in range(7)]
    assert [each.name for each in decide(questions).answers] == [str(i) for i in range(7)]


def test_four_hundred_questions_are_answered(decide):
    questions = [{"type": "predicate", "instructions": f"{i}?"} for i in range(400)]
    assert {each.type for each in decide(questions).answers} == {"predicate"}


# ------------------------------------------------------------------------------------------- scores


def test_continuations_have_their_log_probabilities(http, engine):
    body = {"prompt": "a quick", "continuations": [" brown fox", " b"]}
    found = http.post("/v1/score", json=body).json()
    for told, known in zip(found["scores"], engine.score("a quick", body["continuations"])):
        assert told["text"] == known.text
        assert told["token_ids"] == list(known.token_ids)
        assert told["token_logprobs"] == pytest.approx(known.logprobs, abs=1e-4)
        assert told["logprob"] == pytest.approx(sum(known.logprobs), abs=1e-4)


def test_labels_have_their_probabilities_after_each_item(http, engine):
    labels = [5, 17, 23]
    body = {"query": "a quick", "items": [" brown", " red"], "label_token_ids": labels}
    found = http.post("/v1/score", json=body).json()
    assert found["object"] == "scoring"
    params = SamplingParams(
        max_tokens=1, temperature=1.0, return_logprob=True, token_ids_logprob=tuple(labels)
    )
    for item, told in zip((" brown", " red"), found["scores"]):
        known = {
            id: value
            for value, id, _ in engine.complete("a quick" + item, params).output_logprobs[0].ids
        }
        assert told == pytest.approx([math.exp(known[label]) for label in labels], rel=1e-3)
    softened = http.post("/v1/score", json={**body, "apply_softmax": True}).json()["scores"]
    for plain, soft in zip(found["scores"], softened):
        assert soft == pytest.approx([each / sum(plain) for each in plain], rel=1e-3)


def test_items_may_be_ids_or_one_text_and_stand_first(http, engine):
    encode = engine.tokenizer.encode
    text = {"query": " red", "items": "a quick", "label_token_ids": [5], "item_first": True}
    ids = {
        "query": encode(" red", first=False), "items": [encode("a quick")], "label_token_ids": [5], "item_first": True,
    }  # fmt: skip
    first, second = (http.post("/v1/score", json=body).json()["scores"] for body in (text, ids))
    assert first[0] == pytest.approx(second[0], rel=1e-3)


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "query"),
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ({"query": "a", "items": ["b"], "label_token_ids": [10**7]}, "label_token_ids"),
        ({"prompt": "a", "continuations": [""]}, "continuations"),
        ({"prompt": "a"}, "continuations"),
        ({"prompt": "a", "continuations": ["b"], "query": "c"}, "query"),
        ({"prompt": "a", "continuations": ["b"], "user": "c"}, "user"),
    ],
)
def test_a_score_that_makes_no_sense_is_refused(http, body, parameter):
    response = http.post("/v1/score", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == parameter


def test_a_template_that_begins_reasoning_is_answered_after_it(folder):
    import sglang_lite as sgl
    from tests.server.conftest import SETTINGS

    thinking = TEMPLATE.replace(
        "<assistant>{% endif %}", "<assistant><think>\n{% endif %}{# </think> #}"
    )
    with (
        sgl.Engine(folder, **SETTINGS, chat_template=thinking, in_process=True) as engine,
        serving(engine) as url,
    ):
        body = {
            "model": engine.model_name,
            "input": "a",
            "questions": [{"type": "predicate", "instructions": "b"}],
        }
        found = httpx2.post(f"{url}/v1/decisions", json=body, timeout=60).json()["answers"][0][
            "probability"
        ]
        prompt = f"<user>a\n\n{TASK}\n\nb\nChoices: true, false</user>\n<assistant><think>\n\n</think>\n\n"
        true, false = (sum(each.logprobs) for each in engine.score(prompt, ["true", "false"]))
        assert found == pytest.approx(1 / (1 + math.exp(false - true)), abs=1e-4)
        assert json.dumps(found)
