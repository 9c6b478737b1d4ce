"""Loads a model, from its path to an object that can run."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.attention.registry import BUILTIN_BACKENDS
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig
from sglang_lite.runtime.config_checks import check_unset
from sglang_lite.runtime.embedding.load import (
    LoadedEncoder,
    load_encoder,
    reject_generation_settings,
)
from sglang_lite.runtime.embedding.spec import encoder_spec, is_encoder
from sglang_lite.runtime.executor.ranks import RankLinks
from sglang_lite.runtime.host import startup_messages
from sglang_lite.runtime.kernels.compile_process import DRIVER, CompileProcess
from sglang_lite.runtime.loading.checksums import check_files
from sglang_lite.runtime.loading.expert_placement import (
    prepare_expert_balancing,
    read_initial_placement,
)
from sglang_lite.runtime.loading.load_whisper import load_whisper
from sglang_lite.runtime.loading.model_files import ModelFiles, open_model_files
from sglang_lite.runtime.loading.rank_device import rank_device
from sglang_lite.runtime.loading.seeding import seed_host_and_port
from sglang_lite.runtime.loading.watched_layers import make_layer_watch
from sglang_lite.runtime.media.placeholders import MediaFormat
from sglang_lite.runtime.media.prepare import MediaPreparer
from sglang_lite.runtime.models import cpu_ranks
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.kv_scales import kv_scales, read_kv_scales
from sglang_lite.runtime.models.layers.linear import keeps_only_blocks
from sglang_lite.runtime.models.memory_check import check_free_memory, rotary_bytes, weight_bytes
from sglang_lite.runtime.models.model import Model, is_fused
from sglang_lite.runtime.models.offload import Offload, check_offload_size
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.sharding import rank_spec
from sglang_lite.runtime.models.sound_tower import SoundTower
from sglang_lite.runtime.models.spec import ConvSpec, ExpertsSpec, LatentSpec, ModelSpec
from sglang_lite.runtime.models.transformers_config import TransformersSpec
from sglang_lite.runtime.models.vision_tower import VisionTower, count_feature_vectors
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.models.weights.gguf import GgufSource
from sglang_lite.runtime.models.weights.load_format import (
    check_gguf_load_format,
    list_files_to_read,
    open_weights,
)
from sglang_lite.runtime.models.weights.quantised_formats import Q4_K, Matrices, read_quantisation
from sglang_lite.runtime.models.weights.remote import is_address
from sglang_lite.runtime.models.weights.rounding import ROUNDINGS
from sglang_lite.runtime.models.weights.seed import Seed
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.parallel.addresses import NCCL, rendezvous_url
from sglang_lite.runtime.parallel.collectives import ONE_PROCESS, Collectives
from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.parallel.shared_steps import SharedSteps
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sglang_lite.runtime.executor.compile_ahead import BackgroundCompilation
    from sglang_lite.runtime.media.encoder_client import EncoderClient

logger = logging.getLogger("sglang_lite")
Tower: TypeAlias = VisionTower | SoundTower

# Settings that must have their defaults for models that transformers' code runs.
_OF_OWN_CODE = (
    "quantization", "kv_dtype", "deterministic", "tp_size", "pp_size", "cpu_offload_gb", "language_only",
    "expert_distribution_recorder_mode", "enable_layerwise_nvtx_marker", "debug_tensor_dump_output_folder",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model, with its tokenizer and everything else that an engine needs to know about it.

    Attributes:
        compiling: compilation of its kernels in other processes; None on a CPU, or if none was
            started.
        path: its folder or file; None if it was created in another way.
        media, tower: how prompts contain images, videos and sounds, and their encoder; None if the
            model takes none.
        ranks: links to the ranks that hold its other parts; None if it is whole.
        shared: steps of the replicas that share its feed-forwards; None if it is whole.
        stages: number of steps that its stages compute at the same time. 1 on CPUs, where the
            stages of a machine use its threads in turn.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: frozenset[int]
    context_length: int
    compiling: BackgroundCompilation | None = None
    path: Path | None = None
    media: MediaFormat | None = None
    tower: Tower | EncoderClient | None = None
    ranks: RankLinks | None = None
    shared: SharedSteps | None = None
    stages: int = 1


@dataclass(frozen=True, slots=True)
class LoadedTower:
    """Encoder of a model's images, videos or sounds, without the model's decoder.

    Attributes:
        media, preparer: how prompts contain media, and what decodes the media.
        longest: number of the decoder's positions.
        device: device of the encoder.
    """

    name: str
    tower: Tower
    media: MediaFormat
    preparer: MediaPreparer
    tokenizer: Tokenizer
    longest: int
    device: torch.device


Loaded: TypeAlias = LoadedModel | LoadedEncoder | LoadedTower


def load(
    config: EngineConfig,
    path: Path,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    compiler: CompileProcess | None = None,
    ranks: RankLinks | None = None,
    shared: SharedSteps | None = None,
) -> Loaded:
    """Loads the model at `path`: a decoder, a text encoder, or the media encoder of a decoder.

    Args:
        progress: wraps the iterable of parts to load; None for a progress bar.
        compiler: compile process that was started early. If None, one is started if there is a
            kernel to compile.
        ranks: links to the ranks that load the other parts; None to load the whole model.
        shared: steps of the replicas that load the other parts of its feed-forwards; None to load
            them whole.

    Raises:
        ModelError: the model is damaged or not supported, or a file's sum differs from
            `model_checksum`.
    """
    if config.model_checksum is not None:
        if not config.model_checksum or is_address(config.model):
            why = "is for a model on this machine." if config.model_checksum else "names no file."
            raise ParameterError("model_checksum", why, hint="Leave it out.")
        check_files(path, Path(config.model_checksum), _weight_files_of(config, path))
    if is_encoder(path):
        if config.sharing.ranks > 1:
            problem = "a model that reads texts has one rank."
            raise ParameterError(config.sharing.setting, problem, hint="Leave it out.")
        bar = progress or partial(startup_messages.show_loading_progress, level=config.log_level)
        return load_encoder(config, path, pick_device(config), bar)
    if config.encoder_only:
        return load_tower(config, path)
    if shared is not None:
        loaded = load_model(config, path, progress, compiler, shared.ranks)
        assert isinstance(loaded.model, Decoder), "others are refused"
        loaded.model.share_steps(shared)
        return replace(loaded, shared=shared)
    if ranks is None:
        return load_model(config, path, progress, compiler)
    return replace(load_model(config, path, progress, compiler, ranks.collectives), ranks=ranks)


def load_tower(config: EngineConfig, path: Path) -> LoadedTower:
    """Loads only the encoder of images, videos or sounds of the model in the folder at `path`.

    Raises:
        ModelError: the model is damaged or not supported.
        ParameterError: it has no such encoder, or a setting does not apply to one.
    """
    reject_generation_settings(config)
    files = open_model_files(path, config.model_impl, config.image_options)
    device = pick_device(config)
    assert files.media is not None, "refused with the files"
    if not isinstance(files.spec, ModelSpec):
        why = f"of {files.spec.architecture}, no engine takes features from elsewhere."
        raise ParameterError("encoder_only", why, hint="Serve it whole.")
    dtype = precision(config.dtype, device).compute
    tower = _open_tower(files, _source(files, config, device), dtype, device)
    preparer = MediaPreparer(path, files.media, config.image_options, pinned=device.type == "cuda")
    return LoadedTower(
        config.model,
        tower,
        files.media,
        preparer,
        files.tokenizer,
        files.spec.max_positions,
        device,
    )


def _weight_files_of(config: EngineConfig, path: Path) -> set[Path]:
    """Returns the weight files that are read for a model."""
    if path.is_file():
        return {path}
    behind = [each.folder for each in encoder_spec(path).dense] if is_encoder(path) else []
    return list_files_to_read(path, config.load_format).union(
        *(list_files_to_read(each, "auto") for each in behind)
    )


def load_model(
    config: EngineConfig,
    path: Path,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    compiler: CompileProcess | None = None,
    ranks: Collectives = ONE_PROCESS,
) -> LoadedModel:
    """Loads the decoder in the GGUF file or folder at `path`.

    Args:
        progress: wraps the iterable of parts to load; None for a progress bar.
        compiler: compile process that was started early, as for `load`.
        ranks: collectives of the ranks that share the model, each of which loads its part.

    Raises:
        ModelError: the model is damaged or not supported.
    """
    files = _open_files(config, path)
    spec = files.spec
    tokenizer = files.tokenizer
    positions = longest_context(config, spec.max_positions)
    device = pick_device(config, ranks.parallel)
    _warn_if_gpu_unused(config, device)
    if isinstance(spec, TransformersSpec):
        return _load_transformers(config, files, spec)
    check_kv_dtype(config, spec)
    check_deterministic(config, spec, device)
    check_states(config, spec, device)
    check_replicas(config, spec)
    source = _source(files, config, device)
    given = (
        {}
        if (file := config.quantization_param_path) is None
        else read_kv_scales(Path(file), spec.kv_layout)
    )
    kind = Decoder
    if device.type == "cuda":
        from sglang_lite.runtime.models.gpu_decoder import GpuDecoder  # imports Triton

        kind = GpuDecoder
        # for this thread, which launches the kernels that quantise weights
        torch.cuda.set_device(device)
    stored = Q4_K if files.gguf is not None else read_quantisation(path).matrices
    formats = _choose_number_formats(config, stored, device, packed=source.has_packed_matrices)
    formats = replace(formats, states=getattr(torch, config.mamba_ssm_dtype))
    experts = read_initial_placement(config, spec, ranks.parallel)
    part = rank_spec(spec, ranks.parallel, even=kind.fused, placement=experts)
    ranks = _connect_devices(ranks, config, device, spec.hidden_size * formats.compute.itemsize)
    item = _least_weight_bytes(
        formats, kind, in_few_bits=path.is_file() or source.has_packed_matrices
    )
    offload = _offload(config, part, device, formats.weights.itemsize)
    check_free_memory(
        {
            "weights": max(weight_bytes(part, item) - (config.cpu_offload_gb << 30), 0),
            f"{positions:,} positions": rotary_bytes(spec, positions),
        },
        device,
        str(path),
        "Lower context_length, or take a smaller model or dtype.",
    )
    compilation: BackgroundCompilation | None = None
    if device.type == "cuda":
        from sglang_lite.runtime.executor.compile_ahead import start_compiling  # imports Triton

        kept = stored.format if formats.packed else None
        compilation = start_compiling(
            config, spec, formats, positions, device, compiler, ranks.parallel, kept
        )
    try:
        tower = _make_tower(files, config, source, formats.compute, device)
        with torch.inference_mode():
            bar = progress or partial(
                startup_messages.show_loading_progress, level=config.log_level
            )
            model = kind(
                spec,
                source,
                formats,
                device,
                positions,
                bar,
                ranks=ranks,
                offload=offload,
                placement=experts,
            )
        # None if this process has no encoder
        model.tower = tower if isinstance(tower, VisionTower | SoundTower) else None
        prepare_expert_balancing(
            model, config, spec, experts, partial(_source, files, config, device)
        )
        model.watch = make_layer_watch(config, spec, ranks.parallel, device)
        model.both_ways = tower is not None and files.media is not None and files.media.block > 0
        if model.precision.cache.itemsize == 1:
            model.kv_scales = kv_scales(
                model, source.kv_scales(spec.kv_layout) | given, tokenizer.bos_id
            )
    except BaseException:
        if compilation is not None:
            compilation.end_process()
        raise
    return LoadedModel(
        config.model,
        model,
        tokenizer,
        spec.vocab_size,
        files.eos_ids,
        spec.max_positions,
        compilation,
        path,
        None if tower is None else files.media,
        tower,
        stages=ranks.parallel.pp if kind.fused else 1,
    )


def _open_files(config: EngineConfig, path: Path) -> ModelFiles:
    return open_model_files(
        path,
        config.model_impl,
        config.image_options,
        tokenizer=not config.skip_tokenizer_init,
        # the handle encodes prompts, and finds errors in its own tokenizer
        encodes_later=not config.in_process,
    )


def _least_weight_bytes(formats: Precision, kind: type[Decoder], *, in_few_bits: bool) -> float:
    """Returns a lower bound on the memory that one weight of a matrix takes, in bytes.

    Args:
        formats: numeric formats of the model.
        kind: class of the model.
        in_few_bits: whether the checkpoint may have matrices in few bits.
    """
    if formats.int8 or formats.fp8 or formats.keep_fp8 or formats.rounding:
        return 0.5
    keeps_few = kind.fused or (
        formats.blocks and (formats.weights == torch.float32 or keeps_only_blocks())
    )
    return 0.5 if keeps_few and in_few_bits else formats.weights.itemsize


def _choose_number_formats(
    config: EngineConfig, stored: Matrices, device: torch.device, *, packed: bool
) -> Precision:
    """Returns the numeric formats that a model computes in. `stored` is how its matrices are
    declared to be stored, and `packed` is the same as for `precision`.
    """
    quantization = config.quantization or ("w8a8_int8" if stored.integer_inputs else None)
    formats = precision(
        config.dtype,
        device,
        batch_invariant=config.deterministic,
        quantization=quantization,
        kv_fp8=config.kv_dtype == "fp8",
        packed=packed,
    )
    if formats.packed and stored.fp4:
        logger.info(
            "FP4 numbers become 16 bits within products: only weights are in 4 bits (docs/models.md)."
        )
    return formats


def _offload(
    config: EngineConfig, spec: ModelSpec, device: torch.device, item: int
) -> Offload | None:
    """Returns the object that keeps the last layers' weights in host memory, or None if all weights
    are on the device. An element of a weight takes at most `item` bytes.
    """
    if not config.cpu_offload_gb:
        return None
    if spec.borrowed_blocks or spec.repeated_layers:
        why = "the model has layers that share weights, which are not copied layer by layer."
        raise ParameterError("cpu_offload_gb", why, hint="Leave it out.")
    if device.type == "cpu":
        why = "the weights of an engine on a CPU are in the host's memory."
        raise ParameterError("cpu_offload_gb", why, hint="Leave it out.")
    check_offload_size(spec, config.cpu_offload_gb, item)
    return Offload(device, config.cpu_offload_gb << 30, max(config.offload_group_size, 1))


def _make_tower(
    files: ModelFiles,
    config: EngineConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
) -> Tower | EncoderClient | None:
    """Returns the encoder of a model's images or sounds, in this process or as a client of other
    servers. Returns None if the model takes only text.
    """
    if files.media is None or not _supports_media_format(files.media, config, device):
        return None
    if not config.language_only:
        return _open_tower(files, source, dtype, device)
    from sglang_lite.runtime.media.encoder_client import EncoderClient  # imports an HTTP client

    assert isinstance(files.spec, ModelSpec), "transformers' models take no media here"
    return EncoderClient(
        config.encoder_urls,
        files.spec.hidden_size,
        count_feature_vectors(files.path),
        dtype,
        device,
    )


def _open_tower(
    files: ModelFiles, source: WeightSource, dtype: torch.dtype, device: torch.device
) -> Tower:
    sound = files.media is not None and files.media.sound is not None
    return (SoundTower if sound else VisionTower)(files.path, source, dtype, device)


def _supports_media_format(media: MediaFormat, config: EngineConfig, device: torch.device) -> bool:
    """Returns True if the model can read media of this format with the configured ranks and
    attention. Logs a warning if not.
    """
    layout = config.sharing
    if layout.ranks > 1:
        logger.warning(
            "%s reads text alone with %s=%d.", config.model, layout.setting, layout.ranks
        )
        return False
    able = not config.deterministic and config.attention_backend in ("auto", *BUILTIN_BACKENDS)
    if able or not media.block or device.type == "cpu":
        return True
    logger.warning(
        "%s reads text alone with deterministic=%s and attention_backend=%r: the tokens of its images see later ones.",
        config.model,
        config.deterministic,
        config.attention_backend,
    )
    return False


def _load_transformers(
    config: EngineConfig, files: ModelFiles, spec: TransformersSpec
) -> LoadedModel:
    """Loads a model that runs with transformers' code."""
    # imports all of transformers' models
    from sglang_lite.runtime.models.load_transformers import load_transformers

    check_unset(
        config,
        _OF_OWN_CODE,
        f"{spec.architecture} runs by transformers' code, without it.",
        "Leave it out.",
    )
    if config.dtype == "int8":
        raise ParameterError(
            "dtype", f"{spec.architecture} runs by transformers' code, which has no int8."
        )
    if config.load_format not in ("auto", "dummy"):
        raise ParameterError(
            "load_format", "transformers' code chooses the file itself.", hint='Use "auto".'
        )
    device = pick_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for this thread, which tries the model
    loaded = partial(
        LoadedModel,
        config.model,
        tokenizer=files.tokenizer,
        vocab_size=spec.vocab_size,
        eos_ids=files.eos_ids,
        context_length=spec.max_positions,
        path=files.path,
    )
    if spec.sound is not None:
        dtype = precision(config.dtype, device).compute
        source = partial(_source, files, config, device)
        decoder, tower = load_whisper(config, files, spec.sound, source, dtype, device)
        return loaded(decoder, media=files.media, tower=tower)
    why = (
        "as model_impl says"
        if config.model_impl == "transformers"
        else "as there is none of our own: it is slower"
    )
    startup_messages.announce_line(
        f"{spec.architecture} runs by transformers' code, {why}.", config.log_level
    )
    dummy = config.load_format == "dummy"
    model = load_transformers(
        files.path, precision(config.dtype, device).compute, device, dummy=dummy
    )
    if is_fused(model) and model.uncapturable is not None:
        logger.warning(
            "%s runs without CUDA graphs, as its steps can't be captured: %s",
            spec.architecture,
            model.uncapturable,
        )
    return loaded(model)


def _source(files: ModelFiles, config: EngineConfig, device: torch.device) -> WeightSource:
    """Returns the source of the weights in the format of the files, or of random weights for
    `load_format="dummy"`.
    """
    if files.gguf is not None:
        check_gguf_load_format(config.load_format, files.path)
        if config.quantization not in (None, "fp8", "gguf"):
            raise ParameterError(
                "quantization",
                f"{config.quantization!r} is not for GGUF files, which say how they are quantised.",
                hint='Leave it out, or use "gguf".',
            )
        dummy = config.load_format == "dummy"
        assert isinstance(files.spec, ModelSpec), "no other code reads GGUF files"
        return DummySource(device, Q4_K) if dummy else GgufSource(files.gguf, files.spec)
    declared = read_quantisation(files.path)
    declared.check_requested_format(config.quantization)
    if config.load_format == "dummy":
        return DummySource(device, declared.matrices)
    if config.load_format == "remote_instance":
        return _open_instance_source(config, device)
    source = open_weights(
        files.path,
        config.model,
        config.load_format,
        declared.matrices,
        threads=config.load_threads,
        pinned=device.type == "cuda",
    )
    declared.check_checkpoint(source)
    return source


def _open_instance_source(config: EngineConfig, device: torch.device) -> WeightSource:
    """Returns the source that receives the weights from a running engine."""
    # imports torch.distributed
    from sglang_lite.runtime.models.weights.instance import InstanceSource

    if config.sharing.ranks > 1:
        hint = f"Leave {config.sharing.setting} out."
        raise ParameterError("load_format", "'remote_instance' is for one rank.", hint=hint)
    patience = config.dist_timeout or DIST_TIMEOUT_S
    return InstanceSource(
        Seed(*seed_host_and_port(config), timeout_s=patience),
        config.weight_version,
        device,
        backend=config.remote_instance_weight_loader_backend,
        port=(config.remote_instance_weight_loader_send_weights_group_ports or (0,))[0],
        timeout_s=patience,
    )


def longest_context(config: EngineConfig, limit: int) -> int:
    """Returns the length of the longest sequence, in tokens: the configured one or the model's own
    limit.

    Raises:
        ParameterError: the config asks for more than the model's limit.
    """
    if config.context_length is not None and config.context_length > limit:
        raise ParameterError(
            "context_length", f"{config.context_length} is more than the model's {limit}."
        )
    return config.context_length or limit


def pick_device(config: EngineConfig, parallel: Parallel = ONE_PROCESS.parallel) -> torch.device:
    """Returns the device that a config names. For "auto", this is the GPU `base_gpu_id` if it is
    usable, else the CPU. Each of several ranks gets the GPU that the config assigns to it.

    Raises:
        ParameterError: the device does not exist or can't be used.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(set(visible)) < len(visible):
        problem = f"{','.join(visible)!r} names a GPU twice, which hides others."
        raise ParameterError("CUDA_VISIBLE_DEVICES", problem, hint="Name each once.")
    name = f"cuda:{config.base_gpu_id}" if config.device in ("auto", "cuda") else config.device
    reason = why_no_gpu(name)
    # a replica's GPU is in its config
    if reason is None and parallel.ranks > 1 and parallel.dp == 1:
        return rank_device(config, parallel)
    if reason is None:
        return torch.device(name)
    if config.base_gpu_id and torch.cuda.is_available():
        hint = "Use fewer replicas (dp_size), or a smaller gpu_id_step or base_gpu_id."
        raise ParameterError("base_gpu_id", f"{name!r} can't be used: {reason}", hint=hint)
    if config.device != "auto":
        raise ParameterError(
            "device", f"{config.device!r} can't be used: {reason}", hint='Use device="cpu".'
        )
    return torch.device("cpu")


def _connect_devices(
    ranks: Collectives, config: EngineConfig, device: torch.device, row_bytes: int
) -> Collectives:
    """Connects the ranks' devices with the help of `ranks`. Returns the fastest collectives for
    tensors on these devices.

    Args:
        ranks: collectives of the ranks.
        config: config of the engine.
        device: this rank's device.
        row_bytes: bytes of a row of hidden states.
    """
    if ranks.parallel.ranks == 1:
        return ranks
    if device.type == "cpu":
        return cpu_ranks.connect(ranks)
    from sglang_lite.runtime.models.gpu_ranks import connect  # imports Triton

    where = None if ranks.parallel.nodes == 1 else rendezvous_url(config.dist_init_addr, NCCL)
    return connect(
        ranks, device, row_bytes, own_sum=not config.disable_custom_all_reduce, meeting=where
    )


def why_no_gpu(name: str) -> str | None:
    """Returns the reason why a GPU, such as "cuda:0", can't be used, or None if it can."""
    if not torch.cuda.is_available():
        return _no_gpu_found_reason()
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices."
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"its compute capability is {major}.{minor}; 8.0 (Ampere) or newer is needed."
    if not _has_kernels_for(major, minor):
        return (
            f"this torch, for CUDA {torch.version.cuda}, has no kernels for its compute capability, {major}.{minor}. "
            "Install a torch for another CUDA, as pytorch.org lists them."
        )
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing."
    return None


def _has_kernels_for(major: int, minor: int) -> bool:
    """Returns True if torch was compiled for GPUs of this compute capability. Binary code also runs
    on later cards of its generation, and PTX ("compute_90") on all later ones.
    """
    for compiled in torch.cuda.get_arch_list():
        kind, _, number = compiled.rstrip("af").partition("_")
        made_for = divmod(int(number), 10)
        if made_for <= (major, minor) and (made_for[0] == major or kind == "compute"):
            return True
    return False


def _warn_if_gpu_unused(config: EngineConfig, device: torch.device) -> None:
    """Warns if the CPU was picked automatically although an NVIDIA driver is present and no
    environment variable hides the GPU.
    """
    has_gpu = DRIVER.exists() and "CUDA_VISIBLE_DEVICES" not in os.environ
    if device.type == "cpu" and config.device == "auto" and has_gpu:
        logger.warning(
            "the model runs on the CPU, as the GPU can't be used: %s", why_no_gpu("cuda")
        )


def _no_gpu_found_reason() -> str:
    """Returns the reason why torch sees no GPU. If a driver is present, this is torch's own message
    (about an old driver, for example).
    """
    if DRIVER.exists():
        if torch.version.cuda is None:
            return "this torch is a build for CPUs. Install one for CUDA: pip install --force-reinstall torch."
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call] # untyped in torch
        except (RuntimeError, AssertionError) as error:
            return f"torch says: {str(error).partition(chr(10))[0]}"
    return "torch sees no CUDA device."


def computes_in_eight_bits(device: torch.device) -> bool:
    """Returns True if the device multiplies 8-bit floating-point numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def precision(
    dtype: str,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    quantization: str | None = None,
    kv_fp8: bool = False,
    packed: bool = False,
) -> Precision:
    """Returns the numeric formats in which a model with this `dtype` is stored and computes on a
    device.

    Args:
        dtype: field `dtype` of an EngineConfig.
        device: device of the model.
        batch_invariant: whether every row must be computed the same way in every batch.
        quantization: field `quantization` of an EngineConfig.
        kv_fp8: whether keys and values are stored in 8-bit floating point.
        packed: whether the checkpoint has packed matrices, which a GPU keeps packed if they have up
            to 4 bits.

    Raises:
        ParameterError: the device can't compute in the format.
    """
    fp8 = quantization == "fp8"
    rounding = next((to for to in ROUNDINGS if to == quantization), None)
    for wanted, name in ((fp8, "quantization"), (kv_fp8, "kv_dtype")):
        if wanted and not computes_in_eight_bits(device):
            raise ParameterError(
                name,
                "fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or newer.",
                hint="Leave it out; checkpoints in 8 bits are read without it.",
            )
    if rounding is not None and dtype in ("int8", "float32"):
        raise ParameterError(
            "quantization",
            f"{rounding!r} goes with 16 bits, not with dtype {dtype}.",
            hint="Leave one out.",
        )
    if device.type == "cuda":
        if dtype == "int8":
            raise ParameterError("dtype", "int8 is for CPUs.", hint='Use quantization="int8".')
        dtype = "bfloat16" if dtype == "auto" else dtype
    automatic = dtype == "auto"
    if automatic:
        dtype = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"  # noqa: SLF001 # torch has no other name for it
    if dtype == "int8":
        if not torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
            raise ParameterError(
                "dtype", "int8 needs a CPU with VNNI instructions.", hint="Use bfloat16 or float32."
            )
        return Precision(
            torch.float32,
            torch.bfloat16,
            torch.bfloat16,
            int8=True,
            batch_invariant=batch_invariant,
        )
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    if fp8 and kind != torch.bfloat16:
        raise ParameterError("quantization", f"fp8 goes with dtype bfloat16, not {dtype}.")
    few_bits = device.type == "cuda" and kind.itemsize == 2 and not batch_invariant
    # all matrices, or those stored as int8
    int8 = few_bits and quantization in ("int8", "w8a8_int8")
    return Precision(
        kind,
        kind,
        torch.float8_e4m3fn if kv_fp8 else kind,
        batch_invariant=batch_invariant,
        fp8=fp8,
        packed=few_bits and (packed or quantization is not None) and quantization != "int8",
        int8=int8,
        rounding=None if int8 else rounding,
        blocks=device.type == "cpu"
        and not batch_invariant
        and (automatic or kind == torch.bfloat16),
        keep_fp8=kind == torch.bfloat16 and not batch_invariant and computes_in_eight_bits(device),
    )


def check_kv_dtype(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ParameterError if 8-bit keys and values are requested for a model with convolutions,
    or with layers that read other layers' keys.
    """
    if config.kv_dtype == "fp8" and any(isinstance(x.attention, ConvSpec) for x in spec.layers):
        raise ParameterError(
            "kv_dtype",
            "the model has short convolutions, whose inputs are not kept in 8 bits.",
            hint="Leave it out.",
        )
    if config.kv_dtype == "fp8" and spec.has_linked_layers:
        why = (
            "the model has layers that read other layers' keys or inputs of their own, with which 8-bit keys were "
            "not tried."
        )
        raise ParameterError("kv_dtype", why, hint="Leave it out.")


def check_states(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ParameterError if the model has recurrent layers and a setting does not support them."""
    if not any(spec.states):
        return
    what = "the model has recurrent layers (such as linear attention or state spaces)"
    for name, wrong, why in (
        ("deterministic", config.deterministic, "whose sums depend on how a prompt is cut"),
        (
            "pp_size",
            config.pp_size > 1 and device.type == "cuda",
            "whose states concurrent steps of GPUs would overwrite",
        ),
        (
            "enable_dp_attention",
            config.enable_dp_attention,
            "whose states replicas were not tried with",
        ),
        ("kv_dtype", config.kv_dtype == "fp8", "with which 8-bit keys were not tried"),
        (
            "mamba_ssm_dtype",
            config.mamba_ssm_dtype != "float32" and spec.has_running_maxima,
            "whose running maxima need float32",
        ),
    ):
        if wrong:
            raise ParameterError(name, f"{what}, {why}.", hint="Leave it out.")


def check_replicas(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ParameterError if replicas can't share the model's feed-forwards."""
    if config.enable_dp_attention and any(layer.feeds_apart for layer in spec.layers):
        what = "the model has experts beside dense feed-forwards, with norms of their own"
        why = "which replicas can't share yet"
        raise ParameterError("enable_dp_attention", f"{what}, {why}.", hint="Leave it out.")


def check_deterministic(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ParameterError if `deterministic` is set and the GPU, the model or another parameter
    doesn't support it.
    """
    if not config.deterministic or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise ParameterError(
            "deterministic",
            "needs a CPU or a Hopper GPU (H100, H200), whose order of summation is known.",
            hint='Use device="cpu".',
        )
    for name, able in (
        ("dtype", ("auto", "bfloat16", "float16")),
        ("quantization", (None,)),
        ("kv_dtype", ("auto",)),
        ("attention_backend", ("auto", "triton")),
    ):
        if (value := getattr(config, name)) not in able:
            raise ParameterError(
                name, f"{value!r} does not go with deterministic on a GPU.", hint="Leave one out."
            )
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, LatentSpec):
            _reject_deterministic("latent attention")
        elif attention.sinks:
            _reject_deterministic("attention sinks")
        if isinstance(layer.feed_forward, ExpertsSpec):
            _reject_deterministic("a mixture of experts")


def _reject_deterministic(what: str) -> None:
    raise ParameterError(
        "deterministic",
        f"the model has {what}, whose sums on a GPU depend on the batch.",
        hint='Use device="cpu".',
    )
