"""Redaction of addresses and secrets: what is caught, what is left, and in what time."""

import re

import pytest

from megatfm.data_prep.documents import Document
from tests.support.cleaning_rules import rule, rule_outcome

REDACTED = {
    "mail a.b+c@mail.example.co.uk, or <x@y.org>.": "mail <EMAIL>, or <<EMAIL>>.",
    "no@mail and @handle and a@b": "no@mail and @handle and a@b",
    "at 8.8.8.8 or 192.168.1.1 or 127.0.0.1 or 300.1.1.1": "at <IP> or 192.168.1.1 or 127.0.0.1 or 300.1.1.1",
    "version 1.2.3.4.5, 2001:4860:4860::8888, 12:30:45, fe80::1": "version 1.2.3.4.5, <IP>, 12:30:45, fe80::1",
    "+44 20 7946 0958 or (555) 123-4567 or 555-234-5678, 1.555.234.5678, 1 (555) 234-5678!": "<PHONE> or <PHONE> or "
    "<PHONE>, <PHONE>, <PHONE>!",
    "ISBN 978-3-16-148410-0, 2024-01-15, 1234567890, 555-123-45678, id 12-555-123-4567-8": "ISBN 978-3-16-148410-0, "
    "2024-01-15, 1234567890, 555-123-45678, id 12-555-123-4567-8",
    "a+b=c and 3+4, x[::2], 1::2": "a+b=c and 3+4, x[::2], 1::2",
}


@pytest.mark.parametrize("text", REDACTED)
def test_pii_is_redacted(text: str) -> None:
    step = rule("pii")
    assert rule_outcome(step, text)[0] == REDACTED[text]
    assert sum(step.counts.found.values()) == len(re.findall(r"<(?:EMAIL|IP|PHONE)>", REDACTED[text]))
    assert rule_outcome(rule("pii", email="", ip="", phone=""), text)[0] == text


CAUGHT = {
    "<PHONE>": [
        "020 7946 0958",
        "(020) 7946 0958",
        "01 23 45 67 89",
        "06.12.34.56.78",
        "+351 912 345 678",
        "+49 (0)30 1234567",
        "+39 06 1234 5678",
        "+1 212-555-0123",
        "+86 138 0013 8000",
    ],
    "tel: <PHONE>": ["tel: 030/1234567", "tel: 5550123", "tel: 13800138000"],
    "Call <PHONE>": ["Call 555-0123", "Call (555) 0123 4567"],
    "电话：<PHONE>": ["电话：13800138000"],
    "<SSN>": ["219-09-9999", "078-05-1120"],
    "<SECRET>": [
        f"SG.{'a1_-' * 5}ab.{'b2-_' * 10}abc",
        f"sk-proj-{'aB3_' * 12}",
        f"sk-svcacct-{'aB3-' * 30}ab",
        f"sk-or-v1-{'0af9' * 16}",
    ],
    "<EMAIL>": ["me@2x.org", "a.git@github.com", "git.user@github.com"],
    "<IP>": ["8.8.4.4"],
}
LEFT = [
    "image@2x.png",
    "logo@3x.jpeg, icon@1.5x.svg",
    "git@github.com:",
    "git clone git@github.com:owner/name.git",
    "scp me@host.example.com:folder/file .",
    "+15 000 000 people",
    "+20 000 000 of them",
    "+33 500 000 visitors",
    "+351 000 000",
    "section 3.4.5.6",
    "Section 3.4.5.6 and version 8.8.8.8",
    "see §8.8.4.4",
    "000-12-3456 666-12-3456 900-12-3456 219-00-9999 219-09-0000",
    "1-219-09-9999",
    "10 000 000 000",
    "0.12 34 56 78",
    "2024-01-15 12:30:45, 01.02.2003",
    "sk-learn-contrib is a name, task-proj-x too",
    "call 3 of 12, text 1984, phone 7",
]


@pytest.mark.parametrize(
    ("stands", "text"), [(stands, text) for stands, some in CAUGHT.items() for text in some]
)
def test_what_redaction_catches(stands: str, text: str) -> None:
    assert rule_outcome(rule("pii"), f"It is {text}, they say.")[0] == f"It is {stands}, they say."


@pytest.mark.parametrize("text", LEFT)
def test_what_redaction_leaves(text: str) -> None:
    assert rule_outcome(rule("pii"), f"It is {text}, they say.")[0] == f"It is {text}, they say."


def test_redaction_takes_no_time_on_long_runs() -> None:
    """Patterns that try each place anew would take hours."""
    for text in (
        "a" * 10**6,
        "1" * 10**6,
        "1." * 5 * 10**5,
        "a:" * 5 * 10**5,
        "+1 " * 3 * 10**5,
        "a.b@" * 2 * 10**5,
        "0 " * 5 * 10**5,
        "tel: " * 2 * 10**5,
        "call 1" * 2 * 10**5,
        "(0" * 5 * 10**5,
        "12-" * 3 * 10**5,
    ):
        rule("pii")(Document("x", text))
