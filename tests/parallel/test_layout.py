from dataclasses import replace

import numpy as np
import pytest

from configs import deepseek_v3, k2
from k2jax.config import MeshConfig
from k2jax.parallel.layout import DENSE, IDENTITY, MOE, MTP, layout

K2 = k2.config().model


def in_order(lay):
    """(kind, layer) of every slot in the order in which the model passes through them, by walking the ring."""
    for chunk in range(lay.chunks):
        for stage in range(lay.stages):
            for place in range(lay.layers):
                slot = chunk * lay.layers + place
                yield int(lay.kind_ZL[stage, slot]), int(lay.layer_ZL[stage, slot])


@pytest.mark.parametrize("n_mtp", [0, 1])
@pytest.mark.parametrize("stages, chunks", [(16, 4), (16, 2), (16, 1), (8, 8), (1, 1), (4, 3)])
def test_the_model_passes_through_its_layers_in_order(stages, chunks, n_mtp):
    lay = layout(replace(K2, n_mtp=n_mtp), MeshConfig(pipeline=stages, chunks=chunks))
    slots = list(in_order(lay))
    layers = [(DENSE, 0)] + [(MOE, i) for i in range(60)]
    assert slots[:61] == layers
    assert [kind for kind, _ in slots[61:]] == [IDENTITY] * (len(slots) - 61 - n_mtp) + [MTP] * n_mtp
    assert len(slots) - stages * chunks < 61 + n_mtp <= len(slots)  # one slot a chunk less would not do


def test_k2_and_deepseek_v3_on_sixteen_stages():
    lay = layout(replace(K2, n_mtp=1), MeshConfig(pipeline=16, chunks=4))
    assert lay.slots == 4 and (lay.kind_ZL == IDENTITY).sum() == 2
    assert lay.kind_ZL[15].tolist() == [MOE, MOE, MOE, MTP] and lay.dense_ZJ.shape == (16, 1)
    v3 = layout(deepseek_v3.config().model, MeshConfig(pipeline=16, chunks=4))
    assert [np.flatnonzero(row == DENSE).tolist() for row in v3.kind_ZL[:4]] == [[0], [0], [0], []]
    assert v3.dense_ZJ[:4, 0].tolist() == [0, 1, 2, -1]


def test_several_dense_layers_on_a_stage_are_told_apart():
    lay = layout(replace(K2, n_layers=8, n_dense=5), MeshConfig(pipeline=2, chunks=2))
    for stage in range(2):
        held = [(int(j), int(s)) for j, s in zip(lay.dense_ZJ[stage], lay.dense_slot_ZJ[stage], strict=True) if j >= 0]
        expected = [(int(lay.layer_ZL[stage, s]), s) for s in range(4) if lay.kind_ZL[stage, s] == DENSE]
        assert held == expected


def test_places_for_experts_are_where_they_can_be_used():
    """On stages, which run one program, in every slot; where the model is whole, in layers with experts."""
    model = replace(K2, n_layers=8, n_dense=5, n_mtp=1)
    for sizes in (MeshConfig(pipeline=2, chunks=2), MeshConfig(expert=2)):
        lay = layout(model, sizes)
        assert lay.moe_slots.tolist() == list(range(lay.slots))
    assert layout(model, MeshConfig(data=2)).moe_slots.tolist() == [5, 6, 7, 8]
    assert layout(replace(model, n_dense=8, n_mtp=0), MeshConfig()).moe_slots.tolist() == []
