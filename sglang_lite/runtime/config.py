"""Configuration of an engine. Every field is a keyword of `Engine`, and is either honoured or
rejected.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from types import NoneType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from sglang_lite.protocol import ParameterError, RecordName
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import parameters_for
from sglang_lite.runtime.attention.registry import AttentionBackendName
from sglang_lite.runtime.capacity import Sizes
from sglang_lite.runtime.config_checks import (
    apply_layer_dump_settings,
    check_cache_tiers,
    check_chat_template,
    check_offload,
    check_parallel,
    check_scales,
    check_states,
    check_unset,
    normalise_media_settings,
    normalise_seed_ports,
)
from sglang_lite.runtime.config_checks import check_int as _check_int
from sglang_lite.runtime.config_checks import check_number as _check_number
from sglang_lite.runtime.models.config_fields import abbreviate
from sglang_lite.runtime.models.lora.paths import normalise_lora_paths
from sglang_lite.runtime.parallel.layout import ALONE, Parallel
from sglang_lite.runtime.structured_output.registry import ConstraintBackend
from sglang_lite.runtime.tokens.image_options import ImageOptions, parse_media_setting

# Larger values would exceed the machine's limits: positions and slots are int32, and each thread
# has a stack.
_MAX = {
    "context_length": (1 << 31) - 1,
    "max_total_tokens": (1 << 31) - 1,
    "threads": 1024,
    "load_threads": 1024,
    "max_running": 65_536,
    "step_tokens": 1 << 24,
    "page_size": 64,
    "image_cache_mb": 1 << 20,
    "dist_timeout": 1 << 20,
    "compile_processes": 1024,
    "draft_tokens": 16,
    "draft_context": 16,
    "draft_capacity": 1 << 30,
    "seed": 1 << 53,
}
# Formats of a checkpoint's weights.
LoadFormat: TypeAlias = Literal[
    "auto",
    "safetensors",
    "pt",
    "npcache",
    "sharded_state",
    "mistral",
    "remote",
    "remote_instance",
    "gguf",
    "dummy",
]
# When a page is copied to the host.
WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]
# Rules by which replicas are chosen (engine/replica_chooser.py).
LoadBalance: TypeAlias = Literal[
    "auto", "cache_aware", "round_robin", "shortest_queue", "total_requests", "total_tokens"
]
DIST_TIMEOUT_S = 300  # where `dist_timeout` is None
_WHOLE = -1  # value of step_tokens that prefills prompts whole
DRAFTERS = ("again", "node", "state", "prompt")  # in the order of "auto"
DEFAULT_MODEL = "smollm2-135m"
_P = ParamSpec("_P")


# How matrices are quantised while loading, or the format a checkpoint declares.
QuantizationName: TypeAlias = Literal[
    "fp8",
    "int4",
    "int8",
    "nf4",
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "compressed-tensors",
    "bitsandbytes",
    "gguf",
    "modelopt",
    "modelopt_fp8",
    "modelopt_fp4",
    "mxfp4",
    "w8a8_int8",
    "w8a8_fp8",
    "fbgemm_fp8",
    "torchao",
]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of an engine, checked on creation.

    Attributes:
        model: a short name (`sglang-lite models` lists them), a Hugging Face folder, a `.gguf`
            file, a hub id, or the address of a folder that fsspec knows.
        revision: branch, tag or commit of a hub id.
        model_impl: "native" runs the model with our own code; "transformers" with transformers'
            code over our KV cache: slower, but works for any causal language model whose only state
            is keys and values; "auto" prefers our own code if it supports the model.
        load_format: "auto" reads the checkpoint in its own format; "safetensors", "pt" (pickled
            tensors) and "gguf" reject another format; "npcache" reads pickled tensors from a copy
            in NumPy's format, which it makes beside them; "sharded_state" reads the files that
            `sglang-lite save --sharded` writes; "mistral" reads `consolidated*.safetensors`, which
            Mistral publishes next to `params.json`; "remote" reads safetensors at an address
            (`model="s3://…"`), like "auto" there; "remote_instance" loads those of a running
            server's engine (like `model="instance://host:port"`, plus the model's name); "dummy"
            draws random weights of the model's shapes.
        load_threads: number of threads that read safetensors.
        remote_instance_weight_loader_seed_instance_ip: host of that server.
        remote_instance_weight_loader_seed_instance_service_port: its port.
        remote_instance_weight_loader_send_weights_group_ports: port of the group in which its
            engine sends them, in a list; None for any free port there.
        remote_instance_weight_loader_backend: "gloo" or "nccl"; "auto" is nccl on a GPU.
        model_checksum: file with the SHA-256 sums of the model's files, which are compared before
            weights are read: lines of `sha256sum`, or JSON as SGLang's verifier writes it. None to
            compare none.
        skip_tokenizer_init: whether the checkpoint may lack a tokenizer. If it does, prompts and
            answers are token ids only: the texts of answers are empty, and text, chat templates and
            constraints are rejected.
        served_model_name: name of the model in answers; None for `model`.
        weight_version: name of the weights, reported in answers and by `get_model_info`;
            `update_weights` may change it.
        chat_template: a Jinja template, or the path of one, that replaces the model's own.
        special_tokens_in_roles: whether text that a program writes into a turn (users' text, tools'
            results, choices, variables) can name special tokens, as text outside turns, chat
            templates and `generate`'s prompts always can. If True, a user who writes `<|im_end|>`
            ends the turn.
        device: "cpu", "cuda" or "cuda:1"; "auto" for the GPU if a usable one is found, otherwise
            the CPU.
        dp_size: number of replicas: engines of the same model with one handle, each in its own
            process, on its own GPU if it has one. Sizes (`max_running`, `max_total_tokens`,
            `mem_fraction`) apply to each.
        load_balance_method: how requests and programs get a replica: "auto" (or "cache_aware")
            chooses the one with most of the prompt in its cache, otherwise the least loaded;
            "total_tokens" the one with the fewest expected tokens to compute, "total_requests" (or
            "shortest_queue") the one with the fewest requests; "round_robin" alternates.
        base_gpu_id: number of the GPU, or of the first one if ranks or replicas have several.
        gpu_id_step: distance between two of their GPUs; 0 puts all on one, and each gets its part
            of `mem_fraction`.
        dtype: "bfloat16", "float32" or "float16"; "int8" quantises weights and activations (CPUs
            with VNNI: faster for many rows, less exact); "auto" is bfloat16 if the device computes
            in it, otherwise float32.
        quantization: "fp8" quantises the layers' matrices to 8-bit floating point while loading
            (e4m3; one scale per output, one per row of activations); the head and the embedding are
            not quantised. Needs a GPU of compute capability 8.9 (Ada, Hopper) or newer. "int8" does
            the same with integers on any GPU, but not with experts. "int4" and "nf4", and on CPUs
            "int8", round them to that many bits, in groups of inputs. None keeps the checkpoint's
            format. Layer matrices stored in 8-bit floating point (fp8, fbgemm_fp8, modelopt,
            compressed-tensors) keep their 8 bits on such a GPU if `dtype` is bfloat16. They stay
            exact except for block scales, which become one scale per output. On other devices they
            are dequantised while loading.
            Packed matrices keep their bits where a kernel multiplies them (docs/models.md). A
            checkpoint's own format ("gptq", "awq", "awq_marlin", "gptq_marlin",
            "compressed-tensors", "bitsandbytes", "mxfp4", "modelopt_fp8", "modelopt_fp4",
            "w8a8_int8", "w8a8_fp8", "torchao"; "gguf" for a GGUF file) may be named; another is
            rejected.
        kv_dtype: "fp8" stores keys and values in 8-bit floating point (e4m3), on a GPU as for
            `quantization`; "auto" is `dtype`. The values of each KV head are divided by a power of
            two: the checkpoint's scale rounded up, or, if it has none, one found while loading by
            running the model on a few hundred fixed tokens.
        quantization_param_path: JSON file with a scale of each layer's 8-bit keys and values, as
            SGLang's and vLLM's tools write it; overrides the checkpoint's own scales. Needs
            `kv_dtype="fp8"`. None for those, or for a trial run if there are none.
        context_length: longest sequence in tokens; None for the model's own limit. A model with
            "longrope" (Phi) has two sets of factors: the short ones are used if this is within its
            original length, otherwise the long ones.
        max_total_tokens: size of the KV pool in tokens. None: on a GPU, the memory that
            `mem_fraction` leaves; on a CPU, 512 for each of `max_running`, and at least
            `context_length`.
        mem_fraction: share of a GPU's memory for this engine: weights, KV pool and everything else.
            Sets the size of the pool if `max_total_tokens` is None. Ignored on a CPU.
        max_running: maximum number of requests computed at the same time; None for 64 on a CPU, 256
            on a GPU.
        max_queued: maximum number of waiting requests; further ones are rejected.
        step_tokens: maximum number of tokens computed in one step; a longer prompt is prefilled in
            chunks. None for 512 on a CPU, 8,192 on a GPU. -1 for the longest sequence's length, so
            that no prompt is chunked.
        page_size: tokens in a page of the KV pool; None for 1 on a CPU, 16 on a GPU.
        image_cache_mb: memory for the features of images, videos and sounds in MB. Those of a
            request must fit; the least recently used of others are dropped, and encoded again when
            needed. Ignored by text-only models.
        enable_multimodal: False reads only text, without the memory of an encoder; True rejects a
            model that takes only text; None reads whatever the model supports.
        limit_mm_data_per_request: maximum numbers of images, videos and sounds in a prompt, e.g.
            {"image": 4, "video": 1}; None for no limit.
        mm_process_config: settings that override those of the model's processors: {"image":
            {"max_pixels": 500000}, "video": {"fps": 1}}; None for the model's.
        encoder_only: whether to load only the encoder of images, videos and sounds, whose features
            other engines request. Rejected with settings for text.
        language_only: whether the features come from other servers, and no encoder is loaded. Needs
            `encoder_urls`.
        encoder_urls: addresses of servers with `encoder_only` and the same model, e.g.
            ("http://10.0.0.2:30000",). One that does not answer is replaced by the next.
        max_mamba_cache_size: number of states of recurrent layers that are kept for later requests;
            at least `max_running`. None for as many as `mamba_full_memory_ratio` allows.
        mamba_full_memory_ratio: memory of all states, in multiples of that of keys and values.
            Ignored if `max_mamba_cache_size` is given, by models without attention, whose states
            take all memory that is left, and by models without states.
        mamba_ssm_dtype: data type of what layers sum up: "float32" or "bfloat16", which takes half
            of the memory and is less exact. Ignored by other models.
        mamba_track_interval: number of tokens between states that are kept within long prompts; 0
            keeps states only where a text is expected to be continued: at the end of prompts and
            answers, where programs fork, and where waiting prompts stop being alike. Ignored by
            other models.
        prefix_cache: whether to keep and reuse computed prefixes.
        explain_cache_misses: whether results explain uncached tokens with the text that the cache
            has instead, and with a match in another namespace; this reveals parts of other prompts.
            None is True, but False for `sglang-lite serve`. True is rejected for embedding models,
            which have no cache.
        policy: order of admission: "lpm" (longest cached prefix first), "fcfs" (first come, first
            served), "priority".
        eviction: order in which cached prefixes are evicted: "lru", "lfu", "fifo", "slru".
        cpu_offload_gb: GiB of the last layers' weights kept on the host. Each step copies them from
            its pinned memory to a GPU, while it computes other layers. 0 for none.
        offload_group_size: number of layers copied together; the GPU has room for two such groups.
            -1 for 1.
        enable_memory_saver: whether weights and KV cache are in memory that `sleep` can release;
            without it an engine on a GPU can't sleep. One on a CPU always can.
        enable_weights_cpu_backup: whether host memory for the weights is allocated at the start,
            rather than at the first sleep. Needs `enable_memory_saver`.
        refuse_while_asleep: whether new requests fail with `OverloadedError` while the engine
            sleeps, rather than wait.
        enable_return_routed_experts: whether the KV cache also stores the experts of each token,
            for requests with `return_routed_experts`. Needs a mixture of experts.
        enable_return_hidden_states: the same for hidden states, for requests with
            `return_hidden_states`.
        enable_hierarchical_cache: whether pages that leave the device are kept in the host's
            memory, and copied back for prompts with the same beginning. Outputs don't change. Needs
            `prefix_cache`.
        hicache_ratio: size of that memory, in multiples of the KV pool and of the states kept.
            Ignored if `hicache_size` is given.
        hicache_size: the same in GB; 0 for `hicache_ratio`. Shared by pages and states as
            `mamba_full_memory_ratio` says.
        hicache_write_policy: when a page is copied to the host: "write_through", when it is
            computed; "write_through_selective", when a second request begins with it; "write_back",
            when it is evicted.
        hicache_storage_backend: "file" also keeps the host's pages in files, each of 256 tokens of
            a prompt, and its states, which other engines on this machine, and later ones, read;
            "fsspec" keeps them at a URL of fsspec, and other names are those of classes that are
            registered as entry points of "sglang_lite.page_stores". Pages that only the device has
            when the engine ends are lost. None for no files. Needs `enable_hierarchical_cache`.
        hicache_storage_dir: folder of the files, URL, or other argument of the class. Anyone who
            can write there can forge what a model takes for its own computation.
        hicache_storage_prefetch_policy: how long a request waits for files before it computes the
            unread part: "wait_complete", until everything has been read; "timeout", for 2 s plus
            0.1 s per 1,000 tokens; "best_effort", no longer than it waits for its turn. No request
            waits more than ten seconds.
        hicache_storage_max_gb: maximum size of all files of "file"; the least recently used are
            removed. Other stores have no limit here.
        overlap: whether to plan and launch a step while the previous one is still running.
        jump_forward: "safe" appends text that a constraint forces as a whole, in the tokenizer's
            own spelling, instead of token by token; tokens at its end that might merge with the
            following text are left to the model. Not for requests with log-probabilities or a logit
            processor. On a CPU, the text after a quote in its document is drafted, so one step
            checks several of its words. "off" lets the model write every token.
        speculation: drafters that guess tokens, which one step then checks together: "off", "auto"
            for all, or comma-separated names. "again" remembers answers to the same prompt, "node"
            those of the same node of programs or under the same constraint, "state" tokens in the
            same state of a constraint, and "prompt" copies what followed the last tokens earlier in
            the text. A guess counts while it is what would have been drawn, so no token or
            log-probability changes, except for the rounding of larger batches. Guesses that are too
            rarely right to pay are skipped. Requests with a logit processor get none.
        draft_tokens: maximum number of guesses in a draft, 1 to 16. Text that a constraint forces
            within it is not counted.
        draft_capacity: number of the last tokens of answers that a drafter remembers, some 700
            bytes each.
        draft_context: maximum number of a text's last tokens to search for in earlier text, 1 to
            16.
        deterministic: whether to use one numeric path per dtype, so that a request's tokens and
            log-probabilities have the same bits regardless of concurrent requests, of how its
            prompt is cut into chunks, and of whether it was found in the cache. On a CPU attention
            is computed token by token: in bfloat16, decoding reaches 0.6 (one request) to 0.8 (64)
            of the normal speed, prefill 0.45 (512 tokens) to 0.3 (2,048). On a GPU it needs a
            Hopper GPU, 16 bits, and a model without experts, latent attention and attention sinks.
        original_logprobs: whether log-probabilities of generated tokens are the model's own, before
            penalties, biases, masks and temperature. If False, they are those of the distribution
            that tokens are drawn from, before top-k, top-p and min-p; greedy requests have
            temperature 1. Log-probabilities of prompt tokens and choices are always the model's
            own.
        enable_lora: whether requests may name adapters (LoRA); `lora_paths` implies it. Not with
            `deterministic`.
        lora_paths: adapters to begin with: folders of peft's, `name=folder`, or objects with
            lora_name, lora_path and pinned (whether it stays on the device).
            `Engine.load_lora_adapter` loads others.
        max_loras_per_batch: number of different adapters that run at the same time; requests for
            others wait.
        max_loaded_loras: maximum number of adapters in the host's memory, where they use at most
            half of the free memory; the least recently used ones are dropped, and read again when
            they are named. None for no limit.
        max_lora_rank: largest rank of an adapter; None for the largest of `lora_paths`, or 64
            without any.
        lora_target_modules: names of the modules that adapters may change, such as "q_proj"; None
            or "all" for all.
        lora_eviction_policy: which adapter on the device is replaced by another: "lru", the one
            used longest ago, or "fifo", the one copied longest ago.
        constraint_backend: grammar engine for constraints: "llguidance", the choice of "auto",
            enforces all; "xgrammar" and "outlines" (regexes and choices) reject constraints that
            they can't enforce.
        compile_timeout_s: limit of CPU time for compiling a constraint, in seconds; beyond it, only
            the constraint's request fails.
        compile_memory_mb: memory limit of a process that compiles constraints, in MB; up to two of
            them run.
        cuda_graphs: whether to decode through captured CUDA graphs on a GPU; ignored on a CPU.
        compile_processes: number of forked processes that compile a model's kernels for a GPU in
            parallel while its weights are read; the engine uses each kernel as soon as it is ready.
            None are started if Triton's cache has all kernels. 0: the engine compiles them itself,
            one by one. None: one per core, at most 16; 0 on a single core. Ignored on a CPU.
        attention_backend: attention kernels on a GPU: "triton" for our own, or "torch", which
            supports heads of any size, but doesn't share the reading of common prefixes, runs
            without CUDA graphs, and is slower. "auto" is the first one that can run the model.
            "flashinfer" and "flash_attn" use the packages `flashinfer-python` and `flash-attn-4` if
            they are installed; neither shares the reading of common prefixes, and flashinfer runs
            without CUDA graphs. A named backend that can't run the model is rejected. Ignored on a
            CPU.
        threads: CPU threads, shared by ranks on a CPU; None for one per physical core, which
            replicas share out.
        tp_size: number of processes, called ranks, that share each layer's matrices (tensor
            parallelism); docs/parallel.md says what works with more than one.
        ep_size: number of groups of ranks among which the experts of each layer are divided (expert
            parallelism); must divide `tp_size`. 1 shards each expert over all ranks.
        enable_dp_attention: whether the `dp_size` replicas share one model's feed-forwards, sharded
            as `ep_size` says, while each has its own rows, cache, attention, embedding and head
            (attention by replicas). `tp_size` must equal `dp_size`, and is the number of processes.
        ep_num_redundant_experts: number of extra copies, in each layer, of the experts chosen most.
        init_expert_location: initial placement of experts: "trivial" for in order; or JSON, or a
            file of it, as `Engine.dump_expert_distribution_record` returns it.
        enable_eplb: whether to count how often experts are chosen, and periodically redistribute
            them and their copies, so that ranks get similar numbers of rows.
        eplb_algorithm: how they are placed: "deepseek" only by their load; "deepseek_hierarchical"
            with the groups of experts that tokens choose from on one machine; "auto" for that with
            several machines.
        eplb_rebalance_num_iterations: number of steps between redistributions.
        expert_distribution_recorder_mode: "stat" to count how often experts are chosen;
            `enable_eplb` also does that.
        enable_layerwise_nvtx_marker: whether each layer of a step is a range in profiles, and on a
            GPU in NVTX. Steps are then not captured in CUDA graphs.
        debug_tensor_dump_output_folder: folder with a subfolder per process, where each forward
            writes its ids and the hidden states after each layer, and the engine its steps, which
            `sglang-lite replay` replays. For tests: no CUDA graphs, and no step is planned ahead.
        debug_tensor_dump_layers: numbers of the layers written there; None for all.
        pp_size: number of stages in a row, each of `tp_size` processes with a run of the layers
            (pipeline parallelism), that compute a step one after another; on GPUs, each works on a
            different step at the same time.
        nnodes: number of machines among which the ranks, or with `dp_size` above 1 the replicas,
            are divided evenly. Each runs the same `sglang-lite serve`.
        node_rank: number of this machine; the engine is on 0.
        dist_init_addr: address of machine 0 and a port, such as "10.0.0.1:5000". The next two ports
            are also used.
        dist_timeout: seconds that processes of a group in which weights are sent, ranks that start,
            and replicas with `enable_dp_attention` in a step wait for one another; None for 300.
        disable_custom_all_reduce: whether only NCCL sums the results of GPUs, even for the few rows
            that are summed faster by stores into each other's memory.
        use_ray: whether the ranks after the first are actors on a Ray cluster, one each, that this
            process is connected to, or connects to. A GPU is reserved for each, or a CPU.
        seed: base of the seeds of requests that set none; None for fresh randomness. Replica r
            starts from `seed + r`.
        in_process: whether to run the engine in the caller's process instead of its own. The
            caller's computation and the engine's then wait for each other, and a crash of one ends
            both. Logit processors can be any function. On platforms that can't start the process
            (Windows), every engine runs this way.
        restart: whether to start another process for later requests if the engine's process has
            died, at most three times in five minutes. Rejected with `in_process`, like the next two
            fields.
        stall_timeout_s: seconds after which an unfinished step is logged, with its current
            activity.
        stream_interval_s: minimum number of seconds between two deltas of a stream; text in between
            is joined. 0 sends each delta immediately.
        log_level: level of this package's log messages in the whole process, case-insensitive; they
            are shown on standard error if the caller has set up no logging. None leaves the level
            unchanged.
    """

    model: str = DEFAULT_MODEL
    _: KW_ONLY
    revision: str | None = None
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    load_format: LoadFormat = "auto"
    remote_instance_weight_loader_seed_instance_ip: str | None = None
    remote_instance_weight_loader_seed_instance_service_port: int | None = None
    remote_instance_weight_loader_send_weights_group_ports: tuple[int, ...] | None = None
    remote_instance_weight_loader_backend: Literal["auto", "gloo", "nccl"] = "auto"
    model_checksum: str | None = None
    load_threads: int = 1
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None
    weight_version: str = "default"
    chat_template: str | None = None
    special_tokens_in_roles: bool = False
    device: str = "auto"
    dp_size: int = 1
    load_balance_method: LoadBalance = "auto"
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    quantization: QuantizationName | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    quantization_param_path: str | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    mem_fraction: float = 0.88
    max_running: int | None = None
    max_queued: int = 4096
    step_tokens: int | None = None
    page_size: int | None = None
    max_mamba_cache_size: int | None = None
    mamba_full_memory_ratio: float = 0.9
    mamba_ssm_dtype: Literal["float32", "bfloat16"] = "float32"
    mamba_track_interval: int = 0
    image_cache_mb: int = 512
    enable_multimodal: bool | None = None
    limit_mm_data_per_request: Mapping[str, int] | str | None = None
    mm_process_config: Mapping[str, Mapping[str, Any]] | str | None = None
    encoder_only: bool = False
    language_only: bool = False
    encoder_urls: tuple[str, ...] = ()
    prefix_cache: bool = True
    explain_cache_misses: bool | None = None
    policy: Literal["lpm", "fcfs", "priority"] = "lpm"
    eviction: Literal["lru", "lfu", "fifo", "slru"] = "lru"
    cpu_offload_gb: int = 0
    offload_group_size: int = -1
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    refuse_while_asleep: bool = False
    enable_return_routed_experts: bool = False
    enable_return_hidden_states: bool = False
    enable_hierarchical_cache: bool = False
    hicache_ratio: float = 2.0
    hicache_size: int = 0
    hicache_write_policy: WritePolicy = "write_through"
    hicache_storage_backend: str | None = None
    hicache_storage_dir: str | None = None
    hicache_storage_prefetch_policy: PrefetchPolicy = "timeout"
    hicache_storage_max_gb: float = 10.0
    overlap: bool = True
    jump_forward: Literal["safe", "off"] = "safe"
    speculation: str = "off"
    draft_tokens: int = 8
    draft_capacity: int = 60_000
    draft_context: int = 12
    deterministic: bool = False
    original_logprobs: bool = False
    enable_lora: bool = False
    lora_paths: tuple[str, ...] = ()
    max_loras_per_batch: int = 8
    max_loaded_loras: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: tuple[str, ...] | None = None
    lora_eviction_policy: Literal["lru", "fifo"] = "lru"
    constraint_backend: ConstraintBackend = "auto"
    compile_timeout_s: float = 10.0
    compile_memory_mb: int = 2048
    cuda_graphs: bool = True
    compile_processes: int | None = None
    attention_backend: AttentionBackendName = "auto"
    threads: int | None = None
    tp_size: int = 1
    ep_size: int = 1
    enable_dp_attention: bool = False
    ep_num_redundant_experts: int = 0
    init_expert_location: str = "trivial"
    enable_eplb: bool = False
    eplb_algorithm: Literal["auto", "deepseek", "deepseek_hierarchical"] = "auto"
    eplb_rebalance_num_iterations: int = 1000
    expert_distribution_recorder_mode: Literal["stat"] | None = None
    enable_layerwise_nvtx_marker: bool = False
    debug_tensor_dump_output_folder: str | None = None
    debug_tensor_dump_layers: tuple[int, ...] | None = None
    pp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout: int | None = None
    disable_custom_all_reduce: bool = False
    use_ray: bool = False
    seed: int | None = None
    in_process: bool = False
    restart: bool = False
    stall_timeout_s: float = 60.0
    stream_interval_s: float = 0.0
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None

    def __post_init__(self) -> None:
        _check_int("max_queued", self.max_queued, 1)
        for name, most in _MAX.items():
            if (value := getattr(self, name)) is not None and (name, value) != (
                "step_tokens",
                _WHOLE,
            ):
                _check_int(name, value, 0 if name in ("compile_processes", "seed") else 1)
                if value > most:
                    raise ParameterError(name, f"{abbreviate(value)} is more than {most:,}.")
        for name, optional in _TEXTS.items():
            value = getattr(self, name)
            if not isinstance(value, str) and not (optional and value is None):
                raise ParameterError(name, f"{abbreviate(value)} is no text.")
        check_chat_template(self.chat_template)
        if not isinstance(self.device, str) or not re.fullmatch(
            r"auto|cpu|cuda(:\d+)?", self.device
        ):
            raise ParameterError(
                "device", f'{self.device!r} is not one of "auto", "cpu", "cuda", "cuda:<number>".'
            )
        _check_number(
            "mem_fraction", self.mem_fraction, lambda x: 0 < x < 1, "not between 0 and 1."
        )
        _check_int("compile_memory_mb", self.compile_memory_mb, 256)
        self._check_speculation()
        for name in ("compile_timeout_s", "stall_timeout_s"):
            above = "no number of seconds above 0."
            _check_number(name, getattr(self, name), lambda x: 0 < x < float("inf"), above)
        pause = self.stream_interval_s
        _check_number(
            "stream_interval_s", pause, lambda x: 0 <= x <= 60, "no number of seconds from 0 to 60."
        )
        chunk = self.step_tokens
        if (
            chunk not in (None, _WHOLE)
            and self.max_running is not None
            and chunk < self.max_running
        ):
            raise ParameterError(
                "step_tokens",
                f"{self.step_tokens} is less than max_running ({self.max_running}).",
                hint="Every running request takes one token of a step.",
            )
        if self.in_process:
            check_unset(
                self,
                _OF_A_PROCESS,
                "is for an engine in its own process, not with in_process=True.",
            )
        if isinstance(self.log_level, str):
            object.__setattr__(self, "log_level", self.log_level.lower())
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ParameterError(
                    name, f"{getattr(self, name)!r} is not one of {', '.join(map(str, allowed))}."
                )
        check_states(self)
        check_cache_tiers(self)
        check_scales(self.quantization_param_path, self.kv_dtype)
        check_offload(self.cpu_offload_gb, self.offload_group_size, saver=self.enable_memory_saver)
        ports = "remote_instance_weight_loader_send_weights_group_ports"
        service = self.remote_instance_weight_loader_seed_instance_service_port
        object.__setattr__(self, ports, normalise_seed_ports(service, getattr(self, ports)))
        check_parallel(self)
        apply_layer_dump_settings(self)
        self._check_lora()
        normalise_media_settings(self)

    @property
    def recorded_names(self) -> tuple[RecordName, ...]:
        """Names of the values recorded for each token besides its keys and values."""
        asked: dict[RecordName, bool] = {
            "routed_experts": self.enable_return_routed_experts,
            "hidden_states": self.enable_return_hidden_states,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    def _check_lora(self) -> None:
        """Checks and normalises the settings of adapters."""
        object.__setattr__(self, "lora_paths", normalise_lora_paths(self.lora_paths))
        targets: UserValue = self.lora_target_modules
        if targets is not None:
            targets = (targets,) if isinstance(targets, str) else targets
            if not isinstance(targets, list | tuple) or not all(
                isinstance(each, str) for each in targets
            ):
                raise ParameterError(
                    "lora_target_modules", f"{abbreviate(targets)} is no list of names of modules."
                )
            given = None if "all" in targets or "all-linear" in targets else tuple(targets)
            object.__setattr__(self, "lora_target_modules", given)
        object.__setattr__(self, "enable_lora", self.enable_lora or bool(self.lora_paths))
        for name in ("max_loras_per_batch", "max_loaded_loras", "max_lora_rank"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.max_loaded_loras is not None and self.max_loaded_loras < self.max_loras_per_batch:
            raise ParameterError(
                "max_loaded_loras", "is less than max_loras_per_batch.", hint="Raise it."
            )

    @property
    def image_options(self) -> ImageOptions:
        """Options for images, videos and sounds."""
        limits = parse_media_setting("", self.limit_mm_data_per_request)
        settings = parse_media_setting("", self.mm_process_config)
        wanting = (
            name
            for name in ("encoder_only", "language_only", "enable_multimodal")
            if getattr(self, name)
        )
        return ImageOptions(settings, limits, self.enable_multimodal is False, next(wanting, None))

    def _check_speculation(self) -> None:
        known = isinstance(self.speculation, str) and (
            self.speculation == "off" or set(self.drafters) <= set(DRAFTERS)
        )
        if not known or len(set(self.drafters)) < len(self.drafters):
            names = ", ".join(DRAFTERS)
            raise ParameterError(
                "speculation", f'{self.speculation!r} is not "off", "auto" or some of {names}.'
            )

    @property
    def counts_experts(self) -> bool:
        """Whether the engine counts how many rows choose each expert."""
        return self.enable_eplb or self.expert_distribution_recorder_mode is not None

    @property
    def parallel(self) -> Parallel:
        """Layout of the ranks that one scheduler controls: the ranks of the engine or, with several
        replicas, the ranks of one replica.
        """
        if self.enable_dp_attention:
            return ALONE
        nodes = self.nnodes if self.dp_size == 1 else 1  # a replica is on one
        return Parallel(tp=self.tp_size, pp=self.pp_size, ep=self.ep_size, nodes=nodes)

    @property
    def sharing(self) -> Parallel:
        """Layout of all processes that hold parts of a model. These are an engine's ranks or, with
        `enable_dp_attention`, the replicas.
        """
        if not self.enable_dp_attention:
            return self.parallel
        return Parallel(tp=self.tp_size, pp=self.pp_size, dp=self.dp_size, ep=self.ep_size)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters selected by `speculation`."""
        if self.speculation == "off":
            return ()
        return DRAFTERS if self.speculation == "auto" else tuple(self.speculation.split(","))

    @property
    def max_draft(self) -> int:
        """Maximum number of guesses in a draft; 0 without drafters."""
        return self.draft_tokens if self.drafters else 0

    def resolve_sizes(self, *, gpu: bool, longest: int) -> Sizes:
        """Returns the sizes in force: the configured ones, or the defaults for the kind of device.

        Args:
            gpu: whether the model is on a GPU.
            longest: length of the longest sequence, in tokens.
        """
        most = 256 if gpu else 64
        chunk = (
            max(longest, self.max_running or most)
            if self.step_tokens == _WHOLE
            else self.step_tokens
        )
        running = self.max_running or min(most, chunk or 8192)
        tokens = chunk or max(8192 if gpu else 512, running)
        return Sizes(running, tokens, self.page_size or (16 if gpu else 1))

    @staticmethod
    def make(**values: UserValue) -> EngineConfig:
        """Creates a config from keywords. Raises ParameterError if a keyword or its value is
        invalid.
        """
        EngineConfig.check_names(values)
        return EngineConfig(**values)

    @staticmethod
    def check_names(names: Iterable[str], note: str = "") -> None:
        """Raises ParameterError if the config has no parameter of one of these names.

        Args:
            note: end of the error's hint if no name is similar.
        """
        known = {field.name for field in fields(EngineConfig)}
        for name in names:
            if name not in known:
                if name in _OF_GENERATIONS:
                    hint = f"It belongs to a generation: gen({name}=…)."
                    raise ParameterError(name, "Engine has no such parameter.", hint=hint)
                near = difflib.get_close_matches(name, known, n=1)
                listed = f"It has: {', '.join(sorted(known))}. {note}".rstrip()
                hint = f"Did you mean {near[0]}=?" if near else listed
                raise ParameterError(name, "Engine has no such parameter.", hint=hint)


def _allowed_values(hint: Any) -> tuple[UserValue, ...]:  # any type
    """Returns the values that a boolean or a Literal allows, including None if the type is
    optional. Returns () for other types.
    """
    if hint is bool:
        return True, False
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint)
    found = _allowed_values(parts[0]) if len(parts) == 2 and parts[1] is NoneType else ()
    return (None, *found) if found else ()


_OF_GENERATIONS = parameters_for("gen")
_HINTS: dict[str, Any] = get_type_hints(EngineConfig)
_CHOICES = {name: allowed for name, hint in _HINTS.items() if (allowed := _allowed_values(hint))}
# Texts, and whether they may be None; the three others have their own checks.
_TEXTS = {
    name: hint is not str
    for name, hint in _HINTS.items()
    if hint in (str, str | None) and name not in ("device", "speculation", "hicache_storage_dir")
}
_OF_A_PROCESS = ("restart", "stall_timeout_s", "stream_interval_s", "dp_size")
FIELDS = (EngineConfig.__doc__ or "").partition("Attributes:\n")[2].rstrip()  # for other docstrings


def _with_signature_of(
    record: Callable[_P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:  # of any class
    """Returns a decorator that gives a constructor the signature of a record."""

    def with_signature(constructor: Callable[..., None]) -> Callable[Concatenate[Any, _P], None]:
        this = next(iter(inspect.signature(constructor).parameters.values()))
        kinds = get_type_hints(record)
        own = [
            each.replace(annotation=kinds[each.name])
            for each in inspect.signature(record).parameters.values()
        ]
        constructor.__dict__["__signature__"] = inspect.Signature(
            [this, *own], return_annotation=None
        )
        return constructor

    return with_signature


takes_fields = _with_signature_of(EngineConfig)  # all fields by keyword, the model also by position
# it also takes others
shows_fields: Callable[[Callable[..., None]], Callable[..., None]] = takes_fields
