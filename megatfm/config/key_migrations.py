"""Config keys of earlier versions and what they are today, for configs that megatfm has stored itself.

Checkpoints, run directories and prep.json hold configs with every key spelled out, and outlive a version. To rename a
key, add a row here in the same commit. For a new key whose default computes something else than the versions before,
add to `VALUES_BEFORE` what those computed. A user's own file is not translated: it is refused, with the new name. An
old name is never given a new meaning, so that a stored config needs no version to be read by.

A key is a path such as "optimizer.clip". `section[NAME].key` means the section where its `name` is NAME, and `*` every
key of a table. A list of tables stands for each of them. Rows of "model." hold in the kinds of blocks as well.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RENAMED_KEYS: tuple[tuple[str, str], ...] = ()
"""Old key, new key, of training configs; in the order in which they were renamed."""
RENAMED_VALUES: tuple[tuple[str, Any, Any], ...] = ()
"""Key (its name now), old value, new value."""
VALUES_BEFORE: tuple[tuple[str, Any], ...] = ()
"""Key (its name now), and the value that says what versions without it computed, where that isn't the default."""
RENAMED_PREP_KEYS: tuple[tuple[str, str], ...] = ()
"""The same as `RENAMED_KEYS`, of the configs in prep.json."""

BLOCK_KINDS = ("model.block.*",)
"""Sections that hold sections of [model] for some blocks, under each name that they have had."""

Renames = Sequence[tuple[str, str]]


def migrate(
    values: Any,
    renamed: Renames | None = None,
    new_values: Sequence[tuple[str, Any, Any]] | None = None,
    before: Sequence[tuple[str, Any]] | None = None,
) -> Any:
    """Translate a stored training config into today's keys and values; anything else than a table is returned as it is.

    renamed, new_values, before: other tables than those of this module.
    """
    if not isinstance(values, Mapping):
        return values
    tables = copy.deepcopy(dict(values))
    for old, new in _for_blocks(RENAMED_KEYS if renamed is None else renamed):
        _rename(tables, old.split("."), new.split("."))
    for key, old_value, new_value in RENAMED_VALUES if new_values is None else new_values:
        for path, _ in _for_blocks([(key, key)]):
            *parents, last = path.split(".")
            for table in _tables_at(tables, parents):
                if last in table and table[last] == old_value:
                    table[last] = new_value
    for key, value in VALUES_BEFORE if before is None else before:
        *parents, last = key.split(".")
        for table in _tables_at(tables, parents):
            table.setdefault(last, value)
    return tables


def migrate_prep(values: Any, renamed: Renames | None = None) -> Any:
    """Translate the config in a prep.json into today's keys."""
    return migrate(values, RENAMED_PREP_KEYS if renamed is None else renamed, (), ())


def find_renamed_keys(values: Any, renamed: Renames | None = None) -> list[tuple[str, str]]:
    """Return the old keys that a config still has, each with its name now."""
    found = []
    for old, new in _for_blocks(RENAMED_KEYS if renamed is None else renamed):
        *parents, last = old.split(".")
        if any(last in table for table in _tables_at(values, parents)):
            found.append((_plain(old), _plain(new)))
    return found


def _for_blocks(renamed: Renames) -> Iterator[tuple[str, str]]:
    """The rows, and those of [model] for each kind of block, too."""
    for old, new in renamed:
        yield old, new
        if old.startswith("model.") and new.startswith("model."):
            for kind in BLOCK_KINDS:
                yield f"{kind}{old.removeprefix('model')}", f"{kind}{new.removeprefix('model')}"


def _rename(tables: dict[str, Any], old: list[str], new: list[str]) -> None:
    """Move what stands under the old path to the new one, below the deepest table that both paths share."""
    shared = 0
    while shared < min(len(old), len(new)) - 1 and _names_same_table(old[shared], new[shared]):
        shared += 1
    for root in _tables_at(tables, old[:shared]):
        *parents, last = old[shared:]
        *places, name = (part.partition("[")[0] for part in new[shared:])
        for table in _tables_at(root, parents):
            if last not in table:
                continue
            value, target = table.pop(last), root
            for place in places:
                target = target.setdefault(place, {})
            target.setdefault(name, value)


def _names_same_table(old: str, new: str) -> bool:
    return old.partition("[")[0] == new.partition("[")[0]


def _tables_at(values: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every table that a path leads to."""
    if isinstance(values, list):
        for element in values:
            yield from _tables_at(element, path)
    elif not isinstance(values, dict):
        return
    elif not path:
        yield values
    elif path[0] == "*":
        for value in list(values.values()):
            yield from _tables_at(value, path[1:])
    else:
        key, _, variant = path[0].partition("[")
        for table in _tables_at(values.get(key), ()):
            if not variant or table.get("name") == variant.rstrip("]"):
                yield from _tables_at(table, path[1:])


def _plain(path: str) -> str:
    """A path as a user would write it."""
    return ".".join(part.partition("[")[0].replace("*", "KIND") for part in path.split("."))
