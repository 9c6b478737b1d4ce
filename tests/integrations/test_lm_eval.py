"""Scores and answers of lm-evaluation-harness, beside its own model `hf`."""

import json
import random
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: `make test-clients` installs it")

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM

import sglang_lite as sgl
from sglang_lite.integrations.lm_eval import SglangLiteLM

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own


@pytest.fixture(scope="module")
def ours(engine):
    return SglangLiteLM(engine)


@pytest.fixture(scope="module")
def theirs(model_file):
    return HFLM(
        str(model_file.parent),
        gguf_file=model_file.name,
        dtype="float32",
        device="cpu",
        batch_size=8,
    )


def asked(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


PAIRS = (
    ("The capital of France is", " Paris"), ("The capital of France is", " London"),
    ("The capital of France is", " a city called Lyon"), ("The capital of France is ", "Paris"),
    ("", "Once upon a time"), ("2 + 2 =", " 4"), ("2 + 2 =", " 5, or so they say"), ("A <|im_end|> B", " C"),
)  # fmt: skip


def test_scores_are_those_of_transformers(ours, theirs):
    found = ours.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    expected = theirs.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    assert [each[0] for each in found] == pytest.approx([each[0] for each in expected], abs=1e-4)
    assert [each[1] for each in found] == [each[1] for each in expected]


def test_a_text_longer_than_the_context_is_scored_in_windows(model_file, theirs, monkeypatch):
    text = "It was the best of times, it was the worst of times. " * 12
    monkeypatch.setattr(type(theirs), "max_length", 64)
    with sgl.Engine(dtype="float32", in_process=True, context_length=65) as engine:
        model = SglangLiteLM(engine)
        assert model.max_length == 65
        monkeypatch.setattr(SglangLiteLM, "max_length", 64)
        found = model.loglikelihood_rolling(
            asked("loglikelihood_rolling", (text,)), disable_tqdm=True
        )
    expected = theirs.loglikelihood_rolling(
        asked("loglikelihood_rolling", (text,)), disable_tqdm=True
    )
    assert found == pytest.approx(expected, abs=1e-3)  # of 160 tokens


def test_answers_end_where_the_task_says(ours, theirs):
    requests = asked(
        "generate_until", ("The capital of France is", {"until": ["."], "max_gen_toks": 12}),
        ("One, two,", {"until": ["\n"], "max_gen_toks": 8}),
    )  # fmt: skip
    assert ours.generate_until(requests, disable_tqdm=True) == theirs.generate_until(
        requests, disable_tqdm=True
    )


def test_chat_templates_are_rendered(ours, theirs):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert ours.apply_chat_template(turns[:1]) == theirs.apply_chat_template(turns[:1])
    assert ours.apply_chat_template(
        turns, add_generation_prompt=False
    ) == theirs.apply_chat_template(turns, add_generation_prompt=False)


def sums(**_metadata):
    """Lines of lm_eval's task arithmetic_2da, whose data are random sums."""
    draw = random.Random(0)
    pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(8)]
    rows = [
        {"context": f"Question: What is {a} plus {b}?\nAnswer:", "completion": f" {a + b}"}
        for a, b in pairs
    ]
    return {"validation": Dataset.from_list(rows), "train": Dataset.from_list(rows[:3])}


def odd(**_metadata):
    """Questions with four answers of several tokens."""
    draw = random.Random(1)
    groups = [["a red apple", "a ripe pear", "a sour lemon"], ["a grey wolf", "a brown bear", "a red fox"],
              ["a wooden chair", "a round table", "a soft bed"]]  # fmt: skip
    rows = []
    for _ in range(5):
        one, other = draw.sample(groups, 2)
        choices = [*one, draw.choice(other)]
        draw.shuffle(choices)
        gold = next(i for i, choice in enumerate(choices) if choice in other)
        rows.append(
            {
                "question": f"Which does not belong: {', '.join(choices)}?\nAnswer:",
                "choices": choices,
                "gold": gold,
            }
        )
    return {"validation": Dataset.from_list(rows), "train": Dataset.from_list(rows[:2])}


def task(name, data, **config):
    shots: dict = {"training_split": "train", "validation_split": "validation", "fewshot_split": "train",
             "fewshot_config": {"sampler": "first_n"}}  # fmt: skip
    return ConfigurableTask(config={"task": name, "custom_dataset": data, **shots, **config})


TASKS: dict = {
    "arithmetic_2da": (sums, 3, {
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{completion}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }),
    "odd_one_out": (odd, 2, {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "gold",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_tasks_have_equal_scores(name, ours, theirs):
    data, shots, config = TASKS[name]
    found, expected = (
        simple_evaluate(
            model,
            tasks=[task(name, data, **config)],
            num_fewshot=shots,
            log_samples=True,
            verbosity="ERROR",
        )
        for model in (ours, theirs)
    )
    for one, other in zip(found["samples"][name], expected["samples"][name], strict=True):
        for ours_scored, theirs_scored in zip(
            one["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert ours_scored[0] == pytest.approx(theirs_scored[0], abs=1e-4)
    assert found["results"][name]["acc,none"] == expected["results"][name]["acc,none"]


def test_settings_without_effect_are_refused(engine):
    with pytest.raises(sgl.ParameterError, match="the engine makes its batches itself"):
        SglangLiteLM(engine, batch_size=8)
    with pytest.raises(sgl.ParameterError, match="has been made already"):
        SglangLiteLM(engine, dtype="float32")
    with pytest.raises(sgl.ParameterError, match="device: is a setting of an engine"):
        SglangLiteLM(engine, device="cuda:0")
    with pytest.raises(sgl.ParameterError, match="dtipe"):
        SglangLiteLM("smollm2-135m", dtipe="float32")


def test_the_command_knows_the_model(tmp_path, model_file):
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "1 + 1 =", "answer": " 2"}]))
    (tmp_path / "sum.yaml").write_text(
        "task: one_sum\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.json}}\ntest_split: test\n"
        "output_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{answer}}'\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    command = [sys.executable, "-m", "sglang_lite.integrations.lm_eval", "run", "--model", "sglang_lite", "--model_args",
               "dtype=float32", "--tasks", "one_sum", "--include_path", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "|one_sum|" in done.stdout, done.stdout + done.stderr


def test_requests_that_fit_no_context(engine, monkeypatch):
    model = SglangLiteLM(engine)
    assert model.loglikelihood(asked("loglikelihood", ("Hello there", "")), disable_tqdm=True) == [
        (0.0, True)
    ]
    monkeypatch.setattr(SglangLiteLM, "max_length", 8)
    with pytest.raises(sgl.ParameterError, match=r"requests\[1\].* 9 tokens.* 8"):
        model.loglikelihood(
            asked("loglikelihood", ("Hi", " you"), ("Hi", " a" * 9)), disable_tqdm=True
        )
    with pytest.raises(sgl.ParameterError, match="max_gen_toks"):
        model.generate_until(
            asked("generate_until", ("Hi", {"until": [], "max_gen_toks": 8})), disable_tqdm=True
        )
