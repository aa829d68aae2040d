"""Graphs of several prompts by role: a node is a head at a role's token in each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.circuits.attributed_run import AttributedRun
from attn_only_lens.circuits.graph import EDGE_COLUMNS
from attn_only_lens.circuits.linear_graph import Node
from attn_only_lens.engine.positions import Roles, resolve_positions
from attn_only_lens.engine.prompts import PromptPair


@dataclass(frozen=True, eq=False)
class RoleMap:
    """Where each role is in each prompt.

    Attributes:
        names: of the roles, in the order of their mean positions.
        chosen: whether a position of a prompt has the role.
    """

    names: list[str]
    chosen: Bool[Tensor, "role batch pos"]

    @classmethod
    def of(cls, pair: PromptPair, roles: Roles) -> "RoleMap":
        """Return the map; a token with several roles counts for the first of them."""
        taken = torch.zeros_like(pair.real)
        columns = torch.arange(pair.clean.shape[1], device=taken.device)
        ordered: list[tuple[float, str, Tensor]] = []
        for one in resolve_positions(pair, roles):
            chosen = one.chosen & ~taken
            if chosen.any():
                ordered.append((float((chosen * columns).sum()), str(one.label), chosen.cpu()))
            taken |= chosen
        ordered.sort(key=lambda role: role[0])
        return cls([name for _, name, _ in ordered], torch.stack([x for *_, x in ordered]))

    @property
    def n_roles(self) -> int:
        """The number of roles."""
        return len(self.names)

    def sums(self, by_position: Float[Tensor, "batch pos node"]) -> Tensor:
        """Return the numbers at the roles' tokens, [batch, role, node]."""
        return torch.einsum("rbp,bpn->brn", self.chosen.to(by_position), by_position)

    def positions_of(self, chosen: Sequence[Sequence[Node]]) -> list[list[Node]]:
        """Return the (position, node) of nodes given as (role, node), over all prompts."""
        some = self.chosen.any(1)
        return [
            sorted(
                {
                    (pos, node)
                    for role, node in nodes
                    for pos in some[role].nonzero().flatten().tolist()
                }
            )
            for nodes in chosen
        ]

    def frames(
        self,
        run: AttributedRun,
        chosen: Sequence[Sequence[Node]],
        nodes: pd.DataFrame,
        edges: pd.DataFrame,
        by_prompt: Float[np.ndarray, "edge batch"],
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return nodes and edges by role, with standard errors over prompts."""
        batch = self.chosen.shape[1]
        kept = self._kept(run, chosen)
        edges = edges[edges["source"] != "offset"]
        columns = []
        for prompt in range(batch):
            names = {
                str(pos): self.names[role]
                for role, pos in self.chosen[:, prompt].nonzero().tolist()
            }

            def renamed(ids: "pd.Series[str]", names: dict[str, str] = names) -> "pd.Series[str]":
                parts = ids.str.partition("@")
                by_role = parts[0] + "@" + parts[2].map(names)
                return by_role.where(by_role.isin(kept), "rest").where(parts[1] == "@", ids)

            one = edges[["kind"]].assign(
                source=renamed(edges["source"]),
                target=renamed(edges["target"]),
                weight=by_prompt[:, prompt],
            )
            one = one[one["target"] != "rest"]
            columns.append(one.groupby(["source", "target", "kind"])["weight"].sum())
        wide = pd.concat(columns, axis=1).fillna(0.0)
        frame = wide.sum(axis=1).rename("weight").to_frame()
        frame["error"] = _errors(wide.to_numpy())
        frame = frame.reset_index()[[*EDGE_COLUMNS, "error"]]
        return self._nodes(run, chosen, nodes), frame[frame["weight"] != 0].reset_index(drop=True)

    def _kept(self, run: AttributedRun, chosen: Sequence[Sequence[Node]]) -> set[str]:
        ids = {f"embed@{name}" for name in self.names}
        for index, some in enumerate(chosen):
            ids |= {self._id(run, index, node) for node in some}
        return ids

    def _id(self, run: AttributedRun, index: int, node: Node) -> str:
        writes = run.linear.sublayers[index].writes
        letter = "H" if writes.kind == "attention" else "N"
        return f"L{writes.layer}{letter}{node[1]}@{self.names[node[0]]}"

    def _nodes(
        self, run: AttributedRun, chosen: Sequence[Sequence[Node]], nodes: pd.DataFrame
    ) -> pd.DataFrame:
        """Return the frame of nodes by role."""
        embedding = run.linear.run.embedding
        along = (run.first.to(embedding) * embedding).sum(-1, keepdim=True).cpu().double()
        lengths = self.sums(embedding.norm(dim=-1, keepdim=True).cpu().double())[..., 0].mean(0)
        rows: list[tuple[Any, ...]] = [
            (f"embed@{name}", "embed", None, "embed", role, float(lengths[role]), np.nan, numbers)
            for role, (name, numbers) in enumerate(
                zip(self.names, self.sums(along)[..., 0].T, strict=True)
            )
        ]
        for index, some in enumerate(chosen):
            writes = run.linear.sublayers[index].writes
            z = run.z[index].cpu().double()
            by_node = z.unflatten(2, (run.gradients[index].shape[2], -1))
            sizes = (
                by_node.flatten(3).norm(dim=-1)
                if writes.kind == "attention"
                else by_node.sum((3, 4))
            )
            values = self.sums(sizes).mean(0)
            numbers = self.sums(run.attributions(index).cpu().double())
            for role, node in some:
                name = self._id(run, index, (role, node)).partition("@")[0]
                size, number = float(values[role, node]), numbers[:, role, node]
                key = f"{name}@{self.names[role]}"
                rows.append((key, writes.kind, writes.layer, name, role, size, np.nan, number))
        columns = list(nodes.columns)
        frame = pd.DataFrame([(*row[:-1], float(row[-1].sum())) for row in rows], columns=columns)
        frame["error"] = _errors(np.stack([row[-1].numpy() for row in rows]))
        ends = nodes[nodes["kind"].isin(["bias", "rest", "offset", "metric"])].copy()
        ends["error"] = np.nan
        gone = float(along.sum()) - frame.loc[frame["kind"] == "embed", "attribution"].sum()
        ends.loc[ends["kind"] == "rest", "attribution"] += gone
        frame = pd.concat([frame, ends], ignore_index=True)
        return frame.astype({"layer": "Int64", "position": "Int64"})


def _errors(by_prompt: Float[np.ndarray, "row batch"]) -> Float[np.ndarray, "row"]:
    """Return the standard error of a sum of equal shares of a mean over prompts."""
    n = by_prompt.shape[1]
    if n < 2:
        return np.full(len(by_prompt), np.nan)
    return np.asarray(by_prompt.std(axis=1, ddof=1) * np.sqrt(n))
