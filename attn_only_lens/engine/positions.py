"""Find the sets of positions to patch; all positions in a set are patched together.

The numbers 0, 1, … are columns of the token tensor, so they count padding, too. Negative numbers
count from the end: -1 is the last non-padding token of each prompt. `"each"` and `"all"` leave out
padding. A role of the contrast names one position in each prompt, as in `{"subject": [2, 4], "end":
-1}`, counted without padding, from the start or, if negative, from the end; `"roles"` is all roles.

In prompts of different lengths, one column has unlike tokens in different prompts, and which tokens
depends on the side of the padding. There, `"each"` is all roles of the contrast (`aligned`), and
without roles, `"each"` and numbers from 0 raise an error before the first run. Counting from the
end would also align some tokens, but the tokens before the prompts' common end would silently have
no site. Only sweeps with rows for single prompts have columns of such prompts.

A token is one site. If a token has several of the roles that are asked for, it belongs to the last
of them, in the order of the contrast's roles; the others have no token in that prompt. `"roles"`
leaves out a role that has no token in any prompt.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.engine.prompts import PromptPair, Roles
from attn_only_lens.errors import InputError

Positions: TypeAlias = str | int | Sequence[int | str] | Tensor
_Positions = TypeVar("_Positions", bound=Positions)
WORDS = ("each", "all", "roles")
"""Words for positions; no role may have one of these names."""
_PROBLEM = "these positions cannot be patched"
_WITHOUT = "positions that are 'each', 'all' or numbers"


@dataclass(frozen=True, eq=False)
class PositionSet:
    """Positions that are patched together.

    Attributes:
        label: the name of the set in results: "all", the given number, or the role.
        chosen: True at the positions in each prompt, and False at padding. It is on the CPU, where
            analyses are planned.
    """

    label: int | str
    chosen: Bool[Tensor, "batch pos"]

    @property
    def column(self) -> int | None:
        """The column of the position if all prompts have the same one; otherwise None."""
        inside = isinstance(self.label, int) and 0 <= self.label < self.chosen.shape[1]
        return int(self.label) if inside else None

    def of_prompts(self, prompts: Sequence[int], n_pos: int) -> "PositionSet":
        """Restrict this set to the given prompts and to the first n_pos positions."""
        return PositionSet(self.label, self.chosen[list(prompts), :n_pos])


def resolve_positions(pair: PromptPair, positions: Positions) -> tuple[PositionSet, ...]:
    """Return the sets of positions that `Sites.positions` describes, in some prompts."""
    real = pair.real_on_cpu
    n_pos = real.shape[1]
    if isinstance(positions, str):
        if positions == "all":
            return (PositionSet("all", real),)
        if positions == "each":
            with_tokens = real.any(dim=0).nonzero().flatten().tolist()
            return tuple(PositionSet(pos, real & _column(real, pos)) for pos in with_tokens)
        return _by_role(pair, None if positions == "roles" else (positions,))
    wanted = as_plain(positions)
    wanted = [wanted] if isinstance(wanted, int) else wanted
    numbers = f"numbers from {-n_pos} to {n_pos - 1} (-1 is the last token)"
    expected = f"expected 'each', 'all', 'roles', names of roles, or {numbers}"
    if isinstance(wanted, list | tuple) and wanted and all(isinstance(x, str) for x in wanted):
        return _by_role(pair, wanted)
    if not isinstance(wanted, list | tuple | range) or not wanted:
        raise InputError([f"got positions={positions!r}; {expected}"], _PROBLEM)
    reasons, sets = list[str](), list[PositionSet]()
    for pos in wanted:
        if not is_count(pos, -n_pos, n_pos - 1):
            reasons.append(f"got {pos!r}; {expected}")
            continue
        at_position = real & (_column(real, pos) if pos >= 0 else _from_end(pair, pos))
        without = (~at_position.any(dim=1)).nonzero().flatten().tolist()
        if without:
            reasons.append(
                f"got {pos}, which is padding, or before the start, in prompts {without}; expected "
                "a real token in every prompt"
            )
        reasons += [
            f"got {pos} and {earlier.label}, which are the same position; give only one of them"
            for earlier in sets
            if torch.equal(earlier.chosen, at_position) and not without
        ]
        sets.append(PositionSet(pos, at_position))
    InputError.raise_if(reasons, _PROBLEM)
    return tuple(sets)


OF_CIRCUITS = ("positions 'all'",)
OF_SWEEPS = ("per_prompt=True", "positions 'all' or from the end (-1)")
"""What takes prompts of different lengths besides roles, for errors."""


def aligned(
    pair: PromptPair, positions: _Positions, *, others: Sequence[str] = OF_CIRCUITS
) -> _Positions | str:
    """Return positions that mean the same in all prompts: "each" is "roles" if lengths differ.

    Args:
        pair: the prompts.
        positions: the positions.
        others: what else the analysis takes for prompts of different lengths, for the error.

    Raises:
        InputError: the prompts differ in length, and positions are numbers from 0 or, without
            roles, "each".
    """
    if not (reasons := length_reasons(pair, others=others)):
        return positions
    plain = as_plain(positions)
    if plain == "each" and pair.roles:
        return "roles"
    numbers = plain if isinstance(plain, list | tuple | range) else [plain]
    InputError.raise_if(reasons if plain == "each" or any(map(is_count, numbers)) else [], _PROBLEM)
    return positions


def length_reasons(
    pair: PromptPair, *, only_columns: bool = False, others: Sequence[str] = OF_CIRCUITS
) -> list[str]:
    """Return a reason if columns have unlike tokens, because prompts differ in their padding.

    With `only_columns`, the analysis has no roles; `others` are as in `aligned`.
    """
    real = pair.real_on_cpu
    lengths = real.sum(dim=1).tolist()
    if (real == real[:1]).all():
        return []
    other = int((real != real[:1]).any(dim=1).int().argmax())  # the first with other padding
    differ = f"prompt 0 has {lengths[0]} tokens, and prompt {other} has {lengths[other]}"
    if lengths[0] == lengths[other]:
        differ = f"prompts 0 and {other} have padding in different columns"
    roles = "roles: Contrast(…, roles={'subject': [2, 4], 'end': -1})"
    if pair.roles:
        roles = f"the contrast's roles: {', '.join(map(str, pair.roles))}"
    expected = ["prompts of the same length"]
    if not only_columns:
        expected += [*others, f"or {roles}"]
    return [
        f"{differ}, so the same position holds different words in them; expected "
        f"{', '.join(expected)}"
    ]


def token_columns(pair: PromptPair) -> range:
    """Return the columns from the first to the last in which a prompt has a token."""
    columns = pair.real_on_cpu.any(dim=0).nonzero().flatten().tolist()
    return range(columns[0], columns[-1] + 1)


def column_reasons(pair: PromptPair, columns: range) -> list[str]:
    """Return a reason unless all prompts have tokens in these columns of a circuit's prompts."""
    numbers = pair.real_on_cpu.sum(dim=1), pair.real_on_cpu.int().argmax(dim=1)
    lengths, starts = (sorted(set(x.tolist())) for x in numbers)
    because = "as in the prompts used to find the circuit: the sites have fixed positions"
    if lengths != [len(columns)]:
        listed = " and ".join(map(str, lengths))
        return [f"got prompts of {listed} tokens; expected {len(columns)} tokens, {because}"]
    if starts != [columns.start]:
        listed = " and ".join(map(str, starts))
        return [
            f"got prompts whose first token has position {listed}; expected position "
            f"{columns.start}, {because}"
        ]
    return []


def is_by_role(positions: Positions) -> bool:
    """Return whether positions are roles of the contrast."""
    plain = [positions] if isinstance(positions, str) else as_plain(positions)
    if plain in (["each"], ["all"]) or not isinstance(plain, list | tuple):
        return False
    return bool(plain) and all(isinstance(x, str) for x in plain)


def missing_role_reasons(roles: Roles, expected: Iterable[str], owner: str) -> list[str]:
    """Return a reason if a contrast lacks some of the roles that a circuit or a graph has."""
    missing = ", ".join(role for role in expected if role not in roles)
    reason = f"the contrast lacks roles of the {owner}: {missing}; expected all of them"
    return [reason] if missing else []


def role_reasons(roles: Roles, n_prompts: int) -> list[str]:
    """Return an error message for each invalid name of a role, or form of its positions."""
    reasons: list[str] = []
    for role, given in roles.items():
        if not isinstance(role, str) or not role or role in WORDS or "@" in role:
            words = ", ".join(WORDS)
            reasons.append(f"got role {role!r}; expected a text without @ other than {words}")
        elif role.encode(errors="ignore").decode() != role:
            reasons.append(f"got role {role!r}; expected valid Unicode, to show and save it")
        plain = as_plain(given)
        numbers = plain if isinstance(plain, list | tuple) else [plain]
        wrong = [x for x in map(as_plain, numbers) if not is_count(x, least=-sys.maxsize)]
        if wrong or (numbers is plain and len(numbers) != n_prompts):
            got = repr(wrong[0]) if wrong else f"{len(numbers)} positions"
            reasons.append(
                f"{role}: got {got}; expected one whole number, or {n_prompts} numbers, one for "
                "each prompt"
            )
    return reasons


def _by_role(pair: PromptPair, names: Sequence[str] | None) -> tuple[PositionSet, ...]:
    """Return these roles of the contrast, or all its roles."""
    roles, lengths = pair.roles, pair.real_on_cpu.sum(dim=1)
    batch, reasons, sets = pair.n_all, list[str](), list[PositionSet]()
    unknown = [name for name in names or () if name not in roles]
    reasons += [
        f"got the role {name!r} more than once; expected each role once"
        for name, count in Counter(names or ()).items()
        if count > 1
    ]
    if roles:
        among = f"expected a role of the contrast: {', '.join(map(str, roles))}; or {_WITHOUT}"
        reasons += [f"got the role {name!r}; {among}" for name in unknown]
    else:
        named = f"the role {unknown[0]!r}" if unknown else "positions='roles'"
        reasons.append(
            f"got {named}, but the contrast has no roles; expected "
            f"Contrast(…, roles={{'subject': 2, 'end': -1}}), or {_WITHOUT}"
        )
    chosen = roles if names is None else {name: roles[name] for name in names if name in roles}
    for role, positions_of_role in chosen.items():
        plain = as_plain(positions_of_role)
        per_prompt = plain if isinstance(plain, list | tuple) else [plain] * batch
        per_prompt = list(map(as_plain, pair.select(per_prompt)))
        outside = [
            f"{role}: got {pos!r} in prompt {i}; expected a number from {-n} to {n - 1}"
            for i, (pos, n) in enumerate(zip(per_prompt, lengths.tolist(), strict=True))
            if not is_count(pos, -n, n - 1)
        ]
        reasons += outside
        if outside:
            continue
        columns = torch.tensor(per_prompt, device="cpu")
        columns = torch.where(columns < 0, columns, columns - lengths)  # count from the end
        sets.append(PositionSet(role, _from_end(pair, columns[:, None])))
    InputError.raise_if(reasons, _PROBLEM)
    return _disjoint(pair, sets, keep_empty=names is not None)


def _disjoint(
    pair: PromptPair, sets: Sequence[PositionSet], *, keep_empty: bool
) -> tuple[PositionSet, ...]:
    """Let each token belong to the last of its roles, in the order of the contrast's roles.

    A role whose tokens all belong to later roles is an error if `keep_empty`, because it was asked
    for by name, unless the pair holds only some of the prompts. Otherwise, it is left out.
    """
    taken, of_role = torch.zeros_like(pair.real_on_cpu), dict[int | str, PositionSet]()
    order = list(pair.roles)
    for role in sorted(sets, key=lambda role: order.index(str(role.label)), reverse=True):
        of_role[role.label] = PositionSet(role.label, role.chosen & ~taken)
        taken |= role.chosen
    empty = [role.label for role in sets if not of_role[role.label].chosen.any()]
    if empty and keep_empty and pair.among is None:
        shared = ", ".join(map(repr, empty))
        reason = f"got {shared}, whose tokens all have later roles, too; expected positions without"
        raise InputError([f"{reason} {shared}, or alone"], _PROBLEM)
    return tuple(of_role[role.label] for role in sets if keep_empty or role.label not in empty)


def _column(real: Bool[Tensor, "batch pos"], pos: int) -> Bool[Tensor, "pos"]:
    return torch.arange(real.shape[1], device=real.device) == pos


def _from_end(pair: PromptPair, pos: int | Int[Tensor, "batch 1"]) -> Bool[Tensor, "batch pos"]:
    columns = torch.arange(pair.clean.shape[1], device="cpu")
    return columns == pair.last.cpu()[:, None] + pos + 1
