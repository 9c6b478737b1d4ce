"""`/generate` with ids of an earlier stream, and with prompts and constraints as records."""

import msgspec
import pytest

from sglang_lite.protocol import Choices, Generation, Prompt, SamplingParams, Span

SEEDED = {"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True}


def plain(record):
    """A record as the wire has it, without an envelope."""
    return msgspec.to_builtins(record)


def test_ids_so_far_are_continued(http):
    asked = {"text": "ab", "sampling_params": SEEDED}
    whole = http.post("/generate", json=asked).json()
    for cut in (1, 5, 12):
        again = http.post(
            "/generate", json={**asked, "output_ids": whole["output_ids"][:cut]}
        ).json()
        assert (again["text"], again["output_ids"]) == (whole["text"], whole["output_ids"])
        assert again["meta_info"]["continued_from"] == cut
    both = {
        "text": ["ab", "cd"],
        "sampling_params": SEEDED,
        "output_ids": [whole["output_ids"][:3], None],
    }
    assert http.post("/generate", json=both).json()[0]["text"] == whole["text"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"output_ids": [5000]}, "5000 is no token id"),
        ({"output_ids": [3] * 13}, "13 ids; the output has at most 12"),
        ({"output_ids": [3], "sampling_params": {**SEEDED, "n": 2}}, "n is 2"),
        (
            {"output_ids": [3], "sampling_params": {**SEEDED, "regex": "a+"}},
            "3 at index 0 can't be",
        ),
    ],
)
def test_ids_of_no_output_are_refused_by_name(http, more, said):
    for stream in (False, True):
        response = http.post(
            "/generate", json={"text": "ab", "sampling_params": SEEDED, **more, "stream": stream}
        )
        text = response.text
        assert said in text
        assert '"param":"output_ids"' in text
        assert response.status_code == 400


def test_records_stand_for_text_and_a_grammar(http, engine):
    prompt, constraint = (
        Prompt((Span("ab", (64, 65)), Span("cd", special=False))),
        Choices(("hello", "help")),
    )
    params = SamplingParams(max_tokens=12, seed=5, temperature=1.0)
    whole = engine.complete(prompt, params, constraint)
    body = {"prompt": plain(prompt), "constraint": plain(constraint), "sampling_params": {
        "max_new_tokens": 12, "sampling_seed": 5, "temperature": 1.0}}  # fmt: skip
    answer = http.post("/generate", json=body).json()
    assert answer["text"] == whole.text
    generation = msgspec.convert(answer["generation"], Generation)
    assert (generation.token_ids, generation.spans) == (whole.token_ids, whole.spans)
    assert (
        "generation"
        not in http.post("/generate", json={"text": "a", "sampling_params": SEEDED}).json()
    )


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"prompt": {"spans": [{"text": 3}]}}, "prompt.spans[0].text"),
        ({"prompt": {}}, "prompt.spans"),
        ({"prompt": {"spans": [{"text": "a"}]}, "text": "a"}, "prompt"),
        ({"prompt": {"spans": [{"text": "a"}]}, "input_ids": [3]}, "prompt"),
        ({"text": "a", "constraint": {"kind": "Nothing"}}, "constraint.kind"),
        ({"text": "a", "constraint": {"kind": "Regex", "pattern": "a"}, "sampling_params": {"regex": "a"}}, "constraint"),
        ({"prompt": {"spans": [{"text": "a", "ids": [9999]}]}}, "input_ids"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_by_its_place(http, body, parameter):
    response = http.post("/generate", json={"sampling_params": SEEDED, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == parameter, error
