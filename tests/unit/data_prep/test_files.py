"""Which files are found, in which order, and what is said of those that can't be used."""

import os
import socket
import sysconfig
from pathlib import Path

import pytest

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.input_files import InputFiles
from megatfm.errors import MegatfmError, UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.txt", "a/tests/t.txt", ".git/config", "a.md", "c/d/e/f.txt"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "root"


def test_all_files_sorted_without_the_hidden(root: Path) -> None:
    assert names(root) == ["a/tests/t.txt", "a/z.txt", "a.md", "b.txt", "c/d/e/f.txt"]


def test_patterns_choose_and_leave_out(root: Path) -> None:
    actual = listing(root, include=("*.txt",), exclude=("tests",))
    assert [file.name for file in actual.files] == ["a/z.txt", "b.txt", "c/d/e/f.txt"]
    assert actual.n_excluded == 3


def test_sizes_are_those_on_disk(root: Path) -> None:
    assert [file.size for file in listing(root).files] == [len(name) for name in names(root)]


def test_the_standard_library_without_tests_and_other_packages() -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    expected = {
        str(path.relative_to(stdlib))
        for path in stdlib.rglob("*.py")
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages"}
        & set(path.relative_to(stdlib).parts)
    }
    input_files = InputFiles(ReadConfig(builtin="python-stdlib"))
    assert {file.name for file in input_files.files} == expected
    assert "json/decoder.py" in expected


def test_a_folder_goes_before_a_source(root: Path) -> None:
    assert len(InputFiles(ReadConfig(builtin="python-stdlib", folder=str(root))).files) == 5


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.txt").write_text("x")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "y.txt").symlink_to(tmp_path / "elsewhere" / "x.txt")
    assert {"link/x.txt", "y.txt"} <= set(names(root))


def test_names_that_are_not_utf8_are_escaped(root: Path) -> None:
    (root / os.fsdecode(b"caf\xe9 #1.txt")).write_text("x")
    assert "caf\\xe9 %231.txt" in names(root)


@pytest.mark.parametrize("kind", ["loop", "self", "dangling", "fifo", "socket"])
def test_what_is_no_file_is_named_or_skipped(root: Path, kind: str) -> None:
    bad = root / "c" / "bad"
    if kind == "fifo":
        os.mkfifo(bad)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(bad))
    else:
        bad.symlink_to({"loop": "..", "self": "bad", "dangling": "nowhere"}[kind])
    with pytest.raises(MegatfmError, match=f"{bad}: .*read.on_error=skip") as caught:
        listing(root)
    assert "\n" not in str(caught.value)
    actual = listing(root, on_error="skip")
    assert [item.where for item in actual.bad] == [str(bad)]
    assert len(actual.files) == 5


def test_a_folder_without_permission(tmp_path: Path, root: Path, unprivileged: None) -> None:
    (root / "a").chmod(0)
    try:
        with pytest.raises(MegatfmError, match="a: can't list this folder \\(Permission denied\\)"):
            listing(root)
        assert len(listing(root, on_error="skip").files) == 3
    finally:
        (root / "a").chmod(0o755)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("none", "no such folder"), ("root/b.txt", "is a file, not a folder"), ("empty", "no text files")],
)
def test_a_wrong_folder_is_a_usage_error(tmp_path: Path, root: Path, folder: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"{tmp_path / folder}: {reason}"):
        listing(tmp_path / folder)


def test_patterns_that_fit_nothing_are_a_usage_error(root: Path) -> None:
    with pytest.raises(UsageError, match=r"no text files here \(6 left out by name\).*read\.include"):
        listing(root, include=("*.rst",))


def listing(root: Path, **settings) -> InputFiles:
    return InputFiles(ReadConfig(folder=str(root), **settings))


def names(root: Path) -> list[str]:
    return [file.name for file in listing(root).files]
