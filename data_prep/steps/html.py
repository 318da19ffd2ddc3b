"""The text of HTML, by resiliparse."""

import re
from dataclasses import replace

from resiliparse.extract.html2text import extract_plain_text

from megatfm.config.prep_steps import HtmlConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document

_TAG = re.compile(
    r"<(?:!doctype|html|head|body|div|p|br|h[1-6]|ul|ol|table|span|a)\b[^<>]{0,2000}>", re.IGNORECASE
)


class Html:
    """Takes the text out of documents that have any of the usual tags."""

    title = "HTML"

    def __init__(self, config: HtmlConfig) -> None:
        self._main_content = config.main_content

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        if "<" not in document.text or not _TAG.search(document.text):
            counts.count_event("without tags")
            return document
        text = extract_plain_text(
            document.text,
            main_content=self._main_content,
            alt_texts=False,
            links=False,
            form_fields=False,
            noscript=False,
        )
        return replace(document, text=text) if text.strip() else "has no content"
