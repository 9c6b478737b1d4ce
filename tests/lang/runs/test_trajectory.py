"""Trajectories: the tokens of runs, scored again by the model as a whole."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import sglang_lite as sgl
from sglang_lite.lang.trace import Trace
from tests.server.conftest import serving

ASKED = {"return_prompt_token_ids": True, "return_logprob": True}


def scored(engine, ids):
    """Log-probability of each token after those before it."""
    answer = engine.generate(
        input_ids=list(ids),
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]


def check(engine, state, extra=0):
    """Every drawn token stands once in the trajectory, and has the log-probability that the model
    gives it there. So many tokens at most may be `extra` in the usage.
    """
    trajectory = state.trajectory()
    for each in trajectory.sequences:
        assert (
            len(each.ids) == len(each.loss_mask) == len(each.logprobs) == len(each.model_logprobs)
        )
        spans = [(span.start, span.end) for span in each.spans]
        inside = {i for start, end in spans for i in range(start, end)}
        assert spans == sorted(spans)
        assert all(i in inside for i, drawn in enumerate(each.loss_mask) if drawn)
        assert all(value is None for i, value in enumerate(each.logprobs) if i not in inside)
        again = scored(engine, each.ids)
        for i in inside:
            assert each.logprobs[i] is not None or not each.loss_mask[i]
            own = each.logprobs[i] if each.model_logprobs[i] is None else each.model_logprobs[i]
            assert own == pytest.approx(again[i], abs=1e-4)
            assert each.logprobs[i] >= own - 1e-4  # a constraint only makes it likelier
    spans = sum(span.end - span.start for each in trajectory for span in each.spans)
    assert 0 <= state.usage().completion_tokens - spans <= extra
    return trajectory


@sgl.function
def turns(s, questions):
    s += sgl.system("You are brief.")
    for number, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer{number}", max_tokens=7))


def test_turns_are_one_sequence(engine):
    state = turns.run(["Who?", "When?", "And then what?"], backend=engine, seed=3, **ASKED)
    (sequence,) = check(engine, state)
    assert [span.name for span in sequence.spans] == ["answer0", "answer1", "answer2"]
    for span in sequence.spans:
        assert list(sequence.ids[span.start : span.end]) == [
            entry[1] for entry in state.get_meta_info(span.name)["output_token_logprobs"]
        ]
    assert sequence.prompt_len == sequence.spans[0].start == sequence.loss_mask.index(True)
    assert {span.weight_version for span in sequence.spans} == {"default"}


@sgl.function
def branches(s):
    s += "A list:" + sgl.gen("first", max_tokens=4)
    forks = s.fork(2)
    for fork in forks:
        fork += " more" + sgl.gen("more", max_tokens=5) + " and" + sgl.gen("last", max_tokens=3)
    forks.join("concate_and_append")
    s += " So" + sgl.gen("end", max_tokens=4, n=2)


def test_branches_and_samples_have_their_own(engine):
    trajectory = check(engine, branches.run(backend=engine, seed=4, **ASKED))
    assert len(trajectory) == 4  # the main branch, two forks, and a second sample
    names = sorted(tuple(span.name for span in each.spans) for each in trajectory)
    assert names == [("end",), ("first", "end"), ("more", "last"), ("more", "last")]
    main = next(
        each for each in trajectory if len(each.spans) == 2 and each.spans[0].name == "first"
    )
    # what the branches said is read, and not drawn
    assert main.spans[1].start - main.spans[0].end > 16


@sgl.function
def tried(s, accept):
    s += "Say:" + sgl.gen("value", max_tokens=4, retries=3, check=accept)
    with s.checkpoint() as before:
        s += " or" + sgl.gen("dropped", max_tokens=3)
        if s["dropped"]:
            before.rollback()
    s += " then" + sgl.gen("kept", max_tokens=3)


def test_failed_attempts_and_what_was_taken_back_are_told(engine):
    seen = []

    def third(text):
        seen.append(text)
        return len(seen) == 3

    trajectory = check(engine, tried.run(third, backend=engine, seed=5, **ASKED))
    told = {
        (span.name, span.attempt, span.failed, span.rejected)
        for each in trajectory
        for span in each.spans
    }
    assert told == {
        ("value", 0, True, False), ("value", 1, True, False), ("value", 2, False, False),
        ("dropped", 0, False, True), ("kept", 0, False, False),
    }  # fmt: skip


NAMES = {"colour": {"enum": ["red", "blue"]}, "name": {"type": "string", "maxLength": 5}}
SCHEMA = {
    "type": "object",
    "properties": NAMES,
    "required": [*NAMES],
    "additionalProperties": False,
}


@sgl.function
def forms(s):
    s += "A record: " + sgl.gen("record", json_schema=SCHEMA, max_tokens=40)
    s += "\nA number: " + sgl.gen("number", regex="[0-9]{3}", max_tokens=8) + "\nText:"
    s += sgl.gen("text", max_tokens=12, stop="e") + " end" + sgl.gen("last", max_tokens=2)


def test_constraints_tell_both_log_probabilities(engine):
    trajectory = check(engine, forms.run(backend=engine, seed=6, **ASKED))
    recorded = {
        span.name: each.model_logprobs[span.start] for each in trajectory for span in each.spans
    }
    assert None not in (recorded["record"], recorded["number"])
    assert recorded["text"] is recorded["last"] is None


@sgl.function
def short(s):
    s += "Say:" + sgl.gen("said", regex="(yes|no)+", max_tokens=5) + sgl.gen("next", max_tokens=2)


def test_an_answer_that_was_cut_has_the_scores_of_its_tokens(engine):
    cut = 0
    for seed in range(24):
        state = short.run(backend=engine, seed=seed, **ASKED)
        was_cut = state.get_meta_info("said")["shortened"] == [""]
        check(engine, state, extra=not was_cut)  # the token that ends the text
        cut += was_cut
    assert cut


@sgl.function
def mostly_forced(s):
    s += "Say: " + sgl.gen("said", regex="The answer is certainly [0-9]", max_tokens=24)


def test_what_a_grammar_forces_is_not_drawn_whatever_is_recorded(engine):
    masks = []
    for more in ({"return_logprob": True}, {}):
        (sequence,) = mostly_forced.run(
            backend=engine, seed=1, return_prompt_token_ids=True, **more
        ).trajectory()
        masks.append(sequence.loss_mask)
    assert sum(masks[0]) <= sum(masks[1]) <= 3
    assert masks[0][-1] or masks[0][-2]  # the digit


@sgl.function
def number(s):
    s += "Age: " + sgl.gen("age", type=int, max_tokens=6) + " years" + sgl.gen("more", max_tokens=2)


def test_the_token_that_ends_a_number_is_left_out(engine):
    for seed in range(4):
        (sequence,) = check(engine, number.run(backend=engine, seed=seed, **ASKED), extra=1)
        assert [span.name for span in sequence.spans] == ["age", "more"]


def test_forced_tokens_are_not_drawn(engine):
    state = forms.run(backend=engine, seed=6, return_prompt_token_ids=True)
    assert state.usage().forced_tokens
    trajectory = state.trajectory()
    usage = state.usage()
    assert (
        sum(sum(each.loss_mask) for each in trajectory)
        == usage.completion_tokens - usage.forced_tokens
    )
    assert all(
        value is None for each in trajectory for value in (*each.logprobs, *each.model_logprobs)
    )


def test_a_saved_trace_has_it_too(engine, tmp_path):
    state = turns.run(["Who?"], backend=engine, seed=3, **ASKED)
    state.trace().save(tmp_path / "run.jsonl")
    assert Trace.load(tmp_path / "run.jsonl").trajectory() == state.trajectory()


def test_a_loaded_state_has_none(engine, tmp_path):
    turns.run(["Who?"], backend=engine, seed=3, **ASKED).save(tmp_path / "state")
    with pytest.raises(sgl.ProgramError, match="it was loaded or resumed"):
        sgl.load(tmp_path / "state", backend=engine).trajectory()


@pytest.mark.parametrize(
    "run", [lambda e: turns.run(["Who?"], backend=e), lambda e: turns.run([], backend=e)]
)
def test_a_run_without_ids_says_what_to_do(engine, run):
    with pytest.raises(
        sgl.ProgramError, match=r"return_prompt_token_ids=True|no answer of a generation"
    ):
        run(engine).trajectory()


def test_generate_returns_them(engine):
    ids = [5, 6, 7, 8]
    answer = engine.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 3}, return_prompt_token_ids=True
    )
    assert answer["prompt_token_ids"] == ids
    assert "prompt_token_ids" not in engine.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 3}
    )


def test_a_server_tells_the_same(small_engine):
    here = turns.run(["Who?", "When?"], backend=small_engine, seed=3, **ASKED).trajectory()
    with serving(small_engine) as url:
        endpoint = sgl.RuntimeEndpoint(url)
        for push_down in (True, False):
            there = turns.run(
                ["Who?", "When?"], backend=endpoint, seed=3, push_down=push_down, **ASKED
            ).trajectory()
            assert [each.ids for each in there] == [each.ids for each in here]
            assert [each.spans for each in there] == [each.spans for each in here]
        endpoint.shutdown()


def test_a_provider_that_tells_no_ids_is_refused(connected):
    with pytest.raises(sgl.CapabilityError, match="return_prompt_token_ids"):
        turns.run(["Who?"], backend=connected(sgl.OpenAI, "gpt-4.1"), return_prompt_token_ids=True)


def test_weights_that_are_replaced_meanwhile_are_told(folders):
    """The request ends once its weights are replaced."""
    begun, replaced = threading.Event(), threading.Event()

    def processor(ids, logits):
        if len(ids) > 6:
            begun.set()
        ended = replaced.wait(0.01)
        logits[0] = 1e4 if ended else -1e4  # the end token
        return logits

    with (
        sgl.Engine(folders[0], in_process=True, weight_version="first") as engine,
        ThreadPoolExecutor(1) as thread,
    ):
        running = thread.submit(
            lambda: engine.generate(
                input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2000}, custom_logit_processor=processor,
                return_prompt_token_ids=True,
            )
        )  # fmt: skip
        assert begun.wait(60)
        engine.update_weights(folders[1], "second")
        replaced.set()
        answer = running.result()
    told = answer["meta_info"]
    assert told["weight_version"] == "second"
    ((count, version),) = told["older_weight_versions"]
    assert version == "first"
    assert 0 < count < len(answer["output_ids"])
