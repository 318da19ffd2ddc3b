"""Dumps of MediaWiki (Wikipedia and its kin): the newest text of every article."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mwparserfromhell
import mwxml

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.readers.record import Bad, BadFileError, Record, opened, selected_metadata

_BLANK_LINES = re.compile(r"\n{3,}")
_NO_PROSE = ("file:", "image:", "category:")
_NO_PROSE_TAGS = ("ref", "table", "gallery", "math", "timeline")


def read(path: Path, config: ReadConfig) -> Iterator[Record | Bad]:
    """The articles (pages of name space 0 that are no redirects), by the numbers of their pages: the title, a blank
    line, the text without its markup."""
    title = "the first page"
    try:
        with opened(path) as file:
            for page in mwxml.Dump.from_file(file):
                title = f"page {page.title!r}"
                if page.namespace != 0 or page.redirect:
                    continue
                text = None
                for revision in page:
                    text = revision.text
                if text is None:
                    yield Bad(str(page.id), "has no text")
                else:
                    said = selected_metadata({"title": page.title, "id": page.id}, config.fields)
                    yield Record(str(page.id), f"{page.title}\n\n{plain(text)}", fields=said)
    except BadFileError:
        raise
    except Exception as error:  # the library raises several kinds, down to failed assertions
        raise BadFileError(f"is no whole MediaWiki dump, at {title} ({error})") from None


def plain(wikitext: str) -> str:
    """Wikitext without templates, tables, references, files and other markup."""
    code = mwparserfromhell.parse(wikitext)
    for link in code.filter_wikilinks(
        matches=lambda link: str(link.title).strip().lower().startswith(_NO_PROSE)
    ):
        _remove(code, link)
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag).strip().lower() in _NO_PROSE_TAGS):
        _remove(code, tag)
    return _BLANK_LINES.sub("\n\n", code.strip_code(normalize=True, collapse=True)).strip()


def _remove(code: mwparserfromhell.wikicode.Wikicode, node: mwparserfromhell.nodes.Node) -> None:
    with suppress(ValueError):  # it lay inside one that is gone already
        code.remove(node)
