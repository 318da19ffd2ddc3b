"""Replace personal data and secrets: addresses, phone numbers, keys, cards, bank accounts, Presidio's entities.

They are found by their form, and by check digits if they have any.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from megatfm.config.prep_steps import PIIConfig, PresidioConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS
from megatfm.errors import UsageError

_START, _END = r"(?<![A-Za-z0-9_-])", r"(?![A-Za-z0-9_])"

# A few characters that a text must have, and the form; `before` is what stays. The forms are those that GitHub's secret
# scanning and Yelp's detect-secrets give.
_FORMS: tuple[tuple[str, str], ...] = (
    ("AKIA", r"AKIA[A-Z0-9]{16}"),
    ("ASIA", r"ASIA[A-Z0-9]{16}"),
    (
        "ecret",
        r"(?P<before>(?i:aws_?secret_?(?:access_?)?key)[\"']?\s{0,3}[:=]\s{0,3}[\"']?)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    ("AIza", r"AIza[A-Za-z0-9_-]{35}"),
    ("ya29.", r"ya29\.[A-Za-z0-9_-]{20,}"),
    ("GOCSPX-", r"GOCSPX-[A-Za-z0-9_-]{28}"),
    ("AccountKey=", r"(?P<before>AccountKey=)[A-Za-z0-9+/]{86}=="),
    ("gh", r"gh[pousr]_[A-Za-z0-9]{36,251}"),
    ("github_pat_", r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    ("glpat-", r"glpat-[A-Za-z0-9_-]{20,64}"),
    ("xox", r"xox[abeoprs]-(?:\d+-)*[A-Za-z0-9-]{10,}"),
    ("_live_", r"[sr]k_live_[A-Za-z0-9]{16,}"),
    ("T3BlbkFJ", r"sk-[A-Za-z0-9_-]{16,100}T3BlbkFJ[A-Za-z0-9_-]{16,100}"),
    ("sk-", r"sk-(?:proj|svcacct|admin)-[A-Za-z0-9_-]{40,200}"),
    ("sk-or-v1-", r"sk-or-v1-[0-9a-f]{64}"),
    ("SG.", r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    ("sk-ant-", r"sk-ant-[a-z0-9]{3,10}-[A-Za-z0-9_-]{80,120}"),
    ("hf_", r"hf_[A-Za-z]{34}"),
    ("npm_", r"npm_[A-Za-z0-9]{36}"),
    ("pypi-", r"pypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{50,}"),
    ("eyJ", r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}"),
)
SECRETS = tuple((required, re.compile(f"{_START}{form}{_END}")) for required, form in _FORMS)
PRIVATE_KEY = re.compile(
    r"-----BEGIN (?P<kind>[A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?)-----[^-]{20,20000}-----END (?P=kind)-----"
)

# Digits in groups with one kind of separator, that are no part of a longer number or word.
CARD = re.compile(r"[2-6](?<![\w.,+-].)(?:\d{12,18}|\d{3}(?P<by>[ -])\d{4,6}(?:(?P=by)\d{3,5}){1,3})(?![\w-]|[.,]\d)")
# First digits and lengths of the large networks (ISO/IEC 7812; the networks' own tables).
_NETWORKS = (
    (re.compile(r"4"), (13, 16, 19)),
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), (16,)),
    (re.compile(r"3[47]"), (15,)),
    (re.compile(r"3(?:0[0-5]|[689])"), (14,)),
    (re.compile(r"6011|64[4-9]|65"), (16, 19)),
    (re.compile(r"35(?:2[89]|[3-8])"), (16,)),
    (re.compile(r"62"), (16, 17, 18, 19)),
)

# Lengths by country, from SWIFT's IBAN registry.
_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 "
    "ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 "
    "LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 "
    "QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 "
)


def _make_iban_pattern() -> str:
    by_length: dict[int, list[str]] = {}
    for country_length in _LENGTHS.split():
        by_length.setdefault(int(country_length[2:]), []).append(country_length[:2])
    return "|".join(rf"(?:{'|'.join(codes)})\d\d(?: ?[A-Z0-9]){{{n - 4}}}" for n, codes in sorted(by_length.items()))


# Numbers that the Social Security Administration gives: no part of zeros, no 666, none from 900 on.
SSN = re.compile(r"[0-8](?<![\w.-].)(?!00|66)\d\d-(?!00)\d\d-(?!0000)\d{4}(?![\w-]|\.\d)", re.ASCII)

IBAN = re.compile(rf"(?<![A-Za-z0-9])(?=[A-Z][A-Z]\d\d)(?:{_make_iban_pattern()})(?![A-Za-z0-9])")


def is_card(number: str) -> bool:
    """Return whether digits are of a network's form, and their check digit (Luhn's, ISO/IEC 7812-1 annex B) fits."""
    digits = re.sub("[ -]", "", number)
    if not any(len(digits) in lengths and first.match(digits) for first, lengths in _NETWORKS):
        return False
    doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return sum(digit - 9 * (digit > 9) for digit in doubled) % 10 == 0 and len(set(digits)) > 1


def is_iban(number: str) -> bool:
    """Return whether the check digits fit (ISO 13616: modulo 97)."""
    compact = number.replace(" ", "")
    return int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1


# Each pattern begins with a few characters, so that the search for them is fast, and only where no such character
# stands before (the look back over two), so that a long run is tried once and not at every place.
_LOCAL, _LABEL = r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = re.compile(rf"[A-Za-z0-9](?<!{_LOCAL}.){_LOCAL}{{0,63}}@(?:{_LABEL}\.){{1,8}}[A-Za-z]{{2,63}}(?![A-Za-z0-9])")
_PATH = re.compile(r":[\w.~-]{0,80}/")
_FILES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".avif", ".css", ".js")
_IPV4 = re.compile(r"[0-9](?<![\w.].)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?!\w|\.\d)", re.ASCII)
# All that is reached from elsewhere lies in 2000::/3 (RFC 4291, section 2.4); `::2` is more often code.
_IPV6 = re.compile(r"[23](?<![\w:.].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{3,34}(?![\w:.])")
# Digits and their separators are bounded on both sides, so that parts of longer numbers are left alone.
_LOCAL_NUMBER = r"\) ?\d{3}[ .-]\d{4}"
# Words before four numbers that are a section or version, not an address.
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


class Rule(NamedTuple):
    """One kind of personal data: its name in the report, characters that it always has, its form, its replacement."""

    kind: str
    required_substring: str
    pattern: re.Pattern[str]
    replacement: str
    is_valid: Callable[[re.Match[str]], bool] = lambda match: True
    """Whether a match is replaced."""

    def apply(self, text: str, counts: StepStats) -> str:
        """Return the text with all valid matches replaced, except what they have as the group `before`."""

        def swap(match: re.Match[str]) -> str:
            if not self.is_valid(match):
                return match[0]
            counts.count_event(self.kind)
            return (match.groupdict().get("before") or "") + self.replacement

        return self.pattern.sub(swap, text) if self.required_substring in text else text


@STEPS.register("pii")
class PIIFilter:
    """Replaces personal data and secrets by the config's marks.

    E-mail addresses have the characters of RFC 5322's dot-atom. IP addresses are replaced if they are public. Telephone
    numbers need a country code (E.164: up to 15 digits), a form of North America, France or Britain, or a word such as
    `tel` before them. Matches are judged by form and by a word or two before them, so a version number of four parts
    may be taken for an IP address.
    """

    title = "PII"

    def __init__(self, config: PIIConfig) -> None:
        rules = (
            Rule("private keys", "PRIVATE KEY", PRIVATE_KEY, config.secret),
            *(Rule("keys and tokens", substring, form, config.secret) for substring, form in SECRETS),
            Rule("bank accounts", "", IBAN, config.iban, lambda match: is_iban(match[0])),
            Rule("payment cards", "", CARD, config.card, lambda match: is_card(match[0])),
            Rule("social security numbers", "-", SSN, config.ssn),
            Rule("e-mail addresses", "@", _EMAIL, config.email, _is_address),
            Rule("IP addresses", ".", _IPV4, config.ip, _is_public),
            Rule("IP addresses", ":", _IPV6, config.ip, _is_public),
            Rule("telephone numbers", "", _PHONE, config.phone, _is_phone),
            Rule("telephone numbers", "", _LOCAL_PHONE, config.phone),
            Rule("telephone numbers", "", _CALLED_PHONE, config.phone),
        )
        self._rules = [rule for rule in rules if rule.replacement]

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        text = document.text
        for rule in self._rules:
            text = rule.apply(text, counts)
        return replace(document, text=text) if text is not document.text else document


def _is_address(match: re.Match[str]) -> bool:
    """Return whether a match is an e-mail address: not `image@2x.png`, `git@github.com:`, or a path on a host."""
    is_path = _PATH.match(match.string, match.end())
    return not match[0].lower().endswith(_FILES) and not match[0].startswith("git@") and not is_path


def _is_public(match: re.Match[str]) -> bool:
    """Return whether a match is a public IP address: not private, no example, no time of day, no section number."""
    if _COUNTED.search(match.string, max(0, match.start() - 12), match.start()):
        return False
    try:
        return ipaddress.ip_address(match[0]).is_global
    except ValueError:
        return False


def _is_phone(match: re.Match[str]) -> bool:
    """Return whether a match is a telephone number: 8 to 15 digits, with a country code after a `+`, not a large number
    in groups of three."""
    digits = re.sub(r"\D", "", match[0])
    if not 8 <= len(digits) <= 15:
        return False
    if not match[0].startswith("+"):
        return True
    code = _COUNTRY.match(digits)
    if code is None or re.fullmatch(r"\+\d{1,3}(?:[ .]\d{3})*[ .]000", match[0]):
        return False
    if code[0] == "1":
        return len(digits) == 11 and digits[1] > "1"
    return len(digits) >= 9 and (digits[code.end()] != "0" or code[0] == "39" or "(0" in match[0])


@STEPS.register("presidio")
class Presidio:
    """Replaces entities by their names, `<US_SSN>`."""

    title = "presidio"

    def __init__(self, config: PresidioConfig) -> None:
        self._config = config
        recognizers = _list_pattern_recognizers(config.language)
        known_entities = sorted({name for recognizer in recognizers for name in recognizer.supported_entities})
        if unknown := [name for name in config.entities if name not in known_entities]:
            raise UsageError(
                f"steps: presidio: no recogniser of {config.language!r} finds {unknown[0]!r} by its form; there are: "
                f"{', '.join(known_entities)}"
            )
        entities = set(config.entities)
        self._recognizers = [recognizer for recognizer in recognizers if entities & set(recognizer.supported_entities)]

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        text, entities = document.text, list(self._config.entities)
        results = [
            (result.start, result.end, -result.score, result.entity_type)
            for recognizer in self._recognizers
            for result in recognizer.analyze(text, entities, None) or ()
            if result.score >= self._config.min_score and result.entity_type in entities
        ]
        segments, end_of_last = [], 0
        for start, end, _, name in sorted(results, key=lambda span: (span[0], -span[1], span[2])):
            if start >= end_of_last:
                segments += [text[end_of_last:start], f"<{name}>"]
                counts.count_event(name)
                end_of_last = end
        return replace(document, text="".join([*segments, text[end_of_last:]])) if segments else document


def _list_pattern_recognizers(language: str) -> list[Any]:
    try:
        from presidio_analyzer import PatternRecognizer, RecognizerRegistry
    except ImportError as error:
        raise UsageError(
            "steps: presidio: is not installed: pip install presidio-analyzer, or use `pii`, which needs nothing"
        ) from error
    registry = RecognizerRegistry(supported_languages=[language])
    registry.load_predefined_recognizers(languages=[language])
    # The recogniser of e-mail addresses would fetch a list of domains from the network.
    return [
        recognizer
        for recognizer in registry.recognizers
        if isinstance(recognizer, PatternRecognizer) and "EMAIL_ADDRESS" not in recognizer.supported_entities
    ]
