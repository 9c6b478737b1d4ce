"""Whisper beside others: with CTranslate2's weights, token by token; and with random weights, for
speed.

    python benchmarks/speech.py --weights FOLDER SOUND [SOUND …] [--language en]
    python benchmarks/speech.py --shape turbo [--requests 32] [--tokens 64] [--repeat 3]

- `--weights`: transcripts of the first 30 seconds of sounds, with and without times, by this engine
  and by CTranslate2 (which has to be installed) in float32, and the processor seconds of each. The
  folder has CTranslate2's `model.bin`, `config.json` and `tokenizer.json`; its weights are
  converted to transformers' names.
- `--shape`: seconds of requests with a sound of their own, beside transformers' `generate` with all
  as one batch. Making spectrograms counts on both sides, and on ours reading the files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from machine import describe
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, GenerationMixin, WhisperConfig, WhisperFeatureExtractor
from transformers import WhisperForConditionalGeneration as Whisper

import sglang_lite as sgl
from sglang_lite.media.files import MAX_SECONDS, decode_samples, encode_wav
from sglang_lite.protocol import Media, Prompt, SamplingParams, Span
from sglang_lite.runtime.media.speech import WhisperSpeech, load_speech_format
from tests.real.convert_whisper import END, convert, save_rest, whisper_config

GPU = torch.cuda.is_available()
RATE, WINDOW = 16_000, 480_000  # samples in a second, and in 30
SAYS = (50_258, 50_259, 50_360, 50_364)  # of large-v3: start, English, transcribe, no times
_SHAPES = {
    "base": (512, 6, 6, 8, 80),
    "turbo": (1280, 32, 4, 20, 128),
    "large": (1280, 32, 32, 20, 128),
}


# ---------------------------------------------------------------------------- CTranslate2's weights


def compare(source: Path, files: list[Path], language: str) -> None:
    """Compares transcripts with CTranslate2's."""
    import ctranslate2  # type: ignore[import-not-found] # of no extra: it is installed for this

    theirs: Any = ctranslate2.models.Whisper(
        str(source), device="cpu", compute_type="float32", intra_threads=1
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        convert(source, folder)
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
        with sgl.Engine(made, in_process=True, device="cpu", dtype="float32", threads=1) as engine:
            speech = load_speech_format(engine.core.builder.media, engine.tokenizer, lambda: folder)
            assert isinstance(speech, WhisperSpeech)
            for file in files:
                heard = decode_samples(Media(file.read_bytes(), "audio/*"), RATE, MAX_SECONDS)[
                    :WINDOW
                ]
                features = extractor(heard, sampling_rate=RATE, return_tensors="np").input_features
                for timed in (False, True):
                    start = speech.instructions(language, "transcribe", timed=timed)
                    begun = time.process_time()
                    view = ctranslate2.StorageView.from_array(features)
                    expected = theirs.generate(view, [start], beam_size=1, max_length=448)[
                        0
                    ].sequences_ids[0]
                    peer = time.process_time() - begun
                    begun, answer = time.process_time(), Future[Any]()
                    engine.submit(
                        speech.prompt(encode_wav(heard, RATE), start), SamplingParams(max_tokens=448, temperature=0),
                        sink=answer.set_result, logit_processor=speech.logit_rules(start, timed=timed),
                    )  # fmt: skip
                    ids, ours = (
                        [each for each in answer.result().token_ids if each != speech.end],
                        time.process_time(),
                    )
                    same = (
                        "the same"
                        if ids == [each for each in expected if each != speech.end]
                        else "OTHERS"
                    )
                    told = (
                        f"{file.name}, {len(heard) / RATE:.1f} s, {'with' if timed else 'no'} times"
                    )
                    took = f"ours {ours - begun:.2f} s, CTranslate2 {peer:.2f} s of a processor"
                    print(f"{told}: {len(ids)} tokens, {same}; {took}", flush=True)


# ----------------------------------------------------------------------------------- random weights


def _save_shape(shape: str, folder: Path) -> None:
    save_rest(folder, whisper_config(*_SHAPES[shape], vocab=51_866))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        text: i
        for i, text in enumerate([*alphabet, *(f"x{i}" for i in range(END - len(alphabet)))])
    }
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|startoftranscript|>")])
    tokenizer.save(str(folder / "tokenizer.json"))


def _seconds(run: Callable[[list[Media]], object], requests: int, repeat: int) -> float:
    """Median time of runs over new sounds, after a first one."""
    taken, random = [], np.random.default_rng(0)
    for _ in range(repeat + 1):
        sounds = [
            encode_wav(random.normal(0, 0.1, WINDOW).astype(np.float32), RATE)
            for _ in range(requests)
        ]
        begun = time.perf_counter()
        run(sounds)
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def speed(shape: str, requests: int, tokens: int, repeat: int) -> None:
    """Compares the seconds of requests with transformers'."""
    device, dtype = ("cuda", "float16") if GPU else ("cpu", "bfloat16")
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _save_shape(shape, folder)
        settings: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "load_format": "dummy",
            "max_running": requests,
        }
        if not GPU:
            settings["max_total_tokens"] = requests * 1984
        with sgl.Engine(made, in_process=True, **settings) as engine:

            def ours(sounds: list[Media]) -> None:
                pending = []
                for sound in sounds:
                    prompt = Prompt((Span("<audio>", ()), Span("", SAYS)), images=(sound,))
                    pending.append(Future[Any]())
                    engine.submit(prompt, params, sink=pending[-1].set_result)
                assert all(len(each.result().token_ids) == tokens for each in pending)

            own = _seconds(ours, requests, repeat)
        print(
            f"{requests} sounds of 30 s, {tokens} tokens each: ours {own:.3f} s, {requests / own:.1f} a second"
        )
        with torch.device(device):
            model: Any = (
                Whisper(WhisperConfig.from_pretrained(folder)).to(getattr(torch, dtype)).eval()
            )
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
        start = torch.tensor([SAYS] * requests, device=device)
        told = GenerationConfig(
            eos_token_id=None, pad_token_id=END, do_sample=False, max_new_tokens=tokens
        )

        def theirs(sounds: list[Media]) -> None:
            heard = [np.frombuffer(each.data[-4 * WINDOW :], np.float32) for each in sounds]
            features = extractor(heard, sampling_rate=RATE, return_tensors="pt").input_features
            inputs = features.to(device, model.dtype)
            found = GenerationMixin.generate(
                model, inputs, decoder_input_ids=start, generation_config=told
            )
            assert found.shape[1] == len(SAYS) + tokens

        with torch.inference_mode():
            peer = _seconds(theirs, requests, repeat)
        print(f"transformers as one batch {peer:.3f} s: {peer / own:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sounds", nargs="*", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--language", default="en")
    parser.add_argument("--shape", choices=_SHAPES)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print(describe())
    if args.weights is not None:
        compare(args.weights, args.sounds, args.language)
    if args.shape is not None:
        speed(args.shape, args.requests, args.tokens, args.repeat)


if __name__ == "__main__":
    main()
