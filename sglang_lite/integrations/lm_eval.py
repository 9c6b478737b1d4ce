"""Model for lm-evaluation-harness. `python -m sglang_lite.integrations.lm_eval` runs its command,
`lm_eval`, with this model registered as `sglang_lite`.

The score of a continuation's last token comes from the distribution after all tokens before it. So
one request serves all continuations that differ only in that token. Other continuations share the
part of their contexts that is in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from sglang_lite import Engine
from sglang_lite.compat.sglang.answers import Answer
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.text.chat_format import ChatFormat, Conversation

# texts; tokens of context and continuation
_Pair: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]
_CHUNK = 1024  # requests between two steps of the progress bar
_NAMES = {"until": "stop", "max_gen_toks": "max_new_tokens"}


@register_model("sglang_lite")
class SglangLiteLM(TemplateLM):
    """Model for lm-evaluation-harness that runs on an engine of this process.

    Args:
        pretrained: the model: a name, folder or file, as for `Engine`. Or an engine, which stays
            open.
        batch_size: 1 or "auto", lm_eval's defaults: the engine forms its own batches.
        max_batch_size: None; the engine's `max_running_requests` limits how many run at once.
        device: device of the engine, such as "cpu"; lm_eval's default, "cuda:0", leaves the choice
            to the engine. None if `pretrained` is an engine, which has its own device.
        max_gen_toks: maximum number of tokens of an answer if the task sets no limit.
        **config: settings of the engine (`dtype`, `device` …).

    Raises:
        ParameterError: a setting is unknown or invalid, or is one of lm_eval's that this model does
            not have.
    """

    def __init__(
        self,
        pretrained: str | Engine = "",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        **config: Any,  # as for Engine
    ) -> None:
        super().__init__()
        if batch_size not in (1, "1", "auto") or max_batch_size is not None:
            raise ParameterError(
                "batch_size",
                f"{batch_size!r} has no effect: the engine makes its batches itself.",
                hint="Leave it out; max_running_requests in --model_args limits how many run at once.",
            )
        if device not in (None, "cuda:0") or (device and isinstance(pretrained, Engine)):
            config["device"] = device
        if isinstance(pretrained, Engine) and config:
            raise ParameterError(
                next(iter(config)), "is a setting of an engine that has been made already."
            )
        self.engine = (
            pretrained if isinstance(pretrained, Engine) else Engine(pretrained or None, **config)
        )
        self.max_gen_toks = max_gen_toks

    # ---------------------------------------------------------------------------------------- texts

    @property
    def max_length(self) -> int:
        return self.engine.context_length

    @property
    def eot_token_id(self) -> int:
        return self._special_token_id("eos_token", min(self.engine.tokenizer.eos_ids))

    @property
    def prefix_token_id(self) -> int:
        return self._special_token_id("bos_token", self.eot_token_id)

    def _special_token_id(self, name: str, other: int) -> int:
        """Returns the id of one of the tokenizer's special tokens. Returns `other` if the tokenizer
        has no such token.
        """
        text = self.engine.tokenizer.special_tokens.get(name)
        return other if text is None else self.engine.tokenizer.encode(text, first=False)[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        ids = self.engine.tokenizer.encode(string)
        start = self.engine.tokenizer.bos_id
        named = start is not None and string.startswith(
            self.engine.tokenizer.token_bytes[start].decode()
        )
        return ids[1:] if add_special_tokens is False and start is not None and not named else ids

    @property
    def tokenizer_name(self) -> str:
        return self.engine.model_name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if isinstance(chat_template, str):
            raise CapabilityError(
                f"the model has no chat template named {chat_template!r}.", hint="Give no name."
            )
        found = self.engine.chat_template() if chat_template else None
        return None if found is None else found.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        form = ChatFormat(
            self.engine.chat_template(), self.engine.tokenizer.control_texts, None, None
        )
        return form.prompt(
            Conversation(chat_history, continue_final=not add_generation_prompt)
        ).text

    # --------------------------------------------------------------------------------------- scores

    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        # indices of requests by all their tokens but the last one
        groups: dict[tuple[int, ...], list[int]] = {}
        found: dict[int, tuple[float, bool]] = {}
        for index, (_texts, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ParameterError(
                    f"requests[{index}]",
                    f"its continuation has {len(continuation)} tokens, more than the context of {self.max_length}.",
                )
            if not continuation:
                found[index] = 0.0, True
                continue
            tokens = (context + continuation)[-(self.max_length + 1) :]
            groups.setdefault(tuple(tokens[:-1]), []).append(index)
        prompts = sorted(groups)  # puts prompts with equal beginnings side by side
        with tqdm(total=len(requests) - len(found), disable=disable_tqdm, desc="Scoring") as shown:
            for start in range(0, len(prompts), _CHUNK):
                chunk = prompts[start : start + _CHUNK]
                members = [groups[prompt] for prompt in chunk]
                for prompt, group, scored in zip(
                    chunk, members, self._score_prompts(requests, chunk, members)
                ):
                    found.update(
                        (index, _score(scored, prompt, requests[index][2])) for index in group
                    )
                    shown.update(len(group))
        for index, (texts, _context, _continuation) in enumerate(requests):
            if texts is not None:  # for a whole text, `loglikelihood_rolling` stores the sum
                self.cache_hook.add_partial("loglikelihood", texts, found[index])
        return [found[index] for index in range(len(requests))]

    def _score_prompts(
        self,
        requests: Sequence[_Pair],
        prompts: Sequence[tuple[int, ...]],
        members: Sequence[Sequence[int]],
    ) -> list[Answer]:
        """Returns the engine's answers to prompts. The answers contain the log-probabilities of all
        tokens of the continuations.
        """
        lengths = [max(len(requests[index][2]) for index in group) - 1 for group in members]
        return self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params={"max_new_tokens": 0, "temperature": 0},
            return_logprob=True,
            logprob_start_len=[
                len(prompt) - length if length else -1 for prompt, length in zip(prompts, lengths)
            ],
            top_logprobs_num=1,
            token_ids_logprob=[[requests[index][2][-1] for index in group] for group in members],
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[_Pair] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(
                token_list=tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in found]
            windows += [(None, *window) for window in own]
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # -------------------------------------------------------------------------------------- answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as shown:
            for start in range(0, len(requests), _CHUNK):
                asked = [
                    self._to_engine_request(*request.args)
                    for request in requests[start : start + _CHUNK]
                ]
                prompts = [each[0] for each in asked]
                params = [each[1] for each in asked]
                answers = self.engine.generate(input_ids=prompts, sampling_params=params)
                texts += [answer["text"] for answer in answers]
                shown.update(len(asked))
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _to_engine_request(
        self, context: str, options: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Returns the prompt and sampling parameters of a request."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        if (wanted := given["max_gen_toks"]) >= self.max_length:
            raise ParameterError(
                "max_gen_toks",
                f"{wanted} leaves no room for a prompt: the context is {self.max_length}.",
                hint="Give less, or a longer context_length.",
            )
        tokens, most = maybe_truncate(self.tok_encode(context), wanted, self.max_length)
        drawn = {"temperature": 1.0 if given["do_sample"] else 0.0}
        params = {
            _NAMES.get(name, name): value for name, value in given.items() if name != "do_sample"
        }
        return tokens, {**drawn, **params, "max_new_tokens": most}


def _score(
    answer: Answer, prompt: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """Returns the log-probability of a continuation, and whether each of its tokens is the
    likeliest one at its position.

    Args:
        answer: the engine's answer for the prompt and the token after it.
        prompt: all tokens except the continuation's last one.
    """
    meta: Any = answer["meta_info"]  # has these entries, since they were requested
    before = len(continuation) - 1
    entries = meta["input_token_logprobs"][-before:] if before else []
    tops = meta["input_top_logprobs"][-before:] if before else []
    last = {token: logprob for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
    likeliest = [top[0][1] for top in [*tops, meta["output_top_logprobs"][0]]]
    return sum(entry[0] for entry in entries) + last[continuation[-1]], likeliest == [*continuation]


def main() -> None:
    """Runs the command `lm_eval`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
