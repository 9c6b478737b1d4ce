"""Fields of OpenAI's protocols that name a replica of the engine."""

from __future__ import annotations

from sglang_lite.server.parameters.token_ids import TokenIdFields
from sglang_lite.server.sglang.request import replica_rank


class RoutedFields(TokenIdFields, kw_only=True, omit_defaults=True):
    """Fields that name a replica, by SGLang's present name and its older one, beside those that ask for token ids."""

    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None

    @property
    def replica(self) -> int | None:
        """Number of the replica, if one is named. Raises ParameterError if two are."""
        return replica_rank(self.routed_dp_rank, self.data_parallel_rank)
