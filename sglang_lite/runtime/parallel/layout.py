"""Layout of an engine's ranks. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sglang_lite.protocol import ParameterError

MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of an engine's parallel axes, and the place of one rank.

    Attributes:
        tp: number of ranks that share each layer (tensor parallelism).
        pp: number of stages, which are groups of `tp` consecutive ranks, each with consecutive
            layers (pipeline parallelism).
        dp: number of replicas with separate rows (data parallelism within a model). Each has whole
            attention, embedding and head; only feed-forwards are sharded over all ranks.
            1 or `tp`.
        ep: number of groups of ranks among which the experts of a layer are divided by number
            (expert parallelism). The ranks of a group, tp / ep of them, share each of its experts.
        nodes: number of machines, each with the same number of ranks.
        rank: place of this process among all ranks, one stage after another; rank 0 schedules and
            draws.

    Raises:
        ParameterError: a size is not a whole number from 1 to 1,024, `ep` does not divide `tp`,
            `nodes` does not divide the ranks, `dp` is neither 1 nor `tp` or is combined with `pp`,
            or the rank is not in the layout.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    nodes: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_RANKS:
                name = "nnodes" if field.name == "nodes" else f"{field.name}_size"
                raise ParameterError(name, f"{size!r} is not a whole number from 1 to {MAX_RANKS}.")
        if self.tp % self.ep:
            sizes = ", ".join(str(ep) for ep in range(1, self.tp + 1) if self.tp % ep == 0)
            raise ParameterError(
                "ep_size",
                f"{self.ep} does not divide tp_size={self.tp}.",
                hint=f"It can be {sizes}.",
            )
        if self.dp > 1 and self.tp != self.dp:
            problem = f"{self.tp} is not dp_size={self.dp}: each replica is one of the ranks with enable_dp_attention."
            raise ParameterError("tp_size", problem, hint=f"Use tp_size={self.dp}.")
        if self.dp > 1 and self.pp > 1:
            raise ParameterError(
                "pp_size", "is not here with enable_dp_attention.", hint="Leave one out."
            )
        if self.ranks % self.nodes:
            raise ParameterError(
                "nnodes", f"{self.nodes} does not divide {self.ranks} ranks.", hint="Use a divisor."
            )
        if self.rank not in range(self.ranks):
            raise ParameterError("rank", f"{self.rank!r} is not one of the {self.ranks} ranks.")

    @property
    def ranks(self) -> int:
        """Number of processes that hold parts of the model."""
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each machine."""
        return self.ranks // self.nodes

    @property
    def ranks_sharing_threads(self) -> int:
        """Number of ranks on a machine that compute at the same time. They share the machine's CPU
        threads.
        """
        return min(self.tp, self.ranks_per_node)

    @property
    def setting(self) -> str:
        """Name of the setting to mention in messages about several ranks: `tp_size` or `pp_size`."""
        return "tp_size" if self.pp == 1 else "pp_size"

    @property
    def stage(self) -> int:
        """Index of this rank's stage."""
        return self.rank // self.tp

    @property
    def in_stage(self) -> Parallel:
        """Layout of the ranks that have the same layers as this one."""
        return Parallel(tp=self.tp, dp=self.dp, ep=self.ep, rank=self.rank % self.tp)

    @property
    def row_group_layout(self) -> Parallel:
        """Layout of the ranks of a stage that have the same rows as this one and share their
        attention.
        """
        return self.in_stage if self.dp == 1 else Parallel()

    def as_seen_by(self, rank: int) -> Parallel:
        """Returns the same layout from the view of another rank."""
        return replace(self, rank=rank)

    @property
    def same_experts(self) -> Parallel:
        """Layout of the ranks that have the same experts as this one."""
        each = self.tp // self.ep
        return Parallel(tp=each, rank=self.rank % each)

    def experts(self, count: int) -> range:
        """Returns which of `count` experts this rank holds, in whole or in part."""
        return self.share(count, self.ep, self.rank * self.ep // self.tp)

    def share(self, count: int, ranks: int | None = None, rank: int | None = None) -> range:
        """Returns this rank's share of some units within its stage. If they don't divide evenly,
        earlier ranks get one more.

        Args:
            count: number of units.
            ranks, rank: number of ranks that share them, and the index of one; None for all of the
                stage, and this rank.
        """
        ranks = ranks or self.tp
        rank = self.rank if rank is None else rank
        return range(-(-count * rank // ranks), -(-count * (rank + 1) // ranks))


ALONE = Parallel()
