"""Weighted copies of a state that together sample texts under constraints or a function of the user
(sequential Monte Carlo).

Each copy draws its text independently, in a single try. The copy's weight accounts for the
probability that constraints excluded during the draw (`gen(exact="weighted")`), and for the user's
function. From time to time, copies with little weight are replaced with copies of others.

Source: P. Del Moral, A. Doucet, A. Jasra, Sequential Monte Carlo samplers, 2006; for language
models A. Lew et al., Sequential Monte Carlo steering of large language models, arXiv:2306.03081.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sglang_lite.lang.exact import MAX_GAP_OF_ALL_TEXTS
from sglang_lite.lang.execution.reading import find_variable
from sglang_lite.lang.expressions import SglAudio, SglGen, SglImage, SglSelect, SglVideo
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.lang.unawaited import must_await
from sglang_lite.program.nodes import (
    Expression,
    Expressions,
    Text,
    TurnBegin,
    TurnEnd,
    as_expression,
)
from sglang_lite.protocol import (
    UNSET,
    Generation,
    ParameterError,
    ProgramError,
    SglError,
    TraceError,
    TruncatedError,
    Unset,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import CHANGE_DRAWS

if TYPE_CHECKING:
    from sglang_lite.lang.state import ProgramState

# Returns how well a state fits: 0 if not at all, otherwise any number above 0.
Potential: TypeAlias = "Callable[[ProgramState], float]"
# Parameters of a generation that weights can't account for.
_REFUSED = ("n", "seed", *CHANGE_DRAWS)
# Under a constraint, also parameters that end the text elsewhere, or report data of each token.
_REFUSED_UNDER_CONSTRAINT = (
    "stop", "stop_token_ids", "stop_regex", "include_stop", "confidence", "return_logprob", "return_routed_experts",
    "return_hidden_states",
)  # fmt: skip
# Expressions that can be added unchanged, because they draw nothing.
_GIVEN = (Text, TurnBegin, TurnEnd, SglImage, SglVideo, SglAudio)


@dataclass(slots=True)
class _Particle:
    """One of the weighted copies.

    Attributes:
        state: state of the copy.
        log_weight: log of the weight gained since copies were last replaced. If it is -inf, nothing
            more is added to the copy.
        potential: last result of the user's function for this copy.
        unweighed: names of generations that are not included in the weight yet.
    """

    state: ProgramState
    log_weight: float = 0.0
    potential: float = 1.0
    unweighed: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether its weight is above 0."""
        return self.log_weight > -math.inf

    def weigh(self, potential: Potential | None) -> None:
        """Updates the weight with the new generations, which must have arrived."""
        names, self.unweighed = self.unweighed, []
        for name in names:
            self.log_weight += _read_log_weight(self.state, name)
        if names and potential is not None and self.fits:
            found = _call_potential(potential, self.state)
            self.log_weight += math.log(found) if found else -math.inf
            self.log_weight -= math.log(self.potential)
            self.potential = found

    def discard(self) -> None:
        """Sets its weight to 0."""
        self.log_weight = -math.inf
        self.unweighed = []


class Particles:
    """Weighted copies of a state: a sequence of states with `len`, indexing and iteration. Indexing
    and iterating first wait until everything added has been weighed.

    The weighted states approximate the distribution of the model's texts under all constraints and
    the potential. More particles give a better approximation, but it is never exact.

    Args:
        source: state that the particles continue.
        count: number of particles.
        potential: function of a particle's state, called after every generation. It returns how
            well the state fits, 0 if not at all. Its last result is a factor of the weight.
        resample: particles are replaced with copies of others, drawn by weight, when
            `effective_size` falls below this share of their number.
    """

    def __init__(
        self, source: ProgramState, count: int, potential: Potential | None, resample: float
    ) -> None:
        self._particles = [_Particle(state) for state in source.fork(count)]
        self._potential = potential
        self._resample = resample
        self._log_mass = 0.0  # its value when copies were last replaced
        branch = source.branch
        seed = branch.run.seed_for_path(branch.next_node_path())
        self._random = random.Random(None if isinstance(seed, Unset) else seed)

    # -------------------------------------------------------------------------------------- writing

    def __iadd__(self, other: str | Expression | Callable[[ProgramState], UserValue]) -> Particles:
        """Adds text or an expression to every particle. A function is called with each particle's
        state, and its result is added. First waits for earlier generations and weighs them. Adding
        a text does not change weights. Nothing is added to particles whose weight is 0.

        Raises:
            ParameterError: weights can't account for something in the expression.
            ProgramError: weighing has failed, or would block the event loop of an async program.
        """
        self._wait_and_weigh()
        for particle in self._particles:
            if particle.fits:
                added = other if isinstance(other, str | Expression) else other(particle.state)
                expression, particle.unweighed = _prepare_generations(added)
                particle.state += expression
        return self

    # -------------------------------------------------------------------------------------- weighing

    def sync(self) -> None:
        """Waits for everything that was added, weighs it, and replaces particles if necessary.

        Raises:
            SglError: a generation has failed.
            ProgramError: no particle has a weight above 0, or the potential has failed.
        """
        for particle in self._particles:
            if particle.fits:
                try:
                    particle.state.sync()
                except TruncatedError:  # the value of a type can't be read from the text
                    particle.discard()
        self._weigh()

    @must_await
    async def async_sync(self) -> None:
        """Does what `sync` does, for coroutines."""
        for particle in self._particles:
            if particle.fits:
                try:
                    await particle.state.async_sync()
                except TruncatedError:
                    particle.discard()
        self._weigh()

    def _wait_and_weigh(self) -> None:
        if any(particle.unweighed for particle in self._particles):
            self.sync()

    def _weigh(self) -> None:
        """Weighs the generations that have arrived, and replaces particles if necessary."""
        for particle in self._particles:
            particle.weigh(self._potential)
        self._raise_if_none_fits()
        if self.effective_size < self._resample * len(self._particles):
            self._replace_particles()

    def _raise_if_none_fits(self) -> None:
        if not any(particle.fits for particle in self._particles):
            raise ProgramError(
                f"particles: none of the {len(self._particles)} fits: all have the weight 0.",
                hint="Use more particles, a larger max_tokens, or a potential that is above 0 for more texts.",
                where=user_location(),
            )

    def _replace_particles(self) -> None:
        """Replaces the particles with copies of some of them. The number of copies of a particle is
        proportional to its weight, rounded up or down at random.
        """
        self._log_mass = self.log_mass
        count = len(self._particles)
        kept = list[_Particle]()
        at = self._random.random()
        end = 0.0
        for particle, share in zip(self._particles, self.weights, strict=True):
            end += share * count
            copies = max(math.ceil(end - at), 0)
            at += copies
            if copies == 1:
                kept.append(_Particle(particle.state, 0.0, particle.potential))
            elif copies:
                states = particle.state.fork(copies)
                kept += [_Particle(state, 0.0, particle.potential) for state in states]
        self._particles = kept

    # --------------------------------------------------------------------------------------- reading

    @property
    def weights(self) -> list[float]:
        """Weight of each particle. The weights add up to 1, or are all 0 if no particle fits."""
        self._wait_and_weigh()
        found = self._scale_weights()
        total = math.fsum(found)
        return [weight / total for weight in found] if total else found

    def _scale_weights(self) -> list[float]:
        """Returns the weights divided by the largest weight, or all 0 if no particle fits."""
        top = self._max_log_weight
        if top == -math.inf:
            return [0.0] * len(self._particles)
        return [math.exp(particle.log_weight - top) for particle in self._particles]

    @property
    def _max_log_weight(self) -> float:
        return max(particle.log_weight for particle in self._particles)

    @property
    def effective_size(self) -> float:
        """Number of equally weighted particles that would give an equally good estimate; 1 if a
        single particle has all the weight.
        """
        squares = math.fsum(weight * weight for weight in self.weights)
        return 1 / squares if squares else 0.0

    @property
    def log_mass(self) -> float:
        """Log of an estimate of the mean potential of the model's texts. Texts that a constraint
        excludes have the potential 0. Without a potential, this estimates the log of the
        probability that the unconstrained model satisfies the constraints.
        """
        self._wait_and_weigh()
        if self._max_log_weight == -math.inf:
            return -math.inf
        mean = math.fsum(self._scale_weights()) / len(self._particles)
        return self._log_mass + self._max_log_weight + math.log(mean)

    def shares(self, name: str) -> dict[Hashable, float]:
        """Returns, for each value of a variable, the total weight of the particles that have it,
        largest first. The text of a value is its key if the value can't be hashed.
        """
        found: dict[Hashable, float] = {}
        for state, weight in zip(self, self.weights, strict=True):
            if not weight:
                continue
            value = state[name]
            if not isinstance(value, Hashable):
                value = state.raw(name)
            key = value if isinstance(value, Hashable) else repr(value)
            found[key] = found.get(key, 0.0) + weight
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def pick(self) -> ProgramState:
        """Returns the state of a particle that is drawn by weight. Raises ProgramError if all
        weights are 0.
        """
        weights = self.weights
        self._raise_if_none_fits()
        (state,) = self._random.choices(list(self), weights)
        return state

    def __len__(self) -> int:
        return len(self._particles)

    def __iter__(self) -> Iterator[ProgramState]:
        self._wait_and_weigh()
        return iter([particle.state for particle in self._particles])

    def __getitem__(self, i: int) -> ProgramState:
        self._wait_and_weigh()
        return self._particles[i].state

    def __repr__(self) -> str:
        if any(particle.unweighed for particle in self._particles):
            return f"Particles({len(self)}, not weighed yet)"
        return (
            f"Particles({len(self)}, effective_size={self.effective_size:.1f}, "
            f"log_mass={self.log_mass:.3f})"
        )


def _prepare_generations(added: UserValue) -> tuple[Expression, list[str]]:
    """Returns an expression in which all generations are drawn with weights, and their names.

    Raises:
        ParameterError: something in the expression can't be weighed.
    """
    parts = list[Expression]()
    names = list[str]()
    for part in as_expression(added).walk():
        if isinstance(part, SglGen):
            part = _prepare_generation(part)
            names.append(part.node.name or "")
        elif isinstance(part, SglSelect):
            raise ParameterError(
                "particles",
                "select takes the best choice in every particle.",
                hint='Draw one: sgl.gen("x", type=Literal["a", "b"]).',
                where=user_location(),
            )
        elif not isinstance(part, _GIVEN):
            raise ParameterError(
                "particles",
                f"what {part!r:.60} draws can't be weighed.",
                hint='Add its generations themselves: p += sgl.gen("x").',
                where=user_location(),
            )
        parts.append(part)
    return Expressions(parts), names


def _prepare_generation(own: SglGen) -> SglGen:
    """Changes a generation so that it is drawn with a weight. Raises ParameterError if its
    parameters or options don't allow that.
    """
    params = own.node.params
    constrained = own.node.constraint is not None
    if own.node.name is None:
        raise ParameterError(
            "particles",
            "a generation has no name.",
            hint='Name it: sgl.gen("x").',
            where=user_location(),
        )
    refused = (*_REFUSED, *_REFUSED_UNDER_CONSTRAINT) if constrained else _REFUSED
    given = [name for name in refused if getattr(params, name) is not UNSET]
    options = own.options
    given += [
        name for name in ("check", "backend", "retries") if getattr(options, name) is not None
    ]
    given += ["repair"] if options.repair else []
    given += ["tools"] if own.tools is not None else []
    given += ["code"] if options.code is not None else []
    given += ["reasoning"] if constrained and options.reasoning is not None else []
    if given:
        raise ParameterError(
            given[0],
            "weights of particles can't account for it.",
            hint="Leave it out, or change the weights by a potential.",
            where=user_location(),
        )
    exact = params.exact if params.exact is True else "weighted"
    params = msgspec.structs.replace(params, exact=exact if constrained else UNSET)
    shortened = options.shortened or "keep"
    # A retry after an invalid text would restrict the distribution to valid texts.
    options = replace(options, shortened=shortened, retries=0, draws_plainly=True)
    node = msgspec.structs.replace(own.node, params=params)
    return msgspec.structs.replace(own, node=node, options=options)


def _read_log_weight(state: ProgramState, name: str) -> float:
    """Returns the log of the factor by which a generation changes a particle's weight. It is -inf
    if no text that the constraint allows begins with the generated text.

    Raises:
        TraceError: the program is traced.
        ProgramError: the generation was drawn exactly, and the total probability of the allowed
            texts is not known.
    """
    answer = find_variable(state.branch.player, name, user_location()).record
    if not isinstance(answer, Generation):
        raise TraceError(
            "particles: which of them are replaced depends on what the model writes.",
            where=user_location(),
        )
    if "weighted" in answer.meta:
        log_weight = answer.meta["weighted"]["log_weight"]
        return -math.inf if log_weight is None else float(log_weight)
    if "exact" not in answer.meta:
        return 0.0
    figures = answer.meta["exact"]
    if figures["gap"] > MAX_GAP_OF_ALL_TEXTS:
        raise ProgramError(
            f"particles: {name!r} was drawn from more than 64 texts, so their probability is not known.",
            hint="Leave exact out: weighted draws need not know it.",
            where=user_location(),
        )
    return float(figures["log_mass"])


def _call_potential(potential: Potential, state: ProgramState) -> float:
    """Returns the potential of a state.

    Raises:
        ProgramError: the function raised an exception, or did not return a number of at least 0.
    """
    try:
        given: Any = potential(state)  # users may return anything
        if isinstance(given, Coroutine):
            given.close()
            raise TypeError("it is a coroutine function, but has to be a plain one")
        found = math.nan if isinstance(given, str | bytes) else float(given)
    except SglError:
        raise
    except Exception as error:
        raise ProgramError(
            f"potential: {type(error).__name__}: {error}",
            hint="Return a number of at least 0.",
            where=user_location(),
        ) from error
    if not 0 <= found < math.inf:
        raise ProgramError(
            f"potential: {given!r:.60} is not a number of at least 0.",
            hint="Return 0 for texts that don't fit, and more the better one fits.",
            where=user_location(),
        )
    return found
