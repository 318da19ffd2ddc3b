"""Each kind of mistake gives one line: where, which key, which value, why, and a way out."""

import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from megatfm.config import Config, load_config
from megatfm.config.foreign_keys import FOREIGN_KEYS, FOREIGN_NAMES
from megatfm.config.load import load_section
from megatfm.config.prep import PrepConfig
from megatfm.config.section import list_sections
from megatfm.errors import UsageError


def mistake(load: Callable[..., Config], *overrides: str) -> str:
    with pytest.raises(UsageError, match=r"^[^\n]+\Z") as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(("override", "line"), [
    # unknown keys
    ("train.stesp=3", "train.stesp: unknown key (did you mean 'steps'?); known here: steps, global_batch, "),
    ("traim.steps=3", "traim: unknown key (did you mean 'train'?); known here: name, run_dir, "),
    ("optimizer.beta=1", "optimizer.beta: unknown key (did you mean 'betas'?); known here: name, lr, "),
    ("optimizer.matrix_lr=1", "optimizer.matrix_lr: unknown key; known here: name, lr, "),
    ("a.b.c=1", "a: unknown key; known here: name, "),
    # keys without their section, or below another one
    ("steps=3", "steps: unknown key (did you mean train.steps?); known here: name, "),
    ("n_heads=3", "n_heads: unknown key (did you mean model.attention.n_heads?); known here: name, "),
    ("dropout=0.1", "dropout: unknown key (did you mean model.dropout?); known here: name, "),
    ("optimizer.steps=3", "optimizer.steps: unknown key (did you mean train.steps?); known here: name, lr, "),
    ("train.every=3", "train.every: unknown key (did you mean checkpoint.every or evaluate.every or log.every?);"),
    # types
    ("train.steps=ten", "train.steps = 'ten': input should be a valid integer, "),
    ("train.steps=1.5", "train.steps = 1.5: input should be a valid integer, "),
    ("train.steps=true", "train.steps = true: this is a number: write one"),
    ("model.attention.n_kv_heads=true", "model.attention.n_kv_heads = true: this is a number: write one"),
    ("optimizer.eps=true", "optimizer.eps = true: this is a number: write one"),
    ("train.compile=perhaps", "train.compile = 'perhaps': input should be a valid boolean, "),
    # sizes that would hang or overflow where the model is made
    ("model.d_model=1000000000000000000", "model.d_model = 1000000000000000000: input should be less than or eq"),
    ("model.n_layers=1000000000", "model.n_layers = 1000000000: input should be less than or equal to 16384"),
    (f"train.steps={'9' * 4000}", f"train.steps = {'9' * 80}…: input should be less than or equal to"),
    ("name=[7]", "name = [7]: input should be a valid string; for example 'my-run'"),
    ("parallel.zero=true", "parallel.zero = true: this is a number: write one of 0, 1, 2, 3"),
    ("optimizer.betas=[true, 0.9]", "optimizer.betas = [true, 0.9]: this is a number: write one"),
    ("data.mixture={a={path='x', weight=true}}", "data.mixture.a.weight = true: this is a number: write one"),
    ("train.recompute=50%", "train.recompute = '50%': the compiler chooses what a share of a block's activations is"),
    ("log.profile=7:7", "log.profile = '7:7' records no step, as its end is not included: write '7:8' for step 7"),
    ("data.mixture_schedule=[{tokens=1, weights={a=1}}]", "data.mixture_schedule: there is no data.mixture whose"),
    # a line break in a name of the user's own
    ('data.mixture={"a\\nb"=7}', r"data.mixture.a\nb = 7: this is a section"),
    ('model.layer_type={"a\\nb"={}}', r"model.layer_type.a\nb: none of the"),
    # sections by name and in lists
    ("data.mixture.a.wieght=1", "data.mixture.a.wieght: unknown key (did you mean 'weight'?); known here: path, "),
    ("data.mixture.a.path=x", "data.mixture.a.weight: is required"),
    ("data.mixture.a=7", "data.mixture.a = 7: this is a section"),
    ("data.rampup=[{steps='x'}]", "data.rampup[0].steps = 'x': input should be a valid integer, "),
    ("model.extra_heads.sentence.clases=3", "model.extra_heads.sentence.clases: unknown key (did you mean 'classes'?)"),
    ("model.extra_heads.sentence.classes=x", "model.extra_heads.sentence.classes = 'x': input should be a valid int"),
    ("model.position.scaling={name='x'}", "model.position.scaling.name: unknown or missing; choose one of 'linear'"),
    ("model.position.scaling={name='yarn', factr=3}", "model.position.scaling.factr: unknown key (did you mean "),
    ("model=7", "model = 7: this is a section; for example model = { d_model = 256, n_layers = 4, attenti"),
    ("objective.name=[1]", "objective.name = [1]: input should be a valid string"),
    ("model.latent=5", "model.latent: unknown key (did you mean "),
    ("model.stages.n_layers=[]", "model.stages.n_layers = []: tuple should have at least 1 item"),
    ("objective=7", 'objective = 7: this is a section; for example objective = { name = "causal" }'),
    ("model.attention=", "model.attention: is required; for example model.attention = { n_heads = 4 }"),
    (
        "model.ffn={hidden_dim=8, hidden_size=9, tp=1}",
        "3 unknown keys: model.ffn.hidden_dim (did you mean model.ffn.d_ff?); model.ffn.hidden_size (did you mean "
        "model.d_model?); model.ffn.tp (did you mean parallel.tp?)",
    ),
    # what others call it
    ("train.batch_size=3", "train.batch_size: unknown key (did you mean train.global_batch?); known here: steps, "),
    ("optimizer.learning_rate=3", "optimizer.learning_rate: unknown key (did you mean optimizer.lr?); known"),
    ("model.family=gpt", "model.family = 'gpt': unknown (did you mean 'decoder'?); there are: decoder, encoder, "),
    ("model.family=BertModel", "model.family = 'BertModel': unknown (did you mean 'encoder'?); there are: "),
    ("plugins=7", "plugins = 7: this is a list; the default is []"),
    ("data.validation=ab", "data.validation = 'ab': this is a table; for example data.validation = { NAME = 'ab' }"),
    ("optimizer.betas=0.9", "optimizer.betas = 0.9: this is a list; the default is [0.9, 0.95]"),
    ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: has too few elements; the default is [0.9, 0.95]"),
    ("data.train=[3]", "data.train = [3]: input should be a valid string; for example 'corpora/quickstart/train'"),
    ("model.attention.pattern=window", "model.attention.pattern.width: is required by name = 'window'; for ex"),
    ("model.ffn.name=moe", "model.ffn.n_experts: is required by name = 'moe'; for example 8 (and top_k)"),
    ("model.num_experts=8", "model.num_experts: unknown key (did you mean model.ffn.n_experts?); known here: "),
    ("model.rope_theta=1", "model: keys that have moved into sections: rope_theta is model.position.theta now"),
    ("checkpoint.interval=5", "checkpoint.interval: unknown key (did you mean checkpoint.every?); known here: every, "),
    ("metrics.log_freq=1", "metrics.log_freq: unknown key (did you mean log.every?); known here: name, run_dir, "),
    (
        "training={steps=3, local_batch_size=1, gc=5}",
        "3 unknown keys: training.steps (did you mean train.steps?); training.local_batch_size (did you mean "
        "train.micro_batch?); training.gc",
    ),
    ("activation_checkpoint.mode=full", "activation_checkpoint: unknown key (did you mean train.recompute?); known h"),
    ("train.max_norm=1", "train.max_norm: unknown key (did you mean optimizer.max_grad_norm?); known here: s"),
    # products that no machine has: refused at once
    ("parallel.dp_shard=1000000000000", "parallel.dp_shard = 1000000000000: input should be less than or equal to"),
    # ranges and choices
    ("train.steps=0", "train.steps = 0: input should be greater than 0; for example 1000"),
    ("train.seed=-1", "train.seed = -1: input should be greater than or equal to 0; the default is 0"),
    ("optimizer.lr=nan", "optimizer.lr = nan: input should be "),
    ("optimizer.lr=inf", "optimizer.lr = inf: input should be a finite number; for example 0.0003"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0]: input should be less than 1; the default"),
    ("lr_schedule.min_lr_factor=1.1", "lr_schedule.min_lr_factor = 1.1: input should be less than or equal to 1"),
    ("train.precision=fp6", "train.precision = 'fp6': input should be 'auto', 'fp32', 'bf16', 'fp16', 'fp64'"),
    ("name=a/b", "name = 'a/b': string should match pattern"),
    ("log.profile=5", "log.profile = '5': string should match pattern"),
    ('run_dir=""', "run_dir: an empty path: give a path, or leave the key out"),
    ("data.train=~nobody-here/corpus", "data.train: ~nobody-here is no user of this machine: write the home"),
    ("data.train=${CORPORA}/c", "data.train: '${CORPORA}/c': a config knows no variables of the environment: "),
    (f"data.train={'x' * 256}", f"data.train: '{'x' * 79} is no path: a name in it is too long, or has a null"),
    ('run_dir="a\\u0000b"', "run_dir: 'a\\x00b' is no path: a name in it is too long, or has a null character"),
    ('resume.allow=["all"]', "resume.allow = ['all']: input should be 'data', 'tokenizer', "),
    # the optimizer's name
    (
        "optimizer.name=adam",
        "optimizer.name = 'adam': unknown (did you mean 'adamw'?); there are: adamw, muon, soap, adafactor, lamb, "
        "lion, schedule_free_adamw; others need the package that registers them in plugins",
    ),
    # other names that only a plugin could register
    ("model.ffn.activation=swigluu", "model.ffn.activation = 'swigluu': unknown (did you mean 'swiglu'?); there are: "),
    ("model.norm.placement=preln", "model.norm.placement = 'preln': unknown (did you mean 'pre'?); there are: pre, po"),
    ("log.sinks=[wandb, wandbb]", "log.sinks = 'wandbb': unknown (did you mean 'wandb'?); there are: tensorboard, "),
    ("log.sinks=[[wandb]", "log.sinks = '[[wandb]': unknown (did you mean 'wandb'?); there are: tensorboard, wandb"),
    ("log.sinks=wandb,wandb", "log.sinks = ['wandb', 'wandb'] names 'wandb' twice: name it once"),
    ("objective.name=causall", "objective.name = 'causall': unknown (did you mean 'causal'?); there are: causal, "),
    ("parallel.engine=ntive", "parallel.engine = 'ntive': unknown (did you mean 'native'?); there are: native, deep"),
    ("model.attention.pattern.name=windw", "model.attention.pattern.name = 'windw': unknown (did you mean 'window'?"),
    ('model.ffn={name="moe", d_ff=8, n_experts=2, top_k=1, router={name="topk"}}',
     "model.ffn.router.name = 'topk': unknown (did you mean 'top_k'?); there are: "),
    ('data.images={transforms=["horizontal_flp"]}',
     "data.images.transforms[0].name = 'horizontal_flp': unknown (did you mean 'horizontal_flip'?); there are: "),
    ('data.images={transforms=[{name="random_resized_crop", scale=[1.0, 0.5]}]}',
     "data.images.transforms[0].scale: from 1 to 0.5: give the smaller number first"),
    ('data.images={transforms=[{name="random_erasing", ratio=[3, 0.3]}]}',
     "data.images.transforms[0].ratio: from 3 to 0.3: give the smaller number first"),
    ('data.images={transforms=[{name="random_resized_crop", scale=[0.5, 2.0]}]}',
     "data.images.transforms[0].scale = [0.5, 2.0]: input should be less than or equal to 1; the default is"),
    ("model.extra_heads={clasifier={n_classes=2}}",
     "model.extra_heads.clasifier.name = 'clasifier': unknown (did you mean 'classifier'?); there are: sentence, "),
    ('model={layer_types=["local"], layer_type={local={attention={pattern={name="windw"}}}}, d_model=8, n_layers=1, '
     'attention={n_heads=2}, ffn={d_ff=16}}',
     "model.layer_type.local.attention.pattern.name = 'windw': unknown (did you mean 'window'?); there are: full, "),
    ('optimizer={name="adamw", lr=1e-3, moments_dtype="bf16", ema_decay=0.9}',
     "optimizer.ema_decay = 0.9: optimizer.name = 'adamw' keeps its state in another precision (moments_dtype): "),
    ('optimizer={name="schedule_free_adamw", lr=1e-3, ema_decay=0.9}',
     "optimizer.ema_decay = 0.9: optimizer.name = 'schedule_free_adamw' averages weights itself: choose adamw, lion, "),
    ("optimizer.layer_decay=0", "optimizer.layer_decay = 0: input should be greater than 0; the default is 1.0"),
    # the schedule's name
    ("lr_schedule.name=cosin", "lr_schedule.name = 'cosin': unknown (did you mean 'cosine'?); there are: cosine, "),
    ("lr_schedule.name=inverse_sqrt", "lr_schedule.warmup_steps: is required by name = 'inverse_sqrt'; for ex"),
    ('lr_schedule={name="constant", min_lr_factor=0.1}', "lr_schedule.min_lr_factor: unknown key; known here: na"),
    ('lr_schedule={name="wsd", decay_ratio=0.9, warmup_steps=2}',
     "lr_schedule.decay_ratio = 0.9 leaves no room for lr_schedule.warmup_steps = 2 of train.steps = 10: choose"),
    ("optimizer.name=schedule_free_adamw", "lr_schedule.name = 'cosine': optimizer.name = 'schedule_free"),
    # combinations
    ("model.attention.n_heads=3", "model.attention.n_heads = 3 does not divide d_model = 8: choose n_heads = 2"),
    ("model.attention.n_kv_heads=4", "model.attention.n_kv_heads = 4 does not divide n_heads = 2: choose n_kv_he"),
    ("model.attention.head_dim=3", "model: rope turns pairs of channels, so attention.head_dim = 3 must be even: "),
    ('model.attention.pattern={name="longformer", width=4, global_tokens=[0, 9999]}',
     "model.attention.pattern.global_tokens names position 9999, but rows have data.sequence_length = "),
    ("lr_schedule.warmup_steps=11", "lr_schedule.warmup_steps = 11 is longer than the run, train.steps = 10: ch"),
    ("train.micro_batch=3", "train.global_batch = 4 is not a multiple of train.micro_batch = 3: the nearest"),
    ("data.rampup=[{steps = 2}, {steps = 2, sequence_length = 3}]",
     "data.rampup[1].sequence_length = 3 does not divide data.sequence_length = 8: the nearest that does is 2"),
    ("parallel.tp=4", "parallel.tp = 4 does not divide model.attention.n_heads = 2: the nearest tp that fits is 2"),
    ("parallel.ep=2", "parallel.ep = 2, but the model has no experts to divide: set parallel.ep = 1, or"),
    ("parallel.virtual_stages=2", "parallel.virtual_stages = 2: pp_schedule = '1f1b' has 1 on each rank: leave i"),
    ('parallel.pp_split_points=["head"]', "parallel.pp_split_points are for pipeline stages, and pp = 1: leave t"),
    ("parallel.dp_shard=0", "parallel.dp_shard = 0: choose -1 (all ranks that are left) or a positive number"),
])  # fmt: skip
def test_a_wrong_value(load: Callable[..., Config], file: Path, override: str, line: str) -> None:
    assert mistake(load, override).startswith(f"{file}: {line}")


@pytest.mark.parametrize(("overrides", "message"), [
    (["parallel.dp_shard=15485863", "parallel.ep=2"], "ep = 2 does not divide dp_shard = 15485863, over which exp"),
    (["parallel.dp_shard=16777216", "parallel.cp=16777216", "parallel.ep=3"], "dp_shard × cp are 281474976710656 p"),
    (["parallel.tp=16777215"], "parallel.tp = 16777215 does not divide model.attention.n_heads = 2: the nearest"),
])  # fmt: skip
def test_absurd_sizes_are_refused_at_once(load: Callable[..., Config], overrides: list[str], message: str) -> None:
    start = time.process_time()
    assert message in mistake(load, *overrides)
    assert time.process_time() - start < 1, "the nearest divisor is found without trying every number"


def test_a_sequence_that_the_ranks_cannot_share(load: Callable[..., Config]) -> None:
    message = mistake(load, "parallel.tp=2", "data.sequence_length=9")
    assert message.endswith(
        "data.sequence_length = 9 does not divide into parallel.tp = 2 shards of the sequence: choose 8, or "
        "parallel.sequence_parallel=false"
    )
    load("parallel.tp=2", "data.sequence_length=9", "parallel.sequence_parallel=false")
    for override, key in (
        ("data.target_length=7", "data.target_length = 7"),
        ("data.rampup=[{steps = 2, sequence_length = 5}]", "data.rampup[0].sequence_length = 5"),
    ):
        message = mistake(load, "parallel.tp=2", "data.sequence_length=10", override)
        assert f"{key} does not divide into parallel.tp = 2 shards of the sequence: choose " in message
    load("parallel.tp=2", "data.sequence_length=8")


@pytest.mark.parametrize(("overrides", "line"), [
    (["parallel.pp_schedule=zbv", "train.compile=true"],
     "parallel.pp_schedule = 'zbv' takes backward passes in two parts, which train.compile = True would repeat"),
    (["parallel.pp_schedule=dualpipev", "train.recompute=full"],
     "parallel.pp_schedule = 'dualpipev' takes backward passes in two parts, which train.recompute = 'full' would"),
    (["parallel.grad_accumulation=sharded"],
     "parallel.grad_accumulation = 'sharded': under pipeline stages gradients are reduced once a step: leave it out"),
])  # fmt: skip
def test_options_that_exclude_a_pipeline_are_refused_with_it(
    load: Callable[..., Config], file: Path, overrides: list[str], line: str
) -> None:
    load(*overrides)  # without stages it does
    assert mistake(load, "parallel.pp=2", *overrides).startswith(f"{file}: {line}")


def test_a_generator_s_heads_that_the_ranks_cannot_share() -> None:
    with pytest.raises(UsageError, match=r"parallel\.tp = 2 does not divide model\.generator\.n_heads = 1"):
        load_config("electra-small", ["parallel.tp=2"])
    load_config("electra-base", ["parallel.tp=2"])


def test_several_mistakes_show_the_first_and_their_number(load: Callable[..., Config]) -> None:
    assert mistake(load, "train.steps=0", "train.seed=-1", "model.ffn.d_ff=0").endswith("(and 2 more)")


def test_a_missing_required_key_is_named_with_an_example(file: Path) -> None:
    model = "[model]\nd_model = 8\nn_layers = 1\n[model.attention]\n[model.ffn]\nd_ff = 16\n"
    file.write_text(f'name = "a"\n{model}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"model\.attention\.n_heads: is required; for example 4 \(and 3 more\)$"):
        load_config(file)


def test_a_misspelled_required_key_is_named_before_the_missing_one(file: Path) -> None:
    file.write_text('name = "a"\n[model]\nd_modl = 8\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"model\.d_modl: unknown key \(did you mean 'd_model'\?\).* \(and 7 more\)$"):
        load_config(file)


def test_a_prep_config_is_held_to_its_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "prep.toml"
    path.write_text('out = "x"\n[read]\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"read: nothing to read: set read\.folder to a folder"):
        load_section(PrepConfig, path)
    with pytest.raises(UsageError, match=r"split\.validation = 0\.9: input should be less than or equal to 0\.5"):
        load_section(PrepConfig, path, ["read.folder=y", "split.validation=0.9"])
    with pytest.raises(UsageError, match=r"folder: unknown key \(did you mean read\.folder\?\)"):
        load_section(PrepConfig, path, ["read.builtin=python-stdlib", "folder=y"])


@pytest.mark.parametrize("content", [b"name = ", b"name = 'a'\nname = 'b'", b"\xff\xfe", b"[model\n"])
def test_a_file_that_is_not_toml(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}: not valid TOML: ")
    assert "\n" not in str(caught.value)
    assert "JSON" not in str(caught.value)
    assert ("save the file as UTF-8" in str(caught.value)) == (content == b"\xff\xfe")
    assert ("text needs quotes, a boolean is true or false" in str(caught.value)) == (content == b"name = ")
    other = file.rename(file.with_suffix(".yaml"))
    with pytest.raises(UsageError, match=r"; configs are TOML files, not YAML, JSON or Python$"):
        load_config(other)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"most like it: t5-small, [^,]+, [^,]+; `megatfm config presets` lists all$"):
        load_config("t5-smal")
    with pytest.raises(UsageError, match=r"none\.toml: no such file$"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(UsageError, match=r"quickstrat: no such .* \(did you mean 'quickstart'\?\)"):
        load_config("quickstrat")
    with pytest.raises(UsageError, match=r"is a folder without config\.toml"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("value", "reason"), [("9" * 5000, "Exceeds the limit (4300 digits)"), ("[" * 5000, "recursion depth")]
)
def test_invalid_toml_is_named_with_its_file(load: Callable[..., Config], file: Path, value: str, reason: str) -> None:
    assert reason in mistake(load, f"train.steps={value}")
    file.write_text(f"name = {value}\n")
    output = mistake(load)
    assert output.startswith(f"{file}: not valid TOML: ")
    assert reason in output


@pytest.mark.parametrize("header", ["[{}]", "[[{}]]", "{} = 1"])
def test_tables_that_are_nested_too_deep(load: Callable[..., Config], file: Path, header: str) -> None:
    file.write_text(header.format(".".join("a" * 3000)) + "\n")
    assert mistake(load) == f"{file}: has tables within tables, more than 100: no config has so many"


@pytest.mark.parametrize(("word", "meant"), [
    ("gpt-2", "gpt2"),
    ("openai-community/gpt2", "gpt2"),
    ("bert", "bert-base"),
    ("bert-base-uncased", "bert-base"),
    ("meta-llama/Llama-3-8B", "llama3-8b"),
    ("google/t5-v1_1-base", "t5-v1.1-base"),
])  # fmt: skip
def test_a_model_by_the_name_it_has_elsewhere(word: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(word)
    assert f"(did you mean {meant!r}?)" in str(caught.value)
    load_config(meant)


def test_every_key_by_another_name_is_a_key() -> None:
    assert len(FOREIGN_KEYS) == len(" ".join(FOREIGN_NAMES.values()).split())  # no name stands for two
    for key in FOREIGN_KEYS.values():
        sections: list[Any] = [Config]
        for part in key.split("."):
            assert any(part in section.model_fields for section in sections), key
            sections = [variant for section in sections for variant in list_sections(section, part)]


def test_a_config_of_another_command_is_sent_there(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"is a config of `megatfm train`.*: use `megatfm train {file}`$"):
        load_section(PrepConfig, file)
    with pytest.raises(UsageError, match=r"with out, read, .*: use `megatfm prep quickstart-data`$"):
        load_config("quickstart-data")


@pytest.mark.parametrize("section", ["model", "data", "optimizer", "train"])
def test_the_example_of_a_missing_section_is_a_section(file: Path, section: str) -> None:
    values = tomllib.loads(file.read_text(encoding="utf-8"))
    del values[section]
    file.write_text(tomli_w.dumps(values), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_config(file)
    example = re.search(r"is required; for example (.*)$", str(caught.value))
    assert example
    key, _, value = example[1].partition(" = ")
    assert key == section
    load_config(file, [f"{key}={value}", "lr_schedule.warmup_steps=0"])


@pytest.mark.parametrize(("overrides", "why"), [
    (["parallel.tp=1"], "for tensor-parallel ranks that gather and scatter tokens, and tp = 1: leave it out"),
    (["parallel.sequence_parallel=false"], "without sequence_parallel they add up whole tensors: leave it out"),
    (["train.compile=false"], "train.compile = false: set parallel.async_tp = false"),
    (["train.recompute=2 GB"], "how much blocks keep while they run"),
    (["parallel.cp=2"], "parallel.cp = 2 compiles blocks in parts"),
    (["train.device=cpu"], "train.device = 'cpu': ranks can't read each other's memory there"),
    (["train.precision=fp8"], "train.precision = 'fp8' rounds inputs after they are gathered"),
    (["parallel.engine=deepspeed"], "parallel.async_tp, which takes compiled blocks apart"),
])  # fmt: skip
def test_async_tp_is_refused_where_nothing_is_sent_in_pieces(
    load: Callable[..., Config], overrides: list[str], why: str
) -> None:
    inputs = ["parallel.async_tp=true", "parallel.tp=2"]
    assert load(*inputs).parallel.async_tp
    message = mistake(load, *inputs, *overrides)
    assert why in message
    assert "async_tp = false" in message or "leave it out" in message


@pytest.mark.parametrize(("overrides", "why"), [
    (["parallel.tp=2"], "parallel.tp = 2 needs communication, which is not recorded"),
    (["parallel.dp_shard=2"], "parallel.dp_shard = 2 needs communication"),
    (["parallel.pp=2"], "parallel.pp = 2 needs"),
    (["parallel.engine=deepspeed"], "parallel.engine = 'deepspeed' records no CUDA graphs"),
    (["train.device=cpu"], "train.device = 'cpu' has no CUDA graphs"),
    (["train.recompute=2 GB"], "train.recompute = '2 GB' measures the memory of each pass"),
])  # fmt: skip
def test_cuda_graphs_are_refused_on_a_cpu(load: Callable[..., Config], overrides: list[str], why: str) -> None:
    assert load("train.cuda_graphs=true").train.cuda_graphs
    message = mistake(load, "train.cuda_graphs=true", *overrides)
    assert f"train.cuda_graphs = true: {why}" in message
    assert "set train.cuda_graphs = false" in message


@pytest.mark.parametrize(("key", "remedy"), [
    ("parallel.pp=2", "parallel.pp = 1"), ("parallel.cp=2", "parallel.cp = 1"),
    ("parallel.tp=2", "parallel.sequence_parallel = false"), ("train.precision=fp8", "train.precision = 'bf16'"),
])  # fmt: skip
def test_prompts_that_no_rank_can_continue_are_refused(load: Callable[..., Config], key: str, remedy: str) -> None:
    message = mistake(load, "evaluate.sample_prompts=['a']", key)
    assert "no rank can continue a text token by token: set " in message
    assert remedy in message
