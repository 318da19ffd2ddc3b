"""A small corpus of real text with every flaw that prep mends, and a config for it."""

import ctypes
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.progress import PrepSummary
from tests.support.prep_files import file_hashes, make_prep_config, write_file

# <linux/capability.h>: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root passes file permissions.
_CAPABILITY_VERSION_3 = 0x20080522
_PASS_PERMISSIONS = 1 << 1 | 1 << 2

PACKAGES = ("concurrent", "curses", "dbm", "email", "html", "json", "wsgiref")
MAX_FILE_BYTES = 17_000


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of the standard library, an exact duplicate, an empty file, mojibake and a binary mess of names."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    root = tmp_path_factory.mktemp("texts") / "corpus"
    for package in PACKAGES:
        for path in sorted((stdlib / package).rglob("*.py"))[:9]:
            if "test" not in str(path.relative_to(stdlib)) and path.stat().st_size < MAX_FILE_BYTES:
                write_file(root / path.relative_to(stdlib), path.read_bytes())
    write_file(root / "zz_copy.py", (stdlib / "json" / "decoder.py").read_bytes())
    write_file(root / "empty.txt", b"\n \n")
    write_file(root / "mojibake.txt", "The café is près d'ici.\r\n".encode().decode("latin-1").encode() * 20)
    write_file(root / ".hidden" / "secret.txt", b"never read")
    write_file(root / "names with spaces" / "a#b é.txt", b"tabs\tand\tmore\n" * 40)
    return root


@pytest.fixture
def changeable_corpus(tmp_path: Path, corpus: Path) -> Path:
    """A copy of the corpus, for a test that changes it."""
    return shutil.copytree(corpus, tmp_path / "corpus")


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Callable[..., PrepConfig]:
    """`config(out="other", read={…}, …)`: a config for the corpus with some settings changed."""
    return partial(make_prep_config, tmp_path, corpus)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> PrepSummary:
    """The corpus prepared by `config()`, to be read and copied only."""
    return data_prep.run(make_prep_config(tmp_path_factory.mktemp("prepared"), corpus))


@pytest.fixture(scope="session")
def prepared_hashes(prepared: PrepSummary) -> dict[str, str]:
    """The hashes of the files in `prepared`."""
    return file_hashes(prepared.out)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """File permissions stop this test, even if root runs it."""
    if os.geteuid() != 0:
        yield
        return
    header, capabilities = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    if libc.capget(header, capabilities):
        pytest.skip("this system can't give up root's power over file permissions")
    effective = capabilities[0]
    capabilities[0] &= ~_PASS_PERMISSIONS
    libc.capset(header, capabilities)
    try:
        yield
    finally:
        capabilities[0] = effective
        libc.capset(header, capabilities)
