"""What may point to a person, or open a door: addresses, telephone numbers, keys, cards, bank accounts."""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import replace

from megatfm.config.prep_steps import RedactConfig
from megatfm.data_prep.counts import Counts
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.secrets import CARD, IBAN, PRIVATE_KEY, SECRETS, is_card, is_iban

# Each pattern begins with a few characters, so that the search for them is fast, and only where no such character
# stands before (the look back over two), so that a long run is tried once and not at every place.
_LOCAL, _LABEL = r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = re.compile(
    rf"[A-Za-z0-9](?<!{_LOCAL}.){_LOCAL}{{0,63}}@(?:{_LABEL}\.){{1,8}}[A-Za-z]{{2,63}}(?![A-Za-z0-9])"
)
_IPV4 = re.compile(r"[0-9](?<![\w.].)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?!\w|\.\d)", re.ASCII)
# All that is reached from elsewhere lies in 2000::/3 (RFC 4291, section 2.4); `::2` is more often code.
_IPV6 = re.compile(r"[23](?<![\w:.].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{3,34}(?![\w:.])")
# Digits and their separators are bounded on both sides, so that parts of longer numbers are left alone.
_LOCAL_NUMBER = r"\) ?\d{3}[ .-]\d{4}"
_PHONE = re.compile(
    r"[+(1-9](?<![\w+.-].)(?:"
    r"(?<=\+)[1-9]\d{0,2}(?:[ .-]?\(\d{1,4}\))?(?:[ .-]?\d{2,5}){2,5}"
    rf"|(?<=\()\d{{3}}{_LOCAL_NUMBER}"
    rf"|(?<=1)[ .-]\(\d{{3}}{_LOCAL_NUMBER}"
    r"|(?<=1)[ .-][2-9]\d{2}([ .-])[2-9]\d{2}\1\d{4}"
    r"|(?<=[2-9])\d{2}([ .-])[2-9]\d{2}\2\d{4}"
    r")(?![\w-]|\.\d)"
)


class Redact:
    """Replaces e-mail addresses (the characters of RFC 5322's dot-atom), public IP addresses, and telephone numbers
    with a country code (E.164: up to 15 digits) or in the forms of North America; and what `secrets` knows.

    It goes by form alone: an IP address in an example and a version number of four parts look the same.
    """

    title = "redaction"

    def __init__(self, config: RedactConfig) -> None:
        self._by: list[tuple[str, str, re.Pattern[str], str, Callable[[str], bool]]] = [
            (kind, needs, pattern, stands, really)
            for kind, needs, pattern, stands, really in (
                ("private keys", "PRIVATE KEY", PRIVATE_KEY, config.secret, _always),
                *(("keys and tokens", needs, form, config.secret, _always) for needs, form in SECRETS),
                ("bank accounts", "", IBAN, config.iban, is_iban),
                ("payment cards", "", CARD, config.card, is_card),
                ("e-mail addresses", "@", _EMAIL, config.email, _always),
                ("IP addresses", ".", _IPV4, config.ip, _is_public),
                ("IP addresses", ":", _IPV6, config.ip, _is_public),
                ("telephone numbers", "", _PHONE, config.phone, _is_phone),
            )
            if stands
        ]

    def apply(self, document: Document, counts: Counts) -> Document | str:
        text = document.text
        for kind, needs, pattern, stands, really in self._by:
            if needs in text:
                text = self._replace(text, pattern, stands, really, lambda kind=kind: counts.meet(kind))  # type: ignore[misc]
        return replace(document, text=text) if text is not document.text else document

    def _replace(
        self,
        text: str,
        pattern: re.Pattern[str],
        stands: str,
        really: Callable[[str], bool],
        met: Callable[[], None],
    ) -> str:
        def swap(match: re.Match[str]) -> str:
            if not really(match[0]):
                return match[0]
            met()
            return (match.groupdict().get("before") or "") + stands

        return pattern.sub(swap, text)


def _always(found: str) -> bool:
    return True


def _is_public(found: str) -> bool:
    """Whether it is an address that anyone can be reached at: not private, not an example, no time of day."""
    try:
        return ipaddress.ip_address(found).is_global
    except ValueError:
        return False


def _is_phone(found: str) -> bool:
    return 8 <= sum(map(str.isdigit, found)) <= 15
