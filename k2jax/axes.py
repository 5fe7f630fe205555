"""The legend of axis letters: an array's name ends in its letters, weights included.

The suffix of a weight states its shape (`k_nope_CHN` is [kv rank, head, nope width]) and is also the key by which it is
orthogonalized (`k2jax.optim.muonclip`). Stacks of layers add a leading L that the
names leave out, since one layer's code never sees it.
"""

LEGEND = {
    "B": "batch row",
    "T": "position (query)",
    "S": "position (key)",
    "X": "token, batch rows and positions flattened",
    "D": "model width",
    "Q": "query low rank",
    "C": "key-value low rank, the width of the latent cache; in the experts' exchange, a place in a rank's buffer",
    "H": "query head",
    "G": "key-value head (GQA; equal to H in MHA)",
    "N": "width of a head's part without position; in flat lists, an entry",
    "R": "width of a head's part that RoPE rotates; in `k2jax.parallel`, a rank: one of those that share a stage",
    "Y": "width of a head's query and key, N and R together",
    "V": "width of a head's value",
    "P": "pair of channels that RoPE rotates; in the grouped matmul, a place in the padded buffer of rows; in a cache, a "
    "place in a block",
    "M": "block of such places, all of one expert; in a cache, a block of positions",
    "E": "routed expert",
    "K": "chosen expert of a token",
    "J": "hidden state and embedding side by side, 2D wide (MTP); in `k2jax.parallel`, a dense layer of a stage; "
    "in a cache, a block of one row",
    "F": "hidden width of a feed-forward layer",
    "W": "word: a row of the vocabulary",
    "L": "layer; in `k2jax.parallel`, a layer slot of a stage",
    "Z": "stage of the pipeline",
}


def axes_of(name: str) -> str:
    """Returns the axis letters a name ends in, or "" when its last part is not made of them.

    `axes_of("k_nope_CHN") == "CHN"`.
    """
    suffix = name.rsplit("_", 1)[-1]
    return suffix if "_" in name and suffix and all(letter in LEGEND for letter in suffix) else ""
