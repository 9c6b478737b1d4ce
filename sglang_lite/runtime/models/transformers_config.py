"""Config of a model that runs through transformers' code: the fields that an engine needs. Needs no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.models import config_fields
from sglang_lite.runtime.models.config_fields import MAX_POSITIONS, MAX_TOKENS, Config, Field, Json
from sglang_lite.runtime.models.families import ARCHITECTURES, FAMILIES, WITH_ENCODER

_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "model_max_length",
    "seq_length",
)
# Config fields of models without a position limit -> the layers whose state such a model keeps from
# token to token.
_STATES = {
    "state_size": "state space layers",
    "lru_width": "recurrent layers",
    "rescale_every": "RWKV's layers",
    "chunkwise_kernel": "xLSTM's layers",
}
# Architectures of diffusion language models, and name suffixes of others.
_DIFFUSION = frozenset(
    (
        "LLaDAModelLM",
        "LLaDAMoEModelLM",
        "LLaDA2MoeModelLM",
        "DreamModel",
        "SDARForCausalLM",
        "SDARMoeForCausalLM",
        "Fast_dLLM_QwenForCausalLM",
    )
)
_OF_DIFFUSION = ("ForBlockDiffusion", "ForDiffusionLM")
# Types that transformers runs with another type's class, after renaming their tensors: the class
# that a config names does not tell the names of its tensors.
RENAMED_TYPES = frozenset(("exaone", "sarvam_moe"))
_FIELDS = {
    "vocab_size": Field("whole", 1, MAX_TOKENS, required=True),
    "eos_token_id": config_fields.CONFIG["eos_token_id"],
    "bos_token_id": config_fields.CONFIG["bos_token_id"],
    **{name: Field("whole", 1, MAX_POSITIONS) for name in _LIMITS},
}
WHISPER = "WhisperForConditionalGeneration"
_WHISPER_FIELDS = {
    # A block of queries sees all frames, or none.
    "max_source_positions": Field("whole", 128, MAX_POSITIONS, required=True),
    "max_target_positions": Field("whole", 1, MAX_POSITIONS, required=True),
}


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """Specification of a model that runs through transformers' code.

    Attributes:
        architecture: name of the model's class in transformers.
        vocab_size: number of tokens.
        max_positions: longest sequence, in tokens.
        eos_ids: tokens that end a sequence.
        sound: tokens of the sound that each sequence begins with; None if it begins with text.
    """

    architecture: str
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    sound: SoundPrefix | None = None


def is_natively_supported(config: Config) -> bool:
    """Returns whether the config names an architecture implemented here and requests only supported
    features. Also returns True if `architectures` is missing or malformed.
    """
    names = config.get("architectures")
    if config.get("model_type") in RENAMED_TYPES:
        return False
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return True
    if any(name in WITH_ENCODER for name in names):
        return True
    families = [FAMILIES[ARCHITECTURES[name]] for name in names if name in ARCHITECTURES]
    return bool(families) and not families[0].left_out(config)


def fallback_spec(config: Config, source: str) -> TransformersSpec:
    """Returns the specification of a model of any architecture from its Hugging Face config. If the
    config has several parts, uses the text part.

    Raises:
        ModelError: the model does not generate text, or not token by token, a field is missing or
            invalid, or the model keeps a state other than keys and values.
    """
    for name in config.get("architectures") or ():
        if name in _DIFFUSION or name.endswith(_OF_DIFFUSION):
            problem = f"{name} is a diffusion language model, which writes many tokens at once, and again."
            raise ModelError(
                f"{source}: {problem}", hint="Use a model that writes one token after the other."
            )
    try:
        return _read_transformers_spec(config, source)
    except ModelError:
        if reason := explain_not_causal(config.get("model_type")):  # an encoder has no such fields
            raise ModelError(
                f"{source}: {reason}", hint="Use a model that generates text."
            ) from None
        raise


def explain_not_causal(model_type: Json) -> str | None:
    """Returns the reason why transformers' models of a type generate no text. Returns None if they
    do, or if transformers does not know the type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # imports torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        return None
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    return f"{model_type} is no causal language model in transformers: it does not continue text alone."


def _read_transformers_spec(config: Config, source: str) -> TransformersSpec:
    config_fields.check(
        {"text_config": config.get("text_config")}, {"text_config": Field("object")}, source
    )
    whole = {**config, **(config.get("text_config") or {})}
    config_fields.check(whole, _FIELDS, source)
    limits = [whole[name] for name in _LIMITS if whole.get(name) is not None]
    names = config.get("architectures") or ["not named"]
    eos = whole.get("eos_token_id")
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    config_fields.parse_token_ids(list(ids), whole["vocab_size"], source, "eos_token_id")
    if names[0] == WHISPER:
        config_fields.check(config, _WHISPER_FIELDS, source)
        sound = SoundPrefix.from_frames(whole["max_source_positions"])
        return TransformersSpec(
            WHISPER, whole["vocab_size"], sound.tokens + whole["max_target_positions"], ids, sound
        )
    if config.get("is_encoder_decoder") and names[0].endswith("ForConditionalGeneration"):
        problem = f"{names[0]} has an encoder beside its decoder, which alone continues no text."
        raise ModelError(f"{source}: {problem}", hint="Use a model that generates text.")
    if not limits and (state := next((name for name in _STATES if name in whole), None)):
        raise ModelError(
            f"{source}: architecture {names[0]} keeps the state of {_STATES[state]} (`{state}`) from token to token, "
            "which transformers' code does in a way of its own.",
            hint="Use a model whose architecture docs/models.md lists.",
        )
    if not limits:
        raise ModelError(
            f"{source}: architecture {names[0]} has no limit of positions ({', '.join(_LIMITS)}).",
            hint="Add max_position_embeddings, the longest text that it was trained on, in tokens.",
        )
    return TransformersSpec(names[0], whole["vocab_size"], limits[0], ids)
