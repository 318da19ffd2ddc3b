"""Opening a run or a checkpoint on one process, whatever layout wrote it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue, ValidationError
from torch import nn

from megatfm import checkpoint, tokenizers
from megatfm.config import Config
from megatfm.config.key_migrations import migrate
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import checkpoint_tensors, initialise_buffers
from megatfm.models import build
from megatfm.models.dtype import take, working_dtype
from megatfm.ops.aligned import aligned
from megatfm.registry import import_foreign_plugins
from megatfm.tokenizers import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """A trained model and what belongs to it. `run_dir` is None for a checkpoint on its own.

    prompt_prefix_ids: what stood before texts in the training of a model from elsewhere; None: `bos`, as here.
    eos_token_id: the ids of which each ends a text. knows_objective: whether `config.objective` is what it was trained
    for, not a guess from its kind.
    """

    model: nn.Module
    tokenizer: Tokenizer
    config: Config
    step: int
    run_dir: Path | None
    prompt_prefix_ids: tuple[int, ...] | None = None
    eos_token_id: tuple[int, ...] = ()
    knows_objective: bool = True


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> TextModel:
    """Open the newest checkpoint of a run directory, or one checkpoint, with its tokenizer, in evaluation mode.

    dtype: of the parameters; "auto": what most of them are stored in, up to float32. trust_plugins: import the packages
    that its config names. Raises UsageError where nothing can be opened, MegatfmError
    where something is damaged or does not fit.
    """
    source = checkpoint.find_checkpoint(path)
    return attach_tokenizer(load_model(source, device, dtype=dtype, trust_plugins=trust_plugins), source)


def attach_tokenizer(model: nn.Module, source: Path) -> TextModel:
    """The model of a checkpoint and what belongs to it. Raises as `load` does."""
    state, config = _state(source)
    run = source.absolute().parent.parent
    folder = run if (run / "config.toml").is_file() else None
    where = tokenizers.find_tokenizer_file(run) or config.data.tokenizer
    if where is None:
        raise UsageError(
            f"{source}: was trained on no text, and has no tokenizer: there is nothing to generate"
        )
    tokenizer = tokenizers.load(where)
    if tokenizer.hash != state.get("tokenizer"):
        raise UsageError(
            f"{where}: not the tokenizer that {source.name} was trained with: put that one into {run}"
        )
    rows = config.model.vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise MegatfmError(
            f"{source}: the model has {rows} rows, fewer than its tokenizer's "
            f"{tokenizer.vocab_size} ids: one of the two was replaced"
        )
    if type(step := state.get("step")) is not int:
        raise MegatfmError(f"{source}: not a checkpoint of a run: its state has no step")
    begins, stop = state.get("begins"), state.get("stop")
    return TextModel(
        model,
        tokenizer,
        config,
        step,
        folder,
        tuple(int(str(token)) for token in begins) if isinstance(begins, list) else None,
        # One number in older checkpoints.
        tuple(int(str(token)) for token in stop)
        if isinstance(stop, list)
        else (stop if isinstance(stop, int) else tokenizer.eos,),
        knows_objective=not ((step == 0 and "origin" in state) or "converted_from" in state),
    )


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> nn.Module:
    """The model of a run directory or checkpoint, in evaluation mode; no tokenizer is needed.

    Call it with `tokens` [batch, sequence]; it returns `.logits` and `.hidden`. Raises as `load` does.
    """
    source = checkpoint.find_checkpoint(path)
    _, config = _state(source)
    import_foreign_plugins(config.plugins, source, trusted=trust_plugins)
    model = build(config.model)
    initialise_buffers(model)
    stored = checkpoint.read_tensors(source, "model.")
    sizes = Counter[torch.dtype]()
    for tensor in stored.values():
        sizes[tensor.dtype] += tensor.numel()
    working = working_dtype(dtype, max(sizes, key=sizes.__getitem__, default=torch.float32))
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint_tensors(model).items()}
    if stored.keys() != tensors.keys():
        name = min(stored.keys() ^ tensors.keys())
        raise MegatfmError(
            f"{source}: {name} is {'not ' * (name not in stored)}in the checkpoint, but {'not ' * (name in stored)}"
            "in the model that its config describes: open it with the version and plugins that wrote it"
        )
    for name, tensor in tensors.items():
        if stored[name].shape != tensor.shape:
            raise MegatfmError(
                f"{source}: {name} is {list(stored[name].shape)}, but {list(tensor.shape)} in the model that its "
                "config describes: open it with the version and plugins that wrote it"
            )
        # In place, so that tied modules keep sharing it.
        tensor.data = aligned(take(tensor, stored.pop(name), working))
    return model.eval().to(device)


def _state(source: Path) -> tuple[Mapping[str, JsonValue], Config]:
    """The state of a checkpoint and the config that it was saved under, which unlike RUN/config.toml can't change."""
    state = checkpoint.read_state(source)
    try:
        return state, Config.model_validate(migrate(state.get("config")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config"
        raise MegatfmError(
            f"{source}: this version of megatfm can't read its config ({key}: {first['msg']}): open it with the one "
            f"that wrote it, {state.get('megatfm', 'which it does not name')}"
        ) from None
