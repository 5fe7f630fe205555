"""Where every layer lives: which slot of which chunk of which pipeline stage.

A stage holds v chunks of l slots; the model passes through chunk 0 of every stage, then chunk 1 of every stage, and so on.
Layer counts that do not fill the slots (61 layers and MTP in 64, K2) leave slots that pass their input on. MTP takes the last.
"""

from typing import NamedTuple

import numpy as np

from k2jax.config import MeshConfig, ModelConfig

IDENTITY, MOE, DENSE, MTP = range(4)  # what a slot holds
STACKS = {"dense": DENSE, "moe": MOE, "mtp": MTP}  # a model's stacks of layers, and the slots that hold them


class Layout(NamedTuple):
    """The slots of all stages. Slot s of a stage is place s % layers of chunk s // layers."""

    stages: int
    chunks: int  # a stage
    layers: int  # slots a chunk
    kind_ZL: np.ndarray  # IDENTITY, MOE, DENSE or MTP
    layer_ZL: np.ndarray  # index within its stack ("dense", "moe", "mtp"); -1 at identity
    dense_ZJ: np.ndarray  # the dense layers of each stage, -1 beyond their number; J = most of any stage
    dense_slot_ZJ: np.ndarray  # their slots; 0 beyond
    moe_slots: np.ndarray  # those with places for a router and experts

    @property
    def slots(self) -> int:
        """Slots a stage."""
        return self.chunks * self.layers

    def places(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Stage and slot of every layer of a kind, by its index in the stack."""
        return in_order(self.layer_ZL, self.kind_ZL == kind)

    def position(self, stage: int, slot: int) -> int:
        """Place in the model, counted in slots."""
        chunk, place = divmod(slot, self.layers)
        return (chunk * self.stages + stage) * self.layers + place


def in_order(index_ZL: np.ndarray, chosen_ZL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stage and entry of those chosen, sorted by their index."""
    stage, entry = np.nonzero(chosen_ZL)
    order = np.argsort(index_ZL[stage, entry])
    return stage[order], entry[order]


def layout(model: ModelConfig, mesh: MeshConfig) -> Layout:
    """The layout of a model over the stages and chunks of a mesh, with the fewest slots a chunk that hold all layers.

    Stages run one program, in which every slot has places for experts. A model that is not cut has them where it has experts.
    """
    P, v = mesh.pipeline, mesh.chunks
    n = -(-(model.n_layers + model.n_mtp) // (P * v))
    last = P * v * n - 1
    kind_ZL, layer_ZL = np.full((P, v * n), IDENTITY), np.full((P, v * n), -1)
    empty = Layout(P, v, n, kind_ZL, layer_ZL, np.zeros((P, 0), int), np.zeros((P, 0), int), np.arange(v * n))
    for p in range(P):
        for s in range(v * n):
            position = empty.position(p, s)
            if model.n_mtp and position == last:
                kind_ZL[p, s], layer_ZL[p, s] = MTP, 0
            elif position < model.n_dense:
                kind_ZL[p, s], layer_ZL[p, s] = DENSE, position
            elif position < model.n_layers:
                kind_ZL[p, s], layer_ZL[p, s] = MOE, position - model.n_dense
    J = (kind_ZL == DENSE).sum(1).max(initial=0)
    dense_ZJ, dense_slot_ZJ = np.full((P, J), -1), np.zeros((P, J), int)
    for p in range(P):
        for j, s in enumerate(np.flatnonzero(kind_ZL[p] == DENSE)):
            dense_ZJ[p, j], dense_slot_ZJ[p, j] = layer_ZL[p, s], s
    moe_slots = empty.moe_slots if P * mesh.expert > 1 else np.flatnonzero(np.isin(kind_ZL[0], (MOE, MTP)))
    return empty._replace(dense_ZJ=dense_ZJ, dense_slot_ZJ=dense_slot_ZJ, moe_slots=moe_slots)
