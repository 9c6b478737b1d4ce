"""A number ends where the model ends it: its text is what free text begins with, under every kind
of schedule.
"""

import random
import re

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.program.nodes import Gen, GrammarBegin, GrammarEnd, Program, Text
from sglang_lite.protocol import Continuation, Delta, Number, Played, Prompt, Regex, SamplingParams
from sglang_lite.runtime.kernels.race import draw_exponentials
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.requests.sample_seed import derive_sample_seed
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.counts import some
from tests.runtime.scripted import ScriptedModel, SteppedEngine, ended, hashes

EOS = 0
TOKENS = [
    "\x00",
    *"0123456789,.-+e a",
    "4.",
    "24",
    "1 ",
    ",8",
    "00",
    ".5",
    "7,",
    "-1",
    "a1",
    "9e",
    ",234",
    ",100",
    ",873",
]
SIZE = len(TOKENS)
NUMBERS = {
    "integer": re.compile(r"[-+]?(?:[1-9]\d?\d?(?:,\d\d\d)+|\d+)(?!\d)"),
    "float": re.compile(r"[-+]?(?:[1-9]\d?\d?(?:,\d\d\d)+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\d)"),
}


def logits_of(states):
    """float32 [R, SIZE]: digits are likely, the end of sequence is not."""
    with np.errstate(over="ignore"):
        odd = np.arange(1, SIZE + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        mixed = (np.asarray(states, dtype=np.uint64)[:, None] ^ np.uint64(0x5DEECE66D)) * odd
    logits = ((mixed >> np.uint64(40)) % np.uint64(1009)).astype(np.float32) / 200
    logits[:, EOS] -= 1
    logits[:, 1:11] += 1
    logits[:, -3:] += 2
    return logits


class NumberModel(ScriptedModel):
    def logits(self, hidden):
        return torch.from_numpy(logits_of(hidden[:, 0].numpy().view(np.uint64)))


def model():
    written = [token.replace("\x00", "Ā").replace(" ", "Ġ") for token in TOKENS]
    backend = Backend(models.BPE({token: i for i, token in enumerate(written)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, [token.encode() for token in TOKENS], [EOS], eos_ids=[EOS])
    return LoadedModel("numbers", NumberModel(), tokenizer, SIZE, frozenset({EOS}), 512)


def free_text(prompt, params, seed):
    """Text that a model writes without an end of the number, worked out one token after another;
    and whether the end of sequence ended it. A number has to begin, with a sign at most before its
    first digit.
    """
    tokens, text = list(prompt), ""
    for _ in range(params.max_tokens):
        logits = torch.from_numpy(logits_of(hashes(tokens)[-1:]))[0]
        if text in ("", "-", "+"):
            begins = re.compile(r"[-+]?\d|[-+]\Z" if not text else r"\d")
            logits[[i for i, token in enumerate(TOKENS) if not begins.match(token)]] = float("-inf")
        if params.temperature == 0:
            token = int(logits.argmax())
        else:
            noise = np.log(draw_exponentials(seed, len(tokens), SIZE))
            token = int((logits.numpy() / np.float64(params.temperature) - noise).argmax())
        if token == EOS:
            return text, True
        tokens.append(token)
        text += TOKENS[token]
    return text, False


def asked(count, seed=0):
    draw = random.Random(seed)
    for i in range(count):
        prompt = [draw.randrange(1, SIZE) for _ in range(draw.randint(1, 12))]
        temperature = draw.choice([0, 0.7, 1.0])
        params = SamplingParams(
            temperature=temperature, max_tokens=draw.choice([1, 3, 8, 20]), seed=i
        )
        yield (
            prompt,
            replace(params, return_logprob=i % 2 == 0),
            Number(draw.choice(["integer", "float"])),
        )


def engine_for(**config):
    engine = SteppedEngine(model=model(), max_total_tokens=192, context_length=128, **config)
    for number in (Number("integer"), Number("float")):
        engine.compile_grammar(number)
    return engine


@pytest.mark.parametrize("endless", ["[0-9]+", ",[0-9]{3}"])
def test_an_integer_ends_after_nineteen_digits(endless):
    """Of a model that writes digits without end; a float has as many as it has."""
    engine = engine_for()
    bias = tuple((i, 20.0) for i, token in enumerate(TOKENS) if re.fullmatch(endless, token))
    for seed in range(some(10, 30)):
        params = SamplingParams(max_tokens=60, seed=seed, logit_bias=bias, temperature=1.0)
        numbers = (Number("integer"), Number("float"))
        events = [
            engine.start([5, 6], params, constraint=each, stream=seed % 2 == 0)[1]
            for each in numbers
        ]
        engine.drain()
        whole, real = map(ended, events)
        assert whole.finish_reason == "stop"
        assert NUMBERS["integer"].fullmatch(whole.text)
        digits = sum(map(str.isdigit, whole.text))
        assert digits == 19 or (endless.startswith(",") and digits < 19)
        assert real.text[:15] == whole.text[:15]
        assert sum(map(str.isdigit, real.text)) > 19 or digits < 19


@pytest.mark.parametrize(("overlap", "page", "chunk", "retract"), [
    (True, 1, 7, 0), (True, 4, 64, 3), (False, 16, 7, 3), (False, 1, 64, 0),
], ids=str)  # fmt: skip
def test_a_number_is_what_free_text_begins_with(overlap, page, chunk, retract):
    engine = engine_for(
        overlap=overlap, page_size=page, step_tokens=chunk, retract_every=retract, max_running=3
    )
    started = [
        (*each, engine.start(each[0], each[1], constraint=each[2], stream=i % 3 == 0)[1])
        for i, each in enumerate(asked(120))
    ]
    engine.drain()
    engine.check_empty()
    seen = set()
    for prompt, params, number, events in started:
        generation = ended(events)
        text, stopped = free_text(prompt, params, derive_sample_seed(params.seed, 0))
        found = NUMBERS[number.kind].match(text)
        assert generation.text == (found[0] if found else "")
        tokens = [TOKENS[i] for i in generation.token_ids]
        assert generation.usage.completion_tokens == len(tokens)
        written = "".join(tokens).removesuffix("\x00")
        assert text.startswith(written)
        if generation.finish_reason == "length":
            assert len(tokens) == params.max_tokens
        else:
            assert written != generation.text or stopped
        within = 0  # tokens that lie in the number
        while within < len(tokens) and generation.text.startswith("".join(tokens[: within + 1])):
            within += 1
        assert len(generation.output_logprobs) == (within if params.return_logprob else 0)
        assert [entry.token_id for entry in generation.output_logprobs] == [
            *generation.token_ids[: len(generation.output_logprobs)]
        ]
        assert "".join(span.text for span in generation.spans) == generation.text
        assert sum(len(span.ids or ()) for span in generation.spans) == within
        deltas = [event for event in events if isinstance(event, Delta)]
        if deltas:
            assert "".join(delta.text for delta in deltas) == generation.text
            assert [entry for delta in deltas for entry in delta.logprobs] == [
                *generation.output_logprobs
            ]
            sent = [i for delta in deltas for i in delta.token_ids]
            assert sent == [*generation.token_ids[: len(sent)]]
        seen.add((generation.finish_reason, "," in generation.text, "." in generation.text))
    assert {("length", False, False), ("stop", True, False), ("stop", False, True)} <= seen


@pytest.mark.parametrize("jump", ["safe", "off"])
@pytest.mark.parametrize("schema", [
    {"type": "integer"}, {"type": "integer", "minimum": 10, "maximum": 5000}, {"type": "number"},
    {"enum": [7, 24, 2400, 1.5]}, {"type": "number", "exclusiveMinimum": -1, "maximum": 10},
], ids=str)  # fmt: skip
def test_a_json_document_that_is_a_number_ends_there_too(schema, jump):
    """The value is valid under its schema, and of the value that was written."""
    constraint = json_schema(schema)
    engine = engine_for(jump_forward=jump, max_running=4, retract_every=5)
    engine.compile_grammar(constraint)
    cases = [(prompt, replace(params, max_tokens=20)) for prompt, params, _ in asked(40, seed=4)]
    started = [
        engine.start(prompt, params, constraint=constraint, stream=i % 3 == 0)[1]
        for i, (prompt, params) in enumerate(cases)
    ]
    engine.drain()
    engine.check_empty()
    ends = set()
    for (_, params), events in zip(cases, started, strict=True):
        generation = ended(events)
        tokens = [TOKENS[i] for i in generation.token_ids]
        written, within = "".join(tokens), generation.text
        assert written.startswith(within)
        kept = sum(len(span.ids or ()) for span in generation.spans)
        assert "".join(tokens[:kept]) == within
        assert len(generation.output_logprobs) == (kept if params.return_logprob else 0)
        if generation.finish_reason == "stop":
            sgl.grammar.validate(constraint, within)
            found = re.match(r"(-?\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?", written)
            whole = not {".", "e", "E"} & {*within}  # as the schema may want it
            assert float(within) in (float(found[0]), float(found[1]) if whole else None)
            ends.add(written[len(within) : len(within) + 1])
        deltas = [event for event in events if isinstance(event, Delta)]
        assert not deltas or "".join(delta.text for delta in deltas) == within
    assert len(ends) > 2


def test_a_json_number_that_max_tokens_cuts_keeps_its_digits():
    engine = engine_for(max_running=4)
    constraint = json_schema({"type": "integer", "multipleOf": 7})
    engine.compile_grammar(constraint)
    started = [
        engine.start(
            prompt,
            replace(params, max_tokens=3, return_logprob=True),
            constraint=constraint,
            stream=True,
        )[1]
        for prompt, params, _ in asked(20, seed=6)
    ]
    engine.drain()
    engine.check_empty()
    cut = 0
    for events in started:
        generation = ended(events)
        written = "".join(TOKENS[i] for i in generation.token_ids)
        if generation.finish_reason == "length" and written.isdigit():
            cut += 1
            assert generation.text == written
            assert (
                len(generation.output_logprobs)
                == sum(len(span.ids or ()) for span in generation.spans)
                == 3
            )
        assert (
            "".join(event.text for event in events if isinstance(event, Delta)) == generation.text
        )
    assert cut > 3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_program_goes_on_after_the_number_alone(overlap):
    """Programs as wholes give what call by call gives, whose prompts have the number's own tokens
    and no others.
    """
    engine = engine_for(overlap=overlap, page_size=4, step_tokens=16, max_running=4)
    numbers = 0
    engine.compile_grammar(json_schema({"type": "integer"}))
    for i, (prompt, params, number) in enumerate(asked(30, seed=1)):
        number = json_schema({"type": "integer"}) if i % 3 == 0 else number
        text = "".join(TOKENS[i] for i in prompt)
        params = replace(params, return_logprob=False)
        free = Gen("b", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        program = Program((Gen("a", params, number), Text(" a"), free))
        played = []
        engine.run_program(text, program, sink=played.append)
        engine.drain()
        first, second = (event.event for event in played if isinstance(event, Played))
        _, events = engine.start(text, params, constraint=number)
        engine.drain()
        assert ended(events).text == first.text
        prompt_spans = (
            *Prompt((sgl.protocol.Span(text),)).spans,
            *first.spans,
            sgl.protocol.Span(" a"),
        )
        _, events = engine.start(Prompt(prompt_spans), free.params)
        engine.drain()
        assert ended(events).token_ids == second.token_ids
        assert played[-1].text == first.text + " a" + second.text
        numbers += first.finish_reason == "stop"
    assert numbers > 15
    engine.check_empty()


def test_samples_are_drawn_alone():
    engine = engine_for(max_running=4)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=5, n=6)
    _, events = engine.start([3, 4, 5], params, constraint=Number("integer"))
    engine.drain()
    for generation in events:
        text, _ = free_text([3, 4, 5], params, derive_sample_seed(5, generation.index))
        found = NUMBERS["integer"].match(text)
        assert generation.text == (found[0] if found else "")
    assert len({generation.text for generation in events}) > 1


def test_the_users_stops_end_a_number_sooner():
    engine = engine_for()
    for prompt, params, number in asked(20, seed=2):
        ends = replace(params, temperature=0, max_tokens=20, return_logprob=False)
        _, events = engine.start(prompt, ends, constraint=number)
        _, stopped = engine.start(prompt, replace(ends, stop=("2",)), constraint=number)
        engine.drain()
        assert ended(stopped).text == ended(events).text.partition("2")[0]
        assert ended(stopped).matched == (
            "2" if "2" in ended(events).text else ended(stopped).matched
        )


def test_a_number_in_a_grammar_keeps_to_it():
    """Only what the grammar around it allows ends the number, and what ended it is generated again
    after it.
    """
    grammar = Regex("[0-9]{2,3} a{1,3}")
    engine = engine_for()
    engine.compile_grammar(grammar)
    for prompt, params, _ in asked(12, seed=3):
        text = "".join(TOKENS[i] for i in prompt)
        params = SamplingParams(temperature=params.temperature, max_tokens=12, seed=params.seed)
        program = Program((GrammarBegin(grammar), Gen("n", params, Number("integer")), Text(" "),
                           Gen("rest", params, Regex("a+")), GrammarEnd()))  # fmt: skip
        engine.compile_grammar(Regex("a+"))
        played = []
        engine.run_program(text, program, sink=played.append)
        engine.drain()
        assert re.fullmatch(grammar.pattern, played[-1].text), played[-1]


def test_a_number_is_a_grammar_of_its_own():
    engine = engine_for()
    for before, allowed in (("", True), ("2,87", True), ("-", True), ("a", False)):
        params = SamplingParams(temperature=0, max_tokens=9)
        constraint = Continuation(Number("integer"), before)
        _, events = engine.start([*map(TOKENS.index, before or "a")], params, constraint=constraint)
        engine.drain()
        end = ended(events)
        assert isinstance(end, sgl.ConstraintError) != allowed
        if allowed:
            assert re.fullmatch(r"[-+]?[\d,]*", before + end.text)
