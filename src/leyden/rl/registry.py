"""Finds algorithms by name. Each is one file: `rl/<kind>/<name>.py` holds the function `<name>`, which declares itself.

The declaration says which hyperparameters the function reads and which other algorithms it goes with. Files are found
by walking the package, so a new algorithm is a new file and no other edit. Listing names and checking a credit against
an advantage do not import torch.
"""

import difflib
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, Literal, TypeVar, get_args

from msgspec import Struct

from leyden.config import AlgorithmConfig, ConfigError

Kind = Literal["credit", "advantage", "loss", "aggregation", "correction", "state", "branch"]
KINDS: tuple[Kind, ...] = get_args(Kind)

USER_FUNCTION = "module:function, or file.py:function"
"""How a configuration names a user's function, which the registry does not load."""

Counted = Literal["rollouts", "calls", "tokens"]

F = TypeVar("F", bound=Callable[..., Any])


class Declaration(Struct, frozen=True, kw_only=True):
    """What an algorithm declares, as its decorator: the keys it reads and the algorithms it works with."""

    kind: Kind
    reads: tuple[str, ...] = ()
    """Keys of `[algorithm]` that change what it computes. A run says which keys were set and are not read."""
    requires: tuple[str, ...] = ()
    """Those of them that must be set, because they have no default."""
    credits: tuple[str, ...] = ()
    """Of an advantage: the credits that it goes with, the most usual first."""
    advantages: tuple[str, ...] = ()
    """Of a credit: advantages that it goes with although they do not name it."""
    by_call: bool = False
    """Of a credit: whether what is to be expected of a call depends on its position in the rollout."""
    needs_critic: bool = False
    """Whether it reads the values of a critic."""
    compares_group: bool = False
    """Of an advantage: whether it is 0 for a rollout that is alone in its group."""
    divides_by: Counted | None = None
    """Of an aggregation: the number of what in an update divides its weights, so that other groups change only that."""

    def __call__(self, function: F) -> F:
        """Declare a function."""
        vars(function)["declaration"] = self
        return function


class UnknownAlgorithm(Exception):
    """There is no algorithm of that name; the message lists those that exist."""


class IncompatibleAlgorithms(Exception):
    """A credit and an advantage that do not go together; the message says what to write instead."""


credit = partial(Declaration, kind="credit")
advantage = partial(Declaration, kind="advantage")
loss = partial(Declaration, kind="loss")
aggregation = partial(Declaration, kind="aggregation")
correction = partial(Declaration, kind="correction")
state = partial(Declaration, kind="state")
branch = partial(Declaration, kind="branch")
"""Decorators of the functions of a kind, as in `@loss(reads=("clip_low",))`."""


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """List the algorithms of a kind."""
    spec = find_spec(f"leyden.rl.{kind}")
    assert spec is not None and spec.submodule_search_locations is not None, f"leyden.rl.{kind} is a package"
    return tuple(sorted(module.name for module in iter_modules(spec.submodule_search_locations)))


def check_name(kind: Kind, name: str) -> None:
    """Raise `UnknownAlgorithm` unless there is an algorithm of this name."""
    if name not in names(kind):
        known = [*names(kind), *(["none"] if kind == "correction" else [])]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        raise UnknownAlgorithm(
            f"`algorithm.{kind}`: there is no {name!r}; {hint} are {', '.join(known)}, or {USER_FUNCTION}"
        )


def load(kind: Kind, name: str) -> Callable[..., Any]:
    """Import the function that a name stands for."""
    return _load(kind, name)[0]


def declaration(kind: Kind, name: str) -> Declaration | None:
    """Return what an algorithm declares; None for a user's function, for `none`, and for a name that does not exist."""
    return _load(kind, name)[1] if name in names(kind) else None


def is_user_function(name: str) -> bool:
    """Whether a configuration names a user's function."""
    return ":" in name


def reads(kind: Kind, named: AlgorithmConfig, key: str) -> bool:
    """Whether the chosen algorithm of a kind reads a key of `[algorithm]`; a user's function may read any."""
    if kind == "branch" and not branches(named):
        return False
    name: str = getattr(named, kind)
    declared = declaration(kind, name)
    return is_user_function(name) or (declared is not None and key in declared.reads)


def branches(named: AlgorithmConfig) -> bool:
    """Whether the chosen credit continues rollouts from inside."""
    declared = declaration("credit", named.credit)
    return declared is not None and "branch" in declared.reads


def check_settings(named: AlgorithmConfig, kinds: Sequence[Kind]) -> None:
    """Refuse algorithms of some kinds that lack a setting."""
    for kind in kinds:
        declared = declaration(kind, getattr(named, kind))
        for key in declared.requires if declared is not None else ():
            if getattr(named, key) is None:
                raise ConfigError(f"`algorithm.{kind}` is {getattr(named, kind)}: set `algorithm.{key}`")


def unused_settings(named: AlgorithmConfig) -> list[str]:
    """List the keys that were set and that none of the chosen algorithms reads, each as a sentence."""
    defaults = AlgorithmConfig(kl_in=named.kl_in, loss=named.loss)
    unused = []
    for key in AlgorithmConfig.__struct_fields__:
        kinds = readers(key) if getattr(named, key) != getattr(defaults, key) else {}
        if kinds and not any(reads(kind, named, key) for kind in kinds):
            chosen = " and ".join(f'`{kind} = "{getattr(named, kind)}"`' for kind in kinds)
            does = "only splits the curves of rewards" if key == "normalize_by" else "does nothing"
            unused.append(f"`algorithm.{key}` {does} with {chosen}")
    if named.kl == 0 and (named.kl_in, named.kl_estimate) != ("loss", defaults.kl_estimate):
        unused.append("`algorithm.kl_in` and `algorithm.kl_estimate` do nothing while `algorithm.kl` is 0")
    if named.value_clip is not None and not needs_critic(named.credit, named.advantage):
        unused.append('`algorithm.value_clip` does nothing without a critic, which `algorithm.credit = "gae"` has')
    of_tokens = named.correction == "none" or named.correction_level == "token"
    if named.correction_ratio != defaults.correction_ratio and of_tokens:
        unused.append('`algorithm.correction_ratio` does nothing unless `correction_level` is "call" or "rollout"')
    return unused


def readers(key: str) -> dict[Kind, list[str]]:
    """Return the algorithms that read a key of `[algorithm]`, by kind."""
    found = {kind: [name for name in names(kind) if key in _load(kind, name)[1].reads] for kind in KINDS}
    return {kind: named for kind, named in found.items() if named}


def check_pair(credit: str, advantage: str, preferred: str) -> None:
    """Refuse a credit and an advantage that do not go together; `preferred` is the advantage to suggest if it fits.

    A user's function goes with everything, except as the credit of an advantage that needs a critic.
    """
    its_credit, its_advantage = declaration("credit", credit), declaration("advantage", advantage)
    if its_advantage is None or goes_with(credit, advantage):
        return  # a user's function, or a name that `load` refuses
    if its_credit is None and not its_advantage.needs_critic:
        return
    others = [name for name in names("advantage") if its_credit is not None and goes_with(credit, name)]
    instead = preferred if preferred in others else next(iter(others), None)
    raise IncompatibleAlgorithms(
        f'`algorithm.advantage = "{advantage}"` does not go with `algorithm.credit = "{credit}"`: '
        f'write `algorithm.credit = "{its_advantage.credits[0]}"`'
        + (f', or `algorithm.advantage = "{instead}"` to keep that credit' if instead else "")
    )


def goes_with(credit: str, advantage: str) -> bool:
    """Whether either of the two names the other."""
    of_credit, of_advantage = declaration("credit", credit), declaration("advantage", advantage)
    return (of_advantage is not None and credit in of_advantage.credits) or (
        of_credit is not None and advantage in of_credit.advantages
    )


def needs_critic(credit: str, advantage: str) -> bool:
    """Whether a credit or an advantage reads the values of a critic."""
    found = (declaration("credit", credit), declaration("advantage", advantage))
    return any(one is not None and one.needs_critic for one in found)


def _load(kind: Kind, name: str) -> tuple[Callable[..., Any], Declaration]:
    check_name(kind, name)
    function: Callable[..., Any] | None = getattr(import_module(f"leyden.rl.{kind}.{name}"), name, None)
    found = getattr(function, "declaration", None)
    if function is None or not isinstance(found, Declaration) or found.kind != kind:
        raise TypeError(f"leyden/rl/{kind}/{name}.py needs a function `{name}` with the decorator `@{kind}(...)`")
    return function, found
