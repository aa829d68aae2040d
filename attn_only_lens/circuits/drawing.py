"""The frames of an attribution graph: the linear model of a run, at the nodes that were chosen."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.edges import Inflow, metric_inflow, pattern_inflow, value_inflow
from attn_only_lens.circuits.graph import EDGE_KINDS
from attn_only_lens.circuits.linearised import Linearised, Sublayer
from attn_only_lens.patching.prompts import PromptPair

__all__ = ["Drawn", "attributions"]


def attributions(at: Sublayer) -> Tensor:
    """Of each node, summed over prompts: [pos, node]."""
    return at.by_node((at.gradient * at.cut.detach()).sum(0))


class Drawn:
    """The linear model as frames: ids of the chosen nodes, and where they are among all."""

    def __init__(
        self, linear: Linearised, pair: PromptPair, picked: list[list[tuple[int, int]]]
    ) -> None:
        self._linear = linear
        self._picked = picked
        self._real = pair.real.any(dim=0).nonzero().flatten().tolist()
        self._sources = [f"embed@{pos}" for pos in self._real] + [
            f"{at.name(node)}@{pos}"
            for at, here in zip(linear.sublayers, picked, strict=True)
            for pos, node in here
        ]

    def edges(self, patterns: bool) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        """Edges from chosen nodes, "bias" and "rest" into chosen nodes and the metric.

        Args:
            patterns: whether to find edges of kinds "q" and "k", too.

        Returns:
            A row for each that is not 0, and what each prompt has of its weight.
        """
        linear = self._linear
        found = [self._into(["metric"], metric_inflow(linear), "value")]
        for at, targets in zip(linear.sublayers, self._picked, strict=True):
            for kind in EDGE_KINDS if patterns else ("value",):
                blocks = (
                    value_inflow(linear, at, targets)
                    if kind == "value"
                    else pattern_inflow(linear, at, kind, targets)
                )
                for block in blocks:
                    ids = [f"{at.name(node)}@{pos}" for pos, node in block.targets]
                    found.append(self._into(ids, block, kind))
        frames, weights = zip(*found, strict=True)
        return pd.concat(frames, ignore_index=True), np.concatenate(weights)

    def _into(
        self, ids: list[str], inflow: Inflow, kind: str
    ) -> tuple[pd.DataFrame, Float[np.ndarray, "edge batch"]]:
        pieces, rest = [inflow.embedding[:, :, self._real]], torch.zeros_like(inflow.constant)
        rest = rest + inflow.embedding.sum(2) - pieces[0].sum(2)  # of padding: none
        for found, here in zip(inflow.sublayers, self._picked, strict=True):
            apart = torch.ones(found.shape[2:], dtype=torch.bool, device=found.device)
            pos, node = ([each[i] for each in here] for i in (0, 1))
            apart[pos, node] = False
            rest = rest + (found * apart).flatten(2).sum(2)
            pieces.append(found[:, :, pos, node])
        sources = [*self._sources, "rest", "bias"]
        each = torch.cat([*pieces, rest[..., None], inflow.constant[..., None]], dim=2)
        weights = each.sum(0)
        row, column = weights.nonzero(as_tuple=True)
        frame = pd.DataFrame(
            {
                "source": np.array(sources, dtype=object)[column.cpu().numpy()],
                "target": np.array(ids, dtype=object)[row.cpu().numpy()],
                "kind": kind,
                "weight": weights[row, column].cpu().double().numpy(),
            }
        )
        return frame, each[:, row, column].T.cpu().double().numpy()

    def nodes(self, value: float, rest: float) -> pd.DataFrame:
        """The nodes: embedding, heads by layer, and the others."""
        linear = self._linear
        x = linear.embedding.detach()
        of_embedding = (linear.embedding_gradient * x).sum(dim=(0, -1))
        rows: list[tuple[object, ...]] = [
            (f"embed@{pos}", "embed", None, "embed", pos, length, np.nan, float(of_embedding[pos]))
            for pos in self._real
            for length in [float(x[:, pos].norm(dim=-1).mean())]
        ]
        bias = float((linear.weights * linear.logits_constant).sum())
        for at, here in zip(linear.sublayers, self._picked, strict=True):
            bias += float((at.gradient * at.constant).sum())
            each = attributions(at)
            for pos, node in here:
                name = at.name(node)
                about = at.kind, at.layer, name, pos, *_said(at, pos, node), float(each[pos, node])
                rows.append((f"{name}@{pos}", *about))
        rows += [
            ("bias", "bias", None, "bias", None, 0.0, np.nan, bias),
            ("rest", "rest", None, "rest", None, 0.0, np.nan, rest),
            ("offset", "offset", None, "offset", None, 0.0, np.nan, linear.offset),
            ("metric", "metric", None, "metric", None, value, np.nan, value),
        ]
        columns = ["id", "kind", "layer", "name", "position", "value", "gradient", "attribution"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"layer": "Int64", "position": "Int64"})


def _said(at: Sublayer, pos: int, node: int) -> tuple[float, float]:
    """The value of a node, and the gradient there where it is one number."""
    heads = slice(node * at.width, (node + 1) * at.width)
    z = at.cut.detach()[:, pos, heads].flatten(1)
    if at.kind == "attention":
        return float(z.norm(dim=-1).mean()), float("nan")
    gradient = at.gradient[:, pos, heads].flatten()
    return float(z.sum(-1).mean()), float(gradient) if len(gradient) == 1 else float("nan")
