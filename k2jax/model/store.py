"""Weights on disk under our own names, a safetensors file a layer, and the weights of a training run's checkpoint.

A folder of weights holds `model.json` (the model's config) and, as `files` lists them, `model.safetensors` (embedding, norm and
head), `dense.0.safetensors`, `moe.0.safetensors` ... and `mtp.safetensors`. A tensor's name is its leaf's path with the layer's
number after the stack's name, `moe.3.attention.q_nope_QHN`; a layer's selection bias is `moe.3.router_bias_E`. Matrices may be
float32, bfloat16 or float16. `load` gives what `k2jax.model.transformer.init` gives, and the config.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from k2jax.config import ModelConfig, RunConfig, from_dict, to_dict
from k2jax.model.tensor_files import Stored, create, read_header
from k2jax.model.transformer import abstract
from k2jax.model.weights import working_dtype

FORMAT = "k2jax weights 1"
BIAS = "router_bias_E"


class Weights(NamedTuple):
    """A model."""

    config: ModelConfig
    params: dict
    router_bias: dict[str, jax.Array]


@dataclass(frozen=True)
class Leaf:
    """A leaf of the parameters or of the router bias, and the tensors that hold it."""

    key: str  # its own name
    names: tuple[str, ...]  # one a layer for a leaf of a stack, which has a leading axis for them; else one
    stacked: bool
    shape: tuple[int, ...]  # of the leaf

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of the tensors."""
        return self.shape[self.stacked :]

    def dtype(self, matrices: str) -> str:
        """What it is used in, if matrices are used in this."""
        return "float32" if self.key == BIAS else working_dtype(self.key, matrices)


def leaves(config: ModelConfig) -> tuple[dict, dict]:
    """Trees like the parameters and the router bias, of `Leaf`."""

    def leaf(path, x):
        keys = [p.key for p in path]
        depth = {"dense": 1, "moe": 1}.get(keys[0], 2 if keys[:2] == ["mtp", "block"] else 0)
        if not depth:
            return Leaf(keys[-1], (".".join(keys),), False, x.shape)
        names = (".".join([*keys[:depth], str(l), *keys[depth:]]) for l in range(x.shape[0]))
        return Leaf(keys[-1], tuple(names), True, x.shape)

    def bias(stack, x):
        prefix = {"moe": "moe", "mtp": "mtp.block"}[stack]
        return Leaf(BIAS, tuple(f"{prefix}.{l}.{BIAS}" for l in range(x.shape[0])), True, x.shape)

    params, router_bias = abstract(config)
    return jax.tree.map_with_path(leaf, params), {stack: bias(stack, x) for stack, x in router_bias.items()}


def file_of(name: str) -> str:
    """The file that holds a tensor."""
    if name.startswith("mtp."):
        return "mtp.safetensors"
    layer = re.match(r"(dense|moe)\.\d+", name)
    return f"{layer[0] if layer else 'model'}.safetensors"


def files(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """File -> tensor -> shape, of a whole model."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for leaf in jax.tree.leaves(leaves(config)):
        for name in leaf.names:
            found.setdefault(file_of(name), {})[name] = leaf.tensor_shape
    return found


def describe(config: ModelConfig, source: dict) -> str:
    """The text of `model.json`: the model, and what it was made of."""
    return json.dumps({"format": FORMAT, "model": to_dict(config), "source": source}, indent=1) + "\n"


def read_config(folder: Path) -> ModelConfig:
    """The model's config in a folder of weights. Raises ValueError if it is not one."""
    path = folder / "model.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a folder of weights holds model.json; {folder} has none that can be read ({error})") from None
    if record.get("format") != FORMAT:
        raise ValueError(f"the format in {path} must be {FORMAT!r}; got {record.get('format')!r}")
    return from_dict(ModelConfig, record["model"])


def tensors(folder: Path, config: ModelConfig) -> dict[str, Stored]:
    """The tensors in a folder of weights, none of them read.

    Raises ValueError, naming what is missing, too much or of another shape.
    """
    found: dict[str, Stored] = {}
    for file, expected in files(config).items():
        if not (folder / file).exists():
            raise ValueError(f"{folder} is not whole: {file} is missing; run the import again to go on with it")
        header = read_header(folder / file)
        compare(str(folder / file), {name: x.shape for name, x in header.items()}, expected)
        found |= header
    return found


def compare(where: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError, naming the tensors, if names or shapes are not as expected."""
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    faults = []
    for what, names in (
        ("tensors are missing", [name for name in expected if name not in found]),
        ("tensors are not of this model", [name for name in found if name not in expected]),
        ("shapes are not the config's", [f"{name} is {found[name]}, not {expected[name]}" for name in wrong]),
    ):
        if names:
            shown = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            faults.append(f"{len(names)} {what}: {shown}")
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults)}")


def check(folder: Path, config: ModelConfig) -> None:
    """Raises ValueError, naming what differs, if a folder's weights are not of this model, or not whole; it reads none of them.

    What no weight tells may differ: YaRN and the rotation's base, the context, the router's choices, the precision.
    """
    held = config_of(folder)
    found, expected = ({n: shape for file in files(c).values() for n, shape in file.items()} for c in (held, config))
    compare(str(folder), found, expected)
    if (folder / "model.json").exists():
        tensors(folder, held)
    one, other = held.attention.rope.layout, config.attention.rope.layout
    if one != other:
        raise ValueError(f"weights work with the rope layout that they were trained with; {folder} has {one!r}, not {other!r}")


def config_of(folder: Path) -> ModelConfig:
    """The model's config in a folder of weights or of a training run. Raises ValueError if it is neither."""
    if (folder / "model.json").exists():
        return read_config(folder)
    try:
        last_step(folder)
    except ValueError:
        raise ValueError(
            f"weights are in a training run's folder with a checkpoint, or in one that `python -m k2jax.model.hf import` made; "
            f"{folder} is neither"
        ) from None
    return read_run(folder).model


def load(folder: Path, dtype: str, shardings: tuple[dict, dict] | None = None) -> Weights:
    """Reads a folder of weights, or the last checkpoint of a training run's, leaf by leaf.

    Args:
      dtype: of the matrices; norm gains, the router and its bias are float32 whatever it is. Training wants "float32".
      shardings: trees of shardings like the parameters and the router bias; every process then reads its own part alone.
        Without them the arrays lie on the default device.

    Raises ValueError if the folder does not hold the whole model that it describes.
    """
    config = config_of(folder)
    if not (folder / "model.json").exists():
        return _load_run(folder, config, dtype, shardings)
    held = tensors(folder, config)

    def read(leaf, sharding=None):
        dtype_here = jnp.dtype(leaf.dtype(dtype))

        def part(index):
            if not leaf.stacked:
                return held[leaf.names[0]].map()[index].astype(dtype_here)
            return np.stack([held[name].map()[index[1:]].astype(dtype_here) for name in leaf.names[index[0]]])

        if sharding is None:
            return jnp.asarray(part((slice(None),) * len(leaf.shape)))
        return jax.make_array_from_callback(leaf.shape, sharding, part)

    return Weights(config, *jax.tree.map(read, leaves(config), *([shardings] if shardings else [])))


def save(folder: Path, weights: Weights) -> None:
    """Writes a folder of weights, in the dtypes that they have. The folder must be new or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"a folder of weights must be new or empty; {folder} is not")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(describe(weights.config, {}))
    held: dict[str, jax.Array] = {}
    for leaf, x in zip(jax.tree.leaves(leaves(weights.config)), jax.tree.leaves(weights[1:]), strict=True):
        held |= zip(leaf.names, x if leaf.stacked else [x], strict=True)
    for file, shapes in files(weights.config).items():
        with create(folder / file, {name: (shape, np.dtype(held[name].dtype)) for name, shape in shapes.items()}) as places:
            for name, place in places.items():
                place.map("r+")[...] = held[name]


def _load_run(folder: Path, config: ModelConfig, dtype: str, shardings: tuple[dict, dict] | None) -> Weights:
    """What `load` gives of a training run, without the optimizer's state."""
    here = SingleDeviceSharding(jax.devices()[0])
    shardings = shardings or jax.tree.map(lambda _: here, leaves(config))
    params, router_bias = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype(dtype)), sharding=sharding),
        leaves(config),
        shardings,
    )
    item = {"params": params, "router_bias": router_bias}
    with ocp.PyTreeCheckpointer() as reader:
        args = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        state = reader.restore(folder.resolve() / "checkpoints" / str(last_step(folder)) / "state", args=args)
    return Weights(config, state["params"], state["router_bias"])


def last_step(folder: Path) -> int:
    """The step of the last checkpoint in a training run's folder. Raises ValueError if there is none."""
    steps = [int(path.name) for path in (folder / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    if not steps or not (folder / "config.json").exists():
        raise ValueError(f"a run's folder holds config.json and a folder of checkpoints; {folder} does not")
    return max(steps)


def read_run(folder: Path) -> RunConfig:
    """The config of a training run's folder."""
    return from_dict(RunConfig, json.loads((folder / "config.json").read_text()))
