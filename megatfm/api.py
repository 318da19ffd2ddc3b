"""The public Python interface, loaded at first use of `megatfm.fit`, `load` or `Model`, since it imports torch."""

import logging
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from megatfm import checkpoint, tokenizers
from megatfm.config import Config, ModelConfig, load_config
from megatfm.convert.electra_pair import is_electra_folder
from megatfm.convert.hf_checkpoint import is_hf_folder
from megatfm.convert.load import (
    load_generation_fields,
    load_hf_model,
    read_bos_prefix_ids,
    read_pad_token_id,
    read_sentence_transformer_options,
)
from megatfm.convert.tokenizer_files import find_tokenizer_path
from megatfm.describe.description import flops_per_token
from megatfm.errors import EXIT_OK, MegatfmError, UsageError
from megatfm.inference.batched_generation import generate_each
from megatfm.inference.decoding import Sampling
from megatfm.inference.embeddings import Pooling, SentenceEmbedder, warn_unmarked_padding
from megatfm.inference.evaluate import Baselines, Results, evaluate_run
from megatfm.inference.evaluation_tasks import evaluate_questions, open_tasks
from megatfm.inference.prompts import PromptOptions
from megatfm.inference.text import (
    PromptSampler,
    TextModel,
    attach_tokenizer,
    generate_text_beam,
    load_model,
)
from megatfm.registry import refuse_repeats
from megatfm.tokenizers import Tokenizer
from megatfm.train.run import train

log = logging.getLogger("megatfm")

Texts = TypeVar("Texts", str, list[str])
"""One text, or several."""


def fit(config: Config | str | Path, *overrides: str) -> Path:
    """Train or resume a run in this process, as `megatfm train` does; return its run directory.

    config: a config, or the path of a file or the name of a preset, with `key=value` overrides. Under torchrun or
    srun, every rank calls this. Raises UsageError, and MegatfmError, also if a signal stopped the run after saving: the
    same call then resumes it.
    """
    if vars(multiprocessing.current_process()).get("_inheriting"):  # as multiprocessing itself asks
        raise UsageError('fit: a data worker imports this script: call fit under `if __name__ == "__main__":`')
    if isinstance(config, Config):
        if overrides:
            raise UsageError("fit: overrides are for a file or preset; for a config use config.with_changes({...})")
    elif isinstance(config, str | Path):
        refuse_repeats(overrides)
        config = load_config(config, overrides)
    else:
        raise UsageError(
            f"fit: a {type(config).__name__} is not a config: give a file, a preset, or "
            "megatfm.Config.model_validate({...})"
        )
    folder = config.run_folder
    if train(config, flops_per_token, PromptSampler()) != EXIT_OK:
        raise MegatfmError(f"{folder}: was stopped by a signal, and has saved: the same call resumes from there")
    return folder


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> "Model":
    """Load the model of a run, a checkpoint or a Hugging Face folder, in evaluation mode.

    dtype: dtype of its parameters; "auto" keeps the stored one, so a model in bfloat16 takes half the memory.
    trust_plugins: import the packages that the stored config names in `plugins`, which runs their code. Raises
    UsageError if the path can't be opened, MegatfmError if files are damaged or don't fit together.
    """
    if is_hf_folder(path) or is_electra_folder(path):
        module = load_hf_model(path, device, dtype=dtype)
        if (pad := read_pad_token_id(path)) is not None:
            warn_unmarked_padding(module, pad)
        return Model(module, Path(path))
    module = load_model(path, device, dtype=dtype, trust_plugins=trust_plugins)
    return Model(module, Path(path), trust_plugins=trust_plugins)


class Model:
    """A trained model with methods to generate, encode and evaluate.

    Calling it with `tokens` [batch, sequence] returns an output with `.logits` and `.hidden`. `module` is the
    `nn.Module`, whose attributes and methods (`config`, `parameters()`, …) can also be accessed here.
    """

    def __init__(self, module: nn.Module, path: Path, *, trust_plugins: bool = False) -> None:
        self.module, self.path, self.trust_plugins = module, path.absolute(), trust_plugins
        self._loaded: TextModel | None = None
        self._encoder: SentenceEmbedder | None = None

    def __repr__(self) -> str:
        config = self.module.config
        kind = f"{config.family}, " if isinstance(config, ModelConfig) else ""
        parameters = list(self.module.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        description = f"{str(parameters[0].dtype).removeprefix('torch.')} on {parameters[0].device}"
        return f"megatfm.Model({str(self.path)!r}: {kind}{count:,} parameters, {description})"

    def __call__(self, *args: Any, **keyword_arguments: Any) -> Any:
        tokens = args[0] if args else keyword_arguments.get("tokens")
        if tokens is not None and not (
            isinstance(tokens, Tensor) and tokens.dim() == 2 and not tokens.is_floating_point()
        ):
            raise UsageError(
                f"tokens = {tokens!r:.80}: give ids [batch, sequence], e.g. model(torch.tensor([[1, 5, 6]]))"
            )
        return self.module(*args, **keyword_arguments)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not set yet while this object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.module, name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with. Raises UsageError if there is none."""
        return self._with_tokenizer().tokenizer

    def generate(
        self,
        prompt: Texts = "",  # type: ignore[assignment]
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 0.95,
        num_beams: int = 0,
        length_penalty: float = 0.6,
        seed: int = 0,
        bos: Literal["auto", "bos", "none"] = "auto",
        chat: bool = False,
        sentinel: Literal["auto", "always", "never"] = "auto",
        image: str | Path | Sequence[str | Path] = (),
        batch: int = 16,
    ) -> Texts:
        """Generate the continuation of a prompt; return it without the prompt.

        prompt: or a list of prompts of any lengths, which returns a list: each gets the text that it gets alone. image:
        a file, or several, that a vision-language model describes, for every prompt. batch: number of prompts per
        batch; beam search takes them one by one. The other options are those of `megatfm generate`. Raises UsageError
        for a model that does not generate text.
        """
        texts = [*prompt] if isinstance(prompt, list | tuple) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(
                f"prompt = {prompt!r:.80} is not a string: give one, e.g. model.generate('def '), or a list of them"
            )
        if max_tokens < 1:
            raise UsageError(f"max_tokens = {max_tokens}: choose 1 or more")
        if num_beams < 0:
            raise UsageError(f"num_beams = {num_beams}: choose 0 (none) or more")
        options = PromptOptions(bos, sentinel, [image] if isinstance(image, str | Path) else image, chat)
        loaded = self._with_tokenizer()
        sampling = Sampling(temperature, top_k, top_p, seed, vocab_size=loaded.tokenizer.vocab_size)
        if num_beams:
            results = [
                generate_text_beam(loaded, text, max_tokens, num_beams, length_penalty, options) for text in texts
            ]
        else:
            results = generate_each(loaded, texts, sampling, max_tokens, options, batch_size=batch)
        return results[0] if isinstance(prompt, str) else results

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        batch: int = 32,
    ) -> Tensor:
        """Return a vector for each sentence: float32 [sentences, d_model], on the CPU. Padding never counts.

        pooling: the "mean" of all tokens, the "first" or the "last" token, or "masked", the mean without the special
        tokens at the ends. normalize: scale vectors to length 1. The defaults are those of a Sentence Transformers
        folder, else "mean" and False. batch: number of sentences per batch. Raises UsageError.
        """
        if self._encoder is None:
            self._encoder = self._make_text_encoder()
        return self._encoder.encode(sentences, pooling=pooling, normalize=normalize, batch_size=batch)

    def evaluate(self, sets: Mapping[str, str | Path] | None = None, *, compressors: bool = False) -> dict[str, Any]:
        """Evaluate the run's newest checkpoint on validation sets, as `megatfm evaluate` does; return results by set.

        A result has `loss` and, if the loss is the text's likelihood, `bits_per_byte`. sets: folders or URLs of further
        corpora by name. compressors: add the bits per byte of gzip and xz. If the results can't be written into the run
        directory, a warning says so. Raises UsageError if the model's path is not a run directory.
        """
        _check_mapping("sets", sets or {}, "model.evaluate({'drafts': 'corpora/drafts/validation'})")
        shown: list[tuple[Results, Baselines]] = []

        def keep(results: Results, baselines: Baselines) -> None:
            shown.append((results, baselines))

        try:
            evaluate_run(self.path, sets or {}, compressors, trust_plugins=self.trust_plugins, show=keep)
        except MegatfmError as error:
            if not shown:
                raise
            log.warning("%s", error)
        if not shown:
            return {}
        results, baselines = shown[0]
        return {
            name: {**result, **({"compressors": baselines[name]} if name in baselines else {})}
            for name, result in results["sets"].items()
        }

    def evaluate_tasks(
        self, files: Mapping[str, str | Path], *, batch: int = 16, limit: int = 0
    ) -> dict[str, dict[str, float]]:
        """Evaluate task files, as `megatfm evaluate --task` does, without writing files; return metrics by task.

        files: task name → file. batch: number of rows per batch. limit: number of first questions of each task; 0 for
        all. Raises UsageError.
        """
        _check_mapping("files", files, "model.evaluate_tasks({'mine': 'questions.toml'})")
        tasks, loaded = open_tasks(files, limit), self._with_tokenizer()
        options = read_sentence_transformer_options(self.path, self.module) if is_hf_folder(self.path) else None
        return {
            task.name: dict(
                evaluate_questions(loaded, task, batch_size=batch, embedding_options=options).summary["metrics"]
            )
            for task in tasks
        }

    def _make_text_encoder(self) -> SentenceEmbedder:
        if is_hf_folder(self.path):
            options = read_sentence_transformer_options(self.path, self.module)
            prefix_ids = read_bos_prefix_ids(self.path, tokenizer := tokenizers.load(find_tokenizer_path(self.path)))
            return SentenceEmbedder(self.module, tokenizer, prefix_ids=prefix_ids, **options)
        loaded = self._with_tokenizer()
        longest = loaded.config.model.position.limit or loaded.config.data.sequence_length
        return SentenceEmbedder(self.module, loaded.tokenizer, max_tokens=longest, prefix_ids=loaded.prompt_prefix_ids)

    def _with_tokenizer(self) -> TextModel:
        if self._loaded is None and (is_hf_folder(self.path) or is_electra_folder(self.path)):
            self._loaded = TextModel(self.module, **load_generation_fields(self.path))
        elif self._loaded is None:
            self._loaded = attach_tokenizer(self.module, checkpoint.find_checkpoint(self.path))
        return self._loaded


def _check_mapping(name: str, value: object, example: str) -> None:
    """Raise UsageError unless a value is a table of names, as an example shows."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} = {value!r:.80}: give a dict of names, e.g. {example}")


__all__: Sequence[str] = ["Model", "fit", "load"]
