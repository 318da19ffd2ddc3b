"""The config of `megatfm prep`: from a folder of text to a tokenizer and shards."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from blake3 import blake3
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatfm.config.key_migrations import find_renamed_prep_words
from megatfm.config.parts import PartName, explain_unknown_name, iter_part_names
from megatfm.config.prep_steps import DedupConfig, StepConfig, TokensConfig
from megatfm.config.section import PathStr, Section

PASSTHROUGH_FORMATS = ("images", "megatron", "tokens")
"""Formats whose files are imported unchanged, without cleaning, split by source or dedup."""
READ_FORMATS = (
    *("text", "jsonl", "json", "csv", "parquet", "arrow", "warc", "mediawiki", "webdataset"),
    *PASSTHROUGH_FORMATS,
)


class LabelsConfig(Section):
    """Source of the classes of images."""

    by: Literal["cls", "folder", "table", "json", "txt"] = "cls"
    """cls: a number in the `.cls` beside the image. folder: the name of its folder. table: a row of `table`. json: the
    field `key` of its `.json`. txt: its `.txt`."""
    table: PathStr | None = Field(default=None, examples=["labels.csv"])
    """A `.csv`, `.tsv` or `.jsonl` whose rows have the path or name of an image, and its label."""
    file_key: str = "file"
    """Column of the table that names the image."""
    key: str = "label"
    """Column of the table, or field of the `.json`, that holds the label."""
    classes: PathStr | None = Field(default=None, examples=["classes.txt"])
    """A file with a class name in each line, in the order of the classes. Left out, labels of folders and tables are
    sorted alphabetically, unless all are numbers."""

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if (self.by == "table") != (self.table is not None):
            table = "without a table" if self.table is None else f"with table = {self.table!r}"
            raise ValueError(f"by = {self.by!r} {table}: set both by = 'table' and the table, or neither")
        return self


class ReadConfig(Section):
    """Source of the text."""

    builtin: Literal["python-stdlib", "digits"] | None = None
    """A corpus of every machine: the sources of Python's standard library, without its tests; or scikit-learn's
    handwritten digits, as images in the folders train and validation. Used without `folder`."""
    folder: PathStr | None = Field(None, examples=["my-texts"])
    """A folder of UTF-8 text or of files in another `format`, read with all its sub-folders, or the URL of a folder or
    file (`s3://`, `gs://`, `hf://`, `https://` and others of fsspec). Hidden files and folders are skipped."""
    include: tuple[str, ...] = Field((), examples=[["*.txt", "*.md"]])
    """File names to read, as patterns; left out, every file of a folder."""
    exclude: tuple[str, ...] = Field((), examples=[["tests", "*.log"]])
    """Names of files and of folders to leave out, as patterns."""
    format: Annotated[str | None, PartName("format", READ_FORMATS)] = Field(None, examples=["jsonl"])
    """The format of all files: text, jsonl, json, csv, parquet, arrow, warc, mediawiki, webdataset, images, megatron,
    tokens, or a plugin's; left out, by each file's suffix, and text without a known one. Images, megatron and tokens
    are imported unchanged: images (`.jpg`, `.png`, `.webp`) with `.cls`, `.json` or `.txt` beside them, in folders or
    tars, whose captions become ids if there is a `tokenizer.file`; and token ids, with the tokenizer in
    `tokenizer.file`."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """The field of a record (JSON, Parquet, Arrow) with the text; `a.b` is `b` inside `a`, here and below."""
    url_key: str = "url"
    """The field with the document's address, if there is one."""
    metadata_keys: tuple[str, ...] = Field(default=(), examples=[["date", "licence", "scores.quality"]])
    """Fields that are stored in the shards beside the text, unchanged; `*`: all but the text."""
    tokens: TokensConfig = TokensConfig()
    """Layout of token ids in their files."""
    labels: LabelsConfig = LabelsConfig()
    """Source of the classes of images."""
    on_error: Literal["error", "skip"] = "error"
    """Handling of an unusable file or record (no permission, binary, not UTF-8, a broken link, no such field): stop at
    the first one, or skip it, count it and list it."""
    fix_unicode: bool = True
    """Repair text that was decoded wrongly (`cafÃ©` becomes `café`), and remove stray control characters. Set it to
    false for source code."""
    max_document_bytes: Annotated[int, Field(ge=1024, le=2**26)] = 2**20
    """Maximal bytes of a document; a longer file or record is split into several, at blank lines if there are any."""

    @property
    def is_passthrough(self) -> bool:
        """Whether files are imported unchanged, without cleaning, split by source or dedup."""
        return self.format in PASSTHROUGH_FORMATS

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.folder is None and self.builtin == "digits" and self.format != "images":
            raise ValueError("builtin = 'digits' are images: set read.format to 'images'")
        if self.folder is None and self.builtin is None:
            raise ValueError(
                "nothing to read: set read.folder to a folder of text files, or read.builtin to 'python-stdlib'"
            )
        return self


class NearDuplicatesConfig(Section):
    """Similarity from which a training document is a near duplicate of a held-out one."""

    similarity: Annotated[float, Field(ge=0.5, le=1.0)] = 0.7
    """Share of common shingles (Jaccard similarity, estimated by MinHash) from which two documents are near."""
    n_grams: PositiveInt = 5
    """Words in a shingle, an n-gram of words."""


class SplitConfig(Section):
    """Choice of the held-out documents."""

    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.06
    """Maximal share of the bytes that is held out for validation. 0: no validation/."""
    validation_files: tuple[str, ...] = Field(default=(), examples=[["validation/*"]])
    """Hold out exactly these files, in place of a share: patterns of paths below `read.folder`. If texts are identical,
    the held-out one stays."""
    seed: NonNegativeInt = 0
    """Seed of the choice of held-out documents."""
    partition_by: str | None = Field(default=None, examples=["language"])
    """Write a corpus for each value of a field, train/en, train/de and so on, for a weighted mixture: one of
    `read.metadata_keys`, "domain" of the address, or "language", which a step identifies; for images "class"."""
    partition_values: tuple[str, ...] = Field(default=(), examples=[["en", "de"]])
    """Values that get their own corpus; all others share the corpus "other". Left out, each value gets its own."""
    near_duplicates: NearDuplicatesConfig = NearDuplicatesConfig()
    """Similarity to a held-out document from which a training document is dropped."""

    @property
    def has_validation_split(self) -> bool:
        """Whether there is a validation split."""
        return bool(self.validation_files) or self.validation > 0


class TokenizerConfig(Section):
    """The tokenizer: trained on the training split, or an existing one."""

    kind: Literal["sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe", "wordpiece"] = "sentencepiece-bpe"
    """Kind of tokenizer to train. All are lossless but wordpiece, which keeps no white space."""
    file: PathStr | None = Field(default=None, examples=["gpt2/tokenizer.json"])
    """An existing tokenizer: a tokenizer.json, a SentencePiece model, or a folder with one; left out, train one."""
    vocab_size: Annotated[int, Field(ge=1, le=2**20)] = 4096
    """Number of ids, with the 256 bytes and the reserved ids."""
    sentinels: Annotated[int, Field(ge=0, le=1024)] = 32
    """Number of ids reserved for objectives that mark spans."""
    ul2_modes: bool | None = None
    """Reserve ids for UL2's modes, too; left out, all kinds do except sentencepiece-bpe."""
    pretokenizer: Literal["gpt2", "llama3"] = "gpt2"
    """Pre-tokenization of byte-bpe: GPT-2's, or Llama 3's, which also splits numbers into groups of three digits."""
    lowercase: bool = True
    """Whether wordpiece ignores case and accents, as BERT's uncased models."""
    train_bytes: PositiveInt = 2**27
    """Bytes of training text, at most about; of a larger corpus, a fixed random sample of documents."""

    @property
    def has_mode_tokens(self) -> bool:
        """Whether ids are reserved for mode tokens."""
        return self.kind != "sentencepiece-bpe" if self.ul2_modes is None else self.ul2_modes

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.file is not None and len(changed) > 1:
            key = next(name for name in changed if name != "file")
            raise ValueError(f"file = {self.file!r} is used as it is: leave out tokenizer.{key}, or file")
        for option, kind in (("pretokenizer", "byte-bpe"), ("lowercase", "wordpiece")):
            if option in changed and self.kind != kind:
                raise ValueError(f"{option} is an option of kind = {kind!r}, not of {self.kind!r}: leave it out")
        return self


DEFAULT_SCRATCH = Path("~/.cache/megatfm/prep")


class PrepConfig(Section):
    """All settings of `megatfm prep`."""

    out: PathStr = Field(examples=["corpora/mine"])
    """Output folder with the tokenizer, train/, validation/ and prep.json; or its URL, such as `s3://bucket/mine`."""
    scratch: PathStr | None = Field(None, examples=["/scratch/me"])
    """Folder, shared by all tasks, in which a corpus for a URL is made; each finished shard is uploaded from there.
    Left out, `~/.cache/megatfm/prep`."""
    overwrite: bool = False
    """Replace files of an earlier prep with another config in `out`."""
    tokenizer_threads: PositiveInt | None = None
    """Threads that tokenize; left out, one per core. The result does not depend on it."""
    task_bytes: Annotated[int, Field(ge=2**10, le=2**30)] = 2**24
    """Bytes of text in a part of a stage, the work that is lost at most when a process is killed. The result does not
    depend on it."""
    dedup_memory_bytes: Annotated[int, Field(ge=2**20)] = 2**30
    """Memory of a process, about, for the on-disk index of dedup. The result does not depend on it."""
    compress: bool = True
    """Write shards under zstd, with many documents in a sample. false: plain `.tar` with a sample for each document,
    which webdataset and Hugging Face's datasets can open, and which takes several times the space."""
    plugins: tuple[str, ...] = Field((), examples=[["my_steps"]])
    """Python packages that register steps and formats: beside the config, in the current directory, or installed."""
    read: ReadConfig
    steps: tuple[StepConfig, ...] = ()
    """Steps on single documents, in this order."""
    dedup: tuple[DedupConfig, ...] = ()
    """Corpus-wide deduplication, in this order, after the steps and the removal of identical texts."""
    split: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()

    @property
    def has_remote_out(self) -> bool:
        """Whether the corpus is uploaded to a URL."""
        return "://" in self.out

    @property
    def local_folder(self) -> Path:
        """The folder in which the corpus is made: `out`, or for a URL a folder below `scratch`."""
        if not self.has_remote_out:
            return Path(self.out)
        url = self.out.rstrip("/")
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", url)[-80:]
        root = Path(self.scratch) if self.scratch else DEFAULT_SCRATCH.expanduser()
        return root / f"{name}-{blake3(url.encode()).hexdigest(6)}"

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, values: Any) -> Any:
        if renamed := find_renamed_prep_words(values):
            raise ValueError(f"words of an earlier version: {', '.join(renamed)}: write these")
        return values

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not self.plugins and (error := self.find_unknown_part()):
            raise ValueError(error)
        return self

    def find_unknown_part(self) -> str | None:
        """Return an error for a name that neither megatfm nor an imported plugin registers; None without one."""
        return explain_unknown_name(iter_part_names(self), self.plugins)

    @model_validator(mode="after")
    def _check_out(self) -> Self:
        if self.out.startswith(("http://", "https://")):
            raise ValueError(
                f"out = {self.out!r}: nothing can be written over HTTP: choose a folder, or s3://, gs:// and the like"
            )
        if self.scratch is not None and "://" in self.scratch:
            raise ValueError(f"scratch = {self.scratch!r} is a URL: choose a folder of this machine")
        return self

    @model_validator(mode="after")
    def _check_passthrough_format(self) -> Self:
        read = f"read.format = {self.read.format!r}"
        if self.read.labels != LabelsConfig() and self.read.format != "images":
            raise ValueError("read.labels are those of images: set read.format = 'images', or leave them out")
        if not self.read.is_passthrough:
            return self
        if self.steps or self.dedup:
            raise ValueError(f"{read}: there is no text for steps and dedup: leave them out")
        partition_by = self.split.partition_by
        if partition_by is not None and (self.read.format, partition_by) != ("images", "class"):
            raise ValueError(f"split.partition_by = {partition_by!r}: {read} knows no such field: leave it out")
        if self.read.format == "images":
            if self.tokenizer.file is None and self.tokenizer != TokenizerConfig():
                raise ValueError(f"{read}: no tokenizer is trained on captions: set tokenizer.file, or leave it out")
            return self
        if self.tokenizer.file is None:
            raise ValueError(f"{read}: set tokenizer.file to the tokenizer of these ids")
        if self.read.format == "tokens" and self.read.tokens.eos_id is None:
            raise ValueError(f"{read}: set read.tokens.eos_id to the id that ends a document")
        return self
