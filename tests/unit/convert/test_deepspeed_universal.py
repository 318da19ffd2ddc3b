"""Universal checkpoints that somebody else wrote, damaged or to do harm: an error of one line, and nothing is run."""

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatfm import checkpoint
from megatfm.convert.convert import convert
from megatfm.convert.deepspeed_universal import from_universal
from megatfm.convert.load import load_hf_model
from megatfm.convert.restricted_pickle import Stored, _Placeholder, read_torch_file
from megatfm.errors import MegatfmError

TINY = LlamaConfig(
    vocab_size=40, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
)  # fmt: skip
NORM, KEYS = "model.norm.weight", ("fp32", "exp_avg", "exp_avg_sq")


class Calls:
    """A pickle's object that is made by a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


class WithState:
    """An object that is given a state once it is there."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], state: Any) -> None:
        self.function, self.args, self.state = function, args, state

    def __reduce__(self) -> Any:
        return self.function, self.args, self.state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder, and a universal checkpoint of it as ds_to_universal lays it out."""
    place = tmp_path_factory.mktemp("universal")
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY)
    model.save_pretrained(place / "hf")
    for name, weight in model.named_parameters():
        folder = place / "universal/zero" / name
        folder.mkdir(parents=True)
        for scale, key in enumerate(KEYS, 1):
            torch.save({"param": weight.detach() * scale}, folder / f"{key}.pt")
        torch.save(torch.tensor(7.0), folder / "step.pt")
    return place / "hf", place / "universal"


@pytest.fixture
def copied(folders: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The model's folder, and a checkpoint to damage: files are links until they are replaced."""
    like, source = folders
    for file in source.rglob("*.pt"):
        target = tmp_path / "u" / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file)
    return like, tmp_path / "u"


def put(file: Path, content: Any) -> None:
    """Replace a file by what torch.save writes, or by these bytes."""
    file.unlink(missing_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)


def archive(file: Path, table: bytes, storage: bytes = bytes(32), **more: bytes) -> None:
    """Write an archive of a pickle and one storage by hand."""
    file.unlink(missing_ok=True)
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in {"data.pkl": table, "version": b"3\n", "data/0": storage, **more}.items():
            opened.writestr(f"a/{name}", content)


def test_a_whole_one_goes_over_to_the_bit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    like, source = folders
    summary = from_universal(source, tmp_path / "ours", like)
    assert summary[0].endswith("Adam's state of step 7")
    assert not any("NaN" in line for line in summary)
    stored = checkpoint.read_tensors(tmp_path / "ours/checkpoints/step-00000007")
    norm = LlamaForCausalLM.from_pretrained(like).state_dict()[NORM]
    for scale, key in enumerate(["model.decoder.norm.weight", "optimizer.decoder.norm.weight.exp_avg"], 1):
        assert torch.equal(stored[key], norm * scale)


def test_a_scripted_module_is_refused_before_its_code_runs(copied: tuple[Path, Path], tmp_path: Path) -> None:
    like, source = copied
    victim = str(tmp_path / "victim")

    class Harmful(torch.nn.Module):
        victim: str

        def __init__(self) -> None:
            super().__init__()
            self.victim = victim

        @torch.jit.export
        def __getstate__(self) -> tuple[str, bool]:
            return self.victim, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[str, bool]) -> None:
            self.victim, self.training = state
            torch.save(torch.ones(1), state[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Harmful())
        torch.jit.save(scripted, tmp_path / "scripted.pt")
    file = source / f"zero/{NORM}/fp32.pt"
    put(file, (tmp_path / "scripted.pt").read_bytes())
    with pytest.raises(MegatfmError, match=r"fp32.pt: it holds '.*TorchScript, whose code would run"):
        from_universal(source, tmp_path / "ours", like)
    assert not Path(victim).exists()
    assert not (tmp_path / "ours").exists()


def test_a_pickle_that_calls_something_is_read_without_calling_it(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    shared = torch.arange(6.0).view(2, 3)
    table = {"param": torch.nn.Parameter(shared.T), "again": shared[1:], "evil": Calls(Path.touch, victim)}
    torch.save(table, tmp_path / "x.pt")
    content = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(content["param"].tensor, shared.T)
    assert torch.equal(content["again"].tensor, shared[1:])
    assert isinstance(content["evil"], _Placeholder)
    assert not victim.exists()
    torch.save(torch.zeros(0, 3), tmp_path / "empty.pt")
    assert read_torch_file(tmp_path / "empty.pt").tensor.shape == (0, 3)


ONES = torch.ones(8)
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI8\ntQ"


def opcodes(size: bytes, storage: bytes = STORAGE, tail: bytes = b"") -> bytes:
    """The pickle of a tensor of that size and stride, in the text protocol."""
    return b"\x80\x02" + TENSOR + b"(" + storage + b"I0\n" + size + b"I00\n)tR" + tail + b"."


DAMAGED: dict[str, tuple[str, Any]] = {
    "step NaN": ("step", torch.tensor(float("nan"))),
    "step infinite": ("step", float("inf")),
    "step 10^30": ("step", 10**30),
    "step negative": ("step", -1),
    "step between": ("step", 2.5),
    "step true": ("step", True),
    "step a table": ("step", {"step": 1}),
    "step several": ("step", torch.ones(2)),
    "fewer elements": ("fp32", {"param": torch.ones(7)}),
    "another shape": ("fp32", {"param": torch.ones(4, 2)}),
    "moment of another shape": ("exp_avg", {"param": torch.ones(2, 4)}),
    "complex": ("fp32", {"param": torch.ones(8, dtype=torch.complex64)}),
    "whole numbers": ("exp_avg_sq", {"param": torch.ones(8, dtype=torch.int64)}),
    "no tensor": ("fp32", {"param": [1.0] * 8}),
    "a list": ("fp32", [ONES]),
    "empty": ("fp32", b""),
    "text": ("fp32", b"PK or not"),
    "a bare pickle": ("fp32", pickle.dumps({"param": 1})),
    "old format": ("fp32", pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)),
    "state for a number": ("fp32", WithState(int, ("7",), {"a": 1})),
    "state for a function": ("fp32", WithState(torch.Size, ((1,),), {"__defaults__": 1})),
}  # fmt: skip
PICKLES = {
    "state on an int": b"\x80\x02I7\n}b.",
    "persistent id a number": b"\x80\x02I7\nQ.",
    "persistent id short": b"\x80\x02(S'storage'\ntQ.",
    "storage missing": opcodes(b"(I8\nt(I1\nt", STORAGE.replace(b"'0'", b"'1'")),
    "storage of a longer name": opcodes(b"(I8\nt(I1\nt", STORAGE.replace(b"'0'", b"'../0'")),
    "more elements than bytes": opcodes(b"(I8\nt(I1\nt", STORAGE.replace(b"I8", b"I80")),
    "stretched": opcodes(b"(I1000000000000\nt(I0\nt"),
    "over the end": opcodes(b"(I8\nt(I2\nt"),
    "negative": opcodes(b"(I-8\nt(I1\nt"),
    "sizes of text": opcodes(b"(S'8'\nt(I1\nt"),
    "state on a tensor": opcodes(b"(I8\nt(I1\nt", tail=b"}b"),
    "state on a storage": opcodes(b"(I8\nt(I1\nt", STORAGE + b"}b"),
    "memo of gigabytes": b"\x80\x02I7\nr\xff\xff\xff\x7f.",
    "nested too deep": b"\x80\x02" + b"(" * 10**6 + b"t" * 10**6 + b".",
    "no end": b"\x80\x02}",
    "stack empty": b"\x80\x02R.",
    "unknown opcode": b"\x80\x02\xfe.",
}


@pytest.mark.parametrize("case", [*DAMAGED, *PICKLES])
def test_a_damaged_file_is_one_line(case: str, copied: tuple[Path, Path], tmp_path: Path) -> None:
    like, source = copied
    if case in DAMAGED:
        key, content = DAMAGED[case]
        put(source / f"zero/{NORM}/{key}.pt", content)
    else:
        archive(source / f"zero/{NORM}/fp32.pt", PICKLES[case])
    with pytest.raises(MegatfmError) as raised:
        from_universal(source, tmp_path / "ours", like)
    assert "\n" not in str(raised.value)
    assert str(source) in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["u"]


def test_only_a_plain_archive_of_one_pickle_is_opened(tmp_path: Path) -> None:
    good = opcodes(b"(I8\nt(I1\nt")
    archive(tmp_path / "x.pt", good)
    assert isinstance(read_torch_file(tmp_path / "x.pt"), Stored)
    for more in ({"code/m.py": b""}, {"constants.pkl": b""}, {"data/0/data.pkl": good}, {"byteorder": b"big"}):
        archive(tmp_path / "x.pt", good, **more)
        with pytest.raises(MegatfmError, match="only tables of tensors are opened"):
            read_torch_file(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("a/data.pkl", bytes(10**6))
    with pytest.raises(MegatfmError, match="its entries are compressed"):
        read_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["step.pt", "fp32.pt"])
def test_a_fifo_is_not_waited_for(name: str, copied: tuple[Path, Path], tmp_path: Path) -> None:
    like, source = copied
    file = source / f"zero/{NORM}/{name}"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(MegatfmError, match=f"{name}: no regular file"):
        from_universal(source, tmp_path / "ours", like)


def test_weights_that_are_no_numbers_are_said(
    copied: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    like, source = copied
    put(source / f"zero/{NORM}/fp32.pt", {"param": torch.full((8,), float("nan"))})
    put(source / f"zero/{NORM}/exp_avg.pt", {"param": torch.full((8,), float("inf"))})
    output = "\n".join(from_universal(source, tmp_path / "ours", like))
    assert "NaN or infinity in decoder.norm.weight:" in output
    assert "NaN or infinity in decoder.norm.weight's exp_avg:" in output
    assert "NaN or infinity in decoder.norm.weight:" in "\n".join(convert(tmp_path / "ours", tmp_path / "hf", "hf"))
    caplog.clear()
    load_hf_model(tmp_path / "hf")
    assert "NaN or infinity in decoder.norm.weight:" in caplog.text


def test_a_fifo_among_safetensors_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "like").mkdir()
    os.mkfifo(tmp_path / "like" / "config.json")
    (tmp_path / "u" / "zero").mkdir(parents=True)
    with pytest.raises(MegatfmError, match=r"config.json: not a regular file"):
        from_universal(tmp_path / "u", tmp_path / "ours", tmp_path / "like")
    index = {"weight_map": dict.fromkeys(LlamaForCausalLM(TINY).state_dict(), "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MegatfmError, match=r"a.safetensors: not a regular file"):
        load_hf_model(tmp_path)
