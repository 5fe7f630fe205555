"""`python -m k2jax.infer.generate --checkpoint FOLDER --prompt TEXT`: text from a training run's last checkpoint, or from a
folder of weights that `python -m k2jax.model.hf import` or `python -m k2jax.model.gguf` made.

The first text appears as it is made; more prompts decode beside it and follow in their order.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from k2jax.data import tokenizers
from k2jax.data.tokenizers import Tokenizer
from k2jax.infer.engine import Engine, EngineConfig, Event, Request
from k2jax.infer.sampling import Sampling
from k2jax.model import store
from k2jax.model.store import Weights


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to go on from, and how."""

    checkpoint: Path  # a training run's folder, or a folder of weights
    prompt: tuple[str, ...] = ()  # texts to go on from
    ids: tuple[int, ...] = ()  # a prompt in token ids, in place of texts
    max_new: int = 128  # tokens to make at most, for each prompt
    stop: tuple[int, ...] = ()  # ids that end a text, beside the tokenizer's and the checkpoint's own
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineConfig = field(default_factory=EngineConfig)


def load(folder: Path) -> tuple[Weights, Tokenizer | None]:
    """The weights in a folder, in the model's own dtype, and their tokenizer, None if the folder has none.

    Raises ValueError if it is neither a run's with a checkpoint nor one of weights.
    """
    weights = store.load(folder, store.config_of(folder).dtype)
    if (folder / "tokenizer.json").exists():
        return weights, tokenizers.load(folder)
    if (folder / "tiktoken.model").exists():
        return weights, tokenizers.TiktokenTokenizer(folder / "tiktoken.model")
    return weights, None


def requests(command: Command, tokenizer: Tokenizer | None) -> list[Request]:
    """The command's prompts in tokens. Raises ValueError if there is none, or no tokenizer to read them with."""
    if bool(command.prompt) == bool(command.ids):
        raise ValueError("generate needs either --prompt or --ids")
    stop, prompts = (*command.stop, *ends(command.checkpoint)), [command.ids]
    if command.prompt:
        if tokenizer is None:
            raise ValueError(f"{command.checkpoint} has no tokenizer.json or tiktoken.model; give the prompt as --ids")
        start = [] if tokenizer.bos is None else [tokenizer.bos]
        prompts = [(*start, *tokenizer.encode(text)) for text in command.prompt]
    if tokenizer is not None and tokenizer.eos is not None:
        stop = (*stop, tokenizer.eos)
    return [Request(prompt=p, max_new=command.max_new, stop=stop, sampling=command.sampling) for p in prompts]


def ends(folder: Path) -> tuple[int, ...]:
    """Ids that end a text by the generation_config.json that an imported checkpoint may have."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def pieces(events: Iterator[Event], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Text as it is made, one sequence after the other in the order of their numbers, each ended by a line break."""
    made: dict[int, list[int]] = {}
    done: set[int] = set()
    current, shown = 0, 0
    for event in events:
        ids = made.setdefault(event.sequence, [])
        ids += [] if event.done == "stop" else [event.token]
        done |= {event.sequence} if event.done else set()
        while current in made or current in done:
            text = _text(made.get(current, []), tokenizer)
            # What may be the beginning of a character of several bytes waits for the rest.
            whole = text if current in done else text.rstrip("\ufffd")
            yield whole[shown:]
            shown = len(whole)
            if current not in done:
                break
            yield "\n"
            current, shown = current + 1, 0


def _text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    return tokenizer.decode(ids) if tokenizer else "".join(f"{i} " for i in ids)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 2 for what is refused."""
    command = tyro.cli(Command, prog="python -m k2jax.infer.generate", description=__doc__, args=arguments)
    try:
        weights, tokenizer = load(command.checkpoint)
        engine, asked = Engine(weights, command.engine), requests(command, tokenizer)
        for request in asked:
            engine.submit(request)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in pieces(engine.run(), tokenizer):
        print(text, end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
