"""What may point to a person, or open a door: addresses, telephone numbers, keys, cards, bank accounts."""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatfm.config.prep_steps import RedactConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.secrets import CARD, IBAN, PRIVATE_KEY, SECRETS, SSN, is_card, is_iban

# Each pattern begins with a few characters, so that the search for them is fast, and only where no such character
# stands before (the look back over two), so that a long run is tried once and not at every place.
_LOCAL, _LABEL = r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = re.compile(
    rf"[A-Za-z0-9](?<!{_LOCAL}.){_LOCAL}{{0,63}}@(?:{_LABEL}\.){{1,8}}[A-Za-z]{{2,63}}(?![A-Za-z0-9])"
)
_PATH = re.compile(r":[\w.~-]{0,80}/")
_FILES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".avif", ".css", ".js")
_IPV4 = re.compile(r"[0-9](?<![\w.].)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?!\w|\.\d)", re.ASCII)
# All that is reached from elsewhere lies in 2000::/3 (RFC 4291, section 2.4); `::2` is more often code.
_IPV6 = re.compile(r"[23](?<![\w:.].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{3,34}(?![\w:.])")
# Digits and their separators are bounded on both sides, so that parts of longer numbers are left alone.
_LOCAL_NUMBER = r"\) ?\d{3}[ .-]\d{4}"
# What is counted, and not an address, where four numbers follow it.
_COUNTED = re.compile(
    r"(?:\b(?:section|sec\.|version|ver\.?|release|chapter|figure|fig\.|table|clause|appendix|paragraph|rule|step)|§)\s?$",
    re.IGNORECASE,
)
_PHONE = re.compile(
    r"[+(1-9](?<![\w+.-].)(?:"
    r"(?<=\+)[1-9]\d{0,2}(?:[ .-]?\(\d{1,4}\))?(?:[ .-]?\d{2,5}){2,5}"
    rf"|(?<=\()\d{{3}}{_LOCAL_NUMBER}"
    rf"|(?<=1)[ .-]\(\d{{3}}{_LOCAL_NUMBER}"
    r"|(?<=1)[ .-][2-9]\d{2}([ .-])[2-9]\d{2}\1\d{4}"
    r"|(?<=[2-9])\d{2}([ .-])[2-9]\d{2}\2\d{4}"
    r")(?![\w-]|\.\d)"
)
# Within a country: in the forms of France and Britain, and any that is called a telephone number.
_LOCAL_PHONE = re.compile(
    r"[0(](?<![\w+.-].)(?<!\d [0(])(?:(?<=0)[1-9](?:(?P<by>[ .])\d\d)(?:(?P=by)\d\d){3}"
    r"|(?<=0)[1-9]\d{1,3} \d{3,4} \d{3,4}|(?<=\()0\d{1,4}\) ?\d{3,4}[ -]?\d{3,4})(?![\w-]|\.\d)"
)
_CALLED_PHONE = re.compile(
    r"(?P<before>\b(?i:tel|telephone|phone|mobile|cell|fax|call|text|telefon|tél)\b(?:\.|:| no\.?| number)?:? {0,2}|"
    r"(?:电话|電話|手机|携帯)[:：]? {0,2})"
    r"\(?\d(?:[ ./()-]{0,2}\d){6,14}(?![\w-]|\.\d)"
)

# The codes of countries (ITU-T E.164, annex D): those of one and two digits; all others have three.
_COUNTRY = re.compile(
    r"1|7|2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58]|2[1-69]\d|3[578]\d|42\d|5[09]\d|6[789]\d|8[05-8]\d|9[679]\d"
)


class Redact:
    """Replaces e-mail addresses (the characters of RFC 5322's dot-atom), public IP addresses, and telephone numbers
    with a country code (E.164: up to 15 digits), in the forms of North America, France and Britain, or after a word
    such as `tel`; and what `secrets` knows.

    It goes by form, and by a word or two before it: an IP address in an example and a version number of four parts look
    the same.
    """

    title = "redaction"

    def __init__(self, config: RedactConfig) -> None:
        self._by: list[tuple[str, str, re.Pattern[str], str, Callable[[re.Match[str]], bool]]] = [
            (kind, required_substring, pattern, replacement, validator)
            for kind, required_substring, pattern, replacement, validator in (
                ("private keys", "PRIVATE KEY", PRIVATE_KEY, config.secret, _always),
                *(
                    ("keys and tokens", required_substring, form, config.secret, _always)
                    for required_substring, form in SECRETS
                ),
                ("bank accounts", "", IBAN, config.iban, lambda found: is_iban(found[0])),
                ("payment cards", "", CARD, config.card, lambda found: is_card(found[0])),
                ("social security numbers", "-", SSN, config.ssn, _always),
                ("e-mail addresses", "@", _EMAIL, config.email, _is_address),
                ("IP addresses", ".", _IPV4, config.ip, _is_public),
                ("IP addresses", ":", _IPV6, config.ip, _is_public),
                ("telephone numbers", "", _PHONE, config.phone, _is_phone),
                ("telephone numbers", "", _LOCAL_PHONE, config.phone, _always),
                ("telephone numbers", "", _CALLED_PHONE, config.phone, _always),
            )
            if replacement
        ]

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        text = document.text
        for kind, required_substring, pattern, replacement, validator in self._by:
            if required_substring in text:
                count = partial(counts.count_event, kind)
                text = self._replace(text, pattern, replacement, validator, count)
        return replace(document, text=text) if text is not document.text else document

    def _replace(
        self,
        text: str,
        pattern: re.Pattern[str],
        replacement: str,
        validator: Callable[[re.Match[str]], bool],
        met: Callable[[], None],
    ) -> str:
        def swap(match: re.Match[str]) -> str:
            if not validator(match):
                return match[0]
            met()
            return (match.groupdict().get("before") or "") + replacement

        return pattern.sub(swap, text)


def _always(found: re.Match[str]) -> bool:
    return True


def _is_address(found: re.Match[str]) -> bool:
    """Whether a person may be behind it: no file such as `image@2x.png`, no `git@github.com:`, no folder of a host."""
    is_path = _PATH.match(found.string, found.end())
    return not found[0].lower().endswith(_FILES) and not found[0].startswith("git@") and not is_path


def _is_public(found: re.Match[str]) -> bool:
    """Whether it is an address that anyone can be reached at: not private, not an example, no time of day, and no
    number of a section."""
    if _COUNTED.search(found.string, max(0, found.start() - 12), found.start()):
        return False
    try:
        return ipaddress.ip_address(found[0]).is_global
    except ValueError:
        return False


def _is_phone(found: re.Match[str]) -> bool:
    """Whether it has the digits of a number: 8 to 15, after a country's code if there is a `+`, and isn't a large
    number in groups of three."""
    digits = re.sub(r"\D", "", found[0])
    if not 8 <= len(digits) <= 15:
        return False
    if not found[0].startswith("+"):
        return True
    code = _COUNTRY.match(digits)
    if code is None or re.fullmatch(r"\+\d{1,3}(?:[ .]\d{3})*[ .]000", found[0]):
        return False
    if code[0] == "1":
        return len(digits) == 11 and digits[1] > "1"
    return len(digits) >= 9 and (digits[code.end()] != "0" or code[0] == "39" or "(0" in found[0])
