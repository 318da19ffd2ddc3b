"""The config of `megatfm prep`: from a folder of text to a tokenizer and training shards."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatfm.config.key_migrations import find_renamed_prep_words
from megatfm.config.prep_steps import DedupConfig, StepConfig, TokensConfig
from megatfm.config.section import PathStr, Section


class LabelsConfig(Section):
    """Source of the classes of images."""

    by: Literal["cls", "folder", "table", "json", "txt"] = "cls"
    """A number in the `.cls` beside the image; the name of its folder; a row of `table`; the field `key` of its
    `.json`; or its `.txt`."""
    table: PathStr | None = Field(default=None, examples=["labels.csv"])
    """A `.csv`, `.tsv` or `.jsonl` with the path of an image, or its name, and its label in each row."""
    file_key: str = "file"
    """Column of the table that names the image."""
    key: str = "label"
    """Column of the table, or field of the `.json`, that holds the label."""
    classes: PathStr | None = Field(default=None, examples=["classes.txt"])
    """A file with the name of a class in each line, in the order of their numbers. Left out, labels of folders and
    tables are numbered in alphabetical order, unless all are numbers."""

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if (self.by == "table") != (self.table is not None):
            raise ValueError(
                f"by = {self.by!r} and table = {self.table!r}: set both by = 'table' and the table, or neither"
            )
        return self


class ReadConfig(Section):
    """Source of the text."""

    builtin: Literal["python-stdlib", "digits"] | None = None
    """A corpus that every machine has: the sources of Python's standard library, without its tests; or scikit-learn's
    handwritten digits, as images in the folders train and validation. Used when no `folder` is given."""
    folder: PathStr | None = Field(None, examples=["my-texts"])
    """A folder of UTF-8 text or of files in another `format`, read with all its sub-folders, or the URL of a folder or
    file (`s3://`, `gs://`, `hf://`, `https://` and what else fsspec knows). Hidden files and folders are left out."""
    include: tuple[str, ...] = Field((), examples=[["*.txt", "*.md"]])
    """File names to read, as patterns; left out, every file of a folder."""
    exclude: tuple[str, ...] = Field((), examples=[["tests", "*.log"]])
    """Names of files and of folders to leave out, as patterns."""
    format: str | None = Field(None, examples=["jsonl"])
    """The format of all files: text, jsonl, json, csv, parquet, arrow, warc, mediawiki, webdataset, images, megatron,
    tokens, or that of a plugin; left out, each file's own as the end of its name says, and text where it says nothing.
    The last three of ours are imported as they are: images (`.jpg`, `.png`, `.webp`) with `.cls`, `.json` or `.txt`
    beside them, in folders or in tars, whose captions become ids if there is a `tokenizer.file`; and token ids, with
    the tokenizer in `tokenizer.file`."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """The field of a record (JSON, Parquet, Arrow) that holds the text; `a.b` is `b` inside `a`, here and below."""
    url_key: str = "url"
    """The field that holds the address that it comes from, if there is one."""
    metadata_keys: tuple[str, ...] = Field(default=(), examples=[["date", "licence", "scores.quality"]])
    """Fields that go into the shards beside the text, as they are; `*` stands for all but the text."""
    tokens: TokensConfig = TokensConfig()
    """Layout of token ids in their files."""
    labels: LabelsConfig = LabelsConfig()
    """Source of the classes of images."""
    on_error: Literal["error", "skip"] = "error"
    """Handling of a file or record that can't be used (no permission, binary, not UTF-8, a broken link, no such
    field): stop at the first one, or skip it, count it and list it."""
    fix_unicode: bool = True
    """Whether text that was decoded wrongly is mended (`cafÃ©` becomes `café`), and stray control characters go. Set it
    to false for source code."""
    max_document_bytes: Annotated[int, Field(ge=1024, le=2**26)] = 2**20
    """A longer file or record is cut into several documents, at blank lines where there are any."""

    @property
    def is_passthrough(self) -> bool:
        """Whether nothing is cleaned, split by source or searched for duplicates."""
        return self.format in ("images", "megatron", "tokens")

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
    """Texts that count as nearly the same on both sides of the split."""

    similarity: Annotated[float, Field(ge=0.5, le=1.0)] = 0.7
    """Share of common shingles (Jaccard similarity, estimated by MinHash) from which two documents are near."""
    n_grams: PositiveInt = 5
    """Words in a shingle, an n-gram of words."""


class SplitConfig(Section):
    """Choice of the held-out documents."""

    validation: Annotated[float, Field(ge=0, le=0.5)] = 0.06
    """Share of the bytes that is held out for validation, at most. With 0 there is no validation/."""
    validation_files: tuple[str, ...] = Field(default=(), examples=[["validation/*"]])
    """Hold out these files, and nothing else: patterns of their paths below `read.folder`, without a share;
    of identical texts the held-out one stays."""
    seed: NonNegativeInt = 0
    """Another seed holds out other documents."""
    partition_by: str | None = Field(default=None, examples=["language"])
    """Make a corpus for each value of a field, train/en, train/de and so on, so that a mixture can weigh them: one of
    `read.metadata_keys`, "domain" of the address, or "language", which a step finds; of images "class"."""
    partition_values: tuple[str, ...] = Field(default=(), examples=[["en", "de"]])
    """The values that get a corpus; all others share the one named "other". Left out, each gets its own."""
    near_duplicates: NearDuplicatesConfig = NearDuplicatesConfig()
    """Limits from which on a training document is too similar to a held-out one, and dropped."""

    @property
    def has_validation_split(self) -> bool:
        """Whether there is a validation split."""
        return bool(self.validation_files) or self.validation > 0


class TokenizerConfig(Section):
    """The tokenizer, trained on the training split, or one that there is already."""

    kind: Literal["sentencepiece-bpe", "sentencepiece-unigram", "byte-bpe", "wordpiece"] = "sentencepiece-bpe"
    """Kind of tokenizer to train. All are lossless but wordpiece, which keeps no white space."""
    file: PathStr | None = Field(default=None, examples=["gpt2/tokenizer.json"])
    """Train none, but use this one: a tokenizer.json, a SentencePiece model, or a folder that holds one."""
    vocab_size: Annotated[int, Field(ge=1, le=2**20)] = 4096
    """Number of pieces, with the 256 bytes and the reserved ids."""
    sentinels: Annotated[int, Field(ge=0, le=1024)] = 32
    """Ids reserved for objectives that mark spans, so that adding one does not change the tokenizer."""
    ul2_modes: bool | None = None
    """Reserve ids for UL2's modes, too; left out, all kinds do but sentencepiece-bpe."""
    pretokenizer: Literal["gpt2", "llama3"] = "gpt2"
    """Rule by which byte-bpe cuts words: GPT-2's, or Llama 3's, which also splits numbers into groups of three
    digits."""
    lowercase: bool = True
    """Whether wordpiece, as BERT's uncased models, ignores case and accents."""
    train_bytes: PositiveInt = 2**27
    """Train on at most about this much text: of a larger corpus, on a fixed random sample of documents."""

    @property
    def has_mode_tokens(self) -> bool:
        """Whether ids are kept for mode tokens; unless said, only sentencepiece's BPE keeps none."""
        return self.kind != "sentencepiece-bpe" if self.ul2_modes is None else self.ul2_modes

    @model_validator(mode="after")
    def _fits(self) -> Self:
        changed = [
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        ]
        if self.file is not None and len(changed) > 1:
            key = next(name for name in changed if name != "file")
            raise ValueError(f"file = {self.file!r} is used as it is: leave out tokenizer.{key}, or file")
        for option, kind in (("pretokenizer", "byte-bpe"), ("lowercase", "wordpiece")):
            if option in changed and self.kind != kind:
                raise ValueError(
                    f"{option} is an option of kind = {kind!r}, not of {self.kind!r}: leave it out"
                )
        return self


class PrepConfig(Section):
    """Everything about `megatfm prep`."""

    out: PathStr = Field(examples=["corpora/mine"])
    """Folder to make: the tokenizer, train/, validation/ and prep.json; or its URL, such as `s3://bucket/mine`."""
    scratch: PathStr | None = Field(None, examples=["/scratch/me"])
    """Where a corpus that goes to a URL is made, from where each shard is sent when it is final: a folder that all
    tasks see; left out, `~/.cache/megatfm/prep`."""
    overwrite: bool = False
    """Replace files of an earlier prep with another config in `out`."""
    tokenizer_threads: PositiveInt | None = None
    """Threads to tokenize with; left out, one per core. The result does not depend on it."""
    task_bytes: Annotated[int, Field(ge=2**10, le=2**30)] = 2**24
    """Text in a part of a stage: what a process does at a time, and loses at most when it is killed. The result does
    not depend on it."""
    dedup_memory_bytes: Annotated[int, Field(ge=2**20)] = 2**30
    """Memory, about, that a process takes at a time for an index on disk when it looks for duplicates. The
    result does not depend on it."""
    compress: bool = True
    """Shards under zstd, with many documents in a sample; with false plain `.tar` with a sample for each document, as
    webdataset and Hugging Face's datasets open them, which take several times the room."""
    plugins: tuple[str, ...] = Field((), examples=[["my_steps"]])
    """Python packages that register steps and formats: beside the config, in the current directory, or installed."""
    read: ReadConfig
    steps: tuple[StepConfig, ...] = ()
    """Steps on one document at a time, in this order."""
    dedup: tuple[DedupConfig, ...] = ()
    """Searches in the whole corpus, in this order, after the steps and the removal of identical texts."""
    split: SplitConfig = SplitConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, values: Any) -> Any:
        if renamed := find_renamed_prep_words(values):
            raise ValueError(f"words of an earlier version: {', '.join(renamed)}: write these")
        return values

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
            raise ValueError(f"{read} has no images whose read.labels could be read: leave them out")
        if not self.read.is_passthrough:
            return self
        if self.steps or self.dedup:
            raise ValueError(f"{read}: there is no text for steps and dedup: leave them out")
        by = self.split.partition_by
        if by is not None and (self.read.format, by) != ("images", "class"):
            raise ValueError(f"split.partition_by = {by!r}: {read} knows no such field: leave it out")
        if self.read.format == "images":
            if self.tokenizer.file is None and self.tokenizer != TokenizerConfig():
                raise ValueError(
                    f"{read}: no tokenizer is trained on captions: set tokenizer.file, or leave it out"
                )
            return self
        if self.tokenizer.file is None:
            raise ValueError(f"{read}: set tokenizer.file to the tokenizer of these ids")
        if self.read.format == "tokens" and self.read.tokens.eos_id is None:
            raise ValueError(f"{read}: set read.tokens.eos_id to the id that ends a document")
        return self
