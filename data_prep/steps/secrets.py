"""What opens doors: keys, tokens, payment cards, bank accounts. By their form, and by check digits if any."""

import re

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
SECRETS = tuple((needs, re.compile(f"{_START}{form}{_END}")) for needs, form in _FORMS)
PRIVATE_KEY = re.compile(
    r"-----BEGIN (?P<kind>[A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?)-----[^-]{20,20000}-----END (?P=kind)-----"
)

# Digits in groups with one kind of separator, that are no part of a longer number or word.
CARD = re.compile(
    r"[2-6](?<![\w.,+-].)(?:\d{12,18}|\d{3}(?P<by>[ -])\d{4,6}(?:(?P=by)\d{3,5}){1,3})(?![\w-]|[.,]\d)"
)
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


def _ibans() -> str:
    by_length: dict[int, list[str]] = {}
    for each in _LENGTHS.split():
        by_length.setdefault(int(each[2:]), []).append(each[:2])
    return "|".join(
        rf"(?:{'|'.join(codes)})\d\d(?: ?[A-Z0-9]){{{n - 4}}}" for n, codes in sorted(by_length.items())
    )


# Numbers that the Social Security Administration gives: no part of zeros, no 666, none from 900 on.
SSN = re.compile(r"[0-8](?<![\w.-].)(?!00|66)\d\d-(?!00)\d\d-(?!0000)\d{4}(?![\w-]|\.\d)", re.ASCII)

IBAN = re.compile(rf"(?<![A-Za-z0-9])(?=[A-Z][A-Z]\d\d)(?:{_ibans()})(?![A-Za-z0-9])")


def is_card(found: str) -> bool:
    """Whether digits are of a network's form, and their check digit (Luhn's, ISO/IEC 7812-1 annex B) fits."""
    digits = re.sub("[ -]", "", found)
    if not any(len(digits) in lengths and first.match(digits) for first, lengths in _NETWORKS):
        return False
    doubled = [int(each) * (1 + at % 2) for at, each in enumerate(reversed(digits))]
    return sum(each - 9 * (each > 9) for each in doubled) % 10 == 0 and len(set(digits)) > 1


def is_iban(found: str) -> bool:
    """Whether the check digits fit (ISO 13616: modulo 97)."""
    compact = found.replace(" ", "")
    return int("".join(str(int(each, 36)) for each in compact[4:] + compact[:4])) % 97 == 1
