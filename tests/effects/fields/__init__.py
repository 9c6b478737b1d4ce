"""Effects of fields in bodies of requests, a file for each protocol: rows of a table of cases."""

from tests.effects.fields import native, openai, others, readers

CASES = {**native.REQUESTS, **openai.CASES, **others.CASES, **readers.CASES}
DOORS = {**native.DOORS, **openai.DOORS, **others.DOORS, **readers.DOORS}

_WEIGHTS = "it changes weights, in tests/server/test_weight_routes.py"
# Fields that have no case here, with what they need or where their effect is tested.
NOT_SEEN = {
    f"{record}.{field}": reason
    for record, fields, reason in (
        ("ConfigureLoggingRequest", "log_level log_requests", "the log of all tests would change: tests/server/test_operating.py"),
        ("ProfileRequest", "output_dir with_stack record_shapes", "a profile takes seconds: tests/server/test_profile.py"),
        ("MemoryRequest", "tags", _WEIGHTS),
        ("UpdateFromDiskRequest", "model_path load_format weight_version flush_cache", _WEIGHTS),
        (
            "UpdateFromTensorRequest", "serialized_named_tensors load_format weight_version flush_cache", _WEIGHTS,
        ),
        ("NameWeightsRequest", "new_version abort_all_requests", _WEIGHTS),
        (
            "InitGroupRequest", "master_address master_port rank_offset world_size group_name backend",
            "another process is needed",
        ),
        (
            "UpdateFromGroupRequest", "names dtypes shapes group_name weight_version flush_cache load_format",
            "another process is needed",
        ),
        ("DestroyGroupRequest", "group_name", "another process is needed"),
        (
            "OfferRequest", "master_address ports group_rank world_size group_name backend",
            "another process is needed: tests/server/test_remote_instance.py",
        ),
        ("SendRequest", "master_address ports group_name names", "another process is needed"),
        ("GetWeightsRequest", "name truncate_size", _WEIGHTS),
        ("CheckWeightsRequest", "action", _WEIGHTS),
        ("PauseRequest", "mode", _WEIGHTS),
        ("BeginUpdateRequest", "selector", "it has one value: tests/server/test_weight_routes.py"),
        ("DecisionRequest", "input model questions", "tests/server/openai/test_decisions.py"),
        (
            "TranscriptionRequest",
            "file model language prompt response_format stream temperature timestamp_granularities",
            "a model of speech is needed: tests/server/openai/test_transcriptions.py",
        ),
        ("VertexRequest", "instances parameters", "tests/server/test_clouds.py"),
        (
            "PlayRequest", "version program prompt stream open close limits cache_salt priority model",
            "tests/server/programs/test_program.py",
        ),
        ("ProgramAnswers", "version answers close", "tests/server/programs/test_program.py"),
        ("LoadRequest", "lora_name lora_path pinned", "tests/server/test_adapters.py"),
        (
            "LoadFromTensorsRequest", "lora_name config_dict serialized_named_tensors pinned",
            "tests/server/test_adapters.py",
        ),
        ("UnloadRequest", "lora_name", "tests/server/test_adapters.py"),
    )
    for field in fields.split()
}  # fmt: skip
